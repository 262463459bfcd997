//! Links to the sources that tables of the book quote.

/// Projects by the name that the rows use; a number behind the name is that of an issue or a pull request.
const PROJECTS: &[(&str, &str)] = &[
    ("0seba/coremlmodels", "0seba/coremlmodels"),
    ("ANEForge", "sbryngelson/ANEForge"),
    ("Anemll", "Anemll/Anemll"),
    ("Anemll/anemll-bench", "Anemll/anemll-bench"),
    ("Anemll/anemll-forge", "Anemll/anemll-forge"),
    ("CoreML-LLM", "john-rocky/CoreML-LLM"),
    ("FluidAudio", "FluidInference/FluidAudio"),
    ("FluidInference/mobius", "FluidInference/mobius"),
    ("ane-book", "videlalvaro/ane-book"),
    ("ane-guide", "sbryngelson/ane-guide"),
    ("anemll-bench", "Anemll/anemll-bench"),
    ("anemll-forge", "Anemll/anemll-forge"),
    ("atomgradient", "AtomGradient/hybrid-ane-mlx-bench"),
    ("coreai-model-zoo", "john-rocky/coreai-model-zoo"),
    ("coreai-models", "apple/coreai-models"),
    ("coreai-torch", "apple/coreai-torch"),
    ("coremltools", "apple/coremltools"),
    ("dictus-ios", "getdictus/dictus-ios"),
    ("executorch", "pytorch/executorch"),
    ("hollance neural-engine", "hollance/neural-engine"),
    ("larql", "chrishayuk/larql"),
    ("maderix/ANE", "maderix/ANE"),
    ("mobius", "FluidInference/mobius"),
    ("more-ane-transformers", "smpanaro/more-ane-transformers"),
    ("sbryngelson/ane-guide", "sbryngelson/ane-guide"),
    ("slimwangyue/Anemll", "slimwangyue/Anemll"),
    ("smpanaro/coreml-llm-cli", "smpanaro/coreml-llm-cli"),
    ("speech-swift", "soniqo/speech-swift"),
    ("stablehlo-coreml", "kasper0406/stablehlo-coreml"),
    ("whisper.cpp", "ggml-org/whisper.cpp"),
];

/// Documents by the words that name them.
const DOCUMENTS: &[(&str, &str)] = &[
    ("3. Numerics", "https://github.com/sbryngelson/ane-guide/blob/main/part-1-machine/03-numerics.md"),
    ("ANE_SCALING_FINDINGS", "https://github.com/videlalvaro/ane-book/blob/4ab89e2/research/ANE_SCALING_FINDINGS.md"),
    (
        "DFLASH2_ANE_PLAN",
        "https://github.com/Anemll/anemll-forge/blob/5cda63cc54b84c9a8744941bab0a63162880b92d/DFLASH2_ANE_PLAN.md",
    ),
    (
        "Deploying Transformers on the Apple Neural Engine",
        "https://machinelearning.apple.com/research/neural-engine-transformers",
    ),
    ("INT4_SHARD_ANE_BUG", "https://github.com/videlalvaro/ane-book/blob/4ab89e2/research/INT4_SHARD_ANE_BUG.md"),
    (
        "LFM2 findings",
        "https://github.com/john-rocky/CoreML-LLM/blob/f250c588dcf77481599e56ac9278f116316a4cd6/docs/LFM2_CONVERSION_FINDINGS.md",
    ),
    (
        "QWEN35_LESSONS",
        "https://github.com/john-rocky/CoreML-LLM/blob/54b65284e581f661ba20ad2e04158025c375caf6/docs/QWEN35_LESSONS.md",
    ),
    (
        "REJECTED_APPROACHES",
        "https://github.com/john-rocky/CoreML-LLM/blob/f967bef9e08399d3dcf2a2fca6520cd5202667df/docs/REJECTED_APPROACHES.md",
    ),
    ("appendix A", "https://github.com/sbryngelson/ane-guide/blob/main/appendices/a-op-device-matrix.md"),
    ("developer.apple.com/forums/thread/724930", "https://developer.apple.com/forums/thread/724930"),
    ("eiln.github.io/posts/ane-dma.html", "https://eiln.github.io/posts/ane-dma.html"),
    (
        "more-ane-transformers NOTES",
        "https://github.com/smpanaro/more-ane-transformers/blob/main/src/experiments/NOTES.md",
    ),
    (
        "part 2, chapter 7",
        "https://github.com/sbryngelson/ane-guide/blob/main/part-2-reaching/07-weights-and-compression.md",
    ),
    ("unsupported-layers.md", "https://github.com/hollance/neural-engine/blob/master/docs/unsupported-layers.md"),
];

/// Entries of ane-book's journal, which rows quote by their number.
const JOURNAL: &[(&str, &str)] = &[
    ("026", "phi-4-mini-lean-ane-runtime-optimization-outcome"),
    ("036", "phi-4-mini-fused-runtime-migration-outcome"),
    ("042", "phi-4-mini-isolated-warm-cache-outcome"),
    ("048", "phi-4-mini-lm-head-optimization-outcome"),
    ("050", "phi-4-mini-eight-layer-asymmetric-fusion-outcome"),
    ("055", "phi-4-mini-12-16-20-24-layer-fusion-sweep-outcome"),
    ("071", "phi-stream-one-stream-timing-reality-check"),
    ("073", "phi-lm-head-shard-count-sweep-on-best-topology"),
    ("074", "phi-long-decode-topology-baseline-moves-to-20-4-6-2"),
    ("075", "phi-stream-timing-on-20-4-6-2"),
    ("079", "phi-lm-head-top-k-shard-residency-failed"),
    ("102", "phi-4-mini-rope96-fast-fused-rebuild-outcome"),
    ("104", "speculative-decode-prompt-density-validation"),
    ("105", "exp-26-follow-up-prompt-length-sweep-for-n-gram-speculative-decode"),
    ("109", "t4-3-closed-all-fp16-ane-inference-passes-golden-gate"),
    ("110", "t4-1-5-closed-full-16-token-decode-exact-match-on-all-fp16-ane-stack"),
    ("112", "int4-palettize-l0-ffn-probe-all-gates-pass"),
];

/// Digits at the start of a text.
fn digits(text: &str) -> &str {
    &text[..text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len()]
}

/// Entry of a table whose name is the longest with which the text begins, as whole words.
fn longest<'a>(text: &str, table: &'a [(&'a str, &'a str)]) -> Option<&'a (&'a str, &'a str)> {
    let whole = |name: &str| text[name.len()..].chars().next().is_none_or(|c| !c.is_alphanumeric() && c != '-');
    table.iter().filter(|(name, _)| text.starts_with(name) && whole(name)).max_by_key(|(name, _)| name.len())
}

/// A number of ane-book's journal at the start of a text, as a link.
fn entry(text: &str) -> Option<(usize, String)> {
    let number = digits(text);
    let (_, title) = JOURNAL.iter().find(|(known, _)| *known == number)?;
    let url = format!("https://github.com/videlalvaro/ane-book/blob/4ab89e2/book/journal/{number}-{title}.md");
    Some((number.len(), format!("[{number}]({url})")))
}

/// A source with links to the projects, issues and documents that it names.
pub fn linked(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    // repository of the last project, to which numbers alone belong; whether numbers are entries of the journal
    let (mut project, mut journal) = (None, false);
    let mut boundary = true;
    while let Some(c) = rest.chars().next() {
        let before = rest.len();
        if boundary {
            if let Some((name, url)) = longest(rest, DOCUMENTS) {
                out.push_str(&format!("[{name}]({url})"));
                rest = &rest[name.len()..];
            } else if let Some((name, repository)) = longest(rest, PROJECTS) {
                (project, journal) = (Some(*repository), *name == "ane-book");
                let behind = &rest[name.len()..];
                let mark = ["#", " #", " PR#", " PR "]
                    .into_iter()
                    .find(|mark| behind.strip_prefix(mark).is_some_and(|number| !digits(number).is_empty()));
                let (label, path) = mark.map_or((name.len(), String::new()), |mark| {
                    let number = digits(&behind[mark.len()..]);
                    (name.len() + mark.len() + number.len(), format!("/issues/{number}"))
                });
                out.push_str(&format!("[{}](https://github.com/{repository}{path})", &rest[..label]));
                rest = &rest[label..];
            } else if let (Some(repository), Some(number)) = (project, rest.strip_prefix('#').map(digits))
                && !number.is_empty()
            {
                out.push_str(&format!("[#{number}](https://github.com/{repository}/issues/{number})"));
                rest = &rest[1 + number.len()..];
            } else if let Some((length, link)) = entry(rest).filter(|_| journal) {
                out.push_str(&link);
                rest = &rest[length..];
            }
        }
        if rest.len() == before {
            out.push(c);
            rest = &rest[c.len_utf8()..];
            boundary = !c.is_alphanumeric() && !matches!(c, '-' | '#');
        } else {
            boundary = false;
        }
    }
    out
}

#[test]
fn sources_become_links() {
    assert_eq!(
        linked("coremltools#1909, #2271; speech-swift#282"),
        "[coremltools#1909](https://github.com/apple/coremltools/issues/1909), \
         [#2271](https://github.com/apple/coremltools/issues/2271); \
         [speech-swift#282](https://github.com/soniqo/speech-swift/issues/282)"
    );
    assert_eq!(linked("Anemll/anemll-forge"), "[Anemll/anemll-forge](https://github.com/Anemll/anemll-forge)");
    assert_eq!(linked("mobius PR#77"), "[mobius PR#77](https://github.com/FluidInference/mobius/issues/77)");
    let journal = linked("ane-book journal/050, 055: resident");
    assert!(journal.contains("journal/[050](https://github.com/videlalvaro/ane-book/blob/4ab89e2/book/journal/050-"));
    assert!(journal.contains(", [055](https://") && journal.ends_with("): resident"), "{journal}");
    assert_eq!(linked("no measurement known"), "no measurement known");
}
