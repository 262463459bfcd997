//! Weights behind ops: how much of the model a misplaced op reads.

use std::collections::HashMap;

use anec_mil::{Constant, Function, Op, Uses, ValueId};

/// Bytes of weights that each op reads, by the names of its results.
#[derive(Default)]
pub struct WeightBytes(HashMap<String, u64>);

impl WeightBytes {
    /// Counts the weights of all ops of a function.
    pub fn of(function: &Function) -> Self {
        let uses = Uses::of(function);
        let mut bytes = HashMap::new();
        for op in uses.ops() {
            let read = read_by(function, &uses, op);
            for output in &op.outputs {
                bytes.insert(function.value(*output).name.clone(), read);
            }
        }
        WeightBytes(bytes)
    }

    /// Bytes behind the op that computes a value; `None` if the function has no such value.
    pub fn behind(&self, output: &str) -> Option<u64> {
        self.0.get(output).copied()
    }
}

/// Bytes of an op's weight operands, compressed as stored.
fn read_by(function: &Function, uses: &Uses<'_>, op: &Op) -> u64 {
    let stored = |constant: &Constant| {
        // sizes, axes and flags aren't weights
        let is_weight = constant.ty.rank() > 0 && (op.is_constexpr() || constant.ty.dtype.is_float());
        if is_weight { constant.ty.bytes().unwrap_or(0) } else { 0 }
    };
    let mut values: Vec<ValueId> = op.operands().collect();
    values.sort_unstable();
    values.dedup();
    let mut bytes: u64 = values
        .into_iter()
        .map(|id| match (&function.value(id).constant, uses.producer(id)) {
            (Some(constant), _) => stored(constant),
            (None, Some(source)) if source.is_constexpr() => read_by(function, uses, source),
            _ => 0,
        })
        .sum();
    // a const op's attribute is the constant itself
    if !op.is_const() {
        bytes += op.constants().map(|(_, constant)| stored(constant)).sum::<u64>();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn bytes_are_those_that_are_stored() {
        let room = tempfile::tempdir().unwrap();
        anec_testing::fake::convert_demo(room.path(), &["quant.granularity=per_channel"]);
        let program = anec_package::open(&room.path().join("layers_0_3.mlpackage")).unwrap().program;
        let function = &program.functions[0];
        let weights = WeightBytes::of(function);
        let convs: Vec<(&str, u64)> = function
            .ops()
            .filter(|op| op.operator == "conv")
            .map(|op| {
                let output = &function.value(op.outputs[0]).name;
                (output.as_str(), weights.behind(output).unwrap())
            })
            .collect();
        // 3 layers of 7 projections: int8 and an fp16 scale for each row
        assert_eq!(convs.len(), 21);
        let of = |part: &str| convs.iter().find(|(name, _)| name.contains(part)).unwrap().1;
        assert_eq!(of("q_proj"), 192 * 256 + 2 * 192);
        let total: u64 = convs.iter().map(|(_, bytes)| bytes).sum();
        let package = anec_package::open(&room.path().join("layers_0_3.mlpackage")).unwrap();
        let stored = package.inventory().weight_bytes;
        assert!(total <= stored && total > stored * 95 / 100, "{total} of {stored}");
        assert_eq!(weights.behind("no such value"), None);
    }

    #[test]
    fn older_forms_of_weights_are_counted() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/coremltools"));
        let package = anec_package::open(&folder.join("uint8_affine_channel/model.mlpackage")).unwrap();
        let function = &package.program.functions[0];
        let weights = WeightBytes::of(function);
        let expanded = function.ops().find(|op| op.is_constexpr()).unwrap();
        let stored: u64 = expanded.attributes.values().filter(|c| c.ty.rank() > 0).filter_map(|c| c.ty.bytes()).sum();
        let reader = function.ops().find(|op| op.operands().any(|id| id == expanded.outputs[0])).unwrap();
        let behind = weights.behind(&function.value(reader.outputs[0]).name).unwrap();
        // the reading op has a bias of 32 halves
        assert_eq!((stored > 2000, behind), (true, stored + 64));
    }
}
