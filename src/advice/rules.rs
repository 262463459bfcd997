//! Rules of `tables/ane-rules.yaml` and error codes of `tables/errors.yaml`.

use crate::tables;
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::chips::ChipTarget;

/// Part of the binary, so that forecasts are the same everywhere.
const RULES: &str = include_str!("tables/ane-rules.yaml");
const ERRORS: &str = include_str!("tables/errors.yaml");

/// Known reason why a program leaves the Neural Engine, or is slow on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Name.
    pub id: String,
    /// Subject in a few words.
    pub what: String,
    /// Consequence.
    pub why: String,
    /// Remedy.
    pub remedy: String,
    /// Severity.
    pub severity: Severity,
    /// Pattern that the rule applies to.
    pub applies: Applies,
    /// Chips or generations that the rule is about; all if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chips: Vec<String>,
    /// Major system versions that the rule is about; all if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub systems: Vec<u32>,
    /// Sources for and against the rule.
    pub evidence: Vec<Evidence>,
}

impl Rule {
    /// Whether the rule is about at least one of the targets, or no target is given.
    pub fn concerns(&self, targets: &[ChipTarget<'_>]) -> bool {
        targets.is_empty() || targets.iter().any(|target| target.is_meant(&self.chips, &self.systems))
    }
}

/// Severity of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Severity {
    /// Runs on the Neural Engine and computes wrong numbers.
    Wrong,
    /// Expected to leave the Neural Engine, or not to compile for it.
    Falls,
    /// Contested, or dependent on chip, system and size.
    Doubtful,
    /// Runs on the Neural Engine, but slowly.
    Slow,
}

impl Severity {
    /// Whether a form to which such a rule applies can't be used on the Neural Engine.
    pub fn excludes(self) -> bool {
        matches!(self, Severity::Wrong | Severity::Falls)
    }
}

/// Evidence for or against a rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// For or against the rule.
    pub says: Says,
    /// Source.
    pub source: String,
    /// Device of the observation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// System of the observation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os: Option<String>,
    /// Date of the observation or source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
}

/// Direction of evidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Says {
    /// Supports the rule.
    For,
    /// Contradicts the rule.
    Against,
}

/// Pattern that a rule applies to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Applies {
    /// Compute ops.
    Op(OpPattern),
    /// Ops that expand compressed weights.
    Constexpr(ConstexprPattern),
    /// States of a function.
    State(StatePattern),
    /// Flexible dimensions.
    Lengths(LengthsPattern),
    /// Weights of a package.
    Weights(WeightsPattern),
    /// Constants.
    Constant(ConstantPattern),
    /// All ops of a function.
    Program(ProgramPattern),
    /// Parts of a graph in an asset of Core AI.
    Asset(AssetPattern),
}

/// Pattern of parts of a graph in an asset of Core AI; every given key must match.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AssetPattern {
    /// Part that the rule is about.
    pub part: AssetPart,
    /// Element type is one of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub elements: Vec<String>,
    /// Rank is larger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank_above: Option<usize>,
    /// A dimension has no fixed size.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dynamic: bool,
    /// The last of several axes has the size 1.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub last_axis_of_one: bool,
}

/// Part of a graph in an asset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AssetPart {
    /// Results of operations.
    Result,
    /// Inputs, outputs and states.
    Port,
    /// Constants that are expanded by scales.
    Scaled,
    /// Writes of slices at computed indices.
    ComputedWrite,
}

/// Pattern of compute ops; every given key must match.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OpPattern {
    /// Operator is one of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operators: Vec<String>,
    /// Element type of a result is one of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dtypes: Vec<String>,
    /// Rank of a tensor is larger.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank_above: Option<usize>,
    /// Size of a dimension is larger.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dim_above: Option<u64>,
    /// Size of one of the last two axes is larger.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width_above: Option<u64>,
    /// Product of a result's last two axes is at least this, at the largest size of flexible dimensions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plane_from: Option<u64>,
    /// Last axis but one of a result can have a size from the first to the second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows_between: Option<[u64; 2]>,
    /// Last axis of a result is smaller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_axis_below: Option<u64>,
    /// Convolution with more input channels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_channels_above: Option<u64>,
    /// Convolution with one group per channel.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub depthwise: bool,
    /// Convolution whose fp16 weights per core are close to a multiple of 1 MiB.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub payload_notch: bool,
}

/// Pattern of ops that expand compressed weights; every given key must match.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConstexprPattern {
    /// Operator is one of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operators: Vec<String>,
    /// Element type of the data is one of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dtypes: Vec<String>,
    /// Several scales along another axis than the first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub blockwise: bool,
    /// Several palettes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub grouped: bool,
}

/// Pattern of states; every given key must match.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StatePattern {
    /// Last axis isn't a multiple of this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_axis_multiple_of: Option<u64>,
    /// Two states have different shapes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub different_shapes: bool,
    /// Number of states is larger.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count_above: Option<usize>,
    /// Old content is used by several ops, or the state is written more than once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub used_beyond_update: bool,
    /// Matrix product of a value derived from a state with itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub times_itself: bool,
}

/// Pattern of a function's ops; every given key must match.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProgramPattern {
    /// Number of ops without constants is larger.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ops_above: Option<usize>,
}

/// Pattern of flexible dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthsPattern {
    /// Range of sizes.
    Range,
    /// Enumerated sizes.
    Enumerated,
    /// Inputs of fixed shape in a function that has states and inputs with a range.
    RangeBesideFixed,
}

/// Pattern of a package's weights; every given key must match.
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

/// Pattern of constants; every given key must match.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConstantPattern {
    /// Small constants with an infinite element.
    pub infinite: bool,
}

/// Meaning of an error code or message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meaning {
    /// Codes and parts of messages.
    pub codes: Vec<String>,
    /// Meaning in a sentence.
    pub title: String,
    /// Possible causes.
    pub causes: Vec<String>,
    /// Sources.
    pub evidence: Vec<String>,
    /// Next steps.
    pub next: String,
}

/// All rules.
pub fn rules() -> Vec<Rule> {
    static PARSED: LazyLock<Vec<Rule>> = LazyLock::new(|| tables::built_in("src/advice/tables/ane-rules.yaml", RULES));
    PARSED.clone()
}

/// Meanings of all codes.
pub fn meanings() -> Vec<Meaning> {
    tables::built_in("src/advice/tables/errors.yaml", ERRORS)
}

/// Returns the meaning of a code or message: the entry with exactly this code, otherwise all entries of which a code
/// occurs in the text.
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
    // a number that isn't a code of Core ML is an exit status
    match found.is_empty() && text.parse::<u8>().is_ok() {
        true => meaning(&format!("exit {text}")),
        false => found,
    }
}

/// Whether `text` contains `word` as a whole word: 11 isn't in 110, -1 isn't in -14.
fn contains_word(text: &str, word: &str) -> bool {
    let goes_on = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '-');
    text.match_indices(word)
        .any(|(at, _)| !goes_on(text[..at].chars().next_back()) && !goes_on(text[at + word.len()..].chars().next()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_coreai::aicode::ElementType;
    use std::collections::BTreeSet;

    #[test]
    fn every_rule_has_a_name_of_its_own_and_evidence() {
        let rules = rules();
        let names: BTreeSet<&str> = rules.iter().map(|rule| rule.id.as_str()).collect();
        assert_eq!(names.len(), rules.len());
        for rule in &rules {
            assert!(!rule.evidence.is_empty() && !rule.remedy.is_empty(), "{}", rule.id);
            // every rule has support; a contradicted rule isn't certain, unless it is only slow
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

    /// Whether a JSON Schema has a property, by its path `a.b`.
    fn has_property(root: &serde_json::Value, schema: &serde_json::Value, path: &[&str]) -> bool {
        let Some((first, rest)) = path.split_first() else { return true };
        if let Some(name) = schema["$ref"].as_str() {
            return has_property(root, root.pointer(name.trim_start_matches('#')).unwrap(), path);
        }
        let alternatives = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| schema[key].as_array()).flatten();
        schema["properties"].get(first).is_some_and(|property| has_property(root, property, rest))
            || alternatives.into_iter().any(|alternative| has_property(root, alternative, path))
    }

    #[test]
    fn remedies_name_keys_that_exist() {
        let schema = anec_manifest::schema();
        let rules = rules().into_iter().map(|rule| (rule.id, rule.remedy));
        let systems = crate::ChipTable::built_in().systems.iter();
        let systems = systems.map(|system| (system.os.clone(), system.remedy.clone()));
        let codes = meanings().into_iter().map(|meaning| (meaning.codes[0].clone(), meaning.next));
        let mut checked = 0;
        for (place, remedy) in rules.chain(systems).chain(codes) {
            for span in remedy.split('`').skip(1).step_by(2) {
                if let Some((key, value)) = span.split_once(": ") {
                    let manifest = anec_manifest::Manifest::from_yaml("", &place, &[format!("{key}={value}")]);
                    // a value that needs another key beside it is one
                    let known = matches!(manifest, Ok(_) | Err(anec_manifest::ManifestError::Value { .. }));
                    assert!(known, "{place}: `{span}`: {}", manifest.unwrap_err());
                } else if !span.contains(' ') && !span.starts_with("--") {
                    let path: Vec<&str> = span.split('.').collect();
                    assert!(has_property(&schema, &schema, &path), "{place}: a manifest has no key `{span}`");
                } else {
                    continue;
                }
                checked += 1;
            }
        }
        assert!(checked > 30, "{checked} keys");
        assert!(!has_property(&schema, &schema, &["lm_head", "pieces"]));
    }

    #[test]
    fn rules_name_operators_and_types_that_exist() {
        let known: BTreeSet<&str> = anec_mil::catalogue::table().iter().map(|spec| spec.name).collect();
        for rule in rules() {
            let (operators, dtypes) = match &rule.applies {
                Applies::Op(pattern) => (&pattern.operators, &pattern.dtypes),
                Applies::Constexpr(pattern) => (&pattern.operators, &pattern.dtypes),
                Applies::Asset(pattern) => {
                    let known = |name: &String| ElementType::all().any(|element| element.name() == name);
                    assert!(pattern.elements.iter().all(known), "{}: {:?}", rule.id, pattern.elements);
                    continue;
                }
                _ => continue,
            };
            for dtype in dtypes {
                assert!(anec_mil::DataType::from_name(dtype).is_some(), "{}: {dtype}", rule.id);
            }
            // the catalogue lacks some ops of other packages; a misspelt one resembles one that it has
            let foreign = operators.iter().filter(|operator| !known.contains(operator.as_str()));
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
