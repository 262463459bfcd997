//! Planned manifest: the formats per role and layer that lose least under a budget, by the loss of each alone. Errors
//! of different weights hardly interact, so that losses add up.

use std::collections::BTreeMap;

use anec_base::Result;
use anec_convert::open::{open, resolve};
use anec_convert::plan::ConvertPlan;
use anec_convert::report::{PlanReport, PlannedGroup};
use anec_manifest::{Manifest, Quant, QuantLayers, QuantOverride, QuantPlan, Role, Transforms};

use super::CalibrateError;
use super::budget::{Cost, Limit, choose, smallest};
use super::sensitivity::{Sensitivities, as_planned};

/// Number of attempts at a limit in megabytes, because package overhead depends slightly on the formats.
const TURNS: usize = 4;

/// Manifest with the chosen formats, and the report of the choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// Manifest.
    pub manifest: Manifest,
    /// Report of the choice.
    pub report: PlanReport,
}

/// Chooses formats under a budget.
///
/// # Errors
/// Returns [`CalibrateError::Budget`] if no formats keep the budget, or an error if the source can't be opened.
pub fn plan(manifest: &Manifest, budget: QuantPlan, measured: &Sensitivities) -> Result<Planned> {
    let manifest = as_planned(manifest);
    let opened = open(&manifest)?;
    let model = &*opened.model;
    let done = model.transformed().done;
    let transforms = if done.is_empty() { Transforms::None } else { Transforms::List(done) };
    let bytes_of = |manifest: &Manifest| -> Result<u64> {
        Ok(ConvertPlan::new(&resolve(manifest, &opened.source, model), model)?.weight_bytes())
    };
    let with = |chosen: &[usize]| {
        let quant = with_formats(&manifest.quant, &measured.groups, chosen);
        Manifest { quant, transforms: transforms.clone(), ..manifest.clone() }
    };
    let costs: Vec<Vec<Cost>> = measured
        .groups
        .iter()
        .map(|group| group.formats.iter().map(|of| Cost { bytes: of.bytes, loss: of.kl }).collect())
        .collect();
    let weights: u64 = measured.groups.iter().map(|group| group.weights).sum();
    let sum = |chosen: &[usize]| costs.iter().zip(chosen).map(|(costs, index)| costs[*index].bytes).sum::<u64>();
    let smallest = smallest(&costs).unwrap_or_else(|| vec![0; costs.len()]);
    let chosen = match budget {
        QuantPlan::Bits(bits) => {
            let limit = (bits * weights as f64 / 8.0).round() as u64;
            let least = rounded_up(8.0 * sum(&smallest) as f64 / weights.max(1) as f64, 4.0);
            choose(&costs, Limit::Bytes(limit)).ok_or(CalibrateError::Budget { key: "bits", asked: bits, least })?
        }
        QuantPlan::Kl(nats) => {
            let least: f64 = costs.iter().map(|costs| costs.iter().map(|c| c.loss).fold(f64::INFINITY, f64::min)).sum();
            // losses are far below 1: round to three digits
            let least = rounded_up(least, 2.0 - least.max(f64::MIN_POSITIVE).log10().floor());
            choose(&costs, Limit::Loss(nats)).ok_or(CalibrateError::Budget { key: "kl", asked: nats, least })?
        }
        QuantPlan::MaxMb(megabytes) => {
            let asked = (megabytes * 1e6).round() as u64;
            let rest = bytes_of(&with(&smallest))?.saturating_sub(sum(&smallest));
            let least = rounded_up((rest + sum(&smallest)) as f64 / 1e6, 4.0);
            let refused = CalibrateError::Budget { key: "max_mb", asked: megabytes, least };
            let mut limit = asked.saturating_sub(rest);
            let mut found = None;
            for _ in 0..TURNS {
                let Some(chosen) = choose(&costs, Limit::Bytes(limit)) else { break };
                let over = bytes_of(&with(&chosen))?.saturating_sub(asked);
                found = Some(chosen).filter(|_| over == 0);
                if over == 0 {
                    break;
                }
                limit = limit.saturating_sub(over);
            }
            found.ok_or(refused)?
        }
    };
    let manifest = with(&chosen);
    let groups: Vec<PlannedGroup> = measured
        .groups
        .iter()
        .zip(&chosen)
        .map(|(group, chosen)| PlannedGroup { chosen: Some(*chosen), ..group.clone() })
        .collect();
    let report = PlanReport {
        budget,
        tokens: measured.tokens,
        kl: costs.iter().zip(&chosen).map(|(costs, index)| costs[*index].loss).sum(),
        bits: 8.0 * sum(&chosen) as f64 / weights.max(1) as f64,
        weight_bytes: bytes_of(&manifest)?,
        groups,
        manifest: manifest.to_yaml(),
    };
    Ok(Planned { manifest, report })
}

/// Rounds up to `places` decimal places, so that the displayed number suffices as a budget.
fn rounded_up(number: f64, places: f64) -> f64 {
    let unit = 10f64.powf(places);
    (number * unit).ceil() / unit
}

/// Returns the quantization settings for the chosen formats: the most frequent format of each role, and exceptions by
/// layer.
fn with_formats(quant: &Quant, groups: &[PlannedGroup], chosen: &[usize]) -> Quant {
    let mut by_role: BTreeMap<Role, Vec<(Option<usize>, QuantOverride)>> = BTreeMap::new();
    for (group, chosen) in groups.iter().zip(chosen) {
        by_role.entry(group.role).or_default().push((group.layer, group.formats[*chosen].format));
    }
    let mut quant = Quant { plan: None, ..quant.clone() };
    let mut by_layer: BTreeMap<usize, BTreeMap<Role, QuantOverride>> = BTreeMap::new();
    for (role, formats) in by_role {
        let count = |format: &QuantOverride| formats.iter().filter(|(_, other)| other == format).count();
        let usual = formats.iter().map(|(_, format)| *format).reduce(|a, b| if count(&b) > count(&a) { b } else { a });
        let Some(usual) = usual else { continue };
        // a role that the manifest names for some layers keeps its own default
        let named = quant.layers.iter().any(|own| own.overrides.contains_key(&role));
        if !named {
            quant.overrides.insert(role, usual);
        }
        for (layer, format) in formats {
            if let Some(layer) = layer.filter(|_| named || format != usual) {
                by_layer.entry(layer).or_default().insert(role, format);
            }
        }
    }
    for (layer, overrides) in by_layer {
        match quant.layers.last_mut() {
            Some(last) if last.range[1] == layer && last.overrides == overrides => last.range[1] = layer + 1,
            _ => quant.layers.push(QuantLayers { range: [layer, layer + 1], overrides }),
        }
    }
    quant
}

#[cfg(test)]
mod tests {
    use super::super::sensitivity::FORMATS;
    use super::*;
    use anec_convert::report::FormatCost;

    #[test]
    fn exceptions_are_set_by_layer() {
        let group = |role, layer| {
            let formats = FORMATS.iter().map(|format| FormatCost { format: *format, bytes: 1, kl: 0.0 }).collect();
            PlannedGroup { role, layer, weights: 1, formats, chosen: None }
        };
        let mut groups: Vec<PlannedGroup> = (0..5).map(|layer| group(Role::MlpDown, Some(layer))).collect();
        groups.push(group(Role::LmHead, None));
        let quant = Quant { plan: Some(QuantPlan::Bits(5.0)), ..Quant::default() };
        let chosen = [1, 1, 3, 3, 3, 2];
        let found = with_formats(&quant, &groups, &chosen);
        assert_eq!(found.plan, None);
        assert_eq!(found.layers.len(), 1);
        assert_eq!(found.layers[0].range, [0, 2]);
        for (group, chosen) in groups.iter().zip(chosen) {
            let expected = super::super::sensitivity::number_format(FORMATS[chosen]);
            assert_eq!(found.of(group.role, group.layer), expected, "{:?}", group.layer);
        }
    }
}
