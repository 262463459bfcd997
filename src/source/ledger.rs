//! Ledger of a source: every tensor is used once, or ignored for a reason.

use std::collections::BTreeSet;

use anec_bundle::LedgerTotals;

use super::Source;
use super::dtype::SourceDtype;
use super::error::{Result, SHOWN, SourceError};
use super::tensor::SourceTensor;

/// A ledger of a source's tensors.
///
/// A [recording](Ledger::recording) ledger is of a source without tensors. It returns any tensor that is taken with a
/// shape, and records it: a dry run of a model's opening.
#[derive(Debug)]
pub struct Ledger<'a> {
    source: &'a Source,
    taken: BTreeSet<String>,
    ignored: Vec<(String, String)>,
    recording: Option<Recording>,
}

/// Tensors of a dry run.
#[derive(Debug, Default)]
struct Recording {
    assumed: Vec<String>,
    tensors: Vec<SourceTensor>,
}

impl<'a> Ledger<'a> {
    /// Creates a ledger without entries.
    pub fn new(source: &'a Source) -> Self {
        Ledger { source, taken: BTreeSet::new(), ignored: Vec::new(), recording: None }
    }

    /// Creates a ledger that records tensors instead of reading them from `source`, which provides the configuration.
    pub fn recording(source: &'a Source) -> Self {
        Ledger { recording: Some(Recording::default()), ..Ledger::new(source) }
    }

    /// Makes [`has`](Ledger::has) true for names that match the patterns, in a recording ledger; without effect in
    /// others.
    pub fn assume(&mut self, patterns: impl IntoIterator<Item = impl Into<String>>) {
        if let Some(recording) = &mut self.recording {
            recording.assumed.extend(patterns.into_iter().map(Into::into));
        }
    }

    /// Returns the recorded tensors in the order in which they were taken.
    pub fn into_recorded(self) -> Vec<SourceTensor> {
        self.recording.unwrap_or_default().tensors
    }

    /// Returns the source.
    pub fn source(&self) -> &'a Source {
        self.source
    }

    /// Returns whether the source has a tensor of this name, without using it.
    pub fn has(&self, name: &str) -> bool {
        match &self.recording {
            Some(recording) => recording.assumed.iter().any(|pattern| matches(pattern, name)),
            None => self.source.tensor(name).is_some(),
        }
    }

    /// Uses a tensor whose shape is known. A recording ledger returns one with this shape.
    ///
    /// # Errors
    /// Returns an error if the source doesn't have the tensor, or it was used before. The shape is not checked.
    pub fn take_shaped(&mut self, name: &str, dtype: SourceDtype, shape: &[u64]) -> Result<SourceTensor> {
        let Some(recording) = &mut self.recording else { return self.take(name) };
        if !self.taken.insert(name.to_owned()) {
            return Err(SourceError::TakenTwice { tensor: name.to_owned() });
        }
        let tensor = SourceTensor::shape_only(name, dtype, shape)?;
        recording.tensors.push(tensor.clone());
        Ok(tensor)
    }

    /// Uses a tensor.
    ///
    /// # Errors
    /// Returns an error if the source doesn't have it, or it was used before.
    pub fn take(&mut self, name: &str) -> Result<SourceTensor> {
        let Some(tensor) = self.source.tensor(name) else {
            return Err(SourceError::MissingTensor {
                source_name: self.source.name().to_owned(),
                tensor: name.to_owned(),
                nearest: nearest(name, self.source.tensors().map(SourceTensor::name), 3),
            });
        };
        match self.taken.insert(name.to_owned()) {
            true => Ok(tensor.clone()),
            false => Err(SourceError::TakenTwice { tensor: name.to_owned() }),
        }
    }

    /// Uses a tensor if the source has it.
    ///
    /// # Errors
    /// Returns an error if it was used before.
    pub fn take_optional(&mut self, name: &str) -> Result<Option<SourceTensor>> {
        if self.has(name) { self.take(name).map(Some) } else { Ok(None) }
    }

    /// Declares that tensors whose name matches `pattern` aren't part of the model, and why. `*` matches any
    /// characters. Using such a tensor nevertheless is allowed.
    pub fn ignore(&mut self, pattern: &str, reason: &str) {
        self.ignored.push((pattern.to_owned(), reason.to_owned()));
    }

    /// Closes the ledger.
    pub fn finish(self) -> Result<LedgerTotals> {
        let mut totals = LedgerTotals::default();
        let mut unused = Vec::new();
        for tensor in self.source.tensors() {
            let name = tensor.name();
            if self.taken.contains(name) {
                totals.used += 1;
                totals.used_bytes += tensor.byte_length();
            } else if let Some((_, reason)) = self.ignored.iter().find(|(pattern, _)| matches(pattern, name)) {
                totals.ignored.insert(name.to_owned(), reason.clone());
            } else {
                unused.push(name.to_owned());
            }
        }
        if unused.is_empty() {
            return Ok(totals);
        }
        // only for those that the message shows, because there may be many
        let with_nearest = |(index, name): (usize, String)| {
            let used = (index < SHOWN).then(|| nearest(&name, self.taken.iter().map(String::as_str), 1).pop());
            (name, used.flatten())
        };
        let unused = unused.into_iter().enumerate().map(with_nearest).collect();
        Err(SourceError::Unused { source_name: self.source.name().to_owned(), unused })
    }
}

/// Whether `name` matches `pattern`, in which `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut name) = name.strip_prefix(head) else { return false };
    let mut pieces: Vec<&str> = rest.split('*').collect();
    let tail = pieces.pop().unwrap_or_default();
    for piece in pieces {
        // the leftmost match leaves the most for later pieces
        match name.find(piece) {
            Some(at) => name = &name[at + piece.len()..],
            None => return false,
        }
    }
    name.ends_with(tail)
}

/// Returns at most `count` of the names that are similar to `name`, most similar first.
pub(super) fn nearest<'n>(name: &str, among: impl Iterator<Item = &'n str>, count: usize) -> Vec<String> {
    const LIKE: f64 = 0.7;
    let mut scored: Vec<(f64, &str)> = among
        .map(|other| (strsim::normalized_damerau_levenshtein(name, other), other))
        .filter(|(score, _)| *score >= LIKE)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().take(count).map(|(_, other)| other.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use anec_base::{Diagnostic, Fault};

    fn source() -> Source {
        let names = ["embed.weight", "layers.0.q.weight", "layers.0.k.weight", "layers.0.rotary.inv_freq"];
        let tensors = names.iter().map(|name| SourceTensor::random(name, &[4, 4], 1, 0.0, 1.0).unwrap()).collect();
        Source::random("small", json!({}), tensors).unwrap()
    }

    #[test]
    fn a_ledger_closes_when_every_tensor_is_used_or_ignored() {
        let source = source();
        let mut ledger = Ledger::new(&source);
        ledger.take("layers.0.q.weight").unwrap();
        ledger.take("layers.0.k.weight").unwrap();
        ledger.take("embed.weight").unwrap();
        assert!(ledger.take_optional("layers.0.q.bias").unwrap().is_none());
        ledger.ignore("layers.*.inv_freq", "computed from the configuration");
        let totals = ledger.finish().unwrap();
        assert_eq!(totals.used, 3);
        assert_eq!(totals.ignored["layers.0.rotary.inv_freq"], "computed from the configuration");
        let json = serde_json::to_value(&totals).unwrap();
        assert_eq!(serde_json::from_value::<LedgerTotals>(json).unwrap(), totals);
    }

    #[test]
    fn a_recording_ledger_returns_what_is_taken() {
        let source = Source::shapes("shapes", json!({}), Vec::new()).unwrap();
        let mut ledger = Ledger::recording(&source);
        ledger.assume(["*.fused"]);
        assert!(ledger.has("layers.0.fused") && !ledger.has("layers.0.q"));
        assert!(ledger.take_optional("layers.0.q").unwrap().is_none());
        assert_eq!(ledger.take_shaped("q", SourceDtype::BF16, &[2, 3]).unwrap().shape(), [2, 3]);
        let error = ledger.take_shaped("q", SourceDtype::BF16, &[2, 3]).unwrap_err();
        assert!(matches!(&error, SourceError::TakenTwice { tensor } if tensor == "q"));
        let names: Vec<String> = ledger.into_recorded().iter().map(|tensor| tensor.name().to_owned()).collect();
        assert_eq!(names, ["q"]);
    }

    #[test]
    fn a_tensor_is_used_once() {
        let source = source();
        let mut ledger = Ledger::new(&source);
        ledger.take("embed.weight").unwrap();
        let error = ledger.take("embed.weight").unwrap_err();
        assert!(matches!(&error, SourceError::TakenTwice { tensor } if tensor == "embed.weight"));
    }

    #[test]
    fn a_missing_tensor_is_named_with_those_like_it() {
        let source = source();
        let error = Ledger::new(&source).take("layers.0.v.weight").unwrap_err();
        assert_eq!(error.fault(), Fault::Source);
        let message = error.to_string();
        assert!(message.contains("`layers.0.v.weight` is missing; the source has `layers.0.k.weight`"), "{message}");
    }

    #[test]
    fn an_unused_tensor_is_named_with_the_used_one_nearest_to_it() {
        let source = source();
        let mut ledger = Ledger::new(&source);
        ledger.take("layers.0.q.weight").unwrap();
        ledger.ignore("embed.weight", "test");
        ledger.ignore("*inv_freq", "test");
        let message = ledger.finish().unwrap_err().to_string();
        let expected =
            "1 tensor is no part of the model: `layers.0.k.weight` (nearest that is used: `layers.0.q.weight`)";
        assert!(message.contains(expected), "{message}");
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, expected) in [
            ("a.b", "a.b", true),
            ("a.b", "a.bc", false),
            ("a.*", "a.b.c", true),
            ("*.c", "a.b.c", true),
            ("*.c", "a.b.cd", false),
            ("a.*.c", "a.c", false),
            ("a*b*b", "aab", false),
            ("a*b*b", "abb", true),
            ("*", "", true),
            ("**x", "yx", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}
