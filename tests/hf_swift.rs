//! A bundle as the package that swift-transformers runs, read by a reader that is written from what that library does
//! and knows nothing of bundles.

use crate::common::coremltools;
use crate::common::folder::run;

use std::path::{Path, PathBuf};

use anec::exec::{Executable, Precision, State, Tensor, WeightCache};
use anec::package;
use anec::runtime::{Chunking, ForwardOptions, LoadedModel};

/// The library's model with a state: all of the prompt in one call, then the last token of the text so far; with it
/// zeros for one token more than the text has.
struct SwiftReader {
    model: Executable,
    state: State,
    vocab: usize,
    written: usize,
}

impl SwiftReader {
    fn open(package: &Path) -> Self {
        let package = package::open(package).unwrap();
        let function = &package.program.functions[0];
        let names: Vec<&str> = function.inputs.iter().map(|id| function.value(*id).name.as_str()).collect();
        assert_eq!(names, ["inputIds", "causalMask", "keyCache", "valueCache"]);
        let outputs: Vec<&str> = function.block.outputs.iter().map(|id| function.value(*id).name.as_str()).collect();
        assert_eq!((outputs, package.program.functions.len()), (vec!["logits"], 1));
        let model = Executable::compile(function, Precision::F16, &WeightCache::new()).unwrap();
        SwiftReader { state: model.new_state(), model, vocab: 0, written: 0 }
    }

    /// The scores after the last of all tokens of a text.
    fn scores(&mut self, text: &[i32]) -> Vec<f32> {
        let given = if self.written == 0 { text } else { &text[text.len() - 1..] };
        self.written = text.len();
        let ids = Tensor::new([1, given.len()], given.to_vec());
        let mask = Tensor::new([1, 1, 1, text.len() + 1], vec![0f32; text.len() + 1]);
        let mut outputs = self.model.run(&[("inputIds", &ids), ("causalMask", &mask)], &mut self.state).unwrap();
        let (name, logits) = outputs.remove(0);
        assert_eq!((name.as_str(), outputs.len()), ("logits", 0));
        self.vocab = logits.shape[2];
        assert_eq!(logits.shape.as_slice(), [1, given.len(), self.vocab]);
        logits.floats().unwrap()[(given.len() - 1) * self.vocab..].to_vec()
    }
}

#[test]
fn a_reader_of_the_package_computes_the_same_logits() {
    let room = tempfile::tempdir().unwrap();
    let path = |name: &str| room.path().join(name).to_str().unwrap().to_owned();
    let (code, _, stderr) = run(&["export", crate::verbs::bundle().to_str().unwrap(), "--hf-swift", &path("refused")]);
    assert!(code == 2 && stderr.contains("`state: host`"), "{stderr}");
    assert!(!Path::new(&path("refused")).exists());

    for layout in ["bcs1", "bc1s"] {
        let (bundle, out) = (path(&format!("{layout}.anec")), path(layout));
        let layout = format!("layout={layout}");
        let mut words = vec!["convert", "-m", "demo", "--out", &bundle, "--set", &layout];
        for set in ["state=host", "lengths.range=[1, 32]", "context=64", "shards.layers=[[0,2],[2,6]]"] {
            words.extend(["--set", set]);
        }
        let (code, _, stderr) = run(&words);
        assert_eq!(code, 0, "{stderr}");
        let (code, said, stderr) = run(&["export", &bundle, "--hf-swift", &out]);
        assert!(code == 0 && stderr.contains("on a Mac"), "{said}{stderr}");
        assert_eq!(run(&["export", &bundle, "--hf-swift", &out]).0, 2, "nothing is written over");
        for file in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
            assert!(Path::new(&out).join(file).exists(), "{file}");
        }

        let model = LoadedModel::on_cpu(Path::new(&bundle), Precision::F16).unwrap();
        let ids: Vec<u32> = (0..19).map(|i| (i * 97 + 31) % 2048).collect();
        let signed: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let vocab = model.bundle().model.vocab_size as usize;
        let prompt = 12;
        let chunks = [vec![prompt as u64], vec![1; ids.len() - prompt]].concat();
        let all = ForwardOptions::all(Chunking::Pattern(chunks));
        let expected = model.start(ids.len() as u64).unwrap().forward(&ids, &all).unwrap().logits;
        let mut reader = SwiftReader::open(&PathBuf::from(&out).join("demo.mlpackage"));
        for length in prompt..=ids.len() {
            let found = reader.scores(&signed[..length]);
            let expected = &expected[(length - 1) * vocab..][..vocab];
            assert_eq!(found.len(), vocab);
            let (mut worst, mut largest) = (0f32, 0f32);
            for (a, b) in found.iter().zip(expected) {
                (worst, largest) = (worst.max((a - b).abs()), largest.max(b.abs()));
            }
            assert!(worst <= 2e-3 * largest, "{layout}, {length} tokens: {worst} of {largest}");
        }
        if let Some(python) = coremltools::python() {
            let packages = tempfile::tempdir().unwrap();
            let package = Path::new(&out).join("demo.mlpackage");
            std::fs::rename(package, packages.path().join("demo.mlpackage")).unwrap();
            // the mask is one longer than the text: not all have one length
            for verdict in coremltools::judge_at(&python, packages.path(), "") {
                assert_eq!(verdict.complaints(false), "");
            }
        }
    }
}
