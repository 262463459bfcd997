//! Effects of `tables/ane-arithmetic.yaml`: published properties of the Neural Engine's arithmetic, which the
//! executor simulates.

use crate::tables;
use serde::Deserialize;

/// Part of the binary, so that a simulation can always name its sources.
const EFFECTS: &str = include_str!("tables/ane-arithmetic.yaml");

/// Published facts about one effect.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedEffect {
    /// Name of an [`EngineEffect`](anec_exec::EngineEffect).
    pub effect: String,
    /// Description of the effect.
    pub says: String,
    /// Unpublished details that were chosen here.
    pub ours: Option<String>,
    /// Chips that the source measured.
    pub chips: Vec<String>,
    /// Source of the measurement.
    pub source: String,
    /// Date of the source.
    pub date: String,
}

/// All effects that the executor simulates, with their sources.
#[allow(clippy::expect_used, reason = "a test reads the file that is built in")]
pub fn published_effects() -> Vec<PublishedEffect> {
    tables::built_in("src/advice/tables/ane-arithmetic.yaml", EFFECTS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_exec::EngineEffect;

    #[test]
    fn every_effect_has_its_source() {
        let published = published_effects();
        let names: Vec<&str> = published.iter().map(|row| row.effect.as_str()).collect();
        assert_eq!(names, EngineEffect::ALL.map(EngineEffect::name));
        for row in &published {
            assert!(!row.chips.is_empty() && !row.source.is_empty() && !row.says.is_empty(), "{row:?}");
            let [year, month, day] = row.date.split('-').collect::<Vec<_>>()[..] else { panic!("{row:?}") };
            assert!(year.len() == 4 && month.len() == 2 && day.len() == 2, "{row:?}");
        }
    }
}
