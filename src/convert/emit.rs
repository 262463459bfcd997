//! Emission of weights into functions, in the number format of their role.

use std::sync::Arc;

use indexmap::IndexMap;

use super::report::TensorReport;
use anec_base::Result;
use anec_family::EmitWeight;
use anec_manifest::{Int8Op, NumberFormat, Quant, Role, WeightFormat};
use anec_mil::{Constant, Content, DataType, Function, FunctionBuilder, TensorType, ValueId};
use anec_quant::{
    ChosenCodes, CodedWeight, Fp16, Inputs, KeptIntegers, KeptWeight, ReadCodes, Rounding, RoundingError, WeightLayout,
};
use anec_source::SourceWeight;

/// Emitter for the weights of one package. A weight that several functions use is stored once.
pub struct Emitter<'a> {
    quant: &'a Quant,
    chosen: Option<&'a dyn ChosenCodes>,
    layer: Option<usize>,
    emitted: IndexMap<WeightKey, Emitted>,
}

/// Identity of an emitted weight: its elements and their storage.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct WeightKey {
    weight: String,
    /// Output channels: the first dimension.
    pub(super) channels: u64,
    pub(super) format: NumberFormat,
}

impl WeightKey {
    pub(super) fn new(quant: &Quant, role: Role, layer: Option<usize>, weight: &SourceWeight, channels: u64) -> Self {
        WeightKey { weight: weight.key(), channels, format: quant.of(role, layer) }
    }

    /// Returns the weight as a matrix whose rows are output channels.
    fn matrix(&self, weight: &SourceWeight) -> Result<SourceWeight> {
        Ok(weight.reshape(&[self.channels, weight.elements() / self.channels.max(1)])?)
    }

    /// Layout of the weight's constants.
    pub(super) fn layout(&self, weight: &SourceWeight) -> WeightLayout {
        let kept = self.matrix(weight).ok().and_then(|matrix| KeptIntegers::of(&matrix, self.format));
        kept.map_or_else(|| self.plain_layout(weight), |kept| kept.layout())
    }

    /// Layout of constants that aren't the source's integers.
    fn plain_layout(&self, weight: &SourceWeight) -> WeightLayout {
        WeightLayout::of(self.format, self.channels, weight.elements() / self.channels.max(1))
    }
}

/// Constants of an emitted weight.
pub(super) struct Stored {
    pub(super) layout: WeightLayout,
    pub(super) op: Int8Op,
    /// Elements: fp16 values, integers or indices.
    pub(super) data: Arc<dyn Content>,
    /// Scales of integers.
    pub(super) scale: Option<Arc<dyn Content>>,
    /// Offsets of integers.
    pub(super) offset: Option<Arc<dyn Content>>,
    /// Values of indices.
    pub(super) palette: Option<Arc<dyn Content>>,
    /// Factor of the product's rows.
    pub(super) row_scale: Option<Arc<dyn Content>>,
}

struct Emitted {
    /// `None` until a function uses the weight.
    value: Option<ValueId>,
    name: Option<String>,
    role: Role,
    tensors: Vec<String>,
    shape: Vec<u64>,
    stored: Stored,
    /// Whether the integers are the source's.
    kept: bool,
    measures: Arc<RoundingError>,
}

impl<'a> Emitter<'a> {
    /// Creates an emitter for a new package.
    pub fn new(quant: &'a Quant) -> Self {
        Emitter { quant, chosen: None, layer: None, emitted: IndexMap::new() }
    }

    /// Uses codes that a calibration chose.
    pub fn chosen(self, chosen: Option<&'a dyn ChosenCodes>) -> Self {
        Emitter { chosen, ..self }
    }

    /// Assigns names to the weights that the function just built is the first to use.
    pub fn name_after(&mut self, function: &Function) {
        for emitted in self.emitted.values_mut().filter(|e| e.name.is_none()) {
            emitted.name = emitted.value.map(|value| function.value(value).name.clone());
        }
    }

    /// Report of each weight. Complete once the package is written.
    pub fn reports(&self) -> Vec<TensorReport> {
        let report = |(key, e): (&WeightKey, &Emitted)| {
            let (layout, quantized) = (e.stored.layout, key.format.weights != WeightFormat::None);
            TensorReport {
                name: e.name.clone().unwrap_or_default(),
                tensors: e.tensors.clone(),
                role: e.role,
                shape: e.shape.clone(),
                weights: key.format.weights,
                granularity: quantized.then_some(layout.granularity),
                row_scale: layout.row_scales,
                kept: e.kept,
                bytes: layout.bytes(),
                bits_per_weight: 8.0 * layout.bytes() as f64 / (layout.rows * layout.columns).max(1) as f64,
                loss: e.measures.total(),
            }
        };
        self.emitted.iter().map(report).collect()
    }
}

impl Emitter<'_> {
    /// Returns the stored weight, creating it at the first use.
    fn stored(&mut self, key: WeightKey, role: Role, weight: &SourceWeight, shape: &[u64]) -> Result<&mut Emitted> {
        let overflow = self.quant.overflow;
        let new = match self.emitted.get_index_of(&key) {
            Some(known) => return Ok(&mut self.emitted[known]),
            None => self.emitted.entry(key),
        };
        let key = new.key();
        let file = self.chosen.map_or(Ok(None), |chosen| chosen.codes(&key.weight, key.channels))?;
        let kept = match &file {
            None => kept(key, weight)?,
            Some(_) => None,
        };
        let is_kept = kept.is_some();
        let (stored, measures) = if let Some(stored) = kept {
            stored
        } else if key.format.weights == WeightFormat::None {
            let halves = Fp16::new(weight.clone(), overflow);
            let measures = halves.measures();
            let (layout, op, data) = (key.plain_layout(weight), key.format.op, Arc::new(halves));
            (Stored { layout, op, data, scale: None, offset: None, palette: None, row_scale: None }, measures)
        } else {
            let (rows, layout) = (key.matrix(weight)?, key.plain_layout(weight));
            let codes = file.map(|file| ReadCodes::new(file, &key.weight, layout.rows, layout.columns)).transpose()?;
            let rounding = codes.map(|codes| Arc::new(codes) as Arc<dyn Rounding>);
            let scales = self.chosen.map_or(Ok(None), |chosen| chosen.scales(&key.weight, key.channels))?;
            let moments = self.chosen.and_then(|chosen| chosen.moments(&key.weight, key.channels));
            let inputs = match moments {
                Some(moments) => Inputs::Moments(moments),
                None if !rows.is_rotated() => Inputs::Unknown,
                None if matches!(role, Role::MlpUp | Role::Expert) => Inputs::UniformMultiplied,
                None => Inputs::Uniform,
            };
            let coded = match (rounding, scales) {
                (Some(codes), Some(scales)) => CodedWeight::with_scales(rows, key.format, overflow, codes, scales)?,
                (rounding, _) => CodedWeight::with_inputs(rows, key.format, overflow, rounding, inputs),
            };
            let (op, data, scale) = (key.format.op, coded.data(), coded.scale());
            let (palette, row_scale) = (coded.palette(), coded.row_scale());
            (Stored { layout, op, data, scale, offset: None, palette, row_scale }, coded.measures())
        };
        let (shape, tensors) = (shape.to_vec(), weight.names());
        Ok(new.or_insert(Emitted { value: None, name: None, role, tensors, shape, stored, kept: is_kept, measures }))
    }
}

/// Returns a weight with its source's integers, if its format can hold them.
fn kept(key: &WeightKey, weight: &SourceWeight) -> Result<Option<(Stored, Arc<RoundingError>)>> {
    let matrix = key.matrix(weight)?;
    let kept = KeptIntegers::of(&matrix, key.format).and_then(|kept| KeptWeight::new(matrix, kept));
    Ok(kept.map(|kept| {
        let (layout, op, data, scale, offset) =
            (kept.layout(), key.format.op, kept.data(), Some(kept.scale()), kept.offset());
        (Stored { layout, op, data, scale, offset, palette: None, row_scale: None }, kept.measures())
    }))
}

impl EmitWeight for Emitter<'_> {
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
        let key = WeightKey::new(self.quant, role, self.layer, weight, shape.first().copied().unwrap_or(1));
        let emitted = self.stored(key, role, weight, shape)?;
        let value = add(builder, name, shape, &emitted.stored);
        emitted.value.get_or_insert(value);
        Ok(value)
    }

    fn emit_row_scale(
        &mut self,
        builder: &mut FunctionBuilder,
        name: &str,
        role: Role,
        weight: &SourceWeight,
        shape: &[u64],
    ) -> Result<Option<ValueId>> {
        let key = WeightKey::new(self.quant, role, self.layer, weight, shape.iter().product());
        if !key.format.row_scale {
            return Ok(None);
        }
        let emitted = self.stored(key, role, weight, shape)?;
        Ok(add_row_scale(builder, name, shape, &emitted.stored))
    }
}

/// Adds the constants of a weight to a function.
pub(super) fn add(builder: &mut FunctionBuilder, name: &str, shape: &[u64], stored: &Stored) -> ValueId {
    let data = constant(stored.layout.dtype, shape, &stored.data);
    let half = |shape: &[u64], content| constant(DataType::Fp16, shape, content);
    let ones = || vec![1; shape.len()];
    if let (Some(scale), Some([rows, columns])) = (&stored.scale, stored.layout.scales) {
        if stored.op == Int8Op::Affine {
            // a scalar, or one value per position along the axis
            let along = [rows];
            let scale = half(if rows == 1 { &[] } else { &along }, scale);
            let zero = Constant::literal(TensorType::scalar(DataType::Int8), [0]);
            let parts =
                [("quantized_data", data), ("zero_point", zero), ("scale", scale), ("axis", Constant::int32(0))];
            return builder.op("constexpr_affine_dequantize", name, parts);
        }
        let mut scale_shape = ones();
        scale_shape.iter_mut().zip([rows, columns]).for_each(|(size, count)| *size = count);
        let mut parts = vec![("data", data), ("scale", half(&scale_shape, scale))];
        parts.extend(stored.offset.as_ref().map(|of| ("offset", constant(stored.layout.dtype, &scale_shape, of))));
        return builder.op("constexpr_blockwise_shift_scale", name, parts);
    }
    if let (Some(palette), Some(palettes)) = (&stored.palette, stored.layout.palettes) {
        let mut lut_shape = [ones(), vec![stored.layout.entries(), 1]].concat();
        lut_shape[0] = palettes;
        return builder.op("constexpr_lut_to_dense", name, [("indices", data), ("lut", half(&lut_shape, palette))]);
    }
    builder.constant(name, data)
}

/// Adds the factor of a product's rows, if there is one.
pub(super) fn add_row_scale(
    builder: &mut FunctionBuilder,
    name: &str,
    shape: &[u64],
    stored: &Stored,
) -> Option<ValueId> {
    let scale = stored.row_scale.clone()?;
    Some(builder.constant(name, constant(DataType::Fp16, shape, &scale)))
}

fn constant(dtype: DataType, shape: &[u64], content: &Arc<dyn Content>) -> Constant {
    Constant::content(TensorType::new(dtype, shape.iter().copied()), content.clone())
}
