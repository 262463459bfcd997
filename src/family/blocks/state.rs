//! States: what a function carries from call to call.
//!
//! Every mixer of tokens says what it carries ([`StateSpec`]); the manifest says how that is divided into states of the
//! package: one for each ([`StateForm::PerLayer`]), or one for all of the same shape ([`StateForm::Unified`]), stacked
//! along axis 1. All have the shape `[1, rows, slots, width]`, with channels last.

use std::ops::Range;

use super::Graph;
use crate::family::ports::{StatePort, StateRole};
use crate::manifest::StateForm;
use crate::mil::{DataType, TensorType, ValueId};

/// What is carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// Keys of attention.
    Key,
    /// Values of attention.
    Value,
    /// The last inputs of a causal convolution.
    Convolution,
    /// What the next token takes from the last.
    Delay,
    /// The matrices of a linear recurrence.
    Recurrent,
}

/// One thing that a layer carries: `[1, rows, slots, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// What it is.
    pub kind: StateKind,
    /// Heads; 1 where there are none.
    pub rows: u64,
    /// Places for tokens, or the first dimension of a matrix.
    pub slots: u64,
    /// Channels.
    pub width: u64,
}

impl StateSpec {
    /// Bytes in fp16.
    pub fn bytes(&self) -> u64 {
        2 * self.rows * self.slots * self.width
    }

    /// What a state that holds several layers' is called, and which of them can be in one.
    fn group(&self) -> &'static str {
        match self.kind {
            StateKind::Key | StateKind::Value => "kv_cache",
            StateKind::Convolution => "conv_state",
            StateKind::Delay => "delay_state",
            StateKind::Recurrent => "recurrent_state",
        }
    }

    fn port(&self, layer: usize) -> (String, StateRole) {
        match self.kind {
            StateKind::Key => (format!("k_cache_{layer}"), StateRole::KeyCache { layer }),
            StateKind::Value => (format!("v_cache_{layer}"), StateRole::ValueCache { layer }),
            StateKind::Convolution => {
                (format!("conv_state_{layer}"), StateRole::ConvolutionState { layers: vec![layer] })
            }
            StateKind::Delay => (format!("delay_state_{layer}"), StateRole::DelayState { layers: vec![layer] }),
            StateKind::Recurrent => {
                (format!("recurrent_state_{layer}"), StateRole::RecurrentState { layers: vec![layer] })
            }
        }
    }

    fn group_role(&self, layers: Vec<usize>) -> StateRole {
        match self.kind {
            StateKind::Key | StateKind::Value => StateRole::KeyValueCache { layers },
            StateKind::Convolution => StateRole::ConvolutionState { layers },
            StateKind::Delay => StateRole::DelayState { layers },
            StateKind::Recurrent => StateRole::RecurrentState { layers },
        }
    }
}

/// Where a layer finds one thing that it carries: a state, or rows of one.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    state: ValueId,
    /// Its first row, if the state has others, too.
    first_row: Option<u64>,
    spec: StateSpec,
}

impl Slot {
    /// What it is.
    pub fn spec(&self) -> StateSpec {
        self.spec
    }

    fn rows(&self) -> Range<u64> {
        let first = self.first_row.unwrap_or(0);
        first..first + self.spec.rows
    }

    /// What it holds now, `[1, rows, slots, width]`.
    pub fn read(&self, g: &mut Graph<'_>) -> ValueId {
        let whole = g.ops.read_state(self.state);
        match self.first_row {
            Some(_) => g.ops.slice(whole, 1, self.rows()),
            None => whole,
        }
    }

    /// Replaces all of what it holds.
    pub fn write(&self, g: &mut Graph<'_>, value: ValueId) {
        let updated = match self.first_row {
            None => value,
            Some(_) => {
                let whole = g.ops.read_state(self.state);
                let Range { start, end } = self.rows();
                let begin = g.ops.integers("begin", &[0, start as i32, 0, 0]);
                let end = g.ops.integers("end", &[1, end as i32, self.spec.slots as i32, self.spec.width as i32]);
                g.ops.slice_update(whole, value, begin, end)
            }
        };
        g.ops.write_state(self.state, updated);
    }

    /// Replaces the slots `begin..end`, int32 vectors of one element.
    pub fn write_slots(&self, g: &mut Graph<'_>, begin: ValueId, end: ValueId, value: ValueId) {
        let whole = g.ops.read_state(self.state);
        let rows = self.rows();
        let low = g.ops.integers("low", &[0, rows.start as i32]);
        let zero = g.ops.integers("zero", &[0]);
        let begin = g.ops.concat(&[low, begin, zero], 0);
        let high = g.ops.integers("high", &[1, rows.end as i32]);
        let width = g.ops.integers("width", &[self.spec.width as i32]);
        let end = g.ops.concat(&[high, end, width], 0);
        let updated = g.ops.slice_update(whole, value, begin, end);
        g.ops.write_state(self.state, updated);
    }
}

/// The states of a function.
pub struct States {
    layers: Vec<(usize, Vec<Slot>)>,
    /// Their ports.
    pub ports: Vec<StatePort>,
}

impl States {
    /// Declares the states of layers, `specs` by layer; `context` tells rings from whole caches.
    pub fn declare(g: &mut Graph<'_>, specs: Vec<(usize, Vec<StateSpec>)>, context: u64) -> States {
        match g.form.state {
            StateForm::PerLayer => Self::per_layer(g, specs),
            StateForm::Unified => Self::unified(g, specs, context),
        }
    }

    fn per_layer(g: &mut Graph<'_>, specs: Vec<(usize, Vec<StateSpec>)>) -> States {
        let mut states = States { layers: Vec::new(), ports: Vec::new() };
        for (layer, specs) in specs {
            let slots = specs.into_iter().map(|spec| {
                let (name, role) = spec.port(layer);
                let state = states.add(g, name, role, spec, spec.rows);
                Slot { state, first_row: None, spec }
            });
            let slots = slots.collect();
            states.layers.push((layer, slots));
        }
        states
    }

    fn unified(g: &mut Graph<'_>, specs: Vec<(usize, Vec<StateSpec>)>, context: u64) -> States {
        let mut states = States { layers: Vec::new(), ports: Vec::new() };
        let (first, last) = (specs.first().map_or(0, |s| s.0), specs.last().map_or(0, |s| s.0));
        // one state for each shape of a slot, in the order of their first layers
        let same = |a: &StateSpec, b: &StateSpec| (a.group(), a.slots, a.width) == (b.group(), b.slots, b.width);
        let mut shapes: Vec<StateSpec> = Vec::new();
        for spec in specs.iter().flat_map(|(_, specs)| specs) {
            if !shapes.iter().any(|shape| same(shape, spec)) {
                shapes.push(*spec);
            }
        }
        let values: Vec<ValueId> = shapes
            .iter()
            .map(|shape| {
                let of = |specs: &[StateSpec]| specs.iter().filter(|s| same(s, shape)).map(|s| s.rows).sum::<u64>();
                let layers = specs.iter().filter(|(_, specs)| of(specs) > 0).map(|(layer, _)| *layer).collect();
                let rows = specs.iter().map(|(_, specs)| of(specs)).sum();
                let ring = shape.group() == "kv_cache" && shape.slots < context;
                let local = if ring { "_local" } else { "" };
                let name = format!("{}{local}_{first}_{}", shape.group(), last + 1);
                states.add(g, name, shape.group_role(layers), *shape, rows)
            })
            .collect();
        let mut used = vec![0u64; shapes.len()];
        for (layer, specs) in specs {
            let slots = specs.into_iter().filter_map(|spec| {
                let index = shapes.iter().position(|shape| same(shape, &spec))?;
                let first_row = Some(used[index]);
                used[index] += spec.rows;
                Some(Slot { state: values[index], first_row, spec })
            });
            let slots = slots.collect();
            states.layers.push((layer, slots));
        }
        states
    }

    fn add(&mut self, g: &mut Graph<'_>, name: String, role: StateRole, spec: StateSpec, rows: u64) -> ValueId {
        let shape = [1, rows, spec.slots, spec.width];
        let state = g.ops.state(&name, TensorType::new(DataType::Fp16, shape));
        self.ports.push(StatePort { name, role, shape: shape.to_vec() });
        state
    }

    /// What a layer carries, in the order of its specs.
    pub fn of(&self, layer: usize) -> &[Slot] {
        self.layers.iter().find(|(index, _)| *index == layer).map_or(&[], |(_, slots)| slots)
    }
}
