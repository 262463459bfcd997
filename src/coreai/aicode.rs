//! The dialect `aicode`: element types, types, attributes, operations and their forms.
//!
//! `aicode` is versioned and closed: every operation, type and attribute has a numbered form (`primitive.add_v1`), and
//! the date of the newest form that an asset uses is its version.

mod element;
mod entry;
mod forms;
mod module;
mod read;
mod write;

pub use element::ElementType;
pub use entry::{AiAttribute, AiType, Allocation, AttributeId, Constraints, StringId, TypeId};
pub use forms::{FORMS, OpForm, form};
pub use module::{AiBlock, AiModule, AiOp, AiRegion, AiResource, Blob};
pub use read::read;
pub use write::EncodedModule;

/// Name of the dialect.
pub const DIALECT: &str = "aicode";
/// Version of the dialect's encoding, in its version section.
pub const ENCODING: u64 = 2;
/// Name of the attribute that names a value of a graph.
pub const NAME: &str = "aicode.name";
/// Size of a dynamic dimension as it is encoded.
const DYNAMIC: i64 = i64::MIN;
