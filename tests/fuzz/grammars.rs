//! JSON Schemas, regular expressions and Lark grammars, small ones that compile and some that explode.

use serde_json::{Map, Value as Json, json};

use super::mutate::{Random, extreme};

/// Returns `{"kind": …, "source": …}` of a grammar.
pub fn grammar(random: &mut Random) -> Json {
    match random.below(8) {
        0..5 => json!({"kind": "json", "source": schema(random, 0)}),
        5 => json!({"kind": "regex", "source": regex(random, 0)}),
        _ => json!({"kind": "lark", "source": lark(random)}),
    }
}

fn number(random: &mut Random) -> Json {
    match random.below(4) {
        0 => json!(random.below(10)),
        1 => json!(random.below(3000)),
        2 => json!(random.below(200) as f64 / 8.0 - 10.0),
        _ => extreme(random),
    }
}

fn schema(random: &mut Random, depth: usize) -> Json {
    if depth > 3 {
        return json!({"type": random.pick(&["string", "integer", "null", "boolean"])});
    }
    let mut fields = Map::new();
    let types = ["object", "array", "string", "integer", "number", "boolean", "null"];
    let kind = *random.pick(&types);
    if random.chance(0.85) {
        fields.insert("type".into(), json!(kind));
    }
    for _ in 0..random.below(4) {
        let (key, value) = match (random.below(12), kind) {
            (0, _) => ("enum", json!([1, "a", null, extreme(random)])),
            (1, _) => ("const", extreme(random)),
            (2, _) => {
                let parts: Vec<Json> = (0..1 + random.below(3)).map(|_| schema(random, depth + 1)).collect();
                (*random.pick(&["allOf", "anyOf", "oneOf"]), json!(parts))
            }
            (3, _) => ("$ref", json!(*random.pick(&["#", "#/$defs/a", "#/$defs/b", "other.json", "#/properties/a"]))),
            (_, "object") => {
                let names = ["a", "b", "name", "x y", "é", "\"", ""];
                let own: Map<String, Json> = (0..random.below(5))
                    .map(|_| ((*random.pick(&names)).to_owned(), schema(random, depth + 1)))
                    .collect();
                match random.below(5) {
                    0 => ("required", json!(["a", random.pick(&names)])),
                    1 => ("additionalProperties", schema(random, depth + 1)),
                    2 => (*random.pick(&["minProperties", "maxProperties"]), number(random)),
                    3 => ("patternProperties", json!({regex(random, 1): schema(random, depth + 1)})),
                    _ => ("properties", Json::Object(own)),
                }
            }
            (_, "array") => match random.below(4) {
                0 => (*random.pick(&["minItems", "maxItems"]), number(random)),
                1 => ("prefixItems", json!([schema(random, depth + 1), schema(random, depth + 1)])),
                2 => ("uniqueItems", json!(true)),
                _ => ("items", schema(random, depth + 1)),
            },
            (_, "string") => match random.below(3) {
                0 => (*random.pick(&["minLength", "maxLength"]), number(random)),
                1 => ("pattern", json!(regex(random, 0))),
                _ => ("format", json!(*random.pick(&["date-time", "email", "uuid", "ipv6", "uri", "nonsense"]))),
            },
            _ => (*random.pick(&["minimum", "maximum", "exclusiveMinimum", "multipleOf"]), number(random)),
        };
        fields.insert(key.into(), value);
    }
    if depth == 0 {
        fields.insert("$defs".into(), json!({"a": schema(random, 2), "b": {"$ref": "#/$defs/a"}}));
    }
    Json::Object(fields)
}

fn regex(random: &mut Random, depth: usize) -> String {
    let mut out = String::new();
    for _ in 0..1 + random.below(4) {
        let part = match random.below(9) {
            0 => "[a-c]".to_owned(),
            1 => "\\d".to_owned(),
            2 => ".".to_owned(),
            3 => "\\p{L}".to_owned(),
            4 => (*random.pick(&["^", "$", "(?=a)", "\\b", "[", ")", "\\", "é"])).to_owned(),
            5 | 6 if depth < 3 => {
                let (first, second) = (regex(random, depth + 1), regex(random, depth + 1));
                format!("({first}|{second})")
            }
            _ => "ab".to_owned(),
        };
        out += &part;
        match random.below(6) {
            0 => out.push('*'),
            1 => out.push('?'),
            2 => out += &format!("{{{},{}}}", random.below(20), *random.pick(&[5, 20, 300, 100_000])),
            _ => {}
        }
    }
    out
}

fn lark(random: &mut Random) -> String {
    let most = if random.chance(0.05) { 900 } else { 6 };
    let count = 1 + random.below(most);
    let mut out = String::new();
    for rule in 0..count {
        let name = if rule == 0 { "start".to_owned() } else { format!("r{rule}") };
        let mut alternatives = Vec::new();
        for _ in 0..1 + random.below(3) {
            let mut parts = Vec::new();
            for _ in 0..random.below(4) {
                let mut part = match random.below(6) {
                    0 => "\"a\"".to_owned(),
                    1 => "/[a-z]+/".to_owned(),
                    2 => format!("/{}/", regex(random, 1)),
                    3 => "%json {\"type\": \"integer\"}".to_owned(),
                    _ => format!("r{}", random.below(count + 1)),
                };
                part += *random.pick(&["", "", "?", "*", "+", "{1,50}"]);
                parts.push(part);
            }
            alternatives.push(parts.join(" "));
        }
        out += &format!("{name}: {}\n", alternatives.join(" | "));
    }
    out
}
