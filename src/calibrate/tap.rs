//! Which value of a function is the input of which weights.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anec_base::Result;
use anec_convert::ConvertPlan;
use anec_family::{EmitWeight, FamilyModel, FunctionGraph, FunctionRequest, LoweringOptions};
use anec_manifest::{Manifest, NumberFormat, Overflow, Role, WeightFormat};
use anec_mil::{Binding, Constant, DataType, Function, FunctionBuilder, Op, TensorType, ValueId};
use anec_quant::Fp16;
use anec_source::SourceWeight;

use super::moments::SecondMoments;

/// Input channels from which on moments aren't kept: they would take gigabytes.
const WIDEST: usize = 16384;

/// A weight whose codes are to be chosen.
pub struct QuantTarget {
    /// The key of its elements.
    pub key: String,
    /// Output channels.
    pub channels: u64,
    /// `[output channels, input channels]`.
    pub weight: SourceWeight,
    /// What it does.
    pub role: Role,
    /// How it is held.
    pub format: NumberFormat,
}

/// A value that weights take, and these weights.
pub struct Tap<'a> {
    /// Its name.
    pub value: String,
    /// Its channels; those of one expert, if each has its own.
    pub channels: usize,
    /// Whose tokens count.
    pub tokens: TapTokens,
    /// The weights.
    pub targets: Vec<&'a QuantTarget>,
}

/// Which tokens of a value count for which weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TapTokens {
    /// All for all.
    All,
    /// The value goes into experts: for the rows of each expert, those tokens count that it has a share in. `inside` is
    /// the value that tells.
    Before {
        /// Experts.
        experts: usize,
        /// Name of what leaves them.
        inside: String,
    },
    /// The value leaves experts, weighted by their shares: for the columns of each expert, its own channels count, which
    /// are zero where it has no share.
    Inside {
        /// Experts.
        experts: usize,
    },
}

impl Tap<'_> {
    /// Experts that are calibrated by tokens of their own; 1 where all weights see all tokens.
    pub fn parts(&self) -> usize {
        match self.tokens {
            TapTokens::All => 1,
            TapTokens::Before { experts, .. } | TapTokens::Inside { experts } => experts,
        }
    }

    /// The second moment of each input channel of the weights, from the moments of the parts.
    pub fn of_channels(&self, parts: &[SecondMoments]) -> Vec<f32> {
        let diagonals = parts.iter().map(|moments| moments.sums().diag().to_vec());
        match self.tokens {
            TapTokens::Inside { .. } => diagonals.flatten().collect(),
            TapTokens::All | TapTokens::Before { .. } => diagonals
                .reduce(|mut sum, own| {
                    sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
                    sum
                })
                .unwrap_or_default(),
        }
    }

    /// Multiplications that its moments, their factors and its codes take, about.
    pub fn cost(&self, tokens: u64) -> f64 {
        let n = self.channels as f64;
        let rows: f64 = self.targets.iter().map(|target| target.channels as f64).sum();
        let rows = if matches!(self.tokens, TapTokens::Before { .. }) { rows / self.parts() as f64 } else { rows };
        self.parts() as f64 * n * n * (tokens as f64 + rows + n)
    }
}

/// A weight in a function: its value there, and what it is.
pub struct TappedWeight {
    value: ValueId,
    /// What it does.
    pub role: Role,
    /// Its layer; none in the head.
    pub layer: Option<usize>,
    /// The weight.
    pub weight: SourceWeight,
    /// Output channels.
    pub channels: u64,
}

/// Emits weights as they are and remembers which value each is.
#[derive(Default)]
struct Recorder {
    layer: Option<usize>,
    weights: Vec<TappedWeight>,
}

impl EmitWeight for Recorder {
    fn of_layer(&mut self, layer: Option<usize>) {
        self.layer = layer;
    }

    fn emit(
        &mut self,
        builder: &mut FunctionBuilder,
        name: &str,
        role: Role,
        weight: &SourceWeight,
        shape: &[u64],
    ) -> Result<ValueId> {
        let ty = TensorType::new(DataType::Fp16, shape.iter().copied());
        let halves = Fp16::new(weight.clone(), Overflow::Saturate);
        let value = builder.constant(name, Constant::content(ty, Arc::new(halves)));
        let channels = shape.first().copied().unwrap_or(1);
        self.weights.push(TappedWeight { value, role, layer: self.layer, weight: weight.clone(), channels });
        Ok(value)
    }
}

/// A function and the weights in it.
///
/// # Errors
/// When it can't be built.
pub fn built(
    model: &dyn FamilyModel,
    form: &LoweringOptions,
    request: &FunctionRequest,
) -> Result<(FunctionGraph, Vec<TappedWeight>)> {
    let mut recorder = Recorder::default();
    let graph = model.build(form, request, &mut recorder)?;
    Ok((graph, recorder.weights))
}

/// The weights that a manifest quantizes, each once.
///
/// # Errors
/// When its functions can't be built.
pub fn targets(manifest: &Manifest, model: &dyn FamilyModel) -> Result<Vec<QuantTarget>> {
    let plan = ConvertPlan::new(manifest, model)?;
    let mut targets = BTreeMap::new();
    for package in &plan.packages {
        // the functions of a package have the same weights
        let (_, weights) = built(model, &plan.form, &package.functions[0])?;
        for TappedWeight { role, layer, weight, channels, .. } in weights {
            let format = manifest.quant.of(role, layer);
            if format.weights == WeightFormat::None {
                continue;
            }
            let key = weight.key();
            let weight = weight.reshape(&[channels, weight.elements() / channels.max(1)])?;
            let target = QuantTarget { key: key.clone(), channels, weight, role, format };
            targets.insert((key, channels), target);
        }
    }
    Ok(targets.into_values().collect())
}

/// The inputs of 1x1 convolutions with weights that are to be chosen. The rows of the head may be divided otherwise in
/// `function` than in what is converted, but have the same input. `experts` is the number of experts of the function's
/// layer.
pub fn taps<'a>(
    function: &Function,
    weights: &[TappedWeight],
    head: bool,
    experts: Option<usize>,
    targets: &'a [QuantTarget],
) -> Vec<Tap<'a>> {
    let mut taps: BTreeMap<ValueId, Vec<&'a QuantTarget>> = BTreeMap::new();
    for op in function.ops() {
        let Some((input, weight)) = projection(op) else { continue };
        let Some(weight) = weights.iter().find(|known| known.value == weight) else { continue };
        let own = taps.entry(input).or_default();
        let key = weight.weight.key();
        own.extend(targets.iter().filter(|target| match head {
            true => target.role == Role::LmHead,
            false => target.key == key && target.channels == weight.channels,
        }));
    }
    let name = |input: ValueId| function.value(input).name.clone();
    let all = taps.into_iter().filter_map(|(input, targets)| {
        let channels = targets.first()?.weight.columns() as usize;
        let same = targets.iter().all(|target| target.weight.columns() as usize == channels);
        same.then(|| Tap { value: name(input), channels, tokens: TapTokens::All, targets })
    });
    let mut all: Vec<Tap<'a>> = all.collect();
    if let Some(experts) = experts {
        by_expert(&mut all, experts);
    }
    all.retain(|tap| tap.channels < WIDEST);
    all
}

/// Divides what goes into experts and what leaves them by experts.
fn by_expert(taps: &mut Vec<Tap<'_>>, experts: usize) {
    let expert = |tap: &Tap<'_>| tap.targets.iter().all(|target| target.role == Role::Expert);
    // what leaves the experts has as many channels as the weights before it give
    let rows: Vec<u64> =
        taps.iter().filter(|tap| expert(tap)).flat_map(|tap| &tap.targets).map(|t| t.channels).collect();
    let leaves = |tap: &Tap<'_>| rows.contains(&(tap.channels as u64)) && tap.channels.is_multiple_of(experts);
    let inside = taps.iter().find(|tap| expert(tap) && leaves(tap)).map(|tap| (tap.value.clone(), tap.channels));
    taps.retain_mut(|tap| {
        if !expert(tap) {
            return true;
        }
        let Some((value, channels)) = &inside else { return false };
        if tap.value == *value {
            (tap.channels, tap.tokens) = (channels / experts, TapTokens::Inside { experts });
            return true;
        }
        tap.tokens = TapTokens::Before { experts, inside: value.clone() };
        tap.targets.iter().all(|target| target.channels == *channels as u64)
    });
}

/// The input and the weight of a convolution without groups.
fn projection(op: &Op) -> Option<(ValueId, ValueId)> {
    let value = |name: &str| match op.inputs.get(name)?.as_slice() {
        [Binding::Value(id)] => Some(*id),
        _ => None,
    };
    (op.operator == "conv").then(|| Some((value("x")?, value("weight")?))).flatten()
}

/// The part of a function that computes one of its values, which it gives instead of its own outputs.
pub fn up_to(function: &Function, value: &str) -> Function {
    let mut part = function.clone();
    let target = (0..part.values.len() as u32).map(ValueId).find(|id| part.value(*id).name == value);
    part.block.outputs = target.into_iter().collect();
    let mut needed: BTreeSet<ValueId> = part.block.outputs.iter().copied().collect();
    let mut ops = std::mem::take(&mut part.block.ops);
    ops.reverse();
    ops.retain(|op| {
        let wanted = op.outputs.iter().any(|output| needed.contains(output));
        if wanted {
            needed.extend(op.operands());
        }
        wanted
    });
    ops.reverse();
    part.block.ops = ops;
    part
}
