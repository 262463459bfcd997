//! Energy of a piece of work, measured with macOS' `powermetrics`: CPU, GPU and Neural Engine power, sampled several
//! times a second. Needs root or a passwordless `sudo` rule.

use std::io::{BufRead, BufReader, Read};
use std::ops::{Add, Range};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::error::RuntimeError;

/// Sampling interval in milliseconds.
const INTERVAL: &str = "100";
/// Time within which a sample must arrive.
const SAMPLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Energy in joules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Energy {
    /// CPU energy.
    pub cpu_j: f64,
    /// GPU energy.
    pub gpu_j: f64,
    /// Neural Engine energy.
    pub ane_j: f64,
}

impl Energy {
    /// Returns the sum of all three.
    pub fn total_j(&self) -> f64 {
        self.cpu_j + self.gpu_j + self.ane_j
    }

    fn times(self, factor: f64) -> Self {
        Energy { cpu_j: self.cpu_j * factor, gpu_j: self.gpu_j * factor, ane_j: self.ane_j * factor }
    }
}

impl Add for Energy {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Energy { cpu_j: self.cpu_j + other.cpu_j, gpu_j: self.gpu_j + other.gpu_j, ane_j: self.ane_j + other.ane_j }
    }
}

/// One interval reported by `powermetrics`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    /// Length of the interval in seconds.
    seconds: f64,
    energy: Energy,
}

/// Running `powermetrics` process.
pub struct EnergyMeter {
    child: Child,
    incoming: Receiver<(Instant, Sample)>,
    /// Samples with the ends of their intervals.
    samples: Vec<(Instant, Sample)>,
}

impl EnergyMeter {
    /// Starts the process and waits for its first sample.
    ///
    /// # Errors
    /// If `powermetrics` (part of macOS) is missing or not permitted.
    pub fn start() -> Result<Self, RuntimeError> {
        let mut problems = Vec::new();
        for command in [&["powermetrics"][..], &["sudo", "-n", "powermetrics"]] {
            match Self::launch(command) {
                Ok(meter) => return Ok(meter),
                Err(problem) => problems.push(format!("`{}`: {problem}", command.join(" "))),
            }
        }
        Err(RuntimeError::NoEnergy { problem: problems.join("; ") })
    }

    fn launch(command: &[&str]) -> Result<Self, String> {
        let mut child = Command::new(command[0])
            .args(&command[1..])
            .args(["--samplers", "cpu_power,gpu_power,ane_power", "--sample-rate", INTERVAL])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        let (sender, incoming) = channel();
        if let Some(output) = child.stdout.take() {
            std::thread::spawn(move || {
                let mut reader = SampleReader::default();
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if let Some(sample) = reader.line(&line)
                        && sender.send((Instant::now(), sample)).is_err()
                    {
                        // the receiver is gone: closing the pipe ends the program
                        return;
                    }
                }
            });
        }
        let mut meter = EnergyMeter { child, incoming, samples: Vec::new() };
        if meter.wait() {
            return Ok(meter);
        }
        let mut said = String::new();
        let _ = meter.child.kill();
        if let Some(mut errors) = meter.child.stderr.take() {
            let _ = errors.read_to_string(&mut said);
        }
        let said = said.trim();
        Err(if said.is_empty() { "it gives no samples".into() } else { said.to_owned() })
    }

    /// Reads the next sample; returns false if there is none.
    fn wait(&mut self) -> bool {
        match self.incoming.recv_timeout(SAMPLE_TIMEOUT) {
            Ok(sample) => {
                self.samples.push(sample);
                true
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => false,
        }
    }

    /// Returns the energy between two moments since the start; samples count by their overlap.
    ///
    /// # Errors
    /// If no more samples arrive.
    pub fn between(&mut self, time: &Range<Instant>) -> Result<Energy, RuntimeError> {
        while self.samples.last().is_none_or(|(end, _)| *end < time.end) {
            if !self.wait() {
                return Err(RuntimeError::NoEnergy { problem: "`powermetrics` gives no more samples".into() });
            }
        }
        let mut energy = Energy::default();
        for (end, sample) in &self.samples {
            let length = Duration::from_secs_f64(sample.seconds);
            let Some(start) = end.checked_sub(length) else { continue };
            let shared = (*end).min(time.end).saturating_duration_since(start.max(time.start));
            energy = energy + sample.energy.times(shared.as_secs_f64() / sample.seconds);
        }
        Ok(energy)
    }
}

impl Drop for EnergyMeter {
    fn drop(&mut self) {
        // under sudo it can't be killed from here; it ends at its next write
        let _ = self.child.kill();
        let _ = self.child.try_wait();
    }
}

/// Parser of the text form of samples.
#[derive(Default)]
struct SampleReader {
    /// Length of the interval and power of each part in milliwatts, as far as known.
    seconds: Option<f64>,
    milliwatts: [Option<f64>; 3],
}

impl SampleReader {
    /// Returns the sample that a line completes.
    fn line(&mut self, line: &str) -> Option<Sample> {
        if line.starts_with("*** Sampled system activity") {
            let elapsed = line.rsplit_once("ms elapsed").and_then(|(before, _)| before.rsplit('(').next());
            let elapsed = elapsed.and_then(|elapsed| elapsed.trim().parse::<f64>().ok());
            *self = SampleReader { seconds: elapsed.map(|milliseconds| milliseconds / 1e3), milliwatts: [None; 3] };
        }
        for (part, value) in ["CPU Power:", "GPU Power:", "ANE Power:"].iter().zip(&mut self.milliwatts) {
            let power = line.strip_prefix(part).and_then(|rest| rest.trim().strip_suffix("mW"));
            *value = power.and_then(|power| power.trim().parse().ok()).or(*value);
        }
        let (Some(seconds), [Some(cpu), Some(gpu), Some(ane)]) = (self.seconds, self.milliwatts) else { return None };
        *self = SampleReader::default();
        (seconds > 0.0)
            .then_some(Sample { seconds, energy: Energy { cpu_j: cpu, gpu_j: gpu, ane_j: ane }.times(seconds / 1e3) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_from_the_text() {
        let text = "Machine model: Mac16,1\n\n*** Sampled system activity (Fri Nov 20 21:04:11 2026 +0100) (250.00ms elapsed) ***\n\
            \n**** Processor usage ****\n\nE-Cluster HW active frequency: 1020 MHz\nCPU Power: 400 mW\nGPU Power: 20 mW\n\
            ANE Power: 2000 mW\nCombined Power (CPU + GPU + ANE): 2420 mW\n\n**** GPU usage ****\n\nGPU Power: 20 mW\n";
        let mut reader = SampleReader::default();
        let samples: Vec<Sample> = text.lines().chain(text.lines()).filter_map(|line| reader.line(line)).collect();
        let energy = Energy { cpu_j: 0.1, gpu_j: 0.005, ane_j: 0.5 };
        assert_eq!(samples, [Sample { seconds: 0.25, energy }; 2]);
        assert!((energy.total_j() - 0.605).abs() < 1e-12);
    }

    #[test]
    fn work_gets_its_part_of_each_sample() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let sample = |ane_j| Sample { seconds: 0.1, energy: Energy { ane_j, ..Energy::default() } };
        let samples = vec![(at(1100), sample(1.0)), (at(1200), sample(2.0)), (at(1300), sample(4.0))];
        let child = Command::new("true").spawn().unwrap();
        let (_, incoming) = channel();
        let mut meter = EnergyMeter { child, incoming, samples };
        // half of the second, a quarter of the third
        let energy = meter.between(&(at(1150)..at(1225))).unwrap();
        assert!((energy.ane_j - 2.0).abs() < 1e-6, "{energy:?}");
        assert!(meter.between(&(at(1250)..at(1400))).is_err(), "nothing is known of what comes later");
    }
}
