//! Reading a module out of a container.

use super::entry::{AiAttribute, AiType, AttributeId, TypeId};
use super::module::{AiBlock, AiModule, AiOp, AiRegion, AiResource, Blob};
use super::{DIALECT, ENCODING};
use crate::bytecode::{ByteCursor, Container, Entry, Malformed, ResourceData, section};

/// Most operations of a file that are read. Apple's largest known asset has some ten thousand.
const MOST_OPS: usize = 2_000_000;
/// Deepest nesting of regions that is read.
const MOST_DEPTH: usize = 32;

type Read<T> = Result<T, Malformed>;

/// Reads a module.
///
/// # Errors
/// [`Malformed`] for what breaks the container or the dialect's encoding, for other dialects, and for more operations
/// or deeper regions than any asset has.
pub fn read(container: &Container<'_>) -> Read<AiModule> {
    let start = |problem: String| Malformed { at: container.ir.position(), problem };
    let names: Vec<&str> = container.dialects.iter().map(|dialect| dialect.name).collect();
    let version = match &container.dialects[..] {
        [dialect] if dialect.name == DIALECT => dialect.version,
        _ => return Err(start(format!("dialects {names:?}; expected `{DIALECT}` alone, as in every saved asset"))),
    };
    let encoding = version.map(|bytes| ByteCursor::new(bytes, 0).varint()).transpose()?;
    if encoding != Some(ENCODING) {
        return Err(start(format!("encoding {encoding:?} of `{DIALECT}`; expected {ENCODING}")));
    }
    let types = entries(&container.types, AiType::decode, AiType::Text)?;
    let attributes = entries(&container.attributes, AiAttribute::decode, AiAttribute::Text)?;
    let resource = |entry: &crate::bytecode::ResourceEntry<'_>| AiResource {
        key: entry.key.to_owned(),
        blob: match &entry.data {
            ResourceData::Blob { place, .. } => Blob::File { offset: place.start as u64, length: place.len() as u64 },
            ResourceData::Other => Blob::Other,
        },
    };
    let mut module = AiModule {
        producer: container.producer.to_owned(),
        strings: container.strings.iter().map(|&text| text.to_owned()).collect(),
        types,
        attributes,
        op_names: container.op_names.iter().map(|name| name.name.to_owned()).collect(),
        properties: container.properties.iter().map(|&bytes| bytes.to_vec()).collect(),
        resources: container.resources.iter().map(resource).collect(),
        ops: Vec::new(),
    };
    check_references(&module).map_err(start)?;
    let mut reader = OpReader { module: &module, ops: 0 };
    module.ops = reader.block(&mut container.ir.clone(), 0)?.ops;
    Ok(module)
}

fn entries<T>(entries: &[Entry<'_>], decode: fn(&[u8], usize) -> Read<T>, text: fn(String) -> T) -> Read<Vec<T>> {
    let one = |entry: &Entry<'_>| match entry.custom {
        true => decode(entry.bytes, entry.at),
        false => ByteCursor::new(entry.bytes, entry.at).c_string().map(|found| text(found.to_owned())),
    };
    entries.iter().map(one).collect()
}

/// Checks that entries refer to entries that exist.
fn check_references(module: &AiModule) -> Result<(), String> {
    let ty = |id: &TypeId| module.ty(*id).map(drop).ok_or_else(|| format!("type {} of {}", id.0, module.types.len()));
    let attribute = |id: &AttributeId| {
        module.attribute(*id).map(drop).ok_or_else(|| format!("attribute {} of {}", id.0, module.attributes.len()))
    };
    let string = |index: u32| match module.strings.get(index as usize) {
        Some(_) => Ok(()),
        None => Err(format!("string {index} of {}", module.strings.len())),
    };
    for entry in &module.types {
        match entry {
            AiType::Tensor { element, constraints, .. } => {
                ty(element)?;
                constraints.iter().try_for_each(attribute)?;
            }
            AiType::Function { arguments, results } => arguments.iter().chain(results).try_for_each(ty)?,
            AiType::Handle(inner) => ty(inner)?,
            AiType::Image { format, .. } => attribute(format)?,
            _ => {}
        }
    }
    for entry in &module.attributes {
        match entry {
            AiAttribute::String(text) => string(text.0)?,
            AiAttribute::Type(id) => ty(id)?,
            AiAttribute::Array(items) | AiAttribute::Dictionary(items) => items.iter().try_for_each(attribute)?,
            AiAttribute::Resource(index) if *index as usize >= module.resources.len() => {
                return Err(format!("resource {index} of {}", module.resources.len()));
            }
            AiAttribute::Named { name, values } => {
                string(name.0)?;
                values.iter().try_for_each(attribute)?;
            }
            AiAttribute::SymbolReference(path) => path.iter().try_for_each(|part| string(part.0))?,
            AiAttribute::Parameter { value, ty: of } => {
                attribute(value)?;
                ty(of)?;
            }
            AiAttribute::File(parts) => parts.iter().try_for_each(|part| string(part.0))?,
            AiAttribute::SourceRange { file, .. } => attribute(file)?,
            AiAttribute::CompileUnit { language, file, producer, text, .. } => {
                [language, producer, text].into_iter().try_for_each(|part| string(part.0))?;
                attribute(file)?;
            }
            AiAttribute::Metadata(dictionary) => attribute(dictionary)?,
            AiAttribute::OpId { name, metadata } => {
                string(name.0)?;
                attribute(metadata)?;
            }
            AiAttribute::Subprogram { ty: of, unit, file, names, .. } => {
                ty(of)?;
                [unit, file].into_iter().try_for_each(attribute)?;
                names.iter().try_for_each(|part| string(part.0))?;
            }
            AiAttribute::Location { source, scope, ids, .. } => {
                [source, scope].into_iter().chain(ids).try_for_each(attribute)?;
            }
            _ => {}
        }
    }
    Ok(())
}

struct OpReader<'m> {
    module: &'m AiModule,
    ops: usize,
}

impl OpReader<'_> {
    fn ty(&self, cursor: &ByteCursor<'_>, index: u32) -> Read<TypeId> {
        match self.module.ty(TypeId(index)) {
            Some(_) => Ok(TypeId(index)),
            None => Err(cursor.malformed(format!("type {index} of {}", self.module.types.len()))),
        }
    }

    fn attribute(&self, cursor: &mut ByteCursor<'_>) -> Read<AttributeId> {
        let index = cursor.index()?;
        match self.module.attribute(AttributeId(index)) {
            Some(_) => Ok(AttributeId(index)),
            None => Err(cursor.malformed(format!("attribute {index} of {}", self.module.attributes.len()))),
        }
    }

    fn region(&mut self, cursor: &mut ByteCursor<'_>, depth: usize) -> Read<AiRegion> {
        let blocks = cursor.count()?;
        if blocks == 0 {
            return Ok(AiRegion::default());
        }
        let values = cursor.varint()?;
        let blocks = (0..blocks).map(|_| self.block(cursor, depth)).collect::<Read<_>>()?;
        Ok(AiRegion { values, blocks })
    }

    fn block(&mut self, cursor: &mut ByteCursor<'_>, depth: usize) -> Read<AiBlock> {
        let (count, has_arguments) = cursor.flagged()?;
        let mut arguments = Vec::new();
        if has_arguments {
            for _ in 0..cursor.count()? {
                let (ty, has_location) = cursor.flagged()?;
                let ty = self.ty(cursor, u32::try_from(ty).unwrap_or(u32::MAX))?;
                let location = if has_location { Some(self.attribute(cursor)?) } else { None };
                arguments.push((ty, location));
            }
            if cursor.byte()? != 0 {
                skip_use_lists(cursor, arguments.len())?;
            }
        }
        let count = cursor.check_count(count)?;
        let ops = (0..count).map(|_| self.op(cursor, depth)).collect::<Read<_>>()?;
        Ok(AiBlock { arguments, ops })
    }

    fn op(&mut self, cursor: &mut ByteCursor<'_>, depth: usize) -> Read<AiOp> {
        self.ops += 1;
        if self.ops > MOST_OPS || depth > MOST_DEPTH {
            return Err(cursor.malformed(format!(
                "more than {MOST_OPS} operations, or regions nested deeper than {MOST_DEPTH}: no asset has them"
            )));
        }
        let name = cursor.index()?;
        if name as usize >= self.module.op_names.len() {
            return Err(cursor.malformed(format!("operation {name} of {}", self.module.op_names.len())));
        }
        let mask = cursor.byte()?;
        let has = |bit: u8| mask & bit != 0;
        let location = self.attribute(cursor)?;
        let attributes = if has(0x01) { Some(self.attribute(cursor)?) } else { None };
        let properties = if has(0x40) { Some(cursor.index()?) } else { None };
        if properties.is_some_and(|index| index as usize >= self.module.properties.len()) {
            return Err(cursor.malformed("properties that the file doesn't have"));
        }
        let results = if has(0x02) { cursor.indices()? } else { Vec::new() };
        let results = results.into_iter().map(|ty| self.ty(cursor, ty)).collect::<Read<Box<[_]>>>()?;
        let operands = if has(0x04) { cursor.indices()? } else { Vec::new() };
        if has(0x08) {
            // successors: control flow between blocks, which the dialect hasn't
            return Err(cursor.malformed("an operation with successors, which the dialect doesn't have"));
        }
        if has(0x20) {
            skip_use_lists(cursor, results.len())?;
        }
        let mut regions = Vec::new();
        if has(0x10) {
            let (count, isolated) = cursor.flagged()?;
            for _ in 0..cursor.check_count(count)? {
                regions.push(match isolated {
                    false => self.region(cursor, depth + 1)?,
                    true => match cursor.section()? {
                        (section::IR, mut body) => self.region(&mut body, depth + 1)?,
                        (id, body) => return Err(body.malformed(format!("section {id} instead of a region"))),
                    },
                });
            }
        }
        Ok(AiOp { name, location, attributes, properties, results, operands: operands.into(), regions })
    }
}

/// Skips the order of uses, which doesn't change what is computed.
fn skip_use_lists(cursor: &mut ByteCursor<'_>, values: usize) -> Read<()> {
    let lists = if values > 1 { cursor.count()? } else { 1 };
    for _ in 0..lists {
        if values > 1 {
            cursor.varint()?;
        }
        let (count, _pairs) = cursor.flagged()?;
        for _ in 0..cursor.check_count(count)? {
            cursor.varint()?;
        }
    }
    Ok(())
}
