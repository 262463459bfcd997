//! Targets: the seeds of each, how an input is made of them, and what reads it.

use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use anec::runtime::{Grammar, Grammars, Tokenizer, probe};
use serde_json::{Value as Json, json};

use super::mutate::{self, Random};
use super::{grammars, requests, templates, tokenizers};
use crate::common::folder::repository;
use crate::common::http::{Reply, Server};
use crate::exercise;

/// Reader of untrusted input.
pub struct Target {
    pub name: &'static str,
    seeds: fn() -> Vec<Vec<u8>>,
    input: fn(&mut Random, &Seeds) -> Vec<u8>,
    /// Reads an input; the text of the error if it is refused.
    pub run: fn(&[u8]) -> Result<(), String>,
}

/// Valid inputs, and those of them that are JSON.
pub struct Seeds {
    files: Vec<Vec<u8>>,
    json: Vec<Json>,
}

impl Target {
    pub fn seeds(&self) -> Seeds {
        let files = (self.seeds)();
        let json = files.iter().filter_map(|file| serde_json::from_slice(file).ok()).collect();
        Seeds { files, json }
    }

    /// Returns the input of a number; the same number gives the same input.
    pub fn input(&self, seeds: &Seeds, number: u64) -> Vec<u8> {
        (self.input)(&mut Random::new(number), seeds)
    }
}

pub const TARGETS: [Target; 14] = [
    Target { name: "gguf", seeds: || files("families", "gguf"), input: damaged, run: |b| said(exercise::gguf(b)) },
    Target {
        name: "safetensors",
        seeds: || files("families", "safetensors"),
        input: damaged,
        run: |bytes| said(exercise::safetensors(bytes)),
    },
    Target { name: "pytorch", seeds: || files("pytorch", "bin"), input: damaged, run: |b| said(exercise::pytorch(b)) },
    Target {
        name: "onnx",
        seeds: || [files("onnx", "onnx"), files("onnx_encoders", "onnx")].concat(),
        input: damaged,
        run: onnx,
    },
    Target { name: "package", seeds: package_files, input: of_package, run: package },
    Target { name: "aimodel", seeds: || files("coreai", "mlirb"), input: damaged, run: asset },
    Target {
        name: "mil",
        seeds: || files("../filetests", "mil"),
        input: damaged,
        run: |b| said(text(b, exercise::text)),
    },
    Target {
        name: "manifest",
        seeds: || files("../../src/manifest/manifests", "yaml"),
        input: with_override,
        run: |bytes| said(text(bytes, exercise::manifest)),
    },
    Target {
        name: "tokenizer",
        seeds: || [files("families", "tokenizer.json"), files("encoders", "tokenizer.json")].concat(),
        input: tokenizer,
        run: |bytes| said(exercise::tokenizer(bytes)),
    },
    Target {
        name: "template",
        seeds: || cases("tests/fixtures/jinja/cases.txt"),
        input: template,
        run: |bytes| said(text(bytes, exercise::template)),
    },
    Target { name: "bundle", seeds: || vec![std::fs::read(&*BUNDLE_SEED).unwrap()], input: changed, run: bundle },
    Target {
        name: "grammar",
        seeds: Vec::new,
        input: |random, _| grammars::grammar(random).to_string().into(),
        run: grammar,
    },
    Target { name: "request", seeds: Vec::new, input: |random, _| requests::request(random), run: request },
    Target { name: "line", seeds: Vec::new, input: |random, _| requests::line(random), run: line },
];

/// Returns the files below a folder of the fixtures whose names end in `ending`.
fn files(folder: &str, ending: &str) -> Vec<Vec<u8>> {
    fn visit(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                visit(&path, ending, found);
            } else if path.to_str().is_some_and(|name| name.ends_with(ending)) {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    visit(&repository("tests/fixtures").join(folder), ending, &mut found);
    found.sort();
    let files: Vec<_> =
        found.iter().map(|path| std::fs::read(path).unwrap()).filter(|file| file.len() < 1 << 20).collect();
    assert!(!files.is_empty(), "{folder} has seeds");
    files
}

/// Returns the parts of a file that lines of `===` divide.
fn cases(file: &str) -> Vec<Vec<u8>> {
    let text = std::fs::read_to_string(repository(file)).unwrap();
    text.split("\n===\n").map(|case| case.as_bytes().to_vec()).collect()
}

fn damaged(random: &mut Random, seeds: &Seeds) -> Vec<u8> {
    let (seed, other) = (random.pick(&seeds.files), random.pick(&seeds.files));
    mutate::bytes(random, seed, other)
}

fn changed(random: &mut Random, seeds: &Seeds) -> Vec<u8> {
    let seed = random.pick(&seeds.json);
    mutate::json(random, seed).to_string().into_bytes()
}

fn with_override(random: &mut Random, seeds: &Seeds) -> Vec<u8> {
    let first = *random.pick(&["", "context=64", "quant.weights=int7", "a.b.c=[1", "lengths={range: [1, 9]}", "="]);
    [first.as_bytes(), b"\n", &damaged(random, seeds)].concat()
}

fn tokenizer(random: &mut Random, seeds: &Seeds) -> Vec<u8> {
    match random.below(10) {
        0 => changed(random, seeds),
        1 => damaged(random, seeds),
        2 => {
            let valid = tokenizers::tokenizer(random);
            mutate::json(random, &valid).to_string().into_bytes()
        }
        _ => tokenizers::tokenizer(random).to_string().into_bytes(),
    }
}

fn template(random: &mut Random, seeds: &Seeds) -> Vec<u8> {
    if random.chance(0.3) { damaged(random, seeds) } else { templates::template(random).into_bytes() }
}

fn said(result: anec::base::Result<()>) -> Result<(), String> {
    result.map_err(|error| error.to_string())
}

fn text(bytes: &[u8], read: fn(&str) -> anec::base::Result<()>) -> anec::base::Result<()> {
    read(&String::from_utf8_lossy(bytes))
}

fn onnx(bytes: &[u8]) -> Result<(), String> {
    // beside it lie weights, which models name as `model.onnx.data`
    said(exercise::onnx(&repository("tests/fixtures/onnx/edge/model.onnx"), bytes))
}

fn asset(bytes: &[u8]) -> Result<(), String> {
    said(exercise::asset(bytes.to_vec()))
}

/// Folder of this run, which its parent prepared.
static ROOM: LazyLock<PathBuf> = LazyLock::new(|| std::env::var_os(super::ROOM).expect("the parent names it").into());
static BUNDLE_SEED: LazyLock<PathBuf> = LazyLock::new(|| ROOM.join("bundle.json"));

const PACKAGES: [&str; 4] = ["state_decoder_mask", "multifunction", "range_fp16", "lut4_grouped"];

/// Returns the files of the packages, each behind a byte that names its package and its place.
fn package_files() -> Vec<Vec<u8>> {
    let of = |(number, package): (usize, &'static str)| {
        crate::FILES.iter().enumerate().map(move |(place, file)| {
            let path = repository("tests/fixtures/coremltools").join(package).join("model.mlpackage").join(file);
            let to = ROOM.join(package).join(file);
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::copy(&path, to).unwrap();
            [&[(number * crate::FILES.len() + place) as u8][..], &std::fs::read(path).unwrap()].concat()
        })
    };
    PACKAGES.into_iter().enumerate().flat_map(of).collect()
}

fn of_package(random: &mut Random, seeds: &Seeds) -> Vec<u8> {
    let (seed, other) = (random.pick(&seeds.files), random.pick(&seeds.files));
    [&seed[..1], &mutate::bytes(random, &seed[1..], &other[1..])].concat()
}

fn package(bytes: &[u8]) -> Result<(), String> {
    let (choice, bytes) = bytes.split_first().expect("a byte names the file");
    let choice = usize::from(*choice);
    let (package, file) = (ROOM.join(PACKAGES[choice / 3]), crate::FILES[choice % 3]);
    let whole = std::fs::read(package.join(file)).unwrap();
    std::fs::write(package.join(file), bytes).unwrap();
    let read = exercise::package(&package);
    std::fs::write(package.join(file), whole).unwrap();
    said(read)
}

fn bundle(bytes: &[u8]) -> Result<(), String> {
    let folder = ROOM.join("demo.anec");
    std::fs::write(folder.join("bundle.json"), bytes).unwrap();
    said(exercise::bundle(&folder))
}

/// Compiles a grammar as the server does, after a trial, and takes some steps of a text.
fn grammar(bytes: &[u8]) -> Result<(), String> {
    static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| {
        probe::set_program(env!("CARGO_BIN_EXE_anec").into());
        let tokenizer = Tokenizer::open(&repository("demo/model/tokenizer.json")).unwrap();
        Grammars::new(&tokenizer, 2048, &[0]).unwrap()
    });
    let json: Json = serde_json::from_slice(bytes).unwrap();
    let text = json["source"].as_str().unwrap_or_default().to_owned();
    let form = match json["kind"].as_str().unwrap() {
        "json" => Grammar::JsonSchema(json["source"].clone()),
        "regex" => Grammar::Regex(text),
        _ => Grammar::Lark(text),
    };
    let mut constraint = GRAMMARS.start(&form).map_err(|error| error.to_string())?;
    let mut random = Random::new(bytes.len() as u64);
    for _ in 0..20 {
        let mut logits = vec![0.0; 2048];
        constraint.mask_logits(&mut logits).map_err(|error| error.to_string())?;
        let open: Vec<u32> = (0..2048).filter(|id| logits[*id as usize] == 0.0).collect();
        if constraint.is_finished() || open.is_empty() {
            break;
        }
        constraint.accept_token(*random.pick(&open)).map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn server() -> &'static Server {
    static SERVER: LazyLock<Server> =
        LazyLock::new(|| Server::start(&ROOM.join("served.anec"), &["--max-body", "200000", "--queue", "64"]));
    &SERVER
}

/// Sends bytes to a server, which must answer in its API's form, and stay as it is.
fn request(bytes: &[u8]) -> Result<(), String> {
    let mut stream = TcpStream::connect(&server().address).expect("the server takes connections");
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let reply = Reply::read(stream);
    let text = String::from_utf8(reply.body).expect("answers are text");
    match reply.status {
        // no request was complete, or its body was asked for
        0 | 100 => Ok(()),
        200..=299 => Ok(()),
        400..=499 | 501 | 503 => Err(text),
        other => panic!("status {other}: {text}"),
    }
}

/// Gives a line to a process that answers lines.
fn line(bytes: &[u8]) -> Result<(), String> {
    use std::io::{BufRead, BufReader, Lines};
    use std::process::{Child, ChildStdout, Stdio};
    use std::sync::Mutex;
    static PIPES: LazyLock<Mutex<(Child, Lines<BufReader<ChildStdout>>)>> = LazyLock::new(|| {
        let mut command = crate::common::folder::anec();
        command.arg("serve").arg(ROOM.join("served.anec")).arg("--stdin");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.next().unwrap().unwrap().starts_with("READY "));
        Mutex::new((child, lines))
    });
    let mut pipes = PIPES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // a line that is always answered shows where the answers to the other one end
    const END: &str = "the end of an input";
    let end = json!({"tokens": [], "id": END});
    let input = pipes.0.stdin.as_mut().expect("it is a pipe");
    input.write_all(&[bytes, b"\n", end.to_string().as_bytes(), b"\n"].concat()).expect("the process reads");
    let mut result = Ok(());
    loop {
        let answer = pipes.1.next().expect("the process answers").expect("an answer is text");
        let json: Json = serde_json::from_str(&answer).unwrap_or_default();
        if json["id"] == END {
            return result;
        }
        if json["ok"] == false {
            result = Err(json["error"].to_string());
        }
    }
}
