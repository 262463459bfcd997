//! The table of kernels by operator.

mod binary;
mod conv;
mod conv_transpose;
mod einsum;
mod elementwise;
mod gather;
mod matmul;
mod norm;
mod order;
mod reduce;
mod shape;
mod slice;
mod space;
mod state;

use std::sync::Arc;

pub(super) use self::binary::{Arithmetic, BinaryOp};
pub(super) use self::conv::Conv;
pub(super) use self::matmul::{Linear, Matmul};
pub(super) use self::norm::{Softmax, softmax_rows};
pub(super) use self::slice::{Concat, SliceByIndex, SliceUpdate, Slicing};
pub(super) use self::state::{ReadState, WriteState};
use super::kernel::Kernel;
use super::resolve::Resolver;

/// A kernel, or what is wrong with the op.
pub(crate) type Resolved = Result<Arc<dyn Kernel>, String>;

/// One row of the table.
pub(crate) struct Row {
    /// The operator.
    pub operator: &'static str,
    /// Makes an op's kernel.
    pub resolve: fn(&mut Resolver<'_>) -> Resolved,
    /// The results hold nothing but elements of the arguments, so that rounding them again changes nothing.
    pub moves: bool,
}

/// Rows of a group of operators that compute.
macro_rules! computing {
    ($($operator:literal => $resolve:expr),* $(,)?) => {
        &[$($crate::ops::Row { operator: $operator, resolve: $resolve, moves: false }),*]
    };
}
/// Rows of a group of operators that only move elements.
macro_rules! moving {
    ($($operator:literal => $resolve:expr),* $(,)?) => {
        &[$($crate::ops::Row { operator: $operator, resolve: $resolve, moves: true }),*]
    };
}
/// A tensor of a shape whose elements are appended to `$out`, made from those of another, whatever they are.
macro_rules! make_like {
    ($pool:expr, $shape:expr, $data:expr, ($elements:ident, $out:ident) => $fill:expr) => {
        match $data {
            TensorData::F32($elements) => $pool.make($shape, |$out: &mut Vec<f32>| $fill),
            TensorData::I32($elements) => $pool.make($shape, |$out: &mut Vec<i32>| $fill),
            TensorData::Bool($elements) => $pool.make($shape, |$out: &mut Vec<bool>| $fill),
        }
    };
}
pub(crate) use {computing, make_like, moving};

/// The table, by group.
const GROUPS: &[&[Row]] = &[
    binary::ROWS,
    conv::ROWS,
    conv_transpose::ROWS,
    einsum::ROWS,
    elementwise::ROWS,
    gather::ROWS,
    gather::SCATTER,
    matmul::ROWS,
    norm::ROWS,
    order::ROWS,
    reduce::ROWS,
    shape::ROWS,
    slice::ROWS,
    space::POOL,
    space::ROWS,
    state::ROWS,
];

/// The row of an operator.
pub(crate) fn lookup(operator: &str) -> Option<&'static Row> {
    GROUPS.iter().flat_map(|group| group.iter()).find(|row| row.operator == operator)
}

#[cfg(test)]
pub(crate) mod testing {
    //! Runs single kernels on values.

    use anec_mil::{DataType, TensorType};

    use super::*;
    use crate::kernel::Call;
    use crate::operand::Operand;
    use crate::pool::Pool;
    use crate::state::State;
    use crate::tensor::Tensor;
    use crate::value::Value;

    /// Arguments by parameter.
    pub type Given<'a> = Vec<(&'a str, Value)>;

    /// Floats.
    pub fn f(shape: &[usize], values: &[f32]) -> Value {
        Value::Tensor(Arc::new(Tensor::new(shape, values.to_vec())))
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

    /// All results of an op, or its complaint.
    pub fn results(operator: &str, arguments: Vec<(&str, Vec<Value>)>, dtype: DataType) -> Result<Vec<Tensor>, String> {
        let row = lookup(operator).ok_or_else(|| format!("no kernel for {operator}"))?;
        let types = [TensorType::scalar(dtype)];
        let constants = |values: Vec<Value>| values.into_iter().map(Operand::Constant).collect();
        let arguments: Vec<_> = arguments.into_iter().map(|(name, values)| (name, constants(values))).collect();
        let mut resolver = Resolver::new(&arguments, &types);
        let kernel = (row.resolve)(&mut resolver)?;
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

    /// The one result of an op whose declared type is fp32, or its complaint.
    pub fn try_run(operator: &str, arguments: Given<'_>) -> Result<Tensor, String> {
        let arguments = arguments.into_iter().map(|(name, value)| (name, vec![value])).collect();
        let mut results = results(operator, arguments, DataType::Fp32)?;
        assert_eq!(results.len(), 1, "{operator} gives one result");
        let tensor = results.remove(0);
        assert!(tensor.is_consistent(), "{operator} gives {:?} for {} elements", tensor.shape, tensor.data.len());
        Ok(tensor)
    }

    /// The one result of an op whose declared type is fp32.
    #[track_caller]
    pub fn run(operator: &str, arguments: Given<'_>) -> Tensor {
        try_run(operator, arguments).unwrap_or_else(|problem| panic!("{operator}: {problem}"))
    }

    /// Asserts a float tensor's shape and values within 1e-5 of their size.
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
