//! `anec golden`

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec::base::FileError;

use serde_json::json;

use super::input;
use super::model::Input;
use super::{print, print_json};
use anec::base::Result;
use anec::base::progress::Progress;
use anec::convert::{Options, convert, files};
use anec::exec::Precision;
use anec::manifest::{Manifest, Numerics, Quant, WeightFormat};
use anec::runtime::{Ask, Chunking, Finish, Hidden, Model, Positions, Request, Windows, generate};
use anec::validate::perplexity::loss;
use anec::validate::{Golden, Greedy};

/// Computes a golden for `anec validate --golden`, from the source's weights, not quantized, in f32.
///
/// Such a golden shows what quantization and fp16 cost. It can't show that a graph is wrong, because the same graph made
/// it, and its metadata says so: validators/export_golden.py computes one with transformers. The weights go through a
/// bundle of fp16 weights beside the file, which is removed afterwards.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: input::Input,
    #[command(flatten)]
    input: Input,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Adds the hidden states between the layers
    #[arg(long)]
    hidden: bool,
    /// Adds the N most likely tokens that follow, one after the other
    #[arg(long, value_name = "N", default_value_t = 0)]
    greedy: usize,
    /// Prints what was written as JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(super) fn run(self) -> Result<u8> {
        let mut manifest = self.source.manifest()?;
        manifest.quant = Quant { weights: WeightFormat::None, overrides: Default::default(), ..manifest.quant.clone() };
        // hidden states in the source's own unit
        manifest.numerics = Numerics::default();
        let beside = self.out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = tempfile::Builder::new()
            .prefix(".anec-golden-")
            .tempdir_in(beside)
            .map_err(FileError::of(beside, "create a folder in"))?;
        let bundle = folder.path().join("bundle");
        let model = unquantized(&manifest, &bundle)?;
        let golden = compute(&model, self.input.tokens(&model)?, self.hidden, self.greedy, &manifest)?;
        let written = files::write(&self.out, &golden.to_bytes())?;
        if self.json {
            print_json(&json!({
                "out": self.out,
                "positions": golden.tokens.len(),
                "vocab_size": golden.vocab_size,
                "greedy": golden.greedy.map(|greedy| greedy.ids),
                "metadata": golden.metadata,
            }));
        } else {
            let size = anec::report::bytes(written.bytes);
            print(&format!(
                "{}: {} positions, {size}, {}",
                self.out.display(),
                golden.tokens.len(),
                golden.reference()
            ));
        }
        Ok(0)
    }
}

/// The source's model without quantization, on the CPU in f32.
pub(super) fn unquantized(manifest: &Manifest, folder: &Path) -> Result<Arc<Model>> {
    convert(&Options {
        manifest: manifest.clone(),
        out: Some(folder.to_owned()),
        force: false,
        compile: false,
        progress: Progress::on_stderr(),
    })?;
    Model::on_cpu(folder, Precision::F32)
}

fn compute(model: &Arc<Model>, tokens: Vec<u32>, hidden: bool, greedy: usize, manifest: &Manifest) -> Result<Golden> {
    let hidden = if hidden { Hidden::BetweenLayers } else { Hidden::No };
    let answer = match model.bundle().model.classification() {
        Some(_) => Windows::new(model, None, hidden)?.label(&tokens)?,
        None => {
            let ask = Ask { logits: Positions::All, hidden, chunking: Chunking::Largest };
            model.start(tokens.len() as u64)?.forward(&tokens, &ask)?
        }
    };
    let request =
        Request { prompt: tokens.clone(), max_tokens: greedy, stops: model.end_tokens(), ..Request::default() };
    let greedy = match greedy {
        0 => None,
        _ => {
            let generation = generate(&mut request.session(model)?, &request, |_| Ok(ControlFlow::Continue(())))?;
            if generation.finish == Finish::Context {
                let count = generation.ids.len();
                eprintln!(
                    "note: the context is full after {count} of {greedy} tokens; `--set context=N` makes it larger"
                );
            }
            Some(Greedy { prompt: tokens.clone(), ids: generation.ids })
        }
    };
    let digests: Vec<String> = model.bundle().source.files.iter().map(|f| format!("{} {}", f.sha256, f.file)).collect();
    let metadata = [
        ("reference", "anec".to_owned()),
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("kind", "self-made".to_owned()),
        (
            "case",
            "weights of the source in fp16, not quantized, through anec's own graph and executor in f32".to_owned(),
        ),
        ("source", manifest.source.clone().unwrap_or_default()),
        ("source_files", digests.join("\n")),
    ];
    let facts = &model.bundle().model;
    let vocab_size = facts.head_rows() as usize;
    let rows = answer.logits.chunks_exact(vocab_size).zip(tokens.iter().skip(1));
    // labels say nothing of the next token
    let losses =
        facts.classification().is_none().then(|| rows.filter_map(|(row, token)| Some(loss(row, *token)? as f32)));
    let losses = losses.map(Iterator::collect);
    Ok(Golden {
        positions: (0..tokens.len()).collect(),
        tokens,
        logits: answer.logits,
        vocab_size,
        losses,
        hidden: answer.hidden.into_iter().enumerate().collect(),
        greedy,
        metadata: metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
    })
}
