//! Products of matrices.

use anec_mil::Op;

use super::context::{Lowering, Tensor};
use super::{Lowered, Row};
use crate::aicode::ElementType;

pub(super) const ROWS: &[Row] =
    &[("matmul", matmul), ("linear", linear), ("einsum", einsum), ("scaled_dot_product_attention", attention)];

fn matmul(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (mut x, mut y) = (l.tensor(op, "x")?, l.tensor(op, "y")?);
    // since iOS 17, one of them may be of integers
    let element = if x.element.is_float() || !y.element.is_float() { x.element } else { y.element };
    (x, y) = (l.cast(&x, element), l.cast(&y, element));
    let (vector_x, vector_y) = (x.rank() == 1, y.rank() == 1);
    if vector_x {
        x = l.reshape(&x, &[1, x.shape[0]]);
    }
    if vector_y {
        y = l.reshape(&y, &[y.shape[0], 1]);
    }
    if l.flag(op, "transpose_x")? && !vector_x {
        x = l.swap_axes(&x, x.rank() - 2, x.rank() - 1);
    }
    if l.flag(op, "transpose_y")? && !vector_y {
        y = l.swap_axes(&y, y.rank() - 2, y.rank() - 1);
    }
    let product = l.product(&x, &y)?;
    let mut shape = product.shape.clone();
    if vector_y {
        shape.pop();
    }
    if vector_x {
        shape.remove(shape.len() - if vector_y { 1 } else { 2 });
    }
    Ok(vec![l.reshape(&product, &shape)])
}

fn linear(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (mut x, mut weight) = (l.tensor(op, "x")?, l.tensor(op, "weight")?);
    // since iOS 17, one of them may be of integers
    let element = if x.element.is_float() || !weight.element.is_float() { x.element } else { weight.element };
    (x, weight) = (l.cast(&x, element), l.cast(&weight, element));
    let columns = *x.shape.last().ok_or("an input of rank 0")?;
    let rows = x.shape[..x.rank() - 1].iter().product();
    let flat = l.reshape(&x, &[rows, columns]);
    let weight = l.swap_axes(&weight, 0, 1);
    let mut product = l.product(&flat, &weight)?;
    if let Some(bias) = l.optional(op, "bias")? {
        let bias = l.cast(&bias, element);
        product = l.binary("primitive.add_v1", &product, &bias)?;
    }
    let shape = [&x.shape[..x.rank() - 1], &product.shape[1..]].concat();
    Ok(vec![l.reshape(&product, &shape)])
}

/// Two operands: axes that both have and the result lacks are summed, others that both have are batches.
fn einsum(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let values = l.tensors(op, "values")?;
    let equation = l.text(op, "equation", "").replace(' ', "");
    let [x, y] = &values[..] else { return Err(format!("{} operands", values.len())) };
    let refused = || format!("equation `{equation}`");
    let (inputs, output) = equation.split_once("->").ok_or_else(refused)?;
    let (left, right) = inputs.split_once(',').ok_or_else(refused)?;
    let [left, right, output]: [Vec<char>; 3] = [left, right, output].map(|letters| letters.chars().collect());
    let unique = |letters: &[char]| (0..letters.len()).all(|i| !letters[..i].contains(&letters[i]));
    if ![&left, &right, &output].into_iter().all(|letters| unique(letters)) {
        return Err(refused());
    }
    let batch: Vec<char> = left.iter().copied().filter(|c| right.contains(c) && output.contains(c)).collect();
    let summed: Vec<char> = left.iter().copied().filter(|c| right.contains(c) && !output.contains(c)).collect();
    let only =
        |own: &[char], other: &[char]| -> Vec<char> { own.iter().copied().filter(|c| !other.contains(c)).collect() };
    let (rows, columns) = (only(&left, &right), only(&right, &left));
    if rows.iter().chain(&columns).any(|letter| !output.contains(letter)) {
        return Err(refused());
    }
    let arranged = |l: &mut Lowering<'_>, tensor: &Tensor, own: &[char], order: &[&[char]; 3]| {
        let wanted: Vec<char> = order.concat();
        let permutation: Vec<usize> =
            wanted.iter().filter_map(|letter| own.iter().position(|own| own == letter)).collect();
        let sizes = |letters: &[char]| -> u64 {
            letters.iter().filter_map(|c| own.iter().position(|own| own == c)).map(|i| tensor.shape[i]).product()
        };
        let batch_sizes: Vec<u64> =
            order[0].iter().filter_map(|c| own.iter().position(|own| own == c)).map(|i| tensor.shape[i]).collect();
        let moved = l.transpose(tensor, &permutation);
        let shape = [&batch_sizes[..], &[sizes(order[1]), sizes(order[2])]].concat();
        l.reshape(&moved, &shape)
    };
    let size_of = |letter: &char| {
        let at = |own: &[char], tensor: &Tensor| own.iter().position(|own| own == letter).map(|i| tensor.shape[i]);
        at(&left, x).max(at(&right, y)).unwrap_or(1)
    };
    let a = arranged(l, x, &left, &[&batch, &rows, &summed]);
    let b = arranged(l, y, &right, &[&batch, &summed, &columns]);
    let product = l.product(&a, &b)?;
    let order: Vec<char> = [&batch[..], &rows, &columns].concat();
    let product = l.reshape(&product, &order.iter().map(size_of).collect::<Vec<_>>());
    let permutation: Vec<usize> =
        output.iter().filter_map(|letter| order.iter().position(|other| other == letter)).collect();
    Ok(vec![l.transpose(&product, &permutation)])
}

fn attention(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (query, key, value) = (l.tensor(op, "query")?, l.tensor(op, "key")?, l.tensor(op, "value")?);
    let rank = query.rank();
    let scale = 1.0 / (query.shape[rank - 1] as f64).sqrt();
    let query = l.with_number("primitive.mul_v1", &query, scale)?;
    let key = l.swap_axes(&key, rank - 2, rank - 1);
    let mut scores = l.product(&query, &key)?;
    if let Some(mask) = l.optional(op, "attn_mask")? {
        let mask = match mask.element {
            ElementType::I1 => {
                let (open, closed) =
                    (l.splat(0.0, &mask.shape, scores.element)?, l.splat(-40_000.0, &mask.shape, scores.element)?);
                l.choose(&mask, &open, &closed)
            }
            _ => mask,
        };
        scores = l.binary("primitive.add_v1", &scores, &mask)?;
    }
    let last = scores.rank() - 1;
    let weights = l.softmax(&scores, last)?;
    Ok(vec![l.product(&weights, &value)?])
}
