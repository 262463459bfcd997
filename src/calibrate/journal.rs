//! What a calibration has finished: after a kill the next run goes on with the package that comes next.
//!
//! The codes of finished packages are in files of their own. What else the next package needs is written after each one:
//! the hidden states that left it, and the second moments that belong to the codes. A file is whole before the journal
//! names it.

use std::fs;
use std::path::{Path, PathBuf};

use anec_base::{ContentDigest, FileError, Result};
use anec_convert::files::write_json;
use anec_convert::resume::CALIBRATION_JOURNAL as FILE_NAME;
use serde::{Deserialize, Serialize};

use super::codes::Codes;

/// What is known of a calibration.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Finished {
    /// Digest of the text's tokens.
    text: String,
    /// Packages that are finished.
    packages: usize,
    /// Weights whose codes were chosen, in the order of their files.
    weights: Vec<FinishedWeight>,
    /// Bytes of all codes.
    bytes: u64,
    /// Largest memory of second moments so far.
    most_moments: u64,
}

/// A weight whose codes were chosen.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct FinishedWeight {
    key: String,
    channels: u64,
    /// How many second moments belong to it.
    moments: usize,
}

/// The journal of a calibration.
pub struct CalibrationJournal {
    folder: PathBuf,
    finished: Finished,
}

/// Where a calibration stands.
pub struct Standing {
    /// The hidden states of each window, before the package that comes next.
    pub hidden: Vec<Vec<f32>>,
    /// The codes so far.
    pub codes: Codes,
    /// Largest memory of second moments so far, in bytes.
    pub most_moments: u64,
}

impl CalibrationJournal {
    /// The journal in a folder, and where the calibration stands: where an earlier run of the same text ended, or at the
    /// beginning, with these hidden states.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn open(folder: &Path, texts: &[Vec<u32>], hidden: Vec<Vec<f32>>) -> Result<(CalibrationJournal, Standing)> {
        let bytes: Vec<u8> =
            texts.iter().flat_map(|tokens| tokens.iter().chain([&u32::MAX])).flat_map(|t| t.to_le_bytes()).collect();
        let text = ContentDigest::of(&bytes).hex().to_owned();
        let journal = |finished| CalibrationJournal { folder: folder.to_owned(), finished };
        let read = || serde_json::from_slice::<Finished>(&fs::read(folder.join(FILE_NAME)).ok()?).ok();
        let lengths: Vec<usize> = hidden.iter().map(Vec::len).collect();
        if let Some(found) = read().filter(|found| found.text == text).map(journal)
            && let Some(standing) = found.standing(&lengths)
        {
            return Ok((found, standing));
        }
        let beginning = journal(Finished { text, ..Finished::default() });
        Ok((beginning, Standing { hidden, codes: Codes::new(folder.join("codes"))?, most_moments: 0 }))
    }

    /// Packages that are finished.
    pub fn packages(&self) -> usize {
        self.finished.packages
    }

    /// Where the run that wrote the journal stood, if its files are as it left them.
    fn standing(&self, lengths: &[usize]) -> Option<Standing> {
        let hidden = read_floats(&self.hidden(), lengths)?;
        let sizes: Vec<usize> = self.finished.weights.iter().map(|weight| weight.moments).collect();
        let moments = read_floats(&self.moments(), &sizes)?;
        let mut codes = Codes::new(self.folder.join("codes")).ok()?;
        for (weight, moments) in self.finished.weights.iter().zip(moments) {
            codes.restore(weight.key.clone(), weight.channels, moments)?;
        }
        codes.restore_bytes(self.finished.bytes);
        Some(Standing { hidden, codes, most_moments: self.finished.most_moments })
    }

    /// Notes that another package is finished.
    ///
    /// # Errors
    /// When the system refuses.
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
        // the first package has none before it
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

/// Writes numbers one after another.
fn write_floats<'a>(path: &Path, parts: impl Iterator<Item = &'a [f32]>) -> Result<()> {
    let bytes: Vec<u8> = parts.flatten().flat_map(|value| value.to_le_bytes()).collect();
    Ok(fs::write(path, bytes).map_err(FileError::of(path, "write"))?)
}

/// Parts of these sizes, if the file holds them and nothing else.
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
        let (mut journal, standing) = CalibrationJournal::open(folder.path(), &texts, first.clone()).unwrap();
        assert_eq!((journal.packages(), &standing.hidden), (0, &first));
        let mut codes = standing.codes;
        for part in 1..=2 {
            codes.restore(format!("w{part}"), 8, vec![part as f32; part]).unwrap();
            codes.restore_bytes(100 * part as u64);
            let hidden = vec![vec![part as f32; 4], vec![-1.0; 2]];
            journal.finish(&hidden, &codes, 7).unwrap();
            let (again, standing) = CalibrationJournal::open(folder.path(), &texts, first.clone()).unwrap();
            assert_eq!(again.finished, journal.finished);
            assert_eq!((again.packages(), standing.hidden, standing.most_moments), (part, hidden, 7));
            assert_eq!((standing.codes.weights(), standing.codes.bytes()), (codes.weights(), 100 * part as u64));
        }
        // another text, and files that aren't whole
        let (other, _) = CalibrationJournal::open(folder.path(), &[vec![1, 2, 3]], first.clone()).unwrap();
        assert_eq!(other.packages(), 0);
        fs::write(journal.hidden(), [0; 5]).unwrap();
        let (damaged, standing) = CalibrationJournal::open(folder.path(), &texts, first.clone()).unwrap();
        assert_eq!((damaged.packages(), standing.codes.count(), standing.hidden), (0, 0, first));
    }
}
