//! Quantized weights: integers with scales, or indices into palettes.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use ndarray::ArrayView2;
use rayon::prelude::*;

use super::clip::Inputs;
use super::fp16::LARGEST;
use super::layout::WeightLayout;
use super::measure::{BlockLoss, RoundingError};
use super::pack::pack;
use super::palette::{KnownPalettes, Palettes, saturate};
use super::reader::RowReader;
use super::rounding::{Grid, Rounding};
use super::scales::BlockScales;
use super::{Blocks, QuantError};
use anec_base::Result;
use anec_kernels::level_table::LevelTable;
use anec_kernels::quantize;
use anec_manifest::{NumberFormat, Overflow};
use anec_mil::Content;
use anec_source::SourceWeight;

/// Weight converted to codes as it is read. Output channels are rows.
pub struct CodedWeight {
    reader: RowReader,
    layout: WeightLayout,
    blocks: Blocks,
    grids: Grids,
    rounding: Option<Arc<dyn Rounding>>,
    measures: Arc<RoundingError>,
}

enum Grids {
    Steps(BlockScales),
    Levels(Palettes),
}

impl CodedWeight {
    /// Returns a weight in a number format other than fp16. `rounding` chooses the codes; without it they are rounded
    /// to nearest.
    pub fn new(
        weight: SourceWeight,
        format: NumberFormat,
        overflow: Overflow,
        rounding: Option<Arc<dyn Rounding>>,
    ) -> Arc<Self> {
        CodedWeight::with_inputs(weight, format, overflow, rounding, Inputs::Unknown)
    }

    /// Returns a weight as [`new`](Self::new) does, with known inputs, which shape small palettes and per-tensor
    /// scales.
    pub fn with_inputs(
        weight: SourceWeight,
        format: NumberFormat,
        overflow: Overflow,
        rounding: Option<Arc<dyn Rounding>>,
        inputs: Inputs<'_>,
    ) -> Arc<Self> {
        Arc::new(CodedWeight::make(weight, format, overflow, rounding, inputs))
    }

    /// Returns a weight whose codes and scales were chosen beforehand, the scales by rows and blocks.
    ///
    /// # Errors
    /// Returns [`QuantError::Scales`] if the number of scales differs from the format's.
    pub fn with_scales(
        weight: SourceWeight,
        format: NumberFormat,
        overflow: Overflow,
        rounding: Arc<dyn Rounding>,
        scales: Vec<f16>,
    ) -> Result<Arc<Self>> {
        let mut own = CodedWeight::make(weight, format, overflow, Some(rounding), Inputs::Unknown);
        let expected = own.layout.scales.map_or(0, |[rows, columns]| rows * columns);
        own.grids = match own.grids {
            Grids::Steps(of) if scales.len() as u64 == expected => Grids::Steps(of.given(scales)),
            _ => {
                let (weight, found) = (own.reader.weight.key(), scales.len() as u64);
                return Err(QuantError::Scales { weight, found, expected }.into());
            }
        };
        Ok(Arc::new(own))
    }

    fn make(
        weight: SourceWeight,
        format: NumberFormat,
        overflow: Overflow,
        rounding: Option<Arc<dyn Rounding>>,
        inputs: Inputs<'_>,
    ) -> Self {
        let layout = WeightLayout::of(format, weight.rows(), weight.columns());
        let bits = layout.dtype.bits();
        let blocks = Blocks::packed(&weight, bits, rounding.as_ref().map_or(1, |r| r.rows_at_a_time()));
        let grids = match layout.palettes {
            Some(_) => Grids::Levels(Palettes::new(&layout, inputs.moments(layout.columns as usize))),
            None => Grids::Steps(BlockScales::new(&layout, inputs)),
        };
        let measures = Arc::new(RoundingError::new(blocks.count()));
        let reader = RowReader::new(weight, overflow);
        CodedWeight { reader, layout, blocks, grids, rounding, measures }
    }

    /// Parts of the weight and their sizes.
    pub fn layout(&self) -> &WeightLayout {
        &self.layout
    }

    /// Returns the codes as the content of a constant of the weight's shape.
    pub fn data(self: &Arc<Self>) -> Arc<dyn Content> {
        Arc::new(Codes(self.clone()))
    }

    /// Returns the scales of integers, by rows and blocks, as the content of an fp16 constant.
    pub fn scale(self: &Arc<Self>) -> Option<Arc<dyn Content>> {
        self.layout.scales.map(|_| self.part(Part::Scales))
    }

    /// Returns the palettes, one after another, as the content of an fp16 constant.
    pub fn palette(self: &Arc<Self>) -> Option<Arc<dyn Content>> {
        self.layout.palettes.map(|_| self.part(Part::Palettes))
    }

    /// Returns the factors of each row's product as the content of an fp16 constant.
    pub fn row_scale(self: &Arc<Self>) -> Option<Arc<dyn Content>> {
        self.layout.row_scales.then(|| self.part(Part::RowScales))
    }

    fn part(self: &Arc<Self>, part: Part) -> Arc<dyn Content> {
        Arc::new(PartContent(self.clone(), part))
    }

    /// Reads rows on all cores and passes them to `work` with the grid of each row, as error feedback needs them.
    ///
    /// # Errors
    /// Returns an error if the rows can't be read or hold values that no format can.
    pub fn with_grids<R>(
        &self,
        rows: Range<u64>,
        values: &mut Vec<f32>,
        work: impl FnOnce(ArrayView2<'_, f32>, &[Grid<'_>]) -> R,
    ) -> Result<R> {
        self.prepare(false)?;
        let (columns, weight) = (self.reader.columns().max(1), &self.reader.weight);
        values.resize((rows.end - rows.start) as usize * columns, 0.0);
        let at_a_time = self.blocks.elements() as usize / columns;
        let parts = values.par_chunks_mut(at_a_time.max(1) * columns).enumerate();
        parts.try_for_each(|(part, out)| weight.read_rows(rows.start + (part * at_a_time) as u64, out))?;
        let count = values.len() / columns;
        let shown = |values, grids: &[Grid<'_>]| {
            work(ArrayView2::from_shape((count, columns), values).expect("whole rows were read"), grids)
        };
        match &self.grids {
            Grids::Steps(of) => {
                let mut scales = Vec::new();
                of.of_rows(&self.reader, rows.start, values, &mut scales)?;
                let grids: Vec<Grid<'_>> = (0..count).map(|row| of.grid(&scales, row, columns)).collect();
                Ok(shown(values, &grids))
            }
            Grids::Levels(palettes) => {
                let known = palettes.known(&self.reader, self.blocks)?;
                saturate(values, known.largest);
                let grids: Vec<Grid<'_>> =
                    (0..count).map(|row| grid_of(palettes, known, rows.start + row as u64)).collect();
                Ok(shown(values, &grids))
            }
        }
    }

    /// Returns the conversion error; complete once all codes are read.
    pub fn measures(&self) -> Arc<RoundingError> {
        self.measures.clone()
    }

    /// Makes the passes that must precede reads. `keep` keeps values that are slow to compute for a read of all codes.
    fn prepare(&self, keep: bool) -> Result<()> {
        match &self.grids {
            Grids::Steps(scales) => scales.prepare(&self.reader, self.blocks, keep),
            Grids::Levels(palettes) => palettes.known(&self.reader, self.blocks).map(|_| ()),
        }
    }

    fn convert(&self, block: usize, buffers: &mut Buffers, out: &mut [u8]) -> Result<()> {
        let rows = self.blocks.rows(block);
        let Buffers { values, scales, codes, back } = buffers;
        self.reader.load(rows.clone(), values)?;
        let bits = self.layout.dtype.bits() as u32;
        // 8-bit codes need no packing
        let codes = if bits == 8 {
            &mut *out
        } else {
            codes.resize(values.len(), 0);
            &mut codes[..]
        };
        let mut loss = BlockLoss::default();
        match &self.grids {
            Grids::Steps(of) => {
                loss.largest = of.of_rows(&self.reader, rows.start, values, scales)?;
                loss.saturated = saturated(loss.largest, values);
                if self.rounding.is_none() {
                    let run = if of.is_one() { values.len() } else { of.block };
                    let runs = values.chunks(run.max(1)).zip(codes.chunks_mut(run.max(1)));
                    for ((values, codes), scale) in runs.zip(&*scales) {
                        let (squares, vanished) = quantize::quantize(values, scale.to_f32(), of.range, codes);
                        loss.squares += squares;
                        loss.vanished += vanished;
                    }
                } else {
                    let grid = |row: usize| of.grid(scales, row, self.reader.columns());
                    self.round(rows.start, values, grid, codes, back, &mut loss)?;
                }
            }
            Grids::Levels(palettes) => {
                let known = palettes.known(&self.reader, self.blocks)?;
                (loss.largest, loss.saturated) = (known.largest, saturated(known.largest, values));
                saturate(values, known.largest);
                let grid = |row: usize| grid_of(palettes, known, rows.start + row as u64);
                self.round(rows.start, values, grid, codes, back, &mut loss)?;
            }
        }
        self.measures.set(block, loss);
        if bits < 8 {
            pack(&buffers.codes, bits, out);
        }
        Ok(())
    }

    /// Chooses codes of rows by their grids and adds up the loss.
    fn round<'g>(
        &self,
        first_row: u64,
        values: &[f32],
        grid: impl Fn(usize) -> Grid<'g>,
        codes: &mut [u8],
        back: &mut Vec<f32>,
        loss: &mut BlockLoss,
    ) -> Result<()> {
        let columns = self.reader.columns().max(1);
        if let Some(rounding) = &self.rounding {
            let grids: Vec<Grid<'_>> = (0..values.len() / columns).map(&grid).collect();
            rounding.round(first_row, values, &grids, codes)?;
        }
        back.resize(columns, 0.0);
        for (row, (values, codes)) in values.chunks(columns).zip(codes.chunks_mut(columns)).enumerate() {
            let grid = grid(row);
            match grid {
                Grid::Levels { levels, scale } if self.rounding.is_none() => {
                    levels.nearest_of_all(values, scale, codes);
                    let numbers = codes.iter().map(|code| scale * levels.levels()[usize::from(*code)]);
                    back.iter_mut().zip(numbers).for_each(|(back, number)| *back = number);
                }
                grid => {
                    let numbers = codes.iter().enumerate().map(|(column, code)| grid.value(column, *code));
                    back.iter_mut().zip(numbers).for_each(|(back, number)| *back = number);
                }
            }
            let (squares, vanished) = quantize::compare(values, &back[..values.len()]);
            loss.squares += squares;
            loss.vanished += vanished;
        }
        Ok(())
    }
}

/// Returns the number of values beyond fp16, given the largest magnitude.
fn saturated(largest: f32, values: &[f32]) -> u64 {
    if largest > LARGEST { quantize::count_above(values, LARGEST) } else { 0 }
}

/// Returns the grid of a row.
fn grid_of<'a>(palettes: &Palettes, known: &'a KnownPalettes, row: u64) -> Grid<'a> {
    let scale = known.row_scales.get(row as usize).map_or(1.0, |scale| scale.to_f32());
    Grid::Levels { levels: &known.levels[(row / palettes.group) as usize], scale }
}

#[derive(Default)]
struct Buffers {
    values: Vec<f32>,
    scales: Vec<f16>,
    codes: Vec<u8>,
    back: Vec<f32>,
}

struct Codes(Arc<CodedWeight>);

impl Content for Codes {
    fn length(&self) -> u64 {
        self.0.layout.data_bytes()
    }

    fn granule(&self) -> u64 {
        self.0.layout.dtype.packed_bytes(self.0.blocks.elements())
    }

    fn prepare(&self) -> Result<()> {
        // what the pass keeps is read right after it, so that no more than a few weights are kept at once
        let is_one = matches!(&self.0.grids, Grids::Steps(scales) if scales.is_one());
        if is_one && self.0.reader.keeps() { Ok(()) } else { self.0.prepare(false) }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let own = &self.0;
        own.prepare(true)?;
        let convert = |buffers: &mut Buffers, block, out: &mut [u8]| own.convert(block, buffers, out);
        own.blocks.read(&own.reader.weight, own.layout.dtype, (offset, out), Buffers::default, convert)
    }
}

/// fp16 parts beside the codes.
#[derive(Clone, Copy)]
enum Part {
    Scales,
    Palettes,
    RowScales,
}

struct PartContent(Arc<CodedWeight>, Part);

impl Content for PartContent {
    fn length(&self) -> u64 {
        let layout = &self.0.layout;
        match self.1 {
            Part::Scales => layout.scale_bytes(),
            Part::Palettes => layout.palette_bytes(),
            Part::RowScales => layout.row_scale_bytes(),
        }
    }

    fn granule(&self) -> u64 {
        2
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let PartContent(own, part) = self;
        let end = offset.saturating_add(out.len() as u64);
        if end > self.length() || !offset.is_multiple_of(2) || !end.is_multiple_of(2) {
            let weight = format!("scale of {}", own.reader.weight.key());
            return Err(QuantError::Granule { weight, offset, end, granule: 2 }.into());
        }
        let first = offset as usize / 2;
        let mut put = |numbers: &mut dyn Iterator<Item = f16>| {
            out.chunks_exact_mut(2).zip(numbers).for_each(|(out, half)| out.copy_from_slice(&half.to_le_bytes()));
        };
        match (&own.grids, part) {
            (Grids::Steps(scales), _) => return scales.read(&own.reader, own.blocks, first, out),
            (Grids::Levels(palettes), Part::RowScales) => {
                put(&mut palettes.known(&own.reader, own.blocks)?.row_scales[first..].iter().copied());
            }
            (Grids::Levels(palettes), _) => {
                let known = palettes.known(&own.reader, own.blocks)?;
                let levels = known.levels[first / palettes.entries..].iter().flat_map(LevelTable::levels);
                put(&mut levels.skip(first % palettes.entries).map(|level| f16::from_f32(*level)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
