//! GPTQ and AWQ: integers packed into 32-bit words, with scales and zero points for groups of input channels.

use serde_json::Value as Json;

use super::bits::{field, field_of_column, word};
use super::{Checkpoint, Numbers, bytes_of, integer_matrix, numbers};
use crate::dtype::SourceDtype;
use crate::error::Result;
use crate::tensor::SourceTensor;
use crate::weight::{Formula, Integers, Rounding};

const WORDS: [SourceDtype; 2] = [SourceDtype::I32, SourceDtype::U32];
const HALVES: [SourceDtype; 3] = [SourceDtype::F16, SourceDtype::BF16, SourceDtype::F32];

/// Type that a number of bits is stored in, for reports.
pub(super) fn dtype_of(bits: u32) -> SourceDtype {
    match bits {
        0..=2 => SourceDtype::U2,
        3..=4 => SourceDtype::U4,
        _ => SourceDtype::U8,
    }
}

/// Reads GPTQ: words go down the input channels of `qweight` and along the output channels of `qzeros`.
pub(super) fn read_gptq(mut checkpoint: Checkpoint<'_>) -> Result<Vec<SourceTensor>> {
    let settings = checkpoint.settings;
    let bits = match settings["bits"].as_u64() {
        Some(bits @ (2 | 3 | 4 | 8)) => bits as u32,
        _ => return Err(checkpoint.wrong("bits", "expected 2, 3, 4 or 8")),
    };
    // the first version stores zero points less one
    let stored_less = match settings["checkpoint_format"].as_str() {
        None | Some("gptq") => 1,
        Some("gptq_v2") => 0,
        Some(other) => return Err(checkpoint.wrong("checkpoint_format", &format!("it is \"{other}\", expected gptq"))),
    };
    for base in checkpoint.bases("qweight") {
        let [qweight, qzeros, scales] = ["qweight", "qzeros", "scales"].map(|name| format!("{base}{name}"));
        let (qweight, qzeros, scales) =
            (checkpoint.take(&qweight)?, checkpoint.take(&qzeros)?, checkpoint.take(&scales)?);
        let order = checkpoint.tensors.remove(&format!("{base}g_idx"));
        let &[groups, rows] = scales.shape() else { return Err(not_a_matrix(&checkpoint, &scales)) };
        let &[words, _] = qweight.shape() else { return Err(not_a_matrix(&checkpoint, &qweight)) };
        let columns = words * 32 / u64::from(bits);
        bytes_of(&qweight, &WORDS, &[columns * u64::from(bits) / 32, rows])?;
        bytes_of(&qzeros, &WORDS, &[groups, (rows * u64::from(bits)).div_ceil(32)])?;
        bytes_of(&scales, &HALVES, &[groups, rows])?;
        let group_size = match settings["group_size"].as_i64() {
            Some(size) if size > 0 => size as u64,
            _ => columns.max(1),
        };
        let group_of: Vec<u32> = match &order {
            Some(order) => {
                bytes_of(order, &WORDS, &[columns])?;
                numbers(order)?.into_iter().map(|group| group as u32).collect()
            }
            None => (0..columns).map(|column| (column / group_size) as u32).collect(),
        };
        if let Some(group) = group_of.iter().find(|group| u64::from(**group) >= groups) {
            let problem = format!("group {group} of an input channel isn't one of {groups}");
            let tensor = order.as_ref().unwrap_or(&scales);
            return Err(crate::SourceError::tensor(checkpoint.place, tensor.name(), problem));
        }
        let (rounding, factors) = (Rounding::of(scales.dtype()), Numbers::new(&scales)?);
        let parts = [&qweight, &qzeros, &scales];
        let (codes, zeros) = (qweight.clone(), qzeros.clone());
        let (stride, zero_words) = (rows as usize, (rows * u64::from(bits)).div_ceil(32) as usize);
        let read = move |row: usize, out: &mut [i16]| {
            let codes = codes.bytes().unwrap_or_default();
            let code = |column| field_of_column(codes, row, stride, column, bits) as i16;
            out.iter_mut().enumerate().for_each(|(column, out)| *out = code(column));
        };
        let numbers = move |row: usize, group: usize| {
            let stored = field(&zeros.bytes().unwrap_or_default()[4 * group * zero_words..], row, bits);
            [factors.get(group * stride + row), (stored + stored_less) as f32]
        };
        let most = (1 << bits) - 1;
        let name = format!("{base}weight");
        let integers = Integers {
            range: [0, most],
            zeros: match settings["sym"].as_bool() {
                Some(true) => [1 << (bits - 1); 2],
                _ => [0, most],
            },
            columns,
            groups,
            order: in_order(group_of, groups),
            formula: Formula::Shifted,
            rounding,
            read: Box::new(read),
            numbers: Box::new(numbers),
        };
        let decoded = integer_matrix(&name, rows, &parts, integers);
        checkpoint.put(name, &parts, dtype_of(bits), decoded);
    }
    Ok(checkpoint.finish())
}

/// Place of each of eight consecutive output channels within a word of AWQ.
const AWQ_ORDER: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Reads AWQ: words go along the output channels of `qweight` and `qzeros`, eight interleaved channels each.
pub(super) fn read_awq(mut checkpoint: Checkpoint<'_>) -> Result<Vec<SourceTensor>> {
    let settings = checkpoint.settings;
    let setting = |keys: [&str; 2]| keys.iter().find_map(|key| settings.get(*key)).cloned().unwrap_or(Json::Null);
    if setting(["bits", "w_bit"]).as_u64().is_some_and(|bits| bits != 4) {
        return Err(checkpoint.wrong("bits", "expected 4"));
    }
    if let Some(version) = settings["version"].as_str().filter(|version| !version.eq_ignore_ascii_case("gemm")) {
        return Err(checkpoint.wrong("version", &format!("it is \"{version}\", expected gemm")));
    }
    for base in checkpoint.bases("qweight") {
        let [qweight, qzeros, scales] = ["qweight", "qzeros", "scales"].map(|name| format!("{base}{name}"));
        let (qweight, qzeros, scales) =
            (checkpoint.take(&qweight)?, checkpoint.take(&qzeros)?, checkpoint.take(&scales)?);
        let &[groups, rows] = scales.shape() else { return Err(not_a_matrix(&checkpoint, &scales)) };
        let &[columns, _] = qweight.shape() else { return Err(not_a_matrix(&checkpoint, &qweight)) };
        let words = rows / 8;
        bytes_of(&qweight, &WORDS, &[columns, words])?;
        bytes_of(&qzeros, &WORDS, &[groups, words])?;
        bytes_of(&scales, &HALVES, &[groups, rows])?;
        if columns.checked_div(groups).is_none_or(|size| size == 0 || size * groups != columns) {
            let problem = format!("{groups} groups don't divide {columns} input channels");
            return Err(crate::SourceError::tensor(checkpoint.place, scales.name(), problem));
        }
        let (rounding, factors) = (Rounding::of(scales.dtype()), Numbers::new(&scales)?);
        let parts = [&qweight, &qzeros, &scales];
        let (codes, zeros) = (qweight.clone(), qzeros.clone());
        let (words, rows_of) = (words as usize, rows as usize);
        let code = move |bytes: &[u8], line: usize, row: usize| {
            (word(bytes, line * words + row / 8) >> (4 * AWQ_ORDER[row % 8]) & 15) as i16
        };
        let read = move |row: usize, out: &mut [i16]| {
            let codes = codes.bytes().unwrap_or_default();
            out.iter_mut().enumerate().for_each(|(column, out)| *out = code(codes, column, row));
        };
        let numbers = move |row: usize, group: usize| {
            let zero = code(zeros.bytes().unwrap_or_default(), group, row);
            [factors.get(group * rows_of + row), f32::from(zero)]
        };
        let name = format!("{base}weight");
        let integers = Integers {
            range: [0, 15],
            zeros: [0, 15],
            columns,
            groups,
            order: None,
            formula: Formula::Shifted,
            rounding,
            read: Box::new(read),
            numbers: Box::new(numbers),
        };
        let decoded = integer_matrix(&name, rows, &parts, integers);
        checkpoint.put(name, &parts, SourceDtype::U4, decoded);
    }
    Ok(checkpoint.finish())
}

/// Returns the group of each column unless groups are equal numbers of consecutive columns.
pub(super) fn in_order(group_of: Vec<u32>, groups: u64) -> Option<Vec<u32>> {
    let size = (group_of.len() as u64).checked_div(groups).unwrap_or(0);
    let is_plain = size * groups == group_of.len() as u64
        && group_of.iter().zip(0..).all(|(own, column): (&u32, u64)| column.checked_div(size) == Some(u64::from(*own)));
    (!is_plain).then_some(group_of)
}

fn not_a_matrix(checkpoint: &Checkpoint<'_>, tensor: &SourceTensor) -> crate::SourceError {
    let problem = format!("its shape is {:?}, expected that of a matrix", tensor.shape());
    crate::SourceError::tensor(tensor.path().unwrap_or(checkpoint.place), tensor.name(), problem)
}
