//! Row orders.

use std::sync::Arc;

/// Order of the entries of the outermost dimension.
#[derive(Clone, Debug)]
pub enum RowOrder {
    /// Order from llama.cpp's query and key rows, where rotary pairs are neighbours, to transformers', where the
    /// members of a pair are half of the rotated dimensions apart. Dimensions of a head beyond `rotary_dim` stay.
    InterleavedToHalves {
        /// Number of rows in a head.
        head_dim: u64,
        /// Number of rotated rows; even.
        rotary_dim: u64,
    },
    /// Transposed order of a matrix of the given rows and columns.
    Transposed([u64; 2]),
    /// Entry `i` of the result is entry `rows[i]`; entries may be omitted or repeated.
    Explicit(Arc<[u64]>),
}

impl RowOrder {
    /// Returns the entry at `row` of the result.
    pub(super) fn origin(&self, row: u64) -> u64 {
        match self {
            &RowOrder::InterleavedToHalves { head_dim, rotary_dim } => {
                let (head, place) = (row / head_dim, row % head_dim);
                let half = rotary_dim / 2;
                if place < rotary_dim { head * head_dim + 2 * (place % half) + place / half } else { row }
            }
            &RowOrder::Transposed([rows, columns]) => row % rows * columns + row / rows,
            RowOrder::Explicit(rows) => rows[row as usize],
        }
    }

    /// Returns the number of entries of the result for `rows` entries, or the problem.
    pub(super) fn length(&self, rows: u64) -> Result<u64, String> {
        match self {
            &RowOrder::InterleavedToHalves { head_dim, rotary_dim } => {
                if head_dim == 0 || !rows.is_multiple_of(head_dim) {
                    return Err(format!("{rows} rows aren't whole heads of {head_dim}"));
                }
                if rotary_dim % 2 != 0 || rotary_dim > head_dim {
                    return Err(format!("{rotary_dim} rotated dimensions aren't pairs within a head of {head_dim}"));
                }
                Ok(rows)
            }
            &RowOrder::Transposed([height, width]) => match height.checked_mul(width) {
                Some(count) if count == rows => Ok(rows),
                _ => Err(format!("{rows} rows aren't a matrix of {height} x {width}")),
            },
            RowOrder::Explicit(origins) => match origins.iter().find(|&&row| row >= rows) {
                Some(row) => Err(format!("row {row} is asked for, but there are {rows}")),
                None => Ok(origins.len() as u64),
            },
        }
    }
}
