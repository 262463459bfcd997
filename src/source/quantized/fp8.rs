//! FP8: a scale for each block, each row, or the whole weight.

use super::{Checkpoint, matrix, numbers};
use crate::dtype::SourceDtype;
use crate::error::{Result, SourceError};
use crate::tensor::SourceTensor;
use crate::weight::Rounding;

/// Reads DeepSeek's blocks (`weight_scale_inv`) and FBGEMM's rows (`weight_scale`).
pub(super) fn read(mut checkpoint: Checkpoint<'_>) -> Result<Vec<SourceTensor>> {
    let block = match checkpoint.settings.get("weight_block_size").filter(|block| !block.is_null()) {
        None => None,
        Some(block) => {
            let sizes: Option<Vec<u64>> =
                block.as_array().and_then(|sizes| sizes.iter().map(|size| size.as_u64().filter(|n| *n > 0)).collect());
            let sizes = sizes.filter(|sizes| sizes.len() == 2);
            let wrong = || checkpoint.wrong("weight_block_size", "it isn't two positive numbers");
            sizes.map(|sizes| Some([sizes[0], sizes[1]])).ok_or_else(wrong)?
        }
    };
    for suffix in ["weight_scale_inv", "weight_scale"] {
        for base in checkpoint.bases(suffix) {
            let scales = checkpoint.take(&format!("{base}{suffix}"))?;
            let rounding = match checkpoint.dtype {
                Rounding::None => Rounding::of(scales.dtype()),
                known => known,
            };
            add(&mut checkpoint, &format!("{base}weight"), scales, block, rounding)?;
        }
    }
    checkpoint.drop_all(&[".input_scale", ".activation_scale", ".input_scale_ub"]);
    Ok(checkpoint.finish())
}

/// Puts `weight * scale` in place of the weight, rounded.
pub(super) fn add(
    checkpoint: &mut Checkpoint<'_>,
    name: &str,
    scales: SourceTensor,
    block: Option<[u64; 2]>,
    rounding: Rounding,
) -> Result<()> {
    let weight = checkpoint.take(name)?;
    let &[rows, columns] = weight.shape() else {
        let problem = format!("its shape is {:?}, expected that of a matrix", weight.shape());
        return Err(SourceError::tensor(weight.path().unwrap_or(checkpoint.place), name, problem));
    };
    let by_block = block.map(|[height, width]| [rows.div_ceil(height), columns.div_ceil(width)]);
    let count = scales.elements();
    let (height, width, across) = match (block, by_block) {
        (Some([height, width]), Some([down, across])) if scales.shape() == [down, across] => (height, width, across),
        _ if count == 1 => (rows.max(1), columns.max(1), 1),
        _ if count == rows => (1, columns.max(1), 1),
        _ => {
            let problem = format!("its shape is {:?}, expected scales of {:?}", scales.shape(), weight.shape());
            return Err(SourceError::tensor(scales.path().unwrap_or(checkpoint.place), scales.name(), problem));
        }
    };
    let factors = numbers(&scales)?;
    let codes = weight.clone();
    let decode = move |row: u64, out: &mut [f32]| {
        codes.read(row * columns, out)?;
        let first = (row / height * across) as usize;
        for (part, factor) in out.chunks_mut(width as usize).zip(&factors[first..]) {
            part.iter_mut().for_each(|value| *value = rounding.round(*value * factor));
        }
        Ok(())
    };
    let decoded = matrix(name, [rows, columns], &[&weight, &scales], decode);
    checkpoint.put(name.to_owned(), &[&weight, &scales], weight.dtype(), decoded);
    Ok(())
}

/// FP8 types of weights.
pub(super) const TYPES: [SourceDtype; 2] = [SourceDtype::F8_E4M3, SourceDtype::F8_E5M2];
