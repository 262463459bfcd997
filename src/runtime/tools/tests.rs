use std::path::Path;

use proptest::prelude::*;

use super::*;
#[cfg(feature = "grammar")]
use crate::constraint::Grammars;
use crate::sampling::{Sampler, Sampling};

fn functions() -> Vec<ToolFunction> {
    let weather = json!({"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "near": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "near"],
        "additionalProperties": false,
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": false}},
    }}});
    let now = json!({"type": "function", "function": {"name": "now"}});
    [weather, now].iter().map(|tool| ToolFunction::of(tool).unwrap()).collect()
}

fn call(name: &str, arguments: Json) -> ToolTextPart {
    let Json::Object(arguments) = arguments else { panic!("arguments are an object") };
    ToolTextPart::Call(ToolCall { name: name.into(), arguments })
}

fn said(text: &str) -> ToolTextPart {
    ToolTextPart::Text(text.into())
}

/// Returns the parts of a text fed in pieces of `size` characters, with neighbouring texts joined.
fn read(syntax: &'static CallSyntax, whole: &str, size: usize) -> Vec<ToolTextPart> {
    let mut reader = CallReader::new(syntax, &functions());
    let letters: Vec<char> = whole.chars().collect();
    let mut parts = Vec::new();
    let pieces = letters.chunks(size).map(|piece| reader.push(&piece.iter().collect::<String>()));
    let pieces: Vec<ToolTextPart> = pieces.flatten().collect();
    for part in pieces.into_iter().chain(reader.finish()) {
        match part {
            ToolTextPart::Text(new) => text(new, &mut parts),
            part => parts.push(part),
        }
    }
    parts
}

/// Returns the parts of a text whose calls come in pieces, each put together, and the number of pieces of arguments.
fn read_pieces(syntax: &'static CallSyntax, whole: &str, size: usize) -> (Vec<ToolTextPart>, usize) {
    let mut reader = CallReader::new(syntax, &functions()).in_pieces();
    let letters: Vec<char> = whole.chars().collect();
    let mut found: Vec<ToolTextPart> = Vec::new();
    for piece in letters.chunks(size) {
        found.extend(reader.push(&piece.iter().collect::<String>()));
    }
    found.extend(reader.finish());
    let (mut parts, mut count, mut open) = (Vec::new(), 0, None);
    for part in found {
        match part {
            ToolTextPart::Text(new) => text(new, &mut parts),
            ToolTextPart::Call(_) => parts.push(part),
            ToolTextPart::Piece(CallPiece::Begin(name)) => {
                assert_eq!(open, None, "one call at a time");
                open = Some((name, String::new()));
            }
            ToolTextPart::Piece(CallPiece::Arguments(more)) => {
                open.as_mut().unwrap().1.push_str(&more);
                count += 1;
            }
            ToolTextPart::Piece(CallPiece::End) => {
                let (name, arguments) = open.take().unwrap();
                parts.push(call(&name, serde_json::from_str(&arguments).unwrap()));
            }
        }
    }
    if let Some((name, arguments)) = open {
        parts.push(said(&format!("cut: {name} {arguments}")));
    }
    (parts, count)
}

fn syntax(first_mark: &str, body: fn(&Body) -> bool) -> &'static CallSyntax {
    SYNTAXES.iter().find(|syntax| syntax.marks[0] == first_mark && body(&syntax.body)).unwrap()
}

fn hermes() -> &'static CallSyntax {
    syntax("<tool_call>", |body| matches!(body, Body::Json { .. }))
}

#[test]
fn calls_come_out_of_text_however_it_is_cut() {
    let paris = call("weather", json!({"city": "Paris", "days": 3}));
    let elements = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>";
    for (syntax, text) in [
        (
            hermes(),
            "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}\n</tool_call>",
        ),
        (
            hermes(),
            "<tool_call>{\"name\": \"weather\", \"arguments\": \"{\\\"city\\\": \\\"Paris\\\", \\\"days\\\": 3}\"}",
        ),
        (syntax("<tool_call>", |body| *body == Body::Elements), elements),
        (
            syntax("<|tool_call_start|>", |_| true),
            "<|tool_call_start|>[weather(city='Paris', days=3)]<|tool_call_end|>",
        ),
        (
            syntax("<|tool_call|>", |_| true),
            "<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}]<|/tool_call|>",
        ),
        (
            syntax("[TOOL_CALLS]", |body| *body != Body::Arguments),
            "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}]",
        ),
        (
            syntax("<|python_tag|>", |_| true),
            "{\"name\": \"weather\", \"parameters\": {\"city\": \"Paris\", \"days\": 3}}",
        ),
        (
            syntax("[TOOL_CALLS]", |body| *body == Body::Arguments),
            "[TOOL_CALLS]weather[ARGS]{\"city\": \"Paris\", \"days\": 3}",
        ),
        (
            syntax("[TOOL_CALLS]", |body| *body == Body::Arguments),
            "[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"Paris\", \"days\": 3}",
        ),
        (
            syntax("<tool_call>", |body| *body == Body::Keys),
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        ),
        (
            syntax("<seed:tool_call>", |_| true),
            "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        ),
        (
            syntax("<|START_ACTION|>", |_| true),
            "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {\"city\": \"Paris\", \"days\": 3}}\n]<|END_ACTION|>",
        ),
        (syntax("<|tool_call>", |_| true), "<|tool_call>call:weather{city:<|\"|>Paris<|\"|>,days:3}<tool_call|>"),
        // without the opening mark, and without any
        (syntax("<tool_call>", |body| *body == Body::Elements), &elements["<tool_call>\n".len()..]),
        (hermes(), " {\"name\": \"weather\",\n \"arguments\": {\"city\": \"Paris\", \"days\": 3}}\n"),
    ] {
        for size in [1, 2, 7, 1000] {
            assert_eq!(read(syntax, text, size), std::slice::from_ref(&paris), "{text}");
            assert_eq!(read_pieces(syntax, text, size).0, std::slice::from_ref(&paris), "{text}");
        }
    }
}

#[test]
fn text_around_calls_stays_and_white_space_between_them_goes() {
    let now = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let whole = format!("Let me see.\n\n{now}\n{now}\n");
    for size in [1, 3, 1000] {
        let found = read(hermes(), &whole, size);
        let now = call("now", json!({}));
        assert_eq!(found, [said("Let me see."), now.clone(), now]);
        assert_eq!(read(hermes(), "a < b  <tool \n", size), [said("a < b  <tool \n")]);
    }
}

#[test]
fn a_single_call_ends_the_answer() {
    let now = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    for size in [1, 3, 1000] {
        let mut reader = CallReader::new(hermes(), &functions()).single();
        let letters: Vec<char> = format!("So.\n{now}\n{now} And?").chars().collect();
        let pieces = letters.chunks(size).map(|piece| reader.push(&piece.iter().collect::<String>()));
        let mut parts: Vec<ToolTextPart> = pieces.flatten().collect();
        parts.extend(reader.finish());
        let last = parts.pop();
        assert_eq!(last, Some(call("now", json!({}))));
        assert!(parts.iter().all(|part| matches!(part, ToolTextPart::Text(_))), "{parts:?}");
    }
}

#[test]
fn text_that_is_no_call_stays_text() {
    for whole in [
        "<tool_call>\n{\"name\": \"weather\", \"arg",
        "<tool_call>\nnonsense\n</tool_call> and more",
        "<tool_call>{\"name\": \"unknown\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"arguments\": 7}</tool_call>",
        "<tool_call></tool_call>",
    ] {
        assert_eq!(read(hermes(), whole, 4), [said(whole)]);
    }
    let named = "{\"name\": \"unknown\", \"arguments\": {}}";
    assert_eq!(read(hermes(), named, 3), [said(named)]);
    assert_eq!(read(hermes(), "{\"name\": \"now\"} is one", 3), [said("{\"name\": \"now\"} is one")]);
    let llama = syntax("<|python_tag|>", |_| true);
    assert_eq!(read(llama, "It is {\"name\": \"now\"}", 3), [said("It is {\"name\": \"now\"}")]);
    assert_eq!(read(llama, "{\"name\": \"now\"} indeed", 3), [said("{\"name\": \"now\"} indeed")]);
}

#[test]
fn python_literals_are_values() {
    for (python, value) in [
        ("'it\\'s \\u00e9\\n\\x41 \\ud83d\\ude00'", json!("it's é\nA 😀")),
        ("\"\"\"two \"quoted\" words\"\"\"", json!("two \"quoted\" words")),
        ("[True, None, -2.5e3, 1_000, (1,), {'a': {}}]", json!([true, null, -2500.0, 1000, [1], {"a": {}}])),
        ("[false, null,]", json!([false, null])),
    ] {
        assert_eq!(python::value(python), Some(value), "{python}");
    }
    for wrong in ["", "'open", "[1", "{1: 2}", "f(1)", "nan", "1 2", "'\\ud83d'", &"[".repeat(10_000)] {
        assert_eq!(python::value(wrong), None, "{wrong:.20}");
    }
    assert_eq!(python::calls("f(1)"), None, "arguments have names");
    assert_eq!(python::calls("[a.b(), c-d(x = 1)]").unwrap().len(), 2);
}

#[test]
fn elements_have_the_types_that_the_schema_says() {
    let text = "<function=weather>\n<parameter=city>\n42\nand more\n</parameter>\n<parameter=near>\n{\"x\": true}\n</parameter>\n</function>";
    let calls = Body::Elements.read(text, &functions()).unwrap();
    assert_eq!(Json::Object(calls[0].arguments.clone()), json!({"city": "42\nand more", "near": {"x": true}}));
}

#[test]
fn the_template_tells_the_syntax_before_the_vocabulary() {
    let tokenizer =
        Tokenizer::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model/tokenizer.json")).unwrap();
    let of = |template: &str| CallSyntax::of(template, &tokenizer);
    assert_eq!(of("… <tool_call>\\n{{ tool_call }} …"), Some(hermes()));
    assert_eq!(of("<tool_call>\\n<function=' + name + '><parameter=").unwrap().body, Body::Elements);
    assert_eq!(of("{{ m.content }}"), None);
}

#[test]
fn tools_are_read_as_the_api_has_them() {
    let error = |tool: Json| ToolFunction::of(&tool).unwrap_err();
    assert!(error(json!({"type": "retrieval"})).contains("only functions"));
    assert!(error(json!({"type": "function", "function": {}})).contains("function.name"));
    assert!(error(json!({"type": "function", "function": {"name": "f", "parameters": 3}})).contains("\"f\""));
}

/// Random text under the grammar consists of calls only, for every syntax and seed, and its arguments fit the schema.
#[cfg(feature = "grammar")]
#[test]
fn random_text_under_the_grammar_is_a_call() {
    let tokenizer =
        Tokenizer::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model/tokenizer.json")).unwrap();
    let vocab_size = tokenizer.len() as u64;
    let grammars = Grammars::new(&tokenizer, vocab_size, &[0]).unwrap();
    let functions = functions();
    for syntax in &SYNTAXES {
        for (seed, several) in [(1, false), (2, true), (3, false), (4, true)] {
            let mut constraint = grammars.start(&syntax.grammar(&functions, several, &tokenizer)).unwrap();
            let mut sampler = Sampler::new(Sampling { temperature: 1.0, seed, ..Default::default() }, &[]);
            let mut bytes = Vec::new();
            while !constraint.is_finished() && bytes.len() < 4000 {
                let mut logits = vec![0.0; vocab_size as usize];
                // closing tokens are likelier, so that texts end
                logits[0] = 6.0;
                let written = String::from_utf8_lossy(&bytes);
                let closing = match syntax.body {
                    Body::Keys => "</arg_value>\n",
                    Body::Braces => QUOTE,
                    _ => "\n</parameter>\n",
                };
                let next = &closing[overlap(&written, closing)..];
                for (id, logit) in logits.iter_mut().enumerate() {
                    let token = tokenizer.token_bytes(id as u32);
                    if !token.is_empty() && next.as_bytes().starts_with(&token) {
                        *logit = if next.len() < closing.len() { 12.0 } else { 6.0 };
                    } else if !token.is_empty() && b"\"}".starts_with(&token) {
                        *logit = 6.0;
                    }
                }
                constraint.mask_logits(&mut logits).unwrap();
                let id = sampler.next(&logits);
                constraint.accept_token(id).unwrap();
                bytes.extend(tokenizer.token_bytes(id));
            }
            let written = String::from_utf8_lossy(&bytes).into_owned();
            let parts = read(syntax, &written, 5);
            let calls: Vec<&ToolCall> = parts
                .iter()
                .filter_map(|part| if let ToolTextPart::Call(call) = part { Some(call) } else { None })
                .collect();
            assert!(!calls.is_empty() && calls.len() == parts.len(), "{syntax:?}: {written}");
            assert!(several || calls.len() == 1, "{syntax:?}: {written}");
            for call in calls {
                let function = functions.iter().find(|function| function.name == call.name).unwrap();
                let arguments = Json::Object(call.arguments.clone());
                let free = matches!(syntax.body, Body::Elements | Body::Keys | Body::Braces);
                // a string between elements has no length limit while it is generated
                let valid = jsonschema::is_valid(&function.parameters, &arguments);
                assert!(
                    valid || (free && arguments["city"].is_string() && arguments["near"]["x"].is_boolean()),
                    "{written}"
                );
            }
        }
    }
}

proptest! {
    /// No text is lost or invented.
    #[test]
    fn text_without_marks_comes_out_whole(text in "[a-z<>{}\\[\\]\"=_ \n|/]{0,60}", size in 1_usize..9) {
        for syntax in &SYNTAXES {
            let parts = read(syntax, &text, size);
            let out: String = parts.iter().map(|part| match part { ToolTextPart::Text(text) => text.as_str(), _ => "" }).collect();
            prop_assert_eq!(&out, &text);
        }
    }

    /// A call's arguments survive JSON and Python.
    #[test]
    fn arguments_survive(city in any::<String>(), days in any::<i64>()) {
        let expected = call("weather", json!({"city": city, "days": days}));
        let body = json!({"name": "weather", "arguments": {"city": city, "days": days}});
        // pieces end where the JSON does, whatever its texts contain
        let whole = format!("<tool_call>{body}</tool_call>");
        prop_assert_eq!(read_pieces(hermes(), &whole, 6).0, std::slice::from_ref(&expected));
        if !city.contains("</tool_call>") {
            prop_assert_eq!(read(hermes(), &whole, 6), [expected.clone()]);
        }
        // JSON's strings are literals of Python
        let python = format!("<|tool_call_start|>[weather(city={}, days={days})]<|tool_call_end|>", Json::from(city.as_str()));
        if !city.contains("<|tool_call_end|>") {
            prop_assert_eq!(read(syntax("<|tool_call_start|>", |_| true), &python, 6), [expected]);
        }
    }
}

#[test]
fn arguments_come_as_they_are_generated() {
    let mistral = syntax("[TOOL_CALLS]", |body| matches!(body, Body::Json { .. }));
    let named = syntax("[TOOL_CALLS]", |body| *body == Body::Arguments);
    let (paris, now) =
        (call("weather", json!({"city": "</tool_call> {é\"", "near": {"x": true}})), call("now", json!({})));
    let weather = r#"{"city": "</tool_call> {é\"", "near": {"x": true}}"#;
    let object = format!(r#"{{"name": "weather", "arguments": {weather}}}"#);
    for (syntax, text) in [
        (
            hermes(),
            format!(
                "Hm. <tool_call>\n{object}\n</tool_call>\n<tool_call>{{\"name\":\"now\",\"arguments\":{{}}}}</tool_call>\n"
            ),
        ),
        (hermes(), format!("Hm.<tool_call>{object}\n{{\"name\": \"now\", \"arguments\": {{ }}}}</tool_call>")),
        // the second has no arguments, so it comes whole
        (hermes(), format!("Hm.<tool_call>{object}</tool_call><tool_call>{{\"name\": \"now\"}}</tool_call>")),
        (
            mistral,
            format!(
                r#"Hm.[TOOL_CALLS] [{}, "id": "abc{{"}}, {{"name": "now", "arguments": {{}}}}]"#,
                &object[..object.len() - 1]
            ),
        ),
        (named, format!("Hm.[TOOL_CALLS]weather[ARGS]{weather}[TOOL_CALLS]now[CALL_ID]1[ARGS] {{}}")),
    ] {
        for size in [1, 3, 8, 1000] {
            let (parts, count) = read_pieces(syntax, &text, size);
            assert_eq!(parts, [said("Hm."), paris.clone(), now.clone()], "{text} {size}");
            assert!(size > 1 || count >= weather.chars().count(), "{count} pieces of {text}");
        }
    }
    // an answer that may turn out to be no call, and one of a function that wasn't offered
    let other = "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>";
    let bare = format!("{object} is what I'd call");
    for size in [1, 5, 1000] {
        assert_eq!(read_pieces(hermes(), other, size).0, [said(other)]);
        assert_eq!(read_pieces(hermes(), &bare, size).0, [said(&bare)]);
        let cut = read_pieces(hermes(), "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"b", size);
        assert_eq!(cut.0, [said("cut: now {\"a\": \"b")]);
    }
}
