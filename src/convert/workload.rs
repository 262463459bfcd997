//! Memory traffic and arithmetic of a function, before any weight is read.

use anec_base::Result;
use anec_family::{FamilyModel, FunctionRequest, LoweringOptions};
use anec_manifest::Quant;
use anec_mil::{Constant, Function, Op, TensorType};

use super::size::{DryEmitter, WeightUse};

/// Workload of one function.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Function with contents of known length and no bytes.
    pub function: Function,
    /// Weights, each once.
    pub weights: Vec<WeightUse>,
    /// Bytes of its states.
    pub state_bytes: u64,
}

impl Workload {
    /// Computes the workload of a function, built as a conversion builds it.
    ///
    /// # Errors
    /// If the form can't express the model, or the model lacks a requested part.
    pub fn of(
        model: &dyn FamilyModel,
        form: &LoweringOptions,
        quant: &Quant,
        request: &FunctionRequest,
    ) -> Result<Workload> {
        let mut emitter = DryEmitter::new(quant);
        let function = model.build(form, request, &mut emitter)?.function;
        let state_bytes = function.states().filter_map(|state| state.ty.tensor()?.bytes()).sum();
        Ok(Workload { function, weights: emitter.uses, state_bytes })
    }

    /// Multiply-accumulates of a call with `tokens` tokens: projections, and attention over the whole context.
    pub fn macs(&self, tokens: u64) -> u64 {
        self.function.ops().map(|op| macs(&self.function, op, tokens)).sum()
    }

    /// Number of attention scores in a call of `tokens` tokens: elements that softmax ops normalize.
    pub fn scores(&self, tokens: u64) -> u64 {
        let ops = self.function.ops().filter(|op| op.operator == "softmax");
        let results = ops.flat_map(|op| &op.outputs).filter_map(|id| self.function.tensor_type(*id));
        let fixed =
            |ty: &TensorType| self.function.symbols().fold(ty.clone(), |ty, symbol| ty.substitute(symbol, tokens));
        results.filter_map(|ty| fixed(ty).fixed_shape()).map(|shape| shape.iter().product::<u64>()).sum()
    }

    /// Number of ops that a call executes.
    pub fn ops(&self) -> usize {
        self.function.ops().filter(|op| op.is_executed()).count()
    }
}

/// Multiply-accumulates of one op: elements of the result times the length of each sum.
fn macs(function: &Function, op: &Op, tokens: u64) -> u64 {
    let shape = |ty: &TensorType| {
        let fixed = function.symbols().fold(ty.clone(), |ty, symbol| ty.substitute(symbol, tokens));
        fixed.fixed_shape().unwrap_or_default()
    };
    let input = |name: &str| op.input(name).and_then(|binding| function.binding_type(binding)).map(shape);
    let outputs =
        op.outputs.iter().filter_map(|id| function.tensor_type(*id)).map(|ty| shape(ty).iter().product::<u64>());
    let flag = |name: &str| {
        let constant = op.input(name).and_then(|binding| function.constant(binding));
        constant.and_then(Constant::as_bool).unwrap_or(false)
    };
    let products = match op.operator.as_str() {
        "conv" | "linear" => input("weight").map(|shape| shape.iter().skip(1).product()),
        "matmul" => input("x").and_then(|shape| {
            let from_end = if flag("transpose_x") { 2 } else { 1 };
            shape.iter().rev().nth(from_end - 1).copied()
        }),
        _ => None,
    };
    products.map_or(0, |products: u64| products * outputs.sum::<u64>())
}
