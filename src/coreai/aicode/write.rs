//! Encoding a module: everything but the bytes of resources, whose places are planned here.

use std::collections::HashMap;

use super::entry::{AiAttribute, AiType};
use super::module::{AiBlock, AiModule, AiOp, AiRegion};
use super::{DIALECT, ENCODING};
use crate::bytecode::{MAGIC, RESOURCE_ALIGNMENT, VERSION, pad_to, push_section, push_varint, section};

/// An encoded module, with gaps where the bytes of resources belong.
pub struct EncodedModule {
    /// The bytes before each resource, in order.
    pub before: Vec<Vec<u8>>,
    /// The bytes behind the last resource.
    pub after: Vec<u8>,
}

impl AiModule {
    /// Encodes the module. The bytes of resource `i` belong between `before[i]` and what follows.
    pub fn encode(&self) -> EncodedModule {
        let mut strings = Strings::new(&self.strings);
        let names: Vec<u64> = self.op_names.iter().map(|name| strings.index(name)).collect();
        let dialect = strings.index(DIALECT);
        let keys: Vec<u64> = self.resources.iter().map(|resource| strings.index(&resource.key)).collect();

        let mut out = MAGIC.to_vec();
        push_varint(&mut out, VERSION);
        out.extend(self.producer.bytes().chain([0]));
        push_section(&mut out, section::DIALECT, &dialects(dialect, &names));
        let (offsets, entries) = self.entries();
        push_section(&mut out, section::ATTR_TYPE_OFFSET, &offsets);
        push_section(&mut out, section::ATTR_TYPE, &entries);
        let mut ir = Vec::new();
        push_varint(&mut ir, (self.ops.len() as u64) << 1);
        self.ops.iter().for_each(|op| push_op(&mut ir, op));
        push_section(&mut out, section::IR, &ir);
        let before = self.resources(out, &keys);

        let mut after = Vec::new();
        push_section(&mut after, section::STRING, &strings.encode());
        let mut properties = Vec::new();
        push_varint(&mut properties, self.properties.len() as u64);
        for bytes in &self.properties {
            push_varint(&mut properties, bytes.len() as u64);
            properties.extend(bytes);
        }
        push_section(&mut after, section::PROPERTIES, &properties);
        EncodedModule { before, after }
    }

    fn entries(&self) -> (Vec<u8>, Vec<u8>) {
        let (mut offsets, mut entries) = (Vec::new(), Vec::new());
        push_varint(&mut offsets, self.attributes.len() as u64);
        push_varint(&mut offsets, self.types.len() as u64);
        let attributes: Vec<(Vec<u8>, bool)> =
            self.attributes.iter().map(|a| (a.encode(), !matches!(a, AiAttribute::Text(_)))).collect();
        let types: Vec<(Vec<u8>, bool)> =
            self.types.iter().map(|ty| (ty.encode(), !matches!(ty, AiType::Text(_)))).collect();
        for group in [attributes, types] {
            push_varint(&mut offsets, 0);
            push_varint(&mut offsets, group.len() as u64);
            for (bytes, custom) in group {
                push_varint(&mut offsets, ((bytes.len() as u64) << 1) | u64::from(custom));
                entries.extend(bytes);
            }
        }
        (offsets, entries)
    }

    /// The offsets of resources, and the section's bytes between them. `out` is the file so far.
    fn resources(&self, mut out: Vec<u8>, keys: &[u64]) -> Vec<Vec<u8>> {
        let mut offsets = Vec::new();
        push_varint(&mut offsets, 0);
        if self.resources.is_empty() {
            push_section(&mut out, section::RESOURCE_OFFSET, &offsets);
            push_section(&mut out, section::RESOURCE, &[]);
            return vec![out];
        }
        push_varint(&mut offsets, 0);
        push_varint(&mut offsets, keys.len() as u64);
        // the section's body begins aligned, so places within it have the alignment that they have in the file
        let (mut heads, mut end) = (Vec::new(), 0);
        for (resource, key) in self.resources.iter().zip(keys) {
            let mut head = Vec::new();
            push_varint(&mut head, RESOURCE_ALIGNMENT);
            push_varint(&mut head, resource.blob.length());
            pad_to(&mut head, end, RESOURCE_ALIGNMENT);
            let size = head.len() as u64 + resource.blob.length();
            end += size;
            push_varint(&mut offsets, *key);
            push_varint(&mut offsets, size);
            offsets.push(0);
            heads.push(head);
        }
        push_section(&mut out, section::RESOURCE_OFFSET, &offsets);
        out.push(0x80 | section::RESOURCE);
        push_varint(&mut out, end);
        push_varint(&mut out, RESOURCE_ALIGNMENT);
        pad_to(&mut out, 0, RESOURCE_ALIGNMENT);
        out.append(&mut heads[0]);
        heads[0] = out;
        heads
    }
}

/// Strings, which grow by the names that the tables use.
struct Strings {
    list: Vec<String>,
    places: HashMap<String, u64>,
}

impl Strings {
    fn new(list: &[String]) -> Self {
        let mut places = HashMap::new();
        for (place, text) in (0..).zip(list) {
            places.entry(text.clone()).or_insert(place);
        }
        Strings { list: list.to_vec(), places }
    }

    fn index(&mut self, text: &str) -> u64 {
        if let Some(place) = self.places.get(text) {
            return *place;
        }
        let place = self.list.len() as u64;
        self.list.push(text.to_owned());
        self.places.insert(text.to_owned(), place);
        place
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        push_varint(&mut out, self.list.len() as u64);
        self.list.iter().rev().for_each(|text| push_varint(&mut out, text.len() as u64 + 1));
        self.list.iter().for_each(|text| out.extend(text.bytes().chain([0])));
        out
    }
}

fn dialects(name: u64, op_names: &[u64]) -> Vec<u8> {
    let mut out = Vec::new();
    push_varint(&mut out, 1);
    push_varint(&mut out, (name << 1) | 1);
    let mut version = Vec::new();
    push_varint(&mut version, ENCODING);
    push_section(&mut out, section::DIALECT_VERSIONS, &version);
    push_varint(&mut out, op_names.len() as u64);
    push_varint(&mut out, 0);
    push_varint(&mut out, op_names.len() as u64);
    op_names.iter().for_each(|name| push_varint(&mut out, (name << 1) | 1));
    out
}

fn push_op(out: &mut Vec<u8>, op: &AiOp) {
    let flag = |set: bool, bit: u8| if set { bit } else { 0 };
    let mask = flag(op.attributes.is_some(), 0x01)
        | flag(!op.results.is_empty(), 0x02)
        | flag(!op.operands.is_empty(), 0x04)
        | flag(!op.regions.is_empty(), 0x10)
        | flag(op.properties.is_some(), 0x40);
    push_varint(out, op.name.into());
    out.push(mask);
    push_varint(out, op.location.0.into());
    op.attributes.iter().for_each(|attributes| push_varint(out, attributes.0.into()));
    op.properties.iter().for_each(|properties| push_varint(out, u64::from(*properties)));
    if !op.results.is_empty() {
        push_varint(out, op.results.len() as u64);
        op.results.iter().for_each(|ty| push_varint(out, ty.0.into()));
    }
    if !op.operands.is_empty() {
        push_varint(out, op.operands.len() as u64);
        op.operands.iter().for_each(|operand| push_varint(out, u64::from(*operand)));
    }
    if !op.regions.is_empty() {
        push_varint(out, ((op.regions.len() as u64) << 1) | 1);
        for region in &op.regions {
            let mut body = Vec::new();
            push_region(&mut body, region);
            push_section(out, section::IR, &body);
        }
    }
}

fn push_region(out: &mut Vec<u8>, region: &AiRegion) {
    push_varint(out, region.blocks.len() as u64);
    if !region.blocks.is_empty() {
        push_varint(out, region.values);
        region.blocks.iter().for_each(|block| push_block(out, block));
    }
}

fn push_block(out: &mut Vec<u8>, block: &AiBlock) {
    push_varint(out, ((block.ops.len() as u64) << 1) | u64::from(!block.arguments.is_empty()));
    if !block.arguments.is_empty() {
        push_varint(out, block.arguments.len() as u64);
        for (ty, location) in &block.arguments {
            push_varint(out, (u64::from(ty.0) << 1) | u64::from(location.is_some()));
            location.iter().for_each(|location| push_varint(out, location.0.into()));
        }
        // no order of uses
        out.push(0);
    }
    block.ops.iter().for_each(|op| push_op(out, op));
}
