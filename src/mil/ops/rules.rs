//! Inference rules shared by several groups.

use crate::catalogue::Arguments;
use crate::types::{DataType, Dim, TensorType, ValueType};

/// Result of type inference.
pub type Inferred = Result<Vec<ValueType>, String>;

/// One tensor as the result.
pub fn one(dtype: DataType, shape: Vec<Dim>) -> Inferred {
    Ok(vec![TensorType { dtype, shape }.into()])
}

/// Returns the type of `x`.
pub fn same(a: &Arguments<'_>) -> Inferred {
    Ok(vec![a.tensor("x")?.clone().into()])
}

/// Returns the broadcast of two shapes: aligned at the end, dimensions of size 1 are extended.
pub fn broadcast(x: &[Dim], y: &[Dim]) -> Result<Vec<Dim>, String> {
    let rank = x.len().max(y.len());
    let one = Dim::Fixed(1);
    let at = |shape: &[Dim], i: usize| (i + shape.len()).checked_sub(rank).map_or(one.clone(), |i| shape[i].clone());
    (0..rank)
        .map(|i| match (at(x, i), at(y, i)) {
            (a, b) if a == b => Ok(a),
            (a, b) if a == one => Ok(b),
            (a, b) if b == one => Ok(a),
            (Dim::Unknown, Dim::Fixed(n)) | (Dim::Fixed(n), Dim::Unknown) => Ok(Dim::Fixed(n)),
            (Dim::Unknown, _) | (_, Dim::Unknown) => Ok(Dim::Unknown),
            _ => Err(format!("shapes {} and {} don't broadcast", shape_text(x), shape_text(y))),
        })
        .collect()
}

/// Resolves an axis; negative axes count from the end.
pub fn axis(axis: i64, rank: usize) -> Result<usize, String> {
    let positive = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(positive).ok().filter(|a| *a < rank).ok_or_else(|| format!("axis {axis} is outside of rank {rank}"))
}

/// One unknown dimension for each element of a parameter whose value isn't known.
pub fn unknown_dimensions(a: &Arguments<'_>, parameter: &str) -> Result<Vec<Dim>, String> {
    /// Maximum rank of a tensor.
    const MAX_RANK: u64 = 16;
    let ty = a.tensor(parameter)?;
    match ty.shape.as_slice() {
        [Dim::Fixed(rank)] if *rank <= MAX_RANK => Ok(vec![Dim::Unknown; *rank as usize]),
        _ => Err(format!("`{parameter}` is {ty}; expected a vector of at most {MAX_RANK} elements")),
    }
}

/// Axes of a parameter in ascending order; all axes if it isn't given.
pub fn axes(a: &Arguments<'_>, parameter: &str, rank: usize) -> Result<Vec<usize>, String> {
    if a.optional_tensor(parameter)?.is_none() {
        return Ok((0..rank).collect());
    }
    let mut all = a.integers(parameter)?.into_iter().map(|i| axis(i, rank)).collect::<Result<Vec<_>, _>>()?;
    all.sort_unstable();
    if all.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(format!("`{parameter}` names an axis twice"));
    }
    Ok(all)
}

/// Product of dimensions.
pub fn product(shape: &[Dim]) -> Dim {
    shape.iter().fold(Dim::Fixed(1), |product, dim| product.times(dim))
}

/// Data type with a given name.
pub fn dtype_of_name(name: &str) -> Option<DataType> {
    const ALL: [DataType; 12] = [
        DataType::Bool,
        DataType::Fp16,
        DataType::Fp32,
        DataType::Int8,
        DataType::Int16,
        DataType::Int32,
        DataType::Int64,
        DataType::Uint8,
        DataType::Uint16,
        DataType::Uint32,
        DataType::Fp64,
        DataType::String,
    ];
    ALL.into_iter().find(|dtype| dtype.name() == name)
}

/// Text form of a shape.
pub fn shape_text(shape: &[Dim]) -> String {
    let dims: Vec<String> = shape.iter().map(Dim::to_string).collect();
    format!("[{}]", dims.join(", "))
}
