//! Forecast of placement for an asset of Core AI: the rules about its parts.

use anec_coreai::inventory::{AssetInventory, GraphInventory, GraphPart, TensorKind};

use super::chips::ChipTarget;
use super::forecast::ForecastFinding;
use super::rules::{Applies, AssetPart, AssetPattern, rules};

/// Applies the rules about Core AI that concern the targets to an asset, or all of them if there are no targets.
pub fn forecast_asset(name: &str, inventory: &AssetInventory, targets: &[ChipTarget<'_>]) -> Vec<ForecastFinding> {
    forecast_graphs(name, inventory.functions.iter().chain(&inventory.private_functions), targets)
}

/// Applies the rules like [`forecast_asset`] to graphs of an asset of this name.
pub fn forecast_graphs<'a>(
    name: &str,
    graphs: impl IntoIterator<Item = &'a GraphInventory, IntoIter: Clone>,
    targets: &[ChipTarget<'_>],
) -> Vec<ForecastFinding> {
    let graphs = graphs.into_iter();
    let mut findings = Vec::new();
    for rule in rules().into_iter().filter(|rule| rule.concerns(targets)) {
        let Applies::Asset(pattern) = &rule.applies else { continue };
        for graph in graphs.clone() {
            let count = pattern.count(graph);
            if count > 0 {
                let found = format!("{count} {}", pattern.part.noun(count));
                findings.push(ForecastFinding::new(&rule, name, Some(&graph.name), found, count));
            }
        }
    }
    findings.sort_by_key(|finding| finding.severity);
    findings
}

impl AssetPattern {
    /// Number of a graph's parts that match.
    fn count(&self, graph: &GraphInventory) -> usize {
        graph.parts.iter().filter(|(part, _)| self.matches(part)).map(|(_, count)| count).sum()
    }

    fn matches(&self, part: &GraphPart) -> bool {
        let kind = match (self.part, part) {
            (AssetPart::Result, GraphPart::Result(kind))
            | (AssetPart::Port, GraphPart::Port(kind))
            | (AssetPart::Scaled, GraphPart::Scaled(kind)) => kind,
            (AssetPart::ComputedWrite, GraphPart::SliceUpdate { computed }) => return *computed,
            _ => return false,
        };
        let TensorKind { element, rank, dynamic, last_axis_of_one } = *kind;
        let is_named = element.is_some_and(|element| self.elements.iter().any(|name| name == element.name()));
        (self.elements.is_empty() || is_named)
            && self.rank_above.is_none_or(|most| rank > most)
            && (!self.dynamic || dynamic)
            && (!self.last_axis_of_one || last_axis_of_one)
    }
}

impl AssetPart {
    fn noun(self, count: usize) -> &'static str {
        let (one, several) = match self {
            AssetPart::Result => ("result", "results"),
            AssetPart::Port => ("input, output or state", "inputs, outputs or states"),
            AssetPart::Scaled => ("weight", "weights"),
            AssetPart::ComputedWrite => ("write", "writes"),
        };
        if count == 1 { one } else { several }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_coreai::aicode::ElementType;
    use std::collections::BTreeMap;

    #[test]
    fn rules_apply_to_the_parts_that_they_name() {
        let broken = |part: GraphPart| {
            let graph = GraphInventory {
                name: "main".into(),
                composite: None,
                inputs: Vec::new(),
                states: Vec::new(),
                outputs: Vec::new(),
                ops: BTreeMap::new(),
                unknown_ops: 0,
                parts: BTreeMap::from([(part, 2)]),
            };
            let all = rules().into_iter();
            let found = all.filter(|rule| matches!(&rule.applies, Applies::Asset(p) if p.count(&graph) == 2));
            found.map(|rule| rule.id).collect::<Vec<_>>()
        };
        let flat = |element| TensorKind { element: Some(element), rank: 2, dynamic: false, last_axis_of_one: false };
        let f16 = flat(ElementType::F16);
        for (part, id) in [
            (GraphPart::Result(flat(ElementType::F32)), "asset-float32"),
            (GraphPart::Result(flat(ElementType::Si32)), "asset-wide-integers"),
            (GraphPart::Result(TensorKind { rank: 6, ..f16 }), "asset-rank-above-5"),
            (GraphPart::Result(TensorKind { dynamic: true, ..f16 }), "asset-dynamic-shapes"),
            (GraphPart::Port(flat(ElementType::Si32)), "asset-ports"),
            (GraphPart::Port(TensorKind { last_axis_of_one: true, ..f16 }), "asset-last-axis-of-one"),
            (GraphPart::Scaled(flat(ElementType::Si4)), "asset-four-bit-integers"),
            (GraphPart::SliceUpdate { computed: true }, "asset-slice-update"),
        ] {
            assert_eq!(broken(part), [id]);
        }
        for part in [
            GraphPart::Result(TensorKind { last_axis_of_one: true, ..f16 }),
            GraphPart::Port(f16),
            GraphPart::Scaled(flat(ElementType::Si8)),
            GraphPart::SliceUpdate { computed: false },
        ] {
            assert!(broken(part).is_empty(), "{part:?}");
        }
    }
}
