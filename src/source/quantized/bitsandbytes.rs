//! bitsandbytes: 4-bit codebooks (NF4, FP4) with a scale for each block of consecutive elements, and int8 by row.

use serde_json::Value as Json;

use super::{Checkpoint, Numbers, bytes_as_integers, bytes_of, integer_matrix, matrix, numbers};
use crate::dtype::SourceDtype;
use crate::error::{Result, SourceError};
use crate::tensor::SourceTensor;
use crate::weight::{Formula, Integers, Rounding};

/// One over 127, as bitsandbytes spells it.
const ONE_127TH: f32 = 7.874_015_7e-3;

/// Reads both formats.
pub(super) fn read(mut checkpoint: Checkpoint<'_>) -> Result<Vec<SourceTensor>> {
    for suffix in [".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"] {
        for name in checkpoint.bases(suffix) {
            let state = checkpoint.take(&format!("{name}{suffix}"))?;
            add_codebook(&mut checkpoint, &name, &state)?;
        }
    }
    for base in checkpoint.bases("SCB") {
        add_rows(&mut checkpoint, &base)?;
    }
    checkpoint.drop_all(&[".weight_format"]);
    Ok(checkpoint.finish())
}

fn wrong(checkpoint: &Checkpoint<'_>, tensor: &SourceTensor, problem: String) -> SourceError {
    SourceError::tensor(tensor.path().unwrap_or(checkpoint.place), tensor.name(), problem)
}

/// Scales of blocks, which may be quantized in turn.
enum Scales {
    Plain(Numbers),
    Nested { codes: SourceTensor, map: Vec<f32>, blocks: Numbers, size: usize, offset: f32 },
}

impl Scales {
    #[inline]
    fn get(&self, index: usize) -> f32 {
        match self {
            Scales::Plain(numbers) => numbers.get(index),
            Scales::Nested { codes, map, blocks, size, offset } => {
                let code = codes.bytes().unwrap_or_default()[index];
                map[usize::from(code)] * blocks.get(index / size) + offset
            }
        }
    }
}

/// Two elements to a byte, the first in the high half.
fn add_codebook(checkpoint: &mut Checkpoint<'_>, name: &str, state: &SourceTensor) -> Result<()> {
    let invalid = |what: &str| wrong(checkpoint, state, format!("its {what} isn't one that bitsandbytes writes"));
    let json: Json = state.bytes().and_then(|bytes| serde_json::from_slice(bytes).ok()).unwrap_or_default();
    let size = |key: &str| json[key].as_u64().filter(|size| *size > 0).ok_or_else(|| invalid(key));
    let shape: Option<Vec<u64>> = json["shape"].as_array().and_then(|sizes| sizes.iter().map(Json::as_u64).collect());
    let shape = shape.filter(|shape| shape.len() == 2).ok_or_else(|| invalid("shape"))?;
    let (rows, columns, block) = (shape[0], shape[1], size("blocksize")?);
    let rounding = json["dtype"].as_str().and_then(Rounding::of_name).ok_or_else(|| invalid("dtype"))?;
    let elements = rows.checked_mul(columns).ok_or_else(|| invalid("shape"))?;
    let nested = json["nested_blocksize"].as_u64().filter(|size| *size > 0);
    let offset = json["nested_offset"].as_f64().unwrap_or(0.0) as f32;
    let weight = checkpoint.take(name)?;
    bytes_of(&weight, &[SourceDtype::U8], &[elements.div_ceil(2), 1])?;
    let map = numbers(&checkpoint.take(&format!("{name}.quant_map"))?)?;
    if map.len() != 16 {
        return Err(wrong(checkpoint, &weight, format!("its quant_map has {} numbers, expected 16", map.len())));
    }
    let absmax = checkpoint.take(&format!("{name}.absmax"))?;
    let count = elements.div_ceil(block);
    let scales = match nested {
        None => {
            bytes_of(&absmax, &[SourceDtype::F32], &[count])?;
            Scales::Plain(Numbers::new(&absmax)?)
        }
        Some(size) => {
            bytes_of(&absmax, &[SourceDtype::U8], &[count])?;
            let [blocks, map] = ["nested_absmax", "nested_quant_map"].map(|part| format!("{name}.{part}"));
            let (blocks, map) = (checkpoint.take(&blocks)?, numbers(&checkpoint.take(&map)?)?);
            bytes_of(&blocks, &[SourceDtype::F32], &[count.div_ceil(size)])?;
            if map.len() != 256 {
                let problem = format!("its nested_quant_map has {} numbers, expected 256", map.len());
                return Err(wrong(checkpoint, &absmax, problem));
            }
            Scales::Nested { codes: absmax.clone(), map, blocks: Numbers::new(&blocks)?, size: size as usize, offset }
        }
    };
    let codes = weight.clone();
    let decode = move |row: u64, out: &mut [f32]| {
        let bytes = codes.bytes().unwrap_or_default();
        for (out, element) in out.iter_mut().zip(row * columns..) {
            let byte = bytes[(element / 2) as usize];
            let code = if element % 2 == 0 { byte >> 4 } else { byte & 15 };
            *out = rounding.round(map[usize::from(code)] * scales.get((element / block) as usize));
        }
        Ok(())
    };
    let parts = [&weight, &absmax];
    let decoded = matrix(name, [rows, columns], &parts, decode);
    checkpoint.put(name.to_owned(), &parts, SourceDtype::U4, decoded);
    Ok(())
}

/// int8 with the largest magnitude of each row.
fn add_rows(checkpoint: &mut Checkpoint<'_>, base: &str) -> Result<()> {
    let name = format!("{base}weight");
    let (weight, largest) = (checkpoint.take(&name)?, checkpoint.take(&format!("{base}SCB"))?);
    let &[rows, columns] = weight.shape() else {
        return Err(wrong(
            checkpoint,
            &weight,
            format!("its shape is {:?}, expected that of a matrix", weight.shape()),
        ));
    };
    bytes_of(&weight, &[SourceDtype::I8], &[rows, columns])?;
    bytes_of(&largest, &[SourceDtype::F32], &[rows])?;
    let (factors, rounding, codes) = (numbers(&largest)?, checkpoint.dtype, weight.clone());
    let parts = [&weight, &largest];
    let integers = Integers {
        range: [-128, 127],
        zeros: [0, 0],
        columns,
        groups: 1,
        order: None,
        formula: Formula::Scaled(ONE_127TH),
        rounding,
        read: Box::new(move |row, out| bytes_as_integers(&codes, row, out)),
        numbers: Box::new(move |row, _| [factors[row], 0.0]),
    };
    let decoded = integer_matrix(&name, rows, &parts, integers);
    checkpoint.put(name, &parts, SourceDtype::I8, decoded);
    Ok(())
}
