//! Palettes: `weight = levels[q]`, or `weight = scale * levels[q]` with a scale per row, for indices of 1 to 8 bits. A
//! palette of `2^bits` levels serves a group of rows or all rows.
//!
//! Levels are the centres of exact k-means ([`cluster`](super::cluster)) over the weights rounded to fp16, of which
//! there are at most 65,536 different ones. Values nearer to each other than a [`FINENESS`]th of the step of an even
//! grid are merged into one point. Palettes of 256 levels keep the extremes of the weights, because the few largest
//! weights produce a model's largest activations. In palettes of up to 16 levels, a weight counts by the root of its
//! input's second moment if that is known, so that a channel hundreds of times larger than the others gets levels of
//! its own. Otherwise error feedback, which rounds such a channel first, would push all other weights beyond their
//! levels to compensate.
//!
//! A row scale, the row's largest magnitude, makes rows comparable; its square weights the row, so that the error is
//! least in the original weights. The hardware sums `levels[q] * x` in half precision before it applies the row scale,
//! so that levels are divided by [`HEADROOM`] and row scales multiplied by it.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::Blocks;
use super::cluster::{WeightedPoint, centres};
use super::fp16::LARGEST;
use super::layout::WeightLayout;
use super::reader::RowReader;
use anec_base::Result;
use anec_kernels::level_table::LevelTable;

/// Minimum number of points per step of an even grid.
pub const FINENESS: f32 = 32.0;
/// Divisor of the levels of rows with a scale, so that sums of products stay within half precision.
pub const HEADROOM: f32 = 16.0;
/// Number of weights from which on they are counted by value; fewer are sorted.
const MANY: u64 = 1 << 18;
/// Weight of the row that counts most, alone and together with column weights. Sums over all weights fit into 64 bits.
const FULL_WEIGHT: f32 = (1u32 << 30) as f32;
const FULL_SHARED: f32 = (1u32 << 16) as f32;
/// Largest palette in which weights count by their inputs.
const MOST_WEIGHTED: u64 = 16;
/// Share of the mean that is added to a column's second moment, so that every column counts.
const LEAST_MOMENT: f64 = 0.05;

/// Palettes of a weight.
pub(crate) struct Palettes {
    pub(crate) entries: usize,
    /// Number of rows that share a palette.
    pub(crate) group: u64,
    row_scales: bool,
    pinned: bool,
    /// Weight of each column; empty if all count alike.
    columns: Vec<u32>,
    known: OnceLock<KnownPalettes>,
}

/// Computed palettes.
pub(crate) struct KnownPalettes {
    /// Palette of each group of rows.
    pub(crate) levels: Vec<LevelTable>,
    /// Scale of each row; empty if rows have none.
    pub(crate) row_scales: Vec<f16>,
    /// Largest magnitude of the tensor.
    pub(crate) largest: f32,
}

impl Palettes {
    pub(crate) fn new(layout: &WeightLayout, moments: Option<&[f32]>) -> Self {
        let palettes = layout.palettes.unwrap_or(1).max(1);
        let moments = moments.filter(|_| layout.entries() <= MOST_WEIGHTED);
        Palettes {
            entries: layout.entries() as usize,
            group: (layout.rows / palettes).max(1),
            row_scales: layout.row_scales,
            pinned: layout.entries() == 256,
            columns: moments.map_or_else(Vec::new, column_weights),
            known: OnceLock::new(),
        }
    }

    /// Returns the palettes, computed in a pass over all weights at the first call. Threads don't wait for each other
    /// here.
    pub(crate) fn known(&self, reader: &RowReader, blocks: Blocks) -> Result<&KnownPalettes> {
        if let Some(known) = self.known.get() {
            return Ok(known);
        }
        let known = self.make(reader, blocks)?;
        Ok(self.known.get_or_init(|| known))
    }

    fn make(&self, reader: &RowReader, blocks: Blocks) -> Result<KnownPalettes> {
        let rows = reader.weight.rows();
        let scales = if self.row_scales { row_scales(reader, blocks)? } else { Vec::new() };
        let most = scales.iter().map(|scale| scale.to_f32()).fold(0f32, f32::max);
        let full = if self.columns.is_empty() { FULL_WEIGHT } else { FULL_SHARED };
        let row_weights: Vec<u32> = scales.iter().map(|scale| whole((scale.to_f32() / most).powi(2), full)).collect();
        let largest = AtomicU32::new(0);
        let groups: Vec<Range<u64>> =
            (0..rows.div_ceil(self.group)).map(|i| i * self.group..((i + 1) * self.group).min(rows)).collect();
        let pass = Pass { own: self, reader, scales: &scales, row_weights: &row_weights, largest: &largest };
        let levels: Vec<LevelTable> = if self.group * reader.weight.columns() > MANY {
            groups.into_iter().map(|rows| pass.count(rows, blocks)).collect::<Result<_>>()?
        } else {
            groups
                .into_par_iter()
                .map_init(Default::default, |room, rows| pass.sort(rows, room))
                .collect::<Result<_>>()?
        };
        reader.weight.release(0..reader.weight.elements());
        Ok(KnownPalettes { levels, row_scales: scales, largest: f32::from_bits(largest.into_inner()) })
    }

    /// Returns the palette of values given as keys and weights.
    fn levels(&self, counts: impl Iterator<Item = (u16, u64)> + Clone) -> LevelTable {
        let values = || counts.clone().map(|(key, _)| of_key(key));
        let (Some(first), Some(last)) = (values().next(), values().last()) else {
            return LevelTable::new(vec![0.0; self.entries]);
        };
        let step = first.abs().max(last.abs()) / (self.entries as f32 / 2.0 * FINENESS);
        let mut points: Vec<WeightedPoint> = Vec::new();
        let mut cell = f32::NAN;
        for (key, weight) in counts {
            let (value, weight) = (of_key(key), weight as f64);
            let own = if step > 0.0 { (value / step).floor() } else { 0.0 };
            match points.last_mut() {
                Some(point) if own == cell => {
                    point.value += weight * f64::from(value);
                    point.weight += weight;
                }
                _ => points.push(WeightedPoint { value: weight * f64::from(value), weight }),
            }
            cell = own;
        }
        points.iter_mut().for_each(|point| point.value /= point.weight);
        let pinned = self.pinned.then_some([first.into(), last.into()]);
        // fp16 preserves the order
        let levels = centres(&points, self.entries, pinned).into_iter().map(|c| f16::from_f64(c).to_f32());
        LevelTable::new(levels.collect())
    }
}

/// Returns the scale of every row, in a pass over all weights.
fn row_scales(reader: &RowReader, blocks: Blocks) -> Result<Vec<f16>> {
    let of_block = |values: &mut Vec<f32>, block: usize| {
        let rows = blocks.rows(block);
        reader.load(rows.clone(), values)?;
        reader.largest(rows.start, values)?;
        Ok(values.chunks(reader.columns().max(1)).map(row_scale).collect())
    };
    let scales: Result<Vec<Vec<f16>>> = (0..blocks.count()).into_par_iter().map_init(Vec::new, of_block).collect();
    Ok(scales?.concat())
}

/// Pass over the weights.
struct Pass<'a> {
    own: &'a Palettes,
    reader: &'a RowReader,
    /// Scales of all rows; empty if rows have none.
    scales: &'a [f16],
    row_weights: &'a [u32],
    largest: &'a AtomicU32,
}

/// Count of each fp16 number by its key, and read buffers.
type Counts = (Vec<u64>, Vec<f32>, Vec<f16>);

impl Pass<'_> {
    /// Reads rows and divides them by their scales.
    fn load(&self, rows: Range<u64>, values: &mut Vec<f32>, halves: &mut Vec<f16>) -> Result<()> {
        self.reader.load(rows.clone(), values)?;
        let largest = self.reader.largest(rows.start, values)?;
        self.largest.fetch_max(largest.to_bits(), Ordering::Relaxed);
        saturate(values, largest);
        for (values, scale) in
            values.chunks_mut(self.reader.columns().max(1)).zip(self.scales.iter().skip(rows.start as usize))
        {
            let scale = scale.to_f32();
            values.iter_mut().for_each(|value| *value /= scale);
        }
        halves.resize(values.len(), f16::ZERO);
        halves.convert_from_f32_slice(values);
        Ok(())
    }

    /// Returns the weight of a row's values.
    fn weight(&self, row: u64) -> u64 {
        self.row_weights.get(row as usize).copied().map_or(1, u64::from)
    }

    /// Returns the palette of a small group, by sorting.
    fn sort(&self, rows: Range<u64>, buffers: &mut (Vec<f32>, Vec<f16>, Vec<(u16, u64)>)) -> Result<LevelTable> {
        let (values, halves, keys) = buffers;
        self.load(rows.clone(), values, halves)?;
        keys.clear();
        let columns = self.reader.columns().max(1);
        for (row, halves) in rows.zip(halves.chunks(columns)) {
            let weight = self.weight(row);
            match &self.own.columns[..] {
                [] => keys.extend(halves.iter().map(|half| (key(*half), weight))),
                columns => keys
                    .extend(halves.iter().zip(columns).map(|(half, column)| (key(*half), weight * u64::from(*column)))),
            }
        }
        keys.sort_unstable();
        let same = keys.chunk_by(|(a, _), (b, _)| a == b);
        Ok(self.own.levels(same.map(|same| (same[0].0, same.iter().map(|(_, weight)| weight).sum()))))
    }

    /// Returns the palette of a large group, by counting. Sums are integers, so that their order doesn't matter.
    fn count(&self, rows: Range<u64>, blocks: Blocks) -> Result<LevelTable> {
        let columns = self.reader.columns().max(1);
        let at_a_time = (blocks.elements() / columns as u64).max(1) * blocks.at_a_time() as u64;
        let parts = (rows.end - rows.start).div_ceil(at_a_time);
        let add = |state: Result<Counts>, part: u64| {
            let (mut counts, mut values, mut halves) = state?;
            let first = rows.start + part * at_a_time;
            let part = first..rows.end.min(first + at_a_time);
            self.load(part.clone(), &mut values, &mut halves)?;
            for (row, halves) in part.zip(halves.chunks(columns)) {
                let weight = self.weight(row);
                match &self.own.columns[..] {
                    [] => halves.iter().for_each(|half| counts[usize::from(key(*half))] += weight),
                    columns => halves
                        .iter()
                        .zip(columns)
                        .for_each(|(half, column)| counts[usize::from(key(*half))] += weight * u64::from(*column)),
                }
            }
            Ok((counts, values, halves))
        };
        let none = || Ok((vec![0; 1 << 16], Vec::new(), Vec::new()));
        let sum = |a: Result<Counts>, b: Result<Counts>| {
            let ((mut a, values, halves), (b, ..)) = (a?, b?);
            a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
            Ok((a, values, halves))
        };
        let (counts, ..) = (0..parts).into_par_iter().fold(none, add).reduce(none, sum)?;
        let counts = counts.iter().enumerate().filter(|(_, count)| **count > 0);
        Ok(self.own.levels(counts.map(|(key, count)| (key as u16, *count))))
    }
}

/// Clamps values to the range of fp16.
pub(crate) fn saturate(values: &mut [f32], largest: f32) {
    if largest > LARGEST {
        values.iter_mut().for_each(|value| *value = value.clamp(-LARGEST, LARGEST));
    }
}

/// Returns the scale of a row: never zero or subnormal.
fn row_scale(values: &[f32]) -> f16 {
    let largest = anec_kernels::quantize::largest_magnitude(values);
    if largest == 0.0 {
        return f16::ONE;
    }
    f16::from_f32((largest * HEADROOM).min(LARGEST)).max(f16::MIN_POSITIVE)
}

/// Maps fp16 numbers to integers of the same order.
fn key(half: f16) -> u16 {
    let bits = half.to_bits();
    if bits & 0x8000 == 0 { bits | 0x8000 } else { !bits }
}

fn of_key(key: u16) -> f32 {
    let bits = if key & 0x8000 == 0 { !key } else { key & 0x7fff };
    f16::from_bits(bits).to_f32()
}

/// Returns weights of columns: the roots of the second moments of their inputs.
fn column_weights(moments: &[f32]) -> Vec<u32> {
    let sum: f64 = moments.iter().map(|moment| f64::from(*moment)).sum();
    let mean = sum / moments.len().max(1) as f64;
    if !(mean > 0.0 && mean.is_finite()) {
        return Vec::new();
    }
    let roots: Vec<f64> = moments.iter().map(|moment| (f64::from(*moment) / mean + LEAST_MOMENT).sqrt()).collect();
    let most = roots.iter().copied().fold(0.0, f64::max);
    roots.iter().map(|root| whole((root / most) as f32, FULL_SHARED)).collect()
}

/// Converts a share to an integer of at least 1.
fn whole(share: f32, full: f32) -> u32 {
    if share > 0.0 { 1 + (share.min(1.0) * full) as u32 } else { 1 }
}
