//! Models whose placement is judged: bundles, packages and compiled models.

use std::path::{Path, PathBuf};

use anec_base::input::read_text;
use anec_base::{ContentDigest, FileError, Result};
use anec_bundle::Bundle;
use anec_coreml::CoreMlError;
use anec_coreml::array::{Element, StridedArray};
use anec_coreml::plan::listing_digest;
use anec_mil::verify::infer_types;
use anec_mil::{DataType, Function, Program};
use anec_package::Package;
use serde_json::Value as Json;

use crate::sizes;

/// Maximum size of a compiled model's text, in bytes.
const MAX_TEXT: u64 = 1 << 30;

/// Model whose placement is judged.
pub struct ResidencySubject {
    /// Name for messages.
    pub name: String,
    /// Packages or compiled models.
    pub parts: Vec<SubjectPart>,
    /// Calls that need a plan, in the order of the report.
    pub calls: Vec<SubjectCall>,
}

/// Package or compiled model.
pub struct SubjectPart {
    /// Folder name.
    pub name: String,
    /// Content.
    pub content: PartContent,
}

/// Content of a part.
pub enum PartContent {
    /// Package with its program.
    Package(Package),
    /// Compiled model, whose program can't be read.
    Compiled(CompiledModel),
}

/// Calls of a function that have a plan of their own.
#[derive(Clone, Debug)]
pub struct SubjectCall {
    /// Index of the part.
    pub part: usize,
    /// Name of the function.
    pub function: String,
    /// Number of tokens, or size of the flexible dimension; `None` for fixed shapes.
    pub tokens: Option<u64>,
    /// Whether this is the function's default shape.
    pub is_default: bool,
}

/// Properties of a compiled model (`.mlmodelc`).
pub struct CompiledModel {
    /// Path of the folder.
    pub path: PathBuf,
    /// Names of the functions, with the number of convolutions.
    pub functions: Vec<(String, usize)>,
    /// Inputs, outputs and names of the states of the default function, if all shapes are fixed.
    pub signature: Option<Signature>,
}

/// Arrays and states of a function.
#[derive(Clone, Debug, Default)]
pub struct Signature {
    /// Inputs.
    pub inputs: Vec<StridedArray>,
    /// Outputs.
    pub outputs: Vec<StridedArray>,
    /// Names of the states.
    pub states: Vec<String>,
}

impl Signature {
    /// Signature of a function; `None` if a shape isn't fixed.
    pub fn of(function: &Function) -> Option<Self> {
        // outputs of a function whose lengths were fixed still have the declared shapes
        let function = &infer_types(function).ok()?;
        let array = |value: &anec_mil::Value| {
            let ty = value.ty.tensor()?;
            let element = match ty.dtype {
                DataType::Fp16 => Element::F16,
                DataType::Fp32 => Element::F32,
                DataType::Int32 => Element::I32,
                _ => return None,
            };
            let shape = ty.fixed_shape()?.into_iter().map(|size| size as usize).collect();
            Some(StridedArray { name: value.name.clone(), element, shape })
        };
        Some(Signature {
            inputs: function.tensor_inputs().map(array).collect::<Option<_>>()?,
            outputs: function.outputs().map(array).collect::<Option<_>>()?,
            states: function.states().map(|state| state.name.clone()).collect(),
        })
    }
}

impl ResidencySubject {
    /// All functions of a bundle, at every number of tokens.
    ///
    /// # Errors
    /// If a package can't be read.
    pub fn of_bundle(bundle: &Bundle, folder: &Path) -> Result<Self> {
        let mut parts = Vec::new();
        for entry in &bundle.packages {
            let package = anec_package::open(&folder.join(&entry.package))?;
            parts.push(SubjectPart { name: entry.package.clone(), content: PartContent::Package(package) });
        }
        let mut calls = Vec::new();
        for entry in bundle.all_functions() {
            let Some(part) = parts.iter().position(|part| part.name == entry.package) else { continue };
            let default = parts[part].function(&entry.function).and_then(sizes::default_size);
            for tokens in entry.tokens.least()..=entry.tokens.most() {
                let is_default = default.is_none_or(|default| default == tokens);
                calls.push(SubjectCall { part, function: entry.function.clone(), tokens: Some(tokens), is_default });
            }
        }
        Ok(ResidencySubject { name: bundle.name.clone(), parts, calls })
    }

    /// All functions of a package, at the smallest, default and largest size of its flexible dimensions.
    pub fn of_package(name: &str, package: Package) -> Self {
        let mut calls = Vec::new();
        for function in &package.program.functions {
            let default = sizes::default_size(function);
            let sizes = sizes::size_values(function);
            let sizes = if sizes.is_empty() { vec![None] } else { sizes.into_iter().map(Some).collect() };
            calls.extend(sizes.into_iter().map(|tokens| SubjectCall {
                part: 0,
                function: function.name.clone(),
                tokens,
                is_default: tokens == default,
            }));
        }
        let parts = vec![SubjectPart { name: name.to_owned(), content: PartContent::Package(package) }];
        ResidencySubject { name: name.to_owned(), parts, calls }
    }

    /// All functions of a compiled model, at their default shapes.
    ///
    /// # Errors
    /// If its description can't be read.
    pub fn of_compiled(name: &str, path: &Path) -> Result<Self> {
        let model = CompiledModel::open(path)?;
        let call = |(function, _): &(String, usize)| SubjectCall {
            part: 0,
            function: function.clone(),
            tokens: None,
            is_default: true,
        };
        let calls = model.functions.iter().map(call).collect();
        let parts = vec![SubjectPart { name: name.to_owned(), content: PartContent::Compiled(model) }];
        Ok(ResidencySubject { name: name.to_owned(), parts, calls })
    }

    /// Part of a call.
    pub fn part(&self, call: &SubjectCall) -> &SubjectPart {
        &self.parts[call.part]
    }
}

impl SubjectPart {
    /// Program of a package; `None` for compiled models.
    pub fn program(&self) -> Option<&Program> {
        match &self.content {
            PartContent::Package(package) => Some(&package.program),
            PartContent::Compiled(_) => None,
        }
    }

    /// Function of a package; `None` for compiled models.
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.program()?.function(name)
    }

    /// Number of convolutions of a function; `None` if there is no such function.
    pub fn convs(&self, function: &str) -> Option<usize> {
        match &self.content {
            PartContent::Package(package) => {
                let function = package.program.function(function)?;
                Some(function.ops().filter(|op| op.operator == "conv").count())
            }
            PartContent::Compiled(model) => {
                model.functions.iter().find(|(name, _)| name == function).map(|(_, convs)| *convs)
            }
        }
    }

    /// Digest of the files on disk.
    ///
    /// # Errors
    /// If a file can't be read.
    pub fn digest(&self) -> Result<String, CoreMlError> {
        let (folder, files) = match &self.content {
            PartContent::Package(package) => {
                (&package.path, package.files.iter().map(|file| file.path.clone()).collect())
            }
            PartContent::Compiled(model) => {
                let mut files = Vec::new();
                list_files(&model.path, "", &mut files)?;
                (&model.path, files)
            }
        };
        let mut digests: Vec<(String, ContentDigest)> = Vec::new();
        for file in files {
            let path = folder.join(&file);
            // a package can be a single file
            let path = if path.is_file() { path } else { folder.clone() };
            let sha256 = ContentDigest::sha256_of_file(&path).map_err(FileError::of(&path, "read"))?;
            digests.push((file, sha256));
        }
        Ok(listing_digest(digests.iter().map(|(path, sha256)| (path.as_str(), sha256.hex()))))
    }
}

/// Relative paths of all files below a folder, with `/`.
fn list_files(folder: &Path, prefix: &str, files: &mut Vec<String>) -> Result<(), FileError> {
    for entry in std::fs::read_dir(folder).map_err(FileError::of(folder, "read"))? {
        let entry = entry.map_err(FileError::of(folder, "read"))?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            list_files(&entry.path(), &format!("{name}/"), files)?;
        } else {
            files.push(name);
        }
    }
    Ok(())
}

impl CompiledModel {
    /// Reads `model.mil` and `metadata.json`, as far as they are there.
    ///
    /// # Errors
    /// If the folder isn't a compiled ML Program.
    pub fn open(path: &Path) -> Result<Self> {
        let (text, metadata) = (path.join("model.mil"), path.join("metadata.json"));
        let metadata = if metadata.exists() { read_text(&metadata, MAX_TEXT)? } else { String::new() };
        let metadata: Json = serde_json::from_str(&metadata).unwrap_or_default();
        let mut functions = if text.exists() { functions_of(&read_text(&text, MAX_TEXT)?) } else { Vec::new() };
        if functions.is_empty() {
            let histogram = metadata[0]["mlProgramOperationTypeHistogram"].as_object();
            let Some(histogram) = histogram else {
                let problem = "neither model.mil nor metadata.json describes an ML Program";
                return Err(CoreMlError::Refused { action: "read", path: path.into(), problem: problem.into() }.into());
            };
            let is_conv = |name: &str| name.rsplit('.').next().is_some_and(|name| name.eq_ignore_ascii_case("conv"));
            let convs = histogram.iter().filter(|(name, _)| is_conv(name)).filter_map(|(_, count)| count.as_u64());
            functions = vec![("main".to_owned(), convs.sum::<u64>() as usize)];
        }
        let arrays = |key: &str| -> Option<Vec<StridedArray>> {
            metadata[0][key].as_array().map(Vec::as_slice).unwrap_or_default().iter().map(array_of).collect()
        };
        let signature = arrays("inputSchema").zip(arrays("outputSchema")).map(|(inputs, outputs)| {
            let states = metadata[0]["stateSchema"].as_array().into_iter().flatten();
            let states = states.filter_map(|state| Some(state["name"].as_str()?.to_owned())).collect();
            Signature { inputs, outputs, states }
        });
        let signature = signature.filter(|signature| !signature.outputs.is_empty());
        Ok(CompiledModel { path: path.to_owned(), functions, signature })
    }
}

/// Functions of a program's text (`model.mil`), with the number of convolutions.
fn functions_of(text: &str) -> Vec<(String, usize)> {
    let mut functions: Vec<(String, usize)> = Vec::new();
    for line in text.lines().map(str::trim_start) {
        if let Some(rest) = line.strip_prefix("func ") {
            functions.push((rest.split(['<', '(']).next().unwrap_or_default().trim().to_owned(), 0));
        } else if line.contains("= conv(")
            && let Some((_, convs)) = functions.last_mut()
        {
            *convs += 1;
        }
    }
    functions
}

/// Array of a compiled model's schema; `None` if its shape is flexible.
fn array_of(entry: &Json) -> Option<StridedArray> {
    let element = match entry["dataType"].as_str()? {
        "Float16" => Element::F16,
        "Float32" => Element::F32,
        "Int32" => Element::I32,
        _ => return None,
    };
    if entry["hasShapeFlexibility"] == "1" {
        return None;
    }
    let shape = entry["shape"].as_str()?.trim_matches(['[', ']']);
    let shape: Vec<usize> = shape.split(',').map(|size| size.trim().parse().ok()).collect::<Option<_>>()?;
    Some(StridedArray { name: entry["name"].as_str()?.to_owned(), element, shape })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_and_convolutions_are_counted_in_the_text() {
        let text = "program(1.3)\n{\n    func decode<ios18>(tensor<fp16, [1, 8, 1, 1]> x) {\n            tensor<fp16, [1, 8, 1, 1]> y = \
                    conv(x = x)[name = \"y\"];\n        } -> (y);\n    func prefill<ios18>(tensor<fp16, [1, 8, 1, 4]> x) {\n        } -> (x);\n}";
        assert_eq!(functions_of(text), [("decode".to_owned(), 1), ("prefill".to_owned(), 0)]);
    }

    #[test]
    fn arrays_of_flexible_shape_are_left_out() {
        let array = |flexible: &str| {
            array_of(&serde_json::json!({
                "name": "x", "dataType": "Float16", "shape": "[1, 512, 120]", "hasShapeFlexibility": flexible,
            }))
        };
        assert_eq!(array("0").unwrap().shape, [1, 512, 120]);
        assert!(array("1").is_none());
    }
}
