//! Journal of a calibration, from which an interrupted run resumes at the next package.
//!
//! The codes of finished packages are in files of their own. After each package, the other data that the next one needs
//! are written: the hidden states that leave the package, and the second moments of the chosen codes. Files are
//! complete before the journal names them.

use std::fs;
use std::path::{Path, PathBuf};

use anec_base::{ContentDigest, FileError, Result};
use anec_convert::files::write_json;
use anec_convert::resume::CALIBRATION_JOURNAL as FILE_NAME;
use serde::{Deserialize, Serialize};

use super::codes::Codes;

/// Content of the journal.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Finished {
    /// Digest of the text's tokens.
    text: String,
    /// Number of finished packages.
    packages: usize,
    /// Weights with chosen codes, in the order of their files.
    weights: Vec<FinishedWeight>,
    /// Size of all codes in bytes.
    bytes: u64,
    /// Peak memory of second moments in bytes.
    most_moments: u64,
}

/// Weight with chosen codes.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct FinishedWeight {
    key: String,
    channels: u64,
    /// Number of second moments.
    moments: usize,
}

/// Journal of a calibration.
pub struct CalibrationJournal {
    folder: PathBuf,
    finished: Finished,
}

/// Progress of a calibration.
pub struct CalibrationProgress {
    /// Hidden states of each window at the entry of the next package.
    pub hidden: Vec<Vec<f32>>,
    /// Codes chosen so far.
    pub codes: Codes,
    /// Peak memory of second moments in bytes.
    pub most_moments: u64,
}

impl CalibrationJournal {
    /// Opens the journal in a folder. Returns the progress of an earlier run of the same text, or the initial progress
    /// with the given hidden states.
    ///
    /// # Errors
    /// Returns an error if the folder can't be created.
    pub fn open(
        folder: &Path,
        texts: &[Vec<u32>],
        hidden: Vec<Vec<f32>>,
    ) -> Result<(CalibrationJournal, CalibrationProgress)> {
        let bytes: Vec<u8> =
            texts.iter().flat_map(|tokens| tokens.iter().chain([&u32::MAX])).flat_map(|t| t.to_le_bytes()).collect();
        let text = ContentDigest::of(&bytes).hex().to_owned();
        let journal = |finished| CalibrationJournal { folder: folder.to_owned(), finished };
        let read = || serde_json::from_slice::<Finished>(&fs::read(folder.join(FILE_NAME)).ok()?).ok();
        let lengths: Vec<usize> = hidden.iter().map(Vec::len).collect();
        if let Some(found) = read().filter(|found| found.text == text).map(journal)
            && let Some(progress) = found.progress(&lengths)
        {
            return Ok((found, progress));
        }
        let beginning = journal(Finished { text, ..Finished::default() });
        Ok((beginning, CalibrationProgress { hidden, codes: Codes::new(folder.join("codes"))?, most_moments: 0 }))
    }

    /// Number of finished packages.
    pub fn packages(&self) -> usize {
        self.finished.packages
    }

    /// Returns the recorded progress if its files are intact.
    fn progress(&self, lengths: &[usize]) -> Option<CalibrationProgress> {
        let hidden = read_floats(&self.hidden(), lengths)?;
        let sizes: Vec<usize> = self.finished.weights.iter().map(|weight| weight.moments).collect();
        let moments = read_floats(&self.moments(), &sizes)?;
        let mut codes = Codes::new(self.folder.join("codes")).ok()?;
        for (weight, moments) in self.finished.weights.iter().zip(moments) {
            codes.restore(weight.key.clone(), weight.channels, moments)?;
        }
        codes.restore_bytes(self.finished.bytes);
        Some(CalibrationProgress { hidden, codes, most_moments: self.finished.most_moments })
    }

    /// Records that another package is finished.
    ///
    /// # Errors
    /// Returns an error if a file can't be written or removed.
    pub fn finish(&mut self, hidden: &[Vec<f32>], codes: &Codes, most_moments: u64) -> Result<()> {
        let old = [self.hidden(), self.moments()];
        self.finished.packages += 1;
        let weight = |(key, channels, moments): (&str, u64, &[f32])| FinishedWeight {
            key: key.to_owned(),
            channels,
            moments: moments.len(),
        };
        self.finished.weights = codes.weights().into_iter().map(weight).collect();
        (self.finished.bytes, self.finished.most_moments) = (codes.bytes(), most_moments);
        write_floats(&self.hidden(), hidden.iter().map(Vec::as_slice))?;
        write_floats(&self.moments(), codes.weights().into_iter().map(|(.., moments)| moments))?;
        write_json(&self.folder.join(FILE_NAME), &self.finished)?;
        // the first package has no predecessor
        for path in old.iter().filter(|path| path.exists()) {
            fs::remove_file(path).map_err(FileError::of(path, "remove"))?;
        }
        Ok(())
    }

    fn hidden(&self) -> PathBuf {
        self.folder.join(format!("hidden-{}.bin", self.finished.packages))
    }

    fn moments(&self) -> PathBuf {
        self.folder.join(format!("moments-{}.bin", self.finished.packages))
    }
}

fn write_floats<'a>(path: &Path, parts: impl Iterator<Item = &'a [f32]>) -> Result<()> {
    let bytes: Vec<u8> = parts.flatten().flat_map(|value| value.to_le_bytes()).collect();
    Ok(fs::write(path, bytes).map_err(FileError::of(path, "write"))?)
}

/// Reads parts of the given sizes; `None` unless the file holds exactly these.
fn read_floats(path: &Path, sizes: &[usize]) -> Option<Vec<Vec<f32>>> {
    let bytes = fs::read(path).ok()?;
    let (numbers, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() || numbers.len() != sizes.iter().sum::<usize>() {
        return None;
    }
    let mut numbers = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes));
    Some(sizes.iter().map(|size| numbers.by_ref().take(*size).collect()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_goes_on_where_the_last_one_of_the_same_text_ended() {
        let folder = tempfile::tempdir().unwrap();
        let (texts, first) = (vec![vec![1, 2], vec![3]], vec![vec![0.0; 4], vec![0.5; 2]]);
        let (mut journal, progress) = CalibrationJournal::open(folder.path(), &texts, first.clone()).unwrap();
        assert_eq!((journal.packages(), &progress.hidden), (0, &first));
        let mut codes = progress.codes;
        for part in 1..=2 {
            codes.restore(format!("w{part}"), 8, vec![part as f32; part]).unwrap();
            codes.restore_bytes(100 * part as u64);
            let hidden = vec![vec![part as f32; 4], vec![-1.0; 2]];
            journal.finish(&hidden, &codes, 7).unwrap();
            let (again, progress) = CalibrationJournal::open(folder.path(), &texts, first.clone()).unwrap();
            assert_eq!(again.finished, journal.finished);
            assert_eq!((again.packages(), progress.hidden, progress.most_moments), (part, hidden, 7));
            assert_eq!((progress.codes.weights(), progress.codes.bytes()), (codes.weights(), 100 * part as u64));
        }
        // another text, and incomplete files
        let (other, _) = CalibrationJournal::open(folder.path(), &[vec![1, 2, 3]], first.clone()).unwrap();
        assert_eq!(other.packages(), 0);
        fs::write(journal.hidden(), [0; 5]).unwrap();
        let (damaged, progress) = CalibrationJournal::open(folder.path(), &texts, first.clone()).unwrap();
        assert_eq!((damaged.packages(), progress.codes.count(), progress.hidden), (0, 0, first));
    }
}
