//! Assembly of a decoder: weights under the names of transformers, and properties that all layers share.

use super::decoder::{OnnxDecoder, OnnxLayer, OnnxNormPlacement};
use super::follow::{Branch, Mlp, OnnxBlock, Weights};
use super::network::{Constant, Network};
use super::norm::Norm;
use super::projection::Projection;
use crate::dtype::SourceDtype;
use crate::error::{Result, SourceError};

/// Decoder under assembly.
struct Assembly<'a> {
    network: &'a Network,
    decoder: OnnxDecoder,
    weights: Weights,
    /// Epsilons of all norms.
    epsilons: Vec<f64>,
    /// Names of the cosine and sine tables in use.
    tables: Vec<[&'a str; 2]>,
}

impl Network {
    /// Assembles a decoder from its parts.
    pub fn assemble<'a>(
        &'a self,
        head: Projection<'a>,
        final_norm: Norm<'a>,
        branches: Vec<Branch<'a>>,
        embedding: Constant,
        [embedding_multiplier, logits_multiplier]: [f64; 2],
    ) -> Result<(OnnxDecoder, Weights)> {
        let whole = |problem: &str| SourceError::file(self.path(), problem);
        let &[vocab_size, hidden_size] = embedding.weight.shape() else {
            return Err(whole("the embedding isn't a matrix"));
        };
        let decoder = OnnxDecoder {
            hidden_size,
            vocab_size,
            tied: head.weight.origin == embedding.origin && head.weight.weight.shape() == embedding.weight.shape(),
            epsilon: final_norm.epsilon,
            embedding_multiplier,
            residual_multiplier: branches.first().map_or(1.0, |branch| branch.multiplier),
            logits_multiplier,
            norms: branches.first().and_then(Branch::placement).unwrap_or(OnnxNormPlacement::Pre),
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            head_bias: head.bias.is_some(),
            layers: Vec::new(),
            ropes: Vec::new(),
        };
        let mut weights: Weights = vec![("model.embed_tokens.weight".into(), embedding)];
        if !decoder.tied {
            weights.push(("lm_head.weight".into(), head.weight));
        }
        weights.extend(head.bias.map(|bias| ("lm_head.bias".into(), bias)));
        weights.push(("model.norm.weight".into(), final_norm.weight));
        if branches.is_empty() || !branches.len().is_multiple_of(2) {
            return Err(whole("its blocks aren't pairs of attention and feed-forward network"));
        }
        let mut assembly = Assembly { network: self, decoder, weights, epsilons: Vec::new(), tables: Vec::new() };
        let mut branches = branches.into_iter().rev();
        while let (Some(mixer), Some(feed_forward)) = (branches.next(), branches.next()) {
            assembly.layer(mixer, feed_forward)?;
        }
        assembly.check_epsilons()?;
        let Assembly { decoder, mut weights, .. } = assembly;
        add_missing_biases(&decoder, &mut weights)?;
        Ok((decoder, weights))
    }
}

impl<'a> Assembly<'a> {
    /// Adds the next layer.
    fn layer(&mut self, mixer: Branch<'a>, feed_forward: Branch<'a>) -> Result<()> {
        for branch in [&mixer, &feed_forward] {
            let decoder = &self.decoder;
            if branch.placement() != Some(decoder.norms) || branch.multiplier != decoder.residual_multiplier {
                let problem = "the blocks after it are unlike those of other layers";
                return Err(self.network.refuse_stream(branch.from, problem));
            }
        }
        let (OnnxBlock::Attention(attention), OnnxBlock::Mlp(mlp)) = (mixer.block, feed_forward.block) else {
            let problem = "attention doesn't alternate with feed-forward networks";
            return Err(self.network.refuse_stream(mixer.from, problem));
        };
        let Mlp { gate, up, activation } = *mlp;
        let prefix = format!("model.layers.{}.", self.decoder.layers.len());
        self.norms(&prefix, [mixer.before, mixer.after], [feed_forward.before, feed_forward.after]);
        let rope = attention.rope.map(|names| self.rope(names)).transpose()?;
        self.decoder.layers.push(OnnxLayer {
            heads: attention.heads,
            key_value_heads: attention.key_value_heads,
            head_dim: attention.head_dim,
            scale: attention.scale,
            window: attention.window,
            rope,
            qk_norm: attention.qk_norm.as_ref().map(|(place, ..)| *place),
            intermediate_size: gate.rows(),
            activation,
        });
        if let Some((_, [q, k], epsilon)) = attention.qk_norm {
            self.weights.push((format!("{prefix}self_attn.q_norm.weight"), q));
            self.weights.push((format!("{prefix}self_attn.k_norm.weight"), k));
            self.epsilons.push(epsilon);
        }
        let [q, k, v] = attention.projections;
        let mut project = |name: &str, projection: Projection<'_>, has_bias: &mut bool| {
            self.weights.push((format!("{prefix}{name}.weight"), projection.weight));
            if let Some(bias) = projection.bias {
                *has_bias = true;
                self.weights.push((format!("{prefix}{name}.bias"), bias));
            }
        };
        let OnnxDecoder { qkv_bias, output_bias, mlp_bias, .. } = &mut self.decoder;
        project("self_attn.q_proj", q, qkv_bias);
        project("self_attn.k_proj", k, qkv_bias);
        project("self_attn.v_proj", v, qkv_bias);
        project("self_attn.o_proj", mixer.output, output_bias);
        project("mlp.gate_proj", gate, mlp_bias);
        project("mlp.up_proj", up, mlp_bias);
        project("mlp.down_proj", feed_forward.output, mlp_bias);
        Ok(())
    }

    /// Adds the norms before and after a layer's attention and before and after its feed-forward network.
    fn norms(&mut self, prefix: &str, attention: [Option<(Constant, f64)>; 2], mlp: [Option<(Constant, f64)>; 2]) {
        let (before_mlp, after_attention) = match self.decoder.norms {
            OnnxNormPlacement::Both => ("pre_feedforward_layernorm", "post_attention_layernorm"),
            _ => ("post_attention_layernorm", "post_attention_layernorm"),
        };
        let names = ["input_layernorm", after_attention, before_mlp, "post_feedforward_layernorm"];
        for (name, norm) in names.into_iter().zip(attention.into_iter().chain(mlp)) {
            if let Some((weight, epsilon)) = norm {
                self.weights.push((format!("{prefix}{name}.weight"), weight));
                self.epsilons.push(epsilon);
            }
        }
    }

    /// Returns the index of the rotation with these tables, reading it at first use.
    fn rope(&mut self, names: [&'a str; 2]) -> Result<usize> {
        if let Some(known) = self.tables.iter().position(|known| *known == names) {
            return Ok(known);
        }
        self.decoder.ropes.push(self.network.rope(names)?);
        self.tables.push(names);
        Ok(self.tables.len() - 1)
    }

    fn check_epsilons(&self) -> Result<()> {
        let epsilon = self.decoder.epsilon;
        // graphs hold single precision, so that one number may differ in its last digits
        match self.epsilons.iter().find(|other| (**other / epsilon - 1.0).abs() > 1e-6) {
            Some(other) => {
                let problem = format!(
                    "its norms have different epsilons, {epsilon:e} and {other:e}; known families have one for all"
                );
                Err(SourceError::file(self.network.path(), problem))
            }
            None => Ok(()),
        }
    }
}

/// Adds zero biases to layers without them if other layers have some; exporters omit biases that are all zero.
fn add_missing_biases(decoder: &OnnxDecoder, weights: &mut Weights) -> Result<()> {
    const PARTS: [(&str, &[&str]); 3] = [
        ("qkv", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("output", &["self_attn.o_proj"]),
        ("mlp", &["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
    ];
    let have: std::collections::HashMap<String, (u64, SourceDtype)> =
        weights.iter().map(|(name, constant)| (name.clone(), (constant.weight.shape()[0], constant.dtype))).collect();
    for (part, names) in PARTS {
        let needed = match part {
            "qkv" => decoder.qkv_bias,
            "output" => decoder.output_bias,
            _ => decoder.mlp_bias,
        };
        for index in (0..decoder.layers.len()).filter(|_| needed) {
            for name in names {
                let name = format!("model.layers.{index}.{name}");
                let (rows, _) = have[&format!("{name}.weight")];
                let bias = format!("{name}.bias");
                if !have.contains_key(&bias) {
                    weights.push((bias.clone(), Constant::zeros(&bias, &[rows])?));
                }
            }
        }
    }
    Ok(())
}
