//! Symmetric 8-bit integers: `weight = scale * q` with q from -127 to 127 and one fp16 scale for the whole tensor or
//! for each output channel.
//!
//! The scale is `absmax / 127`, rounded to fp16 *before* values are divided by it, so that its rounding costs no
//! accuracy. It is never zero or subnormal, because hardware may flush subnormals to zero:
//!
//! - nothing but zeros gets the scale 1 (every q is 0);
//! - an absmax below 127 * 2^-14 gets the smallest normal fp16, 2^-14, and fewer than 127 steps.

use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, OnceLock};

use half::f16;
use rayon::prelude::*;

use super::fp16::{LARGEST, first_block, overflow};
use super::measure::{BlockLoss, RoundingError};
use super::{Blocks, QuantError};
use anec_base::{MappedFile, Result};
use anec_kernels::quantize;
use anec_manifest::{Granularity, Overflow};
use anec_mil::Content;
use anec_source::SourceWeight;

/// A weight converted to int8 as it is read. Output channels are rows.
pub struct Int8 {
    weight: SourceWeight,
    blocks: Blocks,
    overflow: Overflow,
    scales: Scales,
    measures: Arc<RoundingError>,
    /// Integers that were chosen before; the nearest ones if there are none.
    chosen: Option<Arc<MappedFile>>,
}

enum Scales {
    Tensor(OnceLock<TensorScale>),
    /// Bits of fp16 by channel; 0, which is no scale, until it is found.
    Channel(Vec<AtomicU16>),
}

#[derive(Clone, Copy)]
struct TensorScale {
    scale: f16,
    /// Largest magnitude of the tensor.
    largest: f32,
}

impl Int8 {
    /// The int8 form of a weight.
    pub fn new(weight: SourceWeight, granularity: Granularity, overflow: Overflow) -> Arc<Self> {
        Self::chosen(weight, granularity, overflow, None)
    }

    /// The int8 form of a weight with integers that were chosen for its scales before: a byte for each element,
    /// row-major.
    pub fn chosen(
        weight: SourceWeight,
        granularity: Granularity,
        overflow: Overflow,
        chosen: Option<Arc<MappedFile>>,
    ) -> Arc<Self> {
        let blocks = Blocks::of(&weight);
        let scales = match granularity {
            Granularity::PerTensor => Scales::Tensor(OnceLock::new()),
            Granularity::PerChannel => Scales::Channel((0..weight.rows()).map(|_| AtomicU16::new(0)).collect()),
        };
        let measures = Arc::new(RoundingError::new(blocks.count()));
        Arc::new(Int8 { weight, blocks, overflow, scales, measures, chosen })
    }

    /// The integers, as the content of a constant of the weight's shape.
    pub fn data(self: &Arc<Self>) -> Arc<dyn Content> {
        Arc::new(Data(self.clone()))
    }

    /// The scales, as the content of an fp16 constant of one element, or one for each channel.
    pub fn scale(self: &Arc<Self>) -> Arc<dyn Content> {
        Arc::new(Scale(self.clone()))
    }

    /// Number of scales.
    pub fn scale_count(&self) -> u64 {
        match &self.scales {
            Scales::Tensor(_) => 1,
            Scales::Channel(scales) => scales.len() as u64,
        }
    }

    /// What the conversion loses; complete once all integers were read.
    pub fn measures(&self) -> Arc<RoundingError> {
        self.measures.clone()
    }

    fn columns(&self) -> usize {
        self.blocks.columns() as usize
    }

    /// Reads a block.
    fn load(&self, block: usize, values: &mut Vec<f32>) -> Result<()> {
        let rows = self.blocks.rows(block);
        values.resize((rows.end - rows.start) as usize * self.columns(), 0.0);
        Ok(self.weight.read_rows(rows.start, values)?)
    }

    /// The largest magnitude of rows that were read, which are refused if they can't be held.
    fn largest(&self, first_row: u64, values: &[f32]) -> Result<f32> {
        let largest = quantize::largest_magnitude(values);
        if !largest.is_finite() {
            self.weight.check_finite(first_row, values)?;
        }
        if largest > LARGEST && self.overflow == Overflow::Error {
            return Err(overflow(&self.weight, first_row, values).into());
        }
        Ok(largest)
    }

    /// The scale of the whole tensor: a pass over all its values. Nothing waits for another thread here (a thread of
    /// the pool that waits could be waiting for work of its own), so two threads could both make the pass.
    fn tensor_scale(&self, known: &OnceLock<TensorScale>) -> Result<TensorScale> {
        if let Some(scale) = known.get() {
            return Ok(*scale);
        }
        let largest = (0..self.blocks.count())
            .into_par_iter()
            .map_init(Vec::new, |values, block| {
                self.load(block, values)?;
                self.largest(self.blocks.rows(block).start, values)
            })
            .try_reduce(|| 0.0, |a, b| Ok(a.max(b)))?;
        self.weight.release(0..self.weight.elements());
        Ok(*known.get_or_init(|| TensorScale { scale: scale_for(largest), largest }))
    }

    /// The scale of a channel, which is kept, and its largest magnitude.
    fn channel_scale(&self, scales: &[AtomicU16], row: u64, values: &[f32]) -> Result<(f16, f32)> {
        let largest = self.largest(row, values)?;
        let scale = scale_for(largest);
        scales[row as usize].store(scale.to_bits(), Ordering::Relaxed);
        Ok((scale, largest))
    }

    fn convert(&self, block: usize, values: &mut Vec<f32>, out: &mut [u8]) -> Result<()> {
        self.load(block, values)?;
        let mut loss = BlockLoss::default();
        let first = (self.blocks.rows(block).start * self.blocks.columns()) as usize;
        let chosen = match &self.chosen {
            None => None,
            Some(file) => Some(file.bytes().get(first..first + values.len()).ok_or_else(|| self.too_few(file))?),
        };
        let (mut at, mut results) = (0, Vec::new());
        let mut quantize = |values: &[f32], scale: f16, out: &mut [u8]| {
            let (squares, vanished) = match chosen {
                None => quantize::quantize(values, scale.to_f32(), out),
                Some(codes) => {
                    out.copy_from_slice(&codes[at..at + values.len()]);
                    at += values.len();
                    results.clear();
                    results.extend(out.iter().map(|code| f32::from(*code as i8) * scale.to_f32()));
                    quantize::compare(values, &results)
                }
            };
            loss.squares += squares;
            loss.vanished += vanished;
        };
        let mut largest = 0f32;
        match &self.scales {
            Scales::Tensor(known) => {
                let known = self.tensor_scale(known)?;
                quantize(values, known.scale, out);
                largest = known.largest;
            }
            Scales::Channel(scales) => {
                let columns = self.columns().max(1);
                let rows = self.blocks.rows(block);
                for ((row, values), out) in rows.zip(values.chunks(columns)).zip(out.chunks_mut(columns)) {
                    let (scale, of_channel) = self.channel_scale(scales, row, values)?;
                    quantize(values, scale, out);
                    largest = largest.max(of_channel);
                }
            }
        }
        loss.largest = largest;
        loss.saturated = if largest > LARGEST { quantize::count_above(values, LARGEST) } else { 0 };
        self.measures.set(block, loss);
        Ok(())
    }

    fn too_few(&self, codes: &MappedFile) -> QuantError {
        let (found, expected) = (codes.bytes().len() as u64, self.weight.elements());
        QuantError::Codes { weight: self.weight.key(), found, expected }
    }

    /// Scales of channels `first ..` into `out`; those that no read of the integers has found yet are found now.
    fn channel_scales(&self, scales: &[AtomicU16], first: usize, out: &mut [u8]) -> Result<()> {
        let unknown = |block: &usize| {
            let rows = self.blocks.rows(*block);
            scales[rows.start as usize..rows.end as usize].iter().any(|s| s.load(Ordering::Relaxed) == 0)
        };
        let missing: Vec<usize> = (0..self.blocks.count()).filter(unknown).collect();
        missing.par_iter().try_for_each_init(Vec::new, |values, block| {
            self.load(*block, values)?;
            for (row, values) in self.blocks.rows(*block).zip(values.chunks(self.columns().max(1))) {
                self.channel_scale(scales, row, values)?;
            }
            Ok::<(), anec_base::Error>(())
        })?;
        for (scale, out) in scales[first..].iter().zip(out.chunks_exact_mut(2)) {
            out.copy_from_slice(&scale.load(Ordering::Relaxed).to_le_bytes());
        }
        Ok(())
    }
}

/// The scale for a largest magnitude (see the module).
pub fn scale_for(largest: f32) -> f16 {
    if largest == 0.0 {
        return f16::ONE;
    }
    f16::from_f32(largest.min(LARGEST) / 127.0).max(f16::MIN_POSITIVE)
}

struct Data(Arc<Int8>);

impl Content for Data {
    fn length(&self) -> u64 {
        self.0.weight.elements()
    }

    fn granule(&self) -> u64 {
        self.0.blocks.elements()
    }

    fn prepare(&self) -> Result<()> {
        match &self.0.scales {
            Scales::Tensor(known) => self.0.tensor_scale(known).map(|_| ()),
            Scales::Channel(_) => Ok(()),
        }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let own = &self.0;
        let first = first_block(&own.weight, self.length(), self.granule(), offset, out.len())?;
        self.prepare()?;
        out.par_chunks_mut(self.granule() as usize)
            .enumerate()
            .with_min_len(own.blocks.at_a_time())
            .try_for_each_init(Vec::new, |values, (i, out)| own.convert(first + i, values, out))?;
        own.weight.release(offset..offset + out.len() as u64);
        Ok(())
    }
}

struct Scale(Arc<Int8>);

impl Content for Scale {
    fn length(&self) -> u64 {
        2 * self.0.scale_count()
    }

    fn granule(&self) -> u64 {
        2
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset.saturating_add(out.len() as u64);
        if end > self.length() || !offset.is_multiple_of(2) || !end.is_multiple_of(2) {
            let weight = format!("scale of {}", self.0.weight.key());
            return Err(QuantError::Granule { weight, offset, end, granule: 2 }.into());
        }
        match &self.0.scales {
            Scales::Tensor(known) => {
                if !out.is_empty() {
                    out.copy_from_slice(&self.0.tensor_scale(known)?.scale.to_le_bytes());
                }
                Ok(())
            }
            Scales::Channel(scales) => self.0.channel_scales(scales, offset as usize / 2, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weight(rows: u64, columns: u64, value: impl Fn(u64, u64) -> f32) -> SourceWeight {
        let values = (0..rows * columns).map(|i| value(i / columns, i % columns)).collect();
        SourceWeight::from_values("w", &[rows, columns], values).unwrap()
    }

    fn noise(row: u64, column: u64) -> f32 {
        let x = (row * 7919 + column + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((x >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * (1.0 + row as f32 * 0.1)
    }

    fn bytes(content: &dyn Content) -> Result<Vec<u8>> {
        let mut out = vec![0; content.length() as usize];
        content.prepare()?;
        content.read(0, &mut out)?;
        Ok(out)
    }

    fn halves(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
    }

    #[test]
    fn each_channel_has_the_scale_of_its_largest_value() {
        let int8 = Int8::new(weight(300, 333, noise), Granularity::PerChannel, Overflow::Error);
        let data = bytes(&*int8.data()).unwrap();
        let scales = halves(&bytes(&*int8.scale()).unwrap());
        assert_eq!(scales.len(), 300);
        for (row, scale) in scales.iter().enumerate() {
            let values: Vec<f32> = (0..333).map(|c| noise(row as u64, c)).collect();
            let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert_eq!(*scale, f16::from_f32(largest / 127.0).to_f32());
            let q = &data[row * 333..][..333];
            assert_eq!(q.iter().map(|q| (*q as i8).unsigned_abs()).max(), Some(127));
            for (x, q) in values.iter().zip(q) {
                assert!((x - f32::from(*q as i8) * scale).abs() <= 0.501 * scale + 0.06 * scale, "{x} {q} {scale}");
            }
        }
    }

    #[test]
    fn a_tensor_has_one_scale() {
        let int8 = Int8::new(weight(300, 333, noise), Granularity::PerTensor, Overflow::Error);
        let scales = halves(&bytes(&*int8.scale()).unwrap());
        let data = bytes(&*int8.data()).unwrap();
        assert_eq!(scales.len(), 1);
        assert_eq!(data.iter().map(|q| (*q as i8).unsigned_abs()).max(), Some(127));
        let per_tensor = int8.measures().total().unwrap();
        let finer = Int8::new(weight(300, 333, noise), Granularity::PerChannel, Overflow::Error);
        bytes(&*finer.data()).unwrap();
        let per_channel = finer.measures().total().unwrap();
        assert!(per_channel.relative_rms_error < per_tensor.relative_rms_error);
        assert!(per_channel.cosine > per_tensor.cosine && per_tensor.cosine > 0.999);
    }

    #[test]
    fn scales_are_the_same_whether_read_before_or_after_the_integers() {
        for granularity in [Granularity::PerChannel, Granularity::PerTensor] {
            let [a, b] = [0, 1].map(|_| Int8::new(weight(200, 500, noise), granularity, Overflow::Error));
            let first = (bytes(&*a.scale()).unwrap(), bytes(&*a.data()).unwrap());
            let data = bytes(&*b.data()).unwrap();
            assert_eq!((bytes(&*b.scale()).unwrap(), data), first);
        }
    }

    #[test]
    fn zeros_and_tiny_channels_have_safe_scales() {
        let w = weight(3, 64, |row, c| [0.0, 1e-5, 1.0][row as usize] * if c % 2 == 0 { 1.0 } else { -1.0 });
        let int8 = Int8::new(w, Granularity::PerChannel, Overflow::Error);
        let data = bytes(&*int8.data()).unwrap();
        let scales = halves(&bytes(&*int8.scale()).unwrap());
        assert_eq!(scales[..2], [1.0, 2f32.powi(-14)]);
        assert!(data[..64].iter().all(|q| *q == 0));
        assert_eq!(data[128..130], [127, 129]);
        let zeros = Int8::new(weight(4, 4, |_, _| 0.0), Granularity::PerTensor, Overflow::Error);
        assert_eq!(halves(&bytes(&*zeros.scale()).unwrap()), [1.0]);
        bytes(&*zeros.data()).unwrap();
        assert_eq!(zeros.measures().total().unwrap().cosine, 1.0);
    }

    #[test]
    fn parts_read_in_any_order_are_the_whole_and_measure_the_same() {
        let make = || Int8::new(weight(400, 700, noise), Granularity::PerChannel, Overflow::Error);
        let (a, b) = (make(), make());
        let whole = bytes(&*a.data()).unwrap();
        let data = b.data();
        let mut parts = vec![0; whole.len()];
        for (i, part) in parts.chunks_mut(data.granule() as usize).enumerate().rev() {
            data.read(i as u64 * data.granule(), part).unwrap();
        }
        assert_eq!(parts, whole);
        assert_eq!(a.measures().total(), b.measures().total());
    }

    #[test]
    fn chosen_integers_are_taken_as_they_are_and_measured() {
        for granularity in [Granularity::PerChannel, Granularity::PerTensor] {
            let nearest = Int8::new(weight(90, 700, noise), granularity, Overflow::Error);
            let mut codes = bytes(&*nearest.data()).unwrap();
            let with = |codes: &[u8]| {
                let file = Arc::new(MappedFile::from_bytes("codes".as_ref(), codes.to_vec()));
                Int8::chosen(weight(90, 700, noise), granularity, Overflow::Error, Some(file))
            };
            let same = with(&codes);
            assert_eq!(bytes(&*same.data()).unwrap(), codes);
            assert_eq!(bytes(&*same.scale()).unwrap(), bytes(&*nearest.scale()).unwrap());
            let loss = |int8: &Arc<Int8>| int8.measures().total().unwrap().relative_rms_error;
            assert!((loss(&same) - loss(&nearest)).abs() < 1e-6);
            codes[700 * 80 + 3] ^= 1;
            let other = with(&codes);
            assert_eq!(bytes(&*other.data()).unwrap(), codes);
            assert!(loss(&other) > loss(&nearest));
            let error = bytes(&*with(&codes[..codes.len() - 1]).data()).unwrap_err().to_string();
            assert!(error.ends_with("62999 codes were chosen for 63000 elements"), "{error}");
        }
    }

    #[test]
    fn a_bad_number_or_one_too_large_names_its_place() {
        let bad = |value: f32| move |r: u64, c: u64| if (r, c) == (70, 3) { value } else { 0.1 };
        for granularity in [Granularity::PerChannel, Granularity::PerTensor] {
            let error = bytes(&*Int8::new(weight(99, 600, bad(f32::NAN)), granularity, Overflow::Error).data());
            assert!(error.unwrap_err().to_string().contains("`w`, row 70, column 3"));
            let error = bytes(&*Int8::new(weight(99, 600, bad(1e6)), granularity, Overflow::Error).data());
            assert!(error.unwrap_err().to_string().contains("row 70, column 3: 1000000 doesn't fit"));
            let int8 = Int8::new(weight(99, 600, bad(1e6)), granularity, Overflow::Saturate);
            bytes(&*int8.data()).unwrap();
            assert_eq!(int8.measures().total().unwrap().saturated, 1);
        }
    }
}
