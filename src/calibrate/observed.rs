//! Observed values: values of a function that are inputs of weights.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anec_base::Result;
use anec_convert::plan::ConvertPlan;
use anec_family::{EmitWeight, FamilyModel, FunctionGraph, FunctionRequest, LoweringOptions};
use anec_manifest::{Manifest, NumberFormat, Overflow, Role, WeightFormat};
use anec_mil::{Binding, Constant, DataType, Function, FunctionBuilder, Op, TensorType, ValueId};
use anec_quant::Fp16;
use anec_source::SourceWeight;

use super::moments::SecondMoments;

/// Number of input channels from which on moments would take gigabytes and aren't kept.
const WIDEST: usize = 16384;

/// Weight whose codes are to be chosen.
pub struct QuantTarget {
    /// Key of the elements.
    pub key: String,
    /// Number of output channels.
    pub channels: u64,
    /// Weight, `[output channels, input channels]`.
    pub weight: SourceWeight,
    /// Role in the model.
    pub role: Role,
    /// Number format.
    pub format: NumberFormat,
}

/// Value and the weights that it is multiplied by.
pub struct ObservedInput<'a> {
    /// Name of the value.
    pub value: String,
    /// Number of channels; per expert if each has its own.
    pub channels: usize,
    /// Tokens that count.
    pub tokens: ObservedTokens,
    /// Weights.
    pub targets: Vec<&'a QuantTarget>,
}

/// Tokens of a value that count for its weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObservedTokens {
    /// All tokens for all weights.
    All,
    /// The value enters experts: for the rows of each expert, the tokens routed to it count, as the value `inside`
    /// shows.
    Before {
        /// Number of experts.
        experts: usize,
        /// Name of the value that leaves the experts.
        inside: String,
    },
    /// The value leaves experts, weighted by routing: for the columns of each expert, its own channels count, which are
    /// zero for tokens that aren't routed to it.
    Inside {
        /// Number of experts.
        experts: usize,
    },
}

impl ObservedInput<'_> {
    /// Number of experts that are calibrated by tokens of their own; 1 if all weights see all tokens.
    pub fn parts(&self) -> usize {
        match self.tokens {
            ObservedTokens::All => 1,
            ObservedTokens::Before { experts, .. } | ObservedTokens::Inside { experts } => experts,
        }
    }

    /// Returns the second moment of each input channel of the weights, from the moments of the parts.
    pub fn of_channels(&self, parts: &[SecondMoments]) -> Vec<f32> {
        let diagonals = parts.iter().map(|moments| moments.sums().diag().to_vec());
        match self.tokens {
            ObservedTokens::Inside { .. } => diagonals.flatten().collect(),
            ObservedTokens::All | ObservedTokens::Before { .. } => diagonals
                .reduce(|mut sum, own| {
                    sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
                    sum
                })
                .unwrap_or_default(),
        }
    }

    /// Returns the approximate number of multiplications for moments, factors and codes.
    pub fn cost(&self, tokens: u64) -> f64 {
        let n = self.channels as f64;
        let rows: f64 = self.targets.iter().map(|target| target.channels as f64).sum();
        let rows = if matches!(self.tokens, ObservedTokens::Before { .. }) { rows / self.parts() as f64 } else { rows };
        self.parts() as f64 * n * n * (tokens as f64 + rows + n)
    }
}

/// Weight of a function and the value that holds it.
pub struct EmittedWeight {
    value: ValueId,
    /// Role in the model.
    pub role: Role,
    /// Index of the layer; `None` in the head.
    pub layer: Option<usize>,
    /// Weight.
    pub weight: SourceWeight,
    /// Number of output channels.
    pub channels: u64,
}

/// Emits weights unchanged and records the value of each.
#[derive(Default)]
struct Recorder {
    layer: Option<usize>,
    weights: Vec<EmittedWeight>,
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
        self.weights.push(EmittedWeight { value, role, layer: self.layer, weight: weight.clone(), channels });
        Ok(value)
    }
}

/// Builds a function and returns the weights in it.
///
/// # Errors
/// Returns an error if the function can't be built.
pub fn built(
    model: &dyn FamilyModel,
    form: &LoweringOptions,
    request: &FunctionRequest,
) -> Result<(FunctionGraph, Vec<EmittedWeight>)> {
    let mut recorder = Recorder::default();
    let graph = model.build(form, request, &mut recorder)?;
    Ok((graph, recorder.weights))
}

/// Returns the weights that a manifest quantizes, each once.
///
/// # Errors
/// Returns an error if a function can't be built.
pub fn targets(manifest: &Manifest, model: &dyn FamilyModel) -> Result<Vec<QuantTarget>> {
    let plan = ConvertPlan::new(manifest, model)?;
    let mut targets = BTreeMap::new();
    for package in &plan.packages {
        // all functions of a package have the same weights
        let (_, weights) = built(model, &plan.form, &package.functions[0])?;
        for EmittedWeight { role, layer, weight, channels, .. } in weights {
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

/// Returns the inputs of 1x1 convolutions with weights whose codes are to be chosen. The head may be divided
/// differently in `function` than in the conversion, but has the same input. `experts` is the number of experts of the
/// function's layer.
pub fn inputs<'a>(
    function: &Function,
    weights: &[EmittedWeight],
    head: bool,
    experts: Option<usize>,
    targets: &'a [QuantTarget],
) -> Vec<ObservedInput<'a>> {
    let mut observed: BTreeMap<ValueId, Vec<&'a QuantTarget>> = BTreeMap::new();
    for op in function.ops() {
        let Some((input, weight)) = projection(op) else { continue };
        let Some(weight) = weights.iter().find(|known| known.value == weight) else { continue };
        let own = observed.entry(input).or_default();
        let key = weight.weight.key();
        own.extend(targets.iter().filter(|target| match head {
            true => target.role == Role::LmHead,
            false => target.key == key && target.channels == weight.channels,
        }));
    }
    let name = |input: ValueId| function.value(input).name.clone();
    let all = observed.into_iter().filter_map(|(input, targets)| {
        let channels = targets.first()?.weight.columns() as usize;
        let same = targets.iter().all(|target| target.weight.columns() as usize == channels);
        same.then(|| ObservedInput { value: name(input), channels, tokens: ObservedTokens::All, targets })
    });
    let mut all: Vec<ObservedInput<'a>> = all.collect();
    if let Some(experts) = experts {
        by_expert(&mut all, experts);
    }
    all.retain(|input| input.channels < WIDEST);
    all
}

/// Divides the values that enter and leave experts by expert.
fn by_expert(observed: &mut Vec<ObservedInput<'_>>, experts: usize) {
    let expert = |input: &ObservedInput<'_>| input.targets.iter().all(|target| target.role == Role::Expert);
    // values that leave experts have as many channels as the weights before them have rows
    let rows: Vec<u64> =
        observed.iter().filter(|input| expert(input)).flat_map(|input| &input.targets).map(|t| t.channels).collect();
    let leaves =
        |input: &ObservedInput<'_>| rows.contains(&(input.channels as u64)) && input.channels.is_multiple_of(experts);
    let inside =
        observed.iter().find(|input| expert(input) && leaves(input)).map(|input| (input.value.clone(), input.channels));
    observed.retain_mut(|input| {
        if !expert(input) {
            return true;
        }
        let Some((value, channels)) = &inside else { return false };
        if input.value == *value {
            (input.channels, input.tokens) = (channels / experts, ObservedTokens::Inside { experts });
            return true;
        }
        input.tokens = ObservedTokens::Before { experts, inside: value.clone() };
        input.targets.iter().all(|target| target.channels == *channels as u64)
    });
}

/// Returns the input and the weight of a convolution without groups.
fn projection(op: &Op) -> Option<(ValueId, ValueId)> {
    let value = |name: &str| match op.inputs.get(name)?.as_slice() {
        [Binding::Value(id)] => Some(*id),
        _ => None,
    };
    (op.operator == "conv").then(|| Some((value("x")?, value("weight")?))).flatten()
}

/// Returns the part of a function that computes one of its values, as its only output.
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
