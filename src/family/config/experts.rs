//! Mixtures of experts.

use serde::Serialize;

use super::keys::Keys;
use crate::error::FamilyError;
use crate::row::{DecoderFamily, MixtureKind, RouterScores, SharedExpertRule};

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExpertsConfig {
    /// Number of first layers without experts.
    pub num_dense_layers: usize,
    /// Number of experts in a layer.
    pub num_experts: u64,
    /// Number of experts chosen for a token.
    pub num_experts_per_tok: u64,
    /// Width of an expert.
    pub moe_intermediate_size: u64,
    /// Function of the router's outputs.
    #[serde(skip_serializing_if = "is_sigmoid")]
    pub scores: RouterScores,
    /// Limits of gates and ups; if set, experts and router have biases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clamped: Option<ClampedExperts>,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// Whether a bias is added to the scores for the choice.
    pub use_expert_bias: bool,
    /// Factor of the weights.
    pub routed_scaling_factor: f64,
    /// Whether a dense network works beside the experts.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub beside_dense: bool,
    /// Width of the state that routers pass to the next layer's router, if they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_hidden_size: Option<u64>,
    /// Shared expert, which every token uses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedExpertConfig>,
}

/// Shared expert, which every token uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SharedExpertConfig {
    /// Width of the network.
    pub intermediate_size: u64,
    /// Whether the output is multiplied by a sigmoid gate for each token.
    pub gated: bool,
}

/// Limits of experts' gates and ups.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClampedExperts {
    /// Gain of the sigmoid.
    pub swiglu_alpha: f64,
    /// Limit of gates and ups.
    pub swiglu_limit: f64,
}

impl ClampedExperts {
    /// Reads keys that have defaults.
    pub fn read(keys: &Keys<'_>) -> Result<Self, FamilyError> {
        let number = |key: &str, default: f64| Ok(keys.f64(key)?.unwrap_or(default));
        match number("swiglu_limit", 7.0)? {
            limit if limit <= 0.0 => Err(keys.value("swiglu_limit", "more than 0")),
            swiglu_limit => Ok(ClampedExperts { swiglu_alpha: number("swiglu_alpha", 1.702)?, swiglu_limit }),
        }
    }
}

/// Default that `bundle.json` omits, as bundles did before other kinds existed.
fn is_sigmoid(scores: &RouterScores) -> bool {
    *scores == RouterScores::Sigmoid
}

/// Experts of the layers that have them.
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
    let shared = match family.network.shared_expert {
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
    Ok(Some(match family.network.mixture {
        MixtureKind::None => return Ok(None),
        MixtureKind::Sigmoid => ExpertsConfig {
            num_dense_layers: keys.u64("num_dense_layers")?.unwrap_or(2) as usize,
            norm_topk_prob: keys.bool("norm_topk_prob")?.unwrap_or(true),
            use_expert_bias: keys.bool("use_expert_bias")?.unwrap_or(true),
            routed_scaling_factor: keys.f64("routed_scaling_factor")?.unwrap_or(1.0),
            ..plain(RouterScores::Sigmoid)?
        },
        // a softmax divided by the sum of the chosen ones is a softmax over them
        MixtureKind::Softmax => plain(match keys.bool("norm_topk_prob")? {
            Some(true) => RouterScores::ChosenSoftmax,
            _ => RouterScores::Softmax,
        })?,
        MixtureKind::BesideDense if !keys.bool("enable_moe_block")?.unwrap_or(false) => {
            // keys without effect
            ["num_experts", "num_experts_per_tok", "moe_intermediate_size"].iter().for_each(|key| keys.accept(key));
            keys.accept("top_k_experts");
            return Ok(None);
        }
        // a softmax divided by the sum of the chosen ones is a softmax over them
        MixtureKind::BesideDense => ExpertsConfig { beside_dense: true, ..plain(RouterScores::ChosenSoftmax)? },
        MixtureKind::ChosenSoftmax => plain(RouterScores::ChosenSoftmax)?,
        MixtureKind::ChosenSoftmaxUnless => plain(match keys.bool("norm_topk_prob")? {
            Some(false) => RouterScores::Softmax,
            _ => RouterScores::ChosenSoftmax,
        })?,
        MixtureKind::ChosenSoftmaxIfAny if keys.u64("num_experts")? == Some(0) => {
            // keys of experts that the model doesn't have
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
