//! Layers of a model as the search sees them, and their division as a shortest path. With `shards.divide` each part of
//! a layer is a package, and there is nothing to choose.
//!
//! A division is a path from layer 0 to the last whose steps are packages. The length of a step is the time of its
//! calls. It isn't the sum over its layers (a call has a fixed cost, and the slowest of bandwidth, palettes and compute
//! counts), but depends on nothing else. So the optimum is found exactly.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use rayon::prelude::*;

use super::LENGTHS;
use crate::chips::{ChipTable, ChipTarget};
use crate::predict::{reading, text};
use crate::speed::points::SpeedPoints;
use crate::speed::{CallWork, ChipRates, SpeedModel};
use anec_base::Result;
use anec_bundle::{Stage, TokenCount};
use anec_convert::{WeightUse, Workload, plan};
use anec_family::{FamilyModel, FunctionRequest};
use anec_manifest::{Manifest, Quant};

/// Tokens of a call, most tokens of any call, context.
type Shape = (u64, u64, u64);

/// Weights and operations of a model's layers and head.
pub struct LayerTable<'a> {
    model: &'a dyn FamilyModel,
    manifest: Manifest,
    rates: Vec<ChipRates>,
    /// Layers in order, or the two parts of each.
    layers: Vec<LayerWork>,
    /// Weights of the whole head.
    head: Vec<WeightUse>,
    /// Multiply-accumulates of the head, by tokens of a call.
    head_macs: BTreeMap<u64, u64>,
    largest: u64,
}

/// Layer, or one of its parts.
struct LayerWork {
    stage: Stage,
    weights: Vec<WeightUse>,
    /// Multiply-accumulates and attention scores.
    work: BTreeMap<Shape, [u64; 2]>,
}

/// Best division for some lengths and contexts.
#[derive(Clone, Debug, PartialEq)]
pub struct Division {
    /// Layers of each package; `None` with `shards.divide`.
    pub ranges: Option<Vec<Range<usize>>>,
    /// Milliseconds per token of a text, as the mean over chips.
    pub milliseconds: f64,
}

/// Kind of call, and how many of them a token of a text takes.
struct Mode {
    shape: Shape,
    often: f64,
    head: bool,
}

impl<'a> LayerTable<'a> {
    /// Builds the table of a model.
    ///
    /// # Errors
    /// If too little is published about a chip, or a layer can't be built.
    pub fn of(
        manifest: &Manifest,
        model: &'a dyn FamilyModel,
        ladders: &[Vec<u64>],
        targets: &[ChipTarget<'_>],
    ) -> Result<LayerTable<'a>> {
        let chips = ChipTable::built_in();
        let rates = targets.iter().map(|target| ChipRates::of(target.chip, chips, SpeedModel::built_in()));
        let rates = rates.collect::<Result<Vec<_>, _>>()?;
        let largest = manifest.context.all().last().copied().unwrap_or(1);
        let mut contexts: Vec<u64> = ladders.iter().flatten().copied().collect();
        contexts.sort_unstable();
        contexts.dedup();
        let form = plan::form(manifest);
        let workload = |stage: Stage, (tokens, most_tokens, context): Shape| {
            let request = FunctionRequest {
                name: "main".into(),
                stage,
                tokens: TokenCount::Fixed(tokens),
                default_tokens: tokens,
                context,
                most_tokens,
                head: manifest.lm_head.outputs(),
            };
            Workload::of(model, &form, &manifest.quant, &request)
        };
        let mut shapes: Vec<Shape> = Vec::new();
        for lengths in LENGTHS.into_iter().filter(|lengths| is_possible(model, lengths)) {
            let most = lengths.iter().copied().max().unwrap_or(1);
            for context in contexts.iter().filter(|context| **context >= most) {
                shapes.extend(lengths.iter().map(|tokens| (*tokens, most, *context)));
            }
        }
        shapes.sort_unstable();
        shapes.dedup();
        let parts = |layer: usize| {
            let whole = Stage::Layers { first: layer, end: layer + 1 };
            let rest = form.omits_feed_forward(model.experts(layer).is_some());
            [Some(whole), rest.then_some(Stage::FeedForward { layer })].into_iter().flatten()
        };
        let stages: Vec<Stage> = (0..model.facts().num_layers).flat_map(parts).collect();
        let weights = stages
            .par_iter()
            .map(|stage| Ok(workload(stage.clone(), (1, 1, largest))?.weights))
            .collect::<Result<Vec<_>>>()?;
        // layers with weights and states of the same sizes take the same time
        let mut kinds: HashMap<(Vec<WeightUse>, Vec<u64>), usize> = HashMap::new();
        let kind_of: Vec<usize> = weights
            .iter()
            .enumerate()
            .map(|(part, weights)| {
                let carried = contexts.iter().map(|context| state_bytes(model, &stages[part], *context, 1)).collect();
                *kinds.entry((weights.clone(), carried)).or_insert(part)
            })
            .collect();
        let mut distinct: Vec<usize> = kinds.values().copied().collect();
        distinct.sort_unstable();
        let work = distinct
            .par_iter()
            .map(|part| {
                let of = |shape: &Shape| {
                    let workload = workload(stages[*part].clone(), *shape)?;
                    Ok((*shape, [workload.macs(shape.0), workload.scores(shape.0)]))
                };
                Ok((*part, shapes.iter().map(of).collect::<Result<BTreeMap<_, _>>>()?))
            })
            .collect::<Result<HashMap<_, _>>>()?;
        let layers = stages.into_iter().zip(weights).zip(&kind_of);
        let layers = layers.map(|((stage, weights), kind)| LayerWork { stage, weights, work: work[kind].clone() });
        let layers = layers.collect();
        let all_rows = Stage::Head { first: 0, end: model.facts().head_rows() };
        let mut tokens: Vec<u64> = shapes.iter().map(|shape| shape.0).collect();
        tokens.dedup();
        let heads = tokens.iter().map(|tokens| Ok((*tokens, workload(all_rows.clone(), (*tokens, *tokens, largest))?)));
        let heads = heads.collect::<Result<Vec<(u64, Workload)>>>()?;
        let head = heads.first().map(|(_, workload)| workload.weights.clone()).unwrap_or_default();
        let head_macs = heads.iter().map(|(tokens, workload)| (*tokens, workload.macs(*tokens))).collect();
        Ok(LayerTable { model, manifest: manifest.clone(), rates, layers, head, head_macs, largest })
    }

    /// Manifest of the layers.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether each layer fits into a package.
    pub fn fits(&self, quant: &Quant, max_mb: f64) -> bool {
        let bytes = |layer: &LayerWork| layer.weights.iter().map(|weight| weight.file_bytes(quant)).sum::<u64>();
        self.layers.iter().all(|layer| bytes(layer) as f64 <= max_mb * 1e6)
    }

    /// Largest context in tokens.
    pub fn largest(&self) -> u64 {
        self.largest
    }

    /// Sets of call sizes that the model supports.
    pub fn lengths(&self) -> impl Iterator<Item = &'static [u64]> {
        LENGTHS
            .into_iter()
            .filter(|lengths| is_possible(self.model, lengths) && lengths[lengths.len() - 1] <= self.largest)
    }

    /// Fewest pieces of the head within the limits of a package and of the channel axis.
    pub fn head_pieces(&self, quant: &Quant, targets: &[ChipTarget<'_>], max_mb: f64) -> Option<u64> {
        let rows = self.model.facts().head_rows();
        let channels = targets.iter().filter_map(|target| target.chip.most_channels.as_ref().map(|fact| fact.value));
        let most = channels.min().unwrap_or(u64::MAX);
        let piece = |pieces: u64| rows.div_ceil(pieces).next_multiple_of(64).min(rows);
        let bytes = |of: u64| -> u64 {
            let part = |weight: &WeightUse| match weight.rows == rows {
                true => WeightUse { rows: of, ..*weight },
                false => *weight,
            };
            self.head.iter().map(|weight| part(weight).file_bytes(quant)).sum()
        };
        (1..=rows.div_ceil(64)).find(|pieces| piece(*pieces) <= most && bytes(piece(*pieces)) as f64 <= max_mb * 1e6)
    }

    /// Memory in bytes with all functions loaded: one for each number of tokens and, except for the head, each context.
    pub fn loaded_bytes(&self, quant: &Quant, targets: &[ChipTarget<'_>], lengths: usize, contexts: usize) -> f64 {
        let factor = SpeedPoints::built_in().loaded.factor;
        let of = |target: &ChipTarget<'_>| {
            let bytes = |weight: &WeightUse| reading(weight, quant, target).0;
            let layers: f64 = self.layers.iter().flat_map(|layer| &layer.weights).map(bytes).sum();
            (layers * contexts as f64 + self.head.iter().map(bytes).sum::<f64>()) * lengths as f64
        };
        targets.iter().map(of).fold(0.0, f64::max) * factor
    }

    /// Seconds of the first load of all functions, least and most.
    pub fn first_load_seconds(&self, quant: &Quant, lengths: usize, contexts: usize) -> [f64; 2] {
        let bytes = |weight: &WeightUse| weight.file_bytes(quant) as f64;
        let layers: f64 = self.layers.iter().flat_map(|layer| &layer.weights).map(bytes).sum();
        let stored = (layers * contexts as f64 + self.head.iter().map(bytes).sum::<f64>()) * lengths as f64;
        SpeedPoints::built_in().first_load.seconds_per_gb.map(|seconds| seconds * stored / 1e9)
    }

    /// Fastest division; `None` if a layer is larger than a package may be.
    pub fn divide(
        &self,
        quant: &Quant,
        lengths: &[u64],
        contexts: &[u64],
        targets: &[ChipTarget<'_>],
        max_mb: f64,
    ) -> Option<Division> {
        let count = self.layers.len();
        let divided = !self.manifest.shards.divide.is_none();
        let modes = self.modes(lengths, contexts);
        let most = lengths[lengths.len() - 1];
        let sums = |of: &dyn Fn(usize) -> f64| -> Vec<f64> {
            let mut sum = 0.0;
            let mut sums = vec![0.0];
            sums.extend((0..count).map(|layer| {
                sum += of(layer);
                sum
            }));
            sums
        };
        let sizes =
            sums(&|layer| self.layers[layer].weights.iter().map(|weight| weight.file_bytes(quant)).sum::<u64>() as f64);
        let read: Vec<[Vec<f64>; 2]> = targets
            .iter()
            .map(|target| {
                let part =
                    |layer: usize| self.layers[layer].weights.iter().map(|weight| reading(weight, quant, target));
                [
                    sums(&|layer| part(layer).map(|(bytes, _)| bytes).sum()),
                    sums(&|layer| part(layer).map(|(_, palette)| palette).sum()),
                ]
            })
            .collect();
        let of_modes: Vec<[Vec<f64>; 3]> = modes
            .iter()
            .map(|mode| {
                let states = |part: usize| state_bytes(self.model, &self.layers[part].stage, mode.shape.2, most) as f64;
                let [macs, scores] =
                    [0, 1].map(|kind| sums(&|layer| self.layers[layer].work[&mode.shape][kind] as f64));
                [sums(&states), macs, scores]
            })
            .collect();
        let between = |sums: &[f64], first: usize, end: usize| sums[end] - sums[first];
        let step = |first: usize, end: usize| -> f64 {
            let mut milliseconds = 0.0;
            for (rates, [bytes, palettes]) in self.rates.iter().zip(&read) {
                for (mode, [states, macs, scores]) in modes.iter().zip(&of_modes) {
                    let work = CallWork {
                        weight_bytes: between(bytes, first, end),
                        palette_weights: between(palettes, first, end),
                        state_bytes: between(states, first, end),
                        macs: between(macs, first, end),
                        scores: between(scores, first, end),
                        ..CallWork::default()
                    }
                    .written(self.manifest.kv_write());
                    milliseconds += mode.often * rates.call(&work).milliseconds;
                }
            }
            milliseconds / self.rates.len() as f64
        };
        // least time from layer 0 to each layer, and the start of its last step
        let mut least = vec![(f64::INFINITY, 0); count + 1];
        least[0].0 = 0.0;
        for end in 1..=count {
            for first in (0..end).rev() {
                if between(&sizes, first, end) > max_mb * 1e6 || divided && end - first > 1 {
                    break;
                }
                let time = least[first].0 + step(first, end);
                if time < least[end].0 {
                    least[end] = (time, first);
                }
            }
        }
        if !least[count].0.is_finite() {
            return None;
        }
        let mut ranges = Vec::new();
        let mut end = count;
        while end > 0 {
            ranges.push(least[end].1..end);
            end = least[end].1;
        }
        ranges.reverse();
        let ranges = (!divided).then_some(ranges);
        Some(Division { ranges, milliseconds: least[count].0 + self.head_time(quant, targets, &modes) })
    }

    /// Time per token of the head.
    fn head_time(&self, quant: &Quant, targets: &[ChipTarget<'_>], modes: &[Mode]) -> f64 {
        let time = |(rates, target): (&ChipRates, &ChipTarget<'_>)| -> f64 {
            let mut work = CallWork { head: true, ..CallWork::default() };
            for weight in &self.head {
                let (bytes, palette) = reading(weight, quant, target);
                work.weight_bytes += bytes;
                work.palette_weights += palette;
            }
            let heads = modes.iter().filter(|mode| mode.head);
            heads
                .map(|mode| {
                    let macs = self.head_macs[&mode.shape.0] as f64;
                    mode.often * rates.call(&CallWork { macs, ..work }).milliseconds
                })
                .sum()
        };
        self.rates.iter().zip(targets).map(time).sum::<f64>() / self.rates.len() as f64
    }

    /// Kinds of calls of a text, with the number per token.
    fn modes(&self, lengths: &[u64], contexts: &[u64]) -> Vec<Mode> {
        let largest = contexts[contexts.len() - 1];
        let [read, written] = text(largest);
        let (fewest, most) = (lengths[0], lengths[lengths.len() - 1]);
        let mut modes = Vec::new();
        let mut before = 0;
        for context in contexts {
            // positions for which this is the smallest context
            let within = |range: Range<u64>| range.end.min(*context).saturating_sub(range.start.max(before)) as f64;
            let all = (read + written) as f64;
            let (reading, writing) = (within(0..read), within(read..read + written));
            modes.push(Mode { shape: (most, most, *context), often: reading / most as f64 / all, head: false });
            modes.push(Mode { shape: (fewest, most, *context), often: writing / all, head: true });
            before = *context;
        }
        modes.retain(|mode| mode.often > 0.0);
        modes
    }
}

/// Bytes of the states of a layer, or of its token mixer.
fn state_bytes(model: &dyn FamilyModel, stage: &Stage, context: u64, most_tokens: u64) -> u64 {
    match stage {
        Stage::Layers { first, .. } => model.layer_state_bytes(*first, context, most_tokens),
        Stage::FeedForward { .. } | Stage::Experts { .. } | Stage::Head { .. } | Stage::Model { .. } => 0,
    }
}

/// Whether a model supports these numbers of tokens.
fn is_possible(model: &dyn FamilyModel, lengths: &[u64]) -> bool {
    !model.facts().recurrent || lengths[0] == 1
}
