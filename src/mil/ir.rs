//! Programs, functions, blocks, ops and values.
//!
//! Values are stored in an arena of their function and referred to by [`ValueId`]. Names are written to the package;
//! no two values that are visible at one place have the same name.

use std::collections::BTreeMap;

use compact_str::CompactString;
use litemap::LiteMap;
use smallvec::SmallVec;

use super::constant::Constant;
use super::types::{Dim, Opset, Symbol, TensorType, ValueType};

/// Index of a value in its function's arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// An SSA value.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Name, unique among the values that are visible where it is.
    pub name: String,
    /// Type.
    pub ty: ValueType,
    /// Constant, if the value is the output of a `const` op.
    pub constant: Option<Constant>,
}

/// A value or constant bound to a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Binding {
    /// The result of an earlier op, or an input.
    Value(ValueId),
    /// A constant in the op itself (constexpr ops from CoreML8).
    Constant(Box<Constant>),
}

/// Bindings of a parameter: one, or several for parameters that take a list (`values` of `concat`).
pub type Argument = SmallVec<[Binding; 1]>;

/// Name of an operator or of a parameter. Those of the catalogue are short enough to need no allocation.
pub type Keyword = CompactString;

/// Arguments or attributes by parameter name. Ops have few, for which a sorted list is the smallest map.
pub type ParameterMap<T> = LiteMap<Keyword, T>;

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// Operator as in the package: `conv`, `read_state`, …
    pub operator: Keyword,
    /// Name (attribute `name`); usually that of the first output.
    pub name: String,
    /// Arguments by parameter name.
    pub inputs: ParameterMap<Argument>,
    /// Attributes other than `name`: `val` of `const`, the parameters of constexpr ops up to CoreML7.
    pub attributes: ParameterMap<Constant>,
    /// Results.
    pub outputs: SmallVec<[ValueId; 2]>,
    /// Nested blocks (`cond`, `while_loop`).
    pub blocks: Vec<Block>,
}

/// Kind of an op for statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// `const`: a constant.
    Const,
    /// `constexpr_…`: weights that are decompressed before the model runs.
    Constexpr,
    /// `read_state` and `write_state`.
    State,
    /// `cast`: conversion to another element type.
    Cast,
    /// All others.
    Compute,
}

impl Op {
    /// Returns the kind of the op.
    pub fn kind(&self) -> OpKind {
        match self.operator.as_str() {
            "const" => OpKind::Const,
            "read_state" | "write_state" => OpKind::State,
            "cast" => OpKind::Cast,
            operator if operator.starts_with("constexpr_") => OpKind::Constexpr,
            _ => OpKind::Compute,
        }
    }

    /// Returns the single binding of a parameter.
    pub fn input(&self, parameter: &str) -> Option<&Binding> {
        match self.inputs.get(parameter).map(SmallVec::as_slice) {
            Some([one]) => Some(one),
            _ => None,
        }
    }

    /// Values that the op reads, in the order of parameters.
    pub fn operands(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.inputs.values().flatten().filter_map(|b| match b {
            Binding::Value(id) => Some(*id),
            Binding::Constant(_) => None,
        })
    }

    /// Constants in the op itself, with their attributes or parameters.
    pub fn constants(&self) -> impl Iterator<Item = (&str, &Constant)> {
        let bound = self.inputs.iter().flat_map(|(name, argument)| argument.iter().map(move |one| (name, one)));
        let in_place = bound.filter_map(|(name, binding)| match binding {
            Binding::Constant(constant) => Some((name, &**constant)),
            Binding::Value(_) => None,
        });
        self.attributes.iter().chain(in_place).map(|(name, constant)| (name.as_str(), constant))
    }

    /// Bindings of all parameters, in their order.
    pub fn bindings_mut(&mut self) -> impl Iterator<Item = &mut Binding> {
        self.inputs.iter_mut().flat_map(|(_, argument)| argument)
    }

    /// Returns whether this is a `const` op.
    pub fn is_const(&self) -> bool {
        self.kind() == OpKind::Const
    }

    /// Returns whether this is a `constexpr_…` op.
    pub fn is_constexpr(&self) -> bool {
        self.kind() == OpKind::Constexpr
    }

    /// Returns whether the op runs on a device: neither `const` nor `constexpr_…`.
    pub fn is_executed(&self) -> bool {
        !matches!(self.kind(), OpKind::Const | OpKind::Constexpr)
    }
}

/// A sequence of ops.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Block {
    /// Inputs of a nested block; a function's own block has none.
    pub inputs: Vec<ValueId>,
    /// Ops in topological order.
    pub ops: Vec<Op>,
    /// Outputs.
    pub outputs: Vec<ValueId>,
}

/// Sizes of a symbol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SymbolRange {
    /// Every size from `lower` to `upper`, both included. Compute plans are for `default`.
    Range {
        /// Smallest size.
        lower: u64,
        /// Largest size, if bounded.
        upper: Option<u64>,
        /// The default size.
        default: u64,
    },
    /// Listed sizes; the first is the default.
    Enumerated(Vec<u64>),
}

impl SymbolRange {
    /// Returns whether a size is allowed.
    pub fn contains(&self, size: u64) -> bool {
        match self {
            SymbolRange::Range { lower, upper, .. } => size >= *lower && upper.is_none_or(|u| size <= u),
            SymbolRange::Enumerated(sizes) => sizes.contains(&size),
        }
    }

    /// Returns the default size.
    pub fn default_size(&self) -> u64 {
        match self {
            SymbolRange::Range { default, .. } => *default,
            SymbolRange::Enumerated(sizes) => sizes.first().copied().unwrap_or(1),
        }
    }
}

/// A function of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Name; `main` if it is the only function.
    pub name: String,
    /// Opset of the block.
    pub opset: Opset,
    /// Inputs in order, states included.
    pub inputs: Vec<ValueId>,
    /// Arena of all values, inputs and those of nested blocks included.
    pub values: Vec<Value>,
    /// Body; its outputs are the function's.
    pub block: Block,
    /// Sizes of the input types' symbols.
    pub lengths: BTreeMap<Symbol, SymbolRange>,
}

impl Function {
    /// Returns a value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// Tensor type of a value; for a state, that of its tensor.
    pub fn tensor_type(&self, id: ValueId) -> Option<&TensorType> {
        self.value(id).ty.tensor()
    }

    /// Constant that a binding contains or refers to.
    pub fn constant<'a>(&'a self, binding: &'a Binding) -> Option<&'a Constant> {
        match binding {
            Binding::Value(id) => self.value(*id).constant.as_ref(),
            Binding::Constant(constant) => Some(constant),
        }
    }

    /// Type of the constant or value that a binding contains or refers to.
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

    /// All ops, nested blocks included, outer before inner.
    pub fn ops(&self) -> impl Iterator<Item = &Op> {
        // remaining ops of the enclosing blocks, the innermost last
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

    /// Returns a value id that an input, op or block uses and the function doesn't have.
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

    /// Returns the function with `symbol` fixed to `size` in the input types. The verifier or the executor infers the
    /// types of results anew.
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

    /// Returns whether any type contains a symbol.
    pub fn is_symbolic(&self) -> bool {
        self.values.iter().any(|v| v.ty.tensor().is_some_and(|t| t.shape.iter().any(|d| !matches!(d, Dim::Fixed(_)))))
    }
}

/// A program.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Functions in the order in which they are written.
    pub functions: Vec<Function>,
    /// Name of the default function.
    pub default_function: String,
}

impl Program {
    /// Creates a program of one function, which must be named `main`.
    pub fn single(function: Function) -> Self {
        Program { default_function: function.name.clone(), functions: vec![function] }
    }

    /// Returns the function with this name.
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|f| f.name == name)
    }

    /// Newest opset of the functions; determines the specification version.
    pub fn opset(&self) -> Opset {
        self.functions.iter().map(|f| f.opset).max().unwrap_or(Opset::CoreMl5)
    }
}
