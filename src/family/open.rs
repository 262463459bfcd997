//! Opening a source: family row, configuration, tensors.

use serde_json::{Map, Value as Json};

use super::config::gguf::FactorTensors;
use super::config::keys::Keys;
use super::config::{self, DecoderConfig};
use super::decoder::Decoder;
use super::error::FamilyError;
use super::row::{DecoderFamily, TensorFlag, WindowRule};
use super::table::{self, DECODERS};
use super::tensors::{Naming, Tensors, own_name};
use super::transform::Transformed;
use super::{FamilyFacts, FamilyModel, Purpose, classifier, encoder, predictor};
use anec_base::Result;
use anec_bundle::{Pooling, SequenceClassification};
use anec_manifest::DraftLayer;
use anec_source::gguf::GgufMetadata;
use anec_source::sentence_transformers::{GGUF_DENSE, GGUF_RANK};
use anec_source::{Description, HuggingFaceFiles, Ledger, Source, onnx};

/// Opens the model of a source: finds its family, reads its configuration and takes its tensors from the ledger.
///
/// `family` is the manifest's, which must agree with the source's. `acknowledged` lists configuration keys that the
/// user has declared harmless.
///
/// # Errors
/// Returns an error if the family is unknown, the configuration isn't understood, or a tensor is missing or has another
/// shape.
pub fn open(ledger: &mut Ledger<'_>, family: Option<&str>, acknowledged: &[String]) -> Result<Box<dyn FamilyModel>> {
    open_with_draft(ledger, family, acknowledged, None)
}

/// Opens the model of a source as [`open`] does, with its next-token layer if `draft` is set.
///
/// # Errors
/// Returns the errors of [`open`], and an error if the source has no such layer.
pub fn open_with_draft(
    ledger: &mut Ledger<'_>,
    family: Option<&str>,
    acknowledged: &[String],
    draft: Option<DraftLayer>,
) -> Result<Box<dyn FamilyModel>> {
    let source = ledger.source();
    let model = match source.description() {
        Description::Gguf(metadata) => open_gguf(source, metadata, ledger, family, acknowledged)?,
        Description::HuggingFace(files) => open_hugging_face(source, files, ledger, family, acknowledged, draft)?,
        Description::Onnx(bundle) => open_onnx(source, bundle, ledger, family, acknowledged)?,
    };
    match draft {
        Some(_) if model.draft().is_none() => {
            let (place, family) = (source.name().to_owned(), model.facts().family.clone());
            Err(FamilyError::NoDraftLayer { place, family }.into())
        }
        _ => Ok(model),
    }
}

/// Opens a configuration without tensors, for which `ledger` records those that the model takes, including those of the
/// next-token layer.
///
/// # Errors
/// Returns an error if the configuration isn't understood.
pub(super) fn open_recording(ledger: &mut Ledger<'_>) -> Result<()> {
    let source = ledger.source();
    let Description::HuggingFace(files) = source.description() else {
        return Err(FamilyError::NoConfig { place: source.name().to_owned() }.into());
    };
    open_hugging_face(source, files, ledger, None, &[], Some(DraftLayer::Mtp))?;
    Ok(())
}

fn open_hugging_face(
    source: &Source,
    files: &HuggingFaceFiles,
    ledger: &mut Ledger<'_>,
    family: Option<&str>,
    acknowledged: &[String],
    draft: Option<DraftLayer>,
) -> Result<Box<dyn FamilyModel>> {
    let place = format!("{}/config.json", source.name());
    let Some(Json::Object(config)) = &files.config else {
        return Err(FamilyError::NoConfig { place: source.name().to_owned() }.into());
    };
    let Some(model_type) = config.get("model_type").and_then(Json::as_str) else {
        return Err(FamilyError::MissingKey { place, key: "model_type".into() }.into());
    };
    if model_type == table::OPENAI_PRIVACY_FILTER.name {
        if let Some(asked) = family.filter(|asked| *asked != model_type) {
            return Err(
                FamilyError::OtherFamily { place, asked: asked.to_owned(), found: model_type.to_owned() }.into()
            );
        }
        return classifier::open(&place, config, ledger, acknowledged);
    }
    if encoder::is_encoder(model_type) {
        if let Some(asked) = family.filter(|asked| *asked != model_type) {
            return Err(
                FamilyError::OtherFamily { place, asked: asked.to_owned(), found: model_type.to_owned() }.into()
            );
        }
        return encoder::open(model_type, &place, config, ledger, acknowledged);
    }
    let row = row_of_type(&place, model_type, config, family)?;
    let labels = encoder::text_labels(&Keys::new(&place, "", config))?;
    let text = (row.name != model_type).then(|| config::text_config(&place, config, row)).transpose()?;
    let config = DecoderConfig::read(&place, text.as_ref().unwrap_or(config), row, acknowledged)?;
    if text.is_some() {
        for pattern in config::NOT_TEXT {
            ledger.ignore(pattern, "not part of the text model");
        }
    }
    for (pattern, why) in row.names.unused {
        ledger.ignore(pattern, why);
    }
    let names = &row.names;
    let embedding = format!("{}{}.weight", names.prefixes[usize::from(text.is_some())], own_name(row, "embed_tokens"));
    ledger.assume(names.published.iter().copied().chain([embedding.as_str()]));
    // buffers in older checkpoints; the tables are computed
    ledger.ignore("model.layers.*.self_attn.rotary_emb.inv_freq", "rotary frequencies are computed");
    ledger.ignore("model.rotary_emb.inv_freq", "rotary frequencies are computed");
    if config.bidirectional {
        return encoder::open_gemma(config, row, Naming::HuggingFace, ledger);
    }
    let purpose = match (labels, &files.sentence_transformers) {
        (Some(labels), _) => Purpose::SequenceClassification(SequenceClassification {
            labels,
            pooling: Pooling::Last,
            causal: true,
            prompt: None,
        }),
        (None, Some(_)) => Purpose::TextEmbedding { bidirectional: false, pooling: Pooling::Last },
        (None, None) => Purpose::TextGeneration,
    };
    let draft = draft.filter(|_| row.predicts_tokens() && purpose == Purpose::TextGeneration);
    assemble(config, row, Naming::HuggingFace, purpose, draft, ledger)
}

fn open_gguf(
    source: &Source,
    metadata: &GgufMetadata,
    ledger: &mut Ledger<'_>,
    family: Option<&str>,
    acknowledged: &[String],
) -> Result<Box<dyn FamilyModel>> {
    let place = source.name().to_owned();
    let Some(architecture) = metadata.str("general.architecture")? else {
        return Err(FamilyError::MissingKey { place, key: "general.architecture".into() }.into());
    };
    let modules = source.sentence_transformers()?;
    for name in GGUF_DENSE.iter().filter(|_| modules.is_some()) {
        // the host applies them to the pooled vector
        ledger.take_optional(&format!("{name}.weight"))?;
    }
    if encoder::is_architecture(architecture) {
        return encoder::open_gguf(&place, metadata, architecture, ledger, family, acknowledged);
    }
    let of_architecture = |row: &DecoderFamily| row.names.gguf.contains(&architecture);
    // an architecture may stand for models with and without windows: a file with a window belongs to the former
    let has_window =
        metadata.u64(&format!("{architecture}.attention.sliding_window"))?.is_some_and(|window| window > 0);
    let may_have = |row: &DecoderFamily| of_architecture(row) && row.attention.window != WindowRule::None;
    let told_apart = has_window && DECODERS.iter().any(may_have);
    let row = find(&place, architecture, family, |row| if told_apart { may_have(row) } else { of_architecture(row) })?;
    let mut factors = |name: &str| -> Result<Option<Vec<f32>>> {
        let Some(tensor) = ledger.take_optional(name)? else { return Ok(None) };
        let mut values = vec![0.0; tensor.elements() as usize];
        tensor.read(0, &mut values)?;
        Ok(Some(values))
    };
    let factors = FactorTensors {
        plain: factors("rope_freqs.weight")?,
        short: factors("rope_factors_short.weight")?,
        long: factors("rope_factors_long.weight")?,
    };
    let vocab_size = source.tensor("token_embd.weight").map_or(0, |t| t.rows());
    let tied = !ledger.has("output.weight");
    let mut config = config::gguf::configuration(metadata, architecture, &factors, vocab_size, tied)?;
    let full_layer = config::gguf::first_full_layer(&config);
    for TensorFlag { key, tensor, present } in row.names.gguf_flags {
        let tensor = match full_layer {
            Some(layer) => tensor.replace("{full}", &layer.to_string()),
            None if tensor.contains("{full}") => continue,
            None => (*tensor).to_owned(),
        };
        config.insert((*key).into(), Json::Bool(ledger.has(&tensor) == *present));
    }
    let config = DecoderConfig::read(&place, &config, row, acknowledged)?;
    for block in config::gguf::next_token_blocks(metadata, architecture, config.num_hidden_layers)? {
        ledger.ignore(&format!("blk.{block}.*"), "next-token layer, not part of the model");
    }
    if config.bidirectional {
        return encoder::open_gemma(config, row, Naming::Gguf, ledger);
    }
    let pooling = format!("{architecture}.pooling_type");
    if metadata.u64(&pooling)? == Some(GGUF_RANK) {
        let problem = format!("heads of decoders aren't known (`{pooling}` is {GGUF_RANK}, rank)");
        return Err(FamilyError::PartialHead { place, problem }.into());
    }
    let purpose = match modules {
        Some(_) => Purpose::TextEmbedding { bidirectional: false, pooling: Pooling::Last },
        None => Purpose::TextGeneration,
    };
    assemble(config, row, Naming::Gguf, purpose, None, ledger)
}

fn open_onnx(
    source: &Source,
    bundle: &onnx::OnnxBundle,
    ledger: &mut Ledger<'_>,
    family: Option<&str>,
    acknowledged: &[String],
) -> Result<Box<dyn FamilyModel>> {
    let graph = &bundle.decoder;
    let genai = |key: &str| bundle.genai.as_ref().and_then(|config| config.pointer(&format!("/model/{key}")));
    let (place, config, row) = match &bundle.files.config {
        Some(Json::Object(config)) => {
            let place = format!("{}/config.json", source.name());
            let Some(model_type) = config.get("model_type").and_then(Json::as_str) else {
                return Err(FamilyError::MissingKey { place, key: "model_type".into() }.into());
            };
            let row = row_of_type(&place, model_type, config, family)?;
            let text = (row.name != model_type).then(|| config::text_config(&place, config, row)).transpose()?;
            (place, text.unwrap_or_else(|| config.clone()), row)
        }
        _ => {
            let place = format!("{}/{}", source.name(), onnx::CONFIG);
            // an unknown type doesn't matter: the graph has the form of some family
            let named =
                genai("type").and_then(Json::as_str).filter(|name| DECODERS.iter().any(|row| row.name == *name));
            let asked = family.unwrap_or_else(|| config::onnx::family(graph));
            let name = named.unwrap_or(asked);
            let row = find(&place, name, family, |row| row.name == name)?;
            let config = config::onnx::configuration(graph, genai("context_length").and_then(Json::as_u64), row)?;
            (place, config, row)
        }
    };
    let mut config = DecoderConfig::read(&place, &config, row, acknowledged)?;
    // the graph has the weights as they were exported: fused ones apart, biases of zero omitted, and a tied head of its
    // own if it was quantized otherwise than the embedding
    (config.fused, config.fused_mlp) = (false, false);
    config.tie_word_embeddings = graph.tied;
    (config.qkv_bias, config.output_bias, config.mlp_bias) = (graph.qkv_bias, graph.output_bias, graph.mlp_bias);
    config.head_bias = graph.head_bias;
    config::onnx::check(&place, &config, graph)?;
    assemble(config, row, Naming::Onnx, Purpose::TextGeneration, None, ledger)
}

/// Row of a model type. A multimodal type may have text models of several families; its `text_config` says which.
fn row_of_type(
    place: &str,
    model_type: &str,
    config: &Map<String, Json>,
    asked: Option<&str>,
) -> Result<&'static DecoderFamily, FamilyError> {
    let wrapped = || DECODERS.iter().filter(|row| row.names.wrappers.contains(&model_type)).map(|row| row.name);
    let own = config.get("text_config").and_then(|text| text.get("model_type")).and_then(Json::as_str);
    match own.filter(|_| wrapped().next().is_some()) {
        Some(own) if wrapped().any(|name| name == own) => find(place, own, asked, |row| row.name == own),
        Some(own) => Err(FamilyError::Value {
            place: place.to_owned(),
            key: "text_config.model_type".into(),
            found: own.to_owned(),
            expected: wrapped().collect::<Vec<_>>().join(" or "),
        }),
        None => {
            find(place, model_type, asked, |row| row.name == model_type || row.names.wrappers.contains(&model_type))
        }
    }
}

fn find(
    place: &str,
    found: &str,
    asked: Option<&str>,
    matches: impl Fn(&DecoderFamily) -> bool,
) -> Result<&'static DecoderFamily, FamilyError> {
    let rows = || DECODERS.iter().filter(|row| matches(row));
    // several families may share an architecture name: the manifest decides, else the first row
    if let Some(row) = rows().find(|row| asked == Some(row.name)) {
        return Ok(row);
    }
    let unsupported = table::UNSUPPORTED.iter().find(|(name, _)| *name == found);
    if let Some((_, why)) = unsupported {
        return Err(FamilyError::Unsupported { place: place.to_owned(), found: found.to_owned(), why });
    }
    let row = rows().next().ok_or_else(|| FamilyError::UnknownFamily {
        place: place.to_owned(),
        found: found.to_owned(),
        nearest: nearest(found),
    })?;
    match asked {
        None => Ok(row),
        Some(asked) => {
            Err(FamilyError::OtherFamily { place: place.to_owned(), asked: asked.to_owned(), found: found.to_owned() })
        }
    }
}

/// Returns the families whose names are most similar.
fn nearest(found: &str) -> Vec<&'static str> {
    const COUNT: usize = 3;
    let decoders = DECODERS.iter().chain([&table::OPENAI_PRIVACY_FILTER]).map(|row| row.name);
    let mut names: Vec<&str> = decoders.chain(encoder::names()).collect();
    names.sort_by(|a, b| strsim::jaro_winkler(found, b).total_cmp(&strsim::jaro_winkler(found, a)));
    names.truncate(COUNT);
    names
}

fn assemble(
    config: DecoderConfig,
    row: &'static DecoderFamily,
    naming: Naming,
    purpose: Purpose,
    draft: Option<DraftLayer>,
    ledger: &mut Ledger<'_>,
) -> Result<Box<dyn FamilyModel>> {
    let mut tensors = Tensors::new(ledger, naming, row, &config);
    let embedding = tensors.embedding()?;
    let head = match &purpose {
        Purpose::TextEmbedding { .. } => tensors.no_head(&embedding),
        Purpose::SequenceClassification(found) => tensors.score_head(found.labels.len() as u64)?,
        _ => tensors.head(&embedding)?,
    };
    let per_layer_embedding = tensors.per_layer_embedding(&embedding)?;
    let embedding = tensors.scaled_embedding(&embedding)?;
    let positions = tensors.positions()?;
    let final_norm = tensors.final_norm()?;
    let layers = (0..config.num_hidden_layers).map(|index| tensors.layer(index)).collect::<Result<Vec<_>>>()?;
    let facts = FamilyFacts {
        family: config.family.to_owned(),
        hidden_size: config.hidden_size,
        num_layers: config.num_hidden_layers,
        vocab_size: config.vocab_size,
        purpose,
        max_position_embeddings: config.max_position_embeddings,
        hidden_scale: 1.0,
        recurrent: config.short_conv.is_some()
            || config.cca.is_some()
            || config.delta_net.is_some()
            || config.mamba2.is_some(),
        config: serde_json::to_value(&config).unwrap_or(Json::Null),
    };
    let hidden_scale = config.hidden_scale;
    let mut decoder = Decoder {
        config,
        facts,
        layers,
        embedding,
        positions,
        per_layer_embedding,
        final_norm,
        head,
        rotation: None,
        transformed: Transformed::default(),
        predictor: None,
        draft: None,
    };
    if let Some(DraftLayer::Mtp) = draft {
        decoder.draft = Some(Box::new(predictor::open(&decoder, row, ledger)?));
    }
    decoder.set_hidden_scale(hidden_scale);
    Ok(Box::new(decoder))
}
