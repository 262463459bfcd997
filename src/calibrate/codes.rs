//! Chosen codes, kept in files: one byte per element of a weight, row-major, with fp16 scales in a file beside it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec_base::{FileError, MappedFile, Result};
use anec_manifest::Overflow;
use anec_quant::{ChosenCodes, CodedWeight, ErrorFeedback, Inputs};
use half::f16;
use ndarray::{ArrayView1, Axis, Slice};

use super::observed::QuantTarget;

/// Number of elements of a weight that are read at a time.
const AT_A_TIME: u64 = 1 << 23;

/// Codes of weights, by key and number of output channels.
pub struct Codes {
    folder: PathBuf,
    /// Number of each weight's file.
    files: BTreeMap<(String, u64), usize>,
    /// Second moments of the inputs, by file number.
    moments: Vec<Vec<f32>>,
    bytes: u64,
}

/// Weight whose codes are being chosen, with scales or palettes that don't depend on the codes.
pub struct WeightCodes<'a> {
    target: &'a QuantTarget,
    grids: Arc<CodedWeight>,
    path: PathBuf,
}

impl WeightCodes<'_> {
    /// Returns the weight.
    pub fn target(&self) -> &QuantTarget {
        self.target
    }
}

impl Codes {
    /// Creates `folder` for codes.
    ///
    /// # Errors
    /// Returns an error if the folder can't be created.
    pub fn new(folder: PathBuf) -> Result<Self> {
        std::fs::create_dir_all(&folder).map_err(FileError::of(&folder, "create"))?;
        Ok(Codes { folder, files: BTreeMap::new(), moments: Vec::new(), bytes: 0 })
    }

    /// Returns keys, output channels and second moments of all weights, in the order of their files.
    pub fn weights(&self) -> Vec<(&str, u64, &[f32])> {
        let mut weights: Vec<_> = self.files.iter().map(|((key, channels), file)| (*file, key, *channels)).collect();
        weights.sort_unstable();
        weights
            .into_iter()
            .map(|(file, key, channels)| (key.as_str(), channels, self.moments[file].as_slice()))
            .collect()
    }

    /// Adds a weight whose codes an earlier run has written, after all others. Returns `None` if it is already there.
    pub fn restore(&mut self, key: String, channels: u64, moments: Vec<f32>) -> Option<()> {
        let file = self.moments.len();
        self.moments.push(moments);
        self.files.insert((key, channels), file).is_none().then_some(())
    }

    /// Sets the number of bytes of codes that an earlier run has written.
    pub fn restore_bytes(&mut self, bytes: u64) {
        self.bytes = bytes;
    }

    fn path(&self, file: usize) -> PathBuf {
        self.folder.join(format!("{file}.bin"))
    }

    fn file_of(&self, key: &str, channels: u64) -> Option<usize> {
        self.files.get(&(key.to_owned(), channels)).copied()
    }

    /// Number of weights with chosen codes.
    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// Size of all codes in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether codes were chosen for a weight.
    pub fn has(&self, key: &str, channels: u64) -> bool {
        self.file_of(key, channels).is_some()
    }

    /// Begins a weight whose input channels have the given second moments.
    pub fn begin<'a>(&mut self, target: &'a QuantTarget, moments: &[f32]) -> WeightCodes<'a> {
        let next = self.files.len();
        let file = *self.files.entry((target.key.clone(), target.channels)).or_insert(next);
        self.moments.resize(self.files.len(), Vec::new());
        self.moments[file] = moments.to_vec();
        let weight = target.weight.clone();
        let grids = CodedWeight::with_inputs(weight, target.format, Overflow::Saturate, None, Inputs::Moments(moments));
        WeightCodes { target, grids, path: self.path(file) }
    }

    /// Chooses the codes of a part of a weight. Parts may come in any order, each once.
    ///
    /// # Errors
    /// Returns an error if the weight can't be read or the codes can't be written.
    pub fn choose(
        &mut self,
        weight_codes: &WeightCodes<'_>,
        rows: Range<u64>,
        columns: Range<u64>,
        feedback: &ErrorFeedback,
    ) -> Result<()> {
        let weight = &weight_codes.target.weight;
        let width = weight.columns();
        let at_a_time = (AT_A_TIME / width.max(1)).max(1);
        let own = Slice::from(columns.start as usize..columns.end as usize);
        let mut out = PartFile::open(&weight_codes.path)?;
        let mut of_scales = None;
        let mut values = Vec::new();
        for first in rows.clone().step_by(at_a_time as usize) {
            let end = rows.end.min(first + at_a_time);
            let chosen = weight_codes.grids.with_grids(first..end, &mut values, |rows, grids| {
                feedback.codes(rows.slice_axis(Axis(1), own), grids, columns.start as usize)
            })?;
            out.rows(first, columns.start, width, chosen.codes.rows().into_iter().map(|row| row.to_vec()))?;
            self.bytes += chosen.codes.len() as u64;
            if let Some(scales) = chosen.scales {
                let block = (columns.end - columns.start) / scales.ncols().max(1) as u64;
                let file = match &mut of_scales {
                    Some(file) => file,
                    none => none.insert(PartFile::open(&scales_of(&weight_codes.path))?),
                };
                let bytes = |row: ArrayView1<'_, f16>| row.iter().flat_map(|scale| scale.to_le_bytes()).collect();
                file.rows(
                    first,
                    2 * (columns.start / block),
                    2 * (width / block),
                    scales.rows().into_iter().map(bytes),
                )?;
                self.bytes += 2 * scales.len() as u64;
            }
        }
        weight.release(0..weight.elements());
        Ok(())
    }
}

/// Returns the path of the scales that belong to codes.
fn scales_of(codes: &Path) -> PathBuf {
    codes.with_extension("scales")
}

/// File that is written in parts.
struct PartFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl PartFile {
    fn open(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).open(path);
        Ok(PartFile { path: path.to_owned(), file: BufWriter::new(file.map_err(FileError::of(path, "create"))?) })
    }

    /// Writes consecutive rows, each from byte `start` of the row on; a whole row has `width` bytes.
    fn rows(&mut self, first: u64, start: u64, width: u64, rows: impl Iterator<Item = Vec<u8>>) -> Result<()> {
        for (row, bytes) in (first..).zip(rows) {
            // whole rows are contiguous
            if row == first || bytes.len() as u64 != width {
                let place = SeekFrom::Start(row * width + start);
                self.file.seek(place).map_err(FileError::of(&self.path, "write"))?;
            }
            self.file.write_all(&bytes).map_err(FileError::of(&self.path, "write"))?;
        }
        Ok(self.file.flush().map_err(FileError::of(&self.path, "write"))?)
    }
}

impl ChosenCodes for Codes {
    fn codes(&self, key: &str, channels: u64) -> Result<Option<Arc<MappedFile>>> {
        let file = self.file_of(key, channels);
        Ok(file.map(|file| MappedFile::open(&self.path(file))).transpose()?.map(Arc::new))
    }

    fn scales(&self, key: &str, channels: u64) -> Result<Option<Vec<f16>>> {
        let path = self.file_of(key, channels).map(|file| scales_of(&self.path(file)));
        let Some(path) = path.filter(|path| path.exists()) else { return Ok(None) };
        let file = MappedFile::open(&path)?;
        let scales = file.bytes().chunks_exact(2).map(|bytes| f16::from_le_bytes([bytes[0], bytes[1]]));
        Ok(Some(scales.collect()))
    }

    fn moments(&self, key: &str, channels: u64) -> Option<&[f32]> {
        self.file_of(key, channels).map(|file| self.moments[file].as_slice())
    }
}
