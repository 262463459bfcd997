//! Stand-in for Core ML on other systems.

use std::path::Path;

use super::array::{OwnedValues, StridedArray, Values};
use super::engine::{Engine, LoadedFunction};
use super::error::CoreMlError;
use super::plan::{ComputeUnits, Machine, Operation};

/// Core ML, absent on this system.
#[derive(Debug)]
pub enum CoreMl {}

impl CoreMl {
    /// Fails, because this system has no Core ML.
    ///
    /// # Errors
    /// Always [`CoreMlError::Unavailable`].
    pub fn new() -> Result<Self, CoreMlError> {
        Err(CoreMlError::Unavailable(format!("it is part of macOS, this is {}", std::env::consts::OS)))
    }
}

impl Engine for CoreMl {
    type Function = CoreMl;

    fn machine(&self) -> Result<Machine, CoreMlError> {
        match *self {}
    }

    fn compile(&self, _: &Path, _: &Path) -> Result<(), CoreMlError> {
        match *self {}
    }

    fn plan(&self, _: &Path, _: ComputeUnits) -> Result<Vec<Operation>, CoreMlError> {
        match *self {}
    }

    fn load(&self, _: &Path, _: Option<&str>, _: ComputeUnits) -> Result<CoreMl, CoreMlError> {
        match *self {}
    }
}

impl LoadedFunction for CoreMl {
    type State = CoreMl;
    type Call = CoreMl;

    fn state(&self, _: &[String]) -> Result<CoreMl, CoreMlError> {
        match *self {}
    }

    fn copy(&self, _: &CoreMl, _: &[String]) -> Result<CoreMl, CoreMlError> {
        match *self {}
    }

    fn read(state: &CoreMl, _: &[StridedArray]) -> Result<Vec<OwnedValues>, CoreMlError> {
        match *state {}
    }

    fn restore(&self, _: &[StridedArray], _: &[OwnedValues]) -> Result<CoreMl, CoreMlError> {
        match *self {}
    }

    fn call(&self, _: &[StridedArray], _: &[StridedArray]) -> Result<CoreMl, CoreMlError> {
        match *self {}
    }

    fn predict(&self, _: &mut CoreMl, _: Option<&CoreMl>, _: &[Values<'_>]) -> Result<Vec<OwnedValues>, CoreMlError> {
        match *self {}
    }
}
