//! Shared attention inputs of a function: rotary tables, masks, and cache writes.

use std::collections::BTreeSet;
use std::ops::Range;

use super::{Decoder, LOCAL_ROPE_TABLE, Ports, ROPE_TABLE};
use crate::FunctionRequest;
use crate::blocks::Graph;
use crate::blocks::attention::AttentionInputs;
use crate::blocks::cache::Write;
use crate::blocks::rope::Rotation;
use crate::rope::QUERY_ROPE_TABLE;
use anec_bundle::{PortRole, TokenCount};
use anec_manifest::{KvWrite, StateForm};
use anec_mil::{DataType, Dim, ValueId};

/// Attention inputs of a function's layers.
pub(super) struct AttentionPorts {
    rotation: Option<Rotation>,
    /// Rotation of layers with a window, if they have their own table.
    local_rotation: Option<Rotation>,
    /// Rotation of queries with a position-dependent scale.
    query_rotation: Option<Rotation>,
    /// Masks: one for full-attention layers, one for each width of window.
    masks: Vec<(Option<u64>, ValueId)>,
    /// Form of writes, for each number of slots.
    writes: Vec<(u64, Write)>,
}

impl AttentionPorts {
    pub(super) fn declare(
        decoder: &Decoder,
        g: &mut Graph<'_>,
        ports: &mut Ports,
        layers: &Range<usize>,
        request: &FunctionRequest,
    ) -> Self {
        let config = &decoder.config;
        let mut rotation = |g: &mut Graph<'_>, of_local: bool| {
            let rotates = |layer: usize| config.layers[layer].rope && decoder.rotates_locally(layer) == of_local;
            layers.clone().any(rotates).then(|| {
                let (suffix, table) = if of_local { ("_local", LOCAL_ROPE_TABLE) } else { ("", ROPE_TABLE) };
                let rope = config.rope_local.as_ref().filter(|_| of_local).unwrap_or(&config.rope);
                ports.rotation(g, suffix, table, rope.rope_dim / 2)
            })
        };
        let [rotation, local_rotation] = [rotation(g, false), rotation(g, true)];
        let query_rotation = decoder
            .late_query_scale(request.context)
            .filter(|_| rotation.is_some())
            .map(|_| ports.rotation(g, "_query", QUERY_ROPE_TABLE, config.rope.rope_dim / 2));
        let attending = layers.clone().filter(|layer| config.layers[*layer].mixer.attends());
        let views: BTreeSet<(Option<u64>, u64)> = attending.map(|layer| decoder.view(layer, request)).collect();
        let masks = views.iter().map(|&(window, slots)| (window, mask(g, ports, window, slots))).collect();
        let caches: BTreeSet<u64> = views.iter().map(|(_, slots)| *slots).collect();
        let writes = caches.iter().rev().map(|slots| (*slots, write(g, ports, *slots, request))).collect();
        AttentionPorts { rotation, local_rotation, query_rotation, masks, writes }
    }

    /// Form of writes to caches with a number of slots.
    pub(super) fn write(&self, slots: u64) -> Option<Write> {
        self.writes.iter().find(|(of, _)| *of == slots).map(|(_, write)| *write)
    }

    /// Inputs of a layer, if it has attention.
    pub(super) fn of(&self, decoder: &Decoder, layer: usize, request: &FunctionRequest) -> Option<AttentionInputs> {
        let config = &decoder.config;
        let (window, slots) = decoder.view(layer, request);
        let rotation = if decoder.rotates_locally(layer) { self.local_rotation } else { self.rotation };
        let (_, mask) = *self.masks.iter().find(|(of, _)| *of == window)?;
        Some(AttentionInputs {
            rotation: rotation.filter(|_| config.layers[layer].rope),
            query_rotation: self.query_rotation,
            mask,
            write: self.write(slots)?,
            shares: config.layers[layer].keys_of.or(config.has_shared_keys(layer, layer).then_some(layer)),
        })
    }
}

/// Mask of layers that see `window` tokens (`None` for all) in a cache of `slots` slots.
fn mask(g: &mut Graph<'_>, ports: &mut Ports, window: Option<u64>, slots: u64) -> ValueId {
    let tokens = g.tokens.clone();
    let mut part = |g: &mut Graph<'_>, name: &str, role: PortRole, columns: Dim| {
        let name = if window.is_some() { format!("{name}_local") } else { name.to_owned() };
        ports.input(g, &name, role, vec![Dim::Fixed(1), Dim::Fixed(1), tokens.clone(), columns])
    };
    let slots = Dim::Fixed(slots);
    if g.form.state == StateForm::PerLayer {
        return part(g, "attn_mask", PortRole::AttentionMask { window }, slots);
    }
    // rows that are written later follow the slots
    let past = part(g, "past_mask", PortRole::PastMask { window }, slots);
    let call = part(g, "call_mask", PortRole::CallMask { window }, tokens.clone());
    g.ops.concat(&[past, call], 3)
}

/// Form of writes to caches of `slots` slots. A ring buffer may wrap around, so it has no slice.
fn write(g: &mut Graph<'_>, ports: &mut Ports, slots: u64, request: &FunctionRequest) -> Write {
    if g.form.state == StateForm::Host {
        return Write::Append;
    }
    let ring = slots < request.context;
    match (g.form.kv_write, request.tokens) {
        (KvWrite::Slice, TokenCount::Fixed(_)) if !ring => {
            let mut place = |g: &mut Graph<'_>, name: &str, role: PortRole| {
                ports.input_of(g, name, role, DataType::Int32, vec![Dim::Fixed(4)])
            };
            let begin = place(g, "cache_begin", PortRole::SliceBegin);
            Write::Slice { begin, end: place(g, "cache_end", PortRole::SliceEnd) }
        }
        _ => {
            let name = if ring { "kv_write_mask_local" } else { "kv_write_mask" };
            let shape = vec![Dim::Fixed(1), Dim::Fixed(1), Dim::Fixed(slots), g.tokens.clone()];
            let mask = ports.input(g, name, PortRole::KvWriteMask, shape);
            Write::from_mask(g, mask)
        }
    }
}
