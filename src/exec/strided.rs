//! Strided views: reading and writing parts of a tensor, or its axes in another order.

use smallvec::SmallVec;

use super::tensor::Dims;
use anec_kernels::pool::{self, LARGE};

/// Elements of a tensor in some order.
#[derive(Clone, Debug)]
pub(crate) struct View {
    /// Index of the first element.
    pub offset: isize,
    /// Number of elements along each axis.
    pub shape: Dims,
    /// Step along each axis: negative goes back, 0 repeats.
    pub strides: SmallVec<[isize; 8]>,
}

impl View {
    /// All elements of a tensor of this shape.
    pub fn whole(shape: &[usize]) -> View {
        let strides = super::tensor::strides(shape).into_iter().map(|s| s as isize).collect();
        View { offset: 0, shape: shape.into(), strides }
    }

    /// Single element, to which axes can be added.
    pub fn scalar() -> View {
        View { offset: 0, shape: Dims::new(), strides: SmallVec::new() }
    }

    /// Restricts an axis to `len` elements from `begin`, `step` apart.
    pub fn slice(&mut self, axis: usize, begin: usize, len: usize, step: isize) {
        self.offset += begin as isize * self.strides[axis];
        self.shape[axis] = len;
        self.strides[axis] *= step;
    }

    /// Permutes the axes.
    pub fn permute(self, order: &[usize]) -> View {
        View {
            offset: self.offset,
            shape: order.iter().map(|axis| self.shape[*axis]).collect(),
            strides: order.iter().map(|axis| self.strides[*axis]).collect(),
        }
    }

    /// Sizes and steps of the axes, with adjacent axes merged where possible.
    fn merged(&self) -> SmallVec<[(usize, isize); 8]> {
        let mut axes = SmallVec::<[(usize, isize); 8]>::new();
        for (size, stride) in self.shape.iter().copied().zip(self.strides.iter().copied()) {
            match axes.last_mut() {
                _ if size == 1 => {}
                Some((outer, step)) if *step == stride * size as isize => (*outer, *step) = (*outer * size, stride),
                _ => axes.push((size, stride)),
            }
        }
        axes
    }

    /// Calls `visit` with the first element, length and step of each innermost run, in row-major order.
    fn for_each_run(&self, mut visit: impl FnMut(isize, usize, isize)) {
        if self.shape.contains(&0) {
            return;
        }
        let mut axes = self.merged();
        let (length, step) = axes.pop().unwrap_or((1, 1));
        self.for_each_place(&axes, |offset| visit(offset, length, step));
    }

    /// Calls `visit` with the index of each element of some axes, in row-major order.
    fn for_each_place(&self, axes: &[(usize, isize)], mut visit: impl FnMut(isize)) {
        let mut index = Dims::from_elem(0, axes.len());
        let mut offset = self.offset;
        loop {
            visit(offset);
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

    /// Elements of the view, in row-major order.
    pub fn read<T: Copy + Send + Sync>(&self, from: &[T]) -> Vec<T> {
        let mut out = Vec::with_capacity(self.shape.iter().product());
        self.read_into(from, &mut out);
        out
    }

    /// Appends the elements of the view, in row-major order, to an empty vector.
    pub fn read_into<T: Copy + Send + Sync>(&self, from: &[T], out: &mut Vec<T>) {
        let count = self.shape.iter().product();
        if let [outer @ .., (rows, 1), (columns, step @ 1..)] = &self.merged()[..]
            && let Some(first) = from.first()
            && !self.shape.contains(&0)
        {
            // transposed matrices
            let (size, step) = ((*rows, *columns), *step as usize);
            let mut places = SmallVec::<[usize; 64]>::new();
            self.for_each_place(outer, |offset| places.push(offset as usize));
            out.resize(count, *first);
            let part = |i: usize, out: &mut [T]| transpose(&from[places[i]..], step, size, out);
            if count > LARGE {
                pool::for_each_chunk(out, rows * columns, part);
            } else {
                out.chunks_exact_mut(rows * columns).enumerate().for_each(|(i, out)| part(i, out));
            }
            return;
        }
        self.for_each_run(|offset, length, step| {
            if step == 1 {
                out.extend_from_slice(&from[offset as usize..][..length]);
            } else {
                out.extend((0..length as isize).map(|i| from[(offset + i * step) as usize]));
            }
        });
    }

    /// Writes elements in row-major order to the view.
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

/// Transposes: writes `[rows, columns]` of a matrix that is stored by columns, `step` apart, block by block, so that
/// each cache line is used completely while it is cached.
fn transpose<T: Copy>(from: &[T], step: usize, (rows, columns): (usize, usize), out: &mut [T]) {
    const BLOCK: usize = 16;
    for column in (0..columns).step_by(BLOCK) {
        let width = BLOCK.min(columns - column);
        for row in (0..rows).step_by(BLOCK) {
            let height = BLOCK.min(rows - row);
            let mut block: [&[T]; BLOCK] = [&[]; BLOCK];
            for (c, block) in block.iter_mut().enumerate().take(width) {
                *block = &from[(column + c) * step + row..][..height];
            }
            for r in 0..height {
                let out = &mut out[(row + r) * columns + column..][..width];
                out.iter_mut().zip(&block).for_each(|(out, column)| *out = column[r]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transposed_matrix_of_any_size_is_read_completely() {
        for (batch, rows, columns) in [(1, 1, 40), (2, 17, 33), (3, 16, 5), (1, 50, 64), (5, 90, 110)] {
            let data: Vec<usize> = (0..batch * rows * columns).collect();
            let turned = View::whole(&[batch, rows, columns]).permute(&[0, 2, 1]).read(&data);
            for (i, found) in turned.iter().enumerate() {
                let (b, c, r) = (i / (rows * columns), i / rows % columns, i % rows);
                assert_eq!(*found, (b * rows + r) * columns + c);
            }
        }
    }

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
