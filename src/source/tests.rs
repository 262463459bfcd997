//! Tests of sources on disk: single files, splits, shards, and damaged ones.

use std::fs;

use ::safetensors::Dtype;
use ::safetensors::tensor::TensorView;
use gguf::write::Writer;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use anec_base::Diagnostic;

/// Writes a safetensors file of f32 tensors `[1, n]` that count from 0.
fn write_safetensors(path: &Path, tensors: &[(&str, usize)]) {
    let data: Vec<(&str, usize, Vec<u8>)> =
        tensors.iter().map(|&(name, n)| (name, n, (0..n).flat_map(|i| (i as f32).to_le_bytes()).collect())).collect();
    let views = data.iter().map(|(name, n, bytes)| (*name, TensorView::new(Dtype::F32, vec![1, *n], bytes).unwrap()));
    fs::write(path, ::safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Writes a GGUF file of f32 tensors `[n]` that count from 0.
fn write_gguf(path: &Path, keys: &[(&str, gguf::GgufValue)], tensors: &[(&str, u64)]) {
    let mut writer = Writer::new();
    for (key, value) in keys {
        writer.key(key, value.clone());
    }
    for (name, n) in tensors {
        writer.tensor(name, SourceDtype::F32, &[*n]);
    }
    let counting = |index: usize, out: &mut dyn std::io::Write| {
        (0..tensors[index].1).try_for_each(|i| out.write_all(&(i as f32).to_le_bytes()))
    };
    writer.write(fs::File::create(path).unwrap(), counting).unwrap();
}

fn values(source: &Source, name: &str) -> Vec<f32> {
    let tensor = source.tensor(name).unwrap();
    let mut values = vec![f32::NAN; tensor.elements() as usize];
    tensor.read_rows(0, &mut values).unwrap();
    values
}

fn names(source: &Source) -> Vec<&str> {
    source.tensors().map(SourceTensor::name).collect()
}

/// Returns the message of the error, which must name a file in the folder.
fn refusal(path: &Path) -> String {
    let error = Source::open_path(path).unwrap_err();
    assert_eq!(error.fault().exit_code(), 4, "{error}");
    error.to_string()
}

/// Writes a Hugging Face folder of two shards.
fn sharded_folder() -> TempDir {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_safetensors(&at("model-00001-of-00002.safetensors"), &[("b", 3), ("a", 2)]);
    write_safetensors(&at("model-00002-of-00002.safetensors"), &[("c", 4)]);
    write_index(folder.path(), &[("a", 1), ("b", 1), ("c", 2)]);
    fs::write(at("config.json"), r#"{"model_type": "llama", "hidden_size": 64}"#).unwrap();
    folder
}

fn write_index(folder: &Path, tensors: &[(&str, u32)]) {
    let map: serde_json::Map<String, Json> = tensors
        .iter()
        .map(|(name, shard)| ((*name).to_owned(), format!("model-{shard:05}-of-00002.safetensors").into()))
        .collect();
    let index = json!({"metadata": {"total_size": 36}, "weight_map": map});
    fs::write(folder.join(safetensors::INDEX), index.to_string()).unwrap();
}

#[test]
fn a_hugging_face_folder_holds_shards_and_files_beside_them() {
    let folder = sharded_folder();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("generation_config.json"), r#"{"eos_token_id": [1, 2]}"#).unwrap();
    fs::write(at("tokenizer_config.json"), r#"{"chat_template": "from the tokenizer's configuration"}"#).unwrap();
    fs::write(at("tokenizer.json"), "{}").unwrap();
    let source = Source::open(folder.path().to_str().unwrap()).unwrap();
    assert_eq!(source.kind(), SourceKind::Safetensors);
    assert_eq!(names(&source), ["a", "b", "c"]);
    assert_eq!(values(&source, "b"), [0.0, 1.0, 2.0]);
    assert_eq!(source.tensor("c").unwrap().shape(), [1, 4]);
    assert_eq!(source.config().unwrap()["hidden_size"], 64);
    let beside = source.hugging_face().unwrap();
    assert_eq!(beside.generation_config.as_ref().unwrap()["eos_token_id"], json!([1, 2]));
    assert_eq!(beside.tokenizer.as_deref(), Some(at("tokenizer.json").as_path()));
    assert_eq!(source.chat_template().unwrap(), Some("from the tokenizer's configuration"));
    let files: Vec<&str> = source.files().iter().map(SourceFile::name).collect();
    assert_eq!(
        files,
        [
            "config.json",
            "generation_config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    );
    fs::write(at("chat_template.jinja"), "from its own file").unwrap();
    assert_eq!(Source::open_path(folder.path()).unwrap().chat_template().unwrap(), Some("from its own file"));
}

#[test]
fn chat_templates_by_name_give_the_default_one() {
    let folder = sharded_folder();
    let config =
        json!({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]});
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    assert_eq!(Source::open_path(folder.path()).unwrap().chat_template().unwrap(), Some("d"));
    fs::write(folder.path().join("tokenizer_config.json"), r#"{"chat_template": 1}"#).unwrap();
    assert!(refusal(folder.path()).contains("tokenizer_config.json: key `chat_template`: it is neither"));
}

#[test]
fn a_single_file_is_read_with_the_files_beside_it() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    write_safetensors(&path, &[("w", 2)]);
    fs::write(folder.path().join("config.json"), r#"{"model_type": "qwen2"}"#).unwrap();
    for opened in [&path, folder.path()] {
        let source = Source::open_path(opened).unwrap();
        assert_eq!(names(&source), ["w"]);
        assert_eq!(source.config().unwrap()["model_type"], "qwen2");
    }
}

#[test]
fn an_index_and_its_shards_must_agree() {
    let folder = sharded_folder();
    let shard = |n: u32| folder.path().join(format!("model-{n:05}-of-00002.safetensors"));
    write_index(folder.path(), &[("a", 1), ("b", 1), ("c", 2), ("d", 2)]);
    assert!(
        refusal(folder.path()).contains("tensor `d`: the index says that it is in model-00002-of-00002.safetensors")
    );
    write_index(folder.path(), &[("a", 1), ("b", 2), ("c", 2)]);
    assert!(refusal(folder.path()).contains("tensor `b`: it is in model-00001-of-00002.safetensors, but the index"));
    write_index(folder.path(), &[("a", 1), ("b", 1), ("c", 2)]);
    let help = Source::open_path(&shard(1)).unwrap_err();
    assert!(help.to_string().contains("one shard of the model") && help.help().unwrap().contains("give the folder"));
    fs::remove_file(shard(2)).unwrap();
    assert!(refusal(folder.path()).contains("shard model-00002-of-00002.safetensors is missing, which has 1"));
    fs::write(folder.path().join(safetensors::INDEX), r#"{"weight_map": {"a": "../../secrets"}}"#).unwrap();
    assert!(refusal(folder.path()).contains("expected a file name in the same folder"));
    fs::write(folder.path().join(safetensors::INDEX), "{}").unwrap();
    assert!(refusal(folder.path()).contains("key `weight_map`"));
    fs::write(folder.path().join(safetensors::INDEX), "{").unwrap();
    assert!(refusal(folder.path()).contains("isn't JSON"));
}

#[test]
fn a_safetensors_file_cut_anywhere_is_refused() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    write_safetensors(&path, &[("a", 2), ("b", 3)]);
    let bytes = fs::read(&path).unwrap();
    for length in 0..bytes.len() {
        let file = Arc::new(MappedFile::from_bytes(&path, bytes[..length].to_vec()));
        let message = safetensors::tensors(&file).unwrap_err().to_string();
        assert!(message.contains("model.safetensors: "), "{message}");
    }
}

#[test]
fn contradictory_safetensors_headers_are_refused() {
    let with_header = |header: Json, data: usize| {
        let header = header.to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        let file = Arc::new(MappedFile::from_bytes(Path::new("x.safetensors"), bytes));
        safetensors::tensors(&file).map(|tensors| tensors.len())
    };
    let tensor = |dtype: &str, shape: &[u64], start: u64, end: u64| json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
    assert_eq!(with_header(json!({"a": tensor("F32", &[2], 0, 8), "__metadata__": {"format": "pt"}}), 8).unwrap(), 1);
    for (header, data, expected) in [
        (json!({"a": tensor("F32", &[2], 0, 8)}), 9, "isn't where its last tensor ends"),
        (json!({"a": tensor("F32", &[3], 0, 8)}), 8, "don't take the bytes"),
        (json!({"a": tensor("F32", &[2], 4, 12)}), 12, "tensor `a` doesn't begin where"),
        (json!({"a": tensor("F32", &[1], 0, 4), "b": tensor("F32", &[1], 2, 6)}), 6, "doesn't begin where"),
        (json!({"a": tensor("F32", &[1 << 62, 4], 0, 8)}), 8, "overflows"),
        (json!({"a": tensor("F4", &[2], 0, 1)}), 1, "tensor `a`: its type is F4"),
        (json!({"a": tensor("F99", &[2], 0, 1)}), 1, "isn't a table of tensors"),
        (json!([]), 0, "isn't a table of tensors"),
    ] {
        let message = with_header(header, data).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    let absurd = MappedFile::from_bytes(Path::new("x.safetensors"), u64::MAX.to_le_bytes().to_vec());
    assert!(safetensors::tensors(&Arc::new(absurd)).unwrap_err().to_string().contains("larger than 100 MB"));
}

/// Returns a file with bits and bytes changed, numbers inserted, parts repeated, or its end cut off, by round.
pub(super) fn mutated(good: &[u8], round: u64) -> Vec<u8> {
    let mut bytes = good.to_vec();
    let pick = |salt: u64, below: usize| (random::mix(round, salt) % below as u64) as usize;
    for mutation in 0..=pick(0, 3) as u64 {
        let at = pick(10 * mutation + 1, bytes.len());
        match pick(10 * mutation + 2, 5) {
            0 => bytes[at] = random::mix(round, 10 * mutation + 3) as u8,
            1 => bytes[at] ^= 1 << pick(10 * mutation + 3, 8),
            2 => bytes.truncate(at.max(1)),
            3 => {
                let edge = [0, 1, u64::MAX, 1 << 63, 1 << 32, u64::MAX >> 1][pick(10 * mutation + 3, 6)];
                let end = (at + 8).min(bytes.len());
                bytes[at..end].copy_from_slice(&edge.to_le_bytes()[..end - at]);
            }
            _ => {
                let from = pick(10 * mutation + 3, bytes.len());
                let piece = bytes[from..(from + 16).min(bytes.len())].to_vec();
                bytes.splice(at..at, piece);
            }
        }
    }
    bytes
}

#[test]
fn mutated_safetensors_never_panic() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    write_safetensors(&path, &[("a", 2), ("b", 3), ("c", 5)]);
    let good = fs::read(&path).unwrap();
    let (mut read, mut refused) = (0, 0);
    for round in 0..5_000u64 {
        let mut bytes = good.clone();
        let at = random::mix(round, 0) as usize % bytes.len();
        match round % 4 {
            0 => bytes[at] = random::mix(round, 1) as u8,
            1 => bytes[at] ^= 1 << (random::mix(round, 1) % 8),
            2 => bytes.truncate(at),
            // a changed digit is the mutation that JSON survives
            _ => {
                let digits: Vec<usize> = (8..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
                bytes[digits[at % digits.len()]] = b'0' + (random::mix(round, 1) % 10) as u8;
            }
        }
        match safetensors::tensors(&Arc::new(MappedFile::from_bytes(&path, bytes))) {
            Ok(tensors) => {
                read += 1;
                for tensor in tensors {
                    tensor.read(0, &mut vec![0.0; tensor.elements() as usize]).unwrap();
                }
            }
            Err(_) => refused += 1,
        }
    }
    assert!(read > 500 && refused > 500, "{read} {refused}");
}

/// Three parts of a split model, with the keys that llama.cpp's splitter writes.
fn split_folder() -> TempDir {
    let folder = TempDir::new().unwrap();
    for (index, tensors) in [&[("a", 2u64)][..], &[("b", 3)], &[("c", 4), ("d", 5)]].into_iter().enumerate() {
        write_part(folder.path(), index as u16, 3, 4, tensors);
    }
    folder
}

fn write_part(folder: &Path, index: u16, count: u16, all_tensors: i32, tensors: &[(&str, u64)]) {
    let mut keys =
        vec![("split.no", index.into()), ("split.count", count.into()), ("split.tensors.count", all_tensors.into())];
    if index == 0 {
        keys.push(("general.architecture", "llama".into()));
        keys.push(("tokenizer.chat_template", "hello".into()));
    }
    write_gguf(&part(folder, index), &keys, tensors);
}

fn part(folder: &Path, index: u16) -> PathBuf {
    folder.join(format!("model-{:05}-of-00003.gguf", index + 1))
}

#[test]
fn a_split_model_opens_from_any_part_or_its_folder() {
    let folder = split_folder();
    for path in [part(folder.path(), 0), part(folder.path(), 2), folder.path().to_owned()] {
        let source = Source::open_path(&path).unwrap();
        assert_eq!(source.kind(), SourceKind::Gguf);
        assert_eq!(names(&source), ["a", "b", "c", "d"]);
        assert_eq!(values(&source, "d"), [0.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(source.gguf().unwrap().str("general.architecture").unwrap(), Some("llama"));
        assert_eq!(source.chat_template().unwrap(), Some("hello"));
        assert_eq!(source.files().len(), 3);
    }
}

#[test]
fn the_parts_of_a_split_model_must_belong_together() {
    let folder = split_folder();
    let path = part(folder.path(), 0);
    write_part(folder.path(), 0, 4, 4, &[("a", 2)]);
    assert!(refusal(&path).contains("key `split.count`: the value is 4, expected 3"));
    write_part(folder.path(), 0, 3, 9, &[("a", 2)]);
    assert!(refusal(&path).contains("key `split.tensors.count`: the value is 9, expected 4"));
    write_gguf(&path, &[], &[("a", 2)]);
    assert!(refusal(&path).contains("key `split.count`: it is missing, expected 3"));
    write_part(folder.path(), 0, 3, 4, &[("b", 2)]);
    assert!(refusal(&path).contains("00002-of-00003.gguf: tensor `b`: it is also in"));
    fs::copy(part(folder.path(), 2), part(folder.path(), 1)).unwrap();
    write_part(folder.path(), 0, 3, 4, &[("a", 2)]);
    assert!(refusal(&path).contains("00002-of-00003.gguf: key `split.no`: the value is 2, expected 1"));
    fs::remove_file(part(folder.path(), 1)).unwrap();
    assert!(refusal(&path).contains("beside it these are missing: 2"));
    let renamed = folder.path().join("renamed.gguf");
    fs::copy(&path, &renamed).unwrap();
    assert!(refusal(&renamed).contains("key `split.count`: the value is 3, expected 1"));
    let wrong_number = folder.path().join("model-00004-of-00003.gguf");
    fs::copy(&path, &wrong_number).unwrap();
    assert!(refusal(&wrong_number).contains("the name says part 4 of 3"));
    let many = folder.path().join("model-00001-of-65535.gguf");
    fs::copy(&path, &many).unwrap();
    let message = refusal(&many);
    assert!(message.contains("are missing: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 65524 more"), "{message}");
}

#[test]
fn invalid_sources_are_refused_with_advice() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    assert!(refusal(&at("nowhere.gguf")).contains("nowhere.gguf: can't open: "));
    let error = Source::open_path(folder.path()).unwrap_err();
    assert!(error.to_string().contains("neither GGUF, safetensors"));
    assert!(error.help().unwrap().contains("pytorch_model.bin"));
    fs::write(at("pytorch_model.bin"), "PK").unwrap();
    assert!(refusal(&at("pytorch_model.bin")).contains("neither GGUF"));
    assert!(refusal(folder.path()).contains("pytorch_model.bin: it isn't a checkpoint of PyTorch"));
    fs::remove_file(at("pytorch_model.bin")).unwrap();
    fs::write(at("empty.gguf"), "").unwrap();
    assert!(refusal(&at("empty.gguf")).contains("the magic number takes 4 bytes at byte 0, but only 0 are left"));
    fs::write(at("empty.safetensors"), "").unwrap();
    assert!(refusal(&at("empty.safetensors")).contains("the file has 0 bytes"));
    write_gguf(&at("other.gguf"), &[], &[("a", 1)]);
    assert!(refusal(folder.path()).contains("the folder has 2 GGUF models: empty.gguf, other.gguf"));
    fs::remove_file(at("empty.gguf")).unwrap();
    assert_eq!(names(&Source::open_path(folder.path()).unwrap()), ["a"]);
    fs::rename(at("other.gguf"), at("without-extension")).unwrap();
    assert_eq!(names(&Source::open_path(&at("without-extension")).unwrap()), ["a"]);
}

#[test]
fn digests_are_of_the_content() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    write_gguf(&path, &[], &[("a", 1000)]);
    let source = Source::open_path(&path).unwrap();
    assert_eq!(source.files()[0].size(), fs::metadata(&path).unwrap().len());
    let expected = anec_base::ContentDigest::of(&fs::read(&path).unwrap());
    assert_eq!(source.files()[0].digest().unwrap(), &expected);
}

#[test]
fn a_tensor_reads_whole_rows_from_any_row_and_again_after_release() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    let numbers: Vec<f32> = (0..4096 * 64).map(|i| ((i % 255) as f32 - 127.0) / 127.0).collect();
    let mut blocks = Vec::new();
    gguf::write::q8_0(&numbers, &mut blocks);
    let mut writer = Writer::new();
    writer.tensor("w", SourceDtype::Q8_0, &[4096, 64]);
    writer.write(fs::File::create(&path).unwrap(), |_, out| out.write_all(&blocks)).unwrap();

    let source = Source::open_path(&path).unwrap();
    let tensor = source.tensor("w").unwrap();
    assert_eq!((tensor.rows(), tensor.columns(), tensor.byte_length()), (4096, 64, blocks.len() as u64));
    assert_eq!(tensor.bytes().unwrap(), blocks);
    let mut first = vec![0.0; 100 * 64];
    tensor.read_rows(1000, &mut first).unwrap();
    for (found, number) in first.iter().zip(&numbers[1000 * 64..]) {
        assert!((found - number).abs() <= 0.5 / 127.0 + 1e-3, "{found} for {number}");
    }
    tensor.release(0..tensor.elements());
    let mut again = vec![0.0; 100 * 64];
    tensor.read_rows(1000, &mut again).unwrap();
    assert_eq!(first, again);
    assert!(tensor.read_rows(4000, &mut again).unwrap_err().to_string().contains("100 rows from row 4000"));
}

#[test]
fn a_shape_whose_elements_overflow_is_an_error() {
    assert!(SourceTensor::random("w", &[u64::MAX, 2], 1, 0.0, 1.0).is_err());
    assert!(SourceTensor::random("w", &[0, u64::MAX, 2], 1, 0.0, 1.0).is_err());
}

#[test]
fn a_random_source_has_the_tensors_and_configuration_it_is_given() {
    let tensor = |name| SourceTensor::random(name, &[2, 3], 5, 0.0, 0.02).unwrap();
    let source = Source::random("shapes", json!({"hidden_size": 3}), vec![tensor("b"), tensor("a")]).unwrap();
    assert_eq!((source.kind().name(), names(&source)), ("random", vec!["a", "b"]));
    assert_eq!(source.config().unwrap()["hidden_size"], 3);
    assert!(Source::random("twice", json!({}), vec![tensor("a"), tensor("a")]).is_err());
}

#[test]
fn bytes_of_microscaled_numbers_are_read_exactly() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    // one row of 32 numbers: codes 0 to 15, low half of a byte first, twice; each halved
    let codes: Vec<u8> = (0..16u8).map(|i| ((2 * i) & 15) | ((((2 * i) & 15) | 1) << 4)).collect();
    let blocks = TensorView::new(Dtype::U8, vec![1, 1, 1, 16], &codes).unwrap();
    let scales = TensorView::new(Dtype::U8, vec![1, 1, 1], &[126]).unwrap();
    fs::write(&path, ::safetensors::serialize([("w_blocks", blocks), ("w_scales", scales)], None).unwrap()).unwrap();

    let source = Source::open_path(&path).unwrap();
    let blocks = source.tensor("w_blocks").unwrap();
    let codes = blocks.viewed_as(SourceDtype::F4_E2M1, &[1, 32]).unwrap();
    let scales = source.tensor("w_scales").unwrap().viewed_as(SourceDtype::F8_E8M0, &[1, 1]).unwrap();
    let weight = SourceWeight::from_blocks(codes.into(), scales.into(), ZeroPoints::All(0.0), [1, 32]).unwrap();
    let mut found = [0.0; 32];
    weight.read(0, &mut found).unwrap();
    let positive = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0];
    let all = [positive, positive.map(|number| -number)].concat();
    assert_eq!(found[..16], all);
    assert_eq!(found[16..], all);

    let message = blocks.viewed_as(SourceDtype::F4_E2M1, &[1, 64]).unwrap_err().to_string();
    assert!(message.contains("F4_E2M1 [1, 64] takes 32 bytes, but it has 16"), "{message}");
}
