//! What templates of strangers may cost: each that asks for more is refused, in time, and limits change nothing else.

use super::*;

/// What a rendering is refused for that makes too much of values.
const BYTES: &str = "it computes values of more than";
/// What one is refused for whose values are nested too deeply.
const DEEP: &str = "nested more than";

fn render(source: &str) -> Result<String, RuntimeError> {
    ChatTemplate::new(source, "", "")?.render(&Chat::new(vec![Message::new("user", "Hi")]))
}

/// Checks that each source is refused for its problem.
fn refused<const N: usize>(sources: [(String, &str); N]) {
    for (source, problem) in sources {
        let start = std::time::Instant::now();
        let shown: String = source.chars().take(200).collect();
        let error = render(&source).expect_err(&shown).to_string();
        assert!(error.contains(problem), "{shown}: {error}");
        // a loaded machine takes longer than a quiet one
        assert!(start.elapsed().as_secs() < 60, "{shown}: {error}: {:?}", start.elapsed());
    }
}

/// Three loops, one in another.
fn loops() -> String {
    "{% for a in range(10000) %}".repeat(3)
}

/// A value that is computed from itself, over and over, and what is done with it.
fn grown(first: &str, next: &str, then: &str) -> String {
    format!("{{% set ns = namespace(v={first}) %}}{{% for i in range(70) %}}{next}{{% endfor %}}{then}")
}

fn grows(first: &str, next: &str) -> String {
    grown(first, &format!("{{% set ns.v = {next} %}}"), "")
}

/// A list of itself twice, over and over, and what is done with it.
fn nested(then: &str) -> String {
    grown("['x']", "{% set ns.v = [ns.v, ns.v] %}", then)
}

#[test]
fn work_has_limits() {
    let macros = "{% macro m0() %}x{% endmacro %}".to_owned()
        + &(1..40)
            .map(|i| format!("{{% macro m{i}() %}}{{{{ m{0}() }}}}{{{{ m{0}() }}}}{{% endmacro %}}", i - 1))
            .collect::<String>()
        + "{{ m39() }}";
    refused([
        (format!("{}{{% set b = a %}}{}", loops(), "{% endfor %}".repeat(3)), "out of fuel"),
        (macros, "out of fuel"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into(), "recursion limit"),
        ("{% set s = 'x' * 1000000 %}{% for a in range(100) %}{{ s }}{% endfor %}".into(), "writes more than"),
        ("{% set s = 'x' * 1000000 %}{% for a in range(100000) %}{{ s }}{% endfor %}".into(), BYTES),
        ("{{ 'x' * 100000000000 }}".into(), BYTES),
        ("x".repeat(200_000), "bytes, and at most"),
    ]);
}

#[test]
fn strings_have_limits() {
    let string = "{% set s = 'x' * 20000000 %}{% for i in range(100000) %}";
    refused([
        (grows("'x'", "ns.v ~ ns.v"), BYTES),
        (grows("'x'", "ns.v + ns.v"), BYTES),
        (grows("'x'", "ns.v * 2"), BYTES),
        (grows("'x'", "[ns.v, ns.v]|join"), BYTES),
        (grows("'x'", "''.join([ns.v, ns.v])"), BYTES),
        (grows("'x'", "ns.v|replace('x', 'xx')"), BYTES),
        (grows("'x'", "ns.v.replace('x', 'xx')"), BYTES),
        (grows("'x'", "'%s%s'|format(ns.v, ns.v)"), BYTES),
        (grows("'x'", "'{0}{0}'.format(ns.v)"), BYTES),
        (grows("'x'", "(ns.v ~ '\\nx')|indent(ns.v|length)"), BYTES),
        (grown("'x'", "{% set s %}{{ ns.v }}{{ ns.v }}{% endset %}{% set ns.v = s %}", ""), BYTES),
        (
            format!("{{% set s %}}{}{}{}{{% endset %}}", &loops(), "raw text ".repeat(1000), "{% endfor %}".repeat(3)),
            BYTES,
        ),
        ("{{ 'x'|indent(1000000000, true) }}".into(), BYTES),
        ("{{ 'x'|indent(width=1000000000) }}".into(), BYTES),
        ("{{ '%999999999d'|format(1) }}".into(), BYTES),
        ("{{ '%*d'|format(999999999, 1) }}".into(), BYTES),
        ("{{ '%.999999999f'|format(1.5) }}".into(), BYTES),
        ("{{ '{:>999999999}'.format(1) }}".into(), BYTES),
        (format!("{{{{ {} }}}}", ["'x' * 90000000"; 1000].join(" ~ ")), BYTES),
        ("{% set x = 'x' * 90000000 %}".repeat(1000), BYTES),
        (format!("{string}{{% set x = s|upper %}}{{% endfor %}}"), BYTES),
        (format!("{string}{{% set x = s[-1] %}}{{% endfor %}}"), BYTES),
        (format!("{string}{{% set x = 'y' in s %}}{{% endfor %}}"), BYTES),
        (format!("{string}{{% for c in s %}}{{% break %}}{{% endfor %}}{{% endfor %}}"), BYTES),
        (format!("{string}{{% set x = s|length %}}{{% endfor %}}"), BYTES),
        (format!("{string}{{% set x = s is iterable %}}{{% endfor %}}"), BYTES),
        (format!("{string}{{% set x = {{s: 1}} %}}{{% endfor %}}"), BYTES),
        (format!("{string}{{% set x = {{'a': 1}}[s] %}}{{% endfor %}}"), BYTES),
        (format!("{string}{{% set x = messages|map(attribute=s) %}}{{% endfor %}}"), BYTES),
        ("{{ ('%s' * 100000)|format('x' * 100000) }}".into(), BYTES),
    ]);
}

#[test]
fn lists_have_limits() {
    refused([
        (grows("['x']", "ns.v + ns.v"), BYTES),
        (grows("['x']", "ns.v * 2"), BYTES),
        (grows("('x',)", "ns.v + ns.v"), BYTES),
        (grows("['x']", "ns.v|chain(ns.v)"), BYTES),
        ("{{ [1]|batch(1000000000, 'x') }}".into(), BYTES),
        ("{{ [1]|slice(1000000000) }}".into(), BYTES),
        ("{{ ('x' * 90000000)|list }}".into(), BYTES),
        ("{{ ('x' * 90000000).split('') }}".into(), BYTES),
        ("{{ (['x' * 1000] * 1000000)|join }}".into(), BYTES),
        ("{{ (['x' * 1000] * 1000000)|sum(start='') }}".into(), BYTES),
        ("{% include ['x' * 10000] * 1000000 %}".into(), BYTES),
    ]);
}

/// Values that are small but for those who walk through them.
#[test]
fn walks_through_values_have_limits() {
    refused([
        (nested("{{ ns.v }}"), BYTES),
        (nested("{{ ns.v ~ '' }}"), BYTES),
        (nested("{{ ns.v == [ns.v[0], [ns.v[1][0], ns.v[1][1]]] }}"), BYTES),
        (nested("{{ ns.v < ns.v[0] }}"), BYTES),
        (nested("{{ ns.v in [ns.v[0]] }}"), BYTES),
        (nested("{{ ns.v is in [ns.v[0]] }}"), BYTES),
        (nested("{{ {ns.v: 1} }}"), BYTES),
        (nested("{{ {'a': 1}[ns.v] }}"), BYTES),
        (nested("{{ {'a': 1}.get(ns.v) }}"), BYTES),
        (nested("{{ ns.v|tojson }}"), BYTES),
        (nested("{{ ns.v|pprint }}"), BYTES),
        (nested("{{ ns.v|string }}"), BYTES),
        (nested("{{ ns.v|sort }}"), BYTES),
        (nested("{{ ns.v|unique }}"), BYTES),
        (nested("{{ ns.v|join }}"), BYTES),
        (nested("{{ [1]|select(ns.v) }}"), BYTES),
        (nested("{{ '%s'|format(ns.v) }}"), BYTES),
        (nested("{{ 'x'|replace(ns.v, 'y') }}"), BYTES),
        (nested("{{ debug(ns.v) }}"), BYTES),
        (nested("{{ raise_exception(ns.v) }}"), BYTES),
        (nested("{{ strftime_now(ns.v) }}"), BYTES),
        (nested("{{ ns.v.count(ns.v[0]) }}"), BYTES),
        (nested("{% for i in [1] %}{{ loop.changed(ns.v) }}{% endfor %}"), BYTES),
        (nested("{% autoescape 'json' %}{{ ns.v }}{% endautoescape %}"), BYTES),
        (grown("{'x': 1}", "{% set ns.v = {'a': ns.v, 'b': ns.v} %}", "{{ ns.v }}"), BYTES),
        (grown("1", "{% set ns.v = namespace(a=ns.v, b=ns.v) %}", "{{ ns.v }}"), BYTES),
    ]);
}

#[test]
fn values_that_hold_themselves_are_refused() {
    refused([
        (grown("1", "{% set ns.v = ns %}", "{{ ns }}"), DEEP),
        (grown("1", "{% set ns.v = [ns] %}", "{{ ns.v|tojson }}"), DEEP),
        (grown("1", "{% set ns.v = {'a': ns} %}", "{{ ns.v == {'a': namespace(v=ns.v)} }}"), DEEP),
        (
            "{% set ns = namespace(v=1) %}{% for i in range(200) %}{% set ns.v = [ns.v] %}{% endfor %}{{ ns.v }}"
                .into(),
            DEEP,
        ),
    ]);
}

#[test]
fn what_the_engine_panics_at_is_refused() {
    refused([
        ("{% for i in [1] %}{{ loop.cycle() }}{% endfor %}".into(), "nothing to cycle through"),
        ("{{ range(9223372036854775807, -9223372036854775808, -1) }}".into(), ""),
        ("{{ 'abc'[::-9223372036854775808] }}".into(), ""),
        (format!("{{{{ 1{} }}}}", "+1".repeat(60_000)), "a tag of more than"),
    ]);
}

/// Chains that a parser without a stack for them would die of.
#[test]
fn chains_of_operators_need_no_stack() {
    for source in [
        format!("{{{{ {} true }}}}", "not ".repeat(30_000)),
        format!("{{{{ 1{} }}}}", "+1".repeat(60_000)),
        format!("{{{{ {}1 }}}}", "-".repeat(120_000)),
        format!("{{{{ {}1{} }}}}", "(".repeat(60_000), ")".repeat(60_000)),
    ] {
        assert!(render(&source).map_or_else(|error| !error.to_string().is_empty(), |text| !text.is_empty()));
    }
}

/// Values that would be dropped or walked through by recursion.
#[test]
fn chains_of_values_need_no_stack() {
    let render = |source: &str| ChatTemplate::new(source, "", "")?.render(&Chat::default());
    let chain = |next: &str| {
        format!(
            "{{% set ns = namespace(v=[1]) %}}{{% for i in range(30000) %}}{next}{{% endfor %}}{{% for x in ns.v %}}{{% endfor %}}ok"
        )
    };
    for next in [
        "{% set ns.v = [ns.v] %}",
        "{% set ns.v = (ns.v, 1) %}",
        "{% set ns.v = {'a': ns.v} %}",
        "{% set ns.v = namespace(a=ns.v) %}",
        "{% set ns.v = dict(a=ns.v) %}",
        "{% set ns.v = ns.v[0:] %}",
        "{% set ns.v = ns.v|reverse %}",
        "{% set ns.v = ns.v + [] %}",
        "{% set ns.v = ns.v|chain([]) %}",
        "{% set ns.v = none.x|default(a=ns.v) %}",
        "{% for x in [1] %}{% set y = loop.changed(ns.v) %}{% set ns.v = loop %}{% endfor %}",
        "{% for x in [1] %}{% set y = loop.changed(loop) %}{% endfor %}",
    ] {
        let rendered = render(&chain(next));
        assert!(rendered.as_deref().is_ok_and(|text| text == "ok") || next.contains("none.x"), "{next}: {rendered:?}");
    }
}

/// A template as the engine alone renders it.
fn unlimited(source: &str, chat: &Chat) -> Result<String, RuntimeError> {
    let mut environment = Environment::new();
    environment.set_debug(false);
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|error| failure(&error))?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", raise);
    environment.add_function("strftime_now", strftime);
    environment.add_template_owned(NAME, without_generation_marks(source)).map_err(|error| failure(&error))?;
    let template = environment.get_template(NAME).map_err(|error| failure(&error))?;
    let tools = ToolsPlace::of(source, &template.undeclared_variables(false));
    let mut context = serde_json::json!({
        "documents": null, "add_generation_prompt": true, "bos_token": "<s>", "eos_token": "</s>"
    });
    if let (Json::Object(context), Json::Object(chat)) = (&mut context, chat.to_json(tools)) {
        context.extend(chat);
    }
    template.render(Value::from(Serde(&context))).map_err(|error| failure(&error))
}

#[test]
fn limits_change_nothing_about_what_is_written() {
    let call = serde_json::json!({
        "role": "assistant",
        "content": null,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{\"a\": [1.5, \"ü\"]}"}}],
    });
    let mut chat = Chat::new(vec![
        Message::new("system", "Be <b>kind</b>.\n\n  "),
        Message::new("user", " Hi\nthere, größte 🙂 "),
        serde_json::from_value(call).unwrap(),
        Message::new("tool", "{\"b\": \"c\"}"),
        Message::new("assistant", "<think>\nwell\n</think>\n\nYes."),
        Message::new("user", "and?"),
    ]);
    chat.tools.push(serde_json::json!({"type": "function", "function": {"name": "f", "parameters": {}}}));
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/families");
    let real = ["privacy_filter-default", "llama-llama3", "qwen2-tokenizer"].map(|family| {
        let config = read_json(&families.join(family).join("tokenizer_config.json")).unwrap();
        config["chat_template"].as_str().unwrap().to_owned()
    });
    let written = include_str!("templates.txt").split("\n===\n").map(str::to_owned);
    let same = |source: &str| {
        let limited = ChatTemplate::new(source, "<s>", "</s>").and_then(|template| template.render(&chat));
        let (limited, unlimited) =
            (limited.map_err(|e| e.to_string()), unlimited(source, &chat).map_err(|e| e.to_string()));
        assert_eq!(limited, unlimited, "{source}");
    };
    for source in written.chain(real) {
        same(&source);
        // what fails hides what comes after it: each expression by itself, too
        for (start, _) in source.match_indices("{{") {
            if let Some(end) = source[start..].find("}}") {
                same(&source[start..start + end + 2]);
            }
        }
    }
}
