//! `/v1/embeddings` of OpenAI's API, and `/v1/rerank`: how well documents answer a query.

use std::sync::{Arc, Weak};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::conversation::parse;
use super::error::ServeError;
use super::service::Service;
use anec_runtime::encode::{Embedder, PreparedText, classify};
use anec_runtime::{EncodedText, LoadedModel, RuntimeError};

/// Maximum number of texts per request.
const MAX_TEXTS: usize = 2048;

/// Body of `POST /v1/embeddings`.
#[derive(Debug, Deserialize)]
struct EmbeddingRequest {
    input: Input,
    #[serde(default)]
    encoding_format: EncodingFormat,
    dimensions: Option<usize>,
    /// Name of the prompt that stands before each text.
    prompt_name: Option<String>,
    /// Whether the end of a text that is too long is cut off; otherwise it is an error.
    #[serde(default = "yes")]
    truncate: bool,
}

fn yes() -> bool {
    true
}

/// Text, texts, tokens of a text, or tokens of texts.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text, a list of texts, tokens, or a list of lists of tokens")]
enum Input {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    Batches(Vec<Vec<u32>>),
}

impl Input {
    /// Returns the number of texts.
    fn count(&self) -> usize {
        match self {
            Input::Text(_) => 1,
            Input::Texts(texts) => texts.len(),
            Input::Tokens(tokens) => usize::from(!tokens.is_empty()),
            Input::Batches(batches) => batches.len(),
        }
    }

    /// Returns a text as tokens.
    fn text(
        &self,
        index: usize,
        prepare: impl Fn(&str) -> Result<PreparedText, RuntimeError>,
    ) -> Result<PreparedText, RuntimeError> {
        match self {
            Input::Text(text) => prepare(text),
            Input::Texts(texts) => prepare(&texts[index]),
            Input::Tokens(tokens) => Ok(EncodedText::from(tokens.clone()).into()),
            Input::Batches(batches) => Ok(EncodedText::from(batches[index].clone()).into()),
        }
    }
}

/// Encoding of vectors.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum EncodingFormat {
    /// List of numbers.
    #[default]
    Float,
    /// Little-endian f32 in base64.
    Base64,
}

/// Body of `POST /v1/rerank`.
#[derive(Debug, Deserialize)]
struct RerankRequest {
    query: String,
    /// Documents; text embeddings inference calls them `texts`, and gets a list of scores.
    #[serde(default)]
    documents: Vec<Document>,
    texts: Option<Vec<Document>>,
    top_n: Option<usize>,
    #[serde(default, alias = "return_text")]
    return_documents: bool,
    /// Whether scores are logits, not probabilities.
    #[serde(default)]
    raw_scores: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text, or an object with `text`")]
enum Document {
    Text(String),
    Object { text: String },
}

impl Document {
    fn text(&self) -> &str {
        match self {
            Document::Text(text) | Document::Object { text } => text,
        }
    }
}

/// Returns the embeddings of a request's texts, unless `client` has gone.
///
/// # Errors
/// If the request is wrong, the model gives no embeddings, or a text is too long.
pub(super) fn embed(service: &Service, body: Json, client: &Weak<()>) -> Result<Json, ServeError> {
    let request: EmbeddingRequest = parse(&body)?;
    let embedder = Embedder::new(service.model(), None)?;
    if let Some(dimensions) = request.dimensions.filter(|dimensions| *dimensions != embedder.dimension()) {
        let problem = format!("the model's vectors have {} dimensions, not {dimensions}", embedder.dimension());
        return Err(ServeError::field("dimensions", problem));
    }
    let count = request.input.count();
    check_count(count)?;
    let mut data = Vec::with_capacity(count);
    let (mut tokens, mut cut) = (0, Vec::new());
    for index in 0..count {
        check_connected(client)?;
        let prepare = |text: &str| embedder.prepare(service.tokenizer(), text, request.prompt_name.as_deref(), false);
        let text = request.input.text(index, prepare)?;
        let length = text.tokens.ids.len();
        check_length(service.model(), length, "input")?;
        match text.cut {
            0 => {}
            _ if request.truncate => cut.push(index),
            more => {
                let (context, tokens) = (length as u64, (length + more) as u64);
                return Err(ServeError::TextLength { context, tokens, field: "input" });
            }
        }
        let vector = embedder.embed_prepared(&text)?;
        tokens += length;
        let embedding = match request.encoding_format {
            EncodingFormat::Float => json!(vector),
            EncodingFormat::Base64 => {
                json!(STANDARD.encode(vector.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>()))
            }
        };
        data.push(json!({"object": "embedding", "index": index, "embedding": embedding}));
    }
    let mut answer = json!({
        "object": "list", "data": data, "model": service.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    });
    if !cut.is_empty() {
        answer["anec"] = json!({"truncated": cut});
    }
    Ok(answer)
}

/// Returns documents by how well they answer a query, best first, unless `client` has gone.
///
/// # Errors
/// If the request is wrong, the model is no reranker, or a pair is too long.
pub(super) fn rerank(service: &Service, body: Json, client: &Weak<()>) -> Result<Json, ServeError> {
    let request: RerankRequest = parse(&body)?;
    let documents = request.texts.as_ref().unwrap_or(&request.documents);
    let model = service.model();
    match model.bundle().model.sequence_classification().map(|classification| classification.labels.len()) {
        Some(1) => {}
        None => return Err(RuntimeError::NoTextLabels { path: model.folder().to_owned() }.into()),
        Some(labels) => {
            let problem = format!("the model tells {labels} labels apart; a reranker has one, how well a text answers");
            return Err(ServeError::Invalid { problem, field: None });
        }
    }
    check_count(documents.len())?;
    let mut results = Vec::new();
    let mut tokens = 0;
    for (index, document) in documents.iter().enumerate() {
        check_connected(client)?;
        let pair = service.whole(&request.query, Some(document.text()), "documents")?;
        check_length(model, pair.ids.len(), "documents")?;
        tokens += pair.ids.len();
        let logit = classify(model, &pair)?.first().copied().unwrap_or_default();
        let logit = f64::from(logit);
        results.push((index, if request.raw_scores { logit } else { 1.0 / (1.0 + (-logit).exp()) }));
    }
    // the sort is stable for equal scores
    results.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    results.truncate(request.top_n.unwrap_or(results.len()));
    let result = |(index, score): (usize, f64)| match (request.texts.is_some(), request.return_documents) {
        (true, false) => json!({"index": index, "score": score}),
        (true, true) => json!({"index": index, "score": score, "text": documents[index].text()}),
        (false, false) => json!({"index": index, "relevance_score": score}),
        (false, true) => {
            json!({"index": index, "relevance_score": score, "document": {"text": documents[index].text()}})
        }
    };
    let results: Vec<Json> = results.into_iter().map(result).collect();
    Ok(match request.texts.is_some() {
        true => json!(results),
        false => {
            let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
            json!({"model": service.name, "results": results, "usage": usage})
        }
    })
}

/// Checks that a request has texts, and not too many.
fn check_count(texts: usize) -> Result<(), ServeError> {
    match texts {
        0 => Err(ServeError::Invalid { problem: "there are no texts".into(), field: None }),
        texts if texts > MAX_TEXTS => {
            let problem = format!("there are {texts} texts; a request may have up to {MAX_TEXTS}");
            Err(ServeError::Invalid { problem, field: None })
        }
        _ => Ok(()),
    }
}

fn check_length(model: &Arc<LoadedModel>, tokens: usize, field: &'static str) -> Result<(), ServeError> {
    let context = model.longest_text().unwrap_or(model.context());
    let tokens = tokens as u64;
    match tokens {
        0 => Err(ServeError::field(field, "a text has no tokens")),
        tokens if tokens > context => Err(ServeError::TextLength { context, tokens, field }),
        _ => Ok(()),
    }
}

fn check_connected(client: &Weak<()>) -> Result<(), ServeError> {
    if client.strong_count() > 0 { Ok(()) } else { Err(ServeError::Stopping) }
}
