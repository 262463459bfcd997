//! Messages of an ONNX file that define a graph (onnx.proto3, IR version 3 and later).

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use crate::error::{Result, SourceError};
use crate::wire::Message;

/// Content of a file.
#[derive(Debug, Default)]
pub(super) struct Model {
    /// Name of the program that wrote the file.
    pub producer: String,
    /// Versions of the operator sets, by domain.
    pub opsets: BTreeMap<String, i64>,
    /// Graph.
    pub graph: Graph,
}

/// Graph, or a branch of an `If`.
#[derive(Debug, Default)]
pub(super) struct Graph {
    /// Nodes in an executable order.
    pub nodes: Vec<Node>,
    /// Constants, by name.
    pub initializers: HashMap<String, Initializer>,
    /// Names of the inputs.
    pub inputs: Vec<String>,
    /// Names of the outputs.
    pub outputs: Vec<String>,
}

/// Operation.
#[derive(Debug, Default)]
pub(super) struct Node {
    /// Name; may be empty.
    pub name: String,
    /// Operator.
    pub op: String,
    /// Domain of the operator; empty for ONNX's own.
    pub domain: String,
    /// Names of the input values; empty for omitted ones.
    pub inputs: Vec<String>,
    /// Names of the output values.
    pub outputs: Vec<String>,
    /// Attributes, by name.
    pub attributes: HashMap<String, Attribute>,
}

/// Value of an attribute.
#[derive(Debug)]
pub(super) enum Attribute {
    Float(f32),
    Int(i64),
    Text(String),
    Ints(Vec<i64>),
    Tensor(Initializer),
    Graph(Box<Graph>),
    /// Kind that no supported operator has.
    Other,
}

/// Constant tensor and the location of its elements.
#[derive(Clone, Debug, Default)]
pub(super) struct Initializer {
    /// Dimensions.
    pub shape: Vec<i64>,
    /// Number of the element type in onnx.proto3.
    pub data_type: i64,
    /// Location of the elements.
    pub data: Data,
}

/// Location of a constant's elements.
#[derive(Clone, Debug, Default)]
pub(super) enum Data {
    /// No elements.
    #[default]
    None,
    /// Little-endian elements in the model's own file.
    Raw(Range<usize>),
    /// Typed field of integers, each at least as wide as an element.
    Numbers(Vec<i64>),
    /// Typed field of single-precision numbers.
    Floats(Vec<f32>),
    /// External file.
    External {
        /// Path from the model's folder.
        location: String,
        /// Offset of the first byte.
        offset: u64,
        /// Size in bytes, if given.
        length: Option<u64>,
    },
    /// Storage that weights don't use.
    Unsupported(&'static str),
}

/// Maximum depth of nested branches.
const DEEPEST: usize = 4;
/// Maximum number of nodes. A model has some tens per layer, and a node takes a hundred times the memory that an empty
/// one takes in a file.
const MOST_NODES: usize = 1 << 20;

/// Parses a model.
///
/// # Errors
/// Returns an error if the bytes aren't an ONNX model, or parts of it would change the meaning of its graph.
pub(super) fn parse(path: &Path, file: &[u8]) -> Result<Model> {
    let message = Message::new(path, "model", file);
    let mut model = Model::default();
    let mut has_graph = false;
    for field in message.fields() {
        let (number, value) = field.map_err(|error| not_onnx(path, error))?;
        match number {
            2 => model.producer = message.text(&value)?.to_owned(),
            7 if has_graph => return Err(message.damaged("it has two graphs")),
            7 => {
                has_graph = true;
                model.graph = graph(&message.message("graph", &value)?, 0)?;
            }
            8 => {
                let opset = message.message("operator set", &value)?;
                let (mut domain, mut version) = (String::new(), 0);
                for field in opset.fields() {
                    match field? {
                        (1, value) => domain = opset.text(&value)?.to_owned(),
                        (2, value) => version = opset.integer(&value)?,
                        _ => {}
                    }
                }
                model.opsets.insert(domain, version);
            }
            25 => return Err(message.damaged("it defines functions of its own, which aren't read")),
            _ => {}
        }
    }
    if !has_graph {
        return Err(SourceError::file(path, "it has no graph, so it isn't an ONNX model"));
    }
    Ok(model)
}

/// Adds to an error that the file may not be ONNX at all, because most other files fail at the first fields.
fn not_onnx(path: &Path, error: SourceError) -> SourceError {
    match error {
        SourceError::File { problem, .. } => {
            SourceError::file(path, format!("it isn't an ONNX model, or damaged: {problem}"))
        }
        other => other,
    }
}

fn graph(message: &Message<'_>, depth: usize) -> Result<Graph> {
    if depth > DEEPEST {
        return Err(message.damaged(&format!("graphs lie more than {DEEPEST} deep within each other")));
    }
    let mut graph = Graph::default();
    for field in message.fields() {
        match field? {
            (1, _) if graph.nodes.len() == MOST_NODES => {
                return Err(message.damaged(&format!("it has more than {MOST_NODES} nodes")));
            }
            (1, value) => graph.nodes.push(node(&message.message("node", &value)?, depth)?),
            (5, value) => {
                let (name, tensor) = initializer(&message.message("initializer", &value)?)?;
                if graph.initializers.insert(name.clone(), tensor).is_some() {
                    return Err(message.damaged(&format!("the initializer `{name}` is there twice")));
                }
            }
            (11, value) => graph.inputs.push(value_name(&message.message("input", &value)?)?),
            (12, value) => graph.outputs.push(value_name(&message.message("output", &value)?)?),
            (15, _) => return Err(message.damaged("it has sparse initializers, which aren't read")),
            _ => {}
        }
    }
    Ok(graph)
}

fn value_name(message: &Message<'_>) -> Result<String> {
    for field in message.fields() {
        if let (1, value) = field? {
            return Ok(message.text(&value)?.to_owned());
        }
    }
    Ok(String::new())
}

fn node(message: &Message<'_>, depth: usize) -> Result<Node> {
    let mut node = Node::default();
    for field in message.fields() {
        let (number, value) = field?;
        match number {
            1 => node.inputs.push(message.text(&value)?.to_owned()),
            2 => node.outputs.push(message.text(&value)?.to_owned()),
            3 => node.name = message.text(&value)?.to_owned(),
            4 => node.op = message.text(&value)?.to_owned(),
            5 => {
                let (name, attribute) = attribute(&message.message("attribute", &value)?, depth)?;
                node.attributes.insert(name, attribute);
            }
            7 => node.domain = message.text(&value)?.to_owned(),
            _ => {}
        }
    }
    // ONNX's own domain has two spellings
    if node.domain == "ai.onnx" {
        node.domain.clear();
    }
    Ok(node)
}

fn attribute(message: &Message<'_>, depth: usize) -> Result<(String, Attribute)> {
    let (mut name, mut kind) = (String::new(), 0);
    let (mut float, mut int, mut text, mut tensor, mut branch) = (0.0, 0, None, None, None);
    let mut ints = Vec::new();
    for field in message.fields() {
        let (number, value) = field?;
        match number {
            1 => name = message.text(&value)?.to_owned(),
            2 => float = message.float(&value)?,
            3 => int = message.integer(&value)?,
            4 => text = message.text(&value).ok().map(str::to_owned),
            5 => tensor = Some(initializer(&message.message("tensor", &value)?)?.1),
            6 => branch = Some(graph(&message.message("graph", &value)?, depth + 1)?),
            8 => message.integers(&value, &mut ints)?,
            20 => kind = message.integer(&value)?,
            _ => {}
        }
    }
    // zeros are omitted from the file, so that the kind decides and not the present fields
    let attribute = match kind {
        1 => Attribute::Float(float),
        2 => Attribute::Int(int),
        3 => text.map_or(Attribute::Other, Attribute::Text),
        4 => tensor.map_or(Attribute::Other, Attribute::Tensor),
        5 => branch.map_or(Attribute::Other, |graph| Attribute::Graph(Box::new(graph))),
        7 => Attribute::Ints(ints),
        _ => Attribute::Other,
    };
    Ok((name, attribute))
}

fn initializer(message: &Message<'_>) -> Result<(String, Initializer)> {
    let mut name = String::new();
    let mut tensor = Initializer::default();
    let (mut numbers, mut floats) = (Vec::new(), Vec::new());
    let mut entries = HashMap::new();
    let mut external = false;
    for field in message.fields() {
        let (number, value) = field?;
        match number {
            1 => message.integers(&value, &mut tensor.shape)?,
            2 => tensor.data_type = message.integer(&value)?,
            3 => tensor.data = Data::Unsupported("a segment of a larger tensor"),
            4 => message.floats(&value, &mut floats)?,
            // int32_data holds all types of up to 32 bits, int64_data and uint64_data their own
            5 | 7 | 11 => message.integers(&value, &mut numbers)?,
            6 => tensor.data = Data::Unsupported("a list of texts"),
            8 => name = message.text(&value)?.to_owned(),
            9 => tensor.data = Data::Raw(message.range_of(&value)?),
            10 => tensor.data = Data::Unsupported("a list of double-precision numbers"),
            13 => {
                let entry = message.message("external data", &value)?;
                let (mut key, mut content) = ("", "");
                for field in entry.fields() {
                    match field? {
                        (1, value) => key = entry.text(&value)?,
                        (2, value) => content = entry.text(&value)?,
                        _ => {}
                    }
                }
                entries.insert(key, content);
            }
            14 => external = message.integer(&value)? == 1,
            _ => {}
        }
    }
    if external {
        let number = |key: &str| -> Result<Option<u64>> {
            entries
                .get(key)
                .map(|text| text.parse())
                .transpose()
                .map_err(|_| message.damaged(&format!("`{name}`: the {key} of its data isn't a number")))
        };
        let location = entries
            .get("location")
            .ok_or_else(|| message.damaged(&format!("`{name}`: its data is in another file, but none is named")))?;
        tensor.data = Data::External {
            location: (*location).to_owned(),
            offset: number("offset")?.unwrap_or(0),
            length: number("length")?,
        };
    } else if matches!(tensor.data, Data::None) {
        tensor.data = match (floats.is_empty(), numbers.is_empty()) {
            (true, true) => Data::None,
            (false, true) => Data::Floats(floats),
            (true, false) => Data::Numbers(numbers),
            (false, false) => Data::Unsupported("two lists of numbers"),
        };
    }
    Ok((name, tensor))
}

impl Node {
    /// Returns the name of an input; empty if omitted.
    pub fn input(&self, index: usize) -> &str {
        self.inputs.get(index).map_or("", String::as_str)
    }

    /// Returns an integer attribute.
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.attributes.get(name) {
            Some(Attribute::Int(value)) => Some(*value),
            _ => None,
        }
    }

    /// Returns a float attribute.
    pub fn float(&self, name: &str) -> Option<f32> {
        match self.attributes.get(name) {
            Some(Attribute::Float(value)) => Some(*value),
            _ => None,
        }
    }

    /// Returns a string attribute.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.attributes.get(name) {
            Some(Attribute::Text(value)) => Some(value),
            _ => None,
        }
    }

    /// Returns an attribute that is a list of integers.
    pub fn ints(&self, name: &str) -> Option<&[i64]> {
        match self.attributes.get(name) {
            Some(Attribute::Ints(value)) => Some(value),
            _ => None,
        }
    }

    /// Whether the operator is `op` of ONNX's own domain.
    pub fn is(&self, op: &str) -> bool {
        self.op == op && self.domain.is_empty()
    }

    /// Whether the operator is `op` of ONNX Runtime's domain.
    pub fn is_contrib(&self, op: &str) -> bool {
        self.op == op && self.domain == "com.microsoft"
    }
}
