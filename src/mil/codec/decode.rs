//! Decoding of programs from protobuf.

use std::collections::{BTreeMap, HashMap};

use coreml_proto::mil_spec as proto;

use super::{BlobPlace, BlobSource, Dimensions, encoding, types, values};
use crate::constant::Constant;
use crate::ir::{Argument, Binding, Block, Function, Op, ParameterMap, Program, SymbolRange, Value, ValueId};
use crate::types::{Dim, Opset, Symbol, ValueType};
use anec_base::Result;
use anec_base::listing::list;

/// Decodes a program. `dimensions` holds the known dimensions of the functions' inputs, by function. Any other
/// unknown dimension becomes the symbol `{input}_{axis}` with sizes from 1.
///
/// Results have the types that the message declares, so dimensions that depend on a symbol are unknown.
/// Doc strings and the program's own attributes (the producer) are dropped.
///
/// # Errors
/// Returns an error if the message isn't a valid program: a missing type or block, a name that is used before its
/// definition or defined twice, or elements that don't fill their type. Returns any error from `blobs`.
pub fn decode(
    program: &proto::Program,
    dimensions: &BTreeMap<String, Dimensions>,
    blobs: &dyn BlobSource,
) -> Result<Program> {
    if program.version != 1 {
        return Err(encoding("program", format!("version {}, expected 1", program.version)).into());
    }
    if program.functions.is_empty() {
        return Err(encoding("program", "there are no functions").into());
    }
    let nothing = Dimensions::default();
    let mut functions = Vec::with_capacity(program.functions.len());
    for (name, function) in &program.functions {
        functions.push(Decoder::new(name, blobs).function(function, dimensions.get(name).unwrap_or(&nothing))?);
    }
    let default_function = match program.functions.keys().next() {
        Some(first) if !program.functions.contains_key("main") => first.clone(),
        _ => "main".to_owned(),
    };
    Ok(Program { functions, default_function })
}

/// The dimensions of a function's inputs that are unknown, by input and axis, in the order of the inputs.
pub fn unknown_dimensions(function: &proto::Function) -> Vec<(String, usize)> {
    let mut out = Vec::new();
    for input in &function.inputs {
        if let Ok(ValueType::Tensor(ty)) = types::decode(input.r#type.as_ref()) {
            let unknown = ty.shape.iter().enumerate().filter(|(_, dim)| **dim == Dim::Unknown);
            out.extend(unknown.map(|(axis, _)| (input.name.clone(), axis)));
        }
    }
    out
}

struct Decoder<'a> {
    name: &'a str,
    blobs: &'a dyn BlobSource,
    values: Vec<Value>,
    /// Names by block, the innermost last.
    scopes: Vec<HashMap<&'a str, ValueId>>,
}

impl<'a> Decoder<'a> {
    fn new(name: &'a str, blobs: &'a dyn BlobSource) -> Self {
        Decoder { name, blobs, values: Vec::new(), scopes: vec![HashMap::new()] }
    }

    fn function(mut self, function: &'a proto::Function, dimensions: &Dimensions) -> Result<Function> {
        let opset = Opset::from_name(&function.opset)
            .ok_or_else(|| self.error(format!("opset `{}` is not known", function.opset)))?;
        let block = function.block_specializations.get(&function.opset).ok_or_else(|| {
            let found = list(function.block_specializations.keys());
            self.error(format!("no block for opset {}, only for [{found}]", function.opset))
        })?;
        if !function.attributes.is_empty() {
            return Err(self.error("a function has attributes, none are known"));
        }
        if !block.inputs.is_empty() {
            return Err(self.error("the body of a function has inputs of its own"));
        }
        let inputs = self.declare(&function.inputs)?;
        let mut lengths = dimensions.lengths.clone();
        for id in &inputs {
            let Value { name, ty: ValueType::Tensor(ty), .. } = &mut self.values[id.0 as usize] else { continue };
            for (axis, dim) in ty.shape.iter_mut().enumerate().filter(|(_, d)| **d == Dim::Unknown) {
                *dim = match dimensions.dims.get(&(name.clone(), axis)) {
                    Some(known) => known.clone(),
                    None => fresh(name, axis, &mut lengths),
                };
            }
        }
        let block = self.block(block)?;
        Ok(Function { name: self.name.to_owned(), opset, inputs, values: self.values, block, lengths })
    }

    fn block(&mut self, block: &'a proto::Block) -> Result<Block> {
        if !block.attributes.is_empty() {
            return Err(self.error("a block has attributes, none are known"));
        }
        let inputs = self.declare(&block.inputs)?;
        let ops = block.operations.iter().map(|op| self.op(op)).collect::<Result<_>>()?;
        let outputs = block
            .outputs
            .iter()
            .map(|name| {
                self.find(name).ok_or_else(|| self.error(format!("the block's output `{name}` is not defined")))
            })
            .collect::<Result<_>>()?;
        Ok(Block { inputs, ops, outputs })
    }

    fn declare(&mut self, declared: &'a [proto::NamedValueType]) -> Result<Vec<ValueId>> {
        declared
            .iter()
            .map(|value| {
                let ty = types::decode(value.r#type.as_ref())
                    .map_err(|problem| self.error(format!("value `{}`: {problem}", value.name)))?;
                let id = u32::try_from(self.values.len()).map_err(|_| self.error("too many values"))?;
                let id = ValueId(id);
                self.values.push(Value { name: value.name.clone(), ty, constant: None });
                match self.scopes.last_mut().and_then(|scope| scope.insert(&value.name, id)) {
                    None => Ok(id),
                    Some(_) => Err(self.error(format!("the name `{}` is given twice", value.name))),
                }
            })
            .collect()
    }

    fn find(&self, name: &str) -> Option<ValueId> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).copied()
    }

    fn op(&mut self, op: &'a proto::Operation) -> Result<Op> {
        let first_output = op.outputs.first().map(|o| o.name.as_str());
        let name = op.attributes.get("name").and_then(values::as_string).or(first_output).unwrap_or(&op.r#type);
        let owner = format!("function `{}`, op `{name}` ({})", self.name, op.r#type);
        let mut inputs = ParameterMap::new();
        for (parameter, argument) in &op.inputs {
            inputs.insert(parameter.into(), self.argument(&owner, parameter, argument)?);
        }
        let mut attributes = ParameterMap::new();
        for (attribute, value) in op.attributes.iter().filter(|(attribute, _)| *attribute != "name") {
            attributes.insert(attribute.into(), self.constant(&owner, attribute, value)?);
        }
        let mut blocks = Vec::with_capacity(op.blocks.len());
        for block in &op.blocks {
            self.scopes.push(HashMap::new());
            blocks.push(self.block(block)?);
            self.scopes.pop();
        }
        let outputs = self.declare(&op.outputs)?;
        if op.r#type == "const" {
            let (Some(value), [id]) = (attributes.get("val"), outputs.as_slice()) else {
                return Err(encoding(owner, "a const has one output and the attribute `val`").into());
            };
            let declared = &mut self.values[id.0 as usize];
            if matches!(&declared.ty, ValueType::Tensor(ty) if *ty != value.ty) {
                let problem = format!("declared as {}, the value is {}", declared.ty, value.ty);
                return Err(encoding(owner, problem).into());
            }
            declared.constant = Some(value.clone());
        }
        Ok(Op {
            operator: op.r#type.as_str().into(),
            name: name.to_owned(),
            inputs,
            attributes,
            outputs: outputs.into(),
            blocks,
        })
    }

    fn argument(&self, owner: &str, parameter: &str, argument: &proto::Argument) -> Result<Argument> {
        use proto::argument::binding::Binding as Bound;
        argument
            .arguments
            .iter()
            .map(|one| match &one.binding {
                Some(Bound::Name(name)) => self.find(name).map(Binding::Value).ok_or_else(|| {
                    encoding(owner, format!("`{parameter}` is `{name}`, which is not defined before it")).into()
                }),
                Some(Bound::Value(value)) => {
                    self.constant(owner, parameter, value).map(|constant| Binding::Constant(Box::new(constant)))
                }
                None => Err(encoding(owner, format!("`{parameter}` is bound to nothing")).into()),
            })
            .collect()
    }

    fn constant(&self, owner: &str, parameter: &str, value: &proto::Value) -> Result<Constant> {
        match values::decode(value).map_err(|problem| encoding(owner, format!("`{parameter}`: {problem}")))? {
            values::Decoded::Constant(constant) => Ok(constant),
            values::Decoded::Blob(ty, blob) => {
                let place = BlobPlace { file_name: blob.file_name.clone(), offset: blob.offset };
                let data = self.blobs.load(&place, &ty, &format!("{owner}, {parameter}"))?;
                Ok(Constant { ty, data })
            }
        }
    }

    fn error(&self, problem: impl Into<String>) -> anec_base::Error {
        encoding(format!("function `{}`", self.name), problem).into()
    }
}

/// Adds a symbol of its own for a dimension without known sizes.
fn fresh(input: &str, axis: usize, lengths: &mut BTreeMap<Symbol, SymbolRange>) -> Dim {
    let mut name = format!("{input}_{axis}");
    while lengths.contains_key(&Symbol::new(&name)) {
        name.push('_');
    }
    let symbol = Symbol::new(&name);
    lengths.insert(symbol.clone(), SymbolRange::Range { lower: 1, upper: None, default: 1 });
    Dim::symbol(&symbol)
}
