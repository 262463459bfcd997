//! Filling a planned weight file.
//!
//! Threads take pieces of a few MB in the order of the file, produce each and write it at its place, so memory is
//! bounded by piece times threads and no disk waits for one slow constant. One more thread follows and hashes what is
//! complete. The threads are not the pool's: a content may itself use the pool, and may make another wait while it is
//! being prepared, which inside the pool would deadlock.

use std::collections::HashSet;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use sha2::{Digest, Sha256};

use super::plan::{Planned, address};
use super::{ALIGNMENT, WeightPlan, header};
use crate::error::{Error, Result};
use crate::mil::Content;
use crate::mil::constant::Data;
use crate::package::PackageError;
use crate::package::files::{read_at, reserve, write_at};

/// Bytes that are produced at a time, about.
const PIECE: u64 = 4 << 20;

/// How far writing has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// So many more bytes of contents are ready to be read.
    Prepared(u64),
    /// So many more bytes are written.
    Written(u64),
}

/// A part of a blob's data.
struct Piece<'a> {
    blob: &'a Planned,
    /// Offset within the data.
    offset: u64,
    length: u64,
}

/// Contents that are about to be read, each once.
#[derive(Default)]
pub(in crate::package) struct Preparation {
    contents: Vec<(Arc<dyn Content>, String)>,
    known: HashSet<usize>,
}

impl Preparation {
    /// Adds a content of a constant.
    pub(in crate::package) fn add(&mut self, content: &Arc<dyn Content>, owner: &str) {
        if self.known.insert(address(content)) {
            self.contents.push((content.clone(), owner.to_owned()));
        }
    }

    /// Bytes of all contents.
    pub(in crate::package) fn bytes(&self) -> u64 {
        self.contents.iter().fold(0, |sum, (content, _)| sum.saturating_add(content.length()))
    }

    /// Lets every content do what must precede reading. A content spreads that over the threads of the pool itself.
    ///
    /// # Errors
    /// The first content that can't be produced, with its constant's name.
    pub(in crate::package) fn prepare(&self, progress: &(dyn Fn(Progress) + Sync)) -> Result<()> {
        self.contents.iter().try_for_each(|(content, owner)| {
            content.prepare().map_err(|cause| PackageError::Constant { owner: format!("op `{owner}`"), cause })?;
            progress(Progress::Prepared(content.length()));
            Ok(())
        })
    }
}

impl WeightPlan {
    /// Writes the file, whose contents must be prepared, and gives the SHA-256 of it. Data is produced by the threads of
    /// rayon's pool. The thread that digests is none of them and never waits for one, so that a pool of one thread, which
    /// may be the caller, suffices.
    ///
    /// # Errors
    /// When the system refuses (a full disk is found before the first constant where the system can reserve room), or
    /// a content can't be produced.
    pub fn write(&self, path: &Path, progress: &(dyn Fn(Progress) + Sync)) -> Result<[u8; 32]> {
        let refused = |action, source| PackageError::write(path, action, source);
        let file = File::options().read(true).write(true).create_new(true).open(path);
        let file = file.map_err(|e| refused("create the weight file", e))?;
        reserve(&file, self.size()).map_err(|e| refused("reserve room", e))?;
        let write = |bytes: &[u8], at: u64| write_at(&file, bytes, at).map_err(|e| refused("write", e));
        let count = u32::try_from(self.blobs.len())
            .map_err(|_| PackageError::Program { problem: format!("{} blobs in a weight file", self.blobs.len()) })?;
        write(&header(count), 0)?;
        for blob in &self.blobs {
            write(&blob.record.to_bytes(), blob.record.offset)?;
        }
        let pieces: Vec<Piece<'_>> = self.blobs.iter().flat_map(pieces).collect();
        let next = AtomicUsize::new(0);
        let failure = Failure::default();
        let front = Front::new(&pieces, self.size());
        let produce = || {
            let _guard = Guard { front: &front, failure: &failure };
            let mut buffer = Vec::new();
            while failure.none() {
                // in the order of the file, which the digest follows
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(piece) = pieces.get(index) else { break };
                match piece.produce(&mut buffer).and_then(|bytes| Ok(write(bytes, piece.place())?)) {
                    Ok(()) => front.finish(index),
                    Err(error) => failure.set(error),
                }
                progress(Progress::Written(piece.length));
            }
        };
        let digest = std::thread::scope(|scope| {
            let hash = scope.spawn(|| hash(&file, &front));
            rayon::scope(|pool| (0..rayon::current_num_threads()).for_each(|_| pool.spawn(|_| produce())));
            hash.join()
        });
        failure.into_result()?;
        match digest {
            Ok(digest) => Ok(digest.map_err(|e| refused("read back", e))?),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// The parts of a blob, none of which begins within a granule.
fn pieces(blob: &Planned) -> impl Iterator<Item = Piece<'_>> {
    let granule = match &blob.data {
        Data::Content(content) => content.granule().max(1),
        _ => 1,
    };
    let step = (PIECE / granule).max(1).saturating_mul(granule);
    let mut offset = 0;
    std::iter::from_fn(move || {
        let length = step.min(blob.record.length - offset);
        let piece = (length > 0).then_some(Piece { blob, offset, length });
        offset += length;
        piece
    })
}

impl Piece<'_> {
    /// Where in the file it begins.
    fn place(&self) -> u64 {
        self.blob.record.data + self.offset
    }

    fn produce<'a>(&'a self, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let (offset, length) = (self.offset as usize, self.length as usize);
        match &self.blob.data {
            Data::Literal(bytes) => Ok(&bytes[offset..offset + length]),
            Data::Content(content) => {
                buffer.resize(length, 0);
                content.read(self.offset, buffer).map_err(|cause| constant_error(self.blob, cause))?;
                Ok(buffer)
            }
            Data::Strings(_) => Ok(&[]),
        }
    }
}

fn constant_error(blob: &Planned, cause: Error) -> Error {
    PackageError::Constant { owner: blob.owner.clone(), cause }.into()
}

/// The first error of several threads.
#[derive(Default)]
struct Failure {
    happened: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl Failure {
    fn none(&self) -> bool {
        !self.happened.load(Ordering::Relaxed)
    }

    fn set(&self, error: Error) {
        let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(error);
        self.happened.store(true, Ordering::Relaxed);
    }

    fn into_result(self) -> Result<()> {
        match self.error.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// How much of the file is complete from its beginning.
struct Front<'a> {
    pieces: &'a [Piece<'a>],
    size: u64,
    state: Mutex<FrontState>,
    moved: Condvar,
}

struct FrontState {
    finished: Vec<bool>,
    /// All pieces before this one are finished.
    first_open: usize,
    abandoned: bool,
}

impl<'a> Front<'a> {
    fn new(pieces: &'a [Piece<'a>], size: u64) -> Self {
        let state = FrontState { finished: vec![false; pieces.len()], first_open: 0, abandoned: false };
        Front { pieces, size, state: Mutex::new(state), moved: Condvar::new() }
    }

    fn finish(&self, index: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.finished[index] = true;
        while state.finished.get(state.first_open) == Some(&true) {
            state.first_open += 1;
        }
        self.moved.notify_one();
    }

    fn abandon(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).abandoned = true;
        self.moved.notify_one();
    }

    /// Waits until there is more than `known` bytes complete; `None` when there never will be.
    fn beyond(&self, known: u64) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if state.abandoned || known >= self.size {
                return None;
            }
            let complete = self.pieces.get(state.first_open).map_or(self.size, Piece::place);
            if complete > known {
                return Some(complete);
            }
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Whatever ends a worker early, a panic included, must end the hashing thread, too.
struct Guard<'a> {
    front: &'a Front<'a>,
    failure: &'a Failure,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() || !self.failure.none() {
            self.front.abandon();
        }
    }
}

/// SHA-256 of the file, following the writers.
fn hash(file: &File, front: &Front<'_>) -> std::io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while let Some(complete) = front.beyond(at) {
        while at < complete {
            let length = (complete - at).min(buffer.len() as u64) as usize;
            read_at(file, &mut buffer[..length], at)?;
            hash.update(&buffer[..length]);
            at += length as u64;
        }
    }
    Ok(hash.finalize().into())
}

const _: () = assert!(PIECE.is_multiple_of(ALIGNMENT));
