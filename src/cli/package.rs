//! `anec run X.mlpackage`: one call of a function of any package, on the CPU.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::json;

use super::usage::UsageError;
use super::{print, print_json};
use anec::base::Result;
use anec::base::input::read;
use anec::base::output::write_file;
use anec::exec::{Executable, Precision, Tensor, TensorData, WeightCache};
use anec::package;

/// Largest size in bytes of a file of tensors.
const MAX_TENSOR_BYTES: u64 = 64 << 30;

/// Options for running any package.
#[derive(Debug, clap::Args)]
pub struct PackageArgs {
    /// Inputs of an .mlpackage (a safetensors file), which is called once instead of generating text
    #[arg(long, value_name = "FILE", requires = "out", conflicts_with_all = ["prompt", "ids"])]
    pub inputs: Option<PathBuf>,
    /// Output file of an .mlpackage's results
    #[arg(short, long, value_name = "F.safetensors", requires = "inputs")]
    out: Option<PathBuf>,
    /// Function of an .mlpackage [default: the package's default function]
    #[arg(long, value_name = "NAME", requires = "inputs")]
    function: Option<String>,
    /// States of an .mlpackage: read if the file exists, and written after the call
    #[arg(long, value_name = "F.safetensors", requires = "inputs")]
    state: Option<PathBuf>,
}

impl PackageArgs {
    /// Calls a function of the package.
    pub fn run(&self, path: &Path, precision: Precision, as_json: bool) -> Result<u8> {
        let (Some(inputs), Some(out)) = (&self.inputs, &self.out) else { return Ok(0) };
        let package = package::open(path)?;
        let name = self.function.as_deref().unwrap_or(&package.program.default_function);
        let function = package.program.function(name).ok_or_else(|| {
            let problem = format!("{}: there is no function `{name}`", path.display());
            UsageError::new(problem, "`anec inspect` lists the functions")
        })?;
        let executable = Executable::compile(function, precision, &WeightCache::new())?;
        let mut state = executable.new_state();
        if let Some(file) = self.state.as_ref().filter(|file| file.exists()) {
            for (name, tensor) in tensors(file)? {
                let declared = executable.states().find(|(own, _)| *own == name);
                let fits = declared.is_some_and(|(_, _)| state.get(&name).is_some_and(|own| own.shape == tensor.shape));
                if !fits {
                    let problem =
                        format!("{}: `{name}` {:?} is no state of the function", file.display(), tensor.shape);
                    return Err(UsageError::new(problem, "`anec inspect` lists the states with their shapes").into());
                }
                state.set(&name, tensor);
            }
        }
        let inputs = tensors(inputs)?;
        let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let outputs = executable.run(&inputs, &mut state)?;
        write(out, outputs.iter().map(|(name, tensor)| (name.as_str(), tensor)))?;
        if let Some(file) = &self.state {
            let states: Vec<_> = executable.states().filter_map(|(name, _)| Some((name, state.get(name)?))).collect();
            write(file, states.iter().map(|(name, tensor)| (*name, &**tensor)))?;
        }
        if as_json {
            let shapes: HashMap<&str, &[usize]> =
                outputs.iter().map(|(name, tensor)| (name.as_str(), &tensor.shape[..])).collect();
            print_json(&json!({ "function": name, "out": out, "outputs": shapes }));
        } else {
            let shapes: Vec<String> =
                outputs.iter().map(|(name, tensor)| format!("{name} {:?}", tensor.shape)).collect();
            print(&format!("{}: {name}: {}", out.display(), shapes.join(", ")));
        }
        Ok(0)
    }
}

/// Tensors of a file, by name. Floats become f32, integers i32.
fn tensors(path: &Path) -> Result<Vec<(String, Tensor)>> {
    let wrong = |problem: String| {
        let problem = format!("{}: {problem}", path.display());
        UsageError::new(problem, "give a safetensors file with a tensor for each name, f32, f16, i32 or bool")
    };
    let bytes = read(path, MAX_TENSOR_BYTES)?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| wrong(error.to_string()))?;
    let named = file.tensors().into_iter().map(|(name, view)| {
        let data = data(&view).ok_or_else(|| wrong(format!("`{name}` has the type {:?}", view.dtype())))?;
        Ok((name, Tensor::new(view.shape(), data)))
    });
    named.collect()
}

fn data(view: &TensorView<'_>) -> Option<TensorData> {
    let bytes = view.data();
    Some(match view.dtype() {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>().into(),
        Dtype::F16 => bytes.as_chunks().0.iter().map(|b| f16(*b)).collect::<Vec<f32>>().into(),
        Dtype::I32 => bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect::<Vec<i32>>().into(),
        Dtype::I8 => bytes.iter().map(|b| i32::from(b.cast_signed())).collect::<Vec<i32>>().into(),
        Dtype::U8 => bytes.iter().map(|b| i32::from(*b)).collect::<Vec<i32>>().into(),
        Dtype::BOOL => TensorData::Bool(bytes.iter().map(|b| *b != 0).collect()),
        _ => return None,
    })
}

fn f16(bytes: [u8; 2]) -> f32 {
    half::f16::from_le_bytes(bytes).to_f32()
}

/// Writes tensors as a safetensors file.
fn write<'a>(path: &Path, tensors: impl Iterator<Item = (&'a str, &'a Tensor)>) -> Result<()> {
    let tensors: Vec<(&str, Dtype, &[usize], Vec<u8>)> = tensors
        .map(|(name, tensor)| {
            let (dtype, bytes) = match &tensor.data {
                TensorData::F32(values) => (Dtype::F32, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
                TensorData::I32(values) => (Dtype::I32, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
                TensorData::Bool(values) => (Dtype::BOOL, values.iter().map(|value| u8::from(*value)).collect()),
            };
            (name, dtype, &tensor.shape[..], bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        // the bytes were made for this type and shape
        (*name, TensorView::new(*dtype, shape.to_vec(), bytes).expect("bytes fit their shape"))
    });
    let bytes = safetensors::serialize(views, None).expect("tensors have distinct names");
    Ok(write_file(path, &bytes)?)
}
