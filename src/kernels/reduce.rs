//! Sums and maxima of a slice, in lanes that the compiler can keep in vector registers.

const LANES: usize = 16;

/// The sum, in 16 partial sums.
pub fn sum(values: &[f32]) -> f32 {
    sum_of(values, |v| v)
}

/// The sum of the squares.
pub fn sum_of_squares(values: &[f32]) -> f32 {
    sum_of(values, |v| v * v)
}

/// The sum of `function` of each value.
#[inline(always)]
pub fn sum_of(values: &[f32], function: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [0f32; LANES];
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += function(*value);
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0] + rest.iter().map(|v| function(*v)).sum::<f32>()
}

/// The largest value; -inf of none.
pub fn max(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = if *value > *lane { *value } else { *lane };
        }
    }
    lanes.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
mod tests {
    #[test]
    fn lanes_and_rest_are_counted() {
        let values: Vec<f32> = (1..=37).map(|v| v as f32).collect();
        assert_eq!(super::sum(&values), 703.0);
        assert_eq!(super::sum_of_squares(&values[..3]), 14.0);
        assert_eq!(super::max(&values), 37.0);
        assert_eq!(super::max(&[]), f32::NEG_INFINITY);
    }
}
