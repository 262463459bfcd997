//! What a function reads and computes in a call, known before any weight is read.

use anec_base::Result;
use anec_family::{FamilyModel, FunctionRequest, LoweringOptions};
use anec_manifest::Quant;
use anec_mil::{Constant, Function, Op, TensorType};

use super::size::{DryEmitter, WeightUse};

/// What one function reads and computes.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The function, with contents that have a length but no bytes.
    pub function: Function,
    /// Its weights, each once.
    pub weights: Vec<WeightUse>,
    /// Bytes of the states that it declares.
    pub state_bytes: u64,
}

impl Workload {
    /// The workload of a function: it is built as a conversion builds it.
    ///
    /// # Errors
    /// When the form can't express the model, or the model lacks what the function is to hold.
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

    /// Multiplications and additions of a call of so many tokens: those of projections, and those of attention over the
    /// whole context.
    pub fn macs(&self, tokens: u64) -> u64 {
        self.function.ops().map(|op| macs(&self.function, op, tokens)).sum()
    }

    /// Ops that a call executes.
    pub fn ops(&self) -> usize {
        self.function.ops().filter(|op| op.is_executed()).count()
    }
}

/// Multiplications of one op: each element of its result is a sum of so many products.
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
