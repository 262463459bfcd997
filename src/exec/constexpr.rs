//! Folding of `constexpr_` ops. The result stays compressed if a kernel can multiply it in that form.

use std::sync::Arc;

use half::f16;

use super::constants::{ConstantError, load};
use super::row::{FoldArgument, FoldArguments, Row, folding};
use super::tensor::{Dims, Tensor, TensorData, broadcast_strides, for_each_index, strides};
use super::value::Value;
use super::weight::{LoadedWeight, SMALL, constant_shape, constant_tensor, decode_integers};
use super::weight_cache::WeightCache;
use anec_kernels::codes::CodeTables;
use anec_kernels::weight::{Elements, Scales};
use anec_mil::{Constant, DataType, TensorType};

/// Rows of the table.
pub(crate) const ROWS: &[Row] = folding! {
    "constexpr_affine_dequantize" => |types, a, cache| affine_dequantize(dtype_of(types, 0), a, cache).map(one),
    "constexpr_blockwise_shift_scale" => |types, a, cache| blockwise_shift_scale(dtype_of(types, 0), a, cache).map(one),
    "constexpr_cast" => |types, a, _| Ok(one(pack(dtype_of(types, 0), number_tensor(a, "source_val")?))),
    "constexpr_lut_to_dense" => |types, a, cache| lut_to_dense(dtype_of(types, 0), a, cache).map(one),
    "constexpr_lut_to_sparse" => |types, a, _| lut_to_sparse(dtype_of(types, 1), a),
    "constexpr_sparse_blockwise_shift_scale" => |types, a, _| sparse_shift_scale(dtype_of(types, 1), a),
    "constexpr_sparse_to_dense" => |types, a, _| sparse_to_dense(dtype_of(types, 0), a).map(one),
};

/// Element type of a result. Sparse ops have two results: the mask and its elements.
fn dtype_of(types: &[TensorType], result: usize) -> DataType {
    types.get(result).or(types.first()).map_or(DataType::Fp32, |ty| ty.dtype)
}

fn one(value: Value) -> Vec<Value> {
    vec![value]
}

fn part<'a>(arguments: &'a FoldArguments<'_>, name: &str) -> Result<&'a FoldArgument, ConstantError> {
    arguments.get(name).ok_or_else(|| ConstantError::Problem(format!("parameter `{name}` is missing")))
}

/// Argument as a tensor.
fn tensor(arguments: &FoldArguments<'_>, name: &str) -> Result<Tensor, ConstantError> {
    let missing = || ConstantError::Problem(format!("parameter `{name}` is not a tensor"));
    match part(arguments, name)? {
        FoldArgument::Stored(constant) if !constant.is_consistent() => {
            Err(format!("parameter `{name}`: {constant:?} doesn't fill its type").into())
        }
        FoldArgument::Stored(constant) => constant_tensor(constant)?.ok_or_else(missing),
        FoldArgument::Folded(Value::Tensor(tensor)) => Ok(Tensor::clone(tensor)),
        FoldArgument::Folded(Value::Weight(weight)) => Ok(Tensor::clone(weight.dense())),
        FoldArgument::Folded(_) => Err(missing()),
    }
}

/// Shape of an argument, and its elements as floats.
fn number_tensor(arguments: &FoldArguments<'_>, name: &str) -> Result<(Vec<usize>, Vec<f32>), ConstantError> {
    let Tensor { shape, data } = tensor(arguments, name)?;
    let values = match data {
        TensorData::F32(v) => v,
        TensorData::I32(v) => v.into_iter().map(|v| v as f32).collect(),
        TensorData::Bool(v) => v.into_iter().map(|v| f32::from(u8::from(v))).collect(),
    };
    Ok((shape, values))
}

/// Packs values in their declared precision: fp16 ones take two bytes.
fn pack(dtype: DataType, (shape, values): (Vec<usize>, Vec<f32>)) -> Value {
    if values.len() < SMALL || !dtype.is_float() {
        let data = if dtype.is_integer() {
            TensorData::I32(values.iter().map(|v| *v as i32).collect())
        } else if dtype == DataType::Fp16 {
            TensorData::F32(values.iter().map(|v| f16::from_f32(*v).to_f32()).collect())
        } else {
            TensorData::F32(values)
        };
        return Value::Tensor(Arc::new(Tensor { shape, data }));
    }
    let elements = match dtype {
        DataType::Fp16 => Elements::F16(values.iter().map(|v| f16::from_f32(*v)).collect()),
        _ => Elements::F32(values.into()),
    };
    Value::Weight(Arc::new(LoadedWeight::plain(shape, Arc::new(elements))))
}

/// `(data - offset) * scale`, where scale and offset have the rank of the data and repeat over blocks of equal size.
fn blockwise_shift_scale(
    dtype: DataType,
    arguments: &FoldArguments<'_>,
    cache: &WeightCache,
) -> Result<Value, ConstantError> {
    let scale = number_tensor(arguments, "scale")?;
    let offset = if arguments.contains_key("offset") { Some(number_tensor(arguments, "offset")?) } else { None };
    shift_scale(dtype, part(arguments, "data")?, scale, offset, cache)
}

/// `(quantized_data - zero_point) * scale`, both scalars or vectors along `axis`.
fn affine_dequantize(
    dtype: DataType,
    arguments: &FoldArguments<'_>,
    cache: &WeightCache,
) -> Result<Value, ConstantError> {
    let data = part(arguments, "quantized_data")?;
    let rank = match data {
        FoldArgument::Stored(constant) => constant.ty.rank(),
        FoldArgument::Folded(_) => return Err("`quantized_data` must be stored".to_owned().into()),
    };
    let axis = match number_tensor(arguments, "axis") {
        Ok((_, values)) if values.len() == 1 => super::tensor::axis_index(values[0] as i64, rank.max(1))?,
        _ => 0,
    };
    let along_axis = |(_, values): (Vec<usize>, Vec<f32>)| {
        let mut shape = vec![1; rank];
        if values.len() > 1 {
            shape[axis] = values.len();
        }
        (shape, values)
    };
    let scale = along_axis(number_tensor(arguments, "scale")?);
    let offset = match arguments.contains_key("zero_point") {
        true => Some(along_axis(number_tensor(arguments, "zero_point")?)),
        false => None,
    };
    shift_scale(dtype, data, scale, offset, cache)
}

type Numbers = (Vec<usize>, Vec<f32>);

fn shift_scale(
    dtype: DataType,
    data: &FoldArgument,
    (scale_shape, scale): Numbers,
    offset: Option<Numbers>,
    cache: &WeightCache,
) -> Result<Value, ConstantError> {
    let shape = match data {
        FoldArgument::Stored(constant) => {
            if !constant.is_consistent() {
                return Err(format!("{constant:?} doesn't fill its type").into());
            }
            constant_shape(constant)
        }
        FoldArgument::Folded(Value::Tensor(tensor)) => tensor.shape.clone(),
        FoldArgument::Folded(Value::Weight(weight)) => weight.shape().to_vec(),
        FoldArgument::Folded(_) => return Err("the data is not a tensor".to_owned().into()),
    };
    check_blocks(&shape, &scale_shape, offset.as_ref().map(|(shape, _)| shape.as_slice()))?;
    let offset = offset.filter(|(_, values)| values.iter().any(|v| *v != 0.0));
    let count: usize = shape.iter().product();
    // kernels take blocks along the first two axes, which are contiguous in a row
    let by_rows = scale_shape.iter().skip(2).all(|b| *b == 1);
    if by_rows && count >= SMALL {
        let bytes = match (data, &offset) {
            (FoldArgument::Stored(constant), None) if constant.ty.dtype.is_integer() => cache.elements(constant)?,
            (FoldArgument::Stored(constant), Some((offset_shape, offset))) if constant.ty.dtype.is_integer() => {
                shifted(constant, &shape, offset_shape, offset, cache)?.map(Arc::new)
            }
            _ => None,
        };
        if let Some(elements) = bytes {
            let scales = row_scales(&shape, &scale_shape, scale);
            let weight = match (&*elements, data) {
                (Elements::Codes(codes), FoldArgument::Stored(constant)) => {
                    let tables = integer_table(codes.bits(), constant.ty.dtype == DataType::Int4, shape[0]);
                    LoadedWeight::coded(shape, elements, tables, scales)
                }
                _ => LoadedWeight::scaled(shape, elements, scales),
            };
            return Ok(Value::Weight(Arc::new(weight)));
        }
    }
    let mut values = match data {
        FoldArgument::Stored(constant) => match load(constant, cache)? {
            Value::Tensor(tensor) => floats(&tensor),
            Value::Weight(weight) => floats(weight.dense()),
            _ => return Err("the data is not a tensor".to_owned().into()),
        },
        FoldArgument::Folded(Value::Tensor(tensor)) => floats(tensor),
        FoldArgument::Folded(Value::Weight(weight)) => floats(weight.dense()),
        FoldArgument::Folded(_) => return Err("the data is not a tensor".to_owned().into()),
    };
    apply(&shape, &mut values, &(scale_shape, scale), offset.as_ref());
    Ok(pack(dtype, (shape, values)))
}

/// Table of the integers that codes of `bits` bits stand for.
fn integer_table(bits: usize, signed: bool, rows: usize) -> CodeTables {
    let count = 1i32 << bits;
    let numbers: Vec<f32> =
        (0..count).map(|code| (code - if signed && 2 * code >= count { count } else { 0 }) as f32).collect();
    CodeTables::new(bits, numbers.len(), &numbers, rows.max(1))
}

/// Checks that scale and offset divide the data into equal blocks.
fn check_blocks(shape: &[usize], scale: &[usize], offset: Option<&[usize]>) -> Result<(), ConstantError> {
    for (name, blocks) in [("scale", Some(scale)), ("offset", offset)] {
        let Some(blocks) = blocks else { continue };
        let fits = blocks.len() == shape.len() && blocks.iter().zip(shape).all(|(b, n)| *b > 0 && n % b == 0);
        if !fits {
            return Err(format!("a {name} of shape {blocks:?} doesn't divide data of shape {shape:?}").into());
        }
    }
    Ok(())
}

/// `(values - offset) * scale`, in place.
fn apply(shape: &[usize], values: &mut [f32], scale: &Numbers, offset: Option<&Numbers>) {
    if let Some((offset_shape, offset)) = offset {
        for_each_block(shape, offset_shape, |i, block| values[i] -= offset[block]);
    }
    for_each_block(shape, &scale.0, |i, block| values[i] *= scale.1[block]);
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    match &tensor.data {
        TensorData::F32(v) => v.clone(),
        TensorData::I32(v) => v.iter().map(|v| *v as f32).collect(),
        TensorData::Bool(v) => v.iter().map(|v| f32::from(u8::from(*v))).collect(),
    }
}

/// Integers minus their offsets, if all of them fit into a signed byte.
fn shifted(
    constant: &Constant,
    shape: &[usize],
    offset_shape: &[usize],
    offset: &[f32],
    cache: &WeightCache,
) -> Result<Option<Elements>, ConstantError> {
    let count = shape.iter().product();
    let Some(mut values) = decode_integers(constant.ty.dtype, &constant.bytes()?, count) else { return Ok(None) };
    for_each_block(shape, offset_shape, |i, block| values[i] -= offset[block] as i32);
    let bytes: Option<Vec<i8>> = values.into_iter().map(|v| i8::try_from(v).ok()).collect();
    Ok(bytes.map(|bytes| cache.keep(Elements::Int8(bytes.into()))))
}

/// Scales of each row; `scale_shape` has blocks along the first two axes only.
fn row_scales(shape: &[usize], scale_shape: &[usize], scale: Vec<f32>) -> Scales {
    if scale.len() == 1 {
        return Scales { values: scale, blocks: 1 };
    }
    let (groups, blocks) = (scale_shape[0], scale_shape.get(1).copied().unwrap_or(1));
    let repeat = shape[0] / groups;
    let values = scale.chunks(blocks).flat_map(|row| std::iter::repeat_n(row, repeat).flatten().copied()).collect();
    Scales { values, blocks }
}

/// Calls `visit` with each element's index and the index of its block.
fn for_each_block(shape: &[usize], blocks: &[usize], mut visit: impl FnMut(usize, usize)) {
    let sizes: Vec<usize> = shape.iter().zip(blocks).map(|(n, b)| n / b).collect();
    // each axis is split in two: the block, and the position in it
    let split: Vec<usize> = blocks.iter().zip(&sizes).flat_map(|(b, size)| [*b, *size]).collect();
    let outer: Vec<usize> = blocks.iter().flat_map(|b| [*b, 1]).collect();
    let element: Dims = strides(&split);
    for_each_index(&split, [&element, &broadcast_strides(&outer, &split)], |[i, block]| visit(i, block));
}

/// Looks values up in tables. The older form has indices packed into bytes and one table; the newer form has indices of
/// a narrow type and tables `[groups…, entries, vector]` that repeat over blocks.
fn lut_to_dense(dtype: DataType, arguments: &FoldArguments<'_>, cache: &WeightCache) -> Result<Value, ConstantError> {
    let (lut_shape, lut) = number_tensor(arguments, "lut")?;
    if arguments.contains_key("shape") {
        let (_, shape) = number_tensor(arguments, "shape")?;
        let shape: Vec<usize> = shape.into_iter().map(|n| n as usize).collect();
        let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).unwrap_or(usize::MAX);
        let bits = lut.len().next_power_of_two().trailing_zeros();
        let narrow = match bits {
            1 => DataType::Uint1,
            2 => DataType::Uint2,
            3 => DataType::Uint3,
            4 => DataType::Uint4,
            6 => DataType::Uint6,
            8 => DataType::Uint8,
            _ => return Err(format!("a table of {} entries belongs to no index type", lut.len()).into()),
        };
        let FoldArgument::Stored(indices) = part(arguments, "indices")? else {
            return Err("`indices` must be stored".to_owned().into());
        };
        if count >= SMALL
            && lut.len().is_power_of_two()
            && narrow.packed_bytes(count as u64) == indices.ty.bytes().unwrap_or(0)
            && let Some(weight) = looked_up(cache, (indices, narrow), &shape, &lut, 1)?
        {
            return Ok(weight);
        }
        let bytes = indices.bytes()?;
        if narrow.packed_bytes(count as u64) > bytes.len() as u64 {
            return Err(format!("{} bytes of indices are too few for the shape {shape:?}", bytes.len()).into());
        }
        let indices = decode_integers(narrow, &bytes[..narrow.packed_bytes(count as u64) as usize], count);
        let values = indices.unwrap_or_default().into_iter().map(|i| lut.get(i as usize).copied());
        let values: Option<Vec<f32>> = values.collect();
        let values = values.ok_or_else(|| format!("an index is beyond the table of {} entries", lut.len()))?;
        return Ok(pack(dtype, (shape, values)));
    }
    // kernels take tables of single numbers, each for the same number of rows
    if let FoldArgument::Stored(indices) = part(arguments, "indices")?
        && indices.is_consistent()
        && let [groups, rest @ .., entries, 1] = &lut_shape[..]
        && rest.iter().all(|n| *n == 1)
        && lut_shape.len() == indices.ty.rank() + 2
        && dtype.is_float()
        && indices.ty.dtype != DataType::Int4
        && *entries as u64 == 1u64.checked_shl(indices.ty.dtype.bits() as u32).unwrap_or(0)
    {
        let shape = constant_shape(indices);
        if shape.iter().product::<usize>() >= SMALL
            && *groups > 0
            && shape[0].is_multiple_of(*groups)
            && let Some(weight) = looked_up(cache, (indices, indices.ty.dtype), &shape, &lut, *groups)?
        {
            return Ok(weight);
        }
    }
    let indices = tensor(arguments, "indices")?;
    let index = indices.integers().ok_or_else(|| "`indices` are not integers".to_owned())?;
    let axis = vector_axis(arguments, indices.rank())?;
    Ok(pack(dtype, look_up(&indices.shape, index, (&lut_shape, &lut), axis)?))
}

/// Weight that stays packed: indices, and one table after another.
fn looked_up(
    cache: &WeightCache,
    (indices, dtype): (&Constant, DataType),
    shape: &[usize],
    lut: &[f32],
    groups: usize,
) -> Result<Option<Value>, ConstantError> {
    let Some(elements) = cache.elements_as(indices, dtype)? else { return Ok(None) };
    let Elements::Codes(codes) = &*elements else { return Ok(None) };
    let tables = CodeTables::new(codes.bits(), lut.len() / groups, lut, (shape[0] / groups).max(1));
    let scales = Scales { values: vec![1.0], blocks: 1 };
    Ok(Some(Value::Weight(Arc::new(LoadedWeight::coded(shape.to_vec(), elements, tables, scales)))))
}

/// Axis along which the vectors of a table run.
fn vector_axis(arguments: &FoldArguments<'_>, rank: usize) -> Result<usize, ConstantError> {
    if !arguments.contains_key("vector_axis") {
        return Ok(0);
    }
    let (_, axis) = number_tensor(arguments, "vector_axis")?;
    Ok(super::tensor::axis_index(axis.first().map_or(0, |a| *a as i64), rank.max(1))?)
}

/// Replaces each index by the vector at that index in the table of its block.
fn look_up(
    shape: &[usize],
    index: &[i32],
    (lut_shape, lut): (&[usize], &[f32]),
    axis: usize,
) -> Result<Numbers, ConstantError> {
    let rank = shape.len();
    if lut_shape.len() != rank + 2 || lut_shape.iter().zip(shape).any(|(g, n)| *g == 0 || n % g != 0) {
        return Err(format!("tables of shape {lut_shape:?} don't divide indices of shape {shape:?}").into());
    }
    let (entries, vector) = (lut_shape[rank], lut_shape[rank + 1]);
    let mut out_shape = shape.to_vec();
    if vector != 1 {
        out_shape[axis] *= vector;
    }
    let inner: usize = shape.iter().skip(axis + 1).product();
    let mut values = vec![0.0; index.len() * vector];
    let mut beyond = false;
    for_each_block(shape, &lut_shape[..rank], |i, group| {
        let entry = index[i] as usize;
        beyond |= entry >= entries;
        if entry < entries {
            let (outer, rest) = (i / inner.max(1), i % inner.max(1));
            for k in 0..vector {
                values[(outer * vector + k) * inner + rest] = lut[(group * entries + entry) * vector + k];
            }
        }
    });
    if beyond {
        return Err(format!("an index is beyond the tables of {entries} entries").into());
    }
    Ok((out_shape, values))
}

/// Spreads elements in row-major order over the set positions of a mask; other positions are zero.
fn spread(mask: &[f32], elements: &[f32]) -> Result<Vec<f32>, ConstantError> {
    let set = mask.iter().filter(|m| **m != 0.0).count();
    if set != elements.len() {
        return Err(format!("{} elements for a mask that lets {set} through", elements.len()).into());
    }
    let mut elements = elements.iter();
    Ok(mask.iter().map(|m| if *m != 0.0 { elements.next().copied().unwrap_or(0.0) } else { 0.0 }).collect())
}

/// Mask and elements of a sparse result.
fn sparse(dtype: DataType, shape: Vec<usize>, mask: &[f32], values: &[f32]) -> Vec<Value> {
    let through: Vec<f32> = values.iter().zip(mask).filter(|(_, m)| **m != 0.0).map(|(v, _)| *v).collect();
    let bits = mask.iter().map(|m| i32::from(*m != 0.0)).collect::<Vec<_>>();
    let mask = Value::Tensor(Arc::new(Tensor::new(shape, bits)));
    vec![mask, pack(dtype, (vec![through.len()], through))]
}

/// Spreads elements over a mask. The older form packs the mask into bytes, least significant bit first, with its shape
/// beside it.
fn sparse_to_dense(dtype: DataType, arguments: &FoldArguments<'_>) -> Result<Value, ConstantError> {
    let (_, elements) = number_tensor(arguments, "nonzero_data")?;
    if !arguments.contains_key("shape") {
        let (shape, mask) = number_tensor(arguments, "mask")?;
        return Ok(pack(dtype, (shape, spread(&mask, &elements)?)));
    }
    let (_, shape) = number_tensor(arguments, "shape")?;
    let shape: Vec<usize> = shape.into_iter().map(|n| n as usize).collect();
    let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).unwrap_or(usize::MAX);
    let (_, bytes) = number_tensor(arguments, "mask")?;
    if count.div_ceil(8) > bytes.len() {
        return Err(format!("{} bytes of mask are too few for the shape {shape:?}", bytes.len()).into());
    }
    let mask: Vec<f32> = (0..count).map(|i| f32::from((bytes[i / 8] as u8) >> (i % 8) & 1)).collect();
    Ok(pack(dtype, (shape, spread(&mask, &elements)?)))
}

fn lut_to_sparse(dtype: DataType, arguments: &FoldArguments<'_>) -> Result<Vec<Value>, ConstantError> {
    let (lut_shape, lut) = number_tensor(arguments, "lut")?;
    let (shape, mask) = number_tensor(arguments, "indices_mask")?;
    let (_, indices) = number_tensor(arguments, "indices_nonzero_data")?;
    let indices: Vec<i32> = spread(&mask, &indices)?.into_iter().map(|v| v as i32).collect();
    let axis = vector_axis(arguments, shape.len())?;
    let (out_shape, values) = look_up(&shape, &indices, (&lut_shape, &lut), axis)?;
    // look the mask up in a table that repeats each bit over the length of a vector
    let vector = lut_shape.last().copied().unwrap_or(1);
    let bits: Vec<f32> = [vec![0.0; vector], vec![1.0; vector]].concat();
    let bit_shape = [vec![1; shape.len()], vec![2, vector]].concat();
    let set: Vec<i32> = mask.iter().map(|m| i32::from(*m != 0.0)).collect();
    let (_, mask) = look_up(&shape, &set, (&bit_shape, &bits), axis)?;
    Ok(sparse(dtype, out_shape, &mask, &values))
}

fn sparse_shift_scale(dtype: DataType, arguments: &FoldArguments<'_>) -> Result<Vec<Value>, ConstantError> {
    let (shape, mask) = number_tensor(arguments, "data_mask")?;
    let (_, elements) = number_tensor(arguments, "nonzero_data")?;
    let mut values = spread(&mask, &elements)?;
    let scale = number_tensor(arguments, "scale")?;
    let offset = if arguments.contains_key("offset") { Some(number_tensor(arguments, "offset")?) } else { None };
    check_blocks(&shape, &scale.0, offset.as_ref().map(|(shape, _)| shape.as_slice()))?;
    apply(&shape, &mut values, &scale, offset.as_ref());
    Ok(sparse(dtype, shape, &mask, &values))
}
