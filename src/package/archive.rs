//! Reproducible zip archives of folders, and their safe extraction.
//!
//! Equal folders give equal archives: entries are sorted by name, and times and modes are fixed. Files that don't
//! compress (weights, tensors) are stored, others are deflated. Archives from elsewhere aren't trusted: names that lead
//! out of the target, links, duplicate names, overlapping entries and contents larger than announced or than the limits
//! allow are refused, and nothing of such an archive stays on the disk.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use zip::read::ZipArchive;
use zip::result::ZipError;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, System, ZipWriter};

use super::PackageError;
use super::files::{PartialFolder, check_space};
use anec_base::output::{OutputFile, is_partial_name};
use anec_base::{FileError, open_file, path_inside};

/// Extensions of files that are stored uncompressed, because their numbers don't compress.
const STORED: [&str; 5] = ["bin", "safetensors", "gguf", "npz", "zip"];

/// Maximum depth of folders.
const MAX_DEPTH: usize = 32;

/// Limits for the content of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnpackLimits {
    /// Maximum size of all files together, in bytes.
    pub bytes: u64,
    /// Maximum number of entries.
    pub entries: usize,
    /// Maximum size of all files per byte of the archive, beyond the first 16 MiB.
    pub ratio: u64,
}

impl Default for UnpackLimits {
    /// Returns limits of 1 TiB, 100,000 entries, and 100 bytes per byte of the archive.
    fn default() -> Self {
        UnpackLimits { bytes: 1 << 40, entries: 100_000, ratio: 100 }
    }
}

/// Size of the content that an archive of any size may have.
const RATIO_SLACK: u64 = 16 << 20;

/// Totals of an archive that was written or unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Archived {
    /// Number of files.
    pub files: usize,
    /// Size of the files in bytes.
    pub bytes: u64,
}

/// Writes all files of a folder to an archive, under their paths below the folder. Calls `progress` with bytes as they
/// are read.
///
/// # Errors
/// Returns an error if the folder holds anything but files and folders or is unfinished, if the archive exists and
/// `replace` is false, or if a file can't be read or written.
pub fn pack(folder: &Path, archive: &Path, replace: bool, progress: &dyn Fn(u64)) -> Result<Archived, PackageError> {
    let mut entries = Vec::new();
    collect(folder, "", 0, &mut entries)?;
    entries.sort();
    let free = || match fs::symlink_metadata(archive) {
        Ok(_) if !replace => Err(PackageError::Exists { path: archive.to_owned() }),
        _ => Ok(()),
    };
    free()?;
    let parent = archive.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(|e| PackageError::write(parent, "create the folder", e))?;
    let output = OutputFile::create(archive).map_err(not_written)?;
    let refused = |source: io::Error| PackageError::write(archive, "write", source);
    let failure = RefCell::new(None);
    let first_failure = || failure.take().map_or(Ok(()), |e| Err(refused(e)));
    let mut zip = ZipWriter::new(BufWriter::with_capacity(1 << 20, Sink { file: output.file(), failure: &failure }));
    let mut done = Archived { files: 0, bytes: 0 };
    for (name, is_folder) in entries {
        let options = SimpleFileOptions::default().last_modified_time(DateTime::DEFAULT).system(System::Unix);
        if is_folder {
            zip.add_directory(name, options.unix_permissions(0o755)).map_err(|e| refused(io_error(e)))?;
            continue;
        }
        let path = folder.join(&name);
        let unreadable = |e| PackageError::unreadable(&path, e);
        let (mut file, size) = open_file(&path).map_err(|e| unreadable(e.error))?;
        let stored = path.extension().is_some_and(|e| STORED.iter().any(|s| e == *s));
        let method = if stored { CompressionMethod::Stored } else { CompressionMethod::Deflated };
        // deflating may slightly enlarge incompressible data
        let large = size >= u64::from(u32::MAX) - (1 << 24);
        let options = options.unix_permissions(0o644).compression_method(method).large_file(large);
        zip.start_file(name, options).map_err(|e| refused(io_error(e)))?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            let read = file.read(&mut buffer).map_err(unreadable)?;
            if read == 0 {
                break;
            }
            zip.write_all(&buffer[..read]).map_err(refused)?;
            first_failure()?;
            progress(read as u64);
            done.bytes += read as u64;
        }
        done.files += 1;
    }
    let writer = zip.finish().map_err(|e| refused(io_error(e)))?;
    writer.into_inner().map_err(|e| refused(e.into_error()))?;
    first_failure()?;
    output.sync().map_err(not_written)?;
    free()?;
    output.commit().map_err(not_written)?;
    Ok(done)
}

fn not_written(error: FileError) -> PackageError {
    PackageError::write(&error.path, error.action, error.error)
}

/// File that records its first error. When the zip writer is dropped after a failure, it tries to finish the archive
/// and prints the errors of that.
struct Sink<'a> {
    file: &'a File,
    failure: &'a RefCell<Option<io::Error>>,
}

impl Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.file.write(bytes) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                self.failure.borrow_mut().get_or_insert(error);
                Ok(bytes.len())
            }
            other => other,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for Sink<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// Collects files and empty folders by their path below the root.
fn collect(folder: &Path, prefix: &str, depth: usize, out: &mut Vec<(String, bool)>) -> Result<(), PackageError> {
    let unreadable = |e| PackageError::unreadable(folder, e);
    if depth > MAX_DEPTH {
        return Err(PackageError::corrupt(folder, format!("folders nest deeper than {MAX_DEPTH}")));
    }
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        let Ok(file_name) = entry.file_name().into_string() else {
            return Err(PackageError::corrupt(&path, "the name is not UTF-8"));
        };
        if is_partial_name(&file_name) {
            return Err(PackageError::corrupt(&path, "unfinished: a run was killed or is still writing here"));
        }
        let name = format!("{prefix}{file_name}");
        let kind = entry.file_type().map_err(unreadable)?;
        if kind.is_dir() {
            let before = out.len();
            collect(&path, &format!("{name}/"), depth + 1, out)?;
            if out.len() == before {
                out.push((name, true));
            }
        } else if kind.is_file() {
            out.push((name, false));
        } else {
            return Err(PackageError::corrupt(&path, "neither a file nor a folder; links are not packed"));
        }
    }
    Ok(())
}

/// Unpacks an archive into a new folder, which appears once it is complete.
///
/// # Errors
/// Returns an error if the archive is damaged or unsafe (see the module), the target exists, or a file can't be
/// written.
pub fn unpack(
    archive: &Path,
    target: &Path,
    limits: &UnpackLimits,
    progress: &dyn Fn(u64),
) -> Result<Archived, PackageError> {
    let (file, archive_bytes) = open_file(archive).map_err(|e| PackageError::unreadable(archive, e.error))?;
    let corrupt = |problem: String| PackageError::corrupt(archive, problem);
    let mut zip = ZipArchive::new(BufReader::new(file)).map_err(|e| corrupt(format!("no zip archive: {e}")))?;
    if zip.len() > limits.entries {
        return Err(corrupt(format!("{} entries, the limit is {}", zip.len(), limits.entries)));
    }
    if zip.has_duplicate_names() {
        return Err(corrupt("two entries have one name".into()));
    }
    let names = check_entries(archive, &mut zip)?;
    if zip.has_overlapping_entries().map_err(|e| corrupt(e.to_string()))? {
        return Err(corrupt("entries overlap".into()));
    }
    let total = names.iter().try_fold(0u64, |sum, entry| sum.checked_add(entry.size));
    let most = limits.bytes.min(archive_bytes.saturating_mul(limits.ratio).saturating_add(RATIO_SLACK));
    match total {
        Some(total) if total <= most => {}
        _ => {
            let found = total.map_or("more than 2^64".to_owned(), |t| t.to_string());
            return Err(corrupt(format!("its files are announced with {found} bytes, the limit is {most}")));
        }
    }
    let folder = PartialFolder::create(target, false)?;
    check_space(folder.path(), total.unwrap_or(0))?;
    let mut done = Archived { files: 0, bytes: 0 };
    for (index, entry) in names.iter().enumerate() {
        let path = folder.path().join(&entry.name);
        let error =
            |problem: String| PackageError::Entry { path: archive.to_owned(), entry: entry.name.clone(), problem };
        let parent = if entry.is_folder { Some(path.as_path()) } else { path.parent() };
        if let Some(parent) = parent {
            fs::create_dir_all(parent).map_err(|e| PackageError::write(parent, "create the folder", e))?;
        }
        if entry.is_folder {
            continue;
        }
        let mut content = zip.by_index(index).map_err(|e| error(e.to_string()))?;
        let mut out = File::create_new(&path).map_err(|e| PackageError::write(&path, "create the file", e))?;
        let mut buffer = vec![0; 1 << 20];
        let mut left = entry.size;
        loop {
            let read = content.read(&mut buffer).map_err(|e| error(format!("broken: {e}")))?;
            if read == 0 {
                break;
            }
            left = left
                .checked_sub(read as u64)
                .ok_or_else(|| error(format!("larger than the {} bytes announced", entry.size)))?;
            out.write_all(&buffer[..read]).map_err(|e| PackageError::write(&path, "write", e))?;
            progress(read as u64);
        }
        if left > 0 {
            return Err(error(format!("{} bytes, {} are announced", entry.size - left, entry.size)));
        }
        done.files += 1;
        done.bytes += entry.size;
    }
    folder.publish(true)?;
    Ok(done)
}

/// Entry with a safe name and kind.
struct Entry {
    name: String,
    is_folder: bool,
    size: u64,
}

fn check_entries(archive: &Path, zip: &mut ZipArchive<BufReader<File>>) -> Result<Vec<Entry>, PackageError> {
    /// Bits of a Unix mode that hold the file type.
    const TYPE: u32 = 0o170_000;
    const REGULAR: u32 = 0o100_000;
    const FOLDER: u32 = 0o040_000;
    let mut out = Vec::with_capacity(zip.len());
    // on some systems, names that differ only in case are the same file
    let mut taken = BTreeSet::new();
    for index in 0..zip.len() {
        let entry = zip.by_index_raw(index).map_err(|e| PackageError::corrupt(archive, e.to_string()))?;
        let raw = String::from_utf8_lossy(entry.name_raw()).into_owned();
        let error = |problem: &str| PackageError::Entry {
            path: archive.to_owned(),
            entry: raw.clone(),
            problem: problem.to_owned(),
        };
        let name = std::str::from_utf8(entry.name_raw()).map_err(|_| error("the name is not UTF-8"))?;
        let is_folder = entry.is_dir();
        let name = name.strip_suffix('/').unwrap_or(name);
        if path_inside(name).is_none() || name.split('/').count() > MAX_DEPTH {
            return Err(error("the name leads out of the folder or is none of a file"));
        }
        let kind = entry.unix_mode().map_or(0, |mode| mode & TYPE);
        if entry.is_symlink() || !(kind == 0 || kind == if is_folder { FOLDER } else { REGULAR }) {
            return Err(error("neither a file nor a folder; links are not unpacked"));
        }
        if !taken.insert(name.to_lowercase()) {
            return Err(error("another entry has this name"));
        }
        out.push(Entry { name: name.to_owned(), is_folder, size: entry.size() });
    }
    // no path is both a file and a folder
    let files: BTreeSet<String> = out.iter().filter(|e| !e.is_folder).map(|e| e.name.to_lowercase()).collect();
    for entry in &out {
        let lower = entry.name.to_lowercase();
        let mut parents = lower.match_indices('/').map(|(end, _)| &lower[..end]);
        if let Some(file) = parents.find(|parent| files.contains(*parent)) {
            let problem = format!("`{file}` is a file, so nothing can be inside it");
            return Err(PackageError::Entry { path: archive.to_owned(), entry: entry.name.clone(), problem });
        }
    }
    Ok(out)
}

fn io_error(error: ZipError) -> std::io::Error {
    match error {
        ZipError::Io(error) => error,
        other => std::io::Error::other(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet(_: u64) {}

    fn sample(room: &Path) -> std::path::PathBuf {
        let folder = room.join("bundle");
        fs::create_dir_all(folder.join("m.mlpackage/Data/empty")).unwrap();
        fs::write(folder.join("m.mlpackage/Data/weight.bin"), vec![7; 100_000]).unwrap();
        fs::write(folder.join("bundle.json"), "{}".repeat(10_000)).unwrap();
        fs::write(folder.join("caf\u{e9}.txt"), "").unwrap();
        folder
    }

    #[test]
    fn a_folder_comes_back_and_its_archive_is_always_the_same() {
        let room = tempfile::tempdir().unwrap();
        let folder = sample(room.path());
        let archive = room.path().join("a.zip");
        let packed = pack(&folder, &archive, false, &quiet).unwrap();
        assert_eq!(packed, Archived { files: 3, bytes: 120_000 });
        let size = fs::metadata(&archive).unwrap().len();
        assert!((100_000..102_000).contains(&size), "weights are stored, text is deflated: {size}");

        let target = room.path().join("out");
        let unpacked = unpack(&archive, &target, &UnpackLimits::default(), &quiet).unwrap();
        assert_eq!(unpacked, packed);
        assert!(target.join("m.mlpackage/Data/empty").is_dir());
        assert_eq!(fs::read(target.join("m.mlpackage/Data/weight.bin")).unwrap(), vec![7; 100_000]);
        assert!(target.join("caf\u{e9}.txt").is_file());

        let again = room.path().join("b.zip");
        pack(&target, &again, false, &quiet).unwrap();
        assert_eq!(fs::read(&archive).unwrap(), fs::read(&again).unwrap());
        assert!(matches!(pack(&target, &again, false, &quiet), Err(PackageError::Exists { .. })));
        pack(&target, &again, true, &quiet).unwrap();
        let exists = unpack(&archive, &target, &UnpackLimits::default(), &quiet);
        assert!(matches!(exists, Err(PackageError::Exists { .. })));
    }

    #[test]
    fn unfinished_output_and_links_are_not_packed() {
        let room = tempfile::tempdir().unwrap();
        let folder = sample(room.path());
        let archive = room.path().join("a.zip");
        let problem = || pack(&folder, &archive, false, &quiet).unwrap_err().to_string();
        fs::create_dir(folder.join(".m.mlpackage.partial-1-0")).unwrap();
        assert!(problem().contains("unfinished"), "{}", problem());
        fs::remove_dir(folder.join(".m.mlpackage.partial-1-0")).unwrap();
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("bundle.json", folder.join("link")).unwrap();
            assert!(problem().contains("links"), "{}", problem());
        }
        assert!(!archive.exists());
    }

    /// Writes an archive without any checks.
    fn hostile(path: &Path, write: impl FnOnce(&mut ZipWriter<File>)) {
        let mut zip = ZipWriter::new(File::create(path).unwrap());
        write(&mut zip);
        zip.finish().unwrap();
    }

    fn refusal(room: &Path, archive: &Path, limits: &UnpackLimits) -> String {
        let target = room.join("target");
        let problem = unpack(archive, &target, limits, &quiet).unwrap_err().to_string();
        assert!(!target.exists());
        assert_eq!(super::super::clean_partials(room).unwrap(), 0, "nothing is left behind");
        problem
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let room = tempfile::tempdir().unwrap();
        let archive = room.path().join("a.zip");
        let names = ["../x", "a/../../x", "/x", "a//x", "./x", "C:x", "a\\..\\x", "..", "x/.", "a\0b"];
        for name in names {
            hostile(&archive, |zip| {
                zip.start_file(name, SimpleFileOptions::default()).unwrap();
            });
            let problem = refusal(room.path(), &archive, &UnpackLimits::default());
            assert!(problem.contains("leads out of the folder"), "{name}: {problem}");
        }
        hostile(&archive, |zip| {
            zip.add_symlink("link", "/etc/passwd", SimpleFileOptions::default()).unwrap();
        });
        assert!(refusal(room.path(), &archive, &UnpackLimits::default()).contains("links"));
        hostile(&archive, |zip| {
            zip.start_file("a", SimpleFileOptions::default()).unwrap();
            zip.start_file("A", SimpleFileOptions::default()).unwrap();
        });
        assert!(refusal(room.path(), &archive, &UnpackLimits::default()).contains("another entry has this name"));
        hostile(&archive, |zip| {
            zip.start_file("a", SimpleFileOptions::default()).unwrap();
            zip.start_file("a/b", SimpleFileOptions::default()).unwrap();
        });
        assert!(refusal(room.path(), &archive, &UnpackLimits::default()).contains("nothing can be inside it"));
    }

    #[test]
    fn bombs_are_refused() {
        let room = tempfile::tempdir().unwrap();
        let archive = room.path().join("a.zip");
        let zeros = vec![0; 32 << 20];
        hostile(&archive, |zip| {
            zip.start_file("zeros", SimpleFileOptions::default()).unwrap();
            zip.write_all(&zeros).unwrap();
        });
        let problem = refusal(room.path(), &archive, &UnpackLimits::default());
        assert!(problem.contains("33554432 bytes, the limit is"), "{problem}");
        let few = UnpackLimits { bytes: 1000, ..UnpackLimits::default() };
        assert!(refusal(room.path(), &archive, &few).contains("the limit is 1000"));
        let none = UnpackLimits { entries: 0, ..UnpackLimits::default() };
        assert!(refusal(room.path(), &archive, &none).contains("1 entries, the limit is 0"));

        // an entry larger than its announced size, which stands in the local and in the central header
        hostile(&archive, |zip| {
            zip.start_file("zeros", SimpleFileOptions::default()).unwrap();
            zip.write_all(&zeros).unwrap();
        });
        let mut bytes = fs::read(&archive).unwrap();
        let size = (zeros.len() as u32).to_le_bytes();
        while let Some(at) = bytes.windows(4).position(|w| w == size) {
            bytes[at..at + 4].copy_from_slice(&100u32.to_le_bytes());
        }
        fs::write(&archive, bytes).unwrap();
        let problem = refusal(room.path(), &archive, &UnpackLimits::default());
        assert!(problem.contains("larger than the 100 bytes announced") || problem.contains("broken"), "{problem}");
    }

    #[test]
    fn a_damaged_archive_never_panics_and_leaves_nothing() {
        let room = tempfile::tempdir().unwrap();
        let folder = room.path().join("small");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("a.json"), "{\"key\": [1, 2, 3]}").unwrap();
        fs::write(folder.join("b.bin"), [1, 2, 3, 4]).unwrap();
        let archive = room.path().join("a.zip");
        pack(&folder, &archive, false, &quiet).unwrap();
        let whole = fs::read(&archive).unwrap();
        let target = room.path().join("target");
        let mut refused = 0;
        for cut in 0..whole.len() {
            fs::write(&archive, &whole[..cut]).unwrap();
            refused += usize::from(unpack(&archive, &target, &UnpackLimits::default(), &quiet).is_err());
        }
        assert_eq!(refused, whole.len());
        for at in 0..whole.len() {
            for value in [0, 0xff, whole[at] ^ 1] {
                let mut damaged = whole.clone();
                damaged[at] = value;
                fs::write(&archive, &damaged).unwrap();
                if unpack(&archive, &target, &UnpackLimits::default(), &quiet).is_ok() {
                    fs::remove_dir_all(&target).unwrap();
                }
            }
        }
        assert_eq!(super::super::clean_partials(room.path()).unwrap(), 0);
    }
}
