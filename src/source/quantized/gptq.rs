//! GPTQ and AWQ: integers packed into 32-bit words, with scales and zero points for groups of input channels.

use serde_json::Value as Json;

use super::bits::{field, field_of_column, word};
use super::{Checkpoint, Numbers, Rounding, bytes_of, matrix, numbers};
use crate::dtype::SourceDtype;
use crate::error::Result;
use crate::tensor::SourceTensor;

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
        let decode = move |row: u64, out: &mut [f32]| {
            let row = row as usize;
            let (codes, zeros) = (codes.bytes().unwrap_or_default(), zeros.bytes().unwrap_or_default());
            let of_group = |group: usize| {
                let stored = field(&zeros[4 * group * zero_words..], row, bits);
                (factors.get(group * stride + row), (stored + stored_less) as f32)
            };
            let groups: Vec<(f32, f32)> = (0..groups as usize).map(of_group).collect();
            for (column, (out, group)) in out.iter_mut().zip(&group_of).enumerate() {
                let (scale, zero) = groups[*group as usize];
                let code = field_of_column(codes, row, stride, column, bits) as f32;
                *out = rounding.round(scale * (code - zero));
            }
            Ok(())
        };
        let name = format!("{base}weight");
        let decoded = matrix(&name, [rows, columns], &parts, decode);
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
        let size = columns.checked_div(groups).filter(|size| size * groups == columns && *size > 0);
        let Some(size) = size else {
            let problem = format!("{groups} groups don't divide {columns} input channels");
            return Err(crate::SourceError::tensor(checkpoint.place, scales.name(), problem));
        };
        let (rounding, factors) = (Rounding::of(scales.dtype()), Numbers::new(&scales)?);
        let parts = [&qweight, &qzeros, &scales];
        let (codes, zeros) = (qweight.clone(), qzeros.clone());
        let (words, rows_of) = (words as usize, rows as usize);
        let decode = move |row: u64, out: &mut [f32]| {
            let row = row as usize;
            let (codes, zeros) = (codes.bytes().unwrap_or_default(), zeros.bytes().unwrap_or_default());
            let shift = 4 * AWQ_ORDER[row % 8];
            let code = |bytes: &[u8], line: usize| word(bytes, line * words + row / 8) >> shift & 15;
            for (group, out) in out.chunks_mut(size as usize).enumerate() {
                let (scale, zero) = (factors.get(group * rows_of + row), code(zeros, group) as f32);
                for (column, out) in out.iter_mut().enumerate() {
                    let value = code(codes, group * size as usize + column) as f32;
                    *out = rounding.round((value - zero) * scale);
                }
            }
            Ok(())
        };
        let name = format!("{base}weight");
        let decoded = matrix(&name, [rows, columns], &parts, decode);
        checkpoint.put(name, &parts, SourceDtype::U4, decoded);
    }
    Ok(checkpoint.finish())
}

fn not_a_matrix(checkpoint: &Checkpoint<'_>, tensor: &SourceTensor) -> crate::SourceError {
    let problem = format!("its shape is {:?}, expected that of a matrix", tensor.shape());
    crate::SourceError::tensor(tensor.path().unwrap_or(checkpoint.place), tensor.name(), problem)
}
