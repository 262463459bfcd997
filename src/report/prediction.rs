//! Predictions for chips, and the choices of the search.

use super::bytes;
use super::table::table;
use anec_advice::search::ChoiceReason;
use anec_advice::{CallPrediction, ChipPrediction, ContextPrediction};

/// Formats predictions: for each chip the calls, the speed in each context, memory and first load.
pub fn predictions(predictions: &[ChipPrediction]) -> String {
    predictions.iter().map(prediction).collect::<Vec<_>>().join("\n")
}

fn prediction(prediction: &ChipPrediction) -> String {
    let ChipPrediction { target, functions, contexts, calls, .. } = prediction;
    let mut text = String::new();
    let rows = functions.iter().map(|function| {
        vec![
            function.package.clone(),
            function.function.clone(),
            function.tokens.to_string(),
            format!("{:.2}", function.time.milliseconds),
            function.time.bound.to_string(),
        ]
    });
    text.push_str(&table(&[&format!("predicted for {target}"), "function", ">tokens", ">ms", "bound by"], rows));
    let speeds = if calls.is_empty() { of_contexts(contexts) } else { of_calls(calls) };
    text.push_str(&format!("\n{speeds}"));
    let [least, most] = prediction.first_load_seconds;
    text.push_str(&format!(
        "\n{} with one function of each package loaded, {} with all functions; first load of all functions {least:.0} to {most:.0} s\n",
        bytes(prediction.loaded_bytes),
        bytes(prediction.all_loaded_bytes)
    ));
    let said = prediction.notes.iter().chain(&prediction.assumptions);
    said.for_each(|line| text.push_str(&format!("  {line}\n")));
    text.push_str("  predicted from published numbers, not measured: book/src/speed.md has the error at every point\n");
    text
}

fn of_contexts(contexts: &[ContextPrediction]) -> String {
    let rows = contexts.iter().map(|context| {
        vec![
            context.context.to_string(),
            format!("{:.1}", context.decode_per_second),
            context.decode_tokens.to_string(),
            format!("{:.1}", context.prefill_per_second),
            context.prefill_tokens.to_string(),
        ]
    });
    let head = [">context", ">decode tok/s", ">tokens per call", ">prefill tok/s", ">tokens per call"];
    table(&head, rows)
}

fn of_calls(calls: &[CallPrediction]) -> String {
    let rows = calls.iter().map(|call| call_cells(call).to_vec());
    table(&[">tokens per call", ">ms per call", ">tok/s"], rows)
}

/// Context, and tokens per second of decode and prefill.
pub(crate) fn context_cells(context: &ContextPrediction) -> [String; 3] {
    let [decode, prefill] = [context.decode_per_second, context.prefill_per_second].map(|rate| format!("{rate:.1}"));
    [context.context.to_string(), decode, prefill]
}

/// Tokens, milliseconds and tokens per second of a call.
pub(crate) fn call_cells(call: &CallPrediction) -> [String; 3] {
    let CallPrediction { tokens, milliseconds } = *call;
    [tokens.to_string(), format!("{milliseconds:.2}"), format!("{:.1}", tokens as f64 * 1e3 / milliseconds)]
}

/// Formats the choices of a search and their reasons.
pub fn choices(reasons: &[ChoiceReason]) -> String {
    table(&["chosen", "because"], reasons.iter().map(|reason| vec![reason.key.to_owned(), reason.reason.clone()]))
}
