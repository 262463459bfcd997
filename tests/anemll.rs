//! A bundle in Anemll's layout, read by a reader that is written from the layout's description and knows nothing of
//! bundles.

use crate::common::{coremltools, folder};

use std::path::Path;

use anec::exec::{Executable, Precision, State, Tensor, WeightCache};
use anec::package;
use anec::runtime::{Chunking, ForwardOptions, LoadedModel};
use folder::run;
use serde_json::Value as Json;

/// Reader like those of apps: `meta.yaml` names the models, `prefill` processes the prompt in zero-padded batches,
/// `infer` one token at a time, and the head's parts are concatenated.
struct Reader {
    embeddings: Executable,
    infer: Executable,
    prefill: Executable,
    head: Executable,
    state: State,
    context: usize,
    batch: usize,
    pieces: usize,
}

impl Reader {
    fn open(folder: &Path) -> Self {
        let meta: Json = serde_yaml::from_str(&std::fs::read_to_string(folder.join("meta.yaml")).unwrap()).unwrap();
        let parameters = &meta["model_info"]["parameters"];
        let number = |key: &str| parameters[key].as_u64().unwrap() as usize;
        assert_eq!((number("num_chunks"), &parameters["lut_ffn"]), (1, &"none".into()));
        let prefix = parameters["model_prefix"].as_str().unwrap();
        assert_eq!(parameters["ffn"], format!("{prefix}_FFN_PF_chunk_01of01.mlmodelc"));
        let load = |key: &str, function: &str| {
            // compiled on a Mac; elsewhere the package of that name stands for it
            let name = parameters[key].as_str().unwrap().replace(".mlmodelc", ".mlpackage");
            let package = package::open(&folder.join(name)).unwrap();
            let function = package.program.functions.iter().find(|f| f.name == function).unwrap();
            Executable::compile(function, Precision::F16, &WeightCache::new()).unwrap()
        };
        let (infer, prefill) = (load("ffn", "infer"), load("ffn", "prefill"));
        Reader {
            embeddings: load("embeddings", "main"),
            state: prefill.new_state(),
            infer,
            prefill,
            head: load("lm_head", "main"),
            context: number("context_length"),
            batch: number("batch_size"),
            pieces: number("split_lm_head"),
        }
    }

    fn layers(&mut self, ids: &[i32], first: usize) -> Tensor {
        let count = ids.len();
        let only = |mut outputs: Vec<(String, Tensor)>, name: &str| {
            let (found, tensor) = outputs.remove(0);
            assert_eq!((found.as_str(), outputs.len()), (name, 0));
            tensor
        };
        let ids = Tensor::new([1, count], ids.to_vec());
        let hidden = only(self.embeddings.run(&[("input_ids", &ids)], &mut State::default()).unwrap(), "hidden_states");
        let positions: Vec<i32> = (first as i32..).take(count).collect();
        let sees = |i: usize| if i % self.context <= first + i / self.context { 0.0 } else { f32::NEG_INFINITY };
        let mask: Vec<f32> = (0..count * self.context).map(sees).collect();
        let inputs = [
            ("hidden_states", &hidden),
            ("position_ids", &Tensor::new([count], positions)),
            ("causal_mask", &Tensor::new([1, 1, count, self.context], mask)),
            ("current_pos", &Tensor::new([1], vec![first as i32])),
        ];
        let function = if count == 1 { &self.infer } else { &self.prefill };
        only(function.run(&inputs, &mut self.state).unwrap(), "output_hidden_states")
    }

    /// Takes a prompt; no logits come of it.
    fn prefill(&mut self, prompt: &[i32]) {
        for (index, batch) in prompt.chunks(self.batch).enumerate() {
            let mut filled = batch.to_vec();
            filled.resize(self.batch, 0);
            self.layers(&filled, index * self.batch);
        }
    }

    /// The logits after a token at a position.
    fn infer(&mut self, token: i32, position: usize) -> Vec<f32> {
        let hidden = self.layers(&[token], position);
        let outputs = self.head.run(&[("hidden_states", &hidden)], &mut State::default()).unwrap();
        let mut logits = Vec::new();
        for piece in 1..=self.pieces {
            let (_, tensor) = outputs.iter().find(|(name, _)| *name == format!("logits{piece}")).unwrap();
            logits.extend_from_slice(tensor.floats().unwrap());
        }
        logits
    }
}

#[test]
fn a_reader_of_the_layout_computes_the_same_logits() {
    let room = tempfile::tempdir().unwrap();
    let path = |name: &str| room.path().join(name).to_str().unwrap().to_owned();
    let (code, _, stderr) = run(&["export", crate::verbs::bundle().to_str().unwrap(), "--anemll", &path("refused")]);
    assert!(code == 2 && stderr.contains("`state: unified`"), "{stderr}");
    assert!(!Path::new(&path("refused")).exists());

    for layout in ["bcs1", "bc1s"] {
        let (bundle, out) = (path(&format!("{layout}.anec")), path(layout));
        let mut words = vec!["convert".to_owned(), "-m".into(), "demo".into(), "--out".into(), bundle.clone()];
        for set in ["state=unified", "kv_write=slice", "lengths.fixed=[1, 8]", "shards.max_mb=100", "context=64"] {
            words.extend(["--set".to_owned(), set.to_owned()]);
        }
        words.extend(["--set".to_owned(), format!("layout={layout}")]);
        let (code, _, stderr) = run(&words.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(code, 0, "{stderr}");
        let (code, said, stderr) = run(&["export", &bundle, "--anemll", &out]);
        assert!(code == 0 && stderr.contains("on a Mac"), "{said}{stderr}");
        assert_eq!(run(&["export", &bundle, "--anemll", &out]).0, 2, "nothing is written over");
        for file in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
            assert!(Path::new(&out).join(file).exists(), "{file}");
        }

        // both functions share their weights
        let size = |folder: &str, package: &str| {
            let path = format!("{folder}/{package}.mlpackage/Data/com.apple.CoreML/weights/weight.bin");
            std::fs::metadata(path).unwrap().len()
        };
        let (own, exported) = (size(&bundle, "layers_0_6"), size(&out, "qwen3_FFN_PF_chunk_01of01"));
        assert!(exported < own + own / 50, "{exported} bytes of {own}");

        let model = LoadedModel::on_cpu(Path::new(&bundle), Precision::F16).unwrap();
        let ids: Vec<u32> = (0..19).map(|i| (i * 97 + 31) % 2048).collect();
        let signed: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let vocab = model.bundle().model.vocab_size as usize;
        // whole batches, and one that is filled up
        for prompt in [16, 11] {
            let mut chunks = vec![8; prompt / 8];
            chunks.extend(vec![1; ids.len() - prompt / 8 * 8]);
            let all = ForwardOptions::all(Chunking::Pattern(chunks));
            let expected = model.start(ids.len() as u64).unwrap().forward(&ids, &all).unwrap().logits;
            let mut reader = Reader::open(Path::new(&out));
            reader.prefill(&signed[..prompt]);
            for position in prompt..ids.len() {
                let found = reader.infer(signed[position], position);
                let expected = &expected[position * vocab..][..vocab];
                let (mut worst, mut largest) = (0f32, 0f32);
                for (a, b) in found.iter().zip(expected) {
                    (worst, largest) = (worst.max((a - b).abs()), largest.max(b.abs()));
                }
                assert_eq!(found.len(), vocab);
                assert!(worst <= 2e-3 * largest, "{layout}, position {position}: {worst} of {largest}");
            }
        }
        // what a stranger's bundle says never becomes a path out of the folder
        let description = Path::new(&bundle).join("bundle.json");
        let good = std::fs::read_to_string(&description).unwrap();
        std::fs::write(&description, good.replace("\"family\": \"qwen3\"", "\"family\": \"../qwen3\"")).unwrap();
        let strange = path(&format!("{layout}-strange"));
        assert_eq!(run(&["export", &bundle, "--anemll", &strange]).0, 0);
        assert!(Path::new(&strange).join("qwen3_lm_head.mlpackage").exists());
        std::fs::write(&description, good.replace("\"tokenizer.json\"", "\"../tokenizer.json\"")).unwrap();
        let (code, _, stderr) = run(&["export", &bundle, "--anemll", &path("outside")]);
        assert!(code != 0 && stderr.contains("is outside of its folder"), "{stderr}");
        assert!(!Path::new(&path("outside")).exists() && !Path::new(&path("tokenizer.json")).exists());

        if let Some(python) = coremltools::python() {
            let packages = tempfile::tempdir().unwrap();
            for entry in std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path()) {
                if entry.extension().is_some_and(|extension| extension == "mlpackage") {
                    std::fs::rename(&entry, packages.path().join(entry.file_name().unwrap())).unwrap();
                }
            }
            for verdict in coremltools::judge(&python, packages.path()) {
                assert_eq!(verdict.complaints(false), "");
            }
        }
    }
}
