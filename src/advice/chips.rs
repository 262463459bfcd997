//! Chips of `tables/chips.yaml`: published facts about their Neural Engines, with sources.

use crate::tables;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use anec_base::{Diagnostic, Fault};
use anec_manifest::{Granularity, Int8Op, NumberFormat, WeightFormat};

/// Part of the binary, so that predictions are the same everywhere.
const CHIPS: &str = include_str!("tables/chips.yaml");

/// Table of chips.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChipTable {
    /// Sources by the names that facts refer to.
    pub sources: BTreeMap<String, FactSource>,
    /// Common facts of chips with the same Neural Engine.
    pub generations: Vec<Chip>,
    /// Chips.
    pub chips: Vec<Chip>,
    /// Systems with known defects.
    pub systems: Vec<SystemDefect>,
}

/// Publication.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FactSource {
    /// Author, title, revision, place.
    pub what: String,
    /// Date of publication or access: `2026-11-22`.
    pub date: String,
}

/// Published fact.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fact<T> {
    /// Value.
    pub value: T,
    /// Name of the source in [`ChipTable::sources`].
    pub source: String,
    /// Remark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A chip, or a generation of chips.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Chip {
    /// Name: `M4 Max`.
    pub name: String,
    /// Generation whose facts the chip inherits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<String>,
    /// Rate at which the Neural Engine streams weights, in GB/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_gb_s: Option<Fact<f64>>,
    /// Peak memory bandwidth, in GB/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_gb_s: Option<Fact<f64>>,
    /// Rate of palette lookups, in 10^9 weights a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub palette_gweights_s: Option<Fact<f64>>,
    /// Peak rate of fp16 operations, in TFLOPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tflops: Option<Fact<f64>>,
    /// Fixed cost of a call, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_ms: Option<Fact<f64>>,
    /// How each form of weights is read.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub weights: BTreeMap<WeightPath, Fact<Reading>>,
    /// Largest size of the last two axes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_width: Option<Fact<u64>>,
    /// Largest size of the channel axis.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_channels: Option<Fact<u64>>,
    /// Number of ops of the largest program known to compile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_ops: Option<Fact<usize>>,
    /// Weights of the largest package known to run on the Neural Engine, in MB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_package_mb: Option<Fact<f64>>,
    /// Maximum number of states of a function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_states: Option<Fact<usize>>,
    /// Memory limit of a process, in MB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process_mb: Option<Fact<f64>>,
}

/// Form of weights, as far as the Neural Engine distinguishes them.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema, strum::Display,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum WeightPath {
    /// Uncompressed.
    Fp16,
    /// 8-bit integers with a scale per tensor or channel, by `constexpr_affine_dequantize`.
    Int8Affine,
    /// 8-bit integers with a scale per tensor or channel, by `constexpr_blockwise_shift_scale`.
    Int8Blockwise,
    /// Integers with a scale per block of input channels.
    Blocks,
    /// 4-bit integers.
    Int4,
    /// Indices into one palette.
    Palette,
    /// Indices into palettes of groups of rows.
    GroupedPalette,
    /// Sparse weights.
    Sparse,
}

impl WeightPath {
    /// Form of a number format.
    pub fn of(format: &NumberFormat) -> Self {
        match (format.weights, format.granularity) {
            (WeightFormat::None, _) => WeightPath::Fp16,
            (_, Granularity::Block(_)) => WeightPath::Blocks,
            (WeightFormat::Int4, _) => WeightPath::Int4,
            (WeightFormat::Int8, _) if format.op == Int8Op::Affine => WeightPath::Int8Affine,
            (WeightFormat::Int8, _) => WeightPath::Int8Blockwise,
            (_, Granularity::Group(_)) => WeightPath::GroupedPalette,
            _ => WeightPath::Palette,
        }
    }
}

/// How weights reach the multipliers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Reading {
    /// Compressed, in every call.
    Streams,
    /// As fp16: expanded when the program is loaded.
    Unfolds,
    /// Not on the Neural Engine.
    Fails,
}

/// System with a known defect.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SystemDefect {
    /// Affected systems.
    pub os: String,
    /// Affected chips; all if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chips: Vec<String>,
    /// Defect.
    pub defect: String,
    /// Remedy.
    pub remedy: String,
    /// Name of the source in [`ChipTable::sources`].
    pub source: String,
}

/// Target of a program: a chip and, optionally, the version of its system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChipTarget<'a> {
    /// Chip.
    pub chip: &'a Chip,
    /// Major version of the system: `27`.
    pub os: Option<u32>,
}

impl ChipTarget<'_> {
    /// Name on the command line: `m5-pro@27`.
    pub fn id(&self) -> String {
        self.os.map_or_else(|| self.chip.id(), |os| format!("{}@{os}", self.chip.id()))
    }

    /// Whether a list of chips and systems includes the target. An empty list includes everything. If the target's
    /// system isn't known, all systems are included.
    pub fn is_meant(&self, chips: &[String], systems: &[u32]) -> bool {
        (chips.is_empty() || self.chip.is_among(chips))
            && (systems.is_empty() || self.os.is_none_or(|os| systems.contains(&os)))
    }
}

/// Error in a table of chips, or in a query.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChipError {
    /// Text that isn't a table.
    #[error("chips: {0}")]
    Syntax(String),
    /// Invalid fact.
    #[error("chips: {place}: {problem}")]
    Fact {
        /// Chip and fact.
        place: String,
        /// Found and expected.
        problem: String,
    },
    /// Unknown chip.
    #[error("no chip `{given}` is known")]
    Unknown {
        /// Name as given.
        given: String,
        /// Known chips.
        known: Vec<String>,
    },
    /// System that isn't a number.
    #[error("`{target}`: system `{given}`, expected a major version, as in m5@27")]
    System {
        /// System as given.
        given: String,
        /// Target.
        target: String,
    },
    /// Missing published data.
    #[error("the speed of {chip} can't be predicted: {missing} isn't published")]
    Unpublished {
        /// Chip.
        chip: String,
        /// Missing fact.
        missing: &'static str,
        /// Chips for which the fact is known.
        known: Vec<String>,
    },
}

impl Diagnostic for ChipError {
    fn fault(&self) -> Fault {
        match self {
            ChipError::Syntax(_) | ChipError::Fact { .. } => Fault::Source,
            ChipError::Unknown { .. } | ChipError::System { .. } | ChipError::Unpublished { .. } => Fault::Usage,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            ChipError::Syntax(_) | ChipError::Fact { .. } | ChipError::System { .. } => None,
            ChipError::Unknown { known, .. } | ChipError::Unpublished { known, .. } => {
                Some(format!("expected one of {}", known.join(", ")))
            }
        }
    }
}

/// Normalizes names for comparison: `m4-max`, `M4_Max` and `Apple M4 Max` are equal.
fn folded(name: &str) -> String {
    let name = name.to_lowercase();
    name.strip_prefix("apple ").unwrap_or(&name).chars().filter(|c| c.is_alphanumeric()).collect()
}

impl ChipTable {
    /// Returns the JSON Schema of `chips.yaml`.
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(ChipTable).into()
    }

    /// Built-in table.
    pub fn built_in() -> &'static ChipTable {
        static TABLE: LazyLock<ChipTable> =
            LazyLock::new(|| ChipTable::parse(CHIPS).expect("tables/chips.yaml is part of the binary and tested"));
        &TABLE
    }

    /// Parses a table. Every fact must refer to a source of the list; chips inherit the facts of their generation.
    ///
    /// # Errors
    /// If the text isn't a table, or a fact is invalid.
    pub fn parse(text: &str) -> Result<ChipTable, ChipError> {
        let mut table: ChipTable = tables::parse(text).map_err(ChipError::Syntax)?;
        let wrong = |place: &str, problem: String| ChipError::Fact { place: place.to_owned(), problem };
        for (name, source) in &table.sources {
            let digits: Vec<&str> = source.date.split('-').collect();
            let dated = [4, 2, 2].iter().zip(&digits).all(|(n, part)| part.len() == *n && part.parse::<u16>().is_ok());
            if digits.len() != 3 || !dated || source.what.trim().is_empty() {
                let problem = format!("`{}` of {}, expected a title and a day (2026-11-22)", source.what, source.date);
                return Err(wrong(&format!("source {name}"), problem));
            }
        }
        let mut names = BTreeSet::new();
        for chip in table.generations.iter().chain(&table.chips) {
            for (fact, source) in chip.sources() {
                let place = format!("{}, {fact}", chip.name);
                if !table.sources.contains_key(source) {
                    return Err(wrong(&place, format!("source `{source}` isn't in the list of sources")));
                }
            }
            for (fact, value) in chip.numbers() {
                if !(value.is_finite() && value > 0.0) {
                    return Err(wrong(
                        &format!("{}, {fact}", chip.name),
                        format!("{value}, expected a number above 0"),
                    ));
                }
            }
        }
        for chip in &table.chips {
            if !names.insert(folded(&chip.name)) {
                return Err(wrong(&chip.name, "it is there twice".into()));
            }
        }
        for system in &table.systems {
            if !table.sources.contains_key(&system.source) {
                return Err(wrong(&system.os, format!("source `{}` isn't in the list of sources", system.source)));
            }
            if let Some(chip) = system.chips.iter().find(|chip| !names.contains(&folded(chip))) {
                return Err(wrong(&system.os, format!("no chip `{chip}` is in the list of chips")));
            }
        }
        for chip in &mut table.chips {
            let Some(name) = &chip.generation else { continue };
            let Some(common) = table.generations.iter().find(|generation| generation.name == *name) else {
                return Err(wrong(&chip.name, format!("no generation `{name}` is in the list of generations")));
            };
            chip.inherit(common);
        }
        Ok(table)
    }

    /// Finds a chip by its name in any spelling: `m4-max`, `M4 Max`, `Apple M4 Max`.
    ///
    /// # Errors
    /// [`ChipError::Unknown`], which lists the known chips.
    pub fn find(&self, name: &str) -> Result<&Chip, ChipError> {
        self.chips.iter().find(|chip| folded(&chip.name) == folded(name)).ok_or_else(|| ChipError::Unknown {
            given: name.to_owned(),
            known: self.chips.iter().map(Chip::id).collect(),
        })
    }

    /// Parses a target: the name of a chip, optionally followed by `@` and the major version of its system.
    ///
    /// # Errors
    /// If there is no such chip, or the version isn't a number.
    pub fn target(&self, name: &str) -> Result<ChipTarget<'_>, ChipError> {
        let (chip, os) = name.split_once('@').map_or((name, None), |(chip, os)| (chip, Some(os)));
        let version = |os: &str| {
            let wrong = || ChipError::System { given: os.to_owned(), target: name.to_owned() };
            os.trim().parse::<u32>().map_err(|_| wrong())
        };
        Ok(ChipTarget { chip: self.find(chip)?, os: os.map(version).transpose()? })
    }

    /// Known defects of a chip's systems.
    pub fn defects_of<'a>(&'a self, chip: &'a Chip) -> impl Iterator<Item = &'a SystemDefect> {
        let on_it = |name: &String| folded(name) == folded(&chip.name);
        self.systems.iter().filter(move |system| system.chips.is_empty() || system.chips.iter().any(on_it))
    }
}

impl Chip {
    /// Name on the command line: `m4-max`.
    pub fn id(&self) -> String {
        self.name.to_lowercase().replace(' ', "-")
    }

    /// Whether a list of names contains the chip or its generation.
    pub fn is_among(&self, names: &[String]) -> bool {
        let own = [Some(&self.name), self.generation.as_ref()];
        own.into_iter().flatten().any(|own| names.iter().any(|name| folded(name) == folded(own)))
    }

    /// How a form of weights is read; `None` if nothing is published.
    pub fn reading(&self, path: WeightPath) -> Option<Reading> {
        match path {
            WeightPath::Fp16 => Some(Reading::Streams),
            path => self.weights.get(&path).map(|fact| fact.value),
        }
    }

    /// Floating-point facts of the chip itself, by name.
    fn floats(&self) -> [(&'static str, &Option<Fact<f64>>); 7] {
        [
            ("bandwidth_gb_s", &self.bandwidth_gb_s),
            ("memory_gb_s", &self.memory_gb_s),
            ("palette_gweights_s", &self.palette_gweights_s),
            ("tflops", &self.tflops),
            ("call_ms", &self.call_ms),
            ("most_package_mb", &self.most_package_mb),
            ("process_mb", &self.process_mb),
        ]
    }

    fn numbers(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.floats().into_iter().filter_map(|(name, fact)| Some((name, fact.as_ref()?.value)))
    }

    /// Sources of all facts of the chip itself.
    fn sources(&self) -> IndexMap<String, &str> {
        let mut sources = IndexMap::new();
        for (name, fact) in self.floats() {
            sources.extend(fact.as_ref().map(|fact| (name.to_owned(), fact.source.as_str())));
        }
        for (name, fact) in [("most_width", &self.most_width), ("most_channels", &self.most_channels)] {
            sources.extend(fact.as_ref().map(|fact| (name.to_owned(), fact.source.as_str())));
        }
        for (name, fact) in [("most_ops", &self.most_ops), ("most_states", &self.most_states)] {
            sources.extend(fact.as_ref().map(|fact| (name.to_owned(), fact.source.as_str())));
        }
        sources.extend(self.weights.iter().map(|(path, fact)| (format!("weights.{path}"), fact.source.as_str())));
        sources
    }

    /// Inherits missing facts from a generation.
    fn inherit(&mut self, common: &Chip) {
        fn take<T: Clone>(own: &mut Option<Fact<T>>, common: &Option<Fact<T>>) {
            if own.is_none() {
                own.clone_from(common);
            }
        }
        take(&mut self.bandwidth_gb_s, &common.bandwidth_gb_s);
        take(&mut self.memory_gb_s, &common.memory_gb_s);
        take(&mut self.palette_gweights_s, &common.palette_gweights_s);
        take(&mut self.tflops, &common.tflops);
        take(&mut self.call_ms, &common.call_ms);
        take(&mut self.most_width, &common.most_width);
        take(&mut self.most_channels, &common.most_channels);
        take(&mut self.most_ops, &common.most_ops);
        take(&mut self.most_package_mb, &common.most_package_mb);
        take(&mut self.most_states, &common.most_states);
        take(&mut self.process_mb, &common.process_mb);
        for (path, fact) in &common.weights {
            self.weights.entry(*path).or_insert_with(|| fact.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_fits_its_schema_and_its_rules() {
        let json: serde_json::Value = serde_yaml::from_str(CHIPS).unwrap();
        jsonschema::validate(&ChipTable::schema(), &json).unwrap();
        let table = ChipTable::parse(CHIPS).unwrap();
        assert!(table.chips.len() >= 25, "{}", table.chips.len());
        // every source is used, and every generation has chips
        let used: BTreeSet<&str> = table
            .generations
            .iter()
            .chain(&table.chips)
            .flat_map(|chip| chip.sources().into_values())
            .chain(table.systems.iter().map(|system| system.source.as_str()))
            .collect();
        assert_eq!(used, table.sources.keys().map(String::as_str).collect());
        for generation in &table.generations {
            assert!(table.chips.iter().any(|chip| chip.generation.as_ref() == Some(&generation.name)));
        }
    }

    #[test]
    fn chips_have_the_facts_of_their_generation_and_their_own() {
        let table = ChipTable::built_in();
        let max = table.find("m4-max").unwrap();
        assert_eq!(max.bandwidth_gb_s.as_ref().unwrap().value, 118.88);
        assert_eq!(max.most_width.as_ref().unwrap().value, 65536);
        assert_eq!(table.find("Apple M4 Max").unwrap(), max);
        let form = |weights, granularity, op| NumberFormat { weights, granularity, row_scale: false, op };
        let int8 = |op| WeightPath::of(&form(WeightFormat::Int8, Granularity::PerChannel, op));
        let m2 = table.find("M2").unwrap();
        // the older op streams, the newer one is expanded
        assert_eq!(m2.reading(int8(Int8Op::Affine)), Some(Reading::Streams));
        assert_eq!(m2.reading(int8(Int8Op::Auto)), Some(Reading::Unfolds));
        assert_eq!(max.reading(int8(Int8Op::Auto)), Some(Reading::Streams));
        let groups = WeightPath::of(&form(WeightFormat::Palette4, Granularity::Group(16), Int8Op::Auto));
        assert_eq!(table.find("m1-pro").unwrap().reading(groups), Some(Reading::Fails));
        assert_eq!(max.reading(groups), None);
    }

    #[test]
    fn a_target_is_a_chip_and_its_system() {
        let table = ChipTable::built_in();
        let target = table.target("m5-pro@27").unwrap();
        assert_eq!((target.id().as_str(), target.chip.name.as_str(), target.os), ("m5-pro@27", "M5 Pro", Some(27)));
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        // a generation includes its chips
        assert!(target.is_meant(&names(&["M5"]), &[]) && target.is_meant(&[], &[26, 27]));
        assert!(!target.is_meant(&names(&["M5 Max"]), &[]) && !target.is_meant(&[], &[26]));
        assert!(table.target("m5-pro").unwrap().is_meant(&[], &[26]));
        assert!(table.target("m5@tahoe").unwrap_err().to_string().contains("`tahoe`, expected a major version"));
    }

    #[test]
    fn errors_list_known_chips() {
        let error = ChipTable::built_in().find("m9").unwrap_err();
        assert_eq!((error.to_string().as_str(), error.fault()), ("no chip `m9` is known", Fault::Usage));
        let help = error.help().unwrap();
        assert!(help.starts_with("expected one of a14, a15,") && help.ends_with("m5-max, m6"), "{help}");
    }

    #[test]
    fn facts_without_a_source_are_refused() {
        let table = |chip: &str| {
            let text = format!(
                "sources: {{ a: {{ what: a book, date: 2026-01-31 }} }}\ngenerations: []\nsystems: []\nchips:\n  - {chip}\n"
            );
            ChipTable::parse(&text).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(table("{ name: M0, call_ms: { value: 1, source: a } }"), Ok(()));
        for (chip, said) in [
            ("{ name: M0, call_ms: { value: 1 } }", "missing field `source`"),
            ("{ name: M0, call_ms: 1 }", "chips: "),
            ("{ name: M0, call_ms: { value: 1, source: b } }", "chips: M0, call_ms: source `b` isn't in the list"),
            ("{ name: M0, call_ms: { value: 0, source: a } }", "chips: M0, call_ms: 0, expected a number above 0"),
            ("{ name: M0, weights: { palette: { value: streams, source: c } } }", "M0, weights.palette: source `c`"),
            ("{ name: M0, generation: M }", "chips: M0: no generation `M`"),
            ("{ name: M0, speed: { value: 1, source: a } }", "speed"),
        ] {
            let error = table(chip).unwrap_err();
            assert!(error.contains(said), "{chip}: {error}");
        }
        let undated = "sources: { a: { what: a book, date: soon } }\ngenerations: []\nsystems: []\nchips: []";
        assert!(ChipTable::parse(undated).unwrap_err().to_string().starts_with("chips: source a: `a book` of soon"));
    }
}
