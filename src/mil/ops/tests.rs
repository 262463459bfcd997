//! Comparison of the catalogue with coremltools' registry: parameters, constness and opsets.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::Opset;
use crate::catalogue::{lookup, table};

#[derive(Deserialize)]
struct Registry {
    operators: BTreeMap<String, Vec<Form>>,
}

#[derive(Deserialize)]
struct Form {
    opset: String,
    parameters: Vec<Parameter>,
}

#[derive(Deserialize)]
struct Parameter {
    name: String,
    #[serde(rename = "const")]
    constant: bool,
    optional: bool,
    variadic: bool,
}

fn opset(name: &str) -> Option<Opset> {
    Opset::ALL.into_iter().find(|o| o.target() == name)
}

#[test]
fn rows_agree_with_coremltools() {
    let text = include_str!("../../../tests/oracle/pymil_ops.json");
    let registry: Registry = serde_json::from_str(text).expect("the dump of coremltools' registry");
    let mut checked = 0;
    for spec in table() {
        // const carries its value as an attribute; pymil has another name for the write of a state
        let Some(forms) = registry.operators.get(spec.name).filter(|_| spec.name != "const") else {
            assert!(matches!(spec.name, "const" | "write_state"), "coremltools has no `{}`", spec.name);
            continue;
        };
        for form in forms {
            let Some(opset) = opset(&form.opset) else { continue };
            let Some(ours) = lookup(spec.name, opset) else {
                panic!("`{}` is in {} of coremltools, not in ours", spec.name, form.opset);
            };
            let names =
                |list: Vec<&str>| list.into_iter().map(str::to_owned).collect::<std::collections::BTreeSet<_>>();
            let (own, theirs) = (
                names(ours.parameters.iter().map(|p| p.name).collect()),
                // functions of Python, which are blocks in packages
                names(form.parameters.iter().map(|p| p.name.as_str()).filter(|name| !name.starts_with('_')).collect()),
            );
            assert_eq!(own, theirs, "parameters of `{}` in {}", spec.name, form.opset);
            for theirs in form.parameters.iter().filter(|theirs| !theirs.name.starts_with('_')) {
                let own = ours.parameter(&theirs.name).expect("same names");
                let at = format!("`{}` of `{}` in {}", theirs.name, spec.name, form.opset);
                assert_eq!(own.constant, theirs.constant, "constness of {at}");
                assert_eq!(own.variadic, theirs.variadic, "list of {at}");
                assert_eq!(own.optional || own.default.is_some(), theirs.optional, "presence of {at}");
                checked += 1;
            }
        }
        let first = forms.iter().filter_map(|form| opset(&form.opset)).min();
        assert!(first.is_some_and(|first| first <= spec.since), "`{}` is older in ours", spec.name);
    }
    assert!(checked > 500, "{checked}");
}
