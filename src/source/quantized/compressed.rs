//! compressed-tensors, as LLM Compressor writes it: FP8, int8, and integers of 2 to 8 bits packed into words.

use super::bits::{field, field_of_column};
use super::gptq::{dtype_of, in_order};
use super::{Checkpoint, Numbers, bytes_as_integers, bytes_of, fp8, integer_matrix, numbers};
use crate::dtype::SourceDtype;
use crate::error::{Result, SourceError};
use crate::tensor::SourceTensor;
use crate::weight::{Formula, Integers, Rounding};

const WORDS: [SourceDtype; 1] = [SourceDtype::I32];

/// Reads all formats: which one a weight has follows from its tensors and its group's settings.
pub(super) fn read(mut checkpoint: Checkpoint<'_>) -> Result<Vec<SourceTensor>> {
    let groups = checkpoint.settings["config_groups"].as_object().cloned().unwrap_or_default();
    let weights: Vec<_> = groups.values().map(|group| group["weights"].clone()).filter(|own| !own.is_null()).collect();
    let Some(first) = weights.first() else {
        return Err(checkpoint.wrong("config_groups", "no group describes weights"));
    };
    // settings that decide how words are divided must be one for all
    if let Some(other) = weights.iter().find(|own| own["num_bits"] != first["num_bits"]) {
        let problem = format!("it is {} and {}, expected one for all groups", first["num_bits"], other["num_bits"]);
        return Err(checkpoint.wrong("config_groups.*.weights.num_bits", &problem));
    }
    let bits = match first["num_bits"].as_u64() {
        Some(bits @ 2..=8) => bits as u32,
        _ => return Err(checkpoint.wrong("config_groups.*.weights.num_bits", "expected 2 to 8")),
    };
    let block =
        first["block_structure"].as_array().map(|sizes| [sizes[0].as_u64(), sizes.get(1).and_then(|n| n.as_u64())]);
    let block = block.and_then(|[height, width]| Some([height.filter(|n| *n > 0)?, width.filter(|n| *n > 0)?]));
    for base in checkpoint.bases("weight_scale") {
        let scales = checkpoint.take(&format!("{base}weight_scale"))?;
        let rounding = Rounding::of(scales.dtype());
        let name = format!("{base}weight");
        if let Some(packed) = checkpoint.tensors.remove(&format!("{base}weight_packed")) {
            add_packed(&mut checkpoint, &base, &packed, &scales, bits)?;
        } else if checkpoint.tensors.get(&name).is_some_and(|weight| fp8::TYPES.contains(&weight.dtype())) {
            fp8::add(&mut checkpoint, &name, scales, block, rounding)?;
        } else {
            add_integers(&mut checkpoint, &base, &scales)?;
        }
    }
    checkpoint.drop_all(&[".input_scale", ".output_scale", ".input_zero_point", ".output_zero_point"]);
    Ok(checkpoint.finish())
}

fn wrong(checkpoint: &Checkpoint<'_>, tensor: &SourceTensor, problem: String) -> SourceError {
    SourceError::tensor(tensor.path().unwrap_or(checkpoint.place), tensor.name(), problem)
}

/// Integers in words along each row, stored with an offset of half their range.
fn add_packed(
    checkpoint: &mut Checkpoint<'_>,
    base: &str,
    packed: &SourceTensor,
    scales: &SourceTensor,
    bits: u32,
) -> Result<()> {
    let shape = checkpoint.take(&format!("{base}weight_shape"))?;
    let shape = numbers(&shape)?;
    let &[rows, columns] = &shape[..] else {
        return Err(wrong(checkpoint, packed, "its weight_shape isn't that of a matrix".into()));
    };
    let (rows, columns) = (rows as u64, columns as u64);
    let words = (columns * u64::from(bits)).div_ceil(32);
    bytes_of(packed, &WORDS, &[rows, words])?;
    let groups = match scales.shape() {
        [down, groups] if *down == rows && *groups > 0 && columns.is_multiple_of(*groups) => *groups,
        [down] if *down == rows => 1,
        other => {
            let problem = format!("its shape is {other:?}, expected scales for groups of {rows} x {columns}");
            return Err(wrong(checkpoint, scales, problem));
        }
    };
    let zeros = checkpoint.tensors.remove(&format!("{base}weight_zero_point"));
    let zero_words = (rows * u64::from(bits)).div_ceil(32);
    if let Some(zeros) = &zeros {
        bytes_of(zeros, &WORDS, &[zero_words, groups])?;
    }
    let order = checkpoint.tensors.remove(&format!("{base}weight_g_idx"));
    let size = columns / groups;
    let group_of: Vec<u32> = match order.as_ref().map(numbers).transpose()? {
        // -1 marks an order that isn't in use
        Some(order) if order.iter().all(|group| *group >= 0.0) => order.into_iter().map(|group| group as u32).collect(),
        _ => (0..columns).map(|column| (column / size) as u32).collect(),
    };
    if group_of.len() as u64 != columns || group_of.iter().any(|group| u64::from(*group) >= groups) {
        return Err(wrong(
            checkpoint,
            packed,
            format!("its weight_g_idx isn't of {columns} channels in {groups} groups"),
        ));
    }
    let (rounding, factors) = (Rounding::of(scales.dtype()), Numbers::new(scales)?);
    let half = 1i16 << (bits - 1);
    let (codes, words, stride) = (packed.clone(), words as usize, groups as usize);
    let read = move |row: usize, out: &mut [i16]| {
        let codes = &codes.bytes().unwrap_or_default()[row * 4 * words..];
        out.iter_mut().enumerate().for_each(|(column, out)| *out = field(codes, column, bits) as i16 - half);
    };
    let symmetric = zeros.is_none();
    let numbers = move |row: usize, group: usize| {
        let zeros = zeros.as_ref().and_then(SourceTensor::bytes);
        let zero = zeros.map(|zeros| field_of_column(zeros, group, stride, row, bits) as f32 - f32::from(half));
        [factors.get(row * stride + group), zero.unwrap_or(0.0)]
    };
    let name = format!("{base}weight");
    let parts = [packed, scales];
    let range = [-half, half - 1];
    let integers = Integers {
        range,
        zeros: if symmetric { [0, 0] } else { range },
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
    Ok(())
}

/// Integers of a byte each.
fn add_integers(checkpoint: &mut Checkpoint<'_>, base: &str, scales: &SourceTensor) -> Result<()> {
    let name = format!("{base}weight");
    let weight = checkpoint.take(&name)?;
    let &[rows, columns] = weight.shape() else {
        return Err(wrong(
            checkpoint,
            &weight,
            format!("its shape is {:?}, expected that of a matrix", weight.shape()),
        ));
    };
    bytes_of(&weight, &[SourceDtype::I8], &[rows, columns])?;
    let count = scales.elements();
    let groups = match count.checked_div(rows) {
        _ if count == 1 => 0,
        Some(groups) if groups > 0 && groups * rows == count && columns.is_multiple_of(groups) => groups,
        _ => {
            let problem = format!("its shape is {:?}, expected scales of {rows} x {columns}", scales.shape());
            return Err(wrong(checkpoint, scales, problem));
        }
    };
    let zeros = checkpoint.tensors.remove(&format!("{base}weight_zero_point"));
    let zeros = zeros.as_ref().map(numbers).transpose()?;
    if zeros.as_ref().is_some_and(|zeros| zeros.len() as u64 != count) {
        return Err(wrong(checkpoint, scales, format!("{count} scales have another number of zero points")));
    }
    let (rounding, factors) = (Rounding::of(scales.dtype()), Numbers::new(scales)?);
    let codes = weight.clone();
    let symmetric = zeros.is_none();
    let numbers = move |row: usize, group: usize| {
        let at = row * groups as usize + group;
        [factors.get(at), zeros.as_ref().map_or(0.0, |zeros| zeros[at])]
    };
    let parts = [&weight, scales];
    let integers = Integers {
        range: [-128, 127],
        zeros: if symmetric { [0, 0] } else { [-128, 127] },
        columns,
        // one scale for the tensor is one for each row
        groups: groups.max(1),
        order: None,
        formula: Formula::Shifted,
        rounding,
        read: Box::new(move |row, out| bytes_as_integers(&codes, row, out)),
        numbers: Box::new(numbers),
    };
    let decoded = integer_matrix(&name, rows, &parts, integers);
    checkpoint.put(name, &parts, SourceDtype::I8, decoded);
    Ok(())
}
