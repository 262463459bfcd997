//! Recurrent layers over `[steps, batch, features]`.

use super::rules::Inferred;
use crate::catalogue::{Arguments, Row};
use crate::types::Opset::{CoreMl5, CoreMl8};
use crate::types::{Dim, TensorType};

pub const ROWS: &[Row] = &[
    (
        "rnn",
        CoreMl5,
        "x initial_h weight_ih! weight_hh! bias!? direction!?=\"forward\" output_sequence!?=false \
         activation!?=\"tanh\"",
        |a| layer(a, 1, 1),
    ),
    (
        "gru",
        CoreMl5,
        "x initial_h weight_ih! weight_hh! bias!? direction!?=\"forward\" output_sequence!?=false \
         recurrent_activation!?=\"sigmoid\" activation!?=\"tanh\"",
        |a| layer(a, 3, 1),
    ),
    (
        "gru",
        CoreMl8,
        "x initial_h weight_ih! weight_hh! bias!? direction!?=\"forward\" output_sequence!?=false \
         recurrent_activation!?=\"sigmoid\" activation!?=\"tanh\" reset_after!? input_bias!?",
        |a| layer(a, 3, 1),
    ),
    (
        "lstm",
        CoreMl5,
        "x initial_h initial_c weight_ih! weight_hh! bias!? peephole!? weight_ih_back!? weight_hh_back!? bias_back!? \
         peephole_back!? direction!?=\"forward\" output_sequence!?=false recurrent_activation!?=\"sigmoid\" \
         cell_activation!?=\"tanh\" activation!?=\"tanh\" clip!?",
        |a| layer(a, 4, 2),
    ),
];

/// All steps or the last, and the final states.
fn layer(a: &Arguments<'_>, gates: u64, states: usize) -> Inferred {
    let x = a.tensor("x")?;
    let [steps, batch, features] = x.shape.as_slice() else {
        return Err(format!("x has rank {}; expected [steps, batch, features]", x.rank()));
    };
    let direction = a.text("direction").unwrap_or("forward");
    let both = match direction {
        "forward" | "reverse" => false,
        "bidirectional" if states == 2 => true,
        other => return Err(format!("`direction` is \"{other}\"")),
    };
    let mut hidden = check(a, ["weight_ih", "weight_hh"], features, gates)?;
    if both {
        check(a, ["weight_ih_back", "weight_hh_back"], features, gates)?;
        hidden = hidden.times(&Dim::Fixed(2));
    }
    let steps = if a.flag("output_sequence") { steps.clone() } else { Dim::Fixed(1) };
    let of = |shape: Vec<Dim>| TensorType { dtype: x.dtype, shape }.into();
    let mut results = vec![of(vec![steps, batch.clone(), hidden.clone()])];
    results.extend((0..states).map(|_| of(vec![batch.clone(), hidden.clone()])));
    Ok(results)
}

/// Checks the weights of one direction; returns the size of the hidden state.
fn check(a: &Arguments<'_>, [input, hidden]: [&str; 2], features: &Dim, gates: u64) -> Result<Dim, String> {
    let (ih, hh) = (a.tensor(input)?, a.tensor(hidden)?);
    let fits = match (ih.shape.as_slice(), hh.shape.as_slice()) {
        ([rows, columns], [own, size]) => {
            let all = size.times(&Dim::Fixed(gates));
            rows.is_compatible(&all) && own.is_compatible(&all) && columns.is_compatible(features)
        }
        _ => false,
    };
    match fits {
        true => Ok(hh.shape[1].clone()),
        false => {
            let expected = format!("[{gates} H, {features}] and [{gates} H, H]");
            Err(format!("`{input}` is {ih} and `{hidden}` is {hh}; expected {expected}"))
        }
    }
}
