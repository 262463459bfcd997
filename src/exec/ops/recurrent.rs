//! Recurrent layers over a sequence `[steps, batch, features]`: `rnn`, `gru` and `lstm`.

use std::sync::Arc;

use super::{Resolved, Row, computing};
use crate::kernel::{Call, Input, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::tensor::Tensor;
use anec_kernels::activation::{sigmoid_in_place, tanh_in_place};
use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::product;

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "gru" => |op| {
        let cell = Gru::resolve(op)?;
        Ok(Arc::new(Recurrent { direction: one_direction(op)?, ..layer(op, cell, 3)? }))
    },
    "lstm" => lstm,
    "rnn" => |op| {
        let cell = Rnn { activation: Activation::resolve(op, "activation")? };
        Ok(Arc::new(Recurrent { direction: one_direction(op)?, ..layer(op, cell, 1)? }))
    },
};

/// Activation of a gate, with the constants of its standard form.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Activation {
    HardSigmoid,
    Linear,
    Relu,
    Sigmoid,
    Tanh,
}

impl Activation {
    fn resolve(op: &Resolver<'_>, parameter: &str) -> Result<Self, String> {
        match op.text(parameter)?.to_ascii_lowercase().as_str() {
            "hard_sigmoid" | "sigmoid_hard" => Ok(Activation::HardSigmoid),
            "linear" => Ok(Activation::Linear),
            "relu" => Ok(Activation::Relu),
            "sigmoid" => Ok(Activation::Sigmoid),
            "tanh" | "scaled_tanh" => Ok(Activation::Tanh),
            other => Err(format!("`{parameter}` is \"{other}\", which isn't an activation of a recurrent layer")),
        }
    }

    fn apply(self, values: &mut [f32]) {
        match self {
            Activation::HardSigmoid => values.iter_mut().for_each(|v| *v = (0.2 * *v + 0.5).clamp(0.0, 1.0)),
            Activation::Linear => {}
            Activation::Relu => values.iter_mut().for_each(|v| *v = v.max(0.0)),
            Activation::Sigmoid => sigmoid_in_place(values),
            Activation::Tanh => tanh_in_place(values),
        }
    }
}

/// Order in which steps are processed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Direction {
    Forward,
    Reverse,
}

fn one_direction(op: &Resolver<'_>) -> Result<Direction, String> {
    match op.text("direction")? {
        "forward" => Ok(Direction::Forward),
        "reverse" => Ok(Direction::Reverse),
        other => Err(format!("`direction` is \"{other}\"; expected forward or reverse")),
    }
}

/// Weights of one direction of a layer with `gates` gates, each a group of rows.
struct Weights {
    /// `[gates * hidden, features]`.
    input: Arc<Tensor>,
    /// `[gates * hidden, hidden]`.
    hidden: Arc<Tensor>,
    /// `[gates * hidden]`.
    bias: Option<Arc<Tensor>>,
}

impl Weights {
    fn resolve(op: &Resolver<'_>, names: [&str; 3], gates: usize) -> Result<Self, String> {
        let matrix = |name: &str| -> Result<Arc<Tensor>, String> {
            let tensor = op.known_tensor(name)?.ok_or_else(|| format!("parameter `{name}` is missing"))?;
            match tensor.rank() == 2 && tensor.floats().is_some() {
                true => Ok(tensor),
                false => Err(format!("`{name}` of shape {:?} is no matrix of floats", tensor.shape)),
            }
        };
        let (input, hidden) = (matrix(names[0])?, matrix(names[1])?);
        let size = hidden.shape[1];
        let rows = gates.checked_mul(size).filter(|rows| *rows > 0 && hidden.shape[0] == *rows);
        let Some(rows) = rows.filter(|rows| input.shape[0] == *rows) else {
            let (input, hidden) = (&input.shape, &hidden.shape);
            return Err(format!(
                "`{}` {input:?} and `{}` {hidden:?} don't fit: expected [{gates} H, I] and [{gates} H, H]",
                names[0], names[1]
            ));
        };
        let bias = vector(op, names[2], rows)?;
        Ok(Weights { input, hidden, bias })
    }

    /// Size of the hidden state.
    fn size(&self) -> usize {
        self.hidden.shape[1]
    }
}

/// Constant vector of floats of this length, if the parameter is present.
fn vector(op: &Resolver<'_>, name: &str, length: usize) -> Result<Option<Arc<Tensor>>, String> {
    let Some(tensor) = op.known_tensor(name)? else { return Ok(None) };
    match tensor.floats().is_some() && tensor.data.len() == length {
        true => Ok(Some(tensor)),
        false => Err(format!("`{name}` of shape {:?} doesn't hold {length} floats", tensor.shape)),
    }
}

/// Computation of one step of a layer.
trait Cell: Send + Sync + 'static {
    /// Number of state vectors: the hidden state, and that of the cell if there is one.
    const STATES: usize;

    /// Computes the states after a step from those before. `given` holds the products with the input and the biases of
    /// all gates, which it may overwrite. `hidden` multiplies a vector with rows of the hidden weights, from the first
    /// row.
    fn step(&self, given: &mut [f32], states: &mut [&mut [f32]], hidden: HiddenProduct<'_>);
}

/// Product of a vector with rows of the hidden weights.
#[derive(Clone, Copy)]
struct HiddenProduct<'a> {
    weights: &'a [f32],
    size: usize,
}

impl HiddenProduct<'_> {
    /// Product of `out.len()` rows from `first` with a vector.
    fn rows(&self, first: usize, vector: &[f32], out: &mut [f32]) {
        let rows = &self.weights[first * self.size..][..out.len() * self.size];
        times(rows, vector, 1, out);
    }
}

/// `out = x w^T` for `count` vectors `x` and a row-major matrix `w`; `out` is `[count, rows of w]`.
fn times(w: &[f32], x: &[f32], count: usize, out: &mut [f32]) {
    if count == 0 || out.is_empty() {
        return;
    }
    let (width, rows) = (x.len() / count, out.len() / count);
    let (x_layout, w_layout) = (MatrixLayout { row: width, column: 1 }, MatrixLayout { row: 1, column: width });
    product((count, width, rows), (x, x_layout), (w, w_layout), out);
}

/// Recurrent layer of one direction.
struct Recurrent<C> {
    x: Input,
    /// Initial states.
    initial: Vec<Input>,
    weights: Weights,
    direction: Direction,
    /// Whether the first result has all steps, or the last one only.
    sequence: bool,
    cell: C,
}

fn layer<C: Cell>(op: &mut Resolver<'_>, cell: C, gates: usize) -> Result<Recurrent<C>, String> {
    let weights = Weights::resolve(op, ["weight_ih", "weight_hh", "bias"], gates)?;
    let initial =
        ["initial_h", "initial_c"][..C::STATES].iter().map(|name| op.input(name)).collect::<Result<_, _>>()?;
    let (x, sequence) = (op.input("x")?, op.flag("output_sequence")?);
    Ok(Recurrent { x, initial, weights, direction: Direction::Forward, sequence, cell })
}

/// Maximum number of products with rows of the weights.
const MAX_ELEMENTS: usize = 1 << 34;

/// Result of one direction: the hidden state after each step in the order of processing, and the final states.
struct Processed {
    steps: Vec<f32>,
    states: Vec<Vec<f32>>,
}

/// Sizes of a sequence.
struct Sizes {
    steps: usize,
    batch: usize,
    features: usize,
}

impl Sizes {
    fn of(x: &Tensor) -> Result<Self, String> {
        match x.shape[..] {
            [steps, batch, features] if steps > 0 => Ok(Sizes { steps, batch, features }),
            _ => Err(format!("`x` has shape {:?}; expected [steps, batch, features]", x.shape)),
        }
    }
}

/// Floats of an initial state `[batch, directions * size]` of one direction.
fn initial_state(
    call: &Call<'_>,
    input: Input,
    batch: usize,
    size: usize,
    part: (usize, usize),
) -> Result<Vec<f32>, String> {
    let (index, directions) = part;
    let tensor = call.tensor(input)?;
    let values = call.floats(input)?;
    let width = directions * size;
    if tensor.shape != [batch, width] {
        return Err(format!("`{}` has shape {:?}; expected [{batch}, {width}]", input.name, tensor.shape));
    }
    Ok(values.chunks_exact(width.max(1)).flat_map(|row| &row[index * size..][..size]).copied().collect())
}

/// Runs a cell over a sequence.
fn process<C: Cell>(
    cell: &C,
    weights: &Weights,
    x: (&[f32], &Sizes),
    mut states: Vec<Vec<f32>>,
    direction: Direction,
) -> Result<Processed, String> {
    let (x, Sizes { steps, batch, features }) = (x.0, x.1);
    let (steps, batch, features, size) = (*steps, *batch, *features, weights.size());
    if weights.input.shape[1] != features {
        let columns = weights.input.shape[1];
        return Err(format!("`x` has {features} features; expected {columns}, as the weights have columns"));
    }
    let rows = weights.input.shape[0];
    let (Some(input), Some(hidden)) = (weights.input.floats(), weights.hidden.floats()) else {
        return Err("the weights aren't floats".into());
    };
    // a sequence without features has no elements, however long it is
    if steps.checked_mul(batch).and_then(|n| n.checked_mul(rows)).is_none_or(|n| n > MAX_ELEMENTS) {
        return Err(format!("{steps} steps of {batch} sequences are too many for {rows} rows of weights"));
    }
    let bias = weights.bias.as_ref().and_then(|bias| bias.floats());
    let mut given = vec![0.0; batch * rows];
    let mut out = Vec::with_capacity(steps * batch * size);
    for step in 0..steps {
        let at = if direction == Direction::Forward { step } else { steps - 1 - step };
        times(input, &x[at * batch * features..][..batch * features], batch, &mut given);
        for (sequence, given) in given.chunks_exact_mut(rows).enumerate() {
            if let Some(bias) = bias {
                given.iter_mut().zip(bias).for_each(|(given, bias)| *given += bias);
            }
            let mut own: Vec<&mut [f32]> =
                states.iter_mut().map(|state| &mut state[sequence * size..][..size]).collect();
            cell.step(given, &mut own, HiddenProduct { weights: hidden, size });
        }
        out.extend_from_slice(&states[0]);
    }
    Ok(Processed { steps: out, states })
}

impl<C: Cell> Kernel for Recurrent<C> {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let sizes = Sizes::of(call.tensor(self.x)?)?;
        let (batch, size) = (sizes.batch, self.weights.size());
        let states = self.initial.iter().map(|input| initial_state(call, *input, batch, size, (0, 1)));
        let states = states.collect::<Result<Vec<_>, _>>()?;
        let x = (call.floats(self.x)?, &sizes);
        let Processed { steps, states } = process(&self.cell, &self.weights, x, states, self.direction)?;
        // in the order of processing, also for the reverse direction
        let first = if self.sequence { &steps[..] } else { &steps[steps.len() - batch * size..] };
        let count = if self.sequence { sizes.steps } else { 1 };
        let result = pool.copied(&[count, batch, size], first);
        call.push(result)?;
        for state in states {
            let result = pool.copied(&[batch, size], &state);
            call.push(result)?;
        }
        Ok(())
    }
}

/// `h = activation(W x + R h + b)`.
struct Rnn {
    activation: Activation,
}

impl Cell for Rnn {
    const STATES: usize = 1;

    fn step(&self, given: &mut [f32], states: &mut [&mut [f32]], hidden: HiddenProduct<'_>) {
        let mut products = vec![0.0; given.len()];
        hidden.rows(0, states[0], &mut products);
        states[0].iter_mut().zip(&*given).zip(&products).for_each(|((h, given), product)| *h = given + product);
        self.activation.apply(states[0]);
    }
}

/// Gates: reset, output, update.
struct Gru {
    recurrent: Activation,
    activation: Activation,
    /// Whether the reset gate scales the product with the hidden state instead of the state itself.
    reset_after: bool,
    /// Bias of the products with the input; `bias` belongs to those with the hidden state then.
    input_bias: Option<Arc<Tensor>>,
    /// Bias of the hidden products of the output gate, if the reset gate scales it.
    hidden_bias: Option<Arc<Tensor>>,
}

impl Gru {
    fn resolve(op: &mut Resolver<'_>) -> Result<Self, String> {
        let rows = op.known_tensor("weight_hh")?.map_or(0, |weight| weight.shape.first().copied().unwrap_or(0));
        let reset_after = op.has("reset_after") && op.flag("reset_after")?;
        Ok(Gru {
            recurrent: Activation::resolve(op, "recurrent_activation")?,
            activation: Activation::resolve(op, "activation")?,
            reset_after,
            input_bias: vector(op, "input_bias", rows)?,
            hidden_bias: if reset_after { vector(op, "bias", rows)? } else { None },
        })
    }
}

impl Cell for Gru {
    const STATES: usize = 1;

    fn step(&self, given: &mut [f32], states: &mut [&mut [f32]], hidden: HiddenProduct<'_>) {
        let h = &mut *states[0];
        let size = h.len();
        if let Some(bias) = self.input_bias.as_ref().and_then(|bias| bias.floats()) {
            given.iter_mut().zip(bias).for_each(|(given, bias)| *given += bias);
        }
        let (reset, rest) = given.split_at_mut(size);
        let (output, update) = rest.split_at_mut(size);
        let mut products = vec![0.0; size];
        for (gate, first) in [(&mut *reset, 0), (&mut *update, 2 * size)] {
            hidden.rows(first, h, &mut products);
            gate.iter_mut().zip(&products).for_each(|(gate, product)| *gate += product);
            self.recurrent.apply(gate);
        }
        if self.reset_after {
            hidden.rows(size, h, &mut products);
            // `output` has the bias already, which belongs to the scaled product
            let bias = self.hidden_bias.as_ref().and_then(|bias| bias.floats()).map(|bias| &bias[size..2 * size]);
            for (i, ((output, product), reset)) in output.iter_mut().zip(&products).zip(&*reset).enumerate() {
                let bias = bias.map_or(0.0, |bias| bias[i]);
                *output += reset * (product + bias) - bias;
            }
        } else {
            let scaled: Vec<f32> = h.iter().zip(&*reset).map(|(h, reset)| h * reset).collect();
            hidden.rows(size, &scaled, &mut products);
            output.iter_mut().zip(&products).for_each(|(output, product)| *output += product);
        }
        self.activation.apply(output);
        for ((h, output), update) in h.iter_mut().zip(&*output).zip(&*update) {
            *h = (1.0 - update) * output + update * *h;
        }
    }
}

/// Gates: input, forget, output, cell.
struct Lstm {
    recurrent: Activation,
    cell: Activation,
    activation: Activation,
    clip: Option<f32>,
    /// Weights of the cell state for the gates input, forget and output: `[3 * hidden]`.
    peephole: Option<Arc<Tensor>>,
}

impl Lstm {
    fn resolve(op: &mut Resolver<'_>, peephole: &str, size: usize) -> Result<Self, String> {
        Ok(Lstm {
            recurrent: Activation::resolve(op, "recurrent_activation")?,
            cell: Activation::resolve(op, "cell_activation")?,
            activation: Activation::resolve(op, "activation")?,
            clip: if op.has("clip") { Some(op.float("clip")?).filter(|clip| *clip >= 0.0) } else { None },
            peephole: vector(op, peephole, 3 * size)?,
        })
    }

    /// Adds the cell state's part to a gate.
    fn peep(&self, gate: &mut [f32], index: usize, c: &[f32]) {
        if let Some(weights) = self.peephole.as_ref().and_then(|weights| weights.floats()) {
            let weights = &weights[index * c.len()..][..c.len()];
            gate.iter_mut().zip(c).zip(weights).for_each(|((gate, c), weight)| *gate += c * weight);
        }
    }
}

impl Cell for Lstm {
    const STATES: usize = 2;

    fn step(&self, given: &mut [f32], states: &mut [&mut [f32]], hidden: HiddenProduct<'_>) {
        let [h, c] = states else { return };
        let size = h.len();
        let mut products = vec![0.0; given.len()];
        hidden.rows(0, h, &mut products);
        given.iter_mut().zip(&products).for_each(|(gate, product)| *gate += product);
        let (input, rest) = given.split_at_mut(size);
        let (forget, rest) = rest.split_at_mut(size);
        let (output, new) = rest.split_at_mut(size);
        self.peep(input, 0, c);
        self.peep(forget, 1, c);
        self.recurrent.apply(input);
        self.recurrent.apply(forget);
        self.cell.apply(new);
        for (((c, forget), input), new) in c.iter_mut().zip(&*forget).zip(&*input).zip(&*new) {
            *c = forget * *c + input * new;
            if let Some(clip) = self.clip {
                *c = c.clamp(-clip, clip);
            }
        }
        self.peep(output, 2, c);
        self.recurrent.apply(output);
        h.copy_from_slice(c);
        self.activation.apply(h);
        h.iter_mut().zip(&*output).for_each(|(h, output)| *h *= output);
    }
}

fn lstm(op: &mut Resolver<'_>) -> Resolved {
    if op.text("direction")? != "bidirectional" {
        let size = Weights::resolve(op, ["weight_ih", "weight_hh", "bias"], 4)?.size();
        let cell = Lstm::resolve(op, "peephole", size)?;
        let direction = one_direction(op).map_err(|problem| format!("{problem}, or bidirectional"))?;
        return Ok(Arc::new(Recurrent { direction, ..layer(op, cell, 4)? }));
    }
    let both = [["weight_ih", "weight_hh", "bias"], ["weight_ih_back", "weight_hh_back", "bias_back"]];
    let [forward, back] = [Weights::resolve(op, both[0], 4)?, Weights::resolve(op, both[1], 4)?];
    if forward.size() != back.size() {
        return Err(format!("the directions have hidden states of {} and {}", forward.size(), back.size()));
    }
    let cells = [Lstm::resolve(op, "peephole", forward.size())?, Lstm::resolve(op, "peephole_back", back.size())?];
    Ok(Arc::new(Bidirectional {
        x: op.input("x")?,
        initial: [op.input("initial_h")?, op.input("initial_c")?],
        weights: [forward, back],
        sequence: op.flag("output_sequence")?,
        cells,
    }))
}

/// LSTM of both directions, whose states lie side by side.
struct Bidirectional {
    x: Input,
    initial: [Input; 2],
    weights: [Weights; 2],
    sequence: bool,
    cells: [Lstm; 2],
}

impl Kernel for Bidirectional {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let sizes = Sizes::of(call.tensor(self.x)?)?;
        let (batch, size) = (sizes.batch, self.weights[0].size());
        let mut processed = Vec::with_capacity(2);
        for (index, direction) in [Direction::Forward, Direction::Reverse].into_iter().enumerate() {
            let states = self.initial.iter().map(|input| initial_state(call, *input, batch, size, (index, 2)));
            let states = states.collect::<Result<Vec<_>, _>>()?;
            let x = (call.floats(self.x)?, &sizes);
            processed.push(process(&self.cells[index], &self.weights[index], x, states, direction)?);
        }
        let [forward, back] = &processed[..] else { return Err("two directions are needed".into()) };
        // each step has the states of both directions at its position
        let part = batch * size;
        let steps = sizes.steps;
        let shown: Vec<(usize, usize)> = match self.sequence {
            true => (0..steps).map(|step| (step, steps - 1 - step)).collect(),
            false => vec![(steps - 1, steps - 1)],
        };
        let result = pool.make(&[shown.len(), batch, 2 * size], |out: &mut Vec<f32>| {
            for (ahead, behind) in &shown {
                let rows = (&forward.steps[ahead * part..][..part], &back.steps[behind * part..][..part]);
                beside(rows.0, rows.1, size, out);
            }
        });
        call.push(result)?;
        for (forward, back) in forward.states.iter().zip(&back.states) {
            let result = pool.make(&[batch, 2 * size], |out: &mut Vec<f32>| beside(forward, back, size, out));
            call.push(result)?;
        }
        Ok(())
    }
}

/// Appends the rows of two matrices of width `size`, side by side.
fn beside(a: &[f32], b: &[f32], size: usize, out: &mut Vec<f32>) {
    for (a, b) in a.chunks_exact(size).zip(b.chunks_exact(size)) {
        out.extend_from_slice(a);
        out.extend_from_slice(b);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{NamedValues, assert_close, b, f, results, s};
    use anec_mil::DataType;

    use crate::tensor::Tensor;

    /// A layer of one step, one sequence and a hidden state of one.
    fn layer(
        operator: &str,
        gates: usize,
        change: impl FnOnce(&mut NamedValues<'static>),
    ) -> Result<Vec<Tensor>, String> {
        let mut arguments: NamedValues<'static> = vec![
            ("x", f(&[1, 1, 2], &[1.0, 2.0])),
            ("initial_h", f(&[1, 1], &[0.5])),
            ("weight_ih", f(&[gates, 2], &vec![0.5; 2 * gates])),
            ("weight_hh", f(&[gates, 1], &vec![1.0; gates])),
            ("output_sequence", b(&[], &[false])),
            ("direction", s("forward")),
            ("activation", s("linear")),
            ("recurrent_activation", s("linear")),
            ("cell_activation", s("linear")),
        ];
        if operator == "lstm" {
            arguments.push(("initial_c", f(&[1, 1], &[1.0])));
        }
        change(&mut arguments);
        results(operator, arguments.into_iter().map(|(name, value)| (name, vec![value])).collect(), DataType::Fp32)
    }

    fn set(arguments: &mut NamedValues<'static>, name: &'static str, value: crate::value::Value) {
        arguments.retain(|(other, _)| *other != name);
        arguments.push((name, value));
    }

    #[test]
    fn gates_are_combined() {
        // each gate is 0.5 * 1 + 0.5 * 2 + h = 2
        let rnn = layer("rnn", 1, |_| {}).unwrap();
        assert_close(&rnn[0], &[1, 1, 1], &[2.0]);
        // reset 2 doubles h: output 1.5 + 1, and (1 - 2) * 2.5 + 2 * 0.5
        let gru = layer("gru", 3, |_| {}).unwrap();
        assert_close(&gru[1], &[1, 1], &[-1.5]);
        // c = 2 * 1 + 2 * 2, h = 2 * 6
        let lstm = layer("lstm", 4, |_| {}).unwrap();
        assert_close(&lstm[1], &[1, 1], &[12.0]);
        assert_close(&lstm[2], &[1, 1], &[6.0]);
    }

    #[test]
    fn arguments_that_do_not_fit_are_errors() {
        let problem =
            |operator, gates, change: fn(&mut NamedValues<'static>)| layer(operator, gates, change).unwrap_err();
        let found = problem("lstm", 4, |a| set(a, "weight_hh", f(&[3, 1], &[1.0; 3])));
        assert_eq!(found, "`weight_ih` [4, 2] and `weight_hh` [3, 1] don't fit: expected [4 H, I] and [4 H, H]");
        let found = problem("gru", 3, |a| set(a, "weight_ih", f(&[3, 5], &[1.0; 15])));
        assert_eq!(found, "`x` has 2 features; expected 5, as the weights have columns");
        let found = problem("rnn", 1, |a| set(a, "bias", f(&[2], &[1.0; 2])));
        assert_eq!(found, "`bias` of shape [2] doesn't hold 1 floats");
        let found = problem("lstm", 4, |a| set(a, "initial_c", f(&[2, 1], &[1.0; 2])));
        assert_eq!(found, "`initial_c` has shape [2, 1]; expected [1, 1]");
        let found = problem("lstm", 4, |a| set(a, "peephole", f(&[4], &[1.0; 4])));
        assert_eq!(found, "`peephole` of shape [4] doesn't hold 3 floats");
        let found = problem("lstm", 4, |a| set(a, "direction", s("bidirectional")));
        assert_eq!(found, "parameter `weight_ih_back` is missing");
        let found = problem("lstm", 4, |a| set(a, "direction", s("sideways")));
        assert_eq!(found, "`direction` is \"sideways\"; expected forward or reverse, or bidirectional");
        let found = problem("rnn", 1, |a| set(a, "direction", s("bidirectional")));
        assert!(found.contains("expected forward or reverse"), "{found}");
        let found = problem("rnn", 1, |a| set(a, "activation", s("softmax")));
        assert!(found.contains("`activation` is \"softmax\""), "{found}");
        let found = problem("rnn", 1, |a| set(a, "x", f(&[0, 1, 2], &[])));
        assert!(found.contains("expected [steps, batch, features]"), "{found}");
        let found = problem("rnn", 1, |a| set(a, "weight_hh", f(&[1, 0], &[])));
        assert!(found.contains("don't fit"), "{found}");
    }

    #[test]
    fn no_sequences_give_no_results() {
        let none = layer("rnn", 1, |a| {
            set(a, "x", f(&[1, 0, 2], &[]));
            set(a, "initial_h", f(&[0, 1], &[]));
        });
        assert_eq!(none.unwrap()[0].shape, [1, 0, 1]);
    }
}
