//! Forecast of placement: the rules of [`rules`](super::rules) applied to a program. It proves nothing and is never a
//! gate.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::Serialize;

use super::chips::ChipTarget;
use super::rules::{
    Applies, ConstexprPattern, Evidence, LengthsPattern, OpPattern, Rule, Severity, StatePattern, WeightsPattern, rules,
};
use anec_mil::{
    Binding, Constant, DataType, Dim, Function, Op, OpKind, Program, SymbolRange, TensorType, Value, ValueId, ValueType,
};

/// Number of ops that a finding names; the others are counted.
const MAX_NAMED: usize = 3;

/// Place where a rule applies.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ForecastFinding {
    /// Name of the rule.
    pub rule: String,
    /// Severity of the rule.
    pub severity: Severity,
    /// Package.
    pub package: String,
    /// Function; `None` if the rule is about the package.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
    /// Finding, with the names of some ops or states.
    pub found: String,
    /// Number of ops or states.
    pub count: usize,
    /// Chips or generations that the rule is about; all if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chips: Vec<String>,
    /// Major system versions that the rule is about; all if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub systems: Vec<u32>,
    /// Remedy.
    pub remedy: String,
    /// Sources for and against the rule.
    pub evidence: Vec<Evidence>,
}

/// Applies the rules that concern the targets to a program, or all rules if there are no targets. `weight_bytes` is the
/// size of the package's weights.
pub fn forecast(
    package: &str,
    program: &Program,
    weight_bytes: u64,
    targets: &[ChipTarget<'_>],
) -> Vec<ForecastFinding> {
    let mut findings = Vec::new();
    for rule in rules().into_iter().filter(|rule| rule.concerns(targets)) {
        if let Applies::Weights(pattern) = &rule.applies {
            if weights(pattern, weight_bytes) {
                let found = vec![format!("{:.1} MB of weights", weight_bytes as f64 / 1e6)];
                findings.push(finding(&rule, package, None, &found));
            }
            continue;
        }
        for function in &program.functions {
            let found = applies(&rule, function);
            if !found.is_empty() {
                findings.push(finding(&rule, package, Some(&function.name), &found));
            }
        }
    }
    findings.sort_by_key(|finding| finding.severity);
    findings
}

fn finding(rule: &Rule, package: &str, function: Option<&str>, found: &[String]) -> ForecastFinding {
    let more = found.len().saturating_sub(MAX_NAMED);
    let tail = if more > 0 { format!(" and {more} more") } else { String::new() };
    let named = found.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join(", ") + &tail;
    ForecastFinding::new(rule, package, function, named, found.len())
}

impl ForecastFinding {
    /// Finding of a rule in so many places.
    pub(crate) fn new(rule: &Rule, package: &str, function: Option<&str>, found: String, count: usize) -> Self {
        ForecastFinding {
            rule: rule.id.clone(),
            severity: rule.severity,
            package: package.to_owned(),
            function: function.map(str::to_owned),
            found,
            count,
            chips: rule.chips.clone(),
            systems: rule.systems.clone(),
            remedy: rule.remedy.clone(),
            evidence: rule.evidence.clone(),
        }
    }
}

/// Findings of a rule in a function.
fn applies(rule: &Rule, function: &Function) -> Vec<String> {
    let named = |op: &Op| format!("{} ({})", op.name, op.operator);
    match &rule.applies {
        Applies::Op(pattern) => {
            function.ops().filter(|op| is_work(op) && matches_op(pattern, function, op)).map(named).collect()
        }
        Applies::Constexpr(pattern) => function
            .ops()
            .filter(|op| op.is_constexpr() && matches_constexpr(pattern, function, op))
            .map(named)
            .collect(),
        Applies::State(pattern) => states(pattern, function),
        Applies::Program(pattern) => {
            let count = function.ops().filter(|op| !op.is_const()).count();
            let above = pattern.ops_above.is_some_and(|most| count > most);
            above.then(|| format!("{count} ops")).into_iter().collect()
        }
        Applies::Lengths(LengthsPattern::RangeBesideFixed) => beside_ranges(function),
        Applies::Lengths(pattern) => {
            let lengths = function.lengths.iter().filter(|(_, lengths)| {
                matches!(
                    (pattern, lengths),
                    (LengthsPattern::Range, SymbolRange::Range { .. })
                        | (LengthsPattern::Enumerated, SymbolRange::Enumerated(_))
                )
            });
            lengths.map(|(symbol, lengths)| format!("{}, default {}", symbol.name(), lengths.default_size())).collect()
        }
        Applies::Constant(pattern) => {
            let infinite = |constant: &Constant| {
                constant.as_floats().is_some_and(|values| values.iter().any(|value| value.is_infinite()))
            };
            let mut found = Vec::new();
            for op in function.ops().filter(|_| pattern.infinite) {
                if op.attributes.get("val").is_some_and(infinite) {
                    found.push(op.name.clone());
                }
            }
            found
        }
        Applies::Weights(_) | Applies::Asset(_) => Vec::new(),
    }
}

/// Inputs of fixed shape in a function that has states and inputs with a range.
fn beside_ranges(function: &Function) -> Vec<String> {
    let ranged = function.lengths.values().any(|lengths| matches!(lengths, SymbolRange::Range { .. }));
    if !ranged || function.states().next().is_none() {
        return Vec::new();
    }
    let inputs = function.inputs.iter().map(|id| function.value(*id));
    let is_fixed = |value: &&Value| match &value.ty {
        ValueType::Tensor(ty) => ty.shape.iter().all(|dim| dim.fixed().is_some()),
        _ => false,
    };
    inputs.filter(is_fixed).map(|value| value.name.clone()).collect()
}

/// Reading and writing states isn't a compute op.
fn is_work(op: &Op) -> bool {
    matches!(op.kind(), OpKind::Compute | OpKind::Cast)
}

fn weights(pattern: &WeightsPattern, bytes: u64) -> bool {
    pattern.bytes_above.is_none_or(|limit| bytes > limit) && pattern.bytes_below.is_none_or(|limit| bytes < limit)
}

fn results<'a>(function: &'a Function, op: &'a Op) -> impl Iterator<Item = &'a TensorType> {
    op.outputs.iter().filter_map(|id| function.tensor_type(*id))
}

/// Results and operands of an op, without constants.
fn tensors<'a>(function: &'a Function, op: &'a Op) -> impl Iterator<Item = &'a TensorType> {
    results(function, op).chain(op.operands().filter_map(|id| function.tensor_type(id)))
}

fn matches_op(pattern: &OpPattern, function: &Function, op: &Op) -> bool {
    let weight = || op.input("weight").and_then(|binding| function.binding_type(binding));
    let size = |dim: &Dim| dim.fixed().unwrap_or(0);
    let channels = |axis: usize| weight().and_then(|ty| ty.shape.get(axis)?.fixed()).unwrap_or(0);
    let groups = || {
        let groups = op.input("groups").and_then(|binding| function.constant(binding)).and_then(Constant::as_integer);
        groups.and_then(|groups| u64::try_from(groups).ok()).unwrap_or(1)
    };
    let one_of = |names: &[String], name: &str| names.is_empty() || names.iter().any(|other| other == name);
    one_of(&pattern.operators, &op.operator)
        && (pattern.dtypes.is_empty() || results(function, op).any(|ty| one_of(&pattern.dtypes, ty.dtype.name())))
        && pattern.rank_above.is_none_or(|rank| tensors(function, op).any(|ty| ty.rank() > rank))
        && pattern
            .dim_above
            .is_none_or(|limit| tensors(function, op).any(|ty| ty.shape.iter().any(|d| size(d) > limit)))
        && pattern.width_above.is_none_or(|limit| {
            tensors(function, op).any(|ty| ty.rank() > 2 && ty.shape.iter().rev().take(2).any(|d| size(d) > limit))
        })
        && pattern.plane_from.is_none_or(|limit| {
            let plane = |ty: &TensorType| {
                let [rows, columns] = ty.shape.last_chunk::<2>()?;
                size_range(function, rows)?[1].checked_mul(size_range(function, columns)?[1])
            };
            results(function, op).filter_map(plane).any(|plane| plane >= limit)
        })
        && pattern.rows_between.is_none_or(|[first, last]| {
            let rows = |ty: &TensorType| size_range(function, &ty.shape.last_chunk::<2>()?[0]);
            results(function, op).filter_map(rows).any(|[least, most]| least <= last && most >= first)
        })
        && pattern.last_axis_below.is_none_or(|limit| {
            results(function, op).any(|ty| ty.shape.last().and_then(Dim::fixed).is_some_and(|size| size < limit))
        })
        && pattern.input_channels_above.is_none_or(|limit| channels(1) * groups() > limit)
        && (!pattern.depthwise || (groups() > 1 && channels(1) == 1))
        && (!pattern.payload_notch || is_const_half(function, op) && in_notch(weight()))
}

/// Smallest and largest size of a dimension; `None` if it isn't known.
fn size_range(function: &Function, dim: &Dim) -> Option<[u64; 2]> {
    let Dim::Symbolic { factor, symbol, offset } = dim else { return dim.fixed().map(|size| [size, size]) };
    let sizes = match function.lengths.get(symbol)? {
        SymbolRange::Range { lower, upper, default } => [*lower, upper.unwrap_or(*default)],
        SymbolRange::Enumerated(sizes) => [*sizes.iter().min()?, *sizes.iter().max()?],
    };
    Some(sizes.map(|size| factor.saturating_mul(size).saturating_add_signed(*offset)))
}

/// Whether a convolution's weight is stored in fp16.
fn is_const_half(function: &Function, op: &Op) -> bool {
    let weight = op.input("weight").and_then(|binding| function.constant(binding));
    weight.is_some_and(|constant| constant.ty.dtype == DataType::Fp16)
}

/// Whether `ceil(N / 16) * D * k * 2` bytes is within 16 KiB of a multiple of 1 MiB.
fn in_notch(weight: Option<&TensorType>) -> bool {
    let Some(shape) = weight.and_then(TensorType::fixed_shape) else { return false };
    let Some((rows, rest)) = shape.split_first() else { return false };
    let payload = rows.div_ceil(16) * rest.iter().product::<u64>() * 2;
    let (mebibyte, near) = (1u64 << 20, 16u64 << 10);
    let over = payload % mebibyte;
    payload + near >= mebibyte && (over <= near || mebibyte - over <= near)
}

fn matches_constexpr(pattern: &ConstexprPattern, function: &Function, op: &Op) -> bool {
    let part = |name: &str| {
        op.attributes.get(name).map(|constant| &constant.ty).or_else(|| function.binding_type(op.input(name)?))
    };
    let one_of = |names: &[String], name: &str| names.is_empty() || names.iter().any(|other| other == name);
    let data = ["data", "quantized_data", "indices"].into_iter().find_map(part);
    one_of(&pattern.operators, &op.operator)
        && (pattern.dtypes.is_empty() || data.is_some_and(|ty| one_of(&pattern.dtypes, ty.dtype.name())))
        && (!pattern.blockwise
            || part("scale").is_some_and(|ty| ty.shape.iter().skip(1).any(|dim| dim.fixed().is_some_and(|n| n > 1))))
        && (!pattern.grouped
            || part("lut").is_some_and(|ty| {
                // the last two axes are entries and vectors
                ty.shape.iter().rev().skip(2).any(|dim| dim.fixed().is_some_and(|n| n > 1))
            }))
}

fn states(pattern: &StatePattern, function: &Function) -> Vec<String> {
    let states: Vec<(&str, Vec<u64>)> =
        function.states().filter_map(|value| Some((value.name.as_str(), value.ty.tensor()?.fixed_shape()?))).collect();
    let all = || states.iter().map(|(name, shape)| format!("{name} {shape:?}")).collect();
    if let Some(multiple) = pattern.last_axis_multiple_of {
        let odd = |shape: &[u64]| shape.last().is_some_and(|size| size % multiple != 0);
        return states.iter().filter(|(_, s)| odd(s)).map(|(name, shape)| format!("{name} {shape:?}")).collect();
    }
    if pattern.used_beyond_update {
        return function
            .states()
            .filter(|state| used_beyond_update(function, &state.name))
            .map(|s| s.name.clone())
            .collect();
    }
    if pattern.times_itself {
        return products_with_themselves(function);
    }
    if pattern.different_shapes && states.windows(2).any(|pair| pair[0].1 != pair[1].1) {
        return all();
    }
    if pattern.count_above.is_some_and(|count| states.len() > count) {
        return all();
    }
    Vec::new()
}

/// State that an op reads or writes.
fn state_of<'a>(function: &'a Function, op: &Op) -> Option<&'a str> {
    match op.input("input")? {
        Binding::Value(id) => Some(function.value(*id).name.as_str()),
        Binding::Constant(_) => None,
    }
}

/// Whether the old content of a state is used by several ops, or the state is written more than once.
fn used_beyond_update(function: &Function, state: &str) -> bool {
    let mine = |op: &&Op| state_of(function, op) == Some(state);
    let writes = function.ops().filter(|op| op.operator == "write_state").filter(mine).count();
    let before = function.ops().take_while(|op| !(op.operator == "write_state" && mine(op)));
    let read: BTreeSet<ValueId> = before
        .filter(|op| op.operator == "read_state")
        .filter(mine)
        .flat_map(|op| op.outputs.iter().copied())
        .collect();
    let users = function.ops().filter(|op| op.operands().any(|id| read.contains(&id))).count();
    writes > 1 || writes == 1 && users > 1
}

/// Matrix products of a value derived from a state with itself.
fn products_with_themselves(function: &Function) -> Vec<String> {
    let mut follows: BTreeSet<ValueId> = BTreeSet::new();
    let mut found = Vec::new();
    for op in function.ops() {
        if op.operator == "read_state" || op.operands().any(|id| follows.contains(&id)) {
            follows.extend(&op.outputs);
        }
        let factor = |name: &str| match op.input(name) {
            Some(Binding::Value(id)) => Some(*id),
            _ => None,
        };
        if op.operator == "matmul"
            && let Some(x) = factor("x")
            && factor("y") == Some(x)
            && follows.contains(&x)
        {
            found.push(op.name.clone());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_mil::{FunctionBuilder, Opset};

    fn rules_of(
        shape: &[u64],
        bytes: u64,
        build: impl FnOnce(&mut FunctionBuilder, ValueId) -> ValueId,
    ) -> Vec<String> {
        let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
        let x = ops.input("x", TensorType::new(DataType::Fp16, shape.iter().copied()));
        let y = build(&mut ops, x);
        ops.output("y", y);
        let program = Program::single(ops.finish().unwrap());
        forecast("p", &program, bytes, &[]).into_iter().map(|finding| finding.rule).collect()
    }

    const MIDDLE: u64 = 100_000_000;

    #[test]
    fn a_plain_graph_raises_nothing() {
        assert!(rules_of(&[1, 8, 1, 32], MIDDLE, |ops, x| ops.silu(x)).is_empty());
    }

    #[test]
    fn ranks_types_and_sizes_are_seen() {
        assert_eq!(rules_of(&[1, 2, 1, 2, 1, 2], MIDDLE, |ops, x| ops.silu(x)), ["rank-above-5"]);
        assert_eq!(rules_of(&[1, 2, 1, 2, 2], MIDDLE, |ops, x| ops.softmax(x, -1)), ["rank-5-matmul"]);
        assert_eq!(rules_of(&[1, 20_000, 1, 2], MIDDLE, |ops, x| ops.silu(x)), ["dimension-above-16384"]);
        assert_eq!(
            rules_of(&[1, 8, 1, 32], 2_300_000_000, |ops, x| ops.silu(x)),
            ["weights-above-2-gb", "weights-above-1-gib", "weights-above-1400-mb", "weights-above-250-mb"]
        );
        assert_eq!(rules_of(&[1, 8, 1, 32], 1000, |ops, x| ops.silu(x)), ["tiny-graph"]);
    }

    #[test]
    fn score_matrices_are_measured_by_head() {
        let scores = |heads: u64, rows: u64, columns: u64| {
            rules_of(&[1, heads, rows, columns], MIDDLE, |ops, x| ops.softmax(x, -1))
        };
        assert_eq!(scores(2, 1024, 1024), ["score-matrix"]);
        assert!(scores(16, 1023, 1024).is_empty());
        assert_eq!(scores(1, 505, 505), ["rows-501-to-512"]);
        assert!(scores(1, 500, 505).is_empty() && scores(1, 513, 513).is_empty());
        // flexible dimensions count at their largest size
        let flexible = |upper: u64| {
            let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
            let t = ops.symbol("T", SymbolRange::Range { lower: 1, upper: Some(upper), default: 1 });
            let shape = [Dim::Fixed(1), Dim::Fixed(2), Dim::symbol(&t), Dim::Fixed(4096)];
            let x = ops.input("x", TensorType { dtype: DataType::Fp16, shape: shape.to_vec() });
            let y = ops.softmax(x, -1);
            ops.output("y", y);
            let program = Program::single(ops.finish().unwrap());
            let found: Vec<String> = forecast("p", &program, MIDDLE, &[]).into_iter().map(|of| of.rule).collect();
            found.contains(&"score-matrix".to_owned())
        };
        assert!(flexible(256) && !flexible(255));
    }

    #[test]
    fn compressed_weights_are_told_apart() {
        let conv = |dtype: DataType, scale: [u64; 4]| {
            move |ops: &mut FunctionBuilder, x| {
                let ty = TensorType::new(dtype, [8u64, 8, 1, 1]);
                let data = Constant::literal(ty.clone(), vec![1; ty.bytes().unwrap() as usize]);
                let scale = Constant::fp16_tensor(&scale, &vec![1.0; scale.iter().product::<u64>() as usize]);
                let weight = ops.op("constexpr_blockwise_shift_scale", "w", [("data", data), ("scale", scale)]);
                ops.conv("c", x, weight, None)
            }
        };
        let found = |dtype, scale| rules_of(&[1, 8, 1, 32], MIDDLE, conv(dtype, scale));
        assert_eq!(found(DataType::Int8, [8, 1, 1, 1]), ["unfolded-int8"]);
        assert_eq!(found(DataType::Int8, [8, 2, 1, 1]), ["blockwise-scales", "unfolded-int8"]);
        assert_eq!(found(DataType::Int4, [8, 1, 1, 1]), ["four-bit-integers"]);
        let palettes = |groups: u64| {
            rules_of(&[1, 8, 1, 32], MIDDLE, move |ops, x| {
                let indices = Constant::literal(TensorType::new(DataType::Uint1, [8u64, 8, 1, 1]), vec![5; 8]);
                let lut = Constant::fp16_tensor(&[groups, 1, 1, 1, 2, 1], &vec![0.5; 2 * groups as usize]);
                let weight = ops.op("constexpr_lut_to_dense", "w", [("indices", indices), ("lut", lut)]);
                ops.conv("c", x, weight, None)
            })
        };
        assert!(palettes(1).is_empty());
        assert_eq!(palettes(4), ["one-palette", "grouped-palettes"]);
    }

    #[test]
    fn rules_that_name_chips_apply_to_those() {
        let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
        let x = ops.input("x", TensorType::new(DataType::Fp16, [1u64, 8, 1, 20_000]));
        let y = ops.silu(x);
        ops.output("y", y);
        let program = Program::single(ops.finish().unwrap());
        let table = crate::ChipTable::built_in();
        let found = |targets: &[&str]| -> Vec<(String, Vec<String>)> {
            let targets: Vec<ChipTarget<'_>> = targets.iter().map(|name| table.target(name).unwrap()).collect();
            let findings = forecast("p", &program, MIDDLE, &targets);
            findings.into_iter().map(|finding| (finding.rule, finding.chips)).collect()
        };
        let wide = |findings: &[(String, Vec<String>)]| findings.iter().any(|(rule, _)| rule == "width-above-16384");
        assert!(wide(&found(&["m3"])) && wide(&found(&["m4", "m2-pro"])) && wide(&found(&[])));
        assert!(!wide(&found(&["m4"])) && !wide(&found(&["m5", "a17-pro"])));
        let named = found(&["m3"]).into_iter().find(|(rule, _)| rule == "width-above-16384").unwrap();
        assert_eq!(named.1, ["A14", "A15", "M1", "M2", "M3"]);
    }

    #[test]
    fn states_are_seen() {
        let with = |shapes: &'static [[u64; 4]]| {
            rules_of(&[1, 8, 1, 32], MIDDLE, move |ops, x| {
                for (i, shape) in shapes.iter().enumerate() {
                    ops.state(&format!("s{i}"), TensorType::new(DataType::Fp16, shape.iter().copied()));
                }
                ops.silu(x)
            })
        };
        assert_eq!(with(&[[1, 2, 16, 64]]), ["stateful-m5"]);
        assert_eq!(with(&[[1, 2, 16, 40]]), ["state-last-axis", "stateful-m5"]);
        assert_eq!(with(&[[1, 2, 16, 64], [1, 2, 8, 64]]), ["state-shapes", "stateful-m5"]);
        assert_eq!(with(&[[1, 2, 16, 64]; 3]), ["state-count", "stateful-m5"]);
    }

    #[test]
    fn inputs_of_fixed_shape_beside_ranges_are_seen_where_there_are_states() {
        let found = |range: bool, fixed: bool, state: bool| {
            let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
            let many = if range {
                let lengths = SymbolRange::Range { lower: 1, upper: Some(4), default: 1 };
                Dim::symbol(&ops.symbol("T", lengths))
            } else {
                Dim::Fixed(1)
            };
            let x =
                ops.input("x", TensorType::new(DataType::Fp16, [Dim::Fixed(1), Dim::Fixed(8), Dim::Fixed(1), many]));
            let mut y = ops.silu(x);
            if fixed {
                let gain = ops.input("gain", TensorType::new(DataType::Fp16, [1u64, 8, 1, 1]));
                y = ops.mul(y, gain);
            }
            if state {
                ops.state("s", TensorType::new(DataType::Fp16, [1u64, 8, 32, 32]));
            }
            ops.output("y", y);
            let program = Program::single(ops.finish().unwrap());
            let findings = forecast("p", &program, MIDDLE, &[]);
            findings.into_iter().find(|finding| finding.rule == "range-beside-fixed").map(|finding| finding.found)
        };
        assert_eq!(found(true, true, true).as_deref(), Some("gain"));
        for (range, fixed, state) in [(false, true, true), (true, false, true), (true, true, false)] {
            assert_eq!(found(range, fixed, state), None);
        }
    }

    #[test]
    fn patterns_of_states_that_were_refused_are_seen() {
        let with = |body: fn(&mut FunctionBuilder, ValueId) -> ValueId| {
            rules_of(&[1, 8, 4, 32], MIDDLE, move |ops, x| {
                let state = ops.state("s", TensorType::new(DataType::Fp16, [1u64, 8, 32, 32]));
                let held = ops.read_state(state);
                body(ops, held);
                let kept = ops.mul(held, Constant::fp16(0.5));
                ops.write_state(state, kept);
                ops.silu(x)
            })
        };
        let rules = with(|_, held| held);
        assert!(!rules.iter().any(|rule| rule.starts_with("state-")), "{rules:?}");
        let rules = with(|ops, held| ops.matmul(held, held, false, true));
        assert!(
            ["state-times-itself", "state-used-twice"].iter().all(|rule| rules.iter().any(|r| r == rule)),
            "{rules:?}"
        );
    }

    #[test]
    fn the_notch_is_that_of_known_models() {
        let ty = |rows: u64, columns: u64| TensorType::new(DataType::Fp16, [rows, columns, 1, 1]);
        // Llama 3.2 1B: gate [8192, 2048] takes 2 MiB for each of 16 cores; Qwen2.5 0.5B: [4864, 896] 0.52 MiB
        assert!(in_notch(Some(&ty(8192, 2048))));
        assert!(!in_notch(Some(&ty(4864, 896))));
        // zero isn't a multiple
        assert!(!in_notch(Some(&ty(16, 16))));
    }
}
