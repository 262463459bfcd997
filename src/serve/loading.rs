//! Loading a model in the background: the server answers meanwhile, and says that it isn't ready.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value as Json, json};

use anec_runtime::LoadedModel;

/// How far a model is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadingStage {
    /// So many of its functions are.
    Loading {
        /// Functions that are loaded.
        done: usize,
        /// Those that a text begins with, as far as there is room for them.
        of: usize,
    },
    /// All that a text begins with.
    Ready,
    /// A function can't be loaded; requests that need it will fail.
    Failed {
        /// Why.
        problem: String,
    },
}

/// A model on its way into memory.
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

    /// How far it is.
    pub fn stage(&self) -> LoadingStage {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, stage: LoadingStage) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = stage;
    }
}

impl LoadingStage {
    /// What `/health` says of it: a word under `status`, and details.
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
    use anec_runtime::fake::{self, FakeOptions, Mishap};

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
    fn what_a_text_begins_with_is_loaded_in_its_order() {
        let (stage, calls) = loaded(&FakeOptions { contexts: vec![8, 16], ..FakeOptions::default() });
        assert_eq!(stage, LoadingStage::Ready);
        // the longer context's functions are loaded when a text has become so long
        assert_eq!(calls, ["layers_0_2_of_8", "layers_2_3_of_8", "head_0_5", "head_5_8"]);
    }

    #[test]
    fn what_cant_be_loaded_is_said() {
        let (stage, _) = loaded(&FakeOptions { script: vec![(1, Mishap::Error)], ..FakeOptions::default() });
        assert_eq!(stage.health(), json!({"status": "failed", "problem": "backend double: the device is busy"}));
    }
}
