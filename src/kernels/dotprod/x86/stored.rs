//! Rows of codes, whose numbers are looked up as bytes (`VPERMB`, AVX-512 VBMI), and rows of bytes in blocks with
//! scales.

use std::arch::x86_64::*;

use smallvec::SmallVec;

use super::super::{DigitColumns, ProductBlock};
use super::{BLOCK, MIDDLE, STEP, across};
use crate::aligned_buf::AlignedBuf;
use crate::byte_planes::PLANES;
use crate::digits::{Activations, DIGITS, FEW_DIGITS, ONE_DIGIT, TWO_DIGITS};
use crate::dispatch::{InstructionSet, Set};
use crate::simd::CACHE_LINE;
use crate::weight::{Elements, StoredWeight};

mod many;
mod row;

use row::{Bytes, CodeRows, EightBitCodes, RowBytes, ShortCodes};

/// Maximum elements of a row: sums of products of a number's bytes with digits fit into 32 bits.
const MAX_DEPTH: usize = i32::MAX as usize / (128 * (128 + (PLANES - 1) * 255));
/// Maximum elements of a block with a scale: the sum of a lane times 256 fits into 32 bits.
const MAX_BLOCK: usize = 512;
/// Prefetch distance of the scales of blocks, in bytes: processors don't detect a second stream beside that of the
/// codes.
const SCALES_PREFETCH_DISTANCE: usize = 2048;
/// Columns that are multiplied with looked-up bytes at a time.
const COLUMNS: usize = 4;

/// Weight that can be multiplied as bytes, other than bytes with one scale per row. Only [`StoredRows::new`] constructs
/// it.
#[derive(Clone, Copy)]
pub(crate) struct StoredRows<'a> {
    weight: &'a StoredWeight,
    form: Form<'a>,
    blocks: Option<Blocks>,
}

/// Form of the elements.
#[derive(Clone, Copy)]
enum Form<'a> {
    Bytes(&'a [i8]),
    Codes(CodeRows<'a>),
}

/// Blocks with scales: their number of elements, and the scale of each four elements of a vector.
#[derive(Clone, Copy)]
struct Blocks {
    size: usize,
    of_lane: [i32; 16],
}

impl Blocks {
    /// Returns `None` unless a vector consists of whole blocks, or lies within one block.
    fn new(size: usize) -> Option<Self> {
        let whole = if size < STEP { size.is_power_of_two() && size >= 4 } else { size.is_multiple_of(STEP) };
        (whole && size <= MAX_BLOCK)
            .then(|| Blocks { size, of_lane: std::array::from_fn(|lane| (lane * 4 / size) as i32) })
    }
}

impl<'a> StoredRows<'a> {
    /// Returns `None` if the processor lacks an instruction, or the weight has another form.
    pub fn new(weight: &'a StoredWeight) -> Option<Self> {
        let (columns, count) = (weight.columns(), weight.scales().blocks);
        let form = match weight.elements() {
            Elements::Int8(values) if count > 1 => Form::Bytes(values),
            Elements::Codes(codes) if (columns * codes.bits()).is_multiple_of(8) => {
                Form::Codes(CodeRows::new(codes, weight.tables()?)?)
            }
            _ => return None,
        };
        let blocks = match count {
            1 => None,
            _ if columns.is_multiple_of(count) => Some(Blocks::new(columns / count)?),
            _ => return None,
        };
        let has = InstructionSet::has(Set::Avx512Vbmi);
        (has && columns <= MAX_DEPTH).then_some(StoredRows { weight, form, blocks })
    }

    /// Number of rows, and of elements in each.
    pub fn size(&self) -> (usize, usize) {
        (self.weight.rows(), self.weight.columns())
    }

    /// Bytes of an element.
    pub fn planes(&self) -> usize {
        match &self.form {
            Form::Bytes(_) => 1,
            Form::Codes(codes) if codes.bits() == 8 => PLANES,
            Form::Codes(codes) => codes.planes(),
        }
    }

    /// Returns whether it is faster than f32 products for many columns. It isn't if most columns have three digits, or
    /// if blocks have scales.
    pub fn takes_many(self, activations: Activations) -> bool {
        activations != Activations::F32 && self.blocks.is_none()
    }

    /// Activations of products: a single digit would be multiplied with the highest byte of a number alone.
    pub fn activations(self, asked: Activations) -> Activations {
        if asked == Activations::I8 && self.planes() > 1 { Activations::I16 } else { asked }
    }
}

/// Initial sums of columns for rows with scaled blocks: for each vector of elements and each digit, the offsets of four
/// digits.
struct LaneStarts {
    sums: AlignedBuf,
    /// Offset of each column.
    places: SmallVec<[usize; 8]>,
}

impl LaneStarts {
    /// Computes the initial sums of all columns.
    fn new(of: &DigitColumns) -> Self {
        /// # Safety
        /// The processor has the instructions; there are `vectors` vectors of digits, and room for their sums.
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        unsafe fn fill(digits: *const i8, vectors: usize, sums: *mut i32) {
            for i in 0..vectors {
                // SAFETY: as promised.
                unsafe {
                    let digits = _mm512_load_si512(digits.add(i * STEP).cast());
                    let sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(MIDDLE), digits);
                    let start = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
                    _mm512_store_si512(sums.add(i * STEP / 4).cast(), start);
                }
            }
        }
        let of_digit = of.depth.div_ceil(STEP) * STEP / 4;
        let count = of.columns.iter().map(|column| column.unit.digits).sum::<usize>();
        let mut sums = AlignedBuf::new(count * of_digit);
        let mut left: &mut [u32] = sums.words();
        let mut places = SmallVec::new();
        let mut place = 0;
        for (c, column) in of.columns.iter().enumerate() {
            let (own, others) = std::mem::take(&mut left).split_at_mut(column.unit.digits * of_digit);
            // SAFETY: columns are made where the processor has the instructions; so many vectors of digits are there.
            unsafe { fill(of.of(c), own.len() * 4 / STEP, own.as_mut_ptr().cast()) };
            places.push(place);
            (left, place) = (others, place + own.len());
        }
        LaneStarts { sums, places }
    }

    fn of(&self, column: usize) -> *const i32 {
        self.sums.pointer().wrapping_add(self.places[column]).cast()
    }
}

/// Products of a weight's rows with columns, without the scale of a whole row.
pub(crate) struct StoredProducts<'a> {
    columns: &'a DigitColumns,
    rows: StoredRows<'a>,
    /// Initial sums, if the rows' blocks have scales.
    starts: Option<LaneStarts>,
}

impl<'a> StoredProducts<'a> {
    /// # Panics
    /// If rows and columns aren't equally long.
    pub fn new(columns: &'a DigitColumns, rows: StoredRows<'a>) -> Self {
        assert_eq!(columns.depth, rows.weight.columns());
        StoredProducts { columns, rows, starts: rows.blocks.map(|_| LaneStarts::new(columns)) }
    }

    /// Returns whether [`multiply`](Self::multiply) looks elements up more than once, because there are too many
    /// columns.
    pub fn looks_up_again(&self) -> bool {
        self.columns.columns.len() > COLUMNS
    }

    /// Passes the products of `count` rows from `first` on to `put`, in pieces, with rows counted from `first`.
    ///
    /// # Panics
    /// If there are fewer rows.
    pub fn multiply(&self, first: usize, count: usize, mut put: impl FnMut(ProductBlock<'_>)) {
        assert!(first <= self.rows.weight.rows() && count <= self.rows.weight.rows() - first);
        let [one, two, few, others] = self.columns.by_digits();
        let mut products: SmallVec<[[f32; BLOCK]; 8]> = SmallVec::from_elem([0.0; BLOCK], self.columns.columns.len());
        for from in (0..count).step_by(BLOCK) {
            let here = BLOCK.min(count - from);
            // SAFETY: columns and rows exist only where the processor has the instructions; they are equally long, and
            // the rows are there.
            unsafe {
                self.in_groups::<ONE_DIGIT>((first + from, here), &one, &mut products);
                self.in_groups::<TWO_DIGITS>((first + from, here), &two, &mut products);
                self.in_groups::<FEW_DIGITS>((first + from, here), &few, &mut products);
                self.in_groups::<DIGITS>((first + from, here), &others, &mut products);
            }
            for (c, products) in products.iter().enumerate() {
                put(ProductBlock::of_column(from, &c, &products[..here]));
            }
        }
    }
}

/// Products of up to [`BLOCK`] rows. Safety of all functions: the processor has the instructions, rows are as long as
/// columns, and the rows exist.
impl StoredProducts<'_> {
    /// Products with columns of `D` digits.
    unsafe fn in_groups<const D: usize>(
        &self,
        rows: (usize, usize),
        mut columns: &[usize],
        products: &mut [[f32; BLOCK]],
    ) {
        // SAFETY: as promised.
        unsafe {
            while let [a, b, c, d, rest @ ..] = columns {
                self.with::<COLUMNS, D>(rows, [*a, *b, *c, *d], products);
                columns = rest;
            }
            if let [a, b, rest @ ..] = columns {
                self.with::<2, D>(rows, [*a, *b], products);
                columns = rest;
            }
            if let [a] = columns {
                self.with::<1, D>(rows, [*a], products);
            }
        }
    }

    /// Products with `C` columns of `D` digits.
    unsafe fn with<const C: usize, const D: usize>(
        &self,
        rows: (usize, usize),
        columns: [usize; C],
        products: &mut [[f32; BLOCK]],
    ) {
        // SAFETY: as promised.
        unsafe {
            match &self.rows.form {
                Form::Bytes(values) => self.each::<Bytes, 1, C, D>(values, rows, columns, products),
                Form::Codes(codes) if codes.bits() == 8 => {
                    self.each::<EightBitCodes, PLANES, C, D>(codes, rows, columns, products);
                }
                Form::Codes(codes) if codes.planes() == 1 => {
                    self.each::<ShortCodes<1>, 1, C, D>(codes, rows, columns, products);
                }
                Form::Codes(codes) => self.each::<ShortCodes<PLANES>, PLANES, C, D>(codes, rows, columns, products),
            }
        }
    }

    /// Products of rows whose elements have `P` bytes.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn each<R: RowBytes<P>, const P: usize, const C: usize, const D: usize>(
        &self,
        of: &R::Of<'_>,
        (first, count): (usize, usize),
        columns: [usize; C],
        products: &mut [[f32; BLOCK]],
    ) {
        let StoredProducts { columns: all, rows, starts } = self;
        let digits = columns.map(|column| all.of(column));
        // SAFETY: as promised.
        unsafe {
            if let (Some(blocks), Some(starts)) = (rows.blocks, starts) {
                let inputs = (digits, columns.map(|column| starts.of(column)));
                let mut i = 0;
                // a single column's initial sums and digits are loaded once for two rows
                if const { C == 1 } {
                    while i + 2 <= count {
                        self.blocks_of_rows::<R, P, C, D, 2>(of, (first, i), (columns, inputs), blocks, products);
                        i += 2;
                    }
                }
                while i < count {
                    self.blocks_of_rows::<R, P, C, D, 1>(of, (first, i), (columns, inputs), blocks, products);
                    i += 1;
                }
                return;
            }
            for row in first..first + count {
                let (bytes, unit) = R::of_row(of, all.depth, row);
                let sums = whole::<R, P, C, D>(&bytes, digits, all.depth);
                for (sums, column) in sums.into_iter().zip(columns) {
                    products[column][row - first] = all.columns[column].product(sums) * unit;
                }
            }
        }
    }

    /// Products of `N` rows from `first + i` on, with scaled blocks.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn blocks_of_rows<R: RowBytes<P>, const P: usize, const C: usize, const D: usize, const N: usize>(
        &self,
        of: &R::Of<'_>,
        (first, i): (usize, usize),
        (columns, inputs): ([usize; C], DigitsAndStarts<C>),
        blocks: Blocks,
        products: &mut [[f32; BLOCK]],
    ) {
        let StoredProducts { columns: all, rows, .. } = self;
        // SAFETY: as promised.
        let bytes: [_; N] = std::array::from_fn(|n| unsafe { R::of_row(of, all.depth, first + i + n) });
        let scales = std::array::from_fn(|n| rows.weight.scales().of_row(first + i + n));
        for line in scales.iter().flat_map(|scales| scales.chunks(CACHE_LINE / size_of::<f32>())) {
            _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_byte_add(SCALES_PREFETCH_DISTANCE).cast());
        }
        // SAFETY: as promised.
        let sums = unsafe { in_blocks::<R, P, C, D, N>(&bytes, inputs, all.depth, (blocks, scales)) };
        for (n, (sums, (_, unit))) in sums.into_iter().zip(&bytes).enumerate() {
            for (sum, column) in sums.into_iter().zip(columns) {
                products[column][i + n] = sum * all.columns[column].unit.size * unit;
            }
        }
    }
}

/// Digits of columns, and their initial sums.
type DigitsAndStarts<const C: usize> = ([*const i8; C], [*const i32; C]);

/// Sums by digit of a whole row.
///
/// # Safety
/// The processor has the instructions; the elements and digits exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
unsafe fn whole<R: RowBytes<P>, const P: usize, const C: usize, const D: usize>(
    row: &R,
    columns: [*const i8; C],
    depth: usize,
) -> [[i32; DIGITS]; C] {
    // two sets of sums for a single column, so that products don't wait for each other
    let mut sums = [[[_mm512_setzero_si512(); D]; C]; 2];
    let steps = depth.div_ceil(STEP);
    // SAFETY: as promised.
    unsafe {
        for step in (0..steps - steps % 2).step_by(2) {
            add_products(&mut sums[0], row.step(step), columns, step);
            add_products(&mut sums[usize::from(C == 1)], row.step(step + 1), columns, step + 1);
        }
        if !steps.is_multiple_of(2) {
            add_products(&mut sums[0], row.step(steps - 1), columns, steps - 1);
        }
    }
    let [one, other] = sums;
    std::array::from_fn(|c| across::<D>(std::array::from_fn(|d| _mm512_add_epi32(one[c][d], other[c][d]))))
}

/// Sums of rows with scaled blocks, in the units of columns.
///
/// # Safety
/// As [`whole`]; there are scales for all blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
unsafe fn in_blocks<R: RowBytes<P>, const P: usize, const C: usize, const D: usize, const N: usize>(
    rows: &[(R, f32); N],
    (columns, starts): DigitsAndStarts<C>,
    depth: usize,
    (blocks, scales): (Blocks, [&[f32]; N]),
) -> [[f32; C]; N] {
    let mut all = [[_mm512_setzero_ps(); C]; N];
    // SAFETY: as promised.
    unsafe {
        let of_lane = _mm512_loadu_si512(blocks.of_lane.as_ptr().cast());
        let (vectors, scales_here) = ((blocks.size / STEP).max(1), (STEP / blocks.size).max(1));
        let steps = depth.div_ceil(STEP);
        for (i, from) in (0..steps).step_by(vectors).enumerate() {
            let start = |c: usize, digit: usize, step: usize| {
                _mm512_load_si512(starts[c].add((step * D + digit) * STEP / 4).cast())
            };
            let first: [[__m512i; D]; C] = std::array::from_fn(|c| std::array::from_fn(|d| start(c, d, from)));
            let mut sums = [first; N];
            for ((row, _), sums) in rows.iter().zip(&mut sums) {
                add_products(sums, row.step(from), columns, from);
            }
            for step in from + 1..from + vectors {
                for ((row, _), sums) in rows.iter().zip(&mut sums) {
                    for (c, sums) in sums.iter_mut().enumerate() {
                        for (d, sum) in sums.iter_mut().enumerate() {
                            *sum = _mm512_add_epi32(*sum, start(c, d, step));
                        }
                    }
                    add_products(sums, row.step(step), columns, step);
                }
            }
            // a partial vector has fewer
            let here = scales_here.min(scales[0].len() - i * scales_here);
            for ((all, sums), scales) in all.iter_mut().zip(sums).zip(scales) {
                let scales = scales[i * scales_here..][..here].as_ptr();
                let scales = _mm512_maskz_loadu_ps(u16::MAX >> (16 - here), scales);
                let scales = _mm512_permutexvar_ps(of_lane, scales);
                for (all, sums) in all.iter_mut().zip(sums) {
                    *all = _mm512_fmadd_ps(joined(sums), scales, *all);
                }
            }
        }
    }
    all.map(|all| all.map(|all| _mm512_reduce_add_ps(all)))
}

/// Joins sums by digit, lane by lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
fn joined<const D: usize>(sums: [__m512i; D]) -> __m512 {
    let pair = |high: __m512i, low: __m512i| _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low));
    let upper = if D == ONE_DIGIT { _mm512_cvtepi32_ps(sums[0]) } else { pair(sums[D - 1], sums[D - 2]) };
    match D {
        ONE_DIGIT | TWO_DIGITS => upper,
        FEW_DIGITS => _mm512_fmadd_ps(upper, _mm512_set1_ps(256.0), _mm512_cvtepi32_ps(sums[0])),
        _ => _mm512_fmadd_ps(upper, _mm512_set1_ps(65536.0), pair(sums[1], sums[0])),
    }
}

/// Adds the products of elements of a row and of columns. The highest byte of a number is multiplied with all digits,
/// the next one with all but the lowest, and so on: the omitted rest is less than a 2^22th of the largest product, or a
/// 2^14th with two digits.
///
/// # Safety
/// The digits exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
unsafe fn add_products<const P: usize, const C: usize, const D: usize>(
    sums: &mut [[__m512i; D]; C],
    planes: [__m512i; P],
    columns: [*const i8; C],
    step: usize,
) {
    for (sums, column) in sums.iter_mut().zip(columns) {
        for digit in 0..D {
            // SAFETY: as promised.
            let digits = unsafe { _mm512_load_si512(column.add((step * D + digit) * STEP).cast()) };
            for (plane, bytes) in planes.iter().enumerate().take(digit + 1) {
                sums[digit - plane] = _mm512_dpbusd_epi32(sums[digit - plane], *bytes, digits);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::Instruction;
    use super::*;
    use crate::codes::{CodeTables, PackedCodes};
    use crate::columns::StridedColumn;
    use crate::digits::tests::max_error;
    use crate::dot::tests::noise;
    use crate::weight::Scales;

    /// Weight of codes (up to eight bits) or of bytes (0), with tables for two rows each, in blocks.
    fn weight(bits: usize, integers: bool, (rows, blocks, block): (usize, usize, usize), seed: u32) -> StoredWeight {
        let columns = blocks * block;
        let scales = if blocks == 1 { vec![1.0] } else { noise(rows * blocks, seed ^ 5) };
        let (shape, scales) = (vec![rows, columns], Scales { values: scales, blocks });
        let bytes = noise(rows * columns, seed).into_iter().map(|v| (v * 128.0) as i8);
        if bits == 0 {
            return StoredWeight::scaled(shape, Arc::new(Elements::Int8(bytes.collect())), scales);
        }
        let packed: Vec<u8> = bytes.map(i8::cast_unsigned).take((rows * columns * bits).div_ceil(8)).collect();
        let codes = Arc::new(Elements::Codes(PackedCodes::new(bits, packed.into())));
        let mut table = noise(rows.div_ceil(2) << bits, seed ^ 3);
        if integers {
            table.iter_mut().enumerate().for_each(|(i, v)| *v = (i % (1 << bits)) as f32 - 7.0);
        }
        StoredWeight::coded(shape, codes, CodeTables::new(bits, 1 << bits, &table, 2), scales)
    }

    /// Products `[columns, rows]`.
    fn products(weight: &StoredWeight, columns: &[Vec<f32>], activations: Activations) -> Option<Vec<Vec<f32>>> {
        let is_whole = weight.scales().blocks == 1;
        let (instruction, rows) = (Instruction::Vpdpbusd, StoredRows::new(weight)?);
        let column = |x| StridedColumn { values: x, step: 1 };
        let measured = columns.iter().map(|x| column(x).measured(x.len(), activations).expect("finite"));
        let measured: Vec<_> = measured.collect();
        let digits = DigitColumns::new(0..measured.len(), instruction, weight.columns(), &measured);
        let stored = StoredProducts::new(&digits, rows);
        let mut out = vec![vec![f32::NAN; weight.rows()]; columns.len()];
        let put = |out: &mut [Vec<f32>], block: ProductBlock<'_>| {
            out[block.columns[0]][block.row..][..block.rows].copy_from_slice(block.products);
        };
        stored.multiply(0, weight.rows(), |block| put(&mut out, block));
        if is_whole {
            let mut many = vec![vec![f32::NAN; weight.rows()]; columns.len()];
            stored.multiply_many(0, weight.rows(), |block| put(&mut many, block));
            assert_eq!(many, out);
        }
        Some(out)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(192))]
        #[test]
        fn products_of_every_form_are_those_of_the_numbers(
            bits in prop::sample::select(vec![0usize, 1, 2, 3, 4, 6, 8]), integers: bool, rows in 1usize..60,
            (blocks, block) in prop_oneof![
                (1usize..2, (1usize..60).prop_map(|eights| 8 * eights)),
                (2usize..20, prop::sample::select(vec![8usize, 16, 32, 64, 128, 192])),
            ],
            count in 1usize..8, seed: u32, form in 0usize..3,
        ) {
            let asked = [Activations::F32, Activations::I16, Activations::I8][form];
            prop_assume!(bits > 0 || blocks > 1);
            if !InstructionSet::has(Set::Avx512Vbmi) {
                anec_base::skipped("this processor doesn't look bytes up");
                return Ok(());
            }
            let weight = weight(bits, integers, (rows, blocks, block), seed);
            let activations = StoredRows::new(&weight).expect("it has the form").activations(asked);
            let columns: Vec<Vec<f32>> = (0..count as u32).map(|c| {
                let mut x = noise(blocks * block, !seed ^ c);
                // columns that need four digits
                x.iter_mut().step_by(37).take(c as usize % 2 * 100).for_each(|v| *v *= 3000.0);
                x
            }).collect();
            let found = products(&weight, &columns, activations).expect("it has the form");
            let mut row_values = vec![0.0; blocks * block];
            for (x, found) in columns.iter().zip(&found) {
                let off = max_error(activations, &x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
                // products of low bytes and low digits are omitted
                let off = if activations == Activations::F32 { off } else { 4.0 * off };
                for (row, found) in found.iter().enumerate() {
                    weight.expand_row(row, &mut row_values);
                    let terms = || row_values.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                    let exact: f64 = terms().sum();
                    let largest = row_values.iter().fold(0.0f64, |most, w| f64::from(w.abs()).max(most));
                    // errors of elements and numbers, and the rounding of sums
                    let limit = off * largest * x.len() as f64 + terms().map(f64::abs).sum::<f64>() * 4e-6;
                    prop_assert!((f64::from(*found) - exact).abs() <= limit, "{found} {exact} {limit}");
                }
            }
            for (c, x) in columns.iter().enumerate() {
                let alone = products(&weight, std::slice::from_ref(x), activations).expect("it has the form");
                prop_assert_eq!(&alone[0], &found[c]);
            }
        }
    }

    #[test]
    fn the_longest_row_does_not_overflow() {
        let depth = MAX_DEPTH / 8 * 8;
        let codes = |depth: usize| Arc::new(Elements::Codes(PackedCodes::new(8, vec![1; depth].into())));
        let of = |depth: usize| {
            // all bytes at their largest
            let tables = CodeTables::new(8, 2, &[0.5, -1.999_999_9], 1);
            let scales = Scales { values: vec![1.0], blocks: 1 };
            StoredWeight::coded(vec![1, depth], codes(depth), tables, scales)
        };
        for x in [vec![-1.0; depth], vec![1.0; depth]] {
            let Some(found) = products(&of(depth), std::slice::from_ref(&x), Activations::F32) else {
                return anec_base::skipped("this processor doesn't look bytes up");
            };
            let exact = -1.999_999_9 * f64::from(x[0]) * depth as f64;
            assert!((f64::from(found[0][0]) / exact - 1.0).abs() < 1e-6, "{} {exact}", found[0][0]);
        }
        assert!(StoredRows::new(&of(MAX_DEPTH + 8)).is_none());
    }
}
