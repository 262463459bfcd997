//! Channels and space, masks, and linear quantization.

use anec_mil::Op;

use super::context::{Lowering, Tensor};
use super::{Lowered, Row, image};
use crate::aicode::ElementType;

pub(super) const ROWS: &[Row] = &[
    ("pixel_shuffle", pixel_shuffle),
    ("pixel_unshuffle", pixel_unshuffle),
    ("depth_to_space", depth_to_space),
    ("space_to_depth", space_to_depth),
    ("upsample_nearest_neighbor", upsample),
    ("one_hot", one_hot),
    ("band_part", band_part),
    ("quantize", quantize),
    ("dequantize", dequantize),
];

fn sizes(x: &Tensor) -> Result<[u64; 4], String> {
    x.shape[..].try_into().map_err(|_| format!("rank {}", x.rank()))
}

fn factor(l: &Lowering<'_>, op: &Op, parameter: &str) -> Result<u64, String> {
    Ok(l.integer_or(op, parameter, 1)?.max(1) as u64)
}

/// Reshapes, transposes and reshapes again.
fn rearranged(l: &mut Lowering<'_>, x: &Tensor, open: &[u64], order: &[usize], shape: &[u64]) -> Tensor {
    let open = l.reshape(x, open);
    let moved = l.transpose(&open, order);
    l.reshape(&moved, shape)
}

fn pixel_shuffle(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let ([n, c, h, w], r) = (sizes(&x)?, factor(l, op, "upscale_factor")?);
    let channels = c / (r * r);
    // without the batch, which keeps the rank at 5
    let open = [n * channels, r, r, h, w];
    Ok(vec![rearranged(l, &x, &open, &[0, 3, 1, 4, 2], &[n, channels, h * r, w * r])])
}

fn pixel_unshuffle(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let ([n, c, h, w], r) = (sizes(&x)?, factor(l, op, "downscale_factor")?);
    let open = [n * c, h / r, r, w / r, r];
    Ok(vec![rearranged(l, &x, &open, &[0, 2, 4, 1, 3], &[n, c * r * r, h / r, w / r])])
}

fn depth_to_space(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let ([n, c, h, w], b) = (sizes(&x)?, factor(l, op, "block_size")?);
    let channels = c / (b * b);
    let open = [n, b, b, channels, h, w];
    Ok(vec![rearranged(l, &x, &open, &[0, 3, 4, 1, 5, 2], &[n, channels, h * b, w * b])])
}

fn space_to_depth(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let ([n, c, h, w], b) = (sizes(&x)?, factor(l, op, "block_size")?);
    let open = [n, c, h / b, b, w / b, b];
    Ok(vec![rearranged(l, &x, &open, &[0, 3, 5, 1, 2, 4], &[n, c * b * b, h / b, w / b])])
}

fn upsample(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let factors = [l.number(op, "scale_factor_height", 1.0)?, l.number(op, "scale_factor_width", 1.0)?];
    let lead = x.rank().checked_sub(2).ok_or("rank below 2")?;
    let (h, w) = (x.shape[lead], x.shape[lead + 1]);
    if factors.iter().any(|factor| factor.fract() != 0.0 || *factor < 1.0) {
        let counts = [(h as f32 * factors[0]) as u64, (w as f32 * factors[1]) as u64];
        return image::nearest(l, &x, &counts, false);
    }
    let factors = factors.map(|factor| factor as u64);
    let planes: u64 = x.shape[..lead].iter().product();
    let open = l.reshape(&x, &[planes, h, 1, w, 1]);
    let wide = l.broadcast(&open, &[planes, h, factors[0], w, factors[1]])?;
    let shape = [&x.shape[..lead], &[h * factors[0], w * factors[1]]].concat();
    Ok(vec![l.reshape(&wide, &shape)])
}

fn one_hot(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let indices = l.tensor(op, "indices")?;
    let size = l.integer_or(op, "one_hot_vector_size", 0)?.max(0) as u64;
    let axis = l.integer_or(op, "axis", -1)?;
    let axis = (if axis < 0 { axis + indices.rank() as i64 + 1 } else { axis }) as usize;
    let mut open = indices.shape.clone();
    open.insert(axis, 1);
    let indices = l.cast(&indices, ElementType::Si32);
    let indices = l.reshape(&indices, &open);
    let mut places = vec![1; open.len()];
    places[axis] = size;
    let numbers: Vec<f64> = (0..size).map(|place| place as f64).collect();
    let numbers = l.floats(&numbers, &places, ElementType::Si32)?;
    let hits = l.binary_to("primitive.equal_v1", &indices, &numbers, ElementType::I1)?;
    let (on, off) = (l.tensor(op, "on_value")?, l.tensor(op, "off_value")?);
    let ones = vec![1; open.len()];
    let (on, off) = (l.reshape(&on, &ones), l.reshape(&off, &ones));
    let (on, off) = (l.broadcast(&on, &hits.shape)?, l.broadcast(&off, &hits.shape)?);
    Ok(vec![l.choose(&hits, &on, &off)])
}

/// Keeps the diagonals from `lower` below the main one to `upper` above it; -1 keeps all.
fn band_part(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let (lower, upper) = (l.integer_or(op, "lower", -1)?, l.integer_or(op, "upper", -1)?);
    let lead = x.rank().checked_sub(2).ok_or("rank below 2")?;
    let (rows, columns) = (x.shape[lead] as i64, x.shape[lead + 1] as i64);
    let kept = |row: i64, column: i64| (lower < 0 || row - column <= lower) && (upper < 0 || column - row <= upper);
    let mask: Vec<f64> = (0..rows)
        .flat_map(|row| (0..columns).map(move |column| (row, column)))
        .map(|(row, column)| f64::from(u8::from(kept(row, column))))
        .collect();
    let mut shape = vec![1; x.rank()];
    (shape[lead], shape[lead + 1]) = (rows as u64, columns as u64);
    let mask = l.booleans(&mask, &shape)?;
    let mask = l.broadcast(&mask, &x.shape)?;
    let zero = l.splat(0.0, &x.shape, x.element)?;
    Ok(vec![l.choose(&mask, &x, &zero)])
}

/// A scale or zero point, as it broadcasts to the input.
fn along_axis(l: &mut Lowering<'_>, op: &Op, x: &Tensor, parameter: &str) -> Result<Option<Tensor>, String> {
    let Some(vector) = l.optional(op, parameter)? else { return Ok(None) };
    let mut shape = vec![1; x.rank()];
    if vector.rank() == 1 {
        shape[x.axis(l.integer_or(op, "axis", 0)?)?] = vector.shape[0];
    }
    Ok(Some(l.reshape(&vector, &shape)))
}

fn quantize(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "input")?;
    let scale = along_axis(l, op, &x, "scale")?.ok_or("no `scale`")?;
    let zero = along_axis(l, op, &x, "zero_point")?;
    let (_, element) = l.result_type(op, 0)?;
    let (least, most) = match element {
        ElementType::Si8 => (-128.0, 127.0),
        ElementType::Ui8 => (0.0, 255.0),
        other => return Err(format!("integers of type {}", other.name())),
    };
    let scaled = l.binary("primitive.divide_v1", &x, &scale)?;
    let mut result = l.unary("primitive.round_v1", &scaled);
    if let Some(zero) = zero {
        let zero = l.cast(&zero, x.element);
        result = l.binary("primitive.add_v1", &result, &zero)?;
    }
    result = l.with_number("primitive.maximum_v1", &result, least)?;
    result = l.with_number("primitive.minimum_v1", &result, most)?;
    Ok(vec![l.cast(&result, element)])
}

fn dequantize(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "input")?;
    let scale = along_axis(l, op, &x, "scale")?.ok_or("no `scale`")?;
    let zero = along_axis(l, op, &x, "zero_point")?;
    let mut result = l.cast(&x, scale.element);
    if let Some(zero) = zero {
        let zero = l.cast(&zero, scale.element);
        result = l.binary("primitive.sub_v1", &result, &zero)?;
    }
    Ok(vec![l.binary("primitive.mul_v1", &result, &scale)?])
}
