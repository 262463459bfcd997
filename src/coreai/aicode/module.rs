//! A module in memory: tables that entries and operations refer to by index, and the tree of operations.

use std::collections::BTreeSet;
use std::sync::Arc;

use anec_mil::Content;

use super::entry::{AiAttribute, AiType, AttributeId, StringId, TypeId};
use super::forms::form;
use crate::bytecode::ByteCursor;

/// Where the bytes of a resource are.
#[derive(Clone)]
pub enum Blob {
    /// In memory.
    Bytes(Arc<[u8]>),
    /// Produced when the asset is written.
    Content(Arc<dyn Content>),
    /// At a place of the file that was read.
    File {
        /// Offset within the file.
        offset: u64,
        /// Number of bytes.
        length: u64,
    },
    /// A boolean or string resource, which this crate doesn't understand.
    Other,
}

impl Blob {
    /// Number of bytes.
    pub fn length(&self) -> u64 {
        match self {
            Blob::Bytes(bytes) => bytes.len() as u64,
            Blob::Content(content) => content.length(),
            Blob::File { length, .. } => *length,
            Blob::Other => 0,
        }
    }
}

/// A large constant.
#[derive(Clone)]
pub struct AiResource {
    /// Key of the resource.
    pub key: String,
    /// Bytes of the resource.
    pub blob: Blob,
}

/// An operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AiOp {
    /// Index of the name.
    pub name: u32,
    /// Where it comes from.
    pub location: AttributeId,
    /// Discardable attributes.
    pub attributes: Option<AttributeId>,
    /// Index of its encoded properties.
    pub properties: Option<u32>,
    /// Types of its results.
    pub results: Box<[TypeId]>,
    /// Numbers of the values that it reads, within its region.
    pub operands: Box<[u32]>,
    /// Nested regions.
    pub regions: Vec<AiRegion>,
}

/// A region of an operation. Its values are numbered from 0: arguments first, then results, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AiRegion {
    /// Number of its values.
    pub values: u64,
    /// Blocks; one, wherever it was seen.
    pub blocks: Vec<AiBlock>,
}

/// A block of operations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AiBlock {
    /// Types of the arguments.
    pub arguments: Vec<(TypeId, Option<AttributeId>)>,
    /// Operations, each after those that it reads from.
    pub ops: Vec<AiOp>,
}

/// A module of the dialect `aicode`.
#[derive(Clone, Default)]
pub struct AiModule {
    /// Program that wrote it.
    pub producer: String,
    /// Strings.
    pub strings: Vec<String>,
    /// Types.
    pub types: Vec<AiType>,
    /// Attributes.
    pub attributes: Vec<AiAttribute>,
    /// Names of operations, without the dialect.
    pub op_names: Vec<String>,
    /// Encoded properties.
    pub properties: Vec<Vec<u8>>,
    /// Resources.
    pub resources: Vec<AiResource>,
    /// Operations of the file's only block; one, the asset, wherever it was seen.
    pub ops: Vec<AiOp>,
}

impl AiModule {
    /// A string; empty if there is none of that index.
    pub fn string(&self, id: StringId) -> &str {
        self.strings.get(id.0 as usize).map_or("", String::as_str)
    }

    /// A type.
    pub fn ty(&self, id: TypeId) -> Option<&AiType> {
        self.types.get(id.0 as usize)
    }

    /// An attribute.
    pub fn attribute(&self, id: AttributeId) -> Option<&AiAttribute> {
        self.attributes.get(id.0 as usize)
    }

    /// The name of an operation.
    pub fn name(&self, op: &AiOp) -> &str {
        self.op_names.get(op.name as usize).map_or("", String::as_str)
    }

    /// The attribute of an operation's property; `None` if it has none, or the operation's form isn't known.
    pub fn property(&self, op: &AiOp, property: &str) -> Option<&AiAttribute> {
        let form = form(self.name(op))?;
        let mut cursor = ByteCursor::new(self.properties.get(op.properties? as usize)?, 0);
        for name in form.properties.split_whitespace() {
            let (bare, optional) = name.strip_suffix('?').map_or((name, false), |bare| (bare, true));
            let value = match (optional, cursor.varint().ok()?) {
                (false, index) => Some(index),
                (true, 0) => None,
                (true, index) => Some(index >> 1),
            };
            if bare == property {
                return self.attribute(AttributeId(u32::try_from(value?).ok()?));
            }
        }
        None
    }

    /// Empties resources that no constant has.
    pub(crate) fn empty_unused_resources(&mut self) {
        fn visit(module: &AiModule, ops: &[AiOp], used: &mut BTreeSet<u32>) {
            for op in ops {
                if let Some(AiAttribute::Resource(index)) = module.property(op, "value") {
                    used.insert(*index);
                }
                op.regions.iter().flat_map(|region| &region.blocks).for_each(|block| visit(module, &block.ops, used));
            }
        }
        let mut used = BTreeSet::new();
        visit(self, &self.ops, &mut used);
        for (_, resource) in (0..).zip(&mut self.resources).filter(|(index, _)| !used.contains(index)) {
            resource.blob = Blob::Bytes(Arc::default());
        }
    }

    /// The items of an array; none if it isn't one.
    pub fn items<'a>(&'a self, attribute: Option<&'a AiAttribute>) -> impl Iterator<Item = &'a AiAttribute> {
        let items = match attribute {
            Some(AiAttribute::Array(items) | AiAttribute::Dictionary(items)) => &items[..],
            _ => &[],
        };
        items.iter().filter_map(|id| self.attribute(*id))
    }

    /// Returns the graphs of the asset, private ones included, in the order of the file.
    pub fn graphs(&self) -> impl Iterator<Item = &AiOp> {
        let nested = |op: &'static str| move |found: &&AiOp| self.name(found) == op;
        let assets = self.ops.iter().filter(nested("serialization.asset"));
        let blocks = assets.flat_map(|asset| asset.regions.iter().flat_map(|region| &region.blocks));
        blocks.flat_map(|block| &block.ops).filter(nested("dataflow.graph_v1"))
    }
}
