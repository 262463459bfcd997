//! Second moments of a projection's inputs: `Σ xᵀx` over all tokens.

use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::product;
use anec_kernels::pool;
use ndarray::{Array2, ArrayView2};

/// Channels whose products a thread computes at a time.
const PART: usize = 256;

/// Second moments in f32; only the lower triangle is kept.
pub struct SecondMoments {
    sums: Array2<f32>,
    tokens: u64,
}

impl SecondMoments {
    /// Returns moments without any tokens.
    pub fn new(channels: usize) -> Self {
        SecondMoments { sums: Array2::zeros((channels, channels)), tokens: 0 }
    }

    /// Adds tokens: columns of `[channels, tokens]`, row-major, the layout of a 1x1 convolution's input. Values of
    /// another number of channels are ignored.
    pub fn add(&mut self, values: &[f32]) {
        let channels = self.sums.nrows();
        let tokens = values.len() / channels.max(1);
        let Some(sums) = self.sums.as_slice_mut().filter(|_| channels > 0 && tokens * channels == values.len()) else {
            return;
        };
        let mut seen = vec![false; tokens];
        for row in values.chunks_exact(tokens.max(1)) {
            seen.iter_mut().zip(row).for_each(|(seen, value)| *seen |= *value != 0.0);
        }
        self.tokens += seen.into_iter().filter(|seen| *seen).count() as u64;
        let transposed = (values, MatrixLayout { row: 1, column: tokens });
        pool::for_each_chunk(sums, PART * channels, |part, sums| {
            let (first, rows) = (part * PART, sums.len() / channels);
            let end = first + rows;
            let mut products = vec![0.0; rows * end];
            let own = (&values[first * tokens..], MatrixLayout { row: tokens, column: 1 });
            product((rows, tokens, end), own, transposed, &mut products);
            for (channel, (sums, products)) in
                sums.chunks_exact_mut(channels).zip(products.chunks_exact(end)).enumerate()
            {
                sums[..=first + channel].iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
            }
        });
    }

    /// Sums, `[channels, channels]`; zero above the diagonal.
    pub fn sums(&self) -> ArrayView2<'_, f32> {
        self.sums.view()
    }

    /// Returns the sums, `[channels, channels]`; zero above the diagonal.
    pub fn into_sums(self) -> Array2<f32> {
        self.sums
    }

    /// Number of tokens with a non-zero value.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        4 * self.sums.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_sums_over_tokens() {
        let mut moments = SecondMoments::new(3);
        // two tokens, then one more; channels are rows
        moments.add(&[1.0, 2.0, 0.5, 0.0, -1.0, 3.0]);
        moments.add(&[2.0, 1.0, 0.0]);
        let tokens = [[1.0, 0.5, -1.0], [2.0, 0.0, 3.0], [2.0, 1.0, 0.0]];
        for i in 0..3 {
            for j in 0..=i {
                let expected: f32 = tokens.iter().map(|x| x[i] * x[j]).sum();
                assert_eq!(moments.sums()[[i, j]], expected, "{i} {j}");
            }
        }
        moments.add(&[0.0, 0.0, 0.0]);
        assert_eq!(moments.tokens(), 3, "a token of zeros is none");
        // values of another number of channels
        let before = moments.sums().to_owned();
        moments.add(&[9.0, 9.0]);
        assert_eq!(moments.sums(), before);
        assert_eq!(moments.bytes(), 36);
    }
}
