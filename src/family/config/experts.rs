//! Mixtures of experts.

use serde::Serialize;

use super::keys::Keys;
use crate::error::FamilyError;
use crate::row::{DecoderFamily, MixtureKind, RouterScores, SharedExpertRule};

/// Mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExpertsConfig {
    /// First layers, which have none.
    pub num_dense_layers: usize,
    /// Experts of a layer.
    pub num_experts: u64,
    /// Experts that a token is given.
    pub num_experts_per_tok: u64,
    /// Width of an expert.
    pub moe_intermediate_size: u64,
    /// What becomes of the router's outputs.
    #[serde(skip_serializing_if = "is_sigmoid")]
    pub scores: RouterScores,
    /// Gates and ups are held below a limit; experts and router have biases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clamped: Option<ClampedExperts>,
    /// The weights of the chosen ones are divided by their sum.
    pub norm_topk_prob: bool,
    /// A bias is added to the scores for choosing.
    pub use_expert_bias: bool,
    /// Multiplied to the weights.
    pub routed_scaling_factor: f64,
    /// A dense network works beside them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub beside_dense: bool,
    /// Width of the state that routers pass on to those of the next layer, if they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_hidden_size: Option<u64>,
    /// The expert that every token is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedExpertConfig>,
}

/// An expert that every token is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SharedExpertConfig {
    /// Its width.
    pub intermediate_size: u64,
    /// Its output is multiplied by a sigmoid for each token.
    pub gated: bool,
}

/// Experts whose gates and ups are held below a limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClampedExperts {
    /// Gain of the sigmoid.
    pub swiglu_alpha: f64,
    /// The limit.
    pub swiglu_limit: f64,
}

impl ClampedExperts {
    /// By keys that have defaults.
    pub fn read(keys: &Keys<'_>) -> Result<Self, FamilyError> {
        let number = |key: &str, default: f64| Ok(keys.f64(key)?.unwrap_or(default));
        match number("swiglu_limit", 7.0)? {
            limit if limit <= 0.0 => Err(keys.value("swiglu_limit", "more than 0")),
            swiglu_limit => Ok(ClampedExperts { swiglu_alpha: number("swiglu_alpha", 1.702)?, swiglu_limit }),
        }
    }
}

/// What configurations resolved before there was another kind leave out.
fn is_sigmoid(scores: &RouterScores) -> bool {
    *scores == RouterScores::Sigmoid
}

/// The experts of the layers that have some, if any does.
pub(super) fn experts(keys: &Keys<'_>, family: &DecoderFamily) -> Result<Option<ExpertsConfig>, FamilyError> {
    let size = |key: &str, default: u64| if keys.get(key).is_some() { keys.size(key) } else { Ok(default) };
    let of_sizes = |num_experts, num_experts_per_tok, moe_intermediate_size, scores| ExpertsConfig {
        num_dense_layers: 0,
        num_experts,
        num_experts_per_tok,
        moe_intermediate_size,
        scores,
        clamped: None,
        norm_topk_prob: false,
        use_expert_bias: false,
        routed_scaling_factor: 1.0,
        beside_dense: false,
        router_hidden_size: None,
        shared: None,
    };
    let shared = match family.shared_expert {
        SharedExpertRule::None => None,
        SharedExpertRule::Gated => {
            let intermediate_size = size("shared_expert_intermediate_size", 512)?;
            Some(SharedExpertConfig { intermediate_size, gated: true })
        }
        SharedExpertRule::Fused => {
            let intermediate_size = size("shared_intermediate_size", 1024)?;
            Some(SharedExpertConfig { intermediate_size, gated: false })
        }
    };
    let plain = |scores: RouterScores| -> Result<ExpertsConfig, FamilyError> {
        let num_experts = keys.size("num_experts")?;
        let num_experts_per_tok = keys.size("num_experts_per_tok")?;
        if num_experts_per_tok > num_experts {
            return Err(keys.value("num_experts_per_tok", &format!("at most {num_experts} experts")));
        }
        let experts = of_sizes(num_experts, num_experts_per_tok, keys.size("moe_intermediate_size")?, scores);
        Ok(ExpertsConfig { shared, ..experts })
    };
    Ok(Some(match family.mixture {
        MixtureKind::None => return Ok(None),
        MixtureKind::Sigmoid => ExpertsConfig {
            num_dense_layers: keys.u64("num_dense_layers")?.unwrap_or(2) as usize,
            norm_topk_prob: keys.bool("norm_topk_prob")?.unwrap_or(true),
            use_expert_bias: keys.bool("use_expert_bias")?.unwrap_or(true),
            routed_scaling_factor: keys.f64("routed_scaling_factor")?.unwrap_or(1.0),
            ..plain(RouterScores::Sigmoid)?
        },
        // a softmax divided by the sum of the chosen ones is their own
        MixtureKind::Softmax => plain(match keys.bool("norm_topk_prob")? {
            Some(true) => RouterScores::ChosenSoftmax,
            _ => RouterScores::Softmax,
        })?,
        MixtureKind::BesideDense if !keys.bool("enable_moe_block")?.unwrap_or(false) => {
            // without effect
            ["num_experts", "num_experts_per_tok", "moe_intermediate_size"].iter().for_each(|key| keys.accept(key));
            keys.accept("top_k_experts");
            return Ok(None);
        }
        // a softmax divided by the sum of the chosen ones is their own
        MixtureKind::BesideDense => ExpertsConfig { beside_dense: true, ..plain(RouterScores::ChosenSoftmax)? },
        MixtureKind::ChosenSoftmax => plain(RouterScores::ChosenSoftmax)?,
        MixtureKind::ChosenSoftmaxUnless => plain(match keys.bool("norm_topk_prob")? {
            Some(false) => RouterScores::Softmax,
            _ => RouterScores::ChosenSoftmax,
        })?,
        MixtureKind::ChosenSoftmaxIfAny if keys.u64("num_experts")? == Some(0) => {
            // of experts that aren't there
            let _ = (keys.get("num_experts_per_tok"), keys.get("moe_intermediate_size"));
            return Ok(None);
        }
        MixtureKind::ChosenSoftmaxIfAny => plain(RouterScores::ChosenSoftmax)?,
        MixtureKind::Clamped => {
            ExpertsConfig { clamped: Some(ClampedExperts::read(keys)?), ..plain(RouterScores::ChosenSoftmax)? }
        }
        MixtureKind::DepthRouted => ExpertsConfig {
            use_expert_bias: true,
            router_hidden_size: Some(size("router_hidden_size", 256)?),
            ..of_sizes(size("num_experts", 16)?, 1, size("moe_intermediate_size", 2048)?, RouterScores::Sigmoid)
        },
    }))
}
