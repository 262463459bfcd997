//! Generation parameters of requests: OpenAI's fields, extensions of local servers, and names of other runtimes for the
//! Neural Engine.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::error::ServeError;
use anec_bundle::Bundle;
use anec_runtime::sampling::within;
use anec_runtime::{GenerationRequest, Grammar, Sampling};

/// Sampling, length and form of a text.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Parameters {
    #[serde(default, alias = "max_new", alias = "n_predict")]
    max_tokens: Option<u64>,
    /// OpenAI's newer name; clients that support several servers send both.
    max_completion_tokens: Option<u64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    #[serde(default, alias = "rep_penalty", alias = "repeat_penalty")]
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    seed: Option<i64>,
    pub(super) n: Option<u64>,
    stop: Option<Stop>,
    logit_bias: Option<BTreeMap<String, f32>>,
    ignore_eos: Option<bool>,
    stop_repeat_ngram: Option<usize>,
    speculation: Option<usize>,
    response_format: Option<Json>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Several(Vec<String>),
}

/// Maximum number of texts per request.
const MAX_CHOICES: u64 = 64;
/// Maximum number of stop strings.
const MAX_STOPS: usize = 16;
/// Maximum number of alternatives with log-probabilities.
pub(super) const MAX_LOGPROBS: u64 = 20;

/// Defaults for omitted fields: the model's `generation_config.json`, then OpenAI's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Defaults {
    sampling: Sampling,
    /// Number of drafted tokens per call.
    speculation: usize,
}

impl Defaults {
    /// Returns the defaults of a bundle.
    pub fn of(bundle: &Bundle, folder: &Path, speculation: usize) -> Self {
        let file = bundle.tokenizer.get("generation_config").map(|file| folder.join(file));
        let config = file.and_then(|file| std::fs::read(file).ok());
        let config: Json = config.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        let number = |key: &str, default: f32| config[key].as_f64().map_or(default, |number| number as f32);
        let samples = config["do_sample"] != json!(false);
        let sampling = Sampling {
            temperature: if samples { number("temperature", 1.0) } else { 0.0 },
            top_k: config["top_k"].as_u64().unwrap_or(0) as usize,
            top_p: number("top_p", 1.0),
            min_p: number("min_p", 0.0),
            repetition_penalty: number("repetition_penalty", 1.0),
            ..Sampling::default()
        };
        Defaults { sampling, speculation }
    }
}

impl Parameters {
    /// Returns the requested maximum number of tokens; the newer name takes precedence.
    pub(super) fn most_tokens(&self) -> Option<u64> {
        self.max_completion_tokens.or(self.max_tokens)
    }

    /// Returns parameters for greedy sampling of up to `max_tokens` tokens.
    pub fn greedy(max_tokens: u64) -> Self {
        let (max_tokens, temperature) = (Some(max_tokens), Some(0.0));
        Parameters { max_tokens, temperature, repetition_penalty: Some(1.0), ..Parameters::default() }
    }

    /// Returns the number of texts.
    ///
    /// # Errors
    /// If it is zero or too large.
    pub fn choices(&self) -> Result<usize, ServeError> {
        Ok(within("n", self.n.unwrap_or(1), 1, MAX_CHOICES)? as usize)
    }

    /// Returns the stop strings.
    ///
    /// # Errors
    /// If there are too many.
    pub fn stops(&self) -> Result<Vec<String>, ServeError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop.clone()],
            Some(Stop::Several(stops)) => stops.clone(),
        };
        if stops.len() > MAX_STOPS {
            return Err(ServeError::field(
                "stop",
                format!("`stop` has {} strings, at most {MAX_STOPS} are taken", stops.len()),
            ));
        }
        Ok(stops)
    }

    /// Returns the requested form of the text.
    ///
    /// # Errors
    /// If `response_format` has an unknown type.
    pub fn grammar(&self) -> Result<Option<Grammar>, ServeError> {
        let wrong = |problem: String| ServeError::field("response_format", problem);
        let Some(format) = &self.response_format else { return Ok(None) };
        let text = |key: &str| format[key].as_str().map(str::to_owned);
        match format["type"].as_str() {
            Some("text") => Ok(None),
            Some("json_object") => Ok(Some(Grammar::JsonSchema(json!({"type": "object"})))),
            Some("json_schema") => match format.pointer("/json_schema/schema").or_else(|| format.get("schema")) {
                Some(schema) => Ok(Some(Grammar::JsonSchema(schema.clone()))),
                None => Err(wrong("`response_format` has no `json_schema.schema`".into())),
            },
            Some("regex") => text("regex").map(Grammar::Regex).map(Some).ok_or_else(|| wrong("no `regex`".into())),
            Some("grammar") => text("grammar").map(Grammar::Lark).map(Some).ok_or_else(|| wrong("no `grammar`".into())),
            other => Err(wrong(format!(
                "`response_format` has the type {}; known are text, json_object, json_schema, regex and grammar",
                other.map_or_else(|| "of no text".to_owned(), |kind| format!("`{kind}`"))
            ))),
        }
    }

    /// Returns the generation request for the first text that continues `prompt`. `room` tokens fit after the prompt,
    /// and `ends` end the text.
    ///
    /// # Errors
    /// If a number is out of range.
    pub fn request(
        &self,
        prompt: Vec<u32>,
        room: u64,
        ends: Vec<u32>,
        vocab_size: u64,
        defaults: &Defaults,
    ) -> Result<GenerationRequest, ServeError> {
        let own = defaults.sampling;
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(own.temperature),
            top_k: self.top_k.map_or(own.top_k, |k| usize::try_from(k).unwrap_or(0)),
            top_p: self.top_p.unwrap_or(own.top_p),
            min_p: self.min_p.unwrap_or(own.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(own.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            seed: self.seed.map_or_else(|| RandomState::new().hash_one(prompt.len()), |seed| seed as u64),
        };
        sampling.check()?;
        Ok(GenerationRequest {
            prompt,
            max_tokens: self.most_tokens().unwrap_or(room).min(room) as usize,
            sampling,
            stops: if self.ignore_eos == Some(true) { Vec::new() } else { ends },
            stop_repeat_ngram: self.stop_repeat_ngram.unwrap_or(0),
            logit_bias: self.biases(vocab_size)?,
            logprobs: None,
            speculation: self.speculation.unwrap_or(defaults.speculation).min(64),
        })
    }

    fn biases(&self, vocab_size: u64) -> Result<Vec<(u32, f32)>, ServeError> {
        let wrong = |problem: String| ServeError::field("logit_bias", problem);
        let biases = self.logit_bias.iter().flatten().map(|(token, bias)| {
            let id = token.parse::<u32>().ok().filter(|id| u64::from(*id) < vocab_size);
            let id =
                id.ok_or_else(|| wrong(format!("`logit_bias` names {token:?}, which is no token of this model")))?;
            Ok((id, within("logit_bias", *bias, -100.0, 100.0)?))
        });
        biases.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: Defaults = Defaults {
        sampling: Sampling {
            temperature: 0.7,
            top_k: 20,
            top_p: 0.8,
            min_p: 0.0,
            repetition_penalty: 1.1,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        },
        speculation: 3,
    };

    fn request(fields: Json) -> Result<GenerationRequest, ServeError> {
        let parameters: Parameters = serde_json::from_value(fields).unwrap();
        parameters.request(vec![1, 2], 50, vec![0], 100, &DEFAULTS)
    }

    #[test]
    fn omitted_fields_use_the_models_defaults() {
        let silent = request(json!({"seed": 7})).unwrap();
        assert_eq!(silent.sampling, Sampling { seed: 7, ..DEFAULTS.sampling });
        assert_eq!((silent.max_tokens, silent.stops, silent.speculation), (50, vec![0], 3));
        let said = request(json!({"temperature": 0, "max_new": 5, "rep_penalty": 1.5, "ignore_eos": true})).unwrap();
        assert_eq!((said.sampling.temperature, said.sampling.repetition_penalty), (0.0, 1.5));
        assert_eq!((said.max_tokens, said.stops.len()), (5, 0));
        let both = request(json!({"max_tokens": 9, "max_completion_tokens": 2})).unwrap();
        assert_eq!(both.max_tokens, 2, "the newer name counts");
    }

    #[test]
    fn numbers_out_of_range_are_named() {
        for (fields, message) in [
            (json!({"temperature": -1}), "`temperature` is -1, but has to be from 0 to 100"),
            (json!({"top_p": 1.5}), "`top_p` is 1.5, but has to be from 0 to 1"),
            (json!({"presence_penalty": 3}), "`presence_penalty` is 3, but has to be from -2 to 2"),
            (json!({"logit_bias": {"100": 1}}), "`logit_bias` names \"100\", which is no token of this model"),
            (json!({"logit_bias": {"5": 101}}), "`logit_bias` is 101, but has to be from -100 to 100"),
        ] {
            assert_eq!(request(fields).unwrap_err().to_string(), message);
        }
        let parameters: Parameters = serde_json::from_value(json!({"n": 0})).unwrap();
        assert!(parameters.choices().is_err());
    }

    #[test]
    fn forms_of_text_are_told_apart() {
        let grammar = |format: Json| {
            let parameters: Parameters = serde_json::from_value(json!({"response_format": format})).unwrap();
            parameters.grammar()
        };
        assert_eq!(grammar(json!({"type": "text"})).unwrap(), None);
        let schema = json!({"type": "integer"});
        let found = grammar(json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})).unwrap();
        assert_eq!(found, Some(Grammar::JsonSchema(schema)));
        assert!(grammar(json!({"type": "json_schema"})).is_err());
        assert!(grammar(json!({"type": "xml"})).unwrap_err().to_string().contains("known are"));
    }
}
