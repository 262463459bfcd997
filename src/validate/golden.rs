//! Goldens: results of a reference for a text, position by position, in a safetensors file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, json};

use super::perplexity;
use anec_base::{Diagnostic, Fault, FileError, MappedFile, input};
use anec_kernels::distance::largest_magnitude_bits;
use anec_kernels::scan;

/// Maximum size of a golden read from a pipe, in bytes.
const MAX_STREAMED: u64 = 1 << 28;

/// Metadata key with the names of the texts, one per line.
const TEXT_NAMES: &str = "texts";

/// Results of a reference.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Golden {
    /// Token ids of one text or several, concatenated.
    pub tokens: Vec<u32>,
    /// Start of each text if there are several; the model sees each alone. Empty for a single text.
    pub texts: Vec<GoldenText>,
    /// Positions with logits, ascending.
    pub positions: Vec<usize>,
    /// Logits, row-major `[positions, vocab_size]`.
    pub logits: Vec<f32>,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Hidden states `[tokens, hidden_size]`, row-major, by N: input of layer N, or output of the last layer.
    pub hidden: BTreeMap<usize, Vec<f32>>,
    /// Negative log likelihood of every token but the first, in nats, if the file has them.
    pub losses: Option<Vec<f32>>,
    /// Greedy continuation of a prompt.
    pub greedy: Option<Greedy>,
    /// Metadata of the file: `reference`, `version`, `kind`, …
    pub metadata: BTreeMap<String, String>,
}

/// One of several texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoldenText {
    /// Name: `prose`, `rust`, …
    pub name: String,
    /// Index of the first token.
    pub start: usize,
}

/// Greedy continuation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Greedy {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Token ids of the continuation.
    pub ids: Vec<u32>,
}

/// Error in a golden.
#[derive(Debug, thiserror::Error)]
#[error("golden {}: {problem}", path.display())]
pub struct GoldenError {
    /// Path of the file.
    pub path: PathBuf,
    /// Found and expected.
    pub problem: String,
}

impl Diagnostic for GoldenError {
    fn fault(&self) -> Fault {
        Fault::Source
    }

    fn help(&self) -> Option<String> {
        Some("compute one with `GoldenBuilder`, or from transformers with tools/export_golden.py".into())
    }
}

impl Golden {
    /// Reads a golden.
    ///
    /// # Errors
    /// If the file can't be read, isn't safetensors, lacks tokens or logits, or contradicts itself.
    pub fn read(path: &Path) -> Result<Self, GoldenError> {
        let error = |problem: String| GoldenError { path: path.to_owned(), problem };
        let unreadable = |e: FileError| error(format!("can't read it: {}", e.error));
        // logits of a long text take gigabytes: map the file
        if std::fs::metadata(path).is_ok_and(|found| found.is_file()) {
            return Self::from_bytes(path, MappedFile::open(path).map_err(unreadable)?.bytes());
        }
        // pipes and devices need a limit
        let bytes = input::read(path, MAX_STREAMED).map_err(|e| error(format!("can't read it: {}", e.error)))?;
        Self::from_bytes(path, &bytes)
    }

    /// Parses a golden; `path` is for errors.
    ///
    /// # Errors
    /// As [`Golden::read`].
    pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, GoldenError> {
        let error = |problem: String| GoldenError { path: path.to_owned(), problem };
        let file = SafeTensors::deserialize(bytes).map_err(|e| error(format!("it isn't a safetensors file: {e}")))?;
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| error(e.to_string()))?;
        let find = |name: &str| file.tensor(name).ok();
        let need = |name: &str| find(name).ok_or_else(|| error(format!("there is no tensor `{name}`")));
        let list = |name: &str, view: TensorView<'_>| {
            integers(&view)
                .ok_or_else(|| error(format!("`{name}` holds {:?}, expected integers from 0 on", view.dtype())))
        };
        let matrix = |name: &str, view: TensorView<'_>| -> Result<(usize, usize, Vec<f32>), GoldenError> {
            let &[rows, columns] = view.shape() else {
                return Err(error(format!("`{name}` has shape {:?}, expected two dimensions", view.shape())));
            };
            let values =
                floats(&view).ok_or_else(|| error(format!("`{name}` holds {:?}, expected F32", view.dtype())))?;
            let finite = largest_magnitude_bits(&values) < f32::INFINITY.to_bits();
            if !finite && let Some(at) = values.iter().position(|v| !v.is_finite()) {
                let (row, column) = (at / columns, at % columns);
                return Err(error(format!("`{name}`, row {row}, column {column}: {}", values[at])));
            }
            Ok((rows, columns, values))
        };
        let tokens = list("tokens", need("tokens")?)?;
        let (rows, vocab_size, logits) = matrix("logits", need("logits")?)?;
        let positions: Vec<usize> = match find("positions") {
            Some(view) => list("positions", view)?.into_iter().map(|p| p as usize).collect(),
            None => (0..tokens.len()).collect(),
        };
        let count = tokens.len();
        if positions.len() != rows {
            return Err(error(format!("it has {rows} rows of logits for {} positions", positions.len())));
        }
        if let Some(pair) = positions.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(error(format!("`positions` has {} before {}, expected ascending ones", pair[0], pair[1])));
        }
        if let Some(position) = positions.iter().find(|position| **position >= count) {
            return Err(error(format!("`positions` has {position}, but there are {count} tokens")));
        }
        let losses = match find("losses") {
            None => None,
            Some(view) => {
                let values =
                    floats(&view).ok_or_else(|| error(format!("`losses` holds {:?}, expected F32", view.dtype())))?;
                let (count, expected) = (values.len(), tokens.len().saturating_sub(1));
                if count != expected || values.iter().any(|loss| !loss.is_finite()) {
                    return Err(error(format!("`losses` has {count} numbers, expected {expected} finite ones")));
                }
                Some(values)
            }
        };
        let metadata: BTreeMap<String, String> =
            header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        let texts: Vec<GoldenText> = match find("texts") {
            None => Vec::new(),
            Some(view) => {
                let mut names = metadata.get(TEXT_NAMES).map(String::as_str).unwrap_or_default().lines();
                let starts = list("texts", view)?.into_iter().enumerate();
                starts
                    .map(|(index, start)| GoldenText {
                        name: names.next().map_or_else(|| format!("text {index}"), str::to_owned),
                        start: start as usize,
                    })
                    .collect()
            }
        };
        let ends = texts.iter().skip(1).map(|text| text.start).chain([count]);
        if texts.first().is_some_and(|first| first.start != 0)
            || texts.iter().zip(ends).any(|(text, end)| text.start >= end)
        {
            let starts: Vec<usize> = texts.iter().map(|text| text.start).collect();
            return Err(error(format!("`texts` begin at {starts:?}, expected 0 and ascending ones below {count}")));
        }
        let mut hidden = BTreeMap::new();
        for name in file.names() {
            if let Some(number) = name.strip_prefix("hidden.").and_then(|n| n.parse().ok()) {
                let (rows, _, values) = matrix(name, need(name)?)?;
                if rows != tokens.len() {
                    return Err(error(format!("`{name}` has {rows} rows for {} tokens", tokens.len())));
                }
                hidden.insert(number, values);
            }
        }
        let greedy = match (find("greedy"), find("greedy.prompt"), find("greedy.ids")) {
            (Some(ids), ..) => Some(Greedy { prompt: tokens.clone(), ids: list("greedy", ids)? }),
            (None, Some(prompt), Some(ids)) => {
                Some(Greedy { prompt: list("greedy.prompt", prompt)?, ids: list("greedy.ids", ids)? })
            }
            _ => None,
        };
        // tokens may be of another vocabulary if the logits are those of labels
        let spoken = greedy.iter().flat_map(|greedy| greedy.prompt.iter().chain(&greedy.ids));
        if let Some(token) = spoken.copied().find(|token| *token as usize >= vocab_size) {
            return Err(error(format!("token {token} is outside its vocabulary of {vocab_size}")));
        }
        Ok(Golden { tokens, texts, positions, logits, vocab_size, hidden, losses, greedy, metadata })
    }

    /// Serializes the golden.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut metadata = self.metadata.clone();
        if !self.texts.is_empty() {
            let names: Vec<&str> = self.texts.iter().map(|text| text.name.as_str()).collect();
            metadata.insert(TEXT_NAMES.to_owned(), names.join("\n"));
        }
        let mut file = TensorFile::new(metadata);
        file.integers("tokens", &self.tokens);
        if !self.texts.is_empty() {
            let starts: Vec<u32> = self.texts.iter().map(|text| text.start as u32).collect();
            file.integers("texts", &starts);
        }
        if self.positions.len() != self.tokens.len() {
            let positions: Vec<u32> = self.positions.iter().map(|p| *p as u32).collect();
            file.integers("positions", &positions);
        }
        file.matrix("logits", self.vocab_size, &self.logits);
        for (number, values) in &self.hidden {
            file.matrix(&format!("hidden.{number}"), values.len() / self.tokens.len().max(1), values);
        }
        if let Some(losses) = &self.losses {
            file.vector("losses", losses);
        }
        match &self.greedy {
            Some(greedy) if greedy.prompt == self.tokens => file.integers("greedy", &greedy.ids),
            Some(greedy) => {
                file.integers("greedy.prompt", &greedy.prompt);
                file.integers("greedy.ids", &greedy.ids);
            }
            None => {}
        }
        file.to_bytes()
    }

    /// Tokens of each text with its name; the name is empty for a single text.
    pub fn spans(&self) -> Vec<(&str, Range<usize>)> {
        if self.texts.is_empty() {
            return vec![("", 0..self.tokens.len())];
        }
        let ends = self.texts.iter().skip(1).map(|text| text.start).chain([self.tokens.len()]);
        self.texts.iter().zip(ends).map(|(text, end)| (text.name.as_str(), text.start..end)).collect()
    }

    /// Appends the golden of another text.
    pub fn followed_by(mut self, name: String, next: Golden) -> Self {
        let start = self.tokens.len();
        self.texts.push(GoldenText { name, start });
        self.tokens.extend(next.tokens);
        self.positions.extend(next.positions.iter().map(|position| start + position));
        self.logits.extend(next.logits);
        for (number, values) in next.hidden {
            self.hidden.entry(number).or_default().extend(values);
        }
        if let (Some(losses), Some(more)) = (&mut self.losses, next.losses) {
            // the first token of a text isn't predicted
            losses.push(0.0);
            losses.extend(more);
        }
        self
    }

    /// Golden of the first text.
    pub fn first_text(&self) -> Golden {
        let count = self.spans()[0].1.end;
        let rows = self.positions.partition_point(|position| *position < count);
        let width = |values: &[f32]| values.len() / self.tokens.len().max(1);
        Golden {
            tokens: self.tokens[..count].to_vec(),
            texts: Vec::new(),
            positions: self.positions[..rows].to_vec(),
            logits: self.logits[..rows * self.vocab_size].to_vec(),
            vocab_size: self.vocab_size,
            hidden: self.hidden.iter().map(|(n, values)| (*n, values[..count * width(values)].to_vec())).collect(),
            losses: self.losses.as_ref().map(|losses| losses[..count.saturating_sub(1)].to_vec()),
            greedy: self.greedy.clone(),
            metadata: self.metadata.clone(),
        }
    }

    /// Positions and negative log likelihoods in nats of all predicted tokens, from the file's list or from the logits
    /// of the previous position. The first token of a text isn't predicted.
    pub fn losses(&self) -> Vec<(usize, f64)> {
        let mut losses = self.all_losses();
        losses.retain(|(position, _)| self.texts.iter().all(|text| text.start != *position));
        losses
    }

    fn all_losses(&self) -> Vec<(usize, f64)> {
        if let Some(losses) = &self.losses {
            return losses.iter().enumerate().map(|(index, loss)| (index + 1, f64::from(*loss))).collect();
        }
        let rows = self.positions.iter().zip(self.logits.chunks_exact(self.vocab_size.max(1)));
        let predicted = rows.filter_map(|(position, row)| {
            Some((position + 1, perplexity::loss(row, *self.tokens.get(position + 1)?)?))
        });
        predicted.collect()
    }

    /// Name of the reference, for people.
    pub fn reference(&self) -> String {
        let part = |key: &str| self.metadata.get(key).map(String::as_str).unwrap_or_default();
        let name = format!("{} {}", part("reference"), part("version"));
        let name = name.trim();
        let name = if name.is_empty() { "an unnamed reference" } else { name };
        match part("kind") {
            "" => name.to_owned(),
            kind => format!("{name} ({kind})"),
        }
    }
}

fn integers(view: &TensorView<'_>) -> Option<Vec<u32>> {
    let data = view.data();
    match view.dtype() {
        Dtype::I32 => {
            data.chunks_exact(4).map(|b| u32::try_from(i32::from_le_bytes([b[0], b[1], b[2], b[3]])).ok()).collect()
        }
        Dtype::I64 => {
            data.chunks_exact(8).map(|b| u32::try_from(i64::from_le_bytes(b.try_into().ok()?)).ok()).collect()
        }
        _ => None,
    }
}

fn floats(view: &TensorView<'_>) -> Option<Vec<f32>> {
    let data = view.data();
    match view.dtype() {
        Dtype::F32 => Some(scan::floats_of_f32(data)),
        Dtype::F16 => Some(scan::floats_of_f16(data)),
        Dtype::BF16 => Some(scan::floats_of_bf16(data)),
        _ => None,
    }
}

/// Builder of safetensors files; equal contents give equal bytes.
pub struct TensorFile {
    metadata: BTreeMap<String, String>,
    header: Map<String, serde_json::Value>,
    data: Vec<u8>,
}

impl TensorFile {
    /// Creates a file without tensors.
    pub fn new(metadata: BTreeMap<String, String>) -> Self {
        TensorFile { metadata, header: Map::new(), data: Vec::new() }
    }

    /// Adds numbers of 4 bytes each, which are little-endian on all supported processors.
    fn add<T: bytemuck::NoUninit>(&mut self, name: &str, dtype: &str, shape: &[usize], values: &[T]) {
        let start = self.data.len();
        self.data.extend_from_slice(bytemuck::cast_slice(values));
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, self.data.len()]});
        self.header.insert(name.to_owned(), entry);
    }

    /// Adds an int32 vector.
    pub fn integers(&mut self, name: &str, values: &[u32]) {
        self.add(name, "I32", &[values.len()], values);
    }

    /// Adds an f32 matrix with the given number of columns.
    pub fn matrix(&mut self, name: &str, columns: usize, values: &[f32]) {
        let shape = [values.len() / columns.max(1), columns];
        self.add(name, "F32", &shape, values);
    }

    /// Adds an f32 vector.
    pub fn vector(&mut self, name: &str, values: &[f32]) {
        self.add(name, "F32", &[values.len()], values);
    }

    /// Serializes the file.
    pub fn to_bytes(mut self) -> Vec<u8> {
        if !self.metadata.is_empty() {
            self.header.insert("__metadata__".into(), json!(self.metadata));
        }
        let mut header = serde_json::Value::Object(self.header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.append(&mut header);
        out.append(&mut self.data);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden() -> Golden {
        Golden {
            tokens: vec![2, 0, 1],
            texts: Vec::new(),
            positions: vec![0, 1, 2],
            logits: (0..12).map(|v| v as f32).collect(),
            vocab_size: 4,
            hidden: BTreeMap::from([(0, vec![0.5; 6]), (1, vec![1.5; 6])]),
            losses: Some(vec![0.25, 1.5]),
            greedy: Some(Greedy { prompt: vec![2], ids: vec![3, 3] }),
            metadata: BTreeMap::from([("reference".into(), "by hand".into()), ("kind".into(), "test".into())]),
        }
    }

    fn refused(change: impl FnOnce(&mut Golden)) -> String {
        let mut golden = golden();
        change(&mut golden);
        Golden::from_bytes(Path::new("g"), &golden.to_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn goldens_survive_a_round_trip() {
        let mut golden = golden();
        assert_eq!(Golden::from_bytes(Path::new("g"), &golden.to_bytes()).unwrap(), golden);
        golden.positions = vec![0, 2];
        golden.logits.truncate(8);
        golden.greedy = Some(Greedy { prompt: golden.tokens.clone(), ids: vec![1] });
        assert_eq!(Golden::from_bytes(Path::new("g"), &golden.to_bytes()).unwrap(), golden);
        assert_eq!(golden.reference(), "by hand (test)");
    }

    #[test]
    fn a_golden_of_several_texts_knows_where_each_begins() {
        let text = |name: &str, start| GoldenText { name: name.into(), start };
        let mut golden = Golden { texts: vec![text("prose", 0), text("rust", 2)], ..golden() };
        golden.metadata.insert(TEXT_NAMES.into(), "prose\nrust".into());
        assert_eq!(Golden::from_bytes(Path::new("g"), &golden.to_bytes()).unwrap(), golden);
        assert_eq!(golden.spans(), [("prose", 0..2), ("rust", 2..3)]);
        assert_eq!(golden.losses(), [(1, 0.25)], "nothing comes before the first token of a text");
        let first = golden.first_text();
        assert_eq!((first.tokens.as_slice(), first.logits.len(), first.hidden[&1].len()), (&[2, 0][..], 8, 4));
        let at = |starts: [usize; 2]| refused(|g| g.texts = starts.map(|start| text("t", start)).to_vec());
        assert!(at([0, 3]).ends_with("`texts` begin at [0, 3], expected 0 and ascending ones below 3"));
        assert!(at([1, 2]).contains("`texts` begin at [1, 2]"));
        assert!(at([0, 0]).contains("`texts` begin at [0, 0]"));
    }

    #[test]
    fn losses_are_those_of_the_file_or_of_its_logits() {
        let mut golden = golden();
        assert_eq!(golden.losses(), [(1, 0.25), (2, 1.5)]);
        golden.losses = None;
        // token 0 of [0, 1, 2, 3], then token 1 of [4, 5, 6, 7]
        let sum = (0..4).map(|v| f64::from(v).exp()).sum::<f64>().ln();
        let found = golden.losses();
        assert_eq!(found.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [1, 2]);
        assert!((found[0].1 - sum).abs() < 1e-9 && (found[1].1 - (sum - 1.0)).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn goldens_by_transformers_are_read() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/golden.safetensors");
        let golden = Golden::read(&path).unwrap();
        assert_eq!((golden.tokens.len(), golden.vocab_size, golden.hidden.len()), (80, 2048, 7));
        assert_eq!(golden.greedy.as_ref().unwrap().ids.len(), 64);
        assert!(golden.reference().starts_with("transformers"), "{}", golden.reference());
    }

    #[test]
    fn a_golden_that_contradicts_itself_is_refused() {
        assert!(refused(|g| g.logits[5] = f32::NAN).ends_with("`logits`, row 1, column 1: NaN"));
        assert!(refused(|g| g.logits.truncate(8)).ends_with("it has 2 rows of logits for 3 positions"));
        let at = |positions: [usize; 2]| {
            refused(|g| {
                g.logits.truncate(8);
                g.positions = positions.to_vec();
            })
        };
        assert!(at([1, 1]).ends_with("`positions` has 1 before 1, expected ascending ones"));
        assert!(at([1, 3]).ends_with("`positions` has 3, but there are 3 tokens"));
        assert!(refused(|g| g.losses = Some(vec![1.0])).ends_with("`losses` has 1 numbers, expected 2 finite ones"));
        let greedy = |ids| Some(Greedy { prompt: vec![1], ids });
        assert!(refused(|g| g.greedy = greedy(vec![2, 9])).ends_with("token 9 is outside its vocabulary of 4"));
        assert!(refused(|g| g.hidden = BTreeMap::from([(2, vec![0.0; 8])])).contains("`hidden.2`"));
        let error = Golden::from_bytes(Path::new("g"), b"junk").unwrap_err().to_string();
        assert!(error.starts_with("golden g: it isn't a safetensors file"), "{error}");
    }
}
