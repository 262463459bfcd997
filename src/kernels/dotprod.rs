//! Products of rows of bytes with columns on processors that multiply bytes with sums in 32 bits: on 64-bit Arm four
//! neighbours at a time (`SDOT`, feature `dotprod`, Armv8.2), or eight for two rows and two digits at a time (`SMMLA`,
//! feature `i8mm`, Armv8.6: Apple's processors from A15 and M2 on); on x86-64 four neighbours (`VPDPBUSD`, AVX-512
//! VNNI), also for rows whose elements are looked up as bytes, or two neighbours widened to words (AVX2, AVX-VNNI). A
//! column becomes integers of [digits](super::digits). Sums are exact until their digits are joined, so a product has
//! the same bits beside any other columns; those that sum bytes have the same bits with any instruction.

#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(target_arch = "x86_64")]
mod x86;

use smallvec::SmallVec;

use super::aligned_buf::AlignedBuf;
use super::columns::StridedColumn;
use super::digits::{Activations, DIGITS, MAX_DEPTH, Unit, joined, third_squared};
use super::dispatch::{Vectorize, vectorized};
use super::layout::MatrixLayout;
use super::pool;

#[cfg(target_arch = "aarch64")]
use arm as processor;
#[cfg(target_arch = "x86_64")]
use x86 as processor;

use processor::ColumnLanes;
pub(super) use processor::Instruction;
#[cfg(target_arch = "x86_64")]
pub(super) use processor::{StoredProducts, StoredRows};

/// Minimum elements of columns for which threads are used to measure or pack them.
pub(super) const MIN_PARALLEL_ELEMENTS: usize = 1 << 12;

/// Columns as digits.
pub(super) struct DigitColumns {
    digits: AlignedBuf,
    columns: SmallVec<[DigitColumn; 8]>,
    depth: usize,
    instruction: Instruction,
}

/// Properties of a column.
#[derive(Clone, Copy)]
struct DigitColumn {
    /// Unit of its integers.
    unit: Unit,
    /// Initial sum of each digit.
    start: [i32; DIGITS],
    /// Offset of its digits.
    place: usize,
}

impl DigitColumn {
    /// Product from the sums by digit.
    #[inline(always)]
    fn product(self, sums: [i32; DIGITS]) -> f32 {
        joined(std::array::from_fn(|digit| self.start[digit].wrapping_add(sums[digit]))) * self.unit.size
    }
}

impl<'a> StridedColumn<'a> {
    /// Measures `count` elements. Returns `None` if they can't be written in digits: all must be finite, and sums of
    /// products must fit into 32 bits.
    pub fn measured(self, count: usize, activations: Activations) -> Option<MeasuredColumn<'a>> {
        let fits = (self.step > 0 || count == 1) && (1..=MAX_DEPTH).contains(&count);
        let unit = fits.then(|| vectorized(Measure { column: self, count, activations })).flatten()?;
        Some(MeasuredColumn { column: self, count, unit })
    }
}

/// Search for the unit of a column.
struct Measure<'a> {
    column: StridedColumn<'a>,
    count: usize,
    activations: Activations,
}

impl Vectorize for Measure<'_> {
    type Output = Option<Unit>;

    #[inline(always)]
    fn run(self) -> Option<Unit> {
        #[inline(always)]
        fn unit<'a>(
            elements: impl Iterator<Item = &'a f32> + Clone,
            count: usize,
            activations: Activations,
        ) -> Option<Unit> {
            let largest = elements.clone().fold(0, |largest, element| element.abs().to_bits().max(largest));
            let few = Unit::of_few(largest)?;
            // SAFETY: the unit is that of these elements.
            let square = |element: &f32| unsafe { third_squared(*element, few.inverse) };
            Unit::of(activations, largest, elements.map(square).fold(0, u32::wrapping_add), count)
        }
        let Measure { column, count, activations } = self;
        match column {
            // contiguous elements are read in vectors
            StridedColumn { values, step: 1 } => unit(values[..count].iter(), count, activations),
            column => unit(column.elements(count), count, activations),
        }
    }
}

/// Column with its unit. Only [`StridedColumn::measured`] constructs it.
#[derive(Clone, Copy)]
pub(super) struct MeasuredColumn<'a> {
    column: StridedColumn<'a>,
    count: usize,
    unit: Unit,
}

impl DigitColumns {
    /// Packs columns of `depth` elements each.
    ///
    /// # Panics
    /// If a column has another length.
    pub fn new(instruction: Instruction, depth: usize, columns: &[MeasuredColumn<'_>]) -> DigitColumns {
        assert!(columns.iter().all(|column| column.count == depth));
        let bytes = |column: &MeasuredColumn<'_>| {
            depth.next_multiple_of(processor::STEP) * processor::stored(instruction, column.unit)
        };
        let mut digits = AlignedBuf::new(columns.iter().map(bytes).sum::<usize>().div_ceil(size_of::<f32>()));
        let (mut left, mut place): (&mut [i8], _) = (bytemuck::cast_slice_mut(digits.words()), 0);
        let mut parts = SmallVec::<[(&mut [i8], DigitColumn); 8]>::new();
        for column in columns {
            let (own, others) = std::mem::take(&mut left).split_at_mut(bytes(column));
            parts.push((own, DigitColumn { unit: column.unit, start: [0; DIGITS], place }));
            (left, place) = (others, place + bytes(column));
        }
        let pack = |c: usize, (digits, known): &mut (&mut [i8], DigitColumn)| {
            // SAFETY: the processor has the instruction; a column was measured with its unit.
            known.start = unsafe { processor::pack(instruction, columns[c], digits) };
        };
        if columns.len() * depth > MIN_PARALLEL_ELEMENTS {
            pool::for_each_mut(&mut parts, pack);
        } else {
            parts.iter_mut().enumerate().for_each(|(c, part)| pack(c, part));
        }
        let columns = parts.iter().map(|(_, known)| *known).collect();
        drop(parts);
        DigitColumns { digits, columns, depth, instruction }
    }

    /// Address of a column's digits.
    fn of(&self, column: usize) -> *const i8 {
        self.digits.pointer().cast::<i8>().wrapping_add(self.columns[column].place)
    }

    /// Digits of a column.
    #[cfg(target_arch = "x86_64")]
    fn digits_of(&self, column: usize) -> &[i8] {
        let DigitColumn { place, unit, .. } = self.columns[column];
        let count = self.depth.next_multiple_of(processor::STEP) * processor::stored(self.instruction, unit);
        &bytemuck::cast_slice(self.digits.as_floats())[place..][..count]
    }
}

/// Products of consecutive rows with some columns.
#[derive(Clone, Copy)]
pub(super) struct ProductBlock<'a> {
    /// First row.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Columns.
    pub columns: &'a [usize],
    /// Products.
    pub products: &'a [f32],
    /// Layout of the products.
    pub layout: MatrixLayout,
}

impl<'a> ProductBlock<'a> {
    /// Block of one column.
    fn of_column(row: usize, column: &'a usize, products: &'a [f32]) -> Self {
        let columns = std::slice::from_ref(column);
        let layout = MatrixLayout { row: 1, column: products.len() };
        ProductBlock { row, rows: products.len(), columns, products, layout }
    }

    /// The block with `first` added to its rows.
    pub fn offset_by(self, first: usize) -> Self {
        ProductBlock { row: first + self.row, ..self }
    }
}

/// Products of rows of bytes with columns.
pub(super) struct ByteProducts<'a> {
    columns: &'a DigitColumns,
    lanes: ColumnLanes,
}

impl<'a> ByteProducts<'a> {
    /// Products with all columns. If products of a row with several columns are computed together, they are contiguous
    /// by row if `by_row`, else by column.
    pub fn new(columns: &'a DigitColumns, by_row: bool) -> Self {
        ByteProducts { columns, lanes: ColumnLanes::new(columns, by_row) }
    }

    /// Returns whether [`multiply`](Self::multiply) needs the sums of rows' elements.
    pub fn takes_sums(&self) -> bool {
        !self.lanes.is_empty()
    }

    /// Passes the products of rows to `put`, in pieces. `sums` holds the sum of each row's elements, if needed.
    ///
    /// # Panics
    /// If the rows aren't whole, or needed sums are missing.
    pub fn multiply(&self, rows: &[i8], sums: &[i32], put: impl FnMut(ProductBlock<'_>)) {
        let depth = self.columns.depth;
        assert!(rows.len().is_multiple_of(depth) && (!self.takes_sums() || sums.len() >= rows.len() / depth));
        // SAFETY: the processor has the instruction; each column has digits for all elements of a row, and the lanes
        // are those of the columns.
        unsafe { processor::multiply((self.columns, &self.lanes), rows, sums, put) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::digits::tests::max_error;
    use super::super::dot::tests::noise;
    use super::*;

    /// Products `[rows, columns]`.
    fn products(
        instruction: Instruction,
        a: &[i8],
        depth: usize,
        columns: &[StridedColumn<'_>],
        activations: Activations,
        by_row: bool,
    ) -> Vec<f32> {
        let columns = columns.iter().map(|column| column.measured(depth, activations).expect("all are finite"));
        let columns: Vec<_> = columns.collect();
        let digits = DigitColumns::new(instruction, depth, &columns);
        let mut out = vec![f32::NAN; a.len() / depth * columns.len()];
        let sums: Vec<i32> = a.chunks(depth).map(|row| row.iter().map(|value| i32::from(*value)).sum()).collect();
        ByteProducts::new(&digits, by_row).multiply(a, &sums, |block| {
            for (c, column) in block.columns.iter().enumerate() {
                for row in 0..block.rows {
                    let product = block.products[row * block.layout.row + c * block.layout.column];
                    out[(block.row + row) * columns.len() + column] = product;
                }
            }
        });
        out
    }

    #[test]
    fn the_instructions_of_this_processor_are_found() {
        let found: Vec<_> = Instruction::available().collect();
        if found.len() < Instruction::COUNT {
            anec_base::skipped(&format!("of the instructions that multiply bytes, this processor has {found:?}"));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn products_of_every_size_are_exact_but_for_their_columns_rounding(
            rows in 1usize..60, depth in 1usize..300, count in 1usize..40, step in 1usize..4, seed: u32, form in 0usize..3
        ) {
            let activations = [Activations::F32, Activations::I16, Activations::I8][form];
            let a: Vec<i8> = noise(rows * depth, seed).iter().map(|v| (v * 128.0) as i8).collect();
            let mut x = noise(depth * step * count, !seed);
            // in some columns, some elements are larger
            x.iter_mut().step_by(17 * step).skip(seed as usize % 7).for_each(|v| *v *= 300.0);
            let columns: Vec<StridedColumn<'_>> = x.chunks(depth * step).map(|values| StridedColumn { values, step }).collect();
            let mut first = None;
            for instruction in Instruction::available() {
                let found = products(instruction, &a, depth, &columns, activations, seed % 2 == 0);
                for (i, found) in found.iter().enumerate() {
                    let (row, column) = (&a[i / count * depth..][..depth], columns[i % count]);
                    let elements = || column.values.iter().step_by(step);
                    let terms = row.iter().zip(elements()).map(|(a, x)| f64::from(*a) * f64::from(*x));
                    let exact: f64 = terms.sum();
                    let off = max_error(activations, &elements().map(|x| f64::from(*x)).collect::<Vec<_>>());
                    // error of each element, and the rounding of the sum
                    let limit = off * depth as f64 * 128.0 + exact.abs() * 1e-6 + 1e-6;
                    prop_assert!((f64::from(*found) - exact).abs() <= limit, "{found} {exact} {instruction:?}");
                }
                if instruction.sums_digits() {
                    prop_assert_eq!(first.get_or_insert_with(|| found.clone()), &found);
                }
                // alone, and from another row on, the bits are the same
                for c in 0..count {
                    let alone = products(instruction, &a[rows / 2 * depth..], depth, &columns[c..][..1], activations, false);
                    let part: Vec<f32> = found.iter().skip(rows / 2 * count + c).step_by(count).copied().collect();
                    prop_assert_eq!(alone, part);
                }
            }
        }
    }

    #[test]
    fn extremes_do_not_overflow() {
        for instruction in Instruction::available() {
            let a = vec![-128i8; MAX_DEPTH];
            let x = vec![-1.0f32; MAX_DEPTH];
            for activations in [Activations::F32, Activations::I16, Activations::I8] {
                let column = StridedColumn { values: &x, step: 1 };
                let found = products(instruction, &a, MAX_DEPTH, &[column], activations, true);
                assert_eq!(found, [128.0 * MAX_DEPTH as f32]);
            }
        }
    }

    #[test]
    fn columns_without_digits_are_rejected() {
        for value in [1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let is_measured = |step: usize, count: usize| {
                let column = StridedColumn { values: &[0.5, value, 0.0], step };
                let forms = [Activations::F32, Activations::I16, Activations::I8];
                let forms = forms.map(|form| column.measured(count, form).is_some());
                assert!(forms.iter().all(|is_measured| *is_measured == forms[0]));
                forms[0]
            };
            assert_eq!(is_measured(1, 3), value == 1.0);
            assert!(is_measured(2, 2));
        }
        let long = vec![1.0; MAX_DEPTH + 1];
        assert!(StridedColumn { values: &long, step: 1 }.measured(long.len(), Activations::F32).is_none());
        assert!(StridedColumn { values: &[], step: 1 }.measured(0, Activations::F32).is_none());
    }
}
