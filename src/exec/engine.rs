//! The arithmetic of the Neural Engine, simulated from what is published of it.
//!
//! Nothing here was measured by us: each [`EngineEffect`] is what somebody has published of some chips, with its source in
//! `src/advice/tables/ane-arithmetic.yaml`, and each can be left out. Under [`Precision::Ane`](super::Precision::Ane) values are
//! rounded to fp16 as under `F16`, and the kernels of some steps are replaced by others (`simulate`) that call this module.
//!
//! | module | what departs from exact arithmetic |
//! |---|---|
//! | `tables` | activations, which are looked up |
//! | `sums` | sums of products: lanes, their range, subnormals, weights |
//! | `slices` | slices of the last axis |

pub(crate) mod slices;
pub(crate) mod sums;
pub(crate) mod tables;

use std::fmt;
use std::str::FromStr;

/// One way in which the Neural Engine is published to depart from exact arithmetic.
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
    /// Sums of products are infinite from 32768 on, on the way to the result, too.
    SumsSaturate,
    /// Integer weights are rounded to fp16 before they are multiplied.
    WeightsRounded,
    /// Numbers of a palette are summed before the scale of their row is applied.
    PaletteBeforeScale,
    /// A slice of the last axis that doesn't begin at 0 is multiplied by 16 on its way: infinite beyond 4094.
    SliceGain,
}

impl EngineEffect {
    /// All of them.
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

    /// Its name, as in `src/advice/tables/ane-arithmetic.yaml`.
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

/// Some effects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineEffects(u16);

impl EngineEffects {
    /// None of them: exact arithmetic.
    pub const NONE: EngineEffects = EngineEffects(0);
    /// All of them.
    pub const ALL: EngineEffects = EngineEffects((1 << EngineEffect::ALL.len()) - 1);

    /// These and another one.
    pub const fn with(self, effect: EngineEffect) -> Self {
        EngineEffects(self.0 | 1 << effect as u16)
    }

    /// These without one.
    pub const fn without(self, effect: EngineEffect) -> Self {
        EngineEffects(self.0 & !(1 << effect as u16))
    }

    /// Whether one is among them.
    pub const fn has(self, effect: EngineEffect) -> bool {
        self.0 >> effect as u16 & 1 == 1
    }

    /// Whether sums of products depart.
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
