//! Expressions that aren't computed element by element: vectors derived from other weights, and products with a square
//! matrix.
//!
//! Such values are computed under a lock by one thread, without the thread pool, because a thread of the pool that
//! waits inside a lock could be waiting for work of its own.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::{Integers, SourceWeight};
use crate::error::{Result, SourceError};

/// Square matrix `Q` that multiplies weights in place.
pub trait SquareMatrix: Send + Sync {
    /// Number of rows and of columns.
    fn size(&self) -> u64;

    /// Returns the identity of the matrix: matrices with equal names are equal.
    fn name(&self) -> String;

    /// Whether `Q Q^T = 1`, so that rows keep their norm.
    fn is_orthogonal(&self) -> bool {
        false
    }

    /// Computes `rows <- rows Q` for consecutive rows of [`size`](SquareMatrix::size) elements.
    ///
    /// # Errors
    /// Returns an error if the matrix can't be computed.
    fn multiply_rows(&self, rows: &mut [f32]) -> Result<()>;

    /// Computes `matrix <- Q^T matrix` for a matrix of [`size`](SquareMatrix::size) rows and `columns` columns.
    ///
    /// # Errors
    /// Returns an error if the matrix can't be computed.
    fn multiply_columns(&self, matrix: &mut [f32], columns: usize) -> Result<()>;
}

/// Function that computes a vector.
type Compute = Box<dyn Fn() -> Result<Vec<f32>> + Send + Sync>;

/// Vector that is computed at the first read and kept.
pub(super) struct Computed {
    pub(super) name: String,
    compute: Compute,
    values: OnceLock<Vec<f32>>,
    busy: Mutex<()>,
}

impl Computed {
    fn values(&self, length: u64) -> Result<&[f32]> {
        if let Some(values) = self.values.get() {
            return Ok(values);
        }
        let _busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(values) = self.values.get() {
            return Ok(values);
        }
        let values = (self.compute)()?;
        if values.len() as u64 != length {
            let problem = format!("{} values were computed, expected {length}", values.len());
            return Err(SourceError::Weight { weight: self.name.clone(), problem });
        }
        Ok(self.values.get_or_init(|| values))
    }

    /// Reads elements from `first` on, of `length`.
    pub(super) fn read(&self, length: u64, first: u64, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.values(length)?[first as usize..][..out.len()]);
        Ok(())
    }
}

/// Function that computes rows from the first on until the buffer, of whole rows, is full.
type ComputeRows = Box<dyn Fn(u64, &mut [f32]) -> Result<()> + Send + Sync>;

/// Matrix whose rows are computed when they are read.
pub(super) struct ComputedRows {
    pub(super) name: String,
    rows: u64,
    pub(super) columns: u64,
    /// Operands of which a row needs the same row.
    pub(super) by_row: Vec<SourceWeight>,
    /// Operands of which a row needs all elements.
    pub(super) whole: Vec<SourceWeight>,
    compute: ComputeRows,
    /// Integers that the rows are decoded from.
    pub(super) integers: Option<Arc<Integers>>,
}

impl ComputedRows {
    /// Returns all operands.
    pub(super) fn of(&self) -> impl Iterator<Item = &SourceWeight> {
        self.by_row.iter().chain(&self.whole)
    }

    /// Reads elements from `first` on; partially read rows are computed whole.
    pub(super) fn read(&self, first: u64, out: &mut [f32]) -> Result<()> {
        let end = first + out.len() as u64;
        let (start, stop) = (first - first % self.columns, end.next_multiple_of(self.columns));
        if (start, stop) == (first, end) {
            return (self.compute)(first / self.columns, out);
        }
        let mut rows = vec![0.0; (stop - start) as usize];
        (self.compute)(start / self.columns, &mut rows)?;
        out.copy_from_slice(&rows[(first - start) as usize..][..out.len()]);
        Ok(())
    }

    pub(super) fn release(&self, range: Range<u64>) {
        let rows = range.start / self.columns..range.end.div_ceil(self.columns);
        for of in &self.by_row {
            of.release(rows.start * of.columns()..(rows.end * of.columns()).min(of.elements()));
        }
        // without operands by row, the last row is the last that needs the others
        if self.by_row.is_empty() && rows.end >= self.rows {
            self.whole.iter().for_each(|of| of.release(0..of.elements()));
        }
    }
}

/// Values of a whole weight, held from the first read until all elements are released.
#[derive(Default)]
struct Held(Mutex<HeldValues>);

#[derive(Default)]
struct HeldValues {
    values: Option<Arc<Vec<f32>>>,
    /// Number of elements released since the values were computed.
    released: u64,
}

impl Held {
    /// Returns the values of a weight, transformed by `prepare` and held.
    fn values(&self, of: &SourceWeight, prepare: impl FnOnce(&mut [f32]) -> Result<()>) -> Result<Arc<Vec<f32>>> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(values) = &held.values {
            return Ok(values.clone());
        }
        let mut values = vec![0.0; of.elements() as usize];
        of.read(0, &mut values)?;
        of.release(0..of.elements());
        prepare(&mut values)?;
        held.released = 0;
        Ok(held.values.insert(Arc::new(values)).clone())
    }

    /// Frees the values when as many elements were released as the product has, in any order: threads finish out of
    /// order, and a value freed too early is computed again.
    fn release(&self, range: &Range<u64>, elements: u64) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.released += range.end.saturating_sub(range.start);
        if held.released >= elements {
            held.values = None;
        }
    }
}

/// `Q^T W`, which is held whole because each element depends on a column.
pub(super) struct Product {
    pub(super) of: SourceWeight,
    pub(super) matrix: Arc<dyn SquareMatrix>,
    held: Held,
}

impl Product {
    pub(super) fn read(&self, first: u64, out: &mut [f32]) -> Result<()> {
        let columns = self.of.columns() as usize;
        let values = self.held.values(&self.of, |values| self.matrix.multiply_columns(values, columns))?;
        out.copy_from_slice(&values[first as usize..][..out.len()]);
        Ok(())
    }

    pub(super) fn release(&self, range: Range<u64>) {
        self.held.release(&range, self.of.elements());
    }
}

/// `W + s B A` with narrow B `[rows, rank]` and A `[rank, columns]`, where A is held.
pub(super) struct LowRankSum {
    pub(super) of: SourceWeight,
    pub(super) up: SourceWeight,
    pub(super) down: SourceWeight,
    pub(super) scale: f32,
    held: Held,
}

impl LowRankSum {
    pub(super) fn read(&self, first: u64, out: &mut [f32]) -> Result<()> {
        self.of.read(first, out)?;
        let down = self.held.values(&self.down, |_| Ok(()))?;
        let (columns, rank) = (self.down.columns() as usize, self.up.columns() as usize);
        let mut up = vec![0.0; rank];
        let (mut at, mut rest) = (first as usize, out);
        while !rest.is_empty() {
            let (row, column) = (at / columns, at % columns);
            let (part, after) = rest.split_at_mut((columns - column).min(rest.len()));
            self.up.read((row * rank) as u64, &mut up)?;
            for (factor, down) in up.iter().zip(down.chunks_exact(columns)) {
                let factor = self.scale * factor;
                part.iter_mut().zip(&down[column..]).for_each(|(value, down)| *value += factor * down);
            }
            at += part.len();
            rest = after;
        }
        Ok(())
    }

    pub(super) fn release(&self, range: Range<u64>) {
        self.held.release(&range, self.of.elements());
        self.of.release(range);
    }
}

impl SourceWeight {
    /// Returns `W + scale up down`: a matrix plus the product of `up` `[rows, rank]` and `down` `[rank, columns]`.
    ///
    /// # Errors
    /// Returns an error if the shapes don't fit.
    pub fn plus_product(&self, up: &SourceWeight, down: &SourceWeight, scale: f32) -> Result<SourceWeight> {
        let product = [up.rows(), down.columns()];
        if *self.shape != product || up.columns() != down.rows() {
            let problem = format!("shape {:?} plus {:?} times {:?}", self.shape, up.shape, down.shape);
            return Err(self.wrong(problem));
        }
        let (of, up, down) = (self.clone(), up.clone(), down.clone());
        let sum = LowRankSum { of, up, down, scale, held: Held::default() };
        Ok(SourceWeight { node: Arc::new(super::Node::LowRankSum(sum)), shape: self.shape.clone() })
    }

    /// Returns a vector that `compute` returns at the first read. Vectors with the same `name` must be equal. `compute`
    /// must not use the thread pool.
    pub fn computed(
        name: &str,
        length: u64,
        compute: impl Fn() -> Result<Vec<f32>> + Send + Sync + 'static,
    ) -> SourceWeight {
        let computed = Computed {
            name: name.to_owned(),
            compute: Box::new(compute),
            values: OnceLock::new(),
            busy: Mutex::new(()),
        };
        SourceWeight { node: Arc::new(super::Node::Computed(computed)), shape: [length].into() }
    }

    /// Returns a matrix of `columns` columns whose rows `compute` fills when they are read, from the first row and a
    /// buffer of whole rows. A row depends on the same row of `by_row` and on all of `whole`. Matrices with the same
    /// `name` and operands must be equal. `compute` must not use the thread pool.
    ///
    /// # Errors
    /// Returns an error if the weights of `by_row` differ in rows, or there are none.
    pub fn computed_rows(
        name: &str,
        columns: u64,
        by_row: Vec<SourceWeight>,
        whole: Vec<SourceWeight>,
        compute: impl Fn(u64, &mut [f32]) -> Result<()> + Send + Sync + 'static,
    ) -> Result<SourceWeight> {
        let rows = by_row.first().map_or(0, SourceWeight::rows);
        if columns == 0 || by_row.iter().any(|of| of.rows() != rows) {
            let problem = format!("{columns} columns of weights that have {rows} rows, or others");
            return Err(SourceError::Weight { weight: name.to_owned(), problem });
        }
        let compute = Box::new(compute);
        let name = name.to_owned();
        let computed = ComputedRows { name, rows, columns, by_row, whole, compute, integers: None };
        Ok(SourceWeight { node: Arc::new(super::Node::ComputedRows(computed)), shape: [rows, columns].into() })
    }

    /// Returns a matrix of the given rows and columns that `compute` decodes from `parts` when it is read, from the
    /// first row and a buffer of whole rows. `compute` must not use the thread pool. `integers` are those that it
    /// decodes, if any.
    pub(crate) fn decoded_rows(
        name: &str,
        [rows, columns]: [u64; 2],
        parts: Vec<SourceWeight>,
        integers: Option<Arc<Integers>>,
        compute: impl Fn(u64, &mut [f32]) -> Result<()> + Send + Sync + 'static,
    ) -> SourceWeight {
        let (name, compute, columns) = (name.to_owned(), Box::new(compute), columns.max(1));
        let by_row = Vec::new();
        let computed = ComputedRows { name, rows, columns, by_row, whole: parts, compute, integers };
        SourceWeight { node: Arc::new(super::Node::ComputedRows(computed)), shape: [rows, columns].into() }
    }

    /// Returns `W Q`: every row times a square matrix.
    ///
    /// # Errors
    /// Returns an error if rows have another length than the matrix.
    pub fn times(&self, matrix: &Arc<dyn SquareMatrix>) -> Result<SourceWeight> {
        if self.columns() != matrix.size() {
            return Err(self.wrong(format!("{} columns times a matrix of {}", self.columns(), matrix.size())));
        }
        let node = super::Node::Times { of: self.clone(), matrix: matrix.clone() };
        Ok(SourceWeight { node: Arc::new(node), shape: self.shape.clone() })
    }

    /// Whether all rows were multiplied by a square matrix, so that the inputs they meet are mixtures of channels.
    pub fn is_rotated(&self) -> bool {
        use super::Node;
        match &*self.node {
            Node::Times { .. } => true,
            Node::ByRow { of, columns, .. } => *columns == of.columns() && of.is_rotated(),
            Node::Slice { of, .. } | Node::Reordered { of, .. } => of.columns() == self.columns() && of.is_rotated(),
            Node::Concatenation(parts) => parts.iter().all(SourceWeight::is_rotated),
            _ => false,
        }
    }

    /// Returns `Q^T W`: every column times a square matrix. The product is held in memory while it is read.
    ///
    /// # Errors
    /// Returns an error if this isn't a matrix with as many rows as the square one.
    pub fn transposed_times(&self, matrix: &Arc<dyn SquareMatrix>) -> Result<SourceWeight> {
        if self.shape.len() != 2 || self.shape[0] != matrix.size() {
            return Err(self.wrong(format!("a matrix of {} times shape {:?}", matrix.size(), self.shape)));
        }
        let product = Product { of: self.clone(), matrix: matrix.clone(), held: Held::default() };
        Ok(SourceWeight { node: Arc::new(super::Node::TransposedTimes(product)), shape: self.shape.clone() })
    }
}

/// Reads elements from `first` on of `W Q`; partially read rows are computed whole.
pub(super) fn read_times(of: &SourceWeight, matrix: &dyn SquareMatrix, first: u64, out: &mut [f32]) -> Result<()> {
    let width = matrix.size();
    let end = first + out.len() as u64;
    let (start, stop) = (first - first % width, end.next_multiple_of(width));
    if (start, stop) == (first, end) {
        of.read(first, out)?;
        return matrix.multiply_rows(out);
    }
    let mut rows = vec![0.0; (stop - start) as usize];
    of.read(start, &mut rows)?;
    matrix.multiply_rows(&mut rows)?;
    out.copy_from_slice(&rows[(first - start) as usize..][..out.len()]);
    Ok(())
}
