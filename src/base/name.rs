//! Names of files that come from elsewhere: in archives, indices, bundles and listings of a hub.

use std::path::Path;

/// The path below a folder that a name stands for, unless it could lead out of that folder on some system: its parts lie
/// between `/`, and none is empty, `.` or `..`, begins with a drive's letter, or holds `\` or NUL.
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
