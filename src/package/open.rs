//! Reading packages, ours or anybody's.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use coreml_proto::{FeatureDescription, FunctionDescription, ModelDescription, mil_spec, model};

use super::blob::WeightFile;
use super::features::{self, SYMBOLS_KEY};
use super::interface::Interface;
use super::manifest::{Manifest, PackageMetadata};
use super::symbols;
use super::{MODEL_PATH, PackageError};
use anec_base::{Result, input, path_inside};
use anec_mil::codec::{self, BlobPlace, BlobSource};
use anec_mil::{Data, Program, TensorType};

/// Maximum size of a model's message in bytes; a protocol buffer has at most 2 GiB.
const MAX_MODEL: u64 = 1 << 31;

/// Most files and folders that are listed of a package; real ones have a handful.
const MAX_FILES: usize = 10_000;

/// Opened package.
#[derive(Debug)]
pub struct Package {
    /// Path of the folder or the `.mlmodel` file.
    pub path: PathBuf,
    /// Program. Functions are in the order of the description, which also gives their symbols and ranges.
    pub program: Program,
    /// Description of each function.
    pub interfaces: Vec<Interface>,
    /// Metadata of the model.
    pub metadata: PackageMetadata,
    /// Build tools and their versions, if recorded: `coremltools-version` and the like.
    pub build_info: BTreeMap<String, String>,
    /// Version of the specification.
    pub specification_version: i32,
    /// Files, sorted by path.
    pub files: Vec<PackageFile>,
    /// Weight files that the program refers to.
    pub weights: Vec<Arc<WeightFile>>,
}

/// File of a package.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PackageFile {
    /// Path below the package's folder, with `/`.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
}

/// Returns what is wrong with a message in a reader's words; `problem` is the decoder's.
fn damage(problem: &str) -> String {
    const KNOWN: [(&str, &str); 9] = [
        ("buffer underflow", "it is cut off"),
        ("delimited length exceeded", "it is longer than what it is in"),
        ("invalid varint", "a number has no end"),
        ("invalid key value", "a field's number is too large"),
        ("invalid tag value", "a field has no number"),
        ("invalid wire type", "its bytes are of another type"),
        ("unexpected end group tag", "a group ends that didn't begin"),
        ("recursion limit reached", "it is nested too deeply"),
        ("data is not UTF-8 encoded", "it isn't UTF-8"),
    ];
    let problem = problem.strip_prefix("failed to decode Protobuf message: ").unwrap_or(problem);
    let Some((at, words)) = KNOWN.iter().find_map(|(decoder, words)| Some((problem.find(decoder)?, words))) else {
        return problem.to_owned();
    };
    // the fields on the way to the place, as `Model.description: FeatureDescription.name: `
    let fields: Vec<&str> = problem[..at].split(": ").filter(|field| field.contains('.')).collect();
    match fields.is_empty() {
        true => format!("the message: {words}"),
        false => format!("the message at {}: {words}", fields.join(", ")),
    }
}

/// Reads an `.mlpackage` folder or an `.mlmodel` file. Large constants stay in mapped files, which must not change
/// while the program is in use.
///
/// # Errors
/// Returns an error if a file can't be read or is damaged, or if the model is of another kind.
pub fn open(path: &Path) -> Result<Package> {
    let is_folder = fs::metadata(path).map_err(|e| PackageError::unreadable(path, e))?.is_dir();
    if is_folder && path.extension().is_some_and(|e| e == "mlmodelc") {
        let problem = "a compiled model can't be read back; give the package that it was compiled from";
        return Err(PackageError::corrupt(path, problem).into());
    }
    let model_path = if is_folder { Manifest::model_path(path)? } else { path.to_owned() };
    let bytes = input::read_file(&model_path, MAX_MODEL).map_err(|e| PackageError::unreadable(&model_path, e.error))?;
    let model = coreml_proto::decode_model(&bytes)
        .map_err(|e| PackageError::corrupt(&model_path, format!("no Core ML model: {}", damage(&e.to_string()))))?;
    drop(bytes);
    let message = match model.r#type {
        Some(model::Type::MlProgram(program)) => program,
        Some(other) => {
            return Err(PackageError::NotAProgram { path: model_path, kind: kind(&other) }.into());
        }
        None => return Err(PackageError::corrupt(&model_path, "no Core ML model: it has no kind").into()),
    };
    let description = model.description.unwrap_or_default();
    let functions = functions(&description, &message);
    let symbols = |name: &str| {
        let metadata = description.metadata.as_ref()?;
        metadata.user_defined.get(&format!("{SYMBOLS_KEY}{name}")).map(String::as_str)
    };
    let dimensions = message
        .functions
        .iter()
        .map(|(name, function)| {
            let inputs: &[FeatureDescription] =
                functions.iter().find(|f| f.name == *name).map_or(&[], |f| f.input.as_slice());
            (name.clone(), features::dimensions(inputs, function, symbols(name)))
        })
        .collect();
    let folder = model_path.parent().unwrap_or(Path::new(".")).to_owned();
    let weights = WeightFiles { folder, model: model_path, open: Mutex::default() };
    let mut program = codec::decode(&message, &dimensions, &weights)
        .map_err(|cause| PackageError::Invalid { path: weights.model.clone(), cause })?;
    for function in program.functions.iter_mut().filter(|function| symbols(&function.name).is_none()) {
        symbols::separate(function);
    }
    let position = |name: &str| functions.iter().position(|f| f.name == name).unwrap_or(functions.len());
    program.functions.sort_by_key(|f| position(&f.name));
    if program.function(&description.default_function_name).is_some() {
        program.default_function.clone_from(&description.default_function_name);
    }
    Ok(Package {
        path: path.to_owned(),
        program,
        interfaces: functions.iter().map(Interface::from_proto).collect(),
        metadata: PackageMetadata::from_proto(description.metadata.as_ref()),
        build_info: build_info(&message),
        specification_version: model.specification_version,
        files: list_files(path, is_folder)?,
        weights: weights.into_files(),
    })
}

/// Returns the descriptions of functions, in either form of the format.
fn functions(description: &ModelDescription, program: &mil_spec::Program) -> Vec<FunctionDescription> {
    if !description.functions.is_empty() {
        return description.functions.clone();
    }
    let name = match program.functions.keys().next() {
        Some(only) if program.functions.len() == 1 => only.clone(),
        _ => "main".to_owned(),
    };
    vec![FunctionDescription {
        name,
        input: description.input.clone(),
        output: description.output.clone(),
        state: description.state.clone(),
        ..Default::default()
    }]
}

/// Returns the format's name of a kind of model.
fn kind(model: &model::Type) -> String {
    /// Writer that keeps the leading identifier of a text.
    struct Name(String);
    impl std::fmt::Write for Name {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            let end = text.find(|c: char| !c.is_alphanumeric());
            self.0.push_str(&text[..end.unwrap_or(text.len())]);
            end.map_or(Ok(()), |_| Err(std::fmt::Error))
        }
    }
    // variants are named like the fields, capitalized; the rest of the debug text may be large
    let mut name = Name(String::new());
    let _ = std::fmt::write(&mut name, format_args!("{model:?}"));
    let mut chars = name.0.chars();
    chars.next().map(|first| first.to_ascii_lowercase().to_string() + chars.as_str()).unwrap_or_default()
}

/// Returns the build information that coremltools leaves in a program.
fn build_info(program: &mil_spec::Program) -> BTreeMap<String, String> {
    use mil_spec::value::{Value, immediate_value};
    let Some(Value::ImmediateValue(value)) = program.attributes.get("buildInfo").and_then(|v| v.value.as_ref()) else {
        return BTreeMap::new();
    };
    let Some(immediate_value::Value::Dictionary(dictionary)) = &value.value else { return BTreeMap::new() };
    let text = |value: &Option<mil_spec::Value>| value.as_ref().and_then(codec::as_string).map(str::to_owned);
    dictionary.values.iter().filter_map(|pair| Some((text(&pair.key)?, text(&pair.value)?))).collect()
}

/// Weight files by the names in the program, opened at first use.
struct WeightFiles {
    folder: PathBuf,
    model: PathBuf,
    open: Mutex<HashMap<String, Arc<WeightFile>>>,
}

impl WeightFiles {
    fn file(&self, name: &str) -> Result<Arc<WeightFile>, PackageError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = open.get(name) {
            return Ok(file.clone());
        }
        let below = name.strip_prefix(MODEL_PATH).and_then(path_inside).ok_or_else(|| {
            PackageError::corrupt(&self.model, format!("`{name}` names no weight file below the model's folder"))
        })?;
        let file = Arc::new(WeightFile::open(&self.folder.join(below))?);
        open.insert(name.to_owned(), file.clone());
        Ok(file)
    }

    fn into_files(self) -> Vec<Arc<WeightFile>> {
        let files = self.open.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut files: Vec<Arc<WeightFile>> = files.into_values().collect();
        files.sort_by(|a, b| a.path().cmp(b.path()));
        files
    }
}

impl BlobSource for WeightFiles {
    fn load(&self, place: &BlobPlace, ty: &TensorType, owner: &str) -> Result<Data> {
        Ok(self.file(&place.file_name)?.load(place.offset, ty, owner)?)
    }
}

/// Returns all files of a package with their sizes.
fn list_files(path: &Path, is_folder: bool) -> Result<Vec<PackageFile>, PackageError> {
    let mut out = Vec::new();
    if !is_folder {
        let bytes = fs::metadata(path).map_err(|e| PackageError::unreadable(path, e))?.len();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Ok(vec![PackageFile { path: name, bytes }]);
    }
    let mut folders = vec![(path.to_owned(), String::new())];
    while let Some((folder, prefix)) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(|e| PackageError::unreadable(&folder, e))? {
            let entry = entry.map_err(|e| PackageError::unreadable(&folder, e))?;
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            let unreadable = |e| PackageError::unreadable(&entry.path(), e);
            // links to files are followed, because download caches have them; links to folders aren't
            if entry.file_type().map_err(unreadable)?.is_dir() {
                folders.push((entry.path(), format!("{name}/")));
            } else {
                let bytes = fs::metadata(entry.path()).map_err(unreadable)?.len();
                out.push(PackageFile { path: name, bytes });
            }
            if out.len() + folders.len() > MAX_FILES {
                return Err(PackageError::corrupt(path, format!("more than {MAX_FILES} files are no package")));
            }
        }
    }
    out.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(out)
}
