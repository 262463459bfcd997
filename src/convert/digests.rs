//! Source facts of `bundle.json`.

use rayon::prelude::*;

use anec_base::FileError;
use anec_bundle::{FileDigest, SourceFacts};
use anec_source::{Source, SourceError, SourceFile};

/// Name, format and digests of a source. Files without a digest are read, several at a time.
///
/// # Errors
/// If a file can't be read.
pub fn source_facts(source: &Source) -> Result<SourceFacts, SourceError> {
    let digest = |file: &SourceFile| -> Result<FileDigest, SourceError> {
        Ok(FileDigest { file: file.name().into(), bytes: file.size(), digest: file.digest()?.clone() })
    };
    Ok(SourceFacts {
        name: source.name().into(),
        format: source.kind().name().into(),
        files: source.files().par_iter().map(digest).collect::<Result<_, _>>()?,
    })
}

/// Returns whether a bundle's source facts match this source; digests use the bundle's functions.
///
/// # Errors
/// If a file can't be read.
pub fn is_source(source: &Source, facts: &SourceFacts) -> Result<bool, SourceError> {
    let same = |(file, known): (&SourceFile, &FileDigest)| -> Result<bool, SourceError> {
        if (file.name(), file.size()) != (&known.file, known.bytes) {
            return Ok(false);
        }
        Ok(known.digest.rehash_file(file.path()).map_err(FileError::of(file.path(), "read"))? == known.digest)
    };
    let named = (source.name(), source.kind().name()) == (&facts.name, &facts.format);
    let as_many = source.files().len() == facts.files.len();
    let pairs: Vec<_> = source.files().iter().zip(&facts.files).collect();
    let same: Vec<bool> = pairs.into_par_iter().map(same).collect::<Result<_, _>>()?;
    Ok(named && as_many && same.into_iter().all(|same| same))
}
