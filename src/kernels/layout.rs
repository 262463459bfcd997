//! Layouts of matrices in slices.

/// Layout of a matrix within a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixLayout {
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub column: usize,
}

impl MatrixLayout {
    /// Offset behind the last element of a matrix of this size.
    pub fn extent(self, rows: usize, columns: usize) -> usize {
        if rows == 0 || columns == 0 {
            return 0;
        }
        let along = |count: usize, step: usize| (count - 1).saturating_mul(step);
        along(rows, self.row).saturating_add(along(columns, self.column)).saturating_add(1)
    }

    /// Returns whether no two elements of a matrix of this size overlap.
    pub fn is_injective(self, rows: usize, columns: usize) -> bool {
        rows <= 1
            || columns <= 1
            || (self.column > 0 && self.row >= columns.saturating_mul(self.column))
            || (self.row > 0 && self.column >= rows.saturating_mul(self.row))
    }
}

/// Result that several threads write, each to rows of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct SharedOutput {
    start: *mut f32,
    layout: MatrixLayout,
}

// SAFETY: only `at` gives the pointer out, and its callers promise to write to elements of their own.
unsafe impl Send for SharedOutput {}
// SAFETY: as for `Send`.
unsafe impl Sync for SharedOutput {}

impl SharedOutput {
    /// Result of this layout within a slice, which must outlive all uses.
    pub fn new(values: &mut [f32], layout: MatrixLayout) -> Self {
        SharedOutput { start: values.as_mut_ptr(), layout }
    }

    pub fn layout(self) -> MatrixLayout {
        self.layout
    }

    /// Address of an element, and the layout.
    ///
    /// # Safety
    /// The slice is alive and holds this element; nothing else accesses the memory written through the pointer.
    pub unsafe fn at(self, row: usize, column: usize) -> (*mut f32, MatrixLayout) {
        // SAFETY: the element lies within the slice, as promised.
        (unsafe { self.start.add(row * self.layout.row + column * self.layout.column) }, self.layout)
    }
}
