//! The manifest's source and its model.

use super::error::ConvertError;
use anec_base::{Progress, Result};
use anec_bundle::LedgerTotals;
use anec_family::FamilyModel;
use anec_family::published::published;
use anec_manifest::{
    Contexts, Granularity, Lengths, Manifest, NumberFormat, Quant, QuantOverride, ResidualScale, Role, Transform,
    Transforms, WeightFormat, builtin,
};
use anec_source::sentence_transformers::LogitScore;
use anec_source::{Adapter, Ledger, Source, hub};

/// Open source with its model.
pub struct Opened {
    /// Source.
    pub source: Source,
    /// Model.
    pub model: Box<dyn FamilyModel>,
    /// Accounting of the source's tensors.
    pub ledger: LedgerTotals,
}

/// Opens a manifest's source and its model.
///
/// # Errors
/// If there is no source, it can't be read, or a tensor or key of its model isn't understood.
pub fn open(manifest: &Manifest) -> Result<Opened> {
    open_observed(manifest, &Progress::hidden())
}

/// Opens a source like [`open`], and reports downloads to `progress`.
///
/// # Errors
/// Returns any error from [`open`].
pub fn open_observed(manifest: &Manifest, progress: &Progress) -> Result<Opened> {
    let name = manifest.source.as_deref().ok_or(ConvertError::NoSource)?;
    with_model(Source::open_observed(name, progress)?, manifest)
}

/// Opens a source for planning, which needs shapes only: for a source on the hub that isn't cached and has a built-in
/// manifest, the published configuration is used and nothing is downloaded.
///
/// # Errors
/// Returns any error from [`open`].
pub fn open_shapes(manifest: &Manifest, progress: &Progress) -> Result<Opened> {
    let name = manifest.source.as_deref().ok_or(ConvertError::NoSource)?;
    match hub::Location::parse(name)? {
        Some(location) if hub::cached(&location).is_none() => match builtin::for_source(name) {
            Some(builtin) => with_model(published(builtin)?, manifest),
            None => open_observed(manifest, progress),
        },
        _ => open_observed(manifest, progress),
    }
}

fn with_model(mut source: Source, manifest: &Manifest) -> Result<Opened> {
    for entry in &manifest.adapters {
        source = source.adapted(&Adapter::read(&entry.path)?, entry.scale)?;
    }
    let (model, ledger) = open_model(&source, manifest)?;
    Ok(Opened { source, model, ledger })
}

/// Opens the model of a source.
///
/// # Errors
/// If a tensor or key isn't understood.
pub fn open_model(source: &Source, manifest: &Manifest) -> Result<(Box<dyn FamilyModel>, LedgerTotals)> {
    let mut ledger = Ledger::new(source);
    let mut model =
        anec_family::open_with_draft(&mut ledger, manifest.family.as_deref(), &manifest.acknowledge, manifest.draft)?;
    if let Some(score) = source.logit_score() {
        let tokens = manifest.reranker.as_ref().map(|reranker| (reranker.positive, Some(reranker.negative)));
        if tokens != Some((score.positive, score.negative)) {
            let LogitScore { positive, negative } = score;
            return Err(ConvertError::LogitScore { positive, negative, has_others: tokens.is_some() }.into());
        }
    }
    if let Some(reranker) = &manifest.reranker {
        model.score_pairs(reranker)?;
    }
    if let Some(ResidualScale::Factor(factor)) = manifest.numerics.scale {
        model.set_hidden_scale(f64::from(factor));
    }
    let transforms = match &manifest.transforms {
        Transforms::Auto if needs_transforms(manifest) => model.recipe(),
        Transforms::Auto if manifest.quant.is_calibrated() => with_feedback(model.recipe(), &manifest.quant),
        Transforms::Auto | Transforms::None => Vec::new(),
        Transforms::List(list) => list.clone(),
    };
    model.transform(&transforms)?;
    Ok((model, ledger.finish()?))
}

/// Returns whether weights of a projection share one scale, which outliers would determine.
fn needs_transforms(manifest: &Manifest) -> bool {
    let shared =
        |format: NumberFormat| format.weights != WeightFormat::None && format.granularity == Granularity::PerTensor;
    // a plan may choose such a format
    manifest.quant.plan.is_some() || manifest.quant.formats().any(shared)
}

/// Reduces a recipe to what helps error feedback if no scale is per tensor: a rotation wherever weights share a scale;
/// without one, new gains of norms for int8. They hurt 4-bit blocks, and new units alone gain nothing.
fn with_feedback(recipe: Vec<Transform>, quant: &Quant) -> Vec<Transform> {
    if recipe.iter().any(|transform| transform.rotation().is_some()) {
        return recipe;
    }
    let int8 = quant.formats().all(|format| matches!(format.weights, WeightFormat::Int8 | WeightFormat::None));
    recipe.into_iter().filter(|transform| int8 && *transform == Transform::Gains).collect()
}

/// Roles whose rows feed a norm (in families with norms after the blocks), and the LM head: rescaling their rows can't
/// be undone, and no rotation would even the rows out.
const ROWS_OF_FIXED_UNITS: [Role; 3] = [Role::AttentionOutput, Role::MlpDown, Role::LmHead];

/// Gives those roles per-channel scales unless the manifest sets others.
fn scale_fixed_rows(quant: &mut Quant) {
    for role in ROWS_OF_FIXED_UNITS {
        let own = quant.overrides.get(&role).copied().unwrap_or_default();
        let format = quant.of(role, None);
        let is_default = format.weights == WeightFormat::Int8 && format.granularity == Granularity::PerTensor;
        if own.granularity.is_none() && is_default {
            quant.overrides.insert(role, QuantOverride { granularity: Some(Granularity::PerChannel), ..own });
        }
    }
}

/// Reduces the default context to the positions that a model has.
fn limit_context(manifest: &mut Manifest, positions: u64) {
    let default = Manifest::default().context;
    if let Contexts::One(tokens) = default
        && manifest.context == default
    {
        manifest.context = Contexts::One(tokens.min(positions));
    }
}

/// Sets the default lengths of models that see both sides of a token: one call holds a text, or as much of it as
/// possible.
fn long_calls(manifest: &mut Manifest) {
    if manifest.lengths == Manifest::default().lengths {
        manifest.lengths = Lengths::Range([1, manifest.context.all().last().copied().unwrap_or(1)]);
    }
}

/// Manifest with all defaults, and with the values that the source determines.
pub fn resolve(manifest: &Manifest, source: &Source, model: &dyn FamilyModel) -> Manifest {
    let mut manifest = manifest.clone();
    manifest.kv_write = Some(manifest.kv_write());
    manifest.family = Some(model.facts().family.clone());
    manifest.source = Some(source.name().to_owned());
    manifest.name.get_or_insert_with(|| name_of(source.name()));
    if model.facts().is_bidirectional() {
        limit_context(&mut manifest, model.facts().max_position_embeddings);
        long_calls(&mut manifest);
    }
    if let Some(positions) = model.positions() {
        limit_context(&mut manifest, positions);
    }
    if manifest.transforms == Transforms::Auto && model.norms_behind_blocks() {
        scale_fixed_rows(&mut manifest.quant);
    }
    manifest
}

/// Default name of a bundle: the last part of the source's name without extension.
pub fn name_of(source: &str) -> String {
    let name = source.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or(source);
    let name = name.split('@').next().unwrap_or(name);
    let name = [".gguf", ".safetensors", ".onnx"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
    let name: String = name.chars().map(|c| if c.is_alphanumeric() || "-_.+".contains(c) { c } else { '_' }).collect();
    match name.trim_start_matches('.') {
        "" => "model".into(),
        name => name.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feedback_reduces_a_recipe() {
        let quant = |text: &str| Manifest::from_yaml(&format!("quant: {text}"), "test", &[]).unwrap().quant;
        let (int8, int4) =
            (quant("{ granularity: per_channel }"), quant("{ weights: int4, granularity: { block: 32 } }"));
        let mixed = quant(
            "{ granularity: per_channel, overrides: { lm_head: { weights: palette6, granularity: per_tensor } } }",
        );
        let rotating = vec![Transform::Fold, Transform::Rotate, Transform::Equalize];
        for quant in [&int8, &int4, &mixed] {
            assert_eq!(with_feedback(rotating.clone(), quant), rotating);
        }
        let others = vec![Transform::Gains, Transform::Equalize];
        assert_eq!(with_feedback(others.clone(), &int8), [Transform::Gains]);
        assert_eq!(with_feedback(others.clone(), &int4), []);
        assert_eq!(with_feedback(others, &mixed), []);
    }

    #[test]
    fn names_come_from_sources() {
        for (source, name) in [
            ("hf:Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
            ("hf:Qwen/Qwen3-0.6B@main", "Qwen3-0.6B"),
            ("hf:owner/name/file.gguf", "file"),
            ("/models/phi4/", "phi4"),
            ("./a b.safetensors", "a_b"),
            ("..", "model"),
        ] {
            assert_eq!(name_of(source), name, "{source}");
        }
    }
}
