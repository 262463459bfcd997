//! Results for people (tables) and for programs (JSON).
//!
//! ```
//! use anec_report::{bytes, table::table};
//!
//! let text = table(&["package", ">weights"], [vec!["lm_head".to_owned(), bytes(250_000_000)]]);
//! assert!(text.contains("250.0 MB"));
//! ```

#![forbid(unsafe_code)]

pub mod inspection;
pub mod table;

mod bisection;
mod card;
mod conversion;
mod escape;
mod experiments;
mod forecast;
mod gates;
mod html;
mod junit;
mod markdown;
mod planned;
mod plot;
mod prediction;
mod residency;
mod sensitivities;
mod summary;

pub use bisection::bisection;
pub use card::{CardFacts, card};
pub use conversion::conversion;
pub use experiments::{arithmetic_findings, experiments, rule_findings};
pub use forecast::{forecast, rule};
pub use gates::gates;
pub use html::html;
pub use junit::junit;
pub use markdown::markdown;
pub use planned::{manifests, plan, plan_json, transforms};
pub use prediction::{choices, predictions};
pub use sensitivities::{sensitivities, sensitivities_svg};
pub use summary::{conversion_summary, forecast_summary, gates_summary, plan_summary, predictions_summary};

/// Formats a number of bytes with a suitable unit: `2.0 kB`, `250.0 MB` (powers of 1000).
pub fn bytes(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if value < 999.95 || unit == "GB" {
            return if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1000.0;
    }
    unreachable!("the loop returns at the last unit")
}

/// Formats a count with its noun: `1 function`, `2 functions`.
pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_a_unit_that_suits_them() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1234), "1.2 kB");
        assert_eq!(bytes(999_960), "1.0 MB");
        assert_eq!(bytes(250_000_000), "250.0 MB");
        assert_eq!(bytes(12_345_000_000_000), "12345.0 GB");
    }
}
