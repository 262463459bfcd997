//! Small models on disk, and the program under test.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value as Json;

/// A path of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The program, where there is no Core ML compiler: a test that wants one brings its own.
pub fn anec() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anec"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env("PATH", "").env_remove("RUST_BACKTRACE");
    command
}

/// Runs the program; gives exit code, stdout and stderr.
pub fn run(arguments: &[&str]) -> (i32, String, String) {
    finish(anec().args(arguments).output().unwrap())
}

/// What a finished program gave.
pub fn finish(output: Output) -> (i32, String, String) {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

/// Copies a folder without its sub-folders.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

/// Every file under a folder with its content, by name.
pub fn contents(folder: &Path) -> std::collections::BTreeMap<String, Vec<u8>> {
    fn visit(root: &Path, folder: &Path, out: &mut std::collections::BTreeMap<String, Vec<u8>>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                visit(root, &path, out);
            } else {
                let name = path.strip_prefix(root).unwrap().display().to_string();
                out.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    let mut out = Default::default();
    visit(folder, folder, &mut out);
    out
}

/// Reads a JSON file.
pub fn json(path: &Path) -> Json {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Changes a JSON file.
pub fn edit_json(path: &Path, edit: impl FnOnce(&mut Json)) {
    let mut value = json(path);
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
