//! Maxima and squares of the rows and columns of a weight, in one pass over it.

use anec_kernels::{reduce, vectorized_fn};

use super::{Node, SourceWeight};
use crate::error::Result;

/// Approximate number of elements read at a time.
const ELEMENTS: u64 = 1 << 16;

/// Maxima and squares of a matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightExtent {
    /// Largest magnitude of each row.
    pub row_max: Vec<f64>,
    /// Sum of the squares of each row.
    pub row_squares: Vec<f64>,
    /// Largest magnitude of each column.
    pub column_max: Vec<f64>,
    /// Sum of the squares of each column.
    pub column_squares: Vec<f64>,
}

impl WeightExtent {
    /// Reads a weight block by block on this thread.
    ///
    /// # Errors
    /// Returns an error if the weight can't be read.
    pub fn of(weight: &SourceWeight) -> Result<WeightExtent> {
        let (rows, columns) = (weight.rows() as usize, weight.columns() as usize);
        let mut extent = WeightExtent {
            row_max: Vec::with_capacity(rows),
            row_squares: Vec::with_capacity(rows),
            column_max: vec![0.0; columns],
            column_squares: vec![0.0; columns],
        };
        // f32 within a block, f64 across blocks
        let mut maxima = vec![0f32; columns];
        let (mut values, mut squares) = (Vec::new(), vec![0f32; columns]);
        let at_a_time = (ELEMENTS / columns.max(1) as u64).max(1);
        for first in (0..rows as u64).step_by(at_a_time as usize) {
            let count = at_a_time.min(rows as u64 - first);
            values.resize(count as usize * columns, 0f32);
            weight.read_rows(first, &mut values)?;
            squares.fill(0.0);
            for row in values.chunks_exact(columns) {
                let (largest, sum) = add_row(row, &mut maxima, &mut squares);
                extent.row_max.push(f64::from(largest));
                extent.row_squares.push(sum);
            }
            extent.column_squares.iter_mut().zip(&squares).for_each(|(sum, part)| *sum += f64::from(*part));
        }
        extent.column_max.iter_mut().zip(&maxima).for_each(|(to, from)| *to = f64::from(*from));
        weight.release(0..weight.elements());
        Ok(extent)
    }

    /// Returns the sum of the squares of each row. A rotation of the rows, which keeps it, isn't computed.
    ///
    /// # Errors
    /// Returns an error if the weight can't be read.
    pub fn row_squares(weight: &SourceWeight) -> Result<Vec<f64>> {
        let plain = match &*weight.node {
            Node::Times { of, matrix } if matrix.is_orthogonal() => of,
            _ => weight,
        };
        Ok(Self::of(plain)?.row_squares)
    }
}

vectorized_fn! {
    /// Adds a row to the maxima and squares of its columns; returns its own.
    fn add_row<'a>(row: &'a [f32], maxima: &'a mut [f32], squares: &'a mut [f32]) -> (f32, f64) = add_row_generic
}

#[inline(always)]
fn add_row_generic(row: &[f32], maxima: &mut [f32], squares: &mut [f32]) -> (f32, f64) {
    for ((value, maximum), square) in row.iter().zip(maxima).zip(squares) {
        *maximum = maximum.max(value.abs());
        *square += value * value;
    }
    let sum = row.chunks(256).map(|part| f64::from(reduce::sum_of_squares(part))).sum();
    (reduce::max_of(row, f32::abs).max(0.0), sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_of_rotated_rows_are_those_of_plain_ones() {
        let tensor = crate::tensor::SourceTensor::random("t", &[30, 48], 1, 0.0, 1.0).unwrap();
        let plain = SourceWeight::from(tensor);
        let matrix: std::sync::Arc<dyn crate::SquareMatrix> =
            std::sync::Arc::new(crate::orthogonal::HadamardRotation::new(48, 1).unwrap());
        let rotated = plain.times(&matrix).unwrap();
        let [found, computed] =
            [WeightExtent::row_squares(&rotated), WeightExtent::of(&rotated).map(|e| e.row_squares)];
        let (found, computed) = (found.unwrap(), computed.unwrap());
        assert_eq!(found, WeightExtent::of(&plain).unwrap().row_squares);
        assert!(found.iter().zip(&computed).all(|(found, computed)| (found / computed - 1.0).abs() < 1e-5));
    }

    #[test]
    fn rows_and_columns_are_looked_through_in_one_pass() {
        let weight = SourceWeight::from_values("w", &[2, 3], vec![1.0, -4.0, 0.5, 2.0, 3.0, 0.0]).unwrap();
        let extent = WeightExtent::of(&weight).unwrap();
        assert_eq!((extent.row_max, extent.row_squares), (vec![4.0, 3.0], vec![17.25, 13.0]));
        assert_eq!((extent.column_max, extent.column_squares), (vec![2.0, 4.0, 0.5], vec![5.0, 25.0, 0.25]));
        // more rows than one block
        let tensor = crate::tensor::SourceTensor::random("t", &[300, 500], 1, 0.0, 1.0).unwrap();
        let extent = WeightExtent::of(&SourceWeight::from(tensor)).unwrap();
        assert_eq!((extent.row_max.len(), extent.column_max.len()), (300, 500));
        let [rows, columns] = [&extent.row_squares, &extent.column_squares].map(|squares| squares.iter().sum::<f64>());
        assert!((rows / columns - 1.0).abs() < 1e-5 && (rows / 150_000.0 - 1.0).abs() < 0.02, "{rows} {columns}");
    }
}
