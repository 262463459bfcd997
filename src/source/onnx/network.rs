//! Graph with its constants: producers of values, and contents of constants.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::model::{Attribute, Data, Graph, Initializer, Model, Node};
use crate::dtype::SourceDtype;
use crate::error::{Result, SourceError};
use crate::tensor::{SourceTensor, byte_length};
use crate::weight::SourceWeight;
use anec_base::{MappedFile, path_inside};

/// Maximum number of steps back from a value, where they don't lead through a layer.
pub(super) const LONGEST_CHAIN: usize = 32;

/// Graph of a model and the files that hold its constants.
#[derive(Debug)]
pub(super) struct Network {
    path: PathBuf,
    file: Arc<MappedFile>,
    model: Model,
    producers: HashMap<String, (usize, usize)>,
    external: RefCell<HashMap<String, Arc<MappedFile>>>,
}

/// Constant matrix or vector in the form that its user needs.
#[derive(Clone, Debug)]
pub(super) struct Constant {
    /// Elements.
    pub weight: SourceWeight,
    /// Stored type.
    pub dtype: SourceDtype,
    /// Whether elements are floating-point numbers, stored or dequantized.
    pub is_float: bool,
    /// Size in the files in bytes.
    pub bytes: u64,
    /// Name of the initializer that holds its elements or codes.
    pub origin: String,
}

impl Constant {
    /// Returns zeros, which no file holds.
    pub fn zeros(name: &str, shape: &[u64]) -> Result<Self> {
        let elements = shape.iter().product::<u64>() as usize;
        let weight = SourceWeight::from_values(name, shape, vec![0.0; elements])?;
        Ok(Constant { weight, dtype: SourceDtype::F32, is_float: true, bytes: 0, origin: name.to_owned() })
    }
}

impl Network {
    /// Parses the model in a file.
    ///
    /// # Errors
    /// Returns an error if the file is damaged.
    pub fn open(file: MappedFile) -> Result<Self> {
        let path = file.path().to_owned();
        let file = Arc::new(file);
        let model = super::model::parse(&path, file.bytes())?;
        let mut producers = HashMap::new();
        for (index, node) in model.graph.nodes.iter().enumerate() {
            for (output, name) in node.outputs.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
                let taken = model.graph.initializers.contains_key(name) || model.graph.inputs.contains(name);
                if producers.insert(name.clone(), (index, output)).is_some() || taken {
                    return Err(SourceError::file(&path, format!("the value `{name}` is made twice")));
                }
            }
        }
        Ok(Network { path, file, model, producers, external: RefCell::default() })
    }

    /// Path of the model.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Name of the program that wrote the file.
    pub fn producer_name(&self) -> &str {
        &self.model.producer
    }

    /// Returns the graph.
    pub fn graph(&self) -> &Graph {
        &self.model.graph
    }

    /// Returns the external files read so far.
    pub fn external_files(&self) -> Vec<PathBuf> {
        self.external.borrow().values().map(|file| file.path().to_owned()).collect()
    }

    /// Version of ONNX's own operators.
    pub fn opset(&self) -> i64 {
        ["", "ai.onnx"].iter().find_map(|domain| self.model.opsets.get(*domain)).copied().unwrap_or(0)
    }

    /// Returns the node that produces a value, its index in the graph, and the index of the output.
    pub fn producer(&self, value: &str) -> Option<(&Node, usize, usize)> {
        let &(index, output) = self.producers.get(value)?;
        Some((&self.model.graph.nodes[index], index, output))
    }

    /// Returns the node of ONNX's own operator `op` that produces a value, before casts.
    pub fn made_by<'a>(&'a self, value: &'a str, op: &str) -> Option<&'a Node> {
        self.producer(self.behind_casts(value)).map(|(node, ..)| node).filter(|node| node.is(op))
    }

    /// Whether a value is an input of the graph.
    pub fn is_input(&self, value: &str) -> bool {
        self.model.graph.inputs.iter().any(|input| input == value) && !self.model.graph.initializers.contains_key(value)
    }

    /// Returns an error about a node.
    pub fn refuse(&self, node: &Node, problem: impl AsRef<str>) -> SourceError {
        let domain = if node.domain.is_empty() { String::new() } else { format!("{}.", node.domain) };
        let problem = format!("node `{}` ({domain}{}): {}", node.name, node.op, problem.as_ref());
        SourceError::file(&self.path, problem).advise(ADVICE)
    }

    /// Returns an error about a value.
    pub fn refuse_value(&self, value: &str, problem: impl AsRef<str>) -> SourceError {
        match self.producer(value) {
            Some((node, ..)) => self.refuse(node, problem),
            None => {
                let problem = format!("value `{value}`: {}", problem.as_ref());
                SourceError::file(&self.path, problem).advise(ADVICE)
            }
        }
    }

    /// Returns the value before conversions between float types and copies.
    pub fn behind_casts<'a>(&'a self, value: &'a str) -> &'a str {
        self.behind(value, |node| {
            let to = || SourceDtype::from_onnx(node.int("to").unwrap_or(0));
            node.is("Identity") || node.is("Cast") && to().is_some_and(SourceDtype::is_float)
        })
    }

    /// Returns the value before changes of the shape or width of integers.
    pub fn behind_counting<'a>(&'a self, value: &'a str) -> &'a str {
        self.behind(value, |node| ["Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"].iter().any(|op| node.is(op)))
    }

    /// Returns the value before reshapes.
    pub fn behind_reshapes<'a>(&'a self, value: &'a str) -> &'a str {
        self.behind(value, |node| node.is("Reshape") || node.is("Identity"))
    }

    /// Returns the value before nodes that pass on their first input.
    fn behind<'a>(&'a self, mut value: &'a str, passes: impl Fn(&Node) -> bool) -> &'a str {
        for _ in 0..LONGEST_CHAIN {
            match self.producer(value) {
                Some((node, ..)) if passes(node) => value = node.input(0),
                _ => break,
            }
        }
        value
    }

    /// Returns the stored constant of a value, if it is one.
    pub fn stored(&self, value: &str) -> Option<(&str, &Initializer)> {
        if let Some((name, initializer)) = self.model.graph.initializers.get_key_value(value) {
            return Some((name, initializer));
        }
        match self.producer(value) {
            Some((node, ..)) if node.is("Constant") => match node.attributes.get("value") {
                Some(Attribute::Tensor(tensor)) => Some((&node.outputs[0], tensor)),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns a stored constant as a tensor, optionally in another type and shape of the same size.
    ///
    /// # Errors
    /// Returns an error if its type is unknown, or its data is missing or of another size.
    pub fn tensor(
        &self,
        name: &str,
        stored: &Initializer,
        other: Option<(SourceDtype, Vec<u64>)>,
    ) -> Result<SourceTensor> {
        let wrong = |problem: String| SourceError::tensor(&self.path, name, problem);
        let dtype = SourceDtype::from_onnx(stored.data_type)
            .ok_or_else(|| wrong(format!("its type is number {}, which no weight is stored in", stored.data_type)))?;
        let (dtype, shape) = match other {
            Some(other) => other,
            None => (dtype, self.shape(name, stored)?),
        };
        let bytes = byte_length(dtype, &shape).map_err(wrong)?;
        let (file, range) = self.bytes(name, stored, bytes)?;
        SourceTensor::in_file(name.to_owned(), dtype, shape, &file, range)
    }

    /// Dimensions of a stored constant.
    pub fn shape(&self, name: &str, stored: &Initializer) -> Result<Vec<u64>> {
        let dimension = |&n: &i64| {
            let problem = format!("its shape is {:?}", stored.shape);
            u64::try_from(n).map_err(|_| SourceError::tensor(&self.path, name, problem))
        };
        stored.shape.iter().map(dimension).collect()
    }

    /// Returns the location of a stored constant's bytes, of which `expected` are needed.
    fn bytes(&self, name: &str, stored: &Initializer, expected: u64) -> Result<(Arc<MappedFile>, Range<u64>)> {
        let wrong = |problem: String| SourceError::tensor(&self.path, name, problem);
        let memory = |bytes: Vec<u8>| {
            let length = bytes.len() as u64;
            (Arc::new(MappedFile::from_bytes(&self.path, bytes)), 0..length)
        };
        Ok(match &stored.data {
            Data::None if expected == 0 => memory(Vec::new()),
            Data::None => return Err(wrong("it has no data".into())),
            Data::Unsupported(how) => return Err(wrong(format!("its data is {how}, which isn't read"))),
            Data::Raw(range) => (self.file.clone(), range.start as u64..range.end as u64),
            Data::Floats(floats) => memory(floats.iter().flat_map(|value| value.to_le_bytes()).collect()),
            Data::Numbers(numbers) => {
                let width = SourceDtype::from_onnx(stored.data_type).map_or(1, |dtype| dtype.block().bytes as usize);
                memory(numbers.iter().flat_map(|number| number.to_le_bytes()[..width].to_vec()).collect())
            }
            Data::External { location, offset, length } => {
                if let Some(length) = length.filter(|&length| length != expected) {
                    return Err(wrong(format!("{location} has {length} bytes for it, but its shape takes {expected}")));
                }
                let file = self.external(name, location)?;
                let size = file.bytes().len() as u64;
                let range = offset.checked_add(expected).map(|end| *offset..end).filter(|range| range.end <= size);
                let range = range.ok_or_else(|| {
                    wrong(format!(
                        "its {expected} bytes from byte {offset} of {location} end after the file, {size} bytes"
                    ))
                })?;
                (file, range)
            }
        })
    }

    /// Returns an external file beside the model.
    fn external(&self, name: &str, location: &str) -> Result<Arc<MappedFile>> {
        if let Some(file) = self.external.borrow().get(location) {
            return Ok(file.clone());
        }
        // names come from the network and must not lead out of the folder
        if path_inside(location).is_none() {
            let problem = format!("its data is in {location:?}, expected a path within the model's folder");
            return Err(SourceError::tensor(&self.path, name, problem));
        }
        let path = self.path.parent().unwrap_or(Path::new("")).join(location);
        if !path.exists() {
            let problem = format!("its data is in {location}, which isn't beside the model");
            return Err(SourceError::tensor(&self.path, name, problem)
                .advise("download all files of the model into the same folder"));
        }
        let file = Arc::new(crate::file::map(&path)?);
        self.external.borrow_mut().insert(location.to_owned(), file.clone());
        Ok(file)
    }

    /// Returns the integers of a small constant.
    pub fn integers(&self, value: &str) -> Result<Option<Vec<i64>>> {
        let Some((name, stored)) = self.stored(value) else { return Ok(None) };
        let tensor = self.tensor(name, stored, None)?;
        let Some(bytes) = tensor.bytes() else { return Ok(None) };
        Ok(match tensor.dtype() {
            SourceDtype::I64 => Some(bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect()),
            SourceDtype::I32 => Some(bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect()),
            _ => None,
        })
    }

    /// Returns the value of a one-element constant.
    pub fn scalar(&self, value: &str) -> Result<Option<f32>> {
        let Some((name, stored)) = self.stored(self.behind_casts(value)) else { return Ok(None) };
        let tensor = self.tensor(name, stored, None)?;
        if tensor.elements() != 1 || !tensor.dtype().is_float() {
            return Ok(None);
        }
        let mut number = [0.0];
        tensor.read(0, &mut number)?;
        Ok(Some(number[0]))
    }

    /// Returns the constant of a value, following conversions, transpositions, reshapes and dequantization; `None` if
    /// it depends on the inputs.
    ///
    /// # Errors
    /// Returns an error if the constant is stored or computed in an unsupported way.
    pub fn constant(&self, value: &str) -> Result<Option<Constant>> {
        self.constant_within(value, LONGEST_CHAIN)
    }

    /// Returns the constant of a value within a number of steps.
    pub fn constant_within(&self, value: &str, steps: usize) -> Result<Option<Constant>> {
        if let Some((name, stored)) = self.stored(value) {
            let tensor = self.tensor(name, stored, None)?;
            let (dtype, bytes, origin) = (tensor.dtype(), tensor.byte_length(), name.to_owned());
            let (weight, is_float) = (SourceWeight::from(tensor), dtype.is_float());
            return Ok(Some(Constant { weight, dtype, is_float, bytes, origin }));
        }
        let Some((node, ..)) = self.producer(value).filter(|_| steps > 0) else { return Ok(None) };
        if node.is("Mul") {
            return self.scaled(node, steps);
        }
        let is_view = ["Cast", "Identity", "Transpose", "Reshape", "DequantizeLinear"].iter().any(|op| node.is(op));
        if !is_view {
            return Ok(None);
        }
        let Some(of) = self.constant_within(node.input(0), steps - 1)? else { return Ok(None) };
        let weight = match node.op.as_str() {
            "Identity" => of.weight.clone(),
            "Cast" => {
                let to = SourceDtype::from_onnx(node.int("to").unwrap_or(0)).filter(|dtype| dtype.is_float());
                let is_code = matches!(of.dtype, SourceDtype::I8 | SourceDtype::U8);
                let exact = to.is_some_and(|to| {
                    to == of.dtype || is_code || matches!(to, SourceDtype::F32 | SourceDtype::F64) && of.is_float
                });
                if !exact {
                    return Err(self.refuse(node, format!("it would round a weight of type {}", of.dtype)));
                }
                return Ok(Some(Constant { is_float: true, ..of }));
            }
            "Transpose" => {
                let turns = of.weight.shape().len() == 2 && node.ints("perm").is_none_or(|perm| perm == [1, 0]);
                if !turns {
                    return Err(self.refuse(node, format!("it turns a weight of shape {:?}", of.weight.shape())));
                }
                of.weight.transpose()?
            }
            "Reshape" => {
                let Some(shape) = self.integers(node.input(1))? else { return Ok(None) };
                let shape: Option<Vec<u64>> = shape.iter().map(|&n| u64::try_from(n).ok().filter(|&n| n > 0)).collect();
                let Some(shape) = shape else {
                    return Err(self.refuse(node, "the new shape of a weight has numbers that aren't positive"));
                };
                of.weight.reshape(&shape)?
            }
            _ => return self.dequantized(node, of, steps).map(Some),
        };
        Ok(Some(Constant { weight, ..of }))
    }

    /// Returns the product of a matrix of codes with scales of its rows or columns; `None` if a factor depends on the
    /// inputs, or neither is codes.
    fn scaled(&self, node: &Node, steps: usize) -> Result<Option<Constant>> {
        // one after the other: products of products would be followed twice at each step
        let Some(a) = self.constant_within(node.input(0), steps - 1)? else { return Ok(None) };
        let Some(b) = self.constant_within(node.input(1), steps - 1)? else { return Ok(None) };
        let is_code = |of: &Constant| !of.dtype.is_float() && of.is_float;
        let (codes, scales) = match (is_code(&a), is_code(&b)) {
            (true, false) => (a, b),
            (false, true) => (b, a),
            _ => return Ok(None),
        };
        let axis = match (codes.weight.shape(), scales.weight.shape()) {
            ([rows, _], [own, 1]) if own == rows => 0,
            ([_, columns], [1, own] | [own]) if own == columns => 1,
            (_, scales) if scales.iter().product::<u64>() == 1 => 1,
            (of, scales) => {
                return Err(self.refuse(node, format!("it multiplies codes of shape {of:?} by scales {scales:?}")));
            }
        };
        self.scaled_codes(node, codes, vec![scales], axis, 0).map(Some)
    }

    /// Returns the shape of a constant after reshapes.
    pub fn shape_of(&self, value: &str) -> Result<Option<Vec<u64>>> {
        if let Some((node, ..)) = self.producer(value).filter(|(node, ..)| node.is("Reshape")) {
            let shape = self.integers(node.input(1))?;
            return Ok(shape.and_then(|shape| shape.iter().map(|&n| u64::try_from(n).ok()).collect()));
        }
        self.stored(value).map(|(name, stored)| self.shape(name, stored)).transpose()
    }

    /// Returns the two constants that a branch of an `If` returns.
    pub fn constants_of_branch(&self, node: &Node, branch: &str) -> Result<[Option<Constant>; 2]> {
        let Some(Attribute::Graph(graph)) = node.attributes.get(branch) else {
            return Err(self.refuse(node, format!("it has no {branch}")));
        };
        let mut outputs = graph.outputs.iter();
        let mut next = || -> Result<Option<Constant>> {
            let Some(output) = outputs.next() else { return Ok(None) };
            let within = |name: &str| {
                let made_by = graph.nodes.iter().find(|node| node.outputs.iter().any(|made| made == name));
                match made_by.map(|node| (node.is("Constant"), node.attributes.get("value"))) {
                    Some((true, Some(Attribute::Tensor(tensor)))) => Some(tensor),
                    _ => graph.initializers.get(name),
                }
            };
            let copied = graph.nodes.iter().find(|node| node.is("Identity") && node.outputs.first() == Some(output));
            let name = copied.map_or(output.as_str(), |node| node.input(0));
            let Some(stored) = within(name) else { return self.constant(name) };
            let tensor = self.tensor(name, stored, None)?;
            let (dtype, bytes) = (tensor.dtype(), tensor.byte_length());
            let (weight, is_float) = (tensor.into(), dtype.is_float());
            Ok(Some(Constant { weight, dtype, is_float, bytes, origin: name.to_owned() }))
        };
        Ok([next()?, next()?])
    }
}

/// Advice for a graph that isn't understood.
const ADVICE: &str = "anec reads decoders as onnxruntime-genai's model builder writes them, with GroupQueryAttention, and \
                      encoders with BERT's layers as PyTorch exports them; the same model as safetensors or GGUF will do";
