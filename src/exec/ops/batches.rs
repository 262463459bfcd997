//! Ops that move elements between batches and space, and crop boxes out of images.

use std::sync::Arc;

use super::resize::{Grid, MAX_ELEMENTS, Source, check_size, floats_of, images};
use super::{Row, computing, make_like, moving};
use crate::kernel::{Call, Input, Integers, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::strided::View;
use crate::tensor::{TensorData, axis_index, strides};

/// Rows of the table for ops that move elements.
pub(super) const ROWS: &[Row] = moving! {
    "batch_to_space" => |op| {
        let (block, edges) = (op.sizes("block_shape")?, op.sizes("crops")?);
        Ok(Arc::new(BatchToSpace { x: op.input("x")?, block, crops: edges }))
    },
    "reverse_sequence" => |op| {
        let axis = |op: &Resolver<'_>, name: &str| if op.has(name) { op.integer(name) } else { Ok(0) };
        let axes = [axis(op, "batch_axis")?, axis(op, "seq_axis")?];
        Ok(Arc::new(ReverseSequence { x: op.input("x")?, lengths: op.integers("lengths")?, axes }))
    },
    "space_to_batch" => |op| {
        let (block, edges) = (op.sizes("block_shape")?, op.sizes("paddings")?);
        Ok(Arc::new(SpaceToBatch { x: op.input("x")?, block, paddings: edges }))
    },
};

/// Rows of the table for ops that compute.
pub(super) const CROPPED: &[Row] = computing! {
    "crop_resize" => |op| {
        let grid = match Grid::resolve(op)? {
            // the published test of this mode contradicts its definition
            Grid::HalfPixels => return Err("`sampling_mode` is \"UNALIGN_CORNERS\"".into()),
            grid => grid,
        };
        let order = match op.text("box_coordinate_mode")? {
            "CORNERS_HEIGHT_FIRST" => BoxOrder { width_first: false, centered: false },
            "CORNERS_WIDTH_FIRST" => BoxOrder { width_first: true, centered: false },
            "CENTER_SIZE_HEIGHT_FIRST" => BoxOrder { width_first: false, centered: true },
            "CENTER_SIZE_WIDTH_FIRST" => BoxOrder { width_first: true, centered: true },
            other => return Err(format!("`box_coordinate_mode` is \"{other}\"")),
        };
        let [height, width] = [op.integer("target_height")?, op.integer("target_width")?].map(usize::try_from);
        let (Ok(height), Ok(width)) = (height, width) else { return Err("the target has no size".into()) };
        Ok(Arc::new(CropResize {
            x: op.input("x")?,
            boxes: op.input(if op.has("boxes") { "boxes" } else { "roi" })?,
            images: if op.has("box_indices") { Some(op.integers("box_indices")?) } else { None },
            size: [height, width],
            normalized: op.flag("normalized_coordinates")?,
            scale: op.float("spatial_scale")?,
            order,
            grid,
            padding: if op.has("pad_value") { op.float("pad_value")? } else { 0.0 },
        }))
    },
};

/// Moves blocks of space to the batch, after padding with zeros. The position in a block is the outermost.
struct SpaceToBatch {
    x: Input,
    block: [usize; 2],
    /// Rows at the top and the bottom, columns on the left and the right.
    paddings: [usize; 4],
}

impl Kernel for SpaceToBatch {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let [batch, channels, h, w] = x.shape[..] else {
            return Err(format!("`x` of shape {:?} is no image", x.shape));
        };
        let ([rows, columns], [top, bottom, left, right]) = (self.block, self.paddings);
        let (height, width) = (h + top + bottom, w + left + right);
        if rows == 0 || columns == 0 || height % rows != 0 || width % columns != 0 {
            return Err(format!("{height} by {width} doesn't divide into blocks of {rows} by {columns}"));
        }
        let planes = batch.saturating_mul(channels);
        let count = planes.checked_mul(height).and_then(|n| n.checked_mul(width)).filter(|n| *n <= MAX_ELEMENTS);
        let count = count.ok_or_else(|| format!("an image of {height} by {width} is too large"))?;
        let split = [batch, channels, height / rows, rows, width / columns, columns];
        let view = View::whole(&split).permute(&[3, 5, 0, 1, 2, 4]);
        let shape = [batch * rows * columns, channels, height / rows, width / columns];
        let result = make_like!(pool, &shape, &x.data, (values, out) => {
            let mut padded = vec![Default::default(); count];
            for (plane, padded) in values.chunks_exact((h * w).max(1)).zip(padded.chunks_exact_mut(height * width)) {
                for (row, padded) in plane.chunks_exact(w.max(1)).zip(padded[top * width..].chunks_exact_mut(width)) {
                    padded[left..][..w].copy_from_slice(row);
                }
            }
            view.read_into(&padded, out);
        });
        call.push(result)
    }
}

/// Inverse of [`SpaceToBatch`]: the edges are cropped.
struct BatchToSpace {
    x: Input,
    block: [usize; 2],
    crops: [usize; 4],
}

impl Kernel for BatchToSpace {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let [all, channels, h, w] = x.shape[..] else { return Err(format!("`x` of shape {:?} is no image", x.shape)) };
        let ([rows, columns], [top, bottom, left, right]) = (self.block, self.crops);
        let of_block = rows.checked_mul(columns).filter(|of_block| *of_block > 0 && all % of_block == 0);
        let batch = all / of_block.ok_or_else(|| format!("a batch of {all} isn't made of blocks {:?}", self.block))?;
        let (height, width) = (h * rows, w * columns);
        let cropped = (height.checked_sub(top + bottom), width.checked_sub(left + right));
        let (Some(kept_rows), Some(kept_columns)) = cropped else {
            return Err(format!("{:?} can't be cropped from {height} by {width}", self.crops));
        };
        let split = [rows, columns, batch, channels, h, w];
        let view = View::whole(&split).permute(&[2, 3, 4, 0, 5, 1]);
        let shape = [batch, channels, kept_rows, kept_columns];
        let result = make_like!(pool, &shape, &x.data, (values, out) => {
            let mut whole = Vec::new();
            view.read_into(values, &mut whole);
            for plane in whole.chunks_exact((height * width).max(1)) {
                for row in plane.chunks_exact(width.max(1)).skip(top).take(kept_rows) {
                    out.extend_from_slice(&row[left..][..kept_columns]);
                }
            }
        });
        call.push(result)
    }
}

/// Reverses the first elements of each sequence, as many as `lengths` says.
struct ReverseSequence {
    x: Input,
    lengths: Integers,
    /// Axis of the batch and of the sequence.
    axes: [i64; 2],
}

impl Kernel for ReverseSequence {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let lengths = call.integers(&self.lengths)?;
        let x = call.tensor(self.x)?;
        let [batch, sequence] = [axis_index(self.axes[0], x.rank())?, axis_index(self.axes[1], x.rank())?];
        let (count, size) = (x.shape[batch], x.shape[sequence]);
        let fits = |length: &i64| usize::try_from(*length).is_ok_and(|length| length <= size);
        if batch == sequence || lengths.len() != count || !lengths.iter().all(fits) {
            return Err(format!("`lengths` {lengths:?} doesn't fit axes {:?} of shape {:?}", self.axes, x.shape));
        }
        let steps = strides(&x.shape);
        let (of_batch, of_sequence) = (steps[batch], steps[sequence]);
        let source = |i: usize| {
            let (at, length) = (i / of_sequence % size, lengths[i / of_batch % count] as usize);
            if at < length { i - at * of_sequence + (length - 1 - at) * of_sequence } else { i }
        };
        let result = make_like!(pool, &x.shape, &x.data, (values, out) => {
            out.extend((0..values.len()).map(|i| values[source(i)]));
        });
        call.push(result)
    }
}

/// Meaning of a box's four numbers.
struct BoxOrder {
    width_first: bool,
    /// Center and size instead of two corners.
    centered: bool,
}

/// Boxes of images, each scaled to one size.
struct CropResize {
    x: Input,
    /// `[boxes, 4]`; or `[boxes, 1, 4 or 5, 1, 1]`, where the fifth number is the first: the index of the image.
    boxes: Input,
    /// Image of each box.
    images: Option<Integers>,
    size: [usize; 2],
    normalized: bool,
    scale: f32,
    order: BoxOrder,
    grid: Grid,
    padding: f32,
}

impl CropResize {
    /// First and last position of a box on each axis of an image of this size.
    fn ends(&self, numbers: [f32; 4], size: [usize; 2]) -> [[f32; 2]; 2] {
        let [a, b, c, d] = numbers;
        let [first, second] = [[a, c], [b, d]];
        let [height, width] = if self.order.width_first { [second, first] } else { [first, second] };
        let end = |[start, end]: [f32; 2], size: usize| {
            let unit = if self.normalized { size as f32 - 1.0 } else { 1.0 };
            let [start, end] = [start, end].map(|at| at * unit * self.scale);
            if self.order.centered { [start - end / 2.0, start + end / 2.0] } else { [start, end] }
        };
        [end(height, size[0]), end(width, size[1])]
    }

    /// Positions within a box.
    fn positions(&self, [start, end]: [f32; 2], count: usize) -> impl Iterator<Item = f32> + Clone {
        let grid = self.grid;
        (0..count).map(move |i| grid.between(start, end, i, count))
    }
}

impl Kernel for CropResize {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let [batch, channels, height, width] = images(call.tensor(self.x)?)?;
        let values = call.floats(self.x)?;
        let shape = &call.tensor(self.boxes)?.shape;
        let (count, numbers, old) = match shape[..] {
            [count, 4] => (count, 4, false),
            [count, 1, numbers @ (4 | 5), 1, 1] => (count, numbers, true),
            _ => return Err(format!("`{}` has shape {shape:?}; expected [N, 4] or [N, 1, 4, 1, 1]", self.boxes.name)),
        };
        let boxes = floats_of(call.tensor(self.boxes)?);
        // a box without an image is cropped from all of them in the older form
        let every = old && numbers == 4;
        let images: Vec<usize> = match &self.images {
            Some(images) => {
                call.integers(images)?.iter().map(|image| usize::try_from(*image).unwrap_or(usize::MAX)).collect()
            }
            None if numbers == 5 => boxes.chunks_exact(5).map(|numbers| numbers[0] as usize).collect(),
            None => (0..count).collect(),
        };
        let of_box = |i: usize| if every { 0..batch } else { images[i]..images[i] + 1 };
        if images.len() != count || (!every && images.iter().any(|image| *image >= batch)) {
            return Err(format!("boxes of the images {images:?}, there are {batch}"));
        }
        let [rows, columns] = self.size;
        let per_box = if every { batch } else { 1 };
        let shape = match old {
            true => vec![count, per_box, channels, rows, columns],
            false => vec![count, channels, rows, columns],
        };
        check_size(&shape)?;
        let source = Source::constant(self.padding);
        // positions beyond the centers of the outer elements have the padding's value alone
        let inside = |at: f32, size: usize| if at < 0.0 || at > size as f32 - 1.0 { f32::NEG_INFINITY } else { at };
        let result = pool.make(&shape, |out: &mut Vec<f32>| {
            for (i, numbers) in boxes.chunks_exact(numbers).enumerate() {
                let corners = [0, 1, 2, 3].map(|at| numbers[numbers.len() - 4 + at]);
                let [vertical, horizontal] = self.ends(corners, [height, width]);
                let across = self.positions(horizontal, columns);
                let positions: Vec<[f32; 2]> =
                    self.positions(vertical, rows).flat_map(|y| across.clone().map(move |x| [y, x])).collect();
                let positions: Vec<[f32; 2]> =
                    positions.into_iter().map(|[y, x]| [inside(y, height), inside(x, width)]).collect();
                let of_image = channels * height * width;
                for image in of_box(i) {
                    source.read(&values[image * of_image..][..of_image], [height, width], &positions, out);
                }
            }
        });
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{NamedValues, assert_close, b, counted, f, i, run, s, try_run};

    #[test]
    fn space_becomes_a_batch_and_back() {
        let block = || i(&[2], &[1, 2]);
        let there = |paddings: &[i32]| {
            let given =
                vec![("x", counted(&[1, 1, 2, 3])), ("block_shape", block()), ("paddings", i(&[2, 2], paddings))];
            try_run("space_to_batch", given)
        };
        let apart = there(&[0, 0, 0, 1]).unwrap();
        assert_close(&apart, &[2, 1, 2, 2], &[0.0, 2.0, 3.0, 5.0, 1.0, 0.0, 4.0, 0.0]);
        let x = f(&apart.shape, apart.floats().unwrap());
        let given = vec![("x", x), ("block_shape", block()), ("crops", i(&[2, 2], &[0, 0, 0, 1]))];
        assert_close(&run("batch_to_space", given), &[1, 1, 2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert!(there(&[0, 0, 0, 0]).unwrap_err().contains("doesn't divide"));
        assert!(there(&[0, 0, -1, 0]).unwrap_err().contains("expected 4 sizes"));
        let none = vec![("x", counted(&[3, 1, 1, 1])), ("block_shape", block()), ("crops", i(&[2, 2], &[0; 4]))];
        assert!(try_run("batch_to_space", none).unwrap_err().contains("isn't made of blocks"));
    }

    #[test]
    fn sequences_are_reversed_up_to_their_lengths() {
        let reverse = |lengths: &[i32], batch: i32, sequence: i32| {
            let axes = [("batch_axis", i(&[], &[batch])), ("seq_axis", i(&[], &[sequence]))];
            let given = vec![("x", counted(&[2, 3])), ("lengths", i(&[lengths.len()], lengths))];
            try_run("reverse_sequence", given.into_iter().chain(axes).collect())
        };
        assert_close(&reverse(&[2, 3], 0, 1).unwrap(), &[2, 3], &[1.0, 0.0, 2.0, 5.0, 4.0, 3.0]);
        assert_close(&reverse(&[2, 1, 0], -1, 0).unwrap(), &[2, 3], &[3.0, 1.0, 2.0, 0.0, 4.0, 5.0]);
        assert!(reverse(&[2, 4], 0, 1).is_err() && reverse(&[2], 0, 1).is_err() && reverse(&[1, 1], 0, 0).is_err());
    }

    #[test]
    fn boxes_are_cropped() {
        let crop = |mode: &'static str, numbers: &[f32], shape: &[usize], indices: Option<&[i32]>| {
            let mut given: NamedValues<'_> = vec![
                ("x", counted(&[1, 1, 4, 4])),
                ("boxes", f(shape, numbers)),
                ("target_height", i(&[], &[2])),
                ("target_width", i(&[], &[2])),
                ("normalized_coordinates", b(&[], &[false])),
                ("spatial_scale", f(&[], &[1.0])),
                ("box_coordinate_mode", s(mode)),
                ("sampling_mode", s("ALIGN_CORNERS")),
                ("pad_value", f(&[], &[-1.0])),
            ];
            given.extend(indices.map(|indices| ("box_indices", i(&[indices.len()], indices))));
            try_run("crop_resize", given)
        };
        let corners = crop("CORNERS_HEIGHT_FIRST", &[1.0, 2.0, 2.0, 4.0], &[1, 4], None).unwrap();
        assert_close(&corners, &[1, 1, 2, 2], &[6.0, -1.0, 10.0, -1.0]);
        let width_first = crop("CORNERS_WIDTH_FIRST", &[2.0, 1.0, 3.0, 2.0], &[1, 4], Some(&[0])).unwrap();
        assert_close(&width_first, &[1, 1, 2, 2], &[6.0, 7.0, 10.0, 11.0]);
        let centered = crop("CENTER_SIZE_HEIGHT_FIRST", &[1.5, 2.5, 1.0, 1.0], &[1, 1, 4, 1, 1], None).unwrap();
        assert_close(&centered, &[1, 1, 1, 2, 2], &[6.0, 7.0, 10.0, 11.0]);
        let indexed = crop("CORNERS_HEIGHT_FIRST", &[0.0, 1.0, 2.0, 2.0, 3.0], &[1, 1, 5, 1, 1], None).unwrap();
        assert_close(&indexed, &[1, 1, 1, 2, 2], &[6.0, 7.0, 10.0, 11.0]);
        assert!(crop("CORNERS_HEIGHT_FIRST", &[0.0; 4], &[1, 4], Some(&[1])).unwrap_err().contains("there are 1"));
        assert!(crop("CORNERS_HEIGHT_FIRST", &[0.0; 4], &[1, 4], Some(&[-1])).is_err());
        assert!(crop("CORNERS_HEIGHT_FIRST", &[0.0; 6], &[2, 3], None).unwrap_err().contains("expected [N, 4]"));
    }
}
