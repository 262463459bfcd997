//! Transforms that a family permits. Others are skipped and reported.

use crate::config::DecoderConfig;
use crate::row::{MixerKind, NormPlacement, QkNorm};
use anec_manifest::{RotateBy, RotationOptions, Transform};

/// Checks that a transform preserves this model's function.
///
/// # Errors
/// Returns the reason as a part of a sentence if it doesn't.
pub fn permits(config: &DecoderConfig, transform: Transform) -> Result<(), &'static str> {
    match transform {
        Transform::Equalize => Ok(()),
        _ if config.norm.has_bias() => Err("norms take the mean away and have biases, which stand behind their gains"),
        Transform::Fold | Transform::Gains => Ok(()),
        _ if config.norm.is_centred() => {
            Err("norms take away the mean of the channels, and a rotation changes which channels there are")
        }
        Transform::Rotate | Transform::RotateBy(_) => match config.norms {
            NormPlacement::Pre if config.residual_scaling => {
                Err("sums with the residual stream have a scale for each channel, and a rotation mixes channels")
            }
            NormPlacement::Pre => Ok(()),
            NormPlacement::Post | NormPlacement::Both => {
                Err("norms behind the blocks have a gain for each channel of what enters the residual stream, and a \
                     rotation mixes channels")
            }
        },
    }
}

/// Default transforms of a model. Rotation makes redistributed gains unnecessary.
pub fn recipe(config: &DecoderConfig) -> Vec<Transform> {
    let rotate = Transform::RotateBy(RotateBy { rotate: RotationOptions::default().learned(true) });
    match permits(config, rotate) {
        Ok(()) => vec![Transform::Fold, rotate, Transform::Equalize],
        Err(_) if permits(config, Transform::Gains).is_ok() => vec![Transform::Gains, Transform::Equalize],
        Err(_) => vec![Transform::Equalize],
    }
}

/// Parts of a model that equalization doesn't change, with reasons.
pub(super) fn equalization_exceptions(config: &DecoderConfig) -> Vec<String> {
    let has = |kind: MixerKind| config.layers.iter().any(|layer| layer.mixer == kind);
    let reasons = [
        (
            config.qk_norm == QkNorm::WholeWidth && has(MixerKind::Attention),
            "queries and keys keep their units: one norm goes over all their heads",
        ),
        (
            has(MixerKind::Cca),
            "queries and keys keep their units: each is averaged with the other in front of the convolutions",
        ),
        (config.clip_qkv.is_some(), "values and outputs keep their units: values are clipped to one limit"),
        (config.value_norm, "values and outputs keep their units: each head of values is normed"),
        (
            config.experts.is_some_and(|experts| experts.clamped.is_some()),
            "experts' ups and downs keep their units: gates and ups are held below a limit",
        ),
    ];
    reasons.into_iter().filter(|(applies, _)| *applies).map(|(_, reason)| reason.to_owned()).collect()
}
