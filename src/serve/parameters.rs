//! Generation parameters of requests: OpenAI's fields, extensions of local servers, and names of other runtimes for the
//! Neural Engine.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use anec_base::input;
use anec_base::json::problem;
use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::error::ServeError;
use anec_bundle::Bundle;
use anec_runtime::sampling::{Sampling, within};
use anec_runtime::{GenerationRequest, Grammar};

/// Sampling, length and form of a text.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Parameters {
    #[serde(default, alias = "max_new", alias = "n_predict")]
    pub(super) max_tokens: Option<i64>,
    /// OpenAI's newer name; clients that support several servers send both.
    pub(super) max_completion_tokens: Option<i64>,
    pub(super) temperature: Option<f32>,
    pub(super) top_p: Option<f32>,
    pub(super) top_k: Option<i64>,
    pub(super) min_p: Option<f32>,
    #[serde(default, alias = "rep_penalty", alias = "repeat_penalty")]
    pub(super) repetition_penalty: Option<f32>,
    pub(super) presence_penalty: Option<f32>,
    pub(super) frequency_penalty: Option<f32>,
    pub(super) seed: Option<i64>,
    pub(super) n: Option<u64>,
    pub(super) stop: Option<Stop>,
    pub(super) logit_bias: Option<BTreeMap<String, f32>>,
    pub(super) ignore_eos: Option<bool>,
    pub(super) stop_repeat_ngram: Option<usize>,
    pub(super) speculation: Option<usize>,
    pub(super) response_format: Option<Json>,
    /// Forms under the names of vLLM and llama.cpp.
    pub(super) structured_outputs: Option<Json>,
    pub(super) guided_json: Option<Json>,
    pub(super) guided_regex: Option<Json>,
    pub(super) guided_choice: Option<Json>,
    pub(super) json_schema: Option<Json>,
    pub(super) stop_token_ids: Option<Vec<u32>>,
}

/// Strings that end a text.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text, or a list of texts")]
pub enum Stop {
    /// One string.
    One(String),
    /// Several strings.
    Several(Vec<String>),
}

/// Maximum number of texts per request.
const MAX_CHOICES: u64 = 64;
/// Maximum number of stop strings.
pub(super) const MAX_STOPS: usize = 16;
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
    /// Returns the defaults of a bundle. One whose head gives only the largest logits samples from those by default, or
    /// is greedy if there is one.
    pub fn of(bundle: &Bundle, folder: &Path, speculation: usize) -> Self {
        let file = bundle.tokenizer.get("generation_config").map(|file| folder.join(file));
        let config = file.and_then(|file| input::read_file(&file, input::MOST_JSON).ok());
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
        let largest = bundle.largest_logits().filter(|_| !bundle.gives_logits());
        let sampling = largest.map_or(sampling, |k| sampling.of_largest(k as usize));
        Defaults { sampling, speculation }
    }
}

impl Parameters {
    /// Returns the requested maximum number of tokens; the newer name takes precedence, and -1 is no maximum.
    ///
    /// # Errors
    /// If it is another negative number.
    pub(super) fn max_tokens(&self) -> Result<Option<u64>, ServeError> {
        match self.max_completion_tokens.or(self.max_tokens) {
            None | Some(-1) => Ok(None),
            Some(count) => match u64::try_from(count) {
                Ok(count) => Ok(Some(count)),
                Err(_) => {
                    Err(ServeError::field("max_tokens", format!("`max_tokens` is {count}, but has to be -1 or more")))
                }
            },
        }
    }

    /// Returns parameters for greedy sampling of up to `max_tokens` tokens.
    pub fn greedy(max_tokens: u64) -> Self {
        let (max_tokens, temperature) = (i64::try_from(max_tokens).ok(), Some(0.0));
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

    /// Returns the requested form of the text, and whether its schema must be kept to the letter.
    ///
    /// # Errors
    /// If the form has an unknown type, or there are several.
    pub fn grammar(&self) -> Result<Option<(Grammar, bool)>, ServeError> {
        let schema = |field: &'static str, value: &Json| match value {
            Json::String(text) => serde_json::from_str(text).map(Grammar::JsonSchema).map_err(|error| {
                ServeError::field(field, format!("`{field}` is a text that isn't JSON: {}", problem(&error)))
            }),
            value => Ok(Grammar::JsonSchema(value.clone())),
        };
        let mut forms = Vec::new();
        if let Some(format) = &self.response_format {
            forms.extend(response_format(format)?);
        }
        for (field, value) in [("guided_json", &self.guided_json), ("json_schema", &self.json_schema)] {
            if let Some(value) = value {
                forms.push((schema(field, value)?, false));
            }
        }
        let outputs = self.structured_outputs.as_ref();
        let output = |key: &str| outputs.and_then(|outputs| outputs.get(key)).filter(|value| !value.is_null());
        if let Some(value) = output("json") {
            forms.push((schema("structured_outputs", value)?, false));
        }
        for value in [self.guided_regex.as_ref(), output("regex")].into_iter().flatten() {
            let regex =
                value.as_str().ok_or_else(|| ServeError::field("guided_regex", "a regular expression is a text"))?;
            forms.push((Grammar::Regex(regex.to_owned()), false));
        }
        for value in [self.guided_choice.as_ref(), output("choice")].into_iter().flatten() {
            let choices: Option<Vec<&str>> = value
                .as_array()
                .and_then(|choices| choices.iter().map(Json::as_str).collect())
                .filter(|all: &Vec<_>| !all.is_empty());
            let choices = choices.ok_or_else(|| ServeError::field("guided_choice", "choices are a list of texts"))?;
            // Lark's strings have JSON's escapes
            let choices: Vec<String> = choices.into_iter().map(|choice| Json::from(choice).to_string()).collect();
            forms.push((Grammar::Lark(format!("start: {}", choices.join(" | "))), false));
        }
        if output("grammar").is_some() || output("structural_tag").is_some() {
            let problem = "`structured_outputs` can have json, regex or choice; a grammar in Lark's form goes into \
                           `response_format`";
            return Err(ServeError::field("structured_outputs", problem));
        }
        match forms.len() {
            0 | 1 => Ok(forms.pop()),
            _ => Err(ServeError::field("response_format", "a text has one form: several are given")),
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
        let mut stops = if self.ignore_eos == Some(true) { Vec::new() } else { ends };
        stops.extend(self.stop_token_ids.iter().flatten());
        Ok(GenerationRequest {
            prompt,
            max_tokens: self.max_tokens()?.unwrap_or(room).min(room) as usize,
            sampling,
            stops,
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

/// Returns the form of a `response_format`.
fn response_format(format: &Json) -> Result<Option<(Grammar, bool)>, ServeError> {
    let wrong = |problem: String| ServeError::field("response_format", problem);
    let text = |key: &str| format[key].as_str().map(str::to_owned);
    let form = match format["type"].as_str() {
        Some("text") => return Ok(None),
        Some("json_object") => {
            let any = json!({"type": "object"});
            Ok(Grammar::JsonSchema(format.get("schema").filter(|schema| !schema.is_null()).cloned().unwrap_or(any)))
        }
        Some("json_schema") => match format.pointer("/json_schema/schema").or_else(|| format.get("schema")) {
            Some(schema) => Ok(Grammar::JsonSchema(schema.clone())),
            None => Err(wrong("`response_format` has no `json_schema.schema`".into())),
        },
        Some("regex") => text("regex").map(Grammar::Regex).ok_or_else(|| wrong("no `regex`".into())),
        Some("grammar") => text("grammar").map(Grammar::Lark).ok_or_else(|| wrong("no `grammar`".into())),
        other => Err(wrong(format!(
            "`response_format` has the type {}; known are text, json_object, json_schema, regex and grammar",
            other.map_or_else(|| "of no text".to_owned(), |kind| format!("`{kind}`"))
        ))),
    };
    let strict = format.pointer("/json_schema/strict").and_then(Json::as_bool) == Some(true);
    form.map(|form| Some((form, strict)))
}

/// Fields that would change an answer and aren't supported, with the values that change nothing.
const UNSUPPORTED: [(&str, &[&str]); 25] = [
    ("grammar", &["\"\""]),
    ("guided_grammar", &[]),
    ("min_tokens", &["0"]),
    ("typical_p", &["1", "1.0"]),
    ("mirostat", &["0"]),
    ("mirostat_mode", &["0"]),
    ("dry_multiplier", &["0", "0.0"]),
    ("xtc_probability", &["0", "0.0"]),
    ("top_n_sigma", &["-1", "-1.0"]),
    ("tfs_z", &["1", "1.0"]),
    ("dynatemp_range", &["0", "0.0"]),
    ("adaptive_target", &["-1", "-1.0"]),
    ("top_a", &["0", "0.0"]),
    ("smoothing_factor", &["0", "0.0"]),
    ("skip_special_tokens", &["true"]),
    ("include_stop_str_in_output", &["false"]),
    ("use_beam_search", &["false"]),
    ("bad_words", &["[]"]),
    ("allowed_token_ids", &["[]"]),
    ("truncate_prompt_tokens", &[]),
    ("audio", &[]),
    ("prediction", &[]),
    ("web_search_options", &[]),
    ("documents", &["[]"]),
    ("lora", &["[]"]),
];

/// Refuses fields that would change the answer and aren't supported.
///
/// # Errors
/// If a request has such a field.
pub(super) fn check_supported(request: &Json) -> Result<(), ServeError> {
    check_fields(request, &UNSUPPORTED)
}

/// Refuses unsupported fields unless they have one of the values, as JSON, that change nothing.
///
/// # Errors
/// If `object` has such a field with another value.
pub(super) fn check_fields(object: &Json, unsupported: &[(&'static str, &[&str])]) -> Result<(), ServeError> {
    for (field, neutral) in unsupported {
        let value = object.get(field).filter(|value| !value.is_null()).map(Json::to_string);
        if value.is_some_and(|value| !neutral.contains(&value.as_str())) {
            let hint = if *field == "grammar" { "; a grammar in Lark's form goes into `response_format`" } else { "" };
            return Err(ServeError::field(field, format!("`{field}` isn't supported{hint}")));
        }
    }
    Ok(())
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
        assert_eq!(found, Some((Grammar::JsonSchema(schema.clone()), false)));
        let found = grammar(json!({"type": "json_object", "schema": schema})).unwrap();
        assert_eq!(found, Some((Grammar::JsonSchema(schema.clone()), false)));
        let strict = json!({"type": "json_schema", "json_schema": {"schema": schema, "strict": true}});
        assert_eq!(grammar(strict).unwrap(), Some((Grammar::JsonSchema(schema), true)));
        assert!(grammar(json!({"type": "json_schema"})).is_err());
        assert!(grammar(json!({"type": "xml"})).unwrap_err().to_string().contains("known are"));
    }

    #[test]
    fn forms_have_the_names_of_other_servers() {
        let grammar = |fields: Json| serde_json::from_value::<Parameters>(fields).unwrap().grammar();
        let schema = json!({"type": "integer"});
        for fields in [
            json!({"guided_json": schema}),
            json!({"guided_json": schema.to_string()}),
            json!({"json_schema": schema}),
            json!({"structured_outputs": {"json": schema}}),
        ] {
            assert_eq!(grammar(fields).unwrap(), Some((Grammar::JsonSchema(schema.clone()), false)));
        }
        let regex = Some((Grammar::Regex("a+".into()), false));
        assert_eq!(grammar(json!({"guided_regex": "a+"})).unwrap(), regex);
        assert_eq!(grammar(json!({"structured_outputs": {"regex": "a+"}})).unwrap(), regex);
        let choice = Some((Grammar::Lark("start: \"a\" | \"b \\\"c\"".into()), false));
        assert_eq!(grammar(json!({"guided_choice": ["a", "b \"c"]})).unwrap(), choice);
        for wrong in [
            json!({"guided_json": schema, "guided_regex": "a"}),
            json!({"structured_outputs": {"grammar": "x"}}),
            json!({"guided_choice": []}),
            json!({"guided_json": "{"}),
        ] {
            assert!(grammar(wrong.clone()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn fields_that_would_change_the_answer_are_refused() {
        for (field, value) in
            [("grammar", json!("root ::= x")), ("min_tokens", json!(3)), ("skip_special_tokens", json!(false))]
        {
            let error = check_supported(&json!({field: value})).unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{field}` isn't supported")), "{error}");
        }
        let neutral =
            json!({"grammar": "", "min_tokens": 0, "typical_p": 1.0, "mirostat": 0, "user": "x", "prediction": null});
        assert!(check_supported(&neutral).is_ok());
    }

    #[test]
    fn numbers_of_tokens_may_be_without_end() {
        let most =
            |count: i64| serde_json::from_value::<Parameters>(json!({"max_tokens": count})).unwrap().max_tokens();
        assert_eq!((most(-1).unwrap(), most(0).unwrap(), most(7).unwrap()), (None, Some(0), Some(7)));
        assert!(most(-2).unwrap_err().to_string().contains("-1 or more"));
    }
}
