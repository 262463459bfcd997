//! Weights that are expanded from a compressed form.

use std::sync::Arc;

use anec_mil::{Constant, DataType, Dim, Op, TensorType};

use super::context::{Lowering, Tensor};
use super::numbers::zero_bytes;
use super::{Lowered, Row};
use crate::aicode::ElementType;
use crate::builder::Property;

pub(super) const ROWS: &[Row] = &[
    ("constexpr_blockwise_shift_scale", blockwise),
    ("constexpr_affine_dequantize", affine),
    ("constexpr_lut_to_dense", palette),
    ("constexpr_cast", cast),
    ("constexpr_sparse_to_dense", sparse),
    ("constexpr_lut_to_sparse", of_sparse),
    ("constexpr_sparse_blockwise_shift_scale", of_sparse),
];

fn given(l: &Lowering<'_>, op: &Op, parameter: &str) -> Result<Constant, String> {
    l.constant_of(op, parameter).ok_or_else(|| format!("`{parameter}` isn't stored"))
}

fn with_shape(constant: &Constant, dtype: DataType, shape: &[u64]) -> Constant {
    Constant { ty: TensorType::new(dtype, shape.iter().copied()), data: constant.data.clone() }
}

/// Zeros of a shape, one element for all.
fn zeros(l: &mut Lowering<'_>, shape: &[u64], element: ElementType) -> Tensor {
    let value = l.module.dense(zero_bytes(element), true);
    l.op_with("primitive.constant_v1", &[Property::Required(value)], &[], shape, element, Vec::new())
}

/// `scale * (data - offset)`; the operation takes a second offset, in the scale's type, which is added.
fn shifted_scaled(l: &mut Lowering<'_>, data: &Tensor, scale: &Tensor, offset: Option<Tensor>) -> Tensor {
    let offset = offset.unwrap_or_else(|| zeros(l, &scale.shape, data.element));
    let added = zeros(l, &scale.shape, scale.element);
    l.op("primitive.blockwise_shift_scale_v2", &[data, scale, &offset, &added], &data.shape, scale.element)
}

fn blockwise(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (data, scale) = (l.tensor(op, "data")?, l.tensor(op, "scale")?);
    let offset = l.optional(op, "offset")?;
    Ok(vec![shifted_scaled(l, &data, &scale, offset)])
}

fn affine(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let data = l.tensor(op, "quantized_data")?;
    let axis = if data.rank() == 0 { 0 } else { data.axis(l.integer_or(op, "axis", 0)?)? };
    let shape_of = |constant: &Constant| {
        let mut shape = vec![1; data.rank()];
        if let [Dim::Fixed(count)] = constant.ty.shape[..] {
            shape[axis] = count;
        }
        shape
    };
    let (scale, zero) = (given(l, op, "scale")?, given(l, op, "zero_point")?);
    let shape = shape_of(&scale);
    let scale = l.constant(&with_shape(&scale, scale.ty.dtype, &shape))?;
    let zero_shape = shape_of(&zero);
    let zero = l.constant(&with_shape(&zero, zero.ty.dtype, &zero_shape))?;
    if zero.element != data.element {
        let (data, zero) = (l.cast(&data, scale.element), l.cast(&zero, scale.element));
        let moved = l.binary("primitive.sub_v1", &data, &zero)?;
        return Ok(vec![l.binary("primitive.mul_v1", &moved, &scale)?]);
    }
    let offset = l.broadcast(&zero, &shape)?;
    Ok(vec![shifted_scaled(l, &data, &scale, Some(offset))])
}

/// Indices and a table of rank K + 2. Before iOS 18, both were flat, and the indices packed in bytes.
fn palette(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (indices, lut) = match l.integers(op, "shape")? {
        None => (l.tensor(op, "indices")?, l.tensor(op, "lut")?),
        Some(shape) => {
            let (indices, lut) = (given(l, op, "indices")?, given(l, op, "lut")?);
            let shape: Vec<u64> = shape.into_iter().map(|size| size.max(0) as u64).collect();
            let entries = lut.elements();
            let dtype = match entries {
                2 => DataType::Uint1,
                4 => DataType::Uint2,
                16 => DataType::Uint4,
                64 => DataType::Uint6,
                256 => DataType::Uint8,
                other => return Err(format!("a table of {other} entries")),
            };
            let table = [vec![1; shape.len()], vec![entries, 1]].concat();
            (l.constant(&with_shape(&indices, dtype, &shape))?, l.constant(&with_shape(&lut, lut.ty.dtype, &table))?)
        }
    };
    let axis = l.integer_or(op, "vector_axis", 0)?;
    Ok(vec![looked_up(l, &indices, &lut, axis)?])
}

fn looked_up(l: &mut Lowering<'_>, indices: &Tensor, lut: &Tensor, axis: i64) -> Result<Tensor, String> {
    let vector = *lut.shape.last().ok_or("a table of rank 0")?;
    let mut shape = indices.shape.clone();
    let axis = if indices.rank() == 0 { 0 } else { indices.axis(axis)? };
    if vector > 1 {
        shape[axis] *= vector;
    }
    let axis = l.floats(&[axis as f64], &[], ElementType::Si16)?;
    Ok(l.op("primitive.lut_to_dense_v1", &[indices, lut, &axis], &shape, lut.element))
}

fn cast(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let source = l.tensor(op, "source_val")?;
    let name = l.text(op, "output_dtype", "");
    let element = DataType::from_name(&name).and_then(ElementType::of).ok_or_else(|| format!("type `{name}`"))?;
    Ok(vec![l.cast(&source, element)])
}

/// Elements where a mask has ones, zeros elsewhere. They are written dense, because the encoding of sparse types isn't
/// known: first the stored integers, which are then expanded like dense ones, and set to zero again where the mask is.
fn sparse(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    if let Ok(nonzero) = given(l, op, "nonzero_data") {
        let mask = given(l, op, "mask")?;
        let shape = match l.integers(op, "shape")? {
            Some(shape) => shape.into_iter().map(|size| size.max(0) as u64).collect(),
            None => mask.ty.fixed_shape().ok_or("a mask without a fixed shape")?,
        };
        return Ok(vec![scattered(l, &mask, &nonzero, &shape)?]);
    }
    let source = op.input("nonzero_data").and_then(|binding| match binding {
        anec_mil::Binding::Value(id) => l.function.block.ops.iter().find(|op| op.outputs.contains(id)).cloned(),
        anec_mil::Binding::Constant(_) => None,
    });
    let source = source.ok_or("elements that aren't stored")?;
    let (flags, dense) = expanded(l, &source)?;
    let flags = l.booleans(&flags, &dense.shape)?;
    let zero = zeros(l, &dense.shape, dense.element);
    Ok(vec![l.choose(&flags, &dense, &zero)])
}

/// The elements that an operator gives sparse, in their places: others have any value. The flags tell them apart.
fn expanded(l: &mut Lowering<'_>, source: &Op) -> Result<(Vec<f64>, Tensor), String> {
    let (mask, axis, dense) = match &source.operator[..] {
        "constexpr_lut_to_sparse" => {
            let mask = given(l, source, "indices_mask")?;
            let shape = mask.ty.fixed_shape().ok_or("a mask without a fixed shape")?;
            let nonzero = given(l, source, "indices_nonzero_data")?;
            let indices = scattered(l, &mask, &nonzero, &shape)?;
            let lut = l.tensor(source, "lut")?;
            let axis = l.integer_or(source, "vector_axis", 0)?;
            (mask, if shape.is_empty() { 0 } else { indices.axis(axis)? }, looked_up(l, &indices, &lut, axis)?)
        }
        "constexpr_sparse_blockwise_shift_scale" => {
            let mask = given(l, source, "data_mask")?;
            let shape = mask.ty.fixed_shape().ok_or("a mask without a fixed shape")?;
            let nonzero = given(l, source, "nonzero_data")?;
            let data = scattered(l, &mask, &nonzero, &shape)?;
            let scale = l.tensor(source, "scale")?;
            let offset = l.optional(source, "offset")?;
            (mask, 0, shifted_scaled(l, &data, &scale, offset))
        }
        other => return Err(format!("elements that `{other}` gives")),
    };
    let shape = mask.ty.fixed_shape().unwrap_or_default();
    let bits = mask.bytes().map_err(|e| e.to_string())?;
    // an index of a palette of vectors stands for several elements along an axis
    let inner = shape.iter().skip(axis + 1).product::<u64>().max(1);
    let (size, repeats) = match (shape.get(axis), dense.shape.get(axis)) {
        (Some(size), Some(whole)) if *size > 0 => (*size, whole / size),
        _ => (1, 1),
    };
    let place = |element: u64| {
        let (outer, rest) = (element / (inner * size * repeats), element % (inner * size * repeats));
        (outer * size + rest / inner / repeats) * inner + rest % inner
    };
    let count = dense.shape.iter().product::<u64>();
    let flags = (0..count).map(|element| f64::from(bit(&bits, place(element) as usize))).collect();
    Ok((flags, dense))
}

/// Operators whose results are lowered with the operator that makes them dense; otherwise the mask and the elements.
fn of_sparse(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let takes = |other: &Op| other.operands().any(|id| op.outputs.contains(&id));
    let is_dense = |other: &Op| other.operator == "constexpr_sparse_to_dense";
    let block = &l.function.block;
    if !block.outputs.iter().any(|id| op.outputs.contains(id)) && block.ops.iter().filter(|o| takes(o)).all(is_dense) {
        return Ok(Vec::new());
    }
    let (flags, dense) = expanded(l, op)?;
    let mut packed = vec![0; flags.len().div_ceil(8)];
    let stored: Vec<usize> = (0..flags.len()).filter(|place| flags[*place] != 0.0).collect();
    stored.iter().for_each(|place| packed[place / 8] |= 1 << (place % 8));
    let ty = TensorType::new(DataType::Uint1, dense.shape.iter().copied());
    let mask = l.constant(&Constant::literal(ty, packed))?;
    let count = stored.len() as u64;
    let flat = l.reshape(&dense, &[flags.len() as u64, 1]);
    let places: Vec<f64> = stored.into_iter().map(|place| place as f64).collect();
    let places = l.floats(&places, &[count, 1], ElementType::Si32)?;
    let elements = l.op("primitive.gather_nd_v1", &[&flat, &places], &[count, 1], dense.element);
    Ok(vec![mask, l.reshape(&elements, &[count])])
}

fn bit(bytes: &[u8], place: usize) -> u8 {
    bytes.get(place / 8).map_or(0, |byte| byte >> (place % 8) & 1)
}

/// A constant with stored elements where a mask has ones, and zeros elsewhere.
fn scattered(l: &mut Lowering<'_>, mask: &Constant, nonzero: &Constant, shape: &[u64]) -> Result<Tensor, String> {
    let width = nonzero.ty.dtype.bits() as usize;
    let elements = shape.iter().product::<u64>() as usize;
    let (bits, values) = (mask.bytes().map_err(|e| e.to_string())?, nonzero.bytes().map_err(|e| e.to_string())?);
    if bits.len() * 8 < elements {
        return Err(format!("a mask of {} bytes for {elements} elements", bits.len()));
    }
    let mut dense = vec![0; (elements * width).div_ceil(8)];
    let ones = (0..elements).filter(|place| bit(&bits, *place) == 1);
    for (rank, place) in ones.enumerate() {
        for i in 0..width {
            let (from, to) = (rank * width + i, place * width + i);
            dense[to / 8] |= bit(&values, from) << (to % 8);
        }
    }
    let ty = TensorType::new(nonzero.ty.dtype, shape.iter().copied());
    l.constant(&Constant::literal(ty, Arc::<[u8]>::from(dense)))
}
