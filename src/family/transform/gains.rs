//! Redistribution of gains between a norm and its readers: `W (g * n) = (W diag(g / t)) (t * n)` for a gain `g`, a
//! reader `W` and any `t`. The rounding error of a reader is `max_j(d_j / t_j)^2 sum_j t_j^2` with the largest
//! magnitudes `d_j` of the columns of `W diag(g)`. It is minimal for `t` proportional to `d`, where all columns have
//! the same largest magnitude. Several readers share one `t`, the largest of theirs.

use half::f16;

use super::balance::largest;
use super::fold::take_gain;
use super::vector;
use crate::blocks::linear::Linear;
use crate::blocks::norm::Norm;
use crate::decoder::Decoder;
use anec_base::Result;
use anec_source::{SourceWeight, WeightExtent};

/// Smallest gain relative to the largest; fp16 holds it as a normal number.
const MIN_GAIN: f64 = 1.0 / 4096.0;

impl Decoder {
    /// Redistributes the gains of all norms before projections.
    pub(super) fn share_gains(&mut self) -> Result<()> {
        let mut deferred = Vec::new();
        for (index, layer) in self.layers.iter_mut().enumerate() {
            for block in layer.blocks() {
                let Some(norm) = block.before else { continue };
                deferred.extend(share(norm, block.readers, &format!("layer {index}"))?);
            }
        }
        deferred.extend(share(&mut self.final_norm, vec![&mut self.head], "head")?);
        self.transformed.deferred.extend(deferred);
        Ok(())
    }
}

/// Gives a norm a new gain and its readers the quotient of the old and the new one.
fn share(norm: &mut Norm, readers: Vec<&mut Linear>, place: &str) -> Result<Option<SourceWeight>> {
    let name = norm.name;
    let Some(gain) = take_gain(norm) else { return Ok(None) };
    let (old, count) = (gain.clone(), gain.elements());
    let quantized = readers.iter().filter(|reader| reader.role.is_projection());
    let weights: Vec<SourceWeight> = quantized.map(|reader| reader.weight.clone()).collect();
    let new = SourceWeight::computed(&format!("gain of {name}, {place}"), count, move || {
        let old = vector(Some(&old), 0)?;
        let mut new = vec![0.0; old.len()];
        for weight in &weights {
            let columns = WeightExtent::of(weight)?.column_max;
            let reach: Vec<f64> = columns.iter().zip(&old).map(|(column, gain)| column * gain.abs()).collect();
            let size = root_mean_square(&reach);
            if size > 0.0 {
                new.iter_mut().zip(&reach).for_each(|(new, reach)| *new = f64::max(*new, reach / size));
            }
        }
        if largest(&new) == 0.0 {
            return Ok(vec![1.0; new.len()]);
        }
        let factor = root_mean_square(&old) / root_mean_square(&new);
        let least = MIN_GAIN * largest(&new);
        // as rounded to fp16, so that the quotient is exact for the stored gain
        let held = |new: &f64| f16::from_f64(new.max(least) * factor).to_f32();
        Ok(new.iter().map(held).map(|new| if new > 0.0 { new } else { 1.0 }).collect())
    });
    let rest = gain.multiply_rows(&new.reciprocal())?;
    for reader in readers {
        reader.weight = reader.weight.multiply_rows(&rest)?;
    }
    norm.weight = Some(new.clone());
    Ok(Some(new))
}

fn root_mean_square(values: &[f64]) -> f64 {
    (values.iter().map(|value| value * value).sum::<f64>() / values.len().max(1) as f64).sqrt()
}
