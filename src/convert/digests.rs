//! What `bundle.json` says of the source.

use rayon::prelude::*;

use anec_bundle::{FileDigest, SourceFacts};
use anec_source::{Source, SourceError, SourceFile};

/// Name, format and digests of a source, whose files are read whole for them, several at a time.
///
/// # Errors
/// When a file can't be read.
pub fn source_facts(source: &Source) -> Result<SourceFacts, SourceError> {
    let digest = |file: &SourceFile| -> Result<FileDigest, SourceError> {
        Ok(FileDigest { file: file.name().into(), bytes: file.size(), sha256: file.sha256()?.into() })
    };
    Ok(SourceFacts {
        name: source.name().into(),
        format: source.kind().name().into(),
        files: source.files().par_iter().map(digest).collect::<Result<_, _>>()?,
    })
}
