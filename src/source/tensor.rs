//! Tensors of a source.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use super::dequantize;
use super::dtype::SourceDtype;
use super::error::{Result, SourceError};
use super::random::Normal;
use super::weight::SourceWeight;
use anec_base::MappedFile;

/// Number of elements that are compared at a time; whole blocks of every type.
const COMPARED: u64 = 1 << 20;

/// Handle to one tensor of a source. Clones are cheap and share the tensor.
///
/// Shapes are row-major, outermost dimension first, whatever the file's own order.
#[derive(Clone)]
pub struct SourceTensor(Arc<Inner>);

struct Inner {
    name: String,
    dtype: SourceDtype,
    shape: Vec<u64>,
    elements: u64,
    data: Data,
}

enum Data {
    File {
        file: Arc<MappedFile>,
        range: Range<usize>,
    },
    Random(Normal),
    /// Tensor of which only the shape is known.
    Absent {
        bytes: u64,
    },
    Computed {
        of: SourceWeight,
        bytes: u64,
        path: PathBuf,
    },
}

impl SourceTensor {
    /// Returns the tensor whose blocks are bytes `range` of `file`.
    ///
    /// # Errors
    /// Returns an error if the shape overflows, isn't whole blocks in each row, or doesn't take exactly `range`, which
    /// must lie in the file.
    pub(super) fn in_file(
        name: String,
        dtype: SourceDtype,
        shape: Vec<u64>,
        file: &Arc<MappedFile>,
        range: Range<u64>,
    ) -> Result<Self> {
        let size = file.bytes().len() as u64;
        let bytes = byte_length(dtype, &shape).map_err(|problem| SourceError::tensor(file.path(), &name, problem))?;
        if range.end.checked_sub(range.start) != Some(bytes) {
            let problem = format!("{dtype} {shape:?} takes {bytes} bytes, but bytes {range:?} are its");
            return Err(SourceError::tensor(file.path(), &name, problem));
        }
        if range.end > size {
            let problem = format!("bytes {range:?} are its, but the file ends at {size}; the file is incomplete");
            return Err(SourceError::tensor(file.path(), &name, problem));
        }
        let elements = shape.iter().product();
        let range = range.start as usize..range.end as usize;
        Ok(SourceTensor(Arc::new(Inner {
            name,
            dtype,
            shape,
            elements,
            data: Data::File { file: file.clone(), range },
        })))
    }

    /// Returns a tensor of normally distributed numbers that are computed as they are read: element `i` depends on
    /// `seed` and `i` only. Its type is F32 and it takes no memory.
    ///
    /// # Errors
    /// Returns an error if the shape overflows.
    pub fn random(name: &str, shape: &[u64], seed: u64, mean: f32, standard_deviation: f32) -> Result<Self> {
        SourceTensor::random_of(name, shape, Normal { seed, mean, standard_deviation })
    }

    fn random_of(name: &str, shape: &[u64], normal: Normal) -> Result<Self> {
        let data = Data::Random(normal);
        byte_length(SourceDtype::F32, shape)
            .map_err(|problem| SourceError::tensor(Path::new("random"), name, problem))?;
        let (name, shape, elements) = (name.to_owned(), shape.to_vec(), shape.iter().product());
        Ok(SourceTensor(Arc::new(Inner { name, dtype: SourceDtype::F32, shape, elements, data })))
    }

    /// Returns a tensor of which only type and shape are known; reading it is an error.
    ///
    /// # Errors
    /// Returns an error if the shape overflows.
    pub fn shape_only(name: &str, dtype: SourceDtype, shape: &[u64]) -> Result<Self> {
        let bytes = byte_length(dtype, shape)
            .map_err(|problem| SourceError::tensor(Path::new("a published configuration"), name, problem))?;
        let (name, shape, elements) = (name.to_owned(), shape.to_vec(), shape.iter().product());
        Ok(SourceTensor(Arc::new(Inner { name, dtype, shape, elements, data: Data::Absent { bytes } })))
    }

    /// Returns a tensor that the file at `path` holds in another form, of `bytes` bytes: transposed, in blocks with
    /// scales, or within a larger tensor. `dtype` is the stored type.
    pub(super) fn computed(name: String, of: SourceWeight, dtype: SourceDtype, bytes: u64, path: &Path) -> Self {
        let (shape, elements) = (of.shape().to_vec(), of.elements());
        let data = Data::Computed { of, bytes, path: path.to_owned() };
        SourceTensor(Arc::new(Inner { name, dtype, shape, elements, data }))
    }

    /// Returns the bytes as elements of another type, for formats that store types they lack as bytes. Computed numbers
    /// are only reshaped.
    ///
    /// # Errors
    /// Returns an error if the new type takes another number of bytes.
    pub fn viewed_as(&self, dtype: SourceDtype, shape: &[u64]) -> Result<Self> {
        let wrong = |problem: String| SourceError::Weight { weight: self.name().to_owned(), problem };
        let bytes = byte_length(dtype, shape).map_err(wrong)?;
        let data = match &self.0.data {
            Data::Random(normal) => return SourceTensor::random_of(self.name(), shape, *normal),
            _ if bytes != self.byte_length() => {
                return Err(wrong(format!("{dtype} {shape:?} takes {bytes} bytes, but it has {}", self.byte_length())));
            }
            Data::File { file, range } => Data::File { file: file.clone(), range: range.clone() },
            Data::Absent { bytes } => Data::Absent { bytes: *bytes },
            Data::Computed { .. } => return Err(wrong(format!("it is computed, and has no bytes to read as {dtype}"))),
        };
        let (name, shape, elements) = (self.name().to_owned(), shape.to_vec(), shape.iter().product());
        Ok(SourceTensor(Arc::new(Inner { name, dtype, shape, elements, data })))
    }

    /// Name in the source.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Element type.
    pub fn dtype(&self) -> SourceDtype {
        self.0.dtype
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[u64] {
        &self.0.shape
    }

    /// Product of the dimensions.
    pub fn elements(&self) -> u64 {
        self.0.elements
    }

    /// Product of all dimensions but the last.
    pub fn rows(&self) -> u64 {
        rows_and_columns(&self.0.shape).0
    }

    /// Returns the last dimension; 1 for a scalar.
    pub fn columns(&self) -> u64 {
        rows_and_columns(&self.0.shape).1
    }

    /// Size in the source in bytes, also if only the shape is known; 0 if elements are computed.
    pub fn byte_length(&self) -> u64 {
        match &self.0.data {
            Data::File { range, .. } => range.len() as u64,
            Data::Random(_) => 0,
            Data::Absent { bytes } | Data::Computed { bytes, .. } => *bytes,
        }
    }

    /// Returns the stored blocks, row after row; `None` if elements are computed or stored in another order.
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.0.data {
            Data::File { file, range } => Some(&file.bytes()[range.clone()]),
            Data::Random(_) | Data::Absent { .. } | Data::Computed { .. } => None,
        }
    }

    /// Returns the map that holds the tensor; `None` if elements are computed.
    pub(super) fn map(&self) -> Option<&Arc<MappedFile>> {
        match &self.0.data {
            Data::File { file, .. } => Some(file),
            Data::Random(_) | Data::Absent { .. } | Data::Computed { .. } => None,
        }
    }

    /// Returns the weight that the elements are computed from, if they are.
    pub(super) fn computed_of(&self) -> Option<&SourceWeight> {
        match &self.0.data {
            Data::Computed { of, .. } => Some(of),
            Data::File { .. } | Data::Random(_) | Data::Absent { .. } => None,
        }
    }

    /// Returns the path of the tensor's file; `None` if elements are computed.
    pub fn path(&self) -> Option<&Path> {
        match &self.0.data {
            Data::File { file, .. } => Some(file.path()),
            Data::Random(_) | Data::Absent { .. } => None,
            Data::Computed { path, .. } => Some(path),
        }
    }

    /// Decodes rows from `first_row` on until `out` is full.
    ///
    /// # Errors
    /// Returns an error if `out` isn't whole rows, or more rows than there are.
    pub fn read_rows(&self, first_row: u64, out: &mut [f32]) -> Result<()> {
        let first = check_rows(self.name(), self.rows(), self.columns(), first_row, out.len() as u64)?;
        self.read(first, out)
    }

    /// Decodes elements from `first` on, in row-major order, until `out` is full.
    ///
    /// # Errors
    /// Returns an error if there are fewer.
    pub fn read(&self, first: u64, out: &mut [f32]) -> Result<()> {
        check_elements(self.name(), self.elements(), first, out.len() as u64)?;
        match &self.0.data {
            Data::File { file, range } => {
                dequantize::read(self.0.dtype, &file.bytes()[range.clone()], first, out);
            }
            Data::Random(normal) => normal.fill(first, out),
            Data::Absent { .. } if out.is_empty() => {}
            Data::Absent { .. } => return Err(SourceError::ShapeOnly { tensor: self.name().to_owned() }),
            Data::Computed { of, .. } => of.read(first, out)?,
        }
        Ok(())
    }

    /// Whether both tensors have the same shape and elements. Tensors without elements equal any of their shape.
    ///
    /// # Errors
    /// Returns an error if a tensor can't be read.
    pub fn has_equal_elements(&self, other: &SourceTensor) -> Result<bool> {
        if self.shape() != other.shape() {
            return Ok(false);
        }
        if [self, other].iter().any(|tensor| matches!(tensor.0.data, Data::Absent { .. })) {
            return Ok(true);
        }
        let (elements, parts) = (self.elements(), self.elements().div_ceil(COMPARED));
        let equal_part = |part: u64| -> Result<bool> {
            let range = part * COMPARED..elements.min((part + 1) * COMPARED);
            let read = |tensor: &SourceTensor| -> Result<Vec<f32>> {
                let mut values = vec![0.0; (range.end - range.start) as usize];
                tensor.read(range.start, &mut values)?;
                tensor.release(range.clone());
                Ok(values)
            };
            Ok(read(self)? == read(other)?)
        };
        let unequal = (0..parts).into_par_iter().map(equal_part).find_any(|equal| !matches!(equal, Ok(true)));
        unequal.unwrap_or(Ok(true))
    }

    /// Returns memory from reading elements to the system, because read pages of a mapped file count as this process's.
    /// They can be read again.
    pub fn release(&self, elements: Range<u64>) {
        let elements = elements.start.min(self.0.elements)..elements.end.min(self.0.elements);
        match &self.0.data {
            Data::File { file, range } => {
                let block = self.0.dtype.block();
                let byte = |element: u64| range.start + (element / block.elements * block.bytes) as usize;
                file.release(byte(elements.start)..byte(elements.end));
            }
            Data::Random(_) | Data::Absent { .. } => {}
            Data::Computed { of, .. } => of.release(elements),
        }
    }
}

impl fmt::Debug for SourceTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?} {} {:?})", self.name(), self.dtype(), self.shape())
    }
}

/// Returns the product of all dimensions but the last, and the last. A scalar is one row of one column.
pub(super) fn rows_and_columns(shape: &[u64]) -> (u64, u64) {
    match shape.split_last() {
        Some((columns, rest)) => (rest.iter().product(), *columns),
        None => (1, 1),
    }
}

/// Checks a read of whole rows of `name` and returns its first element.
pub(super) fn check_rows(name: &str, rows: u64, columns: u64, first_row: u64, length: u64) -> Result<u64> {
    let problem = if length == 0 {
        return Ok(0);
    } else if columns == 0 || !length.is_multiple_of(columns) {
        format!("a read of {length} elements isn't whole rows of {columns}")
    } else if first_row.checked_add(length / columns).is_none_or(|end| end > rows) {
        format!("a read of {} rows from row {first_row}, but it has {rows}", length / columns)
    } else {
        return Ok(first_row * columns);
    };
    Err(SourceError::Weight { weight: name.to_owned(), problem })
}

/// Checks a read of elements of `name`.
pub(super) fn check_elements(name: &str, elements: u64, first: u64, length: u64) -> Result<()> {
    if first.checked_add(length).is_none_or(|end| end > elements) {
        let problem = format!("a read of {length} elements from element {first}, but it has {elements}");
        return Err(SourceError::Weight { weight: name.to_owned(), problem });
    }
    Ok(())
}

/// Returns the size of a tensor in bytes, or the problem of its shape.
pub(super) fn byte_length(dtype: SourceDtype, shape: &[u64]) -> Result<u64, String> {
    let block = dtype.block();
    let (_, columns) = rows_and_columns_checked(shape)?;
    if columns % block.elements != 0 {
        return Err(format!("a row of {columns} elements isn't whole blocks of {} ({dtype})", block.elements));
    }
    let elements: u64 = shape.iter().product();
    let bytes = dtype.bytes(elements).ok_or_else(|| format!("{dtype} {shape:?} has too many bytes"))?;
    // no position inside overflows, in bytes here or in f32 elsewhere, on any machine
    if bytes > i64::MAX as u64 / 8 || elements > i64::MAX as u64 / 8 || usize::try_from(bytes).is_err() {
        return Err(format!("{dtype} {shape:?} has too many bytes"));
    }
    Ok(bytes)
}

fn rows_and_columns_checked(shape: &[u64]) -> Result<(u64, u64), String> {
    // a dimension of zero doesn't excuse the others, whose product is used on its own
    shape
        .iter()
        .try_fold(1u64, |product, &dimension| product.checked_mul(dimension.max(1)))
        .map(|_| rows_and_columns(shape))
        .ok_or_else(|| format!("the number of elements of {shape:?} overflows"))
}
