//! Against the fixtures of `tests/fixtures/gguf/dequant`: blocks beside what the reference reader decodes them to.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

use super::*;

struct Fixture {
    name: String,
    dtype: SourceDtype,
    blocks: Vec<u8>,
    values: Vec<f32>,
}

fn fixtures() -> Vec<Fixture> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gguf/dequant");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: PathBuf| {
        let bytes = std::fs::read(path).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = metadata.metadata().clone().unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let values = tensors.tensor("values").unwrap().data().to_vec();
        Fixture {
            name: metadata["type"].clone(),
            dtype: dtype(&metadata["type"], metadata["ggml_type"].parse().unwrap()),
            blocks: tensors.tensor("blocks").unwrap().data().to_vec(),
            values: values.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
        }
    };
    paths.into_iter().map(read).collect()
}

/// Returns the type of a name, which must have the number.
fn dtype(name: &str, number: u32) -> SourceDtype {
    let dtype = SourceDtype::all().find(|dtype| dtype.name() == name).unwrap();
    assert_eq!(dtype.ggml_number(), Some(number), "{name}");
    dtype
}

fn assert_same_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.to_bits(), expected.to_bits(), "{what}, element {i}: {found} instead of {expected}");
    }
}

#[test]
fn every_block_type_of_ggml_has_a_fixture() {
    let have: BTreeSet<SourceDtype> = fixtures().iter().map(|fixture| fixture.dtype).collect();
    let plain = [F64, F32, I8, I16, I32, I64];
    let needed = SourceDtype::all().filter(|d| d.ggml_number().is_some() && !plain.contains(d));
    assert_eq!(have, needed.collect());
}

#[test]
fn every_copy_of_every_decoder_gives_the_bits_of_the_reference() {
    for Fixture { name, dtype, blocks, values } in fixtures() {
        assert_eq!(name, dtype.name());
        let mut found = vec![f32::NAN; values.len()];
        for set in InstructionSet::available() {
            found.fill(f32::NAN);
            decode_by(set, dtype, &blocks, &mut found);
            assert_same_bits(&found, &values, &format!("{name}, {set:?}"));
        }
    }
}

#[test]
fn a_read_may_begin_and_end_inside_a_block() {
    for Fixture { name, dtype, blocks, values } in fixtures() {
        let block = dtype.block().elements as usize;
        let cuts = [0, 1, block / 2, block - 1, block, block + 1, 2 * block, 3 * block + block / 3];
        for first in cuts {
            for end in cuts.into_iter().filter(|&end| end >= first) {
                let mut found = vec![f32::NAN; end - first];
                read(dtype, &blocks, first as u64, &mut found);
                assert_same_bits(&found, &values[first..end], &format!("{name}, {first}..{end}"));
            }
        }
    }
}

#[test]
fn infinite_and_undefined_scales_come_through_instead_of_being_hidden() {
    for (dtype, at) in [(Q8_0, 0), (Q4_0, 0), (Q4_K, 0), (Q6_K, 208), (IQ2_XXS, 0), (F16, 0)] {
        for scale in [0x7C00u16, 0x7E00] {
            let mut block = vec![0x11; dtype.block().bytes as usize];
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            let mut values = vec![0.0; dtype.block().elements as usize];
            decode(dtype, &block, &mut values);
            assert!(values.iter().all(|value| !value.is_finite()), "{dtype} {scale:#x}: {values:?}");
        }
    }
}

#[test]
fn integers_read_as_numbers() {
    let read_one = |dtype, bytes: &[u8]| {
        let mut value = [0.0];
        decode(dtype, bytes, &mut value);
        value[0]
    };
    assert_eq!(read_one(I8, &[0x80]), -128.0);
    assert_eq!(read_one(I16, &(-300i16).to_le_bytes()), -300.0);
    assert_eq!(read_one(I32, &70_000i32.to_le_bytes()), 70_000.0);
    assert_eq!(read_one(I64, &(-1i64 << 40).to_le_bytes()), -(2f32.powi(40)));
    assert_eq!(read_one(U8, &[200]), 200.0);
    assert_eq!(read_one(U16, &60_000u16.to_le_bytes()), 60_000.0);
    assert_eq!(read_one(U32, &u32::MAX.to_le_bytes()), 4_294_967_296.0);
    assert_eq!(read_one(U64, &u64::MAX.to_le_bytes()), 18_446_744_073_709_551_615.0);
    assert_eq!(read_one(Bool, &[1]), 1.0);
    assert_eq!(read_one(F64, &1e-3f64.to_le_bytes()), 1e-3);
    assert_eq!(read_one(BF16, &[0x80, 0x3F]), 1.0);
}
