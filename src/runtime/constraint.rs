//! Constrained text: JSON by a schema, a regular expression, or a grammar, with llguidance.

pub mod probe;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use anec_base::listing::sentence;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value as Json, json};

use super::error::RuntimeError;
pub use super::grammar::Grammar;
use super::schema;
use super::stack::with_stack;
use super::tokenizer::Tokenizer;

/// White space of a JSON text: after a comma one space, or a line break with its indentation, and after a colon one
/// space. More of it would let greedy models go on with line breaks for as long as they may.
const ITEM_SEPARATOR: &str = r",(\x20|\n[\x20\t]{0,32})?";
const KEY_SEPARATOR: &str = r":\x20?";

/// Maximum size of a grammar's source in bytes. The time to compile it grows with the square of its length.
const MAX_SOURCE: usize = 64 << 10;

/// Maximum number of symbols in a grammar's productions.
const MAX_SYMBOLS: usize = 50_000;

/// Number of compiled grammars that are kept, because applications send the same one with each request.
const KEPT: usize = 16;

/// Compiles grammars for a vocabulary.
pub struct Grammars {
    factory: ParserFactory,
    /// Grammars that were compiled last, by their source.
    compiled: Mutex<VecDeque<(String, Constraint)>>,
}

/// Grammar with the state of a text. Clones share what the grammar's lexer remembers.
#[derive(Clone)]
pub struct Constraint {
    matcher: Matcher,
    warnings: Arc<[String]>,
}

impl Grammars {
    /// Creates the compiler for a tokenizer and a model of `vocab_size` tokens. `ends` are the tokens that end a text.
    ///
    /// # Errors
    /// If no token ends a text, or the vocabulary is unsuitable.
    pub fn new(tokenizer: &Tokenizer, vocab_size: u64, ends: &[u32]) -> Result<Self, RuntimeError> {
        let ends: Vec<u32> = ends.iter().copied().filter(|id| u64::from(*id) < vocab_size).collect();
        let Some(end) = ends.first() else {
            return Err(grammar("no token of the model ends a text".into()));
        };
        // special tokens get a name that no text contains
        let word = |id: u32| match tokenizer.token_bytes(id) {
            bytes if bytes.is_empty() => {
                [vec![TokTrie::SPECIAL_TOKEN_MARKER], tokenizer.token(id).unwrap_or_default().into_bytes()].concat()
            }
            bytes => bytes,
        };
        let words: Vec<Vec<u8>> = (0..vocab_size as u32).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, *end), &words).with_eos_tokens(&ends);
        Self::with(Arc::new(ApproximateTokEnv::new(trie)))
    }

    fn with(environment: TokEnv) -> Result<Self, RuntimeError> {
        let mut factory = ParserFactory::new_simple(&environment).map_err(|error| grammar(error.to_string()))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_grammar_size = MAX_SYMBOLS;
        // errors reach clients, who can't use parser states
        limits.verbose_errors = false;
        Ok(Grammars { factory, compiled: Mutex::default() })
    }

    /// Compiles a grammar and starts a text.
    ///
    /// # Errors
    /// If the grammar is wrong, unsupported or too large; the message says where.
    pub fn start(&self, form: &Grammar) -> Result<Constraint, RuntimeError> {
        self.start_while(form, &|| true)
    }

    /// Compiles a grammar as [`start`](Grammars::start) does, and gives up once nobody `waits`.
    ///
    /// # Errors
    /// Returns any error of [`start`](Grammars::start).
    pub fn start_while(&self, form: &Grammar, waits: &dyn Fn() -> bool) -> Result<Constraint, RuntimeError> {
        let bytes = form.source_bytes();
        if bytes > MAX_SOURCE {
            return Err(grammar(format!("it has {bytes} bytes, and at most {MAX_SOURCE} are compiled")));
        }
        // not a digest, which strangers could make collide, nor the form, whose comparison ignores the order of fields
        let source = form.to_json().to_string();
        let compiled = || self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let known = || compiled().iter().find(|(known, _)| *known == source).map(|(_, constraint)| constraint.clone());
        if let Some(constraint) = known() {
            return Ok(constraint);
        }
        // another request may have brought the same grammar
        let _turn = probe::turn(waits).map_err(grammar)?;
        if let Some(constraint) = known() {
            return Ok(constraint);
        }
        probe::check(&source, waits).map_err(grammar)?;
        let constraint = self.compile_within(form, COMPILER_STACK)?;
        let mut compiled = compiled();
        compiled.push_back((source, constraint.clone()));
        if compiled.len() > KEPT {
            compiled.pop_front();
        }
        Ok(constraint)
    }

    /// Compiles a grammar with a stack of a size in bytes; panics of llguidance, which asserts some of its limits,
    /// become errors.
    fn compile_within(&self, form: &Grammar, stack: usize) -> Result<Constraint, RuntimeError> {
        with_stack(stack, TOO_COMPLEX, || self.compile(form)).unwrap_or_else(|problem| Err(grammar(problem)))
    }

    fn compile(&self, form: &Grammar) -> Result<Constraint, RuntimeError> {
        let grammar_of = match form.clone() {
            Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(with_style(schema).map_err(grammar)?),
            Grammar::Regex(expression) => TopLevelGrammar::from_regex(&expression),
            Grammar::Lark(lark) => TopLevelGrammar::from_lark(lark),
            Grammar::Either(_) => {
                TopLevelGrammar::from_lark(format!("start: {}", lark_expression(form).map_err(grammar)?))
            }
        };
        let mut matcher = Matcher::new(self.factory.create_parser(grammar_of));
        match matcher.get_error() {
            Some(problem) => Err(grammar(for_clients(&problem))),
            None => {
                let warnings = matcher.grammar_warnings();
                let warnings = warnings.iter().map(|warning| for_clients(warning)).collect();
                Ok(Constraint { matcher, warnings })
            }
        }
    }
}

impl Constraint {
    /// Returns a constraint that shares nothing with its clones: what its lexer learns ends with its text.
    #[must_use]
    pub fn independent(self) -> Self {
        Constraint { matcher: self.matcher.deep_clone(), ..self }
    }

    /// Sets the logits of tokens that can't come next to -inf. Tokens that end the text stay where it may end.
    ///
    /// # Errors
    /// If the grammar became too complex.
    pub fn mask_logits(&mut self, logits: &mut [f32]) -> Result<(), RuntimeError> {
        let allowed: SimpleVob =
            self.matcher.compute_mask_or_eos().map_err(|error| grammar(for_clients(&error.to_string())))?;
        for (token, logit) in logits.iter_mut().enumerate() {
            if token >= allowed.len() || !allowed.get(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Adds a token to the text.
    ///
    /// # Errors
    /// If it doesn't fit the grammar.
    pub fn accept_token(&mut self, token: u32) -> Result<(), RuntimeError> {
        self.matcher.consume_token(token).map_err(|error| grammar(for_clients(&error.to_string())))
    }

    /// Returns the parts of a schema that the text needn't satisfy.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns whether nothing can follow.
    pub fn is_finished(&self) -> bool {
        self.matcher.is_stopped()
    }
}

impl Grammar {
    /// Returns the form as JSON.
    fn to_json(&self) -> Json {
        match self {
            Grammar::JsonSchema(schema) => json!({"kind": "json", "source": schema}),
            Grammar::Regex(source) => json!({"kind": "regex", "source": source}),
            Grammar::Lark(source) => json!({"kind": "lark", "source": source}),
            Grammar::Either(forms) => {
                json!({"kind": "either", "source": forms.iter().map(Grammar::to_json).collect::<Vec<_>>()})
            }
        }
    }

    /// Returns the form that a JSON describes.
    fn from_json(mut json: Json) -> Option<Self> {
        let source = json.get_mut("source")?.take();
        let text = source.as_str().map(str::to_owned);
        match json["kind"].as_str()? {
            "json" => Some(Grammar::JsonSchema(source)),
            "regex" => text.map(Grammar::Regex),
            "lark" => text.map(Grammar::Lark),
            "either" => {
                let Json::Array(forms) = source else { return None };
                let forms: Vec<Grammar> = forms.into_iter().filter_map(Grammar::from_json).collect();
                Some(Grammar::Either(Box::new(forms.try_into().ok()?)))
            }
            _ => None,
        }
    }

    /// Returns the size of the source in bytes.
    fn source_bytes(&self) -> usize {
        match self {
            Grammar::JsonSchema(schema) => schema.to_string().len(),
            Grammar::Regex(source) | Grammar::Lark(source) => source.len(),
            Grammar::Either(forms) => forms.iter().map(Grammar::source_bytes).sum(),
        }
    }
}

/// Returns a schema with the white space that answers have.
fn with_style(schema: Json) -> Result<Json, String> {
    let mut schema = schema::prepare(schema)?;
    if let Some(fields) = schema.as_object_mut() {
        // lenient: keywords that can't be kept to are warnings
        let style = json!({
            "whitespace_flexible": false, "item_separator": ITEM_SEPARATOR, "key_separator": KEY_SEPARATOR,
            "lenient": true,
        });
        fields.entry("x-guidance").or_insert(style);
    }
    Ok(schema)
}

/// Returns a form as an expression of llguidance's variant of Lark.
fn lark_expression(form: &Grammar) -> Result<String, String> {
    Ok(match form {
        Grammar::JsonSchema(schema) => format!("%json {}", with_style(schema.clone())?),
        Grammar::Regex(expression) => {
            // a literal ends at the first slash that isn't escaped, and has no line breaks
            let mut literal = String::from("/");
            let mut is_escaped = false;
            for letter in expression.chars() {
                match letter {
                    '/' if !is_escaped => literal.push_str("\\/"),
                    '\n' => literal.push_str(if is_escaped { "n" } else { "\\n" }),
                    _ => literal.push(letter),
                }
                is_escaped = letter == '\\' && !is_escaped;
            }
            literal + "/"
        }
        Grammar::Lark(lark) => format!("%lark {{\n{lark}\n}}"),
        Grammar::Either(forms) => {
            let forms: Vec<String> = forms.iter().map(lark_expression).collect::<Result<_, _>>()?;
            format!("({})", forms.join(" | "))
        }
    })
}

/// Stack of the compiler in bytes: more than a trial has, which compiles for fewer tokens.
const COMPILER_STACK: usize = 64 << 20;

/// Error for a grammar that exceeds a limit of the compiler.
const TOO_COMPLEX: &str = "it is too complex to be compiled";

/// Returns a message of llguidance in a client's terms.
fn for_clients(problem: &str) -> String {
    if problem.contains("panic") {
        return TOO_COMPLEX.into();
    }
    let problem = problem.split("\n<state>").next().unwrap_or(problem).trim_end();
    sentence(&problem.replace("Unimplemented keys", "keywords that can't be kept to"))
}

fn grammar(problem: String) -> RuntimeError {
    RuntimeError::Grammar { problem }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::sampling::{Sampler, Sampling};

    fn tokenizer() -> Tokenizer {
        Tokenizer::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model/tokenizer.json")).unwrap()
    }

    /// Generates text under a constraint without a model: any allowed token, rarely the end.
    fn babble(form: &Grammar, seed: u64) -> String {
        let tokenizer = tokenizer();
        let grammars = Grammars::new(&tokenizer, 2048, &[0]).unwrap();
        let mut constraint = grammars.start(form).unwrap();
        let mut sampler = Sampler::new(Sampling { temperature: 1.0, seed, ..Default::default() }, &[]);
        let mut ids = Vec::new();
        while !constraint.is_finished() && ids.len() < 2000 {
            let mut logits = vec![0.0; 2048];
            // closing tokens are likelier, so that texts end
            for id in ["\"", "}", "]", "\"}"].iter().filter_map(|token| tokenizer.id(token)) {
                logits[id as usize] = 6.0;
            }
            constraint.mask_logits(&mut logits).unwrap();
            let id = sampler.next(&logits);
            assert!(logits[id as usize] > f32::NEG_INFINITY, "some token is always open");
            constraint.accept_token(id).unwrap();
            if id == 0 {
                break;
            }
            ids.push(id);
        }
        tokenizer.decode(&ids, true).unwrap()
    }

    #[test]
    fn grammars_of_strangers_have_limits_and_their_errors_no_parser_states() {
        let tokenizer = tokenizer();
        let grammars = Grammars::new(&tokenizer, 2048, &[0]).unwrap();
        let lark = |count: usize| {
            let alternatives: Vec<String> = (0..count).map(|i| format!("\"w{i}\"")).collect();
            Grammar::Lark(format!("start: {}", alternatives.join(" | ")))
        };
        let problem = |form: &Grammar| grammars.start(form).err().map(|error| error.to_string());
        assert_eq!(problem(&lark(100)), None);
        assert!(problem(&lark(100_000)).unwrap().contains("bytes, and at most 65536 are compiled"));
        for form in [
            lark(6500),
            Grammar::Lark("start: a\na: a a a | a".into()),
            Grammar::Lark("start: <nothing>".into()),
            Grammar::Regex("((a{1000}){1000}){1000}".into()),
            Grammar::Regex("(".into()),
            Grammar::JsonSchema(json!({"type": "strin"})),
            Grammar::JsonSchema(json!({"type": "string", "const": "y".repeat(3000), "pattern": "^x$"})),
            Grammar::JsonSchema(json!({"type": "string", "enum": ["y".repeat(3000)], "maxLength": 2, "minLength": 9})),
            Grammar::JsonSchema(json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})),
            Grammar::JsonSchema(json!({"type": "array", "items": {"type": "string"}, "minItems": 4_000_000_000u64})),
        ] {
            let start = std::time::Instant::now();
            let problem = problem(&form).unwrap_or_default();
            assert!(start.elapsed().as_secs() < 5, "{:?} for {problem}", start.elapsed());
            assert!(problem.len() < 2000, "{} bytes", problem.len());
            for word in ["panic", "backtrace", "<state>", "Some("] {
                assert!(!problem.contains(word), "{problem}");
            }
        }
    }

    /// An answer that may be a call or has a form is one of the two, whatever their kinds.
    #[test]
    fn text_has_one_of_two_forms() {
        let call = || Grammar::Lark("start: \"<call>\" word \"</call>\"\nword: \"rain\" | \"tides\"".into());
        let schema = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false});
        let forms = [
            (Grammar::JsonSchema(schema), ["{\"a\": 1}", "{\"a\": 2}", "{\"a\":1}", "{\"a\":2}"].as_slice()),
            (Grammar::Regex("(a|b)/[\n]c\\/d".into()), &["a/\nc/d", "b/\nc/d"]),
            (Grammar::Lark("start: word\nword: \"yes\" | \"no {}\"".into()), &["yes", "no {}"]),
        ];
        for (form, texts) in forms {
            let either = Grammar::Either(Box::new([call(), form.clone()]));
            let json = either.to_json();
            assert_eq!(Grammar::from_json(json), Some(either.clone()));
            let found: BTreeSet<String> = (0..60).map(|seed| babble(&either, seed)).collect();
            let calls = ["<call>rain</call>", "<call>tides</call>"];
            assert!(found.iter().all(|text| calls.contains(&&**text) || texts.contains(&&**text)), "{found:?}");
            assert!(calls.iter().all(|text| found.contains(*text)), "{form:?}: {found:?}");
            assert!(texts.iter().any(|text| found.contains(*text)), "{form:?}: {found:?}");
        }
    }

    #[test]
    fn constrained_text_satisfies_its_schema() {
        let schema = json!({
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
            },
            "required": ["name", "age", "tags"],
            "additionalProperties": false,
        });
        let validator = jsonschema::validator_for(&schema).unwrap();
        for seed in 0..20 {
            let text = babble(&Grammar::JsonSchema(schema.clone()), seed);
            let value: Json = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert!(validator.is_valid(&value), "{text}");
        }
    }

    #[test]
    fn the_same_grammar_is_compiled_once_and_its_texts_are_independent() {
        let grammars = Grammars::new(&tokenizer(), 2048, &[0]).unwrap();
        let form = |number: usize| Grammar::Regex(format!("[a-c]{{2}}{number}"));
        let compiled = |grammars: &Grammars| grammars.compiled.lock().unwrap().len();
        let [first, second] = [0, 0].map(|number| grammars.start(&form(number)).unwrap());
        assert_eq!(compiled(&grammars), 1);
        let [mut first, mut second] = [first, second].map(Constraint::independent);
        let id = |text: &str| tokenizer().id(text).unwrap();
        first.accept_token(id("a")).unwrap();
        assert!(first.accept_token(id("0")).is_err(), "a letter is missing");
        for text in ["b", "a"] {
            second.accept_token(id(text)).unwrap();
        }
        (0..2 * KEPT).for_each(|number| drop(grammars.start(&form(number)).unwrap()));
        assert_eq!(compiled(&grammars), KEPT, "the oldest are dropped");
        // the order of fields is a part of a schema
        let schema = |names: [&str; 2]| {
            let fields = names.map(|name| (name.to_owned(), json!({"type": "null"})));
            Grammar::JsonSchema(json!({"type": "object", "properties": Json::Object(fields.into_iter().collect())}))
        };
        let [first, second] = [["a", "b"], ["b", "a"]].map(|names| schema(names).to_json().to_string());
        assert_ne!(first, second);
    }

    #[test]
    fn expressions_and_grammars_hold() {
        for seed in 0..10 {
            let text = babble(&Grammar::Regex("[a-c]{2,5}-[0-9]{3}".into()), seed);
            let (letters, digits) = text.split_once('-').unwrap();
            assert!((2..=5).contains(&letters.len()) && letters.chars().all(|c| ('a'..='c').contains(&c)), "{text}");
            assert!(digits.len() == 3 && digits.chars().all(|c| c.is_ascii_digit()), "{text}");
            let text = babble(&Grammar::Lark("start: \"yes\" | \"no\"".into()), seed);
            assert!(text == "yes" || text == "no", "{text}");
        }
    }

    #[test]
    fn wrong_grammars_are_refused_with_a_reason() {
        let grammars = Grammars::new(&tokenizer(), 2048, &[0]).unwrap();
        for form in [
            Grammar::JsonSchema(json!({"type": "strin"})),
            Grammar::Regex("(".into()),
            Grammar::Lark("start: missing".into()),
        ] {
            let error = grammars.start(&form).err().unwrap().to_string();
            assert!(error.starts_with("grammar: ") && error.len() > 20, "{error}");
        }
        assert!(Grammars::new(&tokenizer(), 2048, &[9999]).is_err(), "a text under a grammar must be able to end");
    }
}
