//! Round trips: decoding an encoded program gives the same program.

use std::cell::RefCell;
use std::sync::Arc;

use coreml_proto::Message;
use proptest::prelude::*;
use smallvec::smallvec;

use super::*;
use crate::constant::Content;
use crate::ir::{Binding, Block, Function, Op, ParameterMap, Program, Value, ValueId};
use crate::types::{DataType, Opset, ValueType};

fn message_of(bytes: &[u8]) -> coreml_proto::mil_spec::Program {
    Message::decode(bytes).unwrap()
}

/// A weight file in memory that stores constants as they are placed.
#[derive(Default)]
struct Memory(RefCell<Vec<Constant>>);

impl BlobSink for &Memory {
    fn place(&mut self, constant: &Constant, _: &str) -> Result<BlobPlace> {
        let mut constants = self.0.borrow_mut();
        let found = constants.iter().position(|c| c == constant);
        let index = found.unwrap_or_else(|| {
            constants.push(constant.clone());
            constants.len() - 1
        });
        Ok(BlobPlace { file_name: "@model_path/weights/weight.bin".into(), offset: index as u64 })
    }
}

impl BlobSource for Memory {
    fn load(&self, place: &BlobPlace, ty: &TensorType, owner: &str) -> Result<Data> {
        match self.0.borrow().get(place.offset as usize) {
            Some(constant) if constant.ty == *ty => Ok(constant.data.clone()),
            _ => Err(encoding(owner, "no such blob").into()),
        }
    }
}

struct Zeros(u64);

impl Content for Zeros {
    fn length(&self) -> u64 {
        self.0
    }
    fn granule(&self) -> u64 {
        1
    }
    fn read(&self, _: u64, out: &mut [u8]) -> Result<()> {
        out.fill(0);
        Ok(())
    }
}

/// Draws from random bits, so that proptest can shrink a program by shrinking them.
struct Draw(std::vec::IntoIter<u32>);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0.next().unwrap_or(0) as usize % n
    }

    fn ty(&mut self) -> TensorType {
        use DataType::*;
        let dtypes = [Fp16, Fp32, Fp64, Bf16, Bool, Int4, Int8, Int16, Int32, Int64, Uint1, Uint3, Uint6, Uint16];
        let dtype = dtypes[self.below(dtypes.len())];
        let rank = self.below(4);
        TensorType::new(dtype, (0..rank).map(|_| self.below(5) as u64).collect::<Vec<_>>())
    }

    fn constant(&mut self) -> Constant {
        if self.below(8) == 0 {
            return Constant::string(["", "same", "caf\u{e9}"][self.below(3)]);
        }
        let ty = self.ty();
        let length = ty.bytes().unwrap();
        // types that every opset keeps in weight files; others are written in place and come back as literals
        let blob = matches!(ty.dtype, DataType::Fp16 | DataType::Fp32 | DataType::Int8 | DataType::Uint6);
        if length > 0 && blob && self.below(4) == 0 {
            return Constant::content(ty, Arc::new(Zeros(length)));
        }
        let most = if ty.dtype == DataType::Bool { 2 } else { 256 };
        Constant::literal(ty, (0..length).map(|_| self.below(most) as u8).collect::<Vec<u8>>())
    }
}

struct Maker {
    draw: Draw,
    values: Vec<Value>,
}

impl Maker {
    fn define(&mut self, ty: ValueType, constant: Option<Constant>) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        self.values.push(Value { name: format!("v{}", id.0), ty, constant });
        id
    }

    fn block(&mut self, visible: &mut Vec<ValueId>, depth: usize) -> Block {
        let outer = visible.len();
        let inputs: Vec<ValueId> = (0..if depth > 0 { self.draw.below(3) } else { 0 })
            .map(|_| {
                let ty = self.draw.ty();
                self.define(ty.into(), None)
            })
            .collect();
        visible.extend(&inputs);
        let mut ops = Vec::new();
        for _ in 0..self.draw.below(6) {
            let op = self.op(visible, depth);
            visible.extend(&op.outputs);
            ops.push(op);
        }
        let outputs = (0..self.draw.below(3)).filter_map(|_| visible.last().copied()).collect();
        visible.truncate(outer);
        Block { inputs, ops, outputs }
    }

    fn op(&mut self, visible: &mut Vec<ValueId>, depth: usize) -> Op {
        let mut op = Op {
            operator: ["add", "not_in_any_catalogue", "concat"][self.draw.below(3)].into(),
            name: format!("op{}", self.draw.below(9)),
            inputs: ParameterMap::new(),
            attributes: ParameterMap::new(),
            outputs: smallvec![],
            blocks: Vec::new(),
        };
        match self.draw.below(4) {
            0 => {
                let constant = self.draw.constant();
                op.operator = "const".into();
                op.outputs = smallvec![self.define(constant.ty.clone().into(), Some(constant.clone()))];
                op.attributes.insert("val".into(), constant);
                return op;
            }
            1 => {
                op.operator = "constexpr_anything".into();
                let in_place = self.draw.constant();
                op.attributes.insert("scale".into(), in_place);
                let in_place = self.draw.constant();
                op.inputs.insert("data".into(), smallvec![Binding::Constant(Box::new(in_place))]);
            }
            2 if depth < 3 => {
                op.operator = "cond".into();
                op.blocks = (0..2).map(|_| self.block(visible, depth + 1)).collect();
            }
            _ => {}
        }
        if !visible.is_empty() {
            for parameter in ["x", "y"] {
                let several = 1 + self.draw.below(2);
                let bound = (0..several).map(|_| Binding::Value(visible[self.draw.below(visible.len())]));
                op.inputs.insert(parameter.into(), bound.collect());
            }
        }
        for _ in 0..self.draw.below(3) {
            let ty = match self.draw.below(6) {
                0 => ValueType::Opaque("dict<int64, fp32>".into()),
                1 => {
                    let mut ty = self.draw.ty();
                    ty.shape.push(Dim::Unknown);
                    ty.into()
                }
                _ => self.draw.ty().into(),
            };
            let output = self.define(ty, None);
            op.outputs.push(output);
        }
        op
    }
}

fn program(bits: Vec<u32>) -> Program {
    let mut draw = Draw(bits.into_iter());
    let functions = (0..1 + draw.below(3))
        .map(|i| {
            let mut maker = Maker { draw: Draw(std::mem::take(&mut draw.0)), values: Vec::new() };
            let t = Symbol::new("T");
            let flexible = TensorType::new(DataType::Fp16, [Dim::Fixed(1), Dim::symbol(&t).times(&Dim::Fixed(2))]);
            let mut inputs = vec![maker.define(flexible.into(), None)];
            let ty = maker.draw.ty();
            inputs.push(maker.define(ValueType::State(ty), None));
            let block = maker.block(&mut inputs.clone(), 0);
            let opset = Opset::ALL[maker.draw.below(5)];
            let lengths = BTreeMap::from([(t, SymbolRange::Enumerated(vec![4, 1]))]);
            let name = if i == 0 { "main".to_owned() } else { format!("other{i}") };
            draw = Draw(maker.draw.0);
            Function { name, opset, inputs, values: maker.values, block, lengths }
        })
        .collect::<Vec<_>>();
    Program { functions, default_function: "main".into() }
}

fn dimensions(program: &Program) -> BTreeMap<String, Dimensions> {
    let of = |f: &Function| {
        let mut known = Dimensions { lengths: f.lengths.clone(), ..Default::default() };
        for value in f.tensor_inputs() {
            let ty = value.ty.tensor().unwrap();
            for (axis, dim) in ty.shape.iter().enumerate().filter(|(_, d)| d.fixed().is_none()) {
                known.dims.insert((value.name.clone(), axis), dim.clone());
            }
        }
        known
    };
    program.functions.iter().map(|f| (f.name.clone(), of(f))).collect()
}

/// Renumbers values in the order in which the decoder sees them; the format doesn't record the arena's order.
fn renumber(program: &Program) -> Program {
    fn block(old: &Block, f: &Function, map: &mut BTreeMap<ValueId, ValueId>, values: &mut Vec<Value>) -> Block {
        let mut declare = |ids: &[ValueId], map: &mut BTreeMap<ValueId, ValueId>| -> Vec<ValueId> {
            ids.iter()
                .map(|id| {
                    values.push(f.value(*id).clone());
                    let new = ValueId(values.len() as u32 - 1);
                    map.insert(*id, new);
                    new
                })
                .collect()
        };
        let inputs = declare(&old.inputs, map);
        let mut ops = Vec::new();
        for op in &old.ops {
            let mut op = op.clone();
            for binding in op.bindings_mut() {
                if let Binding::Value(id) = binding {
                    *id = map[id];
                }
            }
            op.blocks = op.blocks.iter().map(|b| block(b, f, map, values)).collect();
            for id in &mut op.outputs {
                values.push(f.value(*id).clone());
                map.insert(*id, ValueId(values.len() as u32 - 1));
                *id = map[id];
            }
            ops.push(op);
        }
        Block { inputs, ops, outputs: old.outputs.iter().map(|id| map[id]).collect() }
    }
    let functions = program.functions.iter().map(|f| {
        let (mut map, mut values) = (BTreeMap::new(), Vec::new());
        for id in &f.inputs {
            values.push(f.value(*id).clone());
            map.insert(*id, ValueId(values.len() as u32 - 1));
        }
        let block = block(&f.block, f, &mut map, &mut values);
        let inputs = f.inputs.iter().map(|id| map[id]).collect();
        Function { inputs, block, values, ..f.clone() }
    });
    Program { functions: functions.collect(), ..program.clone() }
}

proptest! {
    #[test]
    fn decoding_inverts_encoding(bits in proptest::collection::vec(any::<u32>(), 0..400)) {
        let program = renumber(&program(bits));
        let memory = Memory::default();
        let encoded = encode(&program, &mut &memory).unwrap();
        let message = message_of(&encoded);
        let decoded = decode(&message, &dimensions(&program), &memory).unwrap();
        prop_assert_eq!(&decoded, &program);
        // encoding is deterministic, op by op and as one message
        let again = encode(&decoded, &mut &memory).unwrap();
        prop_assert_eq!(&encoded, &again);
        prop_assert_eq!(encoded, message.encode_to_vec());
    }
}

fn one_op(op: Op, values: Vec<Value>) -> Program {
    let outputs = op.outputs.to_vec();
    let block = Block { inputs: vec![], ops: vec![op], outputs };
    let function = Function {
        name: "main".into(),
        opset: Opset::CoreMl8,
        inputs: vec![],
        values,
        block,
        lengths: BTreeMap::new(),
    };
    Program::single(function)
}

fn constant_op(constant: Constant, declared: ValueType, name: &str) -> Program {
    let value = Value { name: name.into(), ty: declared, constant: Some(constant.clone()) };
    let op = Op {
        operator: "const".into(),
        name: name.into(),
        inputs: ParameterMap::new(),
        attributes: ParameterMap::from_iter([("val".into(), constant)]),
        outputs: smallvec![ValueId(0)],
        blocks: vec![],
    };
    one_op(op, vec![value])
}

#[test]
fn a_program_that_the_format_forbids_is_not_written() {
    let problem = |program: &Program| encode(program, &mut &Memory::default()).unwrap_err().to_string();
    let fp16 = ValueType::Tensor(TensorType::scalar(DataType::Fp16));

    let bad_name = constant_op(Constant::fp16(1.0), fp16.clone(), "layers.0");
    assert_eq!(
        problem(&bad_name),
        "function `main`: the name `layers.0` has the character `.`; expected letters, digits, `_` or `@`"
    );
    let mut wrong_type = constant_op(Constant::fp32(1.0), fp16.clone(), "c");
    assert_eq!(problem(&wrong_type), "function `main`, op `c`: declared as fp16, the value is fp32");
    wrong_type.functions[0].block.outputs.push(ValueId(7));
    assert_eq!(problem(&wrong_type), "function `main`: value 7 is used, there are 1");
    let short = constant_op(Constant::literal(TensorType::scalar(DataType::Fp16), [1u8]), fp16.clone(), "c");
    assert_eq!(problem(&short), "function `main`, op `c`: the data of `val` doesn't fill its type fp16");
    let mut twice = constant_op(Constant::fp16(1.0), fp16, "c");
    let again = twice.functions[0].block.ops[0].clone();
    twice.functions[0].block.ops.push(again);
    assert_eq!(problem(&twice), "function `main`: the name `c` is given twice");
    let function = twice.functions[0].clone();
    let mut same = constant_op(Constant::fp16(1.0), ValueType::Tensor(TensorType::scalar(DataType::Fp16)), "c");
    same.functions.push(Function { block: Block::default(), ..function });
    assert_eq!(problem(&same), "program: two functions are called `main`");
}

#[test]
fn a_list_is_written_as_one() {
    let labels = Constant {
        ty: TensorType::new(DataType::String, [2u64]),
        data: Data::Strings(Arc::new(["cat".to_owned(), "dog".to_owned()])),
    };
    let program = constant_op(labels, ValueType::Opaque("list<string, 2>".into()), "labels");
    let memory = Memory::default();
    let encoded = message_of(&encode(&program, &mut &memory).unwrap());
    let op = &encoded.functions["main"].block_specializations["CoreML8"].operations[0];
    assert_eq!(op.outputs[0].r#type, op.attributes["val"].r#type);
    assert_eq!(decode(&encoded, &BTreeMap::new(), &memory).unwrap(), program);
}

#[test]
fn an_unknown_input_dimension_is_a_symbol_of_its_own() {
    let ty = TensorType::new(DataType::Fp16, [Dim::Unknown, Dim::Fixed(2), Dim::Unknown]);
    let value = Value { name: "x".into(), ty: ty.into(), constant: None };
    let op = Op {
        operator: "relu".into(),
        name: "y".into(),
        inputs: ParameterMap::from_iter([("x".into(), smallvec![Binding::Value(ValueId(0))])]),
        attributes: ParameterMap::new(),
        outputs: smallvec![],
        blocks: vec![],
    };
    let mut program = one_op(op, vec![value]);
    program.functions[0].inputs = vec![ValueId(0)];
    let memory = Memory::default();
    let encoded = message_of(&encode(&program, &mut &memory).unwrap());
    let decoded = decode(&encoded, &BTreeMap::new(), &memory).unwrap();
    let function = &decoded.functions[0];
    assert_eq!(function.value(ValueId(0)).ty.to_string(), "tensor<fp16, [x_0, 2, x_2]>");
    let lengths = &function.lengths[&Symbol::new("x_2")];
    assert_eq!(*lengths, SymbolRange::Range { lower: 1, upper: None, default: 1 });
}

#[test]
fn a_broken_message_names_the_place() {
    let fp16 = ValueType::Tensor(TensorType::scalar(DataType::Fp16));
    let memory = Memory::default();
    let good = message_of(&encode(&constant_op(Constant::fp16(1.0), fp16, "c"), &mut &memory).unwrap());
    let problem = |damage: &dyn Fn(&mut coreml_proto::mil_spec::Program)| {
        let mut program = good.clone();
        damage(&mut program);
        decode(&program, &BTreeMap::new(), &memory).unwrap_err().to_string()
    };
    fn ops(p: &mut coreml_proto::mil_spec::Program) -> &mut Vec<coreml_proto::mil_spec::Operation> {
        let function = p.functions.get_mut("main").unwrap();
        &mut function.block_specializations.get_mut("CoreML8").unwrap().operations
    }
    assert_eq!(problem(&|p| p.version = 2), "program: version 2, expected 1");
    assert_eq!(problem(&|p| p.functions.clear()), "program: there are no functions");
    assert_eq!(
        problem(&|p| p.functions.get_mut("main").unwrap().opset = "CoreML4".into()),
        "function `main`: opset `CoreML4` is not known"
    );
    assert_eq!(
        problem(&|p| p.functions.get_mut("main").unwrap().opset = "CoreML7".into()),
        "function `main`: no block for opset CoreML7, only for [CoreML8]"
    );
    assert_eq!(problem(&|p| ops(p)[0].outputs[0].r#type = None), "function `main`: value `c`: no type is declared");
    assert_eq!(
        problem(&|p| {
            let first = ops(p)[0].clone();
            ops(p).push(first);
        }),
        "function `main`: the name `c` is given twice"
    );
    assert_eq!(
        problem(&|p| {
            ops(p)[0].attributes.remove("val");
        }),
        "function `main`, op `c` (const): a const has one output and the attribute `val`"
    );
    assert_eq!(problem(&|p| ops(p).clear()), "function `main`: the block's output `c` is not defined");
    assert_eq!(
        problem(&|p| {
            let name = coreml_proto::mil_spec::argument::binding::Binding::Name("later".into());
            let argument = coreml_proto::mil_spec::Argument {
                arguments: vec![coreml_proto::mil_spec::argument::Binding { binding: Some(name) }],
            };
            ops(p)[0].inputs.insert("x".into(), argument);
        }),
        "function `main`, op `c` (const): `x` is `later`, which is not defined before it"
    );
}
