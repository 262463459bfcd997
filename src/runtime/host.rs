//! Host-side tables: embedding and rotary tables of `host.safetensors`, read from a memory map.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use half::slice::HalfFloatSliceExt;
use ndarray::Array2;
use safetensors::{Dtype, SafeTensors};

use super::error::RuntimeError;
use anec_base::MappedFile;
use anec_base::Result;
use anec_bundle::{Bundle, ProjectionActivation};

/// Host tensors of a bundle.
#[derive(Debug)]
pub struct HostTables {
    file: MappedFile,
    embedding: Matrix,
    vocab_size: u64,
    rope: BTreeMap<String, Vec<Variant>>,
    rotation: Option<Matrix>,
    /// Elements of the rotation, once they were needed.
    rotation_elements: OnceLock<Arc<Array2<f32>>>,
    positions: Option<Matrix>,
    token_types: Option<Matrix>,
    attention_bias: Option<Matrix>,
    per_layer: Option<Matrix>,
    num_layers: usize,
    projections: Vec<(Matrix, Option<Matrix>, ProjectionActivation)>,
}

/// Consecutive tokens of a text.
#[derive(Clone, Copy, Debug)]
pub struct TokenRun<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// Types of the tokens; empty means all 0.
    pub types: &'a [u32],
    /// Position of the first token.
    pub position: u64,
}

/// Rotary table for texts up to a length.
#[derive(Debug)]
struct Variant {
    max_length: u64,
    cos: Matrix,
    sin: Matrix,
}

/// Matrix within the file.
#[derive(Clone, Debug)]
struct Matrix {
    rows: u64,
    columns: usize,
    dtype: Dtype,
    bytes: Range<usize>,
}

/// Variant of each rotary table that a text uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RopeChoice {
    variants: BTreeMap<String, usize>,
    /// Number of positions of the chosen tables.
    pub rows: u64,
}

/// Cosines or sines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryPart {
    /// Cosines.
    Cos,
    /// Sines.
    Sin,
}

impl HostTables {
    /// Opens the host tensors of a bundle.
    ///
    /// # Errors
    /// If the file is missing or damaged, or a tensor is missing or differs in shape from the bundle.
    pub fn open(bundle: &Bundle, folder: &Path) -> Result<Self> {
        let path = folder.join(&bundle.host.file.file);
        Self::from_file(bundle, MappedFile::open(&path)?)
    }

    /// Reads the host tensors of an open file.
    ///
    /// # Errors
    /// Returns any error of [`HostTables::open`].
    pub fn from_file(bundle: &Bundle, file: MappedFile) -> Result<Self> {
        let tensors = Tensors::read(&file)?;
        let embedding = tensors.matrix(&bundle.host.embedding, Dtype::F16)?;
        let size = bundle.model.hidden_size;
        let embedding_size = bundle.host.embedding_size.unwrap_or(size).min(size);
        let expected = [bundle.model.vocab_size, embedding_size];
        if [embedding.rows, embedding.columns as u64] != expected {
            let found = [embedding.rows, embedding.columns as u64];
            let problem = format!("tensor `{}` has shape {found:?}, expected {expected:?}", bundle.host.embedding);
            return Err(RuntimeError::bundle(file.path(), problem).into());
        }
        let mut rope = BTreeMap::new();
        for table in &bundle.host.rope {
            let variants = table
                .variants
                .iter()
                .map(|variant| {
                    let [cos, sin] = [&variant.cos, &variant.sin].map(|name| tensors.matrix(name, Dtype::F32));
                    let (cos, sin) = (cos?, sin?);
                    if (cos.rows, cos.columns) != (sin.rows, sin.columns) {
                        let problem = format!("tensors `{}` and `{}` differ in shape", variant.cos, variant.sin);
                        return Err(RuntimeError::bundle(file.path(), problem));
                    }
                    Ok(Variant { max_length: variant.max_length, cos, sin })
                })
                .collect::<Result<Vec<_>, _>>()?;
            if !variants.is_sorted_by_key(|variant| variant.max_length) || variants.is_empty() {
                let problem = format!("rotary table `{}` has no variants in ascending order", table.table);
                return Err(RuntimeError::bundle(file.path(), problem).into());
            }
            rope.insert(table.table.clone(), variants);
        }
        let rotation = bundle.host.rotation.as_ref().map(|name| tensors.matrix(name, Dtype::F32)).transpose()?;
        if let Some(matrix) = rotation.as_ref().filter(|q| [q.rows, q.columns as u64] != [size, size]) {
            let (rows, columns) = (matrix.rows, matrix.columns);
            let problem = format!("the rotation of hidden states has {rows} x {columns}, expected {size} x {size}");
            return Err(RuntimeError::bundle(file.path(), problem).into());
        }
        let num_layers = bundle.model.num_layers;
        let per_layer = bundle.host.per_layer_embedding.as_ref();
        let per_layer = per_layer.map(|name| tensors.matrix(name, Dtype::F16)).transpose()?;
        if let Some(table) = &per_layer
            && (table.rows != bundle.model.vocab_size || table.columns % num_layers.max(1) != 0)
        {
            let (rows, columns, vocab) = (table.rows, table.columns, bundle.model.vocab_size);
            let problem = format!(
                "what layers are told of tokens has {rows} x {columns}, expected {vocab} rows, and as much for each of \
                 {num_layers} layers"
            );
            return Err(RuntimeError::bundle(file.path(), problem).into());
        }
        let table = |name: &Option<String>| -> Result<Option<Matrix>, RuntimeError> {
            let Some(name) = name else { return Ok(None) };
            let table = tensors.matrix(name, Dtype::F32)?;
            if table.columns as u64 != embedding_size || table.rows == 0 {
                let problem = format!("tensor `{name}` has {} columns, expected {embedding_size}", table.columns);
                return Err(RuntimeError::bundle(file.path(), problem));
            }
            Ok(Some(table))
        };
        let (positions, token_types) = (table(&bundle.host.positions)?, table(&bundle.host.token_types)?);
        let attention_bias =
            bundle.host.attention_bias.as_ref().map(|name| tensors.matrix(name, Dtype::F32)).transpose()?;
        if let Some(matrix) = attention_bias.as_ref().filter(|bias| bias.rows % 2 == 0) {
            let problem = format!("there are attention biases for {} distances, expected an odd number", matrix.rows);
            return Err(RuntimeError::bundle(file.path(), problem).into());
        }
        let mut projections = Vec::new();
        let mut width = size;
        for projection in bundle.model.embedding().map_or(&[][..], |embedding| &embedding.projections) {
            let weight = tensors.matrix(&projection.weight, Dtype::F32)?;
            let bias = projection.bias.as_ref().map(|name| tensors.matrix(name, Dtype::F32)).transpose()?;
            let fits = bias.as_ref().is_none_or(|bias| bias.rows == 1 && bias.columns as u64 == weight.rows);
            if weight.columns as u64 != width || weight.rows == 0 || !fits {
                let problem = format!("projection `{}` doesn't fit what it is given", projection.weight);
                return Err(RuntimeError::bundle(file.path(), problem).into());
            }
            width = weight.rows;
            projections.push((weight, bias, projection.activation));
        }
        drop(tensors);
        let vocab_size = bundle.model.vocab_size;
        Ok(HostTables {
            embedding,
            vocab_size,
            rope,
            rotation,
            rotation_elements: OnceLock::new(),
            positions,
            token_types,
            attention_bias,
            per_layer,
            num_layers,
            projections,
            file,
        })
    }

    /// Returns the matrix that rotates hidden states, if any.
    pub(super) fn rotation(&self) -> Option<Arc<Array2<f32>>> {
        let matrix = self.rotation.as_ref()?;
        Some(self.rotation_elements.get_or_init(|| Arc::new(self.whole(matrix))).clone())
    }

    /// Returns the attention biases by distance, `[2 r + 1, heads]`, if any.
    pub(super) fn attention_bias(&self) -> Option<Array2<f32>> {
        Some(self.whole(self.attention_bias.as_ref()?))
    }

    /// Returns the projections of the pooled vector, in their order.
    pub(super) fn projections(&self) -> Vec<HostProduct> {
        let product = |(weight, bias, activation): &(Matrix, Option<Matrix>, ProjectionActivation)| HostProduct {
            weight: self.whole(weight),
            bias: bias.as_ref().map(|bias| self.whole(bias).into_raw_vec_and_offset().0),
            activation: *activation,
        };
        self.projections.iter().map(product).collect()
    }

    fn whole(&self, matrix: &Matrix) -> Array2<f32> {
        let mut values = Array2::zeros((matrix.rows as usize, matrix.columns));
        for (index, mut row) in values.outer_iter_mut().enumerate() {
            let mut read = vec![0.0; matrix.columns];
            self.read_row(matrix, index as u64, &mut read);
            row.iter_mut().zip(read).for_each(|(value, read)| *value = read);
        }
        values
    }

    /// Writes embeddings of tokens as columns, with learned position and type embeddings added. `out` is `[hidden_size,
    /// size]`; columns past the tokens and channels past the embeddings are left as they are.
    ///
    /// # Errors
    /// If a token isn't in the vocabulary, or a position or type doesn't exist.
    pub fn embed(&self, text: TokenRun<'_>, size: usize, out: &mut [f32]) -> Result<(), RuntimeError> {
        let TokenRun { tokens, types, position } = text;
        for (t, token) in tokens.iter().enumerate() {
            if u64::from(*token) >= self.vocab_size {
                return Err(RuntimeError::Token { token: *token, vocab_size: self.vocab_size });
            }
            self.read_blocks(&self.embedding, u64::from(*token), |first, values| {
                values.iter().zip(first..).for_each(|(value, channel)| out[channel * size + t] = *value);
            });
            let mut add = |table: &Matrix, index: u64| {
                self.read_blocks(table, index, |first, values| {
                    values.iter().zip(first..).for_each(|(value, channel)| out[channel * size + t] += value);
                });
            };
            if let Some(table) = &self.positions {
                let position = position + t as u64;
                if position >= table.rows {
                    return Err(RuntimeError::ContextFull { tokens: position + 1, context: table.rows });
                }
                add(table, position);
            }
            if let Some(table) = &self.token_types {
                // a model of one type can't tell the second text of a pair apart
                let kind = types.get(t).copied().map_or(0, u64::from).min(table.rows - 1);
                add(table, kind);
            }
        }
        Ok(())
    }

    /// Returns the per-layer inputs of tokens as columns `[layers * width, size]`; columns past the tokens are zero.
    ///
    /// # Errors
    /// If the table is missing, or a token isn't in the vocabulary.
    pub fn per_layer_input(&self, tokens: &[u32], layers: Range<usize>, size: usize) -> Result<Vec<f32>, RuntimeError> {
        let Some(table) = self.per_layer.as_ref().filter(|_| layers.end <= self.num_layers) else {
            return Err(RuntimeError::bundle(self.file.path(), "there is no table of what layers are told of tokens"));
        };
        let width = table.columns / self.num_layers;
        let mut row = vec![0.0; table.columns];
        let mut out = vec![0.0; layers.len() * width * size];
        for (t, token) in tokens.iter().enumerate() {
            if u64::from(*token) >= self.vocab_size {
                return Err(RuntimeError::Token { token: *token, vocab_size: self.vocab_size });
            }
            self.read_row(table, u64::from(*token), &mut row);
            for (channel, value) in row[layers.start * width..layers.end * width].iter().enumerate() {
                out[channel * size + t] = *value;
            }
        }
        Ok(out)
    }

    /// Chooses the variants for a text of `length` tokens: in each table the first that is long enough.
    ///
    /// # Errors
    /// If a table has none.
    pub fn choose_rope(&self, length: u64) -> Result<RopeChoice, RuntimeError> {
        let mut choice = RopeChoice { variants: BTreeMap::new(), rows: u64::MAX };
        for (table, variants) in &self.rope {
            let fits = |variant: &Variant| variant.max_length >= length && variant.cos.rows >= length;
            let Some(index) = variants.iter().position(fits) else {
                let context = variants.iter().map(|variant| variant.cos.rows).max().unwrap_or(0);
                return Err(RuntimeError::ContextFull { tokens: length, context });
            };
            choice.rows = choice.rows.min(variants[index].cos.rows).min(variants[index].max_length);
            choice.variants.insert(table.clone(), index);
        }
        Ok(choice)
    }

    /// Appends rows of a rotary table from `position` on, row-major: `real` rows, then the last one repeated up to
    /// `size`.
    ///
    /// # Errors
    /// If there is no such table, or it has too few rows.
    pub fn rope(
        &self,
        choice: &RopeChoice,
        table: &str,
        wave: RotaryPart,
        position: u64,
        [real, size]: [usize; 2],
        rows: &mut Vec<f32>,
    ) -> Result<(), RuntimeError> {
        let variant = choice.variants.get(table).and_then(|index| self.rope.get(table)?.get(*index));
        let Some(variant) = variant else {
            return Err(RuntimeError::bundle(self.file.path(), format!("there is no rotary table `{table}`")));
        };
        let matrix = match wave {
            RotaryPart::Cos => &variant.cos,
            RotaryPart::Sin => &variant.sin,
        };
        if position + real as u64 > matrix.rows {
            return Err(RuntimeError::ContextFull { tokens: position + real as u64, context: matrix.rows });
        }
        let before = rows.len();
        rows.resize(before + size * matrix.columns, 0.0);
        for (t, row) in rows[before..].chunks_exact_mut(matrix.columns).enumerate() {
            self.read_row(matrix, position + t.min(real.saturating_sub(1)) as u64, row);
        }
        Ok(())
    }

    fn read_row(&self, matrix: &Matrix, row: u64, out: &mut [f32]) {
        self.read_blocks(matrix, row, |first, values| out[first..][..values.len()].copy_from_slice(values));
    }

    /// Passes a row to `show` in blocks, each with the index of its first element.
    fn read_blocks(&self, matrix: &Matrix, row: u64, mut show: impl FnMut(usize, &[f32])) {
        const BLOCK: usize = 256;
        let bytes_each = matrix.dtype.bitsize() / 8;
        let width = matrix.columns * bytes_each;
        let start = matrix.bytes.start + row as usize * width;
        let bytes = &self.file.bytes()[start..start + width];
        let (mut halves, mut floats) = ([half::f16::ZERO; BLOCK], [0.0; BLOCK]);
        for (index, bytes) in bytes.chunks(BLOCK * bytes_each).enumerate() {
            let floats = &mut floats[..bytes.len() / bytes_each];
            if matrix.dtype == Dtype::F16 {
                let halves = &mut halves[..floats.len()];
                for (half, bytes) in halves.iter_mut().zip(bytes.chunks_exact(2)) {
                    *half = half::f16::from_le_bytes([bytes[0], bytes[1]]);
                }
                halves.convert_to_f32_slice(floats);
            } else {
                for (value, bytes) in floats.iter_mut().zip(bytes.chunks_exact(4)) {
                    *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
            show(index * BLOCK, floats);
        }
    }
}

/// Header of a safetensors file.
struct Tensors {
    path: PathBuf,
    start: usize,
    length: usize,
    metadata: safetensors::tensor::Metadata,
}

impl Tensors {
    fn read(file: &MappedFile) -> Result<Self, RuntimeError> {
        let (header, metadata) = SafeTensors::read_metadata(file.bytes())
            .map_err(|error| RuntimeError::bundle(file.path(), format!("it isn't a safetensors file: {error}")))?;
        Ok(Tensors { path: file.path().to_owned(), start: 8 + header, length: file.bytes().len(), metadata })
    }

    fn matrix(&self, name: &str, dtype: Dtype) -> Result<Matrix, RuntimeError> {
        let error = |problem: String| RuntimeError::bundle(&self.path, format!("tensor `{name}` {problem}"));
        let info = self.metadata.info(name).ok_or_else(|| error("is missing".into()))?;
        let &[rows, columns] = info.shape.as_slice() else {
            return Err(error(format!("has shape {:?}, expected two dimensions", info.shape)));
        };
        if info.dtype != dtype {
            return Err(error(format!("holds {:?}, expected {dtype:?}", info.dtype)));
        }
        let (first, end) = info.data_offsets;
        let bytes = self.start + first..self.start + end;
        let expected = rows.checked_mul(columns).and_then(|n| n.checked_mul(info.dtype.bitsize() / 8));
        if bytes.end > self.length || expected != Some(bytes.len()) || columns == 0 {
            return Err(error(format!("has {} bytes, which its shape {:?} contradicts", bytes.len(), info.shape)));
        }
        Ok(Matrix { rows: rows as u64, columns, dtype: info.dtype, bytes })
    }
}

/// Layer `activation(W x + b)`.
pub(super) struct HostProduct {
    pub(super) weight: Array2<f32>,
    pub(super) bias: Option<Vec<f32>>,
    pub(super) activation: ProjectionActivation,
}

#[cfg(test)]
mod tests {
    use super::super::fake;
    use super::*;
    use safetensors::tensor::TensorView;

    #[test]
    fn tensors_of_another_type_than_the_bundles_are_refused() {
        let bundle = fake::bundle(&fake::FakeOptions::default());
        let bytes = vec![0; 4 * fake::VOCAB * fake::HIDDEN];
        let embedding = TensorView::new(Dtype::F32, vec![fake::VOCAB, fake::HIDDEN], &bytes).unwrap();
        let file = safetensors::serialize([("embedding", embedding)], None).unwrap();
        let file = MappedFile::from_bytes(Path::new("host.safetensors"), file);
        let error = HostTables::from_file(&bundle, file).unwrap_err().to_string();
        assert_eq!(error, "host.safetensors: tensor `embedding` holds F32, expected F16");
    }
}
