//! Models in several files, named `…-00001-of-000NN.gguf`.

use anec_base::listing::list;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::{GgufMetadata, Header};
use crate::error::{Result, SourceError};

/// Key of a file's index among the files, from 0.
pub const INDEX_KEY: &str = "split.no";
/// Key of the number of files.
pub const COUNT_KEY: &str = "split.count";
/// Key of the number of tensors in all files.
pub const TENSORS_KEY: &str = "split.tensors.count";

/// Parses the part number in a file's name: returns the text before it, the number from 1, and the number of parts.
pub fn name_parts(path: &Path) -> Option<(&str, u64, u64)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let parse = |digits: &str| {
        let five_digits = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
        five_digits.then(|| digits.parse().ok())?
    };
    Some((prefix, parse(number)?, parse(count)?))
}

/// Returns the paths of all files of the model that `path` is a part of, in order; only `path` if its name has no
/// number.
///
/// # Errors
/// Returns an error if the numbers are invalid or a file is missing.
pub fn paths(path: &Path) -> Result<Vec<PathBuf>> {
    let Some((prefix, number, count)) = name_parts(path) else { return Ok(vec![path.to_owned()]) };
    if number == 0 || number > count {
        return Err(SourceError::file(path, format!("the name says part {number} of {count}")));
    }
    let part = |number| path.with_file_name(format!("{prefix}-{number:05}-of-{count:05}.gguf"));
    let paths: Vec<PathBuf> = (1..=count).map(part).collect();
    let missing: Vec<u64> = (1..).zip(&paths).filter(|(_, path)| !path.exists()).map(|(number, _)| number).collect();
    if missing.is_empty() {
        return Ok(paths);
    }
    let problem = format!("the name says part {number} of {count}, but beside it these are missing: {}", list(missing));
    let advice = "put all parts into one folder, under the names they were published with";
    Err(SourceError::file(path, problem).advise(advice))
}

/// Checks that the headers of a model's files, in order, belong together.
///
/// # Errors
/// Returns an error if a file claims to be another part, counts differ, or a tensor is in two files.
pub fn check(headers: &[&Header]) -> Result<()> {
    let files = headers.len() as u64;
    let mut owners: HashMap<&str, &Path> = HashMap::new();
    for (index, header) in headers.iter().enumerate() {
        let metadata = &header.metadata;
        // a single file may omit these keys, but if present they must be right
        let default = (files == 1).then_some([1, 0]);
        expect(metadata, COUNT_KEY, files, default.map(|[count, _]| count))?;
        expect(metadata, INDEX_KEY, index as u64, default.map(|[_, index]| index))?;
        for tensor in &header.tensors {
            if let Some(other) = owners.insert(&tensor.name, metadata.path()) {
                let problem = format!("it is also in {}", other.display());
                return Err(SourceError::tensor(metadata.path(), &tensor.name, problem));
            }
        }
    }
    let tensors = owners.len() as u64;
    headers.first().map_or(Ok(()), |first| expect(&first.metadata, TENSORS_KEY, tensors, Some(tensors)))
}

/// Checks that `key` has the value `expected`, or is absent while `default` has it.
fn expect(metadata: &GgufMetadata, key: &str, expected: u64, default: Option<u64>) -> Result<()> {
    let problem = match metadata.u64(key)?.or(default) {
        Some(found) if found == expected => return Ok(()),
        Some(found) => {
            format!("the value is {found}, expected {expected}; parts must keep the names they were published with")
        }
        None => format!("it is missing, expected {expected} in a part of a split model"),
    };
    Err(SourceError::key(metadata.path(), key, problem))
}
