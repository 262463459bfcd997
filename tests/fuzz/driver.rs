//! Fuzzing without a nightly toolchain: inputs made of seeds and random numbers, read in child processes with limits of
//! time and memory.
//!
//! `ANEC_FUZZ_SECONDS=3600 cargo test --test damage fuzz -- --nocapture` divides an hour among all targets, and
//! `ANEC_FUZZ_TARGETS=gguf,bundle` selects some. `ANEC_FUZZ_SEED` begins with other inputs. What a target fails at is
//! kept in the folder that is printed, one file for each finding. Without a time, each target reads some inputs, which
//! are the same in every run.

mod grammars;
mod mutate;
mod requests;
mod targets;
mod templates;
mod tokenizers;

use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::LARGEST;
use crate::common::folder;
use targets::{TARGETS, Target};

/// Variables by which a parent tells its child the target, the first input, the number of inputs and the end.
const CHILD: &str = "ANEC_FUZZ_CHILD";
const ROOM: &str = "ANEC_FUZZ_ROOM";

/// Maximum time for an input, on a busy machine.
const MAX_TIME: Duration = Duration::from_secs(60);
/// Maximum address space of a child in KiB.
const MAX_MEMORY: u64 = 8 << 20;
/// Maximum size of an allocation in bytes.
const MAX_ALLOCATION: usize = 256 << 20;
/// Exit code of a child with an input that takes too long.
const TOO_LONG: i32 = 97;
/// Number of inputs of each target in a run without a time.
const FEW: u64 = 40;
/// Number of findings after which a target ends.
const MAX_FINDINGS: usize = 20;

/// Result of a target.
#[derive(Default)]
struct Tally {
    inputs: u64,
    accepted: u64,
    seconds: f64,
    findings: Vec<String>,
}

#[test]
fn fuzz_targets_read_or_refuse() {
    let seconds: Option<f64> = std::env::var("ANEC_FUZZ_SECONDS").ok().map(|text| text.parse().expect("a number"));
    let wanted = std::env::var("ANEC_FUZZ_TARGETS").unwrap_or_default();
    let wanted: Vec<&str> = wanted.split(',').filter(|name| !name.is_empty()).collect();
    let seed: u64 = std::env::var("ANEC_FUZZ_SEED").map_or(0, |text| text.parse().expect("a number"));
    let targets: Vec<&Target> =
        TARGETS.iter().filter(|target| wanted.is_empty() || wanted.contains(&target.name)).collect();
    assert!(!targets.is_empty(), "ANEC_FUZZ_TARGETS names targets");
    let room = prepare();
    let mut findings = Vec::new();
    let mut table = String::from("| target | inputs | accepted | seconds | findings |\n|---|---:|---:|---:|---:|\n");
    for target in &targets {
        let time = seconds.map(|seconds| Duration::from_secs_f64(seconds / targets.len() as f64));
        let tally = fuzz(target, &room, seed << 32, time);
        let row = format!(
            "| {} | {} | {} | {:.0} | {} |\n",
            target.name,
            tally.inputs,
            tally.accepted,
            tally.seconds,
            tally.findings.len()
        );
        let _ = std::io::stderr().write_all(row.as_bytes());
        table += &row;
        findings.extend(tally.findings);
    }
    if seconds.is_some() {
        let _ = std::io::stderr().write_all(table.as_bytes());
    }
    assert!(findings.is_empty(), "{}\ninputs are in {}", findings.join("\n"), room.display());
    std::fs::remove_dir_all(room).unwrap();
}

/// Makes the folder of a run, with the bundles that targets change and serve.
fn prepare() -> PathBuf {
    let room = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&room).unwrap();
    for name in ["demo.anec", "served.anec"] {
        let out = room.join(name);
        let arguments =
            ["convert", "-m", "demo", "--no-measure", "--set", "context=64", "--out", out.to_str().unwrap()];
        let (code, _, stderr) = folder::run(&arguments);
        assert_eq!(code, 0, "{stderr}");
    }
    std::fs::copy(room.join("demo.anec/bundle.json"), room.join("bundle.json")).unwrap();
    room
}

/// Runs a target in children, each of which goes on after the input at which the one before ended.
fn fuzz(target: &Target, room: &Path, first: u64, time: Option<Duration>) -> Tally {
    let start = Instant::now();
    let mut tally = Tally::default();
    let mut next = first;
    loop {
        let left = time.map(|time| time.saturating_sub(start.elapsed()));
        let few = FEW.saturating_sub(tally.inputs);
        if left.map_or(few == 0, |left| left.is_zero()) || tally.findings.len() >= MAX_FINDINGS {
            break;
        }
        let count = if time.is_some() { u64::MAX >> 1 } else { few };
        let child = child(target, room, next, count, left.unwrap_or(MAX_TIME));
        tally.inputs += child.done - next;
        tally.accepted += child.accepted;
        next = child.done;
        if let Some(problem) = child.problem {
            let kept = room.join(format!("{}-{next}", target.name));
            let _ = std::fs::rename(room.join(format!("{}.current", target.name)), kept);
            let finding = format!("{} {next}: {problem}", target.name);
            let _ = writeln!(std::io::stderr(), "{finding}");
            tally.findings.push(finding);
            tally.inputs += 1;
            next += 1;
        }
    }
    tally.seconds = start.elapsed().as_secs_f64();
    tally
}

/// Work of a child.
struct ChildResult {
    /// Number of the input after the last one that was read.
    done: u64,
    accepted: u64,
    /// Reason for an early end.
    problem: Option<String>,
}

fn child(target: &Target, room: &Path, first: u64, count: u64, time: Duration) -> ChildResult {
    let progress = room.join(format!("{}.progress", target.name));
    std::fs::write(&progress, format!("{first} 0")).unwrap();
    let script = format!("ulimit -v {MAX_MEMORY}; ulimit -c 0; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(std::env::current_exe().unwrap());
    command.args(["fuzz::fuzz_child", "--exact", "--nocapture", "--test-threads", "1"]);
    command.env(CHILD, format!("{} {first} {count} {}", target.name, time.as_secs_f64())).env(ROOM, room);
    let log = std::fs::File::create(room.join("log")).unwrap();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).process_group(0);
    let mut child = command.spawn().unwrap();
    let status = child.wait().unwrap();
    // servers that it started
    let _ = Command::new("/bin/kill").args(["-KILL", "--", &format!("-{}", child.id())]).stderr(Stdio::null()).status();
    let text = std::fs::read_to_string(&progress).unwrap();
    let (done, accepted) = text.split_once(' ').expect("two numbers");
    let problem = (!status.success()).then(|| {
        let log = String::from_utf8_lossy(&std::fs::read(room.join("log")).unwrap()).into_owned();
        let log: Vec<&str> = log.lines().filter(|line| !line.starts_with("note: ")).take(6).collect();
        let how = match (status.code(), status.signal()) {
            (Some(TOO_LONG), _) => format!("it takes more than {} seconds", MAX_TIME.as_secs()),
            (Some(code), _) => format!("exit {code}"),
            (None, signal) => format!("signal {}", signal.unwrap_or(0)),
        };
        format!("{how}: {}", log.join(" "))
    });
    ChildResult { done: done.parse().unwrap(), accepted: accepted.trim().parse().unwrap(), problem }
}

/// Reads inputs in a process of its own; does nothing unless a parent asks for it.
#[test]
fn fuzz_child() {
    let Ok(order) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = order.split(' ').collect();
    let target = TARGETS.iter().find(|target| target.name == words[0]).expect("a target");
    let (first, count): (u64, u64) = (words[1].parse().unwrap(), words[2].parse().unwrap());
    let (start, time) = (Instant::now(), Duration::from_secs_f64(words[3].parse().unwrap()));
    anec::base::caught::silence();
    let seeds = target.seeds();
    let room: PathBuf = std::env::var_os(ROOM).unwrap().into();
    let [progress, current] = ["progress", "current"].map(|kind| room.join(format!("{}.{kind}", target.name)));
    watch(start);
    let mut accepted = 0;
    for number in first..first.saturating_add(count) {
        if start.elapsed() > time {
            break;
        }
        let input = target.input(&seeds, number);
        std::fs::write(&current, &input).unwrap();
        BEGUN.store(start.elapsed().as_millis() as u64, Ordering::Relaxed);
        LARGEST.set(0);
        match (target.run)(&input) {
            Ok(()) => accepted += 1,
            Err(text) => check_words(&text),
        }
        let largest = LARGEST.get();
        assert!(largest <= MAX_ALLOCATION, "{largest} bytes were asked for at once");
        std::fs::write(&progress, format!("{} {accepted}", number + 1)).unwrap();
    }
}

/// Time in milliseconds at which the current input was begun.
static BEGUN: AtomicU64 = AtomicU64::new(0);

/// Ends the process if an input takes too long.
fn watch(start: Instant) {
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(500));
            let begun = Duration::from_millis(BEGUN.load(Ordering::Relaxed));
            if start.elapsed().saturating_sub(begun) > MAX_TIME {
                std::process::exit(TOO_LONG);
            }
        }
    });
}

/// Phrases of libraries that mean nothing to a user.
const FOREIGN: [&str; 9] = [
    "expected struct",
    "struct variant",
    "invalid type",
    "invalid value",
    "untagged",
    "newtype",
    "usize",
    "panicked",
    "prost",
];
/// Maximum length of an error in bytes: a line of what was read, and what is wrong with it.
const MAX_ERROR: usize = 2500;

/// Checks that an error is short, and in the format's words.
fn check_words(error: &str) {
    assert!(error.len() <= MAX_ERROR, "an error of {} bytes: {:.300}…", error.len(), error);
    let foreign = FOREIGN.iter().find(|phrase| error.contains(**phrase));
    assert!(foreign.is_none(), "an error in a library's words: {error}");
}
