//! Manifests of `manifests/`, built into the binary with the published configurations of their models.

use super::error::{ManifestError, nearest};

/// Built-in manifest.
#[derive(Clone, Copy, Debug)]
pub struct Builtin {
    /// Name: the file's name without `.yaml`.
    pub name: &'static str,
    /// YAML text.
    pub text: &'static str,
    /// `config.json` of the model, as published.
    pub config: &'static str,
}

impl Builtin {
    /// Source that the manifest names.
    pub fn source(&self) -> &'static str {
        // a test compares this with the parsed manifest
        let line = self.text.lines().find_map(|line| line.strip_prefix("source:"));
        line.unwrap_or_default().trim()
    }

    /// Rules of the Neural Engine that advise against the manifest's default form (`# doubted: RULE, RULE`).
    pub fn doubted(&self) -> impl Iterator<Item = &'static str> {
        let line = self.text.lines().find_map(|line| line.strip_prefix("# doubted:"));
        line.unwrap_or_default().split(',').map(str::trim).filter(|rule| !rule.is_empty())
    }
}

macro_rules! builtin {
    ($($name:literal),* $(,)?) => {
        &[$(Builtin {
            name: $name,
            text: include_str!(concat!("manifests/", $name, ".yaml")),
            config: include_str!(concat!("manifests/configs/", $name, ".json")),
        }),*]
    };
}

const ALL: &[Builtin] = builtin![
    "all-minilm-l6-v2",
    "all-mpnet-base-v2",
    "bge-m3",
    "command-r7b",
    "demo",
    "demo-redact",
    "embeddinggemma-2",
    "embeddinggemma-300m",
    "ernie-4.5-0.3b",
    "exaone-4-1.2b",
    "falcon-h1-0.5b",
    "gemma-2-2b",
    "gemma-2b",
    "gemma-3-1b",
    "gemma-3-270m",
    "gemma-3-4b",
    "gemma-4-26b-a4b",
    "gemma-4-e2b",
    "gemma-4-e4b",
    "glm-4-9b",
    "gpt-oss-20b",
    "granite-3.1-1b-a400m",
    "granite-3.3-2b",
    "granite-4.0-h-tiny",
    "hy-mt-1.5-1.8b",
    "lfm2.5-1.2b",
    "lfm2.5-8b-a1b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "ministral-3-3b",
    "mistral-7b",
    "mistral-small-3.1-24b",
    "modernbert-embed-base",
    "nli-deberta-v3-xsmall",
    "olmo-3-7b",
    "olmoe-1b-7b",
    "phi-2",
    "phi4-mini",
    "privacy-filter",
    "pythia-410m",
    "qwen1.5-moe-a2.7b",
    "qwen2.5-0.5b",
    "qwen2.5-coder-0.5b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-30b-a3b",
    "qwen3-4b",
    "qwen3-embedding-0.6b",
    "qwen3-next-80b-a3b",
    "qwen3-vl-30b-a3b",
    "qwen3-vl-4b",
    "qwen3.5-0.8b",
    "qwen3.5-2b",
    "qwen3.5-35b-a3b",
    "qwen3.5-4b",
    "qwen3.5-9b",
    "seed-oss-36b",
    "smollm2-1.7b",
    "smollm3-3b",
    "stablelm-2-1.6b",
    "starcoder2-3b",
    "zaya1-8b",
];

/// All built-in manifests, sorted by name.
pub fn all() -> &'static [Builtin] {
    ALL
}

/// Names of all built-in manifests.
pub fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|b| b.name)
}

/// Finds a built-in manifest by name, file name or path: `phi4-mini`, `phi4-mini.yaml`, `manifests/phi4-mini.yaml`.
///
/// # Errors
/// [`ManifestError::NotFound`] with similar names.
pub fn find(name: &str) -> Result<&'static Builtin, ManifestError> {
    let stem = stem(name);
    let found = ALL.iter().find(|b| b.name == stem);
    found.ok_or_else(|| ManifestError::NotFound { name: name.to_owned(), like: similar(stem) })
}

/// Returns the first built-in manifest for the model at `source`.
pub fn for_source(source: &str) -> Option<&'static Builtin> {
    let source = source.strip_suffix("@main").unwrap_or(source);
    ALL.iter().find(|b| b.source() == source)
}

/// Returns the names that begin with `given`, ignoring punctuation (`phi-4`); otherwise the most similar name.
fn similar(given: &str) -> Vec<&'static str> {
    let plain = |name: &str| name.to_lowercase().replace(|c: char| !c.is_alphanumeric(), "");
    let given_plain = plain(given);
    let begin_so: Vec<_> =
        names().filter(|name| !given_plain.is_empty() && plain(name).starts_with(&given_plain)).collect();
    if begin_so.is_empty() { nearest(given, names()).into_iter().collect() } else { begin_so }
}

/// Returns the part of a path that can name a built-in manifest: without `.yaml`, and without a folder if that is
/// `manifests`.
fn stem(name: &str) -> &str {
    let name = name.strip_prefix("./").unwrap_or(name);
    let name = name.strip_prefix("manifests/").unwrap_or(name);
    name.strip_suffix(".yaml").or_else(|| name.strip_suffix(".yml")).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Manifest;

    #[test]
    fn the_table_holds_every_file_of_the_folder() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests");
        let files = |folder: &std::path::Path, end: &str| {
            let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = entries.filter_map(|name| Some(name.strip_suffix(end)?.to_owned())).collect();
            names.sort();
            names
        };
        assert_eq!(files(&folder, ".yaml"), names().collect::<Vec<_>>());
        assert_eq!(files(&folder.join("configs"), ".json"), names().collect::<Vec<_>>());
    }

    #[test]
    fn the_demos_have_the_configurations_of_their_models() {
        for b in all().iter().filter(|b| b.name.starts_with("demo")) {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(b.source());
            assert_eq!(b.config, std::fs::read_to_string(folder.join("config.json")).unwrap());
        }
    }

    #[test]
    fn each_is_a_manifest_that_names_its_source_and_family() {
        let validator = jsonschema::validator_for(&crate::schema()).unwrap();
        for b in all() {
            let manifest = Manifest::from_yaml(b.text, b.name, &[]).unwrap_or_else(|e| panic!("{}: {e}", b.name));
            assert_eq!(manifest.name.as_deref(), Some(b.name));
            assert_eq!(manifest.source.as_deref(), Some(b.source()));
            assert!(manifest.family.is_some(), "{}", b.name);
            let tree: serde_json::Value = serde_yaml::from_str(b.text).unwrap();
            assert!(validator.is_valid(&tree), "{}", b.name);
        }
    }

    #[test]
    fn paths_that_end_in_a_name_are_found() {
        for name in ["phi4-mini", "phi4-mini.yaml", "manifests/phi4-mini.yaml", "./manifests/phi4-mini.yaml"] {
            assert_eq!(find(name).unwrap().name, "phi4-mini", "{name}");
        }
        assert!(find("elsewhere/phi4-mini.yaml").is_err());
    }

    #[test]
    fn a_source_has_its_manifest() {
        assert_eq!(for_source("hf:Qwen/Qwen3-0.6B").unwrap().name, "qwen3-0.6b");
        assert_eq!(for_source("hf:Qwen/Qwen3-0.6B@main").unwrap().name, "qwen3-0.6b");
        assert!(for_source("hf:Qwen/Qwen3-0.6B@v2").is_none() && for_source("").is_none());
    }

    #[test]
    fn similar_names_are_suggested() {
        for (given, expected) in [
            ("phi4", &["phi4-mini"][..]),
            ("phi-4", &["phi4-mini"]),
            ("Qwen2.5", &["qwen2.5-0.5b", "qwen2.5-coder-0.5b"]),
            ("qwen25", &["qwen2.5-0.5b", "qwen2.5-coder-0.5b"]),
            ("phi4-mino", &["phi4-mini"]),
            ("something else", &[]),
            ("-", &[]),
        ] {
            assert_eq!(similar(given), expected, "{given}");
        }
    }
}
