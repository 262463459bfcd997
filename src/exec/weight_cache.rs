//! Weights and run memory shared by the functions of a model.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytemuck::Pod;
use rayon::prelude::*;

use super::weight::{decode_elements, is_code};
use super::workspace::Workspaces;
use anec_base::Result;
use anec_kernels::codes::PackedCodes;
use anec_kernels::memory::{Arena, ArenaVec};
use anec_kernels::weight::Elements;
use anec_mil::{Constant, Content, Data, DataType};

/// Content, kept so that its address stays unique, with its elements.
type CachedWeight = (Arc<dyn Content>, Arc<Elements>);

/// Loaded weights by their content, so that functions with the same weights share them, and the memory of runs.
#[derive(Default)]
pub struct WeightCache {
    held: Mutex<HashMap<(usize, DataType), CachedWeight>>,
    arena: Arena,
    workspaces: Workspaces,
}

impl WeightCache {
    /// Empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// Memory of runs of all functions.
    pub(super) fn workspaces(&self) -> &Workspaces {
        &self.workspaces
    }

    /// Bytes of the loaded weights.
    pub fn bytes(&self) -> usize {
        let held = self.held.lock().unwrap_or_else(|e| e.into_inner());
        let size = |elements: &Elements| match elements {
            Elements::F32(v) => 4 * v.len(),
            Elements::F16(v) => 2 * v.len(),
            Elements::Int8(v) => v.len(),
            Elements::Codes(v) => v.bytes().len(),
        };
        held.values().map(|(_, elements)| size(elements)).sum()
    }

    /// Frees weights that no executable uses any more.
    pub fn release_unused(&self) {
        let mut held = self.held.lock().unwrap_or_else(|e| e.into_inner());
        held.retain(|_, (_, elements)| Arc::strong_count(elements) > 1);
    }

    /// Elements of a floating-point constant, or of integers with up to eight bits (all but signed bytes are codes);
    /// `None` for other types.
    pub(crate) fn elements(&self, constant: &Constant) -> Result<Option<Arc<Elements>>> {
        self.elements_as(constant, constant.ty.dtype)
    }

    /// Elements of a constant whose bytes hold packed elements of `dtype`. Padding bits of the last byte may appear as
    /// further elements.
    pub(crate) fn elements_as(&self, constant: &Constant, dtype: DataType) -> Result<Option<Arc<Elements>>> {
        let Data::Content(content) = &constant.data else {
            return Ok(decode_elements(dtype, &constant.bytes()?).map(Arc::new));
        };
        let key = (Arc::as_ptr(content).cast::<()>() as usize, dtype);
        if let Some((_, elements)) = self.held.lock().unwrap_or_else(|e| e.into_inner()).get(&key) {
            return Ok(Some(elements.clone()));
        }
        let Some(elements) = self.load(dtype, content.as_ref())?.map(Arc::new) else { return Ok(None) };
        let mut held = self.held.lock().unwrap_or_else(|e| e.into_inner());
        Ok(Some(held.entry(key).or_insert((content.clone(), elements)).1.clone()))
    }
}

/// Bytes that one thread reads at a time.
const PIECE: u64 = 4 << 20;

/// Fills `out` with a content from its start, in parallel.
fn read_all(content: &dyn Content, out: &mut [u8]) -> Result<()> {
    content.prepare()?;
    let granule = content.granule().max(1);
    let piece = usize::try_from(granule * (PIECE / granule).max(1)).unwrap_or(usize::MAX);
    out.par_chunks_mut(piece).enumerate().try_for_each(|(i, out)| content.read(i as u64 * piece as u64, out))
}

impl WeightCache {
    /// Loads the elements of a content.
    fn load(&self, dtype: DataType, content: &dyn Content) -> Result<Option<Elements>> {
        let length = content.length() as usize;
        Ok(Some(match dtype {
            DataType::Fp32 => Elements::F32(self.read(length, content)?),
            DataType::Fp16 => Elements::F16(self.read(length, content)?),
            DataType::Int8 => Elements::Int8(self.read(length, content)?),
            _ if is_code(dtype) => {
                Elements::Codes(PackedCodes::new(dtype.bits() as usize, self.read(length, content)?))
            }
            // decoded to f32
            _ if dtype.is_float() => {
                let mut bytes = vec![0u8; length];
                read_all(content, &mut bytes)?;
                return Ok(decode_elements(dtype, &bytes).map(|elements| self.keep(elements)));
            }
            _ => return Ok(None),
        }))
    }

    /// Reads `length` bytes of a content unchanged.
    fn read<T: Pod>(&self, length: usize, content: &dyn Content) -> Result<ArenaVec<T>> {
        self.arena.filled(length / size_of::<T>(), |values| read_all(content, bytemuck::cast_slice_mut(values)))
    }

    /// Moves decoded elements into the arena.
    pub(crate) fn keep(&self, elements: Elements) -> Elements {
        match elements {
            Elements::F32(values) => Elements::F32(self.copied(&values)),
            Elements::F16(values) => Elements::F16(self.copied(&values)),
            Elements::Int8(values) => Elements::Int8(self.copied(&values)),
            Elements::Codes(codes) => Elements::Codes(PackedCodes::new(codes.bits(), self.copied(codes.bytes()))),
        }
    }

    fn copied<T: Pod>(&self, values: &[T]) -> ArenaVec<T> {
        let Ok(copied) = self.arena.filled(values.len(), |copied| {
            copied.copy_from_slice(values);
            Ok::<_, Infallible>(())
        });
        copied
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_mil::TensorType;

    #[test]
    fn functions_share_the_bytes_of_a_content() {
        struct Bytes(Vec<u8>);
        impl Content for Bytes {
            fn length(&self) -> u64 {
                self.0.len() as u64
            }
            fn granule(&self) -> u64 {
                4
            }
            fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
                out.copy_from_slice(&self.0[offset as usize..][..out.len()]);
                Ok(())
            }
        }
        let values: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let constant = Constant::content(TensorType::new(DataType::Fp32, [2u64]), Arc::new(Bytes(values)));
        let cache = WeightCache::new();
        let first = cache.elements(&constant).unwrap().unwrap();
        let second = cache.elements(&constant.clone()).unwrap().unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(cache.bytes(), 8);
        assert!(matches!(&*first, Elements::F32(v) if **v == [1.5, -2.0]));
    }
}
