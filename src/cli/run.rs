//! `anec run`

use std::io::Write;
use std::ops::ControlFlow;

use serde_json::json;

use super::model::Runner;
use super::{print, print_json};
use crate::error::Result;
use crate::runtime::chat::{ChatTemplate, Message};
use crate::runtime::{Detokenizer, Generation, Model, Request, Sampling, Tokenizer, generate};

/// Continues a prompt: text in, text out.
///
/// The text goes to stdout as it comes; how fast it came, to stderr.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    runner: Runner,
    #[command(flatten)]
    prompt: Prompt,
    /// Most tokens to add
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Goes on after tokens that end a text
    #[arg(long)]
    ignore_eos: bool,
    /// Prints one JSON object at the end instead: prompt_ids, ids, text, finish, timings
    #[arg(long)]
    json: bool,
}

/// What is continued.
#[derive(Debug, clap::Args)]
struct Prompt {
    /// Text to continue
    #[arg(long, value_name = "TEXT", required_unless_present = "ids", conflicts_with = "ids")]
    prompt: Option<String>,
    /// Token ids to continue
    #[arg(long, value_delimiter = ',', value_name = "ID,ID,…")]
    ids: Option<Vec<u32>>,
    /// Takes the text as a user's message and lets the model answer, by its chat template
    #[arg(long, requires = "prompt")]
    chat: bool,
    /// A system message before it
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Special tokens that are written out in the text are letters like all others
    #[arg(long, requires = "prompt")]
    literal: bool,
}

/// How tokens are chosen.
#[derive(Debug, clap::Args)]
pub struct SamplingArgs {
    /// 0 takes the most likely token each time; higher is bolder
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    temperature: f32,
    /// Only the N most likely tokens; 0 for all
    #[arg(long, value_name = "N", default_value_t = 0)]
    top_k: usize,
    /// Only the most likely tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Only tokens with at least this share of the most likely one's probability
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f32,
    /// Seed: equal seeds give equal texts
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl SamplingArgs {
    fn sampling(&self) -> Sampling {
        let Self { temperature, top_k, top_p, min_p, seed } = *self;
        Sampling { temperature, top_k, top_p, min_p, seed }
    }
}

impl Args {
    pub(super) fn run(self) -> Result<u8> {
        let model = self.runner.open()?;
        let tokenizer = match Tokenizer::of(model.bundle(), model.folder()) {
            Ok(tokenizer) => Some(tokenizer),
            Err(_) if self.prompt.ids.is_some() && !model.bundle().tokenizer.contains_key("tokenizer") => None,
            Err(error) => return Err(error.into()),
        };
        let eos = if self.ignore_eos { &[][..] } else { &model.bundle().model.eos_token_ids };
        let request = Request {
            prompt: self.prompt.tokens(&model, tokenizer.as_ref())?,
            max_tokens: self.max_tokens,
            sampling: self.sampling.sampling(),
            stops: eos.iter().filter_map(|id| u32::try_from(*id).ok()).collect(),
        };
        let (generation, text) = continue_text(&model, tokenizer.as_ref(), &request, !self.json)?;
        if self.json {
            print_json(&result(&request, &generation, text.as_deref()));
        } else {
            if tokenizer.is_none() {
                let ids: Vec<String> = generation.ids.iter().map(u32::to_string).collect();
                print(&ids.join(","));
            }
            eprintln!("{}", summary(&request, &generation));
        }
        Ok(0)
    }
}

impl Prompt {
    fn tokens(&self, model: &Model, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
        let (Some(text), Some(tokenizer)) = (&self.prompt, tokenizer) else {
            return Ok(self.ids.clone().unwrap_or_default());
        };
        if !self.chat {
            let tokens = if self.literal { tokenizer.encode_literal(text) } else { tokenizer.encode(text) };
            return Ok(tokens?);
        }
        let template = ChatTemplate::of(model.bundle(), model.folder(), tokenizer)?;
        let message = |role: &str, content: &String| Message { role: role.into(), content: content.clone() };
        let system = self.system.iter().map(|text| message("system", text));
        let messages: Vec<Message> = system.chain([message("user", text)]).collect();
        Ok(template.encode(tokenizer, &messages, self.literal)?)
    }
}

/// Continues a prompt; with a tokenizer, gives the text as well, and streams it to stdout if `show`.
pub(super) fn continue_text(
    model: &std::sync::Arc<Model>,
    tokenizer: Option<&Tokenizer>,
    request: &Request,
    show: bool,
) -> Result<(Generation, Option<String>)> {
    let mut session = request.session(model)?;
    let Some(tokenizer) = tokenizer else {
        return Ok((generate(&mut session, request, |_| Ok(ControlFlow::Continue(())))?, None));
    };
    let mut stream = Detokenizer::after(tokenizer, &request.prompt, false)?;
    let mut text = String::new();
    let mut out = std::io::stdout().lock();
    // a reader that went away wants no more text
    let mut put = |piece: &str| match show.then(|| out.write_all(piece.as_bytes()).and_then(|()| out.flush())) {
        Some(Err(_)) => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let generation = generate(&mut session, request, |id| {
        let piece = stream.push(id)?;
        text.push_str(&piece);
        Ok(put(&piece))
    })?;
    let rest = stream.finish()?;
    text.push_str(&rest);
    let _ = put(&rest);
    let _ = put("\n");
    Ok((generation, Some(text)))
}

fn result(request: &Request, generation: &Generation, text: Option<&str>) -> serde_json::Value {
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
    })
}

fn summary(request: &Request, generation: &Generation) -> String {
    let timings = generation.timings;
    format!(
        "{} tokens of prompt at {:.1} per second, {} tokens at {:.1} per second, the first after {:.0} ms",
        request.prompt.len(),
        timings.prefill_tps,
        generation.ids.len(),
        timings.decode_tps,
        timings.ttft_ms,
    )
}
