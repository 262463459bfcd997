//! Parts of expressions that aren't computed element by element: vectors that come out of other weights, and products
//! with a square matrix.
//!
//! What is computed here is computed under a lock by one thread alone and without the thread pool: a thread of the pool
//! that waits inside a lock could be waiting for work of its own.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::SourceWeight;
use crate::error::{Result, SourceError};

/// A square matrix `Q` by which weights are multiplied in place.
pub trait SquareMatrix: Send + Sync {
    /// Rows, and columns.
    fn size(&self) -> u64;

    /// What it is, in words: matrices with equal names are equal.
    fn name(&self) -> String;

    /// `rows <- rows Q`, for rows of [`size`](SquareMatrix::size) elements one after another.
    ///
    /// # Errors
    /// When the matrix can't be computed.
    fn multiply_rows(&self, rows: &mut [f32]) -> Result<()>;

    /// `matrix <- Q^T matrix`, for a matrix of [`size`](SquareMatrix::size) rows and `columns` columns.
    ///
    /// # Errors
    /// When the matrix can't be computed.
    fn multiply_columns(&self, matrix: &mut [f32], columns: usize) -> Result<()>;
}

/// Computes a vector.
type Compute = Box<dyn Fn() -> Result<Vec<f32>> + Send + Sync>;

/// A vector that is computed when it is read for the first time, and then kept.
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

    /// Elements `first ..` of `length`.
    pub(super) fn read(&self, length: u64, first: u64, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.values(length)?[first as usize..][..out.len()]);
        Ok(())
    }
}

/// Computes rows from the first on until the buffer, of whole rows, is full.
type ComputeRows = Box<dyn Fn(u64, &mut [f32]) -> Result<()> + Send + Sync>;

/// A matrix whose rows are computed when they are read.
pub(super) struct ComputedRows {
    pub(super) name: String,
    pub(super) columns: u64,
    /// What each row is made of the same row of.
    pub(super) by_row: Vec<SourceWeight>,
    /// What each row is made of all of.
    pub(super) whole: Vec<SourceWeight>,
    compute: ComputeRows,
}

impl ComputedRows {
    /// The weights that it is made of.
    pub(super) fn of(&self) -> impl Iterator<Item = &SourceWeight> {
        self.by_row.iter().chain(&self.whole)
    }

    /// Elements `first ..`: rows that are only wanted in part are computed as a whole.
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
    }
}

/// Values of a whole weight, held from the first read of what needs them to the release of its last element.
#[derive(Default)]
struct Held(Mutex<Option<Arc<Vec<f32>>>>);

impl Held {
    /// The values of a weight; what `prepare` makes of them is held.
    fn values(&self, of: &SourceWeight, prepare: impl FnOnce(&mut [f32]) -> Result<()>) -> Result<Arc<Vec<f32>>> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(values) = &*held {
            return Ok(values.clone());
        }
        let mut values = vec![0.0; of.elements() as usize];
        of.read(0, &mut values)?;
        of.release(0..of.elements());
        prepare(&mut values)?;
        Ok(held.insert(Arc::new(values)).clone())
    }

    /// Gives the values up once `range` reaches the end of so many elements.
    fn release(&self, range: &Range<u64>, elements: u64) {
        if range.end >= elements {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

/// `Q^T W`: each element depends on a whole column, so all of it is held.
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

/// `W + s B A` with narrow B `[rows, rank]` and A `[rank, columns]`, of which A is held.
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
    /// `W + scale up down`: a matrix plus the product of `up` `[rows, rank]` and `down` `[rank, columns]`.
    ///
    /// # Errors
    /// When the shapes don't fit.
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

    /// A vector that `compute` gives when it is first read; `name` says what it is, and vectors of one name are equal.
    /// `compute` must not use the thread pool.
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

    /// A matrix of `columns` columns whose rows `compute` makes when they are read, of the same rows of `by_row` and of all
    /// that is `whole`; it is given the first row and a buffer of whole rows. `name` says what it is, and matrices of one
    /// name made of the same weights are equal. `compute` must not use the thread pool.
    ///
    /// # Errors
    /// When the weights by row differ in their rows, or there are none.
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
        let computed = ComputedRows { name: name.to_owned(), columns, by_row, whole, compute };
        Ok(SourceWeight { node: Arc::new(super::Node::ComputedRows(computed)), shape: [rows, columns].into() })
    }

    /// `W Q`: every row times a square matrix.
    ///
    /// # Errors
    /// When rows aren't as long as those of the matrix.
    pub fn times(&self, matrix: &Arc<dyn SquareMatrix>) -> Result<SourceWeight> {
        if self.columns() != matrix.size() {
            return Err(self.wrong(format!("{} columns times a matrix of {}", self.columns(), matrix.size())));
        }
        let node = super::Node::Times { of: self.clone(), matrix: matrix.clone() };
        Ok(SourceWeight { node: Arc::new(node), shape: self.shape.clone() })
    }

    /// Whether all of its rows were multiplied by a square matrix, of whatever else they are made: what they are multiplied by next is a
    /// mixture of channels.
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

    /// `Q^T W`: every column of a matrix times a square matrix. It is held in memory while it is read.
    ///
    /// # Errors
    /// When it isn't a matrix with as many rows as the square one.
    pub fn transposed_times(&self, matrix: &Arc<dyn SquareMatrix>) -> Result<SourceWeight> {
        if self.shape.len() != 2 || self.shape[0] != matrix.size() {
            return Err(self.wrong(format!("a matrix of {} times shape {:?}", matrix.size(), self.shape)));
        }
        let product = Product { of: self.clone(), matrix: matrix.clone(), held: Held::default() };
        Ok(SourceWeight { node: Arc::new(super::Node::TransposedTimes(product)), shape: self.shape.clone() })
    }
}

/// Reads elements `first ..` of `W Q`: rows that are only wanted in part are computed as a whole.
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
