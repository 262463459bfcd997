//! Products with weights that are remembered, for sequences that compute the same tokens in other calls.
//!
//! A product of few tokens gives each the bits that it has alone (`anec_kernels::product`). So what one call has computed
//! of a token is what another one would compute, if the step is the same and the token's activations are, bit for bit. Both
//! are compared exactly: a digest only finds what is compared. All else, such as attention and writing states, is computed
//! anew for each sequence.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use smallvec::SmallVec;

use super::weight::WeightProduct;
use anec_kernels::dot::MOST_COLUMNS;
use anec_kernels::layout::MatrixLayout;
use anec_kernels::product::{TokenProduct, multiply_each};

/// A step whose weight and bias never change: a number that no other executable has, and the place of the op.
pub(super) type ProductStep = (u64, usize);

/// Products of the tokens that sequences are at, which they share: see [`State::remember`](super::State::remember).
/// Sequences that go on at the same pace find what the others have computed; [`forget`](ProductMemo::forget) lets go of
/// what was computed before the last time that it was called.
pub struct ProductMemo {
    generations: Mutex<Generations>,
    /// Most numbers that are kept.
    room: usize,
}

#[derive(Default)]
struct Generations {
    now: Generation,
    before: Generation,
}

/// What was computed between two calls of [`ProductMemo::forget`].
#[derive(Default)]
struct Generation {
    products: HashMap<(ProductStep, u64), Arc<Product>>,
    /// Numbers that they are.
    size: usize,
}

/// What a step made of a token.
struct Product {
    x: Box<[f32]>,
    out: Box<[f32]>,
}

impl ProductMemo {
    /// One that keeps at most so many bytes.
    pub fn new(bytes: usize) -> Self {
        ProductMemo { generations: Mutex::default(), room: bytes / size_of::<f32>() }
    }

    /// Lets go of what was computed before this was called last.
    pub fn forget(&self) {
        let mut generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        generations.before = std::mem::take(&mut generations.now);
    }

    /// The product of a step, if it has few tokens: gives false, with `out` as it was, if it has many or none.
    pub(super) fn multiply(&self, step: ProductStep, product: &WeightProduct<'_>, out: &mut [f32]) -> bool {
        let WeightProduct { weight, activations, bias, x: (x, x_layout), tokens, layout, .. } = product;
        let (rows, columns) = (weight.rows(), weight.columns());
        if !(1..=MOST_COLUMNS).contains(tokens) || columns == 0 || rows == 0 {
            return false;
        }
        let gathered = columns_of((x, *x_layout), *tokens, columns);
        let mut place = |token: usize, values: &[f32]| {
            let out = &mut out[token * layout.column..];
            values.iter().enumerate().for_each(|(row, value)| out[row * layout.row] = *value);
        };
        let mut missing = SmallVec::<[(usize, u64, &[f32]); MOST_COLUMNS]>::new();
        for (token, x) in gathered.chunks_exact(columns).enumerate() {
            let digest = digest(x);
            match self.find((step, digest), x) {
                Some(found) => place(token, &found.out),
                None => missing.push((token, digest, x)),
            }
        }
        let mut results = vec![0.0; missing.len() * rows];
        let by_token = |size: usize| MatrixLayout { row: 1, column: size };
        let alone = missing.iter().zip(results.chunks_exact_mut(rows)).map(|((_, _, x), out)| TokenProduct {
            x: (x, by_token(columns)),
            tokens: 1,
            out: (out, by_token(rows)),
        });
        multiply_each(weight, *activations, *bias, &mut alone.collect::<SmallVec<[_; MOST_COLUMNS]>>());
        for ((token, digest, x), out) in missing.into_iter().zip(results.chunks_exact(rows)) {
            place(token, out);
            self.keep((step, digest), Product { x: x.into(), out: out.into() });
        }
        true
    }

    fn find(&self, key: (ProductStep, u64), x: &[f32]) -> Option<Arc<Product>> {
        let found = {
            let generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
            let Generations { now, before } = &*generations;
            now.products.get(&key).or_else(|| before.products.get(&key)).cloned()
        };
        // zeros of different signs aren't the same, and one that isn't a number is the same as itself
        found.filter(|product| bytemuck::cast_slice::<f32, u32>(&product.x) == bytemuck::cast_slice::<f32, u32>(x))
    }

    fn keep(&self, key: (ProductStep, u64), product: Product) {
        let size = product.x.len() + product.out.len();
        let mut generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        if generations.now.size + generations.before.size + size <= self.room {
            generations.now.size += size;
            generations.now.products.insert(key, Arc::new(product));
        }
    }
}

/// The columns of some tokens, one after the other.
fn columns_of((x, layout): (&[f32], MatrixLayout), tokens: usize, columns: usize) -> Vec<f32> {
    let mut gathered = Vec::with_capacity(tokens * columns);
    for token in 0..tokens {
        let x = &x[token * layout.column..];
        match layout.row {
            1 => gathered.extend_from_slice(&x[..columns]),
            row => gathered.extend(x.iter().step_by(row).take(columns)),
        }
    }
    gathered
}

/// A number that depends on all bits of some values.
fn digest(values: &[f32]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |sum: u64, bits: u64| (sum ^ bits).wrapping_mul(FACTOR).rotate_left(29);
    let (eights, rest) = values.as_chunks::<8>();
    let mut lanes = [values.len() as u64; 4];
    for eight in eights {
        for (lane, pair) in lanes.iter_mut().zip(eight.as_chunks::<2>().0) {
            *lane = mix(*lane, u64::from(pair[0].to_bits()) | u64::from(pair[1].to_bits()) << 32);
        }
    }
    let lanes = lanes.into_iter().chain(rest.iter().map(|value| u64::from(value.to_bits())));
    lanes.fold(0, mix)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Dims;
    use crate::weight::LoadedWeight;
    use anec_kernels::product::Activations;
    use anec_kernels::weight::Elements;

    const ROWS: usize = 37;
    const COLUMNS: usize = 45;

    fn noise(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + seed * 53) % 101) as f32 / 101.0 - 0.5).collect()
    }

    fn weight(seed: usize) -> LoadedWeight {
        LoadedWeight::plain(vec![ROWS, COLUMNS], Arc::new(Elements::F32(noise(ROWS * COLUMNS, seed).into())))
    }

    fn product<'c>(weight: &'c LoadedWeight, bias: &'c [f32], x: &'c [f32], tokens: usize) -> WeightProduct<'c> {
        let layout = MatrixLayout { row: tokens, column: 1 };
        WeightProduct {
            weight,
            activations: Activations::F32,
            bias: Some(bias),
            x: (x, layout),
            tokens,
            shape: Dims::new(),
            layout,
        }
    }

    fn computed(product: &WeightProduct<'_>) -> Vec<u32> {
        let mut out = vec![0.0; ROWS * product.tokens];
        let WeightProduct { weight, activations, bias, x, tokens, layout, .. } = product;
        multiply_each(
            weight,
            *activations,
            *bias,
            &mut [TokenProduct { x: *x, tokens: *tokens, out: (&mut out, *layout) }],
        );
        bytemuck::cast_slice(&out).to_vec()
    }

    fn remembered(memo: &ProductMemo, step: ProductStep, product: &WeightProduct<'_>) -> Vec<u32> {
        let mut out = vec![f32::NAN; ROWS * product.tokens];
        assert!(memo.multiply(step, product, &mut out));
        bytemuck::cast_slice(&out).to_vec()
    }

    #[test]
    fn what_is_remembered_has_the_bits_that_it_has_when_it_is_computed() {
        let (memo, weight, bias) = (ProductMemo::new(1 << 20), weight(1), noise(ROWS, 2));
        let tokens: Vec<Vec<f32>> = (0..6).map(|token| noise(COLUMNS, 7 * token)).collect();
        // other tokens in each call, in other places: all new, some known, all known
        for (turn, call) in [&[0][..], &[1, 0], &[2, 1, 3, 0], &[0, 1, 2, 3], &[4, 4, 5], &[5]].iter().enumerate() {
            let x: Vec<f32> =
                (0..COLUMNS).flat_map(|k| call.iter().map(|t| tokens[*t][k]).collect::<Vec<_>>()).collect();
            let product = product(&weight, &bias, &x, call.len());
            assert_eq!(remembered(&memo, (1, 5), &product), computed(&product), "turn {turn}");
            if turn % 2 == 0 {
                memo.forget();
            }
        }
    }

    #[test]
    fn steps_and_bits_are_told_apart() {
        let memo = ProductMemo::new(1 << 20);
        let (weights, bias) = ([weight(1), weight(2)], noise(ROWS, 2));
        let mut x = noise(COLUMNS, 3);
        x[4] = 0.0;
        for (step, weight) in [((1, 5), &weights[0]), ((1, 6), &weights[1]), ((2, 5), &weights[1])] {
            for change in [0.0, -0.0, 1e-40] {
                x[4] = change;
                let product = product(weight, &bias, &x, 1);
                assert_eq!(remembered(&memo, step, &product), computed(&product));
            }
        }
        // whatever the digest is, what is found is compared
        let key = ((1, 5), digest(&x));
        assert!(memo.find(key, &x).is_some());
        assert!(memo.find(key, &noise(COLUMNS, 4)).is_none());
        x[4] = 0.0;
        let negative: Vec<f32> = x.iter().map(|value| if *value == 0.0 { -0.0 } else { *value }).collect();
        assert!(memo.find(((1, 5), digest(&x)), &negative).is_none());
        assert_ne!(digest(&x), digest(&negative));
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let memo = ProductMemo::new(4 * 3 * (ROWS + COLUMNS));
        let (weight, bias) = (weight(1), noise(ROWS, 2));
        let kept = |memo: &ProductMemo| {
            let generations = memo.generations.lock().unwrap();
            (generations.now.products.len(), generations.before.products.len())
        };
        for token in 0..5 {
            let x = noise(COLUMNS, token);
            let product = product(&weight, &bias, &x, 1);
            assert_eq!(remembered(&memo, (1, 1), &product), computed(&product));
        }
        assert_eq!(kept(&memo), (3, 0));
        memo.forget();
        assert_eq!(kept(&memo), (0, 3));
        memo.forget();
        assert_eq!(kept(&memo), (0, 0));
    }

    #[test]
    fn many_tokens_are_left_to_be_computed() {
        let (memo, weight, bias) = (ProductMemo::new(1 << 20), weight(1), noise(ROWS, 2));
        for tokens in [0, MOST_COLUMNS + 1] {
            let x = noise(COLUMNS * tokens, 1);
            assert!(!memo.multiply((1, 1), &product(&weight, &bias, &x, tokens), &mut vec![0.0; ROWS * tokens]));
        }
    }
}
