//! `anec ls` and `anec rm`

use serde_json::json;

use super::{print, print_json};
use anec::BundleCache;
use anec::base::{Result, clock};
use anec::report::{bytes, counted, table::table};

/// List the bundles that `anec run` and other verbs have converted into the cache
#[derive(Debug, clap::Args)]
pub struct ListArgs {
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Remove bundles from the cache
#[derive(Debug, clap::Args)]
pub struct RemoveArgs {
    /// Names as shown by `anec ls`; without the digest, all bundles of that name; or hf:owner/name
    #[arg(required_unless_present = "all")]
    names: Vec<String>,
    /// Remove all cached bundles
    #[arg(long, conflicts_with = "names")]
    all: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl ListArgs {
    pub(super) fn run(self) -> Result<u8> {
        let cache = BundleCache::from_env()?;
        let bundles = cache.list()?;
        let total: u64 = bundles.iter().map(|bundle| bundle.bytes).sum();
        if self.json {
            print_json(&json!({"folder": cache.folder(), "bytes": total, "bundles": bundles}));
            return Ok(0);
        }
        if bundles.is_empty() {
            print(&format!("{} has no bundles", cache.folder().display()));
            return Ok(0);
        }
        let day = |seconds| clock::strftime("%F %H:%M", seconds);
        let rows = bundles.iter().map(|bundle| {
            let state = if bundle.complete { "" } else { "unfinished" };
            vec![
                bundle.name.clone(),
                bundle.record.origin.clone(),
                bytes(bundle.bytes),
                day(bundle.record.made),
                day(bundle.used),
                state.to_owned(),
            ]
        });
        print(&table(&["bundle", "from", ">size", "made", "used", ""], rows));
        print(&format!("\n{}, {}, in {}", counted(bundles.len(), "bundle"), bytes(total), cache.folder().display()));
        Ok(0)
    }
}

impl RemoveArgs {
    pub(super) fn run(self) -> Result<u8> {
        let cache = BundleCache::from_env()?;
        // resolve all names first, so that a mistake in one removes nothing
        let mut found = match self.all {
            true => cache.list()?,
            false => self.names.iter().map(|name| cache.find(name)).collect::<Result<Vec<_>>>()?.concat(),
        };
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found.dedup_by(|a, b| a.name == b.name);
        for bundle in &found {
            cache.remove(bundle)?;
            if !self.json {
                print(&format!("removed {} ({})", bundle.name, bytes(bundle.bytes)));
            }
        }
        if self.json {
            print_json(&json!({"removed": found}));
        }
        Ok(0)
    }
}
