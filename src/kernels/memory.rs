//! Memory of weights in large pages.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;
use memmap2::{MmapMut, MmapRaw};

/// Elements of a constant: a vector, or a part of a block of an [`Arena`].
pub enum ArenaVec<T> {
    /// Few elements, or elements from elsewhere.
    Vector(Vec<T>),
    /// Many elements.
    Part(ArenaSlice<T>),
}

/// Immutable elements within a block.
pub struct ArenaSlice<T> {
    block: Arc<MmapRaw>,
    /// Offset in bytes, a multiple of [`ALIGNMENT`].
    offset: usize,
    length: usize,
    elements: PhantomData<Vec<T>>,
}

/// Memory for weights, in large pages if the system has them. All weights of a model are read sequentially for each
/// token; with small pages, a processor translates an address and restarts prefetching every 4 KB.
#[derive(Default)]
pub struct Arena {
    open: Mutex<Option<CurrentBlock>>,
}

/// Block with free space.
struct CurrentBlock {
    block: Arc<MmapRaw>,
    taken: usize,
}

/// Bytes of a block; unused pages take no memory.
const BLOCK: usize = 64 << 20;
/// Minimum bytes of elements that are put into blocks.
const MIN_BLOCK_BYTES: usize = 64 << 10;
/// Alignment of parts: a cache line.
const ALIGNMENT: usize = 64;

impl Arena {
    /// Allocates `length` zeroed elements, which `fill` sets.
    ///
    /// # Errors
    /// Any error of `fill`.
    pub fn filled<T: Pod, E>(
        &self,
        length: usize,
        fill: impl FnOnce(&mut [T]) -> Result<(), E>,
    ) -> Result<ArenaVec<T>, E> {
        let bytes = length * size_of::<T>();
        let place = if bytes < MIN_BLOCK_BYTES { None } else { self.take(bytes) };
        let Some((block, offset)) = place else {
            let mut elements = vec![T::zeroed(); length];
            fill(&mut elements)?;
            return Ok(ArenaVec::Vector(elements));
        };
        // SAFETY: these bytes belong to this call alone, begin at a cache line, and are zeros, which are values of any
        // `Pod` type.
        fill(unsafe { std::slice::from_raw_parts_mut(block.as_mut_ptr().add(offset).cast(), length) })?;
        Ok(ArenaVec::Part(ArenaSlice { block, offset, length, elements: PhantomData }))
    }

    /// Reserves `bytes` bytes; `None` if the system has no memory.
    fn take(&self, bytes: usize) -> Option<(Arc<MmapRaw>, usize)> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |open: &CurrentBlock| open.block.len() - open.taken >= bytes;
        if !open.as_ref().is_some_and(fits) {
            let block = MmapMut::map_anon(bytes.max(BLOCK)).ok()?;
            // ignored: small pages work too
            #[cfg(target_os = "linux")]
            let _ = block.advise(memmap2::Advice::HugePage);
            *open = Some(CurrentBlock { block: Arc::new(block.into()), taken: 0 });
        }
        let CurrentBlock { block, taken } = open.as_mut()?;
        let offset = *taken;
        *taken = (offset + bytes).next_multiple_of(ALIGNMENT).min(block.len());
        Some((block.clone(), offset))
    }
}

impl<T: Pod> Deref for ArenaVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            ArenaVec::Vector(elements) => elements,
            // SAFETY: the part is within the block, filled, and never modified.
            ArenaVec::Part(ArenaSlice { block, offset, length, .. }) => unsafe {
                std::slice::from_raw_parts(block.as_ptr().add(*offset).cast(), *length)
            },
        }
    }
}

impl<T> From<Vec<T>> for ArenaVec<T> {
    fn from(elements: Vec<T>) -> Self {
        ArenaVec::Vector(elements)
    }
}

impl<T> FromIterator<T> for ArenaVec<T> {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        ArenaVec::Vector(elements.into_iter().collect())
    }
}

impl<T: Pod> fmt::Debug for ArenaVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_blocks_keep_what_they_were_filled_with() {
        let arena = Arena::default();
        let filled = |length: usize, first: u32| {
            let array = arena.filled(length, |elements: &mut [u32]| {
                assert!(elements.iter().all(|element| *element == 0));
                elements.iter_mut().zip(first..).for_each(|(element, value)| *element = value);
                Ok::<_, ()>(())
            });
            (array.unwrap(), first)
        };
        // small ones, some that share a block, one larger than the rest of it, one larger than a block
        let lengths = [
            10,
            MIN_BLOCK_BYTES / 4,
            MIN_BLOCK_BYTES / 4 + 1,
            BLOCK / 8,
            BLOCK / 8 + 3,
            BLOCK / 4 + 5,
            MIN_BLOCK_BYTES,
        ];
        let arrays: Vec<_> = lengths.iter().zip(1..).map(|(length, i)| filled(*length, i * 1_000_000)).collect();
        drop(arena);
        for ((array, first), length) in arrays.iter().zip(lengths) {
            assert_eq!(array.len(), length);
            assert_eq!(matches!(array, ArenaVec::Part(_)), length * 4 >= MIN_BLOCK_BYTES);
            assert!(array.iter().zip(*first..).all(|(element, value)| *element == value));
            assert_eq!(array.as_ptr().addr() % if length * 4 >= MIN_BLOCK_BYTES { ALIGNMENT } else { 4 }, 0);
        }
    }

    #[test]
    fn a_failed_fill_is_an_error() {
        let refused = |_: &mut [u8]| Err("no such file");
        assert_eq!(Arena::default().filled(MIN_BLOCK_BYTES, refused).unwrap_err(), "no such file");
        assert_eq!(Arena::default().filled(1, refused).unwrap_err(), "no such file");
    }
}
