//! What the other crates need of Core ML. A double stands in for it where there is none.

use std::path::Path;

use super::array::{OwnedValues, StridedArray, Values};
use super::error::CoreMlError;
use super::plan::{ComputeUnits, Machine, Operation};

/// Core ML.
pub trait Engine: Send + Sync + 'static {
    /// A function in memory.
    type Function: LoadedFunction;

    /// The machine that it is on.
    ///
    /// # Errors
    /// When the system doesn't tell.
    fn machine(&self) -> Result<Machine, CoreMlError>;

    /// Compiles a package into a folder, `….mlmodelc`, which doesn't exist yet.
    ///
    /// # Errors
    /// When Core ML refuses the package, or the system the folder.
    fn compile(&self, package: &Path, target: &Path) -> Result<(), CoreMlError>;

    /// What is planned for a compiled model that has one function: its ops in order, with their nested blocks.
    ///
    /// # Errors
    /// When Core ML can't plan it.
    fn plan(&self, model: &Path, units: ComputeUnits) -> Result<Vec<Operation>, CoreMlError>;

    /// Loads a function of a compiled model, by name where the model has several.
    ///
    /// # Errors
    /// When Core ML can't load it.
    fn load(&self, model: &Path, function: Option<&str>, units: ComputeUnits) -> Result<Self::Function, CoreMlError>;
}

/// A function in memory. One thread may use it at a time.
pub trait LoadedFunction: Send + 'static {
    /// The states of one text. Functions of one package that have the same states can share them.
    type State: Send;
    /// The arrays of a call, which are used again and again.
    type Call: Send;

    /// New states, all zero.
    ///
    /// # Errors
    /// When Core ML doesn't give them.
    fn state(&self, names: &[String]) -> Result<Self::State, CoreMlError>;

    /// States that hold what `state` holds, as far as it has these names.
    ///
    /// # Errors
    /// When Core ML doesn't give them.
    fn copy(&self, state: &Self::State, names: &[String]) -> Result<Self::State, CoreMlError>;

    /// What a state holds, array by array. The function that made it needn't be in memory any more.
    ///
    /// # Errors
    /// When Core ML doesn't give it.
    fn read(state: &Self::State, arrays: &[StridedArray]) -> Result<Vec<OwnedValues>, CoreMlError>;

    /// New states that hold these values, array by array.
    ///
    /// # Errors
    /// When Core ML doesn't give them, or the values don't fit.
    fn restore(&self, arrays: &[StridedArray], values: &[OwnedValues]) -> Result<Self::State, CoreMlError>;

    /// Arrays for calls with inputs and outputs of these shapes.
    ///
    /// # Errors
    /// When Core ML doesn't give them.
    fn call(&self, inputs: &[StridedArray], outputs: &[StridedArray]) -> Result<Self::Call, CoreMlError>;

    /// Runs the function; inputs and outputs are in the order of the call's arrays.
    ///
    /// # Errors
    /// When Core ML fails, or gives something else than the call's outputs.
    fn predict(
        &self,
        call: &mut Self::Call,
        state: Option<&Self::State>,
        inputs: &[Values<'_>],
    ) -> Result<Vec<OwnedValues>, CoreMlError>;
}
