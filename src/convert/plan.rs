//! Plan of a conversion: layers, rows of the LM head and functions of each package. Only shapes are read.

mod experts;
mod functions;
mod ranges;
mod token;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Mutex, OnceLock};

use self::experts::{AlikeExperts, Experts};
use self::functions::Functions;
use self::ranges::{explicit_ranges, head_pieces, layer_ranges};
pub use self::token::TokenCost;
use super::error::ConvertError;
use super::size::PackageSize;
use anec_base::Result;
use anec_bundle::Stage;
use anec_family::{ExpertCounts, FamilyFacts, FamilyModel, FunctionRequest, LoweringOptions, Purpose};
use anec_manifest::{HeadSplit, Largest, LmHead, Manifest, RecurrentForm, StateForm, Target};
use anec_mil::Opset;
use rayon::prelude::*;

/// Planned conversion.
#[derive(Clone, Debug)]
pub struct ConvertPlan {
    /// Op forms of every function.
    pub form: LoweringOptions,
    /// Context lengths, ascending.
    pub contexts: Vec<u64>,
    /// Packages: layers first, each followed by its separate experts, then the LM head.
    pub packages: Vec<PackagePlan>,
    /// Experts of each layer.
    pub experts: Vec<Option<ExpertCounts>>,
    /// Draft layer.
    pub draft: Option<DraftPlan>,
}

/// Planned draft layer.
#[derive(Clone, Debug)]
pub struct DraftPlan {
    /// Packages of the draft layer, without the LM head.
    pub packages: Vec<PackagePlan>,
    /// Functions of the draft layer in the model's LM-head packages, by package name.
    pub heads: BTreeMap<String, Vec<FunctionRequest>>,
}

impl DraftPlan {
    fn new(manifest: &Manifest, model: &dyn FamilyModel, heads: &[PackagePlan]) -> Result<DraftPlan> {
        let mut manifest = manifest.clone();
        manifest.shards.layers = None;
        manifest.quant.layers.clear();
        // the same pieces as the model's head
        if manifest.lm_head.split != HeadSplit::None {
            manifest.lm_head.split = HeadSplit::Pieces(heads.len() as u64);
        }
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

/// Planned package.
#[derive(Clone, Debug)]
pub struct PackagePlan {
    /// Name without extension.
    pub name: String,
    /// Stage of the model.
    pub stage: Stage,
    /// Functions, the default one first.
    pub functions: Vec<FunctionRequest>,
    /// Bytes of the constants in the weight file, each counted once.
    pub weight_bytes: u64,
    /// Bytes of state per text, for each context in the order of [`ConvertPlan::contexts`], whether the package or the
    /// host keeps it.
    pub state_bytes: Vec<u64>,
}

impl ConvertPlan {
    /// Plans the conversion of a model.
    ///
    /// # Errors
    /// If the manifest names layers or pieces that the model doesn't have, or packages are too small for them.
    pub fn new(manifest: &Manifest, model: &dyn FamilyModel) -> Result<ConvertPlan> {
        Self::make(manifest, model, true)
    }

    /// Plans a conversion that will measure the sizes of packages itself: here, the size of a package is the sum of its
    /// layers' sizes if these were measured to divide the layers, and shared constants count for each layer.
    ///
    /// # Errors
    /// Returns any error from [`new`](ConvertPlan::new).
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
            head: manifest.lm_head.outputs(),
            whole_texts: facts.is_bidirectional(),
            whole_caches: manifest.contract.is_some(),
        };
        if let Some(contract) = manifest.contract.filter(|_| facts.recurrent) {
            return Err(ConvertError::RecurrentContract { contract: contract.to_string() }.into());
        }
        if facts.recurrent && functions.fewest_tokens() > 1 {
            return Err(ConvertError::NoSingleToken.into());
        }
        check_head(&manifest.lm_head, facts)?;
        let counts: Vec<Option<ExpertCounts>> = (0..facts.num_layers).map(|layer| model.experts(layer)).collect();
        let layer_bytes = OnceLock::new();
        let planner = Planner { manifest, model, form: form(manifest), functions, counts: &counts, exact, layer_bytes };
        let known = Mutex::default();
        let (mut packages, heads): (Vec<PackagePlan>, _) = match manifest.lm_head.split {
            HeadSplit::None => (Vec::new(), vec![planner.one_package()?]),
            HeadSplit::Auto | HeadSplit::Pieces(_) => {
                let of_ranges = planner.ranges()?.into_par_iter().map(|range| planner.layers(range, &known)).collect();
                (in_order(of_ranges)?.into_iter().flatten().collect(), planner.heads()?)
            }
        };
        let draft = model.draft().map(|draft| DraftPlan::new(manifest, draft, &heads)).transpose()?;
        packages.extend(heads);
        let form = planner.form;
        Ok(ConvertPlan { form, contexts, packages, experts: counts, draft })
    }

    /// Bytes of all packages' weights: read by one call of every function.
    pub fn weight_bytes(&self) -> u64 {
        self.packages.iter().map(|p| p.weight_bytes).sum()
    }

    /// Maximum number of experts that a token is routed to in a layer, including the function that joins them.
    pub fn experts_per_token(&self) -> u64 {
        self.experts.iter().flatten().map(|of| of.per_token + u64::from(of.joined)).max().unwrap_or(0)
    }

    /// Number of layers of the largest package.
    pub fn most_layers(&self) -> u64 {
        let layers = self.packages.iter().filter_map(|package| package.stage.whole_layers());
        layers.map(|layers| layers.len() as u64).max().unwrap_or(0)
    }

    /// Bytes of state per text for the largest context.
    pub fn state_bytes(&self) -> u64 {
        self.packages.iter().map(|p| p.state_bytes.last().copied().unwrap_or(0)).sum()
    }
}

/// Op forms that a manifest requests.
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

/// Inputs of the planning.
struct Planner<'a> {
    manifest: &'a Manifest,
    model: &'a dyn FamilyModel,
    form: LoweringOptions,
    functions: Functions<'a>,
    /// Experts of each layer.
    counts: &'a [Option<ExpertCounts>],
    /// Whether each package is measured individually.
    exact: bool,
    /// Bytes of each layer alone, computed on demand.
    layer_bytes: OnceLock<Vec<u64>>,
}

impl Planner<'_> {
    /// Size of a package with these functions.
    fn size(&self, functions: &[FunctionRequest]) -> Result<PackageSize> {
        PackageSize::of(self.model, &self.form, &self.manifest.quant, functions)
    }

    /// Bytes of a package for a stage whose functions all share the same weights.
    fn file_bytes(&self, stage: &Stage) -> Result<u64> {
        let requests = self.functions.of(stage);
        Ok(self.size(&requests[..requests.len().min(1)])?.file_bytes)
    }

    /// Maximum bytes of a package.
    fn limit(&self) -> u64 {
        (self.manifest.shards.max_mb * 1e6) as u64
    }

    /// Experts of a layer in other packages.
    fn experts(&self, layer: usize) -> Option<ExpertCounts> {
        self.counts[layer].filter(|_| !self.manifest.experts.is_packed())
    }

    /// Returns whether a layer's feed-forward network has packages of its own.
    fn is_divided(&self, layer: usize) -> bool {
        self.form.omits_feed_forward(self.counts[layer].is_some())
    }

    /// Layers of each package.
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
        // a package ends after a layer whose experts are elsewhere, because the next layer needs their result
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

    /// Checks that the parts of a divided layer stay under the limit.
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

    /// Plans a package without state.
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

    /// Plans the package of some layers, and the packages of the experts that the last one leaves out.
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
        let stage = Stage::Layers { first: range.start, end: range.end };
        let state_bytes = self.state_bytes(&range);
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

    /// Bytes of state of some layers, for each context.
    fn state_bytes(&self, layers: &Range<usize>) -> Vec<u64> {
        let state = |context: &u64| {
            let cached = self.functions.most_cached(*context);
            layers.clone().map(|layer| self.model.layer_state_bytes(layer, *context, cached)).sum()
        };
        self.functions.contexts.iter().map(state).collect()
    }

    /// Plans the package with all layers and the LM head.
    fn one_package(&self) -> Result<PackagePlan> {
        let (layers, rows) = (self.counts.len(), self.model.facts().head_rows());
        self.manifest.shards.layers.as_ref().map(|ranges| explicit_ranges(ranges, layers)).transpose()?;
        let stage = Stage::Model { layers, rows };
        let megabytes = self.file_bytes(&stage)? as f64 / 1e6;
        let limit = self.manifest.shards.max_mb;
        if megabytes > limit {
            return Err(ConvertError::ModelTooLarge { megabytes, limit }.into());
        }
        Ok(PackagePlan { state_bytes: self.state_bytes(&(0..layers)), ..self.package("model".into(), stage)? })
    }

    /// Plans the packages of the LM head or of a classifier's head.
    fn heads(&self) -> Result<Vec<PackagePlan>> {
        let facts = self.model.facts();
        let stage = |rows: Range<u64>| Stage::Head { first: rows.start, end: rows.end };
        let bytes = |rows| Ok(self.size(&self.functions.of(&stage(rows)))?.file_bytes);
        let pieces = match facts.head_rows() {
            0 => Vec::new(),
            rows => head_pieces(self.manifest, rows, self.limit(), bytes)?,
        };
        let name = if facts.purpose == Purpose::TextGeneration { "lm_head" } else { "classifier" };
        let (count, digits) = (pieces.len(), pieces.len().saturating_sub(1).to_string().len());
        let named = |index| if count == 1 { name.to_owned() } else { format!("{name}_{index:0digits$}") };
        pieces.into_iter().enumerate().map(|(index, rows)| self.package(named(index), stage(rows))).collect()
    }
}

/// Checks that the model has such a head.
fn check_head(head: &LmHead, facts: &FamilyFacts) -> Result<(), ConvertError> {
    let outputs = head.outputs();
    if !matches!(facts.purpose, Purpose::TextGeneration) && (outputs.largest.is_some() || head.split == HeadSplit::None)
    {
        return Err(ConvertError::HeadOfText { family: facts.family.clone() });
    }
    match outputs.largest {
        Some(Largest::TopK(k)) if k > facts.head_rows() => Err(ConvertError::TopK { k, rows: facts.head_rows() }),
        _ => Ok(()),
    }
}

/// Results of a parallel computation, or its first error in order, so that errors are deterministic.
fn in_order<T>(computed: Vec<Result<T>>) -> Result<Vec<T>> {
    computed.into_iter().collect()
}
