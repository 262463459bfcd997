//! Division of layers and of LM-head rows into packages.

use std::ops::Range;

use crate::error::ConvertError;
use anec_base::Result;
use anec_manifest::{HeadSplit, Manifest};

/// Ranges that a manifest lists.
pub(super) fn explicit_ranges(ranges: &[[usize; 2]], layers: usize) -> Result<Vec<Range<usize>>, ConvertError> {
    let end = ranges.last().map_or(0, |[_, end]| *end);
    if end != layers {
        return Err(ConvertError::LayersDontTile { end, layers });
    }
    Ok(ranges.iter().map(|[first, end]| *first..*end).collect())
}

/// Divides layers into the fewest ranges under the limit, and among those the most equal ones; a range also ends after
/// each layer for which `ends` returns true.
pub(super) fn layer_ranges(
    sizes: &[u64],
    limit: u64,
    limit_mb: f64,
    ends: impl Fn(usize) -> bool,
) -> Result<Vec<Range<usize>>, ConvertError> {
    if let Some((layer, bytes)) = sizes.iter().enumerate().find(|(_, bytes)| **bytes > limit) {
        return Err(ConvertError::LayerTooLarge { layer, megabytes: *bytes as f64 / 1e6, limit: limit_mb });
    }
    let mut ranges = Vec::new();
    let mut first = 0;
    for end in (1..=sizes.len()).filter(|end| *end == sizes.len() || ends(end - 1)) {
        let own = equal_ranges(&sizes[first..end], limit);
        ranges.extend(own.into_iter().map(|range| first + range.start..first + range.end));
        first = end;
    }
    Ok(ranges)
}

/// Divides layers without forced ends. Each size is at most the limit.
fn equal_ranges(sizes: &[u64], limit: u64) -> Vec<Range<usize>> {
    let count = fill(sizes, limit).len();
    // the smallest limit that still gives this number of ranges: between the largest layer and the given limit
    let (mut low, mut high) = (sizes.iter().copied().max().unwrap_or(0), limit);
    while low < high {
        let middle = low + (high - low) / 2;
        if fill(sizes, middle).len() <= count {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    fill(sizes, low)
}

/// Fills ranges up to the limit, one after another. Each size is at most the limit.
fn fill(sizes: &[u64], limit: u64) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let (mut first, mut sum) = (0, 0u64);
    for (layer, bytes) in sizes.iter().enumerate() {
        if sum > 0 && sum.saturating_add(*bytes) > limit {
            ranges.push(first..layer);
            (first, sum) = (layer, 0);
        }
        sum = sum.saturating_add(*bytes);
    }
    if first < sizes.len() {
        ranges.push(first..sizes.len());
    }
    ranges
}

/// Rows of each piece of an LM head; `bytes` returns the size of a package with a range of rows.
pub(super) fn head_pieces(
    manifest: &Manifest,
    rows: u64,
    limit: u64,
    bytes: impl Fn(Range<u64>) -> Result<u64>,
) -> Result<Vec<Range<u64>>> {
    let count = match manifest.lm_head.split {
        HeadSplit::Pieces(pieces) if pieces > rows => {
            return Err(ConvertError::TooManyPieces { pieces, rows }.into());
        }
        HeadSplit::Pieces(pieces) => return Ok(divide(rows, pieces)),
        HeadSplit::None => 1,
        HeadSplit::Auto => {
            let fits = |pieces: u64| -> Result<bool> {
                let largest = divide(rows, pieces).into_iter().map(|r| r.end - r.start).max().unwrap_or(rows);
                Ok(bytes(0..largest)? <= limit)
            };
            let smallest = bytes(0..rows.min(1))?;
            if smallest > limit {
                let limit = manifest.shards.max_mb;
                return Err(ConvertError::HeadTooLarge { megabytes: smallest as f64 / 1e6, limit }.into());
            }
            // sizes grow with rows, so the first estimate is close and only rounding has to be corrected
            let mut pieces = bytes(0..rows)?.div_ceil(limit).clamp(1, rows);
            while pieces < rows && !fits(pieces)? {
                pieces += 1;
            }
            pieces
        }
    };
    Ok(divide(rows, count))
}

/// Divides rows into `count` equal pieces, a multiple of 64 rows (or 16, or 1) if that leaves rows for the last, which
/// may be smaller.
fn divide(rows: u64, count: u64) -> Vec<Range<u64>> {
    let count = count.clamp(1, rows.max(1));
    let size = [64, 16, 1]
        .into_iter()
        .map(|multiple| rows.div_ceil(count).next_multiple_of(multiple))
        .find(|size| size * (count - 1) < rows);
    match size {
        Some(size) => (0..count).map(|i| i * size..rows.min((i + 1) * size)).collect(),
        // equal sizes leave nothing for the last (7 rows in 5 pieces): the first ones get one row more
        None => {
            let (small, larger) = (rows / count, rows % count);
            let start = |i: u64| i * small + i.min(larger);
            (0..count).map(|i| start(i)..start(i + 1)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_tile_the_layers_and_stay_under_the_limit(
            sizes in proptest::collection::vec(1u64..1000, 1..60), extra in 0u64..5000
        ) {
            let limit = sizes.iter().max().unwrap() + extra;
            let ranges = layer_ranges(&sizes, limit, 1.0, |_| false).unwrap();
            prop_assert_eq!(ranges.len(), fill(&sizes, limit).len());
            let mut next = 0;
            for range in ranges {
                prop_assert_eq!(range.start, next);
                prop_assert!(range.end > range.start);
                prop_assert!(sizes[range.clone()].iter().sum::<u64>() <= limit);
                next = range.end;
            }
            prop_assert_eq!(next, sizes.len());
        }

        #[test]
        fn pieces_tile_the_rows(rows in 1u64..300_000, count in 1u64..40) {
            let pieces = divide(rows, count);
            prop_assert_eq!(pieces.len() as u64, count.min(rows));
            let mut next = 0;
            let first = pieces[0].end;
            for piece in pieces {
                prop_assert_eq!(piece.start, next);
                prop_assert!(piece.end > piece.start && piece.end - piece.start <= first);
                next = piece.end;
            }
            prop_assert_eq!(next, rows);
        }
    }

    #[test]
    fn ranges_are_as_equal_as_their_number_allows() {
        let ranges = |sizes: &[u64], limit: u64| layer_ranges(sizes, limit, limit as f64, |_| false).unwrap();
        assert_eq!(ranges(&[10; 7], 60), [0..4, 4..7]);
        assert_eq!(ranges(&[10; 7], 70), vec![0..7; 1]);
        assert_eq!(ranges(&[30, 10, 10, 30], 45), [0..2, 2..4]);
    }

    #[test]
    fn ranges_end_after_layers_without_their_experts() {
        // two dense layers, then experts in every layer except the fifth
        let ranges = layer_ranges(&[10; 6], 60, 60.0, |layer| layer > 1 && layer != 4).unwrap();
        assert_eq!(ranges, [0..3, 3..4, 4..6]);
    }

    #[test]
    fn a_layer_over_the_limit_is_named() {
        let error = layer_ranges(&[10, 70, 10], 60, 60.0, |_| false).unwrap_err();
        assert!(matches!(error, ConvertError::LayerTooLarge { layer: 1, .. }));
    }

    #[test]
    fn pieces_have_round_sizes_and_a_remainder() {
        assert_eq!(divide(200_064, 4), [0..50_048, 50_048..100_096, 100_096..150_144, 150_144..200_064]);
        assert_eq!(divide(2048, 2), [0..1024, 1024..2048]);
        assert_eq!(divide(7, 5), [0..2, 2..4, 4..5, 5..6, 6..7]);
        assert_eq!(divide(5, 9).len(), 5);
    }
}
