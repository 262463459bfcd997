//! Building a module: entries are interned, resources shared, and the version is the newest form's date.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use anec_mil::Content;
use indexmap::IndexSet;

use crate::aicode::{
    AiAttribute, AiBlock, AiModule, AiOp, AiRegion, AiResource, AiType, AttributeId, Blob, Constraints, ElementType,
    NAME, StringId, TypeId, form,
};
use crate::bytecode::{ByteCursor, push_varint};

/// Size of the largest constant that is written into the attributes; larger ones become resources.
///
/// Apple's exporter counts elements instead: it writes fewer than 256 of any width into the attributes.
/// Its runtime reads both (measured on Linux).
pub const INLINE_BYTES: u64 = 256;

/// Attribute of a state: the name of the result that is its token.
const MUTATION: &str = "MutableBuffers.buffer_mutation";

/// Name of the producer in the container.
const PRODUCER: &str = concat!("anec", env!("CARGO_PKG_VERSION"));

/// Identity of a resource: its content object, or its bytes.
#[derive(PartialEq, Eq, Hash)]
enum ResourceKey {
    Content(usize),
    Bytes(Arc<[u8]>),
}

/// An attribute of a property.
#[derive(Clone, Copy, Debug)]
pub enum Property {
    /// An attribute that must be present.
    Required(AttributeId),
    /// An attribute that may be absent.
    Optional(Option<AttributeId>),
}

/// A named value of a graph: an argument or a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphValue {
    /// Name of the value.
    pub name: Option<String>,
    /// Type of the value.
    pub ty: TypeId,
    /// Whether it is a state, which calls change.
    pub mutable: bool,
}

impl GraphValue {
    /// A value that calls don't change.
    pub fn named(name: &str, ty: TypeId) -> Self {
        GraphValue { name: Some(name.to_owned()), ty, mutable: false }
    }
}

/// Properties of a graph beyond its signature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphKind {
    /// Called by other graphs only.
    pub private: bool,
    /// Kept apart by compilers.
    pub no_inline: bool,
    /// A named attribute that says which composite operation it is.
    pub composite: Option<AttributeId>,
}

/// A module that is being built.
pub struct ModuleBuilder {
    strings: IndexSet<String>,
    types: IndexSet<AiType>,
    attributes: IndexSet<AiAttribute>,
    op_names: IndexSet<&'static str>,
    properties: IndexSet<Vec<u8>>,
    resources: Vec<AiResource>,
    known_resources: HashMap<ResourceKey, AttributeId>,
    location: AttributeId,
    version: u32,
    graphs: Vec<AiOp>,
}

fn intern<T: Hash + Eq>(set: &mut IndexSet<T>, entry: T) -> u32 {
    set.insert_full(entry).0 as u32
}

impl Default for ModuleBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl ModuleBuilder {
    /// A module without graphs.
    pub fn new() -> Self {
        let mut module = ModuleBuilder {
            strings: IndexSet::new(),
            types: IndexSet::new(),
            attributes: IndexSet::new(),
            op_names: IndexSet::new(),
            properties: IndexSet::new(),
            resources: Vec::new(),
            known_resources: HashMap::new(),
            location: AttributeId(0),
            version: 0,
            graphs: Vec::new(),
        };
        // every operation needs a location; one that names no file serves them all
        let parts = ["-", "", ""].map(|part| module.string(part));
        let file = module.attribute(AiAttribute::File(parts));
        let source = module.attribute(AiAttribute::SourceRange { file, numbers: [1; 4] });
        let scope = module.attribute(AiAttribute::Unit);
        module.location = module.attribute(AiAttribute::Location { source, scope, kind: 0, ids: Vec::new() });
        module
    }

    /// Interns a string.
    pub fn string(&mut self, text: &str) -> StringId {
        match self.strings.get_index_of(text) {
            Some(known) => StringId(known as u32),
            None => StringId(intern(&mut self.strings, text.to_owned())),
        }
    }

    /// Interns an attribute.
    pub fn attribute(&mut self, attribute: AiAttribute) -> AttributeId {
        AttributeId(intern(&mut self.attributes, attribute))
    }

    /// Interns a type.
    pub fn ty(&mut self, ty: AiType) -> TypeId {
        TypeId(intern(&mut self.types, ty))
    }

    /// The type of a tensor.
    pub fn tensor(&mut self, shape: &[u64], element: ElementType) -> TypeId {
        self.constrained_tensor(shape, element, None)
    }

    /// The type of a tensor whose memory has constraints.
    pub fn constrained_tensor(
        &mut self,
        shape: &[u64],
        element: ElementType,
        constraints: Option<Constraints>,
    ) -> TypeId {
        self.version = self.version.max(element.date());
        let element = self.ty(AiType::Scalar(element));
        let constraints = constraints.map(|constraints| self.attribute(AiAttribute::Constraints(constraints)));
        self.ty(AiType::Tensor { shape: shape.iter().copied().map(Some).collect(), element, constraints })
    }

    /// The type of tokens.
    pub fn token(&mut self) -> TypeId {
        self.ty(AiType::Token)
    }

    /// A string attribute.
    pub fn text(&mut self, text: &str) -> AttributeId {
        let text = self.string(text);
        self.attribute(AiAttribute::String(text))
    }

    /// A boolean attribute.
    pub fn flag(&mut self, value: bool) -> AttributeId {
        self.attribute(AiAttribute::Integer { bits: 1, unsigned: true, value: value.into() })
    }

    /// Named values.
    pub fn named(&mut self, name: &str, values: Vec<AttributeId>) -> AttributeId {
        let name = self.string(name);
        self.attribute(AiAttribute::Named { name, values })
    }

    /// A list.
    pub fn array(&mut self, items: Vec<AttributeId>) -> AttributeId {
        self.attribute(AiAttribute::Array(items))
    }

    /// The elements of a constant within the attributes.
    pub fn dense(&mut self, bytes: Vec<u8>, splat: bool) -> AttributeId {
        self.attribute(AiAttribute::Dense { splat, bytes })
    }

    /// The elements of a constant in a resource, of which equal ones are one.
    pub fn resource(&mut self, blob: Blob) -> AttributeId {
        let key = match &blob {
            Blob::Bytes(bytes) => Some(ResourceKey::Bytes(bytes.clone())),
            Blob::Content(content) => Some(ResourceKey::Content(address(content))),
            Blob::File { .. } | Blob::Other => None,
        };
        if let Some(known) = key.as_ref().and_then(|key| self.known_resources.get(key)) {
            return *known;
        }
        let number = self.resources.len();
        self.resources.push(AiResource { key: format!("resource_{number}"), blob });
        let attribute = self.attribute(AiAttribute::Resource(number as u32));
        if let Some(key) = key {
            self.known_resources.insert(key, attribute);
        }
        attribute
    }

    /// A type by its index.
    pub(crate) fn type_of(&self, id: TypeId) -> Option<&AiType> {
        self.types.get_index(id.0 as usize)
    }

    /// The name of an operation by its index.
    pub(crate) fn op_name(&self, name: u32) -> &'static str {
        self.op_names.get_index(name as usize).copied().unwrap_or_default()
    }

    /// The bytes of a resource.
    pub(crate) fn resource_of(&self, index: u32) -> Option<&Blob> {
        self.resources.get(index as usize).map(|resource| &resource.blob)
    }

    /// The attribute of an operation whose only property it is.
    pub(crate) fn only_property(&self, op: &AiOp) -> Option<&AiAttribute> {
        let bytes = self.properties.get_index(op.properties? as usize)?;
        let index = ByteCursor::new(bytes, 0).varint().ok()?;
        self.attributes.get_index(usize::try_from(index).ok()?)
    }

    /// Encoded properties of an operation.
    fn encode_properties(&mut self, properties: &[Property]) -> u32 {
        let mut bytes = Vec::new();
        for property in properties {
            let word = match property {
                Property::Required(id) => u64::from(id.0),
                Property::Optional(None) => 0,
                Property::Optional(Some(id)) => u64::from(id.0) << 1 | 1,
            };
            push_varint(&mut bytes, word);
        }
        intern(&mut self.properties, bytes)
    }

    fn op(
        &mut self,
        name: &'static str,
        properties: &[Property],
        operands: &[u32],
        results: &[TypeId],
        regions: Vec<AiRegion>,
    ) -> AiOp {
        let form = form(name);
        debug_assert!(form.is_some(), "`{name}` has no row in the table of forms");
        self.version = self.version.max(form.map_or(0, |form| form.date));
        let properties = (!properties.is_empty()).then(|| self.encode_properties(properties));
        AiOp {
            name: intern(&mut self.op_names, name),
            location: self.location,
            attributes: None,
            properties,
            results: results.into(),
            operands: operands.into(),
            regions,
        }
    }

    /// The names of values, as graphs have them.
    fn value_names(&mut self, values: &[GraphValue]) -> AttributeId {
        let names = values.iter().map(|value| {
            let name = value.name.as_ref().map(|name| self.text(name));
            let keys = [Some(MUTATION).filter(|_| value.mutable), Some(NAME)].into_iter().flatten();
            let attributes = keys.filter_map(|key| name.map(|name| self.named(key, vec![name])));
            let attributes = attributes.collect();
            self.array(attributes)
        });
        let names = names.collect();
        self.array(names)
    }

    /// Adds a graph whose body ends with its results.
    pub fn graph(
        &mut self,
        name: &str,
        kind: GraphKind,
        arguments: &[GraphValue],
        results: &[GraphValue],
        body: BodyBuilder,
    ) {
        let types = |values: &[GraphValue]| values.iter().map(|value| value.ty).collect();
        let function = self.ty(AiType::Function { arguments: types(arguments), results: types(results) });
        let properties = [
            Property::Required(self.value_names(arguments)),
            Property::Optional(kind.composite),
            Property::Required(self.flag(false)),
            Property::Required(self.attribute(AiAttribute::Type(function))),
            Property::Required(self.flag(kind.private)),
            Property::Required(self.text(name)),
            Property::Required(self.flag(kind.no_inline)),
            Property::Required(self.array(Vec::new())),
            Property::Required(self.value_names(results)),
        ];
        let graph = self.op("dataflow.graph_v1", &properties, &[], &[], vec![body.region(self)]);
        self.graphs.push(graph);
    }

    /// The finished module.
    pub fn finish(mut self) -> AiModule {
        let graphs = std::mem::take(&mut self.graphs);
        let version = self.version.max(form("serialization.asset").map_or(0, |form| form.date));
        let version = self.attribute(AiAttribute::Integer { bits: 32, unsigned: true, value: version.into() });
        let region = AiRegion { values: 0, blocks: vec![AiBlock { arguments: Vec::new(), ops: graphs }] };
        let properties = [Property::Optional(None), Property::Optional(Some(version))];
        let asset = self.op("serialization.asset", &properties, &[], &[], vec![region]);
        let mut module = AiModule {
            producer: PRODUCER.to_owned(),
            strings: self.strings.into_iter().collect(),
            types: self.types.into_iter().collect(),
            attributes: self.attributes.into_iter().collect(),
            op_names: self.op_names.into_iter().map(str::to_owned).collect(),
            properties: self.properties.into_iter().collect(),
            resources: self.resources,
            ops: vec![asset],
        };
        // those of sizes at which a flexible function was lowered
        module.empty_unused_resources();
        module
    }
}

/// Tells contents apart; the module keeps each alive, so no other takes its address.
fn address(content: &Arc<dyn Content>) -> usize {
    Arc::as_ptr(content).cast::<()>().addr()
}

/// The body of a graph or of an operation. Its values are numbered in the order of their definition.
#[derive(Clone, Debug, Default)]
pub struct BodyBuilder {
    arguments: Vec<TypeId>,
    ops: Vec<AiOp>,
    values: u32,
}

impl BodyBuilder {
    /// A body whose arguments have these types.
    pub fn new(arguments: &[TypeId]) -> Self {
        BodyBuilder { arguments: arguments.to_vec(), ops: Vec::new(), values: arguments.len() as u32 }
    }

    /// Adds an operation; gives the number of its first result.
    pub fn op(
        &mut self,
        module: &mut ModuleBuilder,
        name: &'static str,
        properties: &[Property],
        operands: &[u32],
        results: &[TypeId],
        regions: Vec<AiRegion>,
    ) -> u32 {
        let op = module.op(name, properties, operands, results, regions);
        self.push(op)
    }

    /// Adds an operation of the same module; gives the number of its first result.
    pub(crate) fn push(&mut self, op: AiOp) -> u32 {
        let first = self.values;
        self.values += op.results.len() as u32;
        self.ops.push(op);
        first
    }

    /// The operations so far.
    pub(crate) fn ops(&self) -> &[AiOp] {
        &self.ops
    }

    /// Ends the body of an operation with what it yields.
    pub fn yielding(mut self, module: &mut ModuleBuilder, values: &[u32]) -> AiRegion {
        self.op(module, "dataflow.yield_v1", &[], values, &[], Vec::new());
        self.region(module)
    }

    /// The body as a region.
    pub(crate) fn region(self, module: &ModuleBuilder) -> AiRegion {
        let location = module.location;
        let arguments = self.arguments.into_iter().map(|ty| (ty, Some(location))).collect();
        AiRegion { values: u64::from(self.values), blocks: vec![AiBlock { arguments, ops: self.ops }] }
    }
}
