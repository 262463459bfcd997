//! What a conversion will emit: which layers and which rows of the LM head go into which package, and which functions
//! each package has. Nothing is read but shapes.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::error::ConvertError;
use super::size::PackageSize;
use anec_base::Result;
use anec_bundle::{Stage, TokenCount};
use anec_family::{ExpertCounts, FamilyModel, FunctionRequest, LoweringOptions};
use anec_manifest::{ExpertsForm, HeadSplit, Lengths, Manifest, RecurrentForm, StateForm, Target};
use anec_mil::Opset;
use rayon::prelude::*;

/// A conversion, planned.
#[derive(Clone, Debug)]
pub struct ConvertPlan {
    /// The op forms of every function.
    pub form: LoweringOptions,
    /// Context lengths, ascending.
    pub contexts: Vec<u64>,
    /// Packages: layers first, each followed by the experts that it leaves out, then the LM head.
    pub packages: Vec<PackagePlan>,
    /// Experts that a token is given in a layer that has some, at most.
    pub experts_per_token: u64,
    /// The layer that drafts.
    pub draft: Option<DraftPlan>,
}

/// The layer that drafts, planned.
#[derive(Clone, Debug)]
pub struct DraftPlan {
    /// Its packages, without those of the LM head.
    pub packages: Vec<PackagePlan>,
    /// The functions that it has in the packages of the model's LM head, by their names.
    pub heads: BTreeMap<String, Vec<FunctionRequest>>,
}

impl DraftPlan {
    fn new(manifest: &Manifest, model: &dyn FamilyModel, heads: &[PackagePlan]) -> Result<DraftPlan> {
        let mut manifest = manifest.clone();
        manifest.shards.layers = None;
        manifest.quant.layers.clear();
        // the pieces of the model's own
        manifest.lm_head.split = HeadSplit::Pieces(heads.len() as u64);
        let mut packages = ConvertPlan::new(&manifest, model)?.packages;
        let of_head = packages.split_off(packages.len() - heads.len());
        packages.iter_mut().for_each(|package| package.name = format!("draft_{}", package.name));
        let functions = |package: PackagePlan| {
            let named =
                |request: FunctionRequest| FunctionRequest { name: format!("draft_{}", request.name), ..request };
            package.functions.into_iter().map(named).collect()
        };
        let names = heads.iter().map(|package| package.name.clone());
        Ok(DraftPlan { packages, heads: names.zip(of_head.into_iter().map(functions)).collect() })
    }
}

/// A package, planned.
#[derive(Clone, Debug)]
pub struct PackagePlan {
    /// Its name, without extension.
    pub name: String,
    /// What it does.
    pub stage: Stage,
    /// Its functions, the default one first.
    pub functions: Vec<FunctionRequest>,
    /// Bytes of the constants in its weight file, each counted once.
    pub weight_bytes: u64,
    /// Bytes that a text carries from call to call, for each context in the order of [`ConvertPlan::contexts`], whoever keeps them.
    pub state_bytes: Vec<u64>,
}

impl ConvertPlan {
    /// Plans the conversion of a model.
    ///
    /// # Errors
    /// When the manifest asks for layers or pieces that the model doesn't have, or for packages too small for them.
    pub fn new(manifest: &Manifest, model: &dyn FamilyModel) -> Result<ConvertPlan> {
        Self::make(manifest, model, true)
    }

    /// The same for a conversion that follows, which will tell the sizes of packages: here, the size of a package is the sum of
    /// those of its layers, if these were measured to divide them, and what they share is counted for each.
    ///
    /// # Errors
    /// As [`new`](ConvertPlan::new).
    pub fn to_convert(manifest: &Manifest, model: &dyn FamilyModel) -> Result<ConvertPlan> {
        Self::make(manifest, model, false)
    }

    fn make(manifest: &Manifest, model: &dyn FamilyModel, exact: bool) -> Result<ConvertPlan> {
        let contexts = manifest.context.all();
        let facts = model.facts();
        if let Some(end) = manifest.quant.layers.iter().map(|own| own.range[1]).find(|end| *end > facts.num_layers) {
            return Err(ConvertError::QuantLayers { end, layers: facts.num_layers }.into());
        }
        let functions = Functions {
            lengths: &manifest.lengths,
            contexts: &contexts,
            argmax: manifest.lm_head.argmax,
            whole_texts: facts.is_bidirectional(),
        };
        if facts.recurrent && functions.fewest_tokens() > 1 {
            return Err(ConvertError::NoSingleToken.into());
        }
        let counts: Vec<Option<ExpertCounts>> = (0..facts.num_layers).map(|layer| model.experts(layer)).collect();
        let layer_bytes = OnceLock::new();
        let planner = Planner { manifest, model, form: form(manifest), functions, counts: &counts, exact, layer_bytes };
        let known = Mutex::default();
        let of_ranges = planner.ranges()?.into_par_iter().map(|range| planner.layers(range, &known)).collect();
        let mut packages: Vec<PackagePlan> = in_order(of_ranges)?.into_iter().flatten().collect();
        let heads = planner.heads()?;
        let draft = model.draft().map(|draft| DraftPlan::new(manifest, draft, &heads)).transpose()?;
        packages.extend(heads);
        let per_token = counts.iter().flatten().map(|of| of.per_token + u64::from(of.joined));
        let experts_per_token = per_token.max().unwrap_or(0);
        let form = planner.form;
        Ok(ConvertPlan { form, contexts, packages, experts_per_token, draft })
    }

    /// Bytes of all packages' weights: what one call of every function reads.
    pub fn weight_bytes(&self) -> u64 {
        self.packages.iter().map(|p| p.weight_bytes).sum()
    }

    /// Bytes of weights that a call of one token reads, at most, and its calls of functions. Of experts in functions of
    /// their own, those are called that the token was given.
    pub fn of_one_token(&self) -> (u64, usize) {
        let mut parts: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
        let (mut bytes, mut calls) = (0, 0);
        for package in &self.packages {
            match package.stage {
                Stage::Experts { layer, .. } => {
                    let mut stages: Vec<&Stage> = package.functions.iter().map(|request| &request.stage).collect();
                    stages.dedup();
                    let each = package.weight_bytes / stages.len().max(1) as u64;
                    parts.entry(layer).or_default().extend(stages.iter().map(|_| each));
                }
                Stage::Layers { .. } | Stage::FeedForward { .. } | Stage::Head { .. } => {
                    bytes += package.weight_bytes;
                    calls += 1;
                }
            }
        }
        for mut parts in parts.into_values() {
            parts.sort_unstable_by(|a, b| b.cmp(a));
            parts.truncate(self.experts_per_token as usize);
            bytes += parts.iter().sum::<u64>();
            calls += parts.len();
        }
        (bytes, calls)
    }

    /// Layers of the package that has most.
    pub fn most_layers(&self) -> u64 {
        let layers = self.packages.iter().map(|package| match package.stage {
            Stage::Layers { first, end } => (end - first) as u64,
            Stage::FeedForward { .. } | Stage::Experts { .. } | Stage::Head { .. } => 0,
        });
        layers.max().unwrap_or(0)
    }

    /// Bytes that a text carries from call to call, for the largest context.
    pub fn state_bytes(&self) -> u64 {
        self.packages.iter().map(|p| p.state_bytes.last().copied().unwrap_or(0)).sum()
    }
}

/// The op forms that a manifest asks for.
pub fn form(manifest: &Manifest) -> LoweringOptions {
    LoweringOptions {
        opset: match manifest.target {
            Target::Ios18 => Opset::CoreMl8,
            Target::Ios26 => Opset::CoreMl9,
        },
        layout: manifest.layout,
        linear: manifest.linear,
        norm: manifest.norm,
        attention: manifest.attention,
        activations: manifest.activations,
        rope: manifest.rope,
        kv_write: manifest.kv_write(),
        state: manifest.state,
        recurrent_states: match manifest.state {
            StateForm::Host => RecurrentForm::InputOutput,
            StateForm::PerLayer | StateForm::Unified => manifest.recurrent_states,
        },
        experts: manifest.experts,
        divide: manifest.shards.divide,
    }
}

/// What packages are planned from.
struct Planner<'a> {
    manifest: &'a Manifest,
    model: &'a dyn FamilyModel,
    form: LoweringOptions,
    functions: Functions<'a>,
    /// Of each layer's experts.
    counts: &'a [Option<ExpertCounts>],
    /// Whether each package is measured for itself.
    exact: bool,
    /// Bytes of each layer by itself, once they are known.
    layer_bytes: OnceLock<Vec<u64>>,
}

impl Planner<'_> {
    /// The size of a package with some functions.
    fn size(&self, functions: &[FunctionRequest]) -> Result<PackageSize> {
        PackageSize::of(self.model, &self.form, &self.manifest.quant, functions)
    }

    /// Bytes of a package for a stage whose functions all hold the same weights.
    fn file_bytes(&self, stage: &Stage) -> Result<u64> {
        let requests = self.functions.of(stage);
        Ok(self.size(&requests[..requests.len().min(1)])?.file_bytes)
    }

    /// Most bytes of a package.
    fn limit(&self) -> u64 {
        (self.manifest.shards.max_mb * 1e6) as u64
    }

    /// The experts that a layer leaves out.
    fn experts(&self, layer: usize) -> Option<ExpertCounts> {
        self.counts[layer].filter(|_| !self.manifest.experts.is_packed())
    }

    /// Whether a layer's feed-forward network has a package of its own.
    fn is_divided(&self, layer: usize) -> bool {
        self.form.leaves_feed_forward_out(self.counts[layer].is_some())
    }

    /// The layers of each package.
    fn ranges(&self) -> Result<Vec<Range<usize>>> {
        let layers = self.counts.len();
        let shards = &self.manifest.shards;
        let ranges = match &shards.layers {
            Some(ranges) => explicit_ranges(ranges, layers)?,
            None if !shards.divide.is_none() => (0..layers).map(|layer| layer..layer + 1).collect(),
            None => {
                let size = |layer| self.file_bytes(&Stage::Layers { first: layer, end: layer + 1 });
                let sizes = in_order((0..layers).into_par_iter().map(size).collect())?;
                let sizes = self.layer_bytes.get_or_init(|| sizes);
                layer_ranges(sizes, self.limit(), shards.max_mb, |layer| self.experts(layer).is_some())?
            }
        };
        // what leaves experts out ends there, for the next layer needs what they add
        for range in &ranges {
            if let Some(layer) = range.clone().find(|layer| self.experts(*layer).is_some() && layer + 1 != range.end) {
                return Err(ConvertError::ExpertsInside { first: range.start, end: range.end, layer }.into());
            }
        }
        if !shards.divide.is_none() {
            (0..layers).try_for_each(|layer| self.check_divided(layer))?;
        }
        Ok(ranges)
    }

    /// Checks that what a layer is divided into stays under the limit.
    fn check_divided(&self, layer: usize) -> Result<()> {
        let whole = Stage::Layers { first: layer, end: layer + 1 };
        let parts = [Some(whole), self.is_divided(layer).then_some(Stage::FeedForward { layer })];
        let limit = self.manifest.shards.max_mb;
        for stage in parts.iter().flatten() {
            let megabytes = self.file_bytes(stage)? as f64 / 1e6;
            if megabytes > limit {
                return Err(ConvertError::LayerTooLarge { layer, megabytes, limit }.into());
            }
        }
        Ok(())
    }

    /// A package of which a text keeps nothing from call to call.
    fn package(&self, name: String, stage: Stage) -> Result<PackagePlan> {
        let functions = self.functions.of(&stage);
        let weight_bytes = match (&stage, self.layer_bytes.get()) {
            (Stage::Layers { first, end }, Some(layers)) if !self.exact => layers[*first..*end].iter().sum(),
            _ => self.size(&functions)?.weight_bytes,
        };
        Ok(PackagePlan { name, stage, functions, weight_bytes, state_bytes: self.no_state() })
    }

    fn no_state(&self) -> Vec<u64> {
        vec![0; self.functions.contexts.len()]
    }

    /// The package of some layers, and those of what the last of them leaves out.
    fn layers(
        &self,
        range: Range<usize>,
        known: &Mutex<HashMap<AlikeExperts, PackageSize>>,
    ) -> Result<Vec<PackagePlan>> {
        let digits = self.counts.len().to_string().len();
        let layer = range.end - 1;
        let name = match self.is_divided(layer) {
            true => format!("mixer_{layer:0digits$}"),
            false => format!("layers_{:0digits$}_{:0digits$}", range.start, range.end),
        };
        let most_tokens = self.functions.most_tokens();
        let state =
            |context: &u64| range.clone().map(|layer| self.model.layer_state_bytes(layer, *context, most_tokens)).sum();
        let stage = Stage::Layers { first: range.start, end: range.end };
        let state_bytes = self.functions.contexts.iter().map(state).collect();
        let mut packages = vec![PackagePlan { state_bytes, ..self.package(name, stage)? }];
        if self.is_divided(layer) {
            packages.push(self.package(format!("feed_forward_{layer:0digits$}"), Stage::FeedForward { layer })?);
        }
        if let Some(counts) = self.experts(layer) {
            let experts = Experts { planner: self, known, layer, counts };
            packages.extend(experts.packages(&format!("experts_{layer:0digits$}"))?);
        }
        Ok(packages)
    }

    /// The packages of the LM head's pieces, or of what a classifier has in its place.
    fn heads(&self) -> Result<Vec<PackagePlan>> {
        let facts = self.model.facts();
        let stage = |rows: Range<u64>| Stage::Head { first: rows.start, end: rows.end };
        let bytes = |rows| Ok(self.size(&self.functions.of(&stage(rows)))?.file_bytes);
        let pieces = match facts.head_rows() {
            0 => Vec::new(),
            rows => head_pieces(self.manifest, rows, self.limit(), bytes)?,
        };
        let name = if facts.is_bidirectional() { "classifier" } else { "lm_head" };
        let (count, digits) = (pieces.len(), pieces.len().saturating_sub(1).to_string().len());
        let named = |index| if count == 1 { name.to_owned() } else { format!("{name}_{index:0digits$}") };
        pieces.into_iter().enumerate().map(|(index, rows)| self.package(named(index), stage(rows))).collect()
    }
}

/// The experts that a layer leaves out.
struct Experts<'a> {
    planner: &'a Planner<'a>,
    known: &'a Mutex<HashMap<AlikeExperts, PackageSize>>,
    layer: usize,
    counts: ExpertCounts,
}

/// What decides the size of a package of experts. Those of a layer have the same shapes, and so have those of layers in which one alone
/// takes as many bytes; hundreds of packages are built once to be measured.
#[derive(PartialEq, Eq, Hash)]
struct AlikeExperts {
    single: PackageSize,
    count: u64,
    /// With what joins them, which is another function.
    joins: bool,
    /// The layer, where layers have number formats of their own.
    layer: Option<usize>,
}

impl Experts<'_> {
    /// The fewest packages that stay under the limit, of equal groups of experts; `name` is what their names begin with.
    fn packages(&self, name: &str) -> Result<Vec<PackagePlan>> {
        let (limit, shards) = (self.planner.limit(), &self.planner.manifest.shards);
        let all = self.counts.apart();
        let single = self.planner.size(&self.requests(0..1))?;
        if single.file_bytes > limit {
            let (layer, megabytes) = (self.layer, single.file_bytes as f64 / 1e6);
            return Err(ConvertError::LayerTooLarge { layer, megabytes, limit: shards.max_mb }.into());
        }
        let size = |range: Range<u64>| self.size_of(range, single);
        let mut groups = all.div_ceil(shards.max_experts.unwrap_or(all));
        while groups < all && size(0..all.div_ceil(groups))?.file_bytes > limit {
            groups += 1;
        }
        let each = all.div_ceil(groups);
        let digits = all.to_string().len();
        (0..all.div_ceil(each))
            .map(|group| {
                let range = group * each..all.min((group + 1) * each);
                let functions = self.requests(range.clone());
                Ok(PackagePlan {
                    name: format!("{name}_{:0digits$}_{:0digits$}", range.start, range.end),
                    weight_bytes: size(range.clone())?.weight_bytes,
                    functions,
                    stage: self.stage(range),
                    state_bytes: self.planner.no_state(),
                })
            })
            .collect()
    }

    /// The size of a package of some experts, of which one alone has the size `single`.
    fn size_of(&self, range: Range<u64>, single: PackageSize) -> Result<PackageSize> {
        let alike = AlikeExperts {
            single,
            count: range.end - range.start,
            joins: self.counts.joined && range.end == self.counts.apart(),
            layer: (!self.planner.manifest.quant.layers.is_empty()).then_some(self.layer),
        };
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(size) = known().get(&alike) {
            return Ok(*size);
        }
        let size = self.planner.size(&self.requests(range))?;
        known().insert(alike, size);
        Ok(size)
    }

    fn stage(&self, range: Range<u64>) -> Stage {
        Stage::Experts { layer: self.layer, first: range.start, end: range.end }
    }

    /// The functions of a package of some experts: one for all, or one for each.
    fn requests(&self, range: Range<u64>) -> Vec<FunctionRequest> {
        if self.planner.manifest.experts != ExpertsForm::Routed {
            return self.planner.functions.of(&self.stage(range));
        }
        range.flat_map(|expert| self.requests_of_one(expert)).collect()
    }

    /// The functions of one expert among others.
    fn requests_of_one(&self, expert: u64) -> Vec<FunctionRequest> {
        let mut requests = self.planner.functions.of(&self.stage(expert..expert + 1));
        for request in &mut requests {
            request.name = match request.name.as_str() {
                "main" => format!("expert_{expert}"),
                name => format!("expert_{expert}_{name}"),
            };
        }
        requests
    }
}

/// Which functions a package gets.
struct Functions<'a> {
    lengths: &'a Lengths,
    contexts: &'a [u64],
    argmax: bool,
    /// Most calls bring as many tokens as a function takes.
    whole_texts: bool,
}

impl Functions<'_> {
    /// Fewest tokens of any call.
    fn fewest_tokens(&self) -> u64 {
        match self.lengths {
            Lengths::Range([lower, _]) => *lower,
            Lengths::Fixed(sizes) => sizes.iter().copied().min().unwrap_or(1),
        }
    }

    /// Most tokens of any call.
    fn most_tokens(&self) -> u64 {
        match self.lengths {
            Lengths::Range([_, upper]) => *upper,
            Lengths::Fixed(sizes) => sizes.iter().copied().max().unwrap_or(1),
        }
    }

    /// The functions of a stage: one for each number of tokens and, for layers, each context. Feed-forward networks, experts
    /// and the LM head see no context; their functions carry the largest one.
    fn of(&self, stage: &Stage) -> Vec<FunctionRequest> {
        let largest = self.contexts.last().copied().unwrap_or(1);
        let head = matches!(stage, Stage::Head { .. });
        let sees_context = matches!(stage, Stage::Layers { .. });
        let contexts = if sees_context { self.contexts } else { std::slice::from_ref(&largest) };
        let tokens: Vec<TokenCount> = match self.lengths {
            Lengths::Range([lower, upper]) => vec![TokenCount::Range(*lower, *upper)],
            Lengths::Fixed(sizes) => {
                let mut sizes = sizes.clone();
                sizes.sort_unstable();
                sizes.into_iter().map(TokenCount::Fixed).collect()
            }
        };
        let single = contexts.len() == 1 && tokens.len() == 1;
        let name = |context: u64, tokens: TokenCount| match tokens {
            _ if single => "main".to_owned(),
            TokenCount::Fixed(t) if contexts.len() == 1 => format!("tokens_{t}"),
            TokenCount::Fixed(t) => format!("context_{context}_tokens_{t}"),
            TokenCount::Range(..) => format!("context_{context}"),
        };
        let argmax = self.argmax && head;
        contexts
            .iter()
            .flat_map(|context| tokens.iter().map(move |tokens| (*context, *tokens)))
            .map(|(context, tokens)| FunctionRequest {
                name: name(context, tokens),
                stage: stage.clone(),
                tokens,
                // most calls of a decoder bring one token, of a classifier a whole window
                default_tokens: if self.whole_texts { tokens.most() } else { tokens.least() },
                context,
                most_tokens: self.most_tokens(),
                argmax,
            })
            .collect()
    }
}

/// What was computed side by side, or the first error in its order: the same one every time.
fn in_order<T>(computed: Vec<Result<T>>) -> Result<Vec<T>> {
    computed.into_iter().collect()
}

fn explicit_ranges(ranges: &[[usize; 2]], layers: usize) -> Result<Vec<Range<usize>>, ConvertError> {
    let end = ranges.last().map_or(0, |[_, end]| *end);
    if end != layers {
        return Err(ConvertError::LayersDontTile { end, layers });
    }
    Ok(ranges.iter().map(|[first, end]| *first..*end).collect())
}

/// The fewest ranges that stay under the limit, and among those the most equal ones; a range ends after each layer for
/// which `ends` says so.
fn layer_ranges(
    sizes: &[u64],
    limit: u64,
    limit_mb: f64,
    ends: impl Fn(usize) -> bool,
) -> Result<Vec<Range<usize>>, ConvertError> {
    if let Some((layer, bytes)) = sizes.iter().enumerate().find(|(_, bytes)| **bytes > limit) {
        return Err(ConvertError::LayerTooLarge { layer, megabytes: *bytes as f64 / 1e6, limit: limit_mb });
    }
    let mut ranges = Vec::new();
    let mut first = 0;
    for end in (1..=sizes.len()).filter(|end| *end == sizes.len() || ends(end - 1)) {
        let own = equal_ranges(&sizes[first..end], limit);
        ranges.extend(own.into_iter().map(|range| first + range.start..first + range.end));
        first = end;
    }
    Ok(ranges)
}

/// The same for layers that nothing divides. Each size is at most the limit.
fn equal_ranges(sizes: &[u64], limit: u64) -> Vec<Range<usize>> {
    let count = fill(sizes, limit).len();
    // the smallest limit that still gives this many ranges: between the largest layer and the given one
    let (mut low, mut high) = (sizes.iter().copied().max().unwrap_or(0), limit);
    while low < high {
        let middle = low + (high - low) / 2;
        if fill(sizes, middle).len() <= count {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    fill(sizes, low)
}

/// Ranges filled up to the limit, one after another. Each size is at most the limit.
fn fill(sizes: &[u64], limit: u64) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let (mut first, mut sum) = (0, 0u64);
    for (layer, bytes) in sizes.iter().enumerate() {
        if sum > 0 && sum.saturating_add(*bytes) > limit {
            ranges.push(first..layer);
            (first, sum) = (layer, 0);
        }
        sum = sum.saturating_add(*bytes);
    }
    if first < sizes.len() {
        ranges.push(first..sizes.len());
    }
    ranges
}

fn head_pieces(
    manifest: &Manifest,
    rows: u64,
    limit: u64,
    bytes: impl Fn(Range<u64>) -> Result<u64>,
) -> Result<Vec<Range<u64>>> {
    let count = match manifest.lm_head.split {
        HeadSplit::Pieces(pieces) if pieces > rows => {
            return Err(ConvertError::TooManyPieces { pieces, rows }.into());
        }
        HeadSplit::Pieces(pieces) => return Ok(divide(rows, pieces)),
        HeadSplit::Auto => {
            let fits = |pieces: u64| -> Result<bool> {
                let largest = divide(rows, pieces).into_iter().map(|r| r.end - r.start).max().unwrap_or(rows);
                Ok(bytes(0..largest)? <= limit)
            };
            let smallest = bytes(0..rows.min(1))?;
            if smallest > limit {
                let limit = manifest.shards.max_mb;
                return Err(ConvertError::HeadTooLarge { megabytes: smallest as f64 / 1e6, limit }.into());
            }
            // sizes grow with rows, so the first estimate is close; only its rounding has to be made good
            let mut pieces = bytes(0..rows)?.div_ceil(limit).clamp(1, rows);
            while pieces < rows && !fits(pieces)? {
                pieces += 1;
            }
            pieces
        }
    };
    Ok(divide(rows, count))
}

/// `count` pieces of equal size, a multiple of 64 rows (or 16, or 1) where that leaves something for the last, which may
/// be smaller.
fn divide(rows: u64, count: u64) -> Vec<Range<u64>> {
    let count = count.clamp(1, rows.max(1));
    let size = [64, 16, 1]
        .into_iter()
        .map(|multiple| rows.div_ceil(count).next_multiple_of(multiple))
        .find(|size| size * (count - 1) < rows);
    match size {
        Some(size) => (0..count).map(|i| i * size..rows.min((i + 1) * size)).collect(),
        // equal sizes leave nothing for the last (7 rows in 5 pieces): the first ones get one more
        None => {
            let (small, larger) = (rows / count, rows % count);
            let start = |i: u64| i * small + i.min(larger);
            (0..count).map(|i| start(i)..start(i + 1)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_tile_the_layers_and_stay_under_the_limit(
            sizes in proptest::collection::vec(1u64..1000, 1..60), extra in 0u64..5000
        ) {
            let limit = sizes.iter().max().unwrap() + extra;
            let ranges = layer_ranges(&sizes, limit, 1.0, |_| false).unwrap();
            prop_assert_eq!(ranges.len(), fill(&sizes, limit).len());
            let mut next = 0;
            for range in ranges {
                prop_assert_eq!(range.start, next);
                prop_assert!(range.end > range.start);
                prop_assert!(sizes[range.clone()].iter().sum::<u64>() <= limit);
                next = range.end;
            }
            prop_assert_eq!(next, sizes.len());
        }

        #[test]
        fn pieces_tile_the_rows(rows in 1u64..300_000, count in 1u64..40) {
            let pieces = divide(rows, count);
            prop_assert_eq!(pieces.len() as u64, count.min(rows));
            let mut next = 0;
            let first = pieces[0].end;
            for piece in pieces {
                prop_assert_eq!(piece.start, next);
                prop_assert!(piece.end > piece.start && piece.end - piece.start <= first);
                next = piece.end;
            }
            prop_assert_eq!(next, rows);
        }
    }

    #[test]
    fn ranges_are_as_equal_as_their_number_allows() {
        let ranges = |sizes: &[u64], limit: u64| layer_ranges(sizes, limit, limit as f64, |_| false).unwrap();
        assert_eq!(ranges(&[10; 7], 60), [0..4, 4..7]);
        assert_eq!(ranges(&[10; 7], 70), vec![0..7; 1]);
        assert_eq!(ranges(&[30, 10, 10, 30], 45), [0..2, 2..4]);
    }

    #[test]
    fn ranges_end_where_experts_are_left_out() {
        // two dense layers, then experts in every layer but the fifth
        let ranges = layer_ranges(&[10; 6], 60, 60.0, |layer| layer > 1 && layer != 4).unwrap();
        assert_eq!(ranges, [0..3, 3..4, 4..6]);
    }

    #[test]
    fn a_layer_over_the_limit_is_named() {
        let error = layer_ranges(&[10, 70, 10], 60, 60.0, |_| false).unwrap_err();
        assert!(matches!(error, ConvertError::LayerTooLarge { layer: 1, .. }));
    }

    #[test]
    fn pieces_have_round_sizes_and_a_remainder() {
        assert_eq!(divide(200_064, 4), [0..50_048, 50_048..100_096, 100_096..150_144, 150_144..200_064]);
        assert_eq!(divide(2048, 2), [0..1024, 1024..2048]);
        assert_eq!(divide(7, 5), [0..2, 2..4, 4..5, 5..6, 6..7]);
        assert_eq!(divide(5, 9).len(), 5);
    }
}
