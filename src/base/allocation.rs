//! Allocator of a program that says what failed when there is no memory left, instead of aborting.

#![allow(unsafe_code, reason = "an allocator; passes every call on to the system's")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;

use crate::error::Fault;

/// The system's allocator; an allocation that fails ends the process with a message and exit code 5.
///
/// ```no_run
/// use anec_base::allocation::ReportingAllocator;
///
/// #[global_allocator]
/// static ALLOCATOR: ReportingAllocator = ReportingAllocator;
/// ```
#[derive(Debug)]
pub struct ReportingAllocator;

// SAFETY: every call is passed on to the system's allocator as it is; null pointers don't return.
unsafe impl GlobalAlloc for ReportingAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those of this method.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those of this method.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    #[inline]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.dealloc(pointer, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promises are those of this method.
        checked(unsafe { System.realloc(pointer, layout, size) }, size)
    }
}

#[inline]
fn checked(pointer: *mut u8, size: usize) -> *mut u8 {
    if pointer.is_null() {
        report(size);
    }
    pointer
}

/// Maximum length of the message in bytes.
const LENGTH: usize = 256;

/// Reports the size of an allocation that failed, and ends the process. Allocates nothing.
#[cold]
fn report(size: usize) -> ! {
    let mut message = [0; LENGTH];
    let mut rest = &mut message[..];
    let _ = write!(
        rest,
        "error: {size} bytes of memory can't be had\n\
         help: close other programs, or lower the context, the number of threads or the limit of memory of this one\n"
    );
    let length = LENGTH - rest.len();
    // stderr has no buffer
    let _ = std::io::stderr().write_all(&message[..length]);
    std::process::exit(Fault::Platform.exit_code().into())
}
