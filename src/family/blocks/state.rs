//! States: values that a function carries from call to call.
//!
//! Every token mixer describes its states ([`StateSpec`]). The manifest determines their division into states of the
//! package: one for each ([`StateForm::PerLayer`]), or one for all of the same shape ([`StateForm::Unified`]), stacked
//! along axis 1 and read and written once. All have the shape `[1, rows, slots, width]`, with channels last. Recurrent
//! states may be inputs and outputs instead ([`RecurrentForm::InputOutput`]), divided in the same way. With
//! [`StateForm::Host`] keys and values are inputs, too, and the rows of a call are outputs. Mixers are independent of
//! these forms.

use super::cache::Write;
use super::{Graph, extents};
use anec_bundle::{Port, PortDim, PortRole, StatePort, StateRole, state_id};
use anec_manifest::{RecurrentForm, StateForm};
use anec_mil::{DataType, TensorType, ValueId};

/// Kind of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// Keys of attention.
    Key,
    /// Values of attention.
    Value,
    /// Last inputs of a causal convolution.
    Convolution,
    /// Delayed values for the next token.
    Delay,
    /// Matrices of a linear recurrence.
    Recurrent,
}

/// A state of a layer: `[1, rows, slots, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// Kind.
    pub kind: StateKind,
    /// Heads, or 1.
    pub rows: u64,
    /// Token slots, or the first dimension of a matrix.
    pub slots: u64,
    /// Channels.
    pub width: u64,
}

impl StateSpec {
    /// Bytes in fp16.
    pub fn bytes(&self) -> u64 {
        2 * self.rows * self.slots * self.width
    }

    /// Name of a state that holds several layers'; states of one name can be stacked.
    fn group(&self) -> &'static str {
        match self.kind {
            StateKind::Key | StateKind::Value => "kv_cache",
            StateKind::Convolution => "conv_state",
            StateKind::Delay => "delay_state",
            StateKind::Recurrent => "recurrent_state",
        }
    }

    fn is_cache(&self) -> bool {
        matches!(self.kind, StateKind::Key | StateKind::Value)
    }

    /// Returns whether both can be stacked in one state.
    fn stacks_with(&self, other: &StateSpec) -> bool {
        (self.group(), self.slots, self.width) == (other.group(), other.slots, other.width)
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

/// Location of a layer's state.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    place: Place,
    spec: StateSpec,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// A state of its own.
    State(ValueId),
    /// Rows of a value that is read before the layers and written after them: an input and an output of the function,
    /// or a stacked state. Its current value is at this index of [`Graph::state_values`].
    Rows(usize),
}

impl Slot {
    /// Description of the state.
    pub fn spec(&self) -> StateSpec {
        self.spec
    }

    /// Returns whether writes happen after all layers; for a cache, only the rows of the call are written.
    pub fn is_written_later(&self) -> bool {
        matches!(self.place, Place::Rows(_))
    }

    /// Reads the current value, `[1, rows, slots, width]`.
    pub fn read(&self, g: &mut Graph<'_>) -> ValueId {
        match self.place {
            Place::State(state) => g.ops.read_state(state),
            Place::Rows(index) => g.state_values[index],
        }
    }

    /// Replaces the whole value; for a cache that is written later, takes the rows of the call.
    pub fn write(&self, g: &mut Graph<'_>, value: ValueId) {
        match self.place {
            Place::State(state) => g.ops.write_state(state, value),
            Place::Rows(index) => g.state_values[index] = value,
        }
    }
}

/// States of a function.
#[derive(Default)]
pub struct States {
    layers: Vec<(usize, Vec<Slot>)>,
    /// Ports of states that Core ML stores.
    pub ports: Vec<StatePort>,
    /// Inputs of states that the host stores.
    pub inputs: Vec<Port>,
    /// Contents of each input's output: indices of [`Graph::state_values`].
    outputs: Vec<Vec<usize>>,
    /// States with rows of several layers.
    stacked: Vec<Stacked>,
}

/// A state with rows of several layers: read once before them, written once after them.
struct Stacked {
    state: ValueId,
    /// Value before the layers.
    whole: ValueId,
    spec: StateSpec,
    /// Contents of its rows: indices of [`Graph::state_values`].
    rows: Vec<usize>,
}

/// A state, or an input and output.
struct Group {
    name: String,
    role: StateRole,
    /// Shape with the rows of all members.
    spec: StateSpec,
    /// Whether it may hold states of several layers.
    stacked: bool,
}

/// A declared group.
#[derive(Clone, Copy)]
enum DeclaredGroup {
    State(ValueId),
    /// Value read from a state, and index of the stacked state.
    Stacked(ValueId, usize),
    /// Input, and index of its output.
    Input(ValueId, usize),
}

impl States {
    /// Declares the states of layers, `specs` by layer, of a function for `context`.
    pub fn declare(g: &mut Graph<'_>, specs: Vec<(usize, Vec<StateSpec>)>, context: u64) -> States {
        let (groups, group_of) = match g.form.state {
            StateForm::PerLayer | StateForm::Host => per_layer(&specs),
            StateForm::Unified => unified(&specs, context),
        };
        let mut states = States::default();
        let holders: Vec<DeclaredGroup> = groups.iter().map(|group| states.add(g, group, context)).collect();
        let mut used = vec![0u64; groups.len()];
        let mut group_of = group_of.into_iter();
        for (layer, specs) in specs {
            let slots = specs.into_iter().zip(group_of.by_ref()).map(|(spec, index)| {
                let first = used[index];
                used[index] += spec.rows;
                let place = match holders[index] {
                    DeclaredGroup::State(state) => Place::State(state),
                    DeclaredGroup::Stacked(value, place) => {
                        let stored = store_rows(g, value, &groups[index].spec, first, spec.rows);
                        states.stacked[place].rows.push(stored);
                        Place::Rows(stored)
                    }
                    DeclaredGroup::Input(value, place) => {
                        let stored = store_rows(g, value, &groups[index].spec, first, spec.rows);
                        states.outputs[place].push(stored);
                        Place::Rows(stored)
                    }
                };
                Slot { place, spec }
            });
            let slots = slots.collect();
            states.layers.push((layer, slots));
        }
        states
    }

    fn add(&mut self, g: &mut Graph<'_>, group: &Group, context: u64) -> DeclaredGroup {
        let StateSpec { rows, slots, width, .. } = group.spec;
        let shape = [1, rows, slots, width];
        let (name, role, id) = (group.name.clone(), group.role.clone(), state_id(&group.name, context));
        let ty = TensorType::new(DataType::Fp16, shape);
        let host_keeps = g.form.state == StateForm::Host
            || g.form.recurrent_states == RecurrentForm::InputOutput && !group.spec.is_cache();
        if !host_keeps {
            let state = g.ops.state(&name, ty);
            self.ports.push(StatePort { name, id, role, shape: shape.to_vec() });
            if !group.stacked {
                return DeclaredGroup::State(state);
            }
            let whole = g.ops.read_state(state);
            self.stacked.push(Stacked { state, whole, spec: group.spec, rows: Vec::new() });
            return DeclaredGroup::Stacked(whole, self.stacked.len() - 1);
        }
        let input = g.ops.input(&name, ty);
        let role = match group.spec.is_cache() {
            true => PortRole::Cache { id, holds: role },
            false => PortRole::State { id, holds: role },
        };
        self.inputs.push(Port { name, role, shape: shape.map(PortDim::Fixed).to_vec() });
        self.outputs.push(Vec::new());
        DeclaredGroup::Input(input, self.outputs.len() - 1)
    }

    /// States of a layer, in the order of its specs.
    pub fn of(&self, layer: usize) -> &[Slot] {
        self.layers.iter().find(|(index, _)| *index == layer).map_or(&[], |(_, slots)| slots)
    }

    /// Writes stacked states after all layers; `write` returns the form of writes to caches with a number of slots.
    pub fn write_stacked(&self, g: &mut Graph<'_>, write: impl Fn(u64) -> Option<Write>) {
        for Stacked { state, whole, spec, rows } in &self.stacked {
            let rows: Vec<ValueId> = rows.iter().map(|index| g.state_values[*index]).collect();
            let rows = if rows.len() == 1 { rows[0] } else { g.ops.concat(&rows, 1) };
            let value = match write(spec.slots).filter(|_| spec.is_cache()) {
                Some(write) => g.scope("cache", |g| write.into_cache(g, *whole, rows)),
                None => rows,
            };
            g.ops.write_state(*state, value);
        }
    }

    /// Outputs of states that the host stores, after all layers.
    pub fn outputs(&self, g: &mut Graph<'_>) -> Vec<Port> {
        let output = |(port, stored): (&Port, &Vec<usize>)| {
            let values: Vec<ValueId> = stored.iter().map(|index| g.state_values[*index]).collect();
            let value = if values.len() == 1 { values[0] } else { g.ops.concat(&values, 1) };
            let name = match port.role {
                PortRole::Cache { .. } => format!("{}_new", port.name),
                _ => format!("{}_out", port.name),
            };
            g.ops.output(&name, value);
            let shape = extents(&g.ops.ty(value).shape);
            match port.role.clone() {
                PortRole::Cache { id, holds } => Port { name, role: PortRole::CacheRows { id, holds }, shape },
                role => Port { name, role, shape: port.shape.clone() },
            }
        };
        self.inputs.iter().zip(&self.outputs).map(output).collect()
    }
}

/// Stores `count` rows of a value from `first` and returns their index in [`Graph::state_values`].
fn store_rows(g: &mut Graph<'_>, value: ValueId, whole: &StateSpec, first: u64, count: u64) -> usize {
    let rows = if whole.rows == count { value } else { g.ops.slice(value, 1, first..first + count) };
    g.state_values.push(rows);
    g.state_values.len() - 1
}

/// One group for each state. Returns the groups, and the group index of each spec in order.
fn per_layer(specs: &[(usize, Vec<StateSpec>)]) -> (Vec<Group>, Vec<usize>) {
    let groups: Vec<Group> = specs
        .iter()
        .flat_map(|(layer, specs)| specs.iter().map(|spec| (*layer, *spec)))
        .map(|(layer, spec)| {
            let (name, role) = spec.port(layer);
            Group { name, role, spec, stacked: false }
        })
        .collect();
    let group_of = (0..groups.len()).collect();
    (groups, group_of)
}

/// One group for each shape of a slot, in the order of their first layers. Returns the same as [`per_layer`].
fn unified(specs: &[(usize, Vec<StateSpec>)], context: u64) -> (Vec<Group>, Vec<usize>) {
    let (first, last) = (specs.first().map_or(0, |s| s.0), specs.last().map_or(0, |s| s.0));
    let mut shapes: Vec<StateSpec> = Vec::new();
    let mut group_of = Vec::new();
    for spec in specs.iter().flat_map(|(_, specs)| specs) {
        group_of.push(shapes.iter().position(|shape| shape.stacks_with(spec)).unwrap_or_else(|| {
            shapes.push(*spec);
            shapes.len() - 1
        }));
    }
    let group = |shape: &StateSpec| {
        let of = |specs: &[StateSpec]| specs.iter().filter(|s| s.stacks_with(shape)).map(|s| s.rows).sum::<u64>();
        let layers = specs.iter().filter(|(_, specs)| of(specs) > 0).map(|(layer, _)| *layer).collect();
        let rows = specs.iter().map(|(_, specs)| of(specs)).sum();
        let local = if shape.is_cache() && shape.slots < context { "_local" } else { "" };
        let name = format!("{}{local}_{first}_{}", shape.group(), last + 1);
        Group { name, role: shape.group_role(layers), spec: StateSpec { rows, ..*shape }, stacked: true }
    };
    (shapes.iter().map(group).collect(), group_of)
}

/// Writes keys (or values) `[1, heads, T, head_dim]` and returns the updated cache `[1, heads, S, head_dim]`. For a
/// cache that is written later, returns all slots followed by the call's rows, `[1, heads, S + T, head_dim]`.
pub fn update(g: &mut Graph<'_>, cache: Slot, write: Write, new: ValueId) -> ValueId {
    let old = cache.read(g);
    if cache.is_written_later() {
        cache.write(g, new);
        return g.ops.concat(&[old, new], 2);
    }
    let updated = write.into_cache(g, old, new);
    cache.write(g, updated);
    cache.read(g)
}
