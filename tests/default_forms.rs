//! The default form of every family is usable: each is converted from its source alone and takes 40 tokens.

use crate::common::folder;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anec::Converter;
use anec::base::Result;
use anec::bundle::{Task, WHOLE_TEXT};
use anec::exec::Precision;
use anec::manifest::Manifest;
use anec::runtime::classify::windows::Windows;
use anec::runtime::encode::{self, Embedder};
use anec::runtime::{EncodedText, GenerationRequest, Hidden, LoadedModel};
use rayon::prelude::*;

const TOKENS: usize = 40;

/// One fixture for each architecture.
fn families() -> BTreeMap<String, PathBuf> {
    let mut found = BTreeMap::new();
    for folder in ["families", "encoders"] {
        let folder = folder::repository("tests/fixtures").join(folder);
        let mut sources: Vec<PathBuf> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
        sources.sort();
        for source in sources.into_iter().filter(|path| path.join("config.json").exists()) {
            let config = folder::json(&source.join("config.json"));
            found.entry(config["architectures"][0].as_str().unwrap().to_owned()).or_insert(source);
        }
    }
    found
}

/// Number of values that the model gives for 40 tokens, all of them finite; of a decoder, the generated tokens.
fn takes_forty_tokens(source: &Path, out: &Path) -> Result<usize> {
    Converter::new(Manifest::default()).source(source.display().to_string()).out(out).compile(false).convert()?;
    let model = LoadedModel::on_cpu(out, Precision::F32)?;
    let text = EncodedText { ids: (10..10 + TOKENS as u32).collect(), types: Vec::new() };
    let values = match &model.bundle().model.task {
        Task::TextGeneration => {
            let prompt = text.ids[TOKENS / 2..].to_vec();
            let request = GenerationRequest { prompt, max_tokens: TOKENS / 2, ..GenerationRequest::default() };
            let generated = request.start(&model)?.run()?.ids.len();
            assert_eq!(generated, TOKENS / 2, "the prompt and as many generated tokens");
            return Ok(generated);
        }
        Task::TokenClassification(classification) => {
            let whole = classification.label_set.band == WHOLE_TEXT;
            assert!(classification.stride > 0 || whole, "texts longer than a call can't be labelled");
            Windows::new(&model, None, Hidden::No)?.label(&text.ids)?.logits
        }
        Task::TextEmbedding(_) => Embedder::new(&model, None)?.embed(&text)?,
        Task::SequenceClassification(_) => encode::classify(&model, &text)?,
    };
    assert!(values.iter().all(|value| value.is_finite()));
    Ok(values.len())
}

#[test]
fn every_family_takes_forty_tokens_in_its_default_form() {
    let room = tempfile::tempdir().unwrap();
    let families = families();
    assert!(families.len() > 40, "{}", families.len());
    let failed = families.par_iter().filter_map(|(family, source)| {
        let found = takes_forty_tokens(source, &room.path().join(family)).map_err(|error| error.to_string());
        (!found.as_ref().is_ok_and(|count| *count > 0)).then(|| format!("{family}: {found:?}"))
    });
    let failed: Vec<String> = failed.collect();
    assert!(failed.is_empty(), "{failed:#?}");
}
