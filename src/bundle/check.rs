//! Consistency of `bundle.json`. The structure gate compares it with the files.

mod function;
mod states;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use anec_base::path_inside;

use crate::{Bundle, FunctionEntry, PortDim, PortRole, Stage};

impl Bundle {
    /// Returns all contradictions. A runtime refuses a bundle with findings.
    pub fn check(&self) -> Vec<String> {
        let mut findings = Vec::new();
        findings.extend(self.model_problem());
        findings.extend(self.config_problems());
        findings.extend(self.file_problems());
        findings.extend(self.host_problems());
        findings.extend(self.package_problems());
        for entry in &self.functions {
            findings.extend(function::problems(self, entry).into_iter().map(|problem| in_function(entry, problem)));
        }
        findings.extend(states::problems(&self.functions));
        // these checks assume valid functions
        if findings.is_empty() {
            findings.extend(self.order_problem());
            findings.extend(self.tiling_problems());
        }
        let of_draft = self.draft_bundle().map(|draft| draft.check()).unwrap_or_default();
        findings.extend(of_draft.into_iter().map(|problem| format!("the layer that drafts: {problem}")));
        findings
    }

    fn model_problem(&self) -> Option<String> {
        let model = &self.model;
        if model.contexts.is_empty() {
            return Some("it names no context length".into());
        }
        if !model.contexts.is_sorted_by(|a, b| a < b) || model.contexts[0] == 0 {
            return Some(format!("its context lengths are {:?}, expected ascending ones", model.contexts));
        }
        if model.hidden_size == 0 || model.num_layers == 0 || model.head_rows() == 0 {
            return Some("the model has no layers, no rows or no width".into());
        }
        let power_of_two = model.hidden_scale.is_normal() && model.hidden_scale.log2().fract() == 0.0;
        (!power_of_two).then(|| format!("`hidden_scale` is {}, expected a power of two", model.hidden_scale))
    }

    /// Compares sizes with the family's configuration.
    fn config_problems(&self) -> Vec<String> {
        let sizes = [
            ("hidden_size", self.model.hidden_size),
            ("num_hidden_layers", self.model.num_layers as u64),
            ("vocab_size", self.model.vocab_size),
        ];
        let differs =
            |(key, size): &(&str, u64)| self.config.get(*key).is_some_and(|said| said.as_u64() != Some(*size));
        let problem =
            |(key, size)| format!("its configuration says `{key}` {}, the model has {size}", self.config[key]);
        sizes.into_iter().filter(differs).map(problem).collect()
    }

    /// All files must be inside the folder: an untrusted bundle must not make a program read or write elsewhere.
    fn file_problems(&self) -> Vec<String> {
        let packages = self.packages.iter().flat_map(|entry| {
            let folders = [Some(&entry.package), entry.compiled.as_ref()].into_iter().flatten();
            folders.chain(entry.files.iter().map(|file| &file.file))
        });
        let tokenizer = self.tokenizer.values().chain(self.tokenizer_files.iter().map(|file| &file.file));
        let names = packages.chain(tokenizer).chain([&self.host.file.file]);
        names
            .filter(|name| path_inside(name).is_none())
            .map(|name| format!("the file {name:?} is outside of its folder"))
            .collect()
    }

    fn host_problems(&self) -> Vec<String> {
        let longest = self.longest_context();
        let mut problems = Vec::new();
        if let Some(columns) =
            self.host.embedding_size.filter(|columns| !(1..=self.model.hidden_size).contains(columns))
        {
            let hidden = self.model.hidden_size;
            problems
                .push(format!("embeddings have {columns} columns, expected 1 to {hidden}, the size of hidden states"));
        }
        for table in &self.host.rope {
            let lengths: Vec<u64> = table.variants.iter().map(|variant| variant.max_length).collect();
            if !lengths.is_sorted_by(|a, b| a < b) || lengths.last().is_none_or(|last| *last < longest) {
                problems.push(format!(
                    "rotary table `{}` is for texts of up to {lengths:?} tokens, expected ascending lengths up to {longest}",
                    table.table
                ));
            }
        }
        let names: Vec<&str> = self.host.rope.iter().map(|table| table.table.as_str()).collect();
        problems.extend(duplicate(&names).map(|name| format!("there are two rotary tables `{name}`")));
        problems
    }

    fn package_problems(&self) -> Vec<String> {
        let packages: Vec<&str> = self.packages.iter().map(|entry| entry.package.as_str()).collect();
        let functions: Vec<(&str, &str)> =
            self.all_functions().map(|entry| (entry.package.as_str(), entry.function.as_str())).collect();
        let mut problems = Vec::new();
        problems.extend(duplicate(&packages).map(|name| format!("there are two packages `{name}`")));
        problems.extend(
            duplicate(&functions).map(|(package, name)| format!("there are two functions `{name}` of {package}")),
        );
        let listed: BTreeSet<&str> = packages.iter().copied().collect();
        let used: BTreeSet<&str> = functions.iter().map(|(package, _)| *package).collect();
        problems.extend(used.difference(&listed).map(|name| format!("{name} has functions, but isn't listed")));
        problems.extend(listed.difference(&used).map(|name| format!("{name} has no functions")));
        for entry in &self.packages {
            let bytes: u64 = entry.files.iter().map(|file| file.bytes).sum();
            if entry.weight_bytes > bytes {
                let weights = entry.weight_bytes;
                problems.push(format!("{} has {weights} bytes of weights in files of {bytes}", entry.package));
            }
            let prefix = format!("{}/", entry.package);
            let foreign = entry.files.iter().find(|file| !file.file.starts_with(&prefix));
            problems.extend(foreign.map(|file| format!("{} lists the file {}", entry.package, file.file)));
        }
        problems
    }

    /// Functions must be in the order of a call.
    fn order_problem(&self) -> Option<String> {
        let place = |stage: &Stage| match *stage {
            Stage::Layers { first, end } => (0, end as u64, 0, first as u64),
            Stage::FeedForward { layer } => (0, layer as u64 + 1, 1, 0),
            Stage::Experts { layer, first, end } => (0, layer as u64 + 1, 2 + first, end),
            Stage::Head { first, end } => (1, first, 0, end),
            Stage::Model { layers, .. } => (0, layers as u64, 0, 0),
        };
        let pair = self.functions.windows(2).find(|pair| place(&pair[0].stage) > place(&pair[1].stage))?;
        let [before, after] = [&pair[0], &pair[1]].map(|entry| format!("`{}` of {}", entry.function, entry.package));
        Some(format!("function {before} stands before {after}, which is called first"))
    }

    /// For each context there must be functions for all layers and all rows of the head. Each function of layers is
    /// followed by the feed-forward network or the experts that it leaves out.
    fn tiling_problems(&self) -> Vec<String> {
        let tiling = |what: String, parts: &Parts<'_>, total: u64| {
            parts.tiling_problem(total).map(|problem| format!("{what}: {problem}"))
        };
        let mut problems = Vec::new();
        for context in &self.model.contexts {
            let layers = self.parts(|entry| {
                let layers = entry.stage.whole_layers().filter(|_| entry.context == *context)?;
                Some(layers.start as u64..layers.end as u64)
            });
            problems.extend(tiling(format!("layers of context {context}"), &layers, self.model.num_layers as u64));
            let networks = self.parts(|entry| match entry.stage {
                Stage::FeedForward { layer } => Some(layer as u64..layer as u64 + 1),
                _ => None,
            });
            problems.extend(networks.feed_forward_problem(&layers));
            for ((_, end), functions) in &layers.0 {
                let last = end - 1;
                let experts = self.parts(|entry| match entry.stage {
                    Stage::Experts { layer, first, end } if layer as u64 == last => Some(first..end),
                    _ => None,
                });
                problems.extend(tiling(format!("experts of layer {last}"), &experts, experts_asked(functions)));
            }
            problems.extend(carried_problem(&layers, &networks));
        }
        let rows = if self.model.has_head() { self.model.head_rows() } else { 0 };
        problems.extend(self.model.contexts.iter().find_map(|context| {
            // functions of the head alone serve all contexts
            let serves = |entry: &FunctionEntry| entry.stage.whole_layers().is_none() || entry.context == *context;
            let head = self.parts(|entry| entry.stage.head_rows().filter(|_| serves(entry)));
            tiling("LM head".into(), &head, rows)
        }));
        problems
    }

    /// Functions for which `part` returns a range, by that range.
    fn parts(&self, part: impl Fn(&FunctionEntry) -> Option<Range<u64>>) -> Parts<'_> {
        let mut parts = Parts::default();
        for entry in &self.functions {
            if let Some(part) = part(entry) {
                parts.0.entry((part.start, part.end)).or_default().push(entry);
            }
        }
        parts
    }

    fn longest_context(&self) -> u64 {
        self.model.contexts.last().copied().unwrap_or(0)
    }
}

/// Functions by the layers, experts or rows that they compute.
#[derive(Default)]
struct Parts<'a>(BTreeMap<(u64, u64), Vec<&'a FunctionEntry>>);

impl Parts<'_> {
    /// Checks that the parts tile `0..total`, once for each number of tokens.
    fn tiling_problem(&self, total: u64) -> Option<String> {
        let mut next = 0;
        for ((start, end), functions) in &self.0 {
            if *start != next {
                return Some(format!("found {start}..{end} where {next}.. is due"));
            }
            next = *end;
            if let Some(problem) = same_tokens(functions) {
                return Some(problem);
            }
        }
        (next != total).then(|| format!("they end at {next} of {total}"))
    }

    /// Checks that each feed-forward network belongs to the last layer of functions without separate experts, and
    /// supports their numbers of tokens.
    fn feed_forward_problem(&self, layers: &Parts<'_>) -> Option<String> {
        self.0.iter().find_map(|((layer, end), networks)| {
            let Some((_, before)) = layers.0.iter().find(|((_, last), _)| last == end) else {
                return Some(format!("the feed-forward network of layer {layer} follows no function that ends there"));
            };
            if experts_asked(before) > 0 {
                return Some(format!("layer {layer} has a feed-forward network and experts in functions of their own"));
            }
            let takes = |entry: &FunctionEntry| networks.iter().any(|network| network.tokens == entry.tokens);
            if let Some(entry) = before.iter().find(|entry| !takes(entry)) {
                let tokens = entry.tokens;
                return Some(format!("the feed-forward network of layer {layer} has no function for {tokens} tokens"));
            }
            same_tokens(networks)
        })
    }
}

/// Values carried beside the hidden states must be outputs of an earlier function.
fn carried_problem(layers: &Parts<'_>, networks: &Parts<'_>) -> Option<String> {
    let behind = |end: u64| networks.0.get(&(end - 1, end));
    let mut given: Vec<&PortRole> = Vec::new();
    for functions in layers.0.iter().flat_map(|((_, end), functions)| [Some(functions), behind(*end)]).flatten() {
        for entry in functions {
            let mut inputs = entry.inputs.iter().filter(|port| port.role.is_carried());
            if let Some(port) = inputs.find(|port| !given.contains(&&port.role)) {
                return Some(in_function(entry, format!("no function before it gives `{}`", port.name)));
            }
        }
        let gives = |entry: &FunctionEntry, role: &PortRole| entry.outputs.iter().any(|port| port.role == *role);
        let outputs = functions.iter().flat_map(|entry| &entry.outputs).map(|port| &port.role);
        let by_all = outputs.filter(|role| role.is_carried() && functions.iter().all(|entry| gives(entry, role)));
        let by_all: Vec<&PortRole> = by_all.collect();
        given.extend(by_all);
    }
    None
}

/// Reports two functions of one part for the same numbers of tokens.
fn same_tokens(functions: &[&FunctionEntry]) -> Option<String> {
    let same = |index: usize| functions[..index].iter().find(|other| other.tokens == functions[index].tokens);
    let (other, own) = (0..functions.len()).find_map(|index| Some((same(index)?, functions[index])))?;
    Some(format!("`{}` and `{}` are both for {} tokens", other.function, own.function, own.tokens))
}

/// Number of experts in separate functions: the channels of the functions' expert shares.
fn experts_asked(functions: &[&FunctionEntry]) -> u64 {
    let outputs = functions.iter().flat_map(|entry| &entry.outputs);
    let asked = outputs.filter(|port| port.role == PortRole::ExpertShares).map(|port| match port.shape.get(1) {
        Some(PortDim::Fixed(count)) => *count,
        _ => 0,
    });
    asked.max().unwrap_or(0)
}

fn in_function(entry: &FunctionEntry, problem: String) -> String {
    format!("function `{}` of {}: {problem}", entry.function, entry.package)
}

/// First duplicate of a sorted list.
fn duplicate<T: Ord + Copy>(items: &[T]) -> Option<T> {
    let mut seen = BTreeSet::new();
    items.iter().copied().find(|item| !seen.insert(*item))
}
