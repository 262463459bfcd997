//! The table of kernels by operator.

mod batches;
mod binary;
mod conv;
mod conv_transpose;
mod einsum;
mod elementwise;
mod gather;
mod matmul;
mod norm;
mod order;
mod quantize;
mod random;
mod recurrent;
mod reduce;
mod resize;
mod shape;
mod slice;
mod space;
mod state;
mod suppression;

pub(super) use self::binary::{Arithmetic, BinaryOp};
pub(super) use self::conv::Conv;
pub(super) use self::matmul::{Linear, Matmul};
pub(super) use self::norm::{Softmax, softmax_rows};
pub(super) use self::slice::{Concat, SliceByIndex, SliceUpdate, Slicing};
pub(super) use self::state::{ReadState, WriteState};
use super::constexpr;
pub(crate) use super::row::{Resolved, Row, Rule, computing, moving};
use anec_mil::catalogue::OpSpec;
use anec_mil::{Constant, DataType};

/// Tensor whose elements `$out` are made from those of another one, for every element type.
macro_rules! make_like {
    ($pool:expr, $shape:expr, $data:expr, ($elements:ident, $out:ident) => $fill:expr) => {
        match $data {
            TensorData::F32($elements) => $pool.make($shape, |$out: &mut Vec<f32>| $fill),
            TensorData::I32($elements) => $pool.make($shape, |$out: &mut Vec<i32>| $fill),
            TensorData::Bool($elements) => $pool.make($shape, |$out: &mut Vec<bool>| $fill),
        }
    };
}
pub(crate) use make_like;

/// Rows of the ops with nested blocks.
const CONTROL: &[Row] =
    &[Row { operator: "cond", rule: Rule::Blocks }, Row { operator: "while_loop", rule: Rule::Blocks }];

/// Table, by group.
const GROUPS: &[&[Row]] = &[
    batches::CROPPED,
    batches::ROWS,
    binary::ROWS,
    constexpr::ROWS,
    CONTROL,
    conv::ROWS,
    conv_transpose::ROWS,
    einsum::ROWS,
    elementwise::ROWS,
    gather::ROWS,
    gather::SCATTER,
    matmul::ROWS,
    norm::ROWS,
    order::ROWS,
    quantize::ROWS,
    random::ROWS,
    recurrent::ROWS,
    reduce::ROWS,
    resize::INTERPOLATED,
    resize::ROWS,
    shape::ROWS,
    slice::ROWS,
    space::POOL,
    space::ROWS,
    state::ROWS,
    suppression::ROWS,
];

/// Row of an operator.
pub(crate) fn lookup(operator: &str) -> Option<&'static Row> {
    rows().find(|row| row.operator == operator)
}

fn rows() -> impl Iterator<Item = &'static Row> {
    GROUPS.iter().flat_map(|group| group.iter())
}

/// Returns the parameters of an operator with defaults that `arguments` lack, as constants for an `x` of rank `rank`.
/// The catalogue holds the defaults.
pub(crate) fn defaults(
    spec: &OpSpec,
    rank: usize,
    has: impl Fn(&str) -> bool,
) -> impl Iterator<Item = (&'static str, Constant)> {
    let missing = spec.parameters.iter().filter(move |parameter| !has(parameter.name));
    missing.filter_map(move |parameter| {
        // at full precision, whatever the type of `x`
        let constant = parameter.default.as_ref()?.constant(DataType::Fp32, rank);
        Some((parameter.name, constant))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use anec_mil::catalogue;

    use super::*;

    #[test]
    fn the_table_and_the_catalogue_have_the_same_operators() {
        let own: BTreeSet<&str> = rows().map(|row| row.operator).collect();
        assert_eq!(own.len(), rows().count(), "an operator has two rows");
        let known: BTreeSet<&str> = catalogue::table().iter().map(|spec| spec.name).collect();
        // constants are no ops here
        let others = BTreeSet::from(["const"]);
        assert_eq!(&known - &own, others);
        assert_eq!(&own - &known, BTreeSet::new());
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Runs single kernels in tests.

    use anec_mil::{Opset, catalogue};

    use std::sync::Arc;

    use super::*;
    use crate::constants::load;
    use crate::kernel::Call;
    use crate::operand::Operand;
    use crate::pool::Pool;
    use crate::resolve::Resolver;
    use crate::state::State;
    use crate::tensor::Tensor;
    use crate::value::Value;
    use crate::weight_cache::WeightCache;
    use anec_mil::TensorType;

    /// Arguments by parameter.
    pub type NamedValues<'a> = Vec<(&'a str, Value)>;

    /// Floats.
    pub fn f(shape: &[usize], values: &[f32]) -> Value {
        Value::Tensor(Arc::new(Tensor::new(shape, values.to_vec())))
    }

    /// Floats that count from 0.
    pub fn counted(shape: &[usize]) -> Value {
        let count: usize = shape.iter().product();
        f(shape, &(0..count).map(|v| v as f32).collect::<Vec<_>>())
    }

    /// Integers.
    pub fn i(shape: &[usize], values: &[i32]) -> Value {
        Value::Tensor(Arc::new(Tensor::new(shape, values.to_vec())))
    }

    /// Booleans.
    pub fn b(shape: &[usize], values: &[bool]) -> Value {
        Value::Tensor(Arc::new(Tensor::new(shape, values.to_vec())))
    }

    /// A string.
    pub fn s(text: &str) -> Value {
        Value::Text(text.into())
    }

    /// All results of an op, or its error.
    pub fn results(operator: &str, arguments: Vec<(&str, Vec<Value>)>, dtype: DataType) -> Result<Vec<Tensor>, String> {
        let Some(Rule::Kernel { resolve, .. }) = lookup(operator).map(|row| row.rule) else {
            return Err(format!("no kernel for {operator}"));
        };
        let types = [TensorType::scalar(dtype)];
        let constants = |values: Vec<Value>| values.into_iter().map(Operand::Constant).collect();
        let has = |name: &str| arguments.iter().any(|(parameter, _)| *parameter == name);
        // the newest form that treats indices as the given arguments do
        let spec = Opset::ALL.into_iter().rev().filter_map(|opset| catalogue::lookup(operator, opset));
        let spec =
            spec.into_iter().find(|spec| has("validate_indices") || spec.parameter("validate_indices").is_none());
        let x =
            arguments.iter().find(|(name, _)| *name == "x").and_then(|(_, values)| values.first()?.tensor().cloned());
        let rank = x.map_or(0, |x| x.rank());
        let missing = spec.map(|spec| defaults(spec, rank, has)).into_iter().flatten();
        let missing: Vec<_> = missing
            .map(|(name, constant)| match load(&constant, &WeightCache::new()) {
                Ok(value) => (name, vec![Operand::Constant(value)]),
                Err(_) => panic!("the default of `{name}` can't be loaded"),
            })
            .collect();
        let mut arguments: Vec<_> = arguments.into_iter().map(|(name, values)| (name, constants(values))).collect();
        arguments.extend(missing);
        let mut resolver = Resolver::new(&arguments, &types);
        let kernel = resolve(&mut resolver)?;
        let value = |operand| match operand {
            Operand::Constant(value) => Some(value),
            Operand::Slot { .. } => None,
        };
        let mut values: Vec<Option<Value>> = resolver.into_operands().into_iter().map(value).collect();
        let (mut state, mut results) = (State::default(), Vec::new());
        let (values, takes_state) = (&mut values[..], false);
        let mut call = Call { values, state: &mut state, takes_state, results: &mut results };
        kernel.run(&mut call, &mut Pool::default())?;
        Ok(results.into_iter().map(Arc::unwrap_or_clone).collect())
    }

    /// Only result of an op whose declared type is fp32, or its error.
    pub fn try_run(operator: &str, arguments: NamedValues<'_>) -> Result<Tensor, String> {
        let arguments = arguments.into_iter().map(|(name, value)| (name, vec![value])).collect();
        let mut results = results(operator, arguments, DataType::Fp32)?;
        assert_eq!(results.len(), 1, "{operator} gives one result");
        let tensor = results.remove(0);
        assert!(tensor.is_consistent(), "{operator} gives {:?} for {} elements", tensor.shape, tensor.data.len());
        Ok(tensor)
    }

    /// Only result of an op whose declared type is fp32.
    #[track_caller]
    pub fn run(operator: &str, arguments: NamedValues<'_>) -> Tensor {
        try_run(operator, arguments).unwrap_or_else(|problem| panic!("{operator}: {problem}"))
    }

    /// Asserts the shape of a float tensor, and its values within a relative error of 1e-5.
    #[track_caller]
    pub fn assert_close(tensor: &Tensor, shape: &[usize], values: &[f32]) {
        assert_eq!(tensor.shape, shape);
        let found = tensor.floats().expect("floats");
        for (found, expected) in found.iter().zip(values) {
            let near = (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            assert!(near || found == expected, "found {:?}, expected {values:?}", tensor.floats());
        }
        assert_eq!(found.len(), values.len());
    }
}
