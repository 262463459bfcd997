//! A text on its way through a bundle: tokens in, logits out, in calls of as many tokens as the functions take.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use super::backend::{Backend, Sequence, Watch};
use super::cpu::{CpuBackend, Programs};
use super::error::RuntimeError;
use super::feed::{Feed, shape_of, shaped};
use super::host::{Host, RopeChoice};
use super::plan::{self, Chunk, Plan, Route, Step};
use super::profile::{Profile, Profiled};
use crate::convert::bundle::{Bundle, FILE_NAME, ModelFacts};
use crate::error::Result;
use crate::exec::{Precision, Tensor, TensorData};
use crate::family::ports::{PortRole, Stage, StatePort, StateRole};

/// A bundle with a backend that runs it.
pub struct Model {
    bundle: Bundle,
    folder: PathBuf,
    host: Arc<Host>,
    plan: Plan,
    backend: Arc<dyn Backend>,
    /// Whether every state is written by position, so that going back is a matter of the position alone. What was written
    /// after it is closed by the masks, and overwritten before they open it.
    positional: bool,
}

/// For which positions logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// For none.
    None,
    /// For the last token only.
    Last,
    /// For every token.
    All,
}

/// How tokens are divided into calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Chunking {
    /// As many tokens per call as the functions take.
    #[default]
    Largest,
    /// These numbers of tokens, again and again; the last call takes what is left.
    Pattern(Vec<u64>),
}

/// Which hidden states are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hidden {
    /// None.
    No,
    /// Those between functions: what enters the first and leaves each. Every backend can show them.
    BetweenFunctions,
    /// Those between all layers. Not every backend shows what is inside a function.
    BetweenLayers,
}

impl Chunking {
    /// The number of tokens that the call of this turn should have, if any.
    fn wish(&self, turn: usize) -> Option<u64> {
        match self {
            Chunking::Largest => None,
            Chunking::Pattern(sizes) => sizes.get(turn % sizes.len().max(1)).copied(),
        }
    }
}

/// What is wanted of a run over tokens.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Positions with logits.
    pub logits: Positions,
    /// Hidden states beside them.
    pub hidden: Hidden,
    /// Division into calls.
    pub chunking: Chunking,
}

impl Ask {
    /// No logits: only the states are of interest.
    pub fn none() -> Self {
        Ask { logits: Positions::None, hidden: Hidden::No, chunking: Chunking::Largest }
    }

    /// Logits of the last token, in the largest calls.
    pub fn last() -> Self {
        Ask { logits: Positions::Last, hidden: Hidden::No, chunking: Chunking::Largest }
    }

    /// Logits of all tokens, in calls by `chunking`.
    pub fn all(chunking: Chunking) -> Self {
        Ask { logits: Positions::All, hidden: Hidden::No, chunking }
    }
}

/// What a run over tokens gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// Logits, row-major `[positions, vocab_size]`.
    pub logits: Vec<f32>,
    /// Where wanted, `num_layers + 1` matrices `[tokens, hidden_size]`: what enters layer 0, then what leaves each layer.
    /// Those that are not wanted are empty.
    pub hidden: Vec<Vec<f32>>,
}

impl Model {
    /// The bundle in a folder, on the CPU executor.
    ///
    /// # Errors
    /// When there is no bundle, or it contradicts itself.
    pub fn on_cpu(folder: &Path, precision: Precision) -> Result<Arc<Self>> {
        Self::on_cpu_in(folder, &[precision])?.pop().ok_or(RuntimeError::NoBundle { path: folder.to_owned() }.into())
    }

    /// The bundle in a folder, on the CPU executor: a model for each precision, all with the same weights in memory.
    ///
    /// # Errors
    /// As [`Model::on_cpu`].
    pub fn on_cpu_in(folder: &Path, precisions: &[Precision]) -> Result<Vec<Arc<Self>>> {
        if !folder.join(FILE_NAME).exists() {
            return Err(RuntimeError::NoBundle { path: folder.to_owned() }.into());
        }
        let bundle = Bundle::read(folder)?;
        let host = Arc::new(Host::open(&bundle, folder)?);
        let programs = Programs::of(&bundle, folder);
        let model = |precision: &Precision| {
            let backend = CpuBackend::new(programs.clone(), *precision);
            Self::new(bundle.clone(), folder, host.clone(), Box::new(backend))
        };
        precisions.iter().map(model).collect()
    }

    /// A model of parts: a bundle, its host tensors and a backend.
    ///
    /// # Errors
    /// When the bundle's functions don't make a model.
    pub fn new(bundle: Bundle, folder: &Path, host: Arc<Host>, backend: Box<dyn Backend>) -> Result<Arc<Self>> {
        let plan = Plan::new(&bundle, folder)?;
        check_ports(&bundle, folder)?;
        let positional =
            bundle.functions.iter().all(|entry| entry.states.iter().all(|s| by_position(s, entry.context)));
        Ok(Arc::new(Model { bundle, folder: folder.to_owned(), host, plan, backend: backend.into(), positional }))
    }

    /// The same model, measuring how long its functions take.
    ///
    /// # Errors
    /// As [`Model::new`].
    pub fn profiled(&self) -> Result<(Arc<Self>, Profile)> {
        let (backend, profile) = Profiled::new(self.backend.clone());
        Ok((Self::new(self.bundle.clone(), &self.folder, self.host.clone(), Box::new(backend))?, profile))
    }

    /// The bundle.
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Tokens that fit into the largest context.
    pub fn context(&self) -> u64 {
        self.plan.routes.last().map_or(0, |route| route.context)
    }

    /// As a model whose states aren't written by position.
    #[cfg(test)]
    pub(super) fn forget_positions(&mut self) {
        self.positional = false;
    }

    /// Tokens that end a text.
    pub fn end_tokens(&self) -> Vec<u32> {
        self.bundle.model.eos_token_ids.iter().filter_map(|id| u32::try_from(*id).ok()).collect()
    }

    /// Every way through the bundle.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Begins a text of up to `length` tokens, prompt and continuation. The smallest context that holds it is used, and
    /// the rotary tables that belong to its length.
    ///
    /// # Errors
    /// When it doesn't fit, or the backend has no room.
    pub fn start(self: &Arc<Self>, length: u64) -> Result<Session> {
        let route = self.plan.route(length)?;
        let rope = self.host.choose_rope(length)?;
        let limit = self.plan.routes[route].context.min(rope.rows);
        let sequence = self.backend.sequence()?;
        let (tokens, checkpoints) = (Vec::new(), Vec::new());
        Ok(Session { sequence, model: self.clone(), route, rope, tokens, limit, checkpoints })
    }

    /// Tokens, at most `most`, that one call of a text of `length` tokens can take.
    ///
    /// # Errors
    /// When such a text doesn't fit.
    pub fn largest_call(&self, length: u64, most: u64) -> Result<u64, RuntimeError> {
        let route = &self.plan.routes[self.plan.route(length)?];
        Ok(plan::chunk(&route.layers, most, None)?.real)
    }
}

/// Whether each position of a text has a place of its own in a state: not in a ring, and not in a recurrence.
fn by_position(state: &StatePort, context: u64) -> bool {
    let cache = matches!(
        state.role,
        StateRole::KeyCache { .. } | StateRole::ValueCache { .. } | StateRole::KeyValueCache { .. }
    );
    cache && state.shape.get(2).is_some_and(|slots| *slots >= context)
}

/// Every function has the hidden states and what its stage gives, and no port that a host can't serve.
fn check_ports(bundle: &Bundle, folder: &Path) -> Result<(), RuntimeError> {
    for entry in &bundle.functions {
        let hidden_inputs = entry.inputs.iter().filter(|port| port.role == PortRole::Hidden).count();
        let result = match entry.stage {
            Stage::Layers { .. } => PortRole::Hidden,
            Stage::Head { .. } => PortRole::Logits,
        };
        let results = entry.outputs.iter().filter(|port| port.role == result).count();
        if hidden_inputs != 1 || results != 1 {
            let problem = format!(
                "function `{}` of {} has {hidden_inputs} inputs of hidden states and {results} results, expected one each",
                entry.function, entry.package
            );
            return Err(RuntimeError::bundle(folder.join(FILE_NAME), problem));
        }
    }
    Ok(())
}

/// A text: its states and the tokens that they come from.
pub struct Session {
    model: Arc<Model>,
    sequence: Box<dyn Sequence>,
    route: usize,
    rope: RopeChoice,
    tokens: Vec<u32>,
    limit: u64,
    /// Ascending; only for models whose states aren't all written by position.
    checkpoints: Vec<Checkpoint>,
}

/// States after a number of tokens.
struct Checkpoint {
    position: usize,
    sequence: Box<dyn Sequence>,
}

/// Checkpoints that a session keeps: where the prompt ended, and where the last call began.
const CHECKPOINTS: usize = 2;

impl Session {
    /// Tokens computed so far; the position of the next one.
    pub fn position(&self) -> u64 {
        self.tokens.len() as u64
    }

    /// The tokens computed so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that fit.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The functions that it runs through.
    pub fn route(&self) -> &Route {
        &self.model.plan.routes[self.route]
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Forgets everything; the next token is the first of a new text.
    ///
    /// # Errors
    /// When the backend can't reset its states.
    pub fn reset(&mut self) -> Result<()> {
        self.sequence.reset()?;
        self.tokens.clear();
        self.checkpoints.clear();
        Ok(())
    }

    /// Whether a text of `length` tokens would run as this one does: through the same functions, with the same rotary
    /// tables. Only then is what was computed of one of use for the other.
    pub fn suits(&self, length: u64) -> bool {
        self.model.plan.route(length).is_ok_and(|route| route == self.route)
            && self.model.host.choose_rope(length).is_ok_and(|rope| rope == self.rope)
    }

    /// A text of its own that begins with the tokens of this one; nothing where the backend can't copy states.
    ///
    /// # Errors
    /// When the backend has no room.
    pub fn fork(&self) -> Result<Option<Session>> {
        Ok(self.sequence.fork()?.map(|sequence| Session {
            model: self.model.clone(),
            sequence,
            route: self.route,
            rope: self.rope.clone(),
            tokens: self.tokens.clone(),
            limit: self.limit,
            checkpoints: Vec::new(),
        }))
    }

    /// Remembers the states as they are, where going back needs it. Gives whether [`Session::rewind`] then comes here
    /// without computing: not where the backend can't copy states that it would need.
    ///
    /// # Errors
    /// When the backend has no room.
    pub fn checkpoint(&mut self) -> Result<bool> {
        let position = self.tokens.len();
        let known = self.checkpoints.last().is_some_and(|last| last.position == position);
        if self.model.positional || known {
            return Ok(true);
        }
        let Some(sequence) = self.sequence.fork()? else { return Ok(false) };
        if self.checkpoints.len() == CHECKPOINTS {
            self.checkpoints.remove(CHECKPOINTS - 1);
        }
        self.checkpoints.push(Checkpoint { position, sequence });
        Ok(true)
    }

    /// Goes back to the first `position` tokens, as if those after them had never been.
    ///
    /// # Errors
    /// When states have to be computed again and that fails. `position` past the end changes nothing.
    pub fn rewind(&mut self, position: u64) -> Result<()> {
        let position = position as usize;
        if position >= self.tokens.len() {
            return Ok(());
        }
        if self.model.positional {
            self.tokens.truncate(position);
            return Ok(());
        }
        let mut again = std::mem::take(&mut self.tokens);
        again.truncate(position);
        self.checkpoints.retain(|checkpoint| checkpoint.position <= position);
        let copy = match self.checkpoints.last() {
            Some(checkpoint) => checkpoint.sequence.fork()?.map(|sequence| (checkpoint.position, sequence)),
            None => None,
        };
        match copy {
            Some((start, sequence)) => {
                self.sequence = sequence;
                self.tokens = again[..start].to_vec();
            }
            None => self.reset()?,
        }
        let rest = again.split_off(self.tokens.len());
        if rest.is_empty() { Ok(()) } else { self.forward(&rest, &Ask::none()).map(drop) }
    }

    /// Computes `tokens`, which follow those before.
    ///
    /// # Errors
    /// When there are none, they don't fit, a token doesn't exist, or a function fails. After a failure the session holds
    /// the tokens of the calls that went well.
    pub fn forward(&mut self, tokens: &[u32], ask: &Ask) -> Result<Answer> {
        if tokens.is_empty() {
            return Err(RuntimeError::NoTokens.into());
        }
        let end = self.position() + tokens.len() as u64;
        if end > self.limit {
            return Err(RuntimeError::ContextFull { tokens: end, context: self.limit }.into());
        }
        let model = self.model.clone();
        let route = &model.plan.routes[self.route];
        let mut record = (ask.hidden != Hidden::No).then(|| Record::new(&model.bundle, route, ask.hidden));
        let mut answer = Answer::default();
        let mut rest = tokens;
        for turn in 0.. {
            if rest.is_empty() {
                break;
            }
            let chunk = plan::chunk(&route.layers, rest.len() as u64, ask.chunking.wish(turn))?;
            let (now, later) = rest.split_at(chunk.real as usize);
            let hidden = self.layers(&model, route, now, chunk, record.as_mut())?;
            self.tokens.extend(now);
            let real = chunk.real as usize;
            let wanted = match ask.logits {
                Positions::All => 0..real,
                Positions::Last if later.is_empty() => real - 1..real,
                Positions::Last | Positions::None => real..real,
            };
            if !wanted.is_empty() {
                let hidden = hidden.range(wanted.clone(), wanted.len());
                self.head(&model, route, &hidden, &mut answer.logits)?;
            }
            rest = later;
        }
        if let Some(record) = record {
            answer.hidden = record.finish(tokens.len(), &model.bundle.model)?;
        }
        Ok(answer)
    }

    /// Goes to a position, as if zeros had been computed before it: what a validator needs to try the end of a context
    /// without computing all of it.
    ///
    /// # Errors
    /// When the position is beyond the context.
    pub fn seek(&mut self, position: u64) -> Result<()> {
        if position >= self.limit {
            return Err(RuntimeError::ContextFull { tokens: position + 1, context: self.limit }.into());
        }
        self.reset()?;
        // which tokens they were is nobody's question: nothing is recalled of them
        self.tokens = vec![0; position as usize];
        Ok(())
    }

    /// Runs one part of the layers alone, on hidden states that are given instead of what the parts before computed:
    /// `[tokens, hidden_size]`, row-major. `part` counts the parts of [`Session::route`]. Gives what leaves its last layer,
    /// and the others if `wanted` says so, in their places in [`Answer::hidden`].
    ///
    /// # Errors
    /// As [`Session::forward`].
    pub fn force_layers(
        &mut self,
        part: usize,
        hidden: &[f32],
        wanted: Hidden,
        chunking: &Chunking,
    ) -> Result<Vec<Vec<f32>>> {
        let model = self.model.clone();
        let route = &model.plan.routes[self.route];
        let step = &route.layers[part];
        let width = model.bundle.model.hidden_size as usize;
        let count = hidden.len() / width.max(1);
        let mut position = self.position();
        if position + count as u64 > self.limit {
            return Err(RuntimeError::ContextFull { tokens: position + count as u64, context: self.limit }.into());
        }
        let scale = model.bundle.model.hidden_scale as f32;
        let given = Columns::of_rows(hidden, width, scale);
        let rope = self.rope.clone();
        let mut record = Record::new(&model.bundle, route, wanted);
        record.only(step);
        let mut done = 0;
        for turn in 0.. {
            if done == count {
                break;
            }
            let chunk = plan::chunk(&route.layers, (count - done) as u64, chunking.wish(turn))?;
            let real = chunk.real as usize;
            let mut feed = Feed::new(&model.host, &rope, position, chunk, route.context);
            let columns = given.range(done..done + real, chunk.size as usize);
            let left = self.call_recorded(&model, step, columns, &mut feed, chunk, Some(&mut record))?;
            record.add(step.part.end as usize, &left, chunk);
            position += chunk.real;
            done += real;
        }
        self.tokens.resize(position as usize, 0);
        Ok(record.finish(count, &model.bundle.model)?)
    }

    /// Runs the LM head alone, on hidden states that are given: `[tokens, hidden_size]`; gives `[tokens, vocab_size]`.
    ///
    /// # Errors
    /// When a function fails.
    pub fn force_head(&mut self, hidden: &[f32]) -> Result<Vec<f32>> {
        let model = self.model.clone();
        let route = &model.plan.routes[self.route];
        let given =
            Columns::of_rows(hidden, model.bundle.model.hidden_size as usize, model.bundle.model.hidden_scale as f32);
        let mut logits = Vec::new();
        self.head(&model, route, &given, &mut logits)?;
        Ok(logits)
    }

    /// Runs the layers on one chunk; gives the hidden states that leave the last.
    fn layers(
        &mut self,
        model: &Model,
        route: &Route,
        tokens: &[u32],
        chunk: Chunk,
        mut record: Option<&mut Record>,
    ) -> Result<Columns> {
        let size = chunk.size as usize;
        let mut hidden = Columns::zeros(model.bundle.model.hidden_size as usize, size);
        model.host.embed(tokens, size, &mut hidden.values)?;
        if let Some(record) = record.as_deref_mut() {
            record.add(0, &hidden, chunk);
        }
        let rope = self.rope.clone();
        let mut feed = Feed::new(&model.host, &rope, self.position(), chunk, route.context);
        for step in &route.layers {
            hidden = self.call_recorded(model, step, hidden, &mut feed, chunk, record.as_deref_mut())?;
            if let Some(record) = record.as_deref_mut() {
                record.add(step.part.end as usize, &hidden, chunk);
            }
        }
        Ok(hidden)
    }

    /// Runs the function of a step of the layers, and records what is wanted of the states inside it.
    fn call_recorded(
        &mut self,
        model: &Model,
        step: &Step,
        hidden: Columns,
        feed: &mut Feed<'_>,
        chunk: Chunk,
        record: Option<&mut Record>,
    ) -> Result<Columns> {
        let channels = hidden.channels;
        match record {
            Some(record) if record.wants_inside(step) => {
                let mut watch = |name: &str, tensor: &Tensor| record.see(name, tensor, channels, chunk, step);
                self.call(model, step, hidden, PortRole::Hidden, Some(feed), Some(&mut watch))
            }
            _ => self.call(model, step, hidden, PortRole::Hidden, Some(feed), None),
        }
    }

    /// Appends the logits of `hidden`, one row of the vocabulary's width for each column.
    fn head(&mut self, model: &Model, route: &Route, hidden: &Columns, logits: &mut Vec<f32>) -> Result<()> {
        let vocab_size = model.bundle.model.vocab_size as usize;
        let base = logits.len();
        logits.resize(base + hidden.count * vocab_size, 0.0);
        for step in &route.head {
            let mut done = 0;
            while done < hidden.count {
                let chunk = plan::chunk(std::slice::from_ref(step), (hidden.count - done) as u64, None)?;
                let real = chunk.real as usize;
                let columns = hidden.range(done..done + real, chunk.size as usize);
                let part = self.call(model, step, columns, PortRole::Logits, None, None)?;
                for t in 0..real {
                    let first = base + (done + t) * vocab_size + step.part.start as usize;
                    let row = &mut logits[first..first + part.channels];
                    row.iter_mut().zip(part.column(t)).for_each(|(logit, value)| *logit = value);
                }
                done += real;
            }
        }
        Ok(())
    }

    /// Runs the function of a step on `hidden` and gives its output of the role `result`.
    fn call(
        &mut self,
        model: &Model,
        step: &Step,
        hidden: Columns,
        result: PortRole,
        mut feed: Option<&mut Feed<'_>>,
        watch: Option<Watch<'_>>,
    ) -> Result<Columns> {
        let path = || model.folder.join(FILE_NAME);
        let size = hidden.count;
        let Some(function) = step.function(size as u64) else {
            return Err(RuntimeError::bundle(path(), format!("no function takes {size} tokens")).into());
        };
        let entry = &model.bundle.functions[function];
        let mut values = Some(hidden.values);
        let inputs = entry
            .inputs
            .iter()
            .map(|port| match (&port.role, feed.as_deref_mut()) {
                (PortRole::Hidden, _) => {
                    shaped(port, shape_of(port, size as u64), values.take().unwrap_or_default()).map(Rc::new)
                }
                (_, Some(feed)) => feed.input(port),
                (role, None) => {
                    let problem = format!("function `{}` of the LM head has an input of role {role:?}", entry.function);
                    Err(RuntimeError::bundle(path(), problem))
                }
            })
            .collect::<Result<Vec<_>, _>>()?;
        let inputs: Vec<&Tensor> = inputs.iter().map(Rc::as_ref).collect();
        let outputs = self.sequence.run(function, &inputs, watch)?;
        let channels = match result {
            PortRole::Logits => (step.part.end - step.part.start) as usize,
            _ => hidden.channels,
        };
        let output = entry.outputs.iter().position(|port| port.role == result).and_then(|i| outputs.into_iter().nth(i));
        match output.map(|tensor| tensor.data) {
            Some(TensorData::F32(values)) if values.len() == channels * size => {
                Ok(Columns { channels, count: size, values })
            }
            found => {
                let found = found.map_or(0, |data| data.len());
                let problem = format!(
                    "function `{}` of {} gave {found} numbers for {size} tokens, expected {channels} for each",
                    entry.function, entry.package
                );
                Err(RuntimeError::bundle(path(), problem).into())
            }
        }
    }
}

/// Columns of channels, one for each token: `[channels, count]`, the order in which functions have them.
struct Columns {
    channels: usize,
    count: usize,
    values: Vec<f32>,
}

impl Columns {
    fn zeros(channels: usize, count: usize) -> Self {
        Columns { channels, count, values: vec![0.0; channels * count] }
    }

    /// From one row of channels for each token, in the source's unit.
    fn of_rows(rows: &[f32], channels: usize, scale: f32) -> Self {
        let count = rows.len() / channels.max(1);
        let mut columns = Columns::zeros(channels, count);
        for (t, row) in rows.chunks_exact(channels.max(1)).enumerate() {
            row.iter().enumerate().for_each(|(channel, value)| columns.values[channel * count + t] = *value * scale);
        }
        columns
    }

    fn column(&self, t: usize) -> impl Iterator<Item = f32> + '_ {
        self.values.iter().skip(t).step_by(self.count).copied()
    }

    /// Some columns, filled up with zeros to `count`.
    fn range(&self, range: Range<usize>, count: usize) -> Columns {
        let mut out = Columns::zeros(self.channels, count);
        for (from, to) in self.values.chunks_exact(self.count).zip(out.values.chunks_exact_mut(count)) {
            to[..range.len()].copy_from_slice(&from[range.clone()]);
        }
        out
    }
}

/// The hidden states that are wanted, as they come by.
struct Record {
    hidden: Vec<Vec<f32>>,
    /// Which of them are wanted.
    wanted: Vec<bool>,
}

impl Record {
    fn new(bundle: &Bundle, route: &Route, what: Hidden) -> Self {
        let count = bundle.model.num_layers + 1;
        let mut wanted = vec![what == Hidden::BetweenLayers; count];
        for between in route.layers.iter().flat_map(|step| [step.part.start, step.part.end]) {
            wanted[between as usize] = true;
        }
        Record { hidden: vec![Vec::new(); count], wanted }
    }

    /// Nothing is wanted but what the function of a step gives.
    fn only(&mut self, step: &Step) {
        let own = step.part.start as usize + 1..step.part.end as usize + 1;
        self.wanted.iter_mut().enumerate().for_each(|(index, wanted)| *wanted &= own.contains(&index));
    }

    /// Whether something inside the function of a step is wanted.
    fn wants_inside(&self, step: &Step) -> bool {
        self.wanted[step.part.start as usize + 1..step.part.end as usize].contains(&true)
    }

    fn add(&mut self, index: usize, columns: &Columns, chunk: Chunk) {
        for t in 0..chunk.real as usize {
            self.hidden[index].extend(columns.column(t));
        }
    }

    /// A value inside the function of `step`: `layers_7_hidden` is what leaves layer 7. What leaves the step's last layer
    /// is its output.
    fn see(&mut self, name: &str, tensor: &Tensor, channels: usize, chunk: Chunk, step: &Step) {
        let layer = name.strip_prefix("layers_").and_then(|rest| rest.strip_suffix("_hidden"));
        let Some(layer) = layer.and_then(|layer| layer.parse::<u64>().ok()) else { return };
        let inner = step.part.start..step.part.end - 1;
        let count = chunk.size as usize;
        if let Some(values) =
            tensor.floats().filter(|values| inner.contains(&layer) && values.len() == channels * count)
        {
            self.add(layer as usize + 1, &Columns { channels, count, values: values.to_vec() }, chunk);
        }
    }

    /// The matrices, in the source's unit, if all came by.
    fn finish(mut self, tokens: usize, facts: &ModelFacts) -> Result<Vec<Vec<f32>>, RuntimeError> {
        let expected = tokens * facts.hidden_size as usize;
        let missing = |(values, wanted): (&Vec<f32>, &bool)| *wanted && values.len() != expected;
        match self.hidden.iter().zip(&self.wanted).position(missing) {
            None => {
                // a power of two: nothing is lost
                let unscaled = 1.0 / facts.hidden_scale as f32;
                self.hidden.iter_mut().flatten().for_each(|value| *value *= unscaled);
                Ok(self.hidden)
            }
            Some(index) => {
                let problem = format!("the functions don't show the hidden states `hidden.{index}`");
                Err(RuntimeError::bundle(FILE_NAME, problem))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::double::{self, Form, Mishap};
    use super::*;
    use crate::convert::bundle::Tokens;

    const TEXT: [u32; 11] = [3, 1, 4, 1, 5, 2, 6, 5, 3, 0, 7];

    fn fixed(sizes: &[u64]) -> Vec<Tokens> {
        sizes.iter().map(|size| Tokens::Exactly(*size)).collect()
    }

    /// The double computes in one fixed order, so every way through it gives the same bits.
    fn assert_same_as_reference(form: &Form, tokens: &[u32], chunking: Chunking) {
        let (model, _) = double::model(form);
        let mut session = model.start(tokens.len() as u64).unwrap();
        let ask = Ask { logits: Positions::All, hidden: Hidden::BetweenLayers, chunking };
        let (hidden, logits) = double::reference(tokens, tokens.len() as u64);
        for _ in 0..2 {
            let answer = session.forward(tokens, &ask).unwrap();
            assert_eq!(answer.logits, logits);
            assert_eq!(answer.hidden, hidden);
            // the second time starts from what the first left behind, unless reset forgets it
            session.reset().unwrap();
        }
    }

    #[test]
    fn every_chunking_gives_the_same_logits() {
        for sizes in [vec![1], vec![2], vec![3], vec![4], vec![3, 1, 2, 4]] {
            assert_same_as_reference(&Form::default(), &TEXT, Chunking::Pattern(sizes));
        }
        assert_same_as_reference(&Form::default(), &TEXT, Chunking::Largest);
    }

    #[test]
    fn hidden_states_between_functions_need_no_look_inside() {
        let (model, _) = double::model(&Form::default());
        let ask = Ask { hidden: Hidden::BetweenFunctions, ..Ask::all(Chunking::Largest) };
        let found = model.start(TEXT.len() as u64).unwrap().forward(&TEXT, &ask).unwrap().hidden;
        let mut expected = double::reference(&TEXT, TEXT.len() as u64).0;
        // layers 0 and 1 are one function
        expected[1].clear();
        assert_eq!(found, expected);
    }

    #[test]
    fn fixed_sizes_write_at_a_position() {
        let form = Form { layer_tokens: fixed(&[1, 4]), head_tokens: fixed(&[1]), slice: true, ..Form::default() };
        assert_same_as_reference(&form, &TEXT, Chunking::Largest);
    }

    #[test]
    fn a_call_that_is_filled_up_leaves_no_trace() {
        for slice in [false, true] {
            let form = Form { layer_tokens: fixed(&[8]), head_tokens: fixed(&[8]), slice, ..Form::default() };
            assert_same_as_reference(&form, &TEXT, Chunking::Largest);
        }
    }

    #[test]
    fn a_filled_up_call_that_writes_at_a_position_must_fit_the_cache() {
        let form = Form { layer_tokens: fixed(&[8]), contexts: vec![12], slice: true, ..Form::default() };
        let error = double::model(&form).0.start(11).unwrap().forward(&TEXT, &Ask::last()).unwrap_err();
        assert_eq!(error.to_string(), "the text needs 16 tokens, but the bundle's largest context has 12");
    }

    #[test]
    fn rotary_rows_are_those_of_the_texts_length() {
        let short = &TEXT[..double::SHORT as usize];
        assert_same_as_reference(&Form::default(), short, Chunking::Largest);
        // the same tokens as the beginning of a longer text are rotated otherwise
        let (model, _) = double::model(&Form::default());
        let long = model.start(10).unwrap().forward(short, &Ask::all(Chunking::Largest)).unwrap();
        assert_eq!(long.logits, double::reference(short, 10).1);
        assert_ne!(long.logits, double::reference(short, short.len() as u64).1);
    }

    #[test]
    fn generation_asks_the_head_for_the_last_token_only() {
        let (model, calls) = double::model(&Form::default());
        let answer = model.start(16).unwrap().forward(&TEXT[..6], &Ask::last()).unwrap();
        assert_eq!(answer.logits, double::reference(&TEXT[..6], 16).1[5 * double::VOCAB..]);
        let calls = calls.lock().unwrap();
        let expected = [
            ("layers_0_2_of_16", 4),
            ("layers_2_3_of_16", 4),
            ("layers_0_2_of_16", 2),
            ("layers_2_3_of_16", 2),
            ("head_0_5", 1),
            ("head_5_8", 1),
        ];
        assert!(calls.iter().map(|(name, t)| (name.as_str(), *t)).eq(expected), "{calls:?}");
    }

    #[test]
    fn the_smallest_context_that_fits_is_used() {
        let form = Form { contexts: vec![16, 8], ..Form::default() };
        let (model, calls) = double::model(&form);
        for (length, name) in [(5, "layers_0_2_of_8"), (8, "layers_0_2_of_8"), (9, "layers_0_2_of_16")] {
            calls.lock().unwrap().clear();
            model.start(length).unwrap().forward(&TEXT[..2], &Ask::last()).unwrap();
            assert_eq!(calls.lock().unwrap()[0].0, name);
        }
        assert_same_as_reference(&form, &TEXT, Chunking::Largest);
    }

    #[test]
    fn a_full_context_is_an_error_that_says_so() {
        let (model, _) = double::model(&Form::default());
        let error = model.start(17).err().unwrap();
        assert_eq!(error.to_string(), "the text needs 17 tokens, but the bundle's largest context has 16");
        let mut session = model.start(16).unwrap();
        session.forward(&[1; 16], &Ask::last()).unwrap();
        assert!(session.forward(&[1], &Ask::last()).is_err());
        assert_eq!(session.position(), 16);
    }

    /// Goes on with tokens that are then taken back, again and again, and compares with a text that never had them.
    fn assert_rewinds(form: &Form) {
        let (model, _) = double::model(form);
        let fresh = |tokens: &[u32]| model.start(16).unwrap().forward(tokens, &Ask::last()).unwrap().logits;
        let mut session = model.start(16).unwrap();
        let mut fork = None;
        for end in 1..TEXT.len() {
            session.forward(&TEXT[end - 1..end], &Ask::none()).unwrap();
            session.checkpoint().unwrap();
            session.forward(&[6, 6, 2], &Ask::none()).unwrap();
            session.rewind(end as u64 + 1).unwrap();
            session.rewind(end as u64).unwrap();
            assert_eq!(session.tokens(), &TEXT[..end]);
            let mut twin = session.fork().unwrap();
            assert_eq!(twin.is_some(), form.forks);
            if let Some(twin) = &mut twin {
                let text = [&TEXT[..end], &[2]].concat();
                assert_eq!(twin.forward(&[2], &Ask::last()).unwrap().logits, fresh(&text), "a copy goes its own way");
            }
            fork = twin;
        }
        session.rewind(4).unwrap();
        let logits = session.forward(&TEXT[4..6], &Ask::last()).unwrap().logits;
        assert_eq!(logits, fresh(&TEXT[..6]));
        session.rewind(0).unwrap();
        assert_eq!(session.forward(&TEXT[..1], &Ask::last()).unwrap().logits, fresh(&TEXT[..1]));
        assert_eq!(fork.is_some(), form.forks);
    }

    #[test]
    fn what_is_taken_back_leaves_no_trace() {
        for (slice, recurrent, forks) in
            [(false, false, true), (true, false, false), (false, true, true), (false, true, false)]
        {
            assert_rewinds(&Form { slice, recurrent, forks, ..Form::default() });
        }
    }

    /// A call fails in the middle of a text. What was computed before it holds, and the text can go on from there.
    #[test]
    fn after_a_failure_the_text_can_go_on() {
        for mishap in [Mishap::Error, Mishap::Short] {
            // calls of a text of eleven tokens: two shards for each of 4, 4 and 3 tokens, then two pieces of the head
            for at in 0..8 {
                let (model, _) = double::model(&Form { script: vec![(at, mishap)], ..Form::default() });
                let mut session = model.start(TEXT.len() as u64).unwrap();
                let error = session.forward(&TEXT, &Ask::last()).unwrap_err().to_string();
                let expected = match mishap {
                    Mishap::Error => "backend double: the device is busy",
                    _ => "numbers for",
                };
                assert!(error.contains(expected), "{error}");
                let known = session.position();
                assert_eq!(known, (at as u64 / 2 * 4).min(11), "whole calls count, at {at}");
                let rest = known.min(10);
                session.rewind(rest).unwrap();
                let logits = session.forward(&TEXT[rest as usize..], &Ask::last()).unwrap().logits;
                assert_eq!(logits, double::reference(&TEXT, 11).1[10 * double::VOCAB..]);
            }
        }
    }

    #[test]
    fn a_checkpoint_saves_computing() {
        let form = Form { recurrent: true, ..Form::default() };
        let (model, calls) = double::model(&form);
        let mut session = model.start(16).unwrap();
        session.forward(&TEXT[..8], &Ask::none()).unwrap();
        session.checkpoint().unwrap();
        session.forward(&[1, 2], &Ask::none()).unwrap();
        calls.lock().unwrap().clear();
        session.rewind(8).unwrap();
        assert!(calls.lock().unwrap().is_empty(), "the states were kept");
        session.rewind(7).unwrap();
        assert_eq!(calls.lock().unwrap().len(), 4, "seven tokens in two calls of two shards");
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_refused() {
        let (model, _) = double::model(&Form::default());
        let error = model.start(4).unwrap().forward(&[8], &Ask::last()).unwrap_err();
        assert_eq!(error.to_string(), "token 8 doesn't exist: the vocabulary has 8 tokens, 0 to 7");
        assert!(model.start(4).unwrap().forward(&[], &Ask::last()).is_err());
    }

    #[test]
    fn a_bundle_with_a_gap_is_refused() {
        let mut bundle = double::bundle(&Form::default());
        bundle.functions.retain(|f| f.stage != (Stage::Layers { first: 2, end: 3 }));
        let error = Plan::new(&bundle, Path::new("b")).unwrap_err().to_string();
        assert_eq!(error, "b/bundle.json: layers of context 16: they end at 2 of 3");
    }
}
