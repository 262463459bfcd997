//! The rules of `validators/ane-rules.yaml` and the codes of `validators/errors.yaml`, typed.

use crate::data;
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::chips::ChipTarget;

/// Built into the binary, so that a forecast doesn't depend on where it is made.
const RULES: &str = include_str!("validators/ane-rules.yaml");
const ERRORS: &str = include_str!("validators/errors.yaml");

/// Something that is said to keep a program off the Neural Engine, or to slow it there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Its name.
    pub id: String,
    /// What it is about.
    pub what: String,
    /// Why that matters.
    pub why: String,
    /// What to do.
    pub remedy: String,
    /// How much it matters.
    pub severity: Severity,
    /// What it applies to.
    pub applies: Applies,
    /// The chips, or generations of chips, that it is about; all if none are named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chips: Vec<String>,
    /// The major versions of systems that it is about; all if none are named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub systems: Vec<u32>,
    /// Who says so, and who says otherwise.
    pub evidence: Vec<Evidence>,
}

impl Rule {
    /// Whether it is about one of these targets at least; where none is named, it is about what may come.
    pub fn concerns(&self, targets: &[ChipTarget<'_>]) -> bool {
        targets.is_empty() || targets.iter().any(|target| target.is_meant(&self.chips, &self.systems))
    }
}

/// How much a rule matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Severity {
    /// Expected to leave the Neural Engine, or not to compile for it.
    Falls,
    /// Sources differ, or it depends on chip, OS and size.
    Doubtful,
    /// Runs there, but slower than need be.
    Slow,
}

/// A source for a rule, or against it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// For the rule, or against it.
    pub says: Says,
    /// Who.
    pub source: String,
    /// The device on which it was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Its system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os: Option<String>,
    /// When, or the date of the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
}

/// Whether evidence supports a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Says {
    /// It does.
    For,
    /// It contradicts it.
    Against,
}

/// What a rule applies to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Applies {
    /// Ops that compute.
    Op(OpPattern),
    /// Ops that expand compressed weights.
    Constexpr(ConstexprPattern),
    /// States of a function.
    State(StatePattern),
    /// Dimensions that aren't fixed.
    Lengths(LengthsPattern),
    /// Weights of a package.
    Weights(WeightsPattern),
    /// Constants.
    Constant(ConstantPattern),
    /// All ops of a function.
    Program(ProgramPattern),
}

/// Ops that compute; every key that is given must hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OpPattern {
    /// One of these operators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operators: Vec<String>,
    /// A result of one of these element types.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dtypes: Vec<String>,
    /// A tensor of more dimensions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank_above: Option<usize>,
    /// A dimension that is larger.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dim_above: Option<u64>,
    /// A size of one of the last two axes that is larger.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width_above: Option<u64>,
    /// A result whose last axis is smaller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_axis_below: Option<u64>,
    /// A convolution of more input channels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_channels_above: Option<u64>,
    /// A convolution with a group for each channel.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub depthwise: bool,
    /// A convolution whose fp16 weights are next to a multiple of 1 MiB for each core.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub payload_notch: bool,
}

/// Ops that expand compressed weights; every key that is given must hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConstexprPattern {
    /// One of these operators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operators: Vec<String>,
    /// Data of one of these element types.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dtypes: Vec<String>,
    /// Several scales along another axis than the first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub blockwise: bool,
    /// Several palettes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub grouped: bool,
}

/// States of a function; every key that is given must hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StatePattern {
    /// One whose last axis isn't a multiple of this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_axis_multiple_of: Option<u64>,
    /// Two of different shapes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub different_shapes: bool,
    /// More than this many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count_above: Option<usize>,
    /// One whose content, before it is written, several ops use, or that is written more than once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub used_beyond_update: bool,
    /// A product of matrices of what follows from a state with itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub times_itself: bool,
}

/// All ops of a function; every key that is given must hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProgramPattern {
    /// More of them than this, constants aside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ops_above: Option<usize>,
}

/// Dimensions that aren't fixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthsPattern {
    /// With a range of sizes.
    Range,
    /// With several sizes.
    Enumerated,
    /// Inputs without any, in a function that has states and other inputs with a range.
    RangeBesideFixed,
}

/// Weights of a package; every key that is given must hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WeightsPattern {
    /// More bytes than this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_above: Option<u64>,
    /// Fewer bytes than this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_below: Option<u64>,
}

/// Constants; every key that is given must hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConstantPattern {
    /// Small ones with an infinite element.
    pub infinite: bool,
}

/// What a code or message means.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meaning {
    /// Codes and parts of messages.
    pub codes: Vec<String>,
    /// In a sentence.
    pub title: String,
    /// What may have led to it.
    pub causes: Vec<String>,
    /// Who says so.
    pub evidence: Vec<String>,
    /// What to do next.
    pub next: String,
}

/// All rules.
pub fn rules() -> Vec<Rule> {
    static PARSED: LazyLock<Vec<Rule>> = LazyLock::new(|| data::built_in("ane-rules.yaml", RULES));
    PARSED.clone()
}

/// All codes.
pub fn meanings() -> Vec<Meaning> {
    data::built_in("errors.yaml", ERRORS)
}

/// What a code or a message means: the entry with exactly this code, else every entry of which a code is part of it.
pub fn meaning(text: &str) -> Vec<Meaning> {
    let text = text.trim().to_lowercase().replace("exit code", "exit");
    let all = meanings();
    let exact = |meaning: &&Meaning| meaning.codes.iter().any(|code| code.to_lowercase() == text);
    let found: Vec<Meaning> = all.iter().filter(exact).cloned().collect();
    if !found.is_empty() {
        return found;
    }
    let found: Vec<Meaning> = all
        .iter()
        .filter(|meaning| meaning.codes.iter().any(|code| contains_word(&text, &code.to_lowercase())))
        .cloned()
        .collect();
    // a number that is no code of Core ML is what a program ended with
    match found.is_empty() && text.parse::<u8>().is_ok() {
        true => meaning(&format!("exit {text}")),
        false => found,
    }
}

/// Whether `text` contains `word` with nothing that goes on before or after: 11 is not in 110, -1 not in -14.
fn contains_word(text: &str, word: &str) -> bool {
    let goes_on = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '-');
    text.match_indices(word)
        .any(|(at, _)| !goes_on(text[..at].chars().next_back()) && !goes_on(text[at + word.len()..].chars().next()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_rule_has_a_name_of_its_own_and_evidence() {
        let rules = rules();
        let names: BTreeSet<&str> = rules.iter().map(|rule| rule.id.as_str()).collect();
        assert_eq!(names.len(), rules.len());
        for rule in &rules {
            assert!(!rule.evidence.is_empty() && !rule.remedy.is_empty(), "{}", rule.id);
            // what nobody supports is no rule; what somebody contradicts is no certainty, unless it is only slow
            assert!(rule.evidence.iter().any(|evidence| evidence.says == Says::For), "{}", rule.id);
        }
    }

    #[test]
    fn rules_name_chips_that_exist() {
        let table = crate::ChipTable::built_in();
        let known = |name: &String| {
            table.find(name).is_ok() || table.generations.iter().any(|generation| generation.name == *name)
        };
        for rule in rules() {
            assert!(rule.chips.iter().all(known), "{}: {:?}", rule.id, rule.chips);
        }
        let named = |id: &str, target: &str| {
            let target = table.target(target).unwrap();
            rules().iter().find(|rule| rule.id == id).unwrap().concerns(&[target])
        };
        assert!(named("stateful-m5", "m5-pro") && !named("stateful-m5", "m4-max"));
        assert!(named("dynamic-shapes-27", "m4@27") && !named("dynamic-shapes-27", "m4@26"));
        assert!(named("dynamic-shapes-27", "m4") && named("rank-above-5", "m4@26"));
    }

    #[test]
    fn rules_name_operators_and_types_that_exist() {
        let known: BTreeSet<&str> = anec_mil::catalogue::table().iter().map(|spec| spec.name).collect();
        for rule in rules() {
            let (operators, dtypes) = match &rule.applies {
                Applies::Op(pattern) => (&pattern.operators, &pattern.dtypes),
                Applies::Constexpr(pattern) => (&pattern.operators, &pattern.dtypes),
                _ => continue,
            };
            for dtype in dtypes {
                assert!(anec_mil::DataType::from_name(dtype).is_some(), "{}: {dtype}", rule.id);
            }
            // the catalogue lacks some that foreign packages have; a misspelt one is close to one that it has
            let foreign = operators.iter().filter(|operator| !known.contains(operator.as_str()) && *operator != "cond");
            for operator in foreign {
                let near = known.iter().find(|other| strsim::levenshtein(other, operator) <= 1);
                assert!(near.is_none(), "{}: {operator}, or {near:?}?", rule.id);
            }
        }
    }

    #[test]
    fn codes_are_found_in_messages_and_not_in_other_numbers() {
        let titles = |text: &str| meaning(text).into_iter().map(|m| m.codes[0].clone()).collect::<Vec<_>>();
        assert_eq!(titles("-14"), ["-14"]);
        assert_eq!(titles("-1"), ["-1"]);
        assert_eq!(titles("0x1D"), ["11"]);
        assert_eq!(titles("E5RT: Espresso exception: invalid blob"), ["Espresso exception"]);
        assert_eq!(titles("Error=-14"), ["-14"]);
        assert!(titles("1100").is_empty());
    }
}
