//! Reading manifests: text, files, built-in names, `--set key=value`.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use anec_base::listing::{limited, quote};
use serde_json::Value as Json;
use serde_yaml::{MessageFormatter, RenderOptions, UserMessageFormatter};

use super::builtin;
use super::error::{ManifestError, nearest};
use super::{CalibrationText, Manifest, check};

/// Keys whose value is a choice between forms: an override replaces the other form.
const CHOICES: [&str; 1] = ["lengths"];

/// Maximum number of keys in the path of an override.
const MAX_DEPTH: usize = 16;

/// Maximum size of a manifest in bytes.
const MAX_BYTES: u64 = 1 << 20;

impl Manifest {
    /// Reads a manifest from a file, or the built-in one of that name if there is no such file. Applies the overrides,
    /// `key=value`, in order.
    ///
    /// # Errors
    /// If the file can't be read, or as [`Manifest::from_yaml`].
    pub fn open(name: &str, overrides: &[String]) -> Result<Manifest, ManifestError> {
        let path = Path::new(name);
        // a folder, such as the model's, may have the name of a built-in manifest
        let text = if path.is_dir() { Err(std::io::ErrorKind::NotFound.into()) } else { read(path) };
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

    /// Parses a manifest; `origin` names the text in errors.
    ///
    /// # Errors
    /// If the text isn't YAML, has unknown keys or values of a wrong type or range, or an override doesn't fit.
    pub fn from_yaml(text: &str, origin: &str, overrides: &[String]) -> Result<Manifest, ManifestError> {
        // an empty document (or one of comments only) gives the defaults
        let mut manifest = parse::<Option<Manifest>>(text, origin)?.unwrap_or_default();
        if !overrides.is_empty() || manifest.contract.is_some() {
            let mut tree = parse::<Option<Json>>(text, origin)?.unwrap_or_else(|| Json::Object(Default::default()));
            for given in overrides {
                apply(&mut tree, given)?;
                manifest = typed(&tree, given)?;
            }
            if let Some(contract) = manifest.contract {
                contract.complete(object(&mut tree), &manifest.context);
                manifest = typed(&tree, "contract")?;
            }
        }
        check::check(&manifest)?;
        Ok(manifest)
    }

    /// Formats the manifest as YAML, defaults included.
    pub fn to_yaml(&self) -> String {
        // all types can be represented in YAML
        serde_yaml::to_string(self).unwrap_or_default()
    }

    /// Copy of the manifest for publication: file names without the folders of this machine.
    pub fn portable(&self) -> Manifest {
        let mut manifest = self.clone();
        let own = |path: &Path| path.file_name().map_or_else(|| path.to_owned(), PathBuf::from);
        manifest.source = self.source.as_deref().map(|source| without_folders(source).to_owned());
        manifest.adapters.iter_mut().for_each(|adapter| adapter.path = own(&adapter.path));
        if let CalibrationText::File(text) = &mut manifest.calibration.text {
            *text = own(text);
        }
        manifest.golden = self.golden.as_deref().map(own);
        manifest
    }
}

/// Returns the name of a source, adapter or text without its folders. Hub names are kept whole.
pub fn without_folders(name: &str) -> &str {
    match name.starts_with("hf:") {
        true => name,
        false => Path::new(name).file_name().and_then(|own| own.to_str()).unwrap_or(name),
    }
}

/// Reads a text file of at most the size of a manifest; devices are endless.
fn read(path: &Path) -> std::io::Result<String> {
    let bytes = anec_base::input::read(path, MAX_BYTES).map_err(|error| error.error)?;
    String::from_utf8(bytes).map_err(|_| std::io::Error::new(std::io::ErrorKind::InvalidData, "it isn't UTF-8"))
}

/// JSON Schema of manifests, for editors.
pub fn schema() -> Json {
    schemars::schema_for!(Manifest).into()
}

fn parse<T: serde::de::DeserializeOwned>(text: &str, origin: &str) -> Result<T, ManifestError> {
    let mut options = RenderOptions::new(&PlainFormatter);
    options.source_name = Some(origin);
    serde_yaml::from_str(text).map_err(|e| ManifestError::Syntax {
        origin: origin.to_owned(),
        message: concise(&e.render_with_options(options)),
        suggestion: suggestion(&e),
    })
}

/// Returns a rendered error without its first word, and without the message below the line of the manifest, which is
/// above it already.
fn concise(rendered: &str) -> String {
    let mut lines = rendered.trim_start_matches("error: ").lines();
    let mut text = lines.next().unwrap_or_default().to_owned();
    for line in lines {
        let below = line.split_once("| ").is_some_and(|(_, rest)| rest.trim_start().starts_with('^'));
        let end = if below { line.rfind('^').map_or(line.len(), |at| line[..=at].len()) } else { line.len() };
        text.push('\n');
        text.push_str(&line[..end]);
    }
    limited(&text).into_owned()
}

/// Returns the key or value that the user may have meant.
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
    let value: Json = parse::<Option<Json>>(value, &format!("override {given}"))?.unwrap_or(Json::Null);
    let keys: Vec<&str> = path.trim().split('.').collect();
    let (last, parents) = keys.split_last().ok_or_else(wrong)?;
    // no valid path is this long, and trees are dropped recursively
    if keys.iter().any(|key| key.is_empty()) || keys.len() > MAX_DEPTH {
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

/// Returns the node as an object, replacing any other value.
fn object(node: &mut Json) -> &mut serde_json::Map<String, Json> {
    if !node.is_object() {
        *node = Json::Object(Default::default());
    }
    match node {
        Json::Object(map) => map,
        _ => unreachable!("it was made an object above"),
    }
}

/// Parses the tree as a manifest. Errors are due to the override, because the text was valid before it.
fn typed(tree: &Json, given: &str) -> Result<Manifest, ManifestError> {
    let text = serde_yaml::to_string(tree).unwrap_or_default();
    serde_yaml::from_str(&text).map_err(|e| ManifestError::Syntax {
        origin: format!("override {given}"),
        // line and column would refer to text that the user never saw
        message: without_location(&e),
        suggestion: suggestion(&e),
    })
}

/// Message of an error without location or snippet.
fn without_location(error: &serde_yaml::Error) -> String {
    match error.without_snippet() {
        serde_yaml::Error::SerdeInvalidType { unexpected, expected, .. }
        | serde_yaml::Error::SerdeInvalidValue { unexpected, expected, .. } => {
            format!("found {unexpected}, expected {expected}")
        }
        other => PlainFormatter.format_message(other).into_owned(),
    }
}

/// Formatter of parser errors, in YAML's words instead of Rust's.
struct PlainFormatter;

/// Phrases of the parser and their replacements.
const MESSAGES: [(&str, &str); 10] = [
    ("invalid u64", "expected a whole number that isn't negative"),
    ("invalid usize", "expected a whole number that isn't negative"),
    ("invalid u32", "expected a whole number that isn't negative"),
    ("invalid f64", "expected a number"),
    ("invalid f32", "expected a number"),
    ("invalid floating point", "expected a number"),
    ("a tuple of size 2", "two numbers, as in [1, 4]"),
    ("expected an array of length 2", "expected two numbers, as in [1, 4]"),
    ("expected mapping start", "expected keys and values, as in { key: value }"),
    ("expected sequence start", "expected a list, as in [1, 64]"),
];

impl MessageFormatter for PlainFormatter {
    fn format_message<'a>(&self, error: &'a serde_yaml::Error) -> Cow<'a, str> {
        match error.without_snippet() {
            serde_yaml::Error::Budget { .. } => "it is too large for a manifest, or nested too deep".into(),
            serde_yaml::Error::MultipleDocuments { .. } => "it has several documents, expected one".into(),
            serde_yaml::Error::DuplicateMappingKey { key: Some(key), .. } => {
                format!("`{}` is there twice", quote(key)).into()
            }
            serde_yaml::Error::SerdeUnknownField { field, expected, .. } => {
                format!("unknown key `{}`, expected one of {}", quote(field), expected.join(", ")).into()
            }
            serde_yaml::Error::SerdeUnknownVariant { variant, expected, .. } => {
                format!("unknown value `{}`, expected one of {}", quote(variant), expected.join(", ")).into()
            }
            serde_yaml::Error::DuplicateMappingKey { key: None, .. } => "a key is there twice".into(),
            _ => {
                let text = UserMessageFormatter.format_message(error);
                match MESSAGES.iter().find(|(technical, _)| text.contains(technical)) {
                    Some((technical, plain)) => text.replace(technical, plain).into(),
                    None => text,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Contexts, Granularity, HeadSplit, Int8Op, Lengths, NumberFormat, QuantPlan, Role, WeightFormat};
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
        let of = |role| (m.quant.of(role, None).weights, m.quant.of(role, None).granularity);
        assert_eq!(of(Role::LmHead), (WeightFormat::Int8, Granularity::PerChannel));
        assert_eq!(of(Role::MlpUp), (WeightFormat::Int8, Granularity::PerTensor));
        assert_eq!(m.quant.of(Role::Norm, None), NumberFormat::FP16);
        assert_eq!(m.shards.layers, Some(vec![[0, 2], [2, 5]]));
        assert_eq!(m.lm_head.split, HeadSplit::Pieces(3));
        assert_eq!(read("lm_head: { split: auto }", &[]).unwrap().lm_head.split, HeadSplit::Auto);
        assert_eq!(read("lm_head: { split: none }", &[]).unwrap().lm_head.split, HeadSplit::None);
    }

    #[test]
    fn every_number_format_has_a_name() {
        let text = "
quant:
  weights: palette4
  granularity: { group: 16 }
  row_scale: true
  overrides:
    mlp_down: { weights: int4, granularity: { block: 32 }, row_scale: false }
    lm_head: { weights: int8, granularity: per_channel, row_scale: false, op: affine }
";
        let m = read(text, &[]).unwrap();
        let formats = [Role::AttentionQkv, Role::MlpDown, Role::LmHead].map(|role| m.quant.of(role, None).to_string());
        assert_eq!(formats, ["palette4 per group of 16 with row scales", "int4 per block of 32", "int8 per channel"]);
        assert_eq!(m.quant.of(Role::LmHead, None).op, Int8Op::Affine);
        assert_eq!(read(&m.to_yaml(), &[]).unwrap(), m);
        let set = read("", &["quant.weights=palette6", "quant.granularity={group: 8}"]).unwrap();
        assert_eq!(set.quant.of(Role::Expert, None).granularity, Granularity::Group(8));
    }

    #[test]
    fn a_layer_can_have_formats_of_its_own() {
        let text = "
quant:
  granularity: per_channel
  overrides: { mlp_down: { weights: palette6, granularity: per_tensor } }
  layers:
    - { range: [0, 4], overrides: { mlp_down: { row_scale: true }, mlp_up: { weights: none } } }
    - { range: [3, 4], overrides: { mlp_down: { weights: palette4 } } }
";
        let m = read(text, &[]).unwrap();
        let down = |layer| m.quant.of(Role::MlpDown, layer).to_string();
        assert_eq!(
            [down(None), down(Some(0)), down(Some(3)), down(Some(4))],
            [
                "palette6 per tensor",
                "palette6 per tensor with row scales",
                "palette4 per tensor with row scales",
                "palette6 per tensor"
            ]
        );
        assert_eq!(m.quant.of(Role::MlpUp, Some(1)), NumberFormat::FP16);
        assert_eq!(m.quant.of(Role::LmHead, None).to_string(), "int8 per channel");
        assert_eq!(read(&m.to_yaml(), &[]).unwrap(), m);
        let refused = |layers: &str| read("", &[&format!("quant.layers=[{layers}]")]).unwrap_err().to_string();
        assert!(refused("{range: [2, 2], overrides: {}}").contains("expected the first layer"));
        assert!(refused("{range: [0, 2], overrides: {norm: {weights: int8}}}").contains("never quantized"));
        let palette = refused("{range: [0, 2], overrides: {mlp_up: {weights: palette6, granularity: per_channel}}}");
        assert!(palette.contains("quant.layers.overrides.mlp_up.granularity"), "{palette}");
    }

    #[test]
    fn queries_keys_and_values_have_formats_of_their_own() {
        let text = "
quant:
  granularity: per_channel
  overrides: { attention_qkv: { weights: none }, attention_v: { weights: int8 } }
  layers:
    - { range: [2, 3], overrides: { attention_qkv: { weights: palette6, granularity: per_tensor } } }
    - { range: [3, 4], overrides: { attention_k: { weights: int4 } } }
";
        let m = read(text, &[]).unwrap();
        let of = |layer| {
            [Role::AttentionQ, Role::AttentionK, Role::AttentionV].map(|role| m.quant.of(role, layer).to_string())
        };
        assert_eq!(of(None), ["fp16", "fp16", "int8 per channel"]);
        // a later entry for all of them wins
        assert_eq!(of(Some(2)), ["palette6 per tensor"; 3]);
        assert_eq!(of(Some(3)), ["fp16", "int4 per channel", "int8 per channel"]);
        assert_eq!(m.quant.of(Role::AttentionOutput, None).to_string(), "int8 per channel");
        assert_eq!(read(&m.to_yaml(), &[]).unwrap(), m);
    }

    #[test]
    fn a_plan_is_one_budget() {
        let plan = |text: &str| read("", &[&format!("quant.plan={text}")]);
        assert_eq!(plan("{bits: 5}").unwrap().quant.plan, Some(QuantPlan::Bits(5.0)));
        assert_eq!(plan("{max_mb: 400}").unwrap().quant.plan, Some(QuantPlan::MaxMb(400.0)));
        assert_eq!(plan("{kl: 0.01}").unwrap().quant.plan, Some(QuantPlan::Kl(0.01)));
        assert!(plan("{kl: 0}").unwrap_err().to_string().contains("expected nats, such as 0.01"));
        assert!(plan("{bits: 5, kl: 0.01}").is_err() && plan("{size: 5}").is_err());
    }

    #[test]
    fn an_unknown_key_names_its_place_and_its_neighbour() {
        let error = read("context: 64\nquant:\n  granularty: per_channel\n", &[]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("test.yaml") && text.contains("granularty") && text.contains('3'), "{text}");
        assert_eq!(text.matches("row_scale").count(), 1, "known keys are listed once: {text}");
        assert_eq!(error.help().as_deref(), Some("did you mean `granularity`?"));
        assert_eq!(error.fault().exit_code(), 2);
        let long = "x".repeat(100_000);
        for text in [format!("{long}: 1"), format!("quant: {{ weights: {long} }}"), format!("context: [{long}]")] {
            let error = read(&text, &[]).unwrap_err().to_string();
            assert!(error.len() < 5000, "{} bytes", error.len());
        }
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
        assert_eq!(m.quant.of(Role::LmHead, None).weights, WeightFormat::None);
        assert_eq!(m.context, Contexts::One(256));
    }

    #[test]
    fn an_override_of_a_choice_takes_the_place_of_the_other() {
        let m = read("lengths: { range: [1, 8] }", &["lengths.fixed=[1, 4]"]).unwrap();
        assert_eq!(m.lengths, Lengths::Fixed(vec![1, 4]));
    }

    #[test]
    fn messages_use_the_words_of_yaml() {
        for (text, sets, said) in [
            ("context: 64\ncontext: 65", &[][..], "`context` is there twice"),
            ("lengths: { fixed: [1, -4] }", &[], "whole number"),
            ("lengths: { range: [1] }", &[], "two numbers"),
            ("shards: { max_mb: many }", &[], "a number"),
            ("quant: int8", &[], "keys and values"),
            ("name: a\n---\nname: b", &[], "several documents"),
            ("", &["lengths.range=[1]"], "two numbers"),
            ("", &["quant=int8"], "keys and values"),
        ] {
            let error = read(text, sets).unwrap_err().to_string();
            assert!(error.contains(said), "{text:?} {sets:?}: {error}");
            for word in ["u64", "tuple", "mapping", "Options", "from_str", "Policy", "breach"] {
                assert!(!error.contains(word), "{text:?} {sets:?}: {error}");
            }
        }
        let many = format!("acknowledge: [{}]", "a, ".repeat(300_000));
        let error = read(&many, &[]).unwrap_err().to_string();
        assert!(error.contains("too large"), "{}", &error[..200.min(error.len())]);
    }

    #[test]
    fn overrides_of_any_depth_are_errors() {
        let deep = format!("{}b=1", "a.".repeat(20_000));
        assert!(matches!(read("", &[&deep]).unwrap_err(), ManifestError::Override { .. }));
    }

    #[test]
    fn endless_files_are_refused() {
        if Path::new("/dev/zero").exists() {
            assert!(matches!(Manifest::open("/dev/zero", &[]).unwrap_err(), ManifestError::Unreadable { .. }));
        }
    }

    #[test]
    fn a_wrong_override_is_named_with_a_suggestion() {
        let error = read("", &["quant.granularty=per_channel"]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("override quant.granularty=per_channel"), "{text}");
        assert!(text.contains("unknown key `granularty`"), "{text}");
        assert_eq!(error.help().as_deref(), Some("did you mean `granularity`?"));
        assert!(matches!(read("", &["context"]).unwrap_err(), ManifestError::Override { .. }));
        assert!(matches!(read("", &["a..b=1"]).unwrap_err(), ManifestError::Override { .. }));
        let error = read("", &["context=many"]).unwrap_err().to_string();
        assert!(error.contains("override context=many"), "{error}");
    }

    #[test]
    fn unknown_names_get_a_suggestion() {
        let error = Manifest::open("phi4-mino", &[]).unwrap_err();
        assert_eq!(error.help().as_deref(), Some("did you mean `phi4-mini`?"));
        let error = Manifest::open("/nowhere/at/all.yaml", &[]).unwrap_err();
        assert_eq!(error.help().as_deref(), Some("`builtin::names` lists the built-in ones"));
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
