//! Remedies in terms of the command line. Libraries name causes and options; flags and verbs stand here.

use anec::CacheError;
use anec::advice::search::SearchError;
use anec::base::Error;
use anec::calibrate::CalibrateError;
use anec::convert::{ConvertError, ExportError};
use anec::coreai::CoreAiError;
use anec::coreai::lower::DYNAMIC;
use anec::coreml::CoreMlError;
use anec::experiment::ProbeError;
use anec::family::FamilyError;
use anec::manifest::ManifestError;
use anec::runtime::RuntimeError;
use anec::serve::ServeError;
use anec::share::ShareError;
use anec::source::SourceError;
use anec::validate::GoldenError;

/// Help for an error: a remedy with flags and verbs, or the library's own.
pub(super) fn help(error: &Error) -> Option<String> {
    remedy(error).or_else(|| error.help())
}

fn remedy(error: &Error) -> Option<String> {
    let of = |found: Option<&'static str>| found.map(str::to_owned);
    of(error.downcast_ref().and_then(convert))
        .or_else(|| of(error.downcast_ref().and_then(runtime)))
        .or_else(|| of(error.downcast_ref().and_then(manifest)))
        .or_else(|| of(error.downcast_ref().and_then(source)))
        .or_else(|| of(error.downcast_ref().and_then(share)))
        .or_else(|| of(error.downcast_ref().and_then(cache)))
        .or_else(|| of(error.downcast_ref().and_then(serve)))
        .or_else(|| of(error.downcast_ref().and_then(search)))
        .or_else(|| of(error.downcast_ref().and_then(probe)))
        .or_else(|| of(error.downcast_ref().and_then(core_ml)))
        .or_else(|| of(error.downcast_ref().and_then(core_ai)))
        .or_else(|| of(error.downcast_ref().and_then(calibrate)))
        .or_else(|| error.downcast_ref().and_then(family))
        .or_else(|| error.downcast_ref::<ExportError>().map(|_| keys(error)))
        .or_else(|| error.downcast_ref::<GoldenError>().map(|_| GOLDEN.to_owned()))
}

const GOLDEN: &str = "write one with `anec golden`, or from transformers with tools/export_golden.py";

/// The library's help, which names manifest keys, with the flag that sets them.
fn keys(error: &Error) -> String {
    format!("{} (`anec convert --set KEY=VALUE` sets a key)", error.help().unwrap_or_default())
}

fn convert(error: &ConvertError) -> Option<&'static str> {
    Some(match error {
        ConvertError::NoSource => "give --source PATH, or `source:` in the manifest",
        ConvertError::NotABundle(_) => "choose another folder with --out",
        ConvertError::NotOurs(_) => "move it away, or choose another folder with --out",
        ConvertError::Busy(_) => "wait until it ends, or choose another folder with --out",
        ConvertError::Exists { .. } => "--force replaces it; --out names another folder",
        ConvertError::NotCalibrated | ConvertError::NotPlanned | ConvertError::ScaleNotMeasured => {
            "run `anec convert`, which measures it"
        }
        ConvertError::NoCompiler(_) => "run `anec compile BUNDLE` on a Mac that has Xcode or its command line tools",
        _ => return None,
    })
}

fn core_ai(error: &CoreAiError) -> Option<&'static str> {
    match error {
        CoreAiError::Unsupported { problems } if problems.iter().any(|problem| problem.contains(DYNAMIC)) => {
            Some("--shapes SYMBOL=N,N,… makes a function for each size, with fixed shapes")
        }
        _ => None,
    }
}

fn runtime(error: &RuntimeError) -> Option<&'static str> {
    Some(match error {
        RuntimeError::NoBundle { .. } => {
            "give the folder that `anec convert` wrote, or a model: a GGUF file, or a folder with safetensors or ONNX"
        }
        RuntimeError::ContextFull { .. } | RuntimeError::TextTooLong { .. } => {
            "give a shorter text, or a smaller --max-tokens where one is generated, or convert with a larger `context` in \
             the manifest"
        }
        RuntimeError::Memory { .. } => {
            "raise --max-memory-mb, or convert into smaller packages (`shards`, `lm_head.split`)"
        }
        RuntimeError::NoLogits { k: 1, .. } => {
            "generate greedily (--temperature 0), or convert the model with --set lm_head.logits=true"
        }
        RuntimeError::NoLogits { .. } => {
            "sample from fewer tokens (--top-k), or convert the model with --set lm_head.logits=true"
        }
        RuntimeError::LabelsTokens { .. } => "use `anec classify`, `anec redact` or `anec logits`",
        RuntimeError::GivesVectors { .. } => "use `anec embed`",
        RuntimeError::LabelsTexts { .. } => "use `anec classify`",
        RuntimeError::NoLabels { .. } => {
            "use `anec run`, or `anec embed` for vectors; `anec classify` and `anec redact` are for classifiers"
        }
        RuntimeError::BenchmarkLength { .. } => {
            "give --prefill, --decode and --depth within that range, or convert with a larger `context` in the manifest"
        }
        RuntimeError::NoEnergy { .. } => {
            "it needs macOS' powermetrics and root: `sudo anec bench --energy`, or leave out --energy"
        }
        RuntimeError::NoTokenizer { .. } => "give token ids with --ids",
        RuntimeError::NoChatTemplate { .. } => "`anec run --prompt` without --chat continues a text as it is",
        _ => return None,
    })
}

fn manifest(error: &ManifestError) -> Option<&'static str> {
    Some(match error {
        ManifestError::NotFound { like, .. } if like.is_empty() => "`anec manifests` lists the built-in ones",
        ManifestError::Syntax { suggestion: None, .. }
        | ManifestError::Value { advice: None, .. }
        | ManifestError::Override { .. } => "`anec schema manifest` describes every key",
        _ => return None,
    })
}

fn source(error: &SourceError) -> Option<&'static str> {
    matches!(error, SourceError::ShapeOnly { .. }).then_some("name a source with weights with --source")
}

fn share(error: &ShareError) -> Option<&'static str> {
    Some(match error {
        ShareError::NoBundle { .. } => {
            "`anec run hf:owner/name` converts a model; `anec pull` downloads what `anec push` uploaded"
        }
        ShareError::Lacks { .. } => "the upload was interrupted or changed by hand; run `anec push` again",
        ShareError::Exists(_) => "choose another folder with --out, or remove this one",
        ShareError::Gates { .. } => "give the output of `anec validate BUNDLE --json FILE`",
        ShareError::Bench { .. } => "give the output of `anec bench BUNDLE --json`",
        ShareError::OtherPlan { .. } => "convert the source again, or leave out --for",
        _ => return None,
    })
}

fn cache(error: &CacheError) -> Option<&'static str> {
    matches!(error, CacheError::Unknown { .. }).then_some("`anec ls` lists the bundles")
}

fn serve(error: &ServeError) -> Option<&'static str> {
    Some(match error {
        ServeError::Listen { .. } => "choose another --port or --host",
        ServeError::Socket { .. } => "choose another path for --socket, in a writable folder",
        _ => return None,
    })
}

fn search(error: &SearchError) -> Option<&'static str> {
    Some(match error {
        SearchError::NoChip => "name one: `--for m4-max`",
        SearchError::Plan => {
            "leave `quant.plan` out, or search with the manifest that `anec quant --plan … --out` writes, whose formats stay"
        }
        SearchError::CoreAi => {
            "search with the format coreml (`anec plan MODEL --for CHIP --search --out FILE`), then convert with \
             `--manifest FILE --set format=coreai`"
        }
        SearchError::Nothing { .. } => {
            "allow more: `--max-mb`, `--max-memory-mb`, `--max-first-load`, `--least-bits`, fewer chips"
        }
        #[allow(unreachable_patterns, reason = "the enum may grow")]
        _ => return None,
    })
}

fn probe(error: &ProbeError) -> Option<&'static str> {
    Some(match error {
        ProbeError::Report { .. } => "`anec doctor --probe FILE` writes one, on a Mac",
        ProbeError::Unknown(_) => "`anec doctor --experiments` lists them",
        _ => return None,
    })
}

fn core_ml(error: &CoreMlError) -> Option<&'static str> {
    matches!(error, CoreMlError::Plan { .. })
        .then_some("take a new one on a Mac: `anec validate BUNDLE --residency --plan-out plan.json`")
}

fn calibrate(error: &CalibrateError) -> Option<&'static str> {
    matches!(error, CalibrateError::Budget { .. }).then_some("ask for that; `anec quant` shows what each format costs")
}

fn family(error: &FamilyError) -> Option<String> {
    match error {
        FamilyError::Positions { positions, .. } => Some(format!("`--set context={positions}` is the largest")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_libraries_get_flags_and_verbs_here() {
        let help = |error: Error| help(&error).unwrap();
        assert_eq!(
            help(ConvertError::Busy("out".into()).into()),
            "wait until it ends, or choose another folder with --out"
        );
        assert_eq!(
            help(CacheError::Unknown { name: "a".into(), folder: "b".into() }.into()),
            "`anec ls` lists the bundles"
        );
        // the library's own where the command line has nothing to add
        assert_eq!(help(CacheError::NoFolder.into()), "set ANEC_CACHE to a writable folder");
    }
}
