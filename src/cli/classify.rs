//! `anec classify`

use std::ops::Range;
use std::sync::Arc;

use serde_json::{Value as Json, json};

use super::model::{Input, Labels, Runner};
use super::{print, print_json};
use anec::base::Result;
use anec::report::table::table;
use anec::runtime::classify::bioes::{BioesTag, Scheme, Viterbi};
use anec::runtime::classify::windows::Windows;
use anec::runtime::{EncodedText, Hidden, LoadedModel, Logprobs, TokenEntry, Tokenizer, encode};

/// Classify the tokens of a text, or the whole text, depending on the model
///
/// Labels of the forms B-, I-, E- and S- are the best sequence of whole spans; other labels are those of the largest
/// logits. The probability beside each label is that of the token alone.
#[derive(Debug, clap::Args)]
pub struct ClassifyArgs {
    #[command(flatten)]
    runner: Runner,
    #[command(flatten)]
    input: Input,
    #[command(flatten)]
    labels: Labels,
    /// Second text of a pair, for models that classify whole texts
    #[arg(long, value_name = "TEXT")]
    pair: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Token with its label.
struct Labelled {
    id: u32,
    /// Position in the text; `None` for token ids.
    token: Option<TokenEntry>,
    label: u16,
    probability: f32,
}

impl ClassifyArgs {
    /// Classifies a whole text or a pair.
    fn classify_whole(&self, model: &Arc<LoadedModel>) -> Result<u8> {
        let text: EncodedText = match self.input.text() {
            Some(text) => {
                let tokenizer = Tokenizer::of(model.bundle(), model.folder())?;
                encode::text_or_pair(model, &tokenizer, text, self.pair.as_deref(), true)?
            }
            None => self.input.tokens(model)?.into(),
        };
        let logits = encode::classify(model, &text)?;
        // a single label has a sigmoid, several have a softmax
        let probability = |label: usize| match logits.len() {
            1 => 1.0 / (1.0 + (-logits[label]).exp()),
            _ => Logprobs::of(&logits, label as u32, 0).logprob.exp(),
        };
        let names = model.bundle().model.sequence_classification().map_or(&[][..], |facts| &facts.labels);
        if self.json {
            let label = |(index, name): (usize, &String)| json!({"label": name, "logit": logits[index], "probability": probability(index)});
            print_json(&json!({"labels": names.iter().enumerate().map(label).collect::<Vec<_>>()}));
        } else {
            let row = |(index, name): (usize, &String)| {
                vec![name.clone(), format!("{:.4}", logits[index]), format!("{:.4}", probability(index))]
            };
            print(&table(&["label", ">logit", ">probability"], names.iter().enumerate().map(row)));
        }
        Ok(0)
    }

    pub(super) fn run(self) -> Result<u8> {
        let model = self.runner.open()?;
        if model.bundle().model.sequence_classification().is_some() {
            return self.classify_whole(&model);
        }
        let windows = Windows::new(&model, self.labels.window, Hidden::No)?;
        let scheme = Arc::new(Scheme::of(&model)?);
        let biases = self.labels.biases()?;
        scheme.check(&biases)?;
        let text = self.input.text();
        let tokenizer = text.map(|_| Tokenizer::of(model.bundle(), model.folder())).transpose()?;
        let tokens: Vec<(u32, Option<TokenEntry>)> = match text.zip(tokenizer.as_ref()) {
            Some((text, tokenizer)) => {
                tokenizer.tokens(text)?.0.into_iter().map(|token| (token.id, Some(token))).collect()
            }
            None => self.input.tokens(&model)?.into_iter().map(|id| (id, None)).collect(),
        };
        // special tokens have no labels; ids are given with theirs
        let [before, after] = tokenizer.as_ref().map(Tokenizer::special_ends).transpose()?.unwrap_or_default();
        let ids: Vec<u32> = tokens.iter().map(|(id, _)| *id).collect();
        let logits = windows.label(&[&before[..], &ids, &after].concat())?.logits;
        let mut viterbi = Viterbi::new(scheme.clone(), biases);
        let mut best = Vec::new();
        let rows = || logits.chunks_exact(scheme.labels().len()).skip(before.len()).take(ids.len());
        rows().for_each(|row| viterbi.push(row, &mut best));
        viterbi.finish(&mut best);
        let labelled: Vec<Labelled> = tokens
            .into_iter()
            .zip(rows().zip(best))
            .map(|((id, token), (row, label))| Labelled {
                id,
                token,
                label,
                probability: Logprobs::of(row, u32::from(label), 0).logprob.exp(),
            })
            .collect();
        let spans = spans(&labelled, &scheme);
        if self.json {
            print_json(&json!({
                "tokens": labelled.iter().map(|token| token.json(&scheme)).collect::<Vec<_>>(),
                "spans": spans,
            }));
        } else {
            let rows = labelled.iter().map(|token| token.row(&scheme, text));
            print(&table(&[">token", ">bytes", "text", "label", ">probability"], rows));
        }
        Ok(0)
    }
}

impl Labelled {
    fn json(&self, scheme: &Scheme) -> Json {
        let range = self.token.as_ref().map(|token| &token.range);
        json!({
            "id": self.id,
            "start": range.map(|range| range.start),
            "end": range.map(|range| range.end),
            "label": scheme.labels()[usize::from(self.label)],
            "probability": self.probability,
        })
    }

    fn row(&self, scheme: &Scheme, text: Option<&str>) -> Vec<String> {
        let range = self.token.as_ref().map(|token| token.range.start as usize..token.range.end as usize);
        let part = range.clone().and_then(|range| text?.get(range)).unwrap_or_default();
        vec![
            self.id.to_string(),
            range.map_or_else(String::new, |range| format!("{}..{}", range.start, range.end)),
            format!("{part:?}"),
            scheme.labels()[usize::from(self.label)].clone(),
            format!("{:.3}", self.probability),
        ]
    }
}

/// Spans formed by the labels, as token indices and, for a text, byte offsets.
fn spans(labelled: &[Labelled], scheme: &Scheme) -> Vec<Json> {
    // kind and tokens of each span
    let mut spans: Vec<(usize, Range<usize>)> = Vec::new();
    for (index, token) in labelled.iter().enumerate() {
        match spans.last_mut().filter(|(kind, range)| range.end == index && scheme.continues(*kind, token.label)) {
            Some((_, range)) => range.end = index + 1,
            None => match scheme.place(token.label) {
                (BioesTag::Outside, _) => {}
                (_, kind) => spans.push((kind, index..index + 1)),
            },
        }
    }
    let byte = |index: usize| labelled[index].token.as_ref().map(|token: &TokenEntry| token.range.clone());
    let json = |(kind, range): (usize, Range<usize>)| {
        json!({
            "label": scheme.kinds()[kind],
            "tokens": [range.start, range.end],
            "start": byte(range.start).map(|range| range.start),
            "end": byte(range.end - 1).map(|range| range.end),
        })
    };
    spans.into_iter().map(json).collect()
}
