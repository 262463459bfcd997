//! MLX: integers of 2 to 8 bits packed along each row, with a scale and a bias for each group.

use serde_json::Value as Json;

use super::bits::field;
use super::gptq::dtype_of;
use super::{Checkpoint, Numbers, bytes_of, integer_matrix};
use crate::dtype::SourceDtype;
use crate::error::{Result, SourceError};
use crate::tensor::SourceTensor;
use crate::weight::{Formula, Integers, Rounding};

/// Reads affine quantization, whose settings may differ from layer to layer.
pub(super) fn read(mut checkpoint: Checkpoint<'_>) -> Result<Vec<SourceTensor>> {
    for base in checkpoint.bases(".scales") {
        let own = checkpoint.settings.get(&base).filter(|own| own.is_object());
        let setting = |key: &str| own.and_then(|own| own.get(key)).or_else(|| checkpoint.settings.get(key));
        if let Some(mode) = setting("mode").and_then(Json::as_str).filter(|mode| *mode != "affine") {
            return Err(checkpoint.wrong("mode", &format!("it is \"{mode}\", expected affine")));
        }
        let bits = match setting("bits").and_then(Json::as_u64) {
            Some(bits @ (2..=6 | 8)) => bits as u32,
            _ => return Err(checkpoint.wrong("bits", "expected 2, 3, 4, 5, 6 or 8")),
        };
        let group = setting("group_size").and_then(Json::as_u64).filter(|size| *size > 0);
        let Some(group) = group else { return Err(checkpoint.wrong("group_size", "expected a positive number")) };
        add(&mut checkpoint, &base, bits, group)?;
    }
    Ok(checkpoint.finish())
}

fn add(checkpoint: &mut Checkpoint<'_>, base: &str, bits: u32, group: u64) -> Result<()> {
    let name = format!("{base}.weight");
    let [scales, biases] = ["scales", "biases"].map(|part| format!("{base}.{part}"));
    let (weight, scales, biases) = (checkpoint.take(&name)?, checkpoint.take(&scales)?, checkpoint.take(&biases)?);
    // experts are a stack of matrices
    let (Some((groups, above)), Some(words)) = (scales.shape().split_last(), weight.shape().last()) else {
        let problem = format!("its shape is {:?}, expected that of a matrix", weight.shape());
        return Err(SourceError::tensor(weight.path().unwrap_or(checkpoint.place), &name, problem));
    };
    let (groups, words, columns) = (*groups, *words, *groups * group);
    let rows: u64 = above.iter().product();
    bytes_of(&weight, &[SourceDtype::U32], &[above, &[(columns * u64::from(bits)).div_ceil(32)]].concat())?;
    bytes_of(&biases, &[scales.dtype()], &[above, &[groups]].concat())?;
    let shape = [above, &[columns]].concat();
    let (rounding, factors, addends) = (Rounding::of(scales.dtype()), Numbers::new(&scales)?, Numbers::new(&biases)?);
    let (codes, words, stride) = (weight.clone(), words as usize, groups as usize);
    let read = move |row: usize, out: &mut [i16]| {
        let codes = &codes.bytes().unwrap_or_default()[row * 4 * words..];
        out.iter_mut().enumerate().for_each(|(column, out)| *out = field(codes, column, bits) as i16);
    };
    let numbers = move |row: usize, index: usize| {
        let at = row * stride + index;
        [factors.get(at), addends.get(at)]
    };
    let most = (1 << bits) - 1;
    let integers = Integers {
        range: [0, most],
        zeros: [0, most],
        columns,
        groups,
        order: None,
        formula: Formula::Affine,
        rounding,
        read: Box::new(read),
        numbers: Box::new(numbers),
    };
    let parts = [&weight, &scales, &biases];
    let decoded = integer_matrix(&name, rows, &parts, integers).reshape(&shape)?;
    checkpoint.put(name, &parts, dtype_of(bits), decoded);
    Ok(())
}
