//! Ops that scale, crop and sample images: the last two axes.

use super::rules::{Inferred, one, same};
use crate::catalogue::{Arguments, Row};
use crate::types::Opset::{CoreMl5, CoreMl6, CoreMl7};
use crate::types::{DataType, Dim, TensorType};

pub const ROWS: &[Row] = &[
    ("upsample_nearest_neighbor", CoreMl5, "x scale_factor_height!=1 scale_factor_width!=1", upsample),
    ("upsample_bilinear", CoreMl5, "x scale_factor_height!=1 scale_factor_width!=1 align_corners!=true", upsample),
    (
        "upsample_bilinear",
        CoreMl6,
        "x scale_factor_height!=1 scale_factor_width!=1 align_corners!=true half_pixel_centers!?",
        upsample,
    ),
    (
        "resize_bilinear",
        CoreMl5,
        "x target_size_height!=1 target_size_width!=1 sampling_mode!=\"DEFAULT\"",
        resize_to_target,
    ),
    ("resize_nearest_neighbor", CoreMl5, "x target_size_height! target_size_width!", resize_to_target),
    ("resize", CoreMl7, "x shape resized_dims! interpolation_mode!=\"LINEAR\" sampling_mode!=\"DEFAULT\"", resize),
    ("crop", CoreMl5, "x crop_height! crop_width!", crop),
    (
        "crop_resize",
        CoreMl5,
        "x roi target_height!=1 target_width!=1 normalized_coordinates!=false spatial_scale!=1.0 \
         box_coordinate_mode!=\"CORNERS_HEIGHT_FIRST\" sampling_mode!=\"DEFAULT\"",
        crop_resize,
    ),
    (
        "crop_resize",
        CoreMl6,
        "x roi target_height!=1 target_width!=1 normalized_coordinates!=false spatial_scale!=1.0 \
         box_coordinate_mode!=\"CORNERS_HEIGHT_FIRST\" sampling_mode!=\"DEFAULT\" pad_value!=0.0",
        crop_resize,
    ),
    (
        "crop_resize",
        CoreMl7,
        "x boxes box_indices? target_height!=1 target_width!=1 normalized_coordinates!=false spatial_scale!=1.0 \
         box_coordinate_mode!=\"CORNERS_HEIGHT_FIRST\" sampling_mode!=\"DEFAULT\" pad_value!=0.0",
        crop_resize,
    ),
    (
        "non_maximum_suppression",
        CoreMl5,
        "boxes scores iou_threshold! score_threshold! max_boxes! per_class_suppression!=false",
        |a| suppression(a, true),
    ),
    ("non_maximum_suppression", CoreMl7, "boxes scores iou_threshold! max_boxes! per_class_suppression!=false", |a| {
        suppression(a, false)
    }),
    ("space_to_batch", CoreMl5, "x block_shape! paddings!", space_to_batch),
    ("batch_to_space", CoreMl5, "x block_shape! crops!", batch_to_space),
    ("reverse_sequence", CoreMl5, "x lengths seq_axis!=0 batch_axis!=0", same),
    (
        "resample",
        CoreMl5,
        "x coordinates sampling_mode! padding_mode! padding_value! coordinates_mode! align_corners!",
        resample,
    ),
    (
        "affine",
        CoreMl5,
        "x transform_matrix output_height! output_width! sampling_mode! padding_mode! padding_value! \
         coordinates_mode! align_corners!",
        affine,
    ),
];

/// An image and the index of its height.
fn image<'a>(a: &Arguments<'a>) -> Result<(&'a TensorType, usize), String> {
    let x = a.tensor("x")?;
    match x.rank().checked_sub(2) {
        Some(height) if height > 0 => Ok((x, height)),
        _ => Err(format!("x has rank {}, it must be at least 3", x.rank())),
    }
}

/// Multiplies the last two dimensions by a number that may be a fraction, rounding down.
fn upsample(a: &Arguments<'_>) -> Inferred {
    let (x, height) = image(a)?;
    let mut dims = x.shape.clone();
    for (dim, parameter) in dims[height..].iter_mut().zip(["scale_factor_height", "scale_factor_width"]) {
        let factor = a.constant(parameter).filter(|factor| factor.ty.dtype == DataType::Fp32);
        let bytes = factor.and_then(|factor| factor.bytes().ok()).and_then(|b| b.first_chunk().copied());
        *dim = match (a.optional_integers(parameter).as_deref(), bytes.map(f32::from_le_bytes), dim.fixed()) {
            (Some([factor]), ..) => dim.times(&Dim::Fixed((*factor).max(0) as u64)),
            (_, Some(factor), Some(size)) => Dim::Fixed((size as f32 * factor) as u64),
            _ => Dim::Unknown,
        };
    }
    one(x.dtype, dims)
}

fn resize_to_target(a: &Arguments<'_>) -> Inferred {
    let (x, height) = image(a)?;
    let mut dims = x.shape.clone();
    for (dim, parameter) in dims[height..].iter_mut().zip(["target_size_height", "target_size_width"]) {
        let size = match a.optional_tensor(parameter)? {
            Some(_) => a.integer(parameter)?,
            None => 1,
        };
        *dim = Dim::Fixed(u64::try_from(size).map_err(|_| format!("`{parameter}` is {size}"))?);
    }
    one(x.dtype, dims)
}

/// Takes the last sizes from `shape`; 0 keeps the size of x.
fn resize(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let count = a.integer("resized_dims")?;
    let asked = a.tensor("shape")?;
    let [Dim::Fixed(length)] = asked.shape.as_slice() else {
        return Err(format!("`shape` is {asked}; expected a vector of a known length"));
    };
    let count = usize::try_from(count).ok().filter(|count| *count as u64 <= *length && *length <= x.rank() as u64);
    let count = count.ok_or_else(|| format!("`resized_dims` and `shape` of {length} don't fit rank {}", x.rank()))?;
    let mut dims = x.shape.clone();
    let first = x.rank() - count;
    match a.optional_integers("shape") {
        None => dims[first..].fill(Dim::Unknown),
        Some(asked) => {
            for (dim, size) in dims[first..].iter_mut().zip(&asked[asked.len() - count..]) {
                match u64::try_from(*size) {
                    Ok(0) => {}
                    Ok(size) => *dim = Dim::Fixed(size),
                    Err(_) => return Err(format!("{asked:?} is no shape")),
                }
            }
        }
    }
    one(x.dtype, dims)
}

fn crop(a: &Arguments<'_>) -> Inferred {
    let (x, height) = image(a)?;
    let mut dims = x.shape.clone();
    for (dim, parameter) in dims[height..].iter_mut().zip(["crop_height", "crop_width"]) {
        let [before, after] = a.integers(parameter)?[..] else {
            return Err(format!("`{parameter}` takes two integers"));
        };
        let lost = before.saturating_add(after);
        if before < 0 || after < 0 || dim.fixed().is_some_and(|size| (lost as u64) > size) {
            return Err(format!("`{parameter}` takes {before} and {after} from {dim}"));
        }
        *dim = dim.offset_by(-lost);
    }
    one(x.dtype, dims)
}

/// Each box of its image; in the older form, of all images.
fn crop_resize(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let [batch, channels, _, _] = x.shape.as_slice() else { return Err(format!("x is {x}; expected [B, C, H, W]")) };
    let size = |parameter: &str| {
        let size = if a.optional_tensor(parameter)?.is_some() { a.integer(parameter)? } else { 1 };
        u64::try_from(size).map(Dim::Fixed).map_err(|_| format!("`{parameter}` is {size}"))
    };
    let target = [size("target_height")?, size("target_width")?];
    let mut dims = match (a.optional_tensor("boxes")?, a.optional_tensor("roi")?) {
        (Some(boxes), _) => match boxes.shape.as_slice() {
            [count, four] if four.is_compatible(&Dim::Fixed(4)) => vec![count.clone(), channels.clone()],
            _ => return Err(format!("`boxes` is {boxes}; expected [N, 4]")),
        },
        (None, Some(boxes)) => match boxes.shape.as_slice() {
            [count, _, _, _, _] => vec![count.clone(), batch.clone(), channels.clone()],
            _ => return Err(format!("`roi` is {boxes}; expected [N, 1, 4, 1, 1] or [N, 1, 5, 1, 1]")),
        },
        (None, None) => return Err("parameter `boxes` is missing".into()),
    };
    dims.extend(target);
    one(x.dtype, dims)
}

/// Selected boxes, their scores and indices; in the older form, boxes are rows and their number is a result.
fn suppression(a: &Arguments<'_>, rows: bool) -> Inferred {
    let (boxes, scores) = (a.tensor("boxes")?, a.tensor("scores")?);
    let most = a.integer("max_boxes")?;
    let most = u64::try_from(most).map(Dim::Fixed).map_err(|_| format!("`max_boxes` is {most}"))?;
    let ([batch, one, other], [images, first, second]) = (boxes.shape.as_slice(), scores.shape.as_slice()) else {
        return Err(format!("`boxes` is {boxes} and `scores` is {scores}; expected rank 3"));
    };
    let (count, four, all, classes) = if rows { (one, other, first, second) } else { (other, one, second, first) };
    if !batch.is_compatible(images) || !count.is_compatible(all) || !four.is_compatible(&Dim::Fixed(4)) {
        return Err(format!("`boxes` is {boxes} and `scores` is {scores}; expected as many boxes of 4 numbers"));
    }
    let of = |dtype, shape: Vec<Dim>| TensorType { dtype, shape }.into();
    let table = |of: Dim| match rows {
        true => vec![batch.clone(), most.clone(), of],
        false => vec![batch.clone(), of, most.clone()],
    };
    let mut results = vec![
        of(boxes.dtype, table(Dim::Fixed(4))),
        of(scores.dtype, table(classes.clone())),
        of(DataType::Int32, vec![batch.clone(), most.clone()]),
    ];
    if rows {
        results.push(of(DataType::Int32, vec![batch.clone()]));
    }
    Ok(results)
}

/// Images, the sizes of a block, and two numbers for the edges of each axis.
fn blocks<'a>(a: &Arguments<'a>, edges: &str) -> Result<(&'a TensorType, [Dim; 2], [i64; 2]), String> {
    let x = a.tensor("x")?;
    let block = a.integers("block_shape")?;
    let cut = a.integers(edges)?;
    let ([rows, columns], [top, bottom, left, right], 4) = (block.as_slice(), cut.as_slice(), x.rank()) else {
        return Err(format!("x is {x} with `block_shape` {block:?} and `{edges}` {cut:?}; expected 4, 2 and 4 sizes"));
    };
    let size = |size: i64| u64::try_from(size).ok().filter(|size| *size > 0).map(Dim::Fixed);
    match (size(*rows), size(*columns), cut.iter().all(|cut| *cut >= 0)) {
        (Some(rows), Some(columns), true) => {
            Ok((x, [rows, columns], [top.saturating_add(*bottom), left.saturating_add(*right)]))
        }
        _ => Err(format!("`block_shape` is {block:?} and `{edges}` is {cut:?}; expected sizes")),
    }
}

fn space_to_batch(a: &Arguments<'_>) -> Inferred {
    let (x, [rows, columns], [high, wide]) = blocks(a, "paddings")?;
    let uneven = || format!("x is {x}, which doesn't divide into blocks of {rows} by {columns}");
    let height = x.shape[2].offset_by(high).divided_by(&rows).ok_or_else(uneven)?;
    let width = x.shape[3].offset_by(wide).divided_by(&columns).ok_or_else(uneven)?;
    one(x.dtype, vec![x.shape[0].times(&rows.times(&columns)), x.shape[1].clone(), height, width])
}

fn batch_to_space(a: &Arguments<'_>) -> Inferred {
    let (x, [rows, columns], [high, wide]) = blocks(a, "crops")?;
    let batch = x.shape[0].divided_by(&rows.times(&columns));
    let batch = batch.ok_or_else(|| format!("x is {x}, which isn't made of blocks of {rows} by {columns}"))?;
    let (height, width) = (x.shape[2].times(&rows), x.shape[3].times(&columns));
    let lost = |dim: &Dim, cut: i64| dim.fixed().is_some_and(|size| cut as u64 > size);
    if lost(&height, high) || lost(&width, wide) {
        return Err(format!("`crops` takes {high} and {wide} from {height} by {width}"));
    }
    one(x.dtype, vec![batch, x.shape[1].clone(), height.offset_by(-high), width.offset_by(-wide)])
}

fn resample(a: &Arguments<'_>) -> Inferred {
    let (x, at) = (a.tensor("x")?, a.tensor("coordinates")?);
    match (x.shape.as_slice(), at.shape.as_slice()) {
        ([batch, channels, ..], [other, height, width, pair])
            if x.rank() == 4 && batch.is_compatible(other) && pair.is_compatible(&Dim::Fixed(2)) =>
        {
            one(x.dtype, vec![batch.clone(), channels.clone(), height.clone(), width.clone()])
        }
        _ => Err(format!("x is {x} and `coordinates` is {at}; expected [B, C, H, W] and [B, H2, W2, 2]")),
    }
}

fn affine(a: &Arguments<'_>) -> Inferred {
    let (x, matrix) = (a.tensor("x")?, a.tensor("transform_matrix")?);
    let ([batch, channels, ..], [matrices, six]) = (x.shape.as_slice(), matrix.shape.as_slice()) else {
        return Err(format!("x is {x} and `transform_matrix` is {matrix}; expected rank 4 and 2"));
    };
    let one_each = matrices.is_compatible(batch) || *matrices == Dim::Fixed(1);
    if x.rank() != 4 || !one_each || !six.is_compatible(&Dim::Fixed(6)) {
        return Err(format!("x is {x} and `transform_matrix` is {matrix}; expected [B, C, H, W] and [B, 6] or [1, 6]"));
    }
    let size = |parameter: &str| {
        let size = a.integer(parameter)?;
        u64::try_from(size).map(Dim::Fixed).map_err(|_| format!("`{parameter}` is {size}"))
    };
    one(x.dtype, vec![batch.clone(), channels.clone(), size("output_height")?, size("output_width")?])
}
