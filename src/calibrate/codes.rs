//! Codes, in files: a byte for each element of a weight, row-major.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use anec_base::{FileError, MappedFile, Result};
use anec_manifest::Granularity;
use anec_quant::scales::scale_for;
use anec_quant::{Blocks, ChosenCodes, ErrorFeedback, Integers};
use anec_source::SourceWeight;
use ndarray::{Array2, Axis, Slice};
use rayon::prelude::*;

use super::tap::QuantTarget;

/// The largest code of int8.
const LARGEST_CODE: i8 = 127;
/// Elements of a weight that are read at a time.
const AT_A_TIME: u64 = 1 << 23;

/// Codes of weights, by their keys and output channels.
pub struct Codes {
    folder: PathBuf,
    files: BTreeMap<(String, u64), PathBuf>,
    /// The scales of weights that have one.
    scales: BTreeMap<(String, u64), f32>,
    bytes: u64,
}

impl Codes {
    /// No codes yet, in a new folder.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn new(folder: PathBuf) -> Result<Self> {
        std::fs::create_dir(&folder).map_err(FileError::of(&folder, "create"))?;
        Ok(Codes { folder, files: BTreeMap::new(), scales: BTreeMap::new(), bytes: 0 })
    }

    /// Weights that codes were chosen for.
    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// Bytes of all codes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether codes were chosen for a weight.
    pub fn has(&self, key: &str, channels: u64) -> bool {
        self.files.contains_key(&(key.to_owned(), channels))
    }

    /// Chooses the codes of a part of a weight, with the scales that the weight gets, whatever its codes are. Parts come
    /// once each, in any order.
    ///
    /// # Errors
    /// When the weight can't be read or the codes not be written.
    pub fn choose(
        &mut self,
        target: &QuantTarget,
        rows: Range<u64>,
        columns: Range<u64>,
        feedback: &ErrorFeedback,
    ) -> Result<()> {
        let next = self.files.len();
        let key = (target.key.clone(), target.channels);
        let weight = &target.weight;
        let whole = match (target.granularity, self.scales.get(&key)) {
            (_, Some(scale)) => Some(*scale),
            (Granularity::PerTensor, None) => {
                let scale = scale_for(largest(weight)?, LARGEST_CODE).to_f32();
                self.scales.insert(key.clone(), scale);
                Some(scale)
            }
            // a scale for each row
            _ => None,
        };
        let whole = whole.map(|scale| Array2::from_elem((1, 1), scale));
        let path = self.files.entry(key).or_insert_with(|| self.folder.join(format!("{next}.bin")));
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).open(&*path);
        let mut file = file.map_err(FileError::of(&*path, "create"))?;
        let width = weight.columns();
        let at_a_time = (AT_A_TIME / width.max(1)).max(1);
        for first in rows.clone().step_by(at_a_time as usize) {
            let count = at_a_time.min(rows.end - first);
            let mut part = Array2::zeros((count as usize, width as usize));
            read(weight, first, part.as_slice_mut().unwrap_or_default())?;
            let own = || {
                part.map_axis(Axis(1), |row| scale_for(row.fold(0f32, |m, v| m.max(v.abs())), LARGEST_CODE).to_f32())
            };
            let scales = whole.clone().unwrap_or_else(|| own().insert_axis(Axis(1)));
            let grid = Integers { scales: scales.view(), block: width as usize, largest: LARGEST_CODE };
            let part = part.slice_axis(Axis(1), Slice::from(columns.start as usize..columns.end as usize));
            let codes = feedback.codes(part, &grid);
            for (row, codes) in (first..).zip(codes.rows()) {
                // rows that are whole follow each other
                if row == first || columns != (0..width) {
                    let place = SeekFrom::Start(row * width + columns.start);
                    file.seek(place).map_err(FileError::of(&*path, "write"))?;
                }
                file.write_all(codes.as_slice().unwrap_or_default()).map_err(FileError::of(&*path, "write"))?;
            }
            self.bytes += codes.len() as u64;
        }
        weight.release(0..weight.elements());
        Ok(())
    }
}

impl ChosenCodes for Codes {
    fn codes(&self, key: &str, channels: u64) -> Result<Option<Arc<MappedFile>>> {
        let path = self.files.get(&(key.to_owned(), channels));
        Ok(path.map(|path| MappedFile::open(path)).transpose()?.map(Arc::new))
    }
}

/// Reads rows with all cores.
fn read(weight: &SourceWeight, first: u64, out: &mut [f32]) -> Result<()> {
    let columns = weight.columns();
    let rows = Blocks::of(weight).elements() / columns.max(1);
    let parts = out.par_chunks_mut((rows * columns).max(1) as usize).enumerate();
    parts.try_for_each(|(part, out)| Ok(weight.read_rows(first + part as u64 * rows, out)?))
}

/// The largest magnitude of a weight.
fn largest(weight: &SourceWeight) -> Result<f32> {
    let blocks = Blocks::of(weight);
    let of_block = |values: &mut Vec<f32>, block| -> Result<f32> {
        let rows = blocks.rows(block);
        values.resize(((rows.end - rows.start) * blocks.columns()) as usize, 0.0);
        weight.read_rows(rows.start, values)?;
        Ok(values.iter().fold(0f32, |most, value| most.max(value.abs())))
    };
    let all = (0..blocks.count()).into_par_iter().map_init(Vec::new, of_block);
    all.try_reduce(|| 0.0, |a, b| Ok(a.max(b)))
}
