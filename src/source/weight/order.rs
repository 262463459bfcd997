//! New orders of rows.

use std::sync::Arc;

/// A new order of the entries of the outermost dimension.
#[derive(Clone, Debug)]
pub enum RowOrder {
    /// Query or key rows as llama.cpp stores them, in which rotary pairs are neighbours, to rows as transformers has
    /// them, in which a pair's members are half of the rotated dimensions apart. Dimensions of a head beyond
    /// `rotary_dim` stay.
    InterleavedToHalves {
        /// Rows of a head.
        head_dim: u64,
        /// How many of them are rotated; even.
        rotary_dim: u64,
    },
    /// Entries as a matrix of so many rows and columns, on its side: the first of each row, then the second of each.
    Transposed([u64; 2]),
    /// Entry `i` of the result is entry `rows[i]`; entries may be left out or repeated.
    Explicit(Arc<[u64]>),
}

impl RowOrder {
    /// Which entry stands at `row` of the result.
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

    /// Entries of the result for `rows` entries, or what is wrong.
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
