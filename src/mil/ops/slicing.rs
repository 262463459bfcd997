//! Slices: by index, by size, and their update.

use super::rules::{Inferred, one, shape_text};
use crate::catalogue::{Arguments, Row};
use crate::types::Opset::{CoreMl5, CoreMl8};
use crate::types::{Dim, TensorType};

const MASKS: &str =
    "x begin end stride!?=rank:1 begin_mask!?=rank:false end_mask!?=rank:false squeeze_mask!?=rank:false";
const UPDATE_MASKS: &str =
    "x update begin end stride!?=rank:1 begin_mask!?=rank:false end_mask!?=rank:false squeeze_mask!?=rank:false";

pub const ROWS: &[Row] = &[
    ("slice_by_index", CoreMl5, MASKS, slice_by_index),
    ("slice_by_size", CoreMl5, "x begin size", slice_by_size),
    ("slice_update", CoreMl8, UPDATE_MASKS, slice_update),
    ("sliding_windows", CoreMl5, "x axis! size! stride!=1", sliding_windows),
];

/// Shape of a slice without its squeezed axes.
fn sliced(a: &Arguments<'_>, x: &TensorType) -> Result<Vec<Dim>, String> {
    let rank = x.rank();
    let mask = |parameter: &str| -> Result<Vec<bool>, String> {
        match a.optional_integers(parameter) {
            None => Ok(vec![false; rank]),
            Some(mask) if mask.len() == rank => Ok(mask.into_iter().map(|m| m != 0).collect()),
            Some(mask) => Err(format!("`{parameter}` has {} entries for rank {rank}", mask.len())),
        }
    };
    let (begin_mask, end_mask, squeeze) = (mask("begin_mask")?, mask("end_mask")?, mask("squeeze_mask")?);
    let strides = a.optional_integers("stride").unwrap_or_else(|| vec![1; rank]);
    let (begin, end) = (a.optional_integers("begin"), a.optional_integers("end"));
    for (parameter, values) in [("stride", Some(&strides)), ("begin", begin.as_ref()), ("end", end.as_ref())] {
        if let Some(values) = values
            && values.len() != rank
        {
            return Err(format!("`{parameter}` has {} entries for rank {rank}", values.len()));
        }
    }
    let mut dims = Vec::with_capacity(rank);
    for i in 0..rank {
        let (size, stride) = (&x.shape[i], strides[i]);
        if squeeze[i] {
            continue;
        }
        if stride == 0 {
            return Err(format!("the stride of axis {i} is 0"));
        }
        if begin_mask[i] && end_mask[i] && stride.abs() == 1 {
            dims.push(size.clone());
            continue;
        }
        let bound = |values: &Option<Vec<i64>>| values.as_ref().map(|v| v[i]);
        dims.push(extent(size, bound(&begin), bound(&end), begin_mask[i], end_mask[i], stride));
    }
    Ok(dims)
}

/// Number of elements from `begin` to `end` by `stride`, counted as in Python's slices.
fn extent(size: &Dim, begin: Option<i64>, end: Option<i64>, from_start: bool, to_end: bool, stride: i64) -> Dim {
    match size.fixed() {
        Some(n) => {
            let n = n as i64;
            let clamp = |v: i64, low: i64, high: i64| (if v < 0 { v + n } else { v }).clamp(low, high);
            let (low, high) = if stride > 0 { (0, n) } else { (-1, n - 1) };
            let first = match (from_start, begin) {
                (true, _) => Some(if stride > 0 { 0 } else { n - 1 }),
                (false, begin) => begin.map(|b| clamp(b, low, high)),
            };
            let last = match (to_end, end) {
                (true, _) => Some(if stride > 0 { n } else { -1 }),
                (false, end) => end.map(|e| clamp(e, low, high)),
            };
            match first.zip(last) {
                Some((first, last)) => {
                    let span = if stride > 0 { last - first } else { first - last };
                    Dim::Fixed((span.max(0) as u64).div_ceil(stride.unsigned_abs()))
                }
                None => Dim::Unknown,
            }
        }
        // for a symbolic size, the length is known only for slices from one end
        None if stride == 1 => match (from_start, to_end, begin, end) {
            (true, true, ..) => size.clone(),
            (false, true, Some(b), _) if b >= 0 => size.offset_by(-b),
            (false, true, Some(-1), _) => Dim::Fixed(1),
            // coremltools infers no length of other slices from the end; the size may be smaller than that
            (false, true, Some(_), _) => Dim::Unknown,
            (true, false, _, Some(e)) if e < 0 => size.offset_by(e),
            (false, false, Some(b), Some(e)) if b >= 0 && e < 0 => size.offset_by(e - b),
            // the caller guarantees that the size reaches `end`: a shorter one is an error at run time
            (true, false, _, Some(e)) => Dim::Fixed(e as u64),
            (false, false, Some(b), Some(e)) if e >= b => Dim::Fixed((e - b) as u64),
            _ => Dim::Unknown,
        },
        None => Dim::Unknown,
    }
}

fn slice_by_index(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    one(x.dtype, sliced(a, x)?)
}

fn slice_update(a: &Arguments<'_>) -> Inferred {
    let (x, update) = (a.tensor("x")?, a.tensor("update")?);
    let place = sliced(a, x)?;
    let fits = place.len() == update.rank() && place.iter().zip(&update.shape).all(|(p, u)| p.is_compatible(u));
    if !fits {
        return Err(format!("update has shape {}, its place {}", shape_text(&update.shape), shape_text(&place)));
    }
    one(x.dtype, x.shape.clone())
}

fn slice_by_size(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let (begin, size) = (a.optional_integers("begin"), a.optional_integers("size"));
    let Some(size) = size.filter(|s| s.len() == x.rank()) else { return one(x.dtype, vec![Dim::Unknown; x.rank()]) };
    let dims = (0..x.rank()).map(|i| match (size[i], &begin) {
        (-1, Some(begin)) if begin.len() == x.rank() => x.shape[i].offset_by(-begin[i]),
        (-1, _) => Dim::Unknown,
        (n, _) => Dim::Fixed(n.max(0) as u64),
    });
    one(x.dtype, dims.collect())
}

fn sliding_windows(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let along = super::rules::axis(a.integer("axis")?, x.rank())?;
    let (size, stride) = (a.integer("size")?, a.integer("stride")?.max(1));
    let mut dims = x.shape.clone();
    dims[along] = match x.shape[along].fixed() {
        Some(n) => Dim::Fixed((n as i64 - size).max(0) as u64 / stride as u64 + 1),
        None => Dim::Unknown,
    };
    dims.insert(along + 1, Dim::Fixed(size.max(0) as u64));
    one(x.dtype, dims)
}
