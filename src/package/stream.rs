//! Files made of parts that many threads produce. Threads take pieces (of a long part or of several short ones) in the
//! order of the file, produce each and write it at its place. Memory is bounded by the pieces, and the disk doesn't
//! wait for one slow part.
//!
//! The file's digest needs the pieces in order, and no thread may wait for its turn, because inside the pool it could
//! wait for work further down its own stack. Finished pieces are therefore handed in, and the thread that hands in the
//! next one in order updates the digest as far as possible, mostly from its own piece, which is still in the core's
//! cache.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use super::digest::{Blake3Pieces, StreamHash};
use super::files::{read_at, reserve, write_at};
use anec_base::Error;
use anec_mil::Content;

/// Approximate number of bytes produced at a time; small enough for a core's cache.
const PIECE: u64 = 1 << 20;
/// Maximum number of bytes that wait in memory for the digest. Further pieces are read back from the file.
const HELD: usize = 16 << 20;

/// Part of a file.
pub enum FilePart<'a> {
    /// Bytes in memory.
    Bytes(Cow<'a, [u8]>),
    /// Content produced on demand.
    Content(&'a dyn Content),
}

/// Error of writing a file.
#[derive(Debug)]
pub enum NotWritten {
    /// Error of the operating system.
    File {
        /// Operation that failed.
        action: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Part that can't be produced.
    Part {
        /// Index of the part.
        index: usize,
        /// Cause.
        cause: Error,
    },
}

/// Result of writing a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamSummary<D = blake3::Hash> {
    /// Size in bytes.
    pub bytes: u64,
    /// Digest of the content.
    pub digest: D,
}

/// Fills an empty file, open for reading and writing, with consecutive parts. Pieces are produced by the threads of
/// rayon's pool; one thread, which may be the caller, suffices. `written` is called with the part's index and the bytes
/// of each piece.
///
/// # Errors
/// Returns an error if the file can't be written or a part can't be produced. A full disk is detected before the first
/// piece if the system can reserve space.
pub fn write_parts<H: StreamHash>(
    file: &File,
    parts: &[FilePart<'_>],
    written: &(dyn Fn(usize, u64) + Sync),
) -> Result<StreamSummary<H::Digest>, NotWritten> {
    for (index, part) in parts.iter().enumerate() {
        if let FilePart::Content(content) = part {
            content.prepare().map_err(|cause| NotWritten::Part { index, cause })?;
        }
    }
    let pieces = Piece::all(parts);
    let size = pieces.last().map_or(0, |last| last.place + last.length as u64);
    reserve(file, size).map_err(|source| NotWritten::File { action: "reserve room", source })?;
    let next = AtomicUsize::new(0);
    let failure = Failure::default();
    let digest = OrderedDigest::<H>::new(file, &pieces);
    let produce = || {
        while failure.none() {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(number) else { break };
            match piece.write(file, &digest).and_then(|ready| digest.hand_in(number, ready)) {
                Ok(()) => piece.runs.iter().for_each(|run| written(run.index, run.length as u64)),
                Err(error) => failure.set(error),
            }
        }
    };
    rayon::scope(|pool| (0..rayon::current_num_threads().min(pieces.len())).for_each(|_| pool.spawn(|_| produce())));
    failure.into_result()?;
    Ok(StreamSummary { bytes: size, digest: digest.finish() })
}

impl FilePart<'_> {
    fn length(&self) -> u64 {
        match self {
            FilePart::Bytes(bytes) => bytes.len() as u64,
            FilePart::Content(content) => content.length(),
        }
    }

    /// Returns offset and length of the part's runs, which begin at granules.
    fn runs(&self) -> impl Iterator<Item = (u64, usize)> + use<> {
        let granule = match self {
            FilePart::Bytes(_) => 1,
            FilePart::Content(content) => content.granule().max(1),
        };
        let (step, end) = ((PIECE / granule).max(1).saturating_mul(granule), self.length());
        let mut offset = 0;
        std::iter::from_fn(move || {
            let length = step.min(end - offset);
            let run = (length > 0).then_some((offset, length as usize));
            offset += length;
            run
        })
    }
}

/// Consecutive runs that are produced and written together.
struct Piece<'a> {
    runs: Vec<Run<'a>>,
    /// Offset in the file.
    place: u64,
    length: usize,
}

/// Part, or section of a long part, that is produced at once.
struct Run<'a> {
    part: &'a FilePart<'a>,
    /// Index of the part.
    index: usize,
    /// Offset in the part.
    offset: u64,
    length: usize,
}

/// Buffer of a piece. Its memory is reused and never shrinks, because zeroing it again and again took a fifth of a
/// conversion's time.
#[derive(Default)]
struct PieceBuffer {
    memory: Vec<u8>,
    length: usize,
}

impl PieceBuffer {
    /// Resizes the buffer; its content is unspecified.
    fn resized(mut self, length: usize) -> PieceBuffer {
        if self.memory.len() < length {
            self.memory = vec![0; length.max(PIECE as usize)];
        }
        self.length = length;
        self
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[..self.length]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.length]
    }
}

/// Location of a written piece's bytes.
enum Ready<'a> {
    Buffer(PieceBuffer),
    Part(&'a [u8]),
    File,
}

impl<'a> Run<'a> {
    /// Returns the bytes if they are in memory.
    fn bytes(&self) -> Option<&'a [u8]> {
        match self.part {
            FilePart::Bytes(bytes) => Some(&bytes[self.offset as usize..][..self.length]),
            FilePart::Content(_) => None,
        }
    }

    fn read(&self, out: &mut [u8]) -> Result<(), NotWritten> {
        if let Some(bytes) = self.bytes() {
            out.copy_from_slice(bytes);
        } else if let FilePart::Content(content) = self.part {
            content.read(self.offset, out).map_err(|cause| NotWritten::Part { index: self.index, cause })?;
        }
        Ok(())
    }
}

impl<'a> Piece<'a> {
    /// Divides parts into pieces.
    fn all(parts: &'a [FilePart<'a>]) -> Vec<Piece<'a>> {
        let mut pieces: Vec<Piece<'_>> = Vec::new();
        let mut place = 0;
        for (index, part) in parts.iter().enumerate() {
            for (offset, length) in part.runs() {
                let run = Run { part, index, offset, length };
                match pieces.last_mut() {
                    Some(last) if last.length + length <= PIECE as usize => {
                        last.length += length;
                        last.runs.push(run);
                    }
                    _ => pieces.push(Piece { runs: vec![run], place, length }),
                }
                place += length as u64;
            }
        }
        pieces
    }

    fn write<H: StreamHash>(&self, file: &File, digest: &OrderedDigest<'_, H>) -> Result<Ready<'a>, NotWritten> {
        let write = |bytes: &[u8]| {
            write_at(file, bytes, self.place).map_err(|source| NotWritten::File { action: "write", source })
        };
        if let [only] = &self.runs[..]
            && let Some(bytes) = only.bytes()
        {
            write(bytes)?;
            return Ok(Ready::Part(bytes));
        }
        let mut buffer = digest.buffer(self.length);
        let mut rest = buffer.bytes_mut();
        let mut outs = Vec::with_capacity(self.runs.len());
        for run in &self.runs {
            let (out, after) = rest.split_at_mut(run.length);
            outs.push((run, out));
            rest = after;
        }
        // long runs first, because short ones such as scales are computed while long ones are read
        outs.sort_by_key(|(run, _)| Reverse(run.length));
        outs.into_iter().try_for_each(|(run, out)| run.read(out))?;
        write(buffer.bytes())?;
        Ok(Ready::Buffer(buffer))
    }
}

/// Digest of pieces that are handed in out of order.
struct OrderedDigest<'a, H> {
    file: &'a File,
    pieces: &'a [Piece<'a>],
    state: Mutex<DigestState<'a, H>>,
}

struct DigestState<'a, H> {
    /// Index of the next piece.
    next: usize,
    /// Hash; `None` while a thread updates it.
    hash: Option<H>,
    ready: BTreeMap<usize, Ready<'a>>,
    /// Size of the finished pieces in memory.
    held: usize,
    /// Buffers for reuse.
    spare: Vec<PieceBuffer>,
}

impl<H> DigestState<'_, H> {
    /// Keeps a buffer for reuse.
    fn keep(&mut self, buffer: PieceBuffer) {
        if self.spare.len() < rayon::current_num_threads() {
            self.spare.push(buffer);
        }
    }
}

impl<'a, H: StreamHash> OrderedDigest<'a, H> {
    fn new(file: &'a File, pieces: &'a [Piece<'a>]) -> Self {
        let state =
            DigestState { next: 0, hash: Some(H::default()), ready: BTreeMap::new(), held: 0, spare: Vec::new() };
        OrderedDigest { file, pieces, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, DigestState<'a, H>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a buffer of `length` bytes, reused or new.
    fn buffer(&self, length: usize) -> PieceBuffer {
        let spare = self.lock().spare.pop();
        spare.unwrap_or_default().resized(length)
    }

    /// Hands in a written piece.
    fn hand_in(&self, number: usize, ready: Ready<'a>) -> Result<(), NotWritten> {
        let mut state = self.lock();
        let ready = match ready {
            Ready::Buffer(buffer) if state.held > 0 && state.held + buffer.length > HELD => {
                state.keep(buffer);
                Ready::File
            }
            ready => ready,
        };
        if let Ready::Buffer(buffer) = &ready {
            state.held += buffer.length;
        }
        state.ready.insert(number, ready);
        // the thread that holds the hash checks for more pieces, under the lock, before it returns it
        let Some(mut hash) = state.hash.take() else { return Ok(()) };
        loop {
            let number = state.next;
            let Some(ready) = state.ready.remove(&number) else { break };
            state.next += 1;
            drop(state);
            self.update(&mut hash, &self.pieces[number], &ready)
                .map_err(|source| NotWritten::File { action: "read back", source })?;
            state = self.lock();
            if let Ready::Buffer(buffer) = ready {
                state.held -= buffer.length;
                state.keep(buffer);
            }
        }
        state.hash = Some(hash);
        Ok(())
    }

    fn update(&self, hash: &mut H, piece: &Piece<'_>, ready: &Ready<'_>) -> io::Result<()> {
        match ready {
            Ready::Buffer(buffer) => hash.update(buffer.bytes()),
            Ready::Part(bytes) => hash.update(bytes),
            Ready::File => {
                let mut buffer = self.buffer(piece.length);
                read_at(self.file, buffer.bytes_mut(), piece.place)?;
                hash.update(buffer.bytes());
                self.lock().keep(buffer);
            }
        }
        Ok(())
    }

    /// Returns the digest after all pieces were handed in.
    fn finish(self) -> H::Digest {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(state.next, self.pieces.len(), "every piece was handed in");
        state.hash.expect("no thread works with the hash any more").finalize()
    }
}

/// First error of several threads.
#[derive(Default)]
struct Failure {
    happened: AtomicBool,
    error: Mutex<Option<NotWritten>>,
}

impl Failure {
    fn none(&self) -> bool {
        !self.happened.load(Ordering::Relaxed)
    }

    fn set(&self, error: NotWritten) {
        let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(error);
        self.happened.store(true, Ordering::Relaxed);
    }

    fn into_result(self) -> Result<(), NotWritten> {
        self.error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_base::Result;

    /// Content computed from offsets, whose first piece waits until `after` others are done.
    struct Late {
        length: u64,
        after: usize,
        came: AtomicUsize,
    }

    impl Content for Late {
        fn length(&self) -> u64 {
            self.length
        }

        fn granule(&self) -> u64 {
            1
        }

        fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
            while offset == 0 && self.came.load(Ordering::SeqCst) < self.after {
                std::thread::yield_now();
            }
            for (byte, place) in out.iter_mut().zip(offset..) {
                *byte = (place.wrapping_mul(0x9e37_79b9) >> 13) as u8;
            }
            self.came.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    }

    /// Zeros that record the lengths of reads.
    struct Noted<'a>(u64, &'a Mutex<Vec<usize>>);

    impl Content for Noted<'_> {
        fn length(&self) -> u64 {
            self.0
        }

        fn granule(&self) -> u64 {
            1
        }

        fn read(&self, _offset: u64, out: &mut [u8]) -> Result<()> {
            out.fill(0);
            self.1.lock().unwrap().push(out.len());
            Ok(())
        }
    }

    #[test]
    fn short_parts_are_written_together_and_read_after_long_ones() {
        let reads = Mutex::default();
        let contents = [10, PIECE + 1000, 20, 5].map(|length| Noted(length, &reads));
        let mut parts: Vec<FilePart<'_>> = contents.iter().map(|content| FilePart::Content(content)).collect();
        parts.push(FilePart::Bytes([7; 3][..].into()));
        assert_eq!(Piece::all(&parts).iter().map(|piece| piece.runs.len()).collect::<Vec<_>>(), [1, 1, 4]);
        let file = tempfile::tempfile().unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let summary = pool.install(|| write_parts::<Blake3Pieces>(&file, &parts, &|_, _| {})).unwrap();
        assert_eq!(reads.into_inner().unwrap(), [10, PIECE as usize, 1000, 20, 5]);
        let mut bytes = vec![0; PIECE as usize + 1035];
        bytes.extend([7; 3]);
        assert_eq!((summary.bytes, summary.digest), (bytes.len() as u64, blake3::hash(&bytes)));
    }

    #[test]
    fn a_waiting_digest_is_that_of_the_file() {
        // more data waits for the first piece than fits into memory
        let length = 2 * HELD as u64 + 123;
        let late = Late { length, after: (length / PIECE) as usize, came: AtomicUsize::new(0) };
        let parts =
            [FilePart::Bytes([7; 100][..].into()), FilePart::Content(&late), FilePart::Bytes([8; 3][..].into())];
        let file = tempfile::tempfile().unwrap();
        let counted = Mutex::new([0; 3]);
        let written = |part: usize, bytes| counted.lock().unwrap()[part] += bytes;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let summary = pool.install(|| write_parts::<Blake3Pieces>(&file, &parts, &written)).unwrap();
        assert_eq!(summary.bytes, 100 + length + 3);
        assert_eq!(counted.into_inner().unwrap(), [100, length, 3]);
        let mut bytes = vec![0; summary.bytes as usize];
        read_at(&file, &mut bytes, 0).unwrap();
        assert_eq!((bytes[99], bytes[100], bytes[101], bytes[bytes.len() - 1]), (7, 0, 0xbb, 8));
        assert_eq!(summary.digest, blake3::hash(&bytes));
    }
}
