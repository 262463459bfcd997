//! From text, files, built-in names and `--set key=value` to a checked [`Manifest`].

use std::path::Path;

use serde_json::Value as Json;

use super::builtin;
use super::error::{ManifestError, nearest};
use super::{Manifest, check};

/// Keys whose value is a choice between forms: setting one form takes the place of another.
const CHOICES: [&str; 1] = ["lengths"];

impl Manifest {
    /// Reads a manifest from a file, or from the binary if no file has that name; `overrides` are `key=value` pairs
    /// in the order in which they apply.
    ///
    /// # Errors
    /// An unreadable file, anything [`Manifest::from_yaml`] refuses.
    pub fn open(name: &str, overrides: &[String]) -> Result<Manifest, ManifestError> {
        let path = Path::new(name);
        // a folder can have a built-in manifest's name: the model itself, say
        let text = if path.is_dir() { Err(std::io::ErrorKind::NotFound.into()) } else { std::fs::read_to_string(path) };
        let (text, origin) = match text {
            Ok(text) => (text, name.to_owned()),
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
                let found = builtin::find(name)?;
                (found.text.to_owned(), format!("{} (built-in)", found.name))
            }
            Err(source) => return Err(ManifestError::Unreadable { path: path.to_owned(), source }),
        };
        let mut manifest = Manifest::from_yaml(&text, &origin, overrides)?;
        if manifest.name.is_none() {
            manifest.name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
            check::check(&manifest)?;
        }
        Ok(manifest)
    }

    /// Reads a manifest from text; `origin` names it in errors.
    ///
    /// # Errors
    /// Text that isn't YAML, unknown keys, values of the wrong type or out of range, overrides that don't fit.
    pub fn from_yaml(text: &str, origin: &str, overrides: &[String]) -> Result<Manifest, ManifestError> {
        // an empty document (or one of comments only) is a manifest of defaults
        let mut manifest = parse::<Option<Manifest>>(text, origin)?.unwrap_or_default();
        if !overrides.is_empty() {
            let mut tree = parse::<Option<Json>>(text, origin)?.unwrap_or_else(|| Json::Object(Default::default()));
            for given in overrides {
                apply(&mut tree, given)?;
                manifest = typed(&tree, given)?;
            }
        }
        check::check(&manifest)?;
        Ok(manifest)
    }

    /// The manifest as YAML, keys at their default included.
    pub fn to_yaml(&self) -> String {
        // the types hold nothing that YAML can't
        serde_yaml::to_string(self).unwrap_or_default()
    }
}

/// JSON Schema of manifests, for editors.
pub fn schema() -> Json {
    schemars::schema_for!(Manifest).into()
}

fn parse<T: serde::de::DeserializeOwned>(text: &str, origin: &str) -> Result<T, ManifestError> {
    serde_yaml::from_str(text).map_err(|e| ManifestError::Syntax {
        origin: origin.to_owned(),
        message: e.to_string().trim_start_matches("error: ").to_owned(),
        suggestion: suggestion(&e),
    })
}

/// What the user may have meant by an unknown key or word.
fn suggestion(error: &serde_yaml::Error) -> Option<String> {
    match error.without_snippet() {
        serde_yaml::Error::SerdeUnknownField { field: given, expected, .. }
        | serde_yaml::Error::SerdeUnknownVariant { variant: given, expected, .. } => {
            nearest(given, expected.iter().copied()).map(str::to_owned)
        }
        _ => None,
    }
}

/// Sets one key of the tree.
fn apply(tree: &mut Json, given: &str) -> Result<(), ManifestError> {
    let wrong = || ManifestError::Override { given: given.to_owned() };
    let (path, value) = given.split_once('=').ok_or_else(wrong)?;
    let value: Json = parse::<Option<Json>>(value, &format!("--set {given}"))?.unwrap_or(Json::Null);
    let keys: Vec<&str> = path.trim().split('.').collect();
    let (last, parents) = keys.split_last().ok_or_else(wrong)?;
    if keys.iter().any(|key| key.is_empty()) {
        return Err(wrong());
    }
    let mut node = tree;
    for key in parents {
        node = object(node).entry(key.to_string()).or_insert(Json::Null);
        if CHOICES.contains(key) {
            *node = Json::Null;
        }
    }
    object(node).insert(last.to_string(), value);
    Ok(())
}

/// The node as an object; what else it was is replaced.
fn object(node: &mut Json) -> &mut serde_json::Map<String, Json> {
    if !node.is_object() {
        *node = Json::Object(Default::default());
    }
    match node {
        Json::Object(map) => map,
        _ => unreachable!("it was made an object above"),
    }
}

/// The tree as a manifest. A mistake in it is the override's, because the text was a manifest before it.
fn typed(tree: &Json, given: &str) -> Result<Manifest, ManifestError> {
    let text = serde_yaml::to_string(tree).unwrap_or_default();
    serde_yaml::from_str(&text).map_err(|e| ManifestError::Syntax {
        origin: format!("--set {given}"),
        // the line and column would be those of a text that the user never saw
        message: plain(&e),
        suggestion: suggestion(&e),
    })
}

/// An error's message without location or snippet.
fn plain(error: &serde_yaml::Error) -> String {
    let list = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match error.without_snippet() {
        serde_yaml::Error::SerdeUnknownField { field, expected, .. } => {
            format!("unknown key `{field}`, expected one of {}", list(expected))
        }
        serde_yaml::Error::SerdeUnknownVariant { variant, expected, .. } => {
            format!("unknown value `{variant}`, expected one of {}", list(expected))
        }
        serde_yaml::Error::SerdeInvalidType { unexpected, expected, .. }
        | serde_yaml::Error::SerdeInvalidValue { unexpected, expected, .. } => {
            format!("found {unexpected}, expected {expected}")
        }
        serde_yaml::Error::Message { msg, .. } => msg.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Contexts, Granularity, HeadSplit, Lengths, Role, WeightFormat};
    use anec_base::Diagnostic;

    fn read(text: &str, sets: &[&str]) -> Result<Manifest, ManifestError> {
        Manifest::from_yaml(text, "test.yaml", &sets.iter().map(|s| s.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn an_empty_manifest_has_every_default() {
        assert_eq!(read("", &[]).unwrap(), Manifest::default());
        assert_eq!(read("# nothing but a remark\n", &[]).unwrap(), Manifest::default());
    }

    #[test]
    fn every_default_survives_being_written_and_read() {
        let manifest = Manifest::default();
        assert_eq!(read(&manifest.to_yaml(), &[]).unwrap(), manifest);
    }

    #[test]
    fn keys_become_their_types() {
        let text = "
name: tiny
context: [512, 128]
lengths: { fixed: [1, 64] }
quant: { weights: int8, overrides: { lm_head: { granularity: per_channel } } }
shards: { layers: [[0, 2], [2, 5]] }
lm_head: { split: 3 }
";
        let m = read(text, &[]).unwrap();
        assert_eq!(m.context.all(), [128, 512]);
        assert_eq!(m.lengths, Lengths::Fixed(vec![1, 64]));
        assert_eq!(m.quant.of(Role::LmHead), (WeightFormat::Int8, Granularity::PerChannel));
        assert_eq!(m.quant.of(Role::MlpUp), (WeightFormat::Int8, Granularity::PerTensor));
        assert_eq!(m.quant.of(Role::Norm).0, WeightFormat::None);
        assert_eq!(m.shards.layers, Some(vec![[0, 2], [2, 5]]));
        assert_eq!(m.lm_head.split, HeadSplit::Pieces(3));
        assert_eq!(read("lm_head: { split: auto }", &[]).unwrap().lm_head.split, HeadSplit::Auto);
    }

    #[test]
    fn an_unknown_key_names_its_place_and_its_neighbour() {
        let error = read("context: 64\nquant:\n  granularty: per_channel\n", &[]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("test.yaml") && text.contains("granularty") && text.contains('3'), "{text}");
        assert_eq!(error.help().as_deref(), Some("did you mean `granularity`?"));
        assert_eq!(error.fault().exit_code(), 2);
    }

    #[test]
    fn an_unknown_word_names_its_neighbour() {
        let error = read("quant: { granularity: per_chanel }", &[]).unwrap_err();
        assert_eq!(error.help().as_deref(), Some("did you mean `per_channel`?"));
    }

    #[test]
    fn overrides_apply_in_order_and_make_their_parents() {
        let m = read("context: 64", &["quant.overrides.lm_head.weights=none", "context=128", "context=256"]);
        let m = m.unwrap();
        assert_eq!(m.quant.of(Role::LmHead).0, WeightFormat::None);
        assert_eq!(m.context, Contexts::One(256));
    }

    #[test]
    fn an_override_of_a_choice_takes_the_place_of_the_other() {
        let m = read("lengths: { range: [1, 8] }", &["lengths.fixed=[1, 4]"]).unwrap();
        assert_eq!(m.lengths, Lengths::Fixed(vec![1, 4]));
    }

    #[test]
    fn a_wrong_override_is_named_with_a_suggestion() {
        let error = read("", &["quant.granularty=per_channel"]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("--set quant.granularty=per_channel"), "{text}");
        assert!(text.contains("unknown key `granularty`"), "{text}");
        assert_eq!(error.help().as_deref(), Some("did you mean `granularity`?"));
        assert!(matches!(read("", &["context"]).unwrap_err(), ManifestError::Override { .. }));
        assert!(matches!(read("", &["a..b=1"]).unwrap_err(), ManifestError::Override { .. }));
        let error = read("", &["context=many"]).unwrap_err().to_string();
        assert!(error.contains("--set context=many"), "{error}");
    }

    #[test]
    fn what_is_neither_a_file_nor_built_in_gets_a_suggestion() {
        let error = Manifest::open("phi4-mino", &[]).unwrap_err();
        assert_eq!(error.help().as_deref(), Some("did you mean `phi4-mini`?"));
        let error = Manifest::open("/nowhere/at/all.yaml", &[]).unwrap_err();
        assert_eq!(error.help().as_deref(), Some("`anec manifests` lists the built-in ones"));
    }

    #[test]
    fn a_name_comes_from_the_file() {
        assert_eq!(Manifest::open("qwen3-4b.yaml", &[]).unwrap().name.as_deref(), Some("qwen3-4b"));
    }

    #[test]
    fn the_schema_accepts_what_is_accepted_and_refuses_unknown_keys() {
        let validator = jsonschema::validator_for(&schema()).unwrap();
        assert!(validator.is_valid(&serde_json::to_value(Manifest::default()).unwrap()));
        assert!(validator.is_valid(&serde_json::json!({"lm_head": {"split": 4}, "lengths": {"fixed": [1, 64]}})));
        assert!(!validator.is_valid(&serde_json::json!({"contxt": 5})));
        assert!(!validator.is_valid(&serde_json::json!({"lm_head": {"split": "half"}})));
    }
}
