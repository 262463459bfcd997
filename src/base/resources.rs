//! What the process used.

/// What the process used so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Processor time of all threads, in seconds.
    pub cpu_seconds: f64,
    /// Largest memory in use at any time, in bytes; pages of mapped files count.
    pub peak_memory_bytes: u64,
}

/// What the process used so far, where the system tells.
#[cfg(unix)]
pub fn usage() -> Option<Usage> {
    use nix::sys::resource::{UsageWho, getrusage};
    use nix::sys::time::TimeVal;

    let usage = getrusage(UsageWho::RUSAGE_SELF).ok()?;
    // Linux counts in getrusage what the process was that started this one, until it became this program
    let peak = status_bytes("VmHWM:");
    let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 * 1e-6;
    // Linux counts kilobytes here, Apple's systems count bytes
    let unit = if cfg!(target_vendor = "apple") { 1 } else { 1024 };
    Some(Usage {
        cpu_seconds: seconds(usage.user_time()) + seconds(usage.system_time()),
        peak_memory_bytes: peak.unwrap_or_else(|| u64::try_from(usage.max_rss()).unwrap_or(0) * unit),
    })
}

/// What the process used so far, where the system tells.
#[cfg(not(unix))]
pub fn usage() -> Option<Usage> {
    None
}

/// Memory that the process has now, in bytes, where the system tells: on Linux.
pub fn resident_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// A size that Linux keeps of this process, in bytes.
fn status_bytes(field: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn the_system_tells() {
        let usage = usage().unwrap();
        assert!(usage.peak_memory_bytes > 1 << 20 && usage.cpu_seconds >= 0.0);
    }
}
