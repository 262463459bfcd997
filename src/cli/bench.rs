//! `anec bench`

use clap::ValueEnum;

use super::model::{Runner, TEXT_PRECISION};
use super::usage::UsageError;
use super::{print, print_json};
use anec::base::Result;
use anec::report;
use anec::report::table::table;
use anec::runtime::bench::{Benchmark, BenchmarkCase, BenchmarkOptions, BenchmarkTest, FunctionTime};
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
    /// Number of measured runs
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Number of warm-up runs
    #[arg(long, value_name = "N", default_value_t = 1)]
    warmup: u32,
    /// Run five prompts of different kinds once each instead
    #[arg(long, conflicts_with_all = ["prefill", "decode", "depth", "repetitions"])]
    suite: bool,
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
        let options = BenchmarkOptions {
            prefill: self.prefill,
            decode: self.decode,
            depth: self.depth,
            repetitions: self.repetitions,
            warmup: self.warmup,
            suite: self.suite,
            energy: self.energy,
        };
        let mut bench = Benchmark::run(|| self.runner.load(), device, &options)?;
        if !self.functions {
            bench.functions.clear();
        }
        match if self.json { Format::Json } else { self.format } {
            Format::Json => print_json(&bench),
            Format::Table => print(&as_table(&bench)),
            Format::Llama => print(&as_llama_bench(&bench)),
        }
        Ok(0)
    }

    /// Rejects measurements that llama-bench's format has no columns for.
    fn check_format(&self) -> Result<()> {
        let more = [("--suite", self.suite), ("--functions", self.functions), ("--energy", self.energy)];
        match more.into_iter().find(|(_, given)| *given && self.format == Format::Llama) {
            Some((option, _)) => {
                let problem = format!("--format llama has no column for {option}");
                Err(UsageError::new(problem, "leave out --format, or use --format json").into())
            }
            None => Ok(()),
        }
    }
}

/// Formats the results as tables.
fn as_table(bench: &Benchmark) -> String {
    let memory = |bytes: Option<u64>| bytes.map_or("unknown".into(), report::bytes);
    let mut text = format!(
        "{} on {}, {} processors: ready after {:.2} s, weights {}, memory {}, at most {}\n\n",
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
        let row = |case: &BenchmarkCase| {
            let counts = [case.prompt_tokens, case.gen_tokens].map(|count| count.to_string());
            let numbers =
                [case.prefill_tps, case.decode_tps, case.ttft_ms, case.inference_ms].map(|n| format!("{n:.1}"));
            [vec![case.name.to_owned()], counts.to_vec(), numbers.to_vec()].concat()
        };
        let head = ["prompt", ">in", ">out", ">prefill t/s", ">decode t/s", ">TTFT ms", ">infer ms"];
        text += &table(&head, bench.suite.iter().map(row));
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
