//! Programs, functions, blocks, ops and values.
//!
//! Values live in an arena of their function and are named by [`ValueId`]; ops refer to them by id. Names are what is
//! written to the package; they are unique within a function.

use std::collections::BTreeMap;

use super::constant::Constant;
use super::types::{Dim, Opset, Symbol, TensorType, ValueType};

/// A value of a function: an index into its arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// An SSA value.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Unique within the function.
    pub name: String,
    /// Its type.
    pub ty: ValueType,
    /// What it is, where it is the output of a `const` op.
    pub constant: Option<Constant>,
}

/// One thing bound to a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Binding {
    /// The result of an earlier op, or an input.
    Value(ValueId),
    /// A constant written into the op itself (constexpr ops from CoreML8 on).
    Constant(Constant),
}

/// What a parameter gets: one binding, or several for parameters that take a list (`values` of `concat`).
pub type Argument = Vec<Binding>;

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// The operator, as in the package: `conv`, `read_state`, …
    pub operator: String,
    /// The op's own name (attribute `name`); usually that of its first output.
    pub name: String,
    /// Arguments by parameter name.
    pub inputs: BTreeMap<String, Argument>,
    /// Attributes other than `name`: `val` of `const`, the parameters of constexpr ops up to CoreML7.
    pub attributes: BTreeMap<String, Constant>,
    /// Results.
    pub outputs: Vec<ValueId>,
    /// Nested blocks (`cond`, `while_loop`).
    pub blocks: Vec<Block>,
}

/// What an op does, as far as everything that counts ops asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// `const`: a constant.
    Const,
    /// `constexpr_…`: weights that are expanded from a compressed form.
    Constexpr,
    /// `read_state` and `write_state`.
    State,
    /// `cast`: another element type.
    Cast,
    /// All others.
    Compute,
}

impl Op {
    /// What it does.
    pub fn kind(&self) -> OpKind {
        match self.operator.as_str() {
            "const" => OpKind::Const,
            "read_state" | "write_state" => OpKind::State,
            "cast" => OpKind::Cast,
            operator if operator.starts_with("constexpr_") => OpKind::Constexpr,
            _ => OpKind::Compute,
        }
    }

    /// The single binding of a parameter.
    pub fn input(&self, parameter: &str) -> Option<&Binding> {
        match self.inputs.get(parameter).map(Vec::as_slice) {
            Some([one]) => Some(one),
            _ => None,
        }
    }

    /// Every value that the op reads, in parameter order.
    pub fn operands(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.inputs.values().flatten().filter_map(|b| match b {
            Binding::Value(id) => Some(*id),
            Binding::Constant(_) => None,
        })
    }

    /// A `const` op.
    pub fn is_const(&self) -> bool {
        self.kind() == OpKind::Const
    }

    /// A `constexpr_…` op: weights that are expanded from a compressed form.
    pub fn is_constexpr(&self) -> bool {
        self.kind() == OpKind::Constexpr
    }

    /// Neither a constant nor one that is expanded: what is left of a program when it runs.
    pub fn is_executed(&self) -> bool {
        !matches!(self.kind(), OpKind::Const | OpKind::Constexpr)
    }
}

/// A straight line of ops.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Block {
    /// Values that the block receives (none for a function's own block, whose inputs are the function's).
    pub inputs: Vec<ValueId>,
    /// Ops, each after those it reads from.
    pub ops: Vec<Op>,
    /// Values that the block gives.
    pub outputs: Vec<ValueId>,
}

/// The sizes that a symbol may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SymbolRange {
    /// Every size from `lower` to `upper`, both included; `default` is the one a plan speaks for.
    Range {
        /// Smallest size.
        lower: u64,
        /// Largest size, if bounded.
        upper: Option<u64>,
        /// The default size.
        default: u64,
    },
    /// These sizes only; the first is the default.
    Enumerated(Vec<u64>),
}

impl SymbolRange {
    /// Whether a size is allowed.
    pub fn contains(&self, size: u64) -> bool {
        match self {
            SymbolRange::Range { lower, upper, .. } => size >= *lower && upper.is_none_or(|u| size <= u),
            SymbolRange::Enumerated(sizes) => sizes.contains(&size),
        }
    }

    /// The default size.
    pub fn default_size(&self) -> u64 {
        match self {
            SymbolRange::Range { default, .. } => *default,
            SymbolRange::Enumerated(sizes) => sizes.first().copied().unwrap_or(1),
        }
    }
}

/// One function of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Its name; `main` where a program has one function.
    pub name: String,
    /// The opset its block is written in.
    pub opset: Opset,
    /// Inputs in order, states among them.
    pub inputs: Vec<ValueId>,
    /// The arena of all values, inputs and nested blocks included.
    pub values: Vec<Value>,
    /// The body; its outputs are the function's.
    pub block: Block,
    /// What the symbols of the input types may be.
    pub lengths: BTreeMap<Symbol, SymbolRange>,
}

impl Function {
    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// A value's tensor type (of the wrapped tensor for a state).
    pub fn tensor_type(&self, id: ValueId) -> Option<&TensorType> {
        self.value(id).ty.tensor()
    }

    /// The constant that a binding holds or refers to.
    pub fn constant<'a>(&'a self, binding: &'a Binding) -> Option<&'a Constant> {
        match binding {
            Binding::Value(id) => self.value(*id).constant.as_ref(),
            Binding::Constant(constant) => Some(constant),
        }
    }

    /// The type of what a binding holds or refers to.
    pub fn binding_type<'a>(&'a self, binding: &'a Binding) -> Option<&'a TensorType> {
        match binding {
            Binding::Value(id) => self.tensor_type(*id),
            Binding::Constant(constant) => Some(&constant.ty),
        }
    }

    /// Inputs that are tensors.
    pub fn tensor_inputs(&self) -> impl Iterator<Item = &Value> {
        self.inputs.iter().map(|id| self.value(*id)).filter(|v| matches!(v.ty, ValueType::Tensor(_)))
    }

    /// Inputs that are states.
    pub fn states(&self) -> impl Iterator<Item = &Value> {
        self.inputs.iter().map(|id| self.value(*id)).filter(|v| matches!(v.ty, ValueType::State(_)))
    }

    /// Outputs.
    pub fn outputs(&self) -> impl Iterator<Item = &Value> {
        self.block.outputs.iter().map(|id| self.value(*id))
    }

    /// Every op, nested blocks included, outer before inner.
    pub fn ops(&self) -> impl Iterator<Item = &Op> {
        // what is left of the blocks around the next op, the innermost last
        let mut open = vec![self.block.ops.iter()];
        std::iter::from_fn(move || {
            loop {
                match open.last_mut()?.next() {
                    Some(op) => {
                        open.extend(op.blocks.iter().rev().map(|block| block.ops.iter()));
                        return Some(op);
                    }
                    None => _ = open.pop(),
                }
            }
        })
    }

    /// A value that an input, an op or a block names and that the function doesn't have.
    pub fn dangling(&self) -> Option<ValueId> {
        fn of_block(block: &Block, missing: &dyn Fn(&ValueId) -> bool) -> Option<ValueId> {
            let own = block.inputs.iter().chain(&block.outputs).copied().find(missing);
            own.or_else(|| {
                block.ops.iter().find_map(|op| {
                    let named = op.operands().chain(op.outputs.iter().copied()).find(missing);
                    named.or_else(|| op.blocks.iter().find_map(|inner| of_block(inner, missing)))
                })
            })
        }
        let missing = |id: &ValueId| id.0 as usize >= self.values.len();
        self.inputs.iter().copied().find(missing).or_else(|| of_block(&self.block, &missing))
    }

    /// The function's symbols.
    pub fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.lengths.keys()
    }

    /// The same function with `symbol` fixed to `size` in the input types; the types of results are inferred anew by
    /// the verifier or the executor.
    pub fn with_length(&self, symbol: &Symbol, size: u64) -> Function {
        let mut function = self.clone();
        for value in &mut function.values {
            if let ValueType::Tensor(t) | ValueType::State(t) = &mut value.ty {
                *t = t.substitute(symbol, size);
            }
        }
        function.lengths.remove(symbol);
        function
    }

    /// Whether any type of the function still holds a symbol.
    pub fn is_symbolic(&self) -> bool {
        self.values.iter().any(|v| v.ty.tensor().is_some_and(|t| t.shape.iter().any(|d| !matches!(d, Dim::Fixed(_)))))
    }
}

/// A whole program.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Functions in the order they are written.
    pub functions: Vec<Function>,
    /// Name of the function that runs by default.
    pub default_function: String,
}

impl Program {
    /// A program of one function, which must be named `main`.
    pub fn single(function: Function) -> Self {
        Program { default_function: function.name.clone(), functions: vec![function] }
    }

    /// The function of this name.
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|f| f.name == name)
    }

    /// The newest opset that a function uses; decides the specification version.
    pub fn opset(&self) -> Opset {
        self.functions.iter().map(|f| f.opset).max().unwrap_or(Opset::CoreMl5)
    }
}
