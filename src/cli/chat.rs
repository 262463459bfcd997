//! `anec chat`

use std::io::{BufRead, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::SIGINT;
use signal_hook::flag::{register, register_conditional_shutdown};

use super::model::{Runner, TEXT_PRECISION};
use super::print;
use super::run::{show, summary};
use super::sampling::SamplingArgs;
use anec::base::{FileError, Result};
use anec::runtime::chat::{Chat, ChatTemplate, Message};
use anec::runtime::{Finish, LoadedModel, PrefixCache, TextGeneration, Tokenizer};

/// Chat with a model in the terminal
///
/// Each line is a message; the model sees the whole conversation. Ctrl-C stops an answer, Ctrl-D ends the chat.
/// /reset clears the conversation, /system TEXT sets the system message, /help lists the commands.
#[derive(Debug, clap::Args)]
#[command(mut_arg("precision", TEXT_PRECISION))]
pub struct ChatArgs {
    #[command(flatten)]
    runner: Runner,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Print the speed after each answer
    #[arg(long)]
    timings: bool,
}

const HELP: &str = "/reset        clears the conversation
/system TEXT  sets the system message and clears the conversation; without TEXT, removes it
/undo         removes the last question and its answer
/exit         ends the chat";

/// State of a chat.
struct ChatState<'a> {
    arguments: &'a ChatArgs,
    model: Arc<LoadedModel>,
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    system: Option<String>,
    messages: Vec<Message>,
    cache: PrefixCache,
    /// Set by Ctrl-C.
    interrupted: Arc<AtomicBool>,
}

impl ChatArgs {
    pub(super) fn run(self) -> Result<u8> {
        let model = self.runner.load()?;
        model.continues_texts()?;
        let tokenizer = Arc::new(Tokenizer::of(model.bundle(), model.folder())?);
        let template = ChatTemplate::of(model.bundle(), model.folder(), &tokenizer)?;
        self.sampling.sampling()?;
        // Ctrl-C ends the program unless an answer is being generated
        let interrupted = Arc::new(AtomicBool::new(true));
        watch_interrupts(interrupted.clone())?;
        let mut chat = ChatState {
            cache: PrefixCache::new(model.clone(), 1),
            system: self.system.clone(),
            arguments: &self,
            model,
            tokenizer,
            template,
            messages: Vec::new(),
            interrupted,
        };
        let terminal = std::io::stdin().is_terminal();
        let mut lines = std::io::stdin().lock().lines();
        loop {
            if terminal {
                eprint!("> ");
            }
            let Some(line) = lines.next() else { break };
            let line = line.map_err(FileError::of("stdin", "read"))?;
            match line.trim() {
                "" => {}
                "/exit" | "/quit" | "/bye" => break,
                command if command.starts_with('/') => chat.command(command),
                text => chat.say(text)?,
            }
        }
        if terminal {
            eprintln!();
        }
        Ok(0)
    }
}

impl ChatState<'_> {
    fn command(&mut self, line: &str) {
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "/reset" => self.messages.clear(),
            "/system" => {
                self.system = Some(rest.trim().to_owned()).filter(|text| !text.is_empty());
                self.messages.clear();
            }
            "/undo" => self.messages.truncate(self.messages.len().saturating_sub(2)),
            "/help" => eprintln!("{HELP}"),
            _ => eprintln!("unknown command {command}\n{HELP}"),
        }
    }

    /// Tokens of the conversation. Drops the oldest question and its answer until at least a quarter of the context is
    /// free for the answer.
    fn prompt(&mut self) -> Result<Vec<u32>> {
        loop {
            let system = self.system.iter().map(|text| Message::new("system", text));
            let chat = Chat::new(system.chain(self.messages.iter().cloned()).collect());
            let prompt = self.template.encode(&self.tokenizer, &chat)?;
            let context = self.model.context();
            if prompt.len() as u64 <= context - context / 4 {
                return Ok(prompt);
            }
            if self.messages.len() < 3 {
                // a single message may fill the context, or is refused
                return Ok(prompt);
            }
            self.messages.drain(..2);
            eprintln!(
                "(the conversation exceeds the context of {context} tokens: dropped its oldest question and answer)"
            );
        }
    }

    fn say(&mut self, text: &str) -> Result<()> {
        self.messages.push(Message::new("user", text));
        let prompt = self.prompt()?;
        let request = self.arguments.sampling.request(&self.model, prompt)?;
        let taken = self.cache.take(&request.prompt, request.length(&self.model));
        let session = match taken {
            Ok(session) => session,
            Err(error) => {
                eprintln!("error: {error}");
                self.messages.pop();
                return Ok(());
            }
        };
        self.interrupted.store(false, Ordering::Relaxed);
        let count = request.prompt.len();
        let generation = session.generate(request)?;
        let mut deltas = TextGeneration::new(generation, &self.tokenizer, self.arguments.sampling.stops(), &[])?;
        let mut text = String::new();
        for delta in deltas.by_ref() {
            let delta = delta?.text;
            text.push_str(&delta);
            if !show(&delta) || self.interrupted.load(Ordering::Relaxed) {
                break;
            }
        }
        let mut generation = deltas.into_generation();
        generation.stop(Finish::Interrupted);
        self.interrupted.store(true, Ordering::Relaxed);
        print("");
        if self.arguments.timings {
            eprintln!("({})", summary(count, &generation.output()));
        }
        self.messages.push(Message::new("assistant", &text));
        self.cache.put(generation.into_session());
        Ok(())
    }
}

/// Makes Ctrl-C stop the answer; without an answer, or pressed twice, it ends the program.
fn watch_interrupts(interrupted: Arc<AtomicBool>) -> Result<()> {
    // order matters: the first handler reads at the next signal what the second sets
    register_conditional_shutdown(SIGINT, 130, interrupted.clone())
        .and_then(|_| register(SIGINT, interrupted))
        .map_err(FileError::of("signals", "wait for"))?;
    Ok(())
}
