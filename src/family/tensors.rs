//! Weights of a decoder: finds them in a source under its naming scheme and checks their shapes.

pub(super) mod experts;
mod gemma4;
mod mamba2;
mod mixers;

use super::blocks::linear::Linear;
use super::blocks::mlp::{Mlp, PlainMlp};
use super::blocks::norm::Norm;
use super::blocks::residual::{BiasAndScale, ResidualScaling};
use super::config::{DecoderConfig, ExpertsConfig};
use super::error::FamilyError;
use super::layer::{FeedForward, Layer, Mixer};
use super::residual_block::Norms;
use super::row::{DecoderFamily, LayerForm, MixerKind, NormPlacement};
use anec_base::Result;
use anec_manifest::Role;
use anec_source::{Ledger, SourceDtype, SourceTensor, SourceWeight};

/// Naming scheme of a source's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// `model.layers.0.self_attn.q_proj.weight`
    HuggingFace,
    /// `blk.0.attn_q.weight`
    Gguf,
    /// Names as in transformers for most families; norms' weights are the gains themselves.
    Onnx,
}

/// Tensors of a layer: names in transformers (below `model.layers.N.`) and in GGUF (below `blk.N.`).
const LAYER_NAMES: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.sinks", "attn_sinks"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("feed_forward.gate", "ffn_gate_inp"),
    ("feed_forward.expert_bias", "exp_probs_b.bias"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
];

/// Prefixes of the layers and the embedding: with a head, within multimodal models (old and new), in GPT-NeoX, in
/// GPT-2, without a head.
const PREFIXES: &[&str] =
    &["model.", "model.language_model.", "language_model.model.", "gpt_neox.", "transformer.", "language_model.", ""];

/// Weights of a source, taken from its ledger.
pub struct Tensors<'a, 'b> {
    ledger: &'a mut Ledger<'b>,
    naming: Naming,
    family: &'static DecoderFamily,
    config: &'a DecoderConfig,
    /// Prefix of transformers' names, `model.` by default.
    prefix: &'static str,
}

impl<'a, 'b> Tensors<'a, 'b> {
    /// Creates the lookup for a source.
    pub fn new(
        ledger: &'a mut Ledger<'b>,
        naming: Naming,
        family: &'static DecoderFamily,
        config: &'a DecoderConfig,
    ) -> Self {
        let embedding = own_name(family, "embed_tokens");
        let holds = |prefix: &&&str| ledger.has(&format!("{prefix}{embedding}.weight"));
        let prefix = PREFIXES.iter().find(holds).unwrap_or(&PREFIXES[0]);
        Tensors { ledger, naming, family, config, prefix }
    }

    /// Creates the lookup for a next-token layer.
    pub fn of_predictor(ledger: &'a mut Ledger<'b>, family: &'static DecoderFamily, config: &'a DecoderConfig) -> Self {
        Tensors { ledger, naming: Naming::HuggingFace, family, config, prefix: "mtp." }
    }

    /// Takes the projection that joins the embedding and the previous hidden state.
    ///
    /// # Errors
    /// Returns an error if it is missing or has another shape.
    pub fn join(&mut self) -> Result<SourceWeight> {
        let (name, hidden) = (format!("{}fc", self.prefix), self.config.hidden_size);
        self.matrix(&name, hidden, 2 * hidden, "hidden_size, 2 hidden_size")
    }

    /// Takes a norm outside of layers.
    ///
    /// # Errors
    /// Returns an error if it is missing or has another shape.
    pub fn model_norm(&mut self, tensor: &str, name: &'static str) -> Result<Norm> {
        let tensor = format!("{}{tensor}.weight", self.prefix);
        self.norm_of(&tensor, name, self.config.hidden_size, "hidden_size")
    }

    /// Takes the token embedding, `[vocab_size, hidden_size]`.
    ///
    /// # Errors
    /// Returns an error if it is missing or has another shape.
    pub fn embedding(&mut self) -> Result<SourceWeight> {
        let name = self.model_name("embed_tokens", "token_embd");
        self.matrix(&name, self.config.vocab_size, self.config.hidden_size, "vocab_size, hidden_size")
    }

    /// Takes the learned positions, `[max_position_embeddings, hidden_size]`, if the family has them.
    ///
    /// # Errors
    /// Returns an error if they are missing or have another shape.
    pub fn positions(&mut self) -> Result<Option<SourceWeight>> {
        if !self.family.residual.positions {
            return Ok(None);
        }
        let (rows, columns) = (self.config.max_position_embeddings, self.config.hidden_size);
        let name = self.model_name("embed_positions", "position_embd");
        self.matrix(&name, rows, columns, "max_position_embeddings, hidden_size").map(Some)
    }

    /// Applies the learned bias and scale of the first layer's input to the embedding, if the family has them.
    ///
    /// # Errors
    /// Returns an error if those are missing or have another shape.
    pub fn scaled_embedding(&mut self, embedding: &SourceWeight) -> Result<SourceWeight> {
        if !self.config.residual_scaling {
            return Ok(embedding.clone());
        }
        let mut vector = |name: &str| {
            self.take(&format!("{}input_hidden_states_{name}", self.prefix), &[self.config.hidden_size], "hidden_size")
        };
        let (bias, scale) = (vector("bias")?, vector("scale")?);
        Ok(embedding.add_to_rows(&bias)?.multiply_rows(&scale)?)
    }

    /// Takes the LM head; if tied, its weight is the embedding.
    ///
    /// # Errors
    /// Returns an error if it is missing or has another shape.
    pub fn head(&mut self, embedding: &SourceWeight) -> Result<Linear> {
        let name = match self.naming {
            Naming::HuggingFace if self.prefix == "language_model.model." => "language_model.lm_head".to_owned(),
            // published files may have an older name
            Naming::HuggingFace if self.ledger.has(&format!("{}.weight", self.own_name("lm_head"))) => {
                self.own_name("lm_head").to_owned()
            }
            Naming::HuggingFace | Naming::Onnx => "lm_head".to_owned(),
            Naming::Gguf => "output".to_owned(),
        };
        let (config, vocab_size) = (self.config, self.config.vocab_size);
        let mut weight = match config.tie_word_embeddings {
            false => self.matrix(&name, vocab_size, config.hidden_size, "vocab_size, hidden_size")?,
            // transformers doesn't tie weights whose file holds a head of its own
            true if self.has_other_head(&name)? => {
                self.matrix(&name, vocab_size, config.hidden_size, "vocab_size, hidden_size")?
            }
            true => {
                if self.naming == Naming::HuggingFace {
                    self.ledger.ignore(&format!("{name}.weight"), "equal to the embedding that it is tied to");
                }
                embedding.clone()
            }
        };
        let bias = format!("{name}.bias");
        let has_bias = config.head_bias || (self.naming == Naming::Gguf && self.ledger.has(&bias));
        let mut bias = has_bias.then(|| self.take(&bias, &[vocab_size], "vocab_size")).transpose()?;
        if let Some(factor) = config.block_multipliers.map(|factors| factors.lm_head as f32).filter(|by| *by != 1.0) {
            (weight, bias) = (weight.scale(factor), bias.map(|bias| bias.scale(factor)));
        }
        Ok(Linear { name: "lm_head", role: Role::LmHead, weight, bias })
    }

    /// Whether the source holds an LM head that differs from the embedding.
    fn has_other_head(&self, name: &str) -> Result<bool> {
        let source = self.ledger.source();
        let embedding = format!("{}.weight", self.model_name("embed_tokens", "token_embd"));
        let both = source.tensor(&format!("{name}.weight")).zip(source.tensor(&embedding));
        let both = both.filter(|_| self.naming == Naming::HuggingFace);
        Ok(both.map(|(head, embedding)| head.has_equal_elements(embedding)).transpose()?.is_some_and(|equal| !equal))
    }

    /// Takes the head of a model …ForSequenceClassification.
    ///
    /// # Errors
    /// Returns an error if it is missing or has another shape.
    pub fn score_head(&mut self, labels: u64) -> Result<Linear> {
        self.ledger.ignore("lm_head.*", "not needed for labels");
        let weight = self.matrix("score", labels, self.config.hidden_size, "num_labels, hidden_size")?;
        Ok(Linear { name: "score", role: Role::LmHead, weight, bias: None })
    }

    /// Stands in for the LM head of an embedding model, which takes none from its file.
    pub fn no_head(&mut self, embedding: &SourceWeight) -> Linear {
        for pattern in ["lm_head.*", "output.weight"] {
            self.ledger.ignore(pattern, "not needed for hidden states");
        }
        Linear { name: "lm_head", role: Role::LmHead, weight: embedding.clone(), bias: None }
    }

    /// Takes the norm before the LM head.
    ///
    /// # Errors
    /// Returns an error if it is missing or has another shape.
    pub fn final_norm(&mut self) -> Result<Norm> {
        let name = format!("{}.weight", self.model_name("norm", "output_norm"));
        self.norm_of(&name, "norm", self.config.hidden_size, "hidden_size")
    }

    /// Takes a layer.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or has another shape.
    pub fn layer(&mut self, index: usize) -> Result<Layer> {
        let attention_norm = Some(("input_layernorm", "attn_norm"));
        let post_attention_norm = Some(("post_attention_layernorm", "attn_norm"));
        let (mixer_norms, feed_forward_norms) = match self.config.norms {
            NormPlacement::Pre if self.config.form == LayerForm::ParallelOneNorm => {
                ((attention_norm, None), (None, None))
            }
            NormPlacement::Pre => ((attention_norm, None), (Some(("post_attention_layernorm", "mlp_norm")), None)),
            NormPlacement::Post => {
                ((None, post_attention_norm), (None, Some(("post_feedforward_layernorm", "mlp_norm"))))
            }
            NormPlacement::Both => (
                (attention_norm, Some(("post_attention_layernorm", "attn_post_norm"))),
                (
                    Some(("pre_feedforward_layernorm", "mlp_norm")),
                    Some(("post_feedforward_layernorm", "mlp_post_norm")),
                ),
            ),
        };
        Ok(Layer {
            form: self.config.form,
            mixer: match self.config.layers[index].mixer {
                MixerKind::Attention => Mixer::Attention(Box::new(self.attention(index)?)),
                MixerKind::Cca => Mixer::Cca(Box::new(self.cca(index)?)),
                MixerKind::ShortConv => Mixer::ShortConv(Box::new(self.short_conv(index)?)),
                MixerKind::DeltaNet => Mixer::DeltaNet(Box::new(self.delta_net(index)?)),
                MixerKind::Mamba2 => Mixer::Mamba2(Box::new(self.mamba2(index)?)),
                MixerKind::AttentionAndMamba2 => {
                    let both = (self.multiplied_attention(index)?, self.mamba2(index)?);
                    Mixer::AttentionAndMamba2(Box::new(both))
                }
            },
            mixer_norms: Norms {
                scaling: self.residual_scaling(index, "post_attention_residual_scale", "attn_sum")?,
                ..self.norms(index, mixer_norms.0, mixer_norms.1)?
            },
            feed_forward: match self.config.experts.filter(|experts| index >= experts.num_dense_layers) {
                Some(experts @ ExpertsConfig { router_hidden_size: Some(width), .. }) => {
                    FeedForward::DepthMoe(Box::new(self.depth_moe(index, experts, width)?))
                }
                Some(experts) if experts.beside_dense => {
                    FeedForward::DenseAndMoe(Box::new(self.dense_and_moe(index, experts)?))
                }
                Some(experts) => FeedForward::Moe(Box::new(self.moe(index, experts)?)),
                None if self.config.plain_mlp => FeedForward::Plain(Box::new(self.plain_mlp(index)?)),
                None => FeedForward::Mlp(Box::new(self.mlp(index)?)),
            },
            feed_forward_norms: Norms {
                scaling: self.residual_scaling(index, "post_mlp_residual_scale", "mlp_sum")?,
                ..self.norms(index, feed_forward_norms.0, feed_forward_norms.1)?
            },
            per_layer_input: self.per_layer_input(index)?,
            scalar: self.layer_scalar(index)?,
        })
    }

    fn norms(
        &mut self,
        index: usize,
        before: Option<(&str, &'static str)>,
        after: Option<(&str, &'static str)>,
    ) -> Result<Norms> {
        let mut norm = |named: Option<(&str, &'static str)>| {
            named
                .map(|(tensor, name)| self.norm(index, tensor, name, self.config.hidden_size, "hidden_size"))
                .transpose()
        };
        Ok(Norms { before: norm(before)?, after: norm(after)?, of_sum: None, scaling: None })
    }

    fn residual_scaling(&mut self, index: usize, tensor: &str, name: &'static str) -> Result<Option<ResidualScaling>> {
        if !self.config.residual_scaling {
            return Ok(None);
        }
        let tensor = self.layer_name(index, tensor);
        let mut vector = |name: &str| self.take(&format!("{tensor}.{name}"), &[self.config.hidden_size], "hidden_size");
        let mut part = |of: &str| -> Result<BiasAndScale> {
            Ok(BiasAndScale { bias: vector(&format!("{of}_bias"))?, scale: vector(&format!("{of}_scale"))? })
        };
        Ok(Some(ResidualScaling { name, block: part("hidden_states")?, residual: part("residual")? }))
    }

    fn mlp(&mut self, index: usize) -> Result<Mlp> {
        let config = self.config;
        let hidden = config.hidden_size;
        let width = config.layers[index].intermediate_size.unwrap_or(config.intermediate_size);
        // llama.cpp's converter splits some
        let apart = self.naming == Naming::Gguf && self.ledger.has(&format!("blk.{index}.ffn_gate.weight"));
        let [mut gate, up] = if config.fused_mlp && !apart {
            let name = self.layer_name(index, "mlp.gate_up_proj");
            let fused = self.matrix(&name, 2 * width, hidden, "2 intermediate_size, hidden_size")?;
            [fused.slice(0..width)?, fused.slice(width..2 * width)?]
        } else {
            let because = "intermediate_size, hidden_size";
            [
                self.layer_matrix(index, "mlp.gate_proj", width, hidden, because)?,
                self.layer_matrix(index, "mlp.up_proj", width, hidden, because)?,
            ]
        };
        let mut down = self.layer_matrix(index, "mlp.down_proj", hidden, width, "hidden_size, intermediate_size")?;
        let biases = self.has_bias(config.mlp_bias, index, "mlp.down_proj");
        let mut bias = |name: &str, rows: u64| biases.then(|| self.layer_bias(index, name, rows)).transpose();
        let (mut gate_bias, up_bias) = (bias("mlp.gate_proj", width)?, bias("mlp.up_proj", width)?);
        let mut down_bias = bias("mlp.down_proj", hidden)?;
        if let Some(factors) = config.block_multipliers {
            let (of_gate, of_down) = (factors.mlp_gate as f32, factors.mlp_out as f32);
            (gate, down) = (gate.scale(of_gate), down.scale(of_down));
            gate_bias = gate_bias.map(|bias| bias.scale(of_gate));
            down_bias = down_bias.map(|bias| bias.scale(of_down));
        }
        Ok(Mlp {
            gate: Linear { name: "gate_proj", role: Role::MlpUp, weight: gate, bias: gate_bias },
            up: Linear { name: "up_proj", role: Role::MlpUp, weight: up, bias: up_bias },
            down: Linear { name: "down_proj", role: Role::MlpDown, weight: down, bias: down_bias },
            activation: config.activation,
        })
    }

    fn plain_mlp(&mut self, index: usize) -> Result<PlainMlp> {
        let (config, width, hidden) = (self.config, self.config.intermediate_size, self.config.hidden_size);
        let because = "intermediate_size, hidden_size";
        let biases = self.has_bias(config.mlp_bias, index, "mlp.down_proj");
        let mut linear = |name, role, tensor: &str, rows: u64, columns: u64| -> Result<Linear> {
            let weight = self.layer_matrix(index, tensor, rows, columns, because)?;
            let bias = biases.then(|| self.layer_bias(index, tensor, rows)).transpose()?;
            Ok(Linear { name, role, weight, bias })
        };
        Ok(PlainMlp {
            up: linear("up_proj", Role::MlpUp, "mlp.up_proj", width, hidden)?,
            down: linear("down_proj", Role::MlpDown, "mlp.down_proj", hidden, width)?,
            activation: config.activation,
        })
    }

    fn norm(&mut self, index: usize, tensor: &str, name: &'static str, width: u64, because: &str) -> Result<Norm> {
        let tensor = format!("{}.weight", self.layer_name(index, tensor));
        self.norm_of(&tensor, name, width, because)
    }

    fn norm_of(&mut self, tensor: &str, name: &'static str, width: u64, because: &str) -> Result<Norm> {
        let mut weight = self.take(tensor, &[width], because)?;
        if self.config.norm.is_centred() {
            let bias = self.config.norm.has_bias();
            let bias = bias.then(|| self.take(&tensor.replace(".weight", ".bias"), &[width], because)).transpose()?;
            return Ok(Norm::layer(name, weight, bias, self.config.rms_norm_eps));
        }
        // other sources contain the gain, 1 + w
        if self.family.norms.plus_one && self.naming != Naming::HuggingFace {
            weight = weight.add(-1.0);
        }
        let offset = if self.family.norms.plus_one { 1.0 } else { 0.0 };
        Ok(Norm::root_mean_square(name, weight, offset, self.config.rms_norm_eps))
    }

    /// Returns whether a projection has a bias. GGUF has no key for biases: the tensor decides, unless the family
    /// always has one. An ONNX graph decides for the configuration.
    fn has_bias(&self, configured: bool, index: usize, name: &str) -> bool {
        let bias = format!("{}.bias", self.layer_name(index, name));
        configured || (self.naming == Naming::Gguf && self.ledger.has(&bias))
    }

    fn layer_matrix(
        &mut self,
        index: usize,
        name: &str,
        rows: u64,
        columns: u64,
        because: &str,
    ) -> Result<SourceWeight> {
        let name = self.layer_name(index, name);
        if self.family.names.transposed && self.naming == Naming::HuggingFace {
            return Ok(self.matrix(&name, columns, rows, because)?.transpose()?);
        }
        self.matrix(&name, rows, columns, because)
    }

    fn layer_bias(&mut self, index: usize, name: &str, rows: u64) -> Result<SourceWeight> {
        let name = format!("{}.bias", self.layer_name(index, name));
        self.take(&name, &[rows], "rows of the weight")
    }

    fn matrix(&mut self, name: &str, rows: u64, columns: u64, because: &str) -> Result<SourceWeight> {
        self.take(&format!("{name}.weight"), &[rows, columns], because)
    }

    fn take(&mut self, name: &str, shape: &[u64], because: &str) -> Result<SourceWeight> {
        take(self.ledger, name, shape, because)
    }

    /// Takes a tensor that sources have in several shapes of the same size; errors expect the first.
    fn take_any(&mut self, name: &str, shapes: &[&[u64]], because: &str) -> Result<SourceWeight> {
        let found = self.ledger.source().tensor(name).map(|tensor| tensor.shape().to_vec());
        let shape = shapes.iter().find(|shape| Some(**shape) == found.as_deref()).unwrap_or(&shapes[0]);
        self.take(name, shape, because)
    }

    fn model_name(&self, hugging_face: &str, gguf: &str) -> String {
        match self.naming {
            Naming::HuggingFace => format!("{}{}", self.prefix, self.own_name(hugging_face)),
            Naming::Onnx => format!("{}{hugging_face}", self.prefix),
            Naming::Gguf => self.gguf_name(hugging_face).unwrap_or(gguf).to_owned(),
        }
    }

    fn gguf_name(&self, name: &str) -> Option<&'static str> {
        self.family.names.gguf_tensors.iter().find(|(hugging_face, _)| *hugging_face == name).map(|(_, gguf)| *gguf)
    }

    fn layer_name(&self, index: usize, name: &str) -> String {
        match self.naming {
            Naming::HuggingFace => {
                format!("{}{}.{index}.{}", self.prefix, self.family.names.layers, self.own_name(name))
            }
            Naming::Onnx => format!("{}layers.{index}.{name}", self.prefix),
            Naming::Gguf => {
                let elsewhere = || LAYER_NAMES.iter().find(|(own, _)| *own == name).map_or(name, |(_, gguf)| gguf);
                format!("blk.{index}.{}", self.gguf_name(name).unwrap_or_else(elsewhere))
            }
        }
    }

    /// Name of a tensor in transformers for this family.
    fn own_name<'n>(&self, name: &'n str) -> &'n str {
        own_name(self.family, name)
    }
}

/// Name of a tensor in transformers for a family.
pub(super) fn own_name<'n>(family: &DecoderFamily, name: &'n str) -> &'n str {
    family.names.tensors.iter().find(|(elsewhere, _)| *elsewhere == name).map_or(name, |(_, own)| own)
}

/// Returns learned positions for a context.
///
/// # Errors
/// Returns an error if there are fewer.
pub(super) fn first_positions(table: &SourceWeight, context: u64) -> Result<SourceWeight> {
    let positions = table.rows();
    if positions < context {
        return Err(FamilyError::Positions { context, positions }.into());
    }
    Ok(table.slice(0..context)?)
}

/// Takes a tensor of the shape that the configuration requires; `because` names its keys.
pub(super) fn take(ledger: &mut Ledger<'_>, name: &str, shape: &[u64], because: &str) -> Result<SourceWeight> {
    take_tensor(ledger, name, SourceDtype::BF16, shape, because).map(SourceWeight::from)
}

fn take_tensor(
    ledger: &mut Ledger<'_>,
    name: &str,
    dtype: SourceDtype,
    shape: &[u64],
    because: &str,
) -> Result<SourceTensor> {
    let tensor = ledger.take_shaped(name, dtype, shape)?;
    if tensor.shape() != shape {
        let source = ledger.source().name();
        return Err(FamilyError::Shape {
            place: tensor.path().map_or_else(|| source.to_owned(), |path| path.display().to_string()),
            tensor: name.to_owned(),
            found: tensor.shape().to_vec(),
            expected: shape.to_vec(),
            because: because.to_owned(),
        }
        .into());
    }
    Ok(tensor)
}
