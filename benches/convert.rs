//! Measures conversions: wall time, processor time and peak memory of `anec convert`, beside the time that reading the
//! source and writing as many bytes takes.
//!
//! ```text
//! cargo bench --bench convert                                  # Phi-4-mini's shape, 4 of its 32 layers, Q8_0 GGUF
//! cargo bench --bench convert -- --layers 32                   # the whole 3.8 billion weights (12 GB of disk)
//! cargo bench --bench convert -- --source model.gguf           # a model at hand
//! cargo bench --bench convert -- --set quant.granularity=per_channel
//! ```
//!
//! `--runs N` repeats (3 if not given), `--folder DIR` says where files go, `--json` prints one line of JSON for each run.
//! Processor time and memory are what the system reports of the finished process.

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
    use anec::source::gguf::Value;
    use anec::source::gguf::write::{Writer, q8_0};
    use serde_json::json;

    struct Arguments {
        layers: u64,
        source: Option<PathBuf>,
        runs: usize,
        folder: PathBuf,
        sets: Vec<String>,
        json: bool,
    }

    pub fn main() {
        let arguments = parse();
        std::fs::create_dir_all(&arguments.folder).expect("the folder can be made");
        let synthetic = arguments.folder.join(format!("phi4-mini-{}-layers-q8_0.gguf", arguments.layers));
        let source = match &arguments.source {
            Some(source) => source.clone(),
            None => {
                if !synthetic.exists() {
                    eprintln!("writing {}", synthetic.display());
                    phi4_mini(&synthetic, arguments.layers);
                }
                synthetic
            }
        };
        for run in 0..arguments.runs {
            measure(&arguments, &source, run);
        }
    }

    fn parse() -> Arguments {
        let mut arguments = Arguments {
            layers: 4,
            source: None,
            runs: 3,
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
                // cargo's own
                "--bench" => {}
                other => panic!("unknown argument {other}"),
            }
        }
        arguments
    }

    /// Wall and processor seconds and peak bytes of a finished child.
    struct Usage {
        wall: f64,
        cpu: f64,
        peak: u64,
    }

    fn run(command: &mut Command) -> Usage {
        let begin = Instant::now();
        #[allow(clippy::zombie_processes, reason = "wait4 below waits for it, and says what it used")]
        let child = command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().expect("the program starts");
        let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
        let id = libc::pid_t::try_from(child.id()).expect("a process id");
        // SAFETY: both pointers are to values of the types that the call fills; the child was started above and is
        // waited for nowhere else.
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

    fn measure(arguments: &Arguments, source: &Path, number: usize) {
        let out = arguments.folder.join("out");
        let copy = arguments.folder.join("copy");
        for path in [&out, &copy] {
            let _ = std::fs::remove_dir_all(path);
        }
        // a warm cache, for both
        let source_bytes = read(source);

        let mut command = Command::new(env!("CARGO_BIN_EXE_anec"));
        command.args(["convert", "--no-compile", "--source"]).arg(source).arg("--out").arg(&out);
        for set in &arguments.sets {
            command.args(["--set", set]);
        }
        let converted = run(&mut command);
        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(out.join("report.json")).expect("a report")).expect("JSON");
        let bundle_bytes = report["run"]["bundle_bytes"].as_u64().expect("bytes");
        let largest = largest_tensor(source);

        // what cp does: read the source, write as many bytes as the bundle has
        std::fs::create_dir_all(&copy).expect("a folder");
        let begin = Instant::now();
        read(source);
        let mut file = File::create(copy.join("bytes")).expect("a file");
        let buffer = vec![0x5a; 1 << 20];
        let mut left = bundle_bytes;
        while left > 0 {
            let step = left.min(buffer.len() as u64);
            file.write_all(&buffer[..step as usize]).expect("room on the disk");
            left -= step;
        }
        drop(file);
        let copied = begin.elapsed().as_secs_f64();
        for path in [&out, &copy] {
            let _ = std::fs::remove_dir_all(path);
        }

        let limit = largest as f64 * 4.0 * 1.5 + 300e6;
        if arguments.json {
            println!(
                "{}",
                json!({
                    "source": source, "source_bytes": source_bytes, "bundle_bytes": bundle_bytes,
                    "wall_seconds": converted.wall, "cpu_seconds": converted.cpu, "peak_bytes": converted.peak,
                    "copy_seconds": copied, "largest_tensor_elements": largest, "memory_target_bytes": limit,
                })
            );
        } else {
            println!(
                "run {}: {:.2} s wall, {:.2} s processor, {:.0} MB peak (target {:.0} MB); reading {:.0} MB and writing \
                 {:.0} MB alone {:.2} s: {:.2} times that (target 2)",
                number + 1,
                converted.wall,
                converted.cpu,
                converted.peak as f64 / 1e6,
                limit / 1e6,
                source_bytes as f64 / 1e6,
                bundle_bytes as f64 / 1e6,
                copied,
                converted.wall / copied,
            );
        }
    }

    /// Reads a file, or all files of a folder; gives the bytes.
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

    /// Writes a GGUF of Phi-4-mini's shape with random Q8_0 weights, as llama.cpp's converter names them.
    fn phi4_mini(path: &Path, layers: u64) {
        let (hidden, width, vocab, queries, keys) = (3072, 8192, 200_064, 24 * 128, 8 * 128);
        let mut writer = Writer::new();
        writer.key("general.architecture", Value::String("phi3".into()));
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
            writer.key(&format!("phi3.{key}"), Value::U32(value as u32));
        }
        writer.key("phi3.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
        writer.key("phi3.rope.freq_base", Value::F32(10_000.0));
        writer.key("phi3.rope.scaling.attn_factor", Value::F32(1.190_238));
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
                        // xorshift: what matters is that all bit patterns occur
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
