//! Codes, in files: a byte for each element of a weight, row-major.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use anec_base::{FileError, MappedFile, Result};
use anec_manifest::Overflow;
use anec_quant::{ChosenCodes, CodedWeight, ErrorFeedback};
use ndarray::{Axis, Slice};

use super::tap::QuantTarget;

/// Elements of a weight that are read at a time.
const AT_A_TIME: u64 = 1 << 23;

/// Codes of weights, by their keys and output channels.
pub struct Codes {
    folder: PathBuf,
    files: BTreeMap<(String, u64), PathBuf>,
    /// Second moments of the inputs.
    moments: BTreeMap<(String, u64), Vec<f32>>,
    bytes: u64,
}

/// A weight whose codes are being chosen: its scales or palettes, which are those that it gets whatever its codes are.
pub struct Draft<'a> {
    target: &'a QuantTarget,
    grids: Arc<CodedWeight>,
    path: PathBuf,
}

impl Draft<'_> {
    /// The weight.
    pub fn target(&self) -> &QuantTarget {
        self.target
    }
}

impl Codes {
    /// No codes yet, in a new folder.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn new(folder: PathBuf) -> Result<Self> {
        std::fs::create_dir(&folder).map_err(FileError::of(&folder, "create"))?;
        Ok(Codes { folder, files: BTreeMap::new(), moments: BTreeMap::new(), bytes: 0 })
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

    /// Begins a weight, whose input channels have these second moments.
    pub fn begin<'a>(&mut self, target: &'a QuantTarget, moments: &[f32]) -> Draft<'a> {
        let next = self.files.len();
        let key = (target.key.clone(), target.channels);
        self.moments.insert(key.clone(), moments.to_vec());
        let weight = target.weight.clone();
        let grids = CodedWeight::with_moments(weight, target.format, Overflow::Saturate, None, Some(moments));
        let path = self.files.entry(key).or_insert_with(|| self.folder.join(format!("{next}.bin"))).clone();
        Draft { target, grids, path }
    }

    /// Chooses the codes of a part of a weight. Parts come once each, in any order.
    ///
    /// # Errors
    /// When the weight can't be read or the codes not be written.
    pub fn choose(
        &mut self,
        draft: &Draft<'_>,
        rows: Range<u64>,
        columns: Range<u64>,
        feedback: &ErrorFeedback,
    ) -> Result<()> {
        let (weight, path) = (&draft.target.weight, &draft.path);
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).open(path);
        let mut file = file.map_err(FileError::of(path, "create"))?;
        let width = weight.columns();
        let at_a_time = (AT_A_TIME / width.max(1)).max(1);
        let own = Slice::from(columns.start as usize..columns.end as usize);
        let mut values = Vec::new();
        for first in rows.clone().step_by(at_a_time as usize) {
            let end = rows.end.min(first + at_a_time);
            let codes = draft.grids.with_grids(first..end, &mut values, |rows, grids| {
                feedback.codes(rows.slice_axis(Axis(1), own), grids, columns.start as usize)
            })?;
            for (row, codes) in (first..).zip(codes.rows()) {
                // rows that are whole follow each other
                if row == first || columns != (0..width) {
                    let place = SeekFrom::Start(row * width + columns.start);
                    file.seek(place).map_err(FileError::of(path, "write"))?;
                }
                file.write_all(codes.as_slice().unwrap_or_default()).map_err(FileError::of(path, "write"))?;
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

    fn moments(&self, key: &str, channels: u64) -> Option<&[f32]> {
        self.moments.get(&(key.to_owned(), channels)).map(Vec::as_slice)
    }
}
