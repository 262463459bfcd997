//! The effects of `validators/ane-arithmetic.yaml`: who published what of the Neural Engine's arithmetic, which the
//! executor simulates.

use crate::data;
use serde::Deserialize;

/// Built into the binary, so that a simulation says everywhere what it rests on.
const EFFECTS: &str = include_str!("validators/ane-arithmetic.yaml");

/// What is published of one effect.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedEffect {
    /// Its name, that of an [`EngineEffect`](anec_exec::EngineEffect).
    pub effect: String,
    /// What happens.
    pub says: String,
    /// What isn't published and was chosen.
    pub ours: Option<String>,
    /// The chips of the source.
    pub chips: Vec<String>,
    /// Who measured it.
    pub source: String,
    /// The date of the source.
    pub date: String,
}

/// All effects that the executor simulates, with their sources.
#[allow(clippy::expect_used, reason = "a test reads the file that is built in")]
pub fn published_effects() -> Vec<PublishedEffect> {
    data::built_in("ane-arithmetic.yaml", EFFECTS)
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
