//! Quantized checkpoints of Hugging Face folders: weights as integers or small floats with scales beside them.
//!
//! Each group of tensors becomes one tensor under the weight's name, decoded when it is read, to the values that the
//! format's own library gives, in the type that it gives them in.
//!
//! | `quant_method` | tensors of a weight |
//! |---|---|
//! | `fp8`, `fbgemm_fp8` | `weight` in FP8, `weight_scale_inv` by block or `weight_scale` by row |
//! | `compressed-tensors` | `weight_packed` or `weight`, `weight_scale`, `weight_zero_point`, `weight_g_idx`, `weight_shape` |
//! | `gptq` | `qweight`, `qzeros`, `scales`, `g_idx` |
//! | `awq` | `qweight`, `qzeros`, `scales` |
//! | `bitsandbytes` | `weight` with `weight.absmax`, `weight.quant_map`, …; or with `SCB` |
//! | `quantization` (MLX) | `weight`, `scales`, `biases` |
//!
//! Scales of activations are left out: activations aren't quantized here.

mod bits;
mod bitsandbytes;
mod compressed;
mod fp8;
mod gptq;
mod mlx;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};
use serde_json::Value as Json;

use super::dtype::SourceDtype;
use super::error::{Result, SourceError};
use super::tensor::SourceTensor;
use super::weight::{Integers, Rounding, SourceWeight};

/// Key of the settings in `config.json`, and MLX's.
const KEY: &str = "quantization_config";
const MLX_KEY: &str = "quantization";

/// Methods whose tensors are read elsewhere, by the family.
const OF_FAMILIES: [&str; 1] = ["mxfp4"];

/// Replaces the tensors of a quantized checkpoint by its weights, and removes the settings from the configuration.
///
/// # Errors
/// Returns an error if the method isn't supported, or a tensor is missing or doesn't fit.
pub(super) fn dequantized(place: &Path, config: &mut Json, tensors: Vec<SourceTensor>) -> Result<Vec<SourceTensor>> {
    let Some(map) = config.as_object_mut() else { return Ok(tensors) };
    let settings = map.get(KEY).filter(|settings| settings.is_object()).cloned();
    let mlx = map.get(MLX_KEY).filter(|settings| settings.is_object()).cloned();
    let method = settings.as_ref().map(|settings| settings["quant_method"].as_str().unwrap_or_default().to_owned());
    let (key, method, settings) = match (settings, method, mlx) {
        (_, Some(method), None) if OF_FAMILIES.contains(&method.as_str()) => return Ok(tensors),
        // MLX writes its settings under both keys
        (Some(settings), Some(method), None) if !method.is_empty() => (KEY, method, settings),
        (_, _, Some(settings)) => (MLX_KEY, "mlx".to_owned(), settings),
        _ => return Ok(tensors),
    };
    let dtype = ["dtype", "torch_dtype"].iter().find_map(|key| map.get(*key)?.as_str());
    let count = tensors.len();
    let checkpoint = Checkpoint {
        place,
        key,
        settings: &settings,
        dtype: dtype.and_then(Rounding::of_name).unwrap_or(Rounding::None),
        tensors: tensors.into_iter().map(|tensor| (tensor.name().to_owned(), tensor)).collect(),
    };
    let read = match method.as_str() {
        "fp8" | "fbgemm_fp8" => fp8::read(checkpoint)?,
        "compressed-tensors" => compressed::read(checkpoint)?,
        "gptq" => gptq::read_gptq(checkpoint)?,
        "awq" => gptq::read_awq(checkpoint)?,
        "bitsandbytes" => bitsandbytes::read(checkpoint)?,
        "mlx" => mlx::read(checkpoint)?,
        other => {
            let problem = format!(
                "it is \"{other}\", expected one of fp8, fbgemm_fp8, compressed-tensors, gptq, awq, bitsandbytes, mxfp4"
            );
            let wrong = SourceError::key(place, &format!("{KEY}.quant_method"), problem);
            return Err(wrong.advise("convert the model that it was quantized from"));
        }
    };
    // every method has tensors beside those of a model
    if read.len() == count {
        let wrong = SourceError::key(place, key, "no tensor is in the format that it describes");
        return Err(wrong.advise("download the model again, or remove the key if the weights aren't quantized"));
    }
    map.remove(KEY);
    map.remove(MLX_KEY);
    Ok(read)
}

/// Tensors of a quantized checkpoint and its settings.
struct Checkpoint<'a> {
    place: &'a Path,
    key: &'static str,
    settings: &'a Json,
    /// Type of the model.
    dtype: Rounding,
    tensors: BTreeMap<String, SourceTensor>,
}

impl Checkpoint<'_> {
    /// An error about a setting.
    fn wrong(&self, key: &str, problem: &str) -> SourceError {
        SourceError::key(self.place, &format!("{}.{key}", self.key), problem)
            .advise("convert the model that it was quantized from")
    }

    /// Returns the names before `suffix` of all tensors that end with it.
    fn bases(&self, suffix: &str) -> Vec<String> {
        self.tensors.keys().filter_map(|name| name.strip_suffix(suffix)).map(str::to_owned).collect()
    }

    /// Takes a tensor that must be there.
    fn take(&mut self, name: &str) -> Result<SourceTensor> {
        self.tensors.remove(name).ok_or_else(|| SourceError::MissingTensor {
            source_name: self.place.display().to_string(),
            tensor: name.to_owned(),
            nearest: Vec::new(),
        })
    }

    /// Removes tensors that play no part.
    fn drop_all(&mut self, suffixes: &[&str]) {
        self.tensors.retain(|name, _| !suffixes.iter().any(|suffix| name.ends_with(suffix)));
    }

    /// Adds the weight that `parts` stand for.
    fn put(&mut self, name: String, parts: &[&SourceTensor], dtype: SourceDtype, weight: SourceWeight) {
        let bytes = parts.iter().map(|tensor| tensor.byte_length()).sum();
        let path = parts.iter().find_map(|tensor| tensor.path()).unwrap_or(self.place);
        let tensor = SourceTensor::computed(name.clone(), weight, dtype, bytes, path);
        self.tensors.insert(name, tensor);
    }

    fn finish(self) -> Vec<SourceTensor> {
        self.tensors.into_values().collect()
    }
}

/// Function that decodes one row.
trait DecodeRow: Fn(u64, &mut [f32]) -> Result<()> + Send + Sync + 'static {}

impl<F: Fn(u64, &mut [f32]) -> Result<()> + Send + Sync + 'static> DecodeRow for F {}

/// Returns the matrix whose rows `decode` gives. `parts` are the tensors that it reads.
fn matrix(name: &str, shape: [u64; 2], parts: &[&SourceTensor], decode: impl DecodeRow) -> SourceWeight {
    decoded(name, shape, parts, None, decode)
}

/// Returns the matrix of some integers. `parts` are the tensors that they are read from.
fn integer_matrix(name: &str, rows: u64, parts: &[&SourceTensor], integers: Integers) -> SourceWeight {
    let (shape, integers) = ([rows, integers.columns], Arc::new(integers));
    decoded(name, shape, parts, Some(integers.clone()), move |row, out| {
        integers.decode(row as usize, out);
        Ok(())
    })
}

fn decoded(
    name: &str,
    [rows, columns]: [u64; 2],
    parts: &[&SourceTensor],
    integers: Option<Arc<Integers>>,
    decode: impl DecodeRow,
) -> SourceWeight {
    let parts = parts.iter().map(|tensor| SourceWeight::from((*tensor).clone())).collect();
    SourceWeight::decoded_rows(name, [rows, columns], parts, integers, move |first, out| {
        let width = usize::try_from(columns).unwrap_or(usize::MAX).max(1);
        out.chunks_exact_mut(width).zip(first..).try_for_each(|(out, row)| decode(row, out))
    })
}

/// Reads a row of a matrix of bytes, as integers with a sign.
fn bytes_as_integers(tensor: &SourceTensor, row: usize, out: &mut [i16]) {
    let bytes = &tensor.bytes().unwrap_or_default()[row * out.len()..];
    out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = i16::from(*byte as i8));
}

/// Bytes of a tensor of one of the types, and of a shape.
fn bytes_of<'t>(tensor: &'t SourceTensor, dtypes: &[SourceDtype], shape: &[u64]) -> Result<&'t [u8]> {
    let wrong = |problem: String| SourceError::tensor(tensor.path().unwrap_or(Path::new("")), tensor.name(), problem);
    if !dtypes.contains(&tensor.dtype()) {
        return Err(wrong(format!("its type is {}, expected {}", tensor.dtype(), dtypes[0])));
    }
    if tensor.shape() != shape {
        return Err(wrong(format!("its shape is {:?}, expected {shape:?}", tensor.shape())));
    }
    tensor.bytes().ok_or_else(|| wrong("its bytes aren't in a file".into()))
}

/// Numbers of a tensor, read one by one where they are.
#[derive(Clone)]
struct Numbers(SourceTensor);

impl Numbers {
    fn new(tensor: &SourceTensor) -> Result<Self> {
        bytes_of(tensor, &[SourceDtype::F16, SourceDtype::BF16, SourceDtype::F32], tensor.shape())?;
        Ok(Numbers(tensor.clone()))
    }

    #[inline]
    fn get(&self, index: usize) -> f32 {
        let bytes = self.0.bytes().unwrap_or_default();
        let half = || bytes.get(2 * index..).and_then(|rest| rest.first_chunk()).copied().unwrap_or_default();
        match self.0.dtype() {
            SourceDtype::F16 => f16::from_le_bytes(half()).to_f32(),
            SourceDtype::BF16 => bf16::from_le_bytes(half()).to_f32(),
            _ => f32::from_bits(bits::word(bytes, index)),
        }
    }
}

/// Numbers of a small tensor.
fn numbers(tensor: &SourceTensor) -> Result<Vec<f32>> {
    let mut values = vec![0.0; tensor.elements() as usize];
    tensor.read(0, &mut values)?;
    Ok(values)
}

#[cfg(test)]
mod tests;
