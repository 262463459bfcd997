//! Served models: the name in a request chooses one, which is loaded when it is needed and unloaded when it is idle.

use std::future::pending;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep_until, timeout};

use super::engine::ServeLimits;
use super::error::ServeError;
use super::facts::Facts;
use super::loading::LoadingStage;
use super::metrics::Metrics;
use super::service::Service;
use anec_base::Result;
use anec_base::listing::list;

/// Opens a model whose texts count in these metrics.
pub type OpenModel = Box<dyn Fn(&Arc<Metrics>) -> Result<Arc<Service>> + Send + Sync>;

/// Options of the served models.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ModelsOptions {
    /// Time without requests after which a model is unloaded; `None` for never.
    pub unload_after: Option<Duration>,
    /// Maximum number of loaded models; the longest idle one makes room for another.
    pub max_loaded: usize,
    /// Limits of requests that wait for a model.
    pub limits: ServeLimits,
}

impl Default for ModelsOptions {
    fn default() -> Self {
        ModelsOptions { unload_after: None, max_loaded: usize::MAX, limits: ServeLimits::default() }
    }
}

/// Served models, of which some are loaded.
pub struct Models {
    models: Vec<Model>,
    /// Metrics of all models.
    pub(super) metrics: Arc<Metrics>,
    options: ModelsOptions,
    state: Mutex<State>,
    /// Places of loaded models.
    places: Arc<Semaphore>,
    /// Requests that wait for a model; further ones are refused.
    waiting: Semaphore,
    /// Signals that a model's idle time has begun.
    idle: Notify,
}

struct Model {
    facts: Facts,
    open: OpenModel,
    /// Held by the request that loads the model, so that others wait for the same load.
    opening: Arc<tokio::sync::Mutex<()>>,
}

struct State {
    /// Slots of the models, in their order.
    slots: Vec<Slot>,
    /// Number of requests for which no model has made room yet.
    wanted: usize,
    /// Whether new requests are refused.
    closed: bool,
}

/// Loading state of a model.
struct Slot {
    loaded: Option<PlacedService>,
    /// Number of requests in progress.
    users: usize,
    /// End of the last request.
    used: Instant,
    /// Idle time after which the model is unloaded; `None` for never.
    keep: Option<Duration>,
}

/// Loaded model; its place is free once the model's memory is.
struct PlacedService {
    service: Arc<Service>,
    place: OwnedSemaphorePermit,
}

impl Slot {
    fn is_idle(&self) -> bool {
        self.users == 0 && self.loaded.is_some()
    }

    /// Returns the time of the unload, if nothing uses the model until then.
    fn end(&self) -> Option<Instant> {
        self.keep.and_then(|keep| self.used.checked_add(keep)).filter(|_| self.is_idle())
    }

    /// Removes the model. Its memory is freed on a thread of its own, after work of clients that have left.
    fn unload(&mut self) {
        if let Some(PlacedService { service, place }) = self.loaded.take() {
            // where the system gives no thread, both are dropped here
            let _ = std::thread::Builder::new().spawn(move || {
                while Arc::strong_count(&service) > 1 {
                    std::thread::sleep(Duration::from_millis(5));
                }
                drop(service);
                drop(place);
            });
        }
    }
}

impl State {
    /// Unloads the models that have been idle longest, one for each wanted place.
    fn make_room(&mut self) {
        while self.wanted > 0 {
            let idle = self.slots.iter_mut().filter(|slot| slot.is_idle());
            let Some(longest) = idle.min_by_key(|slot| slot.used) else { return };
            longest.unload();
            self.wanted -= 1;
        }
    }
}

/// State of a model for listings.
pub(super) struct ModelStatus<'a> {
    /// Facts about the model.
    pub facts: &'a Facts,
    /// The model, if it is loaded or loading.
    pub service: Option<Arc<Service>>,
    /// Time until it is unloaded; `None` for never.
    pub expires: Option<Duration>,
}

impl Models {
    /// Opens the models once, so that a wrong one is reported at once. An only model is loaded now, several are loaded
    /// on demand.
    ///
    /// # Errors
    /// If a model can't be opened.
    pub fn new(open: Vec<OpenModel>, options: ModelsOptions) -> Result<Arc<Self>> {
        let metrics = Arc::new(Metrics::default());
        let places = Arc::new(Semaphore::new(options.max_loaded.clamp(1, Semaphore::MAX_PERMITS)));
        let (mut models, mut slots) = (Vec::new(), Vec::new());
        let only = open.len() == 1;
        for open in open {
            let service = open(&metrics)?;
            models.push(Model { facts: Facts::of(&service), open, opening: Arc::default() });
            let place = places.clone().try_acquire_owned().ok().filter(|_| only);
            let loaded = place.map(|place| PlacedService { service, place });
            if let Some(PlacedService { service, .. }) = &loaded {
                service.load();
            }
            slots.push(Slot { loaded, users: 0, used: Instant::now(), keep: options.unload_after });
        }
        Ok(Arc::new(Models {
            models,
            metrics,
            state: Mutex::new(State { slots, wanted: 0, closed: false }),
            places,
            waiting: Semaphore::new(options.limits.queue + options.limits.parallel),
            idle: Notify::new(),
            options,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the names of the models.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.models.iter().map(|model| model.facts.name.as_str())
    }

    /// Returns the index of the model with a name, with or without Ollama's tag `:latest`. An only model has every name
    /// unless `strict`.
    ///
    /// # Errors
    /// If there is no such model, or a request to several models names none.
    pub(super) fn find(&self, name: Option<&str>, strict: bool) -> Result<usize, ServeError> {
        let untagged = |name: &str| name.strip_suffix(":latest").unwrap_or(name).to_owned();
        let position = |name: &str| {
            let exact = self.names().position(|own| own == name);
            exact.or_else(|| self.names().position(|own| untagged(own) == untagged(name)))
        };
        let own = || list(self.names().map(|own| format!("`{own}`")));
        match name {
            Some(name) if strict || self.models.len() > 1 => {
                position(name).ok_or_else(|| ServeError::NoModel { name: name.to_owned(), own: own() })
            }
            None if self.models.len() > 1 => {
                Err(ServeError::field("model", format!("`model` has to name one of this server's models: {}", own())))
            }
            _ => Ok(0),
        }
    }

    /// Returns the states of all models.
    pub(super) fn statuses(&self) -> Vec<ModelStatus<'_>> {
        let state = self.lock();
        let statuses = self.models.iter().zip(&state.slots).map(|(model, slot)| ModelStatus {
            facts: &model.facts,
            service: slot.loaded.as_ref().map(|loaded| loaded.service.clone()),
            expires: slot.end().map(|end| end.saturating_duration_since(Instant::now())).or(slot.keep),
        });
        statuses.collect()
    }

    /// Returns the facts about a model.
    pub(super) fn facts(&self, index: usize) -> &Facts {
        &self.models[index].facts
    }

    /// Returns the loaded models.
    pub(super) fn services(&self) -> Vec<Arc<Service>> {
        self.statuses().into_iter().filter_map(|status| status.service).collect()
    }

    /// Returns a model for a request, and loads it if it isn't loaded.
    ///
    /// # Errors
    /// If it can't be opened, too many requests wait, or no other model makes room in time.
    pub(super) async fn lease(self: &Arc<Self>, index: usize) -> Result<Lease, ServeError> {
        if let Some(lease) = self.of_loaded(index)? {
            return Ok(lease);
        }
        let ServeLimits { queue, timeout: limit, .. } = self.options.limits;
        let _waiting = self.waiting.try_acquire().map_err(|_| ServeError::Busy { waiting: queue })?;
        let late = |_| ServeError::Timeout { seconds: limit.as_secs() };
        timeout(limit, self.open(index)).await.map_err(late)?
    }

    /// Returns a model for a request if it is loaded.
    fn of_loaded(self: &Arc<Self>, index: usize) -> Result<Option<Lease>, ServeError> {
        let mut state = self.lock();
        if state.closed {
            return Err(ServeError::Stopping);
        }
        let slot = &mut state.slots[index];
        // try again to load a model that couldn't be loaded
        let failed = |loaded: &PlacedService| matches!(loaded.service.stage(), LoadingStage::Failed { .. });
        if slot.is_idle() && slot.loaded.as_ref().is_some_and(failed) {
            slot.unload();
        }
        let Some(PlacedService { service, .. }) = &slot.loaded else { return Ok(None) };
        let service = service.clone();
        slot.users += 1;
        slot.keep = self.options.unload_after;
        Ok(Some(Lease { models: self.clone(), index, service }))
    }

    async fn open(self: &Arc<Self>, index: usize) -> Result<Lease, ServeError> {
        let alone = self.models[index].opening.clone().lock_owned().await;
        if let Some(lease) = self.of_loaded(index)? {
            return Ok(lease);
        }
        let place = self.place().await?;
        let models = self.clone();
        // the load goes on if its client leaves, because others may wait for it
        let load = tokio::task::spawn_blocking(move || {
            let _alone = alone;
            let Model { facts, open, .. } = &models.models[index];
            let service = open(&models.metrics).map_err(|error| {
                eprintln!("error: the model {} can't be loaded: {error}", facts.name);
                ServeError::Model { problem: error.to_string() }
            })?;
            service.load();
            models.lock().slots[index].loaded = Some(PlacedService { service, place });
            models.of_loaded(index)?.ok_or_else(ServeError::panicked)
        });
        load.await.map_err(|_| ServeError::panicked())?
    }

    /// Waits for a place of a loaded model.
    async fn place(&self) -> Result<OwnedSemaphorePermit, ServeError> {
        if let Ok(place) = self.places.clone().try_acquire_owned() {
            return Ok(place);
        }
        {
            let mut state = self.lock();
            state.wanted += 1;
            state.make_room();
        }
        self.places.clone().acquire_owned().await.map_err(|_| ServeError::Stopping)
    }

    /// Unloads a model once nothing uses it.
    pub(super) fn unload(&self, index: usize) {
        let slot = &mut self.lock().slots[index];
        match slot.users {
            0 => slot.unload(),
            _ => slot.keep = Some(Duration::ZERO),
        }
    }

    /// Unloads models that have been idle for their time, without end.
    pub(super) async fn unload_idle(&self) {
        loop {
            let next = {
                let mut state = self.lock();
                let now = Instant::now();
                let over = |slot: &&mut Slot| slot.end().is_some_and(|end| end <= now);
                state.slots.iter_mut().filter(over).for_each(Slot::unload);
                state.slots.iter().filter_map(Slot::end).min()
            };
            let end = async {
                match next {
                    Some(next) => sleep_until(next.into()).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                () = end => {}
                () = self.idle.notified() => {}
            }
        }
    }

    /// Returns the numbers of waiting and of running texts.
    pub(super) fn texts(&self) -> (usize, usize) {
        let loads = self.services().into_iter().map(|service| service.engine().load());
        loads.fold((0, 0), |(waiting, active), (more, running)| (waiting + more, active + running))
    }

    /// Refuses new requests; texts in progress are finished.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.services().iter().for_each(|service| service.engine().close());
    }

    /// Ends the texts in progress.
    pub(super) fn stop(&self) {
        self.services().iter().for_each(|service| service.engine().stop());
    }
}

/// Model in use by a request; it isn't unloaded until this is dropped.
pub(super) struct Lease {
    models: Arc<Models>,
    index: usize,
    service: Arc<Service>,
}

impl Lease {
    /// Sets the idle time after which the model is unloaded, until the next request; `None` for never.
    pub(super) fn keep(&self, time: Option<Duration>) {
        self.models.lock().slots[self.index].keep = time;
    }
}

impl Deref for Lease {
    type Target = Arc<Service>;

    fn deref(&self) -> &Arc<Service> {
        &self.service
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.models.lock();
        let slot = &mut state.slots[self.index];
        slot.users -= 1;
        slot.used = Instant::now();
        state.make_room();
        self.models.idle.notify_one();
    }
}
