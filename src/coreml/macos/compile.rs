//! Compilation of packages by Core ML itself, without Xcode.

use std::path::Path;

use objc2_core_ml::MLModel;
use objc2_foundation::NSURL;

use super::{Task, url};
use crate::cache::move_folder;
use crate::error::CoreMlError;

pub(super) fn compile(package: &Path, target: &Path) -> Result<(), CoreMlError> {
    let task = Task { action: "compile", path: package };
    task.guard(|| {
        let from = url(package)?;
        let compiled = task.wait::<NSURL>(|handler| {
            // SAFETY: both arguments live through the call; Core ML copies the handler.
            unsafe { MLModel::compileModelAtURL_completionHandler(&from, handler) }
        })?;
        let compiled = compiled.to_file_path().ok_or_else(|| task.refused("the result has no path"))?;
        move_folder(&compiled, target)
    })
}
