//! The parts of a decoder put together: weights under the names of transformers, and what holds for all layers.

use super::decoder::{OnnxDecoder, OnnxLayer, OnnxNormPlacement};
use super::follow::{Branch, Mlp, OnnxBlock, Weights};
use super::network::{Constant, Network};
use super::norm::Norm;
use super::projection::Projection;
use crate::dtype::SourceDtype;
use crate::error::{Result, SourceError};
use crate::weight::SourceWeight;

impl Network {
    /// Puts together what was found.
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
        let mut decoder = OnnxDecoder {
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
        let (before_mlp, after_attention) = match decoder.norms {
            OnnxNormPlacement::Both => ("pre_feedforward_layernorm", "post_attention_layernorm"),
            _ => ("post_attention_layernorm", "post_attention_layernorm"),
        };
        let mut epsilons = Vec::new();
        let mut rope_names: Vec<[&str; 2]> = Vec::new();
        let mut branches = branches.into_iter().rev();
        while let (Some(mixer), Some(feed_forward)) = (branches.next(), branches.next()) {
            let index = decoder.layers.len();
            let prefix = format!("model.layers.{index}.");
            for branch in [&mixer, &feed_forward] {
                if branch.placement() != Some(decoder.norms) || branch.multiplier != decoder.residual_multiplier {
                    return Err(self.refuse_stream(branch.from, "the blocks after it are unlike those of other layers"));
                }
                epsilons.extend([&branch.before, &branch.after].into_iter().flatten().map(|(_, epsilon)| *epsilon));
            }
            let (OnnxBlock::Attention(attention), OnnxBlock::Mlp(mlp)) = (mixer.block, feed_forward.block) else {
                return Err(self.refuse_stream(mixer.from, "attention doesn't alternate with feed-forward networks"));
            };
            let Mlp { gate, up, activation } = *mlp;
            let mut push = |name: &str, constant: Constant| weights.push((format!("{prefix}{name}"), constant));
            for (name, norm) in [
                ("input_layernorm", mixer.before),
                (after_attention, mixer.after),
                (before_mlp, feed_forward.before),
                ("post_feedforward_layernorm", feed_forward.after),
            ] {
                if let Some((weight, _)) = norm {
                    push(&format!("{name}.weight"), weight);
                }
            }
            let rope = match attention.rope {
                None => None,
                Some(names) => match rope_names.iter().position(|known| *known == names) {
                    Some(known) => Some(known),
                    None => {
                        decoder.ropes.push(self.rope(names)?);
                        rope_names.push(names);
                        Some(rope_names.len() - 1)
                    }
                },
            };
            decoder.layers.push(OnnxLayer {
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
                push("self_attn.q_norm.weight", q);
                push("self_attn.k_norm.weight", k);
                epsilons.push(epsilon);
            }
            let [q, k, v] = attention.projections;
            let mut project = |name: &str, projection: Projection<'_>, has_bias: &mut bool| {
                push(&format!("{name}.weight"), projection.weight);
                if let Some(bias) = projection.bias {
                    *has_bias = true;
                    push(&format!("{name}.bias"), bias);
                }
            };
            project("self_attn.q_proj", q, &mut decoder.qkv_bias);
            project("self_attn.k_proj", k, &mut decoder.qkv_bias);
            project("self_attn.v_proj", v, &mut decoder.qkv_bias);
            project("self_attn.o_proj", mixer.output, &mut decoder.output_bias);
            project("mlp.gate_proj", gate, &mut decoder.mlp_bias);
            project("mlp.up_proj", up, &mut decoder.mlp_bias);
            project("mlp.down_proj", feed_forward.output, &mut decoder.mlp_bias);
        }
        // single precision is what graphs hold: the same number may come by different ways
        let same = |other: &&f64| (**other / decoder.epsilon - 1.0).abs() > 1e-6;
        if let Some(other) = epsilons.iter().find(same) {
            let problem = format!(
                "its norms have different epsilons, {:e} and {other:e}; known families have one for all",
                decoder.epsilon
            );
            return Err(whole(&problem));
        }
        add_missing_biases(&decoder, &mut weights)?;
        Ok((decoder, weights))
    }
}

/// Layers may leave out biases that are all zero: if one layer has some, all get them.
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
                    let weight = SourceWeight::from_values(&bias, &[rows], vec![0.0; rows as usize])?;
                    let dtype = SourceDtype::F32;
                    weights.push((bias.clone(), Constant { weight, dtype, is_float: true, bytes: 0, origin: bias }));
                }
            }
        }
    }
    Ok(())
}
