//! Shapes, slices and order of elements.

use anec_mil::Op;

use super::context::{Lowering, Tensor};
use super::{Lowered, Row};
use crate::aicode::{AiAttribute, ElementType};

pub(super) const ROWS: &[Row] = &[
    ("reshape", |l, op| same_elements(l, op)),
    ("expand_dims", |l, op| same_elements(l, op)),
    ("squeeze", |l, op| same_elements(l, op)),
    ("flatten2d", |l, op| same_elements(l, op)),
    ("reshape_like", |l, op| same_elements(l, op)),
    ("transpose", transpose),
    ("shape", shape_of),
    ("concat", concat),
    ("stack", stack),
    ("split", split),
    ("tile", tile),
    ("pad", pad),
    ("reverse", reverse),
    ("fill", fill),
    ("range_1d", range_1d),
    ("slice_by_index", slice_by_index),
    ("slice_by_size", slice_by_size),
    ("slice_update", slice_update),
    ("sliding_windows", sliding_windows),
];

fn same_elements(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let (shape, _) = l.result_type(op, 0)?;
    Ok(vec![l.reshape(&x, &shape)])
}

fn axes_of(x: &Tensor, axes: Vec<i64>) -> Result<Vec<usize>, String> {
    axes.into_iter().map(|axis| x.axis(axis)).collect()
}

fn transpose(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let permutation = axes_of(&x, l.integers(op, "perm")?.unwrap_or_default())?;
    Ok(vec![l.transpose(&x, &permutation)])
}

fn shape_of(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let sizes: Vec<i64> = l.tensor(op, "x")?.shape.iter().map(|size| *size as i64).collect();
    Ok(vec![l.signed(&sizes)])
}

fn concat(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let mut parts = l.tensors(op, "values")?;
    // scalars are joined as vectors
    for part in &mut parts {
        if part.rank() == 0 {
            *part = l.reshape(part, &[1]);
        }
    }
    let first = parts.first().ok_or("no values")?;
    let axis = first.axis(l.integer_or(op, "axis", 0)?)?;
    if !l.flag(op, "interleave")? || parts.len() == 1 {
        return Ok(vec![l.concat(&parts, axis)]);
    }
    // elements of the axis in turns: a new axis behind it, which is merged with it
    let mut shape = first.shape.clone();
    shape[axis] *= parts.len() as u64;
    let stacked = stacked(l, &parts, axis + 1);
    Ok(vec![l.reshape(&stacked, &shape)])
}

fn stacked(l: &mut Lowering<'_>, parts: &[Tensor], axis: usize) -> Tensor {
    let mut shape = parts[0].shape.clone();
    shape.insert(axis, 1);
    let parts: Vec<Tensor> = parts.iter().map(|part| l.reshape(part, &shape)).collect();
    l.concat(&parts, axis)
}

fn stack(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let parts = l.tensors(op, "values")?;
    let rank = parts.first().ok_or("no values")?.rank() as i64 + 1;
    let axis = l.integer_or(op, "axis", 0)?;
    Ok(vec![stacked(l, &parts, (if axis < 0 { axis + rank } else { axis }) as usize)])
}

fn split(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let axis = x.axis(l.integer_or(op, "axis", 0)?)?;
    let mut begin = 0;
    let mut parts = Vec::new();
    for index in 0..op.outputs.len() {
        let end = begin + l.result_type(op, index)?.0[axis];
        parts.push(l.slice_axis(&x, axis, begin, end));
        begin = end;
    }
    Ok(parts)
}

/// Repeats a tensor along its axes: an axis of size 1 before each, which is broadcast.
fn repeated(l: &mut Lowering<'_>, x: &Tensor, counts: &[u64]) -> Result<Tensor, String> {
    let (mut open, mut wide) = (Vec::new(), Vec::new());
    for (size, count) in x.shape.iter().zip(counts) {
        if *count != 1 {
            open.push(1);
            wide.push(*count);
        }
        open.push(*size);
        wide.push(*size);
    }
    let open = l.reshape(x, &open);
    let wide = l.broadcast(&open, &wide)?;
    let shape: Vec<u64> = x.shape.iter().zip(counts).map(|(size, count)| size * count).collect();
    Ok(l.reshape(&wide, &shape))
}

fn tile(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let counts: Vec<u64> =
        l.integers(op, "reps")?.unwrap_or_default().into_iter().map(|count| count.max(0) as u64).collect();
    Ok(vec![repeated(l, &x, &counts)?])
}

/// Adds elements of one value around a tensor.
pub(super) fn pad_constant(l: &mut Lowering<'_>, x: &Tensor, pads: &[[u64; 2]], value: f64) -> Result<Tensor, String> {
    padded(l, x, pads, value, AiAttribute::PaddingMode(1))
}

fn padded(
    l: &mut Lowering<'_>,
    x: &Tensor,
    pads: &[[u64; 2]],
    value: f64,
    mode: AiAttribute,
) -> Result<Tensor, String> {
    if pads.iter().all(|pad| *pad == [0, 0]) {
        return Ok(x.clone());
    }
    let shape: Vec<u64> = x.shape.iter().zip(pads).map(|(size, pad)| size + pad[0] + pad[1]).collect();
    let (amounts, value) = (l.unsigned(&pads.concat()), l.splat(value, &[], x.element)?);
    Ok(l.op_of_kind("primitive.pad_v1", mode, &[x, &amounts, &value], &shape, x.element))
}

fn pad(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let amounts = l.integers(op, "pad")?.unwrap_or_default();
    if amounts.iter().any(|amount| *amount < 0) || amounts.len() > 2 * x.rank() {
        return Err(format!("padding {amounts:?}"));
    }
    let mode = match &l.text(op, "mode", "constant")[..] {
        "constant" => 1,
        "reflect" => 2,
        "replicate" => 3,
        other => return Err(format!("mode `{other}`")),
    };
    // the last axes
    let mut pads = vec![[0, 0]; x.rank() - amounts.len() / 2];
    pads.extend(amounts.chunks(2).map(|pair| [pair[0] as u64, pair[1] as u64]));
    let value = l.number(op, "constant_val", 0.0)?;
    Ok(vec![padded(l, &x, &pads, value.into(), AiAttribute::PaddingMode(mode))?])
}

fn reversed(l: &mut Lowering<'_>, x: &Tensor, axes: &[usize]) -> Tensor {
    let axes = l.signed(&axes.iter().map(|axis| *axis as i64).collect::<Vec<_>>());
    l.op("primitive.reverse_v1", &[x, &axes], &x.shape, x.element)
}

fn reverse(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let axes = axes_of(&x, l.integers_or(op, "axes", (0..x.rank() as i64).collect())?)?;
    Ok(vec![reversed(l, &x, &axes)])
}

fn fill(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let shape: Vec<u64> = l.integers(op, "shape")?.ok_or("no `shape`")?.into_iter().map(|n| n.max(0) as u64).collect();
    let value = l.tensor(op, "value")?;
    let value = l.reshape(&value, &vec![1; shape.len()]);
    Ok(vec![l.broadcast(&value, &shape)?])
}

fn range_1d(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let number = |l: &Lowering<'_>, parameter| -> Result<f64, String> {
        let constant = l.constant_of(op, parameter).ok_or_else(|| format!("`{parameter}` is computed"))?;
        let integer = || constant.as_integer().map(|value| value as f64);
        constant.as_float().map(f64::from).or_else(integer).ok_or_else(|| format!("`{parameter}` is no number"))
    };
    let (start, end, step) = (number(l, "start")?, number(l, "end")?, number(l, "step")?);
    let count = ((end - start) / step).ceil().max(0.0);
    if count > f64::from(1 << 20) {
        return Err(format!("a range of {count} numbers"));
    }
    let (_, element) = match l.result_type(op, 0) {
        Ok(known) => known,
        Err(_) => (Vec::new(), l.tensor(op, "start")?.element),
    };
    let values: Vec<f64> = (0..count as u64).map(|i| start + i as f64 * step).collect();
    Ok(vec![l.floats(&values, &[count as u64], element)?])
}

/// An integer from the end if negative, no less than `low` and no more than `high`.
fn clamped(value: i64, size: i64, low: i64, high: i64) -> i64 {
    (if value < 0 { value + size } else { value }).clamp(low, high)
}

/// Bounds of a slice with positive strides on axes of which some were reversed.
struct Bounds {
    begin: Vec<i64>,
    end: Vec<i64>,
    stride: Vec<i64>,
    reversed: Vec<usize>,
}

fn masks(l: &Lowering<'_>, op: &Op, rank: usize) -> Result<[Vec<bool>; 3], String> {
    let mask = |name| -> Result<Vec<bool>, String> {
        Ok(l.integers_or(op, name, vec![0; rank])?.into_iter().map(|flag| flag != 0).collect())
    };
    Ok([mask("begin_mask")?, mask("end_mask")?, mask("squeeze_mask")?])
}

fn bounds(l: &Lowering<'_>, op: &Op, x: &Tensor) -> Result<Bounds, String> {
    let rank = x.rank();
    let [begin_mask, end_mask, squeeze] = masks(l, op, rank)?;
    let strides = l.integers_or(op, "stride", vec![1; rank])?;
    let (first, last) = (l.integers(op, "begin")?, l.integers(op, "end")?);
    let first = first.filter(|list| list.len() == rank).ok_or("`begin` doesn't fit")?;
    let last = last.filter(|list| list.len() == rank).ok_or("`end` doesn't fit")?;
    let mut out = Bounds { begin: vec![], end: vec![], stride: vec![], reversed: vec![] };
    for i in 0..rank {
        let size = x.shape[i] as i64;
        let forward = strides[i] > 0;
        let (mut begin, mut end, mut stride) = if forward {
            let begin = if begin_mask[i] { 0 } else { clamped(first[i], size, 0, size) };
            (begin, if end_mask[i] { size } else { clamped(last[i], size, 0, size) }, strides[i])
        } else {
            let begin = if begin_mask[i] { size - 1 } else { clamped(first[i], size, -1, size - 1) };
            let end = if end_mask[i] { -1 } else { clamped(last[i], size, -1, size - 1) };
            out.reversed.push(i);
            (size - 1 - begin, size - 1 - end, -strides[i])
        };
        if squeeze[i] {
            begin = begin.min(size - 1);
            (end, stride) = (begin + 1, 1);
        }
        out.begin.push(begin);
        out.end.push(end.max(begin));
        out.stride.push(stride);
    }
    Ok(out)
}

/// Indices that are computed: from the end if negative, and overridden where a mask is set.
fn computed(l: &mut Lowering<'_>, op: &Op, parameter: &str, mask: &[bool], instead: &[i64]) -> Result<Tensor, String> {
    let given = l.tensor(op, parameter)?;
    let given = l.cast(&given, ElementType::Si32);
    if !mask.contains(&true) {
        return Ok(given);
    }
    let bytes: Vec<f64> = mask.iter().map(|flag| f64::from(u8::from(*flag))).collect();
    let (mask, instead) = (l.booleans(&bytes, &[mask.len() as u64])?, l.signed(instead));
    Ok(l.choose(&mask, &instead, &given))
}

/// Whether `begin` and `end` are known.
fn is_static(l: &Lowering<'_>, op: &Op) -> bool {
    ["begin", "end"].iter().all(|parameter| matches!(l.integers(op, parameter), Ok(Some(_))))
}

/// The three operands of a slice whose bounds are computed.
fn computed_bounds(l: &mut Lowering<'_>, op: &Op, x: &Tensor) -> Result<[Tensor; 3], String> {
    let rank = x.rank();
    let [begin_mask, end_mask, squeeze] = masks(l, op, rank)?;
    let strides = l.integers_or(op, "stride", vec![1; rank])?;
    if strides.iter().any(|stride| *stride < 1) {
        return Err("computed bounds with negative strides".into());
    }
    let sizes: Vec<i64> = x.shape.iter().map(|size| *size as i64).collect();
    let begin = computed(l, op, "begin", &begin_mask, &vec![0; rank])?;
    let mut end = computed(l, op, "end", &end_mask, &sizes)?;
    if squeeze.contains(&true) {
        let one = l.signed(&vec![1; rank]);
        let next = l.binary("primitive.add_v1", &begin, &one)?;
        let flags: Vec<f64> = squeeze.iter().map(|flag| f64::from(u8::from(*flag))).collect();
        let flags = l.booleans(&flags, &[rank as u64])?;
        end = l.choose(&flags, &next, &end);
    }
    let strides = l.signed(&strides);
    Ok([begin, end, strides])
}

fn slice_by_index(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    if !is_static(l, op) {
        let (shape, _) = l.result_type(op, 0).map_err(|_| "a slice whose size is computed")?;
        let [begin, end, stride] = computed_bounds(l, op, &x)?;
        let squeeze = masks(l, op, x.rank())?[2].clone();
        let mut sizes = shape.iter();
        let full = squeeze.iter().map(|squeezed| if *squeezed { Some(1) } else { sizes.next().copied() });
        let full: Vec<u64> = full.collect::<Option<_>>().ok_or("a slice whose size is computed")?;
        let part = l.op("primitive.slice_v1", &[&x, &begin, &end, &stride], &full, x.element);
        return Ok(vec![l.reshape(&part, &shape)]);
    }
    let bounds = bounds(l, op, &x)?;
    let squeeze = masks(l, op, x.rank())?[2].clone();
    let x = if bounds.reversed.is_empty() { x } else { reversed(l, &x, &bounds.reversed) };
    let part = l.slice(&x, &bounds.begin, &bounds.end, &bounds.stride);
    let shape: Vec<u64> = (0..part.rank()).filter(|axis| !squeeze[*axis]).map(|axis| part.shape[axis]).collect();
    Ok(vec![l.reshape(&part, &shape)])
}

fn slice_by_size(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let sizes = l.integers(op, "size")?.ok_or("no `size`")?;
    if let Ok(Some(begin)) = l.integers(op, "begin") {
        let begin: Vec<i64> =
            begin.iter().zip(&x.shape).map(|(begin, size)| clamped(*begin, *size as i64, 0, *size as i64)).collect();
        let end: Vec<i64> = (0..x.rank())
            .map(|i| if sizes[i] < 0 { x.shape[i] as i64 } else { (begin[i] + sizes[i]).min(x.shape[i] as i64) })
            .collect();
        return Ok(vec![l.slice(&x, &begin, &end, &vec![1; x.rank()])]);
    }
    if sizes.iter().any(|size| *size < 0) {
        return Err("a slice whose size is computed".into());
    }
    let begin = l.tensor(op, "begin")?;
    let begin = l.cast(&begin, ElementType::Si32);
    let (steps, ones) = (l.signed(&sizes), l.signed(&vec![1; x.rank()]));
    let end = l.binary("primitive.add_v1", &begin, &steps)?;
    let shape: Vec<u64> = sizes.iter().map(|size| *size as u64).collect();
    Ok(vec![l.op("primitive.slice_v1", &[&x, &begin, &end, &ones], &shape, x.element)])
}

fn slice_update(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, update) = (l.tensor(op, "x")?, l.tensor(op, "update")?);
    let squeeze = masks(l, op, x.rank())?[2].clone();
    let mut sizes = update.shape.iter();
    let full = squeeze.iter().map(|squeezed| if *squeezed { Some(1) } else { sizes.next().copied() });
    let full: Vec<u64> = full.collect::<Option<_>>().ok_or("an update of another rank")?;
    let update = l.reshape(&update, &full);
    let [begin, end, stride] = if is_static(l, op) {
        let bounds = bounds(l, op, &x)?;
        if !bounds.reversed.is_empty() {
            return Err("negative strides".into());
        }
        [l.signed(&bounds.begin), l.signed(&bounds.end), l.signed(&bounds.stride)]
    } else {
        computed_bounds(l, op, &x)?
    };
    Ok(vec![l.op("primitive.slice_update_v1", &[&x, &begin, &end, &stride, &update], &x.shape, x.element)])
}

fn sliding_windows(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let axis = x.axis(l.integer_or(op, "axis", 0)?)?;
    let size = l.integer_or(op, "size", 1)?.max(1) as u64;
    let stride = l.integer_or(op, "stride", 1)?.max(1) as u64;
    let count = x.shape[axis].checked_sub(size).ok_or("a window larger than its axis")? / stride + 1;
    let windows: Vec<Tensor> = (0..count).map(|i| l.slice_axis(&x, axis, i * stride, i * stride + size)).collect();
    Ok(vec![stacked(l, &windows, axis)])
}
