//! Sums and maxima of a slice, in lanes that the compiler keeps in vector registers of the [calling
//! code](crate::dispatch); and of adjacent columns, each with the bits of the same reduction over a slice.

use crate::vectorized_fn;

const LANES: usize = 16;
/// Columns that are reduced at a time.
pub const COLUMNS: usize = 16;

/// Sum, in 16 partial sums.
#[inline(always)]
pub fn sum(values: &[f32]) -> f32 {
    sum_of(values, |v| v)
}

/// Sum of squares.
#[inline(always)]
pub fn sum_of_squares(values: &[f32]) -> f32 {
    sum_of(values, |v| v * v)
}

/// Sum of `function` of each value.
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

/// Largest value; -inf for an empty slice.
#[inline(always)]
pub fn max(values: &[f32]) -> f32 {
    max_of(values, |v| v)
}

/// Largest `function` of a value; -inf for an empty slice.
#[inline(always)]
pub fn max_of(values: &[f32], function: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            let value = function(*value);
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.into_iter().chain(rest.iter().map(|v| function(*v))).fold(f32::NEG_INFINITY, f32::max)
}

/// Lanes of each of [`COLUMNS`] columns of `depth` elements, over all whole groups of lanes: element `k` of column `c`
/// is `values[k * stride + c]`.
#[inline(always)]
fn lanes_of_columns(
    values: &[f32],
    stride: usize,
    depth: usize,
    start: f32,
    combine: impl Fn(f32, f32) -> f32,
) -> [[f32; COLUMNS]; LANES] {
    let mut lanes = [[start; COLUMNS]; LANES];
    for k in 0..depth - depth % LANES {
        let row = &values[k * stride..][..COLUMNS];
        for (lane, value) in lanes[k % LANES].iter_mut().zip(row) {
            *lane = combine(*lane, *value);
        }
    }
    lanes
}

/// [`sum_of`] of each column.
#[inline(always)]
fn sums(values: &[f32], stride: usize, depth: usize, function: impl Fn(f32) -> f32) -> [f32; COLUMNS] {
    let mut lanes = lanes_of_columns(values, stride, depth, 0.0, |sum, value| sum + function(value));
    let mut width = LANES / 2;
    while width > 0 {
        let (sums, others) = lanes.split_at_mut(width);
        for (sums, others) in sums.iter_mut().zip(others) {
            sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += *other);
        }
        width /= 2;
    }
    let rest = |c: usize| (depth - depth % LANES..depth).map(|k| function(values[k * stride + c])).sum::<f32>();
    std::array::from_fn(|c| lanes[0][c] + rest(c))
}

#[inline(always)]
fn sum_body(values: &[f32], stride: usize, depth: usize) -> [f32; COLUMNS] {
    sums(values, stride, depth, |v| v)
}

#[inline(always)]
fn squares_body(values: &[f32], stride: usize, depth: usize) -> [f32; COLUMNS] {
    sums(values, stride, depth, |v| v * v)
}

#[inline(always)]
fn max_body(values: &[f32], stride: usize, depth: usize) -> [f32; COLUMNS] {
    let larger = |most: f32, value: f32| if value > most { value } else { most };
    let lanes = lanes_of_columns(values, stride, depth, f32::NEG_INFINITY, larger);
    let mut most = [f32::NEG_INFINITY; COLUMNS];
    for lane in lanes {
        most.iter_mut().zip(lane).for_each(|(most, value)| *most = most.max(value));
    }
    for k in depth - depth % LANES..depth {
        most.iter_mut().zip(&values[k * stride..]).for_each(|(most, value)| *most = most.max(*value));
    }
    most
}

macro_rules! of_columns {
    ($($(#[$doc:meta])* $name:ident => $body:ident;)*) => {$(
        vectorized_fn! {
            $(#[$doc])*
            ///
            /// # Panics
            /// If `values` is too short: element `k` of column `c` is `values[k * stride + c]`.
            pub fn $name<'a>(values: &'a [f32], stride: usize, depth: usize) -> [f32; COLUMNS] = $body
        }
    )*};
}

of_columns! {
    /// [`sum`] of each of [`COLUMNS`] columns of `depth` elements.
    sum_of_columns => sum_body;
    /// [`sum_of_squares`] of each of [`COLUMNS`] columns of `depth` elements.
    sum_of_squares_of_columns => squares_body;
    /// [`max`] of each of [`COLUMNS`] columns of `depth` elements.
    max_of_columns => max_body;
}

#[cfg(test)]
mod tests {
    use super::super::dot::tests::noise;
    use super::*;

    #[test]
    fn columns_have_the_bits_of_their_slices() {
        for depth in [1, 15, 16, 37, 200] {
            for stride in [COLUMNS, COLUMNS + 5] {
                let mut values = noise(depth * stride, depth as u32);
                values.iter_mut().step_by(7).for_each(|v| *v *= 1000.0);
                if depth == 37 {
                    values[stride + 3] = f32::NAN;
                    values[36 * stride + 4] = f32::NAN;
                }
                let check = |columns: [f32; COLUMNS], slice: fn(&[f32]) -> f32| {
                    for (c, found) in columns.into_iter().enumerate() {
                        let column: Vec<f32> = (0..depth).map(|k| values[k * stride + c]).collect();
                        assert_eq!(found.to_bits(), slice(&column).to_bits(), "{depth} {stride} {c}");
                    }
                };
                check(sum_of_columns(&values, stride, depth), sum);
                check(sum_of_squares_of_columns(&values, stride, depth), sum_of_squares);
                check(max_of_columns(&values, stride, depth), max);
            }
        }
    }

    #[test]
    fn lanes_and_rest_are_counted() {
        let values: Vec<f32> = (1..=37).map(|v| v as f32).collect();
        assert_eq!(super::sum(&values), 703.0);
        assert_eq!(super::sum_of_squares(&values[..3]), 14.0);
        assert_eq!(super::max(&values), 37.0);
        assert_eq!(super::max(&[]), f32::NEG_INFINITY);
    }
}
