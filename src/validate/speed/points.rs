//! Speeds that others measured: `validators/speeds.yaml`. Half of them calibrate the model, the other half judges it.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CallWork, ChipRates, SPEEDS, SpeedModel};
use crate::chips::{ChipError, ChipTable, FactSource};
use crate::data;
use anec_manifest::KvWrite;

/// The numbers of the model, and the points behind them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpeedPoints {
    /// The calibrated numbers.
    pub model: SpeedModel,
    /// How long a first load takes.
    pub first_load: FirstLoad,
    /// How much memory loaded weights take.
    pub loaded: LoadedWeights,
    /// Where points come from, by the names that they use.
    pub sources: BTreeMap<String, FactSource>,
    /// What was measured, in the order of the ids.
    pub points: Vec<SpeedPoint>,
}

/// How long a first load takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FirstLoad {
    /// Seconds for each 10^9 bytes of weights of each function, the least and the most that were seen.
    pub seconds_per_gb: [f64; 2],
}

/// How much memory loaded weights take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoadedWeights {
    /// Bytes in memory for each byte on the disk, for each loaded function.
    pub factor: f64,
}

/// A speed that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpeedPoint {
    /// Chip, model, number format, what was measured.
    pub id: String,
    /// The chip.
    pub chip: String,
    /// Tokens a second.
    pub measured: f64,
    /// Layers of the model.
    pub layers: u32,
    /// Millions of weights: of the layers, of the LM head.
    pub weights: [f64; 2],
    /// Bits of each.
    pub bits: f64,
    /// Whether they are indices into palettes.
    #[serde(default)]
    pub palette: bool,
    /// Calls for a token: of layers, of pieces of the LM head, which run side by side; none where the head is in the
    /// last function of layers.
    pub calls: [u32; 2],
    /// Keys and values of the whole context, in 10^6 bytes.
    pub state_mb: f64,
    /// How they are written.
    pub write: KvWrite,
    /// Tokens of a call.
    pub tokens: u32,
    /// Who measured: a name of [`SpeedPoints::sources`].
    pub source: String,
    /// What had to be inferred.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl SpeedPoint {
    /// What the model predicts, in tokens a second.
    ///
    /// # Errors
    /// When the chip isn't known, or nothing is published of its bandwidth.
    pub fn predicted(&self, table: &ChipTable, model: SpeedModel) -> Result<f64, ChipError> {
        let rates = ChipRates::of(table.find(&self.chip)?, table, model)?;
        let work = |millions: f64, share: f64| CallWork {
            weight_bytes: millions * 1e6 * self.bits / 8.0 * share,
            palette_weights: if self.palette { millions * 1e6 * share } else { 0.0 },
            macs: millions * 1e6 * f64::from(self.tokens) * share,
            ..CallWork::default()
        };
        let ([layers, head], [calls, head_calls]) = (self.weights, self.calls.map(f64::from));
        let state_bytes = self.state_mb * 1e6 / calls;
        let call = CallWork { state_bytes, ..work(layers, 1.0 / calls) }.written(self.write);
        let (head, _) = rates.work(&CallWork { head: true, ..work(head, 1.0) });
        let seconds = rates.call(&call).milliseconds / 1e3 * calls + head + rates.call * head_calls.min(1.0);
        Ok(f64::from(self.tokens) / seconds)
    }
}

impl SpeedPoints {
    /// The points that are part of the binary.
    pub fn built_in() -> &'static SpeedPoints {
        static POINTS: LazyLock<SpeedPoints> = LazyLock::new(|| data::built_in("speeds.yaml", SPEEDS));
        &POINTS
    }

    /// The points that calibrate, and those that judge: every second one in the order of their names.
    pub fn halves(&self) -> [Vec<&SpeedPoint>; 2] {
        let half = |first| self.points.iter().skip(first).step_by(2).collect();
        [half(0), half(1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean of the magnitudes of the errors' logarithms: a prediction of half is as bad as one of twice the speed, and
    /// one that is far off counts no more than it is.
    fn error(points: &[&SpeedPoint], model: SpeedModel) -> f64 {
        let table = ChipTable::built_in();
        let one = |point: &&SpeedPoint| (point.predicted(table, model).unwrap() / point.measured).ln().abs();
        points.iter().map(one).sum::<f64>() / points.len() as f64
    }

    /// The numbers of the model, one after another.
    const GRIDS: [(f64, f64, f64); 5] =
        [(0.4, 0.01, 1.0), (0.0, 0.25, 15.0), (0.0, 0.25, 15.0), (0.0, 0.01, 3.0), (0.02, 0.01, 1.0)];

    fn model(at: [f64; 5]) -> SpeedModel {
        let [layer_share, mask_passes, slice_passes, call_ms, compute_share] = at;
        SpeedModel { layer_share, mask_passes, slice_passes, call_ms, compute_share }
    }

    /// The best numbers on their grids: each in its turn, until none can be better, from several beginnings.
    fn fit(points: &[&SpeedPoint]) -> SpeedModel {
        let number =
            |(first, step, _): (f64, f64, f64), index: usize| ((first + step * index as f64) * 100.0).round() / 100.0;
        let mut best = (f64::INFINITY, model([1.0; 5]));
        for start in 0..6 {
            let mut at = GRIDS.map(|(first, _, last)| first + (last - first) * f64::from(start) / 5.0);
            let mut least = error(points, model(at));
            loop {
                let before = least;
                for (axis, grid) in GRIDS.into_iter().enumerate() {
                    for index in 0..=((grid.2 - grid.0) / grid.1).round() as usize {
                        let mut tried = at;
                        tried[axis] = number(grid, index);
                        let error = error(points, model(tried));
                        if error < least - 1e-9 {
                            (least, at) = (error, tried);
                        }
                    }
                }
                if least >= before {
                    break;
                }
            }
            if least < best.0 - 1e-9 {
                best = (least, model(at));
            }
        }
        best.1
    }

    #[test]
    fn points_have_sources_chips_and_an_order() {
        let json: serde_json::Value = serde_yaml::from_str(SPEEDS).unwrap();
        jsonschema::validate(&schemars::schema_for!(SpeedPoints).into(), &json).unwrap();
        let all = SpeedPoints::built_in();
        assert!(all.points.len() >= 14 && all.points.is_sorted_by(|a, b| a.id < b.id));
        for point in &all.points {
            assert!(all.sources.contains_key(&point.source), "{}", point.id);
            assert!(point.id.starts_with(&ChipTable::built_in().find(&point.chip).unwrap().id()), "{}", point.id);
        }
        let [calibrate, judge] = all.halves();
        assert_eq!((calibrate.len(), judge.len()), (all.points.len().div_ceil(2), all.points.len() / 2));
    }

    #[test]
    fn the_numbers_of_the_model_are_those_of_the_calibrating_points() {
        let all = SpeedPoints::built_in();
        assert_eq!(all.model, fit(&all.halves()[0]), "write these into validators/speeds.yaml");
    }

    /// Share of the speed by which a prediction may be off.
    const NEAR: f64 = 0.25;

    fn off(point: &SpeedPoint) -> f64 {
        point.predicted(ChipTable::built_in(), SpeedModel::built_in()).unwrap() / point.measured - 1.0
    }

    #[test]
    fn the_other_points_judge_it() {
        let [_, judge] = SpeedPoints::built_in().halves();
        let near = judge.iter().filter(|point| off(point).abs() <= NEAR).count();
        let misses: Vec<&str> = judge.iter().filter(|point| off(point).abs() > NEAR).map(|p| p.id.as_str()).collect();
        // ten of fifteen; whoever changes the model must not make it worse, and writes down what it misses
        assert!(near >= 10, "{near} of {}; misses: {misses:?}", judge.len());
        let mut sizes: Vec<f64> = judge.iter().map(|point| off(point).abs()).collect();
        sizes.sort_by(f64::total_cmp);
        assert!(sizes[sizes.len() / 2] <= 0.2, "median error {}", sizes[sizes.len() / 2]);
    }

    /// What the book says between two marks.
    fn table() -> String {
        let all = SpeedPoints::built_in();
        let halves = all.halves();
        let mut text = String::from("| point | measured | predicted | error | role |\n|---|---:|---:|---:|---|\n");
        for point in &all.points {
            let predicted = point.predicted(ChipTable::built_in(), all.model).unwrap();
            let role = if halves[0].contains(&point) { "calibrates" } else { "judges" };
            let miss = if off(point).abs() > NEAR { ", **missed**" } else { "" };
            let error = format!("{:+.0} %", off(point) * 100.0);
            text += &format!("| {} | {} | {predicted:.1} | {error} | {role}{miss} |\n", point.id, point.measured);
        }
        for (name, half) in ["calibrating", "judging"].into_iter().zip(halves) {
            let near = half.iter().filter(|point| off(point).abs() <= NEAR).count();
            text += &format!("\n{near} of {} {name} points are within 25 %.\n", half.len());
        }
        text
    }

    #[test]
    fn the_book_shows_every_point_with_its_error() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../book/src/speed.md");
        let page = std::fs::read_to_string(path).unwrap();
        let (begin, end) = ("<!-- points -->\n", "<!-- end of points -->");
        let (before, rest) = page.split_once(begin).unwrap();
        let (shown, after) = rest.split_once(end).unwrap();
        let due = format!("\n{}\n", table());
        if shown != due && std::env::var("INSTA_UPDATE").is_ok_and(|value| value == "always") {
            std::fs::write(path, format!("{before}{begin}{due}{end}{after}")).unwrap();
            return;
        }
        assert_eq!(shown, due, "book/src/speed.md is stale: INSTA_UPDATE=always renews it");
    }
}
