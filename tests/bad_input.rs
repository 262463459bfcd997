//! Invalid input, case by case: message and exit code. No case leaves anything that looks like a bundle.

use crate::common::folder;
use crate::common::gguf;
use crate::common::model;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anec::source::SourceDtype;
use anec::source::gguf::GgufValue;
use folder::{anec, finish, json, repository};
use gguf::{Parts, edit_gguf, fields};
use model::{copy, edit_json, edit_tensors};
use safetensors::Dtype;
use serde_json::json;
use tempfile::TempDir;

/// Damage to a model's folder, or to the parts of a GGUF file.
type Damage = fn(&Path);
type Edit<'a> = &'a dyn Fn(&mut Parts);

/// Messages of each attempt, for a snapshot.
#[derive(Default)]
struct Transcript(String);

impl Transcript {
    /// Runs a command that must be refused, in a folder of its own below which nothing may look like a bundle.
    fn refused(&mut self, what: &str, folder: &Path, command: &mut Command) {
        let (code, stdout, stderr) = finish(command.output().unwrap());
        assert!(matches!(code, 2 | 4 | 5), "{what}: exit code {code}\n{stderr}");
        assert!(stdout.is_empty(), "{what}: {stdout}");
        assert!(stderr.starts_with("error: ") && !stderr.contains("panicked"), "{what}: {stderr}");
        assert!(stderr.contains("\nhelp: ") || stderr.contains("try '--help'"), "{what}: no advice in\n{stderr}");
        assert_no_bundle(what, folder);
        let stderr = without_what_varies(&stderr.replace(folder.to_str().unwrap(), "[folder]"));
        writeln!(self.0, "# {what}\nexit code {code}\n{stderr}").unwrap();
    }

    /// Tries to convert `source`, which lies in `folder`.
    fn refused_source(&mut self, what: &str, folder: &Path, source: &Path) {
        // the weights as they are, so that errors name them
        self.refused(what, folder, convert(folder).args(["--set", "transforms=none", "--source"]).arg(source));
    }
}

/// A text without the numbers of processes in the names of unfinished packages.
fn without_what_varies(text: &str) -> String {
    let mut pieces = text.split(".partial-");
    let first = pieces.next().unwrap_or_default().to_owned();
    let text = pieces.fold(first, |text, piece| {
        let rest = piece.trim_start_matches(|c: char| c.is_ascii_digit() || c == '-');
        format!("{text}.partial-N{rest}")
    });
    text.lines().flat_map(|line| [line, "\n"]).collect()
}

/// `anec convert` into `out` within the folder.
fn convert(folder: &Path) -> Command {
    let mut command = anec();
    command.args(["convert", "--set", "context=32", "--out"]).arg(folder.join("out"));
    command
}

/// No folder below this one has a `bundle.json`.
fn assert_no_bundle(what: &str, folder: &Path) {
    assert!(!folder.join("bundle.json").exists(), "{what}: {}", folder.display());
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            assert_no_bundle(what, &path);
        }
    }
}

/// Damages copies of a model, one after another, and shows what a conversion says of each.
fn damaged(fixture: &str, damages: &[(&str, Damage)]) -> String {
    let mut transcript = Transcript::default();
    for (what, damage) in damages {
        let folder = TempDir::new().unwrap();
        let model = folder.path().join("model");
        copy(&repository(fixture), &model);
        damage(&model);
        transcript.refused_source(what, folder.path(), &model);
    }
    transcript.0
}

/// Damages copies of a fixture's GGUF, one after another, and shows what a conversion says of each.
fn damaged_gguf(fixture: &str, damages: &[(&str, Edit)]) -> String {
    let mut transcript = Transcript::default();
    for (what, damage) in damages {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("model.gguf");
        std::fs::copy(repository(fixture).join("model.gguf"), &path).unwrap();
        edit_gguf(&path, damage);
        transcript.refused_source(what, folder.path(), &path);
    }
    transcript.0
}

const LLAMA: &str = "tests/fixtures/families/llama-default";

fn weights(model: &Path) -> PathBuf {
    model.join("model.safetensors")
}

/// A GGUF file of few fields, whose model nobody would understand.
fn small_gguf(path: &Path) -> Vec<u8> {
    let mut parts = Parts { keys: Vec::new(), tensors: Vec::new() };
    parts.set("general.architecture", "llama");
    parts.set("llama.block_count", 2u32);
    parts.set("tokenizer.ggml.tokens", vec!["a".to_owned(), "b".to_owned()]);
    parts.tensors.push(("token_embd.weight".into(), SourceDtype::F16, vec![3, 5], vec![0; 30]));
    parts.tensors.push(("output_norm.weight".into(), SourceDtype::F32, vec![5], vec![0; 20]));
    parts.write(path);
    std::fs::read(path).unwrap()
}

/// A copy with other bytes at a place.
fn patched(bytes: &[u8], at: usize, with: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + with.len()].copy_from_slice(with);
    bytes
}

#[test]
fn a_gguf_file_cut_at_any_boundary() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = small_gguf(&path);
    let mut transcript = Transcript::default();
    for (at, field) in fields(&bytes) {
        std::fs::write(&path, &bytes[..at]).unwrap();
        transcript.refused_source(&format!("cut before {field}"), folder.path(), &path);
    }
    std::fs::write(&path, &bytes[..bytes.len() - 32 + 19]).unwrap();
    transcript.refused_source("cut before the last byte of data", folder.path(), &path);
    insta::assert_snapshot!(transcript.0);
}

#[test]
fn a_gguf_file_whose_header_is_wrong() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = small_gguf(&path);
    let fields = fields(&bytes);
    let at = |what: &str| fields.iter().find(|(_, field)| field == what).unwrap_or_else(|| panic!("{what}")).0;
    // an allocation of as many would fail: the file is converted with 2 GB of address space
    let absurd = 1u64 << 33;
    let mut transcript = Transcript::default();
    for (what, place, with) in [
        ("another magic number", "the magic number", &b"GGML"[..]),
        ("version 1", "the version", &1u32.to_le_bytes()),
        ("a version of the future", "the version", &9u32.to_le_bytes()),
        ("big-endian", "the version", &3u32.to_be_bytes()),
        ("an absurd number of tensors", "the number of tensors", &absurd.to_le_bytes()),
        ("an absurd number of keys", "the number of keys", &absurd.to_le_bytes()),
        ("an absurd length of a key", "the length of key 0", &absurd.to_le_bytes()),
        ("a key of an unknown type", "the type of llama.block_count", &77u32.to_le_bytes()),
        ("an absurd length of a string", "the length of the value of general.architecture", &absurd.to_le_bytes()),
        (
            "an absurd number of elements",
            "the number of elements of the value of tokenizer.ggml.tokens",
            &absurd.to_le_bytes(),
        ),
        ("more dimensions than there are", "the number of dimensions of token_embd.weight", &9u32.to_le_bytes()),
        ("an absurd dimension", "dimension 0 of token_embd.weight", &(1u64 << 62).to_le_bytes()),
        ("a tensor of an unknown type", "the type of token_embd.weight", &99u32.to_le_bytes()),
        ("a tensor of a type that ggml removed", "the type of token_embd.weight", &4u32.to_le_bytes()),
        ("a row that isn't whole blocks", "the type of token_embd.weight", &8u32.to_le_bytes()),
        ("an offset between alignments", "the offset of output_norm.weight", &33u64.to_le_bytes()),
        ("overlapping tensors", "the offset of output_norm.weight", &0u64.to_le_bytes()),
        ("a tensor out of the file", "the offset of output_norm.weight", &(1u64 << 40).to_le_bytes()),
        ("a tensor out of all numbers", "the offset of output_norm.weight", &(u64::MAX - 31).to_le_bytes()),
    ] {
        std::fs::write(&path, patched(&bytes, at(place), with)).unwrap();
        let mut command = limited("ulimit -v 2000000", folder.path());
        transcript.refused(what, folder.path(), command.arg("--source").arg(&path));
    }
    insta::assert_snapshot!(transcript.0);
}

/// `anec convert` into `out` within the folder, in a shell that limits it first.
fn limited(limit: &str, folder: &Path) -> Command {
    let mut command = Command::new("bash");
    let script = format!("{limit} && exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_anec"), "convert", "--set", "context=32", "--out"]);
    command.arg(folder.join("out")).current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("RUST_BACKTRACE");
    command
}

#[test]
fn a_safetensors_file_cut_at_any_boundary() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(repository(LLAMA).join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let first: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let mut ends: Vec<usize> = first
        .as_object()
        .unwrap()
        .values()
        .filter_map(|tensor| tensor["data_offsets"][1].as_u64())
        .map(|end| 8 + header + end as usize)
        .collect();
    ends.sort_unstable();
    let mut transcript = Transcript::default();
    for (what, length) in [
        ("nothing at all", 0),
        ("cut within the header's length", 7),
        ("cut before the header", 8),
        ("cut within the header", 8 + header / 2),
        ("cut before the data", 8 + header),
        ("cut within the first tensor", ends[0] - 1),
        ("cut after the first tensor", ends[0]),
        ("cut after the last tensor but one", ends[ends.len() - 2]),
        ("cut before the last byte", bytes.len() - 1),
    ] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        transcript.refused_source(what, folder.path(), &path);
    }
    insta::assert_snapshot!(transcript.0);
}

#[test]
fn a_safetensors_file_whose_header_is_wrong() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let file = |header: &str, data: usize| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    };
    let table = |tensors: serde_json::Value, data| file(&tensors.to_string(), data);
    let tensor = |dtype: &str, shape: &[u64], start: u64, end: u64| json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
    let mut transcript = Transcript::default();
    for (what, bytes) in [
        ("a pickle", b"PK\x03\x04 and so on".to_vec()),
        ("an absurd length of the header", (1u64 << 40).to_le_bytes().to_vec()),
        ("a header that isn't JSON", file("{not json}", 0)),
        ("a header that isn't a table", file("[]", 0)),
        ("an unknown type", table(json!({"a": tensor("F99", &[2], 0, 2)}), 2)),
        ("a type that no model has", table(json!({"a": tensor("F4", &[2], 0, 1)}), 1)),
        ("an absurd dimension", table(json!({"a": tensor("F32", &[1 << 62, 4], 0, 8)}), 8)),
        ("a shape that takes other bytes", table(json!({"a": tensor("F32", &[3], 0, 8)}), 8)),
        ("overlapping tensors", table(json!({"a": tensor("F32", &[1], 0, 4), "b": tensor("F32", &[1], 2, 6)}), 6)),
        ("a tensor out of the file", table(json!({"a": tensor("F32", &[2], 0, 8)}), 4)),
        ("a gap before a tensor", table(json!({"a": tensor("F32", &[2], 4, 12)}), 12)),
        ("bytes behind the last tensor", table(json!({"a": tensor("F32", &[2], 0, 8)}), 9)),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let mut command = limited("ulimit -v 2000000", folder.path());
        transcript.refused(what, folder.path(), command.arg("--source").arg(&path));
    }
    insta::assert_snapshot!(transcript.0);
}

/// Folders without weights, or with parts of them.
#[test]
fn a_source_that_is_not_there_or_not_whole() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    let mut transcript = Transcript::default();
    transcript.refused_source("no such path", folder.path(), &at("nowhere"));
    std::fs::create_dir(at("empty")).unwrap();
    transcript.refused_source("an empty folder", folder.path(), &at("empty"));
    std::fs::write(at("pytorch_model.bin"), "PK").unwrap();
    transcript.refused_source("weights in another format", folder.path(), &at("pytorch_model.bin"));
    for name in ["pointer.gguf", "pointer.safetensors"] {
        std::fs::write(at(name), "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n").unwrap();
        transcript.refused_source("what Git LFS leaves in place of weights", folder.path(), &at(name));
        std::fs::remove_file(at(name)).unwrap();
    }
    std::fs::create_dir(at("two")).unwrap();
    for name in ["a.gguf", "b.gguf"] {
        std::fs::copy(repository(LLAMA).join("model.gguf"), at("two").join(name)).unwrap();
    }
    transcript.refused_source("two models in one folder", folder.path(), &at("two"));

    let sharded = repository("tests/fixtures/families/qwen2-sharded");
    copy(&sharded, &at("sharded"));
    let first = at("sharded/model-00001-of-00002.safetensors");
    transcript.refused_source("one shard of several", folder.path(), &first);
    std::fs::rename(at("sharded/model-00002-of-00002.safetensors"), at("elsewhere")).unwrap();
    transcript.refused_source("a shard that is missing", folder.path(), &at("sharded"));
    std::fs::rename(at("elsewhere"), at("sharded/model-00002-of-00002.safetensors")).unwrap();
    edit_json(&at("sharded/model.safetensors.index.json"), |index| {
        index["weight_map"]["model.norm.weight"] = json!("model-00001-of-00002.safetensors");
    });
    transcript.refused_source("an index that contradicts its shards", folder.path(), &at("sharded"));
    edit_json(&at("sharded/model.safetensors.index.json"), |index| {
        index["weight_map"]["model.norm.weight"] = json!("../../secrets");
    });
    transcript.refused_source("an index that leads out of its folder", folder.path(), &at("sharded"));
    std::fs::write(at("sharded/model.safetensors.index.json"), "{").unwrap();
    transcript.refused_source("an index that isn't JSON", folder.path(), &at("sharded"));
    let part = at("model-00001-of-00002.gguf");
    std::fs::copy(sharded.join("model-00001-of-00002.gguf"), &part).unwrap();
    transcript.refused_source("a part of a split GGUF that is missing", folder.path(), &part);
    for name in ["hf:", "hf:only-an-owner", "hf:a/b@"] {
        transcript.refused_source(name, folder.path(), Path::new(name));
    }
    insta::assert_snapshot!(transcript.0);
}

/// Puts a value in place of a weight of a tensor, which becomes f32.
fn edit_value(model: &Path, tensor: &str, index: usize, value: f32) {
    edit_tensors(&weights(model), |tensors| {
        let (_, dtype, shape, bytes) = tensors.iter_mut().find(|(name, ..)| name == tensor).unwrap();
        let mut values = vec![0.01f32; shape.iter().product()];
        values[index] = value;
        *dtype = Dtype::F32;
        *bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    });
}

const PROJECTION: &str = "model.layers.1.self_attn.q_proj.weight";
const NORM: &str = "model.layers.0.input_layernorm.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

#[test]
fn tensors_that_are_no_weights_of_the_model() {
    let text = damaged(
        LLAMA,
        &[
            ("NaN in a projection", |m| edit_value(m, PROJECTION, 31, f32::NAN)),
            ("infinity in a projection", |m| edit_value(m, PROJECTION, 0, f32::NEG_INFINITY)),
            ("NaN in a norm", |m| edit_value(m, NORM, 29, f32::NAN)),
            ("NaN in the embedding", |m| edit_value(m, EMBEDDING, 3929, f32::NAN)),
            ("a projection beyond fp16", |m| edit_value(m, PROJECTION, 7, 1e6)),
            ("a norm beyond fp16", |m| edit_value(m, NORM, 7, -7e4)),
            ("an embedding beyond fp16", |m| edit_value(m, EMBEDDING, 30, 65520.0)),
            ("a missing tensor", |m| {
                edit_tensors(&weights(m), |t| t.retain(|(name, ..)| !name.contains("layers.1.mlp.up")))
            }),
            ("a superfluous tensor", |m| {
                edit_tensors(&weights(m), |t| {
                    let mut extra = t[0].clone();
                    extra.0 = "model.layers.0.extra.weight".into();
                    t.push(extra);
                })
            }),
            ("the tensors of an adapter", |m| {
                edit_tensors(&weights(m), |t| {
                    t.iter_mut().for_each(|(name, ..)| *name = format!("base_model.model.{name}"))
                })
            }),
        ],
    );
    insta::assert_snapshot!(text);
}

#[test]
fn gguf_tensors_that_are_no_weights_of_the_model() {
    let mut text = damaged_gguf(
        "tests/fixtures/families/llama-q8_0",
        &[
            ("a scale that isn't a number", &|p| {
                p.data("blk.1.ffn_down.weight")[34 * 4..34 * 4 + 2].copy_from_slice(&0x7E00u16.to_le_bytes())
            }),
            ("an infinite scale in the embedding", &|p| {
                p.data("token_embd.weight")[34 * 5..34 * 5 + 2].copy_from_slice(&0x7C00u16.to_le_bytes())
            }),
            ("a scale that leads beyond fp16", &|p| {
                let block = &mut p.data("blk.0.attn_q.weight")[34 * 3..34 * 4];
                block[..2].copy_from_slice(&half::f16::from_f32(2000.0).to_le_bytes());
                block[2..].fill(100);
            }),
        ],
    );
    text += &damaged_gguf(
        LLAMA,
        &[
            ("a missing tensor", &|p| p.tensors.retain(|(name, ..)| name != "blk.1.ffn_up.weight")),
            ("a superfluous tensor", &|p| {
                let mut extra = p.tensors[1].clone();
                extra.0 = "blk.0.attn_qq.weight".into();
                p.tensors.push(extra);
            }),
        ],
    );
    insta::assert_snapshot!(text);
}

#[test]
fn configurations_that_contradict_the_weights() {
    fn set(model: &Path, key: &str, value: serde_json::Value) {
        edit_json(&model.join("config.json"), |config| config[key] = value);
    }
    let text = damaged(
        LLAMA,
        &[
            ("no configuration", |m| std::fs::remove_file(m.join("config.json")).unwrap()),
            ("a configuration that isn't JSON", |m| std::fs::write(m.join("config.json"), "model_type: x").unwrap()),
            ("a configuration that isn't an object", |m| std::fs::write(m.join("config.json"), "[1]").unwrap()),
            ("no model type", |m| set(m, "model_type", json!(null))),
            ("an unknown architecture", |m| set(m, "model_type", json!("mamba9"))),
            ("an unknown key", |m| set(m, "attention_wobble", json!(3))),
            ("another width", |m| set(m, "hidden_size", json!(60))),
            ("another width of the feed-forward network", |m| set(m, "intermediate_size", json!(500))),
            ("more layers", |m| set(m, "num_hidden_layers", json!(4))),
            ("fewer layers", |m| set(m, "num_hidden_layers", json!(2))),
            ("heads that don't divide", |m| set(m, "num_key_value_heads", json!(2))),
            ("another number of heads", |m| set(m, "num_attention_heads", json!(5))),
            ("an absurd number of layers", |m| set(m, "num_hidden_layers", json!(4_000_000_000u64))),
            ("an absurd width", |m| set(m, "hidden_size", json!(1u64 << 40))),
            ("a negative width", |m| set(m, "hidden_size", json!(-30))),
            ("a missing key", |m| {
                edit_json(&m.join("config.json"), |c| drop(c.as_object_mut().unwrap().remove("hidden_size")))
            }),
            ("a smaller vocabulary", |m| set(m, "vocab_size", json!(100))),
            ("a tied head that is there and differs", |m| set(m, "vocab_size", json!(132))),
        ],
    );
    insta::assert_snapshot!(text);
}

#[test]
fn gguf_keys_that_contradict_the_weights() {
    let text = damaged_gguf(
        LLAMA,
        &[
            ("no architecture", &|p| p.keys.retain(|(key, _)| key != "general.architecture")),
            ("an unknown architecture", &|p| p.set("general.architecture", "mamba9")),
            ("an unknown key", &|p| p.set("llama.attention.wobble", 3u32)),
            ("a key of another type", &|p| p.set("llama.block_count", "three")),
            ("another width", &|p| p.set("llama.embedding_length", 60u32)),
            ("an array in place of a number", &|p| p.set("llama.feed_forward_length", vec![46i32, 46, 46])),
        ],
    );
    insta::assert_snapshot!(text);
}

#[test]
fn added_tokens_without_a_row_are_left_out_with_a_note() {
    let room = tempfile::tempdir().unwrap();
    let (source, out) = (room.path().join("model"), room.path().join("out.anec"));
    copy(&repository("tests/fixtures/families/qwen2-tokenizer"), &source);
    edit_json(&source.join("tokenizer.json"), |t| t["added_tokens"][0]["id"] = json!(9999));
    let mut command = anec();
    command.args(["convert", "--set", "context=32", "--source"]).arg(&source).arg("--out").arg(&out);
    let (code, _, stderr) = finish(command.output().unwrap());
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("the model has no rows for the tokens"), "{stderr}");
}

#[test]
fn vocabularies_that_contradict_the_tokenizer() {
    let mut text = damaged(
        "tests/fixtures/families/qwen2-tokenizer",
        &[
            ("a tokenizer that isn't JSON", |m| std::fs::write(m.join("tokenizer.json"), "{").unwrap()),
            ("a tokenizer with more tokens than the model has rows", |m| {
                edit_json(&m.join("tokenizer.json"), |t| t["model"]["vocab"]["zzz"] = json!(123_456))
            }),
            ("an end token that the model has no row for", |m| {
                edit_json(&m.join("generation_config.json"), |g| g["eos_token_id"] = json!([2, 7777]))
            }),
            ("a chat template that isn't one", |m| {
                edit_json(&m.join("tokenizer_config.json"), |t| t["chat_template"] = json!(1))
            }),
        ],
    );
    let tokens = |p: &Parts| match p.keys.iter().find(|(key, _)| key == "tokenizer.ggml.tokens") {
        Some((_, GgufValue::Array(anec::source::gguf::GgufArray::String(tokens)))) => {
            tokens.iter().map(str::to_owned).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    text += &damaged_gguf(
        "tests/fixtures/families/qwen2-tokenizer",
        &[
            ("a GGUF with more tokens than rows", &|p| {
                let mut tokens = tokens(p);
                tokens.extend((0..9).map(|i| format!("more {i}")));
                p.set("tokenizer.ggml.token_type", vec![1i32; tokens.len()]);
                p.set("tokenizer.ggml.tokens", tokens);
            }),
            ("a GGUF whose token types are fewer than its tokens", &|p| {
                p.set("tokenizer.ggml.token_type", vec![1i32; 5])
            }),
            ("a GGUF whose merges name no tokens", &|p| {
                p.set("tokenizer.ggml.merges", vec!["nothing ofthekind".to_owned()])
            }),
            ("a GGUF with an unknown tokenizer", &|p| p.set("tokenizer.ggml.model", "telepathy")),
            ("a GGUF with an unknown way of splitting text", &|p| p.set("tokenizer.ggml.pre", "by-mood")),
            ("a GGUF whose end token is no token", &|p| p.set("tokenizer.ggml.eos_token_id", 7777u32)),
        ],
    );
    insta::assert_snapshot!(text);
}

#[test]
fn a_tokenizer_whose_expressions_are_of_another_kind_is_told_of_at_conversion() {
    let folder = TempDir::new().unwrap();
    let model = folder.path().join("model");
    copy(&repository("tests/fixtures/families/qwen2-tokenizer"), &model);
    edit_json(&model.join("tokenizer.json"), |tokenizer| {
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("(?<unclosed");
    });
    let (code, _, stderr) = finish(convert(folder.path()).arg("--source").arg(&model).output().unwrap());
    assert_eq!(code, 0, "{stderr}");
    let told = stderr.lines().find(|line| line.contains("takes token ids only"));
    assert!(told.is_some_and(|line| line.contains("tokenizer.json")), "{stderr}");
    let report = json(&folder.path().join("out/report.json"));
    assert!(report["notes"].to_string().contains("takes token ids only"), "{report}");
}

#[test]
fn commands_and_manifests_that_make_no_sense() {
    let folder = TempDir::new().unwrap();
    let manifest = folder.path().join("own.yaml");
    let mut transcript = Transcript::default();
    let mut manifests = |what: &str, text: &str| {
        std::fs::write(&manifest, text).unwrap();
        transcript.refused(what, folder.path(), convert(folder.path()).arg("--manifest").arg(&manifest));
    };
    manifests("an unknown key", "source: demo/model\nquant:\n  granularty: per_channel\n");
    manifests("an unknown key like no other", "source: demo/model\nfavourite_colour: blue\n");
    manifests("an unknown word", "source: demo/model\nquant: { weights: int7 }\n");
    manifests("a value of another type", "source: demo/model\ncontext: [a, b]\n");
    manifests("a value out of range", "source: demo/model\nlengths: { range: [5, 4] }\n");
    manifests("a form that contradicts another", "source: demo/model\nkv_write: slice\n");
    manifests("no YAML", "source: [demo\n");
    for (what, arguments) in [
        ("no source", &[][..]),
        ("no such manifest", &["--manifest", "phi4-mino"]),
        ("no such file", &["--manifest", "some/where.yaml"]),
        ("--set of an unknown key", &["--manifest", "demo", "--set", "contxt=5"]),
        ("--set of an unknown key within another", &["--manifest", "demo", "--set", "quant.granularty=per_channel"]),
        ("--set of an unknown word", &["--manifest", "demo", "--set", "quant.granularity=per_chanel"]),
        ("--set of another type", &["--manifest", "demo", "--set", "context=many"]),
        ("--set of a value out of range", &["--manifest", "demo", "--set", "context=0"]),
        ("--set without a value", &["--manifest", "demo", "--set", "context"]),
        ("--set without a key", &["--manifest", "demo", "--set", "=5"]),
        ("--set of a value that isn't YAML", &["--manifest", "demo", "--set", "lengths.fixed=[1"]),
        ("another family", &["--manifest", "demo", "--set", "family=llama"]),
        ("packages too small for a layer", &["--manifest", "demo", "--set", "shards.max_mb=0.1"]),
        ("layers that the model doesn't have", &["--manifest", "demo", "--set", "shards.layers=[[0, 2], [2, 5]]"]),
        ("more pieces than rows", &["--manifest", "demo", "--set", "lm_head.split=4000"]),
        ("threads that aren't a number", &["--threads", "many"]),
        ("no threads", &["--threads", "0"]),
        ("an unknown option", &["--manifst", "demo"]),
    ] {
        transcript.refused(what, folder.path(), convert(folder.path()).args(arguments));
    }
    insta::assert_snapshot!(transcript.0);
}

#[test]
fn output_folders_that_are_taken_or_cannot_be() {
    let folder = TempDir::new().unwrap();
    let mut transcript = Transcript::default();
    let mut into = |what: &str, out: &Path| {
        let mut command = anec();
        command.args(["convert", "--manifest", "demo", "--out"]).arg(out);
        transcript.refused(what, folder.path(), nobody(&mut command));
    };
    let at = |name: &str| folder.path().join(name);
    set_mode(folder.path(), 0o755);
    std::fs::write(at("file"), "").unwrap();
    std::fs::create_dir(at("photographs")).unwrap();
    std::fs::write(at("photographs/cat.png"), "").unwrap();
    std::fs::create_dir(at("locked")).unwrap();
    set_mode(&at("locked"), 0o555);
    into("a file", &at("file"));
    into("below a file", &at("file/bundle"));
    into("a folder that holds something else", &at("photographs"));
    into("a folder that may not be written to", &at("locked/out"));
    set_mode(&at("locked"), 0o755);
    assert_eq!(std::fs::read_dir(at("photographs")).unwrap().count(), 1);
    insta::assert_snapshot!(transcript.0);
}

/// A bundle of other inputs stays as it is.
#[test]
fn a_bundle_of_other_inputs() {
    let folder = TempDir::new().unwrap();
    let (out, shown) = (folder.path().join("out"), TempDir::new().unwrap());
    let convert = |arguments: &[&str]| {
        let mut command = anec();
        command.args(["convert", "--manifest", "demo", "--out"]).arg(&out).args(arguments);
        command
    };
    assert_eq!(finish(convert(&[]).output().unwrap()).0, 0);
    let before = folder::contents(&out);
    let mut transcript = Transcript::default();
    let mut other = |what: &str, command: &mut Command| {
        transcript.refused(what, shown.path(), command);
        assert_eq!(folder::contents(&out), before);
    };
    other("other settings", &mut convert(&["--set", "context=64"]));
    other("another source", &mut convert(&["--source", "demo/model/"]));
    let name = json(&out.join("bundle.json"))["packages"][0]["package"].as_str().unwrap().to_owned();
    std::fs::remove_file(out.join(&name).join("Manifest.json")).unwrap();
    transcript.refused("a file of it is missing", shown.path(), &mut convert(&[]));
    std::fs::write(out.join("bundle.json"), "{}").unwrap();
    transcript.refused("its bundle.json is damaged", shown.path(), &mut convert(&[]));
    let text = transcript.0.replace(folder.path().to_str().unwrap(), "[folder]");
    insta::assert_snapshot!(text);
}

/// A limit on the size of files stands for a disk that fills up while it is written to.
#[test]
fn a_disk_that_fills_up() {
    let folder = TempDir::new().unwrap();
    let mut transcript = Transcript::default();
    let mut command = limited("ulimit -f 1024", folder.path());
    transcript.refused("no file can become large", folder.path(), command.args(["--manifest", "demo"]));
    // with room again, the run goes on
    let (code, _, stderr) = finish(convert(folder.path()).args(["--manifest", "demo"]).output().unwrap());
    assert_eq!(code, 0, "{stderr}");
    assert!(folder.path().join("out/bundle.json").is_file());
    insta::assert_snapshot!(transcript.0);
}

/// A limit on processes, which threads count as. It binds no one who may do everything, so this is somebody else.
#[cfg(target_os = "linux")]
#[test]
fn a_system_that_gives_no_threads() {
    let room = TempDir::new().unwrap();
    let limited = |limit: &str, words: &[&str]| {
        let script = format!("ulimit -u {limit} && cd / && exec \"$0\" \"$@\"");
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--bounding-set", "-all"]);
        command.args(["bash", "-c", &script, env!("CARGO_BIN_EXE_anec")]).args(words).env("HOME", "/tmp");
        command
    };
    if !limited("100", &["--version"]).output().is_ok_and(|output| output.status.success()) {
        anec::base::skipped("this system doesn't let a test be another user");
        return;
    }
    let mut transcript = Transcript::default();
    transcript.refused("one process", room.path(), &mut limited("1", &["doctor", "--quick"]));
    transcript.refused(
        "eight threads of two",
        room.path(),
        &mut limited("2", &["--threads", "8", "doctor", "--quick"]),
    );
    // who gets some does with them
    let (code, _, stderr) = finish(limited("4", &["demo", "--json"]).output().unwrap());
    assert!(matches!(code, 0 | 5) && !stderr.contains("panicked"), "{code}: {stderr}");
    insta::assert_snapshot!(transcript.0);
}

/// Disks of a megabyte and of a few names, where the system lets a test make them.
#[cfg(target_os = "linux")]
#[test]
fn a_disk_that_is_full() {
    let mut transcript = Transcript::default();
    for (what, size) in [("a disk of one megabyte", "size=1m"), ("a disk of ten files", "size=99m,nr_inodes=11")] {
        let folder = TempDir::new().unwrap();
        let disk = folder.path().join("disk");
        std::fs::create_dir(&disk).unwrap();
        let in_own_mounts = |script: &str| {
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", size]).arg(&disk);
            command
        };
        const MOUNT: &str = "mount -t tmpfs -o \"$1\" tmpfs \"$2\"";
        if !in_own_mounts(MOUNT).status().is_ok_and(|status| status.success()) {
            anec::base::skipped("this system doesn't let a test mount a disk");
            return;
        }
        // what is left there is printed, which is refused like any other output
        let script =
            format!("{MOUNT} && shift && d=$1 && shift && \"$@\"; code=$?; find \"$d\" -name bundle.json; exit $code");
        let mut command = in_own_mounts(&script);
        command.args([env!("CARGO_BIN_EXE_anec"), "convert", "--manifest", "demo"]);
        // with several threads, any of the files that are written at once can be the first for which there is no room
        command.args(["--threads", "1", "--out"]).arg(disk.join("out"));
        transcript.refused(what, folder.path(), command.current_dir(env!("CARGO_MANIFEST_DIR")));
    }
    // sizes that depend on the page and the number of weights
    let numbers = |word: &str| {
        if word.len() > 5 && word.bytes().all(|b| b.is_ascii_digit()) { "N".into() } else { word.to_owned() }
    };
    let lines = transcript.0.lines().map(|line| line.split(' ').map(numbers).collect::<Vec<_>>().join(" "));
    insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
}

#[cfg(unix)]
fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Takes from a command the privileges by which the superuser writes anywhere.
#[cfg(unix)]
fn nobody(command: &mut Command) -> &mut Command {
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65534;
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } == 0 { command.uid(NOBODY).gid(NOBODY) } else { command }
}

/// The demo's weights are unpacked into the cache, for every verb that reads them.
#[test]
fn a_cache_that_cant_be_written_to_is_named_with_what_to_set() {
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("file");
    std::fs::write(&file, "").unwrap();
    let mut command = anec();
    command.current_dir(room.path()).args(["plan", "-m", "demo"]).env("ANEC_CACHE", file.join("cache"));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(said.contains("can't write to") && said.contains("set ANEC_CACHE"), "{said}");
}
