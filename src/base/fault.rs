//! Report of a mapped file that is truncated while it is in use.
//!
//! The system answers a read beyond the end of a mapped file with the signal SIGBUS, which ends the process without a
//! word. [`report_truncated_files`] names the file first.

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// Number of mapped files that are known to the report.
const SLOTS: usize = 4096;

/// Mapped file. A start of 0 marks a free slot.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    path: AtomicPtr<u8>,
    path_length: AtomicUsize,
}

static FILES: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        path: AtomicPtr::new(std::ptr::null_mut()),
        path_length: AtomicUsize::new(0),
    }
}; SLOTS];

/// Registration of a mapped file, until dropped.
#[derive(Debug)]
pub(crate) struct Registration {
    slot: Option<usize>,
    /// Path that the slot refers to.
    _path: Box<[u8]>,
}

impl Registration {
    /// Registers the mapped bytes of a file. Beyond [`SLOTS`] files nothing is registered.
    pub(crate) fn new(bytes: &[u8], path: &std::path::Path) -> Self {
        let mut path = path.as_os_str().as_encoded_bytes().to_vec().into_boxed_slice();
        let start = bytes.as_ptr() as usize;
        let slot = FILES.iter().position(|slot| {
            // the end is written last, so that the report sees whole entries only
            let free = slot.start.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if free {
                slot.path.store(path.as_mut_ptr(), Ordering::Relaxed);
                slot.path_length.store(path.len(), Ordering::Relaxed);
                slot.end.store(start + bytes.len(), Ordering::Release);
            }
            free
        });
        Registration { slot, _path: path }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.map(|index| &FILES[index]) {
            slot.end.store(0, Ordering::Release);
            slot.start.store(0, Ordering::Release);
        }
    }
}

/// Lets a read of a truncated mapped file end the process with a message and exit code 4 instead of by SIGBUS. For
/// programs; a library must leave signals to its program.
#[cfg(unix)]
pub fn report_truncated_files() {
    unix::install();
}

/// Does nothing: this system reports reads of truncated files otherwise.
#[cfg(not(unix))]
pub fn report_truncated_files() {}

#[cfg(unix)]
#[allow(unsafe_code, reason = "a signal handler")]
mod unix {
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering;

    use nix::libc;
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

    use super::FILES;
    use crate::error::Fault;

    /// Handler that was there before: Rust's own, which reports stack overflows on some systems.
    static BEFORE: OnceLock<SigAction> = OnceLock::new();

    pub(super) fn install() {
        let handler = SigHandler::SigAction(on_fault);
        let action = SigAction::new(handler, SaFlags::SA_ONSTACK | SaFlags::SA_SIGINFO, SigSet::empty());
        // SAFETY: the handler only reads atomics, writes to stderr and ends the process, which signal handlers may do.
        if let Ok(before) = unsafe { sigaction(Signal::SIGBUS, &action) } {
            let _ = BEFORE.set(before);
        }
    }

    extern "C" fn on_fault(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the system passes a valid `siginfo_t` with the address to handlers of SIGBUS.
        let address = unsafe { (*info).si_addr() } as usize;
        for slot in &FILES {
            let end = slot.end.load(Ordering::Acquire);
            if !(slot.start.load(Ordering::Acquire)..end).contains(&address) {
                continue;
            }
            let length = slot.path_length.load(Ordering::Relaxed);
            // SAFETY: a registered path lives until its registration is dropped, which unmaps the file too: nobody
            // would read it then.
            let path = unsafe { std::slice::from_raw_parts(slot.path.load(Ordering::Relaxed), length) };
            for part in [b"error: ", path, MESSAGE] {
                // SAFETY: the bytes are valid; an error can't be reported any further.
                let _ = unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
            }
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(Fault::Source.exit_code().into()) };
        }
        // another fault: the instruction is repeated under the handler that was there before
        // SAFETY: the action was one of this process.
        unsafe {
            match BEFORE.get() {
                Some(before) => drop(sigaction(Signal::SIGBUS, before)),
                None => drop(libc::signal(libc::SIGBUS, libc::SIG_DFL)),
            }
        }
    }

    const MESSAGE: &[u8] = b": the file was truncated while it was in use\n\
        help: leave model files and bundles as they are while anec uses them, and run the command again\n";
}

#[cfg(all(test, unix))]
mod tests {
    use std::process::Command;

    use crate::MappedFile;

    const CHILD: &str = "ANEC_TRUNCATED_FILE";

    /// Reads a mapped file that was truncated, in a process of its own, which ends by it.
    #[test]
    fn a_truncated_file_is_named() {
        if let Some(path) = std::env::var_os(CHILD) {
            super::report_truncated_files();
            let other = MappedFile::open(std::path::Path::new(&path).with_extension("other").as_path()).unwrap();
            let file = MappedFile::open(path.as_ref()).unwrap();
            std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
            assert_eq!(other.bytes()[70_000], 7);
            println!("{}", file.bytes()[70_000]);
            return;
        }
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("weights.bin");
        std::fs::write(&path, vec![7; 100_000]).unwrap();
        std::fs::write(path.with_extension("other"), vec![7; 100_000]).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.arg("fault::tests::a_truncated_file_is_named").env(CHILD, &path);
        let output = child.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{said}");
        let expected = format!("error: {}: the file was truncated while it was in use", path.display());
        assert!(said.contains(&expected) && said.contains("help: "), "{said}");
    }
}
