//! `anec pack` and `anec unpack`

use std::path::{Path, PathBuf};

use serde_json::json;

use super::{print, print_json, progress};
use anec::base::Result;
use anec::bundle::{Bundle, BundleError, FILE_NAME};
use anec::convert::resume;
use anec::package::archive;
use anec::report::{bytes, counted};
use anec::runtime::RuntimeError;

/// Pack a bundle into one reproducible zip file
#[derive(Debug, clap::Args)]
pub struct PackArgs {
    /// Bundle folder
    bundle: PathBuf,
    /// Output file [default: BUNDLE.zip]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Unpack a bundle; damaged or unsafe archives are refused
#[derive(Debug, clap::Args)]
pub struct UnpackArgs {
    /// Zip file
    archive: PathBuf,
    /// Bundle folder [default: the file's name without .zip]
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl PackArgs {
    pub(super) fn run(self) -> Result<u8> {
        if !self.bundle.join(FILE_NAME).is_file() {
            return Err(RuntimeError::NoBundle { path: self.bundle }.into());
        }
        let bundle = Bundle::read(&self.bundle)?;
        if let Some(package) = bundle.packages.iter().find(|p| !resume::complete(&self.bundle, &p.files)) {
            let path = self.bundle.join(&package.package);
            return Err(BundleError::Content { path, problem: "files are missing or cut short".into() }.into());
        }
        let out = self.out.unwrap_or_else(|| with_extension(&self.bundle, "zip"));
        let bar = progress::bytes();
        bar.stage(&bundle.name);
        bar.expect(bundle.packages.iter().flat_map(|p| &p.files).chain([&bundle.host.file]).map(|f| f.bytes).sum());
        let packed = archive::pack(&self.bundle, &out, self.force, &|bytes| bar.add(bytes))?;
        bar.finish();
        finish(self.json, &out, packed, "packed into")
    }
}

impl UnpackArgs {
    pub(super) fn run(self) -> Result<u8> {
        let out = self.out.unwrap_or_else(|| self.archive.with_extension(""));
        let bar = progress::bytes();
        let limits = archive::UnpackLimits::default();
        let unpacked = archive::unpack(&self.archive, &out, &limits, &|bytes| bar.add(bytes))?;
        bar.finish();
        let read = match out.join(FILE_NAME).is_file() {
            true => Bundle::read(&out).map_err(anec::base::Error::from),
            false => Err(RuntimeError::NoBundle { path: self.archive }.into()),
        };
        if let Err(error) = read {
            // this call created the folder
            let _ = std::fs::remove_dir_all(&out);
            return Err(error);
        }
        finish(self.json, &out, unpacked, "unpacked into")
    }
}

fn finish(as_json: bool, out: &Path, archived: archive::Archived, what: &str) -> Result<u8> {
    if as_json {
        print_json(&json!({"path": out, "files": archived.files, "bytes": archived.bytes}));
    } else {
        print(&format!("{} ({}) {what} {}", counted(archived.files, "file"), bytes(archived.bytes), out.display()));
    }
    Ok(0)
}

/// Appends an extension: `model-1.5.anec` becomes `model-1.5.anec.zip`.
fn with_extension(path: &Path, extension: &str) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(extension);
    path.with_file_name(name)
}
