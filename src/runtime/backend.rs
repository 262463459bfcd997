//! Traits that execute the functions of a bundle: on the CPU executor, or with Core ML on a Mac.

use std::any::Any;
use std::sync::Arc;

use anec_base::Result;
use anec_bundle::Bundle;
use anec_exec::Tensor;

/// Callback that receives named values inside a function while it runs.
pub type Watch<'a> = &'a mut dyn FnMut(&str, &Tensor);

/// Generation phase; each phase may use different compute units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// The prompt is prefilled.
    #[default]
    Prompt,
    /// Tokens are decoded one by one.
    Writing,
}

/// Call of a function.
#[derive(Clone, Copy)]
pub struct FunctionCall<'a> {
    /// Index of the function in `bundle.json`.
    pub function: usize,
    /// Inputs in the function's order.
    pub inputs: &'a [Arc<Tensor>],
}

impl<'a> FunctionCall<'a> {
    /// Returns the inputs as [`Sequence::run`] takes them.
    pub fn borrowed(&self) -> Vec<&'a Tensor> {
        self.inputs.iter().map(Arc::as_ref).collect()
    }

    /// Stores the outputs of `run` in place of the previous ones.
    pub(super) fn outputs_of(
        &self,
        run: impl FnOnce(usize, &[&Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Arc<Tensor>>> {
        Ok(run(self.function, &self.borrowed())?.into_iter().map(Arc::new).collect())
    }
}

/// One sequence's share of a batched call.
pub struct BatchMember<'a> {
    /// States of the text.
    pub sequence: &'a mut (dyn Sequence + 'static),
    /// Inputs in the function's order.
    pub inputs: &'a [Arc<Tensor>],
}

impl BatchMember<'_> {
    /// Runs the function for this sequence only.
    pub(super) fn run_alone(self, function: usize) -> BatchResult {
        self.sequence.run(function, &FunctionCall { function, inputs: self.inputs }.borrowed(), None)
    }
}

/// Outputs of a function for one sequence, in their order.
pub type BatchResult = Result<Vec<Tensor>>;

/// Executes the functions of a bundle. No method has a default, so that decorators forward all of them.
pub trait Backend: Send + Sync {
    /// Loads a function ahead of its first call. On Core ML loading takes seconds to minutes.
    ///
    /// # Errors
    /// If the function can't be loaded.
    fn prepare(&self, function: usize) -> Result<()>;

    /// Returns whether a function can be loaded without evicting another one.
    fn has_room(&self, function: usize) -> bool;

    /// Returns a backend for the functions of another bundle that shares this backend's packages; `None` if the backend
    /// has no packages.
    ///
    /// # Errors
    /// If the packages can't be opened.
    fn of_bundle(&self, bundle: &Bundle) -> Result<Option<Box<dyn Backend>>>;

    /// Creates a sequence whose states are all zero. Weights are shared between sequences.
    ///
    /// # Errors
    /// If the states can't be allocated.
    fn sequence(&self) -> Result<Box<dyn Sequence>>;

    /// Runs a function for several sequences. Each result equals that of [`Sequence::run`], bit for bit; a failure
    /// affects only its own sequence. Backends that can't batch use [`run_each`].
    fn run_batch(&self, function: usize, members: Vec<BatchMember<'_>>) -> Vec<BatchResult>;
}

/// States of one text. No method has a default, so that decorators forward all of them.
pub trait Sequence: Any + Send {
    /// Runs a function, given by its index in `bundle.json`, on inputs in the function's order and returns its outputs
    /// in their order. Floating-point tensors hold f32, whatever the port's type. Functions whose states have the same
    /// id share them.
    ///
    /// `watch` receives the named values inside the function.
    ///
    /// # Errors
    /// If the function can't be loaded or run, or `watch` is given and the backend can't show values.
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>>;

    /// Runs a function as [`run`](Sequence::run) and replaces the contents of `outputs`: those of an earlier call,
    /// whose memory is reused where nothing else holds it and the backend supports that; others use [`run_anew`].
    ///
    /// # Errors
    /// Returns any error of [`run`](Sequence::run).
    fn run_into(&mut self, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()>;

    /// Runs stateless, independent functions, in parallel where the backend can; others use [`run_in_turn`]. The
    /// outputs of each call replace its element of `outputs`, as in [`run_into`](Sequence::run_into).
    ///
    /// # Errors
    /// Returns any error of [`run`](Sequence::run).
    fn run_together(&mut self, calls: &[FunctionCall<'_>], outputs: &mut [Vec<Arc<Tensor>>]) -> Result<()>;

    /// Sets the phase of the following calls.
    fn enter(&mut self, phase: Phase);

    /// Returns the contents of a function's states in the order of `bundle.json`; `None` if no call has used them,
    /// which means zeros.
    ///
    /// # Errors
    /// If the backend can't show them.
    fn states(&self, function: usize) -> Result<Option<Vec<Arc<Tensor>>>>;

    /// Replaces the contents of a function's states, in the order of `bundle.json`.
    ///
    /// # Errors
    /// If the function can't be loaded, or has other states.
    fn set_states(&mut self, function: usize, values: Vec<Tensor>) -> Result<()>;

    /// Sets all states to zero.
    ///
    /// # Errors
    /// If the states can't be allocated.
    fn reset(&mut self) -> Result<()>;

    /// Copies the sequence for a text with the same beginning; `None` if the backend can't copy states. Used for
    /// snapshots and forks.
    ///
    /// # Errors
    /// If the states can't be allocated.
    fn fork(&self) -> Result<Option<Box<dyn Sequence>>>;
}

/// Runs a function for sequences one after another: [`Backend::run_batch`] of backends that can't batch.
pub fn run_each(function: usize, members: Vec<BatchMember<'_>>) -> Vec<BatchResult> {
    members.into_iter().map(|member| member.run_alone(function)).collect()
}

/// Runs a function with new memory for its outputs: [`Sequence::run_into`] of backends that don't reuse it.
///
/// # Errors
/// Returns any error of [`Sequence::run`].
pub fn run_anew(sequence: &mut impl Sequence, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()> {
    *outputs = call.outputs_of(|function, inputs| sequence.run(function, inputs, None))?;
    Ok(())
}

/// Runs functions one after another: [`Sequence::run_together`] of backends that don't run them in parallel.
///
/// # Errors
/// Returns any error of [`Sequence::run_into`].
pub fn run_in_turn(
    sequence: &mut impl Sequence,
    calls: &[FunctionCall<'_>],
    outputs: &mut [Vec<Arc<Tensor>>],
) -> Result<()> {
    calls.iter().zip(outputs).try_for_each(|(call, outputs)| sequence.run_into(*call, outputs))
}
