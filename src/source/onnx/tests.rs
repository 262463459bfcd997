//! Errors of unsupported graphs and damaged files.

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::SourceDtype;
use crate::dtype::SourceDtype::U4;
use crate::random::mix;
use crate::tests::mutated;
use crate::weight::{SourceWeight, ZeroPoints};
use anec_base::{Diagnostic, Fault};

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/onnx/edge/model.onnx")
}

fn bytes() -> Vec<u8> {
    std::fs::read(path()).unwrap()
}

fn parsed(bytes: Vec<u8>) -> Result<(OnnxDecoder, Vec<SourceTensor>)> {
    parse(MappedFile::from_bytes(&path(), bytes))
}

fn refusal(bytes: Vec<u8>) -> String {
    let error = parsed(bytes).unwrap_err();
    assert_eq!(error.fault(), Fault::Source);
    assert!(error.help().is_some());
    error.to_string()
}

/// Fields of a message: number, and bytes or an integer.
type Fields = Vec<(u64, Part)>;

#[derive(Clone, Debug, PartialEq)]
enum Part {
    Number(u64),
    Single(f32),
    Bytes(Vec<u8>),
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut number = 0;
    for shift in (0..).step_by(7) {
        let (byte, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        number |= u64::from(byte & 0x7F) << shift;
        if byte < &0x80 {
            break;
        }
    }
    number
}

fn apart(mut bytes: &[u8]) -> Fields {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let part = match key & 7 {
            0 => Part::Number(varint(&mut bytes)),
            2 => {
                let length = varint(&mut bytes) as usize;
                let (content, rest) = bytes.split_at(length);
                bytes = rest;
                Part::Bytes(content.to_vec())
            }
            5 => {
                let (content, rest) = bytes.split_first_chunk().unwrap();
                bytes = rest;
                Part::Single(f32::from_le_bytes(*content))
            }
            kind => panic!("wire type {kind}"),
        };
        fields.push((key >> 3, part));
    }
    fields
}

fn together(fields: &Fields) -> Vec<u8> {
    fn put(out: &mut Vec<u8>, mut number: u64) {
        while number >= 0x80 {
            out.push(number as u8 | 0x80);
            number >>= 7;
        }
        out.push(number as u8);
    }
    let mut out = Vec::new();
    for (number, part) in fields {
        match part {
            Part::Number(value) => {
                put(&mut out, number << 3);
                put(&mut out, *value);
            }
            Part::Single(value) => {
                put(&mut out, number << 3 | 5);
                out.extend(value.to_le_bytes());
            }
            Part::Bytes(content) => {
                put(&mut out, number << 3 | 2);
                put(&mut out, content.len() as u64);
                out.extend(content);
            }
        }
    }
    out
}

/// Returns the fixture with a changed graph.
fn with_graph(edit: impl FnOnce(&mut Fields)) -> Vec<u8> {
    let mut model = apart(&bytes());
    let graph = model.iter_mut().find(|(number, _)| *number == 7).unwrap();
    let Part::Bytes(content) = &graph.1 else { panic!() };
    let mut fields = apart(content);
    edit(&mut fields);
    graph.1 = Part::Bytes(together(&fields));
    together(&model)
}

/// Returns the fixture with a changed node.
fn with_node(name: &str, edit: impl FnOnce(&mut Fields)) -> Vec<u8> {
    with_graph(|graph| {
        let named = |content: &[u8]| apart(content).contains(&(3, Part::Bytes(name.into())));
        let node = graph
            .iter_mut()
            .find(|(number, part)| *number == 1 && matches!(part, Part::Bytes(content) if named(content)))
            .unwrap_or_else(|| panic!("no node {name}"));
        let Part::Bytes(content) = &node.1 else { panic!() };
        let mut fields = apart(content);
        edit(&mut fields);
        node.1 = Part::Bytes(together(&fields));
    })
}

/// Sets an integer attribute.
fn int(name: &str, value: i64) -> impl FnOnce(&mut Fields) {
    attribute(name, 2, (3, Part::Number(value as u64)))
}

/// Sets a float attribute.
fn float(name: &str, value: f32) -> impl FnOnce(&mut Fields) {
    attribute(name, 1, (2, Part::Single(value)))
}

fn attribute(name: &str, kind: u64, value: (u64, Part)) -> impl FnOnce(&mut Fields) {
    let attribute = vec![(1, Part::Bytes(name.into())), value, (20, Part::Number(kind))];
    move |node| node.push((5, Part::Bytes(together(&attribute))))
}

fn op(name: &str) -> impl FnOnce(&mut Fields) {
    let name = Part::Bytes(name.into());
    move |node| node.iter_mut().filter(|(number, _)| *number == 4).for_each(|field| field.1 = name.clone())
}

fn extra_input(index: usize, value: &str) -> impl FnOnce(&mut Fields) {
    let value = Part::Bytes(value.into());
    move |node| {
        let inputs = node.iter().filter(|(number, _)| *number == 1).count();
        node.extend((inputs..index).map(|_| (1, Part::Bytes(Vec::new()))));
        node.push((1, value));
    }
}

#[test]
fn all_parts_of_a_graph_are_read() {
    let (decoder, tensors) = parsed(bytes()).unwrap();
    assert_eq!(decoder.layers.len(), 2);
    assert_eq!((decoder.hidden_size, decoder.tied), (64, false));
    // a factor of 1/16 before the norms turns 1e-5 / 256 into the others' epsilon
    assert!((decoder.epsilon / 1e-5 - 1.0).abs() < 1e-7, "{}", decoder.epsilon);
    assert_eq!(decoder.ropes[0].table.theta().unwrap(), Some(500_000.0));
    let layer = &decoder.layers[1];
    assert_eq!((layer.heads, layer.key_value_heads, layer.head_dim), (4, 2, 32));
    assert_eq!(layer.qk_norm, Some(decoder::OnnxQkNorm::PerHead));
    let down = tensors.iter().find(|t| t.name() == "model.layers.0.mlp.down_proj.weight").unwrap();
    assert_eq!((down.dtype(), down.shape()), (U4, &[64, 96][..]));
    let k = tensors.iter().find(|t| t.name() == "model.layers.0.self_attn.k_proj.weight").unwrap();
    assert_eq!(k.dtype(), SourceDtype::U2);
    assert_eq!(tensors.len(), 3 + 2 * 11);
    // the same message re-encoded
    let (again, _) = parsed(with_graph(|_| {})).unwrap();
    assert_eq!(again.layers, decoder.layers);
}

#[test]
fn changed_maths_of_attention_is_refused() {
    let attention = "/model.layers.1/attention";
    for (change, expected) in [
        (with_node(attention, float("softcap", 50.0)), "caps the scores (softcap 50)"),
        (with_node(attention, int("smooth_softmax", 1)), "smooth_softmax is Some(1), expected 0"),
        (with_node(attention, int("rotary_interleaved", 1)), "rotary_interleaved is Some(1)"),
        (with_node(attention, int("causal", 0)), "causal is Some(0), expected 1"),
        (with_node(attention, int("local_window_size", 0)), "local_window_size is 0"),
        (with_node(attention, int("num_heads", 3)), "3 heads aren't whole groups of 2"),
        (with_node(attention, int("num_heads", 0)), "num_heads is Some(0)"),
        (with_node(attention, extra_input(10, "sixteenth")), "adds a bias to the scores (input 10)"),
        (with_node(attention, extra_input(11, "sixteenth")), "has sinks (input 11)"),
        (with_node(attention, op("SparseAttention")), "neither GroupQueryAttention nor a gated feed-forward network"),
        (with_node(attention, op("MultiHeadAttention")), "its mask is computed in the graph"),
    ] {
        let message = refusal(change);
        assert!(message.contains(expected) && message.contains("/model.layers.1/attention"), "{message}");
    }
    // explicit defaults are accepted
    assert!(parsed(with_node(attention, int("smooth_softmax", 0))).is_ok());
    assert!(parsed(with_node(attention, float("softcap", 0.0))).is_ok());
    // changes of a layer's maths are detected
    let (decoder, _) = parsed(with_node(attention, float("scale", 0.5))).unwrap();
    assert_eq!(decoder.layers.iter().map(|layer| layer.scale).collect::<Vec<_>>(), [32f64.powf(-0.5), 0.5]);
    let (decoder, _) = parsed(with_node(attention, int("local_window_size", 7))).unwrap();
    assert_eq!(decoder.layers[1].window, Some(7));
}

#[test]
fn changed_maths_around_attention_is_refused() {
    let product = "/model.layers.0.mlp.gate_proj/MatMul";
    for (change, expected) in [
        (with_node("/model.layers.0/sigmoid", op("Tanh")), "isn't the product of an activated gate"),
        (with_node("/model.layers.0/add_1", op("Sub")), "embedding"),
        (with_node("/model.layers.0.input_layernorm/mean", op("ReduceMax")), "isn't added to the residual stream"),
        (with_node("/model.layers.0.input_layernorm/scale", op("Sub")), "isn't added to the residual stream"),
        (with_node(product, int("bits", 3)), "its codes have 3 bits"),
        (with_node(product, int("block_size", 24)), "its block_size is 24"),
        (with_node(product, int("block_size", 128)), "bytes"),
        (with_node(product, int("K", 65)), "bytes"),
        (with_node(product, int("N", -1)), "its attribute N is Some(-1)"),
        (with_node(product, int("weight_prepacked", 1)), "packed for one kind of processor"),
        (with_node(product, extra_input(4, "one")), "into another order (g_idx)"),
        (with_node("/model/embed_tokens/Gather", int("gather_axis", 1)), "don't lie within rows"),
        (with_node("/lm_head/MatMul", op("MatMulBnb4")), "isn't an LM head"),
        (with_node("/total_cast", op("Round")), "takes part in counting tokens"),
    ] {
        let message = refusal(change);
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

/// Turns a node into one of ONNX's own domain with these inputs.
fn rewired<'a>(name: &'a str, inputs: &'a [&'a str]) -> impl FnOnce(&mut Fields) {
    move |node| {
        node.retain(|(number, _)| ![1, 4, 7].contains(number));
        node.extend(inputs.iter().map(|input| (1, Part::Bytes((*input).into()))));
        node.push((4, Part::Bytes(name.into())));
    }
}

#[test]
fn a_graph_that_goes_in_circles_is_refused() {
    let lookup = "/model/embed_tokens/Gather";
    for (change, expected) in [
        (with_node("/lm_head/MatMul", rewired("Mul", &["logits", "sixteenth"])), "isn't an LM head"),
        (with_node("/lm_head/MatMul", rewired("Cast", &["logits"])), "isn't an LM head"),
        (
            with_node(lookup, rewired("Slice", &["/model/embed_tokens/Gather_out", "last_axis", "one", "last_axis"])),
            "looked up in the embedding",
        ),
    ] {
        let message = refusal(change);
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn data_is_looked_for_in_the_models_folder_only() {
    let elsewhere = |location: &str| {
        with_graph(|graph| {
            let initializer = graph
                .iter_mut()
                .filter(|(number, _)| *number == 5)
                .find_map(|(_, part)| match part {
                    Part::Bytes(content) if apart(content).iter().any(|(number, _)| *number == 13) => Some(content),
                    _ => None,
                })
                .unwrap();
            let mut fields = apart(initializer);
            let entry = vec![(1, Part::Bytes("location".into())), (2, Part::Bytes(location.into()))];
            fields.push((13, Part::Bytes(together(&entry))));
            *initializer = together(&fields);
        })
    };
    for location in ["../model.onnx.data", "/etc/passwd", "a/../../b", ""] {
        let message = refusal(elsewhere(location));
        assert!(message.contains("expected a path within the model's folder"), "{location}: {message}");
    }
    assert!(refusal(elsewhere("other.data")).contains("other.data, which isn't beside the model"));
    assert!(parsed(elsewhere("model.onnx.data")).is_ok());
}

#[test]
fn files_of_other_formats_are_refused() {
    assert!(refusal(Vec::new()).contains("it has no graph"));
    assert!(refusal(b"GGUF and so on".to_vec()).contains("isn't an ONNX model"));
    assert!(refusal(vec![0xFF; 100]).contains("more than 64 bits"));
    let mut functions = apart(&bytes());
    functions.push((25, Part::Bytes(Vec::new())));
    assert!(refusal(together(&functions)).contains("functions of its own"));
    let sparse = with_graph(|graph| graph.push((15, Part::Bytes(Vec::new()))));
    assert!(refusal(sparse).contains("sparse initializers"));
    let twice = with_graph(|graph| {
        let node = graph.iter().find(|(number, _)| *number == 1).unwrap().clone();
        graph.push(node);
    });
    assert!(refusal(twice).contains("is made twice"));
    let no_logits = with_graph(|graph| graph.retain(|(number, _)| *number != 12));
    assert!(refusal(no_logits).contains("has no output `logits`"));
}

/// A chain of products in which every one multiplies the one before by itself.
#[test]
fn products_of_products_are_followed_once() {
    let text = |number: u64, text: &str| (number, Part::Bytes(text.into()));
    let node = |op: &str, input: &str, output: &str| {
        let fields = vec![text(1, input), text(1, input), text(2, output), text(4, op)];
        (1, Part::Bytes(together(&fields)))
    };
    let value = |number: u64, name: &str| (number, Part::Bytes(together(&vec![text(1, name)])));
    let mut graph = vec![value(11, "input_ids"), value(12, "last_hidden_state")];
    let name = |step: usize| if step == 0 { "input_ids".to_owned() } else { format!("x{step}") };
    graph.extend((0..200).map(|step| node("Mul", &name(step), &name(step + 1))));
    graph.push(node("Add", &name(200), "last_hidden_state"));
    let model = together(&vec![(7, Part::Bytes(together(&graph)))]);
    let error = parse_encoder(MappedFile::from_bytes(&path(), model)).unwrap_err().to_string();
    assert!(error.contains("hidden states of an encoder"), "{error}");
}

/// Parses any bytes without panics; returns whether they were accepted.
fn read_or_refuse(bytes: Vec<u8>) -> bool {
    let Ok((decoder, tensors)) = parsed(bytes) else { return false };
    for tensor in tensors {
        let mut row = vec![0.0; tensor.columns().min(1 << 16) as usize];
        if tensor.elements() >= row.len() as u64 {
            tensor.read(0, &mut row).unwrap();
            tensor.read(tensor.elements() - row.len() as u64, &mut row).unwrap();
        }
    }
    for rope in &decoder.ropes {
        let _ = rope.table.theta();
    }
    true
}

#[test]
fn mutated_files_never_panic() {
    let good = bytes();
    let (mut read_anyway, mut refused) = (0, 0);
    for round in 0..4_000u64 {
        let bytes = mutated(&good, round);
        if read_or_refuse(bytes) { read_anyway += 1 } else { refused += 1 }
    }
    assert!(read_anyway > 100 && refused > 100, "{read_anyway} read, {refused} refused");
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        read_or_refuse(bytes);
    }

    /// Blocked matrices decode to their definition from any element on.
    #[test]
    fn blocks_decode_by_their_definition(
        rows in 1u64..5, columns in 1u64..40, block_rows in 1u64..4, block_columns in 1u64..20, seed: u64,
        zeros: bool, from in 0f64..1.0, length in 0f64..1.0,
    ) {
        let shape = [rows.div_ceil(block_rows), columns.div_ceil(block_columns)];
        let numbers = |salt: u64, count: u64| -> Vec<f32> {
            (0..count).map(|i| (mix(seed, salt + i) % 16) as f32).collect()
        };
        let codes = numbers(0, rows * columns);
        let (scales, points) = (numbers(1000, shape[0] * shape[1]), numbers(2000, shape[0] * shape[1]));
        let weight = |name: &str, shape: &[u64], values: &[f32]| {
            SourceWeight::from_values(name, shape, values.to_vec()).unwrap()
        };
        let zero_points = match zeros {
            true => ZeroPoints::Each(weight("zeros", &shape, &points)),
            false => ZeroPoints::All(8.0),
        };
        let matrix = SourceWeight::from_blocks(
            weight("codes", &[rows, columns], &codes), weight("scales", &shape, &scales), zero_points,
            [block_rows, block_columns],
        ).unwrap();
        let expected: Vec<f32> = (0..rows * columns).map(|i| {
            let block = i / columns / block_rows * shape[1] + i % columns / block_columns;
            let zero = if zeros { points[block as usize] } else { 8.0 };
            (codes[i as usize] - zero) * scales[block as usize]
        }).collect();
        let first = (from * (rows * columns) as f64) as usize;
        let length = (length * (expected.len() - first) as f64) as usize;
        let mut found = vec![f32::NAN; length];
        matrix.read(first as u64, &mut found).unwrap();
        prop_assert_eq!(&found, &expected[first..first + length]);
    }
}

#[test]
fn nan_scales_are_named() {
    let one = |name: &str, shape: &[u64], value: f32| {
        let count = shape.iter().product::<u64>() as usize;
        SourceWeight::from_values(name, shape, vec![value; count]).unwrap()
    };
    let mut scales = vec![1.0; 4];
    scales[3] = f32::INFINITY;
    let scales = SourceWeight::from_values("scales", &[2, 2], scales).unwrap();
    let codes = one("codes", &[2, 8], 3.0);
    let matrix = SourceWeight::from_blocks(codes, scales.clone(), ZeroPoints::All(0.0), [1, 4]).unwrap();
    let mut row = vec![0.0; 8];
    matrix.read_rows(1, &mut row).unwrap();
    let message = matrix.check_finite(1, &row).unwrap_err().to_string();
    assert!(message.contains("tensor `scales`, row 1, column 1"), "{message}");
    assert!(SourceWeight::from_blocks(one("codes", &[2, 9], 1.0), scales, ZeroPoints::All(0.0), [1, 4]).is_err());
}
