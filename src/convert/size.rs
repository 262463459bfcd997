//! Sizes of packages before any weight is read, from a dry run of the build with contents of known length and no bytes.

use std::collections::HashMap;
use std::sync::Arc;

use super::emit::{Stored, WeightKey, add, add_row_scale};
use anec_base::Result;
use anec_family::{EmitWeight, FamilyModel, FunctionRequest, LoweringOptions};
use anec_manifest::{NumberFormat, Quant, Role};
use anec_mil::{Content, FunctionBuilder, ValueId, codec};
use anec_package::blob::{ALIGNMENT, WeightPlan};
use anec_quant::WeightLayout;
use anec_source::SourceWeight;

/// Size of a package's constants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PackageSize {
    /// Bytes of the constants in the weight file, each counted once.
    pub weight_bytes: u64,
    /// Bytes of the weight file: constants with their records and padding, without the header.
    pub file_bytes: u64,
}

impl PackageSize {
    /// Measures a package with these functions, built as a conversion builds them.
    ///
    /// # Errors
    /// If the form can't express the model, or the model lacks a requested part.
    pub fn of(
        model: &dyn FamilyModel,
        form: &LoweringOptions,
        quant: &Quant,
        functions: &[FunctionRequest],
    ) -> Result<PackageSize> {
        let mut emitter = DryEmitter::new(quant);
        let mut weights = WeightPlan::new();
        // one function at a time, to reuse memory
        for request in functions {
            codec::place_blobs(&model.build(form, request, &mut emitter)?.function, &mut weights)?;
        }
        Ok(PackageSize { weight_bytes: weights.weight_bytes(), file_bytes: weights.padded_bytes() })
    }
}

/// Emitter without bytes, equivalent to [`Emitter`](super::emit::Emitter).
pub(super) struct DryEmitter<'a> {
    quant: &'a Quant,
    layer: Option<usize>,
    emitted: HashMap<WeightKey, Stored>,
    /// Emitted weights, each once.
    pub(super) uses: Vec<WeightUse>,
}

impl<'a> DryEmitter<'a> {
    pub(super) fn new(quant: &'a Quant) -> Self {
        DryEmitter { quant, layer: None, emitted: HashMap::new(), uses: Vec::new() }
    }

    fn stored(&mut self, key: WeightKey, role: Role, weight: &SourceWeight) -> &Stored {
        let (layout, op) = (key.layout(weight), key.format.op);
        let uses = &mut self.uses;
        let layer = self.layer.filter(|_| !self.quant.layers.is_empty());
        self.emitted.entry(key).or_insert_with(|| {
            uses.push(WeightUse { role, layer, rows: layout.rows, columns: layout.columns });
            Stored {
                layout,
                op,
                data: Unread::content(layout.data_bytes()),
                scale: layout.scales.map(|_| Unread::content(layout.scale_bytes())),
                offset: layout.offsets.then(|| Unread::content(layout.offset_bytes())),
                palette: layout.palettes.map(|_| Unread::content(layout.palette_bytes())),
                row_scale: layout.row_scales.then(|| Unread::content(layout.row_scale_bytes())),
            }
        })
    }
}

impl EmitWeight for DryEmitter<'_> {
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
        Ok(add(builder, name, shape, self.stored(key, role, weight)))
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
        Ok(add_row_scale(builder, name, shape, self.stored(key, role, weight)))
    }
}

/// Content of known length without bytes.
struct Unread(u64);

impl Unread {
    fn content(length: u64) -> Arc<dyn Content> {
        Arc::new(Unread(length))
    }
}

impl Content for Unread {
    fn length(&self) -> u64 {
        self.0
    }

    fn granule(&self) -> u64 {
        1
    }

    fn read(&self, _offset: u64, out: &mut [u8]) -> Result<()> {
        out.fill(0);
        Ok(())
    }
}

/// Weight of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightUse {
    /// Role.
    pub role: Role,
    /// Layer, if layers have number formats of their own.
    pub layer: Option<usize>,
    /// Output channels.
    pub rows: u64,
    /// Elements per output channel.
    pub columns: u64,
}

impl WeightUse {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.rows * self.columns
    }

    /// Number format and layout of the weight.
    pub fn layout(&self, quant: &Quant) -> (NumberFormat, WeightLayout) {
        let format = quant.of(self.role, self.layer);
        (format, WeightLayout::of(format, self.rows, self.columns))
    }

    /// Bytes in a weight file: each part starts an aligned record.
    pub fn file_bytes(&self, quant: &Quant) -> u64 {
        let (_, layout) = self.layout(quant);
        let parts = [layout.data_bytes(), layout.scale_bytes(), layout.palette_bytes(), layout.row_scale_bytes()];
        parts.iter().filter(|bytes| **bytes > 0).map(|bytes| ALIGNMENT + bytes.next_multiple_of(ALIGNMENT)).sum()
    }
}
