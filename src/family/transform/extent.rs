//! Maxima and squares of the rows and columns of a weight, in one pass over it.

use anec_source::error::Result;
use anec_source::SourceWeight;

/// Elements that are read at a time, about.
const ELEMENTS: u64 = 1 << 16;

/// How far a matrix reaches.
pub(super) struct Extent {
    /// Largest magnitude of each row.
    pub(super) row_max: Vec<f64>,
    /// Sum of the squares of each row.
    pub(super) row_squares: Vec<f64>,
    /// Largest magnitude of each column.
    pub(super) column_max: Vec<f64>,
    /// Sum of the squares of each column.
    pub(super) column_squares: Vec<f64>,
}

impl Extent {
    pub(super) fn of(weight: &SourceWeight) -> Result<Extent> {
        let (rows, columns) = (weight.rows() as usize, weight.columns() as usize);
        let mut extent = Extent {
            row_max: Vec::with_capacity(rows),
            row_squares: Vec::with_capacity(rows),
            column_max: vec![0.0; columns],
            column_squares: vec![0.0; columns],
        };
        // in f32 over the few rows of a block, in f64 over blocks
        let mut maxima = vec![0f32; columns];
        let (mut values, mut squares) = (Vec::new(), vec![0f32; columns]);
        let at_a_time = (ELEMENTS / columns.max(1) as u64).max(1);
        for first in (0..rows as u64).step_by(at_a_time as usize) {
            let count = at_a_time.min(rows as u64 - first);
            values.resize(count as usize * columns, 0f32);
            weight.read_rows(first, &mut values)?;
            squares.fill(0.0);
            for row in values.chunks_exact(columns) {
                let (mut largest, mut sum) = (0f32, 0f64);
                for ((value, maximum), square) in row.iter().zip(&mut maxima).zip(&mut squares) {
                    *maximum = maximum.max(value.abs());
                    *square += value * value;
                }
                for part in row.chunks(256) {
                    largest = part.iter().fold(largest, |largest, value| largest.max(value.abs()));
                    sum += f64::from(part.iter().map(|value| value * value).sum::<f32>());
                }
                extent.row_max.push(f64::from(largest));
                extent.row_squares.push(sum);
            }
            extent.column_squares.iter_mut().zip(&squares).for_each(|(sum, part)| *sum += f64::from(*part));
        }
        extent.column_max.iter_mut().zip(&maxima).for_each(|(to, from)| *to = f64::from(*from));
        weight.release(0..weight.elements());
        Ok(extent)
    }
}

/// The elements of a vector, in f64; zeros where there is none.
pub(super) fn vector(weight: Option<&SourceWeight>, length: usize) -> Result<Vec<f64>> {
    let Some(weight) = weight else { return Ok(vec![0.0; length]) };
    let mut values = vec![0f32; weight.elements() as usize];
    weight.read(0, &mut values)?;
    Ok(values.into_iter().map(f64::from).collect())
}
