//! Textual identity of an expression.

use std::fmt::{self, Write};

use sha2::{Digest, Sha256};

use super::{Function, Node, Operation, RowOrder, SourceWeight, ZeroPoints};
use crate::tensor::SourceTensor;
use anec_base::hexadecimal;

impl SourceWeight {
    /// Returns the tensors of the expression, each once.
    pub fn tensors(&self) -> Vec<SourceTensor> {
        let mut tensors = Vec::new();
        self.visit(&mut |weight| {
            if let Node::Tensor(tensor) = &*weight.node
                && !tensors.iter().any(|other: &SourceTensor| other.name() == tensor.name())
            {
                tensors.push(tensor.clone());
            }
        });
        tensors
    }

    /// Returns the names of the tensors.
    pub fn names(&self) -> Vec<String> {
        self.tensors().iter().map(|tensor| tensor.name().to_owned()).collect()
    }

    /// Whether elements are products with a square matrix, which are slow to compute.
    pub fn has_product(&self) -> bool {
        self.any(|node| matches!(node, Node::Times { .. } | Node::TransposedTimes(_)))
    }

    /// Whether elements are products that are held from the first read until all of them are released.
    pub fn holds_product(&self) -> bool {
        self.any(|node| matches!(node, Node::TransposedTimes(_)))
    }

    fn any(&self, is: impl Fn(&Node) -> bool) -> bool {
        let mut found = false;
        self.visit(&mut |weight| found |= is(&weight.node));
        found
    }

    /// Calls `visitor` for this weight and all its operands.
    fn visit(&self, visitor: &mut impl FnMut(&SourceWeight)) {
        visitor(self);
        match &*self.node {
            Node::Tensor(_) | Node::Values { .. } | Node::Computed(_) => {}
            Node::Slice { of, .. }
            | Node::Reordered { of, .. }
            | Node::Columns { of, .. }
            | Node::Transposed(of)
            | Node::Times { of, .. }
            | Node::Map { of, .. } => of.visit(visitor),
            Node::TransposedTimes(product) => product.of.visit(visitor),
            Node::ComputedRows(computed) => computed.of().for_each(|w| w.visit(visitor)),
            Node::LowRankSum(sum) => [&sum.of, &sum.up, &sum.down].into_iter().for_each(|w| w.visit(visitor)),
            Node::Concatenation(parts) => parts.iter().for_each(|part| part.visit(visitor)),
            Node::ByColumn { of, vector, .. } | Node::ByRow { of, vector, .. } => {
                [of, vector].into_iter().for_each(|w| w.visit(visitor));
            }
            Node::Blocks { codes, scales, zero_points, .. } => {
                [codes, scales].into_iter().for_each(|w| w.visit(visitor));
                if let ZeroPoints::Each(each) = zero_points {
                    each.visit(visitor);
                }
            }
        }
    }

    /// Returns the identity of the elements: weights over the same source with equal keys have equal elements in
    /// row-major order. The shape isn't part of the key.
    pub fn key(&self) -> String {
        let mut key = String::new();
        self.write_key(&mut key);
        key
    }

    fn write_key(&self, key: &mut String) {
        // writing to a string can't fail
        let _ = match &*self.node {
            Node::Tensor(tensor) => write!(key, "{:?}", tensor.name()),
            Node::Values { values, .. } => {
                write!(key, "values({})", digest(values.iter().map(|value| value.to_le_bytes())))
            }
            Node::Slice { of, first } => {
                of.write_key(key);
                write!(key, "[{first}..{}]", first + self.elements())
            }
            Node::Concatenation(parts) => {
                key.push('(');
                write_keys(key, parts.iter());
                write!(key, ")")
            }
            Node::Reordered { of, order, run } => {
                of.write_key(key);
                match order {
                    RowOrder::InterleavedToHalves { head_dim, rotary_dim } => {
                        write!(key, ".halves({head_dim}, {rotary_dim}; {run})")
                    }
                    RowOrder::Transposed([rows, columns]) => write!(key, ".transposed({rows}, {columns}; {run})"),
                    RowOrder::Explicit(rows) => {
                        write!(key, ".rows({}; {run})", digest(rows.iter().map(|row| row.to_le_bytes())))
                    }
                }
            }
            Node::Columns { of, first, columns } => {
                of.write_key(key);
                write!(key, ".columns({first}..{} of {})", first + columns, of.columns())
            }
            Node::Transposed(of) => {
                of.write_key(key);
                let columns = of.columns();
                write!(key, ".transposed({} by {columns})", of.shape[of.shape.len() - 2])
            }
            Node::Map { of, function } => {
                of.write_key(key);
                match function {
                    Function::Scale(factor) => write!(key, "*{factor:?}"),
                    Function::Add(addend) => write!(key, "+{addend:?}"),
                    Function::Exp => write!(key, ".exp"),
                    Function::Reciprocal => write!(key, ".reciprocal"),
                }
            }
            Node::ByColumn { of, operation, vector } => {
                of.write_key(key);
                key.push_str(match operation {
                    Operation::Add => ".rows+(",
                    Operation::Multiply => ".rows*(",
                });
                vector.write_key(key);
                write!(key, ")")
            }
            Node::ByRow { of, columns, vector } => {
                of.write_key(key);
                key.push_str(&format!(".each({columns})*("));
                vector.write_key(key);
                write!(key, ")")
            }
            Node::LowRankSum(sum) => {
                sum.of.write_key(key);
                write!(key, "+{:?}*(", sum.scale).and_then(|()| {
                    sum.up.write_key(key);
                    key.push_str(")*(");
                    sum.down.write_key(key);
                    write!(key, ")")
                })
            }
            Node::Computed(computed) => write!(key, "computed({:?})", computed.name),
            Node::ComputedRows(computed) => {
                key.push_str(&format!("computed({:?}", computed.name));
                for of in computed.of() {
                    key.push_str("; ");
                    of.write_key(key);
                }
                write!(key, ")")
            }
            Node::Times { of, matrix } => {
                of.write_key(key);
                write!(key, ".times({:?})", matrix.name())
            }
            Node::TransposedTimes(product) => {
                product.of.write_key(key);
                write!(key, ".transposed_times({:?}; {})", product.matrix.name(), product.of.columns())
            }
            Node::Blocks { codes, scales, zero_points, block: [rows, columns] } => {
                key.push('(');
                codes.write_key(key);
                key.push('-');
                match zero_points {
                    ZeroPoints::All(zero) => key.push_str(&format!("{zero:?}")),
                    ZeroPoints::Each(each) => each.write_key(key),
                }
                key.push_str(")*");
                scales.write_key(key);
                write!(key, ".blocks({rows} by {columns} of {})", codes.columns())
            }
        };
    }
}

/// Appends the keys of several weights.
fn write_keys<'a>(key: &mut String, weights: impl Iterator<Item = &'a SourceWeight>) {
    for (index, weight) in weights.enumerate() {
        key.push_str(if index > 0 { "; " } else { "" });
        weight.write_key(key);
    }
}

/// Returns a digest of numbers.
fn digest<const N: usize>(numbers: impl Iterator<Item = [u8; N]>) -> String {
    let mut hasher = Sha256::new();
    numbers.for_each(|bytes| hasher.update(bytes));
    hexadecimal(&hasher.finalize())
}

impl fmt::Debug for SourceWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weight({} {:?})", self.key(), self.shape)
    }
}
