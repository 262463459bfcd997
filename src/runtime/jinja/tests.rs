use std::path::Path;
use std::time::Instant;

use super::*;
use serde_json::json;

/// Texts of Jinja2 with transformers' settings: `tests/fixtures/jinja/make.py` writes them. A file that
/// `ANEC_CHAT_TEMPLATES` names is compared as well.
#[test]
fn texts_equal_jinja2s() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/jinja/golden.jsonl");
    let more = std::env::var_os("ANEC_CHAT_TEMPLATES").map(Into::into);
    for path in [Some(own), more].into_iter().flatten() {
        let (mut variables, mut count) = (Json::Null, 0);
        for line in std::fs::read_to_string(&path).unwrap().lines() {
            let mut case: Json = serde_json::from_str(line).unwrap();
            if let Some(own) = case.get_mut("variables") {
                variables = own.take();
            }
            let source = case["source"].as_str().unwrap();
            let found = Template::new(source).and_then(|template| template.render(&variables));
            match (case["text"].as_str(), &found) {
                (Some(text), Ok(found)) => assert_eq!(found, text, "{source}"),
                (None, Err(_)) => {}
                (expected, found) => panic!("{source}\n{variables}\nexpected {expected:?}, found {found:?}"),
            }
            count += 1;
        }
        assert!(count > 90, "{path:?} has {count} cases");
    }
}

/// Checks that each source is refused for its problem, in time.
fn refused(sources: &[String], problem: &str) {
    refused_within(sources, problem, Budget::of);
}

/// As [`refused`], with less work than a rendering may take, because unoptimised tests are slow.
fn refused_soon(sources: &[String], problem: &str) {
    refused_within(sources, problem, |_| Budget::new(STEPS / 16, BUDGET / 16));
}

fn refused_within(sources: &[String], problem: &str, budget: fn(&Json) -> Budget) {
    let variables = json!({"messages": [{"role": "user", "content": "Hi"}]});
    for source in sources {
        let start = Instant::now();
        let shown: String = source.chars().take(200).collect();
        let rendered = Template::new(source).and_then(|template| template.render_within(&variables, budget));
        let error = rendered.expect_err(&shown).to_string();
        assert!(error.contains(problem), "{shown}: {error}");
        // a loaded machine takes longer than a quiet one
        assert!(start.elapsed().as_secs() < 60, "{shown}: {error}: {:?}", start.elapsed());
    }
}

/// A value that is computed from itself, over and over, and a use of it.
fn grown(first: &str, next: &str, then: &str) -> String {
    format!("{{% set ns = namespace(v={first}) %}}{{% for i in range(70) %}}{next}{{% endfor %}}{then}")
}

fn grows(first: &str, next: &str) -> String {
    grown(first, &format!("{{% set ns.v = {next} %}}"), "")
}

#[test]
fn values_have_a_budget() {
    let string =
        |body: &str| format!("{{% set s = 'x' * 1250000 %}}{{% for i in range(100000) %}}{body}{{% endfor %}}");
    let doubled = [
        "ns.v ~ ns.v",
        "ns.v + ns.v",
        "ns.v * 2",
        "[ns.v, ns.v]|join",
        "''.join([ns.v, ns.v])",
        "ns.v|replace('x', 'xx')",
        "ns.v.replace('x', 'xx')",
        "'%s%s'|format(ns.v, ns.v)",
        "'%s%s' % (ns.v, ns.v)",
        "'{0}{0}'.format(ns.v)",
        "(ns.v ~ '\\nx')|indent(ns.v|length)",
    ];
    let widths = [
        "'x' * 100000000000",
        "'x'|indent(1000000000, true)",
        "'x'|indent(width=1000000000)",
        "'%999999999d'|format(1)",
        "'%*d' % (999999999, 1)",
        "'{:>999999999}'.format(1)",
        "'x'.center(999999999)",
        "'x'.zfill(999999999999)",
        "[1]|batch(1000000000, 'x')",
        "[1]|slice(1000000000)",
        "('x' * 5600000)|list",
        "('x' * 5600000).split('x')",
        "(['x' * 1000] * 60000)|join",
        "('\\t' * 1000000).expandtabs(999)",
        "[1]|tojson(indent=1000000000)",
    ];
    let read = [
        "s|upper",
        "s[-1]",
        "'y' in s",
        "s|length",
        "messages|map(attribute=s)|list",
        "s.strip()",
        "s == s ~ ''",
        "s.count('y')",
        "s|tojson",
        "s|wordcount",
        "s is upper",
        "s|urlencode",
        "s|int",
        "s.isalnum()",
        "strftime_now(s)",
    ];
    let mut sources: Vec<String> = doubled.iter().map(|next| grows("'x'", next)).collect();
    sources.extend(["['x']", "('x',)"].map(|first| grows(first, "ns.v + ns.v")));
    sources.extend(widths.iter().map(|value| format!("{{{{ {value} }}}}")));
    sources.extend(read.iter().map(|value| string(&format!("{{% set x = {value} %}}"))));
    sources.push(string("{% for c in s %}{% break %}{% endfor %}"));
    sources.push("{% set x = 'x' * 5600000 %}".repeat(1000));
    sources.push(format!("{{{{ {} }}}}", ["'x' * 5600000"; 1000].join(" ~ ")));
    sources.push("{% for a in range(10000) %}".repeat(3) + &"{% endfor %}".repeat(3));
    refused_soon(&sources, "it computes values of more than");
    refused(
        &["{% set v = 'x' * 2000000 %}{% for a in range(100000) %}{% set x = v + v %}{% endfor %}".into()],
        "it computes values of more than 268436",
    );
    refused(&["{% set s = 'x' * 1000000 %}{% for a in range(100) %}{{ s }}{% endfor %}".into()], "it writes more than");
    refused(&["x".repeat(200_000)], "the maximum is");
}

#[test]
fn work_and_nesting_are_limited() {
    let twice = |then: &str| grown("['x']", "{% set ns.v = [ns.v, ns.v] %}", then);
    let walks = ["{{ ns.v }}", "{{ ns.v ~ '' }}", "{{ ns.v|tojson }}", "{{ ns.v|join }}", "{{ '%s' % (ns.v,) }}"];
    refused_soon(&walks.map(twice), "steps");
    refused(&[twice(walks[0])], "it takes more than 10000000 steps");
    let compared = ["{{ ns.v == [ns.v[0], [ns.v[1][0], ns.v[1][1]]] }}", "{{ ns.v|sort }}"];
    refused_soon(&compared.map(twice), "it computes values of more than");
    let deep = ["[ns.v]", "(ns.v, 1)", "{'a': ns.v}", "dict(a=ns.v)", "[ns.v]|reverse"];
    let deep = deep.map(|next| {
        format!("{{% set ns = namespace(v=[1]) %}}{{% for i in range(30000) %}}{{% set ns.v = {next} %}}{{% endfor %}}")
    });
    refused(&deep, "nested more than");
    refused(&["{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into()], "recursion limit");
    refused(&["{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".into()], "recursion limit");
    let chains = ["not ".repeat(30_000) + "1", format!("1{}", "+1".repeat(60_000)), "-".repeat(120_000) + "1"];
    refused(&chains.map(|chain| format!("{{{{ {chain} }}}}")), "a tag of more than");
    refused(&[format!("{{{{ {}1{} }}}}", "(".repeat(1000), ")".repeat(1000))], "nested more than");
    refused(&["{% if true %}".repeat(5000)], "nested more than");
    refused(&["{% set ns = namespace() %}{% set ns.v = ns %}{{ ns }}".into()], "has no text");
}

/// Numbers and places at their ends, where arithmetic could panic.
#[test]
fn ends_of_numbers_are_refused() {
    let least = "(-9223372036854775807 - 1)";
    for value in [
        "9223372036854775807 + 1",
        "LEAST - 1",
        "LEAST // -1",
        "LEAST % -1",
        "-LEAST",
        "LEAST|abs",
        "10 ** 100",
        "1 // 0",
        "5 % 0.0",
        "1|round(400)",
        "'abc'[::LEAST]",
        "'abc'[LEAST]",
        "[1][LEAST]",
        "range(5)[LEAST]",
        "range(9223372036854775807, LEAST, -1)|list",
        "range(LEAST, 9223372036854775807, 9223372036854775807)|list",
        "LEAST in range(LEAST, 9)",
        "'%c' % 1114112",
        "'{0[}'.format(1)",
        "'x'.expandtabs(LEAST)",
        "'x'.find('x', LEAST)",
        "'x'.ljust(LEAST)",
        "'%*d' % (LEAST, 1)",
        "'%.*f' % (LEAST, 1)",
        "messages|batch(0)",
        "cycler()",
    ] {
        // whatever comes of it, it is no panic
        let template = Template::new(&format!("{{{{ {} }}}}", value.replace("LEAST", least))).unwrap();
        let error = template.render(&json!({"messages": []})).err().map(|error| error.to_string());
        assert_ne!(error.as_deref(), Some("it can't be rendered"), "{value}");
    }
}
