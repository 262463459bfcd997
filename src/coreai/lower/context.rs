//! The function that is being lowered, and the operations that rules are made of.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use anec_mil::catalogue::{self, Arguments};
use anec_mil::{Binding, Constant, Data, Function, Op, TensorType, ValueId, ValueType};

use super::composite::{self, Reduction};
use super::numbers::number_bytes;
use super::{LoweringChoices, Memory, fold, rule};
use crate::aicode::{AiAttribute, AiRegion, Blob, ElementType, TypeId};
use crate::builder::{BodyBuilder, GraphValue, INLINE_BYTES, ModuleBuilder, Property};

/// A value of the graph.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) id: u32,
    pub(super) shape: Vec<u64>,
    pub(super) element: ElementType,
}

impl Tensor {
    pub(super) fn rank(&self) -> usize {
        self.shape.len()
    }

    /// An axis from the end if negative.
    pub(super) fn axis(&self, axis: i64) -> Result<usize, String> {
        let positive = if axis < 0 { axis + self.rank() as i64 } else { axis };
        let valid = usize::try_from(positive).ok().filter(|axis| *axis < self.rank());
        valid.ok_or_else(|| format!("axis {axis} of rank {}", self.rank()))
    }
}

/// A state of the graph.
#[derive(Clone, Debug)]
pub(super) struct StateValue {
    pub(super) handle: u32,
    name: String,
    /// The newest token that orders its reads and writes.
    pub(super) token: Option<u32>,
    pub(super) ty: Tensor,
    /// Type of its tensor in memory, if that has constraints.
    pub(super) constrained: Option<TypeId>,
}

/// A function that was lowered.
pub(super) struct LoweredGraph {
    pub(super) arguments: Vec<GraphValue>,
    pub(super) results: Vec<GraphValue>,
    pub(super) body: BodyBuilder,
    /// Operators of MIL, each with the end of its operations in the body.
    pub(super) marks: Vec<(usize, String)>,
}

/// A function while it is lowered.
pub(super) struct Lowering<'m> {
    pub(super) module: &'m mut ModuleBuilder,
    pub(super) choices: LoweringChoices,
    /// The function, with the types found so far and folded integers as constants.
    pub(super) function: Function,
    /// Constraints on the memory of inputs, states and outputs, by name.
    memory: &'m Memory,
    pub(super) body: BodyBuilder,
    marks: Vec<(usize, String)>,
    values: HashMap<ValueId, Tensor>,
    pub(super) states: BTreeMap<ValueId, StateValue>,
}

fn fixed(ty: &TensorType) -> Result<(Vec<u64>, ElementType), String> {
    let shape = ty.fixed_shape().ok_or_else(|| format!("the shape {ty}, which isn't fixed"))?;
    Ok((shape, ElementType::of(ty.dtype).ok_or("a tensor of strings")?))
}

/// Whether an operator or an output of the function takes a value.
fn is_used(function: &Function, id: ValueId) -> bool {
    function.block.outputs.contains(&id) || function.ops().any(|op| op.operands().any(|operand| operand == id))
}

impl<'m> Lowering<'m> {
    /// Lowers a function; gives all problems if there are some.
    pub(super) fn lower(
        module: &'m mut ModuleBuilder,
        choices: LoweringChoices,
        memory: &'m Memory,
        function: &Function,
    ) -> Result<LoweredGraph, BTreeSet<String>> {
        let mut problems = BTreeSet::new();
        let mut arguments = Vec::new();
        let mut constrained_inputs = Vec::new();
        let mut lowering = Lowering {
            module,
            choices,
            function: function.clone(),
            memory,
            body: BodyBuilder::new(&[]),
            marks: Vec::new(),
            values: HashMap::new(),
            states: BTreeMap::new(),
        };
        for id in &function.inputs {
            let value = function.value(*id);
            let ty = match &value.ty {
                ValueType::Tensor(ty) | ValueType::State(ty) => fixed(ty),
                ValueType::Opaque(text) => Err(format!("an input of type {text}")),
            };
            let (shape, element) = match ty {
                Ok(ty) => ty,
                Err(problem) => {
                    problems.insert(format!("input `{}` of `{}`: {problem}", value.name, function.name));
                    continue;
                }
            };
            let tensor = Tensor { id: arguments.len() as u32, shape, element };
            let constrained = lowering.constrained(&value.name, &tensor);
            let mut ty = constrained.unwrap_or_else(|| lowering.ty(&tensor.shape, element));
            let is_state = matches!(value.ty, ValueType::State(_));
            if is_state {
                ty = lowering.module.ty(crate::aicode::AiType::Handle(ty));
                let (handle, name) = (tensor.id, value.name.clone());
                lowering.states.insert(*id, StateValue { handle, name, token: None, ty: tensor, constrained });
            } else {
                constrained_inputs.extend(constrained.filter(|_| is_used(function, *id)).map(|_| *id));
                lowering.values.insert(*id, tensor);
            }
            arguments.push(GraphValue { name: Some(value.name.clone()), ty, mutable: is_state });
        }
        let types: Vec<TypeId> = arguments.iter().map(|argument| argument.ty).collect();
        lowering.body = BodyBuilder::new(&types);
        for id in constrained_inputs {
            if let Some(tensor) = lowering.values.get(&id).cloned() {
                let plain = lowering.unconstrained(&tensor);
                lowering.values.insert(id, plain);
            }
        }
        if problems.is_empty() {
            problems = lowering.ops(function);
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        match lowering.results(function) {
            Ok(results) => Ok(LoweredGraph { arguments, results, body: lowering.body, marks: lowering.marks }),
            Err(problem) => Err([format!("outputs of `{}`: {problem}", function.name)].into()),
        }
    }

    /// Lowers all operators. Behind one that can't be lowered, only the names of others that can't are looked for.
    fn ops(&mut self, function: &Function) -> BTreeSet<String> {
        let mut problems = BTreeSet::new();
        for op in &function.block.ops {
            if op.is_const() {
                continue;
            }
            let Some(rule) = rule(&op.operator) else {
                problems.insert(format!("operator `{}`", op.operator));
                continue;
            };
            if !problems.is_empty() {
                continue;
            }
            self.infer(op);
            if fold::fold(&mut self.function, op) {
                continue;
            }
            let lowered = rule(self, op);
            self.marks.push((self.body.ops().len(), format!("`{}` (`{}`)", op.operator, op.name)));
            match lowered {
                Ok(results) => {
                    for (output, result) in op.outputs.iter().zip(results) {
                        let ty = TensorType::new(
                            self.function.tensor_type(*output).map_or(anec_mil::DataType::Fp32, |ty| ty.dtype),
                            result.shape.iter().copied(),
                        );
                        self.function.values[output.0 as usize].ty = ty.into();
                        self.values.insert(*output, result);
                    }
                }
                Err(problem) => {
                    problems.insert(format!("`{}` (`{}`): {problem}", op.operator, op.name));
                }
            }
        }
        problems
    }

    /// Infers the types of an operator's results from those of its arguments, which may have been found here.
    fn infer(&mut self, op: &Op) {
        let Some(spec) = catalogue::lookup(&op.operator, self.function.opset) else { return };
        let arguments = Arguments::of(&self.function, op);
        let Ok(types) = spec.results(&arguments) else { return };
        for (output, ty) in op.outputs.iter().zip(types) {
            let known = ty.tensor().is_some_and(|ty| ty.fixed_shape().is_some());
            if known {
                self.function.values[output.0 as usize].ty = ty;
            }
        }
    }

    /// Ends the body with a token for each state, then the function's outputs: the order of Apple's exporter, which
    /// names tokens after their states.
    fn results(&mut self, function: &Function) -> Result<Vec<GraphValue>, String> {
        let (mut results, mut operands) = (Vec::new(), Vec::new());
        let token = self.module.token();
        for id in self.states.keys().copied().collect::<Vec<_>>() {
            operands.push(self.newest_token(id));
            results.push(GraphValue::named(&self.states[&id].name, token));
        }
        for id in &function.block.outputs {
            let tensor = self.value(*id)?;
            let name = &function.value(*id).name;
            let (operand, ty) = match self.constrained(name, &tensor) {
                Some(ty) => (self.copied_to(&tensor, ty), ty),
                None => (tensor.id, self.ty(&tensor.shape, tensor.element)),
            };
            results.push(GraphValue::named(name, ty));
            operands.push(operand);
        }
        self.body.op(self.module, "dataflow.output_v1", &[], &operands, &[], Vec::new());
        Ok(results)
    }

    // ---- memory

    /// Type of an input, state or output in memory, if its name has constraints.
    fn constrained(&mut self, name: &str, tensor: &Tensor) -> Option<TypeId> {
        let constraints = self.memory.get(name)?.clone();
        Some(self.module.constrained_tensor(&tensor.shape, tensor.element, Some(constraints)))
    }

    /// Copies a value from memory with constraints.
    pub(super) fn unconstrained(&mut self, tensor: &Tensor) -> Tensor {
        self.op("ax.copy_discarding_constraints_v1", &[tensor], &tensor.shape, tensor.element)
    }

    /// Copies a value to memory with constraints; returns the number of the copy.
    pub(super) fn copied_to(&mut self, tensor: &Tensor, constrained: TypeId) -> u32 {
        self.body.op(self.module, "ax.copy_with_constraints_v1", &[], &[tensor.id], &[constrained], Vec::new())
    }

    // ---- arguments

    /// The tensor of a value; a constant becomes one here.
    fn value(&mut self, id: ValueId) -> Result<Tensor, String> {
        if let Some(tensor) = self.values.get(&id) {
            return Ok(tensor.clone());
        }
        let constant = self.function.value(id).constant.clone();
        let constant = constant.ok_or_else(|| format!("`{}` is no tensor", self.function.value(id).name))?;
        let tensor = self.constant(&constant)?;
        self.values.insert(id, tensor.clone());
        Ok(tensor)
    }

    fn bound(&mut self, binding: &Binding) -> Result<Tensor, String> {
        match binding {
            Binding::Value(id) => self.value(*id),
            Binding::Constant(constant) => self.constant(constant),
        }
    }

    /// The constant of a parameter, given as an input or an attribute.
    pub(super) fn constant_of(&self, op: &Op, parameter: &str) -> Option<Constant> {
        let bound = op.input(parameter).and_then(|binding| self.function.constant(binding));
        bound.or_else(|| op.attributes.get(parameter)).cloned()
    }

    /// The tensor of a parameter, if it is given.
    pub(super) fn optional(&mut self, op: &Op, parameter: &str) -> Result<Option<Tensor>, String> {
        match (op.input(parameter), op.attributes.get(parameter)) {
            (Some(binding), _) => self.bound(&binding.clone()).map(Some),
            (None, Some(constant)) => self.constant(&constant.clone()).map(Some),
            (None, None) => Ok(None),
        }
    }

    /// The tensor of a parameter.
    pub(super) fn tensor(&mut self, op: &Op, parameter: &str) -> Result<Tensor, String> {
        self.optional(op, parameter)?.ok_or_else(|| format!("no `{parameter}`"))
    }

    /// The tensors of a parameter that takes a list.
    pub(super) fn tensors(&mut self, op: &Op, parameter: &str) -> Result<Vec<Tensor>, String> {
        let bindings = op.inputs.get(parameter).cloned().unwrap_or_default();
        bindings.iter().map(|binding| self.bound(binding)).collect()
    }

    /// The integers of a parameter; `None` if it isn't given.
    ///
    /// # Errors
    /// When they are computed.
    pub(super) fn integers(&self, op: &Op, parameter: &str) -> Result<Option<Vec<i64>>, String> {
        let given = op.inputs.contains_key(parameter) || op.attributes.contains_key(parameter);
        match self.constant_of(op, parameter).and_then(|constant| constant.as_integers()) {
            Some(integers) => Ok(Some(integers)),
            None if given => Err(format!("`{parameter}` is computed")),
            None => Ok(None),
        }
    }

    pub(super) fn integers_or(&self, op: &Op, parameter: &str, default: Vec<i64>) -> Result<Vec<i64>, String> {
        Ok(self.integers(op, parameter)?.unwrap_or(default))
    }

    pub(super) fn integer_or(&self, op: &Op, parameter: &str, default: i64) -> Result<i64, String> {
        Ok(self.integers(op, parameter)?.and_then(|list| list.first().copied()).unwrap_or(default))
    }

    pub(super) fn flag(&self, op: &Op, parameter: &str) -> Result<bool, String> {
        Ok(self.integer_or(op, parameter, 0)? != 0)
    }

    pub(super) fn number(&self, op: &Op, parameter: &str, default: f32) -> Result<f32, String> {
        let Some(constant) = self.constant_of(op, parameter) else { return Ok(default) };
        let integer = || constant.as_integer().map(|value| value as f32);
        constant.as_float().or_else(integer).ok_or_else(|| format!("`{parameter}` is no number"))
    }

    pub(super) fn text(&self, op: &Op, parameter: &str, default: &str) -> String {
        let constant = self.constant_of(op, parameter);
        constant.as_ref().and_then(Constant::as_str).unwrap_or(default).to_owned()
    }

    /// Shape and element type of a result, as far as they follow from the types of the arguments.
    pub(super) fn result_type(&self, op: &Op, index: usize) -> Result<(Vec<u64>, ElementType), String> {
        let id = op.outputs.get(index).ok_or("a result is missing")?;
        fixed(self.function.tensor_type(*id).ok_or("a result that is no tensor")?)
    }

    // ---- constants

    /// A constant tensor.
    pub(super) fn constant(&mut self, constant: &Constant) -> Result<Tensor, String> {
        let (shape, element) = fixed(&constant.ty)?;
        let length = constant.ty.bytes().unwrap_or(u64::MAX);
        let elements = constant.elements();
        let packed = element.bits() < 8;
        let inline = element == ElementType::I1 || elements <= 1 || (length <= INLINE_BYTES && !packed);
        let value = if inline {
            let bytes = match &constant.data {
                Data::Content(_) if self.choices.without_weights => vec![0; length as usize].into(),
                _ => constant.bytes().map_err(|e| e.to_string())?,
            };
            if bytes.len() as u64 != length {
                return Err(format!("a constant of {} bytes for {}", bytes.len(), constant.ty));
            }
            // a single element below 8 bits takes its byte's lowest bits, as it is
            self.module.dense(bytes.to_vec(), elements == 1)
        } else {
            let blob = match &constant.data {
                Data::Literal(bytes) => Blob::Bytes(bytes.clone()),
                Data::Content(content) => Blob::Content(content.clone()),
                Data::Strings(_) => return Err("a constant of strings".into()),
            };
            if blob.length() != length {
                return Err(format!("a constant of {} bytes for {}", blob.length(), constant.ty));
            }
            self.module.resource(blob)
        };
        Ok(self.op_with("primitive.constant_v1", &[Property::Required(value)], &[], &shape, element, Vec::new()))
    }

    fn literal(&mut self, shape: &[u64], element: ElementType, bytes: Vec<u8>) -> Tensor {
        let splat = shape.iter().product::<u64>() == 1;
        let value = match bytes.len() as u64 <= INLINE_BYTES {
            true => self.module.dense(bytes, splat),
            false => self.module.resource(Blob::Bytes(Arc::from(bytes))),
        };
        self.op_with("primitive.constant_v1", &[Property::Required(value)], &[], shape, element, Vec::new())
    }

    /// A vector of si32.
    pub(super) fn signed(&mut self, values: &[i64]) -> Tensor {
        let bytes = values.iter().flat_map(|value| (*value as i32).to_le_bytes()).collect();
        self.literal(&[values.len() as u64], ElementType::Si32, bytes)
    }

    /// A scalar of si32.
    pub(super) fn signed_scalar(&mut self, value: i64) -> Tensor {
        self.literal(&[], ElementType::Si32, (value as i32).to_le_bytes().to_vec())
    }

    /// A vector of ui32.
    pub(super) fn unsigned(&mut self, values: &[u64]) -> Tensor {
        let bytes = values.iter().flat_map(|value| (*value as u32).to_le_bytes()).collect();
        self.literal(&[values.len() as u64], ElementType::Ui32, bytes)
    }

    /// A scalar of ui32.
    pub(super) fn unsigned_scalar(&mut self, value: u64) -> Tensor {
        self.literal(&[], ElementType::Ui32, (value as u32).to_le_bytes().to_vec())
    }

    /// A boolean.
    pub(super) fn boolean(&mut self, value: bool) -> Tensor {
        self.literal(&[], ElementType::I1, vec![value.into()])
    }

    /// One number in every place of a shape.
    pub(super) fn splat(&mut self, value: f64, shape: &[u64], element: ElementType) -> Result<Tensor, String> {
        let bytes = number_bytes(value, element)?;
        let value = self.module.dense(bytes, true);
        Ok(self.op_with("primitive.constant_v1", &[Property::Required(value)], &[], shape, element, Vec::new()))
    }

    /// Numbers of a float type, in a shape.
    pub(super) fn floats(&mut self, values: &[f64], shape: &[u64], element: ElementType) -> Result<Tensor, String> {
        let bytes = values.iter().map(|value| number_bytes(*value, element)).collect::<Result<Vec<_>, _>>()?.concat();
        Ok(self.literal(shape, element, bytes))
    }

    /// Booleans in a shape, given as numbers that are 0 or not. They always stand in the attributes; a resource would
    /// hold the same bytes, one for each boolean (measured).
    pub(super) fn booleans(&mut self, values: &[f64], shape: &[u64]) -> Result<Tensor, String> {
        let bytes = values.iter().map(|value| u8::from(*value != 0.0)).collect();
        let value = self.module.dense(bytes, values.len() == 1);
        Ok(self.op_with("primitive.constant_v1", &[Property::Required(value)], &[], shape, ElementType::I1, Vec::new()))
    }

    // ---- operations

    pub(super) fn ty(&mut self, shape: &[u64], element: ElementType) -> TypeId {
        self.module.tensor(shape, element)
    }

    pub(super) fn op_with(
        &mut self,
        name: &'static str,
        properties: &[Property],
        operands: &[u32],
        shape: &[u64],
        element: ElementType,
        regions: Vec<AiRegion>,
    ) -> Tensor {
        let ty = self.ty(shape, element);
        let id = self.body.op(self.module, name, properties, operands, &[ty], regions);
        Tensor { id, shape: shape.to_vec(), element }
    }

    /// An operation with one result.
    pub(super) fn op(
        &mut self,
        name: &'static str,
        operands: &[&Tensor],
        shape: &[u64],
        element: ElementType,
    ) -> Tensor {
        let operands: Vec<u32> = operands.iter().map(|operand| operand.id).collect();
        self.op_with(name, &[], &operands, shape, element, Vec::new())
    }

    /// An operation with a property that is an enumeration or the like.
    pub(super) fn op_of_kind(
        &mut self,
        name: &'static str,
        kind: AiAttribute,
        operands: &[&Tensor],
        shape: &[u64],
        element: ElementType,
    ) -> Tensor {
        let kind = self.module.attribute(kind);
        let operands: Vec<u32> = operands.iter().map(|operand| operand.id).collect();
        self.op_with(name, &[Property::Required(kind)], &operands, shape, element, Vec::new())
    }

    /// An elementwise operation on one tensor.
    pub(super) fn unary(&mut self, name: &'static str, x: &Tensor) -> Tensor {
        self.op(name, &[x], &x.shape, x.element)
    }

    /// An elementwise operation on two tensors, which broadcast.
    pub(super) fn binary(&mut self, name: &'static str, x: &Tensor, y: &Tensor) -> Result<Tensor, String> {
        let element = x.element;
        self.binary_to(name, x, y, element)
    }

    /// An elementwise operation with another element type of its result, such as a comparison.
    pub(super) fn binary_to(
        &mut self,
        name: &'static str,
        x: &Tensor,
        y: &Tensor,
        element: ElementType,
    ) -> Result<Tensor, String> {
        let shape = broadcast_shape(&x.shape, &y.shape)?;
        let (x, y) = (self.broadcast(x, &shape)?, self.broadcast(y, &shape)?);
        Ok(self.op(name, &[&x, &y], &shape, element))
    }

    /// An elementwise operation on a tensor and a number.
    pub(super) fn with_number(&mut self, name: &'static str, x: &Tensor, number: f64) -> Result<Tensor, String> {
        let number = self.splat(number, &x.shape, x.element)?;
        Ok(self.op(name, &[x, &number], &x.shape, x.element))
    }

    /// Broadcasts a tensor to a shape.
    pub(super) fn broadcast(&mut self, x: &Tensor, shape: &[u64]) -> Result<Tensor, String> {
        if x.shape == shape {
            return Ok(x.clone());
        }
        let mut x = x.clone();
        if x.rank() < shape.len() {
            let padded = [vec![1; shape.len() - x.rank()], x.shape.clone()].concat();
            x = self.reshape(&x, &padded);
        }
        let axes: Vec<usize> = (0..shape.len()).filter(|i| x.shape[*i] != shape[*i]).collect();
        if axes.is_empty() {
            return Ok(x);
        }
        if axes.iter().any(|axis| x.shape[*axis] != 1) {
            return Err(format!("{:?} doesn't broadcast to {shape:?}", x.shape));
        }
        let sizes = self.unsigned(&axes.iter().map(|axis| shape[*axis]).collect::<Vec<_>>());
        let axes = self.signed(&axes.iter().map(|axis| *axis as i64).collect::<Vec<_>>());
        Ok(self.op("primitive.broadcast_in_dims_v1", &[&x, &sizes, &axes], shape, x.element))
    }

    /// Reshapes a tensor.
    pub(super) fn reshape(&mut self, x: &Tensor, shape: &[u64]) -> Tensor {
        if x.shape == shape {
            return x.clone();
        }
        let sizes = self.signed(&shape.iter().map(|size| *size as i64).collect::<Vec<_>>());
        self.op("primitive.reshape_v2", &[x, &sizes], shape, x.element)
    }

    /// Transposes a tensor.
    pub(super) fn transpose(&mut self, x: &Tensor, permutation: &[usize]) -> Tensor {
        if permutation.iter().copied().eq(0..x.rank()) {
            return x.clone();
        }
        let shape: Vec<u64> = permutation.iter().map(|axis| x.shape[*axis]).collect();
        let permutation = self.unsigned(&permutation.iter().map(|axis| *axis as u64).collect::<Vec<_>>());
        self.op("primitive.transpose_v1", &[x, &permutation], &shape, x.element)
    }

    /// Swaps two axes of a tensor.
    pub(super) fn swap_axes(&mut self, x: &Tensor, a: usize, b: usize) -> Tensor {
        let mut permutation: Vec<usize> = (0..x.rank()).collect();
        permutation.swap(a, b);
        self.transpose(x, &permutation)
    }

    /// Converts the elements of a tensor.
    pub(super) fn cast(&mut self, x: &Tensor, element: ElementType) -> Tensor {
        if x.element == element {
            return x.clone();
        }
        self.op("primitive.cast_v1", &[x], &x.shape, element)
    }

    /// The part of a tensor from `begin` to `end`, with positive strides.
    pub(super) fn slice(&mut self, x: &Tensor, begin: &[i64], end: &[i64], stride: &[i64]) -> Tensor {
        let size = |i: usize| ((end[i] - begin[i]).max(0) as u64).div_ceil(stride[i].unsigned_abs());
        let shape: Vec<u64> = (0..x.rank()).map(size).collect();
        if shape == x.shape {
            return x.clone();
        }
        let indices = [begin, end, stride].map(|list| self.signed(list));
        self.op("primitive.slice_v1", &[x, &indices[0], &indices[1], &indices[2]], &shape, x.element)
    }

    /// The part of a tensor from `begin` to `end` along one axis.
    pub(super) fn slice_axis(&mut self, x: &Tensor, axis: usize, begin: u64, end: u64) -> Tensor {
        let (mut first, mut last) = (vec![0; x.rank()], x.shape.iter().map(|size| *size as i64).collect::<Vec<_>>());
        (first[axis], last[axis]) = (begin as i64, end as i64);
        self.slice(x, &first, &last, &vec![1; x.rank()])
    }

    /// Joins tensors along an axis.
    pub(super) fn concat(&mut self, parts: &[Tensor], axis: usize) -> Tensor {
        if let [one] = parts {
            return one.clone();
        }
        let mut shape = parts[0].shape.clone();
        shape[axis] = parts.iter().map(|part| part.shape[axis]).sum();
        let dimension = self.signed_scalar(axis as i64);
        let operands: Vec<&Tensor> = std::iter::once(&dimension).chain(parts).collect();
        self.op("primitive.concat_v1", &operands, &shape, parts[0].element)
    }

    /// Chooses elements of `a` where a condition holds, of `b` elsewhere. All shapes are equal.
    pub(super) fn choose(&mut self, condition: &Tensor, a: &Tensor, b: &Tensor) -> Tensor {
        self.op("primitive.where_v1", &[condition, a, b], &a.shape, a.element)
    }

    /// Whether elements of `x` are greater than those of `y`.
    pub(super) fn greater(&mut self, x: &Tensor, y: &Tensor) -> Result<Tensor, String> {
        self.binary_to("primitive.greater_v1", x, y, ElementType::I1)
    }

    /// Whether elements are greater than a number.
    pub(super) fn greater_than(&mut self, x: &Tensor, number: f64) -> Result<Tensor, String> {
        let number = self.splat(number, &x.shape, x.element)?;
        self.greater(x, &number)
    }

    /// Reduces axes to size 1.
    pub(super) fn reduce(&mut self, kind: Reduction, x: &Tensor, axes: &[usize]) -> Result<Tensor, String> {
        if axes.is_empty() {
            return Ok(x.clone());
        }
        let mut shape = x.shape.clone();
        axes.iter().for_each(|axis| shape[*axis] = 1);
        let region = composite::reduction(self.module, kind, &x.shape, axes, x.element)?;
        let axes = self.signed(&axes.iter().map(|axis| *axis as i64).collect::<Vec<_>>());
        Ok(self.op_with(kind.name(), &[], &[x.id, axes.id], &shape, x.element, vec![region]))
    }

    /// A composite operation on one tensor.
    pub(super) fn activation(&mut self, kind: composite::Activation, x: &Tensor) -> Result<Tensor, String> {
        let region = composite::activation(self.module, kind, &x.shape, x.element)?;
        Ok(self.op_with(kind.name(), &[], &[x.id], &x.shape, x.element, vec![region]))
    }

    /// Softmax along an axis.
    pub(super) fn softmax(&mut self, x: &Tensor, axis: usize) -> Result<Tensor, String> {
        let region = composite::softmax(self.module, &x.shape, axis, x.element)?;
        let axis = self.signed_scalar(axis as i64);
        Ok(self.op_with("softmax_v1", &[], &[x.id, axis.id], &x.shape, x.element, vec![region]))
    }

    /// The product of two batches of matrices.
    pub(super) fn product(&mut self, x: &Tensor, y: &Tensor) -> Result<Tensor, String> {
        let (n, m) = (x.rank(), y.rank());
        let batch = broadcast_shape(&x.shape[..n - 2], &y.shape[..m - 2])?;
        let (left, right) = ([&batch[..], &x.shape[n - 2..]].concat(), [&batch[..], &y.shape[m - 2..]].concat());
        let shape = [&batch[..], &[x.shape[n - 2], y.shape[m - 1]]].concat();
        let (mut x, mut y) = (self.broadcast(x, &left)?, self.broadcast(y, &right)?);
        let element = x.element;
        let wide = self.choices.wide_products && element == ElementType::F16;
        if wide {
            (x, y) = (self.cast(&x, ElementType::F32), self.cast(&y, ElementType::F32));
        }
        let product = self.op("primitive.batch_matmul_v1", &[&x, &y], &shape, x.element);
        Ok(self.cast(&product, element))
    }

    /// A sort and the order that sorts, along an axis.
    pub(super) fn sorted(&mut self, x: &Tensor, axis: usize, descending: bool) -> Result<(Tensor, Tensor), String> {
        let region = composite::sort(self.module, &x.shape, axis, x.element)?;
        let (dim, descending, stable) = (self.signed_scalar(axis as i64), self.boolean(descending), self.boolean(true));
        let operands = [x.id, dim.id, descending.id, stable.id];
        let values = self.op_with("sort_v1", &[], &operands, &x.shape, x.element, vec![region]);
        let order = self.op("primitive.argsort_v1", &[x, &dim, &descending, &stable], &x.shape, ElementType::Si32);
        Ok((values, order))
    }
}

/// The shape that two shapes broadcast to.
pub(super) fn broadcast_shape(x: &[u64], y: &[u64]) -> Result<Vec<u64>, String> {
    let rank = x.len().max(y.len());
    let at = |shape: &[u64], i: usize| (i + shape.len()).checked_sub(rank).map_or(1, |i| shape[i]);
    let one = |i: usize| match (at(x, i), at(y, i)) {
        (a, b) if a == b || b == 1 => Ok(a),
        (1, b) => Ok(b),
        _ => Err(format!("{x:?} and {y:?} don't broadcast")),
    };
    (0..rank).map(one).collect()
}
