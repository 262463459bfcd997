//! Configuration of sentence-transformers: `modules.json` lists the modules after the model, each with a folder of its
//! own; other files say how texts are prepared. A GGUF file has a key for the pooling and tensors for the projections.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec_base::path_inside;
use anec_bundle::TextPreparation;
use serde_json::Value as Json;

use super::error::{Result, SourceError};
use super::file::map;
use super::file::read_json;
use super::gguf::GgufMetadata;
use super::safetensors;
use super::tensor::SourceTensor;

/// Steps after a model's hidden states: pooling, projections, normalization.
#[derive(Clone, Debug)]
pub struct SentenceTransformers {
    /// Pooling of hidden states.
    pub pooling: PoolingMode,
    /// Projections of the pooled state, in order.
    pub dense: Vec<Dense>,
    /// Whether the vector is divided by its Euclidean length.
    pub normalize: bool,
    /// Preparation of texts.
    pub texts: TextPreparation,
}

/// Tokens whose logits at the end of a prompt score a pair of texts, as a module of decoders that rerank names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitScore {
    /// Token whose logit counts for the pair.
    pub positive: u64,
    /// Token whose logit counts against it, if there is one.
    pub negative: Option<u64>,
}

/// Pooling of hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolingMode {
    /// Mean over all tokens.
    Mean,
    /// State of the first token.
    Cls,
    /// State of the last token.
    Last,
}

/// Projection: `activation(W x + b)`.
#[derive(Clone, Debug)]
pub struct Dense {
    /// `[out, in]`
    pub weight: SourceTensor,
    /// `[out]`
    pub bias: Option<SourceTensor>,
    /// Whether the activation is tanh; otherwise there is none.
    pub tanh: bool,
}

/// Names of the projections in GGUF files, in order.
pub const GGUF_DENSE: [&str; 2] = ["dense_2", "dense_3"];

/// Value of GGUF's key `pooling_type` for a head that scores whole texts.
pub const GGUF_RANK: u64 = 4;

/// Advice for modules that aren't supported.
const WITHOUT: &str = "to convert the model without what sentence-transformers adds, take `modules.json` away";

/// File with the list of modules.
const MODULES: &str = "modules.json";

/// File with prompts.
const PROMPTS: &str = "config_sentence_transformers.json";

/// Files with the settings of the first module, the tokenizer's; the first that is there counts.
const TOKENIZING: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

/// File with the limit of texts if no other has it.
const TOKENIZER: &str = "tokenizer_config.json";

/// Files of modules that have a folder, in the folders that sentence-transformers creates.
const OF_MODULES: [&str; 8] = [
    "1_LogitScore/config.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "3_Dense/config.json",
    "3_Dense/model.safetensors",
    "4_Dense/config.json",
    "4_Dense/model.safetensors",
];

/// Returns the files of a model beside those of transformers.
pub fn files() -> impl Iterator<Item = &'static str> {
    [MODULES, PROMPTS].into_iter().chain(TOKENIZING).chain(OF_MODULES)
}

impl SentenceTransformers {
    /// Reads the modules of `folder`: those after a pooling module, or the tokens that score pairs.
    ///
    /// # Errors
    /// Returns an error if a file can't be read or a setting isn't supported.
    pub(super) fn read(folder: &Path) -> Result<(Option<Self>, Option<LogitScore>)> {
        let list = folder.join(MODULES);
        if !list.exists() {
            return Ok((None, None));
        }
        let modules = read_json(&list)?;
        let wrong = |problem: String| SourceError::file(&list, problem).advise(WITHOUT);
        let modules = modules.as_array().ok_or_else(|| wrong("it isn't a list of modules".into()))?;
        let (mut pooling, mut dense, mut normalize, mut score) = (None, Vec::new(), false, None);
        let mut texts = TextPreparation::default();
        for (index, module) in modules.iter().enumerate() {
            let kind = module["type"].as_str().unwrap_or_default();
            let place = module["path"].as_str().unwrap_or_default();
            // a path out of the folder would be read with the user's rights
            if !place.is_empty() && path_inside(place.trim_end_matches('/')).is_none() {
                return Err(wrong(format!("module {index} is at `{place}`, outside of the folder")));
            }
            let place = folder.join(place);
            match (kind.rsplit('.').next().unwrap_or_default(), &pooling, normalize) {
                ("Transformer", None, false) if index == 0 => texts = preparation(folder, &place)?,
                ("LogitScore", None, false) if index == 1 && modules.len() == 2 => {
                    score = Some(LogitScore::read(&place)?)
                }
                ("Pooling", None, false) if dense.is_empty() => {
                    let (mode, skips_prompt) = pooling_of(&place)?;
                    (pooling, texts.skips_prompt) = (Some(mode), skips_prompt);
                }
                ("Dense", Some(_), false) => dense.push(Dense::read(&place)?),
                ("Normalize", Some(_), false) => normalize = true,
                _ => {
                    return Err(wrong(format!(
                        "module {index} is `{kind}`; expected Transformer, Pooling, Dense …, Normalize, in this order"
                    )));
                }
            }
        }
        Ok((pooling.map(|pooling| SentenceTransformers { pooling, dense, normalize, texts }), score))
    }
}

impl LogitScore {
    fn read(folder: &Path) -> Result<Self> {
        let (path, config) = config(folder)?;
        let token = |key: &str| setting(&path, &config, key, "the id of a token", Json::as_u64);
        let missing = || SourceError::key(&path, "true_token_id", "expected the id of a token").advise(WITHOUT);
        Ok(LogitScore { positive: token("true_token_id")?.ok_or_else(missing)?, negative: token("false_token_id")? })
    }
}

/// Reads the prompts of a model, and the settings of its tokenizer from the folder of the first module.
fn preparation(folder: &Path, first: &Path) -> Result<TextPreparation> {
    let mut texts = TextPreparation::default();
    if let Some(path) = TOKENIZING.map(|name| first.join(name)).into_iter().find(|path| path.exists()) {
        let config = read_json(&path)?;
        texts.lowercase = setting(&path, &config, "do_lower_case", "true or false", Json::as_bool)?.unwrap_or(false);
        texts.max_tokens = setting(&path, &config, "max_seq_length", "a number of tokens", Json::as_u64)?;
    }
    let tokenizer = first.join(TOKENIZER);
    if texts.max_tokens.is_none() && tokenizer.exists() {
        // transformers writes 1e30 where there is no limit
        let config = read_json(&tokenizer)?;
        texts.max_tokens = config["model_max_length"].as_u64();
    }
    let path = folder.join(PROMPTS);
    if path.exists() {
        let config = read_json(&path)?;
        let strings = |value: &Json| -> Option<BTreeMap<String, String>> {
            let text = |(name, text): (&String, &Json)| Some((name.clone(), text.as_str()?.to_owned()));
            value.as_object()?.iter().map(text).collect()
        };
        texts.prompts = setting(&path, &config, "prompts", "an object of texts", strings)?.unwrap_or_default();
        let name = |value: &Json| value.as_str().map(str::to_owned);
        texts.default_prompt = setting(&path, &config, "default_prompt_name", "the name of a prompt", name)?;
        if let Some(name) = texts.default_prompt.as_ref().filter(|name| !texts.prompts.contains_key(*name)) {
            let problem = format!("it is `{name}`, which `prompts` doesn't have");
            return Err(SourceError::key(&path, "default_prompt_name", problem).advise(WITHOUT));
        }
        let positive = |value: &Json| value.as_u64().filter(|number| *number > 0);
        texts.dimensions = setting(&path, &config, "truncate_dim", "a number of dimensions", positive)?;
    }
    Ok(texts)
}

/// Returns a setting that is there and isn't null.
fn setting<T>(
    path: &Path,
    config: &Json,
    key: &str,
    expected: &str,
    read: impl Fn(&Json) -> Option<T>,
) -> Result<Option<T>> {
    match &config[key] {
        Json::Null => Ok(None),
        value => match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(SourceError::key(path, key, format!("expected {expected}")).advise(WITHOUT)),
        },
    }
}

impl SentenceTransformers {
    /// Returns the pooling and projections of a GGUF file, if it has any. Vectors are normalized: no key says so, but
    /// all programs for such files do it.
    ///
    /// # Errors
    /// Returns an error if the pooling isn't supported, or a projection differs from the sizes in the metadata.
    pub(super) fn of_gguf<'t>(
        metadata: &GgufMetadata,
        tensor: impl Fn(&str) -> Option<&'t SourceTensor>,
    ) -> Result<Option<Self>> {
        let Some(architecture) = metadata.str("general.architecture")? else { return Ok(None) };
        let key = format!("{architecture}.pooling_type");
        let pooling = match metadata.u64(&key)? {
            // no pooling, or a scoring head
            None | Some(0 | GGUF_RANK) => return Ok(None),
            Some(1) => PoolingMode::Mean,
            Some(2) => PoolingMode::Cls,
            Some(3) => PoolingMode::Last,
            Some(other) => {
                let problem =
                    format!("the value is {other}, expected 0 (none), 1 (mean), 2 (cls), 3 (last) or 4 (rank)");
                return Err(SourceError::key(metadata.path(), &key, problem));
            }
        };
        let mut dense = Vec::new();
        for name in GGUF_DENSE {
            let Some(weight) = tensor(&format!("{name}.weight")) else { continue };
            for (kind, found) in ["out", "in"].into_iter().zip(weight.shape()) {
                let key = format!("{architecture}.{name}_feat_{kind}");
                if let Some(size) = metadata.u64(&key)?.filter(|size| size != found) {
                    let problem = format!("the value is {size}, but {name}.weight has {found}");
                    return Err(SourceError::key(metadata.path(), &key, problem));
                }
            }
            if weight.shape().len() != 2 {
                let problem = format!("its shape is {:?}, expected that of a matrix", weight.shape());
                return Err(SourceError::tensor(metadata.path(), weight.name(), problem));
            }
            dense.push(Dense { weight: weight.clone(), bias: None, tanh: false });
        }
        Ok(Some(SentenceTransformers { pooling, dense, normalize: true, texts: TextPreparation::default() }))
    }
}

fn config(folder: &Path) -> Result<(PathBuf, Json)> {
    let path = folder.join("config.json");
    let json = read_json(&path)?;
    Ok((path, json))
}

/// Returns the pooling mode of a configuration, given as a word or as switches, and whether it leaves prompts out.
fn pooling_of(folder: &Path) -> Result<(PoolingMode, bool)> {
    let (path, config) = config(folder)?;
    let skips_prompt = setting(&path, &config, "include_prompt", "true or false", Json::as_bool)? == Some(false);
    let switches = [
        ("mean", "pooling_mode_mean_tokens"),
        ("cls", "pooling_mode_cls_token"),
        ("lasttoken", "pooling_mode_lasttoken"),
        ("max", "pooling_mode_max_tokens"),
        ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens"),
        ("weightedmean", "pooling_mode_weightedmean_tokens"),
    ];
    let on: Vec<&str> = match config["pooling_mode"].as_str() {
        Some(word) => vec![word],
        None => switches.iter().filter(|(_, key)| config[*key] == true).map(|(word, _)| *word).collect(),
    };
    match on.as_slice() {
        ["mean"] => Ok((PoolingMode::Mean, skips_prompt)),
        ["cls"] => Ok((PoolingMode::Cls, skips_prompt)),
        ["lasttoken"] => Ok((PoolingMode::Last, skips_prompt)),
        found => {
            let problem = format!("it is {found:?}; expected one of mean, cls, lasttoken");
            Err(SourceError::key(&path, "pooling_mode", problem).advise(WITHOUT))
        }
    }
}

impl Dense {
    fn read(folder: &Path) -> Result<Self> {
        let (path, config) = config(folder)?;
        let tanh = match config["activation_function"].as_str().unwrap_or("torch.nn.modules.activation.Tanh") {
            "torch.nn.modules.linear.Identity" => false,
            "torch.nn.modules.activation.Tanh" => true,
            other => {
                let problem = format!("it is `{other}`; expected Identity or Tanh");
                return Err(SourceError::key(&path, "activation_function", problem).advise(WITHOUT));
            }
        };
        let file = folder.join(safetensors::SINGLE);
        if !file.exists() {
            return Err(SourceError::file(&file, "it isn't there; its weights are read from safetensors only"));
        }
        let mut tensors = safetensors::tensors(&Arc::new(map(&file)?))?;
        let mut take = |name: &str| {
            let index = tensors.iter().position(|tensor| tensor.name() == name)?;
            Some(tensors.swap_remove(index))
        };
        let weight = take("linear.weight").ok_or_else(|| SourceError::file(&file, "it has no `linear.weight`"))?;
        let bias = take("linear.bias");
        let sizes = ["out_features", "in_features"].map(|key| config[key].as_u64().unwrap_or_default());
        if weight.shape() != sizes {
            let problem = format!("its shape is {:?}, but config.json says {sizes:?}", weight.shape());
            return Err(SourceError::tensor(&file, "linear.weight", problem));
        }
        if let Some(bias) = bias.as_ref().filter(|bias| bias.shape() != &sizes[..1]) {
            let problem = format!("its shape is {:?}, but config.json says {:?}", bias.shape(), &sizes[..1]);
            return Err(SourceError::tensor(&file, "linear.bias", problem));
        }
        if config["bias"].as_bool().unwrap_or(true) != bias.is_some() {
            return Err(SourceError::key(&path, "bias", "it doesn't agree with the tensors"));
        }
        match tensors.first() {
            Some(tensor) => Err(SourceError::tensor(&file, tensor.name(), "it is no part of a projection")),
            None => Ok(Dense { weight, bias, tanh }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn folder(files: &[(&str, Json)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, json) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, json.to_string()).unwrap();
        }
        folder
    }

    fn modules(list: &[(&str, &str)]) -> Json {
        let module =
            |(kind, path): &(&str, &str)| json!({"type": format!("sentence_transformers.models.{kind}"), "path": path});
        list.iter().map(module).collect()
    }

    #[test]
    fn modules_are_read_in_their_order() {
        let list = modules(&[("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]);
        let switches = json!({"pooling_mode_cls_token": false, "pooling_mode_lasttoken": true, "include_prompt": true});
        let room = folder(&[("modules.json", list.clone()), ("1_Pooling/config.json", switches)]);
        let read = SentenceTransformers::read(room.path()).unwrap().0.unwrap();
        assert_eq!((read.pooling, read.dense.len(), read.normalize), (PoolingMode::Last, 0, true));
        let room = folder(&[("modules.json", list), ("1_Pooling/config.json", json!({"pooling_mode": "mean"}))]);
        let read = SentenceTransformers::read(room.path()).unwrap().0.unwrap();
        assert_eq!(read.pooling, PoolingMode::Mean);
        assert!(SentenceTransformers::read(folder(&[]).path()).unwrap().0.is_none());
    }

    #[test]
    fn tokens_that_score_pairs_are_read() {
        let list = json!([
            {"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""},
            {"type": "sentence_transformers.cross_encoder.modules.LogitScore", "path": "1_LogitScore"},
        ]);
        let read = |config: Json| {
            let room = folder(&[("modules.json", list.clone()), ("1_LogitScore/config.json", config)]);
            SentenceTransformers::read(room.path()).map(|(modules, score)| (modules.is_none(), score))
        };
        let tokens = json!({"true_token_id": 9693, "false_token_id": 2152, "module_input_name": "causal_logits"});
        let both = LogitScore { positive: 9693, negative: Some(2152) };
        assert_eq!(read(tokens).unwrap(), (true, Some(both)));
        let alone = read(json!({"true_token_id": 7, "false_token_id": null})).unwrap();
        assert_eq!(alone, (true, Some(LogitScore { positive: 7, negative: None })));
        for wrong in [json!({}), json!({"true_token_id": "yes"})] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.contains("true_token_id") && error.contains("expected the id of a token"), "{error}");
        }
    }

    #[test]
    fn unsupported_modules_are_named() {
        let pooling = json!({"pooling_mode_mean_tokens": true});
        let refused = |list: &[(&str, &str)], pooling: &Json| {
            let room = folder(&[("modules.json", modules(list)), ("1_Pooling/config.json", pooling.clone())]);
            SentenceTransformers::read(room.path()).unwrap_err().to_string()
        };
        let ends = |error: String, end: &str| assert!(error.ends_with(end), "{error}");
        let order = "in this order";
        ends(refused(&[("Transformer", ""), ("Pooling", "1_Pooling"), ("LayerNorm", "2_LayerNorm")], &pooling), order);
        ends(refused(&[("Pooling", "1_Pooling"), ("Transformer", "")], &pooling), order);
        ends(refused(&[("Transformer", ""), ("Pooling", "../1_Pooling")], &pooling), "outside of the folder");
        let max = json!({"pooling_mode_max_tokens": true});
        ends(
            refused(&[("Transformer", ""), ("Pooling", "1_Pooling")], &max),
            "[\"max\"]; expected one of mean, cls, lasttoken",
        );
    }

    #[test]
    fn settings_of_texts_have_their_types() {
        let refused = |file: &str, config: Json| {
            let list = modules(&[("Transformer", ""), ("Pooling", "1_Pooling")]);
            let pooling = json!({"pooling_mode": "mean"});
            let room = folder(&[("modules.json", list), ("1_Pooling/config.json", pooling), (file, config)]);
            SentenceTransformers::read(room.path()).unwrap_err().to_string()
        };
        for (file, config, key) in [
            ("config_sentence_transformers.json", json!({"prompts": ["query: "]}), "prompts"),
            ("config_sentence_transformers.json", json!({"prompts": {"query": 1}}), "prompts"),
            (
                "config_sentence_transformers.json",
                json!({"default_prompt_name": "query"}),
                "which `prompts` doesn't have",
            ),
            ("config_sentence_transformers.json", json!({"truncate_dim": 0}), "truncate_dim"),
            ("sentence_bert_config.json", json!({"max_seq_length": -1}), "max_seq_length"),
            ("sentence_roberta_config.json", json!({"do_lower_case": "yes"}), "do_lower_case"),
            ("1_Pooling/config.json", json!({"pooling_mode": "mean", "include_prompt": 1}), "include_prompt"),
        ] {
            let error = refused(file, config);
            assert!(error.contains(key) && error.contains(file), "{error}");
        }
    }
}
