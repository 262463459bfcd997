//! Weights that are decompressed before the model runs.
//!
//! Up to CoreML7 their parameters are attributes; from CoreML8 they are inputs that contain the constants.

use super::rules::{Inferred, dtype_of_name, one, product, shape_text};
use crate::catalogue::{Arguments, Row};
use crate::types::Opset::{CoreMl6, CoreMl8};
use crate::types::{DataType, Dim, ValueType};

pub const ROWS: &[Row] = &[
    ("constexpr_affine_dequantize", CoreMl6, "quantized_data! zero_point! scale! axis!", affine_dequantize),
    ("constexpr_cast", CoreMl6, "source_val! output_dtype!", cast),
    ("constexpr_lut_to_dense", CoreMl6, "indices! lut! shape!", shaped_lut),
    ("constexpr_sparse_to_dense", CoreMl6, "nonzero_data! mask! shape!", shaped_sparse),
    ("constexpr_blockwise_shift_scale", CoreMl8, "data! scale! offset!?", blockwise),
    ("constexpr_lut_to_dense", CoreMl8, "indices! lut! vector_axis!?", lut_to_dense),
    ("constexpr_sparse_to_dense", CoreMl8, "nonzero_data! mask!", sparse_to_dense),
    ("constexpr_lut_to_sparse", CoreMl8, "indices_mask! indices_nonzero_data! lut! vector_axis!?", lut_to_sparse),
    ("constexpr_sparse_blockwise_shift_scale", CoreMl8, "data_mask! nonzero_data! scale! offset!?", sparse_blockwise),
];

fn affine_dequantize(a: &Arguments<'_>) -> Inferred {
    let (data, scale) = (a.tensor("quantized_data")?, a.tensor("scale")?);
    let along = a.integers("axis")?.first().copied().unwrap_or(0);
    let size = &data.shape[super::rules::axis(along, data.rank())?];
    for (parameter, ty) in [("scale", scale), ("zero_point", a.tensor("zero_point")?)] {
        if !matches!(&ty.shape[..], [] | [_]) || ty.shape.first().is_some_and(|count| count != size) {
            let shape = shape_text(&ty.shape);
            return Err(format!("`{parameter}` has shape {shape}; expected a scalar, or {size} along axis {along}"));
        }
    }
    one(scale.dtype, data.shape.clone())
}

fn cast(a: &Arguments<'_>) -> Inferred {
    let name = a.text("output_dtype").ok_or("`output_dtype` must be a constant string")?;
    let dtype = dtype_of_name(name).ok_or_else(|| format!("`output_dtype` is \"{name}\""))?;
    one(dtype, a.tensor("source_val")?.shape.clone())
}

fn given_shape(a: &Arguments<'_>, dtype: DataType) -> Inferred {
    let dims = a.integers("shape")?.into_iter().map(|d| u64::try_from(d).map(Dim::Fixed));
    one(dtype, dims.collect::<Result<_, _>>().map_err(|_| "`shape` has a negative dimension")?)
}

fn shaped_lut(a: &Arguments<'_>) -> Inferred {
    let (indices, lut) = (a.tensor("indices")?, a.tensor("lut")?);
    let entries = lut.shape.first().and_then(Dim::fixed).unwrap_or(0);
    if lut.rank() != 1 || ![2, 4, 16, 64, 256].contains(&entries) {
        return Err(format!("`lut` has shape {}; expected 2, 4, 16, 64 or 256 entries", shape_text(&lut.shape)));
    }
    let inferred = given_shape(a, lut.dtype)?;
    let elements = inferred.first().and_then(ValueType::tensor).and_then(|ty| ty.elements()).unwrap_or(0);
    let bytes = u128::from(elements) * u128::from(entries.trailing_zeros());
    let bytes = u64::try_from(bytes.div_ceil(8)).unwrap_or(u64::MAX);
    if indices.shape[..] != [Dim::Fixed(bytes)] {
        let shape = shape_text(&indices.shape);
        return Err(format!(
            "`indices` has shape {shape}; {elements} elements of {entries} entries take {bytes} bytes"
        ));
    }
    Ok(inferred)
}

fn shaped_sparse(a: &Arguments<'_>) -> Inferred {
    given_shape(a, a.tensor("nonzero_data")?.dtype)
}

/// Checks that every dimension of `blocks` divides that of `data`: one scale or table for each block.
fn check_blocks(data: &[Dim], blocks: &[Dim], parameter: &str) -> Result<(), String> {
    let divides = data.len() == blocks.len()
        && data.iter().zip(blocks).all(|(d, b)| match (d.fixed(), b.fixed()) {
            (Some(d), Some(b)) => b > 0 && d % b == 0,
            _ => false,
        });
    if divides {
        Ok(())
    } else {
        Err(format!("`{parameter}` has shape {}, which doesn't divide {}", shape_text(blocks), shape_text(data)))
    }
}

fn blockwise(a: &Arguments<'_>) -> Inferred {
    let (data, scale) = (a.tensor("data")?, a.tensor("scale")?);
    check_blocks(&data.shape, &scale.shape, "scale")?;
    if let Some(offset) = a.optional_tensor("offset")?
        && offset.shape != scale.shape
    {
        return Err(format!("`offset` has shape {}, `scale` {}", shape_text(&offset.shape), shape_text(&scale.shape)));
    }
    one(scale.dtype, data.shape.clone())
}

/// `lut` has the rank of the indices plus two: groups per dimension, entries, vector width.
fn looked_up(a: &Arguments<'_>, indices: &[Dim]) -> Result<Vec<Dim>, String> {
    let lut = a.tensor("lut")?;
    if lut.rank() != indices.len() + 2 {
        return Err(format!("`lut` has rank {}; {} is needed", lut.rank(), indices.len() + 2));
    }
    let (entries, width) = (&lut.shape[lut.rank() - 2], lut.shape[lut.rank() - 1].clone());
    let dtype = a.optional_tensor("indices")?.or(a.optional_tensor("indices_nonzero_data")?).map(|ty| ty.dtype);
    if let Some(dtype) = dtype.filter(|dtype| *entries != Dim::Fixed(1 << dtype.bits())) {
        return Err(format!("`lut` has {entries} entries; indices of {dtype} need {}", 1u64 << dtype.bits()));
    }
    check_blocks(indices, &lut.shape[..indices.len()], "lut")?;
    let mut dims = indices.to_vec();
    if let Some(along) = a.optional_integers("vector_axis").and_then(|v| v.first().copied()) {
        let along = super::rules::axis(along, dims.len())?;
        dims[along] = dims[along].times(&width);
    } else if width != Dim::Fixed(1) {
        return Err(format!("`lut` holds vectors of {width} and `vector_axis` is not given"));
    }
    Ok(dims)
}

fn lut_to_dense(a: &Arguments<'_>) -> Inferred {
    one(a.tensor("lut")?.dtype, looked_up(a, &a.tensor("indices")?.shape)?)
}

fn sparse_to_dense(a: &Arguments<'_>) -> Inferred {
    one(a.tensor("nonzero_data")?.dtype, a.tensor("mask")?.shape.clone())
}

fn lut_to_sparse(a: &Arguments<'_>) -> Inferred {
    let (mask, nonzero) = (a.tensor("indices_mask")?, a.tensor("indices_nonzero_data")?);
    let dims = looked_up(a, &mask.shape)?;
    let mut values = nonzero.clone();
    values.dtype = a.tensor("lut")?.dtype;
    // an index of a vector stands for several elements
    if let (Some(size), [count]) = (product(&dims).divided_by(&product(&mask.shape)), &mut values.shape[..]) {
        *count = count.times(&size);
    }
    let mut full = mask.clone();
    full.shape = dims;
    Ok(vec![ValueType::Tensor(full), ValueType::Tensor(values)])
}

fn sparse_blockwise(a: &Arguments<'_>) -> Inferred {
    let (mask, nonzero, scale) = (a.tensor("data_mask")?, a.tensor("nonzero_data")?, a.tensor("scale")?);
    check_blocks(&mask.shape, &scale.shape, "scale")?;
    let mut values = nonzero.clone();
    values.dtype = scale.dtype;
    Ok(vec![mask.clone().into(), values.into()])
}
