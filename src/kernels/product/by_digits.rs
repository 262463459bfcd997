//! Products with bytes and codes as sums of [digits](crate::digits), on processors that multiply bytes.

use smallvec::SmallVec;

use super::{Products, TokenProduct, for_each_part};
use crate::aligned_buf::AlignedBuf;
use crate::columns::StridedColumn;
use crate::digits::Activations;
use crate::dot::MOST_COLUMNS;
use crate::dotprod::{ByteProducts, DigitColumns, Instruction, MeasuredColumn, SMALL_COLUMNS};
#[cfg(target_arch = "x86_64")]
use crate::dotprod::{StoredProducts, StoredRows};
use crate::layout::{MatrixLayout, SharedOutput};
use crate::pool;
use crate::weight::{Elements, StoredWeight};

/// A weight whose rows can be multiplied by bytes.
enum ByteRows<'a> {
    /// Bytes, with one scale for a row at most.
    Plain(&'a [i8]),
    /// Codes, or blocks that have scales.
    #[cfg(target_arch = "x86_64")]
    Stored(StoredRows<'a>),
}

impl<'a> ByteRows<'a> {
    fn new(weight: &'a StoredWeight) -> Option<Self> {
        match weight.elements() {
            Elements::Int8(values) if weight.scales().blocks == 1 => Some(ByteRows::Plain(values)),
            #[cfg(target_arch = "x86_64")]
            _ => StoredRows::new(weight).map(ByteRows::Stored),
            #[cfg(target_arch = "aarch64")]
            _ => None,
        }
    }
}

/// The activations of a token, and the same measured: each by itself, so that none gets other bits by what is beside it. `None`
/// if they can't be written in digits.
type OwnColumn<'a> = (StridedColumn<'a>, Option<MeasuredColumn<'a>>);

/// Measures columns, by all threads if there is enough to do.
fn measure(all: &mut [OwnColumn<'_>], columns: usize, activations: Activations) {
    let one = |(column, measured): &mut OwnColumn<'_>| *measured = column.measured(columns, activations);
    if all.len() * columns > SMALL_COLUMNS {
        pool::for_each_chunk(all, all.len().div_ceil(pool::threads()).min(MOST_COLUMNS), |_, some| {
            some.iter_mut().for_each(one)
        });
    } else {
        all.iter_mut().for_each(one);
    }
}

/// The activations of many tokens, one token after the other.
fn by_token((x, layout): (&[f32], MatrixLayout), (columns, tokens): (usize, usize)) -> AlignedBuf {
    /// Tokens and elements that are moved at a time: what is read of an element's row is a cache line.
    const SIDE: usize = 16;
    let mut buffer = AlignedBuf::new(tokens * columns);
    pool::for_each_chunk(&mut buffer.floats()[..tokens * columns], SIDE * columns, |i, out| {
        let first = i * SIDE;
        for from in (0..columns).step_by(SIDE) {
            for (t, out) in out.chunks_exact_mut(columns).enumerate() {
                let x = x[(first + t) * layout.column + from * layout.row..].iter().step_by(layout.row);
                out[from..].iter_mut().take(SIDE).zip(x).for_each(|(out, x)| *out = *x);
            }
        }
    });
    buffer
}

/// Computes, and removes, those that a processor which multiplies bytes computes as sums of digits: all of few tokens, and
/// of many where its instruction is the best for these, too.
pub(super) fn by_digits<'w>(
    weight: &'w StoredWeight,
    activations: Activations,
    bias: Option<&'w [f32]>,
    products: &mut Products<'_, '_>,
) {
    let (Some(instruction), Some(stored)) = (Instruction::available().last(), ByteRows::new(weight)) else { return };
    let (rows, columns, scales) = (weight.rows(), weight.columns(), weight.scales());
    let takes_many = match stored {
        ByteRows::Plain(_) => instruction.takes_many(),
        #[cfg(target_arch = "x86_64")]
        ByteRows::Stored(stored) => instruction.takes_many() && stored.takes_many(activations),
    };
    let is_many = |product: &TokenProduct<'_>| product.tokens > MOST_COLUMNS;
    // columns that lie scattered are read several times
    let moved = |product: &&mut TokenProduct<'_>| {
        let scattered = takes_many && is_many(product) && product.x.1.row != 1 && columns > 0;
        scattered.then(|| by_token(product.x, (columns, product.tokens)))
    };
    let moved: SmallVec<[Option<AlignedBuf>; MOST_COLUMNS]> = products.iter().map(moved).collect();
    let mut all = SmallVec::<[OwnColumn<'_>; MOST_COLUMNS]>::new();
    let mut taken = SmallVec::<[_; MOST_COLUMNS]>::new();
    let mut left = Products::new();
    for (product, moved) in std::mem::take(products).into_iter().zip(&moved) {
        if !takes_many && is_many(product) {
            left.push(product);
            continue;
        }
        let (x, layout) = match moved {
            Some(moved) => (moved.as_floats(), MatrixLayout { row: 1, column: columns }),
            None => product.x,
        };
        let of_token = |token: usize| StridedColumn { values: &x[token * layout.column..], step: layout.row };
        all.extend((0..product.tokens).map(|token| (of_token(token), None)));
        taken.push(product);
    }
    measure(&mut all, columns, activations);
    let mut inputs = SmallVec::<[MeasuredColumn<'_>; MOST_COLUMNS]>::new();
    let mut outputs = SmallVec::<[(SharedOutput, usize); MOST_COLUMNS]>::new();
    let mut rest = all.as_slice();
    for product in taken {
        let (own, others) = rest.split_at(product.tokens);
        rest = others;
        if own.iter().any(|(_, measured)| measured.is_none()) {
            left.push(product);
            continue;
        }
        let out = SharedOutput::new(product.out.0, product.out.1);
        inputs.extend(own.iter().filter_map(|(_, measured)| *measured));
        outputs.extend((0..product.tokens).map(|token| (out, token)));
    }
    *products = left;
    if inputs.is_empty() {
        return;
    }
    let digits = DigitColumns::new(instruction, columns, &inputs);
    // blocks' scales are in the products
    let (factors, factor) = match scales.values.as_slice() {
        _ if scales.blocks > 1 => (None, 1.0),
        [all] => (None, *all),
        of_rows => (Some(of_rows), 1.0),
    };
    let put = |row: usize, column: usize, products: &[f32]| {
        let (out, token) = outputs[column];
        let of_rows = |values: Option<&'w [f32]>| values.map(|values| &values[row..][..products.len()]);
        let (factors, bias) = (of_rows(factors), of_rows(bias));
        // SAFETY: `multiply_each` has checked that the output holds these rows of the token, and that no other result
        // shares their places; each part is given other rows.
        unsafe {
            let (at, layout) = out.at(row, token);
            let scaled = |i: usize| {
                let factor = factors.map_or(factor, |factors| factors[i]);
                products[i] * factor + bias.map_or(0.0, |bias| bias[i])
            };
            // what lies side by side is written in vectors
            if layout.row == 1 {
                (0..products.len()).for_each(|i| *at.add(i) = scaled(i));
            } else {
                (0..products.len()).for_each(|i| *at.add(i * layout.row) = scaled(i));
            }
        }
    };
    match stored {
        ByteRows::Plain(values) => {
            let all = ByteProducts::new(&digits);
            let sums = if all.takes_sums() { weight.row_sums() } else { &[] };
            for_each_part(rows, columns, |first, count| {
                let rows = &values[first * columns..][..count * columns];
                let sums = sums.get(first..first + count).unwrap_or_default();
                all.multiply(rows, sums, |row, column, products| put(first + row, column, products));
            });
        }
        #[cfg(target_arch = "x86_64")]
        ByteRows::Stored(stored) => {
            let all = StoredProducts::new(&digits, stored);
            let looks_up_once = takes_many && all.looks_up_again();
            for_each_part(rows, columns, |first, count| {
                let put = |row, column, products: &[f32]| put(first + row, column, products);
                if looks_up_once {
                    all.multiply_many(first, count, put);
                } else {
                    all.multiply(first, count, put);
                }
            });
        }
    }
}
