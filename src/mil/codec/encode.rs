//! Encoding of programs as protobuf.

use std::collections::BTreeMap;

use hashbrown::HashSet;

use coreml_proto::{Message, append_block, append_entry, mil_spec as proto};

use super::values::Elements;
use super::{BlobPlace, BlobSink, encoding, types, values};
use crate::constant::{Constant, Data};
use crate::ir::{Argument, Binding, Block, Function, Op, Program, ValueId};
use crate::names;
use crate::types::{DataType, Opset, ValueType};
use anec_base::Result;

/// Encodes a program. Constants that belong in a weight file are passed to `blobs` in the order of the program.
///
/// Each op is encoded when its message is made. Encoding needs the length of every nested message, and the messages
/// of all ops together take several times the memory of their bytes.
///
/// # Errors
/// Returns an error for an illegal or duplicate name and for a constant that contradicts its type, and any error
/// from `blobs`.
pub fn encode(program: &Program, blobs: &mut dyn BlobSink) -> Result<Vec<u8>> {
    let mut functions = BTreeMap::new();
    for function in &program.functions {
        if let Some(problem) = names::problem(&function.name) {
            return Err(encoding("program", format!("function: {problem}")).into());
        }
        let encoded = Encoder { function, opset: function.opset, blobs, scopes: vec![HashSet::new()] }.function()?;
        if functions.insert(&function.name, encoded).is_some() {
            return Err(encoding("program", format!("two functions are called `{}`", function.name)).into());
        }
    }
    let mut bytes = proto::Program { version: 1, ..Default::default() }.encode_to_vec();
    functions.iter().for_each(|(name, function)| append_entry(FUNCTIONS, name, function, &mut bytes));
    Ok(bytes)
}

/// Passes the constants of a function that belong in a weight file to `blobs`, as [`encode`] does, without building
/// a message. Used to compute the size of the file.
///
/// # Errors
/// Returns any error from `blobs`.
pub fn place_blobs(function: &Function, blobs: &mut dyn BlobSink) -> Result<()> {
    Encoder { function, opset: function.opset, blobs, scopes: Vec::new() }.place_all(&function.block)
}

/// Field number of `Program.functions`.
const FUNCTIONS: u32 = 2;
/// Field number of `Function.block_specializations`.
const BLOCK_SPECIALIZATIONS: u32 = 3;

struct Encoder<'a> {
    function: &'a Function,
    opset: Opset,
    blobs: &'a mut dyn BlobSink,
    /// Names in use, by block.
    scopes: Vec<HashSet<&'a str>>,
}

impl<'a> Encoder<'a> {
    fn function(&mut self) -> Result<Vec<u8>> {
        let function = self.function;
        if let Some(id) = function.dangling() {
            return Err(self.error(format!("value {} is used, there are {}", id.0, function.values.len())));
        }
        let inputs = self.declare(&function.inputs)?;
        let opset = self.opset.name();
        let mut block = Vec::new();
        self.block(&function.block, &mut |part| append_block(&part, &mut block))?;
        let mut bytes = proto::Function { inputs, opset: opset.to_owned(), ..Default::default() }.encode_to_vec();
        append_entry(BLOCK_SPECIALIZATIONS, opset, &block, &mut bytes);
        Ok(bytes)
    }

    /// Passes a block to `take` in parts that merge into the block: inputs and outputs, then each operation.
    fn block(&mut self, block: &'a Block, take: &mut dyn FnMut(proto::Block)) -> Result<()> {
        let inputs = self.declare(&block.inputs)?;
        let outputs = block.outputs.iter().map(|id| self.function.value(*id).name.clone()).collect();
        take(proto::Block { inputs, outputs, ..Default::default() });
        block.ops.iter().try_for_each(|op| {
            take(proto::Block { operations: vec![self.op(op)?], ..Default::default() });
            Ok(())
        })
    }

    /// Names and types of newly defined values.
    fn declare(&mut self, ids: &[ValueId]) -> Result<Vec<proto::NamedValueType>> {
        let function = self.function;
        ids.iter()
            .map(|id| {
                let value = function.value(*id);
                if let Some(problem) = names::problem(&value.name) {
                    return Err(self.error(problem));
                }
                if self.scopes.last_mut().is_some_and(|scope| !scope.insert(&value.name)) {
                    return Err(self.error(format!("the name `{}` is given twice", value.name)));
                }
                let ty = types::encode(&value.ty).map_err(|p| self.error(format!("value `{}`: {p}", value.name)))?;
                Ok(proto::NamedValueType { name: value.name.clone(), r#type: Some(ty) })
            })
            .collect()
    }

    fn op(&mut self, op: &'a Op) -> Result<proto::Operation> {
        let inputs = op
            .inputs
            .iter()
            .map(|(parameter, argument)| Ok((parameter.to_string(), self.argument(op, parameter, argument)?)))
            .collect::<Result<_>>()?;
        let mut attributes = BTreeMap::from([("name".to_owned(), values::string(&op.name))]);
        for (name, constant) in &op.attributes {
            if name == "name" {
                return Err(self.op_error(op, "attribute `name` is the op's own name, it can't be given"));
            }
            attributes.insert(name.to_string(), self.constant(op, name, constant)?);
        }
        let mut blocks = Vec::with_capacity(op.blocks.len());
        for block in &op.blocks {
            self.scopes.push(HashSet::new());
            let mut whole = proto::Block::default();
            self.block(block, &mut |part| {
                whole.inputs.extend(part.inputs);
                whole.outputs.extend(part.outputs);
                whole.operations.extend(part.operations);
            })?;
            blocks.push(whole);
            self.scopes.pop();
        }
        if op.is_const() {
            let declared = op.outputs.first().map(|id| &self.function.value(*id).ty);
            match (op.attributes.get("val"), declared) {
                (Some(value), Some(ValueType::Tensor(ty))) if value.ty != *ty => {
                    return Err(self.op_error(op, &format!("declared as {ty}, the value is {}", value.ty)));
                }
                (Some(_), Some(_)) => {}
                _ => return Err(self.op_error(op, "a const has an output and the attribute `val`")),
            }
        }
        let outputs = self.declare(&op.outputs)?;
        Ok(proto::Operation { r#type: op.operator.to_string(), inputs, outputs, blocks, attributes })
    }

    fn argument(&mut self, op: &Op, parameter: &str, argument: &Argument) -> Result<proto::Argument> {
        use proto::argument::binding;
        let arguments = argument
            .iter()
            .map(|one| {
                let bound = match one {
                    Binding::Value(id) => binding::Binding::Name(self.function.value(*id).name.clone()),
                    Binding::Constant(constant) => binding::Binding::Value(self.constant(op, parameter, constant)?),
                };
                Ok(proto::argument::Binding { binding: Some(bound) })
            })
            .collect::<Result<_>>()?;
        Ok(proto::Argument { arguments })
    }

    /// Returns whether a constant is written as a list. A `const` declares it; elsewhere, vectors of these types occur
    /// only as lists (class labels, settings of a custom layer).
    fn is_list(&self, op: &Op, constant: &Constant) -> bool {
        if op.is_const() {
            let declared = op.outputs.first().map(|id| &self.function.value(*id).ty);
            return matches!(declared, Some(ValueType::Opaque(text)) if text.starts_with("list<"));
        }
        constant.ty.rank() == 1 && matches!(constant.ty.dtype, DataType::String | DataType::Int64)
    }

    /// Place of a constant that belongs in a weight file.
    fn place(&mut self, op: &Op, parameter: &str, constant: &Constant) -> Result<Option<BlobPlace>> {
        if !values::belongs_in_blob(constant, self.opset) || self.is_list(op, constant) {
            return Ok(None);
        }
        let owner = match parameter {
            "val" => self.owner(op),
            _ => format!("{}, {parameter}", self.owner(op)),
        };
        self.blobs.place(constant, &owner).map(Some)
    }

    /// Assigns every constant of a block its place, in the order in which [`op`](Self::op) does.
    fn place_all(&mut self, block: &Block) -> Result<()> {
        for op in &block.ops {
            for (parameter, argument) in &op.inputs {
                for binding in argument {
                    if let Binding::Constant(constant) = binding {
                        self.place(op, parameter, constant)?;
                    }
                }
            }
            for (name, constant) in &op.attributes {
                self.place(op, name, constant)?;
            }
            op.blocks.iter().try_for_each(|block| self.place_all(block))?;
        }
        Ok(())
    }

    fn constant(&mut self, op: &Op, parameter: &str, constant: &Constant) -> Result<proto::Value> {
        if !constant.is_consistent() {
            return Err(self.op_error(op, &format!("the data of `{parameter}` doesn't fill its type {}", constant.ty)));
        }
        if let Some(place) = self.place(op, parameter, constant)? {
            return Ok(values::blob(&constant.ty, place.file_name, place.offset));
        }
        let list = self.is_list(op, constant);
        let bytes;
        let elements = match &constant.data {
            Data::Strings(strings) => Elements::Strings(strings),
            Data::Literal(literal) => Elements::Bytes(literal),
            Data::Content(_) => {
                bytes = constant.bytes()?;
                Elements::Bytes(&bytes)
            }
        };
        Ok(if list { values::list(constant.ty.dtype, &elements) } else { values::tensor(&constant.ty, &elements) })
    }

    fn owner(&self, op: &Op) -> String {
        format!("function `{}`, op `{}`", self.function.name, op.name)
    }

    fn op_error(&self, op: &Op, problem: &str) -> anec_base::Error {
        encoding(self.owner(op), problem).into()
    }

    fn error(&self, problem: String) -> anec_base::Error {
        encoding(format!("function `{}`", self.function.name), problem).into()
    }
}
