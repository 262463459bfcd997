//! Codes, in files: a byte for each element of a weight, row-major.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use anec_base::{FileError, MappedFile, Result};
use anec_manifest::{Granularity, Overflow};
use anec_quant::scales::{scale_for, tensor_scale};
use anec_quant::{Blocks, ChosenCodes, ErrorFeedback, Grid};
use anec_source::SourceWeight;
use half::f16;
use ndarray::{Array2, ArrayView1, Axis, Slice};
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
    scales: BTreeMap<(String, u64), f16>,
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
                let scale = tensor_scale(weight, LARGEST_CODE, Overflow::Saturate)?;
                self.scales.insert(key.clone(), scale);
                Some(scale)
            }
            // a scale for each row
            _ => None,
        };
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
            let own = |row: ArrayView1<'_, f32>| row.iter().fold(0f32, |most, value| most.max(value.abs()));
            let scale = |row| whole.unwrap_or_else(|| scale_for(own(row), LARGEST_CODE));
            let scales: Vec<f16> = part.rows().into_iter().map(scale).collect();
            let grid =
                |scale| Grid::Steps { scales: std::slice::from_ref(scale), block: width as usize, most: LARGEST_CODE };
            let grids: Vec<Grid<'_>> = scales.iter().map(grid).collect();
            let part = part.slice_axis(Axis(1), Slice::from(columns.start as usize..columns.end as usize));
            let codes = feedback.codes(part, &grids);
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
