//! `host.safetensors`: tensors for the host, streamed. f32 tensors (rotary tables, rotation of hidden states,
//! positions) come first so that they are aligned; then the fp16 tables: the embedding and the per-layer embedding.

use std::path::Path;

use serde_json::json;

use super::files;
use anec_base::{Progress, Result};
use anec_bundle::{HostFacts, Projection, RopeTable, RopeVariant};
use anec_family::{HostProjection, HostTensors};
use anec_manifest::Overflow;
use anec_package::stream::FilePart;
use anec_quant::Fp16;
use anec_source::SourceWeight;

/// File name within a bundle's folder.
pub const FILE_NAME: &str = "host.safetensors";
/// Name of the embedding table.
const EMBEDDING: &str = "embedding";
/// Name of the per-layer embedding table.
const PER_LAYER_EMBEDDING: &str = "per_layer_embedding";
/// Rows of the per-layer embedding computed together: one matrix product each.
const TOGETHER: u64 = 64;
/// Name of the rotation matrix of hidden states.
const ROTATION: &str = "rotation";
/// Names of the tables of learned positions and of token types.
const POSITIONS: &str = "positions";
const TOKEN_TYPES: &str = "token_types";
/// Name of the table of attention biases.
const ATTENTION_BIAS: &str = "attention_bias";

/// Names of the projections after pooling.
pub fn projections(projections: &[HostProjection]) -> Vec<Projection> {
    let named = |(index, projection): (usize, &HostProjection)| Projection {
        weight: format!("projection.{index}.weight"),
        bias: projection.bias.as_ref().map(|_| format!("projection.{index}.bias")),
        activation: projection.activation,
    };
    projections.iter().enumerate().map(named).collect()
}

/// Named f32 matrices of the file.
fn matrices(host: &HostTensors) -> Vec<(String, &SourceWeight)> {
    let single = [
        (ROTATION, &host.rotation),
        (POSITIONS, &host.positions),
        (TOKEN_TYPES, &host.token_types),
        (ATTENTION_BIAS, &host.attention_bias),
    ];
    let single = single.into_iter().filter_map(|(name, matrix)| Some((name.to_owned(), matrix.as_ref()?)));
    let named = projections(&host.projections);
    let projected = host.projections.iter().zip(named).flat_map(|(projection, named)| {
        [Some((named.weight, &projection.weight)), named.bias.zip(projection.bias.as_ref())].into_iter().flatten()
    });
    single.chain(projected).collect()
}

/// Size of the file in bytes, without its header.
pub fn bytes(host: &HostTensors) -> u64 {
    let tables = host.rope.iter().flat_map(|t| &t.variants).map(|v| 4 * (v.cos.len() + v.sin.len()) as u64);
    let matrices: u64 = matrices(host).iter().map(|(_, matrix)| 4 * matrix.elements()).sum();
    let halves = host.embedding.elements() + host.per_layer_embedding.as_ref().map_or(0, SourceWeight::elements);
    tables.sum::<u64>() + matrices + 2 * halves
}

/// Writes the file.
///
/// # Errors
/// If the embedding can't be read or represented in fp16, or the file can't be written.
pub fn write(path: &Path, host: &HostTensors, overflow: Overflow, progress: &Progress) -> Result<HostFacts> {
    let mut header = serde_json::Map::new();
    let mut end = 0u64;
    let mut declare = |name: &str, dtype: &str, shape: &[u64], bytes: u64| {
        let offsets = [end, end + bytes];
        end += bytes;
        header.insert(name.to_owned(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
    };
    let mut tables: Vec<&[f32]> = Vec::new();
    let mut rope = Vec::new();
    for table in &host.rope {
        let mut variants = Vec::new();
        for values in &table.variants {
            let suffix = if table.variants.len() == 1 { String::new() } else { format!(".{}", values.max_length) };
            let name = |part: &str| format!("{}.{part}{suffix}", table.table);
            for (part, values) in [("cos", &values.cos), ("sin", &values.sin)] {
                let rows = values.len() as u64 / table.columns.max(1);
                declare(&name(part), "F32", &[rows, table.columns], 4 * values.len() as u64);
                tables.push(values);
            }
            variants.push(RopeVariant { max_length: values.max_length, cos: name("cos"), sin: name("sin") });
        }
        rope.push(RopeTable { table: table.table.clone(), variants });
    }
    let mut read = Vec::new();
    for (name, matrix) in matrices(host) {
        // a bias is a matrix with one row
        let shape = if matrix.shape().len() == 1 { vec![1, matrix.elements()] } else { matrix.shape().to_vec() };
        let mut values = vec![0.0; matrix.elements() as usize];
        matrix.read(0, &mut values)?;
        declare(&name, "F32", &shape, 4 * matrix.elements());
        read.push(values);
    }
    tables.extend(read.iter().map(Vec::as_slice));
    declare(EMBEDDING, "F16", host.embedding.shape(), 2 * host.embedding.elements());
    if let Some(table) = &host.per_layer_embedding {
        declare(PER_LAYER_EMBEDDING, "F16", table.shape(), 2 * table.elements());
    }

    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    header.resize((header.len() + 8).next_multiple_of(64) - 8, b' ');
    let embedding = Fp16::new(host.embedding.clone(), overflow);
    let per_layer = host.per_layer_embedding.clone().map(|table| Fp16::by_rows(table, overflow, TOGETHER));
    let length = (header.len() as u64).to_le_bytes().to_vec();
    let mut parts = vec![FilePart::Bytes(length.into()), FilePart::Bytes(header.into())];
    parts.extend(tables.into_iter().map(|values| FilePart::Bytes(little_endian(values).into())));
    parts.push(FilePart::Content(&embedding));
    parts.extend(per_layer.iter().map(|table| FilePart::Content(table)));
    // the announced total counts the fp16 tables only
    let written = |part, bytes| progress.add(if part < 2 { 0 } else { bytes });
    let file = files::write_parts(path, &parts, &written)?;
    let named = |matrix: &Option<SourceWeight>, name: &str| matrix.as_ref().map(|_| name.to_owned());
    Ok(HostFacts {
        file,
        embedding: EMBEDDING.into(),
        embedding_size: host.embedding_size,
        positions: named(&host.positions, POSITIONS),
        token_types: named(&host.token_types, TOKEN_TYPES),
        attention_bias: named(&host.attention_bias, ATTENTION_BIAS),
        per_layer_embedding: named(&host.per_layer_embedding, PER_LAYER_EMBEDDING),
        rope,
        rotation: named(&host.rotation, ROTATION),
    })
}

/// Bytes of the values; every supported target is little-endian.
fn little_endian(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_family::{RopeTables, RopeValues};

    #[test]
    fn the_file_is_valid_safetensors() {
        let values = |n: u64| (0..n).map(|i| i as f32 * 0.5).collect::<Vec<f32>>();
        let variant = |max_length| RopeValues { max_length, cos: values(6), sin: values(6) };
        let host = HostTensors {
            embedding: SourceWeight::from_values("e", &[50, 3], values(150)).unwrap(),
            rope: vec![RopeTables { table: "rope".into(), columns: 2, variants: vec![variant(64), variant(128)] }],
            rotation: Some(SourceWeight::from_values("q", &[3, 3], values(9)).unwrap()),
            positions: None,
            token_types: None,
            embedding_size: None,
            attention_bias: None,
            per_layer_embedding: None,
            projections: Vec::new(),
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        let facts = write(&path, &host, Overflow::Error, &Progress::hidden()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(facts.file.bytes, bytes.len() as u64);
        let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let embedding = read.tensor(&facts.embedding).unwrap();
        assert_eq!((embedding.dtype(), embedding.shape()), (safetensors::Dtype::F16, &[50, 3][..]));
        assert_eq!(&embedding.data()[2..4], &half::f16::from_f32(0.5).to_le_bytes());
        let cos = read.tensor(&facts.rope[0].variants[1].cos).unwrap();
        assert_eq!((cos.dtype(), cos.shape()), (safetensors::Dtype::F32, &[3, 2][..]));
        assert_eq!(&cos.data()[4..8], &0.5f32.to_le_bytes());
        assert_eq!(facts.rope[0].variants[1].cos, "rope.cos.128");
        let rotation = read.tensor(&facts.rotation.unwrap()).unwrap();
        assert_eq!((rotation.dtype(), rotation.shape()), (safetensors::Dtype::F32, &[3, 3][..]));
        assert_eq!(&rotation.data()[4..8], &0.5f32.to_le_bytes());
    }

    #[test]
    fn a_failed_write_leaves_no_file() {
        let host = HostTensors {
            embedding: SourceWeight::from_values("e", &[2, 1], vec![1.0, f32::NAN]).unwrap(),
            rope: vec![],
            rotation: None,
            positions: None,
            token_types: None,
            embedding_size: None,
            attention_bias: None,
            per_layer_embedding: None,
            projections: Vec::new(),
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        assert!(write(&path, &host, Overflow::Error, &Progress::hidden()).is_err());
        assert!(!path.exists());
    }
}
