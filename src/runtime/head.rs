//! Results of the LM head: the logits of all tokens, or the largest of them with their tokens.

use std::ops::Range;
use std::sync::Arc;

use super::call::{place_logits, result};
use super::error::RuntimeError;
use super::forward::ForwardOutput;
use super::model::LoadedModel;
use anec_bundle::{FILE_NAME, PortRole};
use anec_exec::{Tensor, TensorData};

/// Destination of the head's results, one row for each token.
pub(super) enum HeadRows<'a> {
    /// Logits of the vocabulary or of the labels.
    Logits(&'a mut Vec<f32>),
    /// The `k` largest logits in descending order with their tokens; of equal logits the one of the lowest token first.
    Largest {
        /// Number of logits of each token.
        k: usize,
        /// Logits.
        logits: &'a mut Vec<f32>,
        /// Tokens of the logits.
        tokens: &'a mut Vec<u32>,
    },
}

impl<'a> HeadRows<'a> {
    /// Returns the rows of a pass, which are appended to its output: the largest logits if they suffice and the model
    /// gives them, else all.
    ///
    /// # Errors
    /// If all are needed and the model doesn't give them.
    pub(super) fn of(
        model: &LoadedModel,
        largest_suffice: bool,
        output: &'a mut ForwardOutput,
    ) -> Result<Self, RuntimeError> {
        let ForwardOutput { logits, tokens, .. } = output;
        match model.largest {
            Some(k) if largest_suffice => Ok(HeadRows::Largest { k, logits, tokens }),
            Some(k) if !model.gives_logits => Err(RuntimeError::NoLogits { what: "the call needs", k }),
            _ => Ok(HeadRows::Logits(logits)),
        }
    }

    /// Adds empty rows for `count` tokens and returns the number of rows before them.
    pub(super) fn grow(&mut self, model: &LoadedModel, count: usize) -> usize {
        match self {
            HeadRows::Logits(logits) => {
                let width = model.bundle.model.head_rows() as usize;
                let before = logits.len() / width;
                logits.resize((before + count) * width, 0.0);
                before
            }
            HeadRows::Largest { k, logits, tokens } => {
                let before = tokens.len() / *k;
                logits.resize((before + count) * *k, f32::NEG_INFINITY);
                tokens.resize((before + count) * *k, 0);
                before
            }
        }
    }

    /// Copies the results of a function for the `columns` of a call of `size` tokens into the rows from `first` on.
    ///
    /// # Errors
    /// If the function returned something else.
    pub(super) fn take(
        &mut self,
        model: &LoadedModel,
        (function, outputs): (usize, &[Arc<Tensor>]),
        size: usize,
        columns: Range<usize>,
        first: usize,
    ) -> Result<(), RuntimeError> {
        let entry = &model.bundle.functions[function];
        let rows = entry.stage.head_rows().map_or(0..0, |rows| rows.start as usize..rows.end as usize);
        match self {
            HeadRows::Logits(logits) => {
                let width = model.bundle.model.head_rows() as usize;
                let part = result(model, function, outputs, PortRole::Logits, rows.len(), size)?;
                // columns behind the wanted ones needn't be cut off
                let part = if columns.start == 0 { part } else { part.range(columns.clone(), columns.len()) };
                place_logits(&part, rows, &mut logits[first * width..][..columns.len() * width], width);
            }
            HeadRows::Largest { k, logits, tokens } => {
                let own = rows.len().min(*k);
                let values = result(model, function, outputs, PortRole::TopValues, own, size)?;
                let indices = indices(model, function, outputs, own * size)?;
                for (row, t) in columns.enumerate() {
                    let place = (first + row) * *k..(first + row + 1) * *k;
                    let (logits, tokens) = (&mut logits[place.clone()], &mut tokens[place]);
                    for (value, index) in values.column(t).zip(indices.iter().skip(t).step_by(size)) {
                        let token = usize::try_from(*index).ok().filter(|index| *index < rows.len());
                        let token = token.ok_or_else(|| {
                            let problem =
                                format!("`{}` gave {index} as an index of its {} rows", entry.function, rows.len());
                            RuntimeError::bundle(model.folder.join(&entry.package), problem)
                        })?;
                        insert(logits, tokens, value, (rows.start + token) as u32);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the indices that a function returned.
fn indices<'o>(
    model: &LoadedModel,
    function: usize,
    outputs: &'o [Arc<Tensor>],
    count: usize,
) -> Result<&'o [i32], RuntimeError> {
    let entry = &model.bundle.functions[function];
    let output = entry.outputs.iter().position(|port| port.role == PortRole::TopIndices);
    match output.and_then(|index| outputs.get(index)).map(|tensor| &tensor.data) {
        Some(TensorData::I32(indices)) if indices.len() == count => Ok(indices),
        _ => {
            let problem = format!("function `{}` of {} gave no {count} indices", entry.function, entry.package);
            Err(RuntimeError::bundle(model.folder.join(FILE_NAME), problem))
        }
    }
}

/// Inserts a logit into a row in descending order, whose last one is dropped. A NaN is never inserted.
fn insert(logits: &mut [f32], tokens: &mut [u32], logit: f32, token: u32) {
    let comes_before = |place: &usize| logit > logits[*place] || logit == logits[*place] && token < tokens[*place];
    let Some(place) = (0..logits.len()).find(comes_before) else { return };
    logits[place..].rotate_right(1);
    tokens[place..].rotate_right(1);
    (logits[place], tokens[place]) = (logit, token);
}

#[cfg(test)]
mod tests {
    use super::insert;

    #[test]
    fn of_equal_logits_the_lowest_token_comes_first() {
        let (mut logits, mut tokens) = ([f32::NEG_INFINITY; 3], [0; 3]);
        for (logit, token) in [(1.0, 9), (f32::NAN, 1), (2.0, 7), (2.0, 3), (1.0, 4), (2.0, 8)] {
            insert(&mut logits, &mut tokens, logit, token);
        }
        assert_eq!((logits, tokens), ([2.0; 3], [3, 7, 8]));
    }
}
