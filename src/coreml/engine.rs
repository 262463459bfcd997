//! Interface to Core ML, for which a double can stand in.

use std::path::Path;

use super::array::{OwnedValues, StridedArray, Values};
use super::error::CoreMlError;
use super::plan::{ComputeUnits, Machine, Operation};

/// Core ML.
pub trait Engine: Send + Sync + 'static {
    /// Function in memory.
    type Function: LoadedFunction;

    /// Returns the machine.
    ///
    /// # Errors
    /// If the system doesn't report it.
    fn machine(&self) -> Result<Machine, CoreMlError>;

    /// Compiles a package into a new folder `….mlmodelc`.
    ///
    /// # Errors
    /// If Core ML rejects the package, or the system the folder.
    fn compile(&self, package: &Path, target: &Path) -> Result<(), CoreMlError>;

    /// Returns the compute plan of a compiled model with one function: its ops in order, with their nested blocks.
    ///
    /// # Errors
    /// If Core ML can't plan it.
    fn plan(&self, model: &Path, units: ComputeUnits) -> Result<Vec<Operation>, CoreMlError>;

    /// Loads a function of a compiled model, by name where the model has several.
    ///
    /// # Errors
    /// If Core ML can't load it.
    fn load(&self, model: &Path, function: Option<&str>, units: ComputeUnits) -> Result<Self::Function, CoreMlError>;
}

/// Function in memory, used by one thread at a time.
pub trait LoadedFunction: Send + 'static {
    /// States of one text, shared between functions of one package that have the same states.
    type State: Send;
    /// Reused arrays of a call.
    type Call: Send;

    /// Creates states, all zero.
    ///
    /// # Errors
    /// If Core ML can't create them.
    fn state(&self, names: &[String]) -> Result<Self::State, CoreMlError>;

    /// Creates states that hold what `state` holds under these names.
    ///
    /// # Errors
    /// If Core ML can't create them.
    fn copy(&self, state: &Self::State, names: &[String]) -> Result<Self::State, CoreMlError>;

    /// Returns the contents of states, array by array. The function that created them may have been released.
    ///
    /// # Errors
    /// If Core ML can't read them.
    fn read(state: &Self::State, arrays: &[StridedArray]) -> Result<Vec<OwnedValues>, CoreMlError>;

    /// Creates states that hold these values, array by array.
    ///
    /// # Errors
    /// If Core ML can't create them, or the values don't fit.
    fn restore(&self, arrays: &[StridedArray], values: &[OwnedValues]) -> Result<Self::State, CoreMlError>;

    /// Allocates arrays for calls with these inputs and outputs.
    ///
    /// # Errors
    /// If Core ML can't allocate them.
    fn call(&self, inputs: &[StridedArray], outputs: &[StridedArray]) -> Result<Self::Call, CoreMlError>;

    /// Runs the function; inputs and outputs are in the order of the call's arrays.
    ///
    /// # Errors
    /// If Core ML fails, or returns other outputs.
    fn predict(
        &self,
        call: &mut Self::Call,
        state: Option<&Self::State>,
        inputs: &[Values<'_>],
    ) -> Result<Vec<OwnedValues>, CoreMlError>;
}
