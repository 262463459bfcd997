//! Static checks of a program's numerics: constants outside fp16's range, epsilons that vanish in fp16, zero scales and
//! weights, ops outside fp16, unbounded squares.

use std::collections::HashMap;
use std::sync::Arc;

use half::f16;

use super::verdict::{Check, listed};
use anec_base::Result;
use anec_kernels::scan::FloatScan;
use anec_mil::{Binding, Constant, Data, DataType, Function, Op, OpKind, Program, Uses, ValueId};

/// Largest number whose square fp16 can represent.
const MAX_SQUARABLE: f64 = 255.9;
/// Elements read at a time.
const CHUNK: u64 = 1 << 20;

/// Checks every function of a program; `place` names the package.
///
/// # Errors
/// If a constant can't be read.
pub fn lint(place: &str, program: &Program) -> Result<Vec<Check>> {
    // functions of a package share their weights: each is read once
    let mut scans = Scans::default();
    let mut checks = Vec::new();
    for function in &program.functions {
        let subject = format!("{place}, {}", function.name);
        let half = computes_in_half(function);
        let mut lint = Lint { function, uses: Uses::of(function), half, scans: &mut scans };
        checks.push(lint.constants()?.check(&subject, "half precision holds every constant"));
        checks.push(lint.epsilons().check(&subject, "every epsilon counts in half precision"));
        checks.push(lint.scales()?.check(&subject, "no scale and no weight is zero"));
        checks.push(lint.islands().check(&subject, "everything is computed in half precision"));
        checks.push(lint.squares().check(&subject, "no constant is squared beyond half precision"));
    }
    Ok(checks)
}

/// Findings of a rule: contradictions and remarks.
#[derive(Default)]
struct Findings {
    wrong: Vec<String>,
    notes: Vec<String>,
}

impl Findings {
    fn check(self, subject: &str, claim: &str) -> Check {
        let wrong = listed(&self.wrong);
        let notes = if wrong.is_some() { None } else { listed(&self.notes) };
        let check = Check::of(subject, claim, wrong);
        Check { detail: check.detail.clone().or(notes), ..check }
    }
}

/// Scanned constants, by location of their bytes.
#[derive(Default)]
struct Scans {
    known: HashMap<usize, FloatScan>,
}

impl Scans {
    /// Statistics of a constant; `None` for types other than floating-point.
    fn of(&mut self, constant: &Constant) -> Result<Option<FloatScan>> {
        if !constant.ty.dtype.is_float() {
            return Ok(None);
        }
        let address = match &constant.data {
            Data::Content(content) => Some(Arc::as_ptr(content).cast::<()>().addr()),
            _ => None,
        };
        if let Some(scan) = address.and_then(|address| self.known.get(&address)) {
            return Ok(Some(*scan));
        }
        let mut scan = FloatScan::default();
        for_each_piece(constant, &mut |bytes| {
            match constant.ty.dtype {
                DataType::Fp16 => scan.add_f16(bytes),
                DataType::Bf16 => scan.add_bf16(bytes),
                DataType::Fp32 => scan.add_f32(bytes),
                DataType::Fp64 => scan.add_f64(bytes),
                _ => {}
            }
            true
        })?;
        if let Some(address) = address {
            self.known.insert(address, scan);
        }
        Ok(Some(scan))
    }
}

/// Passes the bytes of a constant to `visit` in chunks until it returns false.
fn for_each_piece(constant: &Constant, visit: &mut dyn FnMut(&[u8]) -> bool) -> Result<()> {
    let Data::Content(content) = &constant.data else {
        visit(&constant.bytes()?);
        return Ok(());
    };
    content.prepare()?;
    let granule = content.granule().max(1);
    let piece = granule * (CHUNK / granule).max(1);
    let mut bytes = Vec::new();
    let mut at = 0;
    while at < content.length() {
        bytes.resize(piece.min(content.length() - at) as usize, 0);
        content.read(at, &mut bytes)?;
        if !visit(&bytes) {
            break;
        }
        at += bytes.len() as u64;
    }
    Ok(())
}

/// Whether all bytes of a constant are zero, which is the value zero in every number format.
fn all_zero(constant: &Constant) -> Result<bool> {
    let mut zero = true;
    for_each_piece(constant, &mut |bytes| {
        zero = bytes.iter().all(|byte| *byte == 0);
        zero
    })?;
    Ok(zero)
}

/// Whether an op computes in the element type of its result; casts don't.
fn has_arithmetic(op: &Op) -> bool {
    matches!(op.kind(), OpKind::Compute | OpKind::State)
}

fn computes_in(function: &Function, op: &Op, dtypes: &[DataType]) -> bool {
    op.outputs.iter().any(|id| function.tensor_type(*id).is_some_and(|ty| dtypes.contains(&ty.dtype)))
}

fn computes_in_half(function: &Function) -> bool {
    function.ops().any(|op| has_arithmetic(op) && computes_in(function, op, &[DataType::Fp16]))
}

/// Rules applied to one function.
struct Lint<'a> {
    function: &'a Function,
    uses: Uses<'a>,
    /// Whether anything in the function is computed in fp16.
    half: bool,
    scans: &'a mut Scans,
}

impl<'a> Lint<'a> {
    /// All constants of an op, with names.
    fn constants_of(&self, op: &'a Op) -> impl Iterator<Item = (String, &'a Constant)> + use<'a> {
        op.constants().map(|(name, constant)| match name {
            "val" => (format!("`{}`", op.name), constant),
            name => (format!("`{name}` of `{}`", op.name), constant),
        })
    }

    fn constants(&mut self) -> Result<Findings> {
        let mut findings = Findings::default();
        for op in self.function.ops() {
            for (name, constant) in self.constants_of(op) {
                let Some(scan) = self.scans.of(constant)? else { continue };
                let of = |count: u64, what: &str| match scan.count {
                    1 => format!("{name} {what}"),
                    all => format!("{name}: {count} of {all} elements {what}"),
                };
                if scan.not_finite > 0 {
                    findings.wrong.push(of(scan.not_finite, "are infinite or not a number"));
                }
                if scan.saturated > 0 && self.half {
                    findings.wrong.push(of(scan.saturated, "are at or beyond 65504, fp16's largest number"));
                }
                // epsilons have their own rule
                if scan.vanishing > 0 && self.half && !self.feeds_epsilon(op) {
                    findings.notes.push(of(scan.vanishing, "are zero in fp16"));
                }
            }
        }
        Ok(findings)
    }

    fn feeds_epsilon(&self, constant: &Op) -> bool {
        let mut users = constant.outputs.iter().flat_map(|id| self.uses.users(*id).map(move |op| (op, id)));
        users.any(|(op, id)| op.input("epsilon") == Some(&Binding::Value(*id)))
    }

    /// Epsilons of norms and roots, and those that are added explicitly.
    fn epsilons(&self) -> Findings {
        let mut findings = Findings::default();
        for op in self.uses.ops() {
            let data = op.input("x").and_then(|x| self.function.binding_type(x));
            if data.is_none_or(|ty| ty.dtype != DataType::Fp16) {
                continue;
            }
            let name = format!("`{}` ({})", op.name, op.operator);
            if let Some(epsilon) = self.parameter(op, "epsilon") {
                let half = f16::from_f32(epsilon);
                // `log` and `inverse` need only a tiny epsilon; a sum may already contain one
                let needed = !matches!(op.operator.as_str(), "log" | "inverse") && !self.is_sum(op.input("x"));
                if needed && half == f16::ZERO {
                    findings.wrong.push(format!("{name}: epsilon {epsilon:e} is zero in fp16"));
                } else if needed && half < f16::MIN_POSITIVE {
                    findings.notes.push(format!(
                        "{name}: epsilon {epsilon:e} is subnormal in fp16; hardware may take zero for it"
                    ));
                }
            }
            if op.operator == "add"
                && [self.parameter(op, "x"), self.parameter(op, "y")].contains(&Some(0.0))
                && op.outputs.iter().any(|id| self.uses.users(*id).any(is_root))
            {
                findings.wrong.push(format!("{name}: it adds zero before a root; an epsilon was lost"));
            }
        }
        findings
    }

    /// Whether a value is a sum, which may already contain an epsilon.
    fn is_sum(&self, binding: Option<&Binding>) -> bool {
        let Some(Binding::Value(id)) = binding else { return false };
        self.uses.producer(*id).is_some_and(|op| op.operator == "add")
    }

    fn parameter(&self, op: &Op, name: &str) -> Option<f32> {
        op.input(name).and_then(|binding| self.function.constant(binding)).and_then(Constant::as_float)
    }

    /// Scales of compressed weights, and weights that are all zero.
    fn scales(&mut self) -> Result<Findings> {
        let mut findings = Findings::default();
        let function = self.function;
        for op in function.ops() {
            if op.is_constexpr() {
                self.scale_of(op, &mut findings)?;
                continue;
            }
            let weights: &[&str] = match op.operator.as_str() {
                "conv" | "conv_transpose" | "linear" => &["weight"],
                "matmul" | "mul" => &["x", "y"],
                _ => continue,
            };
            for binding in weights.iter().filter_map(|name| op.input(name)) {
                let Some(constant) = function.constant(binding) else { continue };
                if self.scans.of(constant)?.is_some_and(|scan| scan.zero == scan.count) {
                    findings.wrong.push(format!("`{}` ({}): its weight is all zeros", op.name, op.operator));
                }
            }
        }
        Ok(findings)
    }

    fn scale_of(&mut self, op: &Op, findings: &mut Findings) -> Result<()> {
        let function = self.function;
        let part = |name: &str| {
            op.attributes.get(name).or_else(|| op.input(name).and_then(|binding| function.constant(binding)))
        };
        let data = part("data").or_else(|| part("quantized_data")).or_else(|| part("indices"));
        if let Some(scan) = part("scale").map(|scale| self.scans.of(scale)).transpose()?.flatten() {
            let name = &op.name;
            if scan.zero > 0 && (scan.count > 1 || !data.map_or(Ok(false), all_zero)?) {
                findings.wrong.push(format!("`{name}`: {} of {} scales are zero", scan.zero, scan.count));
            }
            if scan.vanishing + scan.subnormal > 0 {
                let count = scan.vanishing + scan.subnormal;
                findings.notes.push(format!("`{name}`: {count} of {} scales are subnormal in fp16", scan.count));
            }
        }
        let table = part("lut").map(|lut| self.scans.of(lut)).transpose()?.flatten();
        // index zero is a valid palette entry
        let zero_data = part("lut").is_none() && part("offset").is_none() && part("zero_point").is_none();
        if table.is_some_and(|scan| scan.zero == scan.count) || (zero_data && data.map_or(Ok(false), all_zero)?) {
            findings.wrong.push(format!("`{}`: its weight is all zeros", op.name));
        }
        Ok(())
    }

    fn islands(&self) -> Findings {
        let mut findings = Findings::default();
        let wide = [DataType::Fp32, DataType::Fp64];
        let ops = self.uses.ops().iter().filter(|op| has_arithmetic(op));
        let islands = ops.filter(|op| computes_in(self.function, op, &wide));
        if self.half {
            findings.wrong = islands.map(|op| format!("`{}` ({}) is computed in fp32", op.name, op.operator)).collect();
        } else if islands.count() > 0 {
            let note = "all of it is computed in fp32, which the Neural Engine doesn't do";
            findings.notes.push(note.to_owned());
        }
        findings
    }

    /// Squares: an error if a constant shows that they overflow, a remark if nothing bounds them.
    fn squares(&self) -> Findings {
        let mut findings = Findings::default();
        for op in self.function.ops() {
            let (Some(Binding::Value(x)), true) = (op.input("x"), self.half) else { continue };
            let squares = match op.operator.as_str() {
                "mul" => op.input("y") == Some(&Binding::Value(*x)),
                "square" | "reduce_sum_square" | "reduce_l2_norm" | "l2_norm" => true,
                "pow" => self.parameter(op, "y") == Some(2.0),
                _ => false,
            };
            if !squares || !computes_in(self.function, op, &[DataType::Fp16]) {
                continue;
            }
            let name = format!("`{}` ({})", op.name, op.operator);
            match self.bound(*x, 0) {
                Some(bound) if bound > MAX_SQUARABLE => findings.wrong.push(format!("{name} squares {bound}")),
                Some(_) => {}
                None => {
                    findings.notes.push(format!("{name} overflows where |x| > 256, and nothing in the graph bounds x"))
                }
            }
        }
        findings
    }

    /// Upper bound of a value's magnitude, as far as the graph shows one.
    fn bound(&self, id: ValueId, depth: usize) -> Option<f64> {
        if let Some(constant) = &self.function.value(id).constant {
            let values = constant.as_floats()?;
            return values.iter().map(|v| f64::from(v.abs())).reduce(f64::max);
        }
        let op = self.uses.producer(id)?;
        // long chains are rare; give up
        if depth > 8 {
            return None;
        }
        let of = |name: &str| match op.input(name)? {
            Binding::Value(id) => self.bound(*id, depth + 1),
            Binding::Constant(constant) => constant.as_float().map(|v| f64::from(v.abs())),
        };
        match op.operator.as_str() {
            "softmax" | "sigmoid" | "tanh" | "sin" | "cos" => Some(1.0),
            "mul" => Some(of("x")? * of("y")?),
            "reshape" | "transpose" | "slice_by_index" | "slice_by_size" | "squeeze" | "expand_dims" | "abs" => of("x"),
            "real_div" if self.divides_by_largest(op) => Some(1.0),
            "real_div" => Some(of("x")? / self.least(op.input("y")?)?),
            _ => None,
        }
    }

    /// Positive lower bound of a value: `maximum(x, c)`.
    fn least(&self, binding: &Binding) -> Option<f64> {
        let Binding::Value(id) = binding else { return None };
        let op = self.uses.producer(*id).filter(|op| op.operator == "maximum")?;
        let floor = ["x", "y"].into_iter().find_map(|name| self.parameter(op, name))?;
        (floor > 0.0).then_some(f64::from(floor))
    }

    /// Matches `x / max(|x|)` and `x / maximum(max(|x|), c)`.
    fn divides_by_largest(&self, op: &Op) -> bool {
        let made_by = |binding: Option<&Binding>, operators: &[&str]| -> Option<&'a Op> {
            let Some(Binding::Value(id)) = binding else { return None };
            let op = self.uses.producer(*id)?;
            operators.contains(&op.operator.as_str()).then_some(op)
        };
        let Some(mut divisor) = made_by(op.input("y"), &["maximum", "reduce_max"]) else { return false };
        if divisor.operator == "maximum" {
            let [x, y] = ["x", "y"].map(|name| made_by(divisor.input(name), &["reduce_max"]));
            let Some(inner) = x.or(y) else { return false };
            divisor = inner;
        }
        made_by(divisor.input("x"), &["abs"]).is_some_and(|abs| abs.input("x") == op.input("x"))
    }
}

fn is_root(op: &Op) -> bool {
    matches!(op.operator.as_str(), "sqrt" | "rsqrt" | "pow")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Verdict;
    use anec_mil::{FunctionBuilder, Opset, TensorType};

    /// Findings for a function that `build` makes from an fp16 input of four channels.
    fn found(build: impl FnOnce(&mut FunctionBuilder, ValueId) -> ValueId) -> Vec<(String, String)> {
        let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
        let x = ops.input("x", TensorType::new(DataType::Fp16, [1u64, 4, 2, 1]));
        let y = build(&mut ops, x);
        ops.output("y", y);
        let program = Program::single(ops.finish().unwrap());
        let failed = |check: Check| (check.verdict == Verdict::Failed).then(|| (check.claim, check.detail.unwrap()));
        lint("p", &program).unwrap().into_iter().filter_map(failed).collect()
    }

    fn one(build: impl FnOnce(&mut FunctionBuilder, ValueId) -> ValueId) -> String {
        let found = found(build);
        assert_eq!(found.len(), 1, "{found:?}");
        found.into_iter().next().unwrap().1
    }

    #[test]
    fn a_mask_of_minus_infinity_is_found() {
        let problem = one(|ops, x| ops.add(x, Constant::fp16(f32::NEG_INFINITY)));
        assert!(problem.contains("infinite or not a number"), "{problem}");
        let problem = one(|ops, x| ops.add(x, Constant::fp16(-65504.0)));
        assert!(problem.contains("65504"), "{problem}");
        assert!(found(|ops, x| ops.add(x, Constant::fp16(-1e4))).is_empty());
    }

    #[test]
    fn an_epsilon_that_half_precision_loses_is_found() {
        let norm = |epsilon: f32| {
            move |ops: &mut FunctionBuilder, x| {
                let epsilon = Constant::fp32(epsilon);
                let square = ops.reduce_mean(x, &[1], true);
                let root =
                    ops.op::<anec_mil::OpInput>("rsqrt", "root", [("x", square.into()), ("epsilon", epsilon.into())]);
                ops.mul(x, root)
            }
        };
        assert_eq!(one(norm(1e-12)), "`root` (rsqrt): epsilon 1e-12 is zero in fp16");
        assert!(found(norm(1e-4)).is_empty());
        // 1e-9 is rounded to zero in fp16
        let added = one(|ops, x| {
            let mean = ops.reduce_mean(x, &[1], true);
            let mean = ops.add(mean, Constant::fp16(1e-9));
            let root = ops.rsqrt(mean, 1e-4);
            ops.mul(x, root)
        });
        assert!(added.contains("an epsilon was lost"), "{added}");
    }

    #[test]
    fn weights_and_scales_of_zero_are_found() {
        let weight = |values: &[f32], scale: f32| {
            let values: Vec<u8> = values.iter().map(|v| *v as i8 as u8).collect();
            move |ops: &mut FunctionBuilder, x| {
                let data = Constant::literal(TensorType::new(DataType::Int8, [4u64, 4, 1, 1]), values);
                let scale = Constant::fp16_tensor(&[1, 1, 1, 1], &[scale]);
                let weight = ops.op("constexpr_blockwise_shift_scale", "w", [("data", data), ("scale", scale)]);
                ops.conv("c", x, weight, None)
            }
        };
        assert_eq!(one(weight(&[1.0; 16], 0.0)), "`w`: 1 of 1 scales are zero");
        assert_eq!(one(weight(&[0.0; 16], 1.0)), "`w`: its weight is all zeros");
        assert!(found(weight(&[1.0; 16], 0.5)).is_empty());
        let gain = one(|ops, x| ops.mul(x, Constant::fp16_tensor(&[1, 4, 1, 1], &[0.0; 4])));
        assert!(gain.ends_with("(mul): its weight is all zeros"), "{gain}");
    }

    #[test]
    fn an_island_of_single_precision_is_found() {
        let island = one(|ops, x| {
            let wide = ops.op::<anec_mil::OpInput>(
                "cast",
                "wide",
                [("x", x.into()), ("dtype", Constant::string("fp32").into())],
            );
            let wide = ops.tanh(wide);
            let back = ops.op::<anec_mil::OpInput>(
                "cast",
                "back",
                [("x", wide.into()), ("dtype", Constant::string("fp16").into())],
            );
            ops.sigmoid(back)
        });
        assert!(island.ends_with("(tanh) is computed in fp32"), "{island}");
    }

    #[test]
    fn squares_are_bounded_by_what_the_graph_says() {
        let bounded = |ops: &mut FunctionBuilder, x| {
            let magnitude = ops.abs(x);
            let largest = ops.reduce_max(magnitude, &[1], true);
            let largest = ops.maximum(largest, Constant::fp16(1e-4));
            let scaled = ops.real_div(x, largest);
            ops.mul(scaled, scaled)
        };
        let notes = |build: &dyn Fn(&mut FunctionBuilder, ValueId) -> ValueId| {
            let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
            let x = ops.input("x", TensorType::new(DataType::Fp16, [1u64, 4, 2, 1]));
            let y = build(&mut ops, x);
            ops.output("y", y);
            let program = Program::single(ops.finish().unwrap());
            lint("p", &program).unwrap().pop().unwrap().detail
        };
        assert_eq!(notes(&bounded), None);
        assert!(notes(&|ops, x| ops.mul(x, x)).unwrap().contains("|x| > 256"));
        let problem = one(|ops, x| {
            let large = ops.softmax(x, 1);
            let large = ops.mul(large, Constant::fp16(300.0));
            ops.mul(large, large)
        });
        assert!(problem.ends_with("(mul) squares 300"), "{problem}");
    }
}
