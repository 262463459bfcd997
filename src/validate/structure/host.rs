//! Host tensors: the embedding is finite, and the rotary tables match the configuration. A golden covers only few rows
//! of either.

use std::path::Path;

use rayon::prelude::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::text;
use crate::verdict::{Check, listed};
use anec_base::MappedFile;
use anec_bundle::Bundle;
use anec_family::RopeTables;
use anec_family::rope::RopeConfig;
use anec_kernels::scan::finite_f16;

/// Largest difference of a rotary table's value from the one computed here; sines differ between systems in the last
/// digits.
const ROPE_DIFFERENCE: f32 = 1e-5;

/// Checks of the host's tensors.
pub(super) fn checks(bundle: &Bundle, folder: &Path) -> Vec<Check> {
    let name = &bundle.host.file.file;
    let embedding = "its embedding is of finite fp16 numbers";
    let rope = "its rotary tables are those of the configuration";
    let file = MappedFile::open(&folder.join(name)).map_err(text);
    let tensors = file.as_ref().map_err(Clone::clone).and_then(|f| SafeTensors::deserialize(f.bytes()).map_err(text));
    match tensors {
        Err(problem) => vec![Check::of(name, embedding, Some(problem))],
        Ok(tensors) => {
            let mut checks = vec![
                Check::of(name, embedding, check_halves(&bundle.host.embedding, &tensors).err()),
                Check::of(name, rope, listed(&rotary(bundle, &tensors))),
            ];
            if let Some(table) = &bundle.host.per_layer_embedding {
                let claim = "what layers are told of tokens is of finite fp16 numbers";
                checks.push(Check::of(name, claim, check_halves(table, &tensors).err()));
            }
            checks
        }
    }
}

fn check_halves(name: &str, tensors: &SafeTensors<'_>) -> Result<(), String> {
    let table = tensors.tensor(name).map_err(text)?;
    if table.dtype() != Dtype::F16 {
        return Err(format!("it holds {:?}, expected F16", table.dtype()));
    }
    let width = table.shape().last().copied().unwrap_or(1).max(1);
    let wrong = table.data().par_chunks(2 * width).position_any(|row| !finite_f16(row));
    wrong.map_or(Ok(()), |row| Err(format!("row {row} holds what is no number, or infinite")))
}

/// Differences of the tables from the configuration's.
fn rotary(bundle: &Bundle, tensors: &SafeTensors<'_>) -> Vec<String> {
    let context = bundle.model.contexts.iter().copied().max().unwrap_or(0);
    let problem = |table: &anec_bundle::RopeTable| -> Result<(), String> {
        let config = RopeConfig::of_config(&bundle.config, &table.table)
            .map_err(|error| format!("the configuration has no `{}`: {error}", table.table))?;
        // limit the computed table to the size of the stored one
        let longest = table.variants.last().ok_or_else(|| format!("`{}` has no values", table.table))?;
        let shape = tensors.tensor(&longest.cos).map_err(text)?.shape().to_vec();
        if shape.iter().map(|n| *n as u64).ne([context, config.rope_dim / 2]) {
            let expected = [context, config.rope_dim / 2];
            return Err(format!("`{}` has the shape {shape:?}, expected {expected:?}", longest.cos));
        }
        let RopeTables { columns, variants, .. } = config
            .tables_of_config(&bundle.config, &table.table, context)
            .map_err(|error| format!("the configuration has no `{}`: {error}", table.table))?;
        let lengths: Vec<u64> = table.variants.iter().map(|variant| variant.max_length).collect();
        let expected: Vec<u64> = variants.iter().map(|variant| variant.max_length).collect();
        if lengths != expected {
            return Err(format!("`{}` is for texts of up to {lengths:?} tokens, not {expected:?}", table.table));
        }
        for (variant, expected) in table.variants.iter().zip(&variants) {
            for (name, values) in [(&variant.cos, &expected.cos), (&variant.sin, &expected.sin)] {
                compare(name, &tensors.tensor(name).map_err(text)?, values, columns.max(1))?;
            }
        }
        Ok(())
    };
    bundle.host.rope.iter().filter_map(|table| problem(table).err()).collect()
}

fn compare(name: &str, table: &TensorView<'_>, expected: &[f32], columns: u64) -> Result<(), String> {
    let values = table.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    if table.dtype() != Dtype::F32 || values.len() != expected.len() {
        let (dtype, shape) = (table.dtype(), table.shape());
        return Err(format!(
            "`{name}` holds {dtype:?} {shape:?}, expected F32 of {} rows",
            expected.len() as u64 / columns
        ));
    }
    // `!(<=)` is true for NaN
    let mut wrong = values.zip(expected).enumerate().filter(|(_, (v, e))| !((v - **e).abs() <= ROPE_DIFFERENCE));
    match wrong.next() {
        None => Ok(()),
        Some((at, (found, expected))) => {
            Err(format!("`{name}`, position {}: {found}, expected {expected}", at as u64 / columns))
        }
    }
}
