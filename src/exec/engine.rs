//! Simulation of the Neural Engine's arithmetic from published observations.
//!
//! None of it was measured by this project. Each [`EngineEffect`] has been published for some chips, with its source in
//! `src/advice/tables/ane-arithmetic.yaml`, and each can be switched off. Under
//! [`Precision::Ane`](super::Precision::Ane), values are rounded to fp16 as under `F16`, and some kernels are replaced
//! by simulated ones that call this module.
//!
//! | module | simulates |
//! |---|---|
//! | `tables` | activations, which are table lookups |
//! | `sums` | sums of products: tiles, range, subnormals, weights |
//! | `slices` | slices of the last axis |

pub(crate) mod slices;
pub(crate) mod sums;
pub(crate) mod tables;

use std::fmt;
use std::str::FromStr;

/// One published departure of the Neural Engine from exact arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
pub enum EngineEffect {
    /// `silu` is a table of 33 knots that gives -0.00126 at 0.
    SiluTable,
    /// `gelu` is a table of 33 knots that gives -0.00054 at 0.
    GeluTable,
    /// `tanh` is a table of 33 knots for magnitudes.
    TanhTable,
    /// `softplus` is 0 beyond the end of its table.
    SoftplusTable,
    /// Subnormal numbers count as zero where products are summed.
    SubnormalsFlushed,
    /// Products are summed four at a time in 12 bits, then in f32.
    LaneTiles,
    /// Sums of products overflow to infinity from 32768 on, intermediate sums too.
    SumsSaturate,
    /// Integer weights are rounded to fp16 before they are multiplied.
    WeightsRounded,
    /// Palette values are summed before the scale of their row is applied.
    PaletteBeforeScale,
    /// A slice of the last axis that doesn't begin at 0 is multiplied by 16 internally: infinite beyond 4094.
    SliceGain,
}

impl EngineEffect {
    /// All effects.
    pub const ALL: [EngineEffect; 10] = [
        EngineEffect::SiluTable,
        EngineEffect::GeluTable,
        EngineEffect::TanhTable,
        EngineEffect::SoftplusTable,
        EngineEffect::SubnormalsFlushed,
        EngineEffect::LaneTiles,
        EngineEffect::SumsSaturate,
        EngineEffect::WeightsRounded,
        EngineEffect::PaletteBeforeScale,
        EngineEffect::SliceGain,
    ];

    /// Name of the effect, as in `src/advice/tables/ane-arithmetic.yaml`.
    pub fn name(self) -> &'static str {
        match self {
            EngineEffect::SiluTable => "silu-table",
            EngineEffect::GeluTable => "gelu-table",
            EngineEffect::TanhTable => "tanh-table",
            EngineEffect::SoftplusTable => "softplus-table",
            EngineEffect::SubnormalsFlushed => "subnormals-flushed",
            EngineEffect::LaneTiles => "lane-tiles",
            EngineEffect::SumsSaturate => "sums-saturate",
            EngineEffect::WeightsRounded => "weights-rounded",
            EngineEffect::PaletteBeforeScale => "palette-before-scale",
            EngineEffect::SliceGain => "slice-gain",
        }
    }
}

impl fmt::Display for EngineEffect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for EngineEffect {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        EngineEffect::ALL.into_iter().find(|effect| effect.name() == text).ok_or_else(|| {
            let names = EngineEffect::ALL.map(EngineEffect::name).join(", ");
            format!("`{text}` is no effect of the Neural Engine's arithmetic, expected one of {names}")
        })
    }
}

/// Set of effects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineEffects(u16);

impl EngineEffects {
    /// Exact arithmetic.
    pub const NONE: EngineEffects = EngineEffects(0);
    /// All effects.
    pub const ALL: EngineEffects = EngineEffects((1 << EngineEffect::ALL.len()) - 1);

    /// Adds an effect.
    pub const fn with(self, effect: EngineEffect) -> Self {
        EngineEffects(self.0 | 1 << effect as u16)
    }

    /// Removes an effect.
    pub const fn without(self, effect: EngineEffect) -> Self {
        EngineEffects(self.0 & !(1 << effect as u16))
    }

    /// Returns whether the set contains an effect.
    pub const fn has(self, effect: EngineEffect) -> bool {
        self.0 >> effect as u16 & 1 == 1
    }

    /// Returns whether sums of products depart from exact ones.
    pub(crate) fn has_sums(self) -> bool {
        [
            EngineEffect::SubnormalsFlushed,
            EngineEffect::LaneTiles,
            EngineEffect::SumsSaturate,
            EngineEffect::WeightsRounded,
            EngineEffect::PaletteBeforeScale,
        ]
        .into_iter()
        .any(|effect| self.has(effect))
    }
}
