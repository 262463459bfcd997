//! Weights: lazily evaluated expressions over the tensors of a source.
//!
//! A model family composes a weight from tensors (rows of a fused projection, a concatenation of three, a norm plus
//! one). Elements are computed when they are read, straight into the reader's buffer. Every expression can be read from
//! any element on, so that any number of threads can read parts of it.
//!
//! | module | contents |
//! |---|---|
//! | `order` | row orders |
//! | `read` | element access and error locations |
//! | `key` | textual identity of an expression |
//! | `integers` | integers that the source stores, for number formats that can hold them |
//! | `extent` | maxima and squares of rows and columns |
//! | `lazy` | vectors and rows computed from other weights, products with a square matrix, low-rank updates |

mod extent;
mod integers;
mod key;
mod lazy;
mod order;
mod read;

use std::ops::Range;
use std::sync::Arc;

use super::error::{Result, SourceError};
use super::tensor::{SourceTensor, rows_and_columns};
pub use extent::WeightExtent;
pub use integers::StoredIntegers;
pub(crate) use integers::{Formula, Integers, Rounding};
pub use lazy::SquareMatrix;
pub use order::RowOrder;

/// Matrix, vector or higher tensor of f32, composed of tensors of a source. Clones are cheap.
///
/// Operations work along the outermost dimension: the rows of a matrix, the elements of a vector, the experts of a
/// stack of matrices. *Rows* of [`read_rows`](SourceWeight::read_rows) are runs of the last dimension.
#[derive(Clone)]
pub struct SourceWeight {
    node: Arc<Node>,
    shape: Arc<[u64]>,
}

enum Node {
    Tensor(SourceTensor),
    Values {
        name: String,
        values: Vec<f32>,
    },
    /// Elements from `first` on.
    Slice {
        of: SourceWeight,
        first: u64,
    },
    Concatenation(Vec<SourceWeight>),
    /// Entries of the outermost dimension, of `run` elements each, in another order.
    Reordered {
        of: SourceWeight,
        order: RowOrder,
        run: u64,
    },
    /// Columns of each row from `first` on.
    Columns {
        of: SourceWeight,
        first: u64,
        columns: u64,
    },
    /// Last two dimensions of `of` swapped.
    Transposed(SourceWeight),
    Map {
        of: SourceWeight,
        function: Function,
    },
    /// Every row combined with a vector of its length.
    ByColumn {
        of: SourceWeight,
        operation: Operation,
        vector: SourceWeight,
    },
    /// Every row, of `columns` elements, times its element of a vector.
    ByRow {
        of: SourceWeight,
        columns: u64,
        vector: SourceWeight,
    },
    Computed(lazy::Computed),
    ComputedRows(lazy::ComputedRows),
    /// `of Q`
    Times {
        of: SourceWeight,
        matrix: Arc<dyn SquareMatrix>,
    },
    /// `Q^T of`
    TransposedTimes(lazy::Product),
    /// `of + scale up down`
    LowRankSum(lazy::LowRankSum),
    /// `(codes - zero points) * scales`, with a scale and a zero point per block of rows and columns.
    Blocks {
        codes: SourceWeight,
        scales: SourceWeight,
        zero_points: ZeroPoints,
        block: [u64; 2],
    },
}

/// Codes that represent zero.
#[derive(Clone, Debug)]
pub enum ZeroPoints {
    /// Same code in all blocks.
    All(f32),
    /// One code per block, in the order of the scales.
    Each(SourceWeight),
}

#[derive(Clone, Copy, Debug)]
enum Function {
    Scale(f32),
    Add(f32),
    Exp,
    Reciprocal,
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Add,
    Multiply,
}

impl From<SourceTensor> for SourceWeight {
    fn from(tensor: SourceTensor) -> Self {
        let shape = tensor.shape().into();
        SourceWeight { node: Arc::new(Node::Tensor(tensor)), shape }
    }
}

impl SourceWeight {
    /// Returns a weight of the given values. `name` is for messages.
    ///
    /// # Errors
    /// Returns an error if the shape has another number of elements.
    pub fn from_values(name: &str, shape: &[u64], values: Vec<f32>) -> Result<Self> {
        if count(shape) != Some(values.len() as u64) {
            let problem = format!("{} values don't fill the shape {shape:?}", values.len());
            return Err(SourceError::Weight { weight: name.to_owned(), problem });
        }
        Ok(SourceWeight { node: Arc::new(Node::Values { name: name.to_owned(), values }), shape: shape.into() })
    }

    /// Concatenates weights along the outermost dimension, such as query, key and value rows.
    ///
    /// # Errors
    /// Returns an error if there are none, or their other dimensions differ.
    pub fn concatenate(parts: Vec<SourceWeight>) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(SourceError::Weight { weight: "concatenation".into(), problem: "it has no parts".into() });
        };
        if parts.len() == 1 {
            return Ok(first.clone());
        }
        let Some((_, inner)) = first.shape.split_first() else {
            return Err(first.wrong("a scalar can't be concatenated".into()));
        };
        let mut rows = 0u64;
        for part in &parts {
            match part.shape.split_first() {
                Some((&part_rows, part_inner)) if part_inner == inner => rows = rows.saturating_add(part_rows),
                _ => return Err(part.wrong(format!("shape {:?} can't follow {:?}", part.shape, first.shape))),
            }
        }
        let shape: Arc<[u64]> = [&[rows], inner].concat().into();
        if count(&shape).is_none() {
            return Err(first.wrong(format!("the number of elements of {shape:?} overflows")));
        }
        Ok(SourceWeight { node: Arc::new(Node::Concatenation(parts)), shape })
    }

    /// Returns entries `range` of the outermost dimension: rows of a matrix, elements of a vector.
    ///
    /// # Errors
    /// Returns an error if there are fewer.
    pub fn slice(&self, range: Range<u64>) -> Result<Self> {
        let Some((&rows, inner)) = self.shape.split_first() else {
            return Err(self.wrong("a scalar has no entries".into()));
        };
        if range.start > range.end || range.end > rows {
            return Err(self.wrong(format!("entries {range:?} are asked for, but there are {rows}")));
        }
        let shape: Arc<[u64]> = [&[range.end - range.start], inner].concat().into();
        let run: u64 = inner.iter().product();
        Ok(self.sliced(range.start * run, shape))
    }

    fn sliced(&self, first: u64, shape: Arc<[u64]>) -> Self {
        if shape.iter().product::<u64>() == self.elements() {
            return SourceWeight { node: self.node.clone(), shape };
        }
        // A slice of a slice is a slice.
        let (of, first) = match &*self.node {
            Node::Slice { of, first: before } => (of.clone(), before + first),
            _ => (self.clone(), first),
        };
        SourceWeight { node: Arc::new(Node::Slice { of, first }), shape }
    }

    /// Returns the entries of the outermost dimension in another order.
    ///
    /// # Errors
    /// Returns an error if the order doesn't fit their number.
    pub fn reorder(&self, order: RowOrder) -> Result<Self> {
        let Some((&rows, inner)) = self.shape.split_first() else {
            return Err(self.wrong("a scalar has no entries".into()));
        };
        let rows = order.length(rows).map_err(|problem| self.wrong(problem))?;
        let shape: Arc<[u64]> = [&[rows], inner].concat().into();
        if count(&shape).is_none() {
            return Err(self.wrong(format!("the number of elements of {shape:?} overflows")));
        }
        let run = inner.iter().product();
        Ok(SourceWeight { node: Arc::new(Node::Reordered { of: self.clone(), order, run }), shape })
    }

    /// Returns columns `range` of every row: a part of the last dimension.
    ///
    /// # Errors
    /// Returns an error if there are fewer.
    pub fn columns_range(&self, range: Range<u64>) -> Result<Self> {
        let Some((&columns, outer)) = self.shape.split_last() else {
            return Err(self.wrong("a scalar has no columns".into()));
        };
        if range.start > range.end || range.end > columns {
            return Err(self.wrong(format!("columns {range:?} are asked for, but there are {columns}")));
        }
        let shape: Arc<[u64]> = [outer, &[range.end - range.start]].concat().into();
        if outer.iter().product::<u64>() <= 1 || range == (0..columns) {
            return Ok(self.sliced(range.start, shape));
        }
        // slice columns before other operations, so that no more is held than needed
        match &*self.node {
            Node::TransposedTimes(product) if product.of.shape == self.shape => {
                return product.of.columns_range(range)?.transposed_times(&product.matrix);
            }
            Node::ByColumn { of, operation, vector } if of.shape == self.shape => {
                let vector = vector.reshape(&[vector.elements()])?.slice(range.clone())?;
                return of.columns_range(range)?.by_column(*operation, &vector);
            }
            _ => {}
        }
        let (first, columns) = (range.start, range.end - range.start);
        Ok(SourceWeight { node: Arc::new(Node::Columns { of: self.clone(), first, columns }), shape })
    }

    /// Swaps the last two dimensions: transposes a matrix, or each matrix of a stack.
    ///
    /// # Errors
    /// Returns an error if there are fewer than two dimensions.
    pub fn transpose(&self) -> Result<Self> {
        let [outer @ .., rows, columns] = &*self.shape else {
            return Err(self.wrong("only a matrix can be transposed".into()));
        };
        let shape = [outer, &[*columns, *rows]].concat().into();
        Ok(SourceWeight { node: Arc::new(Node::Transposed(self.clone())), shape })
    }

    /// Multiplies every element by `factor`.
    pub fn scale(&self, factor: f32) -> Self {
        if factor == 1.0 { self.clone() } else { self.map(Function::Scale(factor)) }
    }

    /// Adds `addend` to every element, for norms that store their weight minus one.
    pub fn add(&self, addend: f32) -> Self {
        if addend == 0.0 { self.clone() } else { self.map(Function::Add(addend)) }
    }

    /// Returns e to the power of every element, for decay rates stored as logarithms.
    pub fn exp(&self) -> Self {
        self.map(Function::Exp)
    }

    /// Returns the reciprocal of every element, which undoes a scale.
    pub fn reciprocal(&self) -> Self {
        self.map(Function::Reciprocal)
    }

    /// Multiplies every row by its element of `vector`.
    ///
    /// # Errors
    /// Returns an error if the vector has another number of elements than there are rows.
    pub fn scale_rows(&self, vector: &SourceWeight) -> Result<Self> {
        if vector.elements() != self.rows() {
            let (found, rows) = (vector.elements(), self.rows());
            return Err(vector.wrong(format!("it has {found} elements for {rows} rows")));
        }
        let node = Node::ByRow { of: self.clone(), columns: self.columns(), vector: vector.clone() };
        Ok(SourceWeight { node: Arc::new(node), shape: self.shape.clone() })
    }

    /// Adds `vector` to every row, for embeddings with a learned bias.
    ///
    /// # Errors
    /// Returns an error if the vector isn't as long as a row.
    pub fn add_to_rows(&self, vector: &SourceWeight) -> Result<Self> {
        self.by_column(Operation::Add, vector)
    }

    /// Multiplies every row by `vector`, element by element, for embeddings with a learned scale.
    ///
    /// # Errors
    /// Returns an error if the vector isn't as long as a row.
    pub fn multiply_rows(&self, vector: &SourceWeight) -> Result<Self> {
        self.by_column(Operation::Multiply, vector)
    }

    fn by_column(&self, operation: Operation, vector: &SourceWeight) -> Result<Self> {
        if vector.elements() != self.columns() {
            let (found, columns) = (vector.elements(), self.columns());
            return Err(vector.wrong(format!("it has {found} elements for {columns} columns")));
        }
        let node = Node::ByColumn { of: self.clone(), operation, vector: vector.clone() };
        Ok(SourceWeight { node: Arc::new(node), shape: self.shape.clone() })
    }

    /// Returns the values of quantized codes: `(code - zero point) * scale`. Each block of `block` rows and columns has
    /// a scale; blocks at the ends may be smaller.
    ///
    /// # Errors
    /// Returns an error if the number of scales or zero points differs from the number of blocks.
    pub fn from_blocks(
        codes: SourceWeight,
        scales: SourceWeight,
        zero_points: ZeroPoints,
        block: [u64; 2],
    ) -> Result<Self> {
        let &[rows, columns] = codes.shape() else {
            return Err(codes.wrong("only a matrix can be in blocks".into()));
        };
        if block.contains(&0) {
            return Err(codes.wrong(format!("blocks of {block:?} rows and columns are none")));
        }
        // blocks larger than the matrix are clamped to its size
        let block = [block[0].min(rows.max(1)), block[1].min(columns.max(1))];
        let expected = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        let each = match &zero_points {
            ZeroPoints::All(_) => None,
            ZeroPoints::Each(each) => Some(each),
        };
        for (what, of) in [("scales", Some(&scales)), ("zero points", each)] {
            if let Some(of) = of.filter(|of| of.shape() != expected) {
                let problem =
                    format!("{:?} are the {what} of {expected:?} blocks, of {rows} x {columns} codes", of.shape());
                return Err(of.wrong(problem));
            }
        }
        let shape = codes.shape.clone();
        Ok(SourceWeight { node: Arc::new(Node::Blocks { codes, scales, zero_points, block }), shape })
    }

    fn map(&self, function: Function) -> Self {
        SourceWeight { node: Arc::new(Node::Map { of: self.clone(), function }), shape: self.shape.clone() }
    }

    /// Returns the elements, in row-major order, under another shape.
    ///
    /// # Errors
    /// Returns an error if the shape has another number of elements.
    pub fn reshape(&self, shape: &[u64]) -> Result<Self> {
        if count(shape) != Some(self.elements()) {
            return Err(self.wrong(format!("shape {:?} can't become {shape:?}", self.shape)));
        }
        Ok(SourceWeight { node: self.node.clone(), shape: shape.into() })
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Product of the dimensions.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Product of all dimensions but the last.
    pub fn rows(&self) -> u64 {
        rows_and_columns(&self.shape).0
    }

    /// Returns the last dimension; 1 for a scalar.
    pub fn columns(&self) -> u64 {
        rows_and_columns(&self.shape).1
    }

    fn wrong(&self, problem: String) -> SourceError {
        SourceError::Weight { weight: self.key(), problem }
    }
}

/// Returns the number of elements of a shape; `None` if it, or that of leading dimensions, overflows.
fn count(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |product, &dimension| product.checked_mul(dimension.max(1)))?;
    Some(shape.iter().product())
}

#[cfg(test)]
mod tests;
