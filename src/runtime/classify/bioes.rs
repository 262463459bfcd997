//! Decoder for labels of tokens that form spans.
//!
//! With BIOES labels: `O` outside, `B-x` at the beginning of a span of kind x, `I-x` inside, `E-x` at its end,
//! `S-x` for a span of one token. The Viterbi algorithm finds the best sequence of labels that forms whole spans.
//!
//! `O`, `E` and `S` are followed by `O`, `B` or `S`; `B-x` and `I-x` by `I-x` or `E-x`. A text begins as after `O` and
//! ends as before `O`. The score of a sequence is the sum of its logits plus a bias for each transition, if a
//! calibration provides biases, as in the decoder of OpenAI's privacy filter.
//!
//! Other labels (`B-x`, `I-x` and `O`; or any names, such as parts of speech) don't depend on each other: each token
//! has the label of its largest logit. A span is a run of tokens of one kind, and ends before a label `B-x` or `O`: the
//! simple aggregation of transformers' token classification.

use std::path::Path;
use std::sync::Arc;

use anec_base::input;

use serde_json::Value as Json;

use crate::error::RuntimeError;
use crate::model::LoadedModel;

/// Maximum number of undecided tokens before labels are decided by force.
const MAX_UNDECIDED: usize = 1 << 16;
/// Number of undecided tokens after which decided labels are first looked for.
const FIRST_CHECK: usize = 64;

/// Position of a label in a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BioesTag {
    /// Outside of all spans.
    Outside,
    /// First token of several.
    Begin,
    /// Between the first and the last token.
    Inside,
    /// Last token of several.
    End,
    /// Only token.
    Single,
}

impl BioesTag {
    /// Returns whether the span continues after it.
    fn is_open(self) -> bool {
        matches!(self, BioesTag::Begin | BioesTag::Inside)
    }

    /// Returns whether it continues a span.
    fn continues(self) -> bool {
        matches!(self, BioesTag::Inside | BioesTag::End)
    }
}

/// Labels of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scheme {
    labels: Vec<String>,
    places: Vec<(BioesTag, usize)>,
    kinds: Vec<String>,
    /// Whether labels are BIOES, of which only some may follow each other.
    whole_spans: bool,
}

impl Scheme {
    /// Returns the labels of a model's tokens.
    ///
    /// # Errors
    /// If the model labels no tokens, and any error of [`Scheme::new`].
    pub fn of(model: &LoadedModel) -> Result<Self, RuntimeError> {
        match model.bundle().model.classification() {
            Some(classification) => Self::new(&classification.label_set.labels),
            None => Err(RuntimeError::NoLabels { path: model.folder().to_owned() }),
        }
    }

    /// Parses labels. They are BIOES if all have one of its forms and some begin with `E-` or `S-`.
    ///
    /// # Errors
    /// If BIOES labels lack `O`.
    pub fn new(labels: &[String]) -> Result<Self, RuntimeError> {
        let tags: Option<Vec<_>> = labels.iter().map(|label| tag(label)).collect();
        let tags = tags.filter(|tags| tags.iter().any(|(tag, _)| matches!(tag, BioesTag::End | BioesTag::Single)));
        let whole_spans = tags.is_some();
        let tags = tags.unwrap_or_else(|| labels.iter().map(|label| loose_tag(label)).collect());
        let mut scheme = Scheme { labels: labels.to_vec(), places: Vec::new(), kinds: Vec::new(), whole_spans };
        for (place, kind) in tags {
            let known = scheme.kinds.iter().position(|known| known == kind);
            let index = match (place, known) {
                (BioesTag::Outside, _) => 0,
                (_, Some(index)) => index,
                (_, None) => {
                    scheme.kinds.push(kind.to_owned());
                    scheme.kinds.len() - 1
                }
            };
            scheme.places.push((place, index));
        }
        match !whole_spans || scheme.places.iter().any(|(place, _)| *place == BioesTag::Outside) {
            true => Ok(scheme),
            false => Err(RuntimeError::Labels { problem: "none of the labels is O".into() }),
        }
    }

    /// Returns the labels by number.
    pub fn labels(&self) -> &[String] {
        &self.labels
    }

    /// Returns the kinds of spans, in the order of the labels.
    pub fn kinds(&self) -> &[String] {
        &self.kinds
    }

    /// Returns a label's position in a span and the number of its kind.
    pub fn place(&self, label: u16) -> (BioesTag, usize) {
        self.places[usize::from(label)]
    }

    /// Returns whether the token of a label belongs to a span of `kind` that ends with the token before.
    pub fn continues(&self, kind: usize, label: u16) -> bool {
        let (place, of) = self.place(label);
        place.continues() && of == kind
    }

    /// Returns whether a text may begin with a label.
    fn may_begin(&self, label: u16) -> bool {
        !(self.whole_spans && self.place(label).0.continues())
    }

    /// Returns whether a text may end with a label.
    fn may_end(&self, label: u16) -> bool {
        !(self.whole_spans && self.place(label).0.is_open())
    }

    /// Checks that labels depend on each other if there are biases.
    ///
    /// # Errors
    /// If biases other than zero are given for such labels.
    pub fn check(&self, biases: &Biases) -> Result<(), RuntimeError> {
        if self.whole_spans || *biases == Biases::default() {
            return Ok(());
        }
        let problem = "a calibration biases labels of the forms B-, I-, E- and S-, which the model doesn't have".into();
        Err(RuntimeError::Labels { problem })
    }

    /// Returns whether one label may follow another.
    pub fn may_follow(&self, before: u16, after: u16) -> bool {
        if !self.whole_spans {
            return true;
        }
        let ((before, kind), (after, next_kind)) = (self.place(before), self.place(after));
        match before.is_open() {
            true => after.continues() && kind == next_kind,
            false => !after.continues(),
        }
    }
}

/// Position and kind of a BIOES label.
fn tag(label: &str) -> Option<(BioesTag, &str)> {
    match label.split_once('-') {
        None if label == "O" => Some((BioesTag::Outside, "")),
        Some(("B", kind)) => Some((BioesTag::Begin, kind)),
        Some(("I", kind)) => Some((BioesTag::Inside, kind)),
        Some(("E", kind)) => Some((BioesTag::End, kind)),
        Some(("S", kind)) => Some((BioesTag::Single, kind)),
        _ => None,
    }
}

/// Position and kind of a label of any name.
fn loose_tag(label: &str) -> (BioesTag, &str) {
    let begun = tag(label).filter(|(tag, _)| !matches!(tag, BioesTag::End | BioesTag::Single));
    begun.unwrap_or((BioesTag::Inside, label))
}

/// Biases of transitions: zero for the plain decoder; others give more or fewer spans.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Biases {
    /// From `O` to `O`.
    pub background_stay: f64,
    /// From `O` to `B` or `S`.
    pub background_to_start: f64,
    /// From `B` or `I` to `I`.
    pub inside_to_continue: f64,
    /// From `B` or `I` to `E`.
    pub inside_to_end: f64,
    /// From `E` or `S` to `O`.
    pub end_to_background: f64,
    /// From `E` or `S` to `B` or `S`.
    pub end_to_start: f64,
}

impl Biases {
    /// Reads an operating point of a `viterbi_calibration.json`: `{"operating_points": {"default": {"biases":
    /// {"transition_bias_background_stay": 0.0, …}}}}`.
    ///
    /// # Errors
    /// If the file can't be read, or lacks the operating point or one of its six biases.
    pub fn read(path: &Path, operating_point: &str) -> Result<Self, RuntimeError> {
        let bytes = input::read_file(path, input::MOST_JSON)?;
        let json: Json = serde_json::from_slice(&bytes).map_err(|error| {
            RuntimeError::bundle(path, format!("it isn't JSON: {}", anec_base::json::problem(&error)))
        })?;
        let biases = &json["operating_points"][operating_point]["biases"];
        let bias = |name: &str| {
            let found = biases[format!("transition_bias_{name}")].as_f64().filter(|bias| bias.is_finite());
            let key = format!("operating_points.{operating_point}.biases.transition_bias_{name}");
            found.ok_or_else(|| RuntimeError::bundle(path, format!("`{key}` is missing, or no number")))
        };
        Ok(Biases {
            background_stay: bias("background_stay")?,
            background_to_start: bias("background_to_start")?,
            inside_to_continue: bias("inside_to_continue")?,
            inside_to_end: bias("inside_to_end")?,
            end_to_background: bias("end_to_background")?,
            end_to_start: bias("end_to_start")?,
        })
    }

    fn of(&self, before: BioesTag, after: BioesTag) -> f64 {
        match (before, after) {
            (BioesTag::Outside, BioesTag::Outside) => self.background_stay,
            (BioesTag::Outside, _) => self.background_to_start,
            (BioesTag::Begin | BioesTag::Inside, BioesTag::Inside) => self.inside_to_continue,
            (BioesTag::Begin | BioesTag::Inside, _) => self.inside_to_end,
            (BioesTag::End | BioesTag::Single, BioesTag::Outside) => self.end_to_background,
            (BioesTag::End | BioesTag::Single, _) => self.end_to_start,
        }
    }
}

/// Streaming Viterbi decoder. A label is returned once all sequences that may still win agree on it; the result equals
/// decoding the whole text.
pub struct Viterbi {
    scheme: Arc<Scheme>,
    /// Labels that may precede each label, with their biases.
    before: Vec<Vec<(u16, f64)>>,
    /// Best score of a sequence that ends with each label.
    scores: Vec<f64>,
    next: Vec<f64>,
    /// Preceding label in the best sequence, for each undecided token and label.
    back: Vec<u16>,
    begun: bool,
    /// Number of undecided tokens at which decided labels are looked for next.
    look: usize,
}

impl Viterbi {
    /// Creates a decoder at the beginning of a text.
    pub fn new(scheme: Arc<Scheme>, biases: Biases) -> Self {
        let count = scheme.labels.len() as u16;
        let before = (0..count)
            .map(|after| {
                let bias = |before: u16| biases.of(scheme.place(before).0, scheme.place(after).0);
                (0..count).filter(|label| scheme.may_follow(*label, after)).map(|label| (label, bias(label))).collect()
            })
            .collect();
        let zeros = vec![0.0; usize::from(count)];
        Viterbi {
            scheme,
            before,
            scores: zeros.clone(),
            next: zeros,
            back: Vec::new(),
            begun: false,
            look: FIRST_CHECK,
        }
    }

    /// Returns the number of tokens whose labels are undecided.
    pub fn open(&self) -> usize {
        self.back.len() / self.scores.len().max(1)
    }

    /// Adds the logits of one token and appends the labels that are decided by now.
    pub fn push(&mut self, logits: &[f32], labels: &mut Vec<u16>) {
        for (after, logit) in logits.iter().enumerate().take(self.next.len()) {
            // NaN scores are ignored
            let logit = if logit.is_nan() { f64::from(f32::MIN) } else { f64::from(*logit).clamp(-3e38, 3e38) };
            let (mut best, mut from) = (f64::NEG_INFINITY, 0);
            if self.begun {
                for (before, bias) in &self.before[after] {
                    let score = self.scores[usize::from(*before)] + bias;
                    if score > best {
                        (best, from) = (score, *before);
                    }
                }
            } else if self.scheme.may_begin(after as u16) {
                best = 0.0;
            }
            self.next[after] = best + logit;
            self.back.push(from);
        }
        std::mem::swap(&mut self.scores, &mut self.next);
        self.begun = true;
        // only differences count; subtracting keeps the scores small
        let most = self.scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        self.scores.iter_mut().for_each(|score| *score -= most);
        if self.open() >= self.look {
            self.settle(labels);
            if self.open() >= MAX_UNDECIDED {
                self.force(labels);
            }
            self.look = (2 * self.open()).clamp(FIRST_CHECK, MAX_UNDECIDED);
        }
    }

    /// Ends the text and appends the labels of the remaining tokens.
    pub fn finish(&mut self, labels: &mut Vec<u16>) {
        let open = self.open();
        if open == 0 {
            return;
        }
        let ends = (0..self.scores.len()).filter(|label| self.scheme.may_end(*label as u16));
        // the first of equals, as everywhere
        let best =
            ends.reduce(|best, label| if self.scores[label] > self.scores[best] { label } else { best }).unwrap_or(0);
        let path = self.path(open - 1, best as u16);
        labels.extend(path);
        self.back.clear();
        self.begun = false;
        self.look = FIRST_CHECK;
    }

    /// Returns the label before `label` of undecided token `token`.
    fn back(&self, token: usize, label: u16) -> u16 {
        self.back[token * self.scores.len() + usize::from(label)]
    }

    /// Returns the labels of the undecided tokens up to `token`, which has the label `label`.
    fn path(&self, token: usize, label: u16) -> Vec<u16> {
        let mut path = vec![label];
        for token in (1..=token).rev() {
            path.push(self.back(token, path[path.len() - 1]));
        }
        path.reverse();
        path
    }

    /// Appends the labels that all sequences agree on.
    fn settle(&mut self, labels: &mut Vec<u16>) {
        let mut alive: Vec<u16> =
            (0..self.scores.len() as u16).filter(|l| self.scores[usize::from(*l)].is_finite()).collect();
        for token in (1..self.open()).rev() {
            let mut before: Vec<u16> = alive.iter().map(|label| self.back(token, *label)).collect();
            before.sort_unstable();
            before.dedup();
            if let [label] = before[..] {
                labels.extend(self.path(token - 1, label));
                self.back.drain(..token * self.scores.len());
                return;
            }
            alive = before;
        }
    }

    /// Decides for the currently best sequence, for the older half of the undecided tokens. Sequences that contradict
    /// it are dropped.
    fn force(&mut self, labels: &mut Vec<u16>) {
        let (last, half) = (self.open() - 1, self.open() / 2);
        let best = (0..self.scores.len()).max_by(|a, b| self.scores[*a].total_cmp(&self.scores[*b])).unwrap_or(0);
        let mut path = self.path(last, best as u16);
        path.truncate(half);
        for label in 0..self.scores.len() {
            if self.path(last, label as u16)[half - 1] != path[half - 1] {
                self.scores[label] = f64::NEG_INFINITY;
            }
        }
        labels.extend(path);
        self.back.drain(..half * self.scores.len());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scheme(kinds: &[&str]) -> Arc<Scheme> {
        let spans = kinds.iter().flat_map(|kind| ["B", "I", "E", "S"].map(|place| format!("{place}-{kind}")));
        Arc::new(Scheme::new(&std::iter::once("O".to_owned()).chain(spans).collect::<Vec<_>>()).unwrap())
    }

    fn decode(scheme: &Arc<Scheme>, biases: Biases, logits: &[Vec<f32>]) -> Vec<u16> {
        let mut viterbi = Viterbi::new(scheme.clone(), biases);
        let mut labels = Vec::new();
        logits.iter().for_each(|row| viterbi.push(row, &mut labels));
        viterbi.finish(&mut labels);
        labels
    }

    /// Score to maximise; `None` for a sequence that forms no whole spans. Implements the rules independently, by label
    /// name.
    fn score(scheme: &Scheme, biases: &Biases, logits: &[Vec<f32>], labels: &[u16]) -> Option<f64> {
        let mut sum = 0.0;
        let mut before = "O";
        for (index, (row, label)) in logits.iter().zip(labels).enumerate() {
            let name = scheme.labels()[usize::from(*label)].as_str();
            let bias = match (&before[..1], &name[..1]) {
                ("O", "O") => biases.background_stay,
                ("O", "B" | "S") => biases.background_to_start,
                ("E" | "S", "O") => biases.end_to_background,
                ("E" | "S", "B" | "S") => biases.end_to_start,
                ("B" | "I", "I") if before[1..] == name[1..] => biases.inside_to_continue,
                ("B" | "I", "E") if before[1..] == name[1..] => biases.inside_to_end,
                _ => return None,
            };
            // nothing precedes the first label
            sum += if index == 0 { 0.0 } else { bias };
            sum += f64::from(row[usize::from(*label)]);
            before = name;
        }
        (!before.starts_with(['B', 'I'])).then_some(sum)
    }

    fn all_sequences(labels: u16, length: usize) -> Vec<Vec<u16>> {
        (0..length).fold(vec![vec![]], |all, _| {
            all.iter().flat_map(|s: &Vec<u16>| (0..labels).map(move |l| [&s[..], &[l]].concat())).collect()
        })
    }

    /// Labels that aren't BIOES are chosen token by token, the first of equals.
    #[test]
    fn other_labels_are_those_of_the_largest_logits() {
        let labels = ["O", "B-x", "I-x", "noun"].map(String::from);
        let scheme = Arc::new(Scheme::new(&labels).unwrap());
        let places = (0..4).map(|label| scheme.place(label)).collect::<Vec<_>>();
        assert_eq!(places[0].0, BioesTag::Outside);
        assert_eq!(places[1..], [(BioesTag::Begin, 0), (BioesTag::Inside, 0), (BioesTag::Inside, 1)]);
        let rows = [[0.0, 0.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [0.0, 2.0, 1.0, f32::NAN], [0.0, 1.0, 2.0, 4.0]];
        let rows: Vec<Vec<f32>> = rows.iter().cycle().take(400).map(|row| row.to_vec()).collect();
        let expected: Vec<u16> = [2, 0, 1, 3].into_iter().cycle().take(400).collect();
        assert_eq!(decode(&scheme, Biases::default(), &rows), expected);
        assert!(scheme.continues(0, 2) && !scheme.continues(1, 2) && !scheme.continues(0, 1));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_sequence_of_whole_spans_is_better(
            logits in prop::collection::vec(prop::collection::vec(-4f32..4.0, 5), 1..6),
            bias in prop::collection::vec(-3f64..3.0, 6),
        ) {
            let scheme = scheme(&["x"]);
            let biases = Biases {
                background_stay: bias[0],
                background_to_start: bias[1],
                inside_to_continue: bias[2],
                inside_to_end: bias[3],
                end_to_background: bias[4],
                end_to_start: bias[5],
            };
            let found = score(&scheme, &biases, &logits, &decode(&scheme, biases, &logits));
            let best = all_sequences(5, logits.len())
                .iter()
                .filter_map(|labels| score(&scheme, &biases, &logits, labels))
                .fold(f64::NEG_INFINITY, f64::max);
            prop_assert!((found.expect("whole spans") - best).abs() < 1e-9);
        }

        #[test]
        fn early_labels_equal_those_of_the_whole_text(seed in any::<u64>(), length in 1usize..700) {
            // by hand, without early decisions
            let scheme = scheme(&["x", "yy"]);
            let mut state = seed | 1;
            let mut random = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1 << 22) as f32
            };
            let logits: Vec<Vec<f32>> = (0..length).map(|_| (0..9).map(|_| random()).collect()).collect();
            let mut whole = Viterbi::new(scheme.clone(), Biases::default());
            whole.look = usize::MAX;
            let (mut labels, mut early) = (Vec::new(), Vec::new());
            logits.iter().for_each(|row| whole.push(row, &mut labels));
            prop_assert!(labels.is_empty());
            whole.finish(&mut labels);
            let mut viterbi = Viterbi::new(scheme.clone(), Biases::default());
            let mut most_open = 0;
            for row in &logits {
                viterbi.push(row, &mut early);
                most_open = most_open.max(viterbi.open());
            }
            viterbi.finish(&mut early);
            prop_assert_eq!(labels, early);
            prop_assert!(most_open <= 4 * FIRST_CHECK, "{} open", most_open);
        }
    }

    #[test]
    fn an_undecided_text_is_decided_by_force() {
        // two kinds that are equally likely: nothing tells the two endless spans apart
        let scheme = scheme(&["x", "y"]);
        let mut viterbi = Viterbi::new(scheme.clone(), Biases::default());
        let mut labels = Vec::new();
        let row: Vec<f32> =
            scheme.labels().iter().map(|label| if label.starts_with('I') { 5.0 } else { 0.0 }).collect();
        let count = 2 * MAX_UNDECIDED + 100;
        for _ in 0..count {
            viterbi.push(&row, &mut labels);
            assert!(viterbi.open() <= MAX_UNDECIDED);
        }
        viterbi.finish(&mut labels);
        assert_eq!(labels.len(), count);
        assert!(labels.windows(2).all(|pair| scheme.may_follow(pair[0], pair[1])));
    }

    #[test]
    fn spans_have_labels_around_them() {
        let new = |labels: &[&str]| Scheme::new(&labels.iter().map(|l| (*l).to_owned()).collect::<Vec<_>>());
        assert_eq!(new(&["O", "B-a-b", "E-a-b"]).unwrap().kinds(), ["a-b"]);
        assert!(new(&["B-x", "E-x"]).unwrap_err().to_string().contains("none of the labels is O"));
        // other labels are kinds of their own
        assert_eq!(new(&["O", "LABEL_1", "X-y"]).unwrap().kinds(), ["LABEL_1", "X-y"]);
        let biases = Biases { end_to_start: 0.5, ..Biases::default() };
        assert!(new(&["O", "LABEL_1"]).unwrap().check(&biases).is_err());
        assert!(new(&["O", "S-x"]).unwrap().check(&biases).is_ok());
    }

    #[test]
    fn a_calibration_names_all_six_biases() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("viterbi_calibration.json");
        let names =
            ["background_stay", "background_to_start", "inside_to_continue", "inside_to_end", "end_to_background"];
        let mut biases: serde_json::Map<String, Json> =
            names.iter().zip(1..).map(|(name, value)| (format!("transition_bias_{name}"), value.into())).collect();
        let write = |biases: &serde_json::Map<String, Json>| {
            let json = serde_json::json!({"operating_points": {"default": {"biases": biases}}});
            std::fs::write(&path, json.to_string()).unwrap();
        };
        write(&biases);
        let error = Biases::read(&path, "default").unwrap_err().to_string();
        assert!(error.contains("transition_bias_end_to_start"), "{error}");
        biases.insert("transition_bias_end_to_start".into(), (-0.5).into());
        write(&biases);
        let read = Biases::read(&path, "default").unwrap();
        assert_eq!((read.background_stay, read.inside_to_end, read.end_to_start), (1.0, 4.0, -0.5));
        assert!(Biases::read(&path, "high_recall").is_err());
    }
}
