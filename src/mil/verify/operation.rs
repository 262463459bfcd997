//! Check of ops against the catalogue: operator, arguments, results.

use hashbrown::HashSet;

use super::Findings;
use crate::catalogue::{self, Arguments, OpSpec};
use crate::constant::Constant;
use crate::ir::{Binding, Function, Op, ValueId};
use crate::types::{Dim, TensorType, ValueType};

pub(super) fn check<'a>(function: &'a Function, findings: &mut Findings<'a>) {
    let expanded = function.ops().filter(|op| op.is_constexpr()).flat_map(|op| op.outputs.iter().copied()).collect();
    let mut checker = Checker { function, expanded, findings };
    for op in function.ops() {
        checker.op(op);
    }
}

struct Checker<'a, 'f> {
    function: &'a Function,
    /// Weights decompressed by a constexpr op, which count as constants.
    expanded: HashSet<ValueId>,
    findings: &'f mut Findings<'a>,
}

impl Checker<'_, '_> {
    fn op(&mut self, op: &Op) {
        for (parameter, constant) in op.constants() {
            if !constant.is_consistent() {
                self.findings.add(&op.name, format!("the data of `{parameter}` doesn't fill its type {}", constant.ty));
            }
        }
        let opset = self.function.opset;
        let Some(spec) = catalogue::lookup(&op.operator, opset) else {
            let problem = match catalogue::first_opset(&op.operator) {
                Some(since) => format!("`{}` needs {}, the function is {}", op.operator, since.name(), opset.name()),
                None => format!("the operator `{}` is not in the catalogue", op.operator),
            };
            return self.findings.add(&op.name, problem);
        };
        if !op.blocks.is_empty() && !spec.takes_blocks() {
            self.findings.add(&op.name, format!("`{}` has {} blocks; expected none", op.operator, op.blocks.len()));
        }
        if op.is_const() {
            self.constant(op);
        } else {
            self.parameters(op, spec);
            self.results(op, spec);
        }
    }

    /// Checks that a `const` has the value of its attribute.
    fn constant(&mut self, op: &Op) {
        let (Some(value), [output], 1, true) =
            (op.attributes.get("val"), op.outputs.as_slice(), op.attributes.len(), op.inputs.is_empty())
        else {
            let problem = "expected the attribute `val`, one result and nothing else".into();
            return self.findings.add(&op.name, problem);
        };
        let output = self.function.value(*output);
        if !declares(&output.ty, value) {
            let problem = format!("`{}` is declared {}, the value is {}", output.name, output.ty, value.ty);
            self.findings.add(&op.name, problem);
        }
        if output.constant.as_ref() != Some(value) {
            self.findings.add(&op.name, format!("`{}` isn't known to be the constant {value:?}", output.name));
        }
    }

    fn parameters(&mut self, op: &Op, spec: &OpSpec) {
        for given in op.inputs.keys().chain(op.attributes.keys()) {
            if spec.parameter(given).is_none() {
                self.findings.add(&op.name, format!("`{}` has no parameter `{given}`", op.operator));
            }
        }
        for parameter in &spec.parameters {
            let name = parameter.name;
            let Some(bindings) = op.inputs.get(name) else {
                if !op.attributes.contains_key(name) && !parameter.optional {
                    self.findings.add(&op.name, format!("parameter `{name}` is missing"));
                }
                continue;
            };
            let known = |binding: &Binding| match binding {
                Binding::Value(id) => self.expanded.contains(id) || self.function.value(*id).constant.is_some(),
                Binding::Constant(_) => true,
            };
            if parameter.constant && !bindings.iter().all(known) {
                self.findings.add(&op.name, format!("parameter `{name}` must be a constant"));
            }
            if bindings.is_empty() || (bindings.len() > 1 && !parameter.variadic) {
                self.findings.add(&op.name, format!("parameter `{name}` has {} values; expected one", bindings.len()));
            }
        }
    }

    fn results(&mut self, op: &Op, spec: &OpSpec) {
        let arguments = Arguments::of(self.function, op);
        let inferred = match spec.results(&arguments) {
            Ok(inferred) => inferred,
            Err(problem) => return self.findings.add(&op.name, problem),
        };
        if inferred.len() != op.outputs.len() {
            let problem = format!("{} results are declared, {} follow", op.outputs.len(), inferred.len());
            return self.findings.add(&op.name, problem);
        }
        for (output, inferred) in op.outputs.iter().zip(inferred) {
            let value = self.function.value(*output);
            if !agrees(&value.ty, &inferred) {
                let problem = format!("`{}` is declared {}, but {inferred} follows", value.name, value.ty);
                self.findings.add(&op.name, problem);
            }
            if value.constant.is_some() {
                self.findings.add(&op.name, format!("`{}` is a constant; expected the result of a const", value.name));
            }
        }
    }
}

/// Returns whether a `const` of this type can have this value. Lists are declared as lists; their value is a vector.
fn declares(declared: &ValueType, value: &Constant) -> bool {
    match (declared, value.ty.shape.as_slice()) {
        (ValueType::Tensor(ty), _) => *ty == value.ty,
        (ValueType::Opaque(text), [length]) => *text == format!("list<{}, {length}>", value.ty.dtype),
        _ => false,
    }
}

/// Returns whether a declared type agrees with the inferred one. A declared dimension may be less specific than the
/// inferred one (an unknown dimension of another producer's package).
fn agrees(declared: &ValueType, inferred: &ValueType) -> bool {
    let dims = |a: &TensorType, b: &TensorType| {
        a.dtype == b.dtype
            && a.rank() == b.rank()
            && a.shape.iter().zip(&b.shape).all(|(a, b)| a == b || (*a == Dim::Unknown && b.fixed().is_none()))
    };
    match (declared, inferred) {
        (ValueType::Tensor(a), ValueType::Tensor(b)) | (ValueType::State(a), ValueType::State(b)) => dims(a, b),
        _ => declared == inferred,
    }
}
