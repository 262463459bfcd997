//! Puts weights into functions in the number format that the manifest gives their role, and keeps account of them.

use std::sync::Arc;

use indexmap::IndexMap;

use super::report::TensorReport;
use anec_base::{MappedFile, Result};
use anec_family::EmitWeight;
use anec_manifest::{Granularity, Quant, Role, WeightFormat};
use anec_mil::{Constant, Content, DataType, Function, FunctionBuilder, TensorType, ValueId};
use anec_quant::{ChosenCodes, Fp16, Int8, RoundingError};
use anec_source::SourceWeight;

/// Emits the weights of one package. The same weight in several functions is one content, which is stored once.
pub struct Emitter<'a> {
    quant: &'a Quant,
    chosen: Option<&'a dyn ChosenCodes>,
    emitted: IndexMap<WeightKey, Emitted>,
}

/// What makes two emitted weights the same: their elements and how they are held.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct WeightKey {
    weight: String,
    /// Output channels: the first dimension.
    pub(super) channels: u64,
    pub(super) format: (WeightFormat, Granularity),
}

impl WeightKey {
    pub(super) fn new(quant: &Quant, role: Role, weight: &SourceWeight, shape: &[u64]) -> Self {
        let channels = shape.first().copied().unwrap_or(1);
        WeightKey { weight: weight.key(), channels, format: quant.of(role) }
    }
}

/// The contents of an emitted weight.
pub(super) struct Stored {
    /// Elements.
    pub(super) data: Arc<dyn Content>,
    /// Scales and their number, where elements are integers.
    pub(super) scale: Option<(Arc<dyn Content>, u64)>,
}

struct Emitted {
    value: ValueId,
    name: Option<String>,
    role: Role,
    tensors: Vec<String>,
    shape: Vec<u64>,
    stored: Stored,
    measures: Arc<RoundingError>,
}

impl<'a> Emitter<'a> {
    /// An emitter for a new package.
    pub fn new(quant: &'a Quant) -> Self {
        Emitter { quant, chosen: None, emitted: IndexMap::new() }
    }

    /// With codes that were chosen before.
    pub fn chosen(self, chosen: Option<&'a dyn ChosenCodes>) -> Self {
        Emitter { chosen, ..self }
    }

    /// The codes that were chosen for a weight, if any were.
    fn codes(&self, weight: &SourceWeight, channels: u64) -> Result<Option<Arc<MappedFile>>> {
        self.chosen.map_or(Ok(None), |chosen| chosen.codes(&weight.key(), channels))
    }

    /// Takes the names of weights that this function, which was just built, is the first to use.
    pub fn name_after(&mut self, function: &Function) {
        for emitted in self.emitted.values_mut().filter(|e| e.name.is_none()) {
            emitted.name = Some(function.value(emitted.value).name.clone());
        }
    }

    /// What became of each weight; call it once the package is written.
    pub fn reports(&self) -> Vec<TensorReport> {
        let report = |(key, e): (&WeightKey, &Emitted)| {
            let scale_bytes = e.stored.scale.as_ref().map_or(0, |(_, count)| 2 * count);
            TensorReport {
                name: e.name.clone().unwrap_or_default(),
                tensors: e.tensors.clone(),
                role: e.role,
                shape: e.shape.clone(),
                weights: key.format.0,
                granularity: (key.format.0 != WeightFormat::None).then_some(key.format.1),
                bytes: e.stored.data.length() + scale_bytes,
                loss: e.measures.total(),
            }
        };
        self.emitted.iter().map(report).collect()
    }
}

impl EmitWeight for Emitter<'_> {
    fn emit(
        &mut self,
        builder: &mut FunctionBuilder,
        name: &str,
        role: Role,
        weight: &SourceWeight,
        shape: &[u64],
    ) -> Result<ValueId> {
        let key = WeightKey::new(self.quant, role, weight, shape);
        if let Some(known) = self.emitted.get(&key) {
            return Ok(add(builder, name, shape, &known.stored));
        }
        // rows are output channels
        let rows = weight.reshape(&[key.channels, weight.elements() / key.channels.max(1)])?;
        let (stored, measures) = match key.format {
            (WeightFormat::None, _) => {
                let halves = Fp16::new(weight.clone(), self.quant.overflow);
                let measures = halves.measures();
                (Stored { data: Arc::new(halves), scale: None }, measures)
            }
            (WeightFormat::Int8, granularity) => {
                let codes = self.codes(weight, key.channels)?;
                let int8 = Int8::chosen(rows, granularity, self.quant.overflow, codes);
                let scale = Some((int8.scale(), int8.scale_count()));
                (Stored { data: int8.data(), scale }, int8.measures())
            }
        };
        let value = add(builder, name, shape, &stored);
        let (shape, tensors) = (shape.to_vec(), weight.names());
        self.emitted.insert(key, Emitted { value, name: None, role, tensors, shape, stored, measures });
        Ok(value)
    }
}

/// Adds a weight's constants to a function.
pub(super) fn add(builder: &mut FunctionBuilder, name: &str, shape: &[u64], stored: &Stored) -> ValueId {
    let Stored { data, scale } = stored;
    let ty = |dtype, shape: &[u64]| TensorType::new(dtype, shape.iter().copied());
    match scale {
        None => builder.constant(name, Constant::content(ty(DataType::Fp16, shape), data.clone())),
        Some((scale, count)) => {
            let mut scale_shape = vec![1; shape.len()];
            if let Some(first) = scale_shape.first_mut() {
                *first = *count;
            }
            let data = Constant::content(ty(DataType::Int8, shape), data.clone());
            let scale = Constant::content(ty(DataType::Fp16, &scale_shape), scale.clone());
            builder.op("constexpr_blockwise_shift_scale", name, [("data", data), ("scale", scale)])
        }
    }
}
