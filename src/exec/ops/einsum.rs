//! Einstein summation of two tensors.

use std::sync::Arc;

use super::matmul::batched;
use super::{Resolved, Row, computing};
use crate::engine::EngineEffects;
use crate::kernel::{Call, Input, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::strided::View;
use crate::tensor::{Tensor, TensorData, strides};

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "einsum" => Einsum::resolve,
};

/// Letters of one operand: in both operands and the result (batch), in both but not in the result (summed), in this one
/// and the result (own), in this one alone (summed here).
struct Letters {
    batch: Vec<char>,
    summed: Vec<char>,
    own: Vec<char>,
    alone: Vec<char>,
}

fn sort_letters(letters: &str, other: &str, result: &str) -> Letters {
    let of = |in_other: bool, in_result: bool| {
        letters.chars().filter(|l| other.contains(*l) == in_other && result.contains(*l) == in_result).collect()
    };
    Letters { batch: of(true, true), summed: of(true, false), own: of(false, true), alone: of(false, false) }
}

/// Operand with its axes in the order of `groups`, one axis per group; sizes of 1 are repeated to `size`.
fn arranged(x: &Tensor, letters: &str, groups: &[&[char]], size: &dyn Fn(char) -> usize) -> Result<Tensor, String> {
    let values = x.floats().ok_or_else(|| format!("an operand holds {}, not floats", x.data.kind()))?;
    let steps = strides(&x.shape);
    let mut view = View::scalar();
    for letter in groups.iter().flat_map(|g| g.iter()) {
        let axis = letters.chars().position(|l| l == *letter).unwrap_or(0);
        view.shape.push(size(*letter));
        view.strides.push(if x.shape[axis] == 1 { 0 } else { steps[axis] as isize });
    }
    let shape: Vec<usize> = groups.iter().map(|g| g.iter().map(|l| size(*l)).product()).collect();
    Ok(Tensor::new(shape, view.read(values)))
}

/// Sum over letters, such as `bhtd,bhsd->bhts`.
struct Einsum {
    x: Input,
    y: Input,
    equation: String,
    first: String,
    second: String,
    result: String,
    /// Letters of both operands.
    letters: [Letters; 2],
}

impl Einsum {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let equation: String = op.text("equation")?.chars().filter(|c| !c.is_whitespace()).collect();
        let wrong = || format!("the equation `{equation}` is not one of two operands and a result");
        let (operands, result) = equation.split_once("->").ok_or_else(wrong)?;
        let (first, second) = operands.split_once(',').ok_or_else(wrong)?;
        let values: Vec<Input> = op.inputs("values")?.iter().collect();
        let [x, y] = values[..] else { return Err(format!("{} operands, two are expected", values.len())) };
        let plain = |letters: &str| {
            letters.chars().all(|c| c.is_ascii_alphabetic())
                && letters.chars().enumerate().all(|(i, c)| !letters[..i].contains(c))
        };
        let known = result.chars().all(|l| first.contains(l) || second.contains(l));
        if ![first, second, result].into_iter().all(plain) || !known {
            return Err(wrong());
        }
        let letters = [sort_letters(first, second, result), sort_letters(second, first, result)];
        let [first, second, result] = [first, second, result].map(str::to_owned);
        Ok(Arc::new(Einsum { x, y, first, second, result, letters, equation }))
    }
}

impl Kernel for Einsum {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let Einsum { equation, first, second, result, letters: [a, b], .. } = self;
        let (x, y) = (call.tensor(self.x)?, call.tensor(self.y)?);
        if first.len() != x.rank() || second.len() != y.rank() {
            return Err(format!("the equation `{equation}` doesn't fit the shapes {:?} and {:?}", x.shape, y.shape));
        }
        let sizes = || first.chars().zip(&x.shape).chain(second.chars().zip(&y.shape));
        let size = |letter: char| sizes().filter(|(l, _)| *l == letter).map(|(_, n)| *n).max().unwrap_or(1);
        if let Some((letter, _)) = sizes().find(|(l, n)| **n != 1 && **n != size(*l)) {
            return Err(format!("`{letter}` of `{equation}` has two sizes in {:?} and {:?}", x.shape, y.shape));
        }
        // both operands in the order of the first one's letters
        let left = arranged(x, first, &[&a.batch, &a.own, &a.summed, &a.alone], &size)?;
        let right = arranged(y, second, &[&a.batch, &b.own, &a.summed, &b.alone], &size)?;
        let product = batched(EngineEffects::NONE, pool, &summed(left), &summed(right), false, true)?;
        let order: Vec<char> = a.batch.iter().chain(&a.own).chain(&b.own).copied().collect();
        let shape: Vec<usize> = order.iter().map(|l| size(*l)).collect();
        let perm: Vec<usize> = result.chars().filter_map(|l| order.iter().position(|o| *o == l)).collect();
        let view = View::whole(&shape).permute(&perm);
        let values = product.floats().unwrap_or_default();
        let result = pool.make(&view.shape, |out| view.read_into(values, out));
        call.push(result)
    }
}

/// Sums over the last axis.
fn summed(mut x: Tensor) -> Tensor {
    let last = x.shape.pop().unwrap_or(1);
    if last != 1
        && let TensorData::F32(values) = &mut x.data
    {
        *values = match last {
            0 => vec![0.0; x.shape.iter().product()],
            _ => values.chunks_exact(last).map(anec_kernels::reduce::sum).collect(),
        };
    }
    x
}

#[cfg(test)]
mod tests {
    use super::super::testing::{f, results, s};
    use crate::tensor::Tensor;
    use anec_mil::DataType;

    fn run(equation: &str, x: (&[usize], &[f32]), y: (&[usize], &[f32])) -> Result<Tensor, String> {
        let arguments = vec![("values", vec![f(x.0, x.1), f(y.0, y.1)]), ("equation", vec![s(equation)])];
        results("einsum", arguments, DataType::Fp32).map(|mut r| r.remove(0))
    }

    #[test]
    fn equations_say_what_is_summed() {
        let x: (&[usize], &[f32]) = (&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let y: (&[usize], &[f32]) = (&[2, 2], &[5.0, 6.0, 7.0, 8.0]);
        let values = |equation| run(equation, x, y).unwrap().floats().unwrap().to_vec();
        assert_eq!(values("ij,jk->ik"), [19.0, 22.0, 43.0, 50.0]);
        assert_eq!(values("ij,jk->ki"), [19.0, 43.0, 22.0, 50.0]);
        assert_eq!(values("ij,ij->ij"), [5.0, 12.0, 21.0, 32.0]);
        assert_eq!(values("ij,ij->i"), [17.0, 53.0]);
        assert_eq!(values("ij,ji->"), [5.0 + 14.0 + 18.0 + 32.0]);
        assert_eq!(values("ij,kl->k"), [110.0, 150.0]);
        let outer = run("i,j->ij", (&[2], &[1.0, 2.0]), (&[3], &[1.0, 10.0, 100.0])).unwrap();
        assert_eq!(
            (outer.shape.as_slice(), outer.floats().unwrap()),
            (&[2, 3][..], &[1.0, 10.0, 100.0, 2.0, 20.0, 200.0][..])
        );
        let repeated = run("bi,bi->bi", (&[1, 2], &[1.0, 2.0]), (&[2, 2], &[1.0, 1.0, 3.0, 3.0])).unwrap();
        assert_eq!(repeated.floats().unwrap(), [1.0, 2.0, 3.0, 6.0]);
        assert!(run("ij,jk", x, y).is_err());
        assert!(run("ii,jk->i", x, y).is_err());
        assert!(run("ij,jk->iz", x, y).is_err());
        assert!(run("ijk,jk->i", x, y).is_err());
    }
}
