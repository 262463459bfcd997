//! Small models on disk: copied and changed.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::path::Path;

use serde_json::Value as Json;

/// Copies a folder.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// Changes a JSON file.
pub fn edit_json(path: &Path, edit: impl FnOnce(&mut Json)) {
    let mut value: Json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    edit(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

/// A tensor of a safetensors file: name, dtype, shape, bytes.
pub type RawTensor = (String, safetensors::Dtype, Vec<usize>, Vec<u8>);

/// Changes the tensors of a safetensors file.
pub fn edit_tensors(path: &Path, edit: impl FnOnce(&mut Vec<RawTensor>)) {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<RawTensor> =
        file.tensors().into_iter().map(|(name, t)| (name, t.dtype(), t.shape().to_vec(), t.data().to_vec())).collect();
    edit(&mut tensors);
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}
