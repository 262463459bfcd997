//! Offered functions and their calls, in OpenAI's API.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Value as Json, json};

use super::error::ServeError;
use anec_runtime::reasoning::{AnswerPart, AnswerReader};
use anec_runtime::tools::{CallReader, CallSyntax, ToolCall, ToolFunction};
use anec_runtime::{Grammar, Tokenizer};

/// Functions offered by a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Tools {
    /// Functions that can be called.
    functions: Vec<ToolFunction>,
    /// Whether the answer must be a call.
    required: bool,
    /// Whether the answer may have several calls.
    parallel: bool,
}

impl Tools {
    /// Parses `tools`, `tool_choice` and `parallel_tool_calls`; returns `None` if no function may be called.
    ///
    /// # Errors
    /// If a tool is no function, or the choice isn't among them.
    pub fn read(tools: &[Json], choice: Option<&Json>, parallel: Option<bool>) -> Result<Option<Self>, ServeError> {
        let functions: Vec<ToolFunction> = tools
            .iter()
            .map(ToolFunction::of)
            .collect::<Result<_, _>>()
            .map_err(|problem| ServeError::field("tools", problem))?;
        let wrong = |problem: &str| Err(ServeError::field("tool_choice", problem));
        let parallel = parallel.unwrap_or(true);
        let required = match choice {
            None | Some(Json::Null) => false,
            Some(Json::String(word)) => match word.as_str() {
                "auto" => false,
                "none" => return Ok(None),
                "required" if functions.is_empty() => return wrong("a call is required, but `tools` has no function"),
                "required" => true,
                _ => return wrong("`tool_choice` can be \"auto\", \"none\", \"required\" or name a function"),
            },
            Some(named) => {
                let name = named.pointer("/function/name").and_then(Json::as_str);
                return match functions.into_iter().find(|function| Some(function.name.as_str()) == name) {
                    Some(function) => Ok(Some(Tools { functions: vec![function], required: true, parallel: false })),
                    None => wrong("`tool_choice` names no function of `tools`"),
                };
            }
        };
        Ok((!functions.is_empty()).then_some(Tools { functions, required, parallel }))
    }

    /// Returns whether the answer must be a call.
    pub fn is_required(&self) -> bool {
        self.required
    }

    /// Returns the parser of calls in the model's syntax.
    pub fn reader(&self, syntax: &'static CallSyntax) -> CallReader {
        let reader = CallReader::new(syntax, &self.functions);
        if self.parallel { reader } else { reader.single() }
    }

    /// Returns the grammar of an answer that must be a call, or that may be one and otherwise has `form`.
    ///
    /// # Errors
    /// If a call is required and the model's syntax is unknown.
    pub fn grammar(
        &self,
        syntax: Option<&CallSyntax>,
        form: Option<&Grammar>,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Grammar>, ServeError> {
        let calls = || syntax.map(|syntax| syntax.grammar(&self.functions, self.parallel, tokenizer));
        if !self.required {
            return Ok(form.and_then(|form| Some(Grammar::Either(Box::new([calls()?, form.clone()])))));
        }
        match calls() {
            Some(calls) => Ok(Some(calls)),
            None => {
                let problem = "how this model writes calls isn't known, so none can be required: use \"auto\"";
                Err(ServeError::field("tool_choice", problem))
            }
        }
    }

    /// Returns the string that ends the answer if only one call is allowed.
    pub fn stop(&self, syntax: &CallSyntax) -> Option<&'static str> {
        // the grammar of a required call has its own end
        syntax.end().filter(|_| !self.parallel && !self.required)
    }
}

/// Returns the id of a call: the `number`-th of the text with this `index` in the answer `answer`.
pub fn call_id(answer: &str, index: usize, number: usize) -> String {
    let mut hasher = DefaultHasher::new();
    (answer, index, number).hash(&mut hasher);
    // nine letters or digits, because some chat templates accept nothing else
    format!("{:09x}", hasher.finish() & 0xF_FFFF_FFFF)
}

/// Returns a call with the id of [`call_id`] in OpenAI's form.
pub fn call(call: &ToolCall, answer: &str, index: usize, number: usize) -> Json {
    let arguments = Json::Object(call.arguments.clone()).to_string();
    begun_call(&call.name, &call_id(answer, index, number), &arguments)
}

/// Returns a call in OpenAI's form, with its arguments so far.
pub fn begun_call(name: &str, id: &str, arguments: &str) -> Json {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// Parts of a whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parts {
    /// Text without reasoning and calls.
    pub text: String,
    /// Reasoning before the text, if the model marks it.
    pub reasoning: Option<String>,
    /// Function calls.
    pub calls: Vec<ToolCall>,
}

/// Splits a whole answer into its parts.
pub fn divide(mut reader: AnswerReader, text: &str) -> Parts {
    let mut parts = Parts::default();
    let read = reader.push(text);
    for part in read.into_iter().chain(reader.finish()) {
        match part {
            AnswerPart::Text(text) => parts.text.push_str(&text),
            AnswerPart::Reasoning(text) => parts.reasoning.get_or_insert_default().push_str(&text),
            AnswerPart::Call(call) => parts.calls.push(call),
            // whole answers aren't read in pieces
            AnswerPart::Piece(_) => {}
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(choice: Json) -> Result<Option<Tools>, ServeError> {
        let tools = ["a", "b"].map(|name| json!({"type": "function", "function": {"name": name}}));
        Tools::read(&tools, Some(&choice), None)
    }

    #[test]
    fn a_choice_is_a_word_or_a_function() {
        let auto = read(json!("auto")).unwrap().unwrap();
        assert_eq!((auto.functions.len(), auto.required, auto.parallel), (2, false, true));
        assert_eq!(read(json!("none")).unwrap(), None);
        assert!(read(json!("required")).unwrap().unwrap().required);
        let named = read(json!({"type": "function", "function": {"name": "b"}})).unwrap().unwrap();
        assert_eq!((named.functions[0].name.as_str(), named.functions.len(), named.parallel), ("b", 1, false));
        for (choice, problem) in [
            (json!("always"), "\"required\" or name a function"),
            (json!({"type": "function", "function": {"name": "c"}}), "names no function"),
        ] {
            assert!(read(choice).unwrap_err().to_string().contains(problem));
        }
        assert!(Tools::read(&[], Some(&json!("required")), None).unwrap_err().to_string().contains("has no function"));
        assert_eq!(Tools::read(&[], None, None).unwrap(), None);
        assert!(
            Tools::read(&[json!({"type": "web_search"})], None, None).unwrap_err().to_string().contains("web_search")
        );
    }

    #[test]
    fn names_of_calls_are_nine_letters_and_differ() {
        let some = ToolCall { name: "f".into(), arguments: serde_json::Map::new() };
        let ids: Vec<String> =
            (0..4).map(|i| call(&some, "chatcmpl-1", i / 2, i % 2)["id"].as_str().unwrap().to_owned()).collect();
        assert!(ids.iter().all(|id| id.len() == 9 && id.chars().all(char::is_alphanumeric)), "{ids:?}");
        assert_eq!(ids.iter().collect::<std::collections::BTreeSet<_>>().len(), 4);
    }
}
