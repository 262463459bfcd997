//! Conversion benchmark: wall time, processor time and peak memory of `anec convert`, beside `cp` reading the source
//! and writing as many bytes as the bundle has, and beside the usual route through coremltools.
//!
//! ```text
//! cargo bench --bench convert                        # all of the below
//! cargo bench --bench convert -- --layers 32         # Phi-4-mini whole: 3.8 billion weights (12 GB of disk)
//! cargo bench --bench convert -- --source model.gguf # one local model
//! cargo bench --bench convert -- --set quant.granularity=per_channel
//! ```
//!
//! The models are Qwen2.5-Coder-0.5B as Q4_K_M from the folder in `ANEC_MODELS`; Phi-4-mini's shape as Q8_0 with random
//! weights, 4 of its 32 layers unless `--layers` says otherwise; and 2 of its layers with a quarter of its LM head both
//! ways, through `benches/coremltools_route.py` with the Python in `ANEC_PYTHON`. Missing ones are skipped with a
//! message.
//!
//! `--runs N` sets the number of repetitions (default 5): conversions and copies alternate, with a warm cache and after
//! the disk has written all. `--folder DIR` sets the folder for files, `--json` prints one line of JSON for each model.
//! Processor time and memory are those that the system reports for the finished process.

#[cfg(unix)]
fn main() {
    bench::main();
}

#[cfg(not(unix))]
fn main() {
    eprintln!("this benchmark needs a system that reports what a finished process used");
}

#[cfg(unix)]
mod bench {
    use std::fs::File;
    use std::io::{BufWriter, Read, Write};
    use std::path::{Path, PathBuf};
    use std::process::{Command, Stdio};
    use std::time::Instant;

    use anec::source::SourceDtype;
    use anec::source::gguf::GgufValue;
    use anec::source::gguf::write::{Writer, q8_0};
    use serde_json::{Value as Json, json};

    /// Rows of Phi-4-mini's LM head.
    const VOCABULARY: u64 = 200_064;
    /// Layers and LM head rows that are converted both ways.
    const BOTH_WAYS: (u64, u64) = (2, VOCABULARY / 4);

    struct Arguments {
        layers: u64,
        source: Option<PathBuf>,
        runs: usize,
        folder: PathBuf,
        sets: Vec<String>,
        json: bool,
    }

    pub fn main() {
        let arguments = Arguments::parse();
        std::fs::create_dir_all(&arguments.folder).expect("the folder can be made");
        if let Some(source) = &arguments.source {
            arguments.measure(&source.display().to_string(), source);
            return;
        }
        let models = std::env::var_os("ANEC_MODELS").map(PathBuf::from);
        match models.map(|folder| folder.join("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")) {
            Some(model) if model.is_file() => drop(arguments.measure("Qwen2.5-Coder-0.5B, Q4_K_M", &model)),
            _ => eprintln!("SKIPPED: ANEC_MODELS names no folder with qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
        }
        let name = format!("Phi-4-mini's shape, {} layers, Q8_0", arguments.layers);
        arguments.measure(&name, &arguments.synthetic(arguments.layers, VOCABULARY));
        match std::env::var_os("ANEC_PYTHON") {
            Some(python) => arguments.compare(Path::new(&python)),
            None => eprintln!("SKIPPED: ANEC_PYTHON names no Python that has coremltools"),
        }
    }

    /// Wall and processor seconds and peak bytes of a finished child.
    #[derive(Clone, Copy)]
    struct Usage {
        wall: f64,
        cpu: f64,
        peak: u64,
    }

    fn run(command: &mut Command) -> Usage {
        let begin = Instant::now();
        #[allow(clippy::zombie_processes, reason = "wait4 below waits for it, and says what it used")]
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program starts");
        let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
        let id = libc::pid_t::try_from(child.id()).expect("a process id");
        // SAFETY: both pointers are to values of the types that the call fills; only this code waits for the child.
        let waited = unsafe { libc::wait4(id, &mut status, 0, usage.as_mut_ptr()) };
        assert_eq!(waited, id, "the process can be waited for");
        assert_eq!(status, 0, "the process ends well");
        // SAFETY: all bit patterns are valid for the structure, and it was zeroed.
        let usage = unsafe { usage.assume_init() };
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
        Usage {
            wall: begin.elapsed().as_secs_f64(),
            cpu: seconds(usage.ru_utime) + seconds(usage.ru_stime),
            peak: usage.ru_maxrss as u64 * if cfg!(target_vendor = "apple") { 1 } else { 1024 },
        }
    }

    impl Arguments {
        fn parse() -> Self {
            let mut arguments = Arguments {
                layers: 4,
                source: None,
                runs: 5,
                folder: Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench-convert"),
                sets: Vec::new(),
                json: false,
            };
            let mut words = std::env::args().skip(1);
            while let Some(word) = words.next() {
                let mut value = || words.next().unwrap_or_else(|| panic!("{word} needs a value"));
                match word.as_str() {
                    "--layers" => arguments.layers = value().parse().expect("a number of layers"),
                    "--source" => arguments.source = Some(value().into()),
                    "--runs" => arguments.runs = value().parse().expect("a number of runs"),
                    "--folder" => arguments.folder = value().into(),
                    "--set" => arguments.sets.push(value()),
                    "--json" => arguments.json = true,
                    // option that cargo appends
                    "--bench" => {}
                    other => panic!("unknown argument {other}"),
                }
            }
            arguments
        }

        /// Model of Phi-4-mini's shape, written if it is missing.
        fn synthetic(&self, layers: u64, vocabulary: u64) -> PathBuf {
            let path = self.folder.join(format!("phi4-mini-{layers}-layers-{vocabulary}-rows-q8_0.gguf"));
            if !path.exists() {
                eprintln!("writing {}", path.display());
                phi4_mini(&path, layers, vocabulary);
            }
            path
        }

        /// Converts a source and copies as many bytes, alternating; prints the best and the median of each, and returns
        /// the least processor time of a conversion.
        fn measure(&self, name: &str, source: &Path) -> f64 {
            let (mut conversions, mut copies, mut bundle_bytes) = (Vec::new(), Vec::new(), 0);
            let source_bytes = read(source);
            for _ in 0..self.runs {
                let out = self.folder.join("out");
                let _ = std::fs::remove_dir_all(&out);
                settle(source);
                conversions.push(self.convert(source, &out));
                bundle_bytes = report(&out)["run"]["bundle_bytes"].as_u64().expect("bytes");
                std::fs::remove_dir_all(&out).expect("what was written can be removed");
                settle(source);
                copies.push(copy(source, &self.folder.join("copy"), bundle_bytes));
            }
            let best = |of: &dyn Fn(&Usage) -> f64| conversions.iter().map(of).fold(f64::MAX, f64::min);
            let (wall, cpu) = (best(&|usage| usage.wall), best(&|usage| usage.cpu));
            let peak = conversions.iter().map(|usage| usage.peak).max().unwrap_or(0);
            let copied = copies.iter().copied().fold(f64::MAX, f64::min);
            let walls: Vec<f64> = conversions.iter().map(|usage| usage.wall).collect();
            let (median_wall, median_copied) = (median(&walls), median(&copies));
            let limit = largest_tensor(source) as f64 * 4.0 * 1.5 + 300e6;
            if self.json {
                println!(
                    "{}",
                    json!({
                        "model": name, "source_bytes": source_bytes, "bundle_bytes": bundle_bytes, "runs": self.runs,
                        "wall_seconds": wall, "median_wall_seconds": median_wall, "cpu_seconds": cpu,
                        "peak_bytes": peak, "memory_target_bytes": limit,
                        "copy_seconds": copied, "median_copy_seconds": median_copied,
                    })
                );
            } else {
                println!(
                    "{name}: {:.0} MB become {:.0} MB; best (median) of {} runs",
                    source_bytes as f64 / 1e6,
                    bundle_bytes as f64 / 1e6,
                    self.runs
                );
                println!("  convert  {wall:.2} s ({median_wall:.2} s), {cpu:.2} s of processor time");
                println!("  copy     {copied:.2} s ({median_copied:.2} s)");
                println!("  {:.2} times the copy (target: 1.3)", wall / copied);
                println!("  {:.0} MB of memory at most (limit: {:.0} MB)", peak as f64 / 1e6, limit / 1e6);
            }
            assert!(peak as f64 <= limit, "memory is within 1.5 times the largest tensor in fp32 and 300 MB");
            cpu
        }

        fn convert(&self, source: &Path, out: &Path) -> Usage {
            let mut command = Command::new(env!("CARGO_BIN_EXE_anec"));
            command.args(["convert", "--no-measure", "--no-compile", "--source"]).arg(source).arg("--out").arg(out);
            for set in &self.sets {
                command.args(["--set", set]);
            }
            run(&mut command)
        }

        /// Converts the same layers and rows with anec and with coremltools.
        fn compare(&self, python: &Path) {
            let (layers, rows) = BOTH_WAYS;
            let source = self.synthetic(layers, rows);
            let own =
                self.measure(&format!("Phi-4-mini's shape, {layers} layers, {rows} rows of the LM head"), &source);
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/coremltools_route.py");
            let mut command = Command::new(python);
            command.arg(script).arg(&source).args(["--end", &layers.to_string(), "--head-rows", &rows.to_string()]);
            let theirs = run(&mut command);
            if self.json {
                println!(
                    "{}",
                    json!({
                        "route": "coremltools", "layers": layers, "head_rows": rows, "wall_seconds": theirs.wall,
                        "cpu_seconds": theirs.cpu, "peak_bytes": theirs.peak, "anec_cpu_seconds": own,
                    })
                );
            } else {
                println!("  coremltools, once: {:.1} s, {:.1} s of processor time", theirs.wall, theirs.cpu);
                println!("  {:.0} times the processor time (target: 100)", theirs.cpu / own);
                println!("  {:.0} MB of memory at most", theirs.peak as f64 / 1e6);
            }
        }
    }

    /// Warms the cache and waits until the disk has written everything.
    fn settle(source: &Path) {
        // SAFETY: the call has no preconditions.
        unsafe { libc::sync() };
        read(source);
    }

    /// Reads the source and writes as many bytes as the bundle has, as `cp` does. Returns the seconds.
    fn copy(source: &Path, path: &Path, bytes: u64) -> f64 {
        let begin = Instant::now();
        read(source);
        let mut file = File::create(path).expect("a file");
        let buffer = vec![0x5a; 1 << 20];
        let mut left = bytes;
        while left > 0 {
            let step = left.min(buffer.len() as u64);
            file.write_all(&buffer[..step as usize]).expect("room on the disk");
            left -= step;
        }
        drop(file);
        let seconds = begin.elapsed().as_secs_f64();
        std::fs::remove_file(path).expect("what was written can be removed");
        seconds
    }

    fn median(values: &[f64]) -> f64 {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0
    }

    fn report(bundle: &Path) -> Json {
        serde_json::from_slice(&std::fs::read(bundle.join("report.json")).expect("a report")).expect("JSON")
    }

    /// Reads a file, or all files of a folder; returns the bytes.
    fn read(path: &Path) -> u64 {
        if path.is_dir() {
            let entries = std::fs::read_dir(path).expect("a folder").flatten();
            return entries.filter(|e| e.path().is_file()).map(|e| read(&e.path())).sum();
        }
        let mut file = File::open(path).expect("the source");
        let mut buffer = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            match file.read(&mut buffer).expect("the source can be read") {
                0 => return bytes,
                n => bytes += n as u64,
            }
        }
    }

    fn largest_tensor(source: &Path) -> u64 {
        let source = anec::source::Source::open_path(source).expect("a source");
        source.tensors().map(|t| t.elements()).max().unwrap_or(0)
    }

    /// Writes a GGUF of Phi-4-mini's shape with random Q8_0 weights, named as by llama.cpp's converter.
    fn phi4_mini(path: &Path, layers: u64, vocab: u64) {
        let (hidden, width, queries, keys) = (3072, 8192, 24 * 128, 8 * 128);
        let mut writer = Writer::new();
        writer.key("general.architecture", GgufValue::String("phi3".into()));
        for (key, value) in [
            ("embedding_length", hidden),
            ("block_count", layers),
            ("feed_forward_length", width),
            ("attention.head_count", 24),
            ("attention.head_count_kv", 8),
            ("rope.dimension_count", 96),
            ("context_length", 131_072),
            ("rope.scaling.original_context_length", 4096),
        ] {
            writer.key(&format!("phi3.{key}"), GgufValue::U32(value as u32));
        }
        writer.key("phi3.attention.layer_norm_rms_epsilon", GgufValue::F32(1e-5));
        writer.key("phi3.rope.freq_base", GgufValue::F32(10_000.0));
        writer.key("phi3.rope.scaling.attn_factor", GgufValue::F32(1.190_238));
        writer.tensor("token_embd.weight", SourceDtype::Q8_0, &[vocab, hidden]);
        writer.tensor("output_norm.weight", SourceDtype::F32, &[hidden]);
        writer.tensor("rope_factors_long.weight", SourceDtype::F32, &[48]);
        writer.tensor("rope_factors_short.weight", SourceDtype::F32, &[48]);
        for layer in 0..layers {
            let mut matrix = |name: &str, rows: u64, columns: u64| {
                writer.tensor(&format!("blk.{layer}.{name}.weight"), SourceDtype::Q8_0, &[rows, columns]);
            };
            matrix("attn_qkv", queries + 2 * keys, hidden);
            matrix("attn_output", hidden, queries);
            matrix("ffn_up", 2 * width, hidden);
            matrix("ffn_down", hidden, width);
            for name in ["attn_norm", "ffn_norm"] {
                writer.tensor(&format!("blk.{layer}.{name}.weight"), SourceDtype::F32, &[hidden]);
            }
        }
        let tensors: Vec<(SourceDtype, u64)> = writer.tensors().map(|(_, t, s)| (t, s.iter().product())).collect();
        let partial = path.with_extension("partial");
        let out = BufWriter::new(File::create(&partial).expect("a file"));
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        writer
            .write(out, |index, out| {
                let (dtype, elements) = tensors[index];
                let mut bytes = Vec::new();
                let mut values = [0f32; 4096];
                let mut left = elements as usize;
                while left > 0 {
                    let values = &mut values[..left.min(4096)];
                    for value in values.iter_mut() {
                        // xorshift: all bit patterns occur
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        *value = ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.05;
                    }
                    bytes.clear();
                    match dtype {
                        SourceDtype::F32 => values.iter().for_each(|v| bytes.extend((1.0 + v).to_le_bytes())),
                        _ => q8_0(values, &mut bytes),
                    }
                    out.write_all(&bytes)?;
                    left -= values.len();
                }
                Ok(())
            })
            .expect("room on the disk");
        std::fs::rename(partial, path).expect("a name");
    }
}
