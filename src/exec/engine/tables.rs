//! Activations by tables: 33 knots at equal distances, straight lines between them, asymptotes beyond
//! (`src/advice/tables/ane-arithmetic.yaml` has the sources).
//!
//! Published are the number of knots, the largest errors (tanh 0.0017, gelu 0.0059), the values at 0 (silu -0.001259, gelu
//! -0.000543), and that softplus ends in 0. The ends of the tables are ours: those at which 33 knots give the published
//! errors, for an odd function's magnitudes (tanh) or on both sides of 0. For silu, of which no error is published, ±8.

use std::sync::{Arc, LazyLock};

use super::{EngineEffect, EngineEffects};
use crate::kernel::{Call, Input, Kernel};
use crate::pool::Pool;
use crate::tensor::TensorData;
use anec_kernels::activation::gelu;
use half::f16;

/// Straight lines between the knots.
const PIECES: usize = 32;
/// Where the table of silu ends on both sides.
const SILU_END: f32 = 8.0;
/// Where that of gelu ends: 33 knots over 7.8 are off by at most 0.0059.
const GELU_END: f32 = 3.9;
/// Where that of tanh's magnitudes ends: 33 knots over 4.25 are off by at most 0.0017.
const TANH_END: f32 = 4.25;
/// From where on softplus is 0.
const SOFTPLUS_END: f32 = 11.0;
/// What silu gives at 0.
const SILU_AT_ZERO: f32 = -0.001_259;
/// What gelu gives at 0.
const GELU_AT_ZERO: f32 = -0.000_543;

/// The argument of every activation.
const X: Input = Input { place: 0, name: "x" };

/// A table over an interval.
struct Table {
    from: f32,
    to: f32,
    knots: [f32; PIECES + 1],
}

impl Table {
    /// Of a function, shifted by `bias`.
    fn of(from: f32, to: f32, bias: f32, function: impl Fn(f32) -> f32) -> Table {
        let at = |knot: usize| from + (to - from) * knot as f32 / PIECES as f32;
        let knots = std::array::from_fn(|knot| f16::from_f32(function(at(knot)) + bias).to_f32());
        Table { from, to, knots }
    }

    /// What it has at a place within the interval.
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

/// A gate's table: 0 before it, x after it.
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

/// The table doesn't tell the modes of gelu apart, whose results are nearer to each other than to it.
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

/// The kernel of an operator that is a table, if that is among the effects.
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

/// A function of each element by itself.
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
        call.give(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error over an interval, by thousandths of it.
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
