//! Normalizations.

use super::rules::same;
use crate::catalogue::Row;
use crate::types::Opset::CoreMl5;

pub const ROWS: &[Row] = &[
    ("batch_norm", CoreMl5, "x mean! variance! gamma!? beta!? epsilon!=0.00001", same),
    ("instance_norm", CoreMl5, "x gamma!? beta!? epsilon!=0.00001", same),
    ("l2_norm", CoreMl5, "x epsilon!=0.000001", same),
    ("layer_norm", CoreMl5, "x axes!? gamma!? beta!? epsilon!=0.00001", same),
    ("local_response_norm", CoreMl5, "x size! alpha!=0.0001 beta!=0.75 k!=1.0", same),
];
