//! Transfer of a text's states from one context's functions to another's.
//!
//! A state is an array of equal parts, each of one layer. Of keys and values, the rows of positions that both contexts
//! have slots for are copied to the new slots; parts that don't depend on positions are copied whole. The result equals
//! the states of a text that began in the new context.

use std::collections::BTreeMap;
use std::sync::Arc;

use anec_bundle::{StatePart, StateRole};
use anec_exec::{Tensor, TensorData};
use anec_mil::DataType;

/// Parts of states, by content and layer.
#[derive(Default)]
pub(super) struct StateParts(BTreeMap<(StatePart, usize), Part>);

/// One part of a state's second axis.
struct Part {
    tensor: Arc<Tensor>,
    index: usize,
    count: usize,
}

impl StateParts {
    /// Adds the contents of a state.
    pub(super) fn add(&mut self, role: &StateRole, tensor: &Arc<Tensor>) {
        let parts = role.parts();
        let count = parts.len();
        for (index, part) in parts.into_iter().enumerate() {
            self.0.insert(part, Part { tensor: tensor.clone(), index, count });
        }
    }

    /// Returns whether no state was added, which means that all are zero.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns a state of `shape` after the first `position` tokens of the text.
    ///
    /// # Errors
    /// If the shapes differ, with the difference.
    pub(super) fn state(&self, role: &StateRole, shape: Vec<usize>, position: usize) -> Result<Tensor, String> {
        let parts = role.parts();
        let mut state = Tensor::zeros(DataType::Fp16, shape);
        let (&[_, _, slots, width], TensorData::F32(values)) = (&state.shape[..], &mut state.data) else {
            return Err(format!("a state has shape {:?}, expected four dimensions", state.shape));
        };
        let length = values.len() / parts.len().max(1);
        for ((part, layer), values) in parts.iter().zip(values.chunks_exact_mut(length.max(1))) {
            // states that no call has used are zero
            let found = self.0.get(&(*part, *layer)).and_then(|own| Some((own, own.values()?)));
            let Some((own, from)) = found else { continue };
            let (own_slots, own_width) = (own.tensor.shape[2], own.tensor.shape[3]);
            let plane = |length: usize, slots: usize, width: usize| length.checked_div(slots * width);
            let by_position = matches!(part, StatePart::Keys | StatePart::Values);
            let fits = own_width == width
                && plane(from.len(), own_slots, width) == plane(values.len(), slots, width)
                && (by_position || own_slots == slots);
            if !fits {
                let shape = &own.tensor.shape;
                return Err(format!("the {part:?} of layer {layer} are in a state of shape {shape:?} before"));
            }
            if by_position {
                copy_rows((from, own_slots), (values, slots), width, position);
            } else {
                values.copy_from_slice(from);
            }
        }
        Ok(state)
    }
}

impl Part {
    fn values(&self) -> Option<&[f32]> {
        let values = self.tensor.floats()?;
        (self.tensor.shape.len() == 4).then_some(())?;
        let length = values.len() / self.count;
        values.get(self.index * length..(self.index + 1) * length)
    }
}

/// Copies the rows of the last positions before `position` that both have slots for, head by head.
fn copy_rows((from, from_slots): (&[f32], usize), (to, to_slots): (&mut [f32], usize), width: usize, position: usize) {
    let first = position.saturating_sub(from_slots.min(to_slots));
    let heads = from.chunks_exact((from_slots * width).max(1)).zip(to.chunks_exact_mut((to_slots * width).max(1)));
    for (from, to) in heads {
        for p in first..position {
            let row = &from[p % from_slots * width..][..width];
            to[p % to_slots * width..][..width].copy_from_slice(row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a cache `[1, heads, slots, 2]` whose rows before `end` hold their own position.
    fn cache(heads: usize, slots: usize, end: usize) -> Tensor {
        let mut tensor = Tensor::zeros(DataType::Fp16, vec![1, heads, slots, 2]);
        let TensorData::F32(values) = &mut tensor.data else { panic!("floats") };
        for head in 0..heads {
            for p in end.saturating_sub(slots)..end {
                let at = (head * slots + p % slots) * 2;
                values[at..at + 2].copy_from_slice(&[(100 * head + p + 1) as f32, -1.0]);
            }
        }
        tensor
    }

    #[test]
    fn a_cache_after_a_move_is_that_of_a_text_that_began_there() {
        let role = StateRole::KeyCache { layer: 3 };
        // slots before and after, and tokens: growing caches, and a window's ring that has wrapped
        for (from, to, position) in [(4, 8, 3), (4, 8, 4), (4, 4, 9), (4, 16, 0), (6, 6, 6)] {
            let mut parts = StateParts::default();
            parts.add(&role, &Arc::new(cache(2, from, position)));
            let moved = parts.state(&role, vec![1, 2, to, 2], position).unwrap();
            assert_eq!(moved, cache(2, to, position), "{from} to {to} at {position}");
        }
    }

    /// In a short context, windowed layers have as many slots as all others, and one state holds them all.
    #[test]
    fn states_are_put_together_anew() {
        let mut parts = StateParts::default();
        let whole: Vec<f32> = [1, 2, 3, 4].map(|part| cache(part, 4, 3).floats().unwrap()[..8].to_vec()).concat();
        let whole: Vec<f32> = whole.iter().enumerate().map(|(i, value)| value + (i / 8) as f32).collect();
        let together = StateRole::KeyValueCache { layers: vec![0, 1] };
        parts.add(&together, &Arc::new(Tensor::new(vec![1, 4, 4, 2], whole.clone())));
        parts.add(
            &StateRole::DelayState { layers: vec![0, 1] },
            &Arc::new(Tensor::new(vec![1, 2, 1, 2], vec![1.0, 2.0, 3.0, 4.0])),
        );
        let second = parts.state(&StateRole::KeyValueCache { layers: vec![1] }, vec![1, 2, 4, 2], 3).unwrap();
        // keys and values of the second layer; the row of the position to come stays zero
        let expected: Vec<f32> =
            whole[16..].iter().enumerate().map(|(i, v)| if i % 8 < 6 { *v } else { 0.0 }).collect();
        assert_eq!(second.floats().unwrap(), expected);
        let delay = parts.state(&StateRole::DelayState { layers: vec![1] }, vec![1, 1, 1, 2], 3).unwrap();
        assert_eq!(delay.floats().unwrap(), [3.0, 4.0]);
    }

    #[test]
    fn states_that_dont_fit_are_refused() {
        let mut parts = StateParts::default();
        assert!(parts.is_empty());
        parts.add(&StateRole::KeyCache { layer: 0 }, &Arc::new(cache(2, 4, 2)));
        let unused = parts.state(&StateRole::ValueCache { layer: 0 }, vec![1, 2, 8, 2], 2).unwrap();
        assert_eq!(unused, Tensor::zeros(DataType::Fp16, vec![1, 2, 8, 2]), "no call has used it");
        let other = parts.state(&StateRole::KeyCache { layer: 0 }, vec![1, 4, 8, 2], 2).unwrap_err();
        assert_eq!(other, "the Keys of layer 0 are in a state of shape [1, 2, 4, 2] before");
    }
}
