//! File names from untrusted places: archives, indices, bundles, hub listings.

use std::path::Path;

/// Converts a name to a relative path. Returns `None` if the path could leave the folder on any system: components are
/// separated by `/`; none may be empty, `.` or `..`, begin with a drive letter, or contain `\` or NUL.
///
/// ```
/// use anec_base::path_inside;
///
/// assert!(path_inside("onnx/model.onnx").is_some());
/// assert!(["", "/etc", "a/../../b", "a//b", "C:x", "a\\..\\b"].into_iter().all(|name| path_inside(name).is_none()));
/// ```
pub fn path_inside(name: &str) -> Option<&Path> {
    let plain = |part: &str| {
        !matches!(part, "" | "." | "..") && part.as_bytes().get(1) != Some(&b':') && !part.contains(['\\', '\0'])
    };
    name.split('/').all(plain).then(|| Path::new(name))
}
