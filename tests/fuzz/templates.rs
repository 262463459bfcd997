//! Chat templates of Jinja's tokens.

use super::mutate::Random;

const TOKENS: [&str; 60] = [
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ m.content }}",
    "{{ m['role'] }}",
    "{% if tools %}",
    "{% elif x %}",
    "{% else %}",
    "{% endif %}",
    "{% set x = ",
    "%}",
    "{{ ",
    " }}",
    "{% macro f(a, b=1) %}",
    "{% endmacro %}",
    "{{ f(1) }}",
    "{% raw %}",
    "{% endraw %}",
    "{# note #}",
    "{%- ",
    " -%}",
    "messages",
    "messages[-1]",
    "messages[::-1]",
    "[1, 2, 3]",
    "{'a': 1}",
    "'text'",
    "9223372036854775807",
    "1e308",
    "0",
    "-1",
    " + ",
    " * ",
    " ** ",
    " // ",
    " % ",
    " ~ ",
    " in ",
    " is defined",
    " is string",
    " not ",
    " and ",
    " == ",
    " | tojson(indent=4)",
    " | trim",
    " | length",
    " | join(',')",
    " | list",
    " | map(attribute='role')",
    " | selectattr('role', 'equalto', 'user')",
    " | items",
    " | replace('a', 'bb')",
    " | int",
    " | batch(3)",
    ".split('a')",
    ".strip()",
    ".items()",
    "range(1000000)",
    "namespace(a=1)",
    "raise_exception('no')",
    "strftime_now('%Y')",
];

/// Returns a sequence of tokens, sometimes with its blocks closed.
pub fn template(random: &mut Random) -> String {
    let tokens: Vec<&str> = (0..1 + random.below(25)).map(|_| *random.pick(&TOKENS)).collect();
    let mut text = tokens.concat();
    if random.chance(0.5) {
        // an expression is likelier to be valid by itself
        let parts: Vec<&str> = (0..1 + random.below(6)).map(|_| *random.pick(&TOKENS[20..])).collect();
        text = format!("{{% for m in messages %}}{{{{ {} }}}}{{% endfor %}}", parts.concat());
    }
    text
}
