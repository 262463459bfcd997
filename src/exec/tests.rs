//! Tests of whole functions: states, symbols, precision, sharing, errors.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::f16;

use super::*;
use anec_mil::{
    Constant, Content, DataType, Dim, Function, FunctionBuilder, Opset, SymbolRange, TensorType, ValueType,
};

const F32: Precision = Precision::F32;
const F16: Precision = Precision::F16;

fn compile(function: &Function, precision: Precision) -> Executable {
    Executable::compile(function, precision, &WeightCache::new()).unwrap()
}

/// `out = weight x` for a symbolic number of tokens `T` from 1 to 8.
fn projection(weight: Constant) -> Function {
    let mut b = FunctionBuilder::new("main", Opset::CoreMl8);
    let tokens = b.symbol("T", SymbolRange::Range { lower: 1, upper: Some(8), default: 1 });
    let columns = weight.ty.shape[1].clone();
    let shape = [Dim::Fixed(1), columns, Dim::Fixed(1), Dim::symbol(&tokens)];
    let x = b.input("x", TensorType::new(DataType::Fp16, shape));
    let weight = b.constant("weight", weight);
    let y = b.op_with_outputs("conv", "projection", [("x", x), ("weight", weight)])[0];
    b.output("out", y);
    b.finish().unwrap()
}

#[test]
fn one_executable_runs_any_number_of_tokens() {
    let function = projection(Constant::fp16_tensor(&[2, 2, 1, 1], &[1.0, 2.0, 0.0, -1.0]));
    let executable = compile(&function, F32);
    let mut state = executable.new_state();
    for tokens in 1..=8 {
        let values: Vec<f32> = (0..2 * tokens).map(|v| v as f32).collect();
        let x = Tensor::new([1, 2, 1, tokens], values);
        let outputs = executable.run(&[("x", &x)], &mut state).unwrap();
        assert_eq!(outputs[0].0, "out");
        assert_eq!(outputs[0].1.shape, [1, 2, 1, tokens]);
        let first = outputs[0].1.floats().unwrap()[0];
        assert_eq!(first, 2.0 * tokens as f32, "row (1, 2) times the column (0, T)");
    }
    let long = Tensor::new([1, 2, 1, 9], vec![0.0; 18]);
    let problem = executable.run(&[("x", &long)], &mut state).unwrap_err().to_string();
    assert!(problem.contains("T = 9"), "{problem}");
}

#[test]
fn inputs_are_checked_before_anything_runs() {
    let executable = compile(&projection(Constant::fp16_tensor(&[1, 2, 1, 1], &[1.0, 1.0])), F32);
    let mut state = executable.new_state();
    let mut problem = |inputs: &[(&str, &Tensor)]| executable.run(inputs, &mut state).unwrap_err().to_string();
    let good = Tensor::new([1, 2, 1, 1], vec![0.0; 2]);
    assert!(problem(&[]).contains("missing"));
    assert!(problem(&[("y", &good)]).contains("`y`"));
    assert!(problem(&[("x", &good), ("x", &good)]).contains("twice"));
    assert!(problem(&[("x", &Tensor::new([1, 3, 1, 1], vec![0.0; 3]))]).contains("[1, 3, 1, 1]"));
    assert!(problem(&[("x", &Tensor::new([2], vec![0.0; 2]))]).contains("[2]"));
    assert!(problem(&[("x", &Tensor::new([1, 2, 1, 1], vec![0; 2]))]).contains("integers"));
    assert!(problem(&[("x", &Tensor::new([1, 2, 1, 1], vec![0.0; 3]))]).contains("3 elements"));
}

/// Writes `x` at `position` of a state of size four, and returns the whole state.
fn cache() -> Function {
    let mut b = FunctionBuilder::new("main", Opset::CoreMl8);
    let x = b.input("x", TensorType::new(DataType::Fp16, [1u64]));
    let position = b.input("position", TensorType::new(DataType::Int32, [1u64]));
    let end = b.input("end", TensorType::new(DataType::Int32, [1u64]));
    let cache = b.state("cache", TensorType::new(DataType::Fp16, [4u64]));
    let before = b.op_with_outputs("read_state", "before", [("input", cache)])[0];
    let arguments = [("x", before), ("update", x), ("begin", position), ("end", end)];
    let updated = b.op_with_outputs("slice_update", "updated", arguments)[0];
    b.op_with_outputs("write_state", "written", [("input", cache), ("data", updated)]);
    let after = b.op_with_outputs("read_state", "after", [("input", cache)])[0];
    let doubled = b.op_with_outputs("add", "doubled", [("x", after), ("y", after)])[0];
    b.output("out", doubled);
    b.finish().unwrap()
}

/// Runs [`cache`] and returns its output.
fn write_to(executable: &Executable, state: &mut State, value: f32, position: i32) -> Vec<f32> {
    let x = Tensor::new([1], vec![value]);
    let (begin, end) = (Tensor::new([1], vec![position]), Tensor::new([1], vec![position + 1]));
    let outputs = executable.run(&[("x", &x), ("position", &begin), ("end", &end)], state).unwrap();
    outputs[0].1.floats().unwrap().to_vec()
}

#[test]
fn a_state_in_half_precision_holds_rounded_numbers_in_half_the_memory() {
    let executable = compile(&cache(), F32);
    let mut state = executable.new_state();
    let wide = state.bytes();
    state.hold_in_half_precision("cache");
    assert_eq!(2 * state.bytes(), wide);
    let write = |state: &mut State, value: f32, position: i32| write_to(&executable, state, value, position);
    // nearest even, and beyond the range
    assert_eq!(write(&mut state, 1.0 + 1.0 / 2048.0, 1), [0.0, 2.0, 0.0, 0.0]);
    let snapshot = state.clone();
    assert_eq!(write(&mut state, 1e6, 3), [0.0, 2.0, 0.0, f32::INFINITY]);
    assert_eq!(snapshot.get("cache").unwrap().floats().unwrap(), [0.0, 1.0, 0.0, 0.0]);
    state.set("cache", Tensor::new([4], vec![0.1; 4]));
    assert_eq!(state.get("cache").unwrap().floats().unwrap(), [f16::from_f32(0.1).to_f32(); 4]);
    assert_eq!(2 * state.bytes(), wide, "what is put in takes no more room");
    // a shared buffer stays unchanged
    let held = state.clone();
    state.reset();
    assert_eq!(write(&mut state, 2.0, 0), [4.0, 0.0, 0.0, 0.0]);
    assert_eq!(held.get("cache").unwrap().floats().unwrap(), [f16::from_f32(0.1).to_f32(); 4]);
    let into_zeros = state.into_zeros().unwrap();
    assert_eq!((2 * into_zeros.bytes(), into_zeros.get("cache").unwrap().floats().unwrap()), (wide, &[0.0; 4][..]));
}

#[test]
fn states_persist_and_a_clone_is_a_snapshot() {
    let executable = compile(&cache(), F32);
    let mut state = executable.new_state();
    let write = |state: &mut State, value: f32, position: i32| write_to(&executable, state, value, position);
    assert_eq!(write(&mut state, 3.0, 1), [0.0, 6.0, 0.0, 0.0]);
    let snapshot = state.clone();
    let address = |state: &State| state.get("cache").unwrap().floats().unwrap().as_ptr();
    assert_eq!(address(&snapshot), address(&state), "a snapshot shares the buffer until one side writes");
    assert_eq!(write(&mut state, 5.0, 3), [0.0, 6.0, 0.0, 10.0]);
    assert_eq!(snapshot.get("cache").unwrap().floats().unwrap(), [0.0, 3.0, 0.0, 0.0]);
    let place = address(&state);
    assert_eq!(write(&mut state, 1.0, 0), [2.0, 6.0, 0.0, 10.0]);
    assert_eq!(address(&state), place, "an update of a state that nobody else holds is made in place");
    state.reset();
    assert_eq!(address(&state), place, "nor is another buffer needed for zeros");
    assert_eq!(write(&mut state, 1.0, 0), [2.0, 0.0, 0.0, 0.0]);
    let held = state.clone();
    assert_eq!(state.into_zeros(), None, "a snapshot has the buffer, too");
    assert_eq!(held.into_zeros(), Some(executable.new_state()));
    let missing = executable.run(
        &[
            ("x", &Tensor::new([1], vec![0.0])),
            ("position", &Tensor::new([1], vec![0])),
            ("end", &Tensor::new([1], vec![1])),
        ],
        &mut State::default(),
    );
    assert!(missing.unwrap_err().to_string().contains("`cache`"));
}

#[test]
fn half_precision_rounds_what_is_declared_so() {
    let mut b = FunctionBuilder::new("main", Opset::CoreMl8);
    let x = b.input("x", TensorType::new(DataType::Fp16, [2u64]));
    let square = b.op_with_outputs("mul", "square", [("x", x), ("y", x)])[0];
    b.output("out", square);
    let function = b.finish().unwrap();
    let x = Tensor::new([2], vec![1.0 + 1.0 / 1024.0, 300.0]);
    let run = |precision| {
        let executable = compile(&function, precision);
        let mut seen = Vec::new();
        let outputs = executable
            .run_with(&[("x", &x)], &mut executable.new_state(), &mut |name, tensor| {
                seen.push((name.to_owned(), tensor.clone()));
            })
            .unwrap();
        assert_eq!(seen, outputs, "the observer sees the one op's result");
        outputs[0].1.floats().unwrap().to_vec()
    };
    let exact = (1.0 + 1.0 / 1024.0f32).powi(2);
    assert_eq!(run(F32), [exact, 90_000.0]);
    assert_eq!(run(F16), [1.0 + 2.0 / 1024.0, f32::INFINITY]);
}

#[test]
fn compressed_weights_stay_compressed_and_are_shared() {
    struct Counted(Vec<u8>, AtomicUsize);
    impl Content for Counted {
        fn length(&self) -> u64 {
            self.0.len() as u64
        }
        fn granule(&self) -> u64 {
            1
        }
        fn read(&self, offset: u64, out: &mut [u8]) -> anec_base::Result<()> {
            self.1.fetch_add(1, Ordering::Relaxed);
            out.copy_from_slice(&self.0[offset as usize..][..out.len()]);
            Ok(())
        }
    }
    let (rows, columns) = (64u64, 32u64);
    let bytes: Vec<u8> = (0..rows * columns).map(|v| (v % 251) as u8).collect();
    let content = Arc::new(Counted(bytes.clone(), AtomicUsize::new(0)));
    let function = |name: &str| {
        let mut b = FunctionBuilder::new(name, Opset::CoreMl8);
        let x = b.input("x", TensorType::new(DataType::Fp16, [1, columns]));
        let data = Constant::content(TensorType::new(DataType::Int8, [rows, columns]), content.clone());
        let scales: Vec<f32> = (0..rows).map(|r| 2f32.powi(r as i32 % 4 - 7)).collect();
        let scale = Constant::fp16_tensor(&[rows, 1], &scales);
        let weight =
            b.op_with_outputs("constexpr_blockwise_shift_scale", "weight", [("data", data), ("scale", scale)])[0];
        let y = b.op_with_outputs("linear", "y", [("x", x), ("weight", weight)])[0];
        b.output("out", y);
        b.finish().unwrap()
    };
    let cache = WeightCache::new();
    let first = Executable::compile(&function("first"), F32, &cache).unwrap();
    let second = Executable::compile(&function("second"), F16, &cache).unwrap();
    assert_eq!(content.1.load(Ordering::Relaxed), 1, "the second function finds the bytes in the cache");
    assert_eq!(cache.bytes(), (rows * columns) as usize);
    let x = Tensor::new([1, columns as usize], vec![1.0; columns as usize]);
    let run = |e: &Executable| e.run(&[("x", &x)], &mut State::default()).unwrap().remove(0).1;
    let found = run(&first);
    for (row, found) in found.floats().unwrap().iter().enumerate() {
        let sum: i32 = bytes[row * 32..][..32].iter().map(|b| i32::from(*b as i8)).sum();
        assert_eq!(*found, sum as f32 * 2f32.powi(row as i32 % 4 - 7));
    }
    let rounded: Vec<f32> = found.floats().unwrap().iter().map(|v| f16::from_f32(*v).to_f32()).collect();
    assert_eq!(run(&second).floats().unwrap(), rounded);
}

#[test]
fn all_unsupported_operators_are_named_at_once() {
    let mut function = cache();
    let value = function.block.ops.iter().position(|op| op.operator == "add").unwrap();
    function.block.ops[value].operator = "oracle".into();
    let other = function.block.ops.iter().position(|op| op.operator == "slice_update").unwrap();
    function.block.ops[other].operator = "crystal_ball".into();
    let error = Executable::compile(&function, F32, &WeightCache::new()).unwrap_err();
    assert!(matches!(&error, ExecError::Unsupported { operators, .. } if operators == &["crystal_ball", "oracle"]));
    assert!(error.to_string().contains("crystal_ball, oracle"));
}

#[test]
fn a_graph_out_of_order_is_refused() {
    let mut function = cache();
    let read = function.block.ops.iter().position(|op| op.operator == "read_state").unwrap();
    let op = function.block.ops.remove(read);
    function.block.ops.push(op);
    let problem = Executable::compile(&function, F32, &WeightCache::new()).unwrap_err().to_string();
    assert!(problem.contains("`before`"), "{problem}");
    let mut function = cache();
    function.values[0].ty = ValueType::Opaque("list".into());
    assert!(Executable::compile(&function, F32, &WeightCache::new()).unwrap_err().to_string().contains("list"));
}

#[test]
fn errors_name_the_op_and_the_shapes() {
    let mut b = FunctionBuilder::new("main", Opset::CoreMl8);
    let x = b.input("x", TensorType { dtype: DataType::Fp32, shape: vec![Dim::Unknown] });
    let y = b.input("y", TensorType { dtype: DataType::Fp32, shape: vec![Dim::Unknown] });
    let sum = b.op_with_outputs("add", "sum", [("x", x), ("y", y)])[0];
    b.output("out", sum);
    let executable = compile(&b.finish().unwrap(), F32);
    let (x, y) = (Tensor::new([2], vec![0.0; 2]), Tensor::new([3], vec![0.0; 3]));
    let problem = executable.run(&[("x", &x), ("y", &y)], &mut State::default()).unwrap_err().to_string();
    assert!(problem.contains("(add)") && problem.contains("[2]") && problem.contains("[3]"), "{problem}");
}

/// `softmax(q kᵀ + mask) v` with `heads` heads of queries and one of keys and values.
fn attention(heads: usize, tokens: usize, slots: usize) -> Function {
    let mut b = FunctionBuilder::new("main", Opset::CoreMl8);
    let mut input =
        |name: &str, shape: [usize; 4]| b.input(name, TensorType::new(DataType::Fp32, shape.map(|size| size as u64)));
    let [q, k, v] =
        [("q", [1, heads, tokens, 32]), ("k", [1, 1, slots, 32]), ("v", [1, 1, slots, 32])].map(|(n, s)| input(n, s));
    let mask = input("mask", [1, 1, tokens, slots]);
    let scores = b.matmul(q, k, false, true);
    let masked = b.op_with_outputs("add", "masked", [("x", scores), ("y", mask)])[0];
    let weights = b.softmax(masked, -1);
    let out = b.matmul(weights, v, false, false);
    b.output("out", out);
    b.finish().unwrap()
}

#[test]
fn threads_that_share_a_head_give_each_row_the_bits_that_it_has_alone() {
    let (heads, slots) = (7, 4096);
    let noise = |shape: [usize; 4], seed: f32| {
        let value = |i: usize| (i as f32 * 0.37 + seed).sin();
        Tensor::new(shape, (0..shape.iter().product()).map(value).collect::<Vec<f32>>())
    };
    let [k, v] = [1.0, 2.0].map(|seed| noise([1, 1, slots, 32], seed));
    for tokens in [1, 3] {
        let q = noise([1, heads, tokens, 32], 3.0);
        let closed = |i: usize| if i % slots > 3000 + i / slots { -1e4 } else { 0.0 };
        let mask = Tensor::new([1, 1, tokens, slots], (0..tokens * slots).map(closed).collect::<Vec<f32>>());
        let run = |q: &Tensor| {
            let executable = compile(&attention(q.shape[1], tokens, slots), F32);
            let mut profile = ExecProfile::default();
            let inputs = [("q", q), ("k", &k), ("v", &v), ("mask", &mask)];
            let outputs = executable.run_profiled(&inputs, &mut executable.new_state(), &mut profile).unwrap();
            assert!(profile.operators().iter().any(|(name, _)| *name == "attention"), "it is one step");
            outputs[0].1.floats().unwrap().to_vec()
        };
        let together = run(&q);
        for (head, own) in together.chunks_exact(tokens * 32).enumerate() {
            let rows = q.floats().unwrap()[head * tokens * 32..][..tokens * 32].to_vec();
            assert_eq!(run(&Tensor::new([1, 1, tokens, 32], rows)), own, "head {head} of {tokens} tokens");
        }
    }
}

#[test]
fn a_step_copied_into_a_group_stays_available_to_other_steps() {
    let mut b = FunctionBuilder::new("main", Opset::CoreMl8);
    let ty = |shape: [u64; 4]| TensorType::new(DataType::Fp16, shape);
    let (q, mask) = (b.input("q", ty([1, 2, 1, 8])), b.input("mask", ty([1, 1, 1, 16])));
    let state = b.state("cache", ty([1, 1, 16, 8]));
    let cache = b.read_state(state);
    let scores = b.matmul(q, cache, false, true);
    let masked = b.op_with_outputs("add", "masked", [("x", scores), ("y", mask)])[0];
    let weights = b.softmax(masked, -1);
    let out = b.matmul(weights, cache, false, false);
    let twice = b.op_with_outputs("add", "doubled", [("x", cache), ("y", cache)])[0];
    b.output("out", out);
    b.output("twice", twice);
    let function = b.finish().unwrap();
    let noise = |shape: [usize; 4]| {
        let values = (0..shape.iter().product()).map(|i: usize| (i as f32 * 0.37).sin());
        Tensor::new(shape, values.collect::<Vec<f32>>())
    };
    let (q, mask) = (noise([1, 2, 1, 8]), noise([1, 1, 1, 16]));
    let [found, expected] = [Executable::compile, Executable::compile_unfused].map(|compile| {
        let executable = compile(&function, F32, &WeightCache::new()).unwrap();
        let mut state = executable.new_state();
        state.set("cache", noise([1, 1, 16, 8]));
        executable.run(&[("q", &q), ("mask", &mask)], &mut state).unwrap()
    });
    assert_eq!(found[1], expected[1]);
    let apart = found[0].1.floats().unwrap().iter().zip(expected[0].1.floats().unwrap()).map(|(a, b)| (a - b).abs());
    assert!(apart.fold(0.0, f32::max) < 1e-6);
}

/// Attention of heads over rows of a state joined with keys and values of the call, and the masked write of the state:
/// a layer's keys and values are two rows of four.
fn attention_over_joined(tokens: usize, slots: usize) -> Function {
    let mut b = FunctionBuilder::new("main", Opset::CoreMl8);
    let ty = |shape: [usize; 4]| TensorType::new(DataType::Fp16, shape.map(|size| size as u64));
    let q = b.input("q", ty([1, 2, tokens, 32]));
    let new = b.input("new", ty([1, 4, tokens, 32]));
    let mask = b.input("mask", ty([1, 1, tokens, slots + tokens]));
    let write = b.input("write", ty([1, 1, slots, tokens]));
    let keep = b.input("keep", ty([1, 1, slots, 1]));
    let state = b.state("cache", ty([1, 4, slots, 32]));
    let cache = b.read_state(state);
    let mut of_rows = |first: u64| {
        let [past, own] = [cache, new].map(|tensor| b.slice(tensor, 1, first..first + 1));
        b.concat(&[past, own], 2)
    };
    let (k, v) = (of_rows(1), of_rows(2));
    let scores = b.matmul(q, k, false, true);
    let masked = b.op_with_outputs("add", "masked", [("x", scores), ("y", mask)])[0];
    let weights = b.softmax(masked, -1);
    let out = b.matmul(weights, v, false, false);
    let kept = b.op_with_outputs("mul", "kept", [("x", cache), ("y", keep)])[0];
    let placed = b.matmul(write, new, false, false);
    let sum = b.op_with_outputs("add", "sum", [("x", kept), ("y", placed)])[0];
    b.op_with_outputs("write_state", "written", [("input", state), ("data", sum)]);
    b.output("out", out);
    b.finish().unwrap()
}

#[test]
fn keys_that_a_call_appends_are_joined_to_the_open_slots_of_earlier_ones() {
    let (slots, seen) = (256, 37);
    let noise = |shape: [usize; 4], seed: f32| {
        let value = |i: usize| f16::from_f32((i as f32 * 0.37 + seed).sin()).to_f32();
        Tensor::new(shape, (0..shape.iter().product()).map(value).collect::<Vec<f32>>())
    };
    for (tokens, seen) in [(1, 0), (1, seen), (3, seen), (20, seen)] {
        let function = attention_over_joined(tokens, slots);
        let (q, new) = (noise([1, 2, tokens, 32], 1.0), noise([1, 4, tokens, 32], 2.0));
        let opens = |i: usize| {
            let (token, slot) = (i / (slots + tokens), i % (slots + tokens));
            slot < seen || (slots..=slots + token).contains(&slot)
        };
        let closed = |i: usize| if opens(i) { 0.0 } else { -1e4 };
        let mask: Vec<f32> = (0..tokens * (slots + tokens)).map(closed).collect();
        let writes = |i: usize| f32::from(u8::from(i / tokens == seen + i % tokens));
        let keeps = |slot: usize| f32::from(u8::from(!(seen..seen + tokens).contains(&slot)));
        let mask = Tensor::new([1, 1, tokens, slots + tokens], mask);
        let write = Tensor::new([1, 1, slots, tokens], (0..slots * tokens).map(writes).collect::<Vec<f32>>());
        let keep = Tensor::new([1, 1, slots, 1], (0..slots).map(keeps).collect::<Vec<f32>>());
        let inputs = [("q", &q), ("new", &new), ("mask", &mask), ("write", &write), ("keep", &keep)];
        let mut cache = noise([1, 4, slots, 32], 3.0);
        if let TensorData::F32(values) = &mut cache.data {
            values.iter_mut().enumerate().filter(|(i, _)| i / 32 % slots >= seen).for_each(|(_, value)| *value = 0.0);
        }
        for precision in [F32, F16] {
            let plain = Executable::compile_unfused(&function, precision, &WeightCache::new()).unwrap();
            let mut expected_state = plain.new_state();
            expected_state.set("cache", cache.clone());
            let expected = plain.run(&inputs, &mut expected_state).unwrap();
            for half in [false, true] {
                let fused = compile(&function, precision);
                let mut state = fused.new_state();
                if half {
                    state.hold_in_half_precision("cache");
                }
                state.set("cache", cache.clone());
                let mut profile = ExecProfile::default();
                let found = fused.run_profiled(&inputs, &mut state, &mut profile).unwrap();
                let mut names: Vec<&str> = profile.operators().iter().map(|(name, _)| *name).collect();
                names.sort_unstable();
                assert_eq!(names, ["attention", "cache write", "slice_by_index"], "what was there is not copied");
                assert_eq!(state.get("cache"), expected_state.get("cache"));
                let pairs = found[0].1.floats().unwrap().iter().zip(expected[0].1.floats().unwrap());
                let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(apart < if precision == F32 { 1e-6 } else { 2e-3 }, "{tokens} after {seen}: {apart}");
            }
        }
    }
}
