//! Attention scores of a token and a distance (disentangled attention, arXiv:2006.03654). Tokens i and j get, beside
//! `q_i k_j`,
//!
//! ```text
//! q_i K(i - j) + k_j Q(i - j)
//! ```
//!
//! where the tables K and Q have a row for each bucket of distances. A product with a table has a column for each
//! distance; row i of the result is row i of the product, shifted by i. For T tokens, a table has 2 T rows, for the
//! distances T, T - 1, … 1 - T. The first is of no pair of tokens, so that it may be dropped: `[T, 2 T]` becomes
//! `[2 T, T]` by a reshape, then `[2 T - 1, T]` without the first row, then `[T, 2 T - 1]`, whose first T columns are
//! those of the distances i - j (arXiv:1901.02860, appendix B). Where T varies, the columns are gathered by index
//! instead, because a reshape can't state `2 T`.

use std::ops::Range;

use super::Graph;
use anec_manifest::{AttentionForm, Role};
use anec_mil::{Constant, OpInput, ValueId};
use anec_source::{RowOrder, SourceWeight};
use serde::Serialize;

/// Buckets of distances: rows of a table.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DistanceBuckets {
    /// Number of buckets for each sign of the distance.
    pub span: u64,
    /// Distances from `farthest - 1` on have the last bucket; buckets grow from `span / 2` on, with the logarithm.
    /// `None` if each distance below `span` has a bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub farthest: Option<u64>,
}

impl DistanceBuckets {
    /// Row of a distance.
    fn row(self, distance: i64) -> u64 {
        let (span, middle) = (self.span as i64, self.span as i64 / 2);
        let bucket = match self.farthest {
            Some(farthest) if distance.abs() > middle => {
                let of_middle = |size: u64| (size as f64 / middle as f64).ln();
                let grown = of_middle(distance.unsigned_abs()) / of_middle(farthest - 1) * (middle - 1) as f64;
                distance.signum() * (grown.ceil() as i64 + middle)
            }
            _ => distance,
        };
        (bucket + span).clamp(0, 2 * span - 1) as u64
    }
}

/// Tables of a layer, each with rows `[2 span, heads * head_dim]`.
#[derive(Clone, Debug)]
pub struct DistanceTables {
    /// Keys of distances, for queries of tokens.
    pub keys: Option<SourceWeight>,
    /// Queries of distances, for keys of tokens.
    pub queries: Option<SourceWeight>,
    /// Buckets of distances.
    pub buckets: DistanceBuckets,
}

/// Inputs that all layers share.
#[derive(Clone, Copy, Debug)]
pub struct DistanceInputs {
    /// Number of tokens of the longest text.
    pub longest: u64,
    /// Column of `longest - (i - j)` for each pair of tokens; `None` if the number of tokens is fixed.
    columns: Option<ValueId>,
}

impl DistanceInputs {
    /// Creates the inputs of a function. The columns are counted along the tokens of `mask` `[1, 1, T, T]`; they are
    /// repeated for `heads` where these are in one batch.
    pub fn new(g: &mut Graph<'_>, mask: ValueId, heads: u64, longest: u64) -> Self {
        if g.tokens.fixed().is_some() {
            return DistanceInputs { longest, columns: None };
        }
        let columns = g.scope("distances", |g| {
            let column = g.ops.slice(mask, 3, 0..1);
            let zeros = g.ops.sub(column, column);
            let zeros = g.ops.op::<OpInput>(
                "cast",
                "zeros",
                [("x", zeros.into()), ("dtype", Constant::string("int32").into())],
            );
            let ones = g.ops.add(zeros, Constant::int32(1));
            let i = g.ops.op::<OpInput>("cumsum", "cumsum", [("x", ones.into()), ("axis", Constant::int32(2).into())]);
            let j = g.ops.transpose(i, &[0, 1, 3, 2]);
            let before = g.ops.sub(j, i);
            let columns = g.ops.add(before, Constant::int32(longest as i32));
            match g.form.attention {
                AttentionForm::PerHead => columns,
                AttentionForm::Grouped => g.ops.concat(&vec![columns; heads as usize], 1),
            }
        });
        DistanceInputs { longest, columns: Some(columns) }
    }
}

/// Scores `[1, heads, T, T]` by distance of `heads`, whose `query` and `key` are `[1, heads, T, head_dim]`, plus
/// `mask`.
pub fn with_distance_scores(
    g: &mut Graph<'_>,
    [query, key]: [ValueId; 2],
    heads: Range<u64>,
    tables: &DistanceTables,
    inputs: DistanceInputs,
    mask: ValueId,
) -> ValueId {
    let mut scores = mask;
    if let Some(table) = &tables.keys {
        let rows = |distance| tables.buckets.row(distance);
        let by_query = by_distance(g, query, "distance_keys", heads.clone(), table, rows, inputs);
        scores = g.ops.add(by_query, scores);
    }
    if let Some(table) = &tables.queries {
        // seen from the key, the distance has the other sign
        let rows = |distance: i64| tables.buckets.row(-distance);
        let by_key = by_distance(g, key, "distance_queries", heads, table, rows, inputs);
        let by_key = g.ops.transpose(by_key, &[0, 1, 3, 2]);
        scores = g.ops.add(by_key, scores);
    }
    scores
}

/// Products of token i and the row of the distance i - j, `[1, heads, T, T]`.
fn by_distance(
    g: &mut Graph<'_>,
    x: ValueId,
    name: &str,
    heads: Range<u64>,
    table: &SourceWeight,
    row: impl Fn(i64) -> u64,
    DistanceInputs { longest, columns }: DistanceInputs,
) -> ValueId {
    let count = heads.end - heads.start;
    let width = g.ops.ty(x).shape[3].fixed().unwrap_or(1);
    let all = table.columns() / width;
    let rows: Vec<u64> = (1 - longest as i64..=longest as i64).rev().map(row).collect();
    let order: Vec<u64> = heads.flat_map(|head| rows.iter().map(move |row| row * all + head)).collect();
    let ordered =
        table.reshape(&[table.rows() * all, width]).and_then(|rows| rows.reorder(RowOrder::Explicit(order.into())));
    let table = match ordered {
        Ok(table) => g.weight(name, Role::Table, &table, &[1, count, 2 * longest, width]),
        Err(error) => {
            g.refuse(error);
            return x;
        }
    };
    let Some(tokens) = g.tokens.fixed() else {
        let product = g.ops.matmul(x, table, false, true);
        let Some(columns) = columns else { return g.missing("distance scores", "their columns", x) };
        let arguments = [("x", product.into()), ("indices", columns.into()), ("axis", Constant::int32(3).into())];
        return g.ops.op::<OpInput>("gather_along_axis", "by_distance", arguments);
    };
    let table = if tokens < longest { g.ops.slice(table, 2, longest - tokens..longest + tokens) } else { table };
    let product = g.ops.matmul(x, table, false, true);
    let (count, size) = (count as i32, tokens as i32);
    let rows = g.ops.reshape(product, &[1, count, 2 * size, size]);
    let rows = g.ops.slice(rows, 2, 1..2 * tokens);
    let shifted = g.ops.reshape(rows, &[1, count, size, 2 * size - 1]);
    g.ops.slice(shifted, 3, 0..tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows as transformers computes them, for buckets of all sizes.
    #[test]
    fn distances_have_the_rows_of_their_buckets() {
        let published = DistanceBuckets { span: 256, farthest: Some(512) };
        let rows = [0, 1, 127, 128, 129, 130, 140, 200, 400, 510, 511, 512, 2000].map(|d| published.row(d));
        assert_eq!(rows, [256, 257, 383, 384, 385, 386, 393, 425, 489, 511, 511, 511, 511]);
        for distance in -600..600 {
            let (one, other) = (published.row(distance), published.row(-distance));
            assert!(one + other == 512 || one.max(other) == 511, "{distance}");
        }
        let each = DistanceBuckets { span: 8, farthest: None };
        assert_eq!([-9, -8, -3, 0, 3, 7, 8, 9].map(|d| each.row(d)), [0, 0, 5, 8, 11, 15, 15, 15]);
    }
}
