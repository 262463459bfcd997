//! Multi-token prediction: the layer of a model of the Qwen3.5 family that guesses tokens, converted with `draft: mtp`.

use crate::common::folder;
use crate::common::http;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use anec::exec::Precision;
use anec::runtime::sampling::Sampling;
use anec::runtime::{Chunking, ForwardOptions, Generation, GenerationRequest, Hidden, LoadedModel, PreviousHidden};
use folder::{repository, run};
use http::Server;
use safetensors::{Dtype, SafeTensors, View};
use serde_json::json;

/// A folder for this run's bundles.
fn room() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("drafts-{}", std::process::id()))
}

fn fixture(name: &str) -> PathBuf {
    repository("tests/fixtures/families").join(name)
}

/// Converts a folder with its layer that drafts, in fp16 if nothing else is set.
fn converted(source: &Path, name: &str, more: &[&str]) -> Arc<LoadedModel> {
    let out = room().join(format!("{name}.anec"));
    let mut arguments =
        vec!["convert", "--source", source.to_str().unwrap(), "--out", out.to_str().unwrap(), "--force"];
    let settings = ["context=64", "draft=mtp", "quant.weights=none"];
    settings.iter().chain(more).for_each(|setting| arguments.extend(["--set", setting]));
    let (code, _, stderr) = run(&arguments);
    assert_eq!(code, 0, "{stderr}");
    LoadedModel::on_cpu(&out, Precision::F32).unwrap()
}

/// Output of `mtp_golden.py`.
struct Golden {
    tokens: Vec<u32>,
    drafted: Vec<u32>,
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

impl Golden {
    fn read() -> Golden {
        let bytes = std::fs::read(fixture("qwen3_5-default/golden-mtp.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| -> Vec<[u8; 4]> {
            tensors.tensor(name).unwrap().data().chunks_exact(4).map(|word| word.try_into().unwrap()).collect()
        };
        let tokens = |name: &str| words(name).into_iter().map(u32::from_le_bytes).collect();
        let floats = |name: &str| words(name).into_iter().map(f32::from_le_bytes).collect();
        Golden {
            tokens: tokens("tokens"),
            drafted: tokens("drafted"),
            hidden: floats("hidden"),
            logits: floats("logits"),
        }
    }
}

/// The smallest cosine of rows.
fn least_cosine(found: &[f32], expected: &[f32], width: usize) -> f64 {
    assert_eq!(found.len(), expected.len());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let rows = found.chunks_exact(width).zip(expected.chunks_exact(width));
    rows.map(|(f, e)| dot(f, e) / (dot(f, f) * dot(e, e)).sqrt()).fold(1.0, f64::min)
}

#[test]
fn the_layer_computes_what_transformers_modules_compute() {
    let golden = Golden::read();
    let (count, width, vocabulary) = (golden.tokens.len(), 24, 131);
    let forms: [(&str, &[&str]); 8] = [
        ("plain", &[]),
        ("one", &["lm_head.split=none"]),
        ("host", &["state=host", "layout=bc1s", "attention=grouped"]),
        ("unified", &["state=unified", "linear=matmul", "lm_head.split=3"]),
        ("fixed", &["lengths.fixed=[1,4]", "context=[32,64]", "linear=linear"]),
        ("scaled", &["numerics.scale=0.25", "recurrent_states=input_output", "lm_head={argmax: true, logits: true}"]),
        ("divided", &["shards.divide=attention_mlp", "rope=product"]),
        ("equalized", &["transforms=[rotate,equalize]"]),
    ];
    for (name, settings) in forms {
        let model = converted(&fixture("qwen3_5-default"), &format!("golden-{name}"), settings);
        let layer = model.draft_layer().unwrap().expect("a layer that drafts");
        let ask = |chunking| ForwardOptions::all(chunking).recording(Hidden::BetweenFunctions);
        let text = &golden.tokens[..count - 1];
        let given = model.start(count as u64).unwrap().forward(text, &ask(Chunking::Largest)).unwrap();
        let hidden = given.hidden.last().unwrap();
        // transformed weights are rounded to fp16, which the stored ones are already
        let least = if name == "equalized" { 0.999 } else { 0.99999 };
        let cosine = least_cosine(hidden, &golden.hidden, width);
        assert!(cosine > least, "{name}: {cosine}");
        for chunking in [Chunking::Largest, Chunking::Pattern(vec![1]), Chunking::Pattern(vec![4, 1, 4, 1, 1])] {
            let ask = ask(chunking);
            let mut session = layer.start(64).unwrap();
            let previous = PreviousHidden { rows: hidden, drafted: false };
            let mut given = session.forward_behind(previous, &golden.tokens[1..], &ask).unwrap();
            let mut logits = given.logits.clone();
            for token in &golden.drafted {
                let own = given.hidden.last().unwrap();
                let previous = PreviousHidden { rows: &own[own.len() - width..], drafted: true };
                given = session.forward_behind(previous, &[*token], &ask).unwrap();
                logits.extend(&given.logits);
            }
            let cosine = least_cosine(&logits, &golden.logits, vocabulary);
            assert!(cosine > least, "{name}, {ask:?}: {cosine}");
            let likeliest = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32;
            let rows: Vec<u32> = logits.chunks_exact(vocabulary).map(likeliest).collect();
            assert_eq!(rows[count - 2..][..golden.drafted.len()], golden.drafted, "{name}");
        }
        // without hidden states it computes nothing
        let refused = layer.start(64).unwrap().forward(&[3], &ForwardOptions::last()).unwrap_err().to_string();
        assert!(refused.contains("previous_hidden"), "{refused}");
    }
}

/// A tensor to be written.
struct Values(Vec<usize>, Vec<f32>);

impl View for &Values {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.0
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.1.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()
    }

    fn data_len(&self) -> usize {
        4 * self.1.len()
    }
}

/// The tensors of a fixture.
fn tensors(name: &str) -> BTreeMap<String, Values> {
    let bytes = std::fs::read(fixture(name).join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let half = |pair: &[u8]| half::f16::from_le_bytes([pair[0], pair[1]]).to_f32();
    let values = |name: &str| {
        let view = tensors.tensor(name).unwrap();
        let values = match view.dtype() {
            Dtype::F16 => view.data().chunks_exact(2).map(half).collect(),
            Dtype::F32 => {
                view.data().chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
            }
            other => panic!("{name} holds {other:?}"),
        };
        Values(view.shape().to_vec(), values)
    };
    tensors.names().into_iter().map(|name| (name.to_owned(), values(name))).collect()
}

/// A model whose layers add nothing, so that the next token depends on the last alone, and whose layer that drafts
/// passes the embedding on: it guesses right.
fn twins() -> &'static Arc<LoadedModel> {
    static MODEL: OnceLock<Arc<LoadedModel>> = OnceLock::new();
    MODEL.get_or_init(|| {
        let (folder, vocabulary, width) = (room().join("twins"), 379, 24);
        std::fs::create_dir_all(&folder).unwrap();
        let changed = |name: &str, Values(shape, values): Values| -> Values {
            let count = values.len();
            let adds = ["o_proj.weight", "out_proj.weight", "down_proj.weight"].iter().any(|end| name.ends_with(end));
            // the gains of these are 1 and the weight
            let plain = ["model.norm.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"].contains(&name);
            match name {
                "model.embed_tokens.weight" => {
                    let mut state = 1u32;
                    let mut next = || {
                        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
                    };
                    Values(vec![vocabulary, width], (0..vocabulary * width).map(|_| 0.7 * next()).collect())
                }
                "mtp.fc.weight" => {
                    let one = |at: usize| f32::from(u8::from(at / (2 * width) == at % (2 * width)));
                    Values(shape, (0..count).map(one).collect())
                }
                _ if adds || plain => Values(shape, vec![0.0; count]),
                _ => Values(shape, values),
            }
        };
        let tensors = tensors("qwen3_5-default").into_iter();
        let tensors: BTreeMap<String, Values> =
            tensors.map(|(name, values)| (name.clone(), changed(&name, values))).collect();
        safetensors::serialize_to_file(&tensors, None, &folder.join("model.safetensors")).unwrap();
        let mut config = folder::json(&fixture("qwen3_5-default/config.json"));
        (config["vocab_size"], config["eos_token_id"]) = (json!(vocabulary), json!(368));
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(fixture("qwen2-tokenizer").join(file), folder.join(file)).unwrap();
        }
        converted(&folder, "twins", &[])
    })
}

fn random() -> &'static Arc<LoadedModel> {
    static MODEL: OnceLock<Arc<LoadedModel>> = OnceLock::new();
    MODEL.get_or_init(|| converted(&fixture("qwen3_5-default"), "random", &[]))
}

/// A layer with experts: a copy of the model's last one, which is given the embedding and the hidden state in equal
/// parts.
#[test]
fn a_layer_with_experts_is_the_same_in_every_form() {
    for name in ["qwen3_5_moe-default", "qwen3_next-default"] {
        let (folder, width) = (room().join(name), 24);
        std::fs::create_dir_all(&folder).unwrap();
        let mut tensors = tensors(name);
        let of_layer = tensors.iter().filter_map(|(name, Values(shape, values))| {
            let rest = name.strip_prefix("model.layers.3.")?;
            Some((format!("mtp.layers.0.{rest}"), Values(shape.clone(), values.clone())))
        });
        let of_layer: Vec<_> = of_layer.collect();
        assert!(of_layer.iter().any(|(name, _)| name.contains("experts")) && of_layer.len() > 9);
        tensors.extend(of_layer);
        for norm in ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"] {
            tensors.insert(format!("mtp.{norm}.weight"), Values(vec![width], vec![0.0; width]));
        }
        let half = |at: usize| if at / (2 * width) == at % width { 0.5 } else { 0.0 };
        let join = Values(vec![width, 2 * width], (0..2 * width * width).map(half).collect());
        tensors.insert("mtp.fc.weight".into(), join);
        safetensors::serialize_to_file(&tensors, None, &folder.join("model.safetensors")).unwrap();
        std::fs::copy(fixture(name).join("config.json"), folder.join("config.json")).unwrap();
        let mut first: Option<Vec<f32>> = None;
        for form in ["packed", "split", "routed"] {
            let model = converted(&folder, &format!("{name}-{form}"), &[&format!("experts={form}")]);
            let layer = model.draft_layer().unwrap().unwrap();
            let hidden: Vec<f32> = (0..PROMPT.len() * width).map(|at| ((at * 37 % 101) as f32 - 50.0) / 30.0).collect();
            let previous = PreviousHidden { rows: &hidden, drafted: false };
            let ask = ForwardOptions::all(Chunking::Largest);
            let logits = layer.start(64).unwrap().forward_behind(previous, &PROMPT, &ask).unwrap().logits;
            let vocabulary = logits.len() / PROMPT.len();
            let cosine = least_cosine(&logits, first.get_or_insert_with(|| logits.clone()), vocabulary);
            assert!(cosine > 0.99999, "{name}, {form}: {cosine}");
            let plain = request(&PROMPT, 20, Sampling::default());
            let found = start(&model, &plain, 3).run().unwrap();
            assert_eq!(found.ids, plain.start(&model).unwrap().run().unwrap().ids);
            assert!(found.speculation.drafted > 0);
        }
    }
}

fn request(prompt: &[u32], max_tokens: usize, sampling: Sampling) -> GenerationRequest {
    GenerationRequest { prompt: prompt.to_vec(), max_tokens, sampling, ..GenerationRequest::default() }
}

fn start(model: &Arc<LoadedModel>, request: &GenerationRequest, tokens: usize) -> Generation {
    let layer = model.draft_layer().unwrap().unwrap();
    request.clone().start(model).unwrap().with_draft(&layer, tokens).unwrap()
}

const PROMPT: [u32; 7] = [3, 1, 4, 1, 5, 9, 1];

#[test]
fn its_guesses_change_calls_and_nothing_else() {
    for (model, right) in [(twins(), true), (random(), false)] {
        for (temperature, repetition_penalty) in [(0.0, 1.0), (0.8, 1.0), (0.8, 1.2), (0.0, 1.2)] {
            for seed in 0..4 {
                let sampling = Sampling { temperature, repetition_penalty, seed, ..Sampling::default() };
                let plain = request(&PROMPT, 40, sampling);
                let expected = plain.clone().start(model).unwrap().run().unwrap();
                for (tokens, chunk, speculation) in [(1, 99, 0), (2, 2, 0), (3, 99, 0), (3, 3, 2)] {
                    let asked = GenerationRequest { speculation, ..plain.clone() };
                    let found = start(model, &asked, tokens).with_prompt_chunk(chunk).run().unwrap();
                    let what = format!("{sampling:?}, {tokens} tokens");
                    assert_eq!((&found.ids, found.finish), (&expected.ids, expected.finish), "{what}");
                    assert!(found.speculation.drafted > 0, "{what}");
                    if right && speculation == 0 {
                        let counts = found.speculation;
                        assert_eq!(counts.accepted, counts.drafted, "{what}");
                        let calls = found.ids.len() - 1 - counts.accepted;
                        assert!(calls <= (found.ids.len() - 1).div_ceil(tokens + 1), "{what}: {calls} calls");
                    }
                }
            }
        }
    }
}

/// The share of each text of two tokens over many seeds is its probability: chi-squared of the tokens that follow the
/// prompt, with those grouped that are too rare.
#[test]
fn the_distribution_is_the_models() {
    const TEXTS: u64 = 2_000;
    let model = twins();
    let layer = model.draft_layer().unwrap().unwrap();
    let sampling = |seed| Sampling { temperature: 1.0, seed, ..Sampling::default() };
    // each token depends on the one before alone
    let probabilities = |token: u32| -> Vec<f64> {
        let logits = model.start(4).unwrap().forward(&[token], &ForwardOptions::last()).unwrap().logits;
        let weights: Vec<f64> = logits.iter().map(|logit| f64::from(*logit).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / total).collect()
    };
    let rows: Vec<Vec<f64>> = (0..379).map(probabilities).collect();
    // of the third token: over all the first and second can be
    let step = |from: &[f64]| -> Vec<f64> {
        (0..from.len()).map(|to| from.iter().zip(&rows).map(|(share, row)| share * row[to]).sum()).collect()
    };
    let mut expected = vec![0.0; 379];
    expected[PROMPT[6] as usize] = 1.0;
    for _ in 0..3 {
        expected = step(&expected);
    }
    let mut counts = vec![0u64; 379];
    let mut accepted = 0;
    let mut session = Some(model.start(PROMPT.len() as u64 + 3).unwrap());
    for seed in 0..TEXTS {
        let asked = request(&PROMPT, 3, sampling(seed));
        let mut generation = session.take().unwrap().generate(asked).unwrap().with_draft(&layer, 2).unwrap();
        let output = generation.run().unwrap();
        accepted += output.speculation.accepted;
        counts[output.ids[2] as usize] += 1;
        session = Some(generation.into_session());
    }
    assert!(accepted > 0, "drafts took part");
    let (mut statistic, mut groups, mut rest) = (0.0, 0, (0.0, 0.0));
    for (share, count) in expected.iter().zip(&counts) {
        let wanted = share * TEXTS as f64;
        if wanted < 5.0 {
            rest = (rest.0 + wanted, rest.1 + *count as f64);
        } else {
            statistic += (*count as f64 - wanted).powi(2) / wanted;
            groups += 1;
        }
    }
    if rest.0 > 0.0 {
        statistic += (rest.1 - rest.0).powi(2) / rest.0;
        groups += 1;
    }
    // the mean of chi-squared is its degrees of freedom, its deviation the root of twice as many: four deviations
    let degrees = f64::from(groups - 1);
    assert!(groups > 5 && statistic < degrees + 4.0 * (2.0 * degrees).sqrt(), "{statistic} of {degrees}");
}

#[test]
fn a_text_that_goes_on_from_another_has_drafts_too() {
    for (model, right) in [(twins(), true), (random(), false)] {
        let first = request(&PROMPT, 6, Sampling::default());
        let mut generation = start(model, &first, 3);
        let ids = generation.run().unwrap().ids;
        let longer = request(&[&PROMPT[..], &ids, &[7, 8]].concat(), 12, Sampling::default());
        let expected = longer.clone().start(model).unwrap().run().unwrap();
        let layer = model.draft_layer().unwrap().unwrap();
        let mut session = generation.into_session();
        session.set_length(longer.length(model)).unwrap();
        let found = session.generate(longer).unwrap().with_draft(&layer, 3).unwrap().run().unwrap();
        assert!(found.timings.cached_tokens > PROMPT.len());
        assert_eq!(found.ids, expected.ids);
        assert!(found.speculation.drafted > 0);
        assert!(!right || found.speculation.accepted == found.speculation.drafted);
    }
}

#[test]
fn texts_with_and_without_drafts_are_written_side_by_side() {
    let model = random();
    let asked = [request(&PROMPT, 20, Sampling::default()), request(&PROMPT[2..], 20, Sampling::default())];
    let expected = asked.each_ref().map(|own| own.clone().start(model).unwrap().run().unwrap().ids);
    let mut texts = vec![start(model, &asked[0], 3), asked[1].clone().start(model).unwrap()];
    while texts.iter().any(|text| text.output().ids.len() < 20) {
        Generation::compute_together(&mut texts);
        texts.iter_mut().for_each(|text| assert!(text.step().is_ok()));
    }
    let found: Vec<Vec<u32>> = texts.iter().map(|text| text.output().ids).collect();
    assert_eq!(found, expected);
    assert!(texts[0].output().speculation.drafted > 0);
}

#[test]
fn the_program_and_the_server_use_it() {
    let bundle = twins().folder().to_str().unwrap();
    let write = |more: &[&str]| {
        let arguments = [&["run", bundle, "--prompt", "the lady", "--max-tokens", "24", "--json"], more].concat();
        let (code, stdout, stderr) = run(&arguments);
        assert_eq!(code, 0, "{stderr}");
        serde_json::from_str::<serde_json::Value>(&stdout).unwrap()
    };
    let (plain, drafted) = (write(&[]), write(&["--draft", "mtp", "--draft-tokens", "2"]));
    assert_eq!((&plain["ids"], &plain["text"]), (&drafted["ids"], &drafted["text"]));
    assert_eq!(plain["speculation"]["drafted"], 0);
    assert!(drafted["speculation"]["accepted"].as_u64().unwrap() > 10, "{drafted}");

    let server = Server::start(Path::new(bundle), &["--draft", "mtp"]);
    let answer = server.complete(json!({"prompt": "the lady", "max_tokens": 24, "temperature": 0}));
    assert_eq!(answer["choices"][0]["text"], plain["text"]);
    assert!(answer["anec"]["accepted_tokens"].as_u64().unwrap() > 10, "{answer}");
}

#[test]
fn what_has_no_such_layer_says_so() {
    let llama = fixture("llama-default");
    let out = room().join("none.anec");
    let convert = |source: &Path| {
        run(&["convert", "--source", source.to_str().unwrap(), "--out", out.to_str().unwrap(), "--set", "draft=mtp"])
    };
    for source in [llama.clone(), fixture("qwen3_5-default/model.gguf")] {
        let (code, _, stderr) = convert(&source);
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains("there is no layer for `draft: mtp` in it"), "{stderr}");
    }
    // the family has one, the file hasn't
    let (code, _, stderr) = convert(&fixture("qwen3_5-grouped"));
    assert!(code != 0 && stderr.contains("mtp."), "{stderr}");

    let arguments =
        ["convert", "--source", llama.to_str().unwrap(), "--out", out.to_str().unwrap(), "--set", "context=64"];
    let (code, _, stderr) = run(&arguments);
    assert_eq!(code, 0, "{stderr}");
    let (code, _, stderr) = run(&["run", out.to_str().unwrap(), "--ids", "3,1", "--draft", "mtp"]);
    assert!(code == 2 && stderr.contains("has no draft layer"), "{stderr}");
}

#[test]
fn what_is_said_of_a_bundle_names_it() {
    let bundle = random().folder().to_str().unwrap();
    let (code, stdout, stderr) = run(&["inspect", bundle]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("draft_layers_0_1.mlpackage") && stdout.contains("layer that drafts"), "{stdout}");
    let (code, stdout, stderr) = run(&["validate", bundle, "--structure", "--json", "-"]);
    assert_eq!(code, 0, "{stderr}");
    let report: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let gates = report["gates"].as_array().unwrap();
    let structure = gates.iter().find(|gate| gate["gate"] == "structure").unwrap();
    let checks = structure["checks"].as_array().unwrap();
    assert!(checks.iter().all(|check| check["verdict"] == "passed"), "{structure}");
    assert!(checks.iter().any(|check| check["subject"] == "draft_layers_0_1.mlpackage"), "{structure}");
}
