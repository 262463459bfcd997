//! Element access, and the origin of each element.

use std::ops::Range;

use super::{Function, Node, Operation, SourceWeight, ZeroPoints, lazy};
use crate::error::{Result, SourceError};
use crate::tensor::{check_elements, check_rows};

impl SourceWeight {
    /// Computes rows from `first_row` on until `out` is full.
    ///
    /// # Errors
    /// Returns an error if `out` isn't whole rows, or more rows than there are.
    pub fn read_rows(&self, first_row: u64, out: &mut [f32]) -> Result<()> {
        let inside = check_rows("", self.rows(), self.columns(), first_row, out.len() as u64);
        match inside {
            Ok(first) => self.read(first, out),
            // the key is costly and only made for the message
            Err(_) => check_rows(&self.key(), self.rows(), self.columns(), first_row, out.len() as u64).map(|_| ()),
        }
    }

    /// Computes elements from `first` on, in row-major order, until `out` is full.
    ///
    /// # Errors
    /// Returns an error if there are fewer.
    pub fn read(&self, first: u64, out: &mut [f32]) -> Result<()> {
        let length = out.len() as u64;
        if check_elements("", self.elements(), first, length).is_err() {
            return check_elements(&self.key(), self.elements(), first, length);
        }
        match &*self.node {
            Node::Tensor(tensor) => tensor.read(first, out)?,
            Node::Values { values, .. } => out.copy_from_slice(&values[first as usize..][..out.len()]),
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
            Node::Transposed(of) => read_transposed(of, first, out)?,
            Node::Map { of, function } => {
                of.read(first, out)?;
                match *function {
                    Function::Scale(factor) => out.iter_mut().for_each(|value| *value *= factor),
                    Function::Add(addend) => out.iter_mut().for_each(|value| *value += addend),
                    Function::Exp => out.iter_mut().for_each(|value| *value = value.exp()),
                    Function::Reciprocal => out.iter_mut().for_each(|value| *value = value.recip()),
                }
            }
            Node::ByColumn { of, operation, vector } => {
                of.read(first, out)?;
                let mut row = vec![0.0; vector.elements() as usize];
                vector.read(0, &mut row)?;
                // the first row may be read from its middle
                let (mut rest, mut column) = (out, (first % vector.elements().max(1)) as usize);
                while !rest.is_empty() {
                    let (part, after) = rest.split_at_mut((row.len() - column).min(rest.len()));
                    let pairs = part.iter_mut().zip(&row[column..]);
                    match operation {
                        Operation::Add => pairs.for_each(|(value, addend)| *value += addend),
                        Operation::Multiply => pairs.for_each(|(value, factor)| *value *= factor),
                    }
                    (rest, column) = (after, 0);
                }
            }
            Node::ByRow { of, columns, vector } => {
                of.read(first, out)?;
                multiply_by_row(vector, *columns, first, out)?;
            }
            Node::Computed(computed) => computed.read(self.elements(), first, out)?,
            Node::ComputedRows(computed) => computed.read(first, out)?,
            Node::LowRankSum(sum) => sum.read(first, out)?,
            Node::Times { of, matrix } => lazy::read_times(of, &**matrix, first, out)?,
            Node::TransposedTimes(product) => product.read(first, out)?,
            Node::Blocks { codes, scales, zero_points, block } => {
                read_blocks(codes, scales, zero_points, *block, first, out)?;
            }
        }
        Ok(())
    }

    /// Returns the operand that holds element `at`, the element's index in it, and the number of elements, at most
    /// `length`, that follow there. `at` must be inside this weight.
    pub(super) fn piece(&self, at: u64, length: u64) -> (&SourceWeight, u64, u64) {
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
            Node::Transposed(of) => {
                let (rows, columns) = (of.shape[of.shape.len() - 2], of.columns());
                let (matrix, place) = (at / (rows * columns), at % (rows * columns));
                (of, matrix * rows * columns + place % rows * columns + place / rows, 1)
            }
            Node::Map { of, .. } | Node::ByColumn { of, .. } | Node::ByRow { of, .. } => (of, at, length),
            // codes are finite, so that other numbers come from scales
            Node::Blocks { codes, scales, block: [rows, columns], .. } => {
                let (row, column) = (at / codes.columns(), at % codes.columns());
                (scales, row / rows * scales.columns() + column / columns, 1)
            }
            Node::Tensor(_)
            | Node::Values { .. }
            | Node::Computed(_)
            | Node::ComputedRows(_)
            | Node::LowRankSum(_)
            | Node::Times { .. }
            | Node::TransposedTimes(_) => (self, at, length),
        }
    }

    /// Returns memory from reading elements to the system (see `SourceTensor::release`).
    pub fn release(&self, range: Range<u64>) {
        match &*self.node {
            Node::Tensor(tensor) => tensor.release(range),
            Node::Values { .. } | Node::Computed(_) => {}
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
            // elements are scattered over the operand
            Node::Reordered { of, .. } | Node::Columns { of, .. } | Node::Transposed(of) => {
                of.release(0..of.elements())
            }
            Node::Map { of, .. } | Node::ByColumn { of, .. } | Node::ByRow { of, .. } | Node::Times { of, .. } => {
                of.release(range)
            }
            Node::ComputedRows(computed) => computed.release(range),
            Node::TransposedTimes(product) => product.release(range),
            Node::LowRankSum(sum) => sum.release(range),
            Node::Blocks { codes, scales, zero_points, block } => {
                let rows = range.start / codes.columns().max(1) / block[0]
                    ..range.end.div_ceil(codes.columns().max(1) * block[0]);
                let blocks = rows.start * scales.columns()..(rows.end * scales.columns()).min(scales.elements());
                codes.release(range);
                scales.release(blocks.clone());
                if let ZeroPoints::Each(each) = zero_points {
                    each.release(blocks);
                }
            }
        }
    }

    /// Checks that values read from `first_row` on are finite.
    ///
    /// # Errors
    /// Returns [`SourceError::NotFinite`] with the tensor, row and column of the first value that isn't.
    pub fn check_finite(&self, first_row: u64, values: &[f32]) -> Result<()> {
        let Some(index) = values.iter().position(|value| !value.is_finite()) else { return Ok(()) };
        let (mut weight, mut element) = (self, first_row * self.columns() + index as u64);
        let (name, columns) = loop {
            match &*weight.node {
                // a weight can have another shape than its tensor
                Node::Tensor(tensor) => break (tensor.name().to_owned(), tensor.columns()),
                Node::Values { name, .. } => break (name.clone(), weight.columns()),
                Node::Computed(computed) => break (computed.name.clone(), weight.columns()),
                // as above, if all operands have these rows
                Node::ComputedRows(computed) => {
                    let row = element / computed.columns;
                    for of in &computed.by_row {
                        of.check_rows_finite(row..row + 1)?;
                    }
                    for of in &computed.whole {
                        of.check_rows_finite(0..of.rows())?;
                    }
                    break (computed.name.clone(), computed.columns);
                }
                // one non-finite number spoils all that it is mixed with
                Node::Times { of, matrix } => {
                    let row = element / matrix.size();
                    of.check_rows_finite(row..row + 1)?;
                    break (weight.key(), matrix.size());
                }
                Node::LowRankSum(sum) => {
                    let (row, columns) = (element / weight.columns(), weight.columns());
                    sum.of.check_rows_finite(row..row + 1)?;
                    sum.up.check_rows_finite(row..row + 1)?;
                    sum.down.check_rows_finite(0..sum.down.rows())?;
                    break (weight.key(), columns);
                }
                Node::TransposedTimes(product) => {
                    product.of.check_rows_finite(0..product.of.rows())?;
                    break (weight.key(), product.of.columns());
                }
                _ => (weight, element, _) = weight.piece(element, 1),
            }
        };
        let (row, column) = (element / columns, element % columns);
        Err(SourceError::NotFinite { tensor: name, row, column, value: values[index] })
    }

    /// Reads rows and checks them.
    fn check_rows_finite(&self, rows: Range<u64>) -> Result<()> {
        let mut values = vec![0.0; self.columns() as usize];
        for row in rows {
            self.read_rows(row, &mut values)?;
            self.check_finite(row, &values)?;
        }
        Ok(())
    }
}

/// Multiplies values read from element `first` on by the factors of their rows.
fn multiply_by_row(vector: &SourceWeight, columns: u64, first: u64, out: &mut [f32]) -> Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    let rows = first / columns..(first + out.len() as u64).div_ceil(columns);
    let mut factors = vec![0.0; (rows.end - rows.start) as usize];
    vector.read(rows.start, &mut factors)?;
    let mut rest = out;
    let mut length = (columns - first % columns) as usize;
    for factor in factors {
        let (row, after) = rest.split_at_mut(length.min(rest.len()));
        row.iter_mut().for_each(|value| *value *= factor);
        (rest, length) = (after, columns as usize);
    }
    Ok(())
}

/// Computes elements from `first` on of transposed matrices. Rows of the result are columns of `of`: each row of `of`
/// is read once, as far as needed, and scattered.
fn read_transposed(of: &SourceWeight, first: u64, out: &mut [f32]) -> Result<()> {
    let (rows, columns) = (of.shape[of.shape.len() - 2], of.columns());
    let matrix = rows * columns;
    let (mut at, mut rest) = (first, out);
    let mut strip = Vec::new();
    while !rest.is_empty() {
        let (start, place) = (at - at % matrix, at % matrix);
        let (part, after) = rest.split_at_mut((matrix - place).min(rest.len() as u64) as usize);
        let end = place + part.len() as u64;
        let needed = place / rows..end.div_ceil(rows);
        strip.resize((needed.end - needed.start) as usize, 0.0);
        for row in 0..rows {
            of.read(start + row * columns + needed.start, &mut strip)?;
            for (column, value) in needed.clone().zip(&strip) {
                let to = column * rows + row;
                if (place..end).contains(&to) {
                    part[(to - place) as usize] = *value;
                }
            }
        }
        at += part.len() as u64;
        rest = after;
    }
    Ok(())
}

/// Decodes elements from `first` on of a matrix in blocks.
fn read_blocks(
    codes: &SourceWeight,
    scales: &SourceWeight,
    zero_points: &ZeroPoints,
    [block_rows, block_columns]: [u64; 2],
    first: u64,
    out: &mut [f32],
) -> Result<()> {
    codes.read(first, out)?;
    let columns = codes.columns();
    let (mut factors, mut zeros) = (Vec::new(), Vec::new());
    let (mut at, mut rest) = (first, out);
    while !rest.is_empty() {
        let (row, column) = (at / columns, at % columns);
        let (part, after) = rest.split_at_mut((columns - column).min(rest.len() as u64) as usize);
        let end = column + part.len() as u64;
        let blocks = column / block_columns..end.div_ceil(block_columns);
        let from = row / block_rows * scales.columns() + blocks.start;
        factors.resize((blocks.end - blocks.start) as usize, 0.0);
        scales.read(from, &mut factors)?;
        match zero_points {
            ZeroPoints::All(zero) => {
                zeros.clear();
                zeros.resize(factors.len(), *zero);
            }
            ZeroPoints::Each(each) => {
                zeros.resize(factors.len(), 0.0);
                each.read(from, &mut zeros)?;
            }
        }
        let mut start = column;
        let mut row_rest = part;
        for (factor, zero) in factors.iter().zip(&zeros) {
            let next = (start - start % block_columns + block_columns).min(end);
            let (values, following) = row_rest.split_at_mut((next - start) as usize);
            values.iter_mut().for_each(|value| *value = (*value - zero) * factor);
            (start, row_rest) = (next, following);
        }
        at += end - column;
        rest = after;
    }
    Ok(())
}
