//! Products of a stored weight `[O, K]` with activations of `T` tokens.

use smallvec::SmallVec;

use super::aligned_buf::AlignedBuf;
use super::codes::{CodeTables, PackedCodes};
use super::columns::{InterleavedColumns, StridedColumn};
pub use super::digits::Activations;
use super::dispatch::{InstructionSet, with_lanes};
use super::dot::{Factors, MAX_COLUMNS, Rows, Stored, Sums, add_dots};
use super::layout::{MatrixLayout, SharedOutput};
use super::pool;
use super::simd::{CACHE_LINE, Kernel, Lanes};
use super::tiles::{self, DEPTH, Widen};
use super::weight::{Elements, Scales, StoredWeight};

#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
mod by_digits;

/// Activations of some tokens, and the destination of their product with a weight. For `x`, a row is a `k`; for `out`,
/// a row is an `o`.
pub struct TokenProduct<'a> {
    /// Activations.
    pub x: (&'a [f32], MatrixLayout),
    /// Number of tokens.
    pub tokens: usize,
    /// Results.
    pub out: (&'a mut [f32], MatrixLayout),
}

/// `out[o, t] = sum over k of weight[o, k] * x[k, t] + bias[o]`, with the layouts of `x` (a row is a `k`) and `out` (a
/// row is an `o`).
///
/// Different kernels multiply few tokens, many tokens, and bytes on processors with byte products (AVX-512 VNNI; AVX2
/// if activations are short; codes of few tokens with VBMI, of many tokens if activations are short; 64-bit Arm). Two
/// of them sum in f32, each in its own order, the others in integers. So a prompt in other chunks gives the same values
/// within f32's rounding, and the same bits only if integers are summed for all numbers of tokens, as for bytes. Up to
/// eight tokens each get the bits that they have alone. The scale of a whole row multiplies the finished sum.
///
/// # Panics
/// If a slice is too short for its layout, or two results overlap.
pub fn multiply(
    weight: &StoredWeight,
    activations: Activations,
    x: (&[f32], MatrixLayout),
    tokens: usize,
    bias: Option<&[f32]>,
    out: (&mut [f32], MatrixLayout),
) {
    multiply_each(weight, activations, bias, &mut [TokenProduct { x, tokens, out }]);
}

/// Computes several products with one weight, each with the bits that [`multiply`] gives it alone. Products of few
/// tokens share one pass over the weight.
///
/// # Panics
/// As [`multiply`].
pub fn multiply_each(
    weight: &StoredWeight,
    activations: Activations,
    bias: Option<&[f32]>,
    products: &mut [TokenProduct<'_>],
) {
    let (rows, columns) = (weight.rows(), weight.columns());
    assert!(bias.is_none_or(|bias| bias.len() >= rows), "the bias is shorter than the weight has rows");
    if rows == 0 {
        return;
    }
    for TokenProduct { x, tokens, out } in products.iter() {
        assert!(x.0.len() >= x.1.extent(columns, *tokens) && out.0.len() >= out.1.extent(rows, *tokens));
        let apart = (out.1.row > 0 || rows == 1) && out.1.is_injective(rows, *tokens);
        assert!(apart || *tokens == 0, "results share a place");
    }
    let mut products: Products<'_, '_> = products.iter_mut().collect();
    #[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
    by_digits::by_digits(weight, activations, bias, &mut products);
    let mut few = SmallVec::<[Column<'_>; MAX_COLUMNS]>::new();
    for TokenProduct { x, tokens, out } in products.iter_mut() {
        if *tokens > MAX_COLUMNS {
            by_tiles(weight, *x, *tokens, bias, (&mut *out.0, out.1));
            continue;
        }
        let (x, layout, out) = (x.0, x.1, SharedOutput::new(out.0, out.1));
        let column = |token| Column {
            x: StridedColumn { values: x.get(token * layout.column..).unwrap_or_default(), step: layout.row },
            out,
            token,
        };
        few.extend((0..*tokens).map(column));
    }
    if !few.is_empty() {
        by_dots(weight, &few, |row| bias.map_or(0.0, |bias| bias[row]));
    }
}

/// Products that are still to be computed.
type Products<'p, 'a> = SmallVec<[&'p mut TokenProduct<'a>; MAX_COLUMNS]>;

/// Activations of a token, and the destination of its results.
struct Column<'a> {
    x: StridedColumn<'a>,
    out: SharedOutput,
    token: usize,
}

/// Divides the rows of a weight among threads: calls `work` with the first row and the number of rows of each part.
fn for_each_part(rows: usize, columns: usize, work: impl Fn(usize, usize) + Sync) {
    /// Rows of a part are a multiple of this, so that most tiles are whole.
    const ROW_MULTIPLE: usize = 48;
    // enough work to amortize claiming a part, few enough parts to balance threads
    let share = (65_536 / columns.max(1)).clamp(8, 1024).max(rows / 256).next_multiple_of(ROW_MULTIPLE);
    pool::for_each(rows.div_ceil(share), |i| work(i * share, share.min(rows - i * share)));
}

/// Multiplies few tokens: dot products, with rows divided among threads. Each row is read once and multiplied with as
/// many columns at a time as registers allow.
fn by_dots(weight: &StoredWeight, all: &[Column<'_>], start: impl Fn(usize) -> f32 + Sync) {
    let (rows, columns) = (weight.rows(), weight.columns());
    // groups of equal size
    let together = all.len().div_ceil(all.len().div_ceil(MAX_COLUMNS));
    let part = match weight.elements() {
        Elements::Codes(_) => LOOKUP_LENGTH,
        _ => columns / weight.scales().blocks.max(1),
    };
    let mut groups = SmallVec::<[(InterleavedColumns<'_>, &[Column<'_>]); 1]>::new();
    for group in all.chunks(together) {
        let inputs: SmallVec<[StridedColumn<'_>; MAX_COLUMNS]> = group.iter().map(|column| column.x).collect();
        groups.push((InterleavedColumns::new(&inputs, columns, part), group));
    }
    for_each_part(rows, columns, |first, count| {
        let mut sums = AlignedBuf::new(count * together);
        for (inputs, group) in &groups {
            let sums = &mut sums.floats()[..count * group.len()];
            for (r, sums) in sums.chunks_exact_mut(group.len()).enumerate() {
                sums.fill(start(first + r));
            }
            match weight.elements() {
                Elements::F32(values) => dots(values, weight.scales(), columns, first, inputs, sums),
                Elements::F16(values) => dots(values, weight.scales(), columns, first, inputs, sums),
                Elements::Int8(values) => dots(values, weight.scales(), columns, first, inputs, sums),
                Elements::Codes(codes) => coded_dots(weight, codes, first, inputs, sums),
            }
            for (c, column) in group.iter().enumerate() {
                // SAFETY: `multiply_each` has checked that the output holds these rows of the token and that results
                // don't overlap; each part has different rows.
                unsafe {
                    let (at, layout) = column.out.at(first, column.token);
                    for (r, sum) in sums.iter().skip(c).step_by(group.len()).enumerate() {
                        *at.add(r * layout.row) = *sum;
                    }
                }
            }
        }
    });
}

/// Elements of a row that are looked up at a time.
const LOOKUP_LENGTH: usize = 2048;

/// Dot products of rows of codes, looked up a few rows at a time in the first-level cache.
fn coded_dots(
    weight: &StoredWeight,
    codes: &PackedCodes,
    first: usize,
    inputs: &InterleavedColumns<'_>,
    out: &mut [f32],
) {
    let Some(tables) = weight.tables() else { return };
    let (tokens, columns, scales) = (inputs.count(), weight.columns(), weight.scales());
    let of_token = if tokens == 1 { 1 } else { 4 };
    let mut near = AlignedBuf::new(of_token * LOOKUP_LENGTH);
    let near = near.floats();
    let widened = Coded { codes, tables, scales, size: (weight.rows(), columns) };
    for from in (0..columns).step_by(LOOKUP_LENGTH) {
        let part = inputs.part(from / LOOKUP_LENGTH);
        let length = part.length();
        for (i, out) in out.chunks_mut(of_token * tokens).enumerate() {
            let (row, count) = (first + i * of_token, out.len() / tokens);
            with_lanes(LookUp { of: &widened, row, from, length, out: &mut near[..count * length] });
            let factors = match scales {
                Scales { values, blocks: 1 } if values.len() > 1 => Factors { values: &values[row..], row: 1 },
                Scales { values, blocks: 1 } => Factors { values, row: 0 },
                _ => Factors { values: &[1.0], row: 0 },
            };
            let rows = Rows { values: &*near, stride: length, count };
            add_dots(rows, part, factors, Sums { values: out, row: tokens, column: 1 });
        }
    }
}

/// Rows of codes with scaled blocks; the single scale of a row is applied to the finished sum.
struct Coded<'a> {
    codes: &'a PackedCodes,
    tables: &'a CodeTables,
    scales: &'a Scales,
    size: (usize, usize),
}

// SAFETY: `StoredWeight::coded` has checked that there are codes and tables for all rows.
unsafe impl Widen for Coded<'_> {
    fn size(&self) -> (usize, usize) {
        self.size
    }

    #[inline(always)]
    unsafe fn widen<L: Lanes>(&self, row: usize, from: usize, count: usize, out: *mut f32) {
        let columns = self.size.1;
        let table = self.tables.of_row(row);
        let scales = if self.scales.blocks > 1 { self.scales.of_row(row) } else { &[1.0] };
        let block = (columns / scales.len()).max(1);
        let mut at = from;
        while at < from + count {
            let which = (at / block).min(scales.len() - 1);
            let end = if which + 1 == scales.len() { from + count } else { ((which + 1) * block).min(from + count) };
            // SAFETY: the row has these codes, and `out` has room, as promised.
            unsafe {
                let place = row * columns + at;
                self.codes.expand_at::<L>(place, &table, scales[which], end - at, out.add(at - from));
            }
            at = end;
        }
    }

    #[inline(always)]
    unsafe fn prefetch<L: Lanes>(&self, row: usize, from: usize) {
        let (bits, bytes) = (self.codes.bits(), self.codes.bytes().as_ptr());
        let place = bytes.wrapping_add((row * self.size.1 + from) * bits / 8).cast::<i8>();
        for line in 0..(DEPTH * bits / 8).div_ceil(CACHE_LINE) {
            // SAFETY: as promised; the address need not be one that can be read.
            unsafe { L::prefetch(place.wrapping_add(line * CACHE_LINE)) };
        }
    }
}

/// Lookup of parts of consecutive rows.
struct LookUp<'a> {
    of: &'a Coded<'a>,
    row: usize,
    from: usize,
    length: usize,
    out: &'a mut [f32],
}

impl Kernel for LookUp<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let (rows, columns) = self.of.size();
        let count = self.out.len() / self.length.max(1);
        assert!(self.row + count <= rows && self.from + self.length <= columns);
        for (i, out) in self.out.chunks_exact_mut(self.length.max(1)).enumerate() {
            // SAFETY: as promised; the rows have these elements.
            unsafe { self.of.widen::<L>(self.row + i, self.from, self.length, out.as_mut_ptr()) };
        }
    }
}

fn dots<S: Stored>(
    values: &[S],
    scales: &Scales,
    columns: usize,
    first: usize,
    inputs: &InterleavedColumns<'_>,
    out: &mut [f32],
) {
    let block = (columns / scales.blocks.max(1)).max(1);
    let (tokens, count) = (inputs.count(), out.len() / inputs.count());
    for (number, start) in (0..columns).step_by(block).enumerate() {
        let factors = match scales.values.as_slice() {
            all @ [_] => Factors { values: all, row: 0 },
            values => {
                let which = number.min(scales.blocks - 1);
                Factors { values: &values[first * scales.blocks + which..], row: scales.blocks }
            }
        };
        let rows = Rows { values: &values[first * columns + start..], stride: columns, count };
        add_dots(rows, inputs.part(number), factors, Sums { values: out, row: tokens, column: 1 });
    }
}

/// Rows of a weight with scaled blocks; the single scale of a row is applied to the finished sum.
struct Scaled<'a, S> {
    values: &'a [S],
    rows: usize,
    columns: usize,
    scales: &'a Scales,
}

impl<'a, S> Scaled<'a, S> {
    /// # Panics
    /// If the slice is too short.
    fn new(values: &'a [S], (rows, columns): (usize, usize), scales: &'a Scales) -> Self {
        assert!(values.len() >= rows.saturating_mul(columns), "the weight has fewer elements than its shape says");
        Scaled { values, rows, columns, scales }
    }
}

// SAFETY: `new` has checked that the slice holds so many rows.
unsafe impl<S: Stored> Widen for Scaled<'_, S> {
    fn size(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    #[inline(always)]
    unsafe fn widen<L: Lanes>(&self, row: usize, from: usize, count: usize, out: *mut f32) {
        let scales = if self.scales.blocks > 1 { self.scales.of_row(row) } else { &[1.0] };
        let block = (self.columns / scales.len()).max(1);
        let mut at = from;
        while at < from + count {
            let which = (at / block).min(scales.len() - 1);
            let end = if which + 1 == scales.len() { from + count } else { ((which + 1) * block).min(from + count) };
            // SAFETY: the row has these elements, and `out` has room, as promised.
            unsafe {
                let row = self.values.as_ptr().add(row * self.columns + at);
                widen::<S, L>(row, end - at, scales[which], out.add(at - from));
            }
            at = end;
        }
    }

    #[inline(always)]
    unsafe fn prefetch<L: Lanes>(&self, row: usize, from: usize) {
        let place = self.values.as_ptr().wrapping_add(row * self.columns + from).cast::<i8>();
        for line in 0..(DEPTH * size_of::<S>()).div_ceil(CACHE_LINE) {
            // SAFETY: as promised; the address need not be one that can be read.
            unsafe { L::prefetch(place.wrapping_add(line * CACHE_LINE)) };
        }
    }
}

/// `out = values * scale`.
///
/// # Safety
/// The processor has the instruction set of `L`; there are `count` values and as much room.
#[inline(always)]
unsafe fn widen<S: Stored, L: Lanes>(values: *const S, count: usize, scale: f32, out: *mut f32) {
    let mut k = 0;
    // SAFETY: as promised.
    unsafe {
        let zero = L::splat(0.0);
        let factor = L::splat(scale);
        while k + L::COUNT <= count {
            S::lanes::<L>(values.add(k)).mul_add(factor, zero).store(out.add(k));
            k += L::COUNT;
        }
        while k < count {
            *out.add(k) = (*values.add(k)).value() * scale;
            k += 1;
        }
    }
}

/// Multiplies many tokens, in tiles of rows and tokens.
fn by_tiles(
    weight: &StoredWeight,
    x: (&[f32], MatrixLayout),
    tokens: usize,
    bias: Option<&[f32]>,
    out: (&mut [f32], MatrixLayout),
) {
    let (size, scales) = ((weight.rows(), weight.columns()), weight.scales());
    // scale and bias of a row's sum
    let finish = |row: usize| {
        let scale = if scales.blocks > 1 { 1.0 } else { scales.of_row(row)[0] };
        (scale, bias.map_or(0.0, |bias| bias[row]))
    };
    let sizes = (size.0, size.1, tokens);
    match weight.elements() {
        Elements::F32(values) => {
            tiles::multiply(InstructionSet::best(), sizes, &Scaled::new(values, size, scales), x, finish, out)
        }
        Elements::F16(values) => {
            tiles::multiply(InstructionSet::best(), sizes, &Scaled::new(values, size, scales), x, finish, out)
        }
        Elements::Int8(values) => {
            tiles::multiply(InstructionSet::best(), sizes, &Scaled::new(values, size, scales), x, finish, out)
        }
        Elements::Codes(codes) => {
            let Some(tables) = weight.tables() else { return };
            tiles::multiply(InstructionSet::best(), sizes, &Coded { codes, tables, scales, size }, x, finish, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use half::f16;

    use super::super::dot::tests::noise;
    use super::*;

    /// Kinds of activations, and the maximum error of a product of small numbers.
    const ACTIVATIONS: [(Activations, f64); 3] =
        [(Activations::F32, 1e-4), (Activations::I16, 2e-3), (Activations::I8, 0.3)];

    #[test]
    fn every_store_layout_and_number_of_tokens_gives_the_same_product() {
        let (rows, columns) = (131, 24);
        let values = noise(rows * columns, 1);
        let bias = noise(rows, 2);
        let bytes: Vec<i8> = values.iter().map(|v| (v * 127.0) as i8).collect();
        let row_scales = Scales { values: (0..rows).map(|r| 0.01 + r as f32 * 1e-4).collect(), blocks: 1 };
        let block_scales = Scales { values: (0..rows * 3).map(|r| 0.01 + r as f32 * 1e-4).collect(), blocks: 3 };
        let coded = |bits: usize, scales: Scales| {
            let packed: Vec<u8> = bytes.iter().map(|v| *v as u8).take(rows * columns * bits / 8).collect();
            let table = noise((1 << bits) * 2, 5);
            let tables = CodeTables::new(bits, 1 << bits, &table, rows.div_ceil(2));
            let codes = Arc::new(Elements::Codes(PackedCodes::new(bits, packed.into())));
            StoredWeight::coded(vec![rows, columns], codes, tables, scales)
        };
        let by_row = Scales { values: (0..rows).map(|r| 0.5 + r as f32 * 1e-3).collect(), blocks: 1 };
        let by_block = Scales { values: (0..rows * 3).map(|r| 0.5 + r as f32 * 1e-3).collect(), blocks: 3 };
        let weights = [
            coded(4, by_block),
            coded(6, by_row),
            coded(8, Scales { values: vec![0.5], blocks: 1 }),
            coded(3, Scales { values: vec![0.5], blocks: 1 }),
            StoredWeight::plain(vec![rows, columns], Arc::new(Elements::F32(values.clone().into()))),
            StoredWeight::plain(
                vec![rows, columns],
                Arc::new(Elements::F16(values.iter().map(|v| f16::from_f32(*v)).collect())),
            ),
            StoredWeight::scaled(vec![rows, columns], Arc::new(Elements::Int8(bytes.clone().into())), row_scales),
            StoredWeight::scaled(vec![rows, columns], Arc::new(Elements::Int8(bytes.into())), block_scales),
        ];
        for weight in &weights {
            let mut dense = vec![0.0; rows * columns];
            dense.chunks_mut(columns).enumerate().for_each(|(row, out)| weight.expand_row(row, out));
            for (tokens, by_token) in [1, 2, 3, 5, 8, 9, 40, 100].into_iter().flat_map(|t| [(t, false), (t, true)]) {
                let x = noise(columns * tokens, 3);
                for (activations, limit) in ACTIVATIONS {
                    let layout = |size: usize| match by_token {
                        true => MatrixLayout { row: 1, column: size },
                        false => MatrixLayout { row: tokens, column: 1 },
                    };
                    let (x_layout, out_layout) = (layout(columns), layout(rows));
                    let mut out = vec![f32::NAN; rows * tokens];
                    multiply(weight, activations, (&x, x_layout), tokens, Some(&bias), (&mut out, out_layout));
                    for o in 0..rows {
                        for t in 0..tokens {
                            let exact: f64 = (0..columns)
                                .map(|k| f64::from(dense[o * columns + k] * x[k * x_layout.row + t * x_layout.column]))
                                .sum::<f64>()
                                + f64::from(bias[o]);
                            let found = out[o * out_layout.row + t * out_layout.column];
                            assert!((f64::from(found) - exact).abs() < limit, "{found} {exact}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_without_elements_give_the_bias() {
        let weight = StoredWeight::scaled(
            vec![3, 0],
            Arc::new(Elements::Int8(Vec::new().into())),
            Scales { values: vec![1.0], blocks: 1 },
        );
        for (activations, _) in ACTIVATIONS {
            for tokens in [1, 2, 9, 70] {
                let layout = MatrixLayout { row: tokens, column: 1 };
                let mut out = vec![f32::NAN; 3 * tokens];
                multiply(&weight, activations, (&[], layout), tokens, Some(&[1.0, 2.0, 3.0]), (&mut out, layout));
                assert!(out.chunks(tokens).zip([1.0, 2.0, 3.0]).all(|(row, bias)| row.iter().all(|v| *v == bias)));
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn tokens_in_byte_products_have_the_bits_that_they_have_alone() {
        let multiplies = |activations| crate::dotprod::Instruction::best(activations).is_some();
        if !multiplies(Activations::I16) {
            return anec_base::skipped("this processor has neither AVX-512 VNNI nor AVX2 alone");
        }
        let (rows, columns, tokens) = (70, 2200, 75);
        let bytes: Vec<i8> = noise(rows * columns, 1).iter().map(|v| (v * 127.0) as i8).collect();
        let scales = || Scales { values: noise(rows, 2), blocks: 1 };
        let coded = |bits: usize, numbers: Vec<f32>| {
            let packed: Vec<u8> = bytes.iter().map(|v| v.cast_unsigned()).take(rows * columns * bits / 8).collect();
            let codes = Arc::new(Elements::Codes(PackedCodes::new(bits, packed.into())));
            StoredWeight::coded(vec![rows, columns], codes, CodeTables::new(bits, 1 << bits, &numbers, rows), scales())
        };
        let integers = (0..16).map(|code| code as f32 - 7.0).collect();
        let coded = [coded(8, noise(256, 5)), coded(6, noise(64, 6)), coded(4, noise(16, 7)), coded(4, integers)];
        let plain = StoredWeight::scaled(vec![rows, columns], Arc::new(Elements::Int8(bytes.into())), scales());
        let mut x = noise(columns * tokens, 3);
        // tokens with a few much larger elements need more digits
        x.iter_mut().step_by(4567).for_each(|v| *v *= 1000.0);
        let by_token = |size: usize| MatrixLayout { row: 1, column: size };
        let scattered: Vec<f32> = (0..columns * tokens).map(|i| x[i % tokens * columns + i / tokens]).collect();
        let mut results = Vec::new();
        let cases = [Activations::F32, Activations::I16, Activations::I8].map(|activations| (&plain, activations));
        // f32 products of codes are faster for many tokens, unless activations are short
        let has_tables = crate::dispatch::InstructionSet::has(crate::dispatch::Set::Avx512Vbmi);
        let of_codes = coded.iter().filter(|_| has_tables).map(|weight| (weight, Activations::I16));
        let cases = cases.into_iter().filter(|(_, activations)| multiplies(*activations));
        for (weight, activations) in cases.chain(of_codes) {
            let mut together = vec![f32::NAN; rows * tokens];
            multiply(weight, activations, (&x, by_token(columns)), tokens, None, (&mut together, by_token(rows)));
            for (x, together) in x.chunks_exact(columns).zip(together.chunks_exact(rows)) {
                let mut alone = vec![f32::NAN; rows];
                multiply(weight, activations, (x, by_token(columns)), 1, None, (&mut alone, by_token(rows)));
                assert_eq!(alone, together);
            }
            let mut other = vec![f32::NAN; rows * tokens];
            let by_element = MatrixLayout { row: tokens, column: 1 };
            multiply(weight, activations, (&scattered, by_element), tokens, None, (&mut other, by_token(rows)));
            assert_eq!(other, together);
            results.push(together);
        }
        if multiplies(Activations::F32) {
            assert_ne!(results[0], results[1], "activations of 16 bits are others");
            assert_ne!(results[1], results[2], "and so are those of 8 bits");
        }
    }

    #[test]
    fn products_that_share_a_pass_have_the_bits_that_they_have_alone() {
        let (rows, columns) = (517, 200);
        let bytes: Vec<i8> = noise(rows * columns, 1).iter().map(|v| (v * 127.0) as i8).collect();
        let codes: Vec<u8> = bytes.iter().map(|v| *v as u8).take(rows * columns / 2).collect();
        let scales = |blocks: usize| Scales { values: noise(rows * blocks, 4), blocks };
        let tables = CodeTables::new(4, 16, &noise(16, 5), rows);
        let coded = Arc::new(Elements::Codes(PackedCodes::new(4, codes.into())));
        let weights = [
            StoredWeight::scaled(vec![rows, columns], Arc::new(Elements::Int8(bytes.clone().into())), scales(1)),
            StoredWeight::scaled(vec![rows, columns], Arc::new(Elements::Int8(bytes.into())), scales(5)),
            StoredWeight::coded(vec![rows, columns], coded, tables, scales(1)),
        ];
        let bias = noise(rows, 2);
        // tokens of each product, and whether they are stored by token
        let forms =
            [(1, false), (1, true), (9, false), (3, false), (8, true), (70, false), (0, true), (1, false), (2, true)];
        let layout = |(tokens, by_token): (usize, bool), size: usize| match by_token {
            true => MatrixLayout { row: 1, column: size },
            false => MatrixLayout { row: tokens, column: 1 },
        };
        for weight in &weights {
            let inputs: Vec<Vec<f32>> =
                forms.iter().enumerate().map(|(i, form)| noise(columns * form.0, 10 + i as u32)).collect();
            for (activations, _) in ACTIVATIONS {
                let mut together: Vec<Vec<f32>> = forms.iter().map(|form| vec![f32::NAN; rows * form.0]).collect();
                let mut alone = together.clone();
                let given = forms.iter().zip(&inputs).zip(&mut together);
                let product = |((form, x), out)| -> TokenProduct<'_> {
                    let (form, x, out): (&(usize, bool), &Vec<f32>, &mut Vec<f32>) = (form, x, out);
                    TokenProduct { x: (x, layout(*form, columns)), tokens: form.0, out: (out, layout(*form, rows)) }
                };
                multiply_each(weight, activations, Some(&bias), &mut given.map(product).collect::<Vec<_>>());
                for ((form, x), out) in forms.iter().zip(&inputs).zip(&mut alone) {
                    multiply(
                        weight,
                        activations,
                        (x, layout(*form, columns)),
                        form.0,
                        Some(&bias),
                        (out, layout(*form, rows)),
                    );
                }
                assert_eq!(together, alone);
            }
        }
    }
}
