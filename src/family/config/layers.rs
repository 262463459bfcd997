//! Per-layer configuration: mixer, rotation and windows.

use super::LayerConfig;
use super::keys::Keys;
use crate::error::FamilyError;
use crate::row::{DecoderFamily, MixerKind, RopeLayers, WindowRule};

/// Reads the configuration of each of `count` layers. `default_window` is the class's window.
pub(super) fn read(
    keys: &Keys<'_>,
    family: &DecoderFamily,
    count: usize,
    default_window: Option<u64>,
) -> Result<Vec<LayerConfig>, FamilyError> {
    if !family.attention.mixer.attends() {
        let rotates = family.rope.layers != RopeLayers::ByKey || keys.str("position_embedding_type")? == Some("rope");
        let layer = |mixer| LayerConfig::new(mixer, rotates && mixer == MixerKind::Attention, None);
        return Ok(mixers(keys, family.attention.mixer, count)?.into_iter().map(layer).collect());
    }
    let rotates: Vec<bool> = if family.rope.layers == RopeLayers::Listed {
        let interval = keys.u64("no_rope_layer_interval")?.unwrap_or(4);
        match keys.f64s("no_rope_layers")? {
            // despite its name, the key is 1 for layers with RoPE
            Some(list) if list.len() >= count => list.iter().take(count).map(|v| *v != 0.0).collect(),
            Some(_) => return Err(keys.value("no_rope_layers", &format!("one number for each of {count} layers"))),
            None if interval == 0 => return Err(keys.value("no_rope_layer_interval", "at least 1")),
            None => (0..count as u64).map(|layer| (layer + 1) % interval != 0).collect(),
        }
    } else {
        vec![family.rope.layers != RopeLayers::None; count]
    };
    let uses_window = match family.attention.window {
        WindowRule::None => false,
        WindowRule::Every(_) | WindowRule::Pattern(_) | WindowRule::PatternOrNone(_) | WindowRule::Types => true,
        WindowRule::EveryIfUsed | WindowRule::FromLayer | WindowRule::WithoutRope => {
            keys.bool("use_sliding_window")?.unwrap_or(false)
        }
    };
    let from_layer = keys.u64("max_window_layers")?.unwrap_or(28);
    let width = match family.attention.window {
        WindowRule::None => None,
        WindowRule::Every(default) if !keys.has("sliding_window") => default,
        WindowRule::Pattern(_) | WindowRule::PatternOrNone(_) if !keys.has("sliding_window") => default_window,
        WindowRule::EveryIfUsed if !keys.has("sliding_window") => default_window.filter(|_| uses_window),
        _ => keys.u64("sliding_window")?.filter(|_| uses_window),
    };
    if width == Some(0) {
        return Err(keys.value("sliding_window", "at least 1, or null"));
    }
    let [full, sliding] = family.attention.layer_types;
    let types = keys.strings("layer_types")?;
    if let Some(types) = &types {
        if types.len() != count {
            return Err(keys.value("layer_types", &format!("one for each of {count} layers")));
        }
        if types.iter().any(|t| !family.attention.layer_types.contains(t)) {
            return Err(keys.value("layer_types", &format!("\"{full}\" or \"{sliding}\"")));
        }
        if width.is_none() && types.contains(&sliding) {
            return Err(keys.value("sliding_window", "a width, for the sliding layers of layer_types"));
        }
    }
    if width.is_none() && matches!(family.attention.window, WindowRule::Pattern(_)) {
        return Err(keys.value("sliding_window", "a width, for the sliding layers"));
    }
    let pattern = match family.attention.window {
        // a list of layers takes precedence over a period, which may also be spelled `LLLG`
        WindowRule::PatternOrNone(_) if types.is_some() || width.is_none() => {
            keys.accept("sliding_window_pattern");
            1
        }
        WindowRule::Pattern(every) | WindowRule::PatternOrNone(every) => {
            keys.u64("sliding_window_pattern")?.or(keys.u64("_sliding_window_pattern")?).unwrap_or(every)
        }
        _ => 1,
    };
    if pattern == 0 {
        return Err(keys.value("sliding_window_pattern", "at least 1"));
    }
    let slides = |layer: usize| match (&types, family.attention.window) {
        (_, WindowRule::None) => false,
        (_, WindowRule::Every(_) | WindowRule::EveryIfUsed) => true,
        (Some(types), _) => types[layer] == sliding,
        (_, WindowRule::FromLayer) => layer as u64 >= from_layer,
        (_, WindowRule::WithoutRope) => !rotates[layer],
        (_, WindowRule::Pattern(_) | WindowRule::PatternOrNone(_)) => !(layer as u64 + 1).is_multiple_of(pattern),
        (_, WindowRule::Types) => false,
    };
    Ok((0..count)
        .map(|layer| {
            let window = width.filter(|_| slides(layer));
            let rope =
                rotates[layer] && (family.rope.layers != RopeLayers::Windowed || width.is_none() || window.is_some());
            LayerConfig::new(family.attention.mixer, rope, window)
        })
        .collect())
}

/// Mixer of each layer: attention or `other`.
fn mixers(keys: &Keys<'_>, other: MixerKind, count: usize) -> Result<Vec<MixerKind>, FamilyError> {
    let kind = |attention: bool| if attention { MixerKind::Attention } else { other };
    if let Some(mut types) = keys.strings("layer_types")? {
        if other == MixerKind::Mamba2 {
            // spelling before transformers 5
            for name in &mut types {
                *name = match *name {
                    "attention" => MixerKind::Attention.layer_type(),
                    "mamba" => other.layer_type(),
                    name => name,
                };
            }
        }
        // `layer_types` replaces the older spellings
        keys.accept("full_attn_idxs");
        keys.accept("full_attention_interval");
        let (attention, own) = (MixerKind::Attention.layer_type(), other.layer_type());
        if types.len() != count {
            return Err(keys.value("layer_types", &format!("one for each of {count} layers")));
        }
        if types.iter().any(|t| *t != attention && *t != own) {
            return Err(keys.value("layer_types", &format!("\"{attention}\" or \"{own}\"")));
        }
        return Ok(types.into_iter().map(|t| kind(t == attention)).collect());
    }
    match other {
        MixerKind::ShortConv => {
            let Some(list) = keys.f64s("full_attn_idxs")? else { return Ok(vec![MixerKind::Attention; count]) };
            Ok((0..count).map(|layer| kind(list.contains(&(layer as f64)))).collect())
        }
        MixerKind::Mamba2 => Ok(vec![other; count]),
        _ => match keys.u64("full_attention_interval")?.unwrap_or(4) {
            0 => Err(keys.value("full_attention_interval", "at least 1")),
            interval => Ok((0..count as u64).map(|layer| kind((layer + 1) % interval == 0)).collect()),
        },
    }
}
