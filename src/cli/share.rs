//! `anec push` and `anec pull`

use std::path::PathBuf;

use serde_json::json;

use super::{print, print_json, progress};
use anec::base::Result;
use anec::hub::{Hub, UploadContent};
use anec::report::{bytes, counted};
use anec::share::{Push, PushFacts, ShareError, pull};
use anec::source::hub::Location;

/// Upload a bundle to the Hugging Face hub, with a model card
///
/// The token is HF_TOKEN, or the one stored by the hub's own tools. Files that the hub already has aren't sent again.
#[derive(Debug, clap::Args)]
pub struct PushArgs {
    /// Bundle folder
    bundle: PathBuf,
    /// Repository: hf:owner/name
    repository: String,
    /// Branch
    #[arg(long, value_name = "NAME", default_value = "main")]
    branch: String,
    /// Commit message
    #[arg(long, value_name = "TEXT", default_value = "Upload by anec")]
    message: String,
    /// Create the repository as private
    #[arg(long)]
    private: bool,
    /// Licence of the weights, as the hub names it (apache-2.0, gemma) [default: the source's, if the hub knows it]
    #[arg(long, value_name = "ID")]
    license: Option<String>,
    /// Output of `anec validate --json` [default: the report that `anec validate --record` left]
    #[arg(long, value_name = "FILE")]
    gates: Option<PathBuf>,
    /// Push a bundle that didn't pass structure, numerics and parity; its card says so
    #[arg(long)]
    unproven: bool,
    /// Output of `anec bench --json`, for the card
    #[arg(long, value_name = "FILE")]
    bench: Option<PathBuf>,
    /// Chips whose predicted speed the card shows: m4-max,a17-pro (needs the shapes of the source)
    #[arg(long = "for", value_name = "CHIP", value_delimiter = ',')]
    chips: Vec<String>,
    /// Show the card and the files, and send nothing
    #[arg(long)]
    dry_run: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Download a bundle from the Hugging Face hub; repeat the command to resume
#[derive(Debug, clap::Args)]
pub struct PullArgs {
    /// Repository: hf:owner/name[@revision]
    repository: String,
    /// Bundle folder [default: NAME in the current folder]
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Parses a repository name, with or without `hf:`.
fn location(name: &str) -> Result<Location> {
    let full = if name.starts_with("hf:") { name.to_owned() } else { format!("hf:{name}") };
    let location = Location::parse(&full)?.filter(|location| location.file.is_none());
    Ok(location.ok_or_else(|| ShareError::Name(name.to_owned()))?)
}

impl PushArgs {
    pub(super) fn run(self) -> Result<u8> {
        let repository = location(&self.repository)?.repository;
        let hub = Hub::from_env();
        let facts = PushFacts {
            license: self.license,
            gates: self.gates,
            unproven: self.unproven,
            bench: self.bench,
            chips: self.chips,
        };
        let asked = (!Hub::offline() && !self.dry_run).then_some(&hub);
        let push = Push::prepare(&self.bundle, &repository, &facts, asked)?;
        let size = |content: &UploadContent| match content {
            UploadContent::File { bytes, .. } => *bytes,
            UploadContent::Bytes(bytes) => bytes.len() as u64,
        };
        let total: u64 = push.files.iter().map(|file| size(&file.content)).sum();
        if self.dry_run {
            if self.json {
                let files: Vec<_> =
                    push.files.iter().map(|file| json!({"path": file.path, "bytes": size(&file.content)})).collect();
                print_json(&json!({"repository": repository, "files": files, "bytes": total, "card": push.card}));
            } else {
                print(&push.card);
                print(&format!("{} ({}) would go to {repository}", counted(push.files.len(), "file"), bytes(total)));
            }
            return Ok(0);
        }
        let bar = progress::bytes();
        let sent = push.send(&hub, &self.branch, self.private, &self.message, &bar)?;
        bar.finish();
        let url = format!("{}/{repository}", hub.endpoint());
        if self.json {
            print_json(&json!({
                "repository": repository,
                "url": url,
                "commit": sent.commit,
                "changed_files": sent.changed,
                "sent_bytes": sent.sent,
            }));
        } else if sent.changed == 0 {
            print(&format!("{url} is up to date"));
        } else {
            print(&format!(
                "{} of {} ({} sent) are at {url}",
                counted(sent.changed, "file"),
                push.files.len(),
                bytes(sent.sent)
            ));
        }
        Ok(0)
    }
}

impl PullArgs {
    pub(super) fn run(self) -> Result<u8> {
        let location = location(&self.repository)?;
        let name = location.repository.rsplit('/').next().unwrap_or_default();
        let out = self.out.unwrap_or_else(|| PathBuf::from(name));
        let hub = Hub::from_env();
        let repository = hub.repository(&location.repository, &location.revision)?;
        let bar = progress::bytes();
        let bundle = pull(&hub, &repository, &out, &bar)?;
        bar.finish();
        if self.json {
            print_json(&json!({"path": out, "name": bundle.name, "commit": repository.commit}));
        } else {
            print(&format!("{} is in {}", bundle.name, out.display()));
        }
        Ok(0)
    }
}
