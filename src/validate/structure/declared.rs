//! Family, configuration, transforms and number formats of `bundle.json` against the packages: a runtime and a reader
//! rely on them, and nothing else would notice that they are another model's.

use std::collections::BTreeSet;

use anec_bundle::{Bundle, layer_of};
use anec_manifest::{Granularity, Quant, Transform, Transforms, WeightFormat};
use anec_mil::{Constant, DataType, Function, Op, Program, TensorType};

/// Contradictions that the packages don't matter for.
pub(super) fn bundle_problems(bundle: &Bundle) -> Vec<String> {
    let mut problems = Vec::new();
    let mut differ = |what: &str, other: Option<&str>| {
        if let Some(other) = other.filter(|other| *other != bundle.family) {
            problems.push(format!("`family` is `{}`, {what} has `{other}`", bundle.family));
        }
    };
    differ("`config`", bundle.config["family"].as_str());
    differ("`manifest`", bundle.manifest.family.as_deref());
    let names: Vec<&str> = bundle.transforms.iter().map(|transform| transform.name()).collect();
    let rotated = bundle.transforms.iter().any(|transform| transform.rotation().is_some());
    if rotated != bundle.host.rotation.is_some() {
        let host = if bundle.host.rotation.is_some() { "have a rotation" } else { "have no rotation" };
        problems.push(format!("`transforms` are [{}], the host's tensors {host}", names.join(", ")));
    }
    let requested: Option<Vec<&str>> = match &bundle.manifest.transforms {
        Transforms::Auto => None,
        Transforms::None => Some(Vec::new()),
        Transforms::List(list) => {
            let fold = list.iter().any(|transform| transform.rotation().is_some()).then_some(Transform::Fold);
            Some(list.iter().copied().chain(fold).map(Transform::name).collect())
        }
    };
    if let Some(extra) = requested.and_then(|list| names.iter().find(|name| !list.contains(name)).copied()) {
        problems.push(format!("`transforms` have `{extra}`, which the manifest doesn't ask for"));
    }
    problems
}

/// Contradictions between the configuration or the number formats and a package's program.
pub(super) fn package_problems(bundle: &Bundle, program: &Program) -> Vec<String> {
    let mut problems = BTreeSet::new();
    for function in &program.functions {
        for op in function.ops() {
            problems.extend(width_problem(bundle, function, op));
            problems.extend(format_problem(&bundle.manifest.quant, function, op));
        }
    }
    let quantized = bundle.manifest.quant.formats().all(|format| format.weights != WeightFormat::None);
    let has = |test: &dyn Fn(&Op) -> bool| program.functions.iter().any(|function| function.ops().any(test));
    if quantized && has(&|op| is_projection(&op.name)) && !has(&|op| op.is_constexpr()) {
        problems.insert(format!("its weights are fp16, the manifest has {}", bundle.manifest.quant.weights));
    }
    problems.into_iter().collect()
}

/// Projections of attention and of the feed-forward network, by the ends of their names.
const PROJECTIONS: [&str; 5] = ["_attn_q_proj", "_attn_k_proj", "_attn_v_proj", "_mlp_gate_proj", "_mlp_up_proj"];

fn is_projection(name: &str) -> bool {
    PROJECTIONS.iter().any(|end| name.ends_with(end))
}

/// A projection whose width isn't that of the configuration.
fn width_problem(bundle: &Bundle, function: &Function, op: &Op) -> Option<String> {
    let (config, layer) = (&bundle.config, layer_of(&op.name)?);
    let end = PROJECTIONS.iter().find(|end| op.name.ends_with(**end))?;
    if op.name != format!("{}{end}", anec_bundle::layer_scope(layer)) || op.operator != "conv" {
        return None;
    }
    let of_layer = &config["layers"][layer];
    let own = |key: &str| of_layer[key].as_u64().or_else(|| config[key].as_u64());
    let heads = |key: &str| of_layer["heads"][key].as_u64().or_else(|| config[key].as_u64());
    let (keys, expected) = match *end {
        "_attn_q_proj" => (
            "num_attention_heads, head_dim",
            config["num_attention_heads"].as_u64()?.saturating_mul(heads("head_dim")?),
        ),
        "_attn_k_proj" | "_attn_v_proj" => {
            ("num_key_value_heads, head_dim", heads("num_key_value_heads")?.saturating_mul(heads("head_dim")?))
        }
        _ => ("intermediate_size", own("intermediate_size")?),
    };
    let found = function.tensor_type(*op.outputs.first()?)?.shape.get(1)?.fixed()?;
    // gated attention has gates beside its queries
    let gated = *end == "_attn_q_proj" && config["gated_attention"] == true && found == expected.saturating_mul(2);
    // half of the values of compressed convolutional attention come from the position before
    let halved = *end == "_attn_v_proj" && !config["cca"].is_null() && 2 * found == expected;
    (found != expected && !gated && !halved)
        .then(|| format!("`{}` has {found} channels, `config` has {expected} ({keys})", op.name))
}

/// Kind of granularity; the sizes of groups and blocks can be smaller than those of the manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    Tensor,
    Channel,
    Group,
    Block,
}

impl From<Granularity> for Sharing {
    fn from(granularity: Granularity) -> Self {
        match granularity {
            Granularity::PerTensor => Sharing::Tensor,
            Granularity::PerChannel => Sharing::Channel,
            Granularity::Group(_) => Sharing::Group,
            Granularity::Block(_) => Sharing::Block,
        }
    }
}

/// A compressed weight in a format that the manifest doesn't have.
fn format_problem(quant: &Quant, function: &Function, op: &Op) -> Option<String> {
    let (weights, sharing) = format_of(function, op)?;
    let row = function.tensor_type(*op.outputs.first()?).and_then(|weight| weight.shape.get(1)?.fixed());
    let fits = quant.formats().any(|format| {
        format.weights == weights
            // a group or block can be as large as the tensor, a block as large as a row
            && match (format.granularity, sharing) {
                (_, Sharing::Tensor) => true,
                (Granularity::Block(size), Sharing::Channel) => row.is_some_and(|row| row <= size),
                (granularity, _) => Sharing::from(granularity) == sharing,
            }
    });
    let words = match sharing {
        Sharing::Tensor => "per tensor",
        Sharing::Channel => "per channel",
        Sharing::Group => "per group",
        Sharing::Block => "per block",
    };
    let listed: BTreeSet<String> = quant.formats().map(|format| format.to_string()).collect();
    let listed = listed.into_iter().collect::<Vec<_>>().join(", ");
    (!fits).then(|| format!("`{}` is {weights} {words}, the manifest has {listed}", op.name))
}

/// Format of a compressed weight; `None` for ops that don't expand one.
fn format_of(function: &Function, op: &Op) -> Option<(WeightFormat, Sharing)> {
    let part = |name: &str| -> Option<&TensorType> {
        let attribute = op.attributes.get(name).map(|constant: &Constant| &constant.ty);
        attribute.or_else(|| function.binding_type(op.input(name)?))
    };
    match op.operator.as_str() {
        "constexpr_affine_dequantize" | "constexpr_blockwise_shift_scale" => {
            let data = part("quantized_data").or_else(|| part("data"))?;
            let weights = match data.dtype {
                DataType::Int8 | DataType::Uint8 => WeightFormat::Int8,
                DataType::Int4 | DataType::Uint4 => WeightFormat::Int4,
                _ => return None,
            };
            let scale = part("scale")?.fixed_shape()?;
            let count: u64 = scale.iter().product();
            let sharing = match (count, scale.iter().skip(1).any(|size| *size > 1)) {
                (1, _) => Sharing::Tensor,
                (_, true) => Sharing::Block,
                (_, false) => Sharing::Channel,
            };
            Some((weights, sharing))
        }
        "constexpr_lut_to_dense" => {
            let lut = part("lut")?.fixed_shape()?;
            let (entries, palettes) = match lut.as_slice() {
                [entries] => (*entries, 1),
                [groups @ .., entries, _] => (*entries, groups.iter().product()),
                _ => return None,
            };
            let weights = match entries {
                256 => WeightFormat::Palette8,
                64 => WeightFormat::Palette6,
                16 => WeightFormat::Palette4,
                8 => WeightFormat::Palette3,
                4 => WeightFormat::Palette2,
                2 => WeightFormat::Palette1,
                _ => return None,
            };
            Some((weights, if palettes == 1u64 { Sharing::Tensor } else { Sharing::Group }))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value as Json;

    use super::*;
    use crate::structure::structure;
    use anec_testing::fake::convert_demo;

    #[test]
    fn contradictions_of_the_packages_are_findings() {
        let room = tempfile::tempdir().unwrap();
        convert_demo(room.path(), &["quant.granularity=per_channel"]);
        let sound = Bundle::read(room.path()).unwrap();
        let problems = |change: &dyn Fn(&mut Bundle)| -> Vec<String> {
            let mut bundle = sound.clone();
            change(&mut bundle);
            let report = structure(&bundle, room.path());
            let claims =
                ["its family, configuration and transforms agree", "its weights are those that the bundle describes"];
            let checks = report.checks.into_iter().filter(|check| claims.contains(&check.claim.as_str()));
            checks.filter_map(|check| check.detail).collect()
        };
        assert_eq!(problems(&|_| {}), Vec::<String>::new());
        let number = |bundle: &mut Bundle, key: &str, value: u64| bundle.config[key] = Json::from(value);
        type Change<'a> = Box<dyn Fn(&mut Bundle) + 'a>;
        let changes: Vec<(Change<'_>, &str)> = vec![
            (Box::new(|b| b.family = "llama".into()), "`config` has `"),
            (Box::new(|b| b.manifest.family = Some("other".into())), "`manifest` has `other`"),
            (Box::new(|b| b.config["family"] = Json::from("other")), "`config` has `other`"),
            (Box::new(move |b| number(b, "intermediate_size", 7)), "_mlp_gate_proj` has "),
            (Box::new(move |b| number(b, "num_attention_heads", 7)), "_attn_q_proj` has "),
            (Box::new(move |b| number(b, "num_key_value_heads", 7)), "_attn_k_proj` has "),
            (Box::new(|b| b.transforms = vec![Transform::Rotate]), "the host's tensors have no rotation"),
            (
                Box::new(|b| (b.transforms, b.manifest.transforms) = (vec![Transform::Fold], Transforms::None)),
                "`fold`, which",
            ),
            (
                Box::new(|b| b.manifest.quant.weights = WeightFormat::Palette4),
                "is int8 per channel, the manifest has palette4",
            ),
            (Box::new(|b| b.manifest.quant.weights = WeightFormat::None), "is int8 per channel, the manifest has "),
            (Box::new(|b| b.manifest.quant.granularity = Granularity::PerTensor), "the manifest has int8 per tensor"),
            (Box::new(|b| b.manifest.quant.granularity = Granularity::Block(32)), "the manifest has int8 per block"),
        ];
        for (change, expected) in changes {
            let found = problems(&change);
            assert!(found.iter().any(|problem| problem.contains(expected)), "{expected}: {found:?}");
        }
    }
}
