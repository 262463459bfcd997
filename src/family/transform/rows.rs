//! Rescaling of projections' rows.

use crate::blocks::linear::Linear;
use anec_base::Result;
use anec_source::SourceWeight;

/// Multiplies the rows and the bias of a projection by `units`.
pub(super) fn scale_rows(projection: &mut Linear, units: &SourceWeight) -> Result<()> {
    projection.weight = projection.weight.scale_rows(units)?;
    projection.bias = projection.bias.as_ref().map(|bias| bias.multiply_rows(units)).transpose()?;
    Ok(())
}

/// Rounds scales from f64.
pub(super) fn narrow(values: Vec<f64>) -> Vec<f32> {
    values.into_iter().map(|value| value as f32).collect()
}
