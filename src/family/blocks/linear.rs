//! Projection: `W x + b` on the channels of hidden states, or `s ⊙ (W x) + b` if the weight's number format has a scale
//! for each row.

use super::Graph;
use std::ops::Range;

use anec_base::Result;
use anec_manifest::{Layout, LinearForm, Role};
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;

/// Weights of a projection: `weight` is `[out, in]`, `bias` `[out]`.
#[derive(Clone, Debug)]
pub struct Linear {
    /// Name within the layer.
    pub name: &'static str,
    /// Role, which determines the quantization.
    pub role: Role,
    /// `[out, in]`
    pub weight: SourceWeight,
    /// `[out]`
    pub bias: Option<SourceWeight>,
}

impl Linear {
    /// Output channels.
    pub fn rows(&self) -> u64 {
        self.weight.rows()
    }

    /// Slices the output channels.
    ///
    /// # Errors
    /// Returns an error if there are fewer.
    pub fn slice(&self, rows: Range<u64>) -> Result<Linear> {
        let bias = self.bias.as_ref().map(|bias| bias.slice(rows.clone())).transpose()?;
        Ok(Linear { name: self.name, role: self.role, weight: self.weight.slice(rows)?, bias })
    }
}

/// Applies a projection to hidden states `[1, in, T, 1]` (or `[1, in, 1, T]`); returns `[1, out, T, 1]` (or
/// `[1, out, 1, T]`).
pub fn linear(g: &mut Graph<'_>, x: ValueId, linear: &Linear) -> ValueId {
    let (rows, columns) = (linear.weight.rows(), linear.weight.columns());
    let name = linear.name;
    let bias_name = format!("{name}_bias");
    let token_axis = match g.form.layout {
        Layout::Bcs1 => 2,
        Layout::Bc1s => 3,
    };
    let unit_axis = 5 - token_axis;
    let scale_name = format!("{name}_row_scale");
    let scale = |g: &mut Graph<'_>, shape: &[u64]| g.row_scale(&scale_name, linear.role, &linear.weight, shape);
    match g.form.linear {
        LinearForm::Conv => {
            let weight = g.weight(&format!("{name}_weight"), linear.role, &linear.weight, &[rows, columns, 1, 1]);
            let by_row = [1, rows, 1, 1];
            let Some(scale) = scale(g, &by_row) else {
                let bias = linear.bias.as_ref().map(|b| g.weight(&bias_name, Role::Bias, b, &[rows]));
                return g.ops.conv(name, x, weight, bias);
            };
            let y = g.ops.conv(name, x, weight, None);
            scaled(g, y, scale, linear.bias.as_ref().map(|bias| (bias_name.as_str(), bias, &by_row[..])))
        }
        LinearForm::Linear => {
            let weight = g.weight(&format!("{name}_weight"), linear.role, &linear.weight, &[rows, columns]);
            let by_row = [1, 1, rows];
            let scale = scale(g, &by_row);
            // Core ML has no default for the op's bias
            let bias = match &linear.bias {
                Some(bias) if scale.is_none() => g.weight(&bias_name, Role::Bias, bias, &[rows]),
                _ => {
                    let name = if scale.is_none() { bias_name.clone() } else { format!("{name}_no_bias") };
                    g.ops.constant(&name, Constant::fp16_tensor(&[rows], &vec![0.0; rows as usize]))
                }
            };
            let x = g.ops.squeeze(x, &[unit_axis]);
            let x = g.ops.transpose(x, &[0, 2, 1]);
            let mut y = g.ops.linear(name, x, weight, Some(bias));
            if let Some(scale) = scale {
                y = scaled(g, y, scale, linear.bias.as_ref().map(|bias| (bias_name.as_str(), bias, &by_row[..])));
            }
            let y = g.ops.transpose(y, &[0, 2, 1]);
            g.ops.expand_dims(y, &[unit_axis])
        }
        LinearForm::Matmul => {
            let weight = g.weight(&format!("{name}_weight"), linear.role, &linear.weight, &[rows, columns]);
            let scale = scale(g, &[1, rows, 1]);
            let x = g.ops.squeeze(x, &[unit_axis]);
            let mut y = g.ops.matmul(weight, x, false, false);
            if let Some(scale) = scale {
                y = scaled(g, y, scale, None);
            }
            if let Some(bias) = &linear.bias {
                let bias = g.weight(&bias_name, Role::Bias, bias, &[rows, 1]);
                y = g.ops.add(y, bias);
            }
            g.ops.expand_dims(y, &[unit_axis])
        }
    }
}

/// `scale ⊙ y` plus a bias (name, values, shape).
fn scaled(g: &mut Graph<'_>, y: ValueId, scale: ValueId, bias: Option<(&str, &SourceWeight, &[u64])>) -> ValueId {
    let y = g.ops.mul(y, scale);
    match bias {
        None => y,
        Some((name, bias, shape)) => {
            let bias = g.weight(name, Role::Bias, bias, shape);
            g.ops.add(y, bias)
        }
    }
}
