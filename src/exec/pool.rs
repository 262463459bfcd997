//! Tensors that nobody needs any more, kept for those that come.
//!
//! Every call of a function makes tensors of the same sizes as the one before, so after the first call there is one to be
//! had for each.

use std::sync::Arc;

use super::tensor::{Tensor, TensorData};

/// Tensors to be used again.
#[derive(Default)]
pub(crate) struct Pool {
    free: Vec<Free>,
    /// Runs so far.
    run: u64,
    /// Bytes of the elements of `free`.
    bytes: usize,
}

/// A tensor that nobody else has.
struct Free {
    tensor: Arc<Tensor>,
    /// The run that it was last used in.
    used: u64,
}

/// Runs after which a tensor that wasn't needed is freed: a model is some functions that run one after the other, and
/// what a long prompt needed isn't kept while single tokens follow.
const MOST_IDLE: u64 = 64;
/// Most bytes that are kept.
const MOST_BYTES: usize = 64 << 20;
/// Elements that the size of a new tensor is rounded up to a multiple of.
const GRANULE: usize = 64;
/// A tensor may be used for one that needs a fraction of its room, but no less than this.
const MOST_SLACK: usize = 4;

/// An element of a tensor.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// What stands where nothing was written.
    const UNWRITTEN: Self;
    /// The elements of a tensor, if they are of this type.
    fn of(data: &mut TensorData) -> Option<&mut Vec<Self>>;
    /// A tensor's elements.
    fn data(elements: Vec<Self>) -> TensorData;
}

macro_rules! element {
    ($type:ty, $variant:ident, $unwritten:expr) => {
        impl Element for $type {
            const UNWRITTEN: Self = $unwritten;

            fn of(data: &mut TensorData) -> Option<&mut Vec<Self>> {
                match data {
                    TensorData::$variant(elements) => Some(elements),
                    _ => None,
                }
            }

            fn data(elements: Vec<Self>) -> TensorData {
                TensorData::$variant(elements)
            }
        }
    };
}
element!(f32, F32, f32::NAN);
element!(i32, I32, 0);
element!(bool, Bool, false);

impl Pool {
    /// A tensor of this shape, whose elements `fill` appends to an empty vector that has room for them.
    pub fn make<T: Element>(&mut self, shape: &[usize], fill: impl FnOnce(&mut Vec<T>)) -> Arc<Tensor> {
        self.reuse(shape.iter().product(), shape, |elements| {
            elements.clear();
            fill(elements);
        })
    }

    /// A tensor of this shape, whose elements are those of any that was there before, or NaN or zero: they are all to be
    /// written.
    pub fn unspecified<T: Element>(&mut self, shape: &[usize]) -> Arc<Tensor> {
        self.unspecified_within::<T>(shape.iter().product(), shape)
    }

    /// As [`unspecified`](Pool::unspecified), with room for at least so many elements.
    fn unspecified_within<T: Element>(&mut self, room: usize, shape: &[usize]) -> Arc<Tensor> {
        let count = shape.iter().product();
        self.reuse::<T>(room, shape, |elements| {
            // so that tests see what isn't written
            if cfg!(any(test, debug_assertions)) {
                elements.clear();
            }
            elements.resize(count, T::UNWRITTEN);
        })
    }

    /// A tensor of this shape, all of whose elements `write` writes, in place of what is [there](Pool::unspecified).
    pub fn written<T: Element>(&mut self, shape: &[usize], write: impl FnOnce(&mut [T])) -> Arc<Tensor> {
        self.written_within(shape.iter().product(), shape, write)
    }

    /// As [`written`](Pool::written), with room for at least so many elements, so that the next tensor may be larger.
    pub fn written_within<T: Element>(
        &mut self,
        room: usize,
        shape: &[usize],
        write: impl FnOnce(&mut [T]),
    ) -> Arc<Tensor> {
        let mut tensor = self.unspecified_within::<T>(room, shape);
        if let Some(elements) = Arc::get_mut(&mut tensor).and_then(|tensor| T::of(&mut tensor.data)) {
            write(elements);
        }
        tensor
    }

    /// A tensor of this shape with room for at least so many elements, whose elements `fill` makes of whatever they are.
    fn reuse<T: Element>(&mut self, room: usize, shape: &[usize], fill: impl FnOnce(&mut Vec<T>)) -> Arc<Tensor> {
        let mut tensor = self.take::<T>(room);
        if let Some(Tensor { shape: own, data }) = Arc::get_mut(&mut tensor) {
            own.clear();
            own.extend_from_slice(shape);
            if let Some(elements) = T::of(data) {
                fill(elements);
                debug_assert_eq!(elements.len(), shape.iter().product::<usize>());
            }
        }
        tensor
    }

    /// A tensor of one value throughout.
    pub fn filled<T: Element>(&mut self, shape: &[usize], value: T) -> Arc<Tensor> {
        self.make(shape, |out| out.resize(shape.iter().product(), value))
    }

    /// A tensor of this shape with these elements.
    pub fn copied<T: Element>(&mut self, shape: &[usize], elements: &[T]) -> Arc<Tensor> {
        self.make(shape, |out| out.extend_from_slice(elements))
    }

    /// A tensor of another shape with the elements of `data`.
    pub fn reshaped(&mut self, shape: &[usize], data: &TensorData) -> Arc<Tensor> {
        match data {
            TensorData::F32(elements) => self.copied(shape, elements),
            TensorData::I32(elements) => self.copied(shape, elements),
            TensorData::Bool(elements) => self.copied(shape, elements),
        }
    }

    /// The tensor itself if nobody else has it, else a copy in its place.
    pub fn make_mut<'t>(&mut self, tensor: &'t mut Arc<Tensor>) -> &'t mut Tensor {
        if Arc::get_mut(tensor).is_none() {
            *tensor = self.reshaped(&tensor.shape, &tensor.data);
        }
        Arc::make_mut(tensor)
    }

    /// Takes a tensor back; it is kept if nobody else has it.
    pub fn recycle(&mut self, mut tensor: Arc<Tensor>) {
        if Arc::get_mut(&mut tensor).is_some() {
            let bytes = tensor.data.bytes();
            if bytes > 0 && self.bytes + bytes <= MOST_BYTES {
                self.bytes += bytes;
                self.free.push(Free { tensor, used: self.run });
            }
        }
    }

    /// Bytes of the tensors that are kept.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Begins another run.
    pub fn begin_run(&mut self) {
        self.run += 1;
        let oldest = self.run.saturating_sub(MOST_IDLE);
        let freed = &mut self.bytes;
        self.free.retain(|free| {
            let keep = free.used >= oldest;
            *freed -= if keep { 0 } else { free.tensor.data.bytes() };
            keep
        });
    }

    /// A tensor with room for so many elements, whatever they are: the smallest that is neither too small nor much too large.
    fn take<T: Element>(&mut self, count: usize) -> Arc<Tensor> {
        let most = (count.saturating_mul(MOST_SLACK)).max(GRANULE);
        let mut best: Option<(usize, usize)> = None;
        for (i, free) in self.free.iter_mut().enumerate() {
            let Some(elements) = Arc::get_mut(&mut free.tensor).and_then(|tensor| T::of(&mut tensor.data)) else {
                continue;
            };
            let room = elements.capacity();
            if (count..=most).contains(&room) && best.is_none_or(|(_, best)| room < best) {
                best = Some((i, room));
            }
        }
        let Some((i, _)) = best else {
            let elements = Vec::with_capacity(count.next_multiple_of(GRANULE));
            return Arc::new(Tensor { shape: Vec::with_capacity(8), data: T::data(elements) });
        };
        let tensor = self.free.swap_remove(i).tensor;
        self.bytes -= tensor.data.bytes();
        tensor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(tensor: &Tensor) -> usize {
        tensor.floats().unwrap().as_ptr().addr()
    }

    #[test]
    fn a_tensor_that_nobody_needs_is_used_again_where_it_fits() {
        let mut pool = Pool::default();
        let first = pool.copied(&[2, 50], &[1.0; 100]);
        let (place, other) = (address(&first), first.clone());
        pool.recycle(first);
        let second = pool.filled(&[100], 2.0);
        assert_ne!(address(&second), place, "somebody still had the first");
        pool.recycle(other);
        assert_eq!(pool.make::<i32>(&[100], |out| out.extend(0..100)).integers().unwrap()[99], 99);
        assert_ne!(address(&pool.filled(&[10], 0.0)), place, "it is much too large");
        let third = pool.filled(&[4, 25], 3.0);
        assert_eq!((address(&third), &third.shape[..]), (place, &[4, 25][..]));
        assert_eq!(third.floats().unwrap(), [3.0; 100]);
    }

    #[test]
    fn what_is_shared_is_copied_before_it_changes() {
        let mut pool = Pool::default();
        let mut tensor = pool.copied(&[2], &[1, 2]);
        let place = tensor.integers().unwrap().as_ptr();
        pool.make_mut(&mut tensor).shape = vec![1, 2];
        assert_eq!(tensor.integers().unwrap().as_ptr(), place);
        let other = tensor.clone();
        pool.make_mut(&mut tensor).shape = vec![2, 1];
        assert_eq!((&other.shape[..], &tensor.shape[..]), (&[1, 2][..], &[2, 1][..]));
    }

    #[test]
    fn what_is_not_needed_for_long_is_freed() {
        let mut pool = Pool::default();
        let (prompt, token) = (pool.filled(&[1 << 20], 0.0), pool.filled(&[64], 0.0));
        pool.recycle(prompt);
        pool.recycle(token);
        for _ in 0..2 * MOST_IDLE {
            pool.begin_run();
            let token = pool.filled(&[64], 1.0);
            pool.recycle(token);
        }
        assert_eq!((pool.free.len(), pool.bytes), (1, 256));
        let huge = pool.filled(&[MOST_BYTES], true);
        pool.recycle(huge);
        assert_eq!(pool.bytes, 256, "more than is kept at all");
    }
}
