//! Images: scaling, cropping and sampling of the last two axes.

use anec_mil::Op;

use super::context::{Lowering, Tensor};
use super::shape::pad_constant;
use super::{Lowered, Row};
use crate::aicode::{AiAttribute, ElementType};

pub(super) const ROWS: &[Row] = &[
    ("affine", affine),
    ("crop", crop),
    ("resample", resample),
    ("resize", resize),
    ("resize_bilinear", resize_bilinear),
    ("resize_nearest_neighbor", resize_nearest),
    ("upsample_bilinear", upsample_bilinear),
];

/// Interpolation between elements.
const LINEAR: AiAttribute = AiAttribute::InterpolationMode(0);
/// The nearest element.
const NEAREST: AiAttribute = AiAttribute::InterpolationMode(1);

/// Positions `slope * i + start` on an axis, for `count` results.
#[derive(Clone, Copy)]
struct Line {
    count: u64,
    slope: f64,
    start: f64,
}

impl Line {
    /// The positions of a sampling mode on an axis of `size` elements.
    fn of_mode(mode: &str, size: u64, count: u64) -> Result<Line, String> {
        let (last, many) = (size.saturating_sub(1) as f64, count as f64);
        let ratio = size as f64 / many.max(1.0);
        let (slope, start) = match mode {
            "DEFAULT" => (ratio, 0.0),
            "UNALIGN_CORNERS" => (ratio, 0.5 * ratio - 0.5),
            "ALIGN_CORNERS" if count == 1 => (0.0, last / 2.0),
            "STRICT_ALIGN_CORNERS" if count == 1 => (0.0, 0.0),
            "ALIGN_CORNERS" | "STRICT_ALIGN_CORNERS" => (last / (many - 1.0), 0.0),
            "OFFSET_CORNERS" => {
                let part = last.max(1.0) / many;
                (part, 0.5 * part)
            }
            other => return Err(format!("`sampling_mode` \"{other}\"")),
        };
        Ok(Line { count, slope, start })
    }

    /// Scale and offset of `interpolate`, which takes the position `(i + 0.5 - offset) / scale - 0.5`.
    fn scale_and_offset(self) -> [f64; 2] {
        match self.slope == 0.0 {
            true => [1.0, -self.start],
            false => [1.0 / self.slope, 0.5 - (self.start + 0.5) / self.slope],
        }
    }
}

/// Index of the first of the two axes of an image.
fn height_of(x: &Tensor) -> Result<usize, String> {
    x.rank().checked_sub(2).ok_or_else(|| format!("an image of rank {}", x.rank()))
}

/// Interpolates along axes at positions on lines; other axes are kept.
fn interpolated(l: &mut Lowering<'_>, x: &Tensor, lines: &[(usize, Line)]) -> Result<Tensor, String> {
    let element = x.element;
    let values = if element.is_float() { x.clone() } else { l.cast(x, ElementType::F32) };
    let mut shape = x.shape.clone();
    let (mut scales, mut offsets) = (vec![1.0; x.rank()], vec![0.0; x.rank()]);
    for (axis, line) in lines {
        shape[*axis] = line.count;
        [scales[*axis], offsets[*axis]] = line.scale_and_offset();
    }
    let sizes = l.signed(&shape.iter().map(|size| *size as i64).collect::<Vec<_>>());
    let rank = [x.rank() as u64];
    let (scales, offsets) = (l.floats(&scales, &rank, ElementType::F32)?, l.floats(&offsets, &rank, ElementType::F32)?);
    let operands = [&values, &sizes, &scales, &offsets];
    let result = l.op_of_kind("primitive.interpolate_v1", LINEAR, &operands, &shape, values.element);
    Ok(l.cast(&result, element))
}

/// Takes elements along an axis by their indices.
fn taken(l: &mut Lowering<'_>, x: &Tensor, axis: usize, indices: &[u64]) -> Result<Tensor, String> {
    if indices.iter().copied().eq(0..x.shape[axis]) {
        return Ok(x.clone());
    }
    let product = |sizes: &[u64]| sizes.iter().product::<u64>();
    let (before, behind) = (product(&x.shape[..axis]), product(&x.shape[axis + 1..]));
    let (size, count) = (x.shape[axis], indices.len() as u64);
    let open = l.reshape(x, &[before, size, behind]);
    let moved = l.swap_axes(&open, 0, 1);
    let rows = l.reshape(&moved, &[size, before * behind]);
    let numbers: Vec<f64> = indices.iter().map(|index| *index as f64).collect();
    let numbers = l.floats(&numbers, &[count, 1], ElementType::Si32)?;
    let chosen = l.op("primitive.gather_nd_v1", &[&rows, &numbers], &[count, before * behind], x.element);
    let chosen = l.reshape(&chosen, &[count, before, behind]);
    let back = l.swap_axes(&chosen, 0, 1);
    let mut shape = x.shape.clone();
    shape[axis] = count;
    Ok(l.reshape(&back, &shape))
}

/// The nearest elements of the last axes; positions are those of the centers of elements if `half_pixels`.
pub(super) fn nearest(l: &mut Lowering<'_>, x: &Tensor, counts: &[u64], half_pixels: bool) -> Lowered {
    let first = x.rank().checked_sub(counts.len()).ok_or("too few axes")?;
    let mut out = x.clone();
    for (axis, count) in (first..).zip(counts) {
        let size = u128::from(x.shape[axis]);
        let (twice, offset) = if half_pixels { (2, 1) } else { (1, 0) };
        let place = |i: u64| {
            let at = (twice * u128::from(i) + offset) * size / (twice * u128::from(*count));
            at.min(size.saturating_sub(1)) as u64
        };
        let indices: Vec<u64> = (0..*count).map(place).collect();
        out = taken(l, &out, axis, &indices)?;
    }
    Ok(vec![out])
}

fn crop(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let mut x = l.tensor(op, "x")?;
    let height = height_of(&x)?;
    for (axis, parameter) in (height..).zip(["crop_height", "crop_width"]) {
        let [before, after] = l.integers_or(op, parameter, Vec::new())?[..] else {
            return Err(format!("`{parameter}`"));
        };
        let (before, after) = (before.max(0) as u64, after.max(0) as u64);
        let end =
            x.shape[axis].checked_sub(after).filter(|end| before <= *end).ok_or_else(|| format!("`{parameter}`"))?;
        x = l.slice_axis(&x, axis, before, end);
    }
    Ok(vec![x])
}

/// Sizes of the result's last axes.
fn sizes_of(l: &Lowering<'_>, op: &Op, count: usize) -> Result<Vec<u64>, String> {
    let (shape, _) = l.result_type(op, 0)?;
    let first = shape.len().checked_sub(count).ok_or("too few axes")?;
    Ok(shape[first..].to_vec())
}

/// Interpolates the last axes by a sampling mode.
fn scaled(l: &mut Lowering<'_>, x: &Tensor, counts: &[u64], mode: &str) -> Lowered {
    let first = x.rank().checked_sub(counts.len()).ok_or("too few axes")?;
    let line = |(axis, count): (usize, &u64)| Ok((axis, Line::of_mode(mode, x.shape[axis], *count)?));
    let lines = (first..).zip(counts).map(line).collect::<Result<Vec<_>, String>>()?;
    Ok(vec![interpolated(l, x, &lines)?])
}

fn resize(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let count = l.integer_or(op, "resized_dims", 2)?.max(0) as usize;
    let counts = sizes_of(l, op, count)?;
    let mode = l.text(op, "sampling_mode", "DEFAULT");
    match &l.text(op, "interpolation_mode", "LINEAR")[..] {
        "LINEAR" => scaled(l, &x, &counts, &mode),
        "NEAREST_NEIGHBOR" if matches!(&mode[..], "DEFAULT" | "UNALIGN_CORNERS") => nearest(l, &x, &counts, true),
        other => Err(format!("`interpolation_mode` \"{other}\" with `sampling_mode` \"{mode}\"")),
    }
}

fn resize_bilinear(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let (counts, mode) = (sizes_of(l, op, 2)?, l.text(op, "sampling_mode", "DEFAULT"));
    scaled(l, &x, &counts, &mode)
}

fn resize_nearest(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let counts = sizes_of(l, op, 2)?;
    nearest(l, &x, &counts, true)
}

fn upsample_bilinear(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let align_corners = l.integer_or(op, "align_corners", 1)? != 0;
    let half_pixels = l.integer_or(op, "half_pixel_centers", i64::from(!align_corners))? != 0;
    let mode = match (align_corners, half_pixels) {
        (true, false) => "STRICT_ALIGN_CORNERS",
        (false, true) => "UNALIGN_CORNERS",
        (false, false) => "DEFAULT",
        (true, true) => return Err("`align_corners` with `half_pixel_centers`".into()),
    };
    let counts = sizes_of(l, op, 2)?;
    scaled(l, &x, &counts, mode)
}

/// `x` within 0 and `most`.
fn clamped(l: &mut Lowering<'_>, x: &Tensor, most: f64) -> Result<Tensor, String> {
    let x = l.with_number("primitive.maximum_v1", x, 0.0)?;
    l.with_number("primitive.minimum_v1", &x, most)
}

/// Positions mirrored at 0 and `length`.
fn mirrored(l: &mut Lowering<'_>, x: &Tensor, length: f64) -> Result<Tensor, String> {
    if length <= 0.0 {
        return l.splat(0.0, &x.shape, x.element);
    }
    let x = l.unary("primitive.abs_v1", x);
    let x = l.with_number("primitive.modulo_v1", &x, 2.0 * length)?;
    let whole = l.splat(2.0 * length, &x.shape, x.element)?;
    let back = l.binary("primitive.sub_v1", &whole, &x)?;
    l.binary("primitive.minimum_v1", &x, &back)
}

/// Positions in elements of an axis of `size`, of coordinates in a unit.
fn positions(l: &mut Lowering<'_>, at: &Tensor, size: u64, unit: &str, corners: bool) -> Result<Tensor, String> {
    let (from, length) = match unit {
        "unnormalized" => return Ok(at.clone()),
        "normalized_minus_one_to_one" => (-1.0, 2.0),
        "normalized_zero_to_one" => (0.0, 1.0),
        other => return Err(format!("`coordinates_mode` \"{other}\"")),
    };
    let (factor, shift) = match corners {
        true => ((size as f64 - 1.0) / length, 0.0),
        false => (size as f64 / length, -0.5),
    };
    let at = l.with_number("primitive.sub_v1", at, from)?;
    let at = l.with_number("primitive.mul_v1", &at, factor)?;
    l.with_number("primitive.add_v1", &at, shift)
}

/// How images are sampled.
struct Sampling {
    nearest: bool,
    /// `constant`, `border`, `reflection` or `symmetric`.
    padding: String,
    /// Value outside an image with constant padding.
    outside: f64,
    /// Unit of coordinates.
    unit: String,
    /// Whether a unit's range ends at the centers of the outer elements.
    corners: bool,
}

/// Values of images `[B, C, H, W]` at coordinates `[B, h, w, 2]` in f32, of which the first is along the width.
fn sampled(l: &mut Lowering<'_>, image: &Tensor, coordinates: &Tensor, how: &Sampling) -> Lowered {
    let [batch, channels, height, width] = image.shape[..] else {
        return Err(format!("an image of rank {}", image.rank()));
    };
    let [_, rows, columns, 2] = coordinates.shape[..] else {
        return Err(format!("coordinates of shape {:?}", coordinates.shape));
    };
    let (element, count) = (image.element, rows * columns);
    let is_constant = how.padding == "constant";
    let mut parts = Vec::new();
    for (axis, size) in [(0, batch), (1, channels)] {
        let mut shape = [1; 4];
        shape[axis] = size;
        let numbers: Vec<f64> = (0..size).map(|number| number as f64).collect();
        let numbers = l.floats(&numbers, &shape, ElementType::F32)?;
        parts.push(l.broadcast(&numbers, &[batch, channels, count, 1])?);
    }
    for (part, size) in [(1, height), (0, width)] {
        let at = l.slice_axis(coordinates, 3, part, part + 1);
        let mut at = positions(l, &at, size, &how.unit, how.corners)?;
        let last = size.saturating_sub(1) as f64;
        match &how.padding[..] {
            // positions outside are clamped by the operation
            "border" | "constant" => {}
            "reflection" => at = mirrored(l, &at, last)?,
            "symmetric" => {
                at = l.with_number("primitive.add_v1", &at, 0.5)?;
                at = mirrored(l, &at, size as f64)?;
                at = l.with_number("primitive.sub_v1", &at, 0.5)?;
                at = clamped(l, &at, last)?;
            }
            other => return Err(format!("`padding_mode` \"{other}\"")),
        }
        if how.nearest {
            at = l.unary("primitive.round_v1", &at);
        }
        if is_constant {
            at = l.with_number("primitive.add_v1", &at, 1.0)?;
        }
        let at = l.reshape(&at, &[batch, 1, count, 1]);
        parts.push(l.broadcast(&at, &[batch, channels, count, 1])?);
    }
    // a border of one element, to which positions further outside are clamped
    let border = [[0, 0], [0, 0], [1, 1], [1, 1]].map(|pads: [u64; 2]| if is_constant { pads } else { [0, 0] });
    let image = pad_constant(l, image, &border, how.outside)?;
    let places = l.concat(&parts, 3);
    let all = batch * channels * count;
    let places = l.reshape(&places, &[all, 4]);
    let mode = if how.nearest { NEAREST } else { LINEAR };
    let values = l.op_of_kind("primitive.interpolate_coordinates_v1", mode, &[&image, &places], &[all], element);
    Ok(vec![l.reshape(&values, &[batch, channels, rows, columns])])
}

fn sampling(l: &Lowering<'_>, op: &Op) -> Result<Sampling, String> {
    let nearest = match &l.text(op, "sampling_mode", "bilinear").to_lowercase()[..] {
        "nearest" => true,
        "bilinear" => false,
        other => return Err(format!("`sampling_mode` \"{other}\"")),
    };
    Ok(Sampling {
        nearest,
        padding: l.text(op, "padding_mode", "constant").to_lowercase(),
        outside: l.number(op, "padding_value", 0.0)?.into(),
        unit: l.text(op, "coordinates_mode", "normalized_minus_one_to_one").to_lowercase(),
        corners: l.integer_or(op, "align_corners", 1)? != 0,
    })
}

fn resample(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, coordinates) = (l.tensor(op, "x")?, l.tensor(op, "coordinates")?);
    let how = sampling(l, op)?;
    let coordinates = l.cast(&coordinates, ElementType::F32);
    sampled(l, &x, &coordinates, &how)
}

/// Values at the positions that a matrix `[a0, a1, a2, b0, b1, b2]` gives for each result, in coordinates from -1 to 1:
/// `x' = a0 x + a1 y + a2`, `y' = b0 x + b1 y + b2`.
fn affine(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, matrix) = (l.tensor(op, "x")?, l.tensor(op, "transform_matrix")?);
    let how = sampling(l, op)?;
    if how.nearest || how.padding != "constant" || how.unit != "normalized_minus_one_to_one" || !how.corners {
        return Err(format!("`padding_mode` \"{}\" with `coordinates_mode` \"{}\"", how.padding, how.unit));
    }
    let batch = *x.shape.first().ok_or("an image of rank 0")?;
    let size = |l: &Lowering<'_>, parameter: &str| Ok::<u64, String>(l.integer_or(op, parameter, 1)?.max(0) as u64);
    let (rows, columns) = (size(l, "output_height")?, size(l, "output_width")?);
    let unit = |i: u64, count: u64| if count > 1 { 2.0 * i as f64 / (count - 1) as f64 - 1.0 } else { -1.0 };
    let places: Vec<f64> = (0..rows)
        .flat_map(|row| (0..columns).map(move |column| (row, column)))
        .flat_map(|(row, column)| [unit(column, columns), unit(row, rows), 1.0])
        .collect();
    let places = l.floats(&places, &[1, rows * columns, 3], ElementType::F32)?;
    let matrix = l.cast(&matrix, ElementType::F32);
    let matrices = *matrix.shape.first().ok_or("a matrix of rank 0")?;
    let matrix = l.reshape(&matrix, &[matrices, 2, 3]);
    let matrix = l.swap_axes(&matrix, 1, 2);
    let matrix = l.broadcast(&matrix, &[batch, 3, 2])?;
    let coordinates = l.product(&places, &matrix)?;
    let coordinates = l.reshape(&coordinates, &[batch, rows, columns, 2]);
    sampled(l, &x, &coordinates, &how)
}
