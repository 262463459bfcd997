//! Writer of planned weight files.

use std::collections::HashSet;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use super::plan::{Planned, address};
use super::{ALIGNMENT, WeightPlan, header};
use crate::PackageError;
use crate::stream::{Blake3Pieces, FilePart, NotWritten, write_parts};
use anec_base::Result;
use anec_mil::{Content, Data};

/// Progress of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteProgress {
    /// Number of further bytes of contents that are ready to be read.
    Prepared(u64),
    /// Number of further bytes written.
    Written(u64),
}

/// Contents that are about to be read, each once.
#[derive(Default)]
pub(crate) struct Preparation {
    contents: Vec<(Arc<dyn Content>, String)>,
    known: HashSet<usize>,
}

impl Preparation {
    /// Adds a content of a constant.
    pub(crate) fn add(&mut self, content: &Arc<dyn Content>, owner: &str) {
        if self.known.insert(address(content)) {
            self.contents.push((content.clone(), owner.to_owned()));
        }
    }

    /// Size of all contents in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.contents.iter().fold(0, |sum, (content, _)| sum.saturating_add(content.length()))
    }

    /// Prepares every content for reading. Contents parallelize this over the pool themselves.
    ///
    /// # Errors
    /// Returns the first error of a content, with its constant's name.
    pub(crate) fn prepare(&self, progress: &(dyn Fn(WriteProgress) + Sync)) -> Result<()> {
        self.contents.iter().try_for_each(|(content, owner)| {
            content.prepare().map_err(|cause| PackageError::Constant { owner: format!("op `{owner}`"), cause })?;
            progress(WriteProgress::Prepared(content.length()));
            Ok(())
        })
    }
}

impl WeightPlan {
    /// Writes the file and returns its BLAKE3. Data is produced by the threads of rayon's pool.
    ///
    /// # Errors
    /// Returns an error if the file can't be written or a content can't be produced. A full disk is detected before the
    /// first constant if the system can reserve space.
    pub fn write(&self, path: &Path, progress: &(dyn Fn(WriteProgress) + Sync)) -> Result<blake3::Hash> {
        let refused = |action, source| PackageError::write(path, action, source);
        let file = File::options().read(true).write(true).create_new(true).open(path);
        let file = file.map_err(|e| refused("create the weight file", e))?;
        let count = u32::try_from(self.blobs.len())
            .map_err(|_| PackageError::Program { problem: format!("{} blobs in a weight file", self.blobs.len()) })?;
        // the header, then the record and data of each blob
        let mut parts = vec![FilePart::Bytes(header(count).to_vec().into())];
        let mut end = ALIGNMENT;
        for Planned { record, data, .. } in &self.blobs {
            let mut aligned = vec![0; (record.offset - end) as usize];
            aligned.extend(record.to_bytes());
            parts.push(FilePart::Bytes(aligned.into()));
            parts.push(match data {
                Data::Literal(bytes) => FilePart::Bytes(bytes[..].into()),
                Data::Content(content) => FilePart::Content(&**content),
                Data::Strings(_) => FilePart::Bytes([][..].into()),
            });
            end = record.data + record.length;
        }
        let is_data = |part: usize| part > 0 && part.is_multiple_of(2);
        let written = |part, bytes| {
            if is_data(part) {
                progress(WriteProgress::Written(bytes));
            }
        };
        match write_parts::<Blake3Pieces>(&file, &parts, &written) {
            Ok(summary) => Ok(summary.digest),
            Err(NotWritten::File { action, source }) => Err(refused(action, source).into()),
            Err(NotWritten::Part { index, cause }) => {
                let owner = self.blobs[(index - 1) / 2].owner.clone();
                Err(PackageError::Constant { owner, cause }.into())
            }
        }
    }
}
