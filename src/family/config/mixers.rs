//! Shapes of token mixers other than plain attention: short convolutions, compressed convolutional attention and
//! DeltaNets.

use serde::Serialize;

use super::keys::Keys;
use crate::error::FamilyError;
use crate::row::{DecoderFamily, MixerKind};

/// Gated short convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ShortConvConfig {
    /// Width of the convolution in tokens.
    pub kernel: u64,
    /// Whether projections and convolution have biases.
    pub bias: bool,
}

/// Compressed convolutional attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CcaConfig {
    /// Width of the per-channel convolution in tokens.
    pub channel_kernel: u64,
    /// Width of the per-head convolution in tokens.
    pub head_kernel: u64,
}

/// Gated DeltaNets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeltaNetConfig {
    /// Number of query and key heads.
    pub num_key_heads: u64,
    /// Number of value heads; a multiple of the key heads.
    pub num_value_heads: u64,
    /// Width of a query or key head.
    pub key_head_dim: u64,
    /// Width of a value head.
    pub value_head_dim: u64,
    /// Width of the convolution in tokens.
    pub kernel: u64,
}

impl DeltaNetConfig {
    /// Rows of the queries, and of the keys.
    pub fn key_width(&self) -> u64 {
        self.num_key_heads * self.key_head_dim
    }

    /// Rows of the values.
    pub fn value_width(&self) -> u64 {
        self.num_value_heads * self.value_head_dim
    }
}

/// Shape of layers with a short convolution, if the family has them.
pub(super) fn short_conv(keys: &Keys<'_>, family: &DecoderFamily) -> Result<Option<ShortConvConfig>, FamilyError> {
    if family.attention.mixer != MixerKind::ShortConv {
        return Ok(None);
    }
    let kernel = keys.u64("conv_L_cache")?.unwrap_or(3);
    if !(2..=64).contains(&kernel) {
        return Err(keys.value("conv_L_cache", "from 2 to 64"));
    }
    Ok(Some(ShortConvConfig { kernel, bias: keys.bool("conv_bias")?.unwrap_or(false) }))
}

/// Shape of compressed convolutional attention, if the family has it.
pub(super) fn cca(keys: &Keys<'_>, family: &DecoderFamily, value_width: u64) -> Result<Option<CcaConfig>, FamilyError> {
    if family.attention.mixer != MixerKind::Cca {
        return Ok(None);
    }
    if !value_width.is_multiple_of(2) {
        return Err(
            keys.value("head_dim", "an even number of values for each token: half of them come from the one before")
        );
    }
    let kernel = |key: &str| match keys.u64(key)?.unwrap_or(2) {
        kernel @ 1..=64 => Ok(kernel),
        _ => Err(keys.value(key, "from 1 to 64")),
    };
    let (channel_kernel, head_kernel) = (kernel("cca_time0")?, kernel("cca_time1")?);
    if channel_kernel + head_kernel < 3 {
        return Err(keys.value("cca_time0", "at least 2, or cca_time1"));
    }
    Ok(Some(CcaConfig { channel_kernel, head_kernel }))
}

/// Shape of layers with a DeltaNet, if the family has them.
pub(super) fn delta_net(keys: &Keys<'_>, family: &DecoderFamily) -> Result<Option<DeltaNetConfig>, FamilyError> {
    if family.attention.mixer != MixerKind::DeltaNet {
        return Ok(None);
    }
    let size = |key: &str, default: u64| match keys.get(key) {
        Some(_) => keys.size(key),
        None => Ok(default),
    };
    let config = DeltaNetConfig {
        num_key_heads: size("linear_num_key_heads", 16)?,
        num_value_heads: size("linear_num_value_heads", 32)?,
        key_head_dim: size("linear_key_head_dim", 128)?,
        value_head_dim: size("linear_value_head_dim", 128)?,
        kernel: size("linear_conv_kernel_dim", 4)?,
    };
    if !config.num_value_heads.is_multiple_of(config.num_key_heads) {
        return Err(keys.value("linear_num_value_heads", &format!("a multiple of {} key heads", config.num_key_heads)));
    }
    if !(2..=64).contains(&config.kernel) {
        return Err(keys.value("linear_conv_kernel_dim", "from 2 to 64"));
    }
    Ok(Some(config))
}
