//! The sections of a bytecode file, as tables.

use std::ops::Range;

use super::cursor::{ByteCursor, Malformed};
use super::{MAGIC, VERSION, section};

/// A dialect that a file uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dialect<'a> {
    /// Name of the dialect.
    pub name: &'a str,
    /// Bytes of its version, which the dialect itself understands.
    pub version: Option<&'a [u8]>,
}

/// The name of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpName<'a> {
    /// Index of the dialect.
    pub dialect: u32,
    /// Name without the dialect.
    pub name: &'a str,
}

/// An attribute or type as its dialect wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Index of the dialect.
    pub dialect: u32,
    /// Whether the bytes are the dialect's own encoding; else they are text with a zero byte.
    pub custom: bool,
    /// The bytes.
    pub bytes: &'a [u8],
    /// Where they stand in the file.
    pub at: usize,
}

/// Content of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResourceData {
    /// Bytes, at a place of the file.
    Blob {
        /// Place in the file.
        place: Range<usize>,
        /// The alignment that is declared.
        alignment: u64,
    },
    /// A boolean or string, or nothing.
    Other,
}

/// A resource: a large constant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceEntry<'a> {
    /// Key of the resource.
    pub key: &'a str,
    /// Content of the resource.
    pub data: ResourceData,
}

/// A bytecode file, taken apart into its tables.
#[derive(Clone, Debug)]
pub struct Container<'a> {
    /// Version of the container.
    pub version: u64,
    /// Program that wrote the file.
    pub producer: &'a str,
    /// Strings.
    pub strings: Vec<&'a str>,
    /// Dialects.
    pub dialects: Vec<Dialect<'a>>,
    /// Names of operations.
    pub op_names: Vec<OpName<'a>>,
    /// Attributes.
    pub attributes: Vec<Entry<'a>>,
    /// Types.
    pub types: Vec<Entry<'a>>,
    /// Resources.
    pub resources: Vec<ResourceEntry<'a>>,
    /// Encoded properties of operations.
    pub properties: Vec<&'a [u8]>,
    /// The operations.
    pub ir: ByteCursor<'a>,
}

type Read<T> = Result<T, Malformed>;

impl<'a> Container<'a> {
    /// Takes a file apart.
    ///
    /// # Errors
    /// [`Malformed`] for what breaks the format, with its place.
    pub fn read(bytes: &'a [u8]) -> Read<Container<'a>> {
        let mut cursor = ByteCursor::new(bytes, 0);
        if !bytes.starts_with(&MAGIC) {
            return Err(cursor.malformed("no MLIR bytecode: expected the bytes `ML\\xefR`"));
        }
        cursor.take(MAGIC.len())?;
        let version = cursor.varint()?;
        if !(5..=VERSION).contains(&version) {
            return Err(cursor.malformed(format!("bytecode of version {version}; expected 5 or {VERSION}")));
        }
        let producer = cursor.c_string()?;
        let mut sections = [const { None }; 9];
        while !cursor.is_empty() {
            let at = cursor.position();
            let (id, body) = cursor.section()?;
            match sections.get_mut(usize::from(id)) {
                None => return Err(Malformed { at, problem: format!("section {id} is not known") }),
                Some(Some(_)) => return Err(Malformed { at, problem: format!("a second section {id}") }),
                Some(free) => *free = Some(body),
            }
        }
        let end = cursor.position();
        let mut take = |id: u8| sections[usize::from(id)].take();
        let needed = |body: Option<ByteCursor<'a>>, id: u8| {
            body.ok_or_else(|| Malformed { at: end, problem: format!("section {id} is missing") })
        };
        let strings = strings(needed(take(section::STRING), section::STRING)?)?;
        let (dialects, op_names) = dialects(needed(take(section::DIALECT), section::DIALECT)?, &strings)?;
        let offsets = needed(take(section::ATTR_TYPE_OFFSET), section::ATTR_TYPE_OFFSET)?;
        let entries = needed(take(section::ATTR_TYPE), section::ATTR_TYPE)?;
        let (attributes, types) = entries_of(offsets, entries, dialects.len())?;
        let resources = match take(section::RESOURCE_OFFSET) {
            Some(offsets) => resources(offsets, take(section::RESOURCE), &strings, dialects.len())?,
            None => Vec::new(),
        };
        let properties = take(section::PROPERTIES).map_or(Ok(Vec::new()), properties)?;
        let ir = needed(take(section::IR), section::IR)?;
        Ok(Container { version, producer, strings, dialects, op_names, attributes, types, resources, properties, ir })
    }
}

/// Looks a string up.
fn string<'a>(strings: &[&'a str], cursor: &ByteCursor<'_>, index: u64) -> Read<&'a str> {
    let found = usize::try_from(index).ok().and_then(|index| strings.get(index));
    found.copied().ok_or_else(|| cursor.malformed(format!("string {index} of {}", strings.len())))
}

/// The string section: lengths from the last string to the first, then the strings from the first to the last.
fn strings(mut cursor: ByteCursor<'_>) -> Read<Vec<&str>> {
    let count = cursor.count()?;
    let mut lengths = (0..count).map(|_| cursor.varint()).collect::<Read<Vec<u64>>>()?;
    lengths.reverse();
    let mut strings = Vec::with_capacity(count);
    for length in lengths {
        let length = cursor.check_count(length)?;
        let at = cursor.position();
        let text = match cursor.take(length)? {
            [text @ .., 0] => std::str::from_utf8(text).ok(),
            _ => None,
        };
        strings.push(text.ok_or_else(|| Malformed { at, problem: "no string of UTF-8 with a zero byte".into() })?);
    }
    Ok(strings)
}

fn dialects<'a>(mut cursor: ByteCursor<'a>, strings: &[&'a str]) -> Read<(Vec<Dialect<'a>>, Vec<OpName<'a>>)> {
    let mut dialects = Vec::new();
    for _ in 0..cursor.count()? {
        let (name, has_version) = cursor.flagged()?;
        let name = string(strings, &cursor, name)?;
        let mut version = None;
        if has_version {
            let (id, mut body) = cursor.section()?;
            if id != section::DIALECT_VERSIONS {
                return Err(cursor.malformed(format!("section {id} instead of a dialect's version")));
            }
            version = Some(body.take(body.remaining())?);
        }
        dialects.push(Dialect { name, version });
    }
    let mut op_names = Vec::new();
    let total = cursor.count()?;
    while !cursor.is_empty() {
        let dialect = known_dialect(&mut cursor, dialects.len())?;
        for _ in 0..cursor.count()? {
            let (name, _registered) = cursor.flagged()?;
            op_names.push(OpName { dialect, name: string(strings, &cursor, name)? });
        }
    }
    if op_names.len() != total {
        return Err(cursor.malformed(format!("{} names of operations; expected {total}", op_names.len())));
    }
    Ok((dialects, op_names))
}

fn known_dialect(cursor: &mut ByteCursor<'_>, count: usize) -> Read<u32> {
    let dialect = cursor.index()?;
    if dialect as usize >= count {
        return Err(cursor.malformed(format!("dialect {dialect} of {count}")));
    }
    Ok(dialect)
}

/// Attributes, then types: their lengths stand in one section, their bytes in another.
fn entries_of<'a>(
    mut offsets: ByteCursor<'a>,
    mut bytes: ByteCursor<'a>,
    dialects: usize,
) -> Read<(Vec<Entry<'a>>, Vec<Entry<'a>>)> {
    let (attributes, types) = (offsets.count()?, offsets.count()?);
    let mut entries = Vec::new();
    while !offsets.is_empty() {
        let dialect = known_dialect(&mut offsets, dialects)?;
        for _ in 0..offsets.count()? {
            let (length, custom) = offsets.flagged()?;
            let length = bytes.check_count(length)?;
            let at = bytes.position();
            entries.push(Entry { dialect, custom, bytes: bytes.take(length)?, at });
        }
    }
    if entries.len() != attributes + types {
        let problem = format!("{} attributes and types; expected {attributes} and {types}", entries.len());
        return Err(offsets.malformed(problem));
    }
    let types = entries.split_off(attributes);
    Ok((entries, types))
}

fn resources<'a>(
    mut offsets: ByteCursor<'a>,
    data: Option<ByteCursor<'a>>,
    strings: &[&'a str],
    dialects: usize,
) -> Read<Vec<ResourceEntry<'a>>> {
    let mut data = data.unwrap_or_else(|| ByteCursor::new(&[], offsets.position()));
    let mut out = Vec::new();
    let external = offsets.varint()?;
    let mut group = 0;
    while !offsets.is_empty() {
        if group < external {
            let key = offsets.varint()?;
            string(strings, &offsets, key)?;
        } else {
            known_dialect(&mut offsets, dialects)?;
        }
        group += 1;
        for _ in 0..offsets.count()? {
            let key = offsets.varint()?;
            let key = string(strings, &offsets, key)?;
            let length = offsets.varint()?;
            let kind = offsets.byte()?;
            let length = data.check_count(length)?;
            let base = data.position();
            let mut body = ByteCursor::new(data.take(length)?, base);
            let data = if kind == 0 && length > 0 { blob(&mut body)? } else { ResourceData::Other };
            out.push(ResourceEntry { key, data });
        }
    }
    Ok(out)
}

fn blob(body: &mut ByteCursor<'_>) -> Read<ResourceData> {
    let alignment = body.varint()?;
    let size = body.varint()?;
    body.align(alignment)?;
    let size = body.check_count(size)?;
    let start = body.position();
    Ok(ResourceData::Blob { place: start..start + size, alignment })
}

fn properties(mut cursor: ByteCursor<'_>) -> Read<Vec<&[u8]>> {
    let count = cursor.count()?;
    let one = |_| {
        let length = cursor.varint()?;
        let length = cursor.check_count(length)?;
        cursor.take(length)
    };
    (0..count).map(one).collect()
}
