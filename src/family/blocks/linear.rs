//! A projection: `W x + b` on the channels of hidden states.

use super::Graph;
use anec_manifest::{Layout, LinearForm, Role};
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;

/// A projection's weights: `weight` is `[out, in]`, `bias` `[out]`.
#[derive(Clone, Debug)]
pub struct Linear {
    /// Name within the layer.
    pub name: &'static str,
    /// What it does, for quantization.
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
}

/// Applies a projection to hidden states `[1, in, T, 1]` (or `[1, in, 1, T]`); gives `[1, out, T, 1]` (or likewise).
pub fn linear(g: &mut Graph<'_>, x: ValueId, linear: &Linear) -> ValueId {
    let (rows, columns) = (linear.weight.rows(), linear.weight.columns());
    let name = linear.name;
    let bias_name = format!("{name}_bias");
    let token_axis = match g.form.layout {
        Layout::Bcs1 => 2,
        Layout::Bc1s => 3,
    };
    let unit_axis = 5 - token_axis;
    match g.form.linear {
        LinearForm::Conv => {
            let weight = g.weight(&format!("{name}_weight"), linear.role, &linear.weight, &[rows, columns, 1, 1]);
            let bias = linear.bias.as_ref().map(|b| g.weight(&bias_name, Role::Bias, b, &[rows]));
            g.ops.conv(name, x, weight, bias)
        }
        LinearForm::Linear => {
            let weight = g.weight(&format!("{name}_weight"), linear.role, &linear.weight, &[rows, columns]);
            // Core ML has no default for the op's bias
            let bias = match &linear.bias {
                Some(bias) => g.weight(&bias_name, Role::Bias, bias, &[rows]),
                None => g.ops.constant(&bias_name, Constant::fp16_tensor(&[rows], &vec![0.0; rows as usize])),
            };
            let x = g.ops.squeeze(x, &[unit_axis]);
            let x = g.ops.transpose(x, &[0, 2, 1]);
            let y = g.ops.linear(name, x, weight, Some(bias));
            let y = g.ops.transpose(y, &[0, 2, 1]);
            g.ops.expand_dims(y, &[unit_axis])
        }
        LinearForm::Matmul => {
            let weight = g.weight(&format!("{name}_weight"), linear.role, &linear.weight, &[rows, columns]);
            let x = g.ops.squeeze(x, &[unit_axis]);
            let mut y = g.ops.matmul(weight, x, false, false);
            if let Some(bias) = &linear.bias {
                let bias = g.weight(&bias_name, Role::Bias, bias, &[rows, 1]);
                y = g.ops.add(y, bias);
            }
            g.ops.expand_dims(y, &[unit_axis])
        }
    }
}
