//! A graph with its constants: who makes a value, and what a constant holds.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use super::model::{Attribute, Data, Graph, Initializer, Model, Node};
use crate::source::dtype::SourceDtype;
use crate::source::error::{Result, SourceError};
use crate::source::file::MappedFile;
use crate::source::tensor::{Tensor, byte_length};
use crate::source::weight::{Weight, ZeroPoints};

/// Steps from a value back to what it is made of that are followed, where they don't lead through a layer.
const LONGEST_CHAIN: usize = 32;

/// A model's graph and the files that hold its constants.
#[derive(Debug)]
pub(super) struct Network {
    path: PathBuf,
    file: Arc<MappedFile>,
    model: Model,
    producers: HashMap<String, (usize, usize)>,
    external: RefCell<HashMap<String, Arc<MappedFile>>>,
}

/// A constant matrix or vector, as the operation that uses it sees it.
#[derive(Clone, Debug)]
pub(super) struct Constant {
    /// Its elements.
    pub weight: Weight,
    /// Type of what is stored.
    pub dtype: SourceDtype,
    /// Bytes of it in the files.
    pub bytes: u64,
    /// Name of the initializer that holds its elements or codes.
    pub origin: String,
}

impl Network {
    /// Reads the model of a file.
    ///
    /// # Errors
    /// When it is damaged.
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

    /// Where the model is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Program that wrote it.
    pub fn producer_name(&self) -> &str {
        &self.model.producer
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.model.graph
    }

    /// The external files that were read so far.
    pub fn external_files(&self) -> Vec<PathBuf> {
        self.external.borrow().values().map(|file| file.path().to_owned()).collect()
    }

    /// Version of ONNX's own operators.
    pub fn opset(&self) -> i64 {
        ["", "ai.onnx"].iter().find_map(|domain| self.model.opsets.get(*domain)).copied().unwrap_or(0)
    }

    /// The node that makes a value, its place in the graph, and which of its outputs it is.
    pub fn producer(&self, value: &str) -> Option<(&Node, usize, usize)> {
        let &(index, output) = self.producers.get(value)?;
        Some((&self.model.graph.nodes[index], index, output))
    }

    /// Whether a value is an input of the graph.
    pub fn is_input(&self, value: &str) -> bool {
        self.model.graph.inputs.iter().any(|input| input == value) && !self.model.graph.initializers.contains_key(value)
    }

    /// An error about a node.
    pub fn refuse(&self, node: &Node, problem: impl AsRef<str>) -> SourceError {
        let domain = if node.domain.is_empty() { String::new() } else { format!("{}.", node.domain) };
        let problem = format!("node `{}` ({domain}{}): {}", node.name, node.op, problem.as_ref());
        SourceError::file(&self.path, problem).advise(ADVICE)
    }

    /// An error about a value.
    pub fn refuse_value(&self, value: &str, problem: impl AsRef<str>) -> SourceError {
        match self.producer(value) {
            Some((node, ..)) => self.refuse(node, problem),
            None => {
                let problem = format!("value `{value}`: {}", problem.as_ref());
                SourceError::file(&self.path, problem).advise(ADVICE)
            }
        }
    }

    /// The value behind conversions between types of numbers and copies.
    pub fn behind_casts<'a>(&'a self, mut value: &'a str) -> &'a str {
        for _ in 0..LONGEST_CHAIN {
            match self.producer(value) {
                Some((node, ..)) if node.is("Cast") || node.is("Identity") => value = node.input(0),
                _ => break,
            }
        }
        value
    }

    /// The stored constant that a value is, if it is one.
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

    /// A stored constant as a tensor, in another type and shape of the same size if asked for.
    ///
    /// # Errors
    /// When its type isn't known, or its data isn't there or has another size.
    pub fn tensor(&self, name: &str, stored: &Initializer, other: Option<(SourceDtype, Vec<u64>)>) -> Result<Tensor> {
        let wrong = |problem: String| SourceError::tensor(&self.path, name, problem);
        let dtype = SourceDtype::from_onnx(stored.data_type)
            .ok_or_else(|| wrong(format!("its type is number {}, which no weight is stored in", stored.data_type)))?;
        let (dtype, shape) = match other {
            Some(other) => other,
            None => (dtype, self.shape(name, stored)?),
        };
        let bytes = byte_length(dtype, &shape).map_err(wrong)?;
        let (file, range) = self.bytes(name, stored, bytes)?;
        Tensor::in_file(name.to_owned(), dtype, shape, &file, range)
    }

    /// Dimensions of a stored constant.
    pub fn shape(&self, name: &str, stored: &Initializer) -> Result<Vec<u64>> {
        let dimension = |&n: &i64| {
            let problem = format!("its shape is {:?}", stored.shape);
            u64::try_from(n).map_err(|_| SourceError::tensor(&self.path, name, problem))
        };
        stored.shape.iter().map(dimension).collect()
    }

    /// Where the bytes of a stored constant are, which should be so many.
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

    /// A file beside the model.
    fn external(&self, name: &str, location: &str) -> Result<Arc<MappedFile>> {
        if let Some(file) = self.external.borrow().get(location) {
            return Ok(file.clone());
        }
        // names come from the network; one must not lead out of the folder
        let inside = Path::new(location).components().all(|part| matches!(part, Component::Normal(_)));
        if location.is_empty() || !inside {
            let problem = format!("its data is in {location:?}, expected a path within the model's folder");
            return Err(SourceError::tensor(&self.path, name, problem));
        }
        let path = self.path.parent().unwrap_or(Path::new("")).join(location);
        if !path.exists() {
            let problem = format!("its data is in {location}, which isn't beside the model");
            return Err(SourceError::tensor(&self.path, name, problem)
                .advise("download all files of the model into the same folder"));
        }
        let file = Arc::new(MappedFile::open(&path)?);
        self.external.borrow_mut().insert(location.to_owned(), file.clone());
        Ok(file)
    }

    /// The whole numbers of a small constant.
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

    /// The number that a constant of one element holds.
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

    /// The constant that a value is, through conversions, transpositions, changes of shape and dequantization; nothing if it
    /// depends on the inputs.
    ///
    /// # Errors
    /// When it is a constant, but stored or computed in a way that isn't understood.
    pub fn constant(&self, value: &str) -> Result<Option<Constant>> {
        self.constant_within(value, LONGEST_CHAIN)
    }

    fn constant_within(&self, value: &str, steps: usize) -> Result<Option<Constant>> {
        if let Some((name, stored)) = self.stored(value) {
            let tensor = self.tensor(name, stored, None)?;
            let (dtype, bytes, origin) = (tensor.dtype(), tensor.byte_length(), name.to_owned());
            return Ok(Some(Constant { weight: Weight::from(tensor), dtype, bytes, origin }));
        }
        let Some((node, ..)) = self.producer(value).filter(|_| steps > 0) else { return Ok(None) };
        let is_view = ["Cast", "Identity", "Transpose", "Reshape", "DequantizeLinear"].iter().any(|op| node.is(op));
        if !is_view {
            return Ok(None);
        }
        let Some(of) = self.constant_within(node.input(0), steps - 1)? else { return Ok(None) };
        let weight = match node.op.as_str() {
            "Identity" => of.weight.clone(),
            "Cast" => {
                let to = SourceDtype::from_onnx(node.int("to").unwrap_or(0)).filter(|dtype| dtype.is_float());
                let exact = to.is_some_and(|to| {
                    to == of.dtype || matches!(to, SourceDtype::F32 | SourceDtype::F64) && of.dtype.is_float()
                });
                if !exact {
                    return Err(self.refuse(node, format!("it would round a weight of type {}", of.dtype)));
                }
                of.weight.clone()
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

    /// What `DequantizeLinear` gives: `(code - zero point) * scale` by blocks along an axis, by entries of an axis, or all
    /// with one scale.
    fn dequantized(&self, node: &Node, codes: Constant, steps: usize) -> Result<Constant> {
        let wrong = |problem: String| self.refuse(node, problem);
        let matrix = |of: &Constant| match *of.weight.shape() {
            [rows, columns] => Ok([rows, columns]),
            _ => Err(wrong(format!("it dequantizes a weight of shape {:?}", of.weight.shape()))),
        };
        let [rows, columns] = matrix(&codes)?;
        let input = |index: usize, what: &str| -> Result<Constant> {
            self.constant_within(node.input(index), steps - 1)?
                .ok_or_else(|| wrong(format!("its {what} isn't constant")))
        };
        let scales = input(1, "scale")?;
        let axis = match node.int("axis").unwrap_or(1) {
            0 | -2 => 0,
            1 | -1 => 1,
            axis => return Err(wrong(format!("its axis is {axis}"))),
        };
        let block_size = node.int("block_size").unwrap_or(0);
        let block = match (scales.weight.elements(), u64::try_from(block_size), axis) {
            (1, Ok(0), _) => [rows.max(1), columns.max(1)],
            (_, Ok(0), 0) => [1, columns.max(1)],
            (_, Ok(0), _) => [rows.max(1), 1],
            (_, Ok(size), 0) => [size, 1],
            (_, Ok(size), _) => [1, size],
            (_, Err(_), _) => return Err(wrong(format!("its block_size is {block_size}"))),
        };
        let shape = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        let mut bytes = codes.bytes + scales.bytes;
        let zero_points = match node.input(2) {
            "" => ZeroPoints::All(0.0),
            _ => {
                let zero_points = input(2, "zero point")?;
                bytes += zero_points.bytes;
                ZeroPoints::Each(zero_points.weight.reshape(&shape)?)
            }
        };
        let weight = Weight::from_blocks(codes.weight.clone(), scales.weight.reshape(&shape)?, zero_points, block)?;
        Ok(Constant { weight, bytes, ..codes })
    }

    /// The matrix `[rows, columns]` that codes of `bits` bits stand for, `block_size` of a row to a scale, as `MatMulNBits`
    /// and `GatherBlockQuantized` have them: blocks are padded at the end of a row, and so are zero points, to whole bytes.
    ///
    /// # Errors
    /// When the constants don't fit the numbers, or are stored in another way.
    pub fn blocks(&self, node: &Node, inputs: [&str; 3], rows: u64, columns: u64) -> Result<Constant> {
        let wrong = |problem: String| self.refuse(node, problem);
        let bits = node.int("bits").unwrap_or(4);
        let codes_of = match bits {
            2 => SourceDtype::U2,
            4 => SourceDtype::U4,
            8 => SourceDtype::U8,
            _ => return Err(wrong(format!("its codes have {bits} bits, expected 2, 4 or 8"))),
        };
        let block_size = node.int("block_size").unwrap_or(128);
        let size = u64::try_from(block_size).ok().filter(|size| *size >= 16 && size.is_power_of_two());
        let size =
            size.ok_or_else(|| wrong(format!("its block_size is {block_size}, expected a power of two, at least 16")))?;
        let blocks = columns.div_ceil(size);
        let [codes, scales, zero_points] = inputs;
        // the shape of the codes may be changed on the way, which doesn't change their order
        let (name, stored) = self
            .stored(self.behind_reshapes(codes))
            .ok_or_else(|| wrong(format!("its codes, `{codes}`, aren't a stored constant")))?;
        let padded = blocks.checked_mul(size).ok_or_else(|| wrong(format!("{columns} columns are too many")))?;
        // codes of a type of their own stand for zero by 0, those in bytes by the middle
        let (codes_of, middle) = match SourceDtype::from_onnx(stored.data_type) {
            Some(SourceDtype::U8) => (codes_of, (1u32 << (bits - 1)) as f32),
            Some(own @ (SourceDtype::U4 | SourceDtype::I4)) if bits == 4 => (own, 0.0),
            found => {
                let found = found.map_or_else(|| format!("number {}", stored.data_type), |found| found.to_string());
                return Err(wrong(format!("its codes have type {found}, expected U8")));
            }
        };
        let codes = self.tensor(name, stored, Some((codes_of, vec![rows, padded])))?;
        let scales = self.constant(scales)?.ok_or_else(|| wrong("its scales aren't constant".into()))?;
        if !scales.dtype.is_float() {
            return Err(wrong(format!("its scales have type {}", scales.dtype)));
        }
        let mut bytes = codes.byte_length() + scales.bytes;
        let zero_points = match zero_points {
            "" => ZeroPoints::All(middle),
            value => {
                let (name, stored) =
                    self.stored(value).ok_or_else(|| wrong(format!("its zero points, `{value}`, aren't stored")))?;
                let tensor = match SourceDtype::from_onnx(stored.data_type) {
                    Some(dtype) if dtype.is_float() => self.tensor(name, stored, Some((dtype, vec![rows, blocks])))?,
                    _ => {
                        let per_byte = 8 / bits as u64;
                        let padded = blocks.next_multiple_of(per_byte);
                        self.tensor(name, stored, Some((codes_of, vec![rows, padded])))?
                    }
                };
                bytes += tensor.byte_length();
                ZeroPoints::Each(Weight::from(tensor).columns_range(0..blocks)?)
            }
        };
        let (dtype, origin) = (codes.dtype(), name.to_owned());
        let scales = scales
            .weight
            .reshape(&[rows, blocks])
            .map_err(|_| wrong(format!("it has {} scales, expected {rows} x {blocks}", scales.weight.elements())))?;
        let weight = Weight::from_blocks(codes.into(), scales, zero_points, [1, size])?.columns_range(0..columns)?;
        Ok(Constant { weight, dtype, bytes, origin })
    }

    /// The shape of a stored constant, as changes of shape make it.
    pub fn shape_of(&self, value: &str) -> Result<Option<Vec<u64>>> {
        if let Some((node, ..)) = self.producer(value).filter(|(node, ..)| node.is("Reshape")) {
            let shape = self.integers(node.input(1))?;
            return Ok(shape.and_then(|shape| shape.iter().map(|&n| u64::try_from(n).ok()).collect()));
        }
        self.stored(value).map(|(name, stored)| self.shape(name, stored)).transpose()
    }

    /// The two constants that a branch of an `If` gives.
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
            Ok(Some(Constant { weight: tensor.into(), dtype, bytes, origin: name.to_owned() }))
        };
        Ok([next()?, next()?])
    }

    /// The value behind changes of shape.
    pub fn behind_reshapes<'a>(&'a self, mut value: &'a str) -> &'a str {
        for _ in 0..LONGEST_CHAIN {
            match self.producer(value) {
                Some((node, ..)) if node.is("Reshape") || node.is("Identity") => value = node.input(0),
                _ => break,
            }
        }
        value
    }
}

/// What to do about a graph that isn't understood.
const ADVICE: &str = "anec reads graphs as onnxruntime-genai's model builder writes them, with GroupQueryAttention; the \
                      same model as safetensors or GGUF will do";
