//! Rescaling of rows before depthwise convolutions: the kernel of channel `j` takes `1 / s_j`, so every row of the
//! projection can have the same magnitude. Kernels stay in fp16, so per tensor becomes as good as per channel.

use super::balance::largest;
use super::rows::{narrow, scale_rows};
use crate::blocks::causal_conv::CausalConv;
use crate::blocks::linear::Linear;
use crate::blocks::short_conv::ShortConv;
use anec_base::Result;
use anec_source::{SourceWeight, WeightExtent};

/// Largest scale, and the inverse of the smallest, to limit the range of kernels.
const MAX_SCALE: f64 = 256.0;

/// DeltaNet and Mamba-2: `conv(W x)`, with the rows of `W` times `s` and the kernel divided by it.
pub(super) fn convolved(projection: &mut Linear, conv: &mut CausalConv, layer: usize) -> Result<SourceWeight> {
    let units = equal_rows(&projection.weight, &format!("units of the convolution, layer {layer}"));
    scale_rows(projection, &units)?;
    conv.weight = conv.weight.scale_rows(&units.reciprocal())?;
    Ok(units)
}

/// Short convolution: `W_o (C * (conv(B * x) + b))`, with `s_B`, `s_C` and `s_x` for the rows of the input projection.
/// The kernel takes `1 / (s_B s_C s_x)` and the bias `1 / s_C`; both take `t`, and the columns of `W_o` take `1 / t`.
pub(super) fn short_conv(conv: &mut ShortConv, layer: usize) -> Result<SourceWeight> {
    let width = conv.conv.weight.rows();
    let units = equal_rows(&conv.input.weight, &format!("units of the convolution, layer {layer}"));
    scale_rows(&mut conv.input, &units)?;
    let of = |part: u64| units.slice(part * width..(part + 1) * width);
    let (b, c, x) = (of(0)?, of(1)?.reciprocal(), of(2)?);
    let columns = equal_columns(&conv.output.weight, &format!("units of the output, layer {layer}"));
    conv.output.weight = conv.output.weight.multiply_rows(&columns.reciprocal())?;
    let behind = c.multiply_rows(&columns)?;
    let kernel = behind.multiply_rows(&b.reciprocal())?.multiply_rows(&x.reciprocal())?;
    conv.conv.weight = conv.conv.weight.scale_rows(&kernel)?;
    conv.conv.bias = conv.conv.bias.as_ref().map(|bias| bias.multiply_rows(&behind)).transpose()?;
    // the scales of the output are computed beside those of the input
    Ok(SourceWeight::concatenate(vec![units, columns])?)
}

/// Scales that give all rows the magnitude of their geometric mean.
fn equal_rows(weight: &SourceWeight, name: &str) -> SourceWeight {
    let weight = weight.clone();
    SourceWeight::computed(name, weight.rows(), move || {
        let rows = WeightExtent::of(&weight)?.row_max;
        let alive: Vec<f64> = rows.iter().copied().filter(|row| *row > 0.0).collect();
        let mean = (alive.iter().map(|row| row.ln()).sum::<f64>() / alive.len().max(1) as f64).exp();
        let unit = |row: &f64| if *row > 0.0 { (mean / row).clamp(1.0 / MAX_SCALE, MAX_SCALE) } else { 1.0 };
        Ok(narrow(rows.iter().map(unit).collect()))
    })
}

/// Scales that give all columns the magnitude of the largest; no value grows.
fn equal_columns(weight: &SourceWeight, name: &str) -> SourceWeight {
    let weight = weight.clone();
    SourceWeight::computed(name, weight.columns(), move || {
        let columns = WeightExtent::of(&weight)?.column_max;
        let most = largest(&columns);
        let unit = |column: &f64| if most > 0.0 { (column / most).max(1.0 / MAX_SCALE) } else { 1.0 };
        Ok(narrow(columns.iter().map(unit).collect()))
    })
}
