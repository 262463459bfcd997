//! Download of files. A partial file is kept as `NAME.incomplete` and resumed.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anec_base::{FileError, Progress};

use crate::client::{Hub, pause, unreachable};
use crate::error::{HubError, Result};
use crate::hash::RunningDigest;
use crate::repository::{RemoteFile, RemoteRepository};

/// Maximum number of attempts without progress.
const ATTEMPTS: u32 = 5;
/// Interval in which a download must make progress.
const RATE_INTERVAL: Duration = Duration::from_secs(60);
/// Minimum number of bytes in that time.
const MIN_BYTES: u64 = 64 << 10;
/// Size of a read in bytes.
const STEP: usize = 1 << 18;

/// Progress of several files.
pub struct Transfer<'a> {
    progress: &'a Progress,
    total: u64,
    done: Cell<u64>,
}

impl<'a> Transfer<'a> {
    /// Creates a transfer of `total` bytes.
    pub fn new(progress: &'a Progress, total: u64) -> Self {
        progress.set(0, total);
        Transfer { progress, total, done: Cell::new(0) }
    }

    pub(crate) fn stage(&self, name: &str) {
        self.progress.stage(name);
    }

    pub(crate) fn reach(&self, done: u64) {
        self.done.set(done);
        self.progress.set(done, self.total);
    }

    pub(crate) fn done(&self) -> u64 {
        self.done.get()
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        // the next stage starts at zero
        self.progress.set(0, 0);
    }
}

impl Hub {
    /// Downloads a file to `to`, unless it exists. It gets its name once it is complete and its digest is right.
    ///
    /// # Errors
    /// If the hub can't be reached or refuses, the content differs from the hub's digest, or the system refuses.
    pub fn download(
        &self,
        repository: &RemoteRepository,
        file: &RemoteFile,
        to: &Path,
        transfer: &Transfer<'_>,
    ) -> Result<()> {
        let before = transfer.done();
        transfer.stage(&file.path);
        if !to.exists() {
            let folder = to.parent().unwrap_or(Path::new("."));
            std::fs::create_dir_all(folder).map_err(FileError::of(folder, "create"))?;
            Incomplete::open(to)?.complete(self, repository, file, to, transfer)?;
        }
        transfer.reach(before + file.size);
        Ok(())
    }
}

/// Partial file, locked against concurrent downloads.
struct Incomplete {
    path: PathBuf,
    file: File,
}

impl Incomplete {
    fn open(to: &Path) -> Result<Self> {
        let mut name = to.file_name().unwrap_or_default().to_owned();
        name.push(".incomplete");
        let path = to.with_file_name(name);
        let open = || {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
            // wait for concurrent downloads; file systems without locks do without
            let _ = file.lock();
            Ok(file)
        };
        let file = open().map_err(FileError::of(&path, "write"))?;
        Ok(Incomplete { path, file })
    }

    fn complete(
        mut self,
        hub: &Hub,
        repository: &RemoteRepository,
        remote: &RemoteFile,
        to: &Path,
        transfer: &Transfer<'_>,
    ) -> Result<()> {
        // another process may have finished it while this one waited
        if to.exists() {
            let _ = std::fs::remove_file(&self.path);
            return Ok(());
        }
        let before = transfer.done();
        let path = self.path.clone();
        let refused = move |error| HubError::from(FileError::of(path.clone(), "write")(error));
        let mut hash = RunningDigest::like(&remote.hash, remote.size);
        let mut length = self.digest_beginning(&mut hash, remote.size).map_err(&refused)?;
        let mut failures = 0;
        while length < remote.size {
            transfer.reach(before + length);
            let begin = length;
            let received = self.receive(hub, repository, remote, &mut length, &mut hash, |length| {
                transfer.reach(before + length);
            })?;
            if let Err(error) = received {
                failures = if length > begin { 1 } else { failures + 1 };
                if failures >= ATTEMPTS {
                    return Err(unreachable("download", &remote.path, &error));
                }
                pause(failures);
            }
        }
        let found = hash.finish();
        if found != remote.hash {
            // no part of it can be trusted
            let _ = std::fs::remove_file(&self.path);
            let (expected, found) = (remote.hash.hex().to_owned(), found.hex().to_owned());
            return Err(HubError::Digest { path: to.to_owned(), expected, found });
        }
        self.file.sync_all().map_err(&refused)?;
        std::fs::rename(&self.path, to).map_err(refused)
    }

    /// Adds the existing part to the digest and returns its length. A part longer than the file is discarded.
    fn digest_beginning(&mut self, hash: &mut RunningDigest, size: u64) -> std::io::Result<u64> {
        if self.file.metadata()?.len() > size {
            self.file.set_len(0)?;
        }
        self.file.seek(SeekFrom::Start(0))?;
        let (mut length, mut buffer) = (0, vec![0; STEP]);
        loop {
            match self.file.read(&mut buffer)? {
                0 => return Ok(length),
                count => {
                    hash.update(&buffer[..count]);
                    length += count as u64;
                }
            }
        }
    }

    /// Requests the rest and writes it. The inner error is the network's; earlier bytes are kept.
    fn receive(
        &mut self,
        hub: &Hub,
        repository: &RemoteRepository,
        remote: &RemoteFile,
        length: &mut u64,
        hash: &mut RunningDigest,
        reached: impl Fn(u64),
    ) -> Result<Result<(), String>> {
        let url =
            format!("{}/{}/resolve/{}/{}", hub.endpoint, repository.name, repository.commit, encoded(&remote.path));
        let range = format!("bytes={length}-");
        let response = hub.answered(&remote.path, "download", || hub.get(&url, Some(("range", range.as_str())), None));
        let response = match response {
            Err(HubError::Unreachable { problem, .. }) => return Ok(Err(problem)),
            other => other?,
        };
        let write = |error| HubError::from(FileError::of(&self.path, "write")(error));
        if response.status().as_u16() != 206 && *length > 0 {
            // the server ignores ranges and sends everything
            self.file.set_len(0).map_err(write)?;
            (*length, *hash) = (0, RunningDigest::like(&remote.hash, remote.size));
        }
        self.file.seek(SeekFrom::Start(*length)).map_err(write)?;
        let mut body = response.into_body().into_reader();
        let mut buffer = vec![0; STEP];
        let (mut since, mut before) = (Instant::now(), *length);
        while *length < remote.size {
            if since.elapsed() > RATE_INTERVAL {
                if *length - before < MIN_BYTES {
                    return Ok(Err(format!(
                        "fewer than {MIN_BYTES} bytes came within {} seconds",
                        RATE_INTERVAL.as_secs()
                    )));
                }
                (since, before) = (Instant::now(), *length);
            }
            let most = buffer.len().min(usize::try_from(remote.size - *length).unwrap_or(usize::MAX));
            match body.read(&mut buffer[..most]) {
                Ok(0) => return Ok(Err(format!("the connection ended after {length} of {} bytes", remote.size))),
                Ok(count) => {
                    self.file.write_all(&buffer[..count]).map_err(write)?;
                    hash.update(&buffer[..count]);
                    *length += count as u64;
                    reached(*length);
                }
                Err(error) => return Ok(Err(error.to_string())),
            }
        }
        Ok(Ok(()))
    }
}

/// Encodes a path for a URL.
fn encoded(path: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    path.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_addresses() {
        assert_eq!(encoded("a b/ü#1.json"), "a%20b/%C3%BC%231.json");
    }
}
