//! The chips of `validators/chips.yaml`: what is published of their Neural Engines, every fact with its source.

use crate::data;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use anec_base::{Diagnostic, Fault};
use anec_manifest::{Granularity, Int8Op, NumberFormat, WeightFormat};

/// Built into the binary, so that a prediction doesn't depend on where it is made.
const CHIPS: &str = include_str!("validators/chips.yaml");

/// All chips.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChipTable {
    /// Where facts come from, by the names that facts use.
    pub sources: BTreeMap<String, FactSource>,
    /// What chips with the same Neural Engine have in common.
    pub generations: Vec<Chip>,
    /// The chips.
    pub chips: Vec<Chip>,
    /// Systems with known defects.
    pub systems: Vec<SystemDefect>,
}

/// A publication.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FactSource {
    /// Author, title, revision, place.
    pub what: String,
    /// When it was published, or read: `2026-11-22`.
    pub date: String,
}

/// A published fact.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fact<T> {
    /// What is said.
    pub value: T,
    /// Who says so: a name of [`ChipTable::sources`].
    pub source: String,
    /// What else is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A chip, or what a generation of chips has in common.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Chip {
    /// `M4 Max`
    pub name: String,
    /// The generation whose facts it shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<String>,
    /// Bytes of weights that the Neural Engine streams, in 10^9 a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_gb_s: Option<Fact<f64>>,
    /// What its memory gives at most, in 10^9 bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_gb_s: Option<Fact<f64>>,
    /// Weights that are looked up in palettes, in 10^9 a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub palette_gweights_s: Option<Fact<f64>>,
    /// Largest rate of fp16 multiplications and additions, in 10^12 a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tflops: Option<Fact<f64>>,
    /// Milliseconds of a call, whatever it computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_ms: Option<Fact<f64>>,
    /// How forms of weights are read.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub weights: BTreeMap<WeightPath, Fact<Reading>>,
    /// Largest size of the last two axes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_width: Option<Fact<u64>>,
    /// Largest size of the channel axis.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_channels: Option<Fact<u64>>,
    /// Ops of the largest program that was seen to compile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_ops: Option<Fact<usize>>,
    /// Weights of the largest package that was seen on the Neural Engine, in 10^6 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_package_mb: Option<Fact<f64>>,
    /// States of a function, at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_states: Option<Fact<usize>>,
    /// Memory that a process may use, in 10^6 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process_mb: Option<Fact<f64>>,
}

/// A form of weights, as the Neural Engine tells them apart.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema, strum::Display,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum WeightPath {
    /// Not compressed.
    Fp16,
    /// 8-bit integers with a scale for each tensor or channel, by `constexpr_affine_dequantize`.
    Int8Affine,
    /// The same by `constexpr_blockwise_shift_scale`.
    Int8Blockwise,
    /// Integers with a scale for each block of input channels.
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
    /// The form of a number format.
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
    /// As fp16: they are unfolded when the program is loaded.
    Unfolds,
    /// Not on the Neural Engine.
    Fails,
}

/// A system with a known defect.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SystemDefect {
    /// The systems.
    pub os: String,
    /// Chips on which it was seen; all if none are named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chips: Vec<String>,
    /// What is wrong.
    pub defect: String,
    /// What to do.
    pub remedy: String,
    /// Who says so: a name of [`ChipTable::sources`].
    pub source: String,
}

/// What a program is for: a chip and, where it matters, the version of its system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChipTarget<'a> {
    /// The chip.
    pub chip: &'a Chip,
    /// Major version of the system: `27`.
    pub os: Option<u32>,
}

impl ChipTarget<'_> {
    /// Its name on a command line: `m5-pro@27`.
    pub fn id(&self) -> String {
        self.os.map_or_else(|| self.chip.id(), |os| format!("{}@{os}", self.chip.id()))
    }

    /// Whether something that names chips and systems is about it: what names none is about all, and what names systems
    /// is about a target whose system isn't known.
    pub fn is_meant(&self, chips: &[String], systems: &[u32]) -> bool {
        (chips.is_empty() || self.chip.is_among(chips))
            && (systems.is_empty() || self.os.is_none_or(|os| systems.contains(&os)))
    }
}

/// What can be wrong with a table of chips, or with a question to it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChipError {
    /// The text isn't a table.
    #[error("chips: {0}")]
    Syntax(String),
    /// A fact can't be used.
    #[error("chips: {place}: {problem}")]
    Fact {
        /// The chip and the fact.
        place: String,
        /// Found and expected.
        problem: String,
    },
    /// There is no such chip.
    #[error("no chip `{given}` is known")]
    Unknown {
        /// What was asked for.
        given: String,
        /// The chips that are known.
        known: Vec<String>,
    },
    /// A system isn't a number.
    #[error("`{target}`: system `{given}`, expected a major version, as in m5@27")]
    System {
        /// What was given as the system.
        given: String,
        /// The target.
        target: String,
    },
    /// Too little is published.
    #[error("the speed of {chip} can't be predicted: {missing} isn't published")]
    Unpublished {
        /// The chip.
        chip: String,
        /// What is missing.
        missing: &'static str,
        /// The chips for which it is there.
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

/// How names are compared: `m4-max`, `M4_Max` and `Apple M4 Max` are one.
fn folded(name: &str) -> String {
    let name = name.to_lowercase();
    name.strip_prefix("apple ").unwrap_or(&name).chars().filter(|c| c.is_alphanumeric()).collect()
}

impl ChipTable {
    /// The table that is part of the binary.
    pub fn built_in() -> &'static ChipTable {
        static TABLE: LazyLock<ChipTable> =
            LazyLock::new(|| ChipTable::parse(CHIPS).expect("validators/chips.yaml is part of the binary and tested"));
        &TABLE
    }

    /// Reads a table, in which every fact must name a source of its list; chips get the facts of their generations.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn parse(text: &str) -> Result<ChipTable, ChipError> {
        let mut table: ChipTable = data::parse(text).map_err(ChipError::Syntax)?;
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

    /// A chip by its name, in any spelling: `m4-max`, `M4 Max`, `Apple M4 Max`.
    ///
    /// # Errors
    /// When there is none; the error lists those that there are.
    pub fn find(&self, name: &str) -> Result<&Chip, ChipError> {
        self.chips.iter().find(|chip| folded(&chip.name) == folded(name)).ok_or_else(|| ChipError::Unknown {
            given: name.to_owned(),
            known: self.chips.iter().map(Chip::id).collect(),
        })
    }

    /// A target: the name of a chip, and after `@` the major version of its system, if that is given.
    ///
    /// # Errors
    /// When there is no such chip, or the version isn't a number.
    pub fn target(&self, name: &str) -> Result<ChipTarget<'_>, ChipError> {
        let (chip, os) = name.split_once('@').map_or((name, None), |(chip, os)| (chip, Some(os)));
        let version = |os: &str| {
            let wrong = || ChipError::System { given: os.to_owned(), target: name.to_owned() };
            os.trim().parse::<u32>().map_err(|_| wrong())
        };
        Ok(ChipTarget { chip: self.find(chip)?, os: os.map(version).transpose()? })
    }

    /// The defects that are known of systems of a chip.
    pub fn defects_of<'a>(&'a self, chip: &'a Chip) -> impl Iterator<Item = &'a SystemDefect> {
        let on_it = |name: &String| folded(name) == folded(&chip.name);
        self.systems.iter().filter(move |system| system.chips.is_empty() || system.chips.iter().any(on_it))
    }
}

impl Chip {
    /// The name as it is written on a command line: `m4-max`.
    pub fn id(&self) -> String {
        self.name.to_lowercase().replace(' ', "-")
    }

    /// Whether a rule or a defect that names chips is about this one: it names the chip, or its generation.
    pub fn is_among(&self, names: &[String]) -> bool {
        let own = [Some(&self.name), self.generation.as_ref()];
        own.into_iter().flatten().any(|own| names.iter().any(|name| folded(name) == folded(own)))
    }

    /// How a form of weights is read; nothing where nothing is published.
    pub fn reading(&self, path: WeightPath) -> Option<Reading> {
        match path {
            WeightPath::Fp16 => Some(Reading::Streams),
            path => self.weights.get(&path).map(|fact| fact.value),
        }
    }

    /// The numbers of its own that aren't whole, by name.
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

    /// The source of every fact of its own.
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

    /// Takes the facts of a generation that it hasn't itself.
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

/// JSON Schema of `chips.yaml`.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(ChipTable).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_fits_its_schema_and_its_rules() {
        let json: serde_json::Value = serde_yaml::from_str(CHIPS).unwrap();
        jsonschema::validate(&schema(), &json).unwrap();
        let table = ChipTable::parse(CHIPS).unwrap();
        assert!(table.chips.len() >= 25, "{}", table.chips.len());
        // every source is somebody's, and every generation has chips
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
        // the older op streams where the newer one is bridged
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
        // a generation stands for its chips
        assert!(target.is_meant(&names(&["M5"]), &[]) && target.is_meant(&[], &[26, 27]));
        assert!(!target.is_meant(&names(&["M5 Max"]), &[]) && !target.is_meant(&[], &[26]));
        assert!(table.target("m5-pro").unwrap().is_meant(&[], &[26]));
        assert!(table.target("m5@tahoe").unwrap_err().to_string().contains("`tahoe`, expected a major version"));
    }

    #[test]
    fn what_is_unknown_is_an_error_that_lists_what_is_known() {
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
