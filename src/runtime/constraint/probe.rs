//! Trial compilation of grammars in a process of its own, which can be ended: llguidance can't be interrupted, and some
//! small grammars take it minutes and gigabytes.
//!
//! The program calls [`run`] when it is started with [`ARGUMENT`], and [`set_program`] before it compiles grammars of
//! strangers. Without a program, grammars are compiled untried.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use llguidance::toktrie::ApproximateTokEnv;

use super::{Grammar, Grammars, TOO_COMPLEX};
use crate::stack::with_stack;

/// First argument of a trial process.
pub const ARGUMENT: &str = "__compile-grammar";

/// Maximum processor time of a trial in seconds.
const MAX_SECONDS: u64 = 3;
/// Maximum memory of a trial in bytes.
const MAX_MEMORY: u64 = 1 << 30;
/// Stack of a trial's compiler in bytes.
const TRIAL_STACK: usize = 16 << 20;
/// Stack of a trial's first step of a text in bytes: half of what threads have by default.
const MASK_STACK: usize = 1 << 20;
/// Maximum wall time of a trial, on a busy machine.
const MAX_WALL: Duration = Duration::from_secs(20);
/// Interval between two looks at a trial.
const INTERVAL: Duration = Duration::from_millis(2);

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
/// One compilation at a time: others wait, and the processors stay free for texts.
static TURN: Mutex<()> = Mutex::new(());

/// Sets the program that runs trials. Later calls have no effect.
pub fn set_program(program: PathBuf) {
    let _ = PROGRAM.set(program);
}

/// Runs a trial: reads a grammar from stdin and compiles it under limits. Returns the exit code: 0 if it was compiled,
/// 1 with the problem on stdout if it was refused.
pub fn run() -> u8 {
    #[cfg(unix)]
    {
        use nix::sys::resource::{Resource, setrlimit};
        let limits =
            [(Resource::RLIMIT_CPU, MAX_SECONDS), (Resource::RLIMIT_AS, MAX_MEMORY), (Resource::RLIMIT_CORE, 0)];
        for (resource, most) in limits {
            // systems that don't limit a resource do without
            let _ = setrlimit(resource, most, most);
        }
    }
    let mut source = String::new();
    let read = std::io::stdin().read_to_string(&mut source).ok();
    let form = read.and_then(|_| serde_json::from_str(&source).ok()).and_then(Grammar::from_json);
    let Some(form) = form else { return 2 };
    let tried = Grammars::with(ApproximateTokEnv::single_byte_env()).and_then(|grammars| {
        let mut constraint = grammars.compile_within(&form, TRIAL_STACK)?;
        let mask = || constraint.mask_logits(&mut [0.0; 256]);
        with_stack(MASK_STACK, TOO_COMPLEX, mask).unwrap_or_else(|problem| Err(super::grammar(problem)))
    });
    match tried {
        Ok(()) => 0,
        Err(error) => {
            let _ = std::io::stdout().write_all(error.to_string().as_bytes());
            1
        }
    }
}

/// Returns the turn to compile, once no other grammar is compiled, while somebody `waits`.
pub(super) fn turn(waits: &dyn Fn() -> bool) -> Result<MutexGuard<'static, ()>, String> {
    loop {
        match TURN.try_lock() {
            Ok(turn) => return Ok(turn),
            Err(TryLockError::Poisoned(turn)) => return Ok(turn.into_inner()),
            Err(TryLockError::WouldBlock) if waits() => std::thread::sleep(INTERVAL),
            Err(TryLockError::WouldBlock) => return Err("nobody waits for it".into()),
        }
    }
}

/// Checks that a grammar, as JSON, can be compiled within the limits, while somebody `waits`.
pub(super) fn check(source: &str, waits: &dyn Fn() -> bool) -> Result<(), String> {
    let Some(program) = PROGRAM.get() else { return Ok(()) };
    let mut command = Command::new(program);
    command.arg(ARGUMENT).env("RUST_BACKTRACE", "0");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("it can't be tried: {error}"))?;
    let outcome = outcome(&mut child, source, waits);
    // it has ended, or must
    let _ = child.kill();
    let _ = child.wait();
    outcome
}

fn outcome(child: &mut Child, text: &str, waits: &dyn Fn() -> bool) -> Result<(), String> {
    if let Some(mut stdin) = child.stdin.take() {
        // a trial that ends early says why by its code
        let _ = stdin.write_all(text.as_bytes());
    }
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) if status.code() == Some(1) => {
                let mut problem = String::new();
                if let Some(stdout) = &mut child.stdout {
                    let _ = stdout.take(4096).read_to_string(&mut problem);
                }
                return Err(problem.strip_prefix("grammar: ").unwrap_or(&problem).to_owned());
            }
            Ok(Some(_)) => {
                let limits = format!("{MAX_SECONDS} seconds or {} MB", MAX_MEMORY >> 20);
                return Err(format!("{TOO_COMPLEX}: it takes more than {limits}"));
            }
            Ok(None) if !waits() => return Err("nobody waits for it".into()),
            Ok(None) if start.elapsed() > MAX_WALL => {
                return Err(format!("{TOO_COMPLEX}: it takes more than {} seconds", MAX_WALL.as_secs()));
            }
            Ok(None) => std::thread::sleep(INTERVAL),
            Err(error) => return Err(format!("it can't be tried: {error}")),
        }
    }
}
