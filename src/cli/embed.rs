//! `anec embed`

use std::path::PathBuf;

use clap::ValueEnum;
use serde_json::json;

use super::model::Runner;
use super::{print, print_json};
use anec::base::Result;
use anec::bundle::Pooling;
use anec::convert::files;
use anec::runtime::{Embedder, EncodedText, Tokenizer};
use anec::validate::golden::TensorFile;

/// Gives texts vectors.
///
/// The file has one tensor, f32: `embedding`, [dimensions] for one text and [texts, dimensions] for several; with
/// `--pooling none` the final hidden states, `hidden` [positions, hidden_size] for one text, `hidden.0`, `hidden.1`, … for
/// several.
#[derive(Debug, clap::Args)]
pub struct EmbedArgs {
    #[command(flatten)]
    runner: Runner,
    #[command(flatten)]
    texts: Texts,
    /// How hidden states become one; as the bundle says if not given
    #[arg(long, value_enum, value_name = "NAME")]
    pooling: Option<PoolingName>,
    /// The file that is written
    #[arg(short, long, value_name = "F.safetensors")]
    out: PathBuf,
    /// Prints what was written as JSON
    #[arg(long)]
    json: bool,
}

/// Texts, or their tokens.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Texts {
    /// A text; can be given several times
    #[arg(long, value_name = "TEXT")]
    text: Vec<String>,
    /// Token ids of a text, with those that the model wants at its ends; can be given several times
    #[arg(long, value_name = "ID,ID,…", value_parser = token_list)]
    tokens: Vec<TokenList>,
}

/// Tokens of a text.
#[derive(Clone, Debug)]
struct TokenList(Vec<u32>);

fn token_list(text: &str) -> Result<TokenList, String> {
    let token = |id: &str| id.trim().parse::<u32>().map_err(|_| format!("`{id}` is no token id"));
    text.split(',').map(token).collect::<Result<_, _>>().map(TokenList)
}

/// A way of pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PoolingName {
    /// No pooling: all hidden states
    None,
    /// Their mean
    Mean,
    /// That of the first token
    Cls,
    /// That of the last token
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
        let texts: Vec<EncodedText> = if self.texts.text.is_empty() {
            self.texts.tokens.into_iter().map(|TokenList(ids)| ids.into()).collect()
        } else {
            let tokenizer = Tokenizer::of(model.bundle(), model.folder())?;
            let encoded = |text: &String| tokenizer.encode_whole(text, None, true);
            self.texts.text.iter().map(encoded).collect::<Result<_, _>>()?
        };
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
                file.matrix(&name, width, &embedder.states(text)?);
            }
            width
        } else {
            let vectors = texts.iter().map(|text| embedder.embed(text)).collect::<Result<Vec<_>>>()?;
            match vectors.as_slice() {
                [one] => file.vector("embedding", one),
                several => file.matrix("embedding", embedder.dimension(), &several.concat()),
            }
            embedder.dimension()
        };
        let written = files::write(&self.out, &file.to_bytes())?;
        let tokens: Vec<usize> = texts.iter().map(|text| text.ids.len()).collect();
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
