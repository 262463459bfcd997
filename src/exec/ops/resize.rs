//! Ops that scale, crop and sample images: the last two axes.

use std::sync::Arc;

use super::{Row, computing, make_like, moving};
use crate::kernel::{Call, Input, Integers, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::strided::View;
use crate::tensor::{Dims, Tensor, TensorData};

/// Rows of the table for ops that move elements.
pub(super) const ROWS: &[Row] = moving! {
    "crop" => |op| Ok(Arc::new(Crop { x: op.input("x")?, cut: [op.sizes("crop_height")?, op.sizes("crop_width")?] })),
    "resize_nearest_neighbor" => |op| Ok(Arc::new(Resize {
        x: op.input("x")?,
        target: target(op)?,
        sampling: Sampling::Nearest { half_pixels: true },
    })),
    "upsample_nearest_neighbor" => |op| Ok(Arc::new(Resize {
        x: op.input("x")?,
        target: factors(op)?,
        sampling: Sampling::Nearest { half_pixels: false },
    })),
};

/// Rows of the table for ops that compute.
pub(super) const INTERPOLATED: &[Row] = computing! {
    "affine" => |op| {
        let expected = [
            ("sampling_mode", "bilinear"),
            ("padding_mode", "constant"),
            ("coordinates_mode", "normalized_minus_one_to_one"),
        ];
        for (parameter, expected) in expected {
            let found = op.text(parameter)?;
            if !found.eq_ignore_ascii_case(expected) {
                return Err(format!("`{parameter}` is \"{found}\"; expected \"{expected}\""));
            }
        }
        if !op.flag("align_corners")? {
            return Err("`align_corners` is false; expected true".into());
        }
        let size = [size(op, "output_height")?, size(op, "output_width")?];
        let source = Source::constant(op.float("padding_value")?);
        Ok(Arc::new(Affine { x: op.input("x")?, matrix: op.input("transform_matrix")?, size, source }))
    },
    "resample" => |op| {
        let nearest = match op.text("sampling_mode")? {
            "bilinear" => false,
            "nearest" => true,
            other => return Err(format!("`sampling_mode` is \"{other}\"; expected bilinear or nearest")),
        };
        let align_corners = op.flag("align_corners")?;
        let padding = match op.text("padding_mode")? {
            "constant" => Padding::Constant(op.float("padding_value")?),
            "border" => Padding::Border,
            "reflection" => Padding::Reflection,
            "symmetric" => Padding::Symmetric,
            other => return Err(format!("`padding_mode` is \"{other}\"")),
        };
        let scale = match op.text("coordinates_mode")? {
            "unnormalized" => Scale::Pixels,
            "normalized_minus_one_to_one" => Scale::Range { from: -1.0, length: 2.0, align_corners },
            "normalized_zero_to_one" => Scale::Range { from: 0.0, length: 1.0, align_corners },
            other => return Err(format!("`coordinates_mode` is \"{other}\"")),
        };
        let source = Source { nearest, padding };
        Ok(Arc::new(Resample { x: op.input("x")?, coordinates: op.input("coordinates")?, scale, source }))
    },
    "resize" => |op| {
        let mode = Grid::resolve(op)?;
        let sampling = match op.text("interpolation_mode")? {
            "LINEAR" => Sampling::Linear(mode),
            // what TensorFlow computes with half_pixel_centers; for other grids no rounding is published
            "NEAREST_NEIGHBOR" if matches!(mode, Grid::Ratio | Grid::HalfPixels) => {
                Sampling::Nearest { half_pixels: true }
            }
            "NEAREST_NEIGHBOR" => {
                return Err(format!("nearest neighbours with `sampling_mode` \"{}\"", op.text("sampling_mode")?));
            }
            other => return Err(format!("`interpolation_mode` is \"{other}\"")),
        };
        let (shape, count) = (op.integers("shape")?, size(op, "resized_dims")?);
        Ok(Arc::new(Resize { x: op.input("x")?, target: Target::Shape(shape, count), sampling }))
    },
    "resize_bilinear" => |op| Ok(Arc::new(Resize {
        x: op.input("x")?,
        target: target(op)?,
        sampling: Sampling::Linear(Grid::resolve(op)?),
    })),
    "upsample_bilinear" => |op| {
        let align_corners = op.flag("align_corners")?;
        let half_pixels = if op.has("half_pixel_centers") { op.flag("half_pixel_centers")? } else { !align_corners };
        let grid = match (align_corners, half_pixels) {
            (true, false) => Grid::Corners { centered: false },
            (false, true) => Grid::HalfPixels,
            (false, false) => Grid::Ratio,
            (true, true) => return Err("`align_corners` and `half_pixel_centers` exclude each other".into()),
        };
        Ok(Arc::new(Resize { x: op.input("x")?, target: factors(op)?, sampling: Sampling::Linear(grid) }))
    },
};

fn size(op: &Resolver<'_>, parameter: &str) -> Result<usize, String> {
    let size = op.integer(parameter)?;
    usize::try_from(size).map_err(|_| format!("`{parameter}` is {size}"))
}

fn target(op: &Resolver<'_>) -> Result<Target, String> {
    Ok(Target::Sizes([size(op, "target_size_height")?, size(op, "target_size_width")?]))
}

fn factors(op: &Resolver<'_>) -> Result<Target, String> {
    let factors = [op.float("scale_factor_height")?, op.float("scale_factor_width")?];
    match factors.iter().all(|f| *f > 0.0 && f.is_finite()) {
        true => Ok(Target::Factors(factors)),
        false => Err(format!("`x` can't be scaled by {factors:?}")),
    }
}

/// Sizes of the result.
enum Target {
    /// Height and width.
    Sizes([usize; 2]),
    /// Factors of height and width; sizes are rounded down.
    Factors([f32; 2]),
    /// A shape of which the last sizes are taken; 0 keeps a size.
    Shape(Integers, usize),
}

/// Values between the elements of an axis.
enum Sampling {
    Nearest {
        /// Whether positions are those of the centers of elements.
        half_pixels: bool,
    },
    Linear(Grid),
}

/// Positions on an axis of `size` elements for a result of `count`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Grid {
    /// `i * size / count`.
    Ratio,
    /// `(i + 0.5) * size / count - 0.5`.
    HalfPixels,
    /// From the first element to the last. A single result is the first element, or the middle if `centered`.
    Corners { centered: bool },
    /// Centers of `count` equal parts between the first element and the last.
    Offset,
}

impl Grid {
    pub fn resolve(op: &Resolver<'_>) -> Result<Self, String> {
        match op.text("sampling_mode")? {
            "DEFAULT" => Ok(Grid::Ratio),
            "UNALIGN_CORNERS" => Ok(Grid::HalfPixels),
            "ALIGN_CORNERS" => Ok(Grid::Corners { centered: true }),
            "STRICT_ALIGN_CORNERS" => Ok(Grid::Corners { centered: false }),
            "OFFSET_CORNERS" => Ok(Grid::Offset),
            other => Err(format!("`sampling_mode` is \"{other}\"")),
        }
    }

    fn position(self, i: usize, size: usize, count: usize) -> f32 {
        let (at, last) = (i as f32, size.saturating_sub(1) as f32);
        let ratio = size as f32 / count as f32;
        let position = match self {
            Grid::Ratio => at * ratio,
            Grid::HalfPixels => (at + 0.5) * ratio - 0.5,
            Grid::Corners { centered: true } if count == 1 => last / 2.0,
            Grid::Corners { .. } if count == 1 => 0.0,
            Grid::Corners { .. } => at * last / (count - 1) as f32,
            Grid::Offset => (at + 0.5) * last.max(1.0) / count as f32,
        };
        position.clamp(0.0, last)
    }

    /// Position between `start` and `end` for a result of `count`, where the end is the last element.
    pub fn between(self, start: f32, end: f32, i: usize, count: usize) -> f32 {
        let (at, span) = (i as f32, end - start);
        match self {
            Grid::Ratio => start + at * (span + 1.0) / count as f32,
            Grid::HalfPixels => start + (at + 0.5) * (span + 1.0) / count as f32 - 0.5,
            Grid::Corners { centered: true } if count == 1 => start + span / 2.0,
            Grid::Corners { .. } if count == 1 => start,
            Grid::Corners { .. } => start + at * span / (count - 1) as f32,
            Grid::Offset => start + (at + 0.5) * span.max(1.0) / count as f32,
        }
    }
}

/// Two neighbours on an axis, and the share of the second.
type Neighbours = (usize, usize, f32);

/// Scales the last axes.
struct Resize {
    x: Input,
    target: Target,
    sampling: Sampling,
}

impl Resize {
    /// Sizes of the last axes of the result.
    fn sizes(&self, call: &Call<'_>, shape: &[usize]) -> Result<Dims, String> {
        let misfit = || format!("`x` of shape {shape:?} has too few axes");
        match &self.target {
            Target::Sizes(sizes) if shape.len() >= 2 => Ok(sizes.iter().copied().collect()),
            Target::Factors(factors) if shape.len() >= 2 => {
                let sizes = shape[shape.len() - 2..].iter().zip(factors);
                Ok(sizes.map(|(size, factor)| (*size as f32 * factor) as usize).collect())
            }
            Target::Shape(asked, count) => {
                let asked = call.integers(asked)?;
                if *count > asked.len() || *count > shape.len() {
                    return Err(misfit());
                }
                let asked = &asked[asked.len() - count..];
                let kept = &shape[shape.len() - count..];
                let size = |(asked, kept): (&i64, &usize)| match *asked {
                    0 => Ok(*kept),
                    size => usize::try_from(size).map_err(|_| format!("the size {size}")),
                };
                asked.iter().zip(kept).map(size).collect()
            }
            Target::Sizes(_) | Target::Factors(_) => Err(misfit()),
        }
    }

    /// Elements of a tensor of this shape, with axes of other sizes.
    fn scaled<T: Copy>(
        &self,
        mut values: Vec<T>,
        shape: &[usize],
        axes: &[(usize, usize)],
        combine: impl Fn(T, T, f32) -> T + Copy,
    ) -> Vec<T> {
        let mut shape = Dims::from_slice(shape);
        for (axis, size) in axes {
            let from = self.neighbours(shape[*axis], *size);
            values = along(&values, &shape, *axis, &from, combine);
            shape[*axis] = *size;
        }
        values
    }

    /// Neighbours on an axis for each position of the result.
    fn neighbours(&self, size: usize, count: usize) -> Vec<Neighbours> {
        let last = size.saturating_sub(1);
        let place = |i: usize| match &self.sampling {
            // exact: 2^24 elements and more have no f32
            Sampling::Nearest { half_pixels } => {
                let (twice, offset) = if *half_pixels { (2, 1) } else { (1, 0) };
                let at = (twice * i as u128 + offset) * size as u128 / (twice * count as u128);
                ((at as usize).min(last), (at as usize).min(last), 0.0)
            }
            Sampling::Linear(grid) => {
                let position = grid.position(i, size, count);
                let first = (position as usize).min(last);
                (first, (first + 1).min(last), position - first as f32)
            }
        };
        (0..count).map(place).collect()
    }
}

impl Kernel for Resize {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let sizes = self.sizes(call, &x.shape)?;
        let first = x.rank() - sizes.len();
        let shape: Dims = x.shape[..first].iter().chain(&sizes).copied().collect();
        check_size(&shape)?;
        if x.data.is_empty() && shape.iter().all(|size| *size > 0) {
            return Err(format!("`x` of shape {:?} has no elements to scale to {shape:?}", x.shape));
        }
        // axes that shrink are first, so that nothing in between is larger than `x` and the result
        let mut axes: Vec<(usize, usize)> = (first..).zip(sizes).collect();
        axes.sort_by_key(|(axis, size)| *size > x.shape[*axis]);
        if let Sampling::Nearest { .. } = self.sampling {
            let result = make_like!(pool, &shape, &x.data, (values, out) => {
                out.extend(self.scaled(values.clone(), &x.shape, &axes, |a, _, _| a));
            });
            return call.push(result);
        }
        let values = self.scaled(floats_of(x), &x.shape, &axes, |a, b, share| a + (b - a) * share);
        let result = match x.data {
            TensorData::F32(_) => pool.copied(&shape, &values),
            _ => pool.make(&shape, |out: &mut Vec<i32>| out.extend(values.iter().map(|v| *v as i32))),
        };
        call.push(result)
    }
}

/// Elements as floats.
pub(super) fn floats_of(x: &Tensor) -> Vec<f32> {
    match &x.data {
        TensorData::F32(values) => values.clone(),
        TensorData::I32(values) => values.iter().map(|v| *v as f32).collect(),
        TensorData::Bool(values) => values.iter().map(|v| f32::from(u8::from(*v))).collect(),
    }
}

/// Maximum number of elements of a scaled image.
pub(super) const MAX_ELEMENTS: usize = 1 << 28;
/// Maximum size of an axis of a scaled image.
const MAX_SIZE: usize = 1 << 24;

pub(super) fn check_size(shape: &[usize]) -> Result<(), String> {
    match shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) {
        Some(count) if count <= MAX_ELEMENTS && shape.iter().all(|size| *size <= MAX_SIZE) => Ok(()),
        _ => Err(format!("a result of shape {shape:?} is too large")),
    }
}

/// Combines two neighbours along an axis for each position of the result.
fn along<T: Copy>(
    values: &[T],
    shape: &[usize],
    axis: usize,
    from: &[Neighbours],
    combine: impl Fn(T, T, f32) -> T,
) -> Vec<T> {
    let inner: usize = shape[axis + 1..].iter().product();
    let block = shape[axis] * inner;
    let mut out = Vec::with_capacity(values.len().checked_div(shape[axis]).unwrap_or(0) * from.len());
    if inner == 0 {
        return out;
    }
    for plane in values.chunks_exact(block.max(1)) {
        for (first, second, share) in from {
            let (a, b) = (&plane[first * inner..][..inner], &plane[second * inner..][..inner]);
            out.extend(a.iter().zip(b).map(|(a, b)| combine(*a, *b, *share)));
        }
    }
    out
}

/// Removes rows and columns at the edges.
struct Crop {
    x: Input,
    /// Rows at the top and at the bottom, columns on the left and on the right.
    cut: [[usize; 2]; 2],
}

impl Kernel for Crop {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let first = x.rank().checked_sub(2).ok_or_else(|| format!("`x` of shape {:?} is no image", x.shape))?;
        let mut view = View::whole(&x.shape);
        for (axis, [before, after]) in (first..).zip(self.cut) {
            let kept = before.checked_add(after).and_then(|lost| x.shape[axis].checked_sub(lost));
            let Some(kept) = kept else {
                return Err(format!("{before} and {after} can't be taken from axis {axis} of {:?}", x.shape));
            };
            view.shape[axis] = kept;
            view.offset += before as isize * view.strides[axis];
        }
        let result = make_like!(pool, &view.shape, &x.data, (values, out) => view.read_into(values, out));
        call.push(result)
    }
}

/// Values outside an image.
#[derive(Clone, Copy)]
enum Padding {
    Constant(f32),
    /// The nearest element.
    Border,
    /// Mirrored at the centers of the outer elements.
    Reflection,
    /// Mirrored at the edges of the outer elements.
    Symmetric,
}

impl Padding {
    /// Position within an axis of `size` elements, unless padding is a constant.
    fn place(self, at: f32, size: usize) -> f32 {
        let last = size.saturating_sub(1) as f32;
        let mirror = |at: f32, length: f32| {
            if length <= 0.0 {
                return 0.0;
            }
            let at = at.abs() % (2.0 * length);
            if at > length { 2.0 * length - at } else { at }
        };
        match self {
            Padding::Constant(_) => at,
            Padding::Border => at.clamp(0.0, last),
            Padding::Reflection => mirror(at, last),
            Padding::Symmetric => (mirror(at + 0.5, size as f32) - 0.5).clamp(0.0, last),
        }
    }
}

/// Unit of coordinates.
#[derive(Clone, Copy)]
enum Scale {
    /// Elements.
    Pixels,
    /// The range from `from` covers the image: from the center of the first element to that of the last if
    /// `align_corners`, else with its edges.
    Range { from: f32, length: f32, align_corners: bool },
}

impl Scale {
    fn position(self, at: f32, size: usize) -> f32 {
        match self {
            Scale::Pixels => at,
            Scale::Range { from, length, align_corners: true } => (at - from) / length * (size as f32 - 1.0),
            Scale::Range { from, length, align_corners: false } => (at - from) / length * size as f32 - 0.5,
        }
    }
}

/// Reading an image between its elements.
#[derive(Clone, Copy)]
pub(super) struct Source {
    nearest: bool,
    padding: Padding,
}

impl Source {
    /// Linear interpolation; elements outside an image are this constant.
    pub fn constant(value: f32) -> Self {
        Source { nearest: false, padding: Padding::Constant(value) }
    }

    /// Value of a plane of `[height, width]` at a position.
    fn value(self, plane: &[f32], [height, width]: [usize; 2], [y, x]: [f32; 2]) -> f32 {
        let outside = match self.padding {
            Padding::Constant(value) => value,
            _ => 0.0,
        };
        if !y.is_finite() || !x.is_finite() {
            return outside;
        }
        let (y, x) = (self.padding.place(y, height), self.padding.place(x, width));
        let at = |y: f32, x: f32| {
            let inside = y >= 0.0 && x >= 0.0 && y < height as f32 && x < width as f32;
            if inside { plane[y as usize * width + x as usize] } else { outside }
        };
        if self.nearest {
            return at(y.round_ties_even(), x.round_ties_even());
        }
        let (top, left) = (y.floor(), x.floor());
        let (down, right) = (y - top, x - left);
        // neighbours without a share may lie outside
        let mix = |a: f32, b: &dyn Fn() -> f32, share: f32| if share == 0.0 { a } else { a + (b() - a) * share };
        let row = |y: f32| mix(at(y, left), &|| at(y, left + 1.0), right);
        mix(row(top), &|| row(top + 1.0), down)
    }

    /// Appends the values of all channels at the positions of one image.
    pub fn read(self, image: &[f32], size: [usize; 2], positions: &[[f32; 2]], out: &mut Vec<f32>) {
        for plane in image.chunks_exact((size[0] * size[1]).max(1)) {
            out.extend(positions.iter().map(|position| self.value(plane, size, *position)));
        }
    }
}

pub(super) fn images(x: &Tensor) -> Result<[usize; 4], String> {
    let shape = <[usize; 4]>::try_from(&x.shape[..]).ok().filter(|shape| !shape.contains(&0));
    shape.ok_or_else(|| format!("`x` of shape {:?} holds no images [B, C, H, W]", x.shape))
}

/// Values of images at given coordinates (x, y).
struct Resample {
    x: Input,
    coordinates: Input,
    scale: Scale,
    source: Source,
}

impl Kernel for Resample {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let [batch, channels, height, width] = images(x)?;
        let values = call.floats(self.x)?;
        let coordinates = call.tensor(self.coordinates)?;
        let [other, rows, columns, 2] = coordinates.shape[..] else {
            return Err(format!("`coordinates` has shape {:?}; expected [B, H, W, 2]", coordinates.shape));
        };
        if other != batch {
            return Err(format!("`coordinates` are for {other} images, there are {batch}"));
        }
        let shape = [batch, channels, rows, columns];
        check_size(&shape)?;
        let coordinates = floats_of(coordinates);
        let of_image = rows * columns;
        let result = pool.make(&shape, |out: &mut Vec<f32>| {
            for (i, image) in values.chunks_exact(channels * height * width).enumerate() {
                let positions: Vec<[f32; 2]> = coordinates[i * of_image * 2..][..of_image * 2]
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .map(|[x, y]| [self.scale.position(*y, height), self.scale.position(*x, width)])
                    .collect();
                self.source.read(image, [height, width], &positions, out);
            }
        });
        call.push(result)
    }
}

/// Values of images at the positions that a matrix `[a0, a1, a2, b0, b1, b2]` gives for each result, in coordinates
/// from -1 to 1: `x' = a0 x + a1 y + a2`, `y' = b0 x + b1 y + b2`.
struct Affine {
    x: Input,
    matrix: Input,
    /// Height and width of the result.
    size: [usize; 2],
    source: Source,
}

impl Kernel for Affine {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let [batch, channels, height, width] = images(call.tensor(self.x)?)?;
        let values = call.floats(self.x)?;
        let matrix = call.tensor(self.matrix)?;
        let matrices = call.floats(self.matrix)?;
        if ![[batch, 6], [1, 6]].contains(&<[usize; 2]>::try_from(&matrix.shape[..]).unwrap_or_default()) {
            return Err(format!("`transform_matrix` has shape {:?}; expected [{batch}, 6]", matrix.shape));
        }
        let [rows, columns] = self.size;
        let shape = [batch, channels, rows, columns];
        check_size(&shape)?;
        let range = Scale::Range { from: -1.0, length: 2.0, align_corners: true };
        let unit = |i: usize, count: usize| if count > 1 { 2.0 * i as f32 / (count - 1) as f32 - 1.0 } else { -1.0 };
        let result = pool.make(&shape, |out: &mut Vec<f32>| {
            let matrices = matrices.as_chunks::<6>().0.iter().cycle();
            for (image, [a0, a1, a2, b0, b1, b2]) in values.chunks_exact(channels * height * width).zip(matrices) {
                let place = |row: usize, column: usize| {
                    let (y, x) = (unit(row, rows), unit(column, columns));
                    let to = [b0 * x + b1 * y + b2, a0 * x + a1 * y + a2];
                    [range.position(to[0], height), range.position(to[1], width)]
                };
                let positions: Vec<[f32; 2]> = (0..rows)
                    .flat_map(|row| (0..columns).map(move |column| (row, column)))
                    .map(|(r, c)| place(r, c))
                    .collect();
                self.source.read(image, [height, width], &positions, out);
            }
        });
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{NamedValues, assert_close, b, counted, f, i, run, s, try_run};
    use crate::value::Value;

    #[test]
    fn the_nearest_element_fills_a_scaled_image() {
        let x = || counted(&[1, 1, 2, 2]);
        let scale = |h, w| {
            run("upsample_nearest_neighbor", vec![("x", x()), ("scale_factor_height", h), ("scale_factor_width", w)])
        };
        let whole = scale(i(&[], &[1]), i(&[], &[2]));
        assert_close(&whole, &[1, 1, 2, 4], &[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]);
        let part = scale(f(&[], &[1.5]), f(&[], &[0.5]));
        assert_close(&part, &[1, 1, 3, 1], &[0.0, 0.0, 2.0]);
        // by the ratio of the sizes, not by the factor
        let row = vec![
            ("x", counted(&[1, 1, 3])),
            ("scale_factor_height", f(&[], &[1.0])),
            ("scale_factor_width", f(&[], &[1.12])),
        ];
        assert_close(&run("upsample_nearest_neighbor", row), &[1, 1, 3], &[0.0, 1.0, 2.0]);
    }

    #[test]
    fn resized_axes_are_the_last_of_the_given_shape() {
        let resize = |x: Value, shape: &[i32], count: i32| {
            try_run(
                "resize",
                vec![
                    ("x", x),
                    ("shape", i(&[shape.len()], shape)),
                    ("resized_dims", i(&[], &[count])),
                    ("interpolation_mode", s("LINEAR")),
                    ("sampling_mode", s("DEFAULT")),
                ],
            )
        };
        assert_close(&resize(counted(&[1, 1, 2]), &[1, 1, 5], 2).unwrap(), &[1, 1, 5], &[0.0, 0.4, 0.8, 1.0, 1.0]);
        assert_eq!(resize(counted(&[3, 2, 2]), &[9, 0, 4], 2).unwrap().shape, [3, 2, 4]);
        assert_eq!(resize(i(&[1, 2], &[0, 3]), &[4], 1).unwrap().integers().unwrap(), [0, 1, 3, 3]);
        assert!(resize(counted(&[2]), &[1, 2, 3], 3).unwrap_err().contains("too few axes"));
        assert!(resize(counted(&[1, 2]), &[1, -3], 1).is_err());
        assert!(resize(counted(&[1, 2]), &[i32::MAX, i32::MAX], 2).unwrap_err().contains("too large"));
        assert!(resize(counted(&[1, 0]), &[1, 2], 1).unwrap_err().contains("no elements"));
        assert_eq!(resize(counted(&[1, 2]), &[0, 0], 2).unwrap().shape, [1, 2]);
    }

    #[test]
    fn images_are_cropped() {
        let crop = |rows: &[i32], columns: &[i32]| {
            let (rows, columns) = (i(&[rows.len()], rows), i(&[columns.len()], columns));
            try_run("crop", vec![("x", counted(&[1, 3, 4])), ("crop_height", rows), ("crop_width", columns)])
        };
        assert_close(&crop(&[1, 0], &[1, 1]).unwrap(), &[1, 2, 2], &[5.0, 6.0, 9.0, 10.0]);
        assert!(crop(&[2, 2], &[0, 0]).unwrap_err().contains("can't be taken"));
        assert!(crop(&[-1, 2], &[0, 0]).unwrap_err().contains("expected two sizes"));
        assert!(crop(&[1], &[0, 0]).unwrap_err().contains("expected two sizes"));
    }

    #[test]
    fn coordinates_outside_an_image_are_padded() {
        let sample = |coordinates: Value, padding: &str| {
            let given: NamedValues<'_> = vec![
                ("x", counted(&[1, 1, 1, 4])),
                ("coordinates", coordinates),
                ("sampling_mode", s("bilinear")),
                ("padding_mode", s(padding)),
                ("padding_value", f(&[], &[9.0])),
                ("coordinates_mode", s("unnormalized")),
                ("align_corners", b(&[], &[true])),
            ];
            try_run("resample", given)
        };
        let at = |x: [f32; 2]| f(&[1, 1, 2, 2], &[x[0], 0.0, x[1], 0.0]);
        for (padding, expected) in
            [("constant", [4.5, 9.0]), ("border", [0.0, 3.0]), ("reflection", [0.5, 1.0]), ("symmetric", [0.0, 2.0])]
        {
            assert_close(&sample(at([-0.5, 5.0]), padding).unwrap(), &[1, 1, 1, 2], &expected);
        }
        // infinite and missing coordinates are outside, without a panic
        let strange = sample(at([f32::NAN, f32::NEG_INFINITY]), "constant").unwrap();
        assert_close(&strange, &[1, 1, 1, 2], &[9.0, 9.0]);
        assert!(sample(at([f32::MAX, -1e30]), "symmetric").is_ok());
        assert!(sample(counted(&[1, 1, 2]), "constant").unwrap_err().contains("expected [B, H, W, 2]"));
        assert!(sample(at([0.0, 0.0]), "wrapped").unwrap_err().contains("wrapped"));
    }
}
