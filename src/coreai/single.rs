//! Programs in single precision: the other side of a comparison that shows the cost of half precision.

use std::collections::HashMap;
use std::sync::Arc;

use anec_base::Result;
use anec_mil::Content;

use crate::aicode::{AiAttribute, AiModule, AiOp, AiResource, AiType, Blob, ElementType};
use crate::bytecode::push_varint;
use crate::error::CoreAiError;

/// Returns a module in which every tensor of f16, constants included, is one of f32.
///
/// # Errors
/// [`CoreAiError::Unsupported`] for a module with types or constants that aren't understood.
pub fn in_single_precision(module: &AiModule) -> std::result::Result<AiModule, CoreAiError> {
    let unsupported = |problem: &str| CoreAiError::Unsupported { problems: vec![problem.to_owned()] };
    if module.types.iter().any(|ty| matches!(ty, AiType::Unknown(_) | AiType::Text(_))) {
        return Err(unsupported("f32 in place of f16 in a type that isn't understood"));
    }
    let mut wide = module.clone();
    let mut ops = std::mem::take(&mut wide.ops);
    let mut widening = Widening { module, wide: &mut wide, known: HashMap::new() };
    widening.ops(&mut ops).ok_or_else(|| unsupported("f32 in place of a constant of f16 that can't be read"))?;
    wide.ops = ops;
    wide.empty_unused_resources();
    for ty in &mut wide.types {
        if *ty == AiType::Scalar(ElementType::F16) {
            *ty = AiType::Scalar(ElementType::F32);
        }
    }
    Ok(wide)
}

struct Widening<'a> {
    module: &'a AiModule,
    wide: &'a mut AiModule,
    /// Properties of constants in f32 by those in f16, which constants of other types may share.
    known: HashMap<u32, u32>,
}

impl Widening<'_> {
    fn ops(&mut self, ops: &mut [AiOp]) -> Option<()> {
        for op in ops.iter_mut() {
            if self.module.name(op) == "primitive.constant_v1" {
                let half = op.results.first().is_some_and(|ty| self.module.element(*ty) == Some(ElementType::F16));
                if half {
                    op.properties = Some(self.constant(op.properties?, self.module.property(op, "value")?)?);
                }
            }
            for block in op.regions.iter_mut().flat_map(|region| &mut region.blocks) {
                self.ops(&mut block.ops)?;
            }
        }
        Some(())
    }

    /// Index of the properties of a constant in f32.
    fn constant(&mut self, properties: u32, value: &AiAttribute) -> Option<u32> {
        if let Some(known) = self.known.get(&properties) {
            return Some(*known);
        }
        let wide = match value {
            AiAttribute::Dense { splat, bytes } => AiAttribute::Dense { splat: *splat, bytes: singles(bytes) },
            AiAttribute::Resource(index) => {
                let AiResource { key, blob } = self.module.resources.get(*index as usize)?;
                let blob = match blob {
                    Blob::Bytes(bytes) => Blob::Bytes(singles(bytes).into()),
                    Blob::Content(content) => Blob::Content(Arc::new(Singles(content.clone()))),
                    Blob::File { .. } | Blob::Other => return None,
                };
                let index = self.wide.resources.len() as u32;
                self.wide.resources.push(AiResource { key: format!("{key}_f32"), blob });
                AiAttribute::Resource(index)
            }
            _ => return None,
        };
        let mut bytes = Vec::new();
        push_varint(&mut bytes, self.wide.attributes.len() as u64);
        let index = self.wide.properties.len() as u32;
        self.wide.attributes.push(wide);
        self.wide.properties.push(bytes);
        self.known.insert(properties, index);
        Some(index)
    }
}

/// Elements of f16 as those of f32.
fn singles(halves: &[u8]) -> Vec<u8> {
    halves.as_chunks().0.iter().flat_map(|half| half::f16::from_le_bytes(*half).to_f32().to_le_bytes()).collect()
}

/// The elements of a resource in f16, as f32.
struct Singles(Arc<dyn Content>);

impl Content for Singles {
    fn length(&self) -> u64 {
        2 * self.0.length()
    }

    fn granule(&self) -> u64 {
        // whole elements of both
        4 * self.0.granule()
    }

    fn prepare(&self) -> Result<()> {
        self.0.prepare()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut halves = vec![0; out.len() / 2];
        self.0.read(offset / 2, &mut halves)?;
        out.copy_from_slice(&singles(&halves));
        Ok(())
    }
}
