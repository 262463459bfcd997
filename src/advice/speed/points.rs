//! Published speed measurements of `tables/speeds.yaml`. Half of them calibrate the model, the other half judges
//! it.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CallWork, ChipRates, SPEEDS, SpeedModel};
use crate::chips::{ChipError, ChipTable, FactSource};
use crate::tables;
use anec_manifest::KvWrite;

/// Constants of the model, and the points behind them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpeedPoints {
    /// Calibrated constants.
    pub model: SpeedModel,
    /// Time of a first load.
    pub first_load: FirstLoad,
    /// Memory of loaded weights.
    pub loaded: LoadedWeights,
    /// Sources by the names that points refer to.
    pub sources: BTreeMap<String, FactSource>,
    /// Measured calls of fixed length, in the order of their ids.
    pub encoders: Vec<EncoderPoint>,
    /// Measurements, in the order of their ids.
    pub points: Vec<SpeedPoint>,
}

/// Measured call of one fixed length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EncoderPoint {
    /// Chip, model, number format, tokens.
    pub id: String,
    /// Chip.
    pub chip: String,
    /// Milliseconds of the call of all packages.
    pub milliseconds: f64,
    /// Number of layers.
    pub layers: u32,
    /// Millions of weights of the layers, in fp16.
    pub weights: f64,
    /// Attention heads of a layer.
    pub heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Tokens of the call.
    pub tokens: u32,
    /// Number of packages.
    pub calls: u32,
    /// Name of the source in [`SpeedPoints::sources`].
    pub source: String,
    /// Whether the point calibrates the model; otherwise it judges.
    #[serde(default)]
    pub calibrates: bool,
    /// Inferred facts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl EncoderPoint {
    /// Data and operations of the whole call.
    fn work(&self) -> CallWork {
        let scores = f64::from(self.layers * self.heads) * f64::from(self.tokens).powi(2);
        let products = self.weights * 1e6 * f64::from(self.tokens) + 2.0 * scores * f64::from(self.head_dim);
        CallWork { weight_bytes: self.weights * 2e6, macs: products, scores, ..CallWork::default() }
    }

    /// Prediction of the model, in milliseconds.
    ///
    /// # Errors
    /// If the chip isn't known, or its bandwidth isn't published.
    pub fn predicted(&self, table: &ChipTable, model: SpeedModel) -> Result<f64, ChipError> {
        let rates = ChipRates::of(table.find(&self.chip)?, table, model)?;
        let time = rates.call(&self.work());
        Ok(time.milliseconds + time.call_ms * (f64::from(self.calls) - 1.0))
    }
}

/// Time of a first load.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FirstLoad {
    /// Seconds per GB of weights of each function, least and most observed.
    pub seconds_per_gb: [f64; 2],
}

/// Memory of loaded weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoadedWeights {
    /// Bytes in memory per byte on disk, for each loaded function.
    pub factor: f64,
}

/// Measured speed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpeedPoint {
    /// Chip, model, number format, kind of measurement.
    pub id: String,
    /// Chip.
    pub chip: String,
    /// Tokens per second.
    pub measured: f64,
    /// Number of layers.
    pub layers: u32,
    /// Millions of weights of the layers and of the LM head.
    pub weights: [f64; 2],
    /// Bits per weight.
    pub bits: f64,
    /// Whether weights are palette indices.
    #[serde(default)]
    pub palette: bool,
    /// Calls per token: of layers, and of concurrent pieces of the LM head; 0 pieces if the head is in the last
    /// function of layers.
    pub calls: [u32; 2],
    /// Keys and values of the whole context, in MB.
    pub state_mb: f64,
    /// How caches are written.
    pub write: KvWrite,
    /// Tokens of a call.
    pub tokens: u32,
    /// Name of the source in [`SpeedPoints::sources`].
    pub source: String,
    /// Inferred facts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl SpeedPoint {
    /// Prediction of the model, in tokens per second.
    ///
    /// # Errors
    /// If the chip isn't known, or its bandwidth isn't published.
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
    /// Built-in points.
    pub fn built_in() -> &'static SpeedPoints {
        static POINTS: LazyLock<SpeedPoints> =
            LazyLock::new(|| tables::built_in("src/advice/tables/speeds.yaml", SPEEDS));
        &POINTS
    }

    /// Calibrating and judging points: every second one in the order of their names.
    pub fn halves(&self) -> [Vec<&SpeedPoint>; 2] {
        let half = |first| self.points.iter().skip(first).step_by(2).collect();
        [half(0), half(1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean absolute logarithm of the errors: half the speed counts like twice the speed, and outliers don't dominate.
    fn error(points: &[&SpeedPoint], model: SpeedModel) -> f64 {
        let table = ChipTable::built_in();
        let one = |point: &&SpeedPoint| (point.predicted(table, model).unwrap() / point.measured).ln().abs();
        points.iter().map(one).sum::<f64>() / points.len() as f64
    }

    /// Grids of the constants: start, end, step.
    const GRIDS: [(f64, f64, f64); 5] =
        [(0.4, 0.01, 1.0), (0.0, 0.25, 15.0), (0.0, 0.25, 15.0), (0.0, 0.01, 3.0), (0.02, 0.01, 1.0)];

    fn model(at: [f64; 5]) -> SpeedModel {
        let [layer_share, mask_passes, slice_passes, call_ms, compute_share] = at;
        let score_passes = SpeedPoints::built_in().model.score_passes;
        SpeedModel { layer_share, mask_passes, slice_passes, call_ms, compute_share, score_passes }
    }

    /// Coordinate descent on the grids from several starting points.
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
        assert_eq!(all.model, fit(&all.halves()[0]), "write these into src/advice/tables/speeds.yaml");
    }

    /// Two calls of one model at different lengths give the rate of products and that of scores.
    #[test]
    fn the_encoders_that_calibrate_give_the_rates() {
        let all = SpeedPoints::built_in();
        let [a, b]: [&EncoderPoint; 2] = {
            let points: Vec<_> = all.encoders.iter().filter(|point| point.calibrates).collect();
            points.try_into().unwrap()
        };
        let table = ChipTable::built_in();
        let rates = ChipRates::of(table.find(&a.chip).unwrap(), table, all.model).unwrap();
        let seconds = |point: &EncoderPoint| point.milliseconds / 1e3 - f64::from(point.calls) * rates.call;
        let (x, y) = (a.work(), b.work());
        let determinant = x.macs * y.scores - y.macs * x.scores;
        let by_product = (seconds(a) * y.scores - seconds(b) * x.scores) / determinant;
        let by_score = (seconds(b) * x.macs - seconds(a) * y.macs) / determinant;
        let tflops = 2.0 / by_product / all.model.compute_share / 1e12;
        assert!((tflops - table.find(&a.chip).unwrap().tflops.as_ref().unwrap().value).abs() < 0.05, "{tflops}");
        let passes = by_score * rates.bandwidth / 2.0;
        assert!((passes - all.model.score_passes).abs() < 0.05, "{passes}");
    }

    fn error_of_encoder(point: &EncoderPoint) -> f64 {
        let predicted = point.predicted(ChipTable::built_in(), SpeedModel::built_in()).unwrap();
        predicted / point.milliseconds - 1.0
    }

    #[test]
    fn the_other_encoders_judge_the_model() {
        let all = SpeedPoints::built_in();
        assert!(all.encoders.iter().all(|point| all.sources.contains_key(&point.source)));
        let judging: Vec<&EncoderPoint> = all.encoders.iter().filter(|point| !point.calibrates).collect();
        let misses: Vec<_> = judging.iter().filter(|point| error_of_encoder(point).abs() > NEAR).collect();
        assert_eq!(judging.len(), 13);
        assert!(judging.len() - misses.len() >= 9, "{misses:#?}");
    }

    /// Tolerated relative error of a prediction.
    const NEAR: f64 = 0.25;

    fn off(point: &SpeedPoint) -> f64 {
        point.predicted(ChipTable::built_in(), SpeedModel::built_in()).unwrap() / point.measured - 1.0
    }

    #[test]
    fn the_other_points_judge_it() {
        let [_, judge] = SpeedPoints::built_in().halves();
        let near = judge.iter().filter(|point| off(point).abs() <= NEAR).count();
        let misses: Vec<&str> = judge.iter().filter(|point| off(point).abs() > NEAR).map(|p| p.id.as_str()).collect();
        // ten of fifteen: a change of the model must not make it worse; the book lists the misses
        assert!(near >= 10, "{near} of {}; misses: {misses:?}", judge.len());
        let mut sizes: Vec<f64> = judge.iter().map(|point| off(point).abs()).collect();
        sizes.sort_by(f64::total_cmp);
        assert!(sizes[sizes.len() / 2] <= 0.2, "median error {}", sizes[sizes.len() / 2]);
    }

    /// Table of the book.
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
        text += "\n| call of one length | measured ms | predicted ms | error | role |\n|---|---:|---:|---:|---|\n";
        for point in &all.encoders {
            let (error, predicted) = (error_of_encoder(point), point.predicted(ChipTable::built_in(), all.model));
            let role = if point.calibrates { "calibrates" } else { "judges" };
            let miss = if error.abs() > NEAR { ", **missed**" } else { "" };
            let (id, measured, predicted, error) = (&point.id, point.milliseconds, predicted.unwrap(), error * 100.0);
            text += &format!("| {id} | {measured} | {predicted:.1} | {error:+.0} % | {role}{miss} |\n");
        }
        let judging: Vec<&EncoderPoint> = all.encoders.iter().filter(|point| !point.calibrates).collect();
        let near = judging.iter().filter(|point| error_of_encoder(point).abs() <= NEAR).count();
        text + &format!("\n{near} of {} judging calls are within 25 %.\n", judging.len())
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
