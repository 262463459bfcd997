//! Weights: lazily evaluated expressions over the tensors of a source.
//!
//! A model family says what a weight is made of (rows of a fused projection, the concatenation of three, a norm plus
//! one); the elements are computed when they are read, straight into the reader's buffer, without any copy of the
//! whole. Every expression can be read from any element on, so any number of threads can read parts of it.

use std::fmt::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::error::{Result, SourceError};
use super::file::hexadecimal;
use super::tensor::{Tensor, check_elements, check_rows, rows_and_columns};

/// A matrix, vector or higher tensor of f32, made of tensors of a source. Clones are cheap.
///
/// Operations work along the outermost dimension: the rows of a matrix, the elements of a vector, the experts of a
/// stack of matrices. *Rows* of [`read_rows`](Weight::read_rows) are runs of the last dimension.
#[derive(Clone)]
pub struct Weight {
    node: Arc<Node>,
    shape: Arc<[u64]>,
}

enum Node {
    Tensor(Tensor),
    Values {
        name: String,
        values: Vec<f32>,
    },
    Constant(f32),
    /// Elements from `first`, as many as the shape says.
    Slice {
        of: Weight,
        first: u64,
    },
    Concatenation(Vec<Weight>),
    /// `run` consecutive elements belong to each entry of the outermost dimension.
    Reordered {
        of: Weight,
        order: RowOrder,
        run: u64,
    },
    /// `columns` columns of each row, from `first`.
    Columns {
        of: Weight,
        first: u64,
        columns: u64,
    },
    Map {
        of: Weight,
        function: Function,
    },
}

#[derive(Clone, Copy, Debug)]
enum Function {
    Scale(f32),
    Add(f32),
    Exp,
}

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
    /// The inverse of [`RowOrder::InterleavedToHalves`].
    HalvesToInterleaved {
        /// Rows of a head.
        head_dim: u64,
        /// How many of them are rotated; even.
        rotary_dim: u64,
    },
    /// Entry `i` of the result is entry `rows[i]`; entries may be left out or repeated.
    Explicit(Arc<[u64]>),
}

impl RowOrder {
    /// Which entry stands at `row` of the result.
    fn origin(&self, row: u64) -> u64 {
        match self {
            &RowOrder::InterleavedToHalves { head_dim, rotary_dim } => {
                let (head, place) = (row / head_dim, row % head_dim);
                let half = rotary_dim / 2;
                if place < rotary_dim { head * head_dim + 2 * (place % half) + place / half } else { row }
            }
            &RowOrder::HalvesToInterleaved { head_dim, rotary_dim } => {
                let (head, place) = (row / head_dim, row % head_dim);
                let half = rotary_dim / 2;
                if place < rotary_dim { head * head_dim + place % 2 * half + place / 2 } else { row }
            }
            RowOrder::Explicit(rows) => rows[row as usize],
        }
    }

    /// Entries of the result for `rows` entries, or what is wrong.
    fn length(&self, rows: u64) -> Result<u64, String> {
        match self {
            &RowOrder::InterleavedToHalves { head_dim, rotary_dim }
            | &RowOrder::HalvesToInterleaved { head_dim, rotary_dim } => {
                if head_dim == 0 || !rows.is_multiple_of(head_dim) {
                    return Err(format!("{rows} rows aren't whole heads of {head_dim}"));
                }
                if rotary_dim % 2 != 0 || rotary_dim > head_dim {
                    return Err(format!("{rotary_dim} rotated dimensions aren't pairs within a head of {head_dim}"));
                }
                Ok(rows)
            }
            RowOrder::Explicit(origins) => match origins.iter().find(|&&row| row >= rows) {
                Some(row) => Err(format!("row {row} is asked for, but there are {rows}")),
                None => Ok(origins.len() as u64),
            },
        }
    }
}

impl From<Tensor> for Weight {
    fn from(tensor: Tensor) -> Self {
        let shape = tensor.shape().into();
        Weight { node: Arc::new(Node::Tensor(tensor)), shape }
    }
}

impl Weight {
    /// A weight of numbers at hand. `name` is for messages.
    ///
    /// # Errors
    /// When the shape doesn't have as many elements.
    pub fn from_values(name: &str, shape: &[u64], values: Vec<f32>) -> Result<Self> {
        if count(shape) != Some(values.len() as u64) {
            let problem = format!("{} values don't fill the shape {shape:?}", values.len());
            return Err(SourceError::Weight { weight: name.to_owned(), problem });
        }
        Ok(Weight { node: Arc::new(Node::Values { name: name.to_owned(), values }), shape: shape.into() })
    }

    /// A weight whose elements are all `value`.
    ///
    /// # Errors
    /// When the number of elements overflows.
    pub fn constant(shape: &[u64], value: f32) -> Result<Self> {
        if count(shape).is_none() {
            let problem = format!("the number of elements of {shape:?} overflows");
            return Err(SourceError::Weight { weight: "constant".into(), problem });
        }
        Ok(Weight { node: Arc::new(Node::Constant(value)), shape: shape.into() })
    }

    /// Weights one after another along the outermost dimension, such as query, key and value rows.
    ///
    /// # Errors
    /// When there are none, or their other dimensions differ.
    pub fn concatenate(parts: Vec<Weight>) -> Result<Self> {
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
        Ok(Weight { node: Arc::new(Node::Concatenation(parts)), shape })
    }

    /// Entries `range` of the outermost dimension, which stays, with the range's length: rows of a matrix, elements of
    /// a vector.
    ///
    /// # Errors
    /// When there are fewer.
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

    /// Entry `index` of the outermost dimension, which goes: one matrix of a stack.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn entry(&self, index: u64) -> Result<Self> {
        let entry = self.slice(index..index.saturating_add(1))?;
        let shape = entry.shape[1..].into();
        Ok(Weight { shape, ..entry })
    }

    fn sliced(&self, first: u64, shape: Arc<[u64]>) -> Self {
        if shape.iter().product::<u64>() == self.elements() {
            return Weight { node: self.node.clone(), shape };
        }
        // A slice of a slice is a slice.
        let (of, first) = match &*self.node {
            Node::Slice { of, first: before } => (of.clone(), before + first),
            _ => (self.clone(), first),
        };
        Weight { node: Arc::new(Node::Slice { of, first }), shape }
    }

    /// The entries of the outermost dimension in another order.
    ///
    /// # Errors
    /// When the order doesn't fit their number.
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
        Ok(Weight { node: Arc::new(Node::Reordered { of: self.clone(), order, run }), shape })
    }

    /// Columns `range` of every row: a part of the last dimension.
    ///
    /// # Errors
    /// When there are fewer.
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
        let (first, columns) = (range.start, range.end - range.start);
        Ok(Weight { node: Arc::new(Node::Columns { of: self.clone(), first, columns }), shape })
    }

    /// Every element times `factor`.
    pub fn scale(&self, factor: f32) -> Self {
        if factor == 1.0 { self.clone() } else { self.map(Function::Scale(factor)) }
    }

    /// Every element plus `addend`: norms that store their weight less one.
    pub fn add(&self, addend: f32) -> Self {
        if addend == 0.0 { self.clone() } else { self.map(Function::Add(addend)) }
    }

    /// e to the power of every element: decay rates that are stored as logarithms.
    pub fn exp(&self) -> Self {
        self.map(Function::Exp)
    }

    fn map(&self, function: Function) -> Self {
        Weight { node: Arc::new(Node::Map { of: self.clone(), function }), shape: self.shape.clone() }
    }

    /// The same elements, in row-major order, under another shape.
    ///
    /// # Errors
    /// When the shape has another number of elements.
    pub fn reshape(&self, shape: &[u64]) -> Result<Self> {
        if count(shape) != Some(self.elements()) {
            return Err(self.wrong(format!("shape {:?} can't become {shape:?}", self.shape)));
        }
        Ok(Weight { node: self.node.clone(), shape: shape.into() })
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

    /// The last dimension; 1 for a scalar.
    pub fn columns(&self) -> u64 {
        rows_and_columns(&self.shape).1
    }

    /// Computes rows `first_row ..` until `out` is full.
    ///
    /// # Errors
    /// When `out` isn't whole rows, or more than there are.
    pub fn read_rows(&self, first_row: u64, out: &mut [f32]) -> Result<()> {
        let inside = check_rows("", self.rows(), self.columns(), first_row, out.len() as u64);
        match inside {
            Ok(first) => self.read(first, out),
            // The key, which is costly, is only made for the message.
            Err(_) => check_rows(&self.key(), self.rows(), self.columns(), first_row, out.len() as u64).map(|_| ()),
        }
    }

    /// Computes elements `first ..`, in row-major order, until `out` is full.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn read(&self, first: u64, out: &mut [f32]) -> Result<()> {
        let length = out.len() as u64;
        if check_elements("", self.elements(), first, length).is_err() {
            return check_elements(&self.key(), self.elements(), first, length);
        }
        match &*self.node {
            Node::Tensor(tensor) => tensor.read(first, out)?,
            Node::Values { values, .. } => out.copy_from_slice(&values[first as usize..][..out.len()]),
            Node::Constant(value) => out.fill(*value),
            Node::Slice { of, first: before } => of.read(before + first, out)?,
            Node::Concatenation(_) | Node::Reordered { .. } | Node::Columns { .. } => {
                let mut rest = out;
                let mut at = first;
                while !rest.is_empty() {
                    let (of, from, length) = self.piece(at, rest.len() as u64);
                    let (piece, after) = rest.split_at_mut(length as usize);
                    of.read(from, piece)?;
                    at += length;
                    rest = after;
                }
            }
            Node::Map { of, function } => {
                of.read(first, out)?;
                match *function {
                    Function::Scale(factor) => out.iter_mut().for_each(|value| *value *= factor),
                    Function::Add(addend) => out.iter_mut().for_each(|value| *value += addend),
                    Function::Exp => out.iter_mut().for_each(|value| *value = value.exp()),
                }
            }
        }
        Ok(())
    }

    /// Where the elements from `at` are found: in which weight, from which of its elements, and how many of at most
    /// `length` follow each other there. At least one does: `at` is inside this weight.
    fn piece(&self, at: u64, length: u64) -> (&Weight, u64, u64) {
        match &*self.node {
            Node::Slice { of, first } => (of, first + at, length),
            Node::Concatenation(parts) => {
                let mut from = at;
                for part in parts {
                    if from < part.elements() {
                        return (part, from, length.min(part.elements() - from));
                    }
                    from -= part.elements();
                }
                unreachable!("element {at} is inside the concatenation")
            }
            Node::Reordered { of, order, run } => {
                (of, order.origin(at / run) * run + at % run, length.min(run - at % run))
            }
            Node::Columns { of, first, columns } => {
                (of, at / columns * of.columns() + first + at % columns, length.min(columns - at % columns))
            }
            Node::Map { of, .. } => (of, at, length),
            Node::Tensor(_) | Node::Values { .. } | Node::Constant(_) => (self, at, length),
        }
    }

    /// The tensors that it is made of, each once.
    pub fn tensors(&self) -> Vec<Tensor> {
        let mut tensors = Vec::new();
        self.visit(&mut |weight| {
            if let Node::Tensor(tensor) = &*weight.node
                && !tensors.iter().any(|other: &Tensor| other.name() == tensor.name())
            {
                tensors.push(tensor.clone());
            }
        });
        tensors
    }

    /// Names of the tensors that it is made of.
    pub fn names(&self) -> Vec<String> {
        self.tensors().iter().map(|tensor| tensor.name().to_owned()).collect()
    }

    /// Calls `visitor` for this weight and all that it is made of.
    fn visit(&self, visitor: &mut impl FnMut(&Weight)) {
        visitor(self);
        match &*self.node {
            Node::Tensor(_) | Node::Values { .. } | Node::Constant(_) => {}
            Node::Slice { of, .. } | Node::Reordered { of, .. } | Node::Columns { of, .. } | Node::Map { of, .. } => {
                of.visit(visitor);
            }
            Node::Concatenation(parts) => parts.iter().for_each(|part| part.visit(visitor)),
        }
    }

    /// What the elements are, in words: weights over the same source with equal keys have equal elements in row-major
    /// order. The shape is no part of it.
    pub fn key(&self) -> String {
        let mut key = String::new();
        self.write_key(&mut key);
        key
    }

    fn write_key(&self, key: &mut String) {
        // Writing to a string can't fail.
        let _ = match &*self.node {
            Node::Tensor(tensor) => write!(key, "{:?}", tensor.name()),
            Node::Values { values, .. } => {
                let mut hasher = Sha256::new();
                values.iter().for_each(|value| hasher.update(value.to_le_bytes()));
                write!(key, "values({})", hexadecimal(&hasher.finalize()))
            }
            Node::Constant(value) => write!(key, "{:?}*{}", value, self.elements()),
            Node::Slice { of, first } => {
                of.write_key(key);
                write!(key, "[{first}..{}]", first + self.elements())
            }
            Node::Concatenation(parts) => {
                key.push('(');
                for (index, part) in parts.iter().enumerate() {
                    key.push_str(if index > 0 { "; " } else { "" });
                    part.write_key(key);
                }
                write!(key, ")")
            }
            Node::Reordered { of, order, run } => {
                of.write_key(key);
                match order {
                    RowOrder::InterleavedToHalves { head_dim, rotary_dim } => {
                        write!(key, ".halves({head_dim}, {rotary_dim}; {run})")
                    }
                    RowOrder::HalvesToInterleaved { head_dim, rotary_dim } => {
                        write!(key, ".interleaved({head_dim}, {rotary_dim}; {run})")
                    }
                    RowOrder::Explicit(rows) => {
                        let mut hasher = Sha256::new();
                        rows.iter().for_each(|row| hasher.update(row.to_le_bytes()));
                        write!(key, ".rows({}; {run})", hexadecimal(&hasher.finalize()))
                    }
                }
            }
            Node::Columns { of, first, columns } => {
                of.write_key(key);
                write!(key, ".columns({first}..{} of {})", first + columns, of.columns())
            }
            Node::Map { of, function } => {
                of.write_key(key);
                match function {
                    Function::Scale(factor) => write!(key, "*{factor:?}"),
                    Function::Add(addend) => write!(key, "+{addend:?}"),
                    Function::Exp => write!(key, ".exp"),
                }
            }
        };
    }

    /// Gives back the memory that reading elements `range` took (see [`Tensor::release`]).
    pub fn release(&self, range: Range<u64>) {
        match &*self.node {
            Node::Tensor(tensor) => tensor.release(range),
            Node::Values { .. } | Node::Constant(_) => {}
            Node::Slice { of, first } => of.release(first + range.start..first + range.end),
            Node::Concatenation(parts) => {
                let mut start = 0;
                for part in parts {
                    let end = start + part.elements();
                    let (from, to) = (range.start.max(start), range.end.min(end));
                    if from < to {
                        part.release(from - start..to - start);
                    }
                    start = end;
                }
            }
            // What is read lies here and there.
            Node::Reordered { of, .. } | Node::Columns { of, .. } => of.release(0..of.elements()),
            Node::Map { of, .. } => of.release(range),
        }
    }

    /// Checks numbers that were read from `first_row` on.
    ///
    /// # Errors
    /// When one isn't finite: an error that names the tensor, row and column that it came from.
    pub fn check_finite(&self, first_row: u64, values: &[f32]) -> Result<()> {
        let Some(index) = first_non_finite(values) else { return Ok(()) };
        let (mut weight, mut element) = (self, first_row * self.columns() + index as u64);
        let (name, columns) = loop {
            match &*weight.node {
                // A weight can have another shape than its tensor.
                Node::Tensor(tensor) => break (tensor.name().to_owned(), tensor.columns()),
                Node::Values { name, .. } => break (name.clone(), weight.columns()),
                Node::Constant(_) => break (weight.key(), weight.columns()),
                _ => (weight, element, _) = weight.piece(element, 1),
            }
        };
        let (row, column) = (element / columns, element % columns);
        Err(SourceError::NotFinite { tensor: name, row, column, value: values[index] })
    }

    fn wrong(&self, problem: String) -> SourceError {
        SourceError::Weight { weight: self.key(), problem }
    }
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weight({} {:?})", self.key(), self.shape)
    }
}

/// The number of elements of a shape, unless it overflows, or that of a part of it does.
fn count(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |product, &dimension| product.checked_mul(dimension.max(1)))?;
    Some(shape.iter().product())
}

/// Index of the first infinity or NaN.
pub fn first_non_finite(values: &[f32]) -> Option<usize> {
    // Whole chunks without early exit, which the compiler vectorizes.
    const CHUNK: usize = 256;
    let bad = |value: &f32| value.to_bits() & 0x7F80_0000 == 0x7F80_0000;
    let chunk = values.chunks(CHUNK).position(|chunk| chunk.iter().fold(false, |any, value| any | bad(value)))?;
    values[chunk * CHUNK..].iter().position(bad).map(|index| chunk * CHUNK + index)
}

#[cfg(test)]
mod tests;
