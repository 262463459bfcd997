//! `anec explain`

use serde_json::json;

use super::usage::UsageError;
use super::{print, print_json};
use anec::advice::rules::{Meaning, meaning, meanings, rules};
use anec::base::Result;
use anec::report;
use anec::report::table::table;

/// Explain a rule of the forecast, an error code of Core ML, or an exit code of anec
///
/// For example: `anec explain state-last-axis`, `anec explain -- -14`, `anec explain "Espresso exception"`,
/// `anec explain "exit 3"`. Without an argument, lists all of them.
#[derive(Debug, clap::Args)]
pub struct ExplainArgs {
    /// Rule, code, or message that contains one
    #[arg(allow_hyphen_values = true)]
    what: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl ExplainArgs {
    pub(super) fn run(self) -> Result<u8> {
        let Some(what) = self.what else {
            self.list();
            return Ok(0);
        };
        if let Some(rule) = rules().into_iter().find(|rule| rule.id == what) {
            if self.json {
                print_json(&rule);
            } else {
                print(&report::rule(&rule));
            }
            return Ok(0);
        }
        let found = meaning(&what);
        if found.is_empty() {
            let problem = format!("unknown rule or code: `{what}`");
            return Err(UsageError::new(problem, "run `anec explain` to list the rules and codes").into());
        }
        if self.json {
            print_json(&found);
        } else {
            print(&found.iter().map(text).collect::<Vec<_>>().join("\n"));
        }
        Ok(0)
    }

    fn list(&self) {
        let (rules, meanings) = (rules(), meanings());
        if self.json {
            print_json(&json!({"rules": rules, "codes": meanings}));
            return;
        }
        let of_rules = rules.into_iter().map(|rule| vec![rule.id, rule.severity.to_string(), rule.what]);
        let of_codes = meanings.into_iter().map(|meaning| vec![meaning.codes.join(", "), meaning.title]);
        let rules = table(&["rule", "severity", "about"], of_rules);
        print(&format!("{rules}\n{}", table(&["code", "meaning"], of_codes)));
    }
}

fn text(meaning: &Meaning) -> String {
    let mut text = format!("{}: {}\n", meaning.codes.join(", "), meaning.title);
    for cause in &meaning.causes {
        text.push_str(&format!("  - {cause}\n"));
    }
    if !meaning.evidence.is_empty() {
        text.push_str(&format!("sources: {}\n", meaning.evidence.join("; ")));
    }
    text.push_str(&format!("next: {}\n", meaning.next));
    text
}
