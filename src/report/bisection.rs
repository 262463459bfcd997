//! Result of a bisection.

use std::path::Path;

use super::counted;
use super::table::table;
use anec_validate::bisect::MinimalRepro;

/// Maximum number of listed ops.
const LISTED: usize = 20;

/// Formats the result of `anec bisect`: the failing piece, op by op, and the final test.
pub fn bisection(
    package: &str,
    function: &str,
    predicate: &str,
    culprit: &MinimalRepro,
    written: Option<&Path>,
) -> String {
    let (left, before) = (culprit.ops.len(), culprit.ops_before);
    let verb = if left == 1 { "fails" } else { "fail" };
    let mut text = format!(
        "{package}, {function}: {left} of {} {verb}: {predicate} ({})\n\n",
        counted(before, "op"),
        counted(culprit.tries, "piece") + if culprit.tries == 1 { " was tried" } else { " were tried" }
    );
    let rows = culprit.ops.iter().take(LISTED).map(|op| {
        let layer = op.layer.map_or_else(|| "-".to_owned(), |layer| layer.to_string());
        vec![op.name.clone(), op.operator.clone(), layer]
    });
    text.push_str(&table(&["op", "operator", ">layer"], rows));
    if left > LISTED {
        text.push_str(&format!("and {} more\n", left - LISTED));
    }
    text.push('\n');
    for finding in culprit.findings.iter().take(LISTED) {
        text.push_str(&format!("  {finding}\n"));
    }
    if let Some(path) = written {
        text.push_str(&format!("\nthe piece is in {}\n", path.display()));
    }
    text
}
