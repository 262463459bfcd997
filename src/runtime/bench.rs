//! How fast a bundle runs: tokens per second of prompts and of texts, time to the first token, energy, memory.
//!
//! Each number is the median of several runs, after some that don't count; the spread is their median absolute deviation.

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use serde::Serialize;

use super::chat::{Chat, ChatTemplate, Message};
use super::energy::{Energy, Meter};
use super::{GenerationRequest, LoadedModel, RuntimeError, Tokenizer};
use anec_base::{ContentDigest, Error, Result, resources};
use anec_coreml::{CoreMl, Engine};

/// What is measured, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BenchmarkOptions {
    /// Lengths of prompts, in tokens; 64 and 256 if not given, as far as the context holds them.
    pub prefill: Option<Vec<u64>>,
    /// Lengths of texts, in tokens; 32 if not given, as far as the context holds them.
    pub decode: Option<Vec<u64>>,
    /// Tokens already in the cache when a text begins.
    pub depth: Vec<u64>,
    /// Runs that count.
    pub repetitions: u32,
    /// Runs before them that don't.
    pub warmup: u32,
    /// Five prompts of several kinds instead of lengths, each continued once.
    pub suite: bool,
    /// Also measures energy, by macOS' `powermetrics`.
    pub energy: bool,
}

impl Default for BenchmarkOptions {
    fn default() -> Self {
        let (prefill, decode, depth) = (None, None, vec![1]);
        BenchmarkOptions { prefill, decode, depth, repetitions: 5, warmup: 1, suite: false, energy: false }
    }
}

/// Lengths of prompts that are measured where none are given.
const PREFILL: [u64; 2] = [64, 256];

/// The length of texts that is measured where none is given.
const DECODE: u64 = 32;

/// What is measured: a prompt, or a text after others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lengths {
    prompt: u64,
    generated: u64,
    depth: u64,
}

impl Lengths {
    /// Its name, as llama-bench has it.
    fn name(&self) -> String {
        match self {
            Lengths { generated: 0, prompt, .. } => format!("pp{prompt}"),
            Lengths { generated, depth: ..=1, .. } => format!("tg{generated}"),
            Lengths { generated, depth, .. } => format!("tg{generated} @ d{depth}"),
        }
    }
}

impl BenchmarkOptions {
    /// What is measured of a bundle with such a context.
    ///
    /// # Errors
    /// When a length that was asked for doesn't fit: nothing is measured then.
    fn lengths(&self, context: u64) -> Result<Vec<Lengths>, RuntimeError> {
        let within = |wanted: String, length: u64, most: u64| match (1..=most).contains(&length) {
            true => Ok(length),
            false => Err(RuntimeError::BenchmarkLength { wanted, most, context }),
        };
        let mut usual: Vec<u64> = PREFILL.iter().map(|length| *length.min(&context)).collect();
        usual.dedup();
        let mut all = Vec::new();
        for &prompt in self.prefill.as_ref().unwrap_or(&usual) {
            let prompt = within(format!("--prefill {prompt}"), prompt, context)?;
            all.push(Lengths { prompt, generated: 0, depth: 0 });
        }
        for &depth in &self.depth {
            // a text has a token at least
            let depth = within(format!("--depth {depth}"), depth, context.saturating_sub(1))?;
            let most = context - depth;
            for &generated in self.decode.as_ref().unwrap_or(&vec![DECODE.min(most)]) {
                let wanted = format!("--decode {generated} after --depth {depth}");
                all.push(Lengths { prompt: 0, generated: within(wanted, generated, most)?, depth });
            }
        }
        Ok(all)
    }
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Benchmark {
    /// Name of the bundle.
    pub model: String,
    /// One digest of its files.
    pub digest: ContentDigest,
    /// The machine: a Mac's model and system, or the system and what of its processor the executor uses.
    pub machine: String,
    /// What ran it.
    pub device: String,
    /// Threads of the CPU executor.
    pub threads: usize,
    /// Tokens of the largest context.
    pub context: u64,
    /// Bytes of the weights in all packages.
    pub weight_bytes: u64,
    /// Seconds until the first token could be computed.
    pub load_s: f64,
    /// Bytes of memory at the end.
    pub resident_bytes: Option<u64>,
    /// Bytes of memory at most.
    pub peak_bytes: Option<u64>,
    /// Lengths.
    pub tests: Vec<BenchmarkTest>,
    /// Prompts of the suite.
    pub suite: Vec<BenchmarkCase>,
    /// Times of functions.
    pub functions: Vec<FunctionTime>,
}

/// A length, measured several times.
#[derive(Clone, Debug, Serialize)]
pub struct BenchmarkTest {
    /// `pp64`: a prompt of 64 tokens; `tg32`: a text of 32; `@ d256` after 256 others.
    pub test: String,
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Tokens of the text.
    pub generated: u64,
    /// Tokens before.
    pub depth: u64,
    /// Tokens per second.
    pub median_tps: f64,
    /// Median absolute deviation of tokens per second.
    pub spread_tps: f64,
    /// Tokens per second of each run.
    pub samples_tps: Vec<f64>,
    /// Median of the times to the first token, in milliseconds.
    pub ttft_ms: f64,
    /// Energy of all counted runs.
    pub energy: Option<Energy>,
    /// Energy for each of their tokens.
    pub millijoules_per_token: Option<f64>,
}

/// A prompt of the suite.
#[derive(Clone, Debug, Serialize)]
pub struct BenchmarkCase {
    /// Its name.
    pub name: &'static str,
    /// Tokens of the prompt, of the chat's template too.
    pub prompt_tokens: usize,
    /// Tokens of the text.
    pub gen_tokens: usize,
    /// Tokens of the prompt per second.
    pub prefill_tps: f64,
    /// Tokens of the text per second.
    pub decode_tps: f64,
    /// Milliseconds to the first token.
    pub ttft_ms: f64,
    /// Milliseconds of all.
    pub inference_ms: f64,
    /// The text.
    pub text: String,
}

/// The calls of a function.
#[derive(Clone, Debug, Serialize)]
pub struct FunctionTime {
    /// Its package.
    pub package: String,
    /// Its name.
    pub function: String,
    /// Number of calls.
    pub calls: u64,
    /// Milliseconds of all.
    pub total_ms: f64,
    /// Milliseconds of one.
    pub mean_ms: f64,
    /// Share of the time of all functions, up to 1.
    pub share: f64,
}

/// Name, prompt and most tokens of the suite's cases: as many tokens as a small server's benchmark asked for.
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
    /// Measures a bundle that `load` opens; the time that this takes counts as load time. `device` is what the result calls what
    /// ran it.
    ///
    /// # Errors
    /// When it can't be opened or run, a length doesn't fit its context, or energy can't be measured here.
    pub fn run(
        load: impl FnOnce() -> Result<Arc<LoadedModel>>,
        device: String,
        options: &BenchmarkOptions,
    ) -> Result<Benchmark> {
        let start = Instant::now();
        let model = load()?;
        let lengths = if options.suite { Vec::new() } else { options.lengths(model.context())? };
        // functions are made ready when they are first called
        continue_text(&model, 1, 1, 2)?;
        let load_s = start.elapsed().as_secs_f64();
        let (model, profile) = model.profiled()?;
        let mut meter = options.energy.then(Meter::start).transpose()?;
        let (mut tests, mut suite) = (Vec::new(), Vec::new());
        if options.suite {
            suite = cases(&model, options.warmup)?;
        } else {
            for lengths in lengths {
                tests.push(test(&model, options, &mut meter, lengths)?);
            }
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
            suite,
            functions: functions.collect(),
        })
    }
}

/// What the numbers are of.
fn machine() -> Result<String> {
    match CoreMl::new() {
        Ok(engine) => Ok(engine.machine()?.to_string()),
        Err(_) => {
            let [system, architecture] = [std::env::consts::OS, std::env::consts::ARCH];
            Ok(format!("{system} {architecture}, {}", anec_exec::processor().join(", ")))
        }
    }
}

/// Writes a text after a prompt; gives the times until the first token and after it.
fn continue_text(model: &Arc<LoadedModel>, prompt: u64, generated: u64, length: u64) -> Result<[Range<Instant>; 2]> {
    let vocab_size = model.bundle().model.vocab_size;
    // what the tokens are makes no difference for the time; the same ones each time do for the comparison
    let tokens: Vec<u32> = (0..prompt).map(|i| (i.wrapping_mul(7919) % vocab_size) as u32).collect();
    let session = model.start(length.max(prompt))?;
    // the first token comes with the prompt
    let max_tokens = if generated > 0 { generated as usize + 1 } else { 0 };
    let start = Instant::now();
    let request = GenerationRequest { prompt: tokens, max_tokens, ..GenerationRequest::default() };
    let mut generation = session.generate(request)?;
    generation.step()?;
    let first = Instant::now();
    generation.run()?;
    Ok([start..first, first..Instant::now()])
}

/// Measures a length.
fn test(
    model: &Arc<LoadedModel>,
    options: &BenchmarkOptions,
    meter: &mut Option<Meter>,
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

/// Continues the prompts of the suite.
fn cases(model: &Arc<LoadedModel>, warmup: u32) -> Result<Vec<BenchmarkCase>> {
    let tokenizer = Tokenizer::of(model.bundle(), model.folder())?;
    let template = match ChatTemplate::of(model.bundle(), model.folder(), &tokenizer) {
        Ok(template) => Some(template),
        Err(RuntimeError::NoChatTemplate { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let case = |(name, text, max_tokens): (&'static str, &str, usize)| {
        let prompt = match &template {
            Some(template) => template.encode(&tokenizer, &Chat::new(vec![Message::new("user", text)]))?,
            None => tokenizer.encode_literal(text)?,
        };
        let stops = model.end_tokens();
        let request = GenerationRequest { prompt, max_tokens, stops, ..GenerationRequest::default() };
        let prompt_tokens = request.prompt.len();
        let generation = request.start(model)?.run()?;
        let timings = generation.timings;
        Ok(BenchmarkCase {
            name,
            prompt_tokens,
            gen_tokens: generation.ids.len(),
            prefill_tps: timings.prefill_tps,
            decode_tps: timings.decode_tps,
            ttft_ms: timings.ttft_ms,
            inference_ms: timings.elapsed_s * 1e3,
            text: tokenizer.decode(&generation.ids, false)?,
        })
    };
    for _ in 0..warmup {
        case(SUITE[0])?;
    }
    SUITE.into_iter().map(case).collect()
}

/// The middle of some numbers.
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
        // what was asked for is measured as it is, or refused by its name
        let prompts = |prefill| BenchmarkOptions { prefill: Some(vec![prefill]), ..usual.clone() };
        assert_eq!(names(&prompts(128), 128).unwrap(), ["pp128", "tg32"]);
        for (options, named) in [
            (prompts(129), "--prefill 129 has to be from 1 to 128: "),
            (prompts(0), "--prefill 0 has to be from 1 to 128: "),
            (BenchmarkOptions { depth: vec![600], ..usual.clone() }, "--depth 600 has to be from 1 to 127: "),
            (BenchmarkOptions { depth: vec![0], ..usual.clone() }, "--depth 0 has to be from 1 to 127: "),
            (
                BenchmarkOptions { decode: Some(vec![64]), depth: vec![100], ..usual.clone() },
                "--decode 64 after --depth 100 has to be from 1 to 28: ",
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
