//! Benchmarks: prefill and decode throughput, time to first token, energy, memory.
//!
//! Each number is the median of several runs after warm-up; the spread is the median absolute deviation.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::chat::{Chat, ChatTemplate, Message};
use super::energy::{Energy, EnergyMeter};
use super::{GenerationRequest, LoadedModel, RuntimeError, Tokenizer};
use anec_base::json;
use anec_base::{ContentDigest, Error, Result, input, resources};
use anec_coreml::{CoreMl, Engine};

/// Lengths and repetitions of a benchmark.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BenchmarkOptions {
    /// Prompt lengths in tokens; `None` means 64 and 256, as far as the context holds them.
    pub prefill: Option<Vec<u64>>,
    /// Numbers of generated tokens; `None` means 32, as far as the context holds it.
    pub decode: Option<Vec<u64>>,
    /// Numbers of tokens already in the KV cache.
    pub depth: Vec<u64>,
    /// Number of measured runs.
    pub repetitions: u32,
    /// Number of warm-up runs.
    pub warmup: u32,
    /// Prompts instead of lengths; each is continued `repetitions` times.
    pub suite: Vec<SuitePrompt>,
    /// Whether energy is measured with `powermetrics` on macOS.
    pub energy: bool,
}

impl Default for BenchmarkOptions {
    fn default() -> Self {
        let (prefill, decode, depth) = (None, None, vec![1]);
        BenchmarkOptions { prefill, decode, depth, repetitions: 5, warmup: 1, suite: Vec::new(), energy: false }
    }
}

/// Prompt of a suite.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuitePrompt {
    /// Name.
    pub name: String,
    /// Prompt; one message of a user if the model has a chat template.
    pub prompt: String,
    /// Maximum number of generated tokens.
    pub max_tokens: usize,
}

/// Maximum size of a file of prompts, in bytes.
const MAX_SUITE: u64 = 1 << 24;

impl SuitePrompt {
    /// Five prompts of several kinds.
    pub fn built_in() -> Vec<Self> {
        let prompt = |(name, prompt, max_tokens): (&str, &str, usize)| SuitePrompt {
            name: name.to_owned(),
            prompt: prompt.to_owned(),
            max_tokens,
        };
        SUITE.into_iter().map(prompt).collect()
    }

    /// Reads a JSON list of prompts: `[{"name": "short", "prompt": "…", "max_tokens": 20}, …]`.
    ///
    /// # Errors
    /// If the file can't be read, or isn't such a list.
    pub fn read(path: &Path) -> Result<Vec<Self>> {
        let wrong = |problem: String| RuntimeError::bundle(path, problem);
        let prompts: Vec<Self> = json::read(&input::read(path, MAX_SUITE)?).map_err(|error| {
            wrong(format!("{error}; expected a list of prompts, each with `name`, `prompt` and `max_tokens`"))
        })?;
        match prompts.iter().find(|prompt| prompt.prompt.is_empty() || prompt.max_tokens == 0) {
            Some(prompt) => Err(wrong(format!("prompt `{}` is empty, or generates no token", prompt.name)).into()),
            None if prompts.is_empty() => Err(wrong("it has no prompts".into()).into()),
            None => Ok(prompts),
        }
    }
}

/// Default prompt lengths.
const PREFILL: [u64; 2] = [64, 256];

/// Default number of generated tokens.
const DECODE: u64 = 32;

/// Lengths of one test: a prompt, or generated tokens at a depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lengths {
    prompt: u64,
    generated: u64,
    depth: u64,
}

impl Lengths {
    /// Returns the test's name in llama-bench's notation.
    fn name(&self) -> String {
        match self {
            Lengths { generated: 0, prompt, .. } => format!("pp{prompt}"),
            Lengths { generated, depth: ..=1, .. } => format!("tg{generated}"),
            Lengths { generated, depth, .. } => format!("tg{generated} @ d{depth}"),
        }
    }
}

impl BenchmarkOptions {
    /// Default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the tests for a bundle with this context.
    ///
    /// # Errors
    /// If a requested length doesn't fit; nothing is measured then.
    fn lengths(&self, context: u64) -> Result<Vec<Lengths>, RuntimeError> {
        let within = |wanted: String, length: u64, most: u64| match (1..=most).contains(&length) {
            true => Ok(length),
            false => Err(RuntimeError::BenchmarkLength { wanted, most, context }),
        };
        let mut usual: Vec<u64> = PREFILL.iter().map(|length| *length.min(&context)).collect();
        usual.dedup();
        let mut all = Vec::new();
        for &prompt in self.prefill.as_ref().unwrap_or(&usual) {
            let prompt = within(format!("prefill {prompt}"), prompt, context)?;
            all.push(Lengths { prompt, generated: 0, depth: 0 });
        }
        for &depth in &self.depth {
            // a text has at least one token
            let depth = within(format!("depth {depth}"), depth, context.saturating_sub(1))?;
            let most = context - depth;
            for &generated in self.decode.as_ref().unwrap_or(&vec![DECODE.min(most)]) {
                let wanted = format!("decode {generated} after depth {depth}");
                all.push(Lengths { prompt: 0, generated: within(wanted, generated, most)?, depth });
            }
        }
        Ok(all)
    }
}

/// Result of a benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct Benchmark {
    /// Name of the bundle.
    pub model: String,
    /// Digest over all files of the bundle.
    pub digest: ContentDigest,
    /// Machine: a Mac's model and system, or the system and the CPU features that the executor uses.
    pub machine: String,
    /// Device that ran the model.
    pub device: String,
    /// Number of threads of the CPU executor.
    pub threads: usize,
    /// Size of the largest context in tokens.
    pub context: u64,
    /// Size of all packages' weights in bytes.
    pub weight_bytes: u64,
    /// Load time in seconds, until the first token could be computed.
    pub load_s: f64,
    /// Resident memory at the end, in bytes.
    pub resident_bytes: Option<u64>,
    /// Peak memory in bytes.
    pub peak_bytes: Option<u64>,
    /// Results by length.
    pub tests: Vec<BenchmarkTest>,
    /// Results of the suite's prompts.
    pub suite: Vec<BenchmarkCase>,
    /// Averages over the prompts of the suite.
    pub averages: Option<SuiteAverages>,
    /// Time spent in each function.
    pub functions: Vec<FunctionTime>,
}

/// Result for one length.
#[derive(Clone, Debug, Serialize)]
pub struct BenchmarkTest {
    /// Name of the test: `pp64` is a prompt of 64 tokens, `tg32` 32 generated tokens, `@ d256` a depth of 256 tokens.
    pub test: String,
    /// Number of prompt tokens.
    pub prompt: u64,
    /// Number of generated tokens.
    pub generated: u64,
    /// Number of tokens already in the KV cache.
    pub depth: u64,
    /// Median throughput in tokens per second.
    pub median_tps: f64,
    /// Median absolute deviation of tokens per second.
    pub spread_tps: f64,
    /// Tokens per second of each run.
    pub samples_tps: Vec<f64>,
    /// Median time to first token in milliseconds.
    pub ttft_ms: f64,
    /// Energy of all measured runs.
    pub energy: Option<Energy>,
    /// Energy per token in millijoules.
    pub millijoules_per_token: Option<f64>,
}

/// Result for one prompt of the suite.
#[derive(Clone, Debug, Serialize)]
pub struct BenchmarkCase {
    /// Name of the prompt.
    pub name: String,
    /// Number of counted runs; the times are their medians.
    pub runs: u32,
    /// Number of prompt tokens, including the chat template's.
    pub prompt_tokens: usize,
    /// Number of generated tokens.
    pub gen_tokens: usize,
    /// Prefill throughput in tokens per second.
    pub prefill_tps: f64,
    /// Decode throughput in tokens per second.
    pub decode_tps: f64,
    /// Median absolute deviation of `decode_tps` over the runs.
    pub decode_spread_tps: f64,
    /// Whether all runs gave the same text.
    pub same_text: bool,
    /// Time to first token in milliseconds.
    pub ttft_ms: f64,
    /// Total time in milliseconds.
    pub inference_ms: f64,
    /// Generated text.
    pub text: String,
}

/// Averages over the prompts of a suite.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SuiteAverages {
    /// Mean of the prompts' prefill speeds, in tokens per second.
    pub prefill_tps: f64,
    /// Mean of the prompts' decode speeds, in tokens per second.
    pub decode_tps: f64,
    /// Mean of the times to the first token, in milliseconds.
    pub ttft_ms: f64,
    /// Mean of the total times, in milliseconds.
    pub inference_ms: f64,
    /// Consistency of decoding: 1 less the mean of spread over speed.
    pub consistency: f64,
}

impl SuiteAverages {
    /// Averages of some prompts; `None` if there are none.
    pub fn of(cases: &[BenchmarkCase]) -> Option<Self> {
        let mean = |of: &dyn Fn(&BenchmarkCase) -> f64| cases.iter().map(of).sum::<f64>() / cases.len() as f64;
        (!cases.is_empty()).then(|| SuiteAverages {
            prefill_tps: mean(&|case| case.prefill_tps),
            decode_tps: mean(&|case| case.decode_tps),
            ttft_ms: mean(&|case| case.ttft_ms),
            inference_ms: mean(&|case| case.inference_ms),
            consistency: 1.0 - mean(&|case| case.decode_spread_tps / case.decode_tps.max(1e-9)),
        })
    }
}

/// Time spent in a function.
#[derive(Clone, Debug, Serialize)]
pub struct FunctionTime {
    /// Package that contains the function.
    pub package: String,
    /// Name of the function.
    pub function: String,
    /// Number of calls.
    pub calls: u64,
    /// Total time in milliseconds.
    pub total_ms: f64,
    /// Mean time per call in milliseconds.
    pub mean_ms: f64,
    /// Share of the time of all functions, 0 to 1.
    pub share: f64,
}

/// Name, prompt and maximum number of tokens of each case of the suite.
const SUITE: [(&str, &str, usize); 5] = [
    ("tiny", "Say hello.", 10),
    ("short", "What is the capital of France, and on which river does it lie?", 20),
    ("medium", "Explain in a few sentences how a lighthouse helps ships to find their way at night.", 100),
    ("long", "Write a short story about a clockmaker in a small town whose clocks all stop on the same evening.", 200),
    (
        "stress",
        "A farmer has 17 sheep. All but 9 run away. He buys 5 more, sells a third of what he has, rounds down, and gives two \
         to his neighbour, who owns 3 already. How many sheep does each of them have now? Think step by step, and show every \
         sum that you need on a line of its own.",
        50,
    ),
];

impl Benchmark {
    /// Benchmarks the bundle that `load` opens; opening counts as load time. `device` names the device in the result.
    ///
    /// # Errors
    /// If the bundle can't be opened or run, a length doesn't fit the context, or energy can't be measured.
    pub fn run(
        load: impl FnOnce() -> Result<Arc<LoadedModel>>,
        device: String,
        options: &BenchmarkOptions,
    ) -> Result<Benchmark> {
        let start = Instant::now();
        let model = load()?;
        let lengths = if options.suite.is_empty() { options.lengths(model.context())? } else { Vec::new() };
        // the first call loads the functions
        continue_text(&model, 1, 1, 2)?;
        let load_s = start.elapsed().as_secs_f64();
        let (model, profile) = model.profiled()?;
        let mut meter = options.energy.then(EnergyMeter::start).transpose()?;
        let suite = cases(&model, options)?;
        let mut tests = Vec::new();
        for lengths in lengths {
            tests.push(test(&model, options, &mut meter, lengths)?);
        }
        let profile = profile.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let all: f64 = profile.values().map(|calls| calls.time.as_secs_f64()).sum();
        let bundle = model.bundle();
        let functions = profile.iter().map(|(index, calls)| FunctionTime {
            package: bundle.functions[*index].package.clone(),
            function: bundle.functions[*index].function.clone(),
            calls: calls.count,
            total_ms: calls.time.as_secs_f64() * 1e3,
            mean_ms: calls.time.as_secs_f64() * 1e3 / calls.count as f64,
            share: calls.time.as_secs_f64() / all,
        });
        Ok(Benchmark {
            model: bundle.name.clone(),
            digest: bundle.digest(),
            machine: machine()?,
            device,
            threads: anec_exec::threads(),
            context: model.context(),
            weight_bytes: bundle.packages.iter().map(|package| package.weight_bytes).sum(),
            load_s,
            resident_bytes: resources::resident_bytes(),
            peak_bytes: resources::usage().map(|usage| usage.peak_memory_bytes),
            tests,
            averages: SuiteAverages::of(&suite),
            suite,
            functions: functions.collect(),
        })
    }
}

fn machine() -> Result<String> {
    match CoreMl::new() {
        Ok(engine) => Ok(engine.machine()?.to_string()),
        Err(_) => {
            let [system, architecture] = [std::env::consts::OS, std::env::consts::ARCH];
            Ok(format!("{system} {architecture}, {}", anec_exec::processor().join(", ")))
        }
    }
}

/// Continues a prompt; returns the time spans until and after the first token.
fn continue_text(model: &Arc<LoadedModel>, prompt: u64, generated: u64, length: u64) -> Result<[Range<Instant>; 2]> {
    let vocab_size = model.bundle().model.vocab_size;
    // throughput doesn't depend on token ids; a fixed sequence keeps runs comparable
    let tokens: Vec<u32> = (0..prompt).map(|i| (i.wrapping_mul(7919) % vocab_size) as u32).collect();
    let session = model.start(length.max(prompt))?;
    // prefill yields the first token
    let max_tokens = if generated > 0 { generated as usize + 1 } else { 0 };
    let start = Instant::now();
    let request = GenerationRequest { prompt: tokens, max_tokens, ..GenerationRequest::default() };
    let mut generation = session.generate(request)?;
    generation.step()?;
    let first = Instant::now();
    generation.run()?;
    Ok([start..first, first..Instant::now()])
}

fn test(
    model: &Arc<LoadedModel>,
    options: &BenchmarkOptions,
    meter: &mut Option<EnergyMeter>,
    lengths: Lengths,
) -> Result<BenchmarkTest> {
    let Lengths { prompt, generated, depth } = lengths;
    let seconds = |time: &Range<Instant>| (time.end - time.start).as_secs_f64();
    let (mut samples, mut firsts, mut times) = (Vec::new(), Vec::new(), Vec::new());
    let tokens = if generated > 0 { generated } else { prompt } as f64;
    for turn in 0..options.warmup + options.repetitions {
        let [first, rest] = continue_text(model, prompt + depth, generated, prompt + depth + generated)?;
        if turn >= options.warmup {
            firsts.push(seconds(&first) * 1e3);
            let time = if generated > 0 { rest } else { first };
            samples.push(tokens / seconds(&time));
            times.push(time);
        }
    }
    let energy = match meter {
        Some(meter) => {
            Some(times.iter().try_fold(Energy::default(), |all, time| Ok::<_, Error>(all + meter.between(time)?))?)
        }
        None => None,
    };
    let median_tps = median(&samples);
    let deviations: Vec<f64> = samples.iter().map(|sample| (sample - median_tps).abs()).collect();
    Ok(BenchmarkTest {
        test: lengths.name(),
        prompt,
        generated,
        depth,
        median_tps,
        spread_tps: median(&deviations),
        ttft_ms: median(&firsts),
        millijoules_per_token: energy.map(|energy| energy.total_j() * 1e3 / (tokens * samples.len() as f64)),
        energy,
        samples_tps: samples,
    })
}

fn cases(model: &Arc<LoadedModel>, options: &BenchmarkOptions) -> Result<Vec<BenchmarkCase>> {
    let Some(shortest) = options.suite.first() else { return Ok(Vec::new()) };
    let tokenizer = Tokenizer::of(model.bundle(), model.folder())?;
    let template = match ChatTemplate::of(model.bundle(), model.folder(), &tokenizer) {
        Ok(template) => Some(template),
        Err(RuntimeError::NoChatTemplate { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let run = |of: &SuitePrompt| {
        let prompt = match &template {
            Some(template) => template.encode(&tokenizer, &Chat::new(vec![Message::new("user", &of.prompt)]))?,
            None => tokenizer.encode_literal(&of.prompt)?,
        };
        let max_tokens = of.max_tokens;
        let stops = model.end_tokens();
        let request = GenerationRequest { prompt, max_tokens, stops, ..GenerationRequest::default() };
        let prompt_tokens = request.prompt.len();
        let generation = request.start(model)?.run()?;
        let timings = generation.timings;
        Ok::<_, Error>(BenchmarkCase {
            name: of.name.clone(),
            runs: 1,
            prompt_tokens,
            gen_tokens: generation.ids.len(),
            prefill_tps: timings.prefill_tps,
            decode_tps: timings.decode_tps,
            decode_spread_tps: 0.0,
            same_text: true,
            ttft_ms: timings.ttft_ms,
            inference_ms: timings.elapsed_s * 1e3,
            text: tokenizer.decode(&generation.ids, false)?,
        })
    };
    for _ in 0..options.warmup {
        run(shortest)?;
    }
    let case = |of: &SuitePrompt| {
        let runs = (0..options.repetitions.max(1)).map(|_| run(of)).collect::<Result<Vec<_>>>()?;
        Ok::<_, Error>(BenchmarkCase::of_runs(runs).unwrap_or_else(|| unreachable!("a suite runs at least once")))
    };
    options.suite.iter().map(case).collect()
}

impl BenchmarkCase {
    /// Medians of several runs of a prompt; `None` if there are none.
    pub fn of_runs(runs: Vec<BenchmarkCase>) -> Option<Self> {
        let numbers = |of: fn(&BenchmarkCase) -> f64| runs.iter().map(of).collect::<Vec<f64>>();
        let decode_tps = median(&numbers(|run| run.decode_tps));
        let deviations: Vec<f64> = runs.iter().map(|run| (run.decode_tps - decode_tps).abs()).collect();
        let first = runs.first()?;
        Some(BenchmarkCase {
            runs: runs.len() as u32,
            prefill_tps: median(&numbers(|run| run.prefill_tps)),
            decode_tps,
            decode_spread_tps: median(&deviations),
            same_text: runs.iter().all(|run| run.text == first.text),
            ttft_ms: median(&numbers(|run| run.ttft_ms)),
            inference_ms: median(&numbers(|run| run.inference_ms)),
            ..first.clone()
        })
    }
}

/// Median.
fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::{BenchmarkOptions, Lengths, median};

    #[test]
    fn lengths_fit_the_context() {
        let names = |options: &BenchmarkOptions, context: u64| {
            let lengths = options.lengths(context).map_err(|error| error.to_string())?;
            Ok::<_, String>(lengths.iter().map(Lengths::name).collect::<Vec<_>>())
        };
        let usual = BenchmarkOptions::default();
        assert_eq!(names(&usual, 2048).unwrap(), ["pp64", "pp256", "tg32"]);
        assert_eq!(names(&usual, 128).unwrap(), ["pp64", "pp128", "tg32"]);
        assert_eq!(names(&usual, 16).unwrap(), ["pp16", "tg15"]);
        let deep = BenchmarkOptions { depth: vec![1, 120], ..usual.clone() };
        assert_eq!(names(&deep, 128).unwrap(), ["pp64", "pp128", "tg32", "tg8 @ d120"]);
        // requested lengths are measured exactly or refused by name
        let prompts = |prefill| BenchmarkOptions { prefill: Some(vec![prefill]), ..usual.clone() };
        assert_eq!(names(&prompts(128), 128).unwrap(), ["pp128", "tg32"]);
        for (options, named) in [
            (prompts(129), "prefill 129 has to be from 1 to 128: "),
            (prompts(0), "prefill 0 has to be from 1 to 128: "),
            (BenchmarkOptions { depth: vec![600], ..usual.clone() }, "depth 600 has to be from 1 to 127: "),
            (BenchmarkOptions { depth: vec![0], ..usual.clone() }, "depth 0 has to be from 1 to 127: "),
            (
                BenchmarkOptions { decode: Some(vec![64]), depth: vec![100], ..usual.clone() },
                "decode 64 after depth 100 has to be from 1 to 28: ",
            ),
        ] {
            let error = names(&options, 128).unwrap_err();
            assert_eq!(error, format!("{named}the bundle's largest context has 128 tokens"));
        }
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
