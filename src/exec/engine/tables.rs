//! Activations as lookup tables: 33 equidistant knots, linear between them, asymptotes beyond (sources in
//! `src/advice/tables/ane-arithmetic.yaml`).
//!
//! Published are the number of knots, the largest errors (tanh 0.0017, gelu 0.0059), the values at 0 (silu -0.001259,
//! gelu -0.000543), and that softplus ends in 0. The ends of the tables are fitted: 33 knots give the published errors
//! there, for the magnitudes of an odd function (tanh) or on both sides of 0. No error is published for silu; its table
//! ends at ±8.

use std::sync::{Arc, LazyLock};

use super::{EngineEffect, EngineEffects};
use crate::kernel::{Call, Input, Kernel};
use crate::pool::Pool;
use crate::tensor::TensorData;
use anec_kernels::activation::gelu;
use half::f16;

/// Linear pieces between the knots.
const PIECES: usize = 32;
/// End of silu's table on both sides.
const SILU_END: f32 = 8.0;
/// End of gelu's table: 33 knots over 7.8 have an error of at most 0.0059.
const GELU_END: f32 = 3.9;
/// End of tanh's table of magnitudes: 33 knots over 4.25 have an error of at most 0.0017.
const TANH_END: f32 = 4.25;
/// Value from which softplus is 0.
const SOFTPLUS_END: f32 = 11.0;
/// Value of silu at 0.
const SILU_AT_ZERO: f32 = -0.001_259;
/// Value of gelu at 0.
const GELU_AT_ZERO: f32 = -0.000_543;

/// Argument of every activation.
const X: Input = Input { place: 0, name: "x" };

/// Table over an interval.
struct Table {
    from: f32,
    to: f32,
    knots: [f32; PIECES + 1],
}

impl Table {
    /// Table of a function, shifted by `bias`.
    fn of(from: f32, to: f32, bias: f32, function: impl Fn(f32) -> f32) -> Table {
        let at = |knot: usize| from + (to - from) * knot as f32 / PIECES as f32;
        let knots = std::array::from_fn(|knot| f16::from_f32(function(at(knot)) + bias).to_f32());
        Table { from, to, knots }
    }

    /// Interpolated value at `x` within the interval.
    fn look_up(&self, x: f32) -> f32 {
        let place = (x - self.from) / (self.to - self.from) * PIECES as f32;
        let piece = (place as usize).min(PIECES - 1);
        let (left, right) = (self.knots[piece], self.knots[piece + 1]);
        left + (right - left) * (place - piece as f32)
    }
}

static SILU: LazyLock<Table> =
    LazyLock::new(|| Table::of(-SILU_END, SILU_END, SILU_AT_ZERO, |x| x / (1.0 + (-x).exp())));
static GELU: LazyLock<Table> = LazyLock::new(|| Table::of(-GELU_END, GELU_END, GELU_AT_ZERO, gelu));
static TANH: LazyLock<Table> = LazyLock::new(|| Table::of(0.0, TANH_END, 0.0, f32::tanh));

/// Gated activation: 0 before the table, x after it.
fn gate(table: &Table, x: f32) -> f32 {
    if x < table.from {
        0.0
    } else if x > table.to {
        x
    } else {
        table.look_up(x)
    }
}

fn silu(x: f32) -> f32 {
    gate(&SILU, x)
}

/// Gelu by table, for all modes: they differ by less than the table's error.
fn gelu_by_table(x: f32) -> f32 {
    gate(&GELU, x)
}

fn tanh(x: f32) -> f32 {
    let magnitude = if x.abs() > TANH.to { 1.0 } else { TANH.look_up(x.abs()) };
    magnitude.copysign(x)
}

fn softplus(x: f32) -> f32 {
    if x > SOFTPLUS_END { 0.0 } else { x.max(0.0) + (-x.abs()).exp().ln_1p() }
}

/// Kernel of an operator that is a table under these effects.
pub(crate) fn kernel(operator: &str, effects: EngineEffects) -> Option<Arc<dyn Kernel>> {
    let (effect, function): (_, fn(f32) -> f32) = match operator {
        "silu" => (EngineEffect::SiluTable, silu),
        "gelu" => (EngineEffect::GeluTable, gelu_by_table),
        "tanh" => (EngineEffect::TanhTable, tanh),
        "softplus" => (EngineEffect::SoftplusTable, softplus),
        _ => return None,
    };
    effects.has(effect).then(|| Arc::new(LookUp { function }) as Arc<dyn Kernel>)
}

/// Elementwise table lookup.
struct LookUp {
    function: fn(f32) -> f32,
}

impl Kernel for LookUp {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let mut x = call.take(X)?;
        match &mut pool.make_mut(&mut x).data {
            TensorData::F32(values) => values.iter_mut().for_each(|value| *value = (self.function)(*value)),
            data => return Err(format!("`x` holds {}, not floats", data.kind())),
        }
        call.push(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error over an interval, in steps of a thousandth of it.
    fn worst(from: f32, to: f32, table: impl Fn(f32) -> f32, function: impl Fn(f32) -> f32) -> f32 {
        let at = |i: u32| from + (to - from) * i as f32 / 10_000.0;
        (0..=10_000).map(|i| (table(at(i)) - function(at(i))).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn the_published_values_at_zero() {
        assert!((silu(0.0) - -0.001_26).abs() < 5e-6, "{}", silu(0.0));
        assert!((gelu_by_table(0.0) - -0.000_543).abs() < 5e-6);
        assert_eq!(tanh(0.0), 0.0);
        assert_eq!(softplus(f32::INFINITY), 0.0);
        assert_eq!(softplus(20.0), 0.0);
    }

    #[test]
    fn the_published_errors_at_worst() {
        let found = worst(-6.0, 6.0, tanh, f32::tanh);
        assert!((0.0013..0.0018).contains(&found), "tanh {found}, published 0.0017");
        let found = worst(-6.0, 6.0, gelu_by_table, gelu);
        assert!((0.0050..0.0060).contains(&found), "gelu {found}, published 0.0059");
    }
}
