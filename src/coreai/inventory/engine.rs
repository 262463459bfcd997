//! Rules of the Neural Engine under Core AI that a graph shows: a row for each, with its source.

use crate::aicode::ElementType;

/// Most dimensions of a tensor.
const MOST_RANK: usize = 5;

/// Part of a graph that rules look at.
pub(super) enum Subject<'a> {
    /// Result of an operation that is no constant.
    Result { shape: &'a [Option<u64>], element: Option<ElementType> },
    /// Input, output or state of a function.
    Port { shape: &'a [Option<u64>], element: Option<ElementType> },
    /// Write of a slice, at computed indices or at constant ones.
    Write { computed: bool },
}

/// A rule.
pub(super) struct EngineRule {
    /// Found and its consequence, behind a count.
    pub(super) problem: &'static str,
    /// Where the rule is published.
    pub(super) source: &'static str,
    breaks: fn(&Subject<'_>) -> bool,
}

/// The rules, in the order of findings.
pub(super) const RULES: [EngineRule; 7] = [
    EngineRule {
        problem: "results are f32: they run on the GPU or CPU, and cut the Neural Engine's part",
        source: "Apple coreai-models, neural_engine_rules.md:8, :121",
        breaks: |subject| matches!(subject, Subject::Result { element: Some(ElementType::F32 | ElementType::F64), .. }),
    },
    EngineRule {
        problem: "results are integers of other widths than 8 and 16 bits, which the Neural Engine doesn't take",
        source: "Apple coreai-models, neural_engine_rules.md:8",
        breaks: |subject| matches!(subject, Subject::Result { element: Some(element), .. } if is_wide_integer(*element)),
    },
    EngineRule {
        problem: "results have more than 5 dimensions, which the Neural Engine doesn't take",
        source: "Apple coreai-models, neural_engine_rules.md:7",
        breaks: |subject| matches!(subject, Subject::Result { shape, .. } if shape.len() > MOST_RANK),
    },
    EngineRule {
        problem: "results have dynamic dimensions, which the Neural Engine doesn't take",
        source: "Apple coreai-models, neural_engine_rules.md:9",
        breaks: |subject| matches!(subject, Subject::Result { shape, .. } if shape.contains(&None)),
    },
    EngineRule {
        problem: "inputs, outputs or states are f32, or integers of other widths than 8 and 16 bits: they are converted \
                  outside of the Neural Engine",
        source: "Apple coreai-models, neural_engine_rules.md:8",
        breaks: |subject| match subject {
            Subject::Port { element: Some(element), .. } => {
                is_wide_integer(*element) || matches!(element, ElementType::F32 | ElementType::F64)
            }
            _ => false,
        },
    },
    EngineRule {
        problem: "inputs, outputs or states have a last axis of 1, which is padded to 64 bytes: 32 times the memory in \
                  fp16",
        source: "Apple coreai-models, neural_engine_rules.md:23",
        breaks: |subject| match subject {
            // a vector of one element is as small as it can be
            Subject::Port { shape, .. } => shape.len() > 1 && shape.last() == Some(&Some(1)),
            _ => false,
        },
    },
    EngineRule {
        problem: "slice_update at computed indices, which stops the Neural Engine's compiler",
        source: "apple/coreai-torch#6",
        breaks: |subject| matches!(subject, Subject::Write { computed: true }),
    },
];

fn is_wide_integer(element: ElementType) -> bool {
    matches!(element, ElementType::Si32 | ElementType::Si64 | ElementType::Ui32 | ElementType::Ui64)
}

/// How often each rule is broken.
#[derive(Default)]
pub(super) struct BrokenRules([usize; RULES.len()]);

impl BrokenRules {
    /// Applies all rules.
    pub(super) fn look_at(&mut self, subject: &Subject<'_>) {
        for (count, rule) in self.0.iter_mut().zip(&RULES) {
            *count += usize::from((rule.breaks)(subject));
        }
    }

    /// Rules that are broken, each as a sentence.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> + '_ {
        let broken = self.0.iter().zip(&RULES).filter(|(count, _)| **count > 0);
        broken.map(|(count, rule)| format!("{count} {} ({})", rule.problem, rule.source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_broken_by_what_they_name() {
        let broken = |subject: Subject<'_>| {
            let mut rules = BrokenRules::default();
            rules.look_at(&subject);
            rules.problems().collect::<Vec<_>>().join("; ")
        };
        let [f16, f32, si32] = [ElementType::F16, ElementType::F32, ElementType::Si32].map(Some);
        let (flat, column) = ([Some(1), Some(8)], [Some(8), Some(1)]);
        for (subject, word) in [
            (Subject::Result { shape: &flat, element: f32 }, "are f32"),
            (Subject::Result { shape: &flat, element: si32 }, "8 and 16 bits"),
            (Subject::Result { shape: &[Some(1); 6], element: f16 }, "more than 5"),
            (Subject::Result { shape: &[None], element: f16 }, "dynamic"),
            (Subject::Port { shape: &flat, element: si32 }, "converted outside"),
            (Subject::Port { shape: &column, element: f16 }, "last axis of 1"),
            (Subject::Write { computed: true }, "coreai-torch#6"),
        ] {
            let found = broken(subject);
            assert!(found.starts_with("1 ") && found.contains(word) && !found.contains("; "), "{found}");
        }
        assert_eq!(broken(Subject::Result { shape: &column, element: f16 }), "");
        assert_eq!(broken(Subject::Port { shape: &[Some(1)], element: f16 }), "");
        assert_eq!(broken(Subject::Write { computed: false }), "");
    }
}
