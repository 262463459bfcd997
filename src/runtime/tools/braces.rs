//! Parser of Gemma 4's calls: `call:f{a:1,b:<|"|>text<|"|>,c:[true],d:{e:null}}`. Strings and keys may be JSON's.

use serde_json::{Deserializer, Map, Value as Json};

use super::ToolCall;
use super::reader::{DEPTH, Reader};

/// Quotation mark of strings.
pub(super) const QUOTE: &str = "<|\"|>";

/// Parses a call.
pub(super) fn call(text: &str) -> Option<ToolCall> {
    let (name, rest) = text.trim().strip_prefix("call:")?.split_once('{')?;
    let mut reader = Reader { rest };
    let arguments = reader.object(DEPTH)?;
    reader.ends().then(|| ToolCall { name: name.trim().to_owned(), arguments })
}

impl Reader<'_> {
    /// Takes the text up to `mark`, and the mark.
    fn up_to(&mut self, mark: &str) -> Option<String> {
        let (text, rest) = self.rest.split_once(mark)?;
        self.rest = rest;
        Some(text.to_owned())
    }

    /// Parses the rest of an object.
    fn object(&mut self, depth: usize) -> Option<Map<String, Json>> {
        let mut fields = Map::new();
        while !self.take("}") {
            if !fields.is_empty() && !self.take(",") {
                return None;
            }
            let quoted = if self.take(QUOTE) {
                Some(self.up_to(QUOTE)?)
            } else if self.rest.starts_with('"') {
                Some(self.json()?.as_str()?.to_owned())
            } else {
                None
            };
            let key = match quoted {
                Some(key) => self.take(":").then_some(key)?,
                None => self.up_to(":")?.trim().to_owned(),
            };
            fields.insert(key, self.field_value(depth)?);
        }
        Some(fields)
    }

    /// Parses the value of a field or an item.
    fn field_value(&mut self, depth: usize) -> Option<Json> {
        let depth = depth.checked_sub(1)?;
        if self.take(QUOTE) {
            return self.up_to(QUOTE).map(Json::String);
        }
        if self.take("{") {
            return self.object(depth).map(Json::Object);
        }
        if !self.take("[") {
            return self.json();
        }
        let mut items = Vec::new();
        while !self.take("]") {
            if !items.is_empty() && !self.take(",") {
                return None;
            }
            items.push(self.field_value(depth)?);
        }
        Some(Json::Array(items))
    }

    /// Parses a value of JSON.
    fn json(&mut self) -> Option<Json> {
        let mut values = Deserializer::from_str(self.rest).into_iter::<Json>();
        let value = values.next()?.ok()?;
        self.rest = &self.rest[values.byte_offset()..];
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_bare_or_quoted() {
        for (text, arguments) in [
            ("call:f{}", json!({})),
            ("call:f{a:-7,b:1.5e10,c:null,d:true}", json!({"a": -7, "b": 1.5e10, "c": null, "d": true})),
            ("call:f{a:<|\"|>it's, {\"x\"}: <|\"|>}", json!({"a": "it's, {\"x\"}: "})),
            (
                "call:f{a:[<|\"|>b<|\"|>,<|\"|>c<|\"|>],d:{e:<|\"|>g<|\"|>,h:3}}",
                json!({"a": ["b", "c"], "d": {"e": "g", "h": 3}}),
            ),
            ("call:f{a:[],b:{}, <|\"|>c<|\"|>:{\"d\": \"e\"}}", json!({"a": [], "b": {}, "c": {"d": "e"}})),
        ] {
            let call = call(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!((call.name.as_str(), Json::Object(call.arguments)), ("f", arguments));
        }
        let deep = format!("call:f{{a:{}", "[".repeat(10_000));
        for wrong in
            ["f{}", "call:f", "call:f{a}", "call:f{a:}", "call:f{a:London}", "call:f{a:1 b:2}", "call:f{} x", &deep]
        {
            assert_eq!(call(wrong), None, "{wrong:.20}");
        }
    }
}
