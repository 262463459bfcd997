//! Ops that move elements without computing: reshape, transpose, concatenation, padding.

use super::rules::{Inferred, axes, axis, one, product, same, shape_text, unknown_dimensions};
use crate::catalogue::{Arguments, Row};
use crate::constant::Constant;
use crate::types::Opset::{CoreMl5, CoreMl6, CoreMl7};
use crate::types::{DataType, Dim, ValueType};

pub const ROWS: &[Row] = &[
    ("reshape", CoreMl5, "x shape", reshape),
    ("transpose", CoreMl5, "x perm!", transpose),
    ("expand_dims", CoreMl5, "x axes!", expand_dims),
    ("squeeze", CoreMl5, "x axes!?", squeeze),
    ("flatten2d", CoreMl5, "x axis!=1", flatten2d),
    ("shape", CoreMl5, "x", shape),
    ("concat", CoreMl5, "values* axis! interleave!=false", concat),
    ("stack", CoreMl5, "values* axis!", stack),
    ("split", CoreMl5, "x num_splits!? split_sizes!? axis!", split),
    ("tile", CoreMl5, "x reps", tile),
    ("pad", CoreMl5, "x pad mode!=\"constant\" constant_val!=0.0", pad),
    ("reverse", CoreMl5, "x axes!?", same),
    ("fill", CoreMl5, "shape value!=0.0", fill),
    ("range_1d", CoreMl5, "end start step", range_1d),
    ("random_bernoulli", CoreMl5, "shape prob!=0.5 seed!=-1", |a| random(a, "prob")),
    ("random_categorical", CoreMl5, "x mode!=\"logits\" size!=1 seed!=-1", random_categorical),
    ("random_normal", CoreMl5, "shape mean!=0.0 stddev!=1.0 seed!=-1", |a| random(a, "mean")),
    ("random_uniform", CoreMl5, "shape low!=0.0 high!=1.0 seed!=-1", |a| random(a, "low")),
    ("one_hot", CoreMl5, "indices one_hot_vector_size axis!=-1 on_value!=1 off_value!=0", one_hot),
    ("band_part", CoreMl5, "x lower!=-1 upper!=-1", same),
    ("pixel_shuffle", CoreMl5, "x upscale_factor!", pixel_shuffle),
    ("pixel_unshuffle", CoreMl6, "x downscale_factor!", pixel_unshuffle),
    ("depth_to_space", CoreMl5, "x block_size!", depth_to_space),
    ("space_to_depth", CoreMl5, "x block_size!", space_to_depth),
    ("reshape_like", CoreMl6, "x ref_tensors* begins* ends* end_masks*", reshape_like),
    ("quantize", CoreMl7, "input zero_point!? scale! axis!? output_dtype!", quantize),
    ("dequantize", CoreMl7, "input zero_point!? scale! axis!?", dequantize),
];

fn reshape(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let Some(asked) = a.optional_integers("shape") else { return one(x.dtype, unknown_dimensions(a, "shape")?) };
    // 0 keeps a dimension of x, counted from the right; from iOS17 on, one before the first stands for 1
    let keep = |i: usize| match (i + x.rank()).checked_sub(asked.len()) {
        Some(at) => Ok(x.shape[at].clone()),
        None if a.function.opset >= CoreMl7 => Ok(Dim::Fixed(1)),
        None => Err(format!("the 0 at {i} of {asked:?} stands for no dimension of x")),
    };
    let mut dims = Vec::with_capacity(asked.len());
    let mut inferred = None;
    for (i, size) in asked.iter().enumerate() {
        dims.push(match *size {
            -1 if inferred.is_none() => {
                inferred = Some(i);
                Dim::Fixed(1)
            }
            0 => keep(i)?,
            n => Dim::Fixed(u64::try_from(n).map_err(|_| format!("{asked:?} is no shape"))?),
        });
    }
    let (all, known) = (product(&x.shape), product(&dims));
    match inferred {
        Some(i) if all == Dim::Unknown || known == Dim::Unknown => dims[i] = Dim::Unknown,
        Some(i) => {
            let mismatch = || format!("{} elements can't be reshaped to {asked:?}", all);
            dims[i] = all.divided_by(&known).ok_or_else(mismatch)?;
        }
        None if !all.is_compatible(&known) && all.fixed().is_some() && known.fixed().is_some() => {
            return Err(format!("{} has {all} elements, {asked:?} has {known}", shape_text(&x.shape)));
        }
        None => {}
    }
    one(x.dtype, dims)
}

/// Joins parts of the shapes of several tensors.
fn reshape_like(a: &Arguments<'_>) -> Inferred {
    let (x, references) = (a.tensor("x")?, a.tensors("ref_tensors")?);
    let numbers = |parameter: &str| {
        let constants = a.constants(parameter)?;
        let numbers: Option<Vec<i64>> = constants.into_iter().map(Constant::as_integer).collect();
        let numbers = numbers.filter(|numbers| numbers.len() == references.len());
        numbers.ok_or_else(|| format!("`{parameter}` takes one constant for each of `ref_tensors`"))
    };
    let (begins, ends, masks) = (numbers("begins")?, numbers("ends")?, numbers("end_masks")?);
    let mut dims = Vec::new();
    for (i, reference) in references.iter().enumerate() {
        let rank = reference.rank();
        // as Python's slices: from the back if negative, and cut at the ends
        let place = |at: i64| if at < 0 { (at + rank as i64).max(0) } else { at.min(rank as i64) } as usize;
        let (begin, end) = (place(begins[i]), if masks[i] != 0 { rank } else { place(ends[i]) });
        dims.extend_from_slice(reference.shape.get(begin..end).unwrap_or_default());
    }
    let (all, asked) = (product(&x.shape), product(&dims));
    match all.is_compatible(&asked) || all.fixed().is_none() || asked.fixed().is_none() {
        true => one(x.dtype, dims),
        false => Err(format!("{} has {all} elements, {} has {asked}", shape_text(&x.shape), shape_text(&dims))),
    }
}

fn transpose(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let perm = a.integers("perm")?.into_iter().map(|i| axis(i, x.rank())).collect::<Result<Vec<_>, _>>()?;
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    if !sorted.iter().copied().eq(0..x.rank()) {
        return Err(format!("`perm` is {perm:?}; each of {} axes is needed once", x.rank()));
    }
    one(x.dtype, perm.into_iter().map(|i| x.shape[i].clone()).collect())
}

fn expand_dims(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let new = a.integers("axes")?;
    let rank = x.rank() + new.len();
    let mut new = new.into_iter().map(|i| axis(i, rank)).collect::<Result<Vec<_>, _>>()?;
    new.sort_unstable();
    let mut dims = x.shape.clone();
    for i in new {
        if i > dims.len() {
            return Err(format!("`axes` leaves a gap before axis {i}"));
        }
        dims.insert(i, Dim::Fixed(1));
    }
    one(x.dtype, dims)
}

fn squeeze(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let given = a.optional_tensor("axes")?.is_some();
    let gone = axes(a, "axes", x.rank())?;
    if let Some(i) = gone.iter().find(|i| given && !x.shape[**i].is_compatible(&Dim::Fixed(1))) {
        return Err(format!("axis {i} has size {}, only 1 can be squeezed", x.shape[*i]));
    }
    let stays = |i: usize| !gone.contains(&i) || (!given && x.shape[i] != Dim::Fixed(1));
    one(x.dtype, x.shape.iter().enumerate().filter(|(i, _)| stays(*i)).map(|(_, d)| d.clone()).collect())
}

fn flatten2d(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let at = a.integer("axis")?;
    let at = if at < 0 { at + x.rank() as i64 } else { at };
    let at = usize::try_from(at).ok().filter(|at| *at <= x.rank()).ok_or_else(|| format!("axis {at} is outside"))?;
    one(x.dtype, vec![product(&x.shape[..at]), product(&x.shape[at..])])
}

fn shape(a: &Arguments<'_>) -> Inferred {
    one(DataType::Int32, vec![Dim::Fixed(a.tensor("x")?.rank() as u64)])
}

fn concat(a: &Arguments<'_>) -> Inferred {
    let values = a.tensors("values")?;
    let first = values[0];
    // scalars are joined to a vector
    if values.iter().all(|value| value.rank() == 0 && value.dtype == first.dtype) {
        return one(first.dtype, vec![Dim::Fixed(values.len() as u64)]);
    }
    let along = axis(a.integer("axis")?, first.rank())?;
    let mut dims = first.shape.clone();
    for value in &values[1..] {
        let others_fit = value.rank() == first.rank()
            && (0..first.rank()).all(|i| i == along || value.shape[i].is_compatible(&first.shape[i]));
        if value.dtype != first.dtype || !others_fit {
            return Err(format!("{value} can't be joined to {first} along axis {along}"));
        }
        dims[along] = dims[along].plus(&value.shape[along]);
    }
    one(first.dtype, dims)
}

fn stack(a: &Arguments<'_>) -> Inferred {
    let values = a.tensors("values")?;
    if let Some(other) = values.iter().find(|v| !v.is_compatible(values[0])) {
        return Err(format!("{other} can't be stacked on {}", values[0]));
    }
    let along = axis(a.integer("axis")?, values[0].rank() + 1)?;
    let mut dims = values[0].shape.clone();
    dims.insert(along, Dim::Fixed(values.len() as u64));
    one(values[0].dtype, dims)
}

fn split(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let along = axis(a.integer("axis")?, x.rank())?;
    let sizes: Vec<Dim> = match (a.optional_integers("split_sizes"), a.optional_integers("num_splits")) {
        (Some(sizes), _) => sizes.into_iter().map(|s| Dim::Fixed(s.max(0) as u64)).collect(),
        (None, Some(count)) => {
            let count = count.first().copied().unwrap_or(0);
            let parts = u64::try_from(count).ok().filter(|c| (1..=65536).contains(c));
            let parts = parts.ok_or_else(|| format!("`num_splits` is {count}"))?;
            let part = x.shape[along].divided_by(&Dim::Fixed(parts));
            let part = part.ok_or_else(|| format!("{} can't be split into {count} equal parts", x.shape[along]))?;
            vec![part; parts as usize]
        }
        (None, None) => return Err("`num_splits` or `split_sizes` must be given".into()),
    };
    let sum = sizes.iter().fold(Dim::Fixed(0), |sum, size| sum.plus(size));
    if !sum.is_compatible(&x.shape[along]) {
        return Err(format!("`split_sizes` add up to {sum}, the axis has {}", x.shape[along]));
    }
    let part = |size: Dim| {
        let mut ty = x.clone();
        ty.shape[along] = size;
        ValueType::Tensor(ty)
    };
    Ok(sizes.into_iter().map(part).collect())
}

fn tile(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let Some(reps) = a.optional_integers("reps") else { return one(x.dtype, vec![Dim::Unknown; x.rank()]) };
    if reps.len() != x.rank() || reps.iter().any(|r| *r < 1) {
        return Err(format!("`reps` is {reps:?}; {} positive numbers are needed", x.rank()));
    }
    one(x.dtype, x.shape.iter().zip(reps).map(|(d, r)| d.times(&Dim::Fixed(r as u64))).collect())
}

fn pad(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let Some(pads) = a.optional_integers("pad") else { return one(x.dtype, vec![Dim::Unknown; x.rank()]) };
    if pads.len() % 2 != 0 || pads.len() / 2 > x.rank() {
        return Err(format!("`pad` has {} numbers for rank {}", pads.len(), x.rank()));
    }
    let mut dims = x.shape.clone();
    let first = x.rank() - pads.len() / 2; // pads belong to the last dimensions
    for (dim, pair) in dims[first..].iter_mut().zip(pads.chunks(2)) {
        *dim = dim.offset_by(pair[0].saturating_add(pair[1]));
    }
    one(x.dtype, dims)
}

fn fill(a: &Arguments<'_>) -> Inferred {
    let dtype = a.optional_tensor("value")?.map_or(DataType::Fp32, |ty| ty.dtype);
    match a.optional_integers("shape") {
        Some(dims) => one(dtype, dims.into_iter().map(|d| Dim::Fixed(d.max(0) as u64)).collect()),
        None => one(dtype, unknown_dimensions(a, "shape")?),
    }
}

/// Numbers in the type of a parameter of their distribution.
fn random(a: &Arguments<'_>, parameter: &str) -> Inferred {
    let dtype = a.optional_tensor(parameter)?.map_or(DataType::Fp32, |ty| ty.dtype);
    match a.optional_integers("shape") {
        Some(dims) => one(dtype, dims.into_iter().map(|d| Dim::Fixed(d.max(0) as u64)).collect()),
        None => one(dtype, unknown_dimensions(a, "shape")?),
    }
}

fn random_categorical(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let size = if a.optional_tensor("size")?.is_some() { a.integer("size")? } else { 1 };
    let size = u64::try_from(size).map_err(|_| format!("`size` is {size}"))?;
    let mut dims = x.shape.clone();
    *dims.last_mut().ok_or("x is a scalar; expected classes along its last axis")? = Dim::Fixed(size);
    one(x.dtype, dims)
}

fn range_1d(a: &Arguments<'_>) -> Inferred {
    let dtype = a.tensor("start")?.dtype;
    let number = |parameter: &str| {
        let constant = a.constant(parameter)?;
        constant.as_float().map(f64::from).or(constant.as_integer().map(|v| v as f64))
    };
    let length = match (number("start"), number("end"), number("step")) {
        (Some(start), Some(end), Some(step)) if step != 0.0 => {
            Dim::Fixed(((end - start) / step).ceil().max(0.0) as u64)
        }
        (.., Some(0.0)) => return Err("`step` is 0".into()),
        _ => Dim::Unknown,
    };
    one(dtype, vec![length])
}

fn one_hot(a: &Arguments<'_>) -> Inferred {
    let indices = a.tensor("indices")?;
    let size = a.optional_integers("one_hot_vector_size").and_then(|s| s.first().copied());
    let size = size.map_or(Dim::Unknown, |s| Dim::Fixed(s.max(0) as u64));
    let along = axis(a.integer("axis")?, indices.rank() + 1)?;
    let mut dims = indices.shape.clone();
    dims.insert(along, size);
    one(a.optional_tensor("on_value")?.map_or(DataType::Int32, |ty| ty.dtype), dims)
}

/// Changes channels, height and width of a tensor of rank 4 by factors.
fn rescale(a: &Arguments<'_>, parameter: &str, up: bool) -> Inferred {
    let x = a.tensor("x")?;
    let factor = Dim::Fixed(a.integer(parameter)?.max(1) as u64);
    let [batch, channels, height, width] = x.shape.as_slice() else {
        return Err(format!("x has rank {}; 4 is needed", x.rank()));
    };
    let square = factor.times(&factor);
    let uneven = || format!("{} isn't divided by the factor {factor}", shape_text(&x.shape));
    let dims = if up {
        let channels = channels.divided_by(&square).ok_or_else(uneven)?;
        vec![batch.clone(), channels, height.times(&factor), width.times(&factor)]
    } else {
        let (height, width) = (height.divided_by(&factor), width.divided_by(&factor));
        vec![batch.clone(), channels.times(&square), height.ok_or_else(uneven)?, width.ok_or_else(uneven)?]
    };
    one(x.dtype, dims)
}

fn pixel_shuffle(a: &Arguments<'_>) -> Inferred {
    rescale(a, "upscale_factor", true)
}

fn pixel_unshuffle(a: &Arguments<'_>) -> Inferred {
    rescale(a, "downscale_factor", false)
}

fn depth_to_space(a: &Arguments<'_>) -> Inferred {
    rescale(a, "block_size", true)
}

fn space_to_depth(a: &Arguments<'_>) -> Inferred {
    rescale(a, "block_size", false)
}

fn quantize(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("input")?;
    let name = a.text("output_dtype").ok_or("`output_dtype` must be a constant string")?;
    let dtype = super::rules::dtype_of_name(name).ok_or_else(|| format!("`output_dtype` is \"{name}\""))?;
    one(dtype, x.shape.clone())
}

fn dequantize(a: &Arguments<'_>) -> Inferred {
    one(a.tensor("scale")?.dtype, a.tensor("input")?.shape.clone())
}
