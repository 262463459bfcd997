//! A process that is killed at a chosen step: right before its n-th system call that changes files. (Linux)

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use libc::{c_int, c_long, pid_t};

/// How a process ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// Killed at its step.
    Killed,
    /// Exited before the step, with this status.
    Itself(c_int),
}

/// Definition of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Steps {
    /// Every call that makes, names, removes, writes or resizes a file.
    All,
    /// System calls that change names: create, rename, remove.
    Names,
}

/// Runs a command up to a step, counted from 1.
///
/// # Errors
/// Where the system doesn't let a process watch another.
pub fn run(command: &mut Command, steps: Steps, step: usize) -> io::Result<End> {
    command.stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: the call is allowed between fork and exec; it only says that the parent may watch.
    unsafe { command.pre_exec(|| check(libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0)).map(drop)) };
    #[allow(clippy::zombie_processes, reason = "`wait` below reaps it")]
    let child = command.spawn()?;
    let process = pid_t::try_from(child.id()).expect("a process id");
    let (mut count, mut killed, mut began) = (0, false, false);
    loop {
        let (task, status) = wait()?;
        if !libc::WIFSTOPPED(status) {
            if task == process {
                return Ok(if killed { End::Killed } else { End::Itself(libc::WEXITSTATUS(status)) });
            }
            continue;
        }
        if !began {
            // stopped by exec, before its first instruction
            began = true;
            let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
            // SAFETY: the task is a stopped child that this thread watches.
            check(unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, task, 0, options) })?;
        }
        let signal = match libc::WSTOPSIG(status) {
            // a system call
            stop if stop == libc::SIGTRAP | 0x80 => {
                count += usize::from(enters(task).is_some_and(|call| call.changes_files(steps)));
                if count >= step && !killed {
                    killed = true;
                    // SAFETY: no memory is involved, and the child isn't reaped yet.
                    check(unsafe { libc::kill(process, libc::SIGKILL) }.into())?;
                }
                0
            }
            // events of the watch, and new threads
            libc::SIGTRAP | libc::SIGSTOP => 0,
            other => other,
        };
        // SAFETY: as above. A task that was killed meanwhile can't be resumed, and needn't be.
        let _ = unsafe { libc::ptrace(libc::PTRACE_SYSCALL, task, 0, signal) };
    }
}

fn check(result: c_long) -> io::Result<c_long> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Waits for any task that this thread watches; other threads have children of their own.
fn wait() -> io::Result<(pid_t, c_int)> {
    let mut status = 0;
    // SAFETY: the pointer is to a number that the call fills.
    let task = unsafe { libc::waitpid(-1, &mut status, libc::__WALL | libc::__WNOTHREAD) };
    check(task.into())?;
    Ok((task, status))
}

/// Information about a stop at a system call (`struct ptrace_syscall_info` of Linux).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Call {
    kind: u8,
    _padding: [u8; 3],
    _architecture: u32,
    _instruction: u64,
    _stack: u64,
    number: u64,
    arguments: [u64; 6],
}

/// The call that a stopped task is about to make; nothing if it comes back from one.
fn enters(task: pid_t) -> Option<Call> {
    const GET_SYSCALL_INFO: libc::c_uint = 0x420e;
    const ENTRY: u8 = 1;
    let mut call = Call::default();
    // SAFETY: the pointer is to a structure of the size that is given, which all bit patterns are valid for.
    let result = unsafe { libc::ptrace(GET_SYSCALL_INFO as _, task, size_of::<Call>(), &raw mut call) };
    (result > 0 && call.kind == ENTRY).then_some(call)
}

impl Call {
    fn changes_files(&self, steps: Steps) -> bool {
        #[cfg(target_arch = "x86_64")]
        const OLD: &[c_long] =
            &[libc::SYS_rename, libc::SYS_mkdir, libc::SYS_unlink, libc::SYS_rmdir, libc::SYS_renameat];
        #[cfg(not(target_arch = "x86_64"))]
        const OLD: &[c_long] = &[];
        const NAMES: &[c_long] = &[libc::SYS_renameat2, libc::SYS_mkdirat, libc::SYS_unlinkat];
        const CONTENTS: &[c_long] = &[libc::SYS_write, libc::SYS_pwrite64, libc::SYS_ftruncate, libc::SYS_fallocate];
        let number = self.number as c_long;
        let makes = number == libc::SYS_openat && self.arguments[2] & libc::O_CREAT as u64 != 0;
        // 1 and 2 are the terminal's
        let contents = CONTENTS.contains(&number) && self.arguments[0] > 2;
        makes || NAMES.contains(&number) || OLD.contains(&number) || (contents && steps == Steps::All)
    }
}
