//! Graphs of the contract, around the functions of the bundle.

use std::collections::BTreeMap;
use std::sync::Arc;

use anec_base::Result;
use anec_bundle::{FunctionEntry, Port, PortRole, StateRole};
use anec_manifest::{Granularity, NumberFormat, Overflow, WeightFormat};
use anec_mil::{Constant, DataType, Function, FunctionBuilder, OpInput, TensorType, ValueId};
use anec_quant::CodedWeight;
use anec_source::SourceWeight;

use super::EngineModel;
use super::contract::{CACHES, QUERIES, TABLE};
use crate::exported::gather;

/// Value of a mask for positions that a token doesn't attend to: the engine's own, which fp16 can hold.
const HIDDEN: f32 = -40000.0;

/// Values that the graph of a call computes once for all layers.
struct Call {
    /// Positions of the tokens, int32 `[Q]`.
    positions: ValueId,
    /// Numbers of the slots, int32 `[1, 1, 1, C]`.
    slots: ValueId,
    /// Mask of tokens of earlier calls without a window, `[1, 1, Q, C]`.
    past: ValueId,
    tokens: u64,
}

/// Keys or values of all layers.
struct Cache {
    state: ValueId,
    /// Contents before the call.
    before: ValueId,
    /// New columns of each layer, `[1, 1, channels, 1, Q]`.
    columns: Vec<ValueId>,
}

impl EngineModel<'_> {
    /// Builds the functions of the asset, one after another.
    pub(super) fn each_function(&self, mut add: impl FnMut(Function)) -> Result<()> {
        let table = self.exported.embedding()?;
        let format =
            NumberFormat { weights: WeightFormat::Int8, granularity: Granularity::PerTensor, ..NumberFormat::FP16 };
        let table = CodedWeight::new(SourceWeight::from(table), format, Overflow::default(), None);
        add(self.load_embeddings(&table)?);
        for tokens in QUERIES {
            add(self.gather_embeddings(tokens, &table)?);
        }
        for fills in [false, true] {
            for context in &self.bundle.model.contexts {
                for tokens in QUERIES {
                    add(self.call(*context, tokens, fills)?);
                }
            }
        }
        Ok(())
    }

    fn begin(&self, name: &str) -> FunctionBuilder {
        FunctionBuilder::new(name, self.exported.opset())
    }

    /// `load_embeddings`: the table of int8 codes.
    fn load_embeddings(&self, table: &Arc<CodedWeight>) -> Result<Function> {
        let mut ops = self.begin("load_embeddings");
        let ty = TensorType::new(DataType::Int8, self.dimensions.table());
        let codes = ops.constant("codes", Constant::content(ty, table.data()));
        ops.output(TABLE, codes);
        Ok(ops.finish()?)
    }

    /// `gather_embeddings_Q`: rows of the table times its scale.
    fn gather_embeddings(&self, tokens: u64, table: &Arc<CodedWeight>) -> Result<Function> {
        let mut ops = self.begin(&format!("gather_embeddings_{tokens}"));
        let ids = ops.input("in_new_token_ids", TensorType::new(DataType::Int32, [1, tokens]));
        let codes = ops.input(TABLE, TensorType::new(DataType::Int8, self.dimensions.table()));
        let rows = gather(&mut ops, codes, ids);
        let mut rows = ops.to_fp16(rows);
        if let Some(scale) = table.scale() {
            let scale = Constant::content(TensorType::new(DataType::Fp16, [1, 1, 1, 1]), scale);
            let scale = ops.constant("scale", scale);
            rows = ops.mul(rows, scale);
        }
        ops.output("gathered_embeddings", rows);
        Ok(ops.finish()?)
    }

    /// `extend_C_Q`, or `prompt_opt_C_Q`, which only fills the caches.
    fn call(&self, context: u64, tokens: u64, fills: bool) -> Result<Function> {
        let name = if fills { "prompt_opt" } else { "extend" };
        let mut ops = self.begin(&format!("{name}_{context}_{tokens}"));
        let fp16 = |shape: &[u64]| TensorType::new(DataType::Fp16, shape.iter().copied());
        let embedded = ops.input("transformer_input", fp16(&[1, tokens, 1, self.dimensions.hidden_size]));
        let positions = ops.input("position_ids", TensorType::new(DataType::Uint16, [1, tokens]));
        let step = ops.input("in_step", TensorType::new(DataType::Int32, [1]));
        let causal = ops.input("causal_mask", fp16(&[1, context, 1, tokens]));
        let mut caches = CACHES.map(|name| {
            let state = ops.state(name, fp16(&self.dimensions.cache(context)));
            Cache { state, before: state, columns: Vec::new() }
        });
        ops.input(TABLE, TensorType::new(DataType::Int8, self.dimensions.table()));
        for cache in &mut caches {
            cache.before = ops.read_state(cache.state);
        }

        let call = Call::of(&mut ops, positions, step, causal, [context, tokens]);
        let mut hidden = embedded;
        let layers: Vec<&FunctionEntry> = self.entries(Some(context), tokens).collect();
        for (index, entry) in layers.iter().enumerate() {
            if index == 0 {
                hidden = columns(&mut ops, embedded, &hidden_shape(entry, tokens));
            }
            // after the last layer's keys and values nothing is needed to fill the caches
            let wanted = |role: &PortRole| match role {
                PortRole::Hidden => !(fills && index + 1 == layers.len()),
                role => matches!(role, PortRole::CacheRows { .. }),
            };
            let outputs: Vec<&Port> = entry.outputs.iter().filter(|port| wanted(&port.role)).collect();
            let results = self.inlined(&mut ops, entry, &call, hidden, &caches, &outputs)?;
            for (port, result) in outputs.iter().zip(results) {
                match &port.role {
                    PortRole::CacheRows { holds, .. } => {
                        let columns = self.cache_columns(&mut ops, result, tokens);
                        caches[usize::from(!is_keys(holds))].columns.push(columns);
                    }
                    _ => hidden = result,
                }
            }
        }
        let firsts = caches.map(|cache| cache.write(&mut ops, step, tokens));
        let logits = match fills {
            true => {
                let [keys, values] = firsts.map(|written| first_element(&mut ops, written));
                ops.add(keys, values)
            }
            false => self.logits(&mut ops, &call, hidden)?,
        };
        ops.output("out_logits", logits);
        Ok(ops.finish()?)
    }

    /// Adds the ops of a function of the bundle; returns its outputs.
    fn inlined(
        &self,
        ops: &mut FunctionBuilder,
        entry: &FunctionEntry,
        call: &Call,
        hidden: ValueId,
        caches: &[Cache],
        outputs: &[&Port],
    ) -> Result<Vec<ValueId>> {
        let callee = self.exported.function(entry, call.tokens)?;
        let mut inputs = BTreeMap::new();
        for port in &entry.inputs {
            let value = match &port.role {
                PortRole::Hidden => hidden,
                PortRole::RopeCos { table } => self.exported.rotary(ops, table, call.positions, true)?,
                PortRole::RopeSin { table } => self.exported.rotary(ops, table, call.positions, false)?,
                PortRole::PastMask { window } => call.past_mask(ops, *window),
                PortRole::CallMask { window } => call.call_mask(ops, *window),
                PortRole::Cache { holds, .. } => match caches.get(usize::from(!is_keys(holds))) {
                    Some(cache) => self.cache_of_layer(ops, cache.before, holds),
                    None => continue,
                },
                // refused when the bundle was opened
                _ => continue,
            };
            inputs.insert(port.name.clone(), value);
        }
        let names: Vec<String> = outputs.iter().map(|port| port.name.clone()).collect();
        let stem = entry.package.trim_end_matches(".mlpackage");
        ops.enter(&super::name_of(stem));
        let results = ops.inline(&callee, &inputs, &names);
        ops.leave();
        Ok(results)
    }

    /// Logits `[1, 1, Q, vocab_size]` of hidden states.
    fn logits(&self, ops: &mut FunctionBuilder, call: &Call, hidden: ValueId) -> Result<ValueId> {
        let mut pieces = Vec::new();
        for entry in self.entries(None, call.tokens) {
            let outputs: Vec<_> = entry.outputs.iter().filter(|port| port.role == PortRole::Logits).collect();
            for piece in self.inlined(ops, entry, call, hidden, &[], &outputs)? {
                let is_last = ops.ty(piece).fixed_shape().is_some_and(|shape| shape[3] == call.tokens);
                pieces.push(ops.transpose(piece, if is_last { &[0, 2, 3, 1] } else { &[0, 3, 2, 1] }));
            }
        }
        Ok(if let [one] = pieces[..] { one } else { ops.concat(&pieces, 3) })
    }

    /// Slots of a layer, `[1, heads, C, head_dim]`.
    fn cache_of_layer(&self, ops: &mut FunctionBuilder, all: ValueId, holds: &StateRole) -> ValueId {
        let (StateRole::KeyCache { layer } | StateRole::ValueCache { layer }) = holds else { return all };
        let layer = *layer as u64;
        let own = if self.dimensions.layers == 1 { all } else { ops.slice(all, 0, layer..layer + 1) };
        let heads = ops.reshape(own, &[1, self.dimensions.heads as i32, self.dimensions.head_dim as i32, -1]);
        ops.transpose(heads, &[0, 1, 3, 2])
    }

    /// Keys or values of a call `[1, heads, Q, head_dim]` as columns of the cache.
    fn cache_columns(&self, ops: &mut FunctionBuilder, rows: ValueId, tokens: u64) -> ValueId {
        let columns = ops.transpose(rows, &[0, 1, 3, 2]);
        ops.reshape(columns, &[1, 1, self.dimensions.channels() as i32, 1, tokens as i32])
    }
}

impl Cache {
    /// Writes the columns of the call; returns the contents after it. One write for all layers: of several writes to
    /// one state, the GPU's compiler was reported to keep only one.
    fn write(self, ops: &mut FunctionBuilder, step: ValueId, tokens: u64) -> ValueId {
        let columns = if let [one] = self.columns[..] { one } else { ops.concat(&self.columns, 0) };
        let begin = place(ops, step);
        let end = ops.add(step, Constant::int32s(&[tokens as i32]));
        let end = place(ops, end);
        let after = ops.slice_update_along(self.before, columns, 4, begin, end);
        ops.write_state(self.state, after);
        after
    }
}

impl Call {
    fn of(
        ops: &mut FunctionBuilder,
        positions: ValueId,
        step: ValueId,
        causal: ValueId,
        [context, tokens]: [u64; 2],
    ) -> Call {
        let positions = ops.squeeze(positions, &[0]);
        let arguments: [(&str, OpInput); 2] = [("x", positions.into()), ("dtype", Constant::string("int32").into())];
        let positions = ops.op("cast", "positions", arguments);
        let numbers: Vec<i32> = (0..context as i32).collect();
        let slots = ops.constant("slots", Constant::int32s(&numbers));
        let slots = ops.expand_dims(slots, &[0, 1, 2]);
        // the call's own slots hold what earlier calls left there
        let unwritten: ValueId = ops.op("greater_equal", "unwritten", [("x", slots), ("y", step)]);
        let unwritten = hidden_where(ops, unwritten);
        let causal = ops.transpose(causal, &[0, 2, 3, 1]);
        let past = ops.minimum(causal, unwritten);
        Call { positions, slots, past, tokens }
    }

    /// Mask of tokens of earlier calls, `[1, 1, Q, C]`.
    fn past_mask(&self, ops: &mut FunctionBuilder, window: Option<u64>) -> ValueId {
        let Some(window) = window else { return self.past };
        let positions = ops.reshape(self.positions, &[1, 1, -1, 1]);
        let distance = ops.sub(positions, self.slots);
        let arguments: [(&str, OpInput); 2] = [("x", distance.into()), ("y", Constant::int32(window as i32).into())];
        let outside = ops.op("greater_equal", "outside", arguments);
        let outside = hidden_where(ops, outside);
        ops.minimum(self.past, outside)
    }

    /// Mask of tokens of the same call, `[1, 1, Q, Q]`.
    fn call_mask(&self, ops: &mut FunctionBuilder, window: Option<u64>) -> ValueId {
        let tokens = self.tokens;
        let is_seen = |query: u64, key: u64| key <= query && window.is_none_or(|window| query - key < window);
        let pairs = (0..tokens).flat_map(|query| (0..tokens).map(move |key| (query, key)));
        let values: Vec<f32> = pairs.map(|(query, key)| if is_seen(query, key) { 0.0 } else { HIDDEN }).collect();
        ops.constant("call_mask", Constant::fp16_tensor(&[1, 1, tokens, tokens], &values))
    }
}

fn is_keys(holds: &StateRole) -> bool {
    matches!(holds, StateRole::KeyCache { .. })
}

/// Shape of a function's hidden states.
fn hidden_shape(entry: &FunctionEntry, tokens: u64) -> Vec<u64> {
    let port = entry.inputs.iter().find(|port| port.role == PortRole::Hidden);
    port.map_or_else(Vec::new, |port| port.shape_at(tokens))
}

/// Transposes `[1, Q, 1, H]` to `[1, H, 1, Q]` or `[1, H, Q, 1]`.
fn columns(ops: &mut FunctionBuilder, rows: ValueId, shape: &[u64]) -> ValueId {
    ops.transpose(rows, if shape.last() == Some(&1) { &[0, 3, 1, 2] } else { &[0, 3, 2, 1] })
}

/// Additive mask: 0 for false.
fn hidden_where(ops: &mut FunctionBuilder, hidden: ValueId) -> ValueId {
    let ones = ops.to_fp16(hidden);
    ops.mul(ones, Constant::fp16(HIDDEN))
}

/// Index of a slot in a cache: `0, 0, 0, 0, slot`.
fn place(ops: &mut FunctionBuilder, slot: ValueId) -> ValueId {
    let before = ops.constant("before", Constant::int32s(&[0; 4]));
    ops.concat(&[before, slot], 0)
}

/// First element of a cache, a scalar.
fn first_element(ops: &mut FunctionBuilder, cache: ValueId) -> ValueId {
    let [zeros, ones] = [0, 1].map(|value| Constant::int32s(&[value; 5]));
    let arguments: [(&str, OpInput); 3] = [("x", cache.into()), ("begin", zeros.into()), ("end", ones.into())];
    let first = ops.op("slice_by_index", "first", arguments);
    ops.squeeze(first, &[0, 1, 2, 3, 4])
}
