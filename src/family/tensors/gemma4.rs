//! Weights that only Gemma 4 and EmbeddingGemma 2 have.

use std::sync::OnceLock;

use ndarray::{ArrayView2, ArrayViewMut2, linalg::general_mat_mul};

use super::{Naming, Tensors};
use crate::blocks::dense_and_moe::DenseAndMoe;
use crate::blocks::linear::Linear;
use crate::blocks::norm::Norm;
use crate::blocks::per_layer_input::{PerLayerInput, PerLayerSource};
use crate::config::{ExpertsConfig, PerLayerEmbeddingConfig};
use crate::residual_block::Norms;
use anec_base::Result;
use anec_manifest::Role;
use anec_source::Result as SourceResult;
use anec_source::SourceWeight;

impl Tensors<'_, '_> {
    /// Takes the dense network and the experts beside it. The router reads `norm(x) * scale / sqrt(hidden_size)`; both
    /// factors are folded into its weight.
    pub(super) fn dense_and_moe(&mut self, index: usize, experts: ExpertsConfig) -> Result<DenseAndMoe> {
        let (hidden, count) = (self.config.hidden_size, experts.num_experts);
        let mut moe = self.moe(index, experts)?;
        let gguf = self.naming == Naming::Gguf;
        let mut vector = |name: &str, gguf_name: &str, length: u64, because: &str| {
            let name = if gguf { format!("blk.{index}.{gguf_name}") } else { self.layer_name(index, name) };
            self.take(&name, &[length], because)
        };
        let scale = vector("router.scale", "ffn_gate_inp.scale", hidden, "hidden_size")?;
        moe.router.weight = moe.router.weight.multiply_rows(&scale.scale((hidden as f32).powf(-0.5)))?;
        moe.expert_scale = Some(vector("router.per_expert_scale", "ffn_down_exps.scale", count, "num_experts")?);
        let mut norm = |tensor: &str, name| self.norm(index, tensor, name, hidden, "hidden_size");
        Ok(DenseAndMoe {
            mlp_norm: norm("post_feedforward_layernorm_1", "mlp_own_norm")?,
            experts_norm: norm("pre_feedforward_layernorm_2", "moe_norm")?,
            moe_norm: norm("post_feedforward_layernorm_2", "moe_post_norm")?,
            router_norm: Norm::without_gain("router_norm", self.config.rms_norm_eps),
            mlp: self.mlp(index)?,
            moe,
        })
    }

    /// Takes the block that applies per-layer embeddings.
    pub(super) fn per_layer_input(&mut self, index: usize) -> Result<Option<(PerLayerInput, Norms)>> {
        let Some(PerLayerEmbeddingConfig { width, .. }) = self.config.per_layer_embedding else { return Ok(None) };
        let hidden = self.config.hidden_size;
        let because = "hidden_size_per_layer_input, hidden_size";
        let gate = self.layer_matrix(index, "per_layer_input_gate", width, hidden, because)?;
        let projection = self.layer_matrix(index, "per_layer_projection", hidden, width, because)?;
        let after = self.norm(index, "post_per_layer_input_norm", "per_layer_post_norm", hidden, "hidden_size")?;
        let block = PerLayerInput {
            source: None,
            gate: Linear { name: "gate", role: Role::MlpUp, weight: gate, bias: None },
            projection: Linear { name: "proj", role: Role::MlpDown, weight: projection, bias: None },
            activation: self.config.activation,
        };
        Ok(Some((block, Norms { before: None, after: Some(after), of_sum: None, scaling: None })))
    }

    /// Takes the factor of a layer's output, if the family has it.
    pub(super) fn layer_scalar(&mut self, index: usize) -> Result<Option<SourceWeight>> {
        if !self.family.has_gemma4_layers() {
            return Ok(None);
        }
        let name = match self.naming {
            Naming::Gguf => format!("blk.{index}.layer_output_scale.weight"),
            Naming::HuggingFace | Naming::Onnx => self.layer_name(index, "layer_scalar"),
        };
        // files may omit factors of 1
        if !self.ledger.has(&name) {
            return Ok(None);
        }
        self.take(&name, &[1], "one for each layer").map(Some)
    }

    /// Takes the per-layer embeddings of tokens, `[vocab_size, layers * width]`. They depend on the token alone, so a
    /// table combines the looked-up vector `v` with a projection of the token's `embedding` `e`: `(norm(W e) + v
    /// sqrt(width)) / sqrt(2)`. The embedding's factor `sqrt(hidden_size)` and the projection's cancel.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or has another shape.
    pub fn per_layer_embedding(&mut self, embedding: &SourceWeight) -> Result<Option<SourceWeight>> {
        let Some(PerLayerEmbeddingConfig { vocab_size: Some(vocab_size), width }) = self.config.per_layer_embedding
        else {
            return Ok(None);
        };
        let (hidden, tokens) = (self.config.hidden_size, self.config.vocab_size);
        let columns = self.config.num_hidden_layers as u64 * width;
        let because = "num_hidden_layers hidden_size_per_layer_input";
        let name = self.model_name("embed_tokens_per_layer", "per_layer_token_embd");
        let table = self.matrix(&name, vocab_size, columns, because)?.slice(0..tokens)?;
        let name = self.model_name("per_layer_model_projection", "per_layer_model_proj");
        let projection = self.matrix(&name, columns, hidden, because)?;
        let name = format!("{}.weight", self.model_name("per_layer_projection_norm", "per_layer_proj_norm"));
        let gain = self.take(&name, &[width], "hidden_size_per_layer_input")?;
        Ok(Some(combined(embedding, &table, &projection, &gain, self.config.rms_norm_eps)?))
    }

    /// Takes the projections that make each layer's per-layer embeddings, `[width, hidden_size]`, with the norm behind
    /// them. The model divides the projection by `sqrt(hidden_size)`, the factor of the embeddings that it reads. The
    /// weights are divided by the nearest power of two instead, and the norm's epsilon takes the rest.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or has another shape.
    pub fn per_layer_sources(&mut self) -> Result<Vec<PerLayerSource>> {
        let Some(PerLayerEmbeddingConfig { vocab_size: None, width }) = self.config.per_layer_embedding else {
            return Ok(Vec::new());
        };
        let (hidden, layers) = (self.config.hidden_size, self.config.num_hidden_layers as u64);
        let because = "num_hidden_layers hidden_size_per_layer_input, hidden_size";
        let name = self.model_name("per_layer_model_projection", "per_layer_model_proj");
        let root = (hidden as f64).sqrt();
        let factor = (-root.log2().round()).exp2();
        let projection = self.matrix(&name, layers * width, hidden, because)?.scale(factor as f32);
        let name = format!("{}.weight", self.model_name("per_layer_projection_norm", "per_layer_proj_norm"));
        let gain = self.take(&name, &[width], "hidden_size_per_layer_input")?;
        let eps = self.config.rms_norm_eps * (root * factor).powi(2);
        let source = |layer: u64| -> Result<PerLayerSource> {
            let weight = projection.slice(layer * width..(layer + 1) * width)?;
            Ok(PerLayerSource {
                projection: Linear { name: "source", role: Role::MlpUp, weight, bias: None },
                norm: Norm::root_mean_square("source_norm", gain.clone(), 0.0, eps),
            })
        };
        (0..layers).map(source).collect()
    }

    /// Takes the projection of an encoder's final hidden states, `[embedding_dim, hidden_size]`, if it has one.
    ///
    /// # Errors
    /// Returns an error if it is missing or has another shape.
    pub fn final_projection(&mut self) -> Result<Option<SourceWeight>> {
        let Some(rows) = self.config.embedding_dim else { return Ok(None) };
        let name = self.model_name("embedding_projection", "dense_2");
        self.matrix(&name, rows, self.config.hidden_size, "embedding_dim, hidden_size").map(Some)
    }
}

/// `(norm(W e) gain + v sqrt(width)) / sqrt(2)` for each row `e` of an embedding and `v` of a table, normed in groups
/// of the gain's width.
fn combined(
    embedding: &SourceWeight,
    table: &SourceWeight,
    projection: &SourceWeight,
    gain: &SourceWeight,
    eps: f64,
) -> SourceResult<SourceWeight> {
    let (columns, hidden, width) = (table.columns() as usize, embedding.columns() as usize, gain.elements() as usize);
    let (by_row, whole) = (vec![embedding.clone(), table.clone()], vec![projection.clone(), gain.clone()]);
    let [embedding, table, projection, gain] = [embedding, table, projection, gain].map(SourceWeight::clone);
    let held: OnceLock<(Vec<f32>, Vec<f32>)> = OnceLock::new();
    let compute = move |first: u64, out: &mut [f32]| -> SourceResult<()> {
        if held.get().is_none() {
            let mut values = (vec![0.0; projection.elements() as usize], vec![0.0; width]);
            projection.read(0, &mut values.0)?;
            gain.read(0, &mut values.1)?;
            let _ = held.set(values); // another thread's are the same
        }
        let Some((projection, gain)) = held.get() else { return Ok(()) };
        let rows = out.len() / columns;
        let mut tokens = vec![0.0; rows * hidden];
        embedding.read_rows(first, &mut tokens)?;
        let views = ArrayView2::from_shape((rows, hidden), &tokens)
            .and_then(|tokens| Ok((tokens, ArrayView2::from_shape((columns, hidden), projection)?)))
            .and_then(|(tokens, weights)| {
                Ok((tokens, weights, ArrayViewMut2::from_shape((rows, columns), &mut *out)?))
            });
        if let Ok((tokens, weights, mut product)) = views {
            general_mat_mul(1.0, &tokens, &weights.t(), 0.0, &mut product);
        }
        let mut looked_up = vec![0.0; rows * columns];
        table.read_rows(first, &mut looked_up)?;
        let root = (width as f32).sqrt();
        for (run, vector) in out.chunks_exact_mut(width).zip(looked_up.chunks_exact(width)) {
            let square = run.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / width as f64;
            let inverse = (square + eps).sqrt().recip() as f32;
            for ((value, gain), looked_up) in run.iter_mut().zip(gain).zip(vector) {
                *value = (*value * inverse * gain + looked_up * root) * std::f32::consts::FRAC_1_SQRT_2;
            }
        }
        Ok(())
    };
    SourceWeight::computed_rows("vectors of tokens for layers", columns as u64, by_row, whole, compute)
}
