//! What runs the functions of a bundle: the CPU executor, or Core ML on a Mac.

use std::any::Any;
use std::sync::Arc;

use anec_base::Result;
use anec_bundle::Bundle;
use anec_exec::{ProductMemo, Tensor};

/// Sees values inside a function while it runs, by name.
pub type Watch<'a> = &'a mut dyn FnMut(&str, &Tensor);

/// What a text is at: its calls may run elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Its prompt is computed.
    #[default]
    Prompt,
    /// It is written, token by token.
    Writing,
}

/// A call of a function.
#[derive(Clone, Copy)]
pub struct FunctionCall<'a> {
    /// The function: its index in `bundle.json`.
    pub function: usize,
    /// Tensors, in the order of its inputs.
    pub inputs: &'a [Arc<Tensor>],
}

impl<'a> FunctionCall<'a> {
    /// The inputs as [`Sequence::run`] takes them.
    pub fn borrowed(&self) -> Vec<&'a Tensor> {
        self.inputs.iter().map(Arc::as_ref).collect()
    }

    /// What [`Sequence::run`] or what takes its place gives for the call.
    pub(super) fn outputs_of(
        &self,
        run: impl FnOnce(usize, &[&Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Arc<Tensor>>> {
        Ok(run(self.function, &self.borrowed())?.into_iter().map(Arc::new).collect())
    }
}

/// What one of several texts gives to a call of a function that they share.
pub struct BatchMember<'a> {
    /// Its states.
    pub sequence: &'a mut (dyn Sequence + 'static),
    /// Tensors, in the order of the function's inputs.
    pub inputs: &'a [Arc<Tensor>],
}

impl BatchMember<'_> {
    /// Runs the function for this text only.
    pub(super) fn run_alone(self, function: usize) -> BatchResult {
        self.sequence.run(function, &FunctionCall { function, inputs: self.inputs }.borrowed(), None)
    }
}

/// What a function gave to one of several texts: its outputs, in their order.
pub type BatchResult = Result<Vec<Tensor>>;

/// A bundle made ready to run on something.
pub trait Backend: Send + Sync {
    /// Makes a function ready, which its first call would do otherwise: on Core ML that takes seconds to minutes.
    ///
    /// # Errors
    /// When the function can't be loaded.
    fn prepare(&self, function: usize) -> Result<()>;

    /// Whether a function can be made ready without another one being let go for it.
    fn has_room(&self, _function: usize) -> bool {
        true
    }

    /// The same packages for the functions of another bundle, with which it shares what it can of them; nothing where it has no
    /// packages.
    ///
    /// # Errors
    /// When they can't be had.
    fn of_bundle(&self, _bundle: &Bundle) -> Result<Option<Box<dyn Backend>>> {
        Ok(None)
    }

    /// Begins a text: states of its own, all zero. Weights are shared with every other sequence.
    ///
    /// # Errors
    /// When the states can't be had.
    fn sequence(&self) -> Result<Box<dyn Sequence>>;

    /// Runs a function for several texts, whose results are those of [`Sequence::run`] for each, bit for bit; one that
    /// fails leaves the others as they are. A backend that can't share anything between them runs it for one after the
    /// other.
    fn run_batch(&self, function: usize, members: Vec<BatchMember<'_>>) -> Vec<BatchResult> {
        members.into_iter().map(|member| member.run_alone(function)).collect()
    }
}

/// The states of one text.
pub trait Sequence: Any + Send {
    /// Runs a function of the bundle, by its index in `bundle.json`, with tensors in the order of its inputs, and gives
    /// its outputs in their order. Floating-point tensors hold f32, whatever the port's type. Functions whose states have
    /// the same id share them.
    ///
    /// `watch` is shown the values inside the function that have a name.
    ///
    /// # Errors
    /// When the function can't be loaded or run, or when the backend can't show values and `watch` is given.
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>>;

    /// As [`run`](Sequence::run), with the outputs in place of what `outputs` holds: those of a call before, whose memory is
    /// used again where nobody else has them and the backend can.
    ///
    /// # Errors
    /// As [`run`](Sequence::run).
    fn run_into(&mut self, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()> {
        *outputs = call.outputs_of(|function, inputs| self.run(function, inputs, None))?;
        Ok(())
    }

    /// Runs functions that have no states and don't need each other, at the same time where the backend can. The outputs
    /// of each call take the place of what `outputs` holds for it, as in [`run_into`](Sequence::run_into).
    ///
    /// # Errors
    /// As [`run`](Sequence::run).
    fn run_together(&mut self, calls: &[FunctionCall<'_>], outputs: &mut [Vec<Arc<Tensor>>]) -> Result<()> {
        calls.iter().zip(outputs).try_for_each(|(call, outputs)| self.run_into(*call, outputs))
    }

    /// From now on, products with weights are shared with other sequences through a memo, where the backend can: gives
    /// whether it does. Results are the same, bit for bit.
    fn remember(&mut self, _memo: &Arc<ProductMemo>) -> bool {
        false
    }

    /// Says what the calls that follow are for.
    fn enter(&mut self, _phase: Phase) {}

    /// What the states of a function hold, in the order of `bundle.json`; nothing where no call has used them, which means
    /// zeros.
    ///
    /// # Errors
    /// When the backend can't show them.
    fn states(&self, function: usize) -> Result<Option<Vec<Arc<Tensor>>>>;

    /// Puts values in place of what the states of a function hold, in the order of `bundle.json`.
    ///
    /// # Errors
    /// When the function can't be loaded, or has other states.
    fn set_states(&mut self, function: usize, values: Vec<Tensor>) -> Result<()>;

    /// Sets all states to zero.
    ///
    /// # Errors
    /// When the states can't be had.
    fn reset(&mut self) -> Result<()>;

    /// A text of its own that begins with what this one holds; nothing where the backend can't copy states. Snapshots,
    /// and texts with the same beginning, are made of it.
    ///
    /// # Errors
    /// When the states can't be had.
    fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
        Ok(None)
    }
}
