//! Batched calls of one function for several sequences, which share each pass over the weights.
//!
//! Each node of the function runs for all sequences before the next node does. A product with a weight runs once for
//! the tokens of all sequences; each token gets the bits that it has alone. The nodes between two such products depend
//! on a sequence's own values and states, so they run sequence by sequence, each on one thread. A prompt that is more
//! work than a thread's share of the total runs first and is divided among all threads.

use std::cmp::Reverse;
use std::sync::Arc;

use smallvec::SmallVec;

use super::error::ExecError;
use super::executable::Executable;
use super::frame::Frame;
use super::kernel::Call;
use super::node::Node;
use super::pool::Pool;
use super::state::State;
use super::step::Step;
use super::tensor::{Tensor, TensorData};
use super::weight::WeightProduct;
use super::workspace::Workspace;
use anec_kernels::pool::{self, LARGE};
use anec_kernels::product::{TokenProduct, multiply_each};

/// Input of one sequence to a batched call.
pub struct SequenceCall<'a> {
    /// Inputs by name, in any order.
    pub inputs: Vec<(&'a str, &'a Arc<Tensor>)>,
    /// States of the sequence.
    pub state: &'a mut State,
}

/// Progress of one sequence through a function.
struct Member<'a> {
    workspace: Workspace,
    state: &'a mut State,
    /// Whether its steps are divided among threads.
    is_divided: bool,
    /// Error that stopped it.
    failure: Option<ExecError>,
}

impl Executable {
    /// Runs the function for several sequences. Each result equals that of [`run`](Executable::run) bit for bit; an
    /// error of one sequence doesn't affect the others.
    pub fn run_batch(&self, calls: Vec<SequenceCall<'_>>) -> Vec<Result<Vec<(String, Tensor)>, ExecError>> {
        let sizes: Vec<usize> = calls.iter().map(largest_input).collect();
        let divided = are_divided(&sizes, pool::threads());
        let begin = |(call, is_divided)| self.begin(call, is_divided);
        let mut members: Vec<Member<'_>> = calls.into_iter().zip(divided).map(begin).collect();
        for run in self.nodes.split_inclusive(|node| node.shared().is_some()) {
            let step = run.last().and_then(Node::shared);
            let own = &run[..run.len() - usize::from(step.is_some())];
            if !own.is_empty() {
                let run = |member: &mut Member<'_>| {
                    member.attempt(self, |frame| own.iter().try_for_each(|node| node.run(frame)));
                };
                members.iter_mut().filter(|member| member.is_divided).for_each(run);
                let mut others: SmallVec<[_; 16]> = members.iter_mut().filter(|member| !member.is_divided).collect();
                pool::for_each_mut(&mut others, |_, member| run(member));
            }
            if let Some(step) = step {
                self.share(step, &mut members);
            }
        }
        members.into_iter().map(|member| self.end(member)).collect()
    }

    fn begin<'a>(&self, call: SequenceCall<'a>, is_divided: bool) -> Member<'a> {
        let SequenceCall { inputs, state } = call;
        let workspace = self.workspaces.take(self.slots);
        let failure = self.check_inputs(&inputs).err();
        let mut member = Member { workspace, state, is_divided, failure };
        member.attempt(self, |frame| {
            self.set_inputs(frame, &inputs);
            Ok(())
        });
        member
    }

    fn end(&self, mut member: Member<'_>) -> Result<Vec<(String, Tensor)>, ExecError> {
        let mut outputs = Vec::new();
        member.attempt(self, |frame| self.take_outputs(frame, &mut outputs));
        self.workspaces.give(member.workspace);
        match member.failure {
            None => Ok(self.with_names(outputs)),
            Some(error) => Err(error),
        }
    }

    /// Runs a step that multiplies a weight: in one pass for all sequences, or one by one if they can't share it.
    fn share(&self, step: &Step, members: &mut [Member<'_>]) {
        let problem = |frame: &Frame<'_>, problem| frame.failed(step, problem);
        for member in members.iter_mut() {
            member.attempt(self, |frame| frame.fetch_arguments(step).map_err(|text| problem(frame, text)));
        }
        let shared = multiply_for_all(step, members);
        for member in members.iter_mut() {
            member.attempt(self, |frame| {
                if !shared {
                    frame.compute(step).map_err(|text| problem(frame, text))?;
                }
                frame.store_results(step).map_err(|text| problem(frame, text))
            });
        }
    }
}

/// Size of the call's largest input; proportional to its number of tokens.
fn largest_input(call: &SequenceCall<'_>) -> usize {
    call.inputs.iter().map(|(_, tensor)| tensor.data.len()).max().unwrap_or(0)
}

/// Returns which calls are divided among threads: those whose largest input is more than one thread's share of the
/// remaining work and large enough for its steps to be divided.
fn are_divided(sizes: &[usize], threads: usize) -> Vec<bool> {
    let (mut divided, mut left) = (vec![false; sizes.len()], sizes.iter().sum::<usize>());
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|call| Reverse(sizes[*call]));
    for call in order {
        if sizes[call] <= LARGE || sizes[call].saturating_mul(threads) <= left {
            break;
        }
        divided[call] = true;
        left -= sizes[call];
    }
    divided
}

/// Multiplies the inputs of all members with the weight of a step in one pass. Returns false, and changes nothing, if
/// they can't share it.
fn multiply_for_all(step: &Step, members: &mut [Member<'_>]) -> bool {
    let (mut calls, mut pools) = (Vec::with_capacity(members.len()), Vec::with_capacity(members.len()));
    for Member { workspace, state, .. } in members.iter_mut().filter(|member| member.failure.is_none()) {
        let Workspace { values, results, pool, .. } = workspace;
        calls.push(Call { values, state, takes_state: step.takes_state, results });
        pools.push(pool);
    }
    let products = calls.iter().map(|call| step.kernel.weight_product(call).ok().flatten());
    let Some(products) = products.collect::<Option<Vec<WeightProduct<'_>>>>() else { return false };
    let Some(WeightProduct { weight, activations, bias, .. }) = products.first() else { return false };
    // the bias may be a computed value
    let same = |other: &WeightProduct<'_>| std::ptr::eq(*weight, other.weight) && *bias == other.bias;
    if !products.iter().all(same) {
        return false;
    }
    let place = |(product, pool): (&WeightProduct<'_>, &mut Pool)| pool.unspecified::<f32>(&product.shape);
    let mut outputs: Vec<Arc<Tensor>> = products.iter().zip(pools).map(place).collect();
    let token_product = |(product, output)| -> Option<TokenProduct<'_>> {
        let (product, output): (&WeightProduct<'_>, &mut Arc<Tensor>) = (product, output);
        let TensorData::F32(out) = &mut Arc::get_mut(output)?.data else { return None };
        Some(TokenProduct { x: product.x, tokens: product.tokens, out: (out, product.layout) })
    };
    let each = products.iter().zip(&mut outputs).map(token_product).collect::<Option<Vec<_>>>();
    let Some(mut each) = each else { return false };
    multiply_each(weight, *activations, *bias, &mut each);
    drop(each);
    drop(products);
    for (call, output) in calls.iter_mut().zip(outputs) {
        call.results.push(output);
    }
    true
}

impl Member<'_> {
    /// Runs `body` in the member's frame, unless the member has failed.
    fn attempt(&mut self, function: &Executable, body: impl FnOnce(&mut Frame<'_>) -> Result<(), ExecError>) {
        if self.failure.is_some() {
            return;
        }
        let workspace = std::mem::take(&mut self.workspace);
        let mut frame = function.frame(workspace, &mut *self.state, None, None);
        self.failure = body(&mut frame).err();
        self.workspace = frame.workspace;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Precision, WeightCache};
    use anec_mil::{Constant, DataType, Dim, Function, FunctionBuilder, Opset, SymbolRange, TensorType};

    const WIDTH: usize = 64;

    fn noise(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + seed * 53) % 101) as f32 / 101.0 - 0.5).collect()
    }

    /// A product, a sum with a state of the sequence, and another product.
    fn function() -> Function {
        let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
        let x = ops.input("x", TensorType::new(DataType::Fp16, [1, WIDTH as u64, 1, 1]));
        let state = ops.state("sum", TensorType::new(DataType::Fp16, [1, WIDTH as u64, 1, 1]));
        let weight = |seed| Constant::fp16_tensor(&[WIDTH as u64, WIDTH as u64, 1, 1], &noise(WIDTH * WIDTH, seed));
        let (first, second) = (ops.constant("first", weight(1)), ops.constant("second", weight(2)));
        let given = ops.conv("given", x, first, None);
        let before = ops.read_state(state);
        let sum = ops.add(given, before);
        ops.write_state(state, sum);
        let y = ops.conv("y", sum, second, None);
        ops.output("out", y);
        ops.finish().unwrap()
    }

    #[test]
    fn sequences_that_share_calls_have_the_bits_that_they_have_alone() {
        for precision in [Precision::F32, Precision::I16, Precision::I8, Precision::F16, Precision::ANE] {
            let executable = Executable::compile(&function(), precision, &WeightCache::new()).unwrap();
            let products = executable.nodes.iter().filter(|node| node.shared().is_some()).count();
            assert_eq!(products, 2, "{precision}");
            for count in [1, 2, 7, 11] {
                let mut alone: Vec<State> = (0..count).map(|_| executable.new_state()).collect();
                let mut together = alone.clone();
                for turn in 0..3_usize {
                    let given = |i| Arc::new(Tensor::new([1, WIDTH, 1, 1], noise(WIDTH, 10 * turn + i)));
                    let inputs: Vec<Arc<Tensor>> = (0..count).map(given).collect();
                    let calls = inputs.iter().zip(&mut together);
                    let calls = calls.map(|(x, state)| SequenceCall { inputs: vec![("x", x)], state }).collect();
                    let found = executable.run_batch(calls);
                    for ((found, state), x) in found.into_iter().zip(&mut alone).zip(&inputs) {
                        assert_eq!(found.unwrap(), executable.run(&[("x", x)], state).unwrap(), "{precision}");
                    }
                }
                assert_eq!(together, alone);
            }
        }
    }

    #[test]
    fn a_call_larger_than_a_threads_share_is_divided() {
        let (prompt, token) = (64 * 2048, 2048);
        assert_eq!(are_divided(&[token, prompt, token], 2), [false, true, false]);
        assert_eq!(are_divided(&[prompt, prompt], 2), [false; 2], "each is a thread's share");
        assert_eq!(are_divided(&[prompt, prompt], 4), [true; 2]);
        assert_eq!(are_divided(&[token; 3], 16), [false; 3], "too little to be divided");
        assert_eq!(are_divided(&[prompt], 1), [false]);
    }

    #[test]
    fn a_failing_sequence_does_not_affect_the_others() {
        let executable = Executable::compile(&function(), Precision::F32, &WeightCache::new()).unwrap();
        let good = Arc::new(Tensor::new([1, WIDTH, 1, 1], noise(WIDTH, 1)));
        let bad = Arc::new(Tensor::new([1, 2, 1, 1], vec![0.0; 2]));
        let mut states: Vec<State> = (0..3).map(|_| executable.new_state()).collect();
        // the state is missing
        states.push(State::default());
        let calls = [&good, &bad, &good, &good].into_iter().zip(&mut states);
        let calls = calls.map(|(x, state)| SequenceCall { inputs: vec![("x", x)], state }).collect();
        let found = executable.run_batch(calls);
        let expected = executable.run(&[("x", &good)], &mut executable.new_state()).unwrap();
        assert_eq!(found[0].as_ref().unwrap(), &expected);
        assert_eq!(found[2].as_ref().unwrap(), &expected);
        assert!(found[1].as_ref().unwrap_err().to_string().contains("its shape is [1, 2, 1, 1]"));
        assert!(found[3].as_ref().unwrap_err().to_string().contains("sum"), "{:?}", found[3]);
        // the sequence can run again
        let calls = vec![SequenceCall { inputs: vec![("x", &good)], state: &mut states[1] }];
        assert_eq!(executable.run_batch(calls).remove(0).unwrap(), expected);
    }

    #[test]
    fn sequences_may_have_different_numbers_of_tokens() {
        let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
        let tokens = ops.symbol("T", SymbolRange::Range { lower: 1, upper: Some(32), default: 1 });
        let shape = [Dim::Fixed(1), Dim::Fixed(WIDTH as u64), Dim::Fixed(1), Dim::symbol(&tokens)];
        let x = ops.input("x", TensorType::new(DataType::Fp16, shape));
        let weight = Constant::fp16_tensor(&[WIDTH as u64, WIDTH as u64, 1, 1], &noise(WIDTH * WIDTH, 1));
        let weight = ops.constant("weight", weight);
        let y = ops.conv("y", x, weight, None);
        ops.output("out", y);
        let executable = Executable::compile(&ops.finish().unwrap(), Precision::F32, &WeightCache::new()).unwrap();
        let of_tokens = |tokens| Arc::new(Tensor::new([1, WIDTH, 1, tokens], noise(WIDTH * tokens, tokens)));
        let inputs = [1, 5, 20, 8, 1].map(of_tokens);
        let mut states = [(); 5].map(|()| State::default());
        let calls = inputs.iter().zip(&mut states);
        let calls = calls.map(|(x, state)| SequenceCall { inputs: vec![("x", x)], state }).collect();
        for (found, x) in executable.run_batch(calls).into_iter().zip(&inputs) {
            assert_eq!(found.unwrap(), executable.run(&[("x", x)], &mut State::default()).unwrap());
        }
    }
}
