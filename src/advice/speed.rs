//! Predicted time of a call: the constants of `tables/speeds.yaml`, applied to a chip's facts.
//!
//! ```text
//! t = max(weights / bandwidth + states, palettes / rate of palettes + states, products / rate of products) + call
//! ```
//!
//! The attention scores of a call come on top: their bytes in fp16 times the passes over them, divided by the
//! bandwidth. `states` are the bytes of the caches times the number of passes over them, divided by the bandwidth.
//! [`points`] has measurements, with the error of the prediction at each.

pub mod points;

use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::chips::{Chip, ChipError, ChipTable};
use anec_manifest::KvWrite;

pub(crate) const SPEEDS: &str = include_str!("tables/speeds.yaml");

/// Constants of the model, calibrated by points.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpeedModel {
    /// Share of the bandwidth that layers reach. The LM head reaches all of it, by the definition of a chip's
    /// bandwidth.
    pub layer_share: f64,
    /// Passes over the caches in a call if a mask writes them.
    pub mask_passes: f64,
    /// Passes over the caches in a call if only the new rows are written.
    pub slice_passes: f64,
    /// Cost of a call beyond the chip's fixed cost, in milliseconds.
    pub call_ms: f64,
    /// Share of the peak compute rate that is reached.
    pub compute_share: f64,
    /// Passes over the attention scores of a call, in fp16, at the bandwidth.
    pub score_passes: f64,
}

impl SpeedModel {
    /// Calibrated constants.
    pub fn built_in() -> SpeedModel {
        static MODEL: LazyLock<SpeedModel> = LazyLock::new(|| points::SpeedPoints::built_in().model);
        *MODEL
    }
}

/// Data and operations of one call of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CallWork {
    /// Streamed bytes of weights.
    pub weight_bytes: f64,
    /// Number of weights that are looked up in palettes.
    pub palette_weights: f64,
    /// Bytes of the caches.
    pub state_bytes: f64,
    /// Whether a mask writes the caches.
    pub masked: bool,
    /// Multiply-accumulates.
    pub macs: f64,
    /// Number of attention scores.
    pub scores: f64,
    /// Whether the function is a piece of the LM head.
    pub head: bool,
}

impl CallWork {
    /// Returns the work with the given form of cache writes.
    pub fn written(self, write: KvWrite) -> Self {
        CallWork { masked: write == KvWrite::Mask, ..self }
    }
}

/// Bottleneck of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
pub enum SpeedBound {
    /// Reading weights and caches.
    #[strum(to_string = "bandwidth")]
    Bandwidth,
    /// Palette lookups.
    #[strum(to_string = "palettes")]
    Palettes,
    /// Multiplications.
    #[strum(to_string = "compute")]
    Compute,
    /// Fixed cost of the call.
    #[strum(to_string = "call")]
    Call,
}

/// Predicted time of a call.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PredictedTime {
    /// Total, in milliseconds.
    pub milliseconds: f64,
    /// Fixed cost of the call.
    pub call_ms: f64,
    /// Bottleneck.
    pub bound: SpeedBound,
}

/// Fact of a chip, with the assumption if it isn't published.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    value: f64,
    assumed: Option<String>,
}

/// Rates of a chip.
#[derive(Clone, Debug)]
pub struct ChipRates {
    /// Bytes of weights per second.
    pub bandwidth: f64,
    /// Palette lookups per second.
    pub palettes: f64,
    /// Multiply-accumulates per second.
    pub macs: f64,
    /// Seconds of a call.
    pub call: f64,
    /// Unpublished facts and their replacements.
    pub assumptions: Vec<String>,
    model: SpeedModel,
}

impl ChipRates {
    /// Rates of a chip, with the given constants.
    ///
    /// # Errors
    /// If neither the bandwidth of its Neural Engine nor that of its memory is published.
    pub fn of(chip: &Chip, table: &ChipTable, model: SpeedModel) -> Result<Self, ChipError> {
        let bandwidth = bandwidth(chip, table)?;
        let palettes = stand_in(chip, table, "the rate of palettes", |other| {
            let rate = other.palette_gweights_s.as_ref()?.value;
            // M6's Neural Engine is the first that isn't limited by lookups
            (other.name == chip.name).then_some(rate).or_else(|| {
                let own = other.bandwidth_gb_s.as_ref()?.value;
                (other.generation.as_deref() != Some("M6")).then_some(rate / own * bandwidth.value)
            })
        });
        let tflops = stand_in(chip, table, "the rate of multiplications", |other| Some(other.tflops.as_ref()?.value));
        let call = stand_in(chip, table, "the cost of a call", |other| Some(other.call_ms.as_ref()?.value));
        let known = [&bandwidth, &palettes, &tflops, &call];
        Ok(ChipRates {
            bandwidth: bandwidth.value * 1e9,
            palettes: palettes.value * 1e9,
            // a multiply-accumulate is two operations
            macs: tflops.value * 1e12 / 2.0,
            call: (call.value + model.call_ms) / 1e3,
            assumptions: known.into_iter().filter_map(|known| known.assumed.clone()).collect(),
            model,
        })
    }

    /// Time of a call.
    pub fn call(&self, work: &CallWork) -> PredictedTime {
        let (seconds, bound) = self.work(work);
        self.time(seconds, bound)
    }

    /// Time of calls that run concurrently, such as the pieces of the LM head: data and operations add up, the fixed
    /// cost counts once.
    pub fn side_by_side<'a>(&self, works: impl IntoIterator<Item = &'a CallWork>) -> Option<PredictedTime> {
        let parts: Vec<(f64, SpeedBound)> = works.into_iter().map(|work| self.work(work)).collect();
        let seconds = parts.iter().map(|(seconds, _)| seconds).sum();
        let (_, bound) = parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0))?;
        Some(self.time(seconds, bound))
    }

    fn time(&self, seconds: f64, bound: SpeedBound) -> PredictedTime {
        PredictedTime {
            milliseconds: (seconds + self.call) * 1e3,
            call_ms: self.call * 1e3,
            bound: if self.call > seconds { SpeedBound::Call } else { bound },
        }
    }

    /// Seconds of a call without its fixed cost.
    fn work(&self, work: &CallWork) -> (f64, SpeedBound) {
        let passes = if work.masked { self.model.mask_passes } else { self.model.slice_passes };
        let states = work.state_bytes * passes / self.bandwidth;
        let share = if work.head { 1.0 } else { self.model.layer_share };
        let bounds = [
            (work.weight_bytes / (self.bandwidth * share) + states, SpeedBound::Bandwidth),
            (
                if work.palette_weights > 0.0 { work.palette_weights / self.palettes + states } else { 0.0 },
                SpeedBound::Palettes,
            ),
            (work.macs / (self.macs * self.model.compute_share), SpeedBound::Compute),
        ];
        let (seconds, bound) =
            bounds.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((0.0, SpeedBound::Compute));
        (seconds + 2.0 * work.scores * self.model.score_passes / self.bandwidth, bound)
    }
}

/// Rate at which a chip streams weights, in GB/s.
fn bandwidth(chip: &Chip, table: &ChipTable) -> Result<Known, ChipError> {
    if let Some(fact) = &chip.bandwidth_gb_s {
        return Ok(Known { value: fact.value, assumed: None });
    }
    // base chips only: larger ones have memory bandwidth for their GPUs
    let plain = |other: &&Chip| other.generation.as_deref() == Some(&other.name);
    let share = |other: &Chip| Some(other.bandwidth_gb_s.as_ref()?.value / other.memory_gb_s.as_ref()?.value);
    let share = median(table.chips.iter().filter(plain).filter_map(share).collect());
    let (Some(memory), Some(share)) = (&chip.memory_gb_s, share) else {
        let known = table.chips.iter().filter(|other| other.bandwidth_gb_s.is_some() || other.memory_gb_s.is_some());
        let (missing, known) = ("a bandwidth of its Neural Engine or of its memory", known.map(Chip::id).collect());
        return Err(ChipError::Unpublished { chip: chip.name.clone(), missing, known });
    };
    let assumed = format!(
        "the bandwidth of {}'s Neural Engine isn't published: {share:.2} of its memory's {} GB/s, as with the M chips",
        chip.name, memory.value
    );
    Ok(Known { value: share * memory.value, assumed: Some(assumed) })
}

/// Fact of a chip: its own, that of its generation's first chip that has one, or the median of all.
fn stand_in(chip: &Chip, table: &ChipTable, what: &str, number: impl Fn(&Chip) -> Option<f64>) -> Known {
    if let Some(value) = number(chip) {
        return Known { value, assumed: None };
    }
    let kin = table.chips.iter().filter(|other| other.generation.is_some() && other.generation == chip.generation);
    if let Some((other, value)) = kin.filter_map(|other| Some((other, number(other)?))).next() {
        let assumed = format!("{what} of {} isn't published: as of {}", chip.name, other.name);
        return Known { value, assumed: Some(assumed) };
    }
    let value = median(table.chips.iter().filter_map(&number).collect()).unwrap_or(0.0);
    Known { value, assumed: Some(format!("{what} of {} isn't published: the median of other chips", chip.name)) }
}

/// Median.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: SpeedModel = SpeedModel {
        layer_share: 0.5,
        mask_passes: 4.0,
        slice_passes: 2.0,
        call_ms: 0.88,
        compute_share: 0.5,
        score_passes: 0.0,
    };

    fn rates(chip: &str) -> ChipRates {
        let table = ChipTable::built_in();
        ChipRates::of(table.find(chip).unwrap(), table, MODEL).unwrap()
    }

    #[test]
    fn the_slowest_resource_bounds_a_call() {
        let m4 = rates("m4");
        let bound = |work: CallWork| m4.call(&work);
        // 64.18 MB at half of 64.18 GB/s take 2 ms, plus 1 ms for the call
        let weights = CallWork { weight_bytes: 64.18e6, ..CallWork::default() };
        let time = bound(weights);
        assert!((time.milliseconds - 3.0).abs() < 1e-9 && time.bound == SpeedBound::Bandwidth, "{time:?}");
        // the head reaches the full bandwidth
        assert!((bound(CallWork { head: true, ..weights }).milliseconds - 2.0).abs() < 1e-9);
        // 81e9 weights a second
        let palettes = CallWork { weight_bytes: 1e6, palette_weights: 162e6, ..CallWork::default() };
        assert_eq!((bound(palettes).milliseconds.round(), bound(palettes).bound), (3.0, SpeedBound::Palettes));
        let compute = CallWork { macs: 9.0e9, ..weights };
        assert_eq!((bound(compute).milliseconds.round(), bound(compute).bound), (3.0, SpeedBound::Bandwidth));
        assert_eq!(bound(CallWork { macs: 9.5e10, ..weights }).bound, SpeedBound::Compute);
        assert_eq!(bound(CallWork::default()).bound, SpeedBound::Call);
        // a mask takes four passes over the caches
        let states = CallWork { state_bytes: 64.18e6, ..CallWork::default() };
        assert!((bound(states.written(KvWrite::Mask)).milliseconds - 5.0).abs() < 1e-9);
        assert!((bound(states.written(KvWrite::Slice)).milliseconds - 3.0).abs() < 1e-9);
        let both = m4.side_by_side(&[CallWork { head: true, ..weights }; 2]).unwrap();
        assert!((both.milliseconds - 3.0).abs() < 1e-9);
    }

    #[test]
    fn unpublished_facts_are_assumptions() {
        assert_eq!(rates("m5-max").assumptions, Vec::<String>::new());
        let phone = rates("a17-pro");
        // median of 0.895, 0.605, 0.631, 0.535, 0.456 and 0.894 of the memory's bandwidth
        assert!((phone.bandwidth / 1e9 - 51.2 * (0.6045 + 0.631) / 2.0).abs() < 1e-3, "{}", phone.bandwidth);
        assert_eq!(phone.assumptions.len(), 4, "{:?}", phone.assumptions);
        assert!(phone.assumptions[0].contains("0.62 of its memory's 51.2 GB/s"), "{:?}", phone.assumptions);
        // the palette rate scales with the bandwidth, as on M4 Max
        let pro = rates("m4-pro");
        assert!(pro.assumptions.iter().any(|text| text == "the rate of palettes of M4 Pro isn't published: as of M4"));
        assert!((pro.palettes / 1e9 - 81.0 / 64.18 * 126.36).abs() < 1e-6);
        assert_eq!(rates("m6").palettes, 700e9);
        let table = ChipTable::built_in();
        let error = ChipRates::of(table.find("a14").unwrap(), table, MODEL).unwrap_err();
        assert!(error.to_string().starts_with("the speed of A14 can't be predicted: a bandwidth"), "{error}");
    }
}
