//! `anec run`

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec::base::FileError;
use anec::base::input::{read, read_from};

use serde_json::json;

use super::draft::DraftArgs;
use super::model::{Runner, TEXT_PRECISION};
use super::package::PackageArgs;
use super::sampling::SamplingArgs;
use super::usage::UsageError;
use super::{print, print_json};
use anec::base::Result;
use anec::runtime::chat::{Chat, ChatTemplate, Message};
use anec::runtime::{
    Constraint, Finish, Generation, GenerationOutput, GenerationRequest, Grammar, Grammars, LoadedModel,
    TextGeneration, Tokenizer,
};

/// Generate text from a prompt
///
/// The text is streamed to stdout; the speed goes to stderr. With --inputs, a function of any .mlpackage is called
/// once.
#[derive(Debug, clap::Args)]
#[command(mut_arg("precision", TEXT_PRECISION))]
pub struct RunArgs {
    #[command(flatten)]
    runner: Runner,
    #[command(flatten)]
    prompt: Prompt,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    package: PackageArgs,
    /// Constrain the output to the JSON Schema in this file
    #[arg(long, value_name = "FILE", conflicts_with = "ids")]
    json_schema: Option<PathBuf>,
    /// Print one JSON object at the end instead: prompt_ids, ids, text, finish, timings
    #[arg(long)]
    json: bool,
}

/// Text or token ids to continue.
#[derive(Debug, clap::Args)]
struct Prompt {
    /// Prompt; `-` reads it from stdin
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["ids", "inputs"], conflicts_with = "ids")]
    prompt: Option<String>,
    /// Token ids
    #[arg(long, value_delimiter = ',', value_name = "ID,ID,…")]
    ids: Option<Vec<u32>>,
    /// Apply the chat template: the prompt is a user message
    #[arg(long, conflicts_with = "ids")]
    chat: bool,
    /// System message
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Parse special tokens in the prompt (`<|fim_prefix|>`) instead of treating them as plain text
    #[arg(long, conflicts_with = "ids")]
    special: bool,
}

impl RunArgs {
    pub(super) fn run(self) -> Result<u8> {
        if self.package.inputs.is_some() {
            return self.package.run(self.runner.path(), self.runner.exact_precision(), self.json);
        }
        let model = self.runner.load()?;
        model.continues_texts()?;
        // the vocabulary is read while the weights load
        let tokenizer = || Tokenizer::of(model.bundle(), model.folder());
        let (tokenizer, ()) = rayon::join(tokenizer, || model.preload());
        let tokenizer = match tokenizer {
            Ok(tokenizer) => Some(Arc::new(tokenizer)),
            Err(_) if self.prompt.ids.is_some() && !model.bundle().tokenizer.contains_key("tokenizer") => None,
            Err(error) => return Err(error.into()),
        };
        let prompt = self.prompt.tokens(&model, tokenizer.as_deref())?;
        let request = self.sampling.request(&model, prompt)?;
        let constraint = match (&self.json_schema, &tokenizer) {
            (Some(file), Some(tokenizer)) => Some(json_schema(file, &model, tokenizer)?),
            _ => None,
        };
        let constrained = constraint.is_some();
        let generation = request.clone().start(&model)?.with_constraint(constraint);
        let generation = match self.draft.load(&self.runner, &model)? {
            Some((draft, tokens)) => generation.with_draft(&draft, tokens)?,
            None => generation,
        };
        let (generation, text) =
            write(generation, tokenizer.as_ref(), self.sampling.stops(), |text| self.json || show(text))?;
        if self.json {
            print_json(&result(&request, &generation, text.as_deref()));
        } else {
            if text.is_some() {
                print("");
            }
            if tokenizer.is_none() {
                let ids: Vec<String> = generation.ids.iter().map(u32::to_string).collect();
                print(&ids.join(","));
            }
            eprintln!("{}", summary(request.prompt.len(), &generation));
        }
        if constrained && generation.finish != Finish::Stop {
            let help = "increase --max-tokens, or bound the strings and arrays of the schema";
            return Err(UsageError::new("the text ended before its JSON was complete", help).into());
        }
        Ok(0)
    }
}

impl Prompt {
    fn tokens(&self, model: &LoadedModel, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
        let (Some(text), Some(tokenizer)) = (&self.prompt, tokenizer) else {
            return Ok(self.ids.clone().unwrap_or_default());
        };
        let mut text = text.clone();
        if text == "-" {
            let bytes = read_from(std::io::stdin().lock(), longest(model, tokenizer));
            let bytes = bytes.map_err(FileError::of("stdin", "read"))?;
            text = String::from_utf8(bytes).map_err(|_| {
                FileError::of("stdin", "read")(std::io::Error::new(ErrorKind::InvalidData, "it isn't UTF-8"))
            })?;
        }
        tokenizer.check_length(&text, model.context())?;
        if !self.chat {
            return Ok(if self.special { tokenizer.encode(&text) } else { tokenizer.encode_literal(&text) }?);
        }
        let template = ChatTemplate::of(model.bundle(), model.folder(), tokenizer)?;
        let system = self.system.iter().map(|text| Message::new("system", text));
        let chat = Chat::new(system.chain([Message::new("user", &text)]).collect());
        Ok(match self.special {
            true => {
                let text = template.render(&chat)?;
                tokenizer.check_length(&text, model.context())?;
                tokenizer.encode_rest(&text)
            }
            false => template.encode_within(tokenizer, &chat, model.context()),
        }?)
    }
}

/// Largest size in bytes of a JSON Schema.
const MAX_SCHEMA_BYTES: u64 = 16 << 20;

/// Upper bound in bytes of a text that fits the context: no token is longer than the longest one.
fn longest(model: &LoadedModel, tokenizer: &Tokenizer) -> u64 {
    let tokens = (0..tokenizer.len() as u32).map(|id| tokenizer.token_bytes(id).len());
    model.context() * tokens.max().unwrap_or(1).max(1) as u64
}

fn json_schema(file: &Path, model: &LoadedModel, tokenizer: &Tokenizer) -> Result<Constraint> {
    let bytes = read(file, MAX_SCHEMA_BYTES)?;
    let schema = anec::base::json::read(&bytes).map_err(|error| {
        let problem = format!("{}: it isn't JSON: {error}", file.display());
        UsageError::new(problem, "--json-schema takes a file that holds a JSON Schema")
    })?;
    let grammars = Grammars::new(tokenizer, model.bundle().model.vocab_size, &model.end_tokens())?;
    Ok(grammars.start(&Grammar::JsonSchema(schema))?)
}

/// Generates to the end; with a tokenizer, as text. `each` receives every part and returns whether to continue.
pub(super) fn write(
    mut generation: Generation,
    tokenizer: Option<&Arc<Tokenizer>>,
    stops: &[String],
    mut each: impl FnMut(&str) -> bool,
) -> Result<(GenerationOutput, Option<String>)> {
    let Some(tokenizer) = tokenizer else { return Ok((generation.run()?, None)) };
    let mut deltas = TextGeneration::new(generation, tokenizer, stops, &[])?;
    let mut text = String::new();
    for delta in deltas.by_ref() {
        let delta = delta?.text;
        text.push_str(&delta);
        if !each(&delta) {
            break;
        }
    }
    Ok((deltas.generation().output(), Some(text)))
}

/// Prints a part of a text; returns whether to continue.
pub(super) fn show(text: &str) -> bool {
    super::put(text)
}

fn result(request: &GenerationRequest, generation: &GenerationOutput, text: Option<&str>) -> serde_json::Value {
    let timings = generation.timings;
    json!({
        "prompt_ids": request.prompt,
        "ids": generation.ids,
        "text": text,
        "finish": generation.finish,
        "prefill_tps": timings.prefill_tps,
        "decode_tps": timings.decode_tps,
        "ttft_ms": timings.ttft_ms,
        "elapsed_s": timings.elapsed_s,
        "speculation": generation.speculation,
    })
}

/// One-line summary of the speed.
pub(super) fn summary(prompt: usize, generation: &GenerationOutput) -> String {
    let timings = generation.timings;
    let speculation = match generation.speculation {
        drafts if drafts.drafted == 0 => String::new(),
        drafts => format!(", {} of {} draft tokens accepted", drafts.accepted, drafts.drafted),
    };
    let cached = match timings.cached_tokens {
        0 => String::new(),
        count => format!(" ({count} known)"),
    };
    format!(
        "{prompt} tokens of prompt{cached} at {:.1} per second, {} tokens at {:.1} per second, the first after {:.0} ms{speculation}",
        timings.prefill_tps,
        generation.ids.len(),
        timings.decode_tps,
        timings.ttft_ms,
    )
}
