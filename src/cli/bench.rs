//! `anec bench`

use std::path::PathBuf;

use clap::ValueEnum;
use serde_json::json;

use super::model::{Runner, TEXT_PRECISION};
use super::openai_client::Server;
use super::usage::UsageError;
use super::{print, print_json};
use anec::base::Result;
use anec::report;
use anec::report::table::table;
use anec::runtime::bench::{
    Benchmark, BenchmarkCase, BenchmarkOptions, BenchmarkTest, FunctionTime, SuiteAverages, SuitePrompt,
};
use anec::runtime::energy::Energy;

/// Measure the speed and memory of a bundle: prefill and decode tokens/s, time to first token, memory
///
/// Each number is the median of several runs after a warm-up; the spread is the median absolute deviation.
#[derive(Debug, clap::Args)]
#[command(mut_arg("precision", TEXT_PRECISION))]
pub struct BenchArgs {
    #[command(flatten)]
    runner: Runner,
    /// Prompt lengths to measure [default: 64,256, within the context]
    #[arg(long, value_delimiter = ',', value_name = "N,N,…")]
    prefill: Option<Vec<u64>>,
    /// Numbers of tokens to generate [default: 32, within the context]
    #[arg(long, value_delimiter = ',', value_name = "N,N,…")]
    decode: Option<Vec<u64>>,
    /// Tokens in the KV cache before measuring starts (depth)
    #[arg(long, value_delimiter = ',', value_name = "N,N,…", default_values_t = [1])]
    depth: Vec<u64>,
    /// Number of measured runs [default: 5, of a suite 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: Option<u32>,
    /// Number of warm-up runs
    #[arg(long, value_name = "N", default_value_t = 1)]
    warmup: u32,
    /// Run prompts instead: five built-in ones, or a JSON file's, [{"name", "prompt", "max_tokens"}, …]
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with_all = ["prefill", "decode", "depth"])]
    suite: Option<Option<PathBuf>>,
    /// Run the same prompts on a server with OpenAI's API, too: http://127.0.0.1:11434/v1
    #[arg(long, value_name = "URL", requires = "suite")]
    compare: Option<String>,
    /// Model of that server [default: its first one]
    #[arg(long, value_name = "NAME", requires = "compare")]
    compare_model: Option<String>,
    /// Show the time of each function
    #[arg(long)]
    functions: bool,
    /// Measure the energy per token with macOS' powermetrics (needs root; its samples take 0.1 s, so choose lengths
    /// that take longer)
    #[arg(long, conflicts_with = "suite")]
    energy: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// Print the result as JSON (same as --format json)
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Human-readable table
    Table,
    /// One JSON object
    Json,
    /// Lines as printed by llama.cpp's llama-bench
    Llama,
}

impl BenchArgs {
    pub(super) fn run(self) -> Result<u8> {
        self.check_format()?;
        let device = self.runner.device();
        let suite = match &self.suite {
            None => Vec::new(),
            Some(None) => SuitePrompt::built_in(),
            Some(Some(file)) => SuitePrompt::read(file)?,
        };
        let repetitions = self.repetitions.unwrap_or(if suite.is_empty() { 5 } else { 3 });
        let server = self.compare.as_deref().map(Server::new).transpose()?;
        let mut options = BenchmarkOptions::new();
        (options.prefill, options.decode, options.depth) = (self.prefill, self.decode, self.depth);
        (options.repetitions, options.warmup, options.energy) = (repetitions, self.warmup, self.energy);
        options.suite.clone_from(&suite);
        let mut bench = Benchmark::run(|| self.runner.load(), device, &options)?;
        let gates = self.runner.recorded_gates();
        if !self.functions {
            bench.functions.clear();
        }
        let compared = match &server {
            None => None,
            Some(server) => {
                let model = self.compare_model.map_or_else(|| server.model(), Ok)?;
                let case = |of: &SuitePrompt| {
                    server.run(&model, of)?;
                    let runs = (0..repetitions).map(|_| server.run(&model, of)).collect::<Result<Vec<_>>>()?;
                    Ok::<_, anec::base::Error>(BenchmarkCase::of_runs(runs))
                };
                let cases = suite.iter().map(case).collect::<Result<Vec<_>>>()?;
                Some((model, cases.into_iter().flatten().collect::<Vec<_>>()))
            }
        };
        match if self.json { Format::Json } else { self.format } {
            Format::Json => {
                let mut json = serde_json::to_value(&bench).unwrap_or_default();
                json["gates"] = gates.into();
                if let Some((model, cases)) = &compared {
                    let averages = SuiteAverages::of(cases);
                    json["compared"] =
                        json!({"url": self.compare, "model": model, "suite": cases, "averages": averages});
                }
                print_json(&json);
            }
            Format::Table => {
                let mut text = as_table(&bench, &gates);
                if let Some((model, cases)) = &compared {
                    let url = self.compare.as_deref().unwrap_or_default();
                    text += &format!("\n{model} on {url}\n\n{}", suite_table(cases));
                }
                print(&text);
            }
            Format::Llama => print(&as_llama_bench(&bench)),
        }
        Ok(0)
    }

    /// Rejects measurements that llama-bench's format has no columns for.
    fn check_format(&self) -> Result<()> {
        let more = [("--suite", self.suite.is_some()), ("--functions", self.functions), ("--energy", self.energy)];
        match more.into_iter().find(|(_, given)| *given && self.format == Format::Llama) {
            Some((option, _)) => {
                let problem = format!("--format llama has no column for {option}");
                Err(UsageError::new(problem, "leave out --format, or use --format json").into())
            }
            None => Ok(()),
        }
    }
}

/// Prompts of a suite with their averages.
fn suite_table(cases: &[BenchmarkCase]) -> String {
    let row = |case: &BenchmarkCase| {
        let counts = [case.prompt_tokens, case.gen_tokens].map(|count| count.to_string());
        let numbers = [case.prefill_tps, case.decode_tps, case.decode_spread_tps, case.ttft_ms, case.inference_ms];
        let same = if case.same_text { "yes" } else { "no" };
        [vec![case.name.clone()], counts.to_vec(), numbers.map(|n| format!("{n:.1}")).to_vec(), vec![same.to_owned()]]
            .concat()
    };
    let head =
        ["prompt", ">in", ">out", ">prefill tok/s", ">decode tok/s", ">spread", ">TTFT ms", ">total ms", "same text"];
    let mut text = table(&head, cases.iter().map(row));
    if let Some(SuiteAverages { prefill_tps, decode_tps, ttft_ms, inference_ms, consistency }) =
        SuiteAverages::of(cases)
    {
        text += &format!(
            "\nmeans: prefill {prefill_tps:.1} tok/s, decode {decode_tps:.1} tok/s, TTFT {ttft_ms:.1} ms, total \
             {inference_ms:.1} ms; consistency of decoding {:.1} %\n",
            consistency * 100.0
        );
    }
    text
}

/// Formats the results as tables.
fn as_table(bench: &Benchmark, gates: &str) -> String {
    let memory = |bytes: Option<u64>| bytes.map_or("unknown".into(), report::bytes);
    let mut text = format!(
        "{} on {}, {} processors: ready after {:.2} s, weights {}, memory {}, at most {}; gates: {gates}\n\n",
        bench.model,
        bench.device,
        bench.threads,
        bench.load_s,
        report::bytes(bench.weight_bytes),
        memory(bench.resident_bytes),
        memory(bench.peak_bytes),
    );
    if !bench.tests.is_empty() {
        let energy = bench.tests.iter().any(|test| test.energy.is_some());
        let row = |test: &BenchmarkTest| {
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
        text += &table(&head, bench.tests.iter().map(row));
    }
    if !bench.suite.is_empty() {
        text += &suite_table(&bench.suite);
    }
    if !bench.functions.is_empty() {
        let row = |function: &FunctionTime| {
            let times = [function.total_ms, function.mean_ms, function.share * 100.0].map(|n| format!("{n:.2}"));
            let names = [function.package.clone(), function.function.clone(), function.calls.to_string()];
            [names.to_vec(), times.to_vec()].concat()
        };
        text.push('\n');
        let head = ["package", "function", ">calls", ">total ms", ">mean ms", ">share %"];
        text += &table(&head, bench.functions.iter().map(row));
    }
    text
}

/// Formats the results as llama-bench's Markdown, with the columns that apply.
fn as_llama_bench(bench: &Benchmark) -> String {
    let size = bench.weight_bytes as f64 / f64::from(1 << 20);
    let mut text =
        "| model | size | backend | threads | test | t/s |\n| --- | ---: | --- | ---: | ---: | ---: |\n".to_owned();
    for test in &bench.tests {
        text += &format!(
            "| {} | {size:.2} MiB | {} | {} | {} | {:.2} ± {:.2} |\n",
            bench.model, bench.device, bench.threads, test.test, test.median_tps, test.spread_tps
        );
    }
    text
}
