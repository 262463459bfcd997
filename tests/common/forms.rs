//! The form that tests start from.

use anec::family::LoweringOptions;
use anec::manifest::{
    ActivationForm, AttentionForm, ExpertsForm, KvWrite, LayerDivision, Layout, LinearForm, NormForm, RecurrentForm,
    RopeForm, StateForm,
};
use anec::mil::Opset;

/// The manifest's defaults, for calls of any number of tokens.
pub const FORM: LoweringOptions = LoweringOptions {
    opset: Opset::CoreMl8,
    layout: Layout::Bcs1,
    linear: LinearForm::Conv,
    norm: NormForm::Accurate,
    attention: AttentionForm::PerHead,
    activations: ActivationForm::Stable,
    rope: RopeForm::Halves,
    kv_write: KvWrite::Mask,
    state: StateForm::PerLayer,
    recurrent_states: RecurrentForm::State,
    experts: ExpertsForm::Packed,
    divide: LayerDivision::None,
};
