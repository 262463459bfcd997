//! Products of rows of bytes with columns on processors that multiply bytes with sums in 32 bits: on 64-bit Arm four
//! neighbours at a time (`SDOT`, feature `dotprod`, Armv8.2), or eight for two rows and two digits at a time (`SMMLA`,
//! feature `i8mm`, Armv8.6: Apple's processors from A15 and M2 on); on x86-64 four neighbours (`VPDPBUSD`, AVX-512
//! VNNI), also for rows whose elements are looked up as bytes, or two neighbours widened to words (AVX2, AVX-VNNI). A
//! column becomes integers of [digits](super::digits). Sums are exact until their digits are joined, so a product has
//! the same bits beside any other columns; those that sum bytes have the same bits with any instruction.

#[cfg(target_arch = "aarch64")]
mod arm;
mod measure;
#[cfg(target_arch = "x86_64")]
mod x86;

use smallvec::SmallVec;

use super::aligned_buf::AlignedBuf;
use super::digits::{DIGITS, Unit, joined};
use super::layout::MatrixLayout;
use super::pool;

#[cfg(target_arch = "aarch64")]
use arm as processor;
#[cfg(target_arch = "x86_64")]
use x86 as processor;

pub(super) use measure::{MeasuredColumn, STRIP, measure_beside};
use processor::ColumnLanes;
pub(super) use processor::Instruction;
#[cfg(target_arch = "x86_64")]
pub(super) use processor::{StoredProducts, StoredRows};

/// Minimum elements of columns for which threads are used to measure or pack them.
pub(super) const MIN_PARALLEL_ELEMENTS: usize = 1 << 12;
/// Rows of a matrix between the one that is read and the one that is prefetched.
const ROWS_AHEAD: usize = 16;

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

impl DigitColumns {
    /// Packs the digits of some columns of `depth` elements each. The others have none.
    ///
    /// # Panics
    /// If a column has another length.
    pub fn new(
        chosen: impl Iterator<Item = usize>,
        instruction: Instruction,
        depth: usize,
        columns: &[MeasuredColumn<'_>],
    ) -> DigitColumns {
        assert!(columns.iter().all(|column| column.count == depth));
        let bytes = |unit: Unit| depth.next_multiple_of(processor::STEP) * processor::stored(instruction, unit);
        let of_column = |column: &MeasuredColumn<'_>| DigitColumn { unit: column.unit, start: [0; DIGITS], place: 0 };
        let mut known: SmallVec<[DigitColumn; 8]> = columns.iter().map(of_column).collect();
        let mut all = 0;
        let chosen: SmallVec<[usize; 8]> = chosen.collect();
        for column in &chosen {
            known[*column].place = all;
            all += bytes(known[*column].unit);
        }
        let mut digits = AlignedBuf::new(all.div_ceil(size_of::<f32>()));
        let mut left: &mut [i8] = bytemuck::cast_slice_mut(digits.words());
        let mut parts = SmallVec::<[_; 8]>::new();
        for column in &chosen {
            let (own, others) = std::mem::take(&mut left).split_at_mut(bytes(known[*column].unit));
            parts.push((own, columns[*column], [0; DIGITS]));
            left = others;
        }
        let pack = |_: usize, (digits, column, start): &mut (&mut [i8], MeasuredColumn<'_>, [i32; DIGITS])| {
            // SAFETY: the processor has the instruction; a column was measured with its unit.
            *start = unsafe { processor::pack(instruction, *column, digits) };
        };
        if chosen.len() * depth > MIN_PARALLEL_ELEMENTS {
            pool::for_each_mut(&mut parts, pack);
        } else {
            parts.iter_mut().for_each(|part| pack(0, part));
        }
        chosen.iter().zip(parts).for_each(|(column, (_, _, start))| known[*column].start = start);
        DigitColumns { digits, columns: known, depth, instruction }
    }

    /// Address of a column's digits.
    fn of(&self, column: usize) -> *const i8 {
        self.digits.pointer().cast::<i8>().wrapping_add(self.columns[column].place)
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
pub(super) struct ByteProducts {
    columns: DigitColumns,
    lanes: ColumnLanes,
}

impl ByteProducts {
    /// Products with columns of `depth` elements each. If products of a row with several columns are computed together,
    /// they are contiguous by row if `by_row`, else by column.
    ///
    /// # Panics
    /// If a column has another length.
    pub fn new(instruction: Instruction, depth: usize, columns: &[MeasuredColumn<'_>], by_row: bool) -> Self {
        let lanes = ColumnLanes::new(instruction, depth, columns, by_row);
        ByteProducts { columns: DigitColumns::new(lanes.left(), instruction, depth, columns), lanes }
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
        unsafe { processor::multiply((&self.columns, &self.lanes), rows, sums, put) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::columns::StridedColumn;
    use super::super::digits::tests::max_error;
    use super::super::digits::{Activations, MAX_DEPTH};
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
        products_of_measured(instruction, a, depth, &columns.collect::<Vec<_>>(), by_row)
    }

    /// Products `[rows, columns]` of measured columns.
    fn products_of_measured(
        instruction: Instruction,
        a: &[i8],
        depth: usize,
        columns: &[MeasuredColumn<'_>],
        by_row: bool,
    ) -> Vec<f32> {
        let mut out = vec![f32::NAN; a.len() / depth * columns.len()];
        let sums: Vec<i32> = a.chunks(depth).map(|row| row.iter().map(|value| i32::from(*value)).sum()).collect();
        ByteProducts::new(instruction, depth, columns, by_row).multiply(a, &sums, |block| {
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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn neighbours_in_rows_have_the_products_of_contiguous_columns(
            rows in 1usize..20, depth in 1usize..200, count in 1usize..200, others in 0usize..40, seed: u32, form in 0usize..3
        ) {
            let activations = [Activations::F32, Activations::I16, Activations::I8][form];
            let a: Vec<i8> = noise(rows * depth, seed).iter().map(|v| (v * 128.0) as i8).collect();
            let step = count + others;
            let mut x = noise(depth * step, !seed);
            // in some columns, some elements are larger, so that these have more digits
            x.iter_mut().step_by(1 + seed as usize % (7 * step)).for_each(|v| *v *= 300.0);
            let x = &x[others / 2..];
            let mut beside = vec![None; count];
            measure_beside((x, step), depth, activations, &mut beside);
            // some are left out, so that lanes are taken from places that don't follow each other
            let is_kept = |c: usize| seed.is_multiple_of(3) || !c.is_multiple_of(2 + seed as usize % 50);
            let beside: Vec<_> = (0..count).filter(|c| is_kept(*c)).map(|c| beside[c].expect("all are finite")).collect();
            let copy = |c: usize| x[c..].iter().step_by(step).copied().take(depth).collect();
            let copies: Vec<Vec<f32>> = (0..count).filter(|c| is_kept(*c)).map(copy).collect();
            let columns: Vec<_> = copies.iter().map(|values| StridedColumn { values, step: 1 }).collect();
            for instruction in Instruction::available() {
                for by_row in [false, true] {
                    let expected = products(instruction, &a, depth, &columns, activations, by_row);
                    prop_assert_eq!(products_of_measured(instruction, &a, depth, &beside, by_row), expected);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn second_digits_of_few_elements_count_in_every_form(
            rows in 1usize..60, fours in 25usize..75, count in 1usize..150,
            large in prop::collection::vec(0usize..100, 0..3), scattered: bool, seed: u32
        ) {
            let depth = 4 * fours;
            let a: Vec<i8> = noise(rows * depth, seed).iter().map(|v| (v * 128.0) as i8).collect();
            let mut x = noise(depth * count, !seed);
            for (c, k) in (0..count).flat_map(|c| large.iter().map(move |k| (c, *k))) {
                // at the same place in all columns, or each at its own
                x[(if scattered { (k + 7 * c) % depth } else { k }) * count + c] = if c % 2 == 0 { 25.0 } else { -30.0 };
            }
            let mut beside = vec![None; count];
            measure_beside((&x, count), depth, Activations::I8, &mut beside);
            let beside: Vec<_> = beside.into_iter().map(|column| column.expect("all are finite")).collect();
            prop_assert!(beside.iter().all(|column| column.unit.is_mostly_one != large.is_empty()));
            let copies: Vec<Vec<f32>> = (0..count).map(|c| x[c..].iter().step_by(count).copied().collect()).collect();
            let columns: Vec<_> = copies.iter().map(|values| StridedColumn { values, step: 1 }).collect();
            for instruction in Instruction::available() {
                let found = products(instruction, &a, depth, &columns, Activations::I8, seed % 2 == 0);
                prop_assert_eq!(&products_of_measured(instruction, &a, depth, &beside, seed % 2 == 1), &found);
                for (c, column) in columns.iter().enumerate() {
                    let alone = products(instruction, &a, depth, &[*column], Activations::I8, false);
                    prop_assert_eq!(alone, found.iter().skip(c).step_by(count).copied().collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn a_neighbour_without_digits_leaves_the_others_theirs() {
        let (depth, step) = (8, 150);
        for value in [f32::INFINITY, f32::NAN] {
            let mut x = noise(depth * step, 3);
            x[5 * step + 140] = value;
            let mut found = vec![None; step];
            measure_beside((&x, step), depth, Activations::I8, &mut found);
            let missing: Vec<usize> = (0..step).filter(|c| found[*c].is_none()).collect();
            assert_eq!(missing, [140]);
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
