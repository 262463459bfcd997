//! Sums of products as published for the Neural Engine's multiply-accumulate units.
//!
//! Factors are fp16. Products are summed in tiles of four neighbours, one after the other, in units of the twelfth bit
//! of the larger operand of each addition. Tiles are summed in f32. A sum that reaches 32768 in magnitude becomes
//! infinite and stays so. The bias is added last. The published probes give the measured results: 4096 and 1024 ones
//! give 5116; sixteen triples of m, -m and 1 keep sixteen ones up to m = 4090 and four from 4096 on.

use std::array::from_fn;
use std::cell::RefCell;
use std::ops::Range;

use smallvec::SmallVec;

use super::{EngineEffect, EngineEffects};
use crate::arithmetic::ProductArithmetic;
use crate::weight::LoadedWeight;
use anec_kernels::dispatch::{Vectorize, vectorized};
use anec_kernels::layout::MatrixLayout;
use anec_kernels::pool;
use anec_kernels::round::{EXPONENT, rounded_to_f16, rounding_shift};
use anec_kernels::weight::Elements;

/// Magnitude at which sums become infinite.
const LIMIT: f32 = 32768.0;
/// Products that are summed in reduced precision.
const TILE: usize = 4;
/// Smallest normal fp16.
const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;
/// Minimum multiplications for which threads are used.
const MIN_PARALLEL_WORK: usize = 1 << 14;

/// `out[o, t] = sum over k of weight[o, k] x[k, t] + bias[o]`; without effects, as `anec_kernels::product::multiply`.
pub(crate) fn multiply(
    arithmetic: ProductArithmetic,
    weight: &LoadedWeight,
    (x, x_layout): (&[f32], MatrixLayout),
    tokens: usize,
    bias: Option<&[f32]>,
    (out, out_layout): (&mut [f32], MatrixLayout),
) {
    let ProductArithmetic { activations, effects } = arithmetic;
    if !effects.has_sums() {
        return anec_kernels::product::multiply(weight, activations, (x, x_layout), tokens, bias, (out, out_layout));
    }
    let (rows, columns) = (weight.rows(), weight.columns());
    let mut product = vec![0.0; rows * tokens];
    let palette = matches!(weight.elements(), Elements::Codes(_)) && effects.has(EngineEffect::PaletteBeforeScale);
    // unprepared factors of a row; returns the factor of its sums
    let expand = |row: usize, factors: &mut [f32]| {
        weight.expand_row(row, factors);
        let scale = match weight.scales().of_row(row) {
            [scale] if palette && *scale != 0.0 => *scale,
            _ => return 1.0,
        };
        factors.iter_mut().for_each(|factor| *factor /= scale);
        scale
    };
    let finish = |row: usize, scale: f32, sum: &mut f32| *sum = *sum * scale + bias.map_or(0.0, |bias| bias[row]);
    let work = rows * tokens * columns;
    if tokens < LANES {
        // with few tokens, lanes hold rows
        let tokens_of_x: Vec<Vec<f32>> = (0..tokens).map(|t| vector(effects, (x, x_layout), t, columns)).collect();
        by_parts(&mut product, tokens * LANES, work, |part, product| {
            thread_local!(static SCRATCH: RefCell<(Vec<f32>, Groups)> = RefCell::default());
            SCRATCH.with_borrow_mut(|(factors, group)| {
                let (first, count) = (part * LANES, product.len() / tokens);
                factors.resize(count * columns, 0.0);
                let own = (0..count).map(|i| expand(first + i, &mut factors[i * columns..][..columns]));
                let scales: SmallVec<[f32; LANES]> = own.collect();
                group.gather(effects, (count, columns), (factors, MatrixLayout { row: 1, column: columns }));
                let mut sums = [0.0; LANES];
                for (token, x) in tokens_of_x.iter().enumerate() {
                    group.dots(effects, x, &mut sums[..count]);
                    for (i, (scale, sum)) in scales.iter().zip(&mut sums).enumerate() {
                        finish(first + i, *scale, sum);
                        product[i * tokens + token] = *sum;
                    }
                }
            });
        });
    } else {
        let mut groups = Groups::default();
        groups.gather(effects, (tokens, columns), (x, x_layout));
        by_parts(&mut product, tokens, work, |row, product| {
            let mut factors = vec![0.0; columns];
            let scale = expand(row, &mut factors);
            prepare(effects, &mut factors);
            groups.dots(effects, &factors, product);
            product.iter_mut().for_each(|sum| finish(row, scale, sum));
        });
    }
    for (row, sums) in product.chunks_exact(tokens.max(1)).enumerate() {
        for (token, sum) in sums.iter().enumerate() {
            out[row * out_layout.row + token * out_layout.column] = *sum;
        }
    }
}

/// Product of `[m, k]` and `[k, n]`, row-major; without effects, as `anec_kernels::matrix::product`.
pub(crate) fn product(
    effects: EngineEffects,
    (m, k, n): (usize, usize, usize),
    (a, a_layout): (&[f32], MatrixLayout),
    (b, b_layout): (&[f32], MatrixLayout),
    out: &mut [f32],
) {
    if !effects.has_sums() {
        return anec_kernels::matrix::product((m, k, n), (a, a_layout), (b, b_layout), out);
    }
    if k == 0 {
        return out.fill(0.0);
    }
    let mut columns = Groups::default();
    columns.gather(effects, (n, k), (b, b_layout));
    let a_layout = MatrixLayout { row: a_layout.column, column: a_layout.row };
    for (row, out) in out.chunks_exact_mut(n.max(1)).take(m).enumerate() {
        columns.dots(effects, &vector(effects, (a, a_layout), row, k), out);
    }
}

/// Computes parts of `length` sums each (the last may be shorter), in parallel if there is enough work.
fn by_parts(out: &mut [f32], length: usize, work: usize, compute: impl Fn(usize, &mut [f32]) + Sync) {
    if length == 0 {
        return;
    }
    if work > MIN_PARALLEL_WORK {
        pool::for_each_chunk(out, length, |part, out| compute(part, out));
    } else {
        out.chunks_mut(length).enumerate().for_each(|(part, out)| compute(part, out));
    }
}

/// Column of a matrix, prepared for multiplication.
fn vector(effects: EngineEffects, (values, layout): (&[f32], MatrixLayout), column: usize, length: usize) -> Vec<f32> {
    let mut vector: Vec<f32> = (0..length).map(|k| values[k * layout.row + column * layout.column]).collect();
    prepare(effects, &mut vector);
    vector
}

/// Converts factors to the values that reach the multipliers.
fn prepare(effects: EngineEffects, factors: &mut [f32]) {
    vectorized(Preparation { effects, factors });
}

struct Preparation<'a> {
    effects: EngineEffects,
    factors: &'a mut [f32],
}

impl Vectorize for Preparation<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        if self.effects.has(EngineEffect::WeightsRounded) {
            self.factors.iter_mut().for_each(|factor| *factor = rounded_to_f16(*factor));
        }
        if self.effects.has(EngineEffect::SubnormalsFlushed) {
            let flushed = |factor: f32| if factor.abs() < SMALLEST_NORMAL { 0.0 } else { factor };
            self.factors.iter_mut().for_each(|factor| *factor = flushed(*factor));
        }
    }
}

/// Vectors in groups that are summed together. Each vector has a lane of its own and one product follows the other, so
/// a sum has the bits that it has alone.
#[derive(Default)]
struct Groups {
    /// Elements of each vector.
    length: usize,
    /// For each group, the first elements of its vectors, then the second ones, and so on; zeros in unused lanes.
    lanes: Vec<[f32; LANES]>,
}

/// Vectors in a group.
const LANES: usize = 16;

impl Groups {
    /// Packs the columns of a matrix, prepared for multiplication.
    fn gather(&mut self, effects: EngineEffects, (count, length): (usize, usize), source: (&[f32], MatrixLayout)) {
        self.length = length;
        self.lanes.resize(count.div_ceil(LANES) * length, [0.0; LANES]);
        for (group, lanes) in self.lanes.chunks_mut(length.max(1)).enumerate() {
            let first = group * LANES;
            vectorized(Gathering { effects, columns: first..count.min(first + LANES), source, lanes });
        }
    }

    /// Dot products of one vector with each packed vector.
    fn dots(&self, effects: EngineEffects, factors: &[f32], sums: &mut [f32]) {
        let by_tiles = effects.has(EngineEffect::LaneTiles);
        for (lanes, sums) in self.lanes.chunks(self.length.max(1)).zip(sums.chunks_mut(LANES)) {
            let (found, peaks) = match by_tiles {
                true => vectorized(TileWork::<true> { factors, lanes }),
                false => vectorized(TileWork::<false> { factors, lanes }),
            };
            for (lane, sum) in sums.iter_mut().enumerate() {
                *sum = finished(effects, (found[lane], peaks[lane]), || {
                    let vector: Vec<f32> = lanes.iter().map(|lanes| lanes[lane]).collect();
                    saturated(by_tiles, factors, &vector)
                });
            }
        }
    }
}

/// Packing of columns as lanes.
struct Gathering<'a> {
    effects: EngineEffects,
    columns: Range<usize>,
    source: (&'a [f32], MatrixLayout),
    lanes: &'a mut [[f32; LANES]],
}

impl Vectorize for Gathering<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        /// Elements that are packed from each vector at a time, so that written memory stays cached.
        const BLOCK: usize = 8;
        let Gathering { effects, columns, source: (values, layout), lanes } = self;
        for (block, lanes) in lanes.chunks_mut(BLOCK).enumerate() {
            let first = &values[block * BLOCK * layout.row..];
            if let (Ok(lanes), 1) = (<&mut [_; BLOCK]>::try_from(&mut *lanes), layout.row) {
                let mut parts = [[0.0; BLOCK]; LANES];
                for (column, part) in columns.clone().zip(&mut parts) {
                    part.copy_from_slice(&first[column * layout.column..][..BLOCK]);
                }
                *lanes = from_fn(|i| from_fn(|lane| parts[lane][i]));
            } else {
                for (i, lanes) in lanes.iter_mut().enumerate() {
                    *lanes = [0.0; LANES];
                    let of = |column: usize| first[i * layout.row + column * layout.column];
                    columns.clone().zip(lanes).for_each(|(column, lane)| *lane = of(column));
                }
            }
            Preparation { effects, factors: lanes.as_flattened_mut() }.run();
        }
    }
}

struct TileWork<'a, const ALIGNED: bool> {
    factors: &'a [f32],
    lanes: &'a [[f32; LANES]],
}

impl<const ALIGNED: bool> Vectorize for TileWork<'_, ALIGNED> {
    type Output = ([f32; LANES], [f32; LANES]);

    #[inline(always)]
    fn run(self) -> Self::Output {
        let (mut sums, mut peaks) = ([0f32; LANES], [0f32; LANES]);
        let (whole, rest) = self.factors.as_chunks::<TILE>();
        let (other, other_rest) = self.lanes.as_chunks::<TILE>();
        for (a, b) in whole.iter().zip(other) {
            add_to(&mut sums, &mut peaks, &tiles::<ALIGNED>(a, b));
        }
        let mut column = [0.0; TILE];
        let last = from_fn(|lane| {
            other_rest.iter().zip(&mut column).for_each(|(lanes, value)| *value = lanes[lane]);
            tile::<ALIGNED>(rest, &column)
        });
        add_to(&mut sums, &mut peaks, &last);
        (sums, peaks)
    }
}

/// Products of a tile, summed in each lane as [`tile`] does.
#[inline(always)]
fn tiles<const ALIGNED: bool>(a: &[f32; TILE], b: &[[f32; LANES]; TILE]) -> [f32; LANES] {
    let mut sums = [0f32; LANES];
    for (sum, b) in sums.iter_mut().zip(&b[0]) {
        *sum = a[0] * b;
    }
    // unrolled, so that sums stay in registers
    add_product::<ALIGNED>(&mut sums, a[1], &b[1]);
    add_product::<ALIGNED>(&mut sums, a[2], &b[2]);
    add_product::<ALIGNED>(&mut sums, a[3], &b[3]);
    sums
}

/// Adds a product in each lane.
#[inline(always)]
fn add_product<const ALIGNED: bool>(sums: &mut [f32; LANES], a: f32, b: &[f32; LANES]) {
    for (sum, b) in sums.iter_mut().zip(b) {
        *sum = if ALIGNED { add_aligned(*sum, a * b) } else { *sum + a * b };
    }
}

/// Adds a tile to the sums, and updates the largest magnitudes.
#[inline(always)]
fn add_to(sums: &mut [f32; LANES], peaks: &mut [f32; LANES], tile: &[f32; LANES]) {
    for ((sum, peak), tile) in sums.iter_mut().zip(peaks).zip(tile) {
        *sum += tile;
        // not `max`, which takes two more instructions to ignore NaN
        *peak = if sum.abs() > *peak { sum.abs() } else { *peak };
    }
}

/// Final value of a sum, given the largest intermediate magnitude.
fn finished(effects: EngineEffects, (sum, peak): (f32, f32), saturated: impl Fn() -> f32) -> f32 {
    if effects.has(EngineEffect::SumsSaturate) && peak >= LIMIT {
        return saturated();
    }
    if effects.has(EngineEffect::SubnormalsFlushed) && sum.abs() < SMALLEST_NORMAL {
        return 0.0;
    }
    sum
}

/// Sum of the products of four neighbours.
fn tile<const ALIGNED: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut products = a.iter().zip(b).map(|(a, b)| a * b);
    let first = products.next().unwrap_or(0.0);
    products.fold(first, |sum, product| if ALIGNED { add_aligned(sum, product) } else { sum + product })
}

/// Infinity, with the sign of the first sum that left the range.
#[cold]
fn saturated(by_tiles: bool, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = 0f32;
    for (a, b) in a.chunks(TILE).zip(b.chunks(TILE)) {
        sum += if by_tiles { tile::<true>(a, b) } else { tile::<false>(a, b) };
        if sum.abs() >= LIMIT {
            break;
        }
    }
    f32::INFINITY.copysign(sum)
}

/// Sum whose operands are rounded to units of the larger one's twelfth bit, nearest even.
#[inline(always)]
fn add_aligned(a: f32, b: f32) -> f32 {
    let power = (a.to_bits() & EXPONENT).max(b.to_bits() & EXPONENT);
    let shift = rounding_shift(power, 12);
    (a + shift - shift) + (b + shift - shift)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Executable, Precision, Tensor, WeightCache};
    use anec_kernels::codes::{CodeTables, PackedCodes};
    use anec_kernels::weight::Scales;
    use anec_mil::{Constant, DataType, FunctionBuilder, Opset, TensorType};
    use half::f16;

    /// Product of a row with ones.
    fn row_sum(effects: EngineEffects, weight: &LoadedWeight) -> f32 {
        let (x, layout) = (vec![1.0; weight.columns()], MatrixLayout { row: 1, column: 1 });
        let mut out = [0.0];
        multiply(
            ProductArithmetic { effects, ..ProductArithmetic::default() },
            weight,
            (&x, layout),
            1,
            None,
            (&mut out, layout),
        );
        out[0]
    }

    #[test]
    fn integer_weights_are_rounded_to_fp16_before_they_are_multiplied() {
        let bytes = Arc::new(Elements::Int8(vec![3i8].into()));
        let weight = LoadedWeight::scaled(vec![1, 1], bytes, Scales { values: vec![0.1], blocks: 1 });
        assert_eq!(row_sum(EngineEffects::ALL, &weight), f16::from_f32(0.3).to_f32());
        assert_eq!(row_sum(EngineEffects::ALL.without(EngineEffect::WeightsRounded), &weight), 3.0 * 0.1);
    }

    #[test]
    fn numbers_of_a_palette_are_summed_before_the_scale_of_their_row() {
        // seventeen times 10,000: the 170,000 of a published overflow, with a result of 170
        let codes = Arc::new(Elements::Codes(PackedCodes::new(4, vec![0; 9].into())));
        let numbers: Vec<f32> = (0..16).map(|code| if code == 0 { 10_000.0 } else { 0.0 }).collect();
        let tables = CodeTables::new(4, 16, &numbers, 1);
        let weight = LoadedWeight::coded(vec![1, 17], codes, tables, Scales { values: vec![0.001], blocks: 1 });
        assert_eq!(row_sum(EngineEffects::ALL, &weight), f32::INFINITY);
        let scaled_first = EngineEffects::ALL.without(EngineEffect::PaletteBeforeScale);
        assert!((row_sum(scaled_first, &weight) - 170.0).abs() < 0.1);
    }

    #[test]
    fn a_convolution_that_sums_nothing_up_does_not_saturate() {
        for (channels, expected) in [(1usize, 32768.0), (2, f32::INFINITY)] {
            let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
            let shape = [1, channels as u64, 1, 1];
            let x = ops.input("x", TensorType::new(DataType::Fp16, shape));
            let weight = ops.constant("weight", Constant::fp16_tensor(&shape, &vec![1.0; channels]));
            let y = ops.conv("y", x, weight, None);
            ops.output("out", y);
            let executable = Executable::compile(&ops.finish().unwrap(), Precision::ANE, &WeightCache::new()).unwrap();
            let mut values = vec![0.0; channels];
            values[0] = 32768.0;
            let x = Tensor::new([1, channels, 1, 1], values);
            let outputs = executable.run(&[("x", &x)], &mut executable.new_state()).unwrap();
            assert_eq!(outputs[0].1.floats().unwrap(), [expected], "{channels}");
        }
    }

    /// Dot product of two vectors, tile by tile.
    fn dot(effects: EngineEffects, a: &[f32], b: &[f32]) -> f32 {
        let by_tiles = effects.has(EngineEffect::LaneTiles);
        let found = if by_tiles { add_tiles::<true>(a, b) } else { add_tiles::<false>(a, b) };
        finished(effects, found, || saturated(by_tiles, a, b))
    }

    /// Sum over all tiles, and the largest intermediate magnitude.
    fn add_tiles<const ALIGNED: bool>(a: &[f32], b: &[f32]) -> (f32, f32) {
        let (mut sum, mut peak) = (0f32, 0f32);
        let (whole, rest) = a.as_chunks::<TILE>();
        let (other, other_rest) = b.as_chunks::<TILE>();
        for (a, b) in whole.iter().zip(other) {
            sum += tile::<ALIGNED>(a, b);
            peak = peak.max(sum.abs());
        }
        sum += tile::<ALIGNED>(rest, other_rest);
        (sum, peak.max(sum.abs()))
    }

    /// Sum as a product with ones, in the form that the engine stores.
    fn sum(effects: EngineEffects, values: &[f32]) -> f32 {
        f16::from_f32(dot(effects, values, &vec![1.0; values.len()])).to_f32()
    }

    #[test]
    fn sums_saturate_at_32768() {
        let all = EngineEffects::ALL;
        assert_eq!(sum(all, &[32752.0]), 32752.0);
        assert_eq!(sum(all, &[32768.0]), f32::INFINITY);
        assert_eq!(sum(all, &[-16384.0, -16384.0]), f32::NEG_INFINITY);
        assert_eq!(sum(all.without(EngineEffect::SumsSaturate), &[32768.0]), 32768.0);
        // intermediate overflow, though the result would be in range
        let there_and_back = [20000.0, 0.0, 0.0, 0.0, 20000.0, 0.0, 0.0, 0.0, -30000.0];
        assert_eq!(sum(all, &there_and_back), f32::INFINITY);
        assert_eq!(sum(all.without(EngineEffect::SumsSaturate), &there_and_back), 10000.0);
    }

    #[test]
    fn tiles_of_four_reproduce_the_published_losses() {
        let all = EngineEffects::ALL;
        let mut values = vec![1.0; 1025];
        values[0] = 4096.0;
        assert_eq!(sum(all, &values), 5116.0);
        assert_eq!(sum(all.without(EngineEffect::LaneTiles), &values), 5120.0);
        assert_eq!(sum(all, &vec![1.0; 16000]), 16000.0);
        for (magnitude, survivors) in [(1024.0, 16.0), (3000.0, 16.0), (4090.0, 16.0), (4096.0, 4.0), (16000.0, 4.0)] {
            let triples: Vec<f32> = [magnitude, -magnitude, 1.0].into_iter().cycle().take(48).collect();
            assert_eq!(sum(all, &triples), survivors, "{magnitude}");
        }
    }

    #[test]
    fn sums_side_by_side_have_the_bits_that_they_have_alone() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f16::from_f32((state >> 8) as f32 / (1 << 20) as f32 - 8.0).to_f32()
        };
        // partial groups and tiles; sums that leave the range
        for (count, length, scale) in [(1, 1, 1.0), (16, 64, 1.0), (21, 67, 1.0), (5, 130, 64.0)] {
            let factors: Vec<f32> = (0..length).map(|_| scale * next()).collect();
            let vectors: Vec<f32> = (0..count * length).map(|_| next()).collect();
            let layout = MatrixLayout { row: 1, column: length };
            let all = EngineEffects::ALL;
            for effects in [all, all.without(EngineEffect::LaneTiles), all.without(EngineEffect::SumsSaturate)] {
                let mut sums = vec![0.0; count];
                let mut groups = Groups::default();
                groups.gather(EngineEffects::NONE, (count, length), (&vectors, layout));
                groups.dots(effects, &factors, &mut sums);
                let alone = vectors.chunks(length).map(|vector| dot(effects, &factors, vector).to_bits());
                assert!(sums.iter().map(|sum| sum.to_bits()).eq(alone), "{count} of {length}");
            }
        }
    }

    #[test]
    fn columns_of_any_layout_become_lanes() {
        let (count, length) = (21, 37);
        let element = |k: usize, column: usize| (k * count + column) as f32 * 4.0;
        for (row, column) in [(1, length), (count, 1), (2 * count, 2)] {
            let mut values = vec![f32::NAN; 2 * count * length];
            for (k, i) in (0..length).flat_map(|k| (0..count).map(move |i| (k, i))) {
                values[k * row + i * column] = element(k, i);
            }
            let mut groups = Groups { length: 1, lanes: vec![[f32::NAN; LANES]; 3 * length] };
            groups.gather(EngineEffects::ALL, (count, length), (&values, MatrixLayout { row, column }));
            for (at, lanes) in groups.lanes.iter().enumerate() {
                let (group, k) = (at / length, at % length);
                let column = |lane: usize| group * LANES + lane;
                let expected = |lane: usize| if column(lane) < count { element(k, column(lane)) } else { 0.0 };
                assert_eq!(*lanes, from_fn(expected), "{k} of group {group}, {row} and {column:?}", column = column(0));
            }
            assert_eq!(groups.lanes.len(), 2 * length);
        }
    }

    #[test]
    fn a_token_has_the_bits_that_it_has_alone_whether_lanes_are_tokens_or_rows() {
        let (rows, columns, tokens) = (37, 70, LANES + 3);
        let noise =
            |count: usize, seed: f32| (0..count).map(|i| 120.0 * (i as f32 * 0.37 + seed).sin()).collect::<Vec<f32>>();
        let weight =
            LoadedWeight::plain(vec![rows, columns], Arc::new(Elements::F32(noise(rows * columns, 1.0).into())));
        let (x, bias) = (noise(columns * tokens, 2.0), noise(rows, 3.0));
        let arithmetic = ProductArithmetic { effects: EngineEffects::ALL, ..ProductArithmetic::default() };
        let by_token = |size: usize| MatrixLayout { row: 1, column: size };
        let product = |x: &[f32]| {
            let mut out = vec![f32::NAN; x.len() / columns * rows];
            let target = (&mut out[..], by_token(rows));
            multiply(arithmetic, &weight, (x, by_token(columns)), x.len() / columns, Some(&bias), target);
            out.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        let together = product(&x);
        assert!(together.contains(&f32::INFINITY.to_bits()), "some leave the range");
        for count in [1, 5] {
            let alone: Vec<u32> = x.chunks(count * columns).flat_map(product).collect();
            assert_eq!(alone, together, "{count} at a time");
        }
    }

    #[test]
    fn subnormals_are_flushed_where_products_are_summed() {
        let smallest = 2f32.powi(-24);
        let all = EngineEffects::ALL;
        assert_eq!(sum(all, &[3.0 * smallest, 5.0 * smallest]), 0.0);
        assert_eq!(
            sum(all.without(EngineEffect::SubnormalsFlushed), &[3.0 * smallest, 5.0 * smallest]),
            8.0 * smallest
        );
    }

    #[test]
    fn sums_are_rounded_to_the_larger_operands_twelfth_bit() {
        assert_eq!(add_aligned(4096.0, 1.0), 4096.0);
        assert_eq!(add_aligned(-4096.0, 1.0), -4096.0);
        assert_eq!(add_aligned(4090.0, 1.0), 4091.0);
        assert_eq!(add_aligned(4096.0, 3.0), 4100.0);
        assert_eq!(add_aligned(0.0, 0.0), 0.0);
        assert_eq!(add_aligned(f32::INFINITY, 1.0), f32::INFINITY);
    }
}
