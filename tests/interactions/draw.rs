//! Fixtures of every family, and forms for them that are drawn at random.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::common::folder::{json, repository};

/// Kind of model, by its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Logits of every token, call by call.
    Decoder,
    /// Logits of labels for every token, in windows.
    TokenClassifier,
    /// A vector of a text.
    Embedder,
    /// Logits of labels of a text.
    TextClassifier,
}

/// A small model, and what transformers computes of it.
#[derive(Clone, Debug)]
pub struct Fixture {
    /// Folder of the fixture.
    pub folder: PathBuf,
    /// Reference computed by transformers.
    pub golden: PathBuf,
    /// Kind of model.
    pub kind: Kind,
    family: String,
    tokens: u64,
}

/// The fixtures of each family that has some of Hugging Face; encoders of a family are one by themselves.
pub fn fixtures() -> BTreeMap<String, Vec<Fixture>> {
    let root = repository("tests/fixtures/families");
    let listed = json(&root.join("cases.json"));
    let mut families = BTreeMap::<String, Vec<Fixture>>::new();
    for (list, kind) in [("cases", Kind::Decoder), ("classifiers", Kind::TokenClassifier)] {
        for case in listed[list].as_array().unwrap().iter().filter(|case| case["hugging_face"].is_string()) {
            let golden = &case["goldens"][0];
            let fixture = Fixture {
                folder: root.join(case["hugging_face"].as_str().unwrap()),
                golden: root.join(golden["file"].as_str().unwrap()),
                kind,
                family: case["family"].as_str().unwrap().to_owned(),
                tokens: golden["tokens"].as_u64().unwrap(),
            };
            families.entry(fixture.family.clone()).or_default().push(fixture);
        }
    }
    let mut encoders: Vec<PathBuf> =
        std::fs::read_dir(root.with_file_name("encoders")).unwrap().map(|entry| entry.unwrap().path()).collect();
    encoders.sort();
    for folder in encoders.into_iter().filter(|folder| folder.is_dir()) {
        let config = json(&folder.join("config.json"));
        let kind = match config["architectures"][0].as_str().unwrap() {
            class if class.ends_with("ForTokenClassification") => Kind::TokenClassifier,
            class if class.ends_with("Classification") => Kind::TextClassifier,
            _ => Kind::Embedder,
        };
        let family = config["model_type"].as_str().unwrap().to_owned();
        let golden = folder.join("golden.safetensors");
        let fixture = Fixture { folder, golden, kind, family, tokens: 0 };
        families.entry(format!("encoders of {}", fixture.family)).or_default().push(fixture);
    }
    families
}

/// Number formats, and how near the logits stay to those of unquantized weights at least, over a whole text. The
/// weights of these models are noise, which few levels hold badly, and a router may choose another expert.
const QUANTS: [(&str, f64); 8] = [
    // scaled weights and tables of the host are rounded to fp16
    ("{weights: none}", 0.99995),
    ("{weights: int8}", 0.97),
    ("{weights: int8, granularity: per_channel}", 0.98),
    ("{weights: int8, granularity: {block: 8}}", 0.98),
    ("{weights: palette8, row_scale: true}", 0.98),
    ("{weights: palette6, granularity: {group: 8}}", 0.95),
    ("{weights: int4, granularity: per_channel}", 0.6),
    ("{weights: palette4, row_scale: true}", 0.7),
];

/// Numbers that look random: SplitMix64.
pub struct Draw(pub u64);

impl Draw {
    /// One of the numbers below `count`.
    pub fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % count as u64) as usize
    }

    /// One of a list.
    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// A model in a form.
pub struct Combination {
    /// The model.
    pub fixture: Fixture,
    /// Keys of its manifest.
    pub sets: Vec<String>,
    /// Sizes of a decoder's calls, beside one token at a time or the only size there is.
    pub sizes: Vec<u64>,
    /// How near what it gives stays to what transformers computes.
    pub least: f64,
}

/// A fixture of a family in a form that a manifest may ask for.
pub fn combination(draw: &mut Draw, fixtures: &[Fixture]) -> Combination {
    let fixture = fixtures[draw.below(fixtures.len())].clone();
    let config = json(&fixture.folder.join("config.json"));
    let text = config.get("text_config").unwrap_or(&config);
    let has = |key: &str| text.get(key).is_some_and(|value| !value.is_null() && *value != 0);
    let mut sets = Vec::new();
    let mut set = |key: &str, value: &str| sets.push(format!("{key}={value}"));

    set("layout", draw.one_of(&["bcs1", "bc1s"]));
    set("linear", draw.one_of(&["conv", "linear", "matmul"]));
    set("norm", draw.one_of(&["accurate", "naive", "layer_norm_concat", "prescale"]));
    set("attention", draw.one_of(&["per_head", "grouped"]));
    set("activations", draw.one_of(&["stable", "native"]));
    set("rope", draw.one_of(&["halves", "product"]));
    if has("num_experts") || has("num_local_experts") {
        let experts = draw.one_of(&["packed", "split", "routed"]);
        set("experts", experts);
        if experts == "split" {
            set("shards.max_experts", &(1 + draw.below(4)).to_string());
        }
    }
    // a few labels say little of what few bits do to a whole model
    let few_labels =
        fixture.kind == Kind::TextClassifier || fixture.kind == Kind::TokenClassifier && fixture.tokens == 0;
    let quants = if few_labels { &QUANTS[..3] } else { &QUANTS };
    let (quant, least) = draw.one_of(quants);
    set("quant", quant);
    if fixture.kind != Kind::Decoder {
        set("context", "64");
        set("lengths", draw.one_of(&["{range: [1, 64]}", "{fixed: [48, 64]}"]));
        return Combination { fixture, sets, sizes: Vec::new(), least };
    }
    // a dynamic RoPE is that of the longest text
    let dynamic = ["rope_scaling", "rope_parameters"].iter().any(|key| {
        let scaling = &text[*key];
        scaling["rope_type"] == "dynamic" || scaling["type"] == "dynamic"
    });
    set("context", &if dynamic { fixture.tokens } else { 48 }.to_string());
    let family = fixture.family.as_str();
    let recurrent = ["conv_L_cache", "linear_num_key_heads", "cca_time0", "mamba_n_heads"].iter().any(|key| has(key))
        || ["lfm2", "qwen3_5", "qwen3_next", "zaya"].iter().any(|name| family.starts_with(name));
    let state = draw.one_of(&["per_layer", "unified", "host"]);
    set("state", state);
    if recurrent && state != "host" {
        set("recurrent_states", draw.one_of(&["state", "input_output"]));
    }
    // a recurrence can't be given tokens that aren't there, so that it needs calls of one; nor has a context that ends
    // with the text room for them
    let lengths = draw.below(if recurrent || dynamic { 4 } else { 5 });
    let (lengths, sizes): (&str, &[u64]) = [
        ("{range: [1, 4]}", &[4, 3, 1][..]),
        ("{range: [1, 16]}", &[7, 16]),
        ("{fixed: [1, 4]}", &[4, 1]),
        ("{fixed: [1, 2, 5]}", &[5, 2, 1]),
        ("{fixed: [7]}", &[7]),
    ][lengths];
    set("lengths", lengths);
    if state != "host" {
        let fixed = lengths.contains("fixed");
        set("kv_write", draw.one_of(if fixed { &["mask", "slice"][..] } else { &["mask"] }));
    }
    let divide = draw.one_of(&["none", "none", "attention_mlp"]);
    set("shards.divide", divide);
    set("lm_head.split", draw.one_of(&["1", "2", "3"]));
    set("lm_head.logits", "true");
    // drawn apart, so that a seed's other choices stay as they were
    let mut of_head = Draw(draw.0);
    match of_head.below(3) {
        0 => set("lm_head.argmax", "true"),
        1 => set("lm_head.top_k", "3"),
        _ => {}
    }
    let apart = divide != "none" || sets.iter().any(|set| ["experts=split", "experts=routed"].contains(&set.as_str()));
    if !apart && of_head.below(3) == 0 {
        sets.push("lm_head.split=none".into());
    }
    Combination { fixture, sets, sizes: sizes.to_vec(), least }
}
