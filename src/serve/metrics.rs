//! Prometheus metrics in the text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anec_runtime::GenerationOutput;

/// Upper bounds of the histograms' buckets in seconds.
const BUCKETS: [f64; 12] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0];

/// Counters of a server.
#[derive(Debug)]
pub struct Metrics {
    start: Instant,
    /// Requests by route and status.
    requests: Mutex<BTreeMap<(String, u16), u64>>,
    /// Number of prompt tokens.
    prompt_tokens: AtomicU64,
    /// Number of prompt tokens that were cached.
    cached_tokens: AtomicU64,
    /// Number of generated tokens.
    generated_tokens: AtomicU64,
    drafted_tokens: AtomicU64,
    accepted_tokens: AtomicU64,
    /// Number of texts whose client disconnected or whose time ran out.
    cancelled: AtomicU64,
    first_token: Histogram,
    duration: Histogram,
    queued: Histogram,
}

#[derive(Debug, Default)]
struct Histogram {
    buckets: [AtomicU64; BUCKETS.len()],
    count: AtomicU64,
    microseconds: AtomicU64,
}

impl Histogram {
    fn add(&self, time: Duration) {
        for (bucket, end) in self.buckets.iter().zip(BUCKETS) {
            if time.as_secs_f64() <= end {
                bucket.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        self.microseconds.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, help: &str) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        for (bucket, end) in self.buckets.iter().zip(BUCKETS) {
            let _ = writeln!(out, "{name}_bucket{{le=\"{end}\"}} {}", bucket.load(Ordering::Relaxed));
        }
        let count = self.count.load(Ordering::Relaxed);
        let seconds = self.microseconds.load(Ordering::Relaxed) as f64 / 1e6;
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {seconds}\n{name}_count {count}");
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics {
            start: Instant::now(),
            requests: Mutex::default(),
            prompt_tokens: AtomicU64::default(),
            cached_tokens: AtomicU64::default(),
            generated_tokens: AtomicU64::default(),
            drafted_tokens: AtomicU64::default(),
            accepted_tokens: AtomicU64::default(),
            cancelled: AtomicU64::default(),
            first_token: Histogram::default(),
            duration: Histogram::default(),
            queued: Histogram::default(),
        }
    }
}

impl Metrics {
    /// Counts an answered request.
    pub fn request(&self, route: &str, status: u16) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((route.to_owned(), status)).or_default() += 1;
    }

    /// Counts a finished text with its time in the queue.
    pub fn text(&self, prompt: usize, generation: &GenerationOutput, queued: Duration) {
        let add = |counter: &AtomicU64, count: usize| counter.fetch_add(count as u64, Ordering::Relaxed);
        add(&self.prompt_tokens, prompt);
        add(&self.cached_tokens, generation.timings.cached_tokens);
        add(&self.generated_tokens, generation.ids.len());
        add(&self.drafted_tokens, generation.speculation.drafted);
        add(&self.accepted_tokens, generation.speculation.accepted);
        self.first_token.add(Duration::from_secs_f64(generation.timings.ttft_ms / 1e3) + queued);
        self.duration.add(Duration::from_secs_f64(generation.timings.elapsed_s) + queued);
        self.queued.add(queued);
    }

    /// Counts a text that nobody waits for any more.
    pub fn cancelled(&self) {
        self.cancelled.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the time since the start.
    pub fn uptime(&self) -> Duration {
        self.start.elapsed()
    }

    /// Returns all metrics. `waiting` and `active` are the scheduler's numbers of texts.
    pub fn render(&self, waiting: usize, active: usize) -> String {
        let mut out = String::new();
        let mut one = |name: &str, kind: &str, help: &str, value: f64| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        };
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        one("anec_prompt_tokens_total", "counter", "Tokens of prompts.", count(&self.prompt_tokens));
        one(
            "anec_cached_tokens_total",
            "counter",
            "Prompt tokens that weren't computed again.",
            count(&self.cached_tokens),
        );
        one("anec_generated_tokens_total", "counter", "Tokens of answers.", count(&self.generated_tokens));
        one("anec_drafted_tokens_total", "counter", "Tokens that were guessed.", count(&self.drafted_tokens));
        one("anec_accepted_tokens_total", "counter", "Guessed tokens that were right.", count(&self.accepted_tokens));
        one("anec_cancelled_total", "counter", "Texts that nobody waited for.", count(&self.cancelled));
        one("anec_waiting", "gauge", "Texts in the queue.", waiting as f64);
        one("anec_active", "gauge", "Texts being written.", active as f64);
        one("anec_uptime_seconds", "gauge", "Time since the start.", self.start.elapsed().as_secs_f64());
        if let Some(bytes) = anec_base::resources::resident_bytes() {
            one("process_resident_memory_bytes", "gauge", "Memory in use.", bytes as f64);
        }
        self.first_token.write(&mut out, "anec_time_to_first_token_seconds", "From the request to its first token.");
        self.duration.write(&mut out, "anec_text_seconds", "From the request to the end of its text.");
        self.queued.write(&mut out, "anec_queue_seconds", "Time in the queue.");
        let name = "anec_http_requests_total";
        let _ = writeln!(out, "# HELP {name} Requests by route and status.\n# TYPE {name} counter");
        for ((route, status), count) in self.requests.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(out, "{name}{{route=\"{route}\",status=\"{status}\"}} {count}");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_as_prometheus_reads_them() {
        let metrics = Metrics::default();
        metrics.request("/v1/models", 200);
        metrics.request("/v1/models", 200);
        metrics.queued.add(Duration::from_millis(30));
        let text = metrics.render(3, 1);
        assert!(text.contains("anec_http_requests_total{route=\"/v1/models\",status=\"200\"} 2\n"), "{text}");
        assert!(text.contains("anec_waiting 3\n") && text.contains("anec_active 1\n"));
        for line in
            ["_bucket{le=\"0.025\"} 0", "_bucket{le=\"0.05\"} 1", "_bucket{le=\"+Inf\"} 1", "_sum 0.03", "_count 1"]
        {
            assert!(text.contains(&format!("anec_queue_seconds{line}\n")), "{line} in {text}");
        }
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(line.rsplit_once(' ').unwrap().1.parse::<f64>().is_ok(), "{line}");
        }
    }
}
