//! Integers that a source stores, with a scale and a zero point for each group of a row's columns. A number format that
//! can hold them takes them unchanged.

use std::sync::Arc;

use half::{bf16, f16};

use super::{Node, SourceWeight};
use crate::dtype::SourceDtype;
use crate::tensor::SourceTensor;

/// Largest difference between a zero point and an integer, in steps.
const NEAR_INTEGER: f32 = 1.0 / 16.0;
/// Largest rounding error of a value in fp16, twice over.
const ROUNDED_HALF: f32 = 1.0 / 1024.0;

/// Type that a library's arithmetic rounds to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    None,
    F16,
    Bf16,
}

impl Rounding {
    pub(crate) fn of(dtype: SourceDtype) -> Self {
        match dtype {
            SourceDtype::F16 => Rounding::F16,
            SourceDtype::BF16 => Rounding::Bf16,
            _ => Rounding::None,
        }
    }

    /// By a name of PyTorch.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        match name.trim_start_matches("torch.") {
            "float16" => Some(Rounding::F16),
            "bfloat16" => Some(Rounding::Bf16),
            "float32" => Some(Rounding::None),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn round(self, value: f32) -> f32 {
        match self {
            Rounding::None => value,
            Rounding::F16 => f16::from_f32(value).to_f32(),
            Rounding::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }
}

/// Value of an integer `q` by the numbers `a` and `b` of its group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Formula {
    /// `(q - b) a`
    Shifted,
    /// `q a + b`, rounded twice
    Affine,
    /// `q a c` with a constant factor
    Scaled(f32),
}

/// Function that reads the integers of a row.
type ReadIntegers = Box<dyn Fn(usize, &mut [i16]) + Send + Sync>;

/// Function that returns the two numbers of a row's group.
type GroupNumbers = Box<dyn Fn(usize, usize) -> [f32; 2] + Send + Sync>;

/// Matrix of integers in a source.
pub(crate) struct Integers {
    /// Least and largest integer.
    pub(crate) range: [i16; 2],
    /// Least and largest zero point.
    pub(crate) zeros: [i16; 2],
    /// Number of columns.
    pub(crate) columns: u64,
    /// Number of groups in a row.
    pub(crate) groups: u64,
    /// Group of each column, if groups aren't equal numbers of consecutive columns.
    pub(crate) order: Option<Vec<u32>>,
    pub(crate) formula: Formula,
    pub(crate) rounding: Rounding,
    pub(crate) read: ReadIntegers,
    pub(crate) numbers: GroupNumbers,
}

impl Integers {
    /// Number of consecutive columns in a group.
    fn block(&self) -> u64 {
        (self.columns / self.groups.max(1)).max(1)
    }

    /// Computes the values of a row.
    pub(crate) fn decode(&self, row: usize, out: &mut [f32]) {
        let mut integers = vec![0; out.len()];
        (self.read)(row, &mut integers);
        match &self.order {
            None => {
                let group = self.block() as usize;
                for (index, (out, integers)) in out.chunks_mut(group).zip(integers.chunks(group)).enumerate() {
                    self.values((self.numbers)(row, index), integers, out);
                }
            }
            Some(order) => {
                let groups = 0..self.groups as usize;
                let numbers: Vec<[f32; 2]> = groups.map(|group| (self.numbers)(row, group)).collect();
                for ((out, integer), group) in out.chunks_mut(1).zip(integers.chunks(1)).zip(order) {
                    self.values(numbers[*group as usize], integer, out);
                }
            }
        }
    }

    /// Computes the values of integers of one group.
    #[inline]
    fn values(&self, [a, b]: [f32; 2], integers: &[i16], out: &mut [f32]) {
        let round = |value| self.rounding.round(value);
        let pairs = out.iter_mut().zip(integers);
        match self.formula {
            Formula::Shifted => pairs.for_each(|(out, q)| *out = round((f32::from(*q) - b) * a)),
            Formula::Affine => pairs.for_each(|(out, q)| *out = round(round(f32::from(*q) * a) + b)),
            Formula::Scaled(c) => pairs.for_each(|(out, q)| *out = round(f32::from(*q) * a * c)),
        }
    }

    /// Returns the scale and the zero point of a row's group; `None` if the zero point isn't an integer.
    fn step(&self, row: usize, group: usize) -> Option<(f32, i16)> {
        let [a, b] = (self.numbers)(row, group);
        let (scale, zero) = match self.formula {
            Formula::Shifted => (a, b),
            Formula::Scaled(c) => (a * c, 0.0),
            Formula::Affine if a == 0.0 => return None,
            Formula::Affine => {
                let zero = (-b / a).round();
                // both numbers are rounded, so that their quotient is near an integer at best
                let off = (b + zero * a).abs();
                (off <= (NEAR_INTEGER * a.abs()).max(ROUNDED_HALF * b.abs())).then_some((a, zero))?
            }
        };
        (zero.fract() == 0.0 && zero.abs() < 16384.0).then_some((scale, zero as i16))
    }

    /// Returns the integers of a tensor in GGUF's `Q8_0` or `Q4_0`.
    fn of_blocks(tensor: &SourceTensor) -> Option<Self> {
        const COLUMNS: usize = 32;
        let bytes = match tensor.dtype() {
            SourceDtype::Q8_0 => 2 + COLUMNS,
            SourceDtype::Q4_0 => 2 + COLUMNS / 2,
            _ => return None,
        };
        tensor.bytes()?;
        let (codes, scales) = (tensor.clone(), tensor.clone());
        let of_row = tensor.columns() as usize / COLUMNS;
        let range = if bytes == 2 + COLUMNS { [-128, 127] } else { [-8, 7] };
        let read = move |row: usize, out: &mut [i16]| {
            let blocks = &codes.bytes().unwrap_or_default()[row * of_row * bytes..];
            for (out, block) in out.chunks_mut(COLUMNS).zip(blocks.chunks(bytes)) {
                let (low, high) = out.split_at_mut(COLUMNS / 2);
                let (first, second) = block[2..].split_at(COLUMNS / 2);
                if second.is_empty() {
                    low.iter_mut().zip(first).for_each(|(out, byte)| *out = i16::from(byte & 15) - 8);
                    high.iter_mut().zip(first).for_each(|(out, byte)| *out = i16::from(byte >> 4) - 8);
                } else {
                    low.iter_mut().zip(first).for_each(|(out, byte)| *out = i16::from(*byte as i8));
                    high.iter_mut().zip(second).for_each(|(out, byte)| *out = i16::from(*byte as i8));
                }
            }
        };
        let numbers = move |row: usize, group: usize| {
            let block = &scales.bytes().unwrap_or_default()[(row * of_row + group) * bytes..];
            [f16::from_le_bytes([block[0], block[1]]).to_f32(), 0.0]
        };
        Some(Integers {
            range,
            zeros: [0, 0],
            columns: tensor.columns(),
            groups: of_row as u64,
            order: None,
            formula: Formula::Shifted,
            rounding: Rounding::None,
            read: Box::new(read),
            numbers: Box::new(numbers),
        })
    }
}

/// Integers of a weight as its source stores them, in rows of blocks: `value = scale * (integer - zero point)`, before
/// the source's library rounds it.
#[derive(Clone)]
pub struct StoredIntegers {
    rows: Vec<(Arc<Integers>, u64)>,
    range: [i16; 2],
    zeros: [i16; 2],
    block: u64,
}

impl StoredIntegers {
    /// Least and largest integer that the source can store.
    pub fn range(&self) -> [i16; 2] {
        self.range
    }

    /// Least and largest zero point that the source can store.
    pub fn zeros(&self) -> [i16; 2] {
        self.zeros
    }

    /// Number of columns that share a scale and a zero point.
    pub fn block(&self) -> u64 {
        self.block
    }

    /// Reads the integers of a row.
    pub fn read_row(&self, row: u64, out: &mut [i16]) {
        let (integers, row) = &self.rows[row as usize];
        (integers.read)(*row as usize, out);
    }

    /// Returns the scale and the zero point of a block of a row; `None` if the zero point isn't an integer.
    pub fn step(&self, row: u64, block: u64) -> Option<(f32, i16)> {
        let (integers, row) = &self.rows[row as usize];
        integers.step(*row as usize, block as usize)
    }
}

impl SourceTensor {
    /// Returns the stored integers, if the tensor consists of them.
    pub(crate) fn integers(&self) -> Option<Arc<Integers>> {
        match self.computed_of() {
            Some(of) => match &*of.node {
                Node::ComputedRows(computed) => computed.integers.clone(),
                _ => None,
            },
            None => Integers::of_blocks(self).map(Arc::new),
        }
    }

    /// Returns the number of values that integers of a quantized checkpoint can have and the number of columns that
    /// share a scale; `None` for other tensors, and where the columns of a group aren't neighbours.
    pub fn integer_blocks(&self) -> Option<(u32, u64)> {
        self.computed_of()?;
        let integers = self.integers().filter(|integers| integers.order.is_none())?;
        let [least, largest] = integers.range;
        Some(((largest - least) as u32 + 1, integers.block()))
    }
}

impl SourceWeight {
    /// Returns the integers that the source stores, if each row is one of a quantized tensor and all have blocks of one
    /// size. Rows may be a selection or in another order.
    pub fn stored_integers(&self) -> Option<StoredIntegers> {
        // tensors are shared by consecutive rows
        let mut last: Option<(SourceTensor, Arc<Integers>)> = None;
        let mut rows = Vec::with_capacity(self.rows() as usize);
        for row in 0..self.rows() {
            let (tensor, own) = self.tensor_row(row)?;
            let known = last.as_ref().filter(|(known, _)| known.name() == tensor.name());
            let integers = match known {
                Some((_, integers)) => integers.clone(),
                None => tensor.integers()?,
            };
            if integers.columns != self.columns() || integers.order.is_some() {
                return None;
            }
            if known.is_none() {
                last = Some((tensor.clone(), integers.clone()));
            }
            rows.push((integers, own));
        }
        let (first, _) = rows.first()?;
        let block = first.block();
        let (mut range, mut zeros) = (first.range, first.zeros);
        for (integers, _) in &rows {
            if integers.block() != block {
                return None;
            }
            let widen = |[least, most]: [i16; 2], of: [i16; 2]| [least.min(of[0]), most.max(of[1])];
            (range, zeros) = (widen(range, integers.range), widen(zeros, integers.zeros));
        }
        Some(StoredIntegers { rows, range, zeros, block })
    }

    /// Returns the tensor that a row is one of, and the row's index in it.
    fn tensor_row(&self, row: u64) -> Option<(&SourceTensor, u64)> {
        let columns = self.columns();
        let (mut weight, mut at) = (self, row * columns);
        loop {
            match &*weight.node {
                Node::Tensor(tensor) => return (tensor.columns() == columns).then(|| (tensor, at / columns)),
                Node::Slice { .. } | Node::Concatenation(_) | Node::Reordered { .. } => {
                    let length;
                    (weight, at, length) = weight.piece(at, columns);
                    if length != columns || !at.is_multiple_of(columns) {
                        return None;
                    }
                }
                _ => return None,
            }
        }
    }
}
