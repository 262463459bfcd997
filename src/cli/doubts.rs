//! Rules against the form of a converted bundle, as a one-line note.

use std::collections::BTreeSet;
use std::path::Path;

use anec::advice::ChipTarget;
use anec::bundle::Bundle;
use anec::forecast_of;

/// Note on the rules that expect a bundle to leave the Neural Engine, or to compute wrong numbers there. Without
/// targets, rules about single chips don't count.
pub(super) fn note(folder: &Path, bundle: &Bundle, targets: &[ChipTarget<'_>]) -> Option<String> {
    let mut rules = BTreeSet::new();
    for entry in bundle.packages.iter().filter(|entry| !entry.is_asset()) {
        let Ok(findings) = forecast_of(folder, entry, targets) else { continue };
        let counts = findings.into_iter().filter(|finding| finding.severity.excludes());
        rules.extend(counts.filter(|of| !targets.is_empty() || of.chips.is_empty()).map(|finding| finding.rule));
    }
    let (first, more) = (rules.first()?, rules.len() - 1);
    let listed = rules.iter().cloned().collect::<Vec<_>>().join(", ");
    let (doubt, them) = if more > 0 { ("rules doubt", "them") } else { ("a rule doubts", "it") };
    Some(format!(
        "{doubt} this form on the Neural Engine: {listed}; `anec explain {first}` has the remedy, `--for CHIP` avoids \
         {them}"
    ))
}
