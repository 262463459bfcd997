//! Comparison of every expression with plain loops over vectors.

use proptest::prelude::*;

use super::*;
use anec_base::Diagnostic;

/// Rows 0, 1, 2 … with columns .0, .1 …: row 3, column 2 is 3.02.
fn numbered(name: &str, rows: u64, columns: u64) -> SourceWeight {
    let values = (0..rows * columns).map(|i| (i / columns) as f32 + (i % columns) as f32 / 100.0).collect();
    SourceWeight::from_values(name, &[rows, columns], values).unwrap()
}

fn all(weight: &SourceWeight) -> Vec<f32> {
    let mut values = vec![f32::NAN; weight.elements() as usize];
    weight.read(0, &mut values).unwrap();
    values
}

/// Returns the row of `numbered` that each row came from.
fn row_numbers(weight: &SourceWeight) -> Vec<u64> {
    all(weight).chunks(weight.columns() as usize).map(|row| row[0] as u64).collect()
}

#[test]
fn rows_of_a_fused_projection_are_split_and_joined() {
    let fused = numbered("qkv", 12, 4);
    let (q, k, v) = (fused.slice(0..6).unwrap(), fused.slice(6..9).unwrap(), fused.slice(9..12).unwrap());
    assert_eq!(k.shape(), [3, 4]);
    assert_eq!(row_numbers(&k), [6, 7, 8]);
    let joined = SourceWeight::concatenate(vec![v, q.clone(), k]).unwrap();
    assert_eq!(joined.shape(), [12, 4]);
    assert_eq!(row_numbers(&joined), [9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    let mut two_rows = [0.0; 8];
    joined.read_rows(2, &mut two_rows).unwrap();
    assert_eq!(two_rows[..5], [11.0, 11.01, 11.02, 11.03, 0.0]);
    assert_eq!(row_numbers(&q.slice(2..5).unwrap().slice(1..3).unwrap()), [3, 4]);
}

#[test]
fn a_vector_is_split_and_joined_by_elements() {
    let bias = SourceWeight::from_values("b", &[6], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
    let tail = bias.slice(4..6).unwrap();
    assert_eq!((tail.shape(), all(&tail)), (&[2][..], vec![4.0, 5.0]));
    let zeros = SourceWeight::from_values("zeros", &[2], vec![0.0; 2]).unwrap();
    let joined = SourceWeight::concatenate(vec![tail, zeros, bias.slice(0..1).unwrap()]).unwrap();
    assert_eq!(all(&joined), [4.0, 5.0, 0.0, 0.0, 0.0]);
    assert_eq!((bias.rows(), bias.columns()), (1, 6));
}

#[test]
fn columns_have_a_bias_and_a_scale_of_their_own() {
    let vector = |name: &str, values: [f32; 3]| SourceWeight::from_values(name, &[3], values.to_vec()).unwrap();
    let (bias, scale) = (vector("b", [0.5, 0.0, -1.0]), vector("s", [2.0, 1.0, -4.0]));
    let numbers = numbered("w", 4, 3);
    let scaled = numbers.add_to_rows(&bias).unwrap().multiply_rows(&scale).unwrap();
    let expected: Vec<f32> = (0..4)
        .flat_map(|row| [(row as f32 + 0.5) * 2.0, row as f32 + 0.01, (row as f32 + 0.02 - 1.0) * -4.0])
        .collect();
    assert_eq!(all(&scaled), expected);
    // from the middle of a row, and through a slice
    let mut middle = [0.0; 5];
    scaled.read(4, &mut middle).unwrap();
    assert_eq!(middle[..], expected[4..9]);
    assert_eq!(all(&scaled.slice(2..4).unwrap()), expected[6..]);
    assert_ne!(numbers.add_to_rows(&bias).unwrap().key(), numbers.multiply_rows(&bias).unwrap().key());
    assert_ne!(numbers.add_to_rows(&bias).unwrap().key(), numbers.add_to_rows(&scale).unwrap().key());
    assert!(numbered("w", 3, 4).add_to_rows(&bias).is_err());
}

#[test]
fn llama_cpps_neighbouring_rotary_pairs_become_halves() {
    // llama.cpp's converter views a head's rows as [2, half] and stores them as [half, 2].
    let original = numbered("q", 16, 3);
    let interleaved = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15];
    let stored = original.reorder(RowOrder::Explicit(interleaved.into())).unwrap();
    let back = stored.reorder(RowOrder::InterleavedToHalves { head_dim: 8, rotary_dim: 8 }).unwrap();
    assert_eq!(all(&back), all(&original));
    let partial = original.reorder(RowOrder::InterleavedToHalves { head_dim: 8, rotary_dim: 4 }).unwrap();
    assert_eq!(row_numbers(&partial)[..8], [0, 2, 1, 3, 4, 5, 6, 7]);
    let bias = SourceWeight::from_values("b", &[4], vec![0.0, 1.0, 2.0, 3.0]).unwrap();
    let bias = bias.reorder(RowOrder::InterleavedToHalves { head_dim: 4, rotary_dim: 4 }).unwrap();
    assert_eq!(all(&bias), [0.0, 2.0, 1.0, 3.0]);
}

#[test]
fn rows_can_be_left_out_and_repeated() {
    let weight = numbered("w", 5, 2).reorder(RowOrder::Explicit([4, 4, 0].into())).unwrap();
    assert_eq!((weight.shape(), row_numbers(&weight)), (&[3, 2][..], vec![4, 4, 0]));
    assert!(numbered("w", 5, 2).reorder(RowOrder::Explicit([5].into())).is_err());
}

#[test]
fn rows_that_alternate_are_put_apart() {
    let order = || RowOrder::Transposed([3, 2]);
    let apart = numbered("w", 6, 4).reorder(order()).unwrap();
    assert_eq!(row_numbers(&apart), [0, 2, 4, 1, 3, 5]);
    assert_eq!(row_numbers(&apart.reorder(RowOrder::Transposed([2, 3])).unwrap()), [0, 1, 2, 3, 4, 5]);
    assert_ne!(apart.key(), numbered("w", 6, 4).reorder(RowOrder::Transposed([2, 3])).unwrap().key());
    let message = numbered("w", 5, 4).reorder(order()).unwrap_err().to_string();
    assert!(message.contains("5 rows aren't a matrix of 3 x 2"), "{message}");
}

#[test]
fn columns_are_cut_from_every_row() {
    let middle = numbered("w", 3, 5).columns_range(1..3).unwrap();
    assert_eq!(all(&middle), [0.01, 0.02, 1.01, 1.02, 2.01, 2.02]);
    // reshaping keeps the elements
    assert_eq!(all(&middle.reshape(&[6]).unwrap()), all(&middle));
    assert_eq!(all(&middle.reshape(&[6]).unwrap().slice(2..4).unwrap()), [1.01, 1.02]);
    let vector = SourceWeight::from_values("v", &[4], vec![0.0, 1.0, 2.0, 3.0]).unwrap();
    assert_eq!(all(&vector.columns_range(2..4).unwrap()), [2.0, 3.0]);
}

#[test]
fn each_matrix_of_a_stack_is_transposed() {
    let stack = numbered("experts", 4, 3).reshape(&[2, 2, 3]).unwrap().transpose().unwrap();
    assert_eq!(stack.shape(), [2, 3, 2]);
    assert_eq!(all(&stack), [0.0, 1.0, 0.01, 1.01, 0.02, 1.02, 2.0, 3.0, 2.01, 3.01, 2.02, 3.02]);
    let mut part = [0.0; 5];
    stack.read(4, &mut part).unwrap();
    assert_eq!(part, [0.02, 1.02, 2.0, 3.0, 2.01]);
    assert!(SourceWeight::from_values("v", &[2], vec![0.0; 2]).unwrap().transpose().is_err());
}

#[test]
fn elements_are_scaled_shifted_and_raised() {
    let weight = SourceWeight::from_values("w", &[2], vec![0.5, -1.0]).unwrap();
    assert_eq!(all(&weight.add(1.0).scale(2.0)), [3.0, 0.0]);
    assert_eq!(all(&weight.exp().scale(-1.0)), [-(0.5f32.exp()), -(-1.0f32).exp()]);
}

#[test]
fn equal_keys_mean_equal_elements_and_neutral_steps_leave_no_trace() {
    let tensor = |name| SourceWeight::from(SourceTensor::random(name, &[8, 4], 1, 0.0, 1.0).unwrap());
    let a = tensor("a");
    assert_eq!(a.key(), "\"a\"");
    assert_eq!(a.scale(1.0).add(0.0).slice(0..8).unwrap().reshape(&[4, 8]).unwrap().key(), a.key());
    assert_eq!(a.slice(1..7).unwrap().slice(1..3).unwrap().key(), a.slice(2..4).unwrap().key());
    let order = || RowOrder::InterleavedToHalves { head_dim: 4, rotary_dim: 4 };
    let different = [
        a.clone(),
        tensor("b"),
        a.slice(0..4).unwrap(),
        a.slice(4..8).unwrap(),
        a.columns_range(0..2).unwrap(),
        a.columns_range(2..4).unwrap(),
        a.scale(2.0),
        a.scale(-2.0),
        a.add(2.0),
        a.exp(),
        a.reorder(order()).unwrap(),
        a.reshape(&[4, 8]).unwrap().reorder(order()).unwrap(),
        a.reorder(RowOrder::Explicit([1, 0].into())).unwrap(),
        a.reorder(RowOrder::Explicit([0, 1].into())).unwrap(),
        SourceWeight::concatenate(vec![a.clone(), tensor("b")]).unwrap(),
        SourceWeight::concatenate(vec![tensor("b"), a.clone()]).unwrap(),
        numbered("n", 2, 2),
        numbered("n", 2, 3),
    ];
    let keys: std::collections::HashSet<String> = different.iter().map(SourceWeight::key).collect();
    assert_eq!(keys.len(), different.len(), "{keys:#?}");
    let joined = SourceWeight::concatenate(vec![a.clone(), tensor("b"), a.scale(2.0)]).unwrap();
    assert_eq!(joined.names(), ["a", "b"]);
}

#[test]
fn mismatched_shapes_are_refused_with_the_weight_named() {
    let weight = SourceWeight::from(SourceTensor::random("w", &[4, 6], 1, 0.0, 1.0).unwrap());
    let mut row_and_a_half = [0.0; 9];
    let mut two_rows = [0.0; 12];
    for (error, expected) in [
        (weight.read_rows(0, &mut row_and_a_half).unwrap_err(), "a read of 9 elements isn't whole rows of 6"),
        (weight.read_rows(3, &mut two_rows).unwrap_err(), "a read of 2 rows from row 3, but it has 4"),
        (weight.read_rows(u64::MAX, &mut two_rows).unwrap_err(), "but it has 4"),
        (weight.read(23, &mut two_rows).unwrap_err(), "but it has 24"),
        (weight.slice(2..5).unwrap_err(), "entries 2..5 are asked for, but there are 4"),
        (weight.columns_range(0..7).unwrap_err(), "columns 0..7 are asked for, but there are 6"),
        (weight.reshape(&[5, 5]).unwrap_err(), "shape [4, 6] can't become [5, 5]"),
        (
            weight.reorder(RowOrder::InterleavedToHalves { head_dim: 3, rotary_dim: 2 }).unwrap_err(),
            "4 rows aren't whole heads of 3",
        ),
        (
            weight.reorder(RowOrder::InterleavedToHalves { head_dim: 4, rotary_dim: 3 }).unwrap_err(),
            "3 rotated dimensions aren't pairs",
        ),
        (
            SourceWeight::concatenate(vec![numbered("a", 2, 3), weight.clone()]).unwrap_err(),
            "shape [4, 6] can't follow [2, 3]",
        ),
    ] {
        let message = error.to_string();
        assert!(message.contains("weight `\"w\"") && message.contains(expected), "{message}");
    }
    assert!(SourceWeight::concatenate(vec![]).is_err());
    assert!(SourceWeight::from_values("v", &[0, 1 << 40, 1 << 40], vec![]).is_err());
    assert!(SourceWeight::from_values("v", &[3], vec![0.0]).is_err());
}

#[test]
fn a_number_that_is_not_finite_is_traced_to_its_tensor() {
    let mut values = vec![1.0; 40];
    values[7 * 4 + 2] = f32::NAN;
    let bad = SourceWeight::from_values("bad", &[10, 4], values).unwrap();
    let weight = SourceWeight::concatenate(vec![numbered("good", 3, 4), bad.slice(6..10).unwrap()]).unwrap().scale(2.0);
    let mut rows = vec![0.0; 12];
    weight.read_rows(2, &mut rows).unwrap();
    let error = weight.check_finite(2, &rows).unwrap_err();
    let expected = "tensor `bad`, row 7, column 2: the weight is NaN, expected a finite number";
    assert_eq!(error.to_string(), expected);
    assert_eq!(error.fault().exit_code(), 4);
    assert!(weight.check_finite(0, &rows[..4]).is_ok());
    let mut turned = vec![0.0; 28];
    weight.transpose().unwrap().read_rows(0, &mut turned).unwrap();
    assert_eq!(weight.transpose().unwrap().check_finite(0, &turned).unwrap_err().to_string(), expected);
}

/// Two-by-two `Q`, not symmetric.
struct Two;

const TWO: [[f32; 2]; 2] = [[1.0, 2.0], [3.0, 5.0]];

impl SquareMatrix for Two {
    fn size(&self) -> u64 {
        2
    }

    fn name(&self) -> String {
        "two".into()
    }

    fn multiply_rows(&self, rows: &mut [f32]) -> Result<()> {
        for row in rows.chunks_exact_mut(2) {
            let [a, b] = [row[0], row[1]];
            row.copy_from_slice(&[0, 1].map(|j| a * TWO[0][j] + b * TWO[1][j]));
        }
        Ok(())
    }

    fn multiply_columns(&self, matrix: &mut [f32], columns: usize) -> Result<()> {
        for column in 0..columns {
            let [a, b] = [matrix[column], matrix[columns + column]];
            (0..2).for_each(|j| matrix[j * columns + column] = a * TWO[0][j] + b * TWO[1][j]);
        }
        Ok(())
    }
}

#[test]
fn a_square_matrix_multiplies_rows_and_columns() {
    let two: std::sync::Arc<dyn SquareMatrix> = std::sync::Arc::new(Two);
    let values =
        |values: &[f32]| SourceWeight::from_values("w", &[values.len() as u64 / 2, 2], values.to_vec()).unwrap();
    let rows = values(&[1.0, 0.0, 0.0, 1.0, 1.0, -1.0]).times(&two).unwrap();
    assert_eq!(all(&rows), [1.0, 2.0, 3.0, 5.0, -2.0, -3.0]);
    // from the middle of a row to the middle of another
    let mut middle = [0.0; 3];
    rows.read(1, &mut middle).unwrap();
    assert_eq!(middle, [2.0, 3.0, 5.0]);
    assert_eq!(all(&rows.slice(2..3).unwrap()), [-2.0, -3.0]);
    // a bias is a row
    assert_eq!(all(&SourceWeight::from_values("b", &[2], vec![1.0, 1.0]).unwrap().times(&two).unwrap()), [4.0, 7.0]);
    let wide = SourceWeight::from_values("w", &[2, 3], vec![1.0, 0.0, 2.0, 0.0, 1.0, -1.0]).unwrap();
    let columns = wide.transposed_times(&two).unwrap();
    assert_eq!(all(&columns), [1.0, 3.0, -1.0, 2.0, 5.0, -1.0]);
    columns.release(0..6);
    assert_eq!(all(&columns.columns_range(1..2).unwrap()), [3.0, 5.0]);
    let scaled = columns.multiply_rows(&SourceWeight::from_values("s", &[3], vec![1.0, 2.0, 3.0]).unwrap()).unwrap();
    assert_eq!(all(&scaled.columns_range(1..3).unwrap()), [6.0, -3.0, 10.0, -3.0]);
    // rows stay rotated in any order and scale; parts of rows don't
    let halves = SourceWeight::from_values("s", &[3], vec![0.5; 3]).unwrap();
    let reordered = rows.scale_rows(&halves).unwrap().reorder(RowOrder::Explicit([2, 0].into()));
    assert!(rows.is_rotated() && rows.slice(1..3).unwrap().is_rotated() && reordered.is_ok_and(|w| w.is_rotated()));
    assert!(SourceWeight::concatenate(vec![rows.clone(), rows.clone()]).unwrap().is_rotated());
    assert!(!SourceWeight::concatenate(vec![rows.clone(), values(&[0.0; 6])]).unwrap().is_rotated());
    assert!(!columns.is_rotated() && !wide.is_rotated() && !rows.columns_range(1..2).unwrap().is_rotated());
    assert!(wide.times(&two).is_err() && values(&[0.0; 6]).transposed_times(&two).is_err());
    let keys = [rows.key(), columns.key(), wide.key(), wide.transpose().unwrap().times(&two).unwrap().key()];
    assert_eq!(keys.iter().collect::<std::collections::HashSet<_>>().len(), 4, "{keys:?}");
}

#[test]
fn non_finite_products_are_traced_to_their_source() {
    let two: std::sync::Arc<dyn SquareMatrix> = std::sync::Arc::new(Two);
    let bad = SourceWeight::from_values("bad", &[3, 2], vec![1.0, 1.0, 1.0, f32::INFINITY, 1.0, 1.0]).unwrap();
    let rows = bad.times(&two).unwrap();
    let error = rows.check_finite(0, &all(&rows)).unwrap_err().to_string();
    assert!(error.contains("tensor `bad`, row 1, column 1"), "{error}");
    let columns = bad.transpose().unwrap().transposed_times(&two).unwrap();
    let error = columns.check_finite(0, &all(&columns)).unwrap_err().to_string();
    assert!(error.contains("tensor `bad`, row 1, column 1"), "{error}");
}

#[test]
fn rows_have_a_scale_of_their_own_that_may_be_computed() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let scale = SourceWeight::computed("scale", 4, move || {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(vec![1.0, 10.0, 100.0, 0.0])
    });
    let scaled = numbered("w", 4, 3).scale_rows(&scale).unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 0, "nothing is computed before it is read");
    let mut middle = [0.0; 5];
    scaled.read(5, &mut middle).unwrap();
    assert_eq!(middle, [1.02 * 10.0, 200.0, 2.01 * 100.0, 2.02 * 100.0, 0.0]);
    assert_eq!(all(&scaled).len(), 12);
    assert_eq!(all(&scale.slice(1..3).unwrap().reciprocal()), [0.1, 0.01]);
    assert_eq!(count.load(Ordering::Relaxed), 1);
    assert!(numbered("w", 3, 3).scale_rows(&scale).is_err());
    assert_ne!(scaled.key(), numbered("w", 4, 3).key());
    let short = SourceWeight::computed("short", 4, || Ok(vec![1.0]));
    assert!(short.read(0, &mut [0.0; 4]).unwrap_err().to_string().contains("expected 4"));
}

/// Step of building an expression; numbers are fitted to the shape.
#[derive(Clone, Debug)]
enum Step {
    Slice(u64, u64),
    Columns(u64, u64),
    Explicit(Vec<u64>),
    Repeat(u64),
    Scale(f32),
    Flatten,
    Transpose,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (any::<u64>(), any::<u64>()).prop_map(|(a, b)| Step::Slice(a, b)),
        (any::<u64>(), any::<u64>()).prop_map(|(a, b)| Step::Columns(a, b)),
        prop::collection::vec(any::<u64>(), 1..5).prop_map(Step::Explicit),
        (1u64..4).prop_map(Step::Repeat),
        (-4i8..4).prop_map(|factor| Step::Scale(factor.into())),
        Just(Step::Flatten),
        Just(Step::Transpose),
    ]
}

/// Applies a step to the weight and, by plain loops, to its elements as `[rows][columns]`.
fn apply(step: Step, weight: SourceWeight, rows: Vec<Vec<f32>>) -> (SourceWeight, Vec<Vec<f32>>) {
    let (height, width) = (rows.len() as u64, rows[0].len() as u64);
    let range = |a: u64, b: u64, n: u64| {
        let start = a % n;
        start..start + 1 + b % (n - start)
    };
    let plain = |range: &Range<u64>| range.start as usize..range.end as usize;
    match step {
        Step::Slice(a, b) => {
            let range = range(a, b, height);
            (weight.slice(range.clone()).unwrap(), rows[plain(&range)].to_vec())
        }
        Step::Columns(a, b) => {
            let range = range(a, b, width);
            let cut = rows.iter().map(|row| row[plain(&range)].to_vec()).collect();
            (weight.columns_range(range).unwrap(), cut)
        }
        Step::Explicit(order) => {
            let order: Vec<u64> = order.into_iter().map(|row| row % height).collect();
            let picked = order.iter().map(|&row| rows[row as usize].clone()).collect();
            (weight.reorder(RowOrder::Explicit(order.into())).unwrap(), picked)
        }
        Step::Repeat(times) => {
            let joined = SourceWeight::concatenate(vec![weight; times as usize]).unwrap();
            (joined, rows.iter().cycle().take(rows.len() * times as usize).cloned().collect())
        }
        Step::Scale(factor) => {
            let scaled = rows.into_iter().map(|row| row.into_iter().map(|value| value * factor).collect()).collect();
            (weight.scale(factor), scaled)
        }
        Step::Flatten => (weight.reshape(&[1, height * width]).unwrap(), vec![rows.into_iter().flatten().collect()]),
        Step::Transpose => {
            let columns = (0..width as usize).map(|column| rows.iter().map(|row| row[column]).collect());
            (weight.transpose().unwrap(), columns.collect())
        }
    }
}

proptest! {
    #[test]
    fn any_expression_reads_as_the_plain_loops_say_from_anywhere(
        height in 1u64..6,
        width in 1u64..6,
        steps in prop::collection::vec(any_step(), 0..6),
        cut in any::<(u64, u64)>(),
    ) {
        let mut weight = numbered("w", height, width);
        let mut rows: Vec<Vec<f32>> = all(&weight).chunks(width as usize).map(<[f32]>::to_vec).collect();
        for step in steps {
            (weight, rows) = apply(step, weight, rows);
        }
        let expected: Vec<f32> = rows.concat();
        prop_assert_eq!(weight.shape(), [rows.len() as u64, rows[0].len() as u64]);
        prop_assert_eq!(&all(&weight), &expected);
        let first = cut.0 % (expected.len() as u64 + 1);
        let length = cut.1 % (expected.len() as u64 - first + 1);
        let mut part = vec![f32::NAN; length as usize];
        weight.read(first, &mut part).unwrap();
        prop_assert_eq!(&part, &expected[first as usize..(first + length) as usize]);
    }
}

#[test]
fn rows_are_computed_when_they_are_read() {
    let (rows, table, gain) = (numbered("rows", 5, 2), numbered("table", 5, 3), numbered("gain", 1, 3));
    let parts = (rows.clone(), table.clone(), gain.clone());
    // each row: twice its first number, plus the table's row, times the gain
    let compute = move |first: u64, out: &mut [f32]| {
        let (rows, table, gain) = &parts;
        table.read_rows(first, out)?;
        let mut factors = [0.0; 3];
        gain.read(0, &mut factors)?;
        for (row, out) in (first..).zip(out.chunks_exact_mut(3)) {
            let mut own = [0.0; 2];
            rows.read_rows(row, &mut own)?;
            out.iter_mut().zip(factors).for_each(|(value, factor)| *value = (*value + 2.0 * own[0]) * factor);
        }
        Ok(())
    };
    let made = |name: &str| {
        SourceWeight::computed_rows(name, 3, vec![rows.clone(), table.clone()], vec![gain.clone()], compute.clone())
    };
    let whole = made("sum").unwrap();
    assert_eq!(whole.shape(), [5, 3]);
    let expected: Vec<f32> =
        (0..15).map(|i| (2.0 * (i / 3) as f32 + all(&table)[i]) * ((i % 3) as f32 / 100.0)).collect();
    assert_eq!(all(&whole), expected);
    // parts of rows, and rows of a part
    let mut part = [0.0; 7];
    whole.read(4, &mut part).unwrap();
    assert_eq!(part, expected[4..11]);
    assert_eq!(all(&whole.slice(2..4).unwrap()), expected[6..12]);
    assert_eq!(all(&whole.columns_range(1..2).unwrap()), [1, 4, 7, 10, 13].map(|i| expected[i]));
    assert_eq!(whole.key(), made("sum").unwrap().key());
    assert_ne!(whole.key(), made("another").unwrap().key());
    let error = SourceWeight::computed_rows("odd", 3, vec![rows.clone(), gain.clone()], Vec::new(), |_, _| Ok(()));
    assert!(error.unwrap_err().to_string().contains("odd"));
}
