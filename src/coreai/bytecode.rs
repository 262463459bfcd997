//! MLIR's bytecode container: variable-length integers, sections, and the tables that an asset keeps in them.
//!
//! The container is public (MLIR's "Bytecode Format"); this module knows nothing of the dialect inside. Versions 5 and
//! 6 are read, version 6 is written.

mod container;
mod cursor;
mod encode;

pub use container::{Container, Dialect, Entry, OpName, ResourceData, ResourceEntry};
pub use cursor::{ByteCursor, Malformed};
pub use encode::{RESOURCE_ALIGNMENT, pad_to, push_section, push_signed, push_varint};

/// First bytes of every bytecode file.
pub const MAGIC: [u8; 4] = *b"ML\xefR";
/// Version of the container that is written.
pub const VERSION: u64 = 6;
/// Byte that fills a section or resource up to its alignment.
const PADDING: u8 = 0xCB;

/// Numbers of the sections.
pub mod section {
    #![allow(missing_docs)] // the names are MLIR's
    pub const STRING: u8 = 0;
    pub const DIALECT: u8 = 1;
    pub const ATTR_TYPE: u8 = 2;
    pub const ATTR_TYPE_OFFSET: u8 = 3;
    pub const IR: u8 = 4;
    pub const RESOURCE: u8 = 5;
    pub const RESOURCE_OFFSET: u8 = 6;
    pub const DIALECT_VERSIONS: u8 = 7;
    pub const PROPERTIES: u8 = 8;
}
