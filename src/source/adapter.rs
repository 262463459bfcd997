//! Low-rank adapters (LoRA, arXiv:2106.09685) as PEFT writes them, merged into the weights of a source:
//! `W' = W + s (lora_alpha / r) B A`, or `/ sqrt(r)` for rank-stabilised ones (arXiv:2312.03732).
//!
//! The sum is an expression over both: its rows are computed when they are read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use regex::Regex;
use serde_json::{Map, Value as Json};

use super::error::{Result, SourceError};
use super::file::read_json;
use super::file::{SourceFile, map};
use super::ledger::nearest;
use super::safetensors;
use super::tensor::SourceTensor;
use super::weight::SourceWeight;
use super::{Source, SourceKind};

/// File of the configuration.
const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Prefix that PEFT puts before the names of a model's modules.
const PREFIX: &str = "base_model.model.";

/// Configuration keys that are read, or don't affect a trained adapter. Any other key must be empty or off.
const KNOWN: &[&str] = &[
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
];

/// Advice for adapters that aren't merged here.
const MERGE: &str = "merge it into its model with PEFT (`merge_and_unload`), and convert the merged model";

/// Adapter read from a folder.
#[derive(Debug)]
pub struct Adapter {
    folder: PathBuf,
    files: [PathBuf; 2],
    /// Low-rank updates, by the name of their weight.
    sums: BTreeMap<String, LowRank>,
    /// Weights that replace the model's.
    whole: BTreeMap<String, SourceTensor>,
}

/// `scale * up down`
#[derive(Debug)]
struct LowRank {
    /// `[rows, rank]`
    up: SourceWeight,
    /// `[rank, columns]`
    down: SourceWeight,
    scale: f64,
}

/// Ranks and scales that the configuration gives to modules.
struct Ranks {
    rank: u64,
    alpha: f64,
    rank_pattern: Vec<(Regex, f64)>,
    alpha_pattern: Vec<(Regex, f64)>,
    stabilised: bool,
}

/// Factors of a module found so far.
#[derive(Default)]
struct Factors {
    down: Option<SourceTensor>,
    up: Option<SourceTensor>,
    /// Whether the factors belong to an embedding, whose matrix is transposed.
    of_embedding: bool,
}

impl Adapter {
    /// Reads the adapter in `folder`.
    ///
    /// # Errors
    /// Returns an error if a file is absent or damaged, or the adapter is of a kind that isn't merged.
    pub fn read(folder: &Path) -> Result<Self> {
        let [config_path, weights_path] = [CONFIG, WEIGHTS].map(|name| folder.join(name));
        for path in [&config_path, &weights_path] {
            if !path.exists() {
                return Err(SourceError::file(path, "it isn't there")
                    .advise(format!("an adapter is a folder with {CONFIG} and {WEIGHTS}, as PEFT saves it")));
            }
        }
        let ranks = Ranks::read(&config_path, &read_json(&config_path)?)?;
        let mut factors = BTreeMap::<String, Factors>::new();
        let mut whole = BTreeMap::new();
        for tensor in safetensors::tensors(&Arc::new(map(&weights_path)?))? {
            let wrong = |problem: &str| SourceError::tensor(&weights_path, tensor.name(), problem);
            let name = tensor.name().strip_prefix(PREFIX).ok_or_else(|| wrong("its name isn't one of PEFT's"))?;
            let parts: Vec<&str> = name.split('.').collect();
            let Some(at) = parts.iter().position(|part| part.starts_with("lora_")) else {
                // a module trained in full
                let name = name.replace(".modules_to_save.default", "").replace(".modules_to_save", "");
                whole.insert(name, tensor.clone());
                continue;
            };
            let module = parts[..at].join(".");
            let own = factors.entry(module).or_default();
            own.of_embedding |= parts[at].starts_with("lora_embedding_");
            let place = match parts[at] {
                "lora_A" | "lora_embedding_A" => &mut own.down,
                "lora_B" | "lora_embedding_B" => &mut own.up,
                "lora_magnitude_vector" => return Err(wrong("it is DoRA's, whose weights aren't a sum").advise(MERGE)),
                _ => return Err(wrong("it is no factor of a low-rank sum")),
            };
            if place.replace(tensor.clone()).is_some() {
                return Err(wrong("there are two of it: the file holds several adapters"));
            }
        }
        let sum = |(module, own): (String, Factors)| -> Result<(String, LowRank)> {
            Ok((format!("{module}.weight"), own.sum(&weights_path, &module, &ranks)?))
        };
        let sums = factors.into_iter().map(sum).collect::<Result<_>>()?;
        Ok(Adapter { folder: folder.to_owned(), files: [config_path, weights_path], sums, whole })
    }

    fn wrong(&self, tensor: &str, problem: String) -> SourceError {
        SourceError::tensor(&self.files[1], tensor, problem)
            .advise("check that the adapter was trained on this model, and not on a quantized or renamed copy")
    }
}

impl Ranks {
    fn read(path: &Path, config: &Json) -> Result<Self> {
        let empty = Map::new();
        let map = config.as_object().unwrap_or(&empty);
        let wrong = |key: &str, expected: &str| {
            let found = map.get(key).map_or_else(|| "absent".to_owned(), Json::to_string);
            SourceError::key(path, key, format!("it is {found}; expected {expected}")).advise(MERGE)
        };
        let is = |key: &str, value: &str| map.get(key).and_then(Json::as_str).is_none_or(|found| found == value);
        if map.get("peft_type").and_then(Json::as_str) != Some("LORA") {
            return Err(wrong("peft_type", "\"LORA\""));
        }
        if !is("bias", "none") {
            return Err(wrong("bias", "\"none\": trained biases aren't merged"));
        }
        // these initializations change the model's weights before training, so that the update doesn't apply to
        // published ones
        if let Some(start) = map.get("init_lora_weights").and_then(Json::as_str)
            && ["pissa", "olora", "corda", "loftq", "lora_ga"].iter().any(|kind| start.to_lowercase().starts_with(kind))
        {
            return Err(wrong("init_lora_weights", "true: this start changes the model's own weights"));
        }
        let says_nothing = |value: &Json| match value {
            Json::Null | Json::Bool(false) => true,
            Json::Array(list) => list.is_empty(),
            Json::Object(map) => map.is_empty(),
            _ => false,
        };
        if let Some((key, _)) = map.iter().find(|(key, value)| !KNOWN.contains(&key.as_str()) && !says_nothing(value)) {
            return Err(wrong(key, "nothing: this kind of adapter isn't merged"));
        }
        let number = |key: &str| map.get(key).and_then(Json::as_f64).filter(|number| *number > 0.0);
        let pattern = |key: &str| -> Result<Vec<(Regex, f64)>> {
            let entries = map.get(key).and_then(Json::as_object).into_iter().flatten();
            let entry = |(name, value): (&String, &Json)| {
                // PEFT matches the end of a module's name
                let regex = Regex::new(&format!("^(?:.*\\.)?(?:{name})$")).ok()?;
                Some((regex, value.as_f64().filter(|number| *number > 0.0)?))
            };
            entries.map(|item| entry(item).ok_or_else(|| wrong(key, "a positive number for each pattern"))).collect()
        };
        Ok(Ranks {
            rank: map
                .get("r")
                .and_then(Json::as_u64)
                .filter(|r| *r > 0)
                .ok_or_else(|| wrong("r", "a positive rank"))?,
            alpha: number("lora_alpha").ok_or_else(|| wrong("lora_alpha", "a positive number"))?,
            rank_pattern: pattern("rank_pattern")?,
            alpha_pattern: pattern("alpha_pattern")?,
            stabilised: map.get("use_rslora").and_then(Json::as_bool).unwrap_or(false),
        })
    }

    /// Returns rank and scale of a module.
    fn of(&self, module: &str) -> (u64, f64) {
        let find =
            |patterns: &[(Regex, f64)]| patterns.iter().find(|(regex, _)| regex.is_match(module)).map(|(_, n)| *n);
        let rank = find(&self.rank_pattern).map_or(self.rank, |rank| rank as u64);
        let alpha = find(&self.alpha_pattern).unwrap_or(self.alpha);
        let divisor = if self.stabilised { (rank as f64).sqrt() } else { rank as f64 };
        (rank, alpha / divisor)
    }
}

impl Factors {
    fn sum(self, path: &Path, module: &str, ranks: &Ranks) -> Result<LowRank> {
        let missing =
            |which: &str| SourceError::tensor(path, &format!("{PREFIX}{module}"), format!("it has no {which}"));
        let down = self.down.ok_or_else(|| missing("lora_A"))?;
        let up = self.up.ok_or_else(|| missing("lora_B"))?;
        let (rank, scale) = ranks.of(module);
        for (tensor, axis) in [(&down, 0), (&up, 1)] {
            if tensor.shape().len() != 2 || tensor.shape()[axis] != rank {
                let problem = format!("its shape is {:?}, but its rank is {rank} by {CONFIG}", tensor.shape());
                return Err(SourceError::tensor(path, tensor.name(), problem));
            }
        }
        let (up, down) = (SourceWeight::from(up), SourceWeight::from(down));
        match self.of_embedding {
            // W is [tokens, width]: the transpose of B A
            true => Ok(LowRank { up: down.transpose()?, down: up.transpose()?, scale }),
            false => Ok(LowRank { up, down, scale }),
        }
    }
}

impl Source {
    /// Returns the source with an adapter merged into its weights, at `factor` times its trained strength.
    ///
    /// # Errors
    /// Returns an error if the source isn't safetensors, or lacks a weight that the adapter changes.
    pub fn adapted(mut self, adapter: &Adapter, factor: f64) -> Result<Self> {
        if !matches!(self.kind, SourceKind::Safetensors | SourceKind::Pytorch) {
            let problem = format!("the source is {}, and adapters name weights as transformers does", self.kind.name());
            return Err(SourceError::file(&adapter.folder, problem)
                .advise("give the Hugging Face folder of the model that the adapter was trained on"));
        }
        if adapter.sums.is_empty() && adapter.whole.is_empty() {
            return Err(SourceError::file(&adapter.files[1], "it holds no weights"));
        }
        let mut merged = Vec::new();
        for (name, sum) in &adapter.sums {
            let tensor = self.target(adapter, name)?;
            let weight = SourceWeight::from(tensor.clone());
            let scale = (factor * sum.scale) as f32;
            if tensor.shape() != [sum.up.rows(), sum.down.columns()] {
                let found = [sum.up.rows(), sum.down.columns()];
                return Err(
                    adapter.wrong(name, format!("the adapter is for {found:?}, the model has {:?}", tensor.shape()))
                );
            }
            merged.push((name.clone(), weight.plus_product(&sum.up, &sum.down, scale)?));
        }
        for (name, own) in &adapter.whole {
            let tensor = self.target(adapter, name)?;
            if tensor.shape() != own.shape() {
                let problem = format!("the adapter has {:?}, the model {:?}", own.shape(), tensor.shape());
                return Err(adapter.wrong(name, problem));
            }
            if factor != 1.0 {
                return Err(
                    adapter.wrong(name, format!("it was trained as a whole: there is no {factor} times as much"))
                );
            }
            merged.push((name.clone(), SourceWeight::from(own.clone())));
        }
        for (name, weight) in merged {
            let tensor = &self.tensors[&name];
            let path = tensor.path().unwrap_or(&adapter.folder).to_owned();
            let computed = SourceTensor::computed(name.clone(), weight, tensor.dtype(), tensor.byte_length(), &path);
            self.tensors.insert(name, computed);
        }
        for path in &adapter.files {
            self.files.push(SourceFile::new(path, &adapter.folder)?);
        }
        Ok(self)
    }

    /// Returns the weight that an update of the adapter applies to.
    fn target(&self, adapter: &Adapter, name: &str) -> Result<&SourceTensor> {
        if name.ends_with("embed_tokens.weight") && !self.tensors.contains_key("lm_head.weight") {
            let problem = "the embedding is also the LM head, which the adapter leaves as it is";
            return Err(adapter.wrong(name, problem.into()));
        }
        self.tensors.get(name).ok_or_else(|| {
            let near = nearest(name, self.tensors.keys().map(String::as_str), 1);
            let near = near.first().map_or_else(String::new, |near| format!("; near it: `{near}`"));
            adapter.wrong(name, format!("the model has no such weight{near}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Writes an adapter of one module and a model with its weight.
    fn room(config: Json, tensors: &[(&str, [usize; 2])]) -> tempfile::TempDir {
        let room = tempfile::tempdir().unwrap();
        let save = |name: &str, tensors: &[(&str, [usize; 2])]| {
            let bytes: Vec<Vec<u8>> = tensors
                .iter()
                .map(|(_, [rows, columns])| (0..rows * columns).flat_map(|i| (i as f32 - 2.0).to_le_bytes()).collect())
                .collect();
            let views = tensors.iter().zip(&bytes).map(|((name, shape), bytes)| {
                (
                    *name,
                    ::safetensors::tensor::TensorView::new(::safetensors::Dtype::F32, shape.to_vec(), bytes).unwrap(),
                )
            });
            std::fs::write(room.path().join(name), ::safetensors::serialize(views, None).unwrap()).unwrap();
        };
        save(
            "model.safetensors",
            &[("layers.0.q_proj.weight", [3, 4]), ("embed.weight", [5, 3]), ("embed_tokens.weight", [5, 3])],
        );
        save(WEIGHTS, tensors);
        std::fs::write(room.path().join(CONFIG), config.to_string()).unwrap();
        room
    }

    fn config(more: Json) -> Json {
        let mut config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none", "use_dora": false, "init_lora_weights": true});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    }

    const A: &str = "base_model.model.layers.0.q_proj.lora_A.weight";
    const B: &str = "base_model.model.layers.0.q_proj.lora_B.weight";

    fn merged(room: &tempfile::TempDir, factor: f64) -> Result<Source> {
        Source::open_path(room.path())?.adapted(&Adapter::read(room.path())?, factor)
    }

    #[test]
    fn a_weight_is_the_sum_with_the_scaled_product() {
        let expect = |more: Json, factor: f64, scale: f32| {
            let room = room(config(more), &[(A, [2, 4]), (B, [3, 2])]);
            let source = merged(&room, factor).unwrap();
            let mut found = vec![0.0; 12];
            source.tensor("layers.0.q_proj.weight").unwrap().read(0, &mut found).unwrap();
            let at = |row: usize, columns: usize, column: usize| (row * columns + column) as f32 - 2.0;
            for (i, found) in found.iter().enumerate() {
                let (row, column) = (i / 4, i % 4);
                let product: f32 = (0..2).map(|k| at(row, 2, k) * at(k, 4, column)).sum();
                assert!((found - (at(row, 4, column) + scale * product)).abs() < 1e-4, "{i}: {found}");
            }
            // reading a part gives the same values
            let mut part = vec![0.0; 5];
            source.tensor("layers.0.q_proj.weight").unwrap().read(3, &mut part).unwrap();
            assert_eq!(part, found[3..8]);
            assert_eq!(source.files().len(), 3);
        };
        expect(json!({}), 1.0, 4.0);
        expect(json!({}), 0.5, 2.0);
        expect(json!({"use_rslora": true}), 1.0, 8.0 / 2f32.sqrt());
        expect(json!({"r": 16, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.q_.*": 3}}), 1.0, 1.5);
    }

    #[test]
    fn an_embedding_is_transposed() {
        let names = ["base_model.model.embed.lora_embedding_A", "base_model.model.embed.lora_embedding_B"];
        let room = room(config(json!({})), &[(names[0], [2, 5]), (names[1], [3, 2])]);
        let mut found = vec![0.0; 15];
        merged(&room, 1.0).unwrap().tensor("embed.weight").unwrap().read(0, &mut found).unwrap();
        let at = |row: usize, columns: usize, column: usize| (row * columns + column) as f32 - 2.0;
        for (i, found) in found.iter().enumerate() {
            let product: f32 = (0..2).map(|k| at(k, 5, i / 3) * at(i % 3, 2, k)).sum();
            assert!((found - (at(i / 3, 3, i % 3) + 4.0 * product)).abs() < 1e-4, "{i}");
        }
    }

    #[test]
    fn an_embedding_that_is_the_head_is_left_alone() {
        let names =
            ["base_model.model.embed_tokens.lora_embedding_A", "base_model.model.embed_tokens.lora_embedding_B"];
        let room = room(config(json!({})), &[(names[0], [2, 5]), (names[1], [3, 2])]);
        let refused = |room: &tempfile::TempDir| merged(room, 1.0).err().unwrap().to_string();
        assert!(refused(&room).contains("also the LM head, which the adapter leaves as it is"));
        // PEFT also trains a copy of a whole embedding, and the head keeps the original
        let whole = self::room(config(json!({})), &[("base_model.model.embed_tokens.weight", [5, 3])]);
        assert!(refused(&whole).contains("also the LM head, which the adapter leaves as it is"));
    }

    #[test]
    fn unmergeable_adapters_are_named() {
        let refused = |more: Json, tensors: &[(&str, [usize; 2])]| {
            merged(&room(config(more), tensors), 1.0).err().unwrap().to_string()
        };
        let good = [(A, [2, 4]), (B, [3, 2])];
        let has = |error: String, part: &str| assert!(error.contains(part), "{error}");
        has(refused(json!({"use_dora": true}), &good), "key `use_dora`: it is true; expected nothing");
        has(refused(json!({"bias": "all"}), &good), "trained biases aren't merged");
        has(refused(json!({"peft_type": "IA3"}), &good), "expected \"LORA\"");
        has(
            refused(json!({"init_lora_weights": "pissa_niter_4"}), &good),
            "this start changes the model's own weights",
        );
        has(refused(json!({"r": 4}), &good), "its shape is [2, 4], but its rank is 4");
        has(refused(json!({}), &[(A, [2, 4])]), "it has no lora_B");
        has(refused(json!({}), &[(A, [2, 5]), (B, [3, 2])]), "the adapter is for [3, 5], the model has [3, 4]");
        let elsewhere =
            ["base_model.model.layers.1.q_proj.lora_A.weight", "base_model.model.layers.1.q_proj.lora_B.weight"];
        has(
            refused(json!({}), &[(elsewhere[0], [2, 4]), (elsewhere[1], [3, 2])]),
            "the model has no such weight; near it: `layers.0",
        );
        has(refused(json!({}), &[("q_proj.lora_A.weight", [2, 4])]), "its name isn't one of PEFT's");
        let magnitude = "base_model.model.layers.0.q_proj.lora_magnitude_vector";
        has(refused(json!({}), &[(A, [2, 4]), (B, [3, 2]), (magnitude, [1, 3])]), "it is DoRA's");
        has(
            refused(json!({}), &[("base_model.model.embed.weight", [4, 3])]),
            "the adapter has [4, 3], the model [5, 3]",
        );
    }

    #[test]
    fn a_module_trained_in_full_replaces_the_models() {
        let room = room(config(json!({"modules_to_save": ["embed"]})), &[("base_model.model.embed.weight", [5, 3])]);
        assert!(merged(&room, 1.0).is_ok());
        assert!(merged(&room, 0.5).err().unwrap().to_string().contains("trained as a whole"));
    }
}
