//! Contents of an asset: functions, operations, weights, and findings.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;

use serde::Serialize;

use crate::aicode::{
    AiAttribute, AiModule, AiOp, AiRegion, AiType, AttributeId, Blob, Constraints, ElementType, NAME, TypeId, form,
};
use crate::asset::{Asset, AssetMetadata};

/// Depth of nested entries that are printed.
const MOST_DEPTH: usize = 4;

/// Contents of an asset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AssetInventory {
    /// Size of the bytecode file.
    pub bytes: u64,
    /// Version of the bytecode container.
    pub container_version: u64,
    /// Program that wrote the bytecode.
    pub producer: String,
    /// Date of the newest form that the asset needs, as `YYYYMMDD`.
    pub version: Option<u32>,
    /// Metadata, if the asset has some.
    pub metadata: Option<AssetMetadata>,
    /// Graphs that can be called.
    pub functions: Vec<GraphInventory>,
    /// Graphs that other graphs call.
    pub private_functions: Vec<GraphInventory>,
    /// Bytes of constants by element type, each resource counted once.
    pub constant_bytes: BTreeMap<String, u64>,
    /// Weights by form, each resource counted once: those that operations expand, and floats in resources.
    pub weights: BTreeMap<String, WeightTotals>,
    /// Bytes of all resources.
    pub resource_bytes: u64,
    /// Findings about the asset and its functions.
    pub findings: Vec<AssetFinding>,
}

/// Weights of one form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WeightTotals {
    /// Number of weights.
    pub count: usize,
    /// Bytes of elements or indices, without scales and tables.
    pub bytes: u64,
}

/// A named value of a graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NamedValue {
    /// Name of the value.
    pub name: String,
    /// Type of the value, as text.
    #[serde(rename = "type")]
    pub ty: String,
}

impl fmt::Display for NamedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.ty)
    }
}

/// Contents of a graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GraphInventory {
    /// Name of the graph.
    pub name: String,
    /// Composite operation that the graph stands for, if any.
    pub composite: Option<String>,
    /// Inputs.
    pub inputs: Vec<NamedValue>,
    /// States.
    pub states: Vec<NamedValue>,
    /// Outputs without tokens.
    pub outputs: Vec<NamedValue>,
    /// How often each operation occurs, without constants and the bodies of operations.
    pub ops: BTreeMap<String, usize>,
    /// Number of operations that the table of forms doesn't have.
    pub unknown_ops: usize,
    /// How often each kind of part occurs, as the Neural Engine's rules tell parts apart. A private graph has no ports.
    #[serde(skip)]
    pub parts: BTreeMap<GraphPart, usize>,
}

/// Part of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GraphPart {
    /// Result of an operation that is no constant.
    Result(TensorKind),
    /// Input, output or state.
    Port(TensorKind),
    /// Constant that is expanded by scales.
    Scaled(TensorKind),
    /// Write of a slice.
    SliceUpdate {
        /// Whether its indices are computed.
        computed: bool,
    },
}

/// Kind of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TensorKind {
    /// Element type, if it is a scalar's.
    pub element: Option<ElementType>,
    /// Number of dimensions.
    pub rank: usize,
    /// Whether the size of a dimension is unknown.
    pub dynamic: bool,
    /// Whether the last of several axes has the size 1.
    pub last_axis_of_one: bool,
}

/// Something that a user of an asset should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AssetFinding {
    /// The function, or `None` for the asset as a whole.
    pub function: Option<String>,
    /// Found, and its consequence.
    pub problem: String,
}

impl fmt::Display for AssetFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(function) = &self.function {
            write!(f, "function `{function}`: ")?;
        }
        f.write_str(&self.problem)
    }
}

impl AiModule {
    /// Date of the newest form that the module says it needs.
    pub fn version(&self) -> Option<u32> {
        let asset = self.ops.iter().find(|op| self.name(op) == "serialization.asset")?;
        match self.property(asset, "version")? {
            AiAttribute::Integer { value, .. } => u32::try_from(*value).ok(),
            _ => None,
        }
    }

    /// Contents of the graphs, those that only other graphs call included.
    pub fn graph_inventories(&self) -> Vec<GraphInventory> {
        let mut survey = Survey::new(self);
        self.graphs().map(|graph| survey.graph(graph, self.is_private(graph))).collect()
    }

    /// Whether only other graphs call a graph.
    fn is_private(&self, graph: &AiOp) -> bool {
        matches!(self.property(graph, "isPrivate"), Some(AiAttribute::Integer { value: 1, .. }))
    }

    /// A type as text.
    pub fn type_text(&self, id: TypeId) -> String {
        self.nested_type_text(id, 0)
    }

    fn nested_type_text(&self, id: TypeId, depth: usize) -> String {
        if depth > MOST_DEPTH {
            return "…".into();
        }
        match self.ty(id) {
            Some(AiType::Scalar(element)) => element.name().into(),
            Some(AiType::Tensor { shape, element, constraints }) => {
                let mut text = String::from("tensor<");
                for size in shape {
                    text += &size.map_or("?".into(), |size| size.to_string());
                    text.push('x');
                }
                text += &self.nested_type_text(*element, depth + 1);
                match constraints.and_then(|id| self.attribute(id)) {
                    Some(AiAttribute::Constraints(constraints)) => {
                        let Constraints { interleave, alignments, .. } = constraints;
                        text += &format!(", interleave {interleave:?}, alignments {alignments:?}");
                    }
                    Some(AiAttribute::SparseEncoding { stored, .. }) => text += &format!(", sparse, {stored} stored"),
                    _ => {}
                }
                text + ">"
            }
            Some(AiType::Handle(inner)) => format!("handle<{}>", self.nested_type_text(*inner, depth + 1)),
            Some(AiType::Token) => "token".into(),
            Some(AiType::Symbol) => "symbol".into(),
            Some(AiType::Image { format, height, width }) => {
                let format = match self.attribute(*format) {
                    Some(AiAttribute::PixelFormat(code)) => pixel_format_text(*code),
                    _ => "no format".into(),
                };
                format!("image<{height}x{width}, {format}>")
            }
            Some(AiType::Debug(_)) => "debug information".into(),
            Some(AiType::Function { .. }) => "function".into(),
            Some(AiType::Unknown(bytes)) => format!("type of code {}", leading_code(bytes)),
            Some(AiType::Text(text)) => text.clone(),
            None => "no type".into(),
        }
    }

    /// The type of a tensor, or of the tensor that a handle holds.
    fn tensor_type(&self, id: TypeId) -> Option<&AiType> {
        match self.ty(id)? {
            AiType::Handle(inner) => self.ty(*inner),
            other => Some(other),
        }
    }

    /// The element type of a tensor or of a handle's tensor.
    pub fn element(&self, id: TypeId) -> Option<ElementType> {
        match self.tensor_type(id)? {
            AiType::Tensor { element, .. } => match self.ty(*element)? {
                AiType::Scalar(element) => Some(*element),
                _ => None,
            },
            _ => None,
        }
    }

    /// The kind of a tensor, or of the tensor that a handle holds.
    fn tensor_kind(&self, id: TypeId) -> Option<TensorKind> {
        let Some(AiType::Tensor { shape, .. }) = self.tensor_type(id) else { return None };
        Some(TensorKind {
            element: self.element(id),
            rank: shape.len(),
            dynamic: shape.contains(&None),
            last_axis_of_one: shape.len() > 1 && shape.last() == Some(&Some(1)),
        })
    }

    /// The names of a graph's arguments or results.
    fn value_names<'a>(&'a self, graph: &'a AiOp, property: &str) -> Vec<Option<String>> {
        let of_value = |attributes: &'a AiAttribute| {
            self.items(Some(attributes)).find_map(|item| match item {
                AiAttribute::Named { name, values } if self.string(*name) == NAME => self.text(*values.first()?),
                _ => None,
            })
        };
        self.items(self.property(graph, property)).map(of_value).collect()
    }

    fn text(&self, id: AttributeId) -> Option<String> {
        match self.attribute(id)? {
            AiAttribute::String(text) => Some(self.string(*text).to_owned()),
            _ => None,
        }
    }

    fn string_property(&self, op: &AiOp, property: &str) -> Option<String> {
        match self.property(op, property)? {
            AiAttribute::String(text) => Some(self.string(*text).to_owned()),
            _ => None,
        }
    }
}

/// The four characters of a pixel format; its number in hexadecimal if they can't be printed.
fn pixel_format_text(code: u64) -> String {
    let characters = u32::try_from(code).map(u32::to_be_bytes).unwrap_or_default();
    match characters.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') {
        true => characters.map(char::from).iter().collect(),
        false => format!("{code:#x}"),
    }
}

fn leading_code(bytes: &[u8]) -> u64 {
    crate::bytecode::ByteCursor::new(bytes, 0).varint().unwrap_or(0)
}

impl Asset {
    /// Lists the contents of the asset.
    pub fn inventory(&self) -> AssetInventory {
        let module = &self.module;
        let mut survey = Survey::new(module);
        let (mut functions, mut private_functions) = (Vec::new(), Vec::new());
        for graph in module.graphs() {
            let private = module.is_private(graph);
            let inventory = survey.graph(graph, private);
            if private { private_functions.push(inventory) } else { functions.push(inventory) }
        }
        survey.whole(self, &functions);
        AssetInventory {
            bytes: self.bytes,
            container_version: self.container_version,
            producer: module.producer.clone(),
            version: module.version(),
            metadata: self.metadata.clone(),
            functions,
            private_functions,
            constant_bytes: survey.constants.into_iter().map(|(k, v)| (k.to_owned(), v)).collect(),
            weights: survey.weights,
            resource_bytes: module.resources.iter().fold(0, |sum, r| r.blob.length().saturating_add(sum)),
            findings: survey.findings,
        }
    }
}

/// A walk over all graphs.
struct Survey<'m> {
    module: &'m AiModule,
    findings: Vec<AssetFinding>,
    /// Attributes of constants that were counted.
    seen: BTreeSet<u32>,
    constants: BTreeMap<&'static str, u64>,
    /// Attributes of weights that were counted.
    counted: HashSet<AiAttribute>,
    weights: BTreeMap<String, WeightTotals>,
}

/// Form of the weight that an operation expands, after the element type of its data.
fn weight_form(operation: &str, element: ElementType) -> Option<String> {
    let name = element.name();
    Some(match operation {
        "primitive.lut_to_dense_v1" => format!("palettes of {} bits", element.bits()),
        "primitive.lut_to_sparse_with_bitmask_v1" => format!("sparse palettes of {} bits", element.bits()),
        "primitive.build_sparse_with_bitmask_v1" => format!("sparse {name}"),
        "primitive.blockwise_shift_scale_v2" | "dequantize_v2" => format!("{name} with scales"),
        _ => return None,
    })
}

/// Constants of another length than their type asks for.
#[derive(Default)]
struct WrongLengths {
    constants: usize,
    /// Number of those in resources that have a byte for each element below 8 bits.
    unpacked: usize,
    /// Type, length and expected length of the first.
    first: Option<(String, u64, u64)>,
}

impl WrongLengths {
    /// Adds the constants of an operation's regions. Depth is bounded by the reader.
    fn count(&mut self, module: &AiModule, op: &AiOp) {
        for op in op.regions.iter().flat_map(|region| &region.blocks).flat_map(|block| &block.ops) {
            if module.name(op) == "primitive.constant_v1" {
                self.constant(module, op);
            }
            self.count(module, op);
        }
    }

    fn constant(&mut self, module: &AiModule, op: &AiOp) {
        let Some(ty) = op.results.first() else { return };
        let (Some(element), Some(AiType::Tensor { shape, .. })) = (module.element(*ty), module.ty(*ty)) else { return };
        let Some(sizes) = shape.iter().copied().collect::<Option<Vec<u64>>>() else { return };
        let elements = match sizes.contains(&0) {
            true => 0,
            false => sizes.into_iter().fold(1, u64::saturating_mul),
        };
        let packed = element.packed_bytes(elements).unwrap_or(u64::MAX);
        let unpacked = element.unpacked_bytes(elements).unwrap_or(u64::MAX);
        let (found, expected) = match module.property(op, "value") {
            Some(AiAttribute::Resource(index)) => match module.resources.get(*index as usize).map(|r| &r.blob) {
                Some(Blob::Other) | None => return,
                Some(blob) => (blob.length(), packed),
            },
            // Apple's exporter marks equal booleans as a splat, but writes all of them
            Some(AiAttribute::Dense { splat: true, bytes }) if bytes.len() as u64 != unpacked => {
                (bytes.len() as u64, element.unpacked_bytes(1).unwrap_or(u64::MAX))
            }
            Some(AiAttribute::Dense { bytes, .. }) => (bytes.len() as u64, unpacked),
            _ => return,
        };
        if found != expected {
            self.constants += 1;
            self.unpacked += usize::from(expected == packed && found == unpacked);
            self.first.get_or_insert_with(|| (module.type_text(*ty), found, expected));
        }
    }
}

impl<'m> Survey<'m> {
    fn new(module: &'m AiModule) -> Self {
        Survey {
            module,
            findings: Vec::new(),
            seen: BTreeSet::new(),
            constants: BTreeMap::new(),
            counted: HashSet::new(),
            weights: BTreeMap::new(),
        }
    }

    fn find(&mut self, function: Option<&str>, problem: impl Into<String>) {
        self.findings.push(AssetFinding { function: function.map(str::to_owned), problem: problem.into() });
    }

    /// Adds the findings about the asset as a whole.
    fn whole(&mut self, asset: &Asset, functions: &[GraphInventory]) {
        if functions.is_empty() {
            self.find(None, "no function can be called");
        }
        match &asset.metadata {
            Some(metadata) if metadata.producer.is_empty() => {
                self.find(
                    None,
                    "metadata.json names no producer, by which tools of the OS tell assets that it refuses",
                );
            }
            _ => {}
        }
        if asset.digest_matches() == Some(false) {
            self.find(None, "main.hash isn't the SHA-256 of main.mlirb");
        }
        let module = self.module;
        let unknown: BTreeSet<u64> = module
            .types
            .iter()
            .filter_map(|ty| match ty {
                AiType::Unknown(bytes) => Some(leading_code(bytes)),
                _ => None,
            })
            .collect();
        if !unknown.is_empty() {
            self.find(None, format!("types of codes {unknown:?} are not understood"));
        }
        let unknown: BTreeSet<u64> = module
            .attributes
            .iter()
            .filter_map(|attribute| match attribute {
                AiAttribute::Unknown(bytes) => Some(leading_code(bytes)),
                _ => None,
            })
            .collect();
        if !unknown.is_empty() {
            self.find(None, format!("attributes of codes {unknown:?} are not understood"));
        }
        let needed = module.op_names.iter().filter_map(|name| form(name)).max_by_key(|form| form.date);
        match (module.version(), needed) {
            (None, _) => self.find(None, "the asset has no version"),
            (Some(version), Some(form)) if form.date > version => {
                let problem = format!("version {version}, but `{}` needs {}", form.name, form.date);
                self.find(None, problem);
            }
            _ => {}
        }
    }

    fn graph(&mut self, graph: &AiOp, private: bool) -> GraphInventory {
        let module = self.module;
        let name = module.string_property(graph, "name").unwrap_or_default();
        let composite = match module.property(graph, "compositeDecl") {
            Some(AiAttribute::Named { name, .. }) => Some(module.string(*name).to_owned()),
            _ => None,
        };
        let (arguments, results) = match module.property(graph, "functionType") {
            Some(AiAttribute::Type(ty)) => match module.ty(*ty) {
                Some(AiType::Function { arguments, results }) => (&arguments[..], &results[..]),
                _ => (&[][..], &[][..]),
            },
            _ => (&[][..], &[][..]),
        };
        let named = |types: &[TypeId], names: Vec<Option<String>>| -> Vec<(TypeId, Option<String>)> {
            types.iter().copied().zip(names.into_iter().chain(std::iter::repeat(None))).collect()
        };
        let mut parts = BTreeMap::new();
        for kind in arguments.iter().chain(results).filter(|_| !private).filter_map(|ty| module.tensor_kind(*ty)) {
            *parts.entry(GraphPart::Port(kind)).or_default() += 1;
        }
        let (mut inputs, mut states, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
        for (ty, name) in named(arguments, module.value_names(graph, "argAttrs")) {
            let is_state = matches!(module.ty(ty), Some(AiType::Handle(_)));
            let value = NamedValue { name: name.unwrap_or_default(), ty: module.type_text(ty) };
            if is_state { states.push(value) } else { inputs.push(value) }
        }
        let mut unnamed = 0;
        for (ty, name) in named(results, module.value_names(graph, "resAttrs")) {
            if !matches!(module.ty(ty), Some(AiType::Token)) {
                unnamed += usize::from(name.is_none());
                outputs.push(NamedValue { name: name.unwrap_or_default(), ty: module.type_text(ty) });
            }
        }
        let function = (!private).then_some(&name[..]);
        if unnamed > 0 && !private {
            self.find(function, format!("{unnamed} results have no name: Apple's runtime can't run it"));
        }
        let mut inventory = GraphInventory {
            name: name.clone(),
            composite,
            inputs,
            states,
            outputs,
            ops: BTreeMap::new(),
            unknown_ops: 0,
            parts,
        };
        self.constant_lengths(graph, &name);
        for region in &graph.regions {
            self.region(region, &mut inventory);
        }
        if inventory.unknown_ops > 0 {
            self.find(Some(&name), format!("{} operations are of forms that anec doesn't know", inventory.unknown_ops));
        }
        inventory
    }

    /// Adds a finding about constants of another length than their type asks for, those of nested regions included.
    fn constant_lengths(&mut self, graph: &AiOp, function: &str) {
        let mut wrong = WrongLengths::default();
        wrong.count(self.module, graph);
        let Some((ty, found, expected)) = wrong.first else { return };
        let mut problem = match wrong.constants {
            1 => format!("the constant {ty} has {found} bytes instead of {expected}"),
            count => {
                format!("{count} constants have wrong lengths, the first, {ty}, {found} bytes instead of {expected}")
            }
        };
        if wrong.unpacked == wrong.constants {
            problem += ": a byte for each element, which Apple's runtime reads as packed ones";
        }
        self.find(Some(function), problem);
    }

    /// Counts the operations of a graph's own region; the bodies of composite operations are their definition.
    fn region(&mut self, region: &AiRegion, inventory: &mut GraphInventory) {
        let module = self.module;
        for block in &region.blocks {
            // the type of each constant, by the number of its value
            let mut constants = BTreeMap::new();
            let (mut stored, mut expanded) = (BTreeMap::new(), BTreeSet::new());
            let mut value = block.arguments.len() as u32;
            for op in &block.ops {
                let name = module.name(op);
                if form(name).is_none() {
                    inventory.unknown_ops += 1;
                }
                if name == "primitive.constant_v1" {
                    constants.insert(value, op.results.first().copied());
                    stored.insert(value, op);
                    self.constant(op);
                } else if !matches!(name, "dataflow.output_v1" | "dataflow.yield_v1") {
                    *inventory.ops.entry(name.to_owned()).or_default() += 1;
                    let kinds = op.results.iter().filter_map(|ty| module.tensor_kind(*ty));
                    let mut parts: Vec<GraphPart> = kinds.map(GraphPart::Result).collect();
                    if name == "primitive.slice_update_v1" {
                        let indices = op.operands.get(1..3).unwrap_or_default();
                        let computed = indices.iter().any(|index| !constants.contains_key(index));
                        parts.push(GraphPart::SliceUpdate { computed });
                    } else if name == "primitive.blockwise_shift_scale_v2" {
                        let data = op.operands.first().and_then(|data| *constants.get(data)?);
                        parts.extend(data.and_then(|ty| module.tensor_kind(ty)).map(GraphPart::Scaled));
                    }
                    let data = op.operands.first().and_then(|data| stored.get(data));
                    let element = data.and_then(|data| module.element(*data.results.first()?));
                    if let (Some(data), Some(form)) = (data, element.and_then(|element| weight_form(name, element))) {
                        self.weight(form, data);
                    }
                    // tables and scales are parts of a weight
                    if weight_form(name, ElementType::Si8).is_some() {
                        expanded.extend(op.operands.iter().copied());
                    }
                    for part in parts {
                        *inventory.parts.entry(part).or_default() += 1;
                    }
                }
                value = value.saturating_add(op.results.len() as u32);
            }
            for (_, op) in stored.into_iter().filter(|(value, _)| !expanded.contains(value)) {
                let element =
                    op.results.first().and_then(|ty| module.element(*ty)).filter(|element| element.is_float());
                if let (Some(element), Some(AiAttribute::Resource(_))) = (element, module.property(op, "value")) {
                    self.weight(element.name().to_owned(), op);
                }
            }
        }
    }

    /// Counts a weight that no other constant shares.
    fn weight(&mut self, form: String, constant: &AiOp) {
        let module = self.module;
        let Some(value) = module.property(constant, "value") else { return };
        let bytes = match value {
            AiAttribute::Resource(index) => module.resources.get(*index as usize).map_or(0, |r| r.blob.length()),
            AiAttribute::Dense { bytes, .. } => bytes.len() as u64,
            _ => return,
        };
        if self.counted.insert(value.clone()) {
            let totals = self.weights.entry(form).or_default();
            totals.count += 1;
            totals.bytes = totals.bytes.saturating_add(bytes);
        }
    }

    fn constant(&mut self, op: &AiOp) {
        let module = self.module;
        let Some(value) = module.property(op, "value") else { return };
        let bytes = match value {
            AiAttribute::Resource(index) if self.seen.insert(*index) => {
                module.resources.get(*index as usize).map_or(0, |resource| resource.blob.length())
            }
            AiAttribute::Dense { bytes, .. } => bytes.len() as u64,
            _ => 0,
        };
        if let Some(element) = op.results.first().and_then(|ty| module.element(*ty)).filter(|_| bytes > 0) {
            let total = self.constants.entry(element.name()).or_default();
            *total = total.saturating_add(bytes);
        }
    }
}
