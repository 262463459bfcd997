//! Resource usage of the process.

/// Resources used since the process started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Processor time of all threads, in seconds.
    pub cpu_seconds: f64,
    /// Peak memory in bytes, including pages of mapped files.
    pub peak_memory_bytes: u64,
}

/// Returns the resources used so far; `None` where the system doesn't report them.
#[cfg(unix)]
pub fn usage() -> Option<Usage> {
    use nix::sys::resource::{UsageWho, getrusage};
    use nix::sys::time::TimeVal;

    let usage = getrusage(UsageWho::RUSAGE_SELF).ok()?;
    // on Linux, getrusage also counts the parent process until exec
    let peak = status_bytes("VmHWM:");
    let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 * 1e-6;
    // kilobytes on Linux, bytes on Apple systems
    let unit = if cfg!(target_vendor = "apple") { 1 } else { 1024 };
    Some(Usage {
        cpu_seconds: seconds(usage.user_time()) + seconds(usage.system_time()),
        peak_memory_bytes: peak.unwrap_or_else(|| u64::try_from(usage.max_rss()).unwrap_or(0) * unit),
    })
}

/// Returns the resources used so far; `None` where the system doesn't report them.
#[cfg(not(unix))]
pub fn usage() -> Option<Usage> {
    None
}

/// Returns the current resident memory in bytes; `None` except on Linux.
pub fn resident_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// Reads a size from Linux's `/proc/self/status`.
fn status_bytes(field: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn usage_is_reported() {
        let usage = usage().unwrap();
        assert!(usage.peak_memory_bytes > 1 << 20 && usage.cpu_seconds >= 0.0);
    }
}
