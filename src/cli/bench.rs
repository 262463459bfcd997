//! `anec bench`

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use clap::ValueEnum;
use serde::Serialize;

use super::model::Runner;
use super::{print, print_json};
use anec::base::resources;
use anec::base::{Error, Result};
use anec::report;
use anec::report::table::table;
use anec::runtime::chat::{Chat, ChatTemplate, Message};
use anec::runtime::energy::{Energy, Meter};
use anec::runtime::{GenerationRequest, LoadedModel, RuntimeError, Tokenizer};

/// Measures how fast a bundle runs: tokens per second of prompts and of texts, time to the first token, memory.
///
/// Each number is the median of several runs, after some that don't count; the spread is their median absolute deviation.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    #[command(flatten)]
    runner: Runner,
    /// Lengths of prompts
    #[arg(long, value_delimiter = ',', value_name = "N,N,…", default_values_t = [64, 256])]
    prefill: Vec<u64>,
    /// Lengths of texts
    #[arg(long, value_delimiter = ',', value_name = "N,N,…", default_values_t = [32])]
    decode: Vec<u64>,
    /// Tokens already in the cache when measuring begins (depth)
    #[arg(long, value_delimiter = ',', value_name = "N,N,…", default_values_t = [1])]
    depth: Vec<u64>,
    /// Runs that count
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Runs before them that don't
    #[arg(long, value_name = "N", default_value_t = 1)]
    warmup: u32,
    /// Five prompts of several kinds instead, each written once
    #[arg(long)]
    suite: bool,
    /// Also says how long each function took
    #[arg(long)]
    functions: bool,
    /// Also measures the energy for each token, by macOS' powermetrics, which needs root. Its samples are 0.1 s long: give
    /// lengths that take longer
    #[arg(long, conflicts_with = "suite")]
    energy: bool,
    /// Form of the result
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// The same as --format json
    #[arg(long)]
    json: bool,
}

/// Form of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A table for people
    Table,
    /// One JSON object
    Json,
    /// Lines like those of llama.cpp's llama-bench
    Llama,
}

/// What was measured.
#[derive(Debug, Serialize)]
struct Bench {
    model: String,
    device: String,
    threads: usize,
    context: u64,
    weight_bytes: u64,
    load_s: f64,
    resident_bytes: Option<u64>,
    peak_bytes: Option<u64>,
    tests: Vec<Test>,
    suite: Vec<Case>,
    functions: Vec<FunctionTime>,
}

/// A length, measured several times.
#[derive(Debug, Serialize)]
struct Test {
    /// `pp64`: a prompt of 64 tokens; `tg32`: a text of 32; `@ d256` after 256 others.
    test: String,
    prompt: u64,
    generated: u64,
    depth: u64,
    /// Tokens per second.
    median_tps: f64,
    spread_tps: f64,
    samples_tps: Vec<f64>,
    /// Median of the times to the first token.
    ttft_ms: f64,
    /// Energy of all counted runs.
    energy: Option<Energy>,
    /// Energy for each of their tokens.
    millijoules_per_token: Option<f64>,
}

/// A prompt of the suite.
#[derive(Debug, Serialize)]
struct Case {
    name: &'static str,
    prompt_tokens: usize,
    gen_tokens: usize,
    prefill_tps: f64,
    decode_tps: f64,
    ttft_ms: f64,
    inference_ms: f64,
    text: String,
}

/// The calls of a function.
#[derive(Debug, Serialize)]
struct FunctionTime {
    package: String,
    function: String,
    calls: u64,
    total_ms: f64,
    mean_ms: f64,
    share: f64,
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

impl BenchArgs {
    pub(super) fn run(self) -> Result<u8> {
        let start = Instant::now();
        let model = self.runner.load()?;
        // functions are made ready when they are first called
        self.text(&model, 1, 1, 2)?;
        let load_s = start.elapsed().as_secs_f64();
        let (model, profile) = model.profiled()?;
        let mut meter = self.energy.then(Meter::start).transpose()?;
        let (mut tests, mut suite) = (Vec::new(), Vec::new());
        if self.suite {
            suite = self.cases(&model)?;
        } else {
            for &prompt in &self.prefill {
                tests.push(self.test(&model, &mut meter, format!("pp{prompt}"), prompt, 0, 0)?);
            }
            for (&depth, &generated) in self.depth.iter().flat_map(|depth| self.decode.iter().map(move |n| (depth, n)))
            {
                let after = if depth > 1 { format!(" @ d{depth}") } else { String::new() };
                tests.push(self.test(&model, &mut meter, format!("tg{generated}{after}"), 0, generated, depth)?);
            }
        }
        let profile = profile.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let all: f64 = profile.values().map(|calls| calls.time.as_secs_f64()).sum();
        let bundle = model.bundle();
        let function = |(index, calls): (&usize, &anec::runtime::profile::CallTime)| FunctionTime {
            package: bundle.functions[*index].package.clone(),
            function: bundle.functions[*index].function.clone(),
            calls: calls.count,
            total_ms: calls.time.as_secs_f64() * 1e3,
            mean_ms: calls.time.as_secs_f64() * 1e3 / calls.count as f64,
            share: calls.time.as_secs_f64() / all,
        };
        let bench = Bench {
            model: bundle.name.clone(),
            device: self.runner.device(),
            threads: anec_exec::threads(),
            context: model.context(),
            weight_bytes: bundle.packages.iter().map(|package| package.weight_bytes).sum(),
            load_s,
            resident_bytes: resources::resident_bytes(),
            peak_bytes: resources::usage().map(|usage| usage.peak_memory_bytes),
            tests,
            suite,
            functions: if self.functions { profile.iter().map(function).collect() } else { Vec::new() },
        };
        match if self.json { Format::Json } else { self.format } {
            Format::Json => print_json(&bench),
            Format::Table => print(&bench.table()),
            Format::Llama => print(&bench.llama()),
        }
        Ok(0)
    }

    /// Writes a text after a prompt; gives the times until the first token and after it.
    fn text(&self, model: &Arc<LoadedModel>, prompt: u64, generated: u64, length: u64) -> Result<[Range<Instant>; 2]> {
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

    fn test(
        &self,
        model: &Arc<LoadedModel>,
        meter: &mut Option<Meter>,
        test: String,
        prompt: u64,
        generated: u64,
        depth: u64,
    ) -> Result<Test> {
        let seconds = |time: &Range<Instant>| (time.end - time.start).as_secs_f64();
        let (mut samples, mut firsts, mut times) = (Vec::new(), Vec::new(), Vec::new());
        let tokens = if generated > 0 { generated } else { prompt } as f64;
        for turn in 0..self.warmup + self.repetitions {
            let [first, rest] = self.text(model, prompt + depth, generated, prompt + depth + generated)?;
            if turn >= self.warmup {
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
        Ok(Test {
            test,
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

    fn cases(&self, model: &Arc<LoadedModel>) -> Result<Vec<Case>> {
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
            Ok(Case {
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
        for _ in 0..self.warmup {
            case(SUITE[0])?;
        }
        SUITE.into_iter().map(case).collect()
    }
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

impl Bench {
    fn table(&self) -> String {
        let memory = |bytes: Option<u64>| bytes.map_or("unknown".into(), report::bytes);
        let mut text = format!(
            "{} on {}, {} processors: ready after {:.2} s, weights {}, memory {}, at most {}\n\n",
            self.model,
            self.device,
            self.threads,
            self.load_s,
            report::bytes(self.weight_bytes),
            memory(self.resident_bytes),
            memory(self.peak_bytes),
        );
        if !self.tests.is_empty() {
            let energy = self.tests.iter().any(|test| test.energy.is_some());
            let row = |test: &Test| {
                let least = test.samples_tps.iter().copied().fold(f64::INFINITY, f64::min);
                let most = test.samples_tps.iter().copied().fold(0.0, f64::max);
                let numbers = [test.median_tps, test.spread_tps, least, most].map(|number| format!("{number:.2}"));
                let first = format!("{:.1}", test.ttft_ms);
                let joules = |energy: Energy| format!("{:.2}, {:.2}, {:.2}", energy.ane_j, energy.cpu_j, energy.gpu_j);
                let energy = test.energy.zip(test.millijoules_per_token);
                let energy = energy.map(|(energy, each)| vec![format!("{each:.1}"), joules(energy)]);
                [vec![test.test.clone()], numbers.to_vec(), vec![first], energy.unwrap_or_default()].concat()
            };
            let mut head = vec!["test", ">tokens/s", ">spread", ">least", ">most", ">first token, ms"];
            if energy {
                head.extend([">mJ/token", ">ANE, CPU, GPU in J"]);
            }
            text += &table(&head, self.tests.iter().map(row));
        }
        if !self.suite.is_empty() {
            let row = |case: &Case| {
                let counts = [case.prompt_tokens, case.gen_tokens].map(|count| count.to_string());
                let numbers =
                    [case.prefill_tps, case.decode_tps, case.ttft_ms, case.inference_ms].map(|n| format!("{n:.1}"));
                [vec![case.name.to_owned()], counts.to_vec(), numbers.to_vec()].concat()
            };
            let head = ["prompt", ">in", ">out", ">prefill t/s", ">decode t/s", ">TTFT ms", ">infer ms"];
            text += &table(&head, self.suite.iter().map(row));
        }
        if !self.functions.is_empty() {
            let row = |function: &FunctionTime| {
                let times = [function.total_ms, function.mean_ms, function.share * 100.0].map(|n| format!("{n:.2}"));
                let names = [function.package.clone(), function.function.clone(), function.calls.to_string()];
                [names.to_vec(), times.to_vec()].concat()
            };
            text.push('\n');
            let head = ["package", "function", ">calls", ">total ms", ">mean ms", ">share %"];
            text += &table(&head, self.functions.iter().map(row));
        }
        text
    }

    /// The columns of llama-bench's Markdown, as far as they mean something here.
    fn llama(&self) -> String {
        let size = self.weight_bytes as f64 / f64::from(1 << 20);
        let mut text =
            "| model | size | backend | threads | test | t/s |\n| --- | ---: | --- | ---: | ---: | ---: |\n".to_owned();
        for test in &self.tests {
            text += &format!(
                "| {} | {size:.2} MiB | {} | {} | {} | {:.2} ± {:.2} |\n",
                self.model, self.device, self.threads, test.test, test.median_tps, test.spread_tps
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
