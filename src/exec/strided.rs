//! Reading and writing part of a tensor, or its axes in another order: each axis has a step through the elements.

/// Which elements of a tensor, in which order.
#[derive(Clone, Debug)]
pub(crate) struct View {
    /// The first element.
    pub offset: isize,
    /// How many steps along each axis.
    pub shape: Vec<usize>,
    /// How far each step goes; negative ones go back, 0 repeats.
    pub strides: Vec<isize>,
}

impl View {
    /// A tensor as it is.
    pub fn whole(shape: &[usize]) -> View {
        let strides = super::tensor::strides(shape).into_iter().map(|s| s as isize).collect();
        View { offset: 0, shape: shape.to_vec(), strides }
    }

    /// `len` elements of an axis from `begin`, each `step` further.
    pub fn slice(&mut self, axis: usize, begin: usize, len: usize, step: isize) {
        self.offset += begin as isize * self.strides[axis];
        self.shape[axis] = len;
        self.strides[axis] *= step;
    }

    /// The axes in another order.
    pub fn permute(self, order: &[usize]) -> View {
        View {
            offset: self.offset,
            shape: order.iter().map(|axis| self.shape[*axis]).collect(),
            strides: order.iter().map(|axis| self.strides[*axis]).collect(),
        }
    }

    /// Calls `visit` with the first element, the number and the step of each innermost run, in row-major order.
    fn for_each_run(&self, mut visit: impl FnMut(isize, usize, isize)) {
        if self.shape.contains(&0) {
            return;
        }
        let mut axes: Vec<(usize, isize)> = Vec::with_capacity(self.shape.len());
        for (size, stride) in self.shape.iter().copied().zip(self.strides.iter().copied()) {
            match axes.last_mut() {
                _ if size == 1 => {}
                Some((outer, step)) if *step == stride * size as isize => (*outer, *step) = (*outer * size, stride),
                _ => axes.push((size, stride)),
            }
        }
        let (length, step) = axes.pop().unwrap_or((1, 1));
        let mut index = vec![0usize; axes.len()];
        let mut offset = self.offset;
        loop {
            visit(offset, length, step);
            let mut axis = axes.len();
            loop {
                if axis == 0 {
                    return;
                }
                axis -= 1;
                let (size, stride) = axes[axis];
                index[axis] += 1;
                offset += stride;
                if index[axis] < size {
                    break;
                }
                offset -= stride * size as isize;
                index[axis] = 0;
            }
        }
    }

    /// The elements, in row-major order.
    pub fn read<T: Copy>(&self, from: &[T]) -> Vec<T> {
        let mut out = Vec::with_capacity(self.shape.iter().product());
        self.for_each_run(|offset, length, step| {
            if step == 1 {
                out.extend_from_slice(&from[offset as usize..][..length]);
            } else {
                out.extend((0..length as isize).map(|i| from[(offset + i * step) as usize]));
            }
        });
        out
    }

    /// Puts elements, given in row-major order, where this view says.
    pub fn write<T: Copy>(&self, to: &mut [T], elements: &[T]) {
        let mut rest = elements;
        self.for_each_run(|offset, length, step| {
            let Some((run, others)) = rest.split_at_checked(length) else { return };
            rest = others;
            if step == 1 {
                to[offset as usize..][..length].copy_from_slice(run);
            } else {
                for (i, element) in run.iter().enumerate() {
                    to[(offset + i as isize * step) as usize] = *element;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_and_permutations_read_and_write_the_same_places() {
        let data: Vec<i32> = (0..12).collect();
        let mut view = View::whole(&[3, 4]);
        view.slice(1, 3, 2, -2);
        assert_eq!(view.read(&data), [3, 1, 7, 5, 11, 9]);
        let turned = View::whole(&[3, 4]).permute(&[1, 0]);
        assert_eq!(turned.read(&data), [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]);
        let mut back = vec![0; 12];
        turned.write(&mut back, &turned.read(&data));
        assert_eq!(back, data);
        assert_eq!(View::whole(&[]).read(&[7]), [7]);
        assert!(View::whole(&[2, 0]).read(&data).is_empty());
    }
}
