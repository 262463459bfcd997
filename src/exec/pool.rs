//! Reuse of tensors that are no longer needed.
//!
//! Every call of a function makes tensors of the same sizes, so all calls after the first find memory here.

use std::sync::Arc;

use super::tensor::{Tensor, TensorData};

/// Free tensors for reuse.
#[derive(Default)]
pub(crate) struct Pool {
    free: Vec<Free>,
    /// Number of runs so far.
    run: u64,
    /// Bytes of all elements of `free`.
    bytes: usize,
}

/// Free tensor that nothing else refers to.
struct Free {
    tensor: Arc<Tensor>,
    /// Run that last used it.
    used: u64,
}

/// Runs after which an unused tensor is freed. A model is a few functions in turn, and memory of a long prompt isn't
/// kept while single tokens follow.
const MAX_IDLE: u64 = 64;
/// Maximum bytes of free tensors.
const MAX_BYTES: usize = 64 << 20;
/// Capacities of new tensors are multiples of this number of elements.
const GRANULE: usize = 64;
/// Maximum ratio of a reused tensor's capacity to the requested size.
const MAX_SLACK: usize = 4;

/// Element type of a tensor.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// Value of elements that were not written.
    const UNWRITTEN: Self;
    /// Elements of a tensor, if they are of this type.
    fn of(data: &mut TensorData) -> Option<&mut Vec<Self>>;
    /// Tensor data of these elements.
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
    /// Tensor of this shape; `fill` appends its elements to an empty vector with enough capacity.
    pub fn make<T: Element>(&mut self, shape: &[usize], fill: impl FnOnce(&mut Vec<T>)) -> Arc<Tensor> {
        self.reuse(shape.iter().product(), shape, |elements| {
            elements.clear();
            fill(elements);
        })
    }

    /// Tensor of this shape with unspecified elements, all of which must be written.
    pub fn unspecified<T: Element>(&mut self, shape: &[usize]) -> Arc<Tensor> {
        self.unspecified_within::<T>(shape.iter().product(), shape)
    }

    /// As [`unspecified`](Pool::unspecified), with capacity for at least `room` elements.
    fn unspecified_within<T: Element>(&mut self, room: usize, shape: &[usize]) -> Arc<Tensor> {
        let count = shape.iter().product();
        self.reuse::<T>(room, shape, |elements| {
            // lets tests find elements that were not written
            if cfg!(any(test, debug_assertions)) {
                elements.clear();
            }
            elements.resize(count, T::UNWRITTEN);
        })
    }

    /// Tensor of this shape whose elements are all set by `write`.
    pub fn written<T: Element>(&mut self, shape: &[usize], write: impl FnOnce(&mut [T])) -> Arc<Tensor> {
        self.written_within(shape.iter().product(), shape, write)
    }

    /// As [`written`](Pool::written), with capacity for at least `room` elements, so that it can be reused for a larger
    /// tensor.
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

    /// Tensor of this shape with capacity for at least `room` elements; `fill` replaces the elements of the reused
    /// memory.
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

    /// Tensor of equal elements.
    pub fn filled<T: Element>(&mut self, shape: &[usize], value: T) -> Arc<Tensor> {
        self.make(shape, |out| out.resize(shape.iter().product(), value))
    }

    /// Tensor of this shape with these elements.
    pub fn copied<T: Element>(&mut self, shape: &[usize], elements: &[T]) -> Arc<Tensor> {
        self.make(shape, |out| out.extend_from_slice(elements))
    }

    /// Tensor of another shape with the elements of `data`.
    pub fn reshaped(&mut self, shape: &[usize], data: &TensorData) -> Arc<Tensor> {
        match data {
            TensorData::F32(elements) => self.copied(shape, elements),
            TensorData::I32(elements) => self.copied(shape, elements),
            TensorData::Bool(elements) => self.copied(shape, elements),
        }
    }

    /// Mutable access to a tensor; a shared one is replaced by a copy.
    pub fn make_mut<'t>(&mut self, tensor: &'t mut Arc<Tensor>) -> &'t mut Tensor {
        if Arc::get_mut(tensor).is_none() {
            *tensor = self.reshaped(&tensor.shape, &tensor.data);
        }
        Arc::make_mut(tensor)
    }

    /// Takes a tensor back; kept only if nothing else refers to it.
    pub fn recycle(&mut self, mut tensor: Arc<Tensor>) {
        if Arc::get_mut(&mut tensor).is_some() {
            let bytes = tensor.data.bytes();
            if bytes > 0 && self.bytes + bytes <= MAX_BYTES {
                self.bytes += bytes;
                self.free.push(Free { tensor, used: self.run });
            }
        }
    }

    /// Bytes of the free tensors.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Begins the next run.
    pub fn begin_run(&mut self) {
        self.run += 1;
        let oldest = self.run.saturating_sub(MAX_IDLE);
        let freed = &mut self.bytes;
        self.free.retain(|free| {
            let keep = free.used >= oldest;
            *freed -= if keep { 0 } else { free.tensor.data.bytes() };
            keep
        });
    }

    /// Free tensor with capacity for `count` elements: the smallest that is large enough and not much too large.
    fn take<T: Element>(&mut self, count: usize) -> Arc<Tensor> {
        let most = (count.saturating_mul(MAX_SLACK)).max(GRANULE);
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
    fn an_unused_tensor_is_reused_if_it_fits() {
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
    fn a_shared_tensor_is_copied_before_it_changes() {
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
    fn tensors_unused_for_many_runs_are_freed() {
        let mut pool = Pool::default();
        let (prompt, token) = (pool.filled(&[1 << 20], 0.0), pool.filled(&[64], 0.0));
        pool.recycle(prompt);
        pool.recycle(token);
        for _ in 0..2 * MAX_IDLE {
            pool.begin_run();
            let token = pool.filled(&[64], 1.0);
            pool.recycle(token);
        }
        assert_eq!((pool.free.len(), pool.bytes), (1, 256));
        let huge = pool.filled(&[MAX_BYTES], true);
        pool.recycle(huge);
        assert_eq!(pool.bytes, 256, "more than is kept at all");
    }
}
