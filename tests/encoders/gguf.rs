//! Encoders, embedding models and rerankers from GGUF: files as llama.cpp's converter writes them, made with its gguf
//! package, give what transformers computes of the same values, and their tokenizers the ids of the tokenizers that
//! they were made of.

use super::*;
use crate::common::gguf::Parts;

/// Cases with a `model.gguf`.
const CASES: [&str; 7] = [
    "bert-mean",
    "embeddinggemma-period",
    "modernbert-cls",
    "modernbert-rank",
    "qwen3-embedding",
    "roberta-mean",
    "xlm-roberta-labels",
];

fn file(case: &str) -> PathBuf {
    fixture(case).join("model.gguf")
}

/// Change of a GGUF file.
type Change<'a> = &'a dyn Fn(&mut Parts);

/// The error of a conversion.
fn refused(source: &Path) -> String {
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("b");
    let (code, _, stderr) =
        folder::run(&["convert", "--source", source.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    assert_eq!(code, 4, "{stderr}");
    stderr
}

#[test]
fn hidden_states_vectors_and_logits_agree_with_transformers() {
    let forms: [&[&str]; 2] = [&[], &["layout=bc1s", "attention=grouped", "linear=linear"]];
    let all: Vec<_> = CASES.iter().flat_map(|case| forms.map(|form| (*case, form))).collect();
    all.par_iter().for_each(|(case, form)| {
        let golden = Golden::read(&fixture(case).join("golden.safetensors"));
        let room = tempfile::tempdir().unwrap();
        let model = convert(&file(case), &room.path().join("b"), form);
        let of_folder = convert(&fixture(case), &room.path().join("folder"), form);
        let facts = &model.bundle().model;
        assert_eq!(facts.task, of_folder.bundle().model.task, "{case}");
        let width = facts.hidden_size as usize;
        let states = hidden(&model, &golden.text, Chunking::Pattern(vec![3, 1, 4]));
        assert!(states.len() > 2, "{case}");
        for (layer, found) in states.iter().enumerate() {
            let rows = found.chunks(width).zip(golden.tensors[&format!("hidden.{layer}")].chunks(width));
            let worst = rows.map(|(found, expected)| cosine(found, expected)).fold(1.0, f64::min);
            assert!(worst > 0.99999, "{case} {form:?}: hidden {layer}: {worst}");
        }
        match golden.tensors.get("embedding") {
            Some(expected) => {
                let found = Embedder::new(&model, None).unwrap().embed(&golden.text).unwrap();
                assert!(cosine(&found, expected) > 0.99999, "{case} {form:?}");
                assert!(largest_difference(&found, expected) < 2e-3, "{case} {form:?}: of the same length, too");
            }
            None => {
                let (found, expected) = (encode::classify(&model, &golden.text).unwrap(), &golden.tensors["logits"]);
                assert!(largest_difference(&found, expected) < 3e-3, "{case} {form:?}: {found:?} {expected:?}");
            }
        }
    });
}

#[test]
fn pieces_are_those_of_the_folder() {
    let room = tempfile::tempdir().unwrap();
    let of = |source: &Path, name: &str| {
        let model = convert(source, &room.path().join(name), &[]);
        Tokenizer::of(model.bundle(), model.folder()).unwrap()
    };
    let texts = [
        "the sea",
        "The SEA is singing, and sing-sing.",
        "",
        "é ÀB 漢字 x1",
        "cafe\u{301} of Singers' songs, don't 12",
        "  a\tb\n[SEP] [MASK] </s>c",
        &"z".repeat(101),
    ];
    for case in ["bert-mean", "roberta-mean", "modernbert-cls"] {
        let tokenizers = [of(&fixture(case), &format!("{case} folder")), of(&file(case), &format!("{case} file"))];
        for text in texts {
            for second in [None, Some("the is. a")] {
                for special in [false, true] {
                    let [own, rebuilt] =
                        tokenizers.each_ref().map(|of| of.encode_whole(text, second, special).unwrap());
                    assert_eq!(own, rebuilt, "{case} {text:?} {second:?}");
                    assert!(own.ids.len() >= 2, "{case}");
                }
            }
        }
    }
}

#[test]
fn unigram_pieces_are_those_of_sentence_piece() {
    let room = tempfile::tempdir().unwrap();
    let model = convert(&file("xlm-roberta-labels"), &room.path().join("b"), &[]);
    let tokenizer = Tokenizer::of(model.bundle(), model.folder()).unwrap();
    let golden = folder::json(&fixture("xlm-roberta-labels").join("tokenizer-golden.json"));
    let texts = golden["texts"].as_array().unwrap();
    assert!(texts.len() > 8);
    for case in texts {
        let text = tokenizer.encode_whole(case["text"].as_str().unwrap(), case["pair"].as_str(), false).unwrap();
        assert_eq!(json!(text.ids), case["ids"], "{case}");
        assert!(text.types.iter().all(|kind| *kind == 0), "{case}");
    }
}

#[test]
fn what_a_file_cannot_say_or_says_otherwise_is_refused() {
    let error = refused(&file("bert-reranker"));
    for part in ["`cls.weight` is missing", "classifiers of BERT", "Hugging Face folder"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let room = tempfile::tempdir().unwrap();
    let changed = room.path().join("changed.gguf");
    let changes: [(&str, Change, &str); 9] = [
        (
            "bert-mean",
            &|parts| parts.set("bert.attention.causal", true),
            "`bert.attention.causal` is true; expected false",
        ),
        ("bert-mean", &|parts| parts.set("bert.pooling_type", 7_u32), "bert.pooling_type`: the value is 7"),
        (
            "bert-mean",
            &|parts| parts.set("tokenizer.ggml.token_type_count", 3_u32),
            "expected 2, the rows of token_types",
        ),
        ("bert-mean", &|parts| parts.set("bert.attention.max_alibi_bias", 8.0_f32), "`bert.attention.max_alibi_bias`"),
        ("bert-mean", &|parts| parts.set("bert.pooling_type", 4_u32), "`cls.weight` is missing"),
        ("qwen3-embedding", &|parts| parts.set("qwen3.pooling_type", 4_u32), "heads of decoders"),
        ("qwen3-embedding", &|parts| parts.set("qwen3.attention.causal", false), "expected true in files of qwen3"),
        (
            "embeddinggemma-period",
            &|parts| parts.set("gemma-embedding.dense_2_feat_out", 41_u32),
            "the value is 41, but dense_2.weight has 40",
        ),
        ("modernbert-cls", &|parts| parts.set("modern-bert.rope.scaling.type", "yarn"), "expected \"none\""),
    ];
    for (case, change, expected) in changes {
        let mut parts = Parts::read(&file(case));
        change(&mut parts);
        parts.write(&changed);
        let error = refused(&changed);
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// DistilBERT has no types of tokens: as if they were nothing.
#[test]
fn a_file_without_types_of_tokens_has_none() {
    let room = tempfile::tempdir().unwrap();
    let embed = |name: &str, change: Change| {
        let mut parts = Parts::read(&file("bert-mean"));
        change(&mut parts);
        let path = room.path().join(format!("{name}.gguf"));
        parts.write(&path);
        let model = convert(&path, &room.path().join(name), &[]);
        Embedder::new(&model, None).unwrap().embed(&EncodedText { ids: vec![2, 30, 7, 3], types: vec![0; 4] }).unwrap()
    };
    let zeros = embed("zeros", &|parts| parts.data("token_types.weight").fill(0));
    let none = embed("none", &|parts| parts.tensors.retain(|(name, ..)| name != "token_types.weight"));
    assert!(cosine(&zeros, &none) > 0.999_999_9);
}

/// A file of the published model, made with the gguf package, gives the vectors and ids of its folder and of
/// transformers.
#[test]
fn the_published_minilm_gives_the_vectors_of_transformers() {
    let Some(source) = testing::real_model("all-minilm-l6-v2") else { return };
    let Some(python) = std::env::var_os("ANEC_PYTHON") else {
        anec::base::skipped("all-MiniLM-L6-v2 from GGUF: ANEC_PYTHON isn't set");
        return;
    };
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("minilm.gguf");
    let script = folder::repository("tests/fixtures/all-minilm-l6-v2/gguf_model.py");
    let made = std::process::Command::new(python).arg(script).args([&source, &file]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let model = convert(&file, &room.path().join("b"), &[]);
    let of_folder = convert(&source, &room.path().join("folder"), &[]);
    // no key says where texts end
    let mut task = of_folder.bundle().model.task.clone();
    if let Task::TextEmbedding(embedding) = &mut task {
        assert_eq!(embedding.texts.max_tokens.take(), Some(512));
    }
    assert_eq!(model.bundle().model.task, task);
    let [tokenizer, own] = [&model, &of_folder].map(|model| Tokenizer::of(model.bundle(), model.folder()).unwrap());
    let (texts, expected) = minilm_golden();
    let embedder = Embedder::new(&model, None).unwrap();
    for (text, expected) in texts.iter().zip(&expected) {
        let ids = tokenizer.encode_whole(text, None, true).unwrap();
        assert_eq!(ids, own.encode_whole(text, None, true).unwrap(), "{text:?}");
        let found = cosine(&embedder.embed(&ids).unwrap(), expected);
        assert!(found > 0.99999, "{text:?}: {found}");
    }
    let corpus = folder::json(&folder::repository("tests/fixtures/tokenizer/corpus.json"));
    let cases = corpus["cases"].as_array().unwrap();
    assert!(cases.len() > 100);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        for second in [None, Some("A café, 2nd.")] {
            let both = [&tokenizer, &own].map(|tokenizer| tokenizer.encode_whole(text, second, true).unwrap());
            assert_eq!(both[0], both[1], "{text:?}");
        }
    }
    // the command gives the same
    let vectors = room.path().join("v.safetensors");
    let (bundle, vectors_path) = (room.path().join("b"), vectors.to_str().unwrap());
    let (code, _, stderr) =
        folder::run(&["embed", bundle.to_str().unwrap(), "--prompt", &texts[0], "--out", vectors_path]);
    assert_eq!(code, 0, "{stderr}");
    assert!(cosine(&Golden::read(&vectors).tensors["embedding"], &expected[0]) > 0.99999);
}
