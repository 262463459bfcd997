//! A function of the demo model, broken in every way that the verifier knows of: it finds each, and names the op.

use std::collections::BTreeMap;

use anec::mil::Data;
use anec::mil::verify::{verify, verify_function};
use anec::mil::{
    Binding, Block, Constant, DataType, Dim, Function, Op, Opset, Program, Symbol, SymbolRange, TensorType, Value,
    ValueId, ValueType,
};

use crate::common::emitted;

/// The layers of the demo model, for 1 to 4 tokens: int8 convolutions, norms, attention, states.
fn emitted_function() -> Function {
    let manifest = emitted::manifest("demo/model", &["context=64", "activations=native"]);
    let (name, program) = emitted::programs(&manifest).swap_remove(0);
    assert!(name.starts_with("layers"));
    let function = program.functions.into_iter().next().unwrap();
    assert_eq!(verify_function(&function), []);
    function
}

/// Where the first op of an operator is.
fn first(function: &Function, operator: &str) -> usize {
    let found = function.block.ops.iter().position(|op| op.operator == operator);
    found.unwrap_or_else(|| panic!("no {operator}"))
}

fn op<'a>(function: &'a mut Function, operator: &str) -> &'a mut Op {
    let at = first(function, operator);
    &mut function.block.ops[at]
}

/// The first result of the first op of an operator.
fn result(function: &Function, operator: &str) -> ValueId {
    function.block.ops[first(function, operator)].outputs[0]
}

/// Value bound to a parameter of the first op with this operator.
fn operand(function: &Function, operator: &str, parameter: &str) -> ValueId {
    match function.block.ops[first(function, operator)].input(parameter) {
        Some(Binding::Value(id)) => *id,
        other => panic!("{parameter} of {operator} is {other:?}"),
    }
}

fn bind(function: &mut Function, operator: &str, parameter: &str, id: ValueId) {
    op(function, operator).inputs.insert(parameter.into(), [Binding::Value(id)].into());
}

fn input(function: &Function, name: &str) -> ValueId {
    *function.inputs.iter().find(|id| function.value(**id).name == name).unwrap_or_else(|| panic!("no {name}"))
}

fn value(function: &mut Function, id: ValueId) -> &mut Value {
    &mut function.values[id.0 as usize]
}

fn tensor(function: &mut Function, id: ValueId) -> &mut TensorType {
    match &mut value(function, id).ty {
        ValueType::Tensor(ty) | ValueType::State(ty) => ty,
        ValueType::Opaque(text) => panic!("{text}"),
    }
}

/// Name of a defect, the change, the op or value that must be named, and the problem.
type Break = (&'static str, fn(&mut Function), &'static str, &'static str);

const BREAKS: &[Break] = &[
    // order, scopes, single definition
    (
        "an op before what it reads",
        |f| {
            let at = first(f, "rsqrt");
            f.block.ops.swap(at, at + 1);
        },
        "layers_0_attn_norm_mul_2",
        "`layers_0_attn_norm_rsqrt` is read before it is defined",
    ),
    (
        "an op that is never there",
        |f| drop(f.block.ops.remove(first(f, "rsqrt"))),
        "layers_0_attn_norm_mul_2",
        "`layers_0_attn_norm_rsqrt` is read before it is defined",
    ),
    (
        "an op twice",
        |f| f.block.ops.insert(first(f, "rsqrt"), f.block.ops[first(f, "rsqrt")].clone()),
        "layers_0_attn_norm_rsqrt",
        "`layers_0_attn_norm_rsqrt` is defined a second time",
    ),
    (
        "an op that gives an input",
        |f| op(f, "rsqrt").outputs = [input(f, "hidden")].into_iter().collect(),
        "layers_0_attn_norm_rsqrt",
        "`hidden` is defined a second time",
    ),
    (
        "an op that reads itself",
        |f| bind(f, "rsqrt", "x", result(f, "rsqrt")),
        "layers_0_attn_norm_rsqrt",
        "`layers_0_attn_norm_rsqrt` is read before it is defined",
    ),
    (
        "an op within a block, its result used outside",
        |f| {
            let at = first(f, "rsqrt");
            let inner = f.block.ops.remove(at);
            let block = Block { inputs: vec![], outputs: inner.outputs.to_vec(), ops: vec![inner] };
            f.block.ops[at].blocks = vec![block];
        },
        "layers_0_attn_norm_mul_2",
        "`layers_0_attn_norm_rsqrt` is read before it is defined",
    ),
    (
        "a value of a block that has ended",
        |f| {
            let at = first(f, "rsqrt");
            let inner = f.block.ops.remove(at);
            let block = Block { inputs: vec![], outputs: inner.outputs.to_vec(), ops: vec![inner] };
            f.block.ops[at - 1].blocks = vec![block];
        },
        "layers_0_attn_norm_mul_2",
        "`layers_0_attn_norm_rsqrt` is read after the block that defines it has ended",
    ),
    ("an output that nothing gives", |f| drop(f.block.ops.pop()), "hidden_out", "an output is never defined"),
    (
        "an id beyond the values",
        |f| bind(f, "rsqrt", "x", ValueId(u32::MAX)),
        "",
        "value 4294967295 is used, there are",
    ),
    // declared types
    (
        "a declared element type",
        |f| tensor(f, result(f, "rsqrt")).dtype = DataType::Fp32,
        "layers_0_attn_norm_rsqrt",
        "`layers_0_attn_norm_rsqrt` is declared tensor<fp32, [1, 1, T, 1]>, but tensor<fp16, [1, 1, T, 1]> follows",
    ),
    (
        "a declared size",
        |f| tensor(f, result(f, "conv")).shape[1] = Dim::Fixed(191),
        "layers_0_attn_q_proj",
        "`layers_0_attn_q_proj` is declared tensor<fp16, [1, 191, T, 1]>, but tensor<fp16, [1, 192, T, 1]> follows",
    ),
    (
        "a declared size where T is",
        |f| tensor(f, result(f, "conv")).shape[2] = Dim::Fixed(1),
        "layers_0_attn_q_proj",
        "`layers_0_attn_q_proj` is declared tensor<fp16, [1, 192, 1, 1]>, but tensor<fp16, [1, 192, T, 1]> follows",
    ),
    (
        "a declared symbol",
        |f| tensor(f, result(f, "conv")).shape[2] = Dim::symbol(&Symbol::new("S")),
        "layers_0_attn_q_proj",
        "`layers_0_attn_q_proj` is declared tensor<fp16, [1, 192, S, 1]>, but tensor<fp16, [1, 192, T, 1]> follows",
    ),
    (
        "a declared rank",
        |f| drop(tensor(f, result(f, "conv")).shape.pop()),
        "layers_0_attn_q_proj",
        "`layers_0_attn_q_proj` is declared tensor<fp16, [1, 192, T]>, but tensor<fp16, [1, 192, T, 1]> follows",
    ),
    (
        "one result more",
        |f| {
            let more = result(f, "silu");
            op(f, "rsqrt").outputs.push(more);
        },
        "layers_0_attn_norm_rsqrt",
        "2 results are declared, 1 follow",
    ),
    (
        "an input of another size",
        |f| tensor(f, input(f, "hidden")).shape[1] = Dim::Fixed(255),
        "layers_0_attn_norm_abs",
        "`layers_0_attn_norm_abs` is declared tensor<fp16, [1, 256, T, 1]>, but tensor<fp16, [1, 255, T, 1]> follows",
    ),
    // constants
    (
        "a constant that is too short",
        |f| {
            let id = operand(f, "rsqrt", "epsilon");
            let short = Constant::literal(TensorType::scalar(DataType::Fp16), [1u8]);
            let op = f.block.ops.iter_mut().find(|op| op.outputs[..] == [id]).unwrap();
            op.attributes.insert("val".into(), short.clone());
            f.values[id.0 as usize].constant = Some(short);
        },
        "layers_0_attn_norm_rsqrt_epsilon",
        "the data of `val` doesn't fill its type fp16",
    ),
    (
        "a weight that is too short",
        |f| {
            let weight = op(f, "constexpr_blockwise_shift_scale").inputs.get_mut("data").unwrap();
            let Binding::Constant(data) = &mut weight[0] else { panic!() };
            data.data = Data::Literal(vec![0; 100].into());
        },
        "layers_0_attn_q_proj_weight",
        "the data of `data` doesn't fill its type tensor<int8, [192, 256, 1, 1]>",
    ),
    (
        "a constant declared as another type",
        |f| tensor(f, operand(f, "rsqrt", "epsilon")).dtype = DataType::Fp32,
        "layers_0_attn_norm_rsqrt_epsilon",
        "`layers_0_attn_norm_rsqrt_epsilon` is declared fp32, the value is fp16",
    ),
    (
        "a constant that its value doesn't know",
        |f| value(f, operand(f, "rsqrt", "epsilon")).constant = Some(Constant::fp16(1.0)),
        "layers_0_attn_norm_rsqrt_epsilon",
        "isn't known to be the constant",
    ),
    (
        "a result that claims to be a constant",
        |f| value(f, result(f, "rsqrt")).constant = Some(Constant::fp16(1.0)),
        "layers_0_attn_norm_rsqrt",
        "`layers_0_attn_norm_rsqrt` is a constant; expected the result of a const",
    ),
    (
        "a const without a value",
        |f| op(f, "const").attributes.clear(),
        "reduce_sum_axes",
        "expected the attribute `val`, one result and nothing else",
    ),
    (
        "a scale that doesn't divide the weight",
        |f| {
            let scale = op(f, "constexpr_blockwise_shift_scale").inputs.get_mut("scale").unwrap();
            let Binding::Constant(scale) = &mut scale[0] else { panic!() };
            **scale = Constant::fp16_tensor(&[7, 1, 1, 1], &[0.5; 7]);
        },
        "layers_0_attn_q_proj_weight",
        "`scale` has shape [7, 1, 1, 1], which doesn't divide [192, 256, 1, 1]",
    ),
    // parameters
    (
        "a parameter left out",
        |f| drop(op(f, "conv").inputs.remove("strides")),
        "layers_0_attn_q_proj",
        "parameter `strides` is missing",
    ),
    (
        "an unknown parameter",
        |f| bind(f, "silu", "alpha", operand(f, "rsqrt", "epsilon")),
        "layers_0_mlp_silu",
        "`silu` has no parameter `alpha`",
    ),
    (
        "an unknown attribute",
        |f| drop(op(f, "silu").attributes.insert("alpha".into(), Constant::fp16(1.0))),
        "layers_0_mlp_silu",
        "`silu` has no parameter `alpha`",
    ),
    (
        "a computed value where a constant must be",
        |f| bind(f, "rsqrt", "epsilon", operand(f, "rsqrt", "x")),
        "layers_0_attn_norm_rsqrt",
        "parameter `epsilon` must be a constant",
    ),
    (
        "two values where one must be",
        |f| {
            let x = Binding::Value(input(f, "hidden"));
            op(f, "silu").inputs.insert("x".into(), vec![x.clone(), x].into());
        },
        "layers_0_mlp_silu",
        "parameter `x` has 2 values; expected one",
    ),
    (
        "a block where none can be",
        |f| op(f, "silu").blocks = vec![Block::default()],
        "layers_0_mlp_silu",
        "`silu` has 1 blocks",
    ),
    // element types
    (
        "an element type that the operator doesn't take",
        |f| tensor(f, operand(f, "silu", "x")).dtype = DataType::Int32,
        "layers_0_mlp_silu",
        "`x` is int32; expected fp16 or fp32",
    ),
    (
        "two element types",
        |f| tensor(f, operand(f, "add", "y")).dtype = DataType::Fp32,
        "layers_0_attn_norm_add",
        "`x` is fp16 and `y` is fp32; both must be the same type",
    ),
    // states
    (
        "a state read as a tensor",
        |f| bind(f, "silu", "x", input(f, "k_cache_0")),
        "layers_0_mlp_silu",
        "`x` is a state; expected what `read_state` reads from it",
    ),
    (
        "a tensor read as a state",
        |f| bind(f, "read_state", "input", input(f, "hidden")),
        "layers_0_attn_cache_read_state",
        "`input` is tensor<fp16, [1, 256, T, 1]>; a state is needed",
    ),
    (
        "a state of another shape",
        |f| tensor(f, input(f, "k_cache_0")).shape[1] = Dim::Fixed(7),
        "layers_0_attn_cache_read_state",
        "follows",
    ),
    (
        "something of another shape written to a state",
        |f| bind(f, "write_state", "data", input(f, "hidden")),
        "layers_0_attn_cache_write_state",
        "what is written tensor<fp16, [1, 256, T, 1]>",
    ),
    (
        "a value read from a state before it is written",
        |f| {
            let read = result(f, "read_state");
            let write = first(f, "write_state");
            for op in &mut f.block.ops[write + 1..] {
                if op.operator == "read_state" {
                    let again = op.outputs[0];
                    let later = |op: &mut Op| {
                        for binding in op.bindings_mut().filter(|b| **b == Binding::Value(again)) {
                            *binding = Binding::Value(read);
                        }
                    };
                    f.block.ops[write + 1..].iter_mut().for_each(later);
                    return;
                }
            }
        },
        "",
        "was read from a state before `layers_0_attn_cache_write_state` wrote it",
    ),
    (
        "a state without a fixed shape",
        |f| tensor(f, input(f, "k_cache_0")).shape[1] = Dim::symbol(&Symbol::new("T")),
        "k_cache_0",
        "expected fp16 and a fixed shape",
    ),
    (
        "a state of fp32",
        |f| tensor(f, input(f, "k_cache_0")).dtype = DataType::Fp32,
        "k_cache_0",
        "expected fp16 and a fixed shape",
    ),
    ("a state as an output", |f| f.block.outputs.push(input(f, "k_cache_0")), "k_cache_0", "expected a tensor"),
    // signature
    (
        "an input as an output",
        |f| f.block.outputs.push(input(f, "hidden")),
        "hidden",
        "an output is an input; expected the result of an op",
    ),
    ("an output twice", |f| f.block.outputs.push(f.block.outputs[0]), "hidden_out", "it is an output twice"),
    (
        "a symbol without lengths",
        |f| f.lengths.clear(),
        "hidden",
        "an input is tensor<fp16, [1, 256, T, 1]>; expected lengths for the symbol T",
    ),
    (
        "lengths that nothing can have",
        |f| {
            f.lengths =
                BTreeMap::from([(Symbol::new("T"), SymbolRange::Range { lower: 3, upper: Some(2), default: 3 })])
        },
        "",
        "symbol T: 3 to 2 with default 3; expected 1 <= lower <= default <= upper",
    ),
    (
        "a default length out of range",
        |f| {
            f.lengths =
                BTreeMap::from([(Symbol::new("T"), SymbolRange::Range { lower: 1, upper: Some(4), default: 5 })])
        },
        "",
        "symbol T: 1 to 4 with default 5",
    ),
    // operators and opsets
    (
        "an operator that nobody knows",
        |f| op(f, "silu").operator = "swish".into(),
        "layers_0_mlp_silu",
        "the operator `swish` is not in the catalogue",
    ),
    (
        "an older opset",
        |f| f.opset = Opset::CoreMl7,
        "layers_0_attn_q_proj_weight",
        "`constexpr_blockwise_shift_scale` needs CoreML8, the function is CoreML7",
    ),
    (
        "states in an older opset",
        |f| f.opset = Opset::CoreMl7,
        "k_cache_0",
        "a state needs CoreML8, the function is CoreML7",
    ),
    // names
    (
        "a name with a dot",
        |f| value(f, result(f, "silu")).name = "layers.0.silu".into(),
        "layers.0.silu",
        "has the character `.`; expected letters, digits, `_` or `@`",
    ),
    (
        "a name that is a word of the language",
        |f| value(f, result(f, "silu")).name = "tensor".into(),
        "tensor",
        "the name `tensor` is a word of the language",
    ),
    ("a name twice", |f| value(f, result(f, "silu")).name = "hidden".into(), "hidden", "two values have this name"),
    ("a function's name", |f| f.name = "1st".into(), "", "the name `1st` starts with `1`; expected a letter or `_`"),
];

#[test]
fn every_break_is_found_and_named() {
    let whole = emitted_function();
    let mut missed = String::new();
    for (what, damage, op, problem) in BREAKS {
        let mut broken = whole.clone();
        damage(&mut broken);
        let findings = verify_function(&broken);
        if !findings.iter().any(|f| (f.op == *op || op.is_empty()) && f.problem.contains(problem)) {
            missed += &format!("{what}: expected `{op}: {problem}`, found:\n");
            findings.iter().take(9).for_each(|finding| missed += &format!("    {finding}\n"));
        }
    }
    assert!(missed.is_empty(), "{missed}");
}

#[test]
fn what_is_wrong_with_a_program_is_found() {
    let program = Program::single(emitted_function());
    assert_eq!(verify(&program), []);
    let problems = |damage: &dyn Fn(&mut Program)| {
        let mut broken = program.clone();
        damage(&mut broken);
        verify(&broken).iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(problems(&|p| p.default_function = "start".into()), ["the default function `start` doesn't exist"]);
    assert_eq!(problems(&|p| p.functions.push(p.functions[0].clone())), ["two functions are named `main`"]);
    let another = |p: &mut Program| {
        let mut function = p.functions[0].clone();
        function.name = "other".into();
        function.opset = Opset::CoreMl9;
        p.functions.push(function);
    };
    assert_eq!(problems(&another), ["function `main` is for CoreML8; expected CoreML9 as in the others"]);
}
