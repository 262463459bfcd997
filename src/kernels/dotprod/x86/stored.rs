//! Rows of codes, whose numbers are looked up as bytes (`VPERMB`, AVX-512 VBMI), and rows whose blocks each have a scale.

use std::arch::x86_64::*;

use smallvec::SmallVec;

use super::super::super::aligned_buf::AlignedBuf;
use super::super::super::digits::{DIGITS, FEW_DIGITS};
use super::super::super::dot::AHEAD;
use super::super::super::planes::PLANES;
use super::super::super::weight::{Elements, StoredWeight};
use super::super::DigitColumns;
use super::{MIDDLE, STEP, across, raised, raised_part};

/// Most elements of a row: sums of the products of a number's bytes with digits of as many fit 32 bits.
const MOST_DEPTH: usize = i32::MAX as usize / (128 * (128 + (PLANES - 1) * 255));
/// Most elements of a block that has a scale: the sums of a vector's elements, times 256, fit 32 bits.
const MOST_BLOCK: usize = 512;
/// Columns that are multiplied at a time with what was looked up.
const COLUMNS: usize = 4;
/// Rows whose products are given at a time.
const BLOCK: usize = 48;

/// A weight that can be multiplied by bytes though it isn't one of bytes with a scale for each row: made by
/// [`StoredRows::new`] alone.
#[derive(Clone, Copy)]
pub(in super::super::super) struct StoredRows<'a> {
    weight: &'a StoredWeight,
    form: Form<'a>,
    blocks: Option<Blocks>,
}

/// How elements are stored.
#[derive(Clone, Copy)]
enum Form<'a> {
    Bytes(&'a [i8]),
    /// Packed codes of so many bits.
    Codes(&'a [u8], usize),
}

/// Blocks that have a scale: how many elements, and which of the scales of a vector's elements belongs to each four.
#[derive(Clone, Copy)]
struct Blocks {
    size: usize,
    of_lane: [i32; 16],
}

impl Blocks {
    /// `None` unless a vector's blocks are whole, or its elements of one block.
    fn new(size: usize) -> Option<Self> {
        let whole = if size < STEP { size.is_power_of_two() && size >= 4 } else { size.is_multiple_of(STEP) };
        (whole && size <= MOST_BLOCK)
            .then(|| Blocks { size, of_lane: std::array::from_fn(|lane| (lane * 4 / size) as i32) })
    }
}

impl<'a> StoredRows<'a> {
    /// `None` if the processor lacks an instruction, or the weight is of another form.
    pub fn new(weight: &'a StoredWeight) -> Option<Self> {
        let (columns, count) = (weight.columns(), weight.scales().blocks);
        let form = match weight.elements() {
            Elements::Int8(values) if count > 1 => Form::Bytes(values),
            Elements::Codes(codes) if (columns * codes.bits()).is_multiple_of(8) => {
                weight.tables()?.planes()?;
                Form::Codes(codes.bytes(), codes.bits())
            }
            _ => return None,
        };
        let blocks = match count {
            1 => None,
            _ if columns.is_multiple_of(count) => Some(Blocks::new(columns / count)?),
            _ => return None,
        };
        let has = is_x86_feature_detected!("avx512vbmi");
        (has && columns <= MOST_DEPTH).then_some(StoredRows { weight, form, blocks })
    }
}

/// What the sums of columns start with in a row whose blocks have scales: of every vector of elements and each digit, the
/// sums of four digits, times what is taken from an element.
struct LaneStarts {
    sums: AlignedBuf,
    of_column: usize,
}

impl LaneStarts {
    /// Those of all columns.
    fn new(of: &DigitColumns) -> Self {
        /// # Safety
        /// The processor has the instructions; so many vectors of digits are there, and there is room for their sums.
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
        let vectors = of.depth.div_ceil(STEP) * DIGITS;
        let of_column = vectors * STEP / 4;
        let mut sums = AlignedBuf::new(of_column * of.columns.len());
        for (c, sums) in sums.words().chunks_exact_mut(of_column.max(1)).enumerate() {
            // SAFETY: columns are made where the processor has the instructions; so many vectors of digits are there.
            unsafe { fill(of.of(c), vectors, sums.as_mut_ptr().cast()) };
        }
        LaneStarts { sums, of_column }
    }

    fn of(&self, column: usize) -> *const i32 {
        self.sums.pointer().wrapping_add(column * self.of_column).cast()
    }
}

/// The products of a weight's rows with columns, but for a scale that a whole row has.
pub(in super::super::super) struct StoredProducts<'a> {
    columns: &'a DigitColumns,
    rows: StoredRows<'a>,
    /// Where the rows' blocks have scales.
    starts: Option<LaneStarts>,
}

impl<'a> StoredProducts<'a> {
    /// # Panics
    /// If rows and columns aren't equally long.
    pub fn new(columns: &'a DigitColumns, rows: StoredRows<'a>) -> Self {
        assert_eq!(columns.depth, rows.weight.columns());
        StoredProducts { columns, rows, starts: rows.blocks.map(|_| LaneStarts::new(columns)) }
    }

    /// Gives those of `count` rows from `first` on, some that follow each other with a column at a time:
    /// `put(row, column, products)`, rows counted from `first`.
    ///
    /// # Panics
    /// If there are fewer rows.
    pub fn multiply(&self, first: usize, count: usize, mut put: impl FnMut(usize, usize, &[f32])) {
        assert!(first <= self.rows.weight.rows() && count <= self.rows.weight.rows() - first);
        let columns = &self.columns.columns;
        let with = |digits: usize| -> SmallVec<[usize; 8]> {
            (0..columns.len()).filter(|c| columns[*c].unit.digits == digits).collect()
        };
        let (few, others) = (with(FEW_DIGITS), with(DIGITS));
        let mut products: SmallVec<[[f32; BLOCK]; 8]> = SmallVec::from_elem([0.0; BLOCK], columns.len());
        for from in (0..count).step_by(BLOCK) {
            let here = BLOCK.min(count - from);
            for row in 0..here {
                let mut keep = |column: usize, product: f32| products[column][row] = product;
                let row = Row { of: self, row: first + from + row };
                // SAFETY: columns and rows are made where the processor has the instructions; they are equally long, and
                // the row is there.
                unsafe {
                    row.in_groups::<FEW_DIGITS>(&few, &mut keep);
                    row.in_groups::<DIGITS>(&others, &mut keep);
                }
            }
            for (c, products) in products.iter().enumerate() {
                put(from, c, &products[..here]);
            }
        }
    }
}

/// A row, and what it is multiplied with.
struct Row<'a> {
    of: &'a StoredProducts<'a>,
    row: usize,
}

/// The functions are safe where the processor has the instructions, rows are as long as columns, and the row is there.
impl Row<'_> {
    /// The products with some columns of `D` digits.
    unsafe fn in_groups<const D: usize>(&self, mut columns: &[usize], keep: &mut impl FnMut(usize, f32)) {
        // SAFETY: as promised.
        unsafe {
            while let [a, b, c, d, rest @ ..] = columns {
                self.with::<COLUMNS, D>([*a, *b, *c, *d], keep);
                columns = rest;
            }
            if let [a, b, rest @ ..] = columns {
                self.with::<2, D>([*a, *b], keep);
                columns = rest;
            }
            if let [a] = columns {
                self.with::<1, D>([*a], keep);
            }
        }
    }

    /// The products with `C` columns of `D` digits.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn with<const C: usize, const D: usize>(&self, columns: [usize; C], keep: &mut impl FnMut(usize, f32)) {
        let (rows, depth) = (&self.of.rows, self.of.columns.depth);
        // SAFETY: as promised; `StoredRows::new` has checked that rows begin with a byte.
        let products = unsafe {
            match rows.form {
                Form::Bytes(values) => {
                    let row = values.as_ptr().add(self.row * depth).cast();
                    self.sums::<_, 1, C, D>(&Bytes { row, depth }, columns)
                }
                Form::Codes(bytes, bits) => {
                    let row = bytes.as_ptr().add(self.row * depth * bits / 8);
                    let tables = rows.weight.tables();
                    let Some((planes, unit)) = tables.and_then(|tables| tables.planes_of_row(self.row)) else { return };
                    let products = match (bits, planes.len() / STEP) {
                        (8, _) => self.sums::<_, PLANES, C, D>(&Long::new(row, depth, planes), columns),
                        (_, 1) => self.sums::<_, 1, C, D>(&Short::new(row, depth, bits, planes), columns),
                        _ => self.sums::<_, PLANES, C, D>(&Short::new(row, depth, bits, planes), columns),
                    };
                    products.map(|product| product * unit)
                }
            }
        };
        for (column, product) in columns.into_iter().zip(products) {
            keep(column, product);
        }
    }

    /// The products of a row's elements, each of `P` bytes, with `C` columns of `D` digits.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn sums<S: RowBytes<P>, const P: usize, const C: usize, const D: usize>(
        &self,
        row: &S,
        columns: [usize; C],
    ) -> [f32; C] {
        let StoredProducts { columns: all, rows, starts } = self.of;
        let digits = columns.map(|column| all.of(column));
        // SAFETY: as promised.
        unsafe {
            match (rows.blocks, starts) {
                (Some(blocks), Some(starts)) => {
                    let scales = rows.weight.scales().of_row(self.row);
                    let starts = columns.map(|column| starts.of(column));
                    let sums = in_blocks::<S, P, C, D>(row, (digits, starts), all.depth, (blocks, scales));
                    std::array::from_fn(|c| sums[c] * all.columns[columns[c]].unit.size)
                }
                _ => {
                    let sums = whole::<S, P, C, D>(row, digits, all.depth);
                    std::array::from_fn(|c| all.columns[columns[c]].product(sums[c]))
                }
            }
        }
    }
}

/// The sums by digits of a whole row.
///
/// # Safety
/// The processor has the instructions; the elements and digits are there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
unsafe fn whole<S: RowBytes<P>, const P: usize, const C: usize, const D: usize>(
    row: &S,
    columns: [*const i8; C],
    depth: usize,
) -> [[i32; DIGITS]; C] {
    // two sets of sums for a lone column, so that no product waits for the one before it
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

/// The sums of a row whose blocks have scales, in the units of columns, which come with their starts.
///
/// # Safety
/// As [`whole`]; there are scales for all blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
unsafe fn in_blocks<S: RowBytes<P>, const P: usize, const C: usize, const D: usize>(
    row: &S,
    (columns, starts): ([*const i8; C], [*const i32; C]),
    depth: usize,
    (blocks, scales): (Blocks, &[f32]),
) -> [f32; C] {
    let mut all = [_mm512_setzero_ps(); C];
    // SAFETY: as promised.
    unsafe {
        let of_lane = _mm512_loadu_si512(blocks.of_lane.as_ptr().cast());
        let (vectors, scales_here) = ((blocks.size / STEP).max(1), (STEP / blocks.size).max(1));
        let steps = depth.div_ceil(STEP);
        for (from, scales) in (0..steps).step_by(vectors).zip(scales.chunks(scales_here)) {
            let mut sums = [[_mm512_setzero_si512(); D]; C];
            for step in from..from + vectors {
                for (sums, starts) in sums.iter_mut().zip(&starts) {
                    for (digit, sum) in sums.iter_mut().enumerate() {
                        let start = _mm512_load_si512(starts.add((step * DIGITS + digit) * STEP / 4).cast());
                        *sum = _mm512_add_epi32(*sum, start);
                    }
                }
                add_products(&mut sums, row.step(step), columns, step);
            }
            let scales = _mm512_maskz_loadu_ps(u16::MAX >> (16 - scales.len()), scales.as_ptr());
            let scales = _mm512_permutexvar_ps(of_lane, scales);
            for (all, sums) in all.iter_mut().zip(sums) {
                *all = _mm512_fmadd_ps(joined(sums), scales, *all);
            }
        }
    }
    all.map(|all| _mm512_reduce_add_ps(all))
}

/// Sums whose digits are these, lane by lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
fn joined<const D: usize>(sums: [__m512i; D]) -> __m512 {
    let pair = |high: __m512i, low: __m512i| _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low));
    let upper = pair(sums[D - 1], sums[D - 2]);
    if D == FEW_DIGITS {
        _mm512_fmadd_ps(upper, _mm512_set1_ps(256.0), _mm512_cvtepi32_ps(sums[0]))
    } else {
        _mm512_fmadd_ps(upper, _mm512_set1_ps(65536.0), pair(sums[1], sums[0]))
    }
}

/// Adds the products of elements of a row and of columns. A number's highest byte is multiplied with all digits, the next
/// with all but the lowest, and so on: what is left out is less than a 2^22th of the largest product.
///
/// # Safety
/// There are as many digits.
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
            let digits = unsafe { _mm512_load_si512(column.add((step * DIGITS + digit) * STEP).cast()) };
            for (plane, bytes) in planes.iter().enumerate().take(digit + 1) {
                sums[digit - plane] = _mm512_dpbusd_epi32(sums[digit - plane], *bytes, digits);
            }
        }
    }
}

/// Elements of a row as `P` bytes each, the highest first, which is 128 more than it stands for.
trait RowBytes<const P: usize> {
    /// The elements of a vector; what follows the row's last may be anything.
    ///
    /// # Safety
    /// The processor has the instructions, and the row so many vectors.
    unsafe fn step(&self, step: usize) -> [__m512i; P];
}

/// Signed bytes.
struct Bytes {
    row: *const i8,
    depth: usize,
}

impl RowBytes<1> for Bytes {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn step(&self, step: usize) -> [__m512i; 1] {
        // SAFETY: as promised.
        unsafe {
            let (at, left) = (self.row.add(step * STEP), self.depth - step * STEP);
            [if left >= STEP { raised(at) } else { raised_part(at, left) }]
        }
    }
}

/// Where a row's codes are, and how many bytes those of a vector and of the row have.
struct PackedRow {
    row: *const u8,
    step: usize,
    length: usize,
}

impl PackedRow {
    /// The bytes of a vector's codes. Asks for what comes later.
    ///
    /// # Safety
    /// The row has so many vectors.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn bytes(&self, step: usize) -> __m512i {
        let from = step * self.step;
        let at = self.row.wrapping_add(from);
        // SAFETY: as promised; what is asked for need not be there.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(AHEAD).cast());
            _mm512_maskz_loadu_epi8(u64::MAX >> (64 - self.step.min(self.length - from)), at.cast())
        }
    }
}

/// Codes of at most six bits; tables of 64 bytes.
struct Short<const P: usize> {
    codes: PackedRow,
    tables: [__m512i; P],
    /// Which bytes hold eight codes.
    spread: __m512i,
    /// Where each of them begins there.
    shifts: __m512i,
}

impl<const P: usize> Short<P> {
    /// A row of codes of so many bits.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    fn new(row: *const u8, depth: usize, bits: usize, planes: &[u8]) -> Self {
        let spread: [u8; STEP] = std::array::from_fn(|i| (i / 8 * bits + i % 8) as u8);
        let shifts: [u8; STEP] = std::array::from_fn(|i| (i % 8 * bits) as u8);
        let tables = planes.as_chunks::<STEP>().0;
        // SAFETY: arrays of 64 bytes.
        unsafe {
            Short {
                codes: PackedRow { row, step: 8 * bits, length: depth * bits / 8 },
                tables: std::array::from_fn(|plane| _mm512_loadu_si512(tables[plane].as_ptr().cast())),
                spread: _mm512_loadu_si512(spread.as_ptr().cast()),
                shifts: _mm512_loadu_si512(shifts.as_ptr().cast()),
            }
        }
    }
}

impl<const P: usize> RowBytes<P> for Short<P> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn step(&self, step: usize) -> [__m512i; P] {
        // SAFETY: as promised.
        let bytes = unsafe { self.codes.bytes(step) };
        let eights = _mm512_permutexvar_epi8(self.spread, bytes);
        // the bits above a code's make no difference where a table has its numbers again and again
        let codes = _mm512_multishift_epi64_epi8(self.shifts, eights);
        self.tables.map(|table| _mm512_permutexvar_epi8(codes, table))
    }
}

/// Codes of eight bits; tables of 256 bytes.
struct Long {
    codes: PackedRow,
    tables: [[__m512i; 4]; PLANES],
}

impl Long {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    fn new(row: *const u8, depth: usize, planes: &[u8]) -> Self {
        let tables = planes.as_chunks::<STEP>().0;
        // SAFETY: arrays of 64 bytes.
        let part = |i: usize| unsafe { _mm512_loadu_si512(tables[i].as_ptr().cast()) };
        Long {
            codes: PackedRow { row, step: STEP, length: depth },
            tables: std::array::from_fn(|plane| std::array::from_fn(|i| part(4 * plane + i))),
        }
    }
}

impl RowBytes<PLANES> for Long {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn step(&self, step: usize) -> [__m512i; PLANES] {
        // SAFETY: as promised.
        let codes = unsafe { self.codes.bytes(step) };
        let upper = _mm512_movepi8_mask(codes);
        self.tables.map(|[a, b, c, d]| {
            let low = _mm512_permutex2var_epi8(a, codes, b);
            _mm512_mask_blend_epi8(upper, low, _mm512_permutex2var_epi8(c, codes, d))
        })
    }
}
