//! Round trips of the writer and reader, and errors of damaged files.

use indexmap::IndexMap;
use proptest::prelude::*;

use super::write::Writer;
use super::*;
use crate::tests::mutated;
use anec_base::Diagnostic;

/// Returns a file with a key of every type and tensors of several.
fn small_model() -> Vec<u8> {
    let mut writer = Writer::new();
    writer
        .key("general.architecture", "llama")
        .key("u8", GgufValue::U8(200))
        .key("i8", GgufValue::I8(-7))
        .key("u16", 60_000u16)
        .key("i16", GgufValue::I16(-300))
        .key("u32", 4_000_000_000u32)
        .key("i32", -5)
        .key("f32", 0.5f32)
        .key("bool", true)
        .key("u64", u64::MAX)
        .key("i64", GgufValue::I64(i64::MIN))
        .key("f64", GgufValue::F64(1e300))
        .key("tokens", vec!["a".to_owned(), "ü".to_owned(), String::new()])
        .key("scores", vec![0.5f32, -1.0])
        .key(
            "nested",
            GgufValue::Array(GgufArray::Array(vec![GgufArray::I32(vec![1, 2]), GgufArray::Bool(vec![true])])),
        )
        .tensor("token_embd.weight", SourceDtype::Q8_0, &[3, 32])
        .tensor("norm.weight", SourceDtype::F32, &[5])
        .tensor("blk.0.ffn.weight", SourceDtype::F16, &[2, 2, 3]);
    written(&writer)
}

/// Returns the model with bytes that depend on nothing as its data.
fn written(writer: &Writer) -> Vec<u8> {
    let lengths: Vec<u64> = writer.tensors().map(|(_, dtype, shape)| byte_length(dtype, shape).unwrap()).collect();
    let mut bytes = Vec::new();
    writer
        .write(&mut bytes, |index, out| out.write_all(&(0..lengths[index]).map(|i| i as u8).collect::<Vec<u8>>()))
        .unwrap();
    bytes
}

fn read(bytes: &[u8]) -> Result<Header> {
    parse(Path::new("model.gguf"), bytes)
}

/// Returns the message of the error.
fn refusal(bytes: &[u8]) -> String {
    let error = read(bytes).unwrap_err();
    assert_eq!(error.fault().exit_code(), 4);
    error.to_string()
}

/// Returns a copy with other bytes at a place.
fn patched(bytes: &[u8], at: usize, with: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + with.len()].copy_from_slice(with);
    bytes
}

/// Returns the offset of `text` in the file.
fn find(bytes: &[u8], text: &str) -> usize {
    bytes.windows(text.len()).position(|window| window == text.as_bytes()).unwrap()
}

#[test]
fn keys_and_tensors_come_back_as_they_were_written() {
    let bytes = small_model();
    let header = read(&bytes).unwrap();
    assert_eq!(header.version, 3);
    let metadata = &header.metadata;
    assert_eq!(metadata.str("general.architecture").unwrap(), Some("llama"));
    assert_eq!(metadata.u64("u64").unwrap(), Some(u64::MAX));
    assert_eq!(metadata.u64("u8").unwrap(), Some(200));
    assert_eq!(metadata.f64("f32").unwrap(), Some(0.5));
    assert_eq!(metadata.f64("f64").unwrap(), Some(1e300));
    assert_eq!(metadata.bool("bool").unwrap(), Some(true));
    assert!(metadata.strings("tokens").unwrap().unwrap().iter().eq(["a", "ü", ""]));
    assert_eq!(metadata.f32s("scores").unwrap().unwrap(), [0.5, -1.0]);
    assert_eq!(metadata.i64s("i64").unwrap().unwrap(), [i64::MIN]);
    assert_eq!(metadata.u64("absent").unwrap(), None);
    let nested = GgufArray::Array(vec![GgufArray::I32(vec![1, 2]), GgufArray::Bool(vec![true])]);
    assert_eq!(metadata.get("nested"), Some(&GgufValue::Array(nested)));
    assert_eq!(serde_json::to_value(metadata.get("nested")).unwrap(), serde_json::json!([[1, 2], [true]]));

    let tensors: Vec<_> = header.tensors.iter().map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice())).collect();
    assert_eq!(
        tensors,
        [
            ("token_embd.weight", SourceDtype::Q8_0, &[3, 32][..]),
            ("norm.weight", SourceDtype::F32, &[5]),
            ("blk.0.ffn.weight", SourceDtype::F16, &[2, 2, 3]),
        ]
    );
    for tensor in &header.tensors {
        assert_eq!(tensor.range.start % DEFAULT_ALIGNMENT, 0);
        assert_eq!(bytes[tensor.range.start as usize..][..4], [0, 1, 2, 3]);
    }
}

#[test]
fn a_key_of_another_type_is_named_with_what_it_holds() {
    let metadata = read(&small_model()).unwrap().metadata;
    for (found, expected) in [
        (metadata.u64("i32").unwrap_err(), "key `i32`: the value is -5, expected an integer that isn't negative"),
        (metadata.str("tokens").unwrap_err(), "key `tokens`: the value is array of 3 string, expected a string"),
        (metadata.f64("u32").unwrap_err(), "expected a floating-point number"),
        (metadata.bool("u8").unwrap_err(), "expected a boolean"),
        (metadata.strings("scores").unwrap_err(), "expected an array of strings"),
        (metadata.f32s("tokens").unwrap_err(), "expected an array of f32"),
        (metadata.i64s("u64").unwrap_err(), "expected an array of integers"),
    ] {
        assert!(found.to_string().contains(expected), "{found}");
    }
}

#[test]
fn version_2_reads_like_version_3_and_others_are_refused() {
    let bytes = small_model();
    let header = read(&patched(&bytes, 4, &2u32.to_le_bytes())).unwrap();
    assert_eq!((header.version, header.tensors), (2, read(&bytes).unwrap().tensors));
    assert!(refusal(&patched(&bytes, 4, &1u32.to_le_bytes())).contains("version 1, expected 2 or 3"));
    assert!(refusal(&patched(&bytes, 4, &4u32.to_le_bytes())).contains("version 4, expected 2 or 3"));
    assert!(refusal(&patched(&bytes, 4, &3u32.to_be_bytes())).contains("big-endian"));
    assert!(refusal(&patched(&bytes, 0, b"GGML")).contains("expected `GGUF`"));
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = small_model();
    let last = read(&bytes).unwrap().tensors.iter().map(|tensor| tensor.range.end).max().unwrap() as usize;
    for length in 0..last {
        let message = refusal(&bytes[..length]);
        assert!(message.starts_with("model.gguf: "), "{message}");
    }
    // Only the padding after the last tensor may be missing.
    assert!(read(&bytes[..last]).is_ok());
}

#[test]
fn absurd_counts_and_lengths_are_refused_before_anything_is_allocated() {
    let bytes = small_model();
    let huge = (u64::MAX / 2).to_le_bytes();
    for (at, expected) in [
        (8, "tensors of at least 24 bytes each are announced"),
        (16, "metadata keys of at least 13 bytes each are announced"),
        (24, "metadata key 0 of 15 takes"),
        (find(&bytes, "llama") - 8, "value of key `general.architecture` takes"),
        (find(&bytes, "tokens") + 6 + 8, "strings of key `tokens` of at least 8 bytes each are announced"),
        (find(&bytes, "tokens") + 6 + 16, "string 0 of 3 of key `tokens` takes"),
        (find(&bytes, "scores") + 6 + 8, "numbers of key `scores` takes"),
        (find(&bytes, "nested") + 6 + 8, "arrays of key `nested` of at least 12 bytes each are announced"),
        (find(&bytes, "token_embd") - 8, "name of tensor 0 of 3 takes"),
        (find(&bytes, "norm.weight") + 11 + 4, "tensor `norm.weight`: F32 [4611686018427387903"),
        (find(&bytes, "norm.weight") + 11 + 4 + 8 + 4, "tensor `norm.weight`: its offset"),
    ] {
        let mut huge = huge;
        if expected.contains("F32 [461") {
            huge = (u64::MAX / 4).to_le_bytes();
        }
        let message = refusal(&patched(&bytes, at, &huge));
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn contradictory_tensors_are_refused() {
    let bytes = small_model();
    let norm = find(&bytes, "norm.weight") + 11;
    let (dimensions, length, number, offset) = (norm, norm + 4, norm + 12, norm + 16);
    for (at, with, expected) in [
        (dimensions, &5u32.to_le_bytes()[..], "it has 5 dimensions, expected at most 4"),
        (number, &77u32.to_le_bytes(), "tensor `norm.weight`: its ggml type number 77 isn't one that is known"),
        (number, &12u32.to_le_bytes(), "a row of 5 elements isn't whole blocks of 256 (Q4_K)"),
        (offset, &33u64.to_le_bytes(), "its offset 33 isn't a multiple of the alignment 32"),
        (offset, &0u64.to_le_bytes(), "overlap"),
        (offset, &(1u64 << 40).to_le_bytes(), "end after the file"),
        (offset, &(u64::MAX - 31).to_le_bytes(), "end after the file"),
        (length, &1000u64.to_le_bytes(), "end after the file"),
        (length, &12u64.to_le_bytes(), "overlap"),
        (find(&bytes, "token_embd.weight") + 17 + 4 + 8, &(1u64 << 60).to_le_bytes(), "overflows"),
        (find(&bytes, "token_embd.weight") + 17 + 4 + 8, &(1u64 << 56).to_le_bytes(), "has too many bytes"),
    ] {
        let message = refusal(&patched(&bytes, at, with));
        assert!(message.contains(expected), "{message}");
    }
    let error = read(&patched(&bytes, number, &4u32.to_le_bytes())).unwrap_err();
    assert!(error.help().unwrap().contains("removed"));
}

#[test]
fn names_and_keys_are_unique_and_text() {
    let twice = |tensor| {
        let mut writer = Writer::new();
        match tensor {
            true => writer.tensor("a", SourceDtype::F32, &[1]).tensor("a", SourceDtype::F32, &[1]),
            false => writer.key("a", 1u32).key("a", 2u32),
        };
        refusal(&written(&writer))
    };
    assert!(twice(true).contains("tensor `a`: the file has two tensors of this name"));
    assert!(twice(false).contains("key `a`: the file has this key twice"));
    let bytes = small_model();
    assert!(refusal(&patched(&bytes, find(&bytes, "llama"), &[0xFF])).contains("isn't UTF-8"));
    assert!(refusal(&patched(&bytes, find(&bytes, "norm."), &[0xFF])).contains("isn't UTF-8"));
    assert!(refusal(&patched(&bytes, find(&bytes, "bool") + 8, &[2])).contains("a boolean is 2"));
    assert!(refusal(&patched(&bytes, find(&bytes, "bool") + 4, &[13])).contains("its type number is 13"));
}

#[test]
fn the_alignment_key_moves_the_data() {
    let with_alignment = |alignment: GgufValue| {
        let mut writer = Writer::new();
        writer.key(ALIGNMENT_KEY, alignment);
        writer.tensor("a", SourceDtype::I8, &[3]).tensor("b", SourceDtype::I8, &[3]);
        written(&writer)
    };
    for alignment in [1u32, 8, 64, 4096] {
        let header = read(&with_alignment(alignment.into())).unwrap();
        let starts: Vec<u64> = header.tensors.iter().map(|tensor| tensor.range.start).collect();
        assert_eq!(starts[0] % u64::from(alignment), 0);
        assert_eq!(starts[1] - starts[0], 3u64.next_multiple_of(alignment.into()));
    }
    for wrong in [GgufValue::U32(0), GgufValue::U32(24), GgufValue::U32(1 << 21), GgufValue::U64(32)] {
        assert!(refusal(&with_alignment(wrong)).contains("expected a power of two as u32"));
    }
}

#[test]
fn arrays_that_nest_to_overflow_the_stack_are_refused() {
    let nested = |depth| {
        let array = (0..depth).fold(GgufArray::U8(vec![1]), |inner, _| GgufArray::Array(vec![inner]));
        let mut writer = Writer::new();
        writer.key("deep", GgufValue::Array(array));
        written(&writer)
    };
    assert!(read(&nested(8)).is_ok());
    assert!(refusal(&nested(9)).contains("nested more than 8 deep"));
    let mut bytes = nested(0);
    let array = find(&bytes, "deep") + 8;
    bytes.truncate(array);
    for _ in 0..1_000_000 {
        bytes.extend(9u32.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
    }
    assert!(refusal(&bytes).contains("nested more than 8 deep"));
}

#[test]
fn the_space_between_tensors_decides_between_types_of_one_number() {
    for (dtype, number) in
        [(SourceDtype::Q1_0, 41u32), (SourceDtype::SEQ_2BIT, 41), (SourceDtype::NVFP4, 40), (SourceDtype::SEQ_2BIT, 40)]
    {
        let mut writer = Writer::new();
        writer.tensor("aaaa", dtype, &[4, 512]).tensor("b", SourceDtype::F32, &[8]).tensor("cccc", dtype, &[2, 1024]);
        let mut bytes = written(&writer);
        for name in ["aaaa", "cccc"] {
            // after the name, the number of dimensions and two dimensions
            let at = find(&bytes, name) + 4 + 4 + 16;
            assert_eq!(bytes[at..at + 4], dtype.ggml_number().unwrap().to_le_bytes());
            bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        }
        let header = read(&bytes).unwrap();
        assert_eq!(header.tensors[0].dtype, dtype);
        assert_eq!(header.tensors[2].dtype, dtype);
        // Also without the padding at the end of the file.
        let end = header.tensors[2].range.end as usize;
        assert_eq!(read(&bytes[..end]).unwrap().tensors, header.tensors);
    }
}

/// Mutations of a good file are read or refused without panics, and all data lies in the file.
#[test]
fn mutated_files_never_panic() {
    let good = small_model();
    let (mut read_anyway, mut refused) = (0, 0);
    for round in 0..20_000u64 {
        let bytes = mutated(&good, round);
        match read(&bytes) {
            Ok(header) => {
                read_anyway += 1;
                for tensor in &header.tensors {
                    assert!(tensor.range.end <= bytes.len() as u64);
                }
            }
            Err(error) => {
                refused += 1;
                assert!(error.to_string().contains("model.gguf"));
            }
        }
    }
    assert!(read_anyway > 1000 && refused > 1000, "{read_anyway} {refused}");
}

fn any_array(depth: u32) -> BoxedStrategy<GgufArray> {
    let flat = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..5).prop_map(GgufArray::U8),
        prop::collection::vec(any::<i8>(), 0..5).prop_map(GgufArray::I8),
        prop::collection::vec(any::<u16>(), 0..5).prop_map(GgufArray::U16),
        prop::collection::vec(any::<i16>(), 0..5).prop_map(GgufArray::I16),
        prop::collection::vec(any::<u32>(), 0..5).prop_map(GgufArray::U32),
        prop::collection::vec(any::<i32>(), 0..5).prop_map(GgufArray::I32),
        prop::collection::vec(any::<f32>(), 0..5).prop_map(GgufArray::F32),
        prop::collection::vec(any::<bool>(), 0..5).prop_map(GgufArray::Bool),
        prop::collection::vec(any::<String>(), 0..5).prop_map(|strings| GgufArray::String(strings.iter().collect())),
        prop::collection::vec(any::<u64>(), 0..5).prop_map(GgufArray::U64),
        prop::collection::vec(any::<i64>(), 0..5).prop_map(GgufArray::I64),
        prop::collection::vec(any::<f64>(), 0..5).prop_map(GgufArray::F64),
    ];
    if depth == 0 {
        return flat.boxed();
    }
    prop_oneof![4 => flat, 1 => prop::collection::vec(any_array(depth - 1), 0..4).prop_map(GgufArray::Array)].boxed()
}

fn any_value() -> impl Strategy<Value = GgufValue> {
    prop_oneof![
        any::<u8>().prop_map(GgufValue::U8),
        any::<i8>().prop_map(GgufValue::I8),
        any::<u16>().prop_map(GgufValue::U16),
        any::<i16>().prop_map(GgufValue::I16),
        any::<u32>().prop_map(GgufValue::U32),
        any::<i32>().prop_map(GgufValue::I32),
        any::<f32>().prop_map(GgufValue::F32),
        any::<bool>().prop_map(GgufValue::Bool),
        any::<String>().prop_map(GgufValue::String),
        any_array(3).prop_map(GgufValue::Array),
        any::<u64>().prop_map(GgufValue::U64),
        any::<i64>().prop_map(GgufValue::I64),
        any::<f64>().prop_map(GgufValue::F64),
    ]
}

proptest! {
    #[test]
    fn any_metadata_and_shapes_come_back(
        values in prop::collection::hash_map(any::<String>(), any_value(), 0..8),
        shapes in prop::collection::vec((prop::collection::vec(0u64..5, 0..4), 0usize..4), 0..6),
    ) {
        let values: IndexMap<String, GgufValue> = values.into_iter().filter(|(key, _)| key != ALIGNMENT_KEY).collect();
        let mut writer = Writer::new();
        for (key, value) in &values {
            writer.key(key, value.clone());
        }
        let dtypes = [SourceDtype::F32, SourceDtype::Q8_0, SourceDtype::BF16, SourceDtype::Q4_K];
        let mut expected = Vec::new();
        for (index, (mut shape, dtype)) in shapes.into_iter().enumerate() {
            let dtype = dtypes[dtype];
            shape.push(dtype.block().elements);
            writer.tensor(&format!("t{index}"), dtype, &shape);
            expected.push((format!("t{index}"), dtype, shape));
        }
        let header = read(&written(&writer)).unwrap();
        prop_assert_eq!(header.metadata, GgufMetadata::new(Path::new("model.gguf"), values));
        let found: Vec<_> = header.tensors.into_iter().map(|t| (t.name, t.dtype, t.shape)).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn any_bytes_after_the_magic_number_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(bytes);
        let _ = read(&file);
    }
}
