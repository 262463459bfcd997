//! Rotary position embedding: frequencies of every scaling type in use, and tables of cos and sin.
//!
//! RoFormer (arXiv:2104.09864) rotates pairs of dimensions `(i, i + dim/2)` of queries and keys by
//! `position * theta^(-2i/dim)`. The scaling types are those of transformers' `modeling_rope_utils`: they change the
//! frequencies, and some multiply cos and sin by an attention factor.

use std::f64::consts::PI;

use serde::de::Error;
use serde::{Deserialize, Serialize};

use super::{RopeTables, RopeValues};

/// Name of the rotary table of queries with a position-dependent scale.
pub const QUERY_ROPE_TABLE: &str = "rope_query";

/// A rotary embedding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub rope_theta: f64,
    /// Rotated dimensions of each head, even; the rest pass through.
    pub rope_dim: u64,
    /// Scaling of the frequencies for longer texts.
    pub scaling: RopeScaling,
}

/// Scaling of frequencies for texts longer than those of the first training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "snake_case")]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// Position interpolation (arXiv:2306.15595): all frequencies divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Rotation of the first pairs only, with the frequencies of the whole head divided by `factor`.
    Proportional {
        /// Number of pairs that rotate.
        rotated: u64,
        /// Divisor.
        factor: f64,
    },
    /// NTK-aware scaling of the base by the length of the text.
    Dynamic {
        /// Ratio of the lengths.
        factor: f64,
        /// Length up to which the frequencies are unchanged.
        max_position_embeddings: u64,
    },
    /// NTK-aware scaling of the base by a constant at every length: `theta * alpha^(dim / (dim - 2))`.
    NtkAlpha {
        /// Constant of the scaling.
        alpha: f64,
    },
    /// YaRN (arXiv:2309.00071): high frequencies are kept, low ones interpolated, with a ramp between.
    Yarn {
        /// Ratio of the lengths.
        factor: f64,
        /// Length of the first training.
        original_max_position_embeddings: u64,
        /// Factor of cos and sin.
        attention_factor: f64,
        /// Rotations within the original length above which a frequency is kept.
        beta_fast: f64,
        /// Rotations within the original length below which a frequency is interpolated.
        beta_slow: f64,
        /// Whether the ends of the ramp are rounded to whole dimensions.
        truncate: bool,
    },
    /// Llama 3: three bands by wavelength.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Length of the first training.
        original_max_position_embeddings: u64,
    },
    /// LongRoPE (arXiv:2402.13753): a divisor for each frequency, in one set for texts up to the original length and
    /// another for longer ones.
    Longrope {
        /// Divisors up to the original length.
        short_factor: Vec<f64>,
        /// Divisors beyond it.
        long_factor: Vec<f64>,
        /// Length of the first training.
        original_max_position_embeddings: u64,
        /// Factor of cos and sin at every length.
        attention_factor: f64,
    },
    /// A divisor for each frequency: Llama 3 scaling in GGUF's `rope_freqs.weight`.
    Factors {
        /// Divisors.
        factors: Vec<f32>,
    },
}

impl RopeScaling {
    /// Default attention factor of YaRN: `0.1 ln(factor) + 1`, or a ratio of two such terms if `mscale` and
    /// `mscale_all_dim` are given.
    pub fn yarn_attention_factor(factor: f64, mscale: Option<f64>, mscale_all_dim: Option<f64>) -> f64 {
        let get = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        match (mscale.filter(|m| *m != 0.0), mscale_all_dim.filter(|m| *m != 0.0)) {
            (Some(m), Some(all)) => get(m) / get(all),
            _ => get(1.0),
        }
    }

    /// Default attention factor of LongRoPE: `sqrt(1 + ln(factor) / ln(original))`.
    pub fn longrope_attention_factor(factor: f64, original: u64) -> f64 {
        if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() }
    }
}

impl RopeConfig {
    /// Reads the rotary embedding of a host table from a family's configuration in `bundle.json`.
    ///
    /// # Errors
    /// Returns an error if the configuration has none for the table.
    pub fn of_config(config: &serde_json::Value, table: &str) -> Result<Self, serde_json::Error> {
        // keys have the names of tables, except that scaled queries rotate as keys do
        let key = if table == QUERY_ROPE_TABLE { "rope" } else { table };
        RopeConfig::deserialize(config.get(key).unwrap_or(&serde_json::Value::Null))
    }

    /// Computes a host table with `context` rows from the configuration in `bundle.json`.
    ///
    /// # Errors
    /// Returns an error if the configuration lacks the scale of the queries' table.
    pub fn tables_of_config(
        &self,
        config: &serde_json::Value,
        table: &str,
        context: u64,
    ) -> Result<RopeTables, serde_json::Error> {
        if table != QUERY_ROPE_TABLE {
            return Ok(self.tables(table, context));
        }
        let scale = config.get("late_query_scale").unwrap_or(&serde_json::Value::Null);
        match LateQueryScale::deserialize(scale)? {
            LateQueryScale { from: 0, .. } => Err(Error::custom("queries are scaled from position 0 on")),
            scale => Ok(self.query_tables(table, context, scale)),
        }
    }

    /// Frequencies (radians per position) for a text of `length` tokens, and the factor of cos and sin.
    pub fn frequencies(&self, length: u64) -> (Vec<f64>, f64) {
        let dim = self.rope_dim as f64;
        let half = self.rope_dim / 2;
        let with_base =
            |base: f64| -> Vec<f64> { (0..half).map(|i| base.powf(-((2 * i) as f64) / dim)).collect::<Vec<f64>>() };
        let plain = with_base(self.rope_theta);
        match &self.scaling {
            RopeScaling::Default => (plain, 1.0),
            RopeScaling::Linear { factor } => (plain.iter().map(|f| f / factor).collect(), 1.0),
            RopeScaling::Proportional { rotated, factor } => {
                let frequency = |(i, f): (usize, &f64)| if (i as u64) < *rotated { f / factor } else { 0.0 };
                (plain.iter().enumerate().map(frequency).collect(), 1.0)
            }
            RopeScaling::Dynamic { factor, max_position_embeddings } => {
                let max = *max_position_embeddings as f64;
                let length = (length as f64).max(max);
                let stretch = factor * length / max - (factor - 1.0);
                (with_base(self.rope_theta * stretch.powf(dim / (dim - 2.0))), 1.0)
            }
            RopeScaling::NtkAlpha { alpha } => (with_base(self.rope_theta * alpha.powf(dim / (dim - 2.0))), 1.0),
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                attention_factor,
                beta_fast,
                beta_slow,
                truncate,
            } => {
                let original = *original_max_position_embeddings as f64;
                let dimension =
                    |rotations: f64| dim * (original / (rotations * 2.0 * PI)).ln() / (2.0 * self.rope_theta.ln());
                let (mut low, mut high) = (dimension(*beta_fast), dimension(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                low = low.max(0.0);
                high = high.min(dim - 1.0);
                if low == high {
                    high += 0.001;
                }
                let blend = |(i, f): (usize, &f64)| {
                    let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / factor * interpolated + f * (1.0 - interpolated)
                };
                (plain.iter().enumerate().map(blend).collect(), *attention_factor)
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let original = *original_max_position_embeddings as f64;
                let scale = |f: &f64| {
                    let wavelength = 2.0 * PI / f;
                    if wavelength < original / high_freq_factor {
                        *f
                    } else if wavelength > original / low_freq_factor {
                        f / factor
                    } else {
                        let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                        (1.0 - smooth) * f / factor + smooth * f
                    }
                };
                (plain.iter().map(scale).collect(), 1.0)
            }
            RopeScaling::Longrope { short_factor, long_factor, original_max_position_embeddings, attention_factor } => {
                let divisors = if length > *original_max_position_embeddings { long_factor } else { short_factor };
                (plain.iter().zip(divisors).map(|(f, d)| f / d).collect(), *attention_factor)
            }
            RopeScaling::Factors { factors } => {
                (plain.iter().zip(factors).map(|(f, d)| f / f64::from(*d)).collect(), 1.0)
            }
        }
    }

    /// Computes the host's tables for texts of up to `context` tokens, named `table`.
    ///
    /// If the frequencies depend on the length of the text, there are two variants: one up to the original length and
    /// one for longer texts. The second is computed for the full context. Dynamic scaling would change with every
    /// token, but keys in the cache keep the rotation they were written with.
    pub fn tables(&self, table: &str, context: u64) -> RopeTables {
        let original = match &self.scaling {
            RopeScaling::Dynamic { max_position_embeddings, .. } => Some(*max_position_embeddings),
            RopeScaling::Longrope { original_max_position_embeddings, .. } => Some(*original_max_position_embeddings),
            _ => None,
        };
        let lengths = match original {
            Some(original) if original < context => vec![original, context],
            _ => vec![context],
        };
        RopeTables {
            table: table.to_owned(),
            columns: self.rope_dim / 2,
            variants: lengths.into_iter().map(|length| self.values(length)).collect(),
        }
    }

    /// Computes the table of scaled queries: rotation is linear, so the scale is folded into the table.
    pub fn query_tables(&self, table: &str, context: u64, scale: LateQueryScale) -> RopeTables {
        let mut tables = self.tables(table, context);
        let columns = tables.columns.max(1) as usize;
        for RopeValues { cos, sin, .. } in &mut tables.variants {
            for rows in [cos, sin] {
                for (position, row) in rows.chunks_exact_mut(columns).enumerate() {
                    let factor = scale.at(position as u64) as f32;
                    row.iter_mut().for_each(|value| *value *= factor);
                }
            }
        }
        tables
    }

    fn values(&self, length: u64) -> RopeValues {
        let (frequencies, factor) = self.frequencies(length);
        let angles = (0..length).flat_map(|position| frequencies.iter().map(move |f| position as f64 * f));
        let (cos, sin) = angles.map(|a| ((a.cos() * factor) as f32, (a.sin() * factor) as f32)).unzip();
        RopeValues { max_length: length, cos, sin }
    }
}

/// Scale of queries, `1 + beta ln(1 + floor(position / from))`, which is 1 before position `from`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LateQueryScale {
    /// Growth rate.
    pub beta: f64,
    /// First position with a scale other than 1.
    pub from: u64,
}

impl LateQueryScale {
    /// Scale at a position.
    pub fn at(&self, position: u64) -> f64 {
        1.0 + self.beta * ((position / self.from) as f64).ln_1p()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> RopeConfig {
        RopeConfig { rope_theta: 10000.0, rope_dim: 8, scaling }
    }

    #[test]
    fn default_frequencies_fall_from_one_by_powers_of_theta() {
        let (f, factor) = rope(RopeScaling::Default).frequencies(100);
        assert_eq!(factor, 1.0);
        for (i, expected) in [1.0, 0.1, 0.01, 0.001].into_iter().enumerate() {
            assert!((f[i] - expected).abs() < 1e-12, "{f:?}");
        }
    }

    #[test]
    fn what_is_left_of_a_proportional_rotation_stands_still() {
        let (whole, _) = rope(RopeScaling::Default).frequencies(100);
        let (f, factor) = rope(RopeScaling::Proportional { rotated: 1, factor: 2.0 }).frequencies(100);
        assert_eq!((f, factor), (vec![whole[0] / 2.0, 0.0, 0.0, 0.0], 1.0));
    }

    #[test]
    fn a_configuration_comes_back_from_the_bundle() {
        for scaling in [
            RopeScaling::Default,
            RopeScaling::Dynamic { factor: 1.7, max_position_embeddings: 16 },
            RopeScaling::Factors { factors: vec![1.1, 2.0, 3.3, 4.0] },
        ] {
            let rope = rope(scaling);
            let config = serde_json::json!({ "rope": rope, "rope_local": null }).to_string();
            let config: serde_json::Value = serde_json::from_str(&config).unwrap();
            assert_eq!(RopeConfig::of_config(&config, "rope").unwrap(), rope);
            assert!(RopeConfig::of_config(&config, "rope_local").is_err());
        }
    }

    #[test]
    fn phi4_mini_has_the_attention_factor_that_others_lose() {
        // config of Phi-4-mini: 131072 positions over 4096 original ones
        let factor = RopeScaling::longrope_attention_factor(131072.0 / 4096.0, 4096);
        assert!((factor - 1.1902).abs() < 1e-4, "{factor}");
    }

    #[test]
    fn a_text_past_the_original_length_gets_its_own_table() {
        let scaling = RopeScaling::Longrope {
            short_factor: vec![1.0; 4],
            long_factor: vec![2.0; 4],
            original_max_position_embeddings: 16,
            attention_factor: 1.5,
        };
        let tables = rope(scaling).tables("rope", 32);
        let lengths: Vec<u64> = tables.variants.iter().map(|v| v.max_length).collect();
        assert_eq!(lengths, [16, 32]);
        // position 1, first frequency: 1 rad in the short table, 1/2 rad in the long one, both times 1.5
        assert_eq!(tables.variants[0].cos[4], (1f64.cos() * 1.5) as f32);
        assert_eq!(tables.variants[1].cos[4], (0.5f64.cos() * 1.5) as f32);
        assert_eq!(tables.variants[1].sin.len(), 32 * 4);
    }

    #[test]
    fn dynamic_scaling_leaves_short_texts_alone() {
        let scaling = RopeScaling::Dynamic { factor: 4.0, max_position_embeddings: 16 };
        let plain = rope(RopeScaling::Default).frequencies(16).0;
        assert_eq!(rope(scaling.clone()).frequencies(16).0, plain);
        assert!(rope(scaling).frequencies(32).0[3] < plain[3]);
    }
}
