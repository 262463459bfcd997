//! Products of bytes and codes as sums of [digits](crate::digits), on processors that multiply bytes.

use smallvec::SmallVec;

use super::{Products, TokenProduct, for_each_part};
use crate::aligned_buf::AlignedBuf;
use crate::columns::StridedColumn;
use crate::digits::Activations;
use crate::dispatch::{Vectorize, vectorized};
use crate::dot::MAX_COLUMNS;
use crate::dotprod::{
    ByteProducts, Instruction, MIN_PARALLEL_ELEMENTS, MeasuredColumn, ProductBlock, STRIP, measure_beside,
};
#[cfg(target_arch = "x86_64")]
use crate::dotprod::{DigitColumns, StoredProducts, StoredRows};
use crate::layout::{MatrixLayout, SharedOutput};
use crate::pool;
use crate::prefetch::prefetch;
use crate::weight::{Elements, StoredWeight};

/// Weight whose rows can be multiplied as bytes.
enum ByteRows<'a> {
    /// Bytes with at most one scale per row.
    Plain(&'a [i8]),
    /// Codes, or bytes in blocks with scales.
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

/// Minimum tokens of a product whose activations are measured and packed straight from rows, if that can be done.
const MIN_BESIDE: usize = 64;

/// Measures the activations of tokens, on all threads if there is enough work: each token by itself, so that other
/// tokens don't affect its bits. `None` for those that can't be written in digits.
fn measured<'a>(
    tokens: &[StridedColumn<'a>],
    columns: usize,
    activations: Activations,
) -> SmallVec<[Option<MeasuredColumn<'a>>; MAX_COLUMNS]> {
    let mut all = SmallVec::from_elem(None, tokens.len());
    let part = tokens.len().div_ceil(pool::threads()).clamp(1, MAX_COLUMNS);
    let measure = |i: usize, some: &mut [Option<MeasuredColumn<'a>>]| {
        let own = some.iter_mut().zip(&tokens[i * part..]);
        own.for_each(|(measured, token)| *measured = token.measured(columns, activations));
    };
    if tokens.len() * columns > MIN_PARALLEL_ELEMENTS {
        pool::for_each_chunk(&mut all, part, measure);
    } else {
        all.chunks_mut(part).enumerate().for_each(|(i, some)| measure(i, some));
    }
    all
}

/// Measures the activations of many tokens that are neighbours in rows, as [`measured`].
fn measured_beside<'a>(
    (x, step): (&'a [f32], usize),
    (columns, tokens): (usize, usize),
    activations: Activations,
) -> Vec<Option<MeasuredColumn<'a>>> {
    let mut all = vec![None; tokens];
    let part = tokens.div_ceil(pool::threads()).next_multiple_of(16).min(STRIP);
    pool::for_each_chunk(&mut all, part, |i, some| measure_beside((&x[i * part..], step), columns, activations, some));
    all
}

/// Activations of many tokens, stored by token.
fn by_token((x, layout): (&[f32], MatrixLayout), (columns, tokens): (usize, usize)) -> AlignedBuf {
    /// Tokens and elements that are moved at a time, so that a read is a cache line.
    const SIDE: usize = 16;
    let mut buffer = AlignedBuf::new(tokens * columns);
    pool::for_each_chunk(&mut buffer.floats()[..tokens * columns], SIDE * columns, |i, out| {
        let first = i * SIDE;
        for from in (0..columns).step_by(SIDE) {
            // rows are too far apart for the processor's own prefetching
            let next = (from + SIDE..from + 2 * SIDE).map(|k| first * layout.column + k * layout.row);
            next.for_each(|at| prefetch(x.as_ptr().wrapping_add(at)));
            for (t, out) in out.chunks_exact_mut(columns).enumerate() {
                let x = x[(first + t) * layout.column + from * layout.row..].iter().step_by(layout.row);
                out[from..].iter_mut().take(SIDE).zip(x).for_each(|(out, x)| *out = *x);
            }
        }
    });
    buffer
}

/// Destination of products, with scales and biases.
struct Results<'w> {
    /// Output of each column, and its token in that output.
    columns: SmallVec<[(SharedOutput, usize); MAX_COLUMNS]>,
    /// Factor of each row's products, or one for all rows.
    factors: Option<&'w [f32]>,
    factor: f32,
    /// Bias of each row.
    bias: Option<&'w [f32]>,
}

impl<'w> Results<'w> {
    /// Returns whether tokens of a row are contiguous.
    fn are_by_row(&self) -> bool {
        self.columns.iter().all(|(out, _)| out.layout().row > 1 && out.layout().column == 1)
    }

    /// Writes the results of some rows.
    ///
    /// # Safety
    /// The outputs are alive and hold these rows of the tokens; nothing else accesses them meanwhile.
    #[inline(always)]
    unsafe fn put(&self, block: ProductBlock<'_>) {
        /// Results that are written at a time.
        const VECTOR: usize = 16;
        let ProductBlock { row, rows, columns, products, layout: from } = block;
        let of_rows = |values: Option<&'w [f32]>| values.map(|values| &values[row..][..rows]);
        let (factors, bias) = (of_rows(self.factors), of_rows(self.bias));
        let of_row = |i: usize| (factors.map_or(self.factor, |factors| factors[i]), bias.map_or(0.0, |bias| bias[i]));
        let result = |i: usize, product: f32| {
            let (factor, bias) = of_row(i);
            product * factor + bias
        };
        let mut c = 0;
        for beside in columns.chunk_by(|one, next| self.are_beside(*one, *next)) {
            let (out, token) = self.columns[beside[0]];
            let products = &products[c * from.column..];
            c += beside.len();
            // SAFETY: as promised.
            let (at, to) = unsafe { out.at(row, token) };
            if from.column == 1 && to.column == 1 {
                for i in 0..rows {
                    let (factor, bias) = of_row(i);
                    let (vectors, others) = products[i * from.row..][..beside.len()].as_chunks::<VECTOR>();
                    let mut at = at.wrapping_add(i * to.row);
                    for vector in vectors {
                        let mut results = *vector;
                        results.iter_mut().for_each(|result| *result = *result * factor + bias);
                        // SAFETY: as promised.
                        unsafe { *at.cast() = results };
                        at = at.wrapping_add(VECTOR);
                    }
                    for (c, product) in others.iter().enumerate() {
                        // SAFETY: as promised.
                        unsafe { *at.add(c) = product * factor + bias };
                    }
                }
                continue;
            }
            for c in 0..beside.len() {
                let products = &products[c * from.column..];
                // SAFETY: as promised.
                let (at, to) = unsafe { out.at(row, token + c) };
                // SAFETY: as promised.
                let put = |i: usize, product: f32| unsafe { *at.add(i * to.row) = result(i, product) };
                match (from.row, to.row) {
                    (1, 1) => {
                        let products = &products[..rows];
                        // SAFETY: as promised; it is written in vectors.
                        (0..rows).for_each(|i| unsafe { *at.add(i) = result(i, products[i]) });
                    }
                    (1, _) => {
                        let products = &products[..rows];
                        (0..rows).for_each(|i| put(i, products[i]));
                    }
                    _ => (0..rows).for_each(|i| put(i, products[i * from.row])),
                }
            }
        }
    }

    /// Returns whether the second of two columns is the first one's next token.
    fn are_beside(&self, one: usize, next: usize) -> bool {
        let ((out, token), (next, other)) = (self.columns[one], self.columns[next]);
        other == token + 1 && next == out
    }
}

/// Results of some rows to write, in the processor's widest vectors.
struct Put<'p, 'w, 'b> {
    results: &'p Results<'w>,
    block: ProductBlock<'b>,
}

impl<'p, 'w, 'b> Put<'p, 'w, 'b> {
    /// # Safety
    /// As [`Results::put`].
    unsafe fn new(results: &'p Results<'w>, block: ProductBlock<'b>) -> Self {
        Put { results, block }
    }
}

impl Vectorize for Put<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // SAFETY: as promised.
        unsafe { self.results.put(self.block) };
    }
}

/// Computes and removes the products that byte instructions compute as sums of digits: all products of few tokens, and
/// those of many tokens if byte instructions are faster than f32 for these too.
pub(super) fn by_digits<'w>(
    weight: &'w StoredWeight,
    activations: Activations,
    bias: Option<&'w [f32]>,
    products: &mut Products<'_, '_>,
) {
    let (Some(instruction), Some(stored)) = (Instruction::best(activations), ByteRows::new(weight)) else { return };
    let (rows, columns, scales) = (weight.rows(), weight.columns(), weight.scales());
    if columns == 0 {
        return;
    }
    let activations = match stored {
        ByteRows::Plain(_) => instruction.activations(activations),
        #[cfg(target_arch = "x86_64")]
        ByteRows::Stored(stored) => stored.activations(activations),
    };
    let takes_many = match stored {
        ByteRows::Plain(_) => instruction.takes_many(),
        #[cfg(target_arch = "x86_64")]
        ByteRows::Stored(stored) => instruction.takes_many() && stored.takes_many(activations),
    };
    let is_many = |product: &TokenProduct<'_>| product.tokens > MAX_COLUMNS;
    let packs_rows = matches!(stored, ByteRows::Plain(_)) && instruction.packs_rows(columns);
    let are_beside = |product: &TokenProduct<'_>| packs_rows && product.tokens >= MIN_BESIDE && product.x.1.column == 1;
    // otherwise strided columns would be read several times
    let moved = |product: &&mut TokenProduct<'_>| {
        let scattered = takes_many && is_many(product) && product.x.1.row != 1;
        (scattered && !are_beside(product)).then(|| by_token(product.x, (columns, product.tokens)))
    };
    let moved: SmallVec<[Option<AlignedBuf>; MAX_COLUMNS]> = products.iter().map(moved).collect();
    let mut tokens = SmallVec::<[StridedColumn<'_>; MAX_COLUMNS]>::new();
    let mut taken = SmallVec::<[_; MAX_COLUMNS]>::new();
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
        let beside =
            are_beside(product).then(|| measured_beside((x, layout.row), (columns, product.tokens), activations));
        if beside.is_none() {
            let of_token = |token: usize| StridedColumn { values: &x[token * layout.column..], step: layout.row };
            tokens.extend((0..product.tokens).map(of_token));
        }
        taken.push((product, beside));
    }
    let all = measured(&tokens, columns, activations);
    let mut inputs = SmallVec::<[MeasuredColumn<'_>; MAX_COLUMNS]>::new();
    let mut outputs = SmallVec::<[(SharedOutput, usize); MAX_COLUMNS]>::new();
    let mut rest = all.as_slice();
    for (product, beside) in taken {
        let own = beside.as_deref().unwrap_or_else(|| {
            let (own, others) = rest.split_at(product.tokens);
            rest = others;
            own
        });
        if own.iter().any(Option::is_none) {
            left.push(product);
            continue;
        }
        let out = SharedOutput::new(product.out.0, product.out.1);
        inputs.extend(own.iter().flatten().copied());
        outputs.extend((0..product.tokens).map(|token| (out, token)));
    }
    *products = left;
    if inputs.is_empty() {
        return;
    }
    // scales of blocks are in the products already
    let (factors, factor) = match scales.values.as_slice() {
        _ if scales.blocks > 1 => (None, 1.0),
        [all] => (None, *all),
        of_rows => (Some(of_rows), 1.0),
    };
    let results = Results { columns: outputs, factors, factor, bias };
    // SAFETY: `multiply_each` has checked that outputs hold the rows of their tokens and that results don't overlap;
    // each part has different rows.
    let put = |block: ProductBlock<'_>| vectorized(unsafe { Put::new(&results, block) });
    match stored {
        ByteRows::Plain(values) => {
            let all = ByteProducts::new(instruction, columns, &inputs, results.are_by_row());
            let sums = if all.takes_sums() { weight.row_sums() } else { &[] };
            for_each_part(rows, columns, |first, count| {
                let rows = &values[first * columns..][..count * columns];
                let sums = sums.get(first..first + count).unwrap_or_default();
                all.multiply(rows, sums, |block| put(block.offset_by(first)));
            });
        }
        #[cfg(target_arch = "x86_64")]
        ByteRows::Stored(stored) => {
            let digits = DigitColumns::new(0..inputs.len(), instruction, columns, &inputs);
            let all = StoredProducts::new(&digits, stored);
            let looks_up_once = takes_many && all.looks_up_again();
            for_each_part(rows, columns, |first, count| {
                let put = |block: ProductBlock<'_>| put(block.offset_by(first));
                if looks_up_once {
                    all.multiply_many(first, count, put);
                } else {
                    all.multiply(first, count, put);
                }
            });
        }
    }
}
