//! Background loading of a model; the server answers meanwhile that it isn't ready.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value as Json, json};

use anec_runtime::LoadedModel;

/// Loading stage of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadingStage {
    /// Some functions are loaded.
    Loading {
        /// Number of loaded functions.
        done: usize,
        /// Number of functions that a text begins with, as far as memory allows.
        of: usize,
    },
    /// All functions that a text begins with are loaded.
    Ready,
    /// A function can't be loaded; requests that need it will fail.
    Failed {
        /// Reason of the failure.
        problem: String,
    },
}

/// Model that is being loaded.
#[derive(Clone)]
pub struct Loading(Arc<Mutex<LoadingStage>>);

impl Loading {
    /// Loads a model on a thread of its own.
    pub fn start(model: Arc<LoadedModel>) -> Self {
        let loading =
            Loading(Arc::new(Mutex::new(LoadingStage::Loading { done: 0, of: model.bundle().functions.len() })));
        let own = loading.clone();
        std::thread::spawn(move || {
            let stage = match model.prepare(|done, of| own.set(LoadingStage::Loading { done, of })) {
                Ok(()) => LoadingStage::Ready,
                Err(error) => {
                    eprintln!("error: the model can't be loaded: {error}");
                    LoadingStage::Failed { problem: error.to_string() }
                }
            };
            own.set(stage);
        });
        loading
    }

    /// Returns the current stage.
    pub fn stage(&self) -> LoadingStage {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, stage: LoadingStage) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = stage;
    }
}

impl LoadingStage {
    /// Returns the stage for `/health`: a word under `status`, and details.
    pub fn health(&self) -> Json {
        match self {
            LoadingStage::Loading { done, of } => json!({"status": "loading", "loaded": done, "functions": of}),
            LoadingStage::Ready => json!({"status": "ok"}),
            LoadingStage::Failed { problem } => json!({"status": "failed", "problem": problem}),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_runtime::fake::{self, FakeFailure, FakeOptions};

    fn loaded(form: &FakeOptions) -> (LoadingStage, Vec<String>) {
        let (model, calls) = fake::model(form);
        let loading = Loading::start(model);
        while matches!(loading.stage(), LoadingStage::Loading { .. }) {
            std::thread::yield_now();
        }
        let calls = calls.lock().unwrap().iter().map(|(name, _)| name.clone()).collect();
        (loading.stage(), calls)
    }

    #[test]
    fn functions_are_loaded_in_the_order_of_a_text() {
        let (stage, calls) = loaded(&FakeOptions { contexts: vec![8, 16], ..FakeOptions::default() });
        assert_eq!(stage, LoadingStage::Ready);
        // functions of the longer context are loaded when a text needs them
        assert_eq!(calls, ["layers_0_2_of_8", "layers_2_3_of_8", "head_0_5", "head_5_8"]);
    }

    #[test]
    fn a_failed_load_is_reported() {
        let (stage, _) = loaded(&FakeOptions { script: vec![(1, FakeFailure::Error)], ..FakeOptions::default() });
        assert_eq!(stage.health(), json!({"status": "failed", "problem": "backend double: the device is busy"}));
    }
}
