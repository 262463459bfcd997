//! `anec embed`

use std::path::PathBuf;

use clap::ValueEnum;
use serde_json::json;

use super::model::Runner;
use super::{print, print_json};
use anec::base::Result;
use anec::bundle::Pooling;
use anec::convert::files;
use anec::runtime::encode::{Embedder, PreparedText};
use anec::runtime::{EncodedText, Tokenizer};
use anec::validate::TensorFile;

/// Compute text embeddings
///
/// The file has one f32 tensor: `embedding`, [dimensions] for one text and [texts, dimensions] for several. With
/// `--pooling none` it has the final hidden states: `hidden` [tokens, hidden_size] for one text, `hidden.0`,
/// `hidden.1`, … for several.
#[derive(Debug, clap::Args)]
pub struct EmbedArgs {
    #[command(flatten)]
    runner: Runner,
    #[command(flatten)]
    texts: Texts,
    /// Prompt of the model that stands before each text [default: the model's default prompt, if it has one]
    #[arg(long, value_name = "NAME", conflicts_with = "ids")]
    prompt_name: Option<String>,
    /// Pooling of the hidden states [default: the bundle's]
    #[arg(long, value_enum, value_name = "NAME")]
    pooling: Option<PoolingName>,
    /// Output file
    #[arg(short, long, value_name = "F.safetensors")]
    out: PathBuf,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Texts, or their token ids.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Texts {
    /// Text to embed; repeatable
    #[arg(long, alias = "text", value_name = "TEXT")]
    prompt: Vec<String>,
    /// Token ids of a text, special tokens included; repeatable
    #[arg(long, alias = "tokens", value_name = "ID,ID,…", value_parser = token_list)]
    ids: Vec<TokenList>,
}

/// Token ids of a text.
#[derive(Clone, Debug)]
struct TokenList(Vec<u32>);

fn token_list(text: &str) -> Result<TokenList, String> {
    let token = |id: &str| id.trim().parse::<u32>().map_err(|_| format!("`{id}` is not a token id"));
    text.split(',').map(token).collect::<Result<_, _>>().map(TokenList)
}

/// Pooling method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PoolingName {
    /// No pooling: all hidden states
    None,
    /// Mean over all tokens
    Mean,
    /// First token
    Cls,
    /// Last token
    Last,
}

impl PoolingName {
    fn pooling(self) -> Option<Pooling> {
        match self {
            PoolingName::None => None,
            PoolingName::Mean => Some(Pooling::Mean),
            PoolingName::Cls => Some(Pooling::Cls),
            PoolingName::Last => Some(Pooling::Last),
        }
    }
}

impl EmbedArgs {
    pub(super) fn run(self) -> Result<u8> {
        let model = self.runner.load()?;
        let embedder = Embedder::new(&model, self.pooling.and_then(PoolingName::pooling))?;
        let texts: Vec<PreparedText> = if self.texts.prompt.is_empty() {
            self.texts.ids.into_iter().map(|TokenList(ids)| EncodedText::from(ids).into()).collect()
        } else {
            let tokenizer = Tokenizer::of(model.bundle(), model.folder())?;
            let name = self.prompt_name.as_deref();
            let prepared = |text: &String| embedder.prepare(&tokenizer, text, name, true);
            self.texts.prompt.iter().map(prepared).collect::<Result<_, _>>()?
        };
        if let Some(text) = texts.iter().find(|text| text.cut > 0) {
            let cut = texts.iter().filter(|text| text.cut > 0).count();
            let (texts, tokens) = (texts.len(), text.tokens.ids.len());
            eprintln!("note: {cut} of {texts} texts were cut off after {tokens} tokens, as the model takes no more");
        }
        let about = [
            ("bundle", model.bundle().name.clone()),
            ("precision", self.runner.precision()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ];
        let mut file = TensorFile::new(about.clone().map(|(key, value)| (key.into(), value)).into());
        let width = if self.pooling == Some(PoolingName::None) {
            let width = model.bundle().model.hidden_size as usize;
            for (index, text) in texts.iter().enumerate() {
                let name = if texts.len() == 1 { "hidden".to_owned() } else { format!("hidden.{index}") };
                file.matrix(&name, width, &embedder.states(&text.tokens)?);
            }
            width
        } else {
            let vectors = texts.iter().map(|text| embedder.embed_prepared(text)).collect::<Result<Vec<_>>>()?;
            match vectors.as_slice() {
                [one] => file.vector("embedding", one),
                several => file.matrix("embedding", embedder.dimension(), &several.concat()),
            }
            embedder.dimension()
        };
        let written = files::write(&self.out, &file.to_bytes())?;
        let tokens: Vec<usize> = texts.iter().map(|text| text.tokens.ids.len()).collect();
        if self.json {
            let mut about: serde_json::Map<_, _> =
                about.into_iter().map(|(key, value)| (key.to_owned(), json!(value))).collect();
            about.insert("out".into(), json!(self.out));
            about.insert("tokens".into(), json!(tokens));
            about.insert("dimensions".into(), json!(width));
            print_json(&about);
        } else {
            let size = anec::report::bytes(written.bytes);
            let texts = if texts.len() == 1 { "1 text".to_owned() } else { format!("{} texts", texts.len()) };
            print(&format!("{}: {texts}, {width} dimensions, {size}", self.out.display()));
        }
        Ok(0)
    }
}
