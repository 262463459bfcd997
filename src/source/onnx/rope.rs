//! Rotary tables of a graph, and the frequencies behind them.

use std::f64::consts::TAU;

use crate::dtype::SourceDtype;
use crate::error::Result;
use crate::weight::SourceWeight;

/// Number of leading positions that are compared one by one; of the others, as many are sampled.
const COMPARED: u64 = 512;

/// Cosines and sines of a rotary embedding, by position and rotated pair of dimensions.
#[derive(Clone, Debug)]
pub struct OnnxRope {
    cos: SourceWeight,
    sin: SourceWeight,
    /// Rounding error of a number in the table.
    rounding: f64,
}

/// Frequencies behind a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Frequencies {
    /// Radians per position, for each pair of dimensions.
    pub radians: Vec<f64>,
    /// Factor of cosines and sines.
    pub factor: f64,
}

impl OnnxRope {
    /// Returns the table of two matrices of the same shape, `[positions, pairs]`, stored as `dtype`, or the problem.
    pub(super) fn new(cos: SourceWeight, sin: SourceWeight, dtype: SourceDtype) -> Result<Self, String> {
        match *cos.shape() {
            [positions, pairs] if sin.shape() == cos.shape() && positions > 1 && pairs > 0 => {
                let rounding = match dtype {
                    SourceDtype::F16 => 1e-3,
                    SourceDtype::BF16 => 8e-3,
                    _ => 4e-6,
                };
                Ok(OnnxRope { cos, sin, rounding })
            }
            _ => Err(format!("its rotary tables have shapes {:?} and {:?}", cos.shape(), sin.shape())),
        }
    }

    /// Number of rotated dimensions of a head: twice the pairs.
    pub fn rope_dim(&self) -> u64 {
        2 * self.cos.columns()
    }

    /// Number of positions.
    pub fn positions(&self) -> u64 {
        self.cos.rows()
    }

    /// Returns cosines and sines at a position.
    fn at(&self, position: u64) -> Result<(Vec<f32>, Vec<f32>)> {
        let mut rows = (vec![0.0; self.cos.columns() as usize], vec![0.0; self.cos.columns() as usize]);
        self.cos.read_rows(position, &mut rows.0)?;
        self.sin.read_rows(position, &mut rows.1)?;
        Ok(rows)
    }

    /// Returns the first mismatch with the given frequencies: position, pair, table value and expected value.
    ///
    /// # Errors
    /// Returns an error if the table can't be read.
    #[allow(clippy::type_complexity, reason = "one place of a table and its two numbers")]
    pub fn deviation(&self, frequencies: &Frequencies) -> Result<Option<(u64, usize, [f64; 2], [f64; 2])>> {
        let stride = (self.positions() / COMPARED).max(1);
        let spread = (0..COMPARED).map(|i| i * stride).chain([self.positions() - 1]);
        for position in (0..COMPARED).chain(spread).filter(|&position| position < self.positions()) {
            let (cos, sin) = self.at(position)?;
            for (pair, (cos, sin)) in cos.into_iter().zip(sin).enumerate() {
                let angle = position as f64 * frequencies.radians[pair];
                let expected = [angle.cos(), angle.sin()].map(|value| value * frequencies.factor);
                // exporters compute angles in single precision, so that the error grows with the angle
                let tolerance = frequencies.factor * (self.rounding + angle.abs() * 6e-7);
                let found = [f64::from(cos), f64::from(sin)];
                // in this form, so that NaN is a mismatch
                if !found.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() <= tolerance) {
                    return Ok(Some((position, pair, found, expected)));
                }
            }
        }
        Ok(None)
    }

    /// Returns the frequencies behind the table, as exactly as its numbers allow.
    ///
    /// # Errors
    /// Returns an error if the table can't be read.
    pub fn frequencies(&self) -> Result<Frequencies> {
        let (start, _) = self.at(0)?;
        let factor = f64::from(start[0]);
        let (cos, sin) = self.at(1)?;
        // estimate an angle where its rounding error is relatively small: small ones from the sine at one position,
        // larger ones over many positions
        let mut radians: Vec<f64> = cos.iter().zip(&sin).map(|(c, s)| f64::from(*s).atan2(f64::from(*c))).collect();
        let mut position = 2;
        while position < self.positions().min(1 << 12) {
            let (cos, sin) = self.at(position)?;
            for (radians, (cos, sin)) in radians.iter_mut().zip(cos.iter().zip(&sin)) {
                let near = *radians * position as f64;
                let turn = f64::from(*sin).atan2(f64::from(*cos));
                let angle = turn + ((near - turn) / TAU).round() * TAU;
                // a sine keeps the relative precision of a small number at any position
                if near.abs() > 0.5 || *radians > 1e-2 {
                    *radians = angle / position as f64;
                }
            }
            position *= 2;
        }
        Ok(Frequencies { radians, factor })
    }

    /// Returns the base of frequencies `theta^(-2i/dim)`: the roundest number that fits the whole table.
    ///
    /// # Errors
    /// Returns an error if the table can't be read.
    pub fn theta(&self) -> Result<Option<f64>> {
        let found = self.frequencies()?;
        let dim = self.rope_dim() as f64;
        let Some((last, radians)) = found.radians.iter().enumerate().next_back().filter(|(last, _)| *last > 0) else {
            return Ok(None);
        };
        let theta = radians.powf(-dim / (2 * last) as f64);
        if !theta.is_finite() || theta <= 1.0 {
            return Ok(None);
        }
        let exponent = theta.log10().floor() as i32;
        for digits in 0..9 {
            let unit = 10f64.powi(exponent - digits);
            let round = (theta / unit).round() * unit;
            let frequencies = Frequencies { radians: geometric(round, dim), factor: found.factor };
            if self.deviation(&frequencies)?.is_none() {
                return Ok(Some(round));
            }
        }
        Ok(None)
    }
}

/// Returns the frequencies of a plain rotary embedding.
fn geometric(theta: f64, dim: f64) -> Vec<f64> {
    (0..dim as u64 / 2).map(|pair| theta.powf(-((2 * pair) as f64) / dim)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(radians: &[f64], factor: f64, positions: u64, dtype: SourceDtype) -> OnnxRope {
        let part = |f: fn(f64) -> f64| {
            let values: Vec<f32> = (0..positions)
                .flat_map(|p| radians.iter().map(move |r| (f(f64::from(p as f32 * *r as f32)) * factor) as f32))
                .map(|value| if dtype == SourceDtype::F16 { half::f16::from_f32(value).to_f32() } else { value })
                .collect();
            SourceWeight::from_values("table", &[positions, radians.len() as u64], values).unwrap()
        };
        OnnxRope::new(part(f64::cos), part(f64::sin), dtype).unwrap()
    }

    #[test]
    fn the_base_of_a_table_is_found() {
        for theta in [10_000.0, 500_000.0, 1_000_000.0, 5_000_000.0, 150_000.0, 11_158_840.0] {
            for dim in [64, 128] {
                let table = table(&geometric(theta, f64::from(dim)), 1.0, 4096, SourceDtype::F32);
                assert_eq!(table.theta().unwrap(), Some(theta), "{dim}");
            }
        }
        for theta in [10_000.0, 1_000_000.0] {
            let table = table(&geometric(theta, 128.0), 1.0, 4096, SourceDtype::F16);
            assert_eq!(table.theta().unwrap(), Some(theta));
        }
    }

    #[test]
    fn a_table_that_isnt_geometric_has_no_base_but_frequencies() {
        let mut radians = geometric(10_000.0, 64.0);
        radians.iter_mut().skip(16).for_each(|r| *r /= 8.0);
        let table = table(&radians, 1.25, 2048, SourceDtype::F32);
        assert_eq!(table.theta().unwrap(), None);
        let found = table.frequencies().unwrap();
        assert_eq!(found.factor, 1.25);
        for (found, expected) in found.radians.iter().zip(&radians) {
            assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
        }
        assert!(table.deviation(&found).unwrap().is_none());
        let (position, ..) = table.deviation(&Frequencies { factor: 1.0, ..found }).unwrap().unwrap();
        assert_eq!(position, 0);
    }
}
