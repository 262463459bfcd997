//! Loading constants.

use std::sync::Arc;

use super::value::Value;
use super::weight::{LoadedWeight, SMALL, constant_shape, constant_tensor};
use super::weight_cache::WeightCache;
use anec_base::Error;
use anec_mil::{Constant, Data};

/// Error of loading a constant.
pub(super) enum ConstantError {
    /// The bytes don't fit the type.
    Problem(String),
    /// The bytes can't be read.
    Content(Error),
}

impl From<String> for ConstantError {
    fn from(problem: String) -> Self {
        ConstantError::Problem(problem)
    }
}

impl From<Error> for ConstantError {
    fn from(error: Error) -> Self {
        ConstantError::Content(error)
    }
}

/// Loads a constant: small ones and integers as tensors, others in their stored form.
pub(super) fn load(constant: &Constant, cache: &WeightCache) -> Result<Value, ConstantError> {
    if let Data::Strings(strings) = &constant.data {
        return match &strings[..] {
            [text] => Ok(Value::Text(text.as_str().into())),
            several => Err(format!("{} strings, one is expected", several.len()).into()),
        };
    }
    if !constant.is_consistent() {
        return Err(format!("{constant:?} doesn't fill its type").into());
    }
    if constant.ty.dtype.is_float()
        && constant.elements() >= SMALL as u64
        && let Some(elements) = cache.elements(constant)?
    {
        return Ok(Value::Weight(Arc::new(LoadedWeight::plain(constant_shape(constant), elements))));
    }
    match constant_tensor(constant)? {
        Some(tensor) => Ok(Value::Tensor(Arc::new(tensor))),
        None => Err(format!("constants of type {} can't be computed with", constant.ty.dtype).into()),
    }
}
