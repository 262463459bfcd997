//! Products of a stored weight `[O, K]` with activations of `T` tokens.

use super::aligned_buf::AlignedBuf;
use super::codes::{CodeTables, PackedCodes};
use super::dot::{Factors, MOST_COLUMNS, Rows, Stored, Sums, add_dots};
use super::layout::MatrixLayout;
use super::pool;
use super::simd::{CACHE_LINE, Dispatch, Kernel, Lanes, Widest};
use super::tiles::{self, DEPTH, Widen};
use super::weight::{Elements, Scales, StoredWeight};

/// `out[o, t] = sum over k of weight[o, k] * x[k, t] + bias[o]`: `x` and `out` lie as their layouts say (for `x`, a row
/// is a `k`; for `out`, a row is an `o`).
///
/// Few tokens, many, and many on a processor with AMX are multiplied by different kernels. Two sum in f32, each in an
/// order of its own, the third in integers: a prompt that is read in other chunks gives the same values within f32's
/// rounding, not the same bits. A scale that a whole row has multiplies the finished sum.
///
/// # Panics
/// If a slice is too short for its layout.
pub fn multiply(
    weight: &StoredWeight,
    (x, x_layout): (&[f32], MatrixLayout),
    tokens: usize,
    bias: Option<&[f32]>,
    (out, out_layout): (&mut [f32], MatrixLayout),
) {
    let (rows, columns) = (weight.rows(), weight.columns());
    assert!(x.len() >= x_layout.extent(columns, tokens) && out.len() >= out_layout.extent(rows, tokens));
    if rows == 0 || tokens == 0 {
        return;
    }
    if tokens > MOST_COLUMNS {
        by_tiles(weight, (x, x_layout), tokens, bias, (out, out_layout));
        return;
    }
    // the columns of x, each in one piece
    let mut gathered = AlignedBuf::new(if x_layout.row == 1 { 0 } else { tokens * columns });
    let (x, step) = if x_layout.row == 1 {
        (x, x_layout.column)
    } else {
        let column = |t: usize| (0..columns).map(move |k| x[k * x_layout.row + t * x_layout.column]);
        gathered.floats().iter_mut().zip((0..tokens).flat_map(column)).for_each(|(place, value)| *place = value);
        (&*gathered.floats(), columns)
    };
    let mut inputs: [&[f32]; MOST_COLUMNS] = [&[]; MOST_COLUMNS];
    inputs.iter_mut().enumerate().take(tokens).for_each(|(t, input)| *input = &x[t * step..][..columns]);
    let inputs = &inputs[..tokens];
    let start = |row: usize| bias.map_or(0.0, |bias| bias[row]);
    if out_layout.column == 1 && out_layout.row == tokens || tokens == 1 && out_layout.row == 1 {
        return by_dots(weight, inputs, start, &mut out[..rows * tokens]);
    }
    let mut product = AlignedBuf::new(rows * tokens);
    by_dots(weight, inputs, start, product.floats());
    for (row, values) in product.floats().chunks_exact(tokens).enumerate() {
        for (token, value) in values.iter().enumerate() {
            out[row * out_layout.row + token * out_layout.column] = *value;
        }
    }
}

/// Few tokens: dot products, rows divided among threads.
fn by_dots(weight: &StoredWeight, inputs: &[&[f32]], start: impl Fn(usize) -> f32 + Sync, out: &mut [f32]) {
    let (tokens, columns) = (inputs.len(), weight.columns());
    // enough work for a part to be worth fetching, and no more parts than even out what threads are given
    let share = (65_536 / columns.max(1)).clamp(8, 1024).max(weight.rows() / 256);
    pool::for_each_chunk(out, share * tokens, |i, out| {
        let first = i * share;
        for (r, out) in out.chunks_exact_mut(tokens).enumerate() {
            out.fill(start(first + r));
        }
        match weight.elements() {
            Elements::F32(values) => dots(values, weight.scales(), columns, first, inputs, out),
            Elements::F16(values) => dots(values, weight.scales(), columns, first, inputs, out),
            Elements::Int8(values) => dots(values, weight.scales(), columns, first, inputs, out),
            Elements::Codes(codes) => coded_dots(weight, codes, first, inputs, out),
        }
    });
}

/// Elements of a row that are looked up at a time.
const LOOKED_UP: usize = 2048;

/// Dot products of rows that are looked up, a few rows at a time, in the first-level cache.
fn coded_dots(weight: &StoredWeight, codes: &PackedCodes, first: usize, inputs: &[&[f32]], out: &mut [f32]) {
    let Some(tables) = weight.tables() else { return };
    let (tokens, columns, scales) = (inputs.len(), weight.columns(), weight.scales());
    let of_token = if tokens == 1 { 1 } else { 4 };
    let mut near = AlignedBuf::new(of_token * LOOKED_UP);
    let near = near.floats();
    let widened = Coded { codes, tables, scales, size: (weight.rows(), columns) };
    for from in (0..columns).step_by(LOOKED_UP) {
        let length = LOOKED_UP.min(columns - from);
        let mut parts: [&[f32]; MOST_COLUMNS] = [&[]; MOST_COLUMNS];
        parts.iter_mut().zip(inputs).for_each(|(part, input)| *part = &input[from..from + length]);
        for (i, out) in out.chunks_mut(of_token * tokens).enumerate() {
            let (row, count) = (first + i * of_token, out.len() / tokens);
            Widest.run(LookUp { of: &widened, row, from, length, out: &mut near[..count * length] });
            let factors = match scales {
                Scales { values, blocks: 1 } if values.len() > 1 => Factors { values: &values[row..], row: 1 },
                Scales { values, blocks: 1 } => Factors { values, row: 0 },
                _ => Factors { values: &[1.0], row: 0 },
            };
            let rows = Rows { values: &*near, stride: length, count };
            add_dots(rows, &parts[..tokens], factors, Sums { values: out, row: tokens, column: 1 });
        }
    }
}

/// Rows that are looked up, each block times its scale; a row's only scale is left for the finished sum.
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

/// Parts of rows, looked up one after another.
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

/// Floats of all columns together that are multiplied with every row before the next are: half of a first-level cache.
const NEAR: usize = 4096;

fn dots<S: Stored>(values: &[S], scales: &Scales, columns: usize, first: usize, inputs: &[&[f32]], out: &mut [f32]) {
    let block = (columns / scales.blocks.max(1)).max(1);
    let count = out.len() / inputs.len();
    let piece = if inputs.len() == 1 { columns } else { (NEAR / inputs.len()).max(1) };
    for start in (0..columns).step_by(block) {
        let end = (start + block).min(columns);
        let factors = match scales.values.as_slice() {
            all @ [_] => Factors { values: all, row: 0 },
            values => {
                let which = (start / block).min(scales.blocks - 1);
                Factors { values: &values[first * scales.blocks + which..], row: scales.blocks }
            }
        };
        for from in (start..end).step_by(piece.max(1)) {
            let range = from..(from + piece).min(end);
            let mut parts: [&[f32]; MOST_COLUMNS] = [&[]; MOST_COLUMNS];
            for (part, input) in parts.iter_mut().zip(inputs) {
                *part = &input[range.clone()];
            }
            let rows = Rows { values: &values[first * columns + range.start..], stride: columns, count };
            let sums = Sums { values: out, row: inputs.len(), column: 1 };
            add_dots(rows, &parts[..inputs.len()], factors, sums);
        }
    }
}

/// Rows of a weight, each block times its scale; a row's only scale is left for the finished sum.
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
/// The processor has the instruction set of `L`; there are `count` values and there is room for them.
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

/// Many tokens: tiles of rows and tokens.
fn by_tiles(
    weight: &StoredWeight,
    x: (&[f32], MatrixLayout),
    tokens: usize,
    bias: Option<&[f32]>,
    out: (&mut [f32], MatrixLayout),
) {
    /// What a row's sum is multiplied by, and what is added to it.
    fn finish(scales: &Scales, bias: Option<&[f32]>, row: usize) -> (f32, f32) {
        let scale = if scales.blocks > 1 { 1.0 } else { scales.of_row(row)[0] };
        (scale, bias.map_or(0.0, |bias| bias[row]))
    }

    fn go<S: Stored>(
        (values, weight): (&[S], &StoredWeight),
        x: (&[f32], MatrixLayout),
        tokens: usize,
        bias: Option<&[f32]>,
        out: (&mut [f32], MatrixLayout),
    ) {
        let (rows, columns, scales) = (weight.rows(), weight.columns(), weight.scales());
        let stored = Scaled::new(values, (rows, columns), scales);
        let finish = |row: usize| finish(scales, bias, row);
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if let Some(bytes) = S::bytes(values)
            && scales.blocks == 1
            && super::amx::is_available()
            && super::amx::multiply((rows, columns, tokens), bytes, x, finish, (&mut *out.0, out.1))
        {
            return;
        }
        tiles::multiply(Widest, (rows, columns, tokens), &stored, x, finish, out);
    }
    match weight.elements() {
        Elements::F32(values) => go((values, weight), x, tokens, bias, out),
        Elements::F16(values) => go((values, weight), x, tokens, bias, out),
        Elements::Int8(values) => go((values, weight), x, tokens, bias, out),
        Elements::Codes(codes) => {
            let Some(tables) = weight.tables() else { return };
            let (size, scales) = ((weight.rows(), weight.columns()), weight.scales());
            let rows = Coded { codes, tables, scales, size };
            let finish = |row: usize| finish(scales, bias, row);
            tiles::multiply(Widest, (size.0, size.1, tokens), &rows, x, finish, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use half::f16;

    use super::super::dot::tests::noise;
    use super::*;

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
            for tokens in [1, 2, 3, 5, 8, 9, 40] {
                let x = noise(columns * tokens, 3);
                for by_token in [false, true] {
                    let layout = |size: usize| match by_token {
                        true => MatrixLayout { row: 1, column: size },
                        false => MatrixLayout { row: tokens, column: 1 },
                    };
                    let (x_layout, out_layout) = (layout(columns), layout(rows));
                    let mut out = vec![f32::NAN; rows * tokens];
                    multiply(weight, (&x, x_layout), tokens, Some(&bias), (&mut out, out_layout));
                    for o in 0..rows {
                        for t in 0..tokens {
                            let exact: f64 = (0..columns)
                                .map(|k| f64::from(dense[o * columns + k] * x[k * x_layout.row + t * x_layout.column]))
                                .sum::<f64>()
                                + f64::from(bias[o]);
                            let found = out[o * out_layout.row + t * out_layout.column];
                            assert!((f64::from(found) - exact).abs() < 1e-4, "{found} {exact}");
                        }
                    }
                }
            }
        }
    }
}
