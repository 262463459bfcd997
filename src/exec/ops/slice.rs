//! Ops that slice, update, split and join tensors.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{Resolved, Row, make_like, moving};
use crate::kernel::{Call, Input, Inputs, Integers, Kernel, Numbers};
use crate::pool::{Element, Pool};
use crate::resolve::Resolver;
use crate::strided::View;
use crate::tensor::{Dims, Tensor, TensorData, axis_index};

/// Rows of the table.
pub(super) const ROWS: &[Row] = moving! {
    "concat" => Concat::resolve,
    "pad" => Pad::resolve,
    "slice_by_index" => |op| Ok(Arc::new(SliceByIndex { x: op.input("x")?, slicing: Slicing::resolve(op)? })),
    "slice_by_size" => |op| {
        let (x, begin, size) = (op.input("x")?, op.integers("begin")?, op.integers("size")?);
        Ok(Arc::new(SliceBySize { x, begin, size }))
    },
    "slice_update" => |op| {
        let (x, update) = (op.input("x")?, op.input("update")?);
        Ok(Arc::new(SliceUpdate { x, update, slicing: Slicing::resolve(op)? }))
    },
    "split" => Split::resolve,
    "stack" => |op| Ok(Arc::new(Stack { values: op.inputs("values")?, axis: op.integer("axis")? })),
};

/// Slice by `begin`, `end`, `stride` and masks, with Python's rules: negative positions count from the end, positions
/// outside are clamped.
pub(crate) struct Slicing {
    pub begin: Integers,
    pub end: Integers,
    pub stride: Option<Numbers>,
    pub begin_mask: Option<Vec<bool>>,
    pub end_mask: Option<Vec<bool>>,
    pub squeeze_mask: Option<Vec<bool>>,
}

impl Slicing {
    fn resolve(op: &mut Resolver<'_>) -> Result<Self, String> {
        Ok(Slicing {
            begin: op.integers("begin")?,
            end: op.integers("end")?,
            stride: op.known_integers("stride")?,
            begin_mask: op.flags("begin_mask")?,
            end_mask: op.flags("end_mask")?,
            squeeze_mask: op.flags("squeeze_mask")?,
        })
    }

    /// Returns whether the slice skips the first element of the last axis.
    pub fn begins_within_last_axis(&self) -> bool {
        let masked = self.begin_mask.as_ref().and_then(|mask| mask.last().copied()).unwrap_or(false);
        !masked
            && match &self.begin {
                Integers::Known(begin) => begin.last().is_some_and(|begin| *begin != 0),
                Integers::Computed(_) => true,
            }
    }

    fn squeezes(&self, axis: usize) -> bool {
        self.squeeze_mask.as_ref().is_some_and(|mask| mask[axis])
    }

    /// View of a tensor of this shape.
    fn view(&self, call: &Call<'_>, shape: &[usize]) -> Result<View, String> {
        let rank = shape.len();
        let (begin, end) = (call.integers(&self.begin)?, call.integers(&self.end)?);
        let lengths = [
            ("begin", Some(begin.len())),
            ("end", Some(end.len())),
            ("stride", self.stride.as_ref().map(SmallVec::len)),
            ("begin_mask", self.begin_mask.as_ref().map(Vec::len)),
            ("end_mask", self.end_mask.as_ref().map(Vec::len)),
            ("squeeze_mask", self.squeeze_mask.as_ref().map(Vec::len)),
        ];
        for (name, length) in lengths {
            if let Some(length) = length.filter(|length| *length != rank) {
                return Err(format!("`{name}` has {length} elements for a tensor of rank {rank}"));
            }
        }
        let is_set = |mask: &Option<Vec<bool>>, axis: usize| mask.as_ref().is_some_and(|mask| mask[axis]);
        let mut view = View::whole(shape);
        for axis in 0..rank {
            let (from_start, to_end) = (is_set(&self.begin_mask, axis), is_set(&self.end_mask, axis));
            let size = shape[axis] as i64;
            let from_end = |position: i64| if position < 0 { position.saturating_add(size) } else { position };
            let step = self.stride.as_ref().map_or(1, |stride| stride[axis]);
            if self.squeezes(axis) {
                let at = from_end(if from_start { 0 } else { begin[axis] });
                let at = usize::try_from(at).ok().filter(|at| *at < shape[axis]);
                let at = at.ok_or_else(|| format!("position {} is outside axis {axis} of size {size}", begin[axis]))?;
                view.slice(axis, at, 1, 1);
                continue;
            }
            let (first, past) = match step {
                0 => return Err(format!("the stride of axis {axis} is 0")),
                1.. => (
                    if from_start { 0 } else { from_end(begin[axis]).clamp(0, size) },
                    if to_end { size } else { from_end(end[axis]).clamp(0, size) },
                ),
                _ => (
                    if from_start { size - 1 } else { from_end(begin[axis]).clamp(-1, size - 1) },
                    if to_end { -1 } else { from_end(end[axis]).clamp(-1, size - 1) },
                ),
            };
            let span = if step > 0 { past - first } else { first - past };
            let count = if span > 0 { (span as u64).div_ceil(step.unsigned_abs()) as usize } else { 0 };
            view.slice(axis, first.max(0) as usize, count, step as isize);
        }
        Ok(view)
    }

    /// Shape of a view without squeezed axes.
    fn kept(&self, view: &View) -> Dims {
        (0..view.shape.len()).filter(|axis| !self.squeezes(*axis)).map(|axis| view.shape[axis]).collect()
    }
}

pub(crate) struct SliceByIndex {
    pub x: Input,
    pub slicing: Slicing,
}

impl Kernel for SliceByIndex {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let view = self.slicing.view(call, &x.shape)?;
        let shape = self.slicing.kept(&view);
        if view.shape[..] == x.shape[..] && view.offset == 0 && view.strides == View::whole(&x.shape).strides {
            let mut x = call.take(self.x)?;
            if x.shape[..] != shape[..] {
                let own = &mut pool.make_mut(&mut x).shape;
                own.clear();
                own.extend_from_slice(&shape);
            }
            return call.push(x);
        }
        let result = make_like!(pool, &shape, &x.data, (v, out) => view.read_into(v, out));
        call.push(result)
    }
}

/// `size` elements of each axis from `begin`; a size of -1 goes to the end.
struct SliceBySize {
    x: Input,
    begin: Integers,
    size: Integers,
}

impl Kernel for SliceBySize {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let (begin, size) = (call.integers(&self.begin)?, call.integers(&self.size)?);
        let x = call.tensor(self.x)?;
        if begin.len() != x.rank() || size.len() != x.rank() {
            let (b, s) = (begin.len(), size.len());
            return Err(format!("{b} begins and {s} sizes for a tensor of rank {}", x.rank()));
        }
        let mut view = View::whole(&x.shape);
        for axis in 0..x.rank() {
            let whole = x.shape[axis] as i64;
            let from = if begin[axis] < 0 { begin[axis].saturating_add(whole) } else { begin[axis] };
            let count = if size[axis] == -1 { whole - from } else { size[axis] };
            if from < 0 || count < 0 || from.saturating_add(count) > whole {
                return Err(format!("{count} elements from {from} are beyond axis {axis} of size {whole}"));
            }
            view.slice(axis, from as usize, count as usize, 1);
        }
        let result = make_like!(pool, &view.shape, &x.data, (v, out) => view.read_into(v, out));
        call.push(result)
    }
}

/// Replaces a slice of `x` by `update`; in place if nothing else needs `x`.
pub(crate) struct SliceUpdate {
    pub x: Input,
    pub update: Input,
    pub slicing: Slicing,
}

impl Kernel for SliceUpdate {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let view = self.slicing.view(call, &call.tensor(self.x)?.shape)?;
        let update = call.take(self.update)?;
        let mut x = call.take(self.x)?;
        let expected = self.slicing.kept(&view);
        if update.shape[..] != expected[..] {
            return Err(format!("an update of shape {:?} for a slice of shape {expected:?}", update.shape));
        }
        match (&mut pool.make_mut(&mut x).data, &update.data) {
            (TensorData::F32(x), TensorData::F32(update)) => view.write(x, update),
            (TensorData::I32(x), TensorData::I32(update)) => view.write(x, update),
            (TensorData::Bool(x), TensorData::Bool(update)) => view.write(x, update),
            (x, update) => return Err(format!("an update of {} for {}", update.kind(), x.kind())),
        }
        pool.recycle(update);
        call.push(x)
    }
}

/// Division of an axis.
enum Division {
    Sizes(Vec<usize>),
    /// Number of equal parts.
    Equal(usize),
}

/// Parts of a tensor along an axis.
struct Split {
    x: Input,
    axis: i64,
    division: Division,
}

impl Split {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let division = match (op.known_integers("split_sizes")?, op.known_integers("num_splits")?.as_deref()) {
            (Some(sizes), _) => {
                let sizes: Result<Vec<usize>, _> = sizes.iter().map(|s| usize::try_from(*s)).collect();
                Division::Sizes(sizes.map_err(|_| "a size is negative".to_owned())?)
            }
            (None, Some([n])) if *n > 0 => Division::Equal(*n as usize),
            _ => return Err("neither sizes nor a number of parts is given".into()),
        };
        Ok(Arc::new(Split { x: op.input("x")?, axis: op.integer("axis")?, division }))
    }
}

impl Kernel for Split {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.take(self.x)?;
        let axis = axis_index(self.axis, x.rank())?;
        let whole = x.shape[axis];
        let count = match &self.division {
            Division::Sizes(sizes) => {
                if sizes.iter().try_fold(0usize, |n, s| n.checked_add(*s)) != Some(whole) {
                    return Err(format!("the sizes {sizes:?} don't sum to {whole}, the size of axis {axis}"));
                }
                sizes.len()
            }
            Division::Equal(count) if whole % count == 0 => *count,
            Division::Equal(count) => return Err(format!("axis {axis} of size {whole} has no {count} equal parts")),
        };
        let mut begin = 0;
        for i in 0..count {
            let size = match &self.division {
                Division::Sizes(sizes) => sizes[i],
                Division::Equal(count) => whole / count,
            };
            let mut view = View::whole(&x.shape);
            view.slice(axis, begin, size, 1);
            begin += size;
            let part = make_like!(pool, &view.shape, &x.data, (v, out) => view.read_into(v, out));
            call.push(part)?;
        }
        pool.recycle(x);
        Ok(())
    }
}

/// Joins tensors, each laid out as `rows` rows of equal width.
fn join(call: &mut Call<'_>, pool: &mut Pool, values: &Inputs, (shape, rows): (&[usize], usize)) -> Result<(), String> {
    fn interleave<'a, T: Element>(
        pool: &mut Pool,
        (shape, rows): (&[usize], usize),
        part: impl Fn(Input) -> Option<&'a [T]>,
        values: &Inputs,
    ) -> Option<Arc<Tensor>> {
        let parts: SmallVec<[&[T]; 64]> = values.iter().map(part).collect::<Option<_>>()?;
        Some(pool.make(shape, |out| {
            for row in 0..rows {
                for part in &parts {
                    let width = part.len() / rows.max(1);
                    out.extend_from_slice(&part[row * width..][..width]);
                }
            }
        }))
    }
    let first = values.iter().next().ok_or("there is nothing to join")?;
    let tensor = |input: Input| call.tensor(input).ok();
    let joined = match call.tensor(first)?.data {
        TensorData::F32(_) => interleave(pool, (shape, rows), |input| tensor(input)?.floats(), values),
        TensorData::I32(_) => interleave(pool, (shape, rows), |input| tensor(input)?.integers(), values),
        TensorData::Bool(_) => interleave(pool, (shape, rows), |input| tensor(input)?.booleans(), values),
    };
    let joined = joined.ok_or_else(|| "the tensors hold different kinds of elements".to_owned())?;
    call.push(joined)
}

/// Concatenation; scalars are joined to a vector.
pub(crate) struct Concat {
    pub values: Inputs,
    pub axis: i64,
    pub interleave: bool,
}

impl Concat {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let (axis, interleave) = (op.integer("axis")?, op.flag("interleave")?);
        Ok(Arc::new(Concat { values: op.inputs("values")?, axis, interleave }))
    }
}

impl Kernel for Concat {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let first = call.tensor(self.values.iter().next().ok_or("there is nothing to join")?)?;
        let mut all_scalars = true;
        for input in self.values.iter() {
            all_scalars &= call.tensor(input)?.rank() == 0;
        }
        if all_scalars {
            return join(call, pool, &self.values, (&[self.values.places.len()], 1));
        }
        let axis = axis_index(self.axis, first.rank())?;
        let mut shape = Dims::from_slice(&first.shape);
        shape[axis] = 0;
        let mut equal = true;
        for input in self.values.iter() {
            let tensor = call.tensor(input)?;
            let fits =
                tensor.rank() == first.rank() && (0..shape.len()).all(|i| i == axis || tensor.shape[i] == shape[i]);
            if !fits {
                return Err(format!(
                    "the shapes {:?} and {:?} don't join along axis {axis}",
                    first.shape, tensor.shape
                ));
            }
            shape[axis] += tensor.shape[axis];
            equal &= tensor.shape[axis] == first.shape[axis];
        }
        let mut rows: usize = shape[..axis].iter().product();
        if self.interleave {
            if !equal {
                return Err("only tensors of equal shape can be interleaved".into());
            }
            rows *= first.shape[axis];
        }
        join(call, pool, &self.values, (&shape, rows))
    }
}

struct Stack {
    values: Inputs,
    axis: i64,
}

impl Kernel for Stack {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let first = call.tensor(self.values.iter().next().ok_or("there is nothing to join")?)?;
        let axis = axis_index(self.axis, first.rank() + 1)?;
        for input in self.values.iter() {
            let other = call.tensor(input)?;
            if other.shape != first.shape {
                return Err(format!("the shapes {:?} and {:?} don't stack", first.shape, other.shape));
            }
        }
        let mut shape = Dims::from_slice(&first.shape);
        shape.insert(axis, self.values.places.len());
        let rows = shape[..axis].iter().product();
        join(call, pool, &self.values, (&shape, rows))
    }
}

/// Padding of the last axes by pairs of counts in `pad`: with a constant, a reflection about the edge element, or the
/// edge element itself.
struct Pad {
    x: Input,
    amounts: Integers,
    mode: PadMode,
    constant: f32,
}

enum PadMode {
    Constant,
    Reflect,
    Replicate,
}

impl Pad {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let mode = match op.text("mode")? {
            "constant" => PadMode::Constant,
            "reflect" => PadMode::Reflect,
            "replicate" => PadMode::Replicate,
            other => return Err(format!("mode `{other}` is none of constant, reflect, replicate")),
        };
        let (x, amounts, constant) = (op.input("x")?, op.integers("pad")?, op.float("constant_val")?);
        Ok(Arc::new(Pad { x, amounts, mode, constant }))
    }
}

impl Kernel for Pad {
    fn run(&self, call: &mut Call<'_>, _: &mut Pool) -> Result<(), String> {
        let (amounts, constant) = (call.integers(&self.amounts)?, self.constant);
        let x = call.tensor(self.x)?;
        let padded = amounts.len() / 2;
        if amounts.len() % 2 != 0 || padded > x.rank() || amounts.iter().any(|n| *n < 0) {
            return Err(format!("`pad` {amounts:?} doesn't fit a tensor of rank {}", x.rank()));
        }
        let first = x.rank() - padded;
        let mut data = x.data.clone();
        let mut shape = x.shape.clone();
        // axis by axis, so that corners are right
        for (i, pair) in amounts.chunks_exact(2).enumerate() {
            let (before, after) = (pair[0] as usize, pair[1] as usize);
            let axis = first + i;
            let size = shape[axis];
            let source = |position: usize| -> Result<Option<usize>, String> {
                let at = position as i64 - before as i64;
                let inside = usize::try_from(at).ok().filter(|at| *at < size);
                match self.mode {
                    _ if inside.is_some() => Ok(inside),
                    PadMode::Constant => Ok(None),
                    PadMode::Replicate if size > 0 => Ok(Some(if at < 0 { 0 } else { size - 1 })),
                    PadMode::Replicate => Err("there is no edge to replicate".to_owned()),
                    PadMode::Reflect => {
                        let mirrored = if at < 0 { -at } else { 2 * (size as i64 - 1) - at };
                        let mirrored = usize::try_from(mirrored).ok().filter(|at| *at < size);
                        mirrored
                            .map(Some)
                            .ok_or_else(|| format!("{before} and {after} reflect beyond a size of {size}"))
                    }
                }
            };
            let sources: Vec<Option<usize>> = (0..before + size + after).map(source).collect::<Result<_, _>>()?;
            let inner: usize = shape[axis + 1..].iter().product();
            let outer: usize = shape[..axis].iter().product();
            data = match &data {
                TensorData::F32(v) => TensorData::F32(pad_axis(v, outer, size, inner, &sources, constant)),
                TensorData::I32(v) => TensorData::I32(pad_axis(v, outer, size, inner, &sources, constant as i32)),
                TensorData::Bool(v) => TensorData::Bool(pad_axis(v, outer, size, inner, &sources, constant != 0.0)),
            };
            shape[axis] = sources.len();
        }
        call.push(Arc::new(Tensor { shape, data }))
    }
}

fn pad_axis<T: Copy>(
    from: &[T],
    outer: usize,
    size: usize,
    inner: usize,
    sources: &[Option<usize>],
    constant: T,
) -> Vec<T> {
    let mut out = Vec::with_capacity(outer * sources.len() * inner);
    for block in 0..outer {
        for source in sources {
            match source {
                Some(at) => out.extend_from_slice(&from[(block * size + at) * inner..][..inner]),
                None => out.extend(std::iter::repeat_n(constant, inner)),
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, b, counted, f, i, results, run, s, try_run};
    use crate::value::Value;
    use anec_mil::DataType;

    #[test]
    fn slices_follow_pythons_rules() {
        let slice = |begin: [i32; 2], end: [i32; 2], stride: [i32; 2]| {
            run(
                "slice_by_index",
                vec![
                    ("x", counted(&[3, 4])),
                    ("begin", i(&[2], &begin)),
                    ("end", i(&[2], &end)),
                    ("stride", i(&[2], &stride)),
                ],
            )
        };
        assert_close(&slice([1, 1], [3, 3], [1, 1]), &[2, 2], &[5.0, 6.0, 9.0, 10.0]);
        assert_close(&slice([0, -2], [1, 100], [1, 1]), &[1, 2], &[2.0, 3.0]);
        assert_close(&slice([0, 0], [3, 4], [2, 3]), &[2, 2], &[0.0, 3.0, 8.0, 11.0]);
        assert_close(&slice([0, 3], [1, 0], [1, -2]), &[1, 2], &[3.0, 1.0]);
        assert_eq!(slice([2, 2], [1, 4], [1, 1]).shape, [0, 2]);
        let masked = run(
            "slice_by_index",
            vec![
                ("x", counted(&[3, 4])),
                ("begin", i(&[2], &[-1, 9])),
                ("end", i(&[2], &[0, 0])),
                ("begin_mask", b(&[2], &[false, true])),
                ("end_mask", b(&[2], &[false, true])),
                ("squeeze_mask", b(&[2], &[true, false])),
            ],
        );
        assert_close(&masked, &[4], &[8.0, 9.0, 10.0, 11.0]);
        let sized = run(
            "slice_by_size",
            vec![("x", counted(&[3, 4])), ("begin", i(&[2], &[1, 2])), ("size", i(&[2], &[1, -1]))],
        );
        assert_close(&sized, &[1, 2], &[6.0, 7.0]);
    }

    #[test]
    fn an_update_replaces_a_slice() {
        let arguments = |update: Value| {
            vec![
                ("x", counted(&[2, 3])),
                ("update", update),
                ("begin", i(&[2], &[0, 1])),
                ("end", i(&[2], &[2, 2])),
                ("stride", i(&[2], &[1, 1])),
            ]
        };
        let updated = run("slice_update", arguments(f(&[2, 1], &[-1.0, -2.0])));
        assert_close(&updated, &[2, 3], &[0.0, -1.0, 2.0, 3.0, -2.0, 5.0]);
        let problem = try_run("slice_update", arguments(f(&[1, 2], &[0.0; 2]))).unwrap_err();
        assert!(problem.contains("[1, 2]") && problem.contains("[2, 1]"), "{problem}");
    }

    #[test]
    fn parts_and_wholes() {
        let parts = |name: &'static str, value: Value| {
            let arguments = vec![("x", vec![counted(&[2, 3])]), ("axis", vec![i(&[], &[1])]), (name, vec![value])];
            results("split", arguments, DataType::Fp32)
        };
        let two = parts("split_sizes", i(&[2], &[1, 2])).unwrap();
        assert_close(&two[0], &[2, 1], &[0.0, 3.0]);
        assert_close(&two[1], &[2, 2], &[1.0, 2.0, 4.0, 5.0]);
        assert_eq!(parts("num_splits", i(&[], &[3])).unwrap().len(), 3);
        assert!(parts("num_splits", i(&[], &[2])).is_err());
        let join = |operator, axis: i32| {
            let values = vec![counted(&[1, 2]), counted(&[1, 2])];
            results(operator, vec![("values", values), ("axis", vec![i(&[], &[axis])])], DataType::Fp32)
                .unwrap()
                .remove(0)
        };
        assert_close(&join("concat", 0), &[2, 2], &[0.0, 1.0, 0.0, 1.0]);
        assert_close(&join("concat", -1), &[1, 4], &[0.0, 1.0, 0.0, 1.0]);
        assert_close(&join("stack", 2), &[1, 2, 2], &[0.0, 0.0, 1.0, 1.0]);
        let scalars = vec![("values", vec![f(&[], &[1.0]), f(&[], &[2.0])]), ("axis", vec![i(&[], &[0])])];
        assert_close(&results("concat", scalars, DataType::Fp32).unwrap()[0], &[2], &[1.0, 2.0]);
    }

    #[test]
    fn padding_by_mode() {
        let pad = |amounts: &[i32], mode| {
            run("pad", vec![("x", counted(&[1, 3])), ("pad", i(&[amounts.len()], amounts)), ("mode", s(mode))])
        };
        assert_close(&pad(&[1, 0, 0, 1], "constant"), &[2, 4], &[0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0]);
        assert_close(&pad(&[2, 1], "reflect"), &[1, 6], &[2.0, 1.0, 0.0, 1.0, 2.0, 1.0]);
        assert_close(&pad(&[1, 2], "replicate"), &[1, 6], &[0.0, 0.0, 1.0, 2.0, 2.0, 2.0]);
    }
}
