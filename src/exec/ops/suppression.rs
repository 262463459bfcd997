//! Selection of boxes that overlap little.

use std::sync::Arc;

use super::{Resolved, Row, computing};
use crate::kernel::{Call, Input, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! { "non_maximum_suppression" => resolve };

/// Non-maximum suppression of boxes (center and size).
struct Suppression {
    boxes: Input,
    scores: Input,
    overlap: f32,
    /// Smallest score; the older form has one, and counts the boxes.
    threshold: Option<f32>,
    most: usize,
    per_class: bool,
}

fn resolve(op: &mut Resolver<'_>) -> Resolved {
    let most = op.integer("max_boxes")?;
    Ok(Arc::new(Suppression {
        boxes: op.input("boxes")?,
        scores: op.input("scores")?,
        overlap: op.float("iou_threshold")?,
        threshold: if op.has("score_threshold") { Some(op.float("score_threshold")?) } else { None },
        most: usize::try_from(most)
            .ok()
            .filter(|most| *most < 1 << 24)
            .ok_or_else(|| format!("`max_boxes` is {most}"))?,
        per_class: op.flag("per_class_suppression")?,
    }))
}

/// Box with its best class.
struct Candidate {
    index: usize,
    score: f32,
    class: usize,
    /// Left, top, right, bottom.
    corners: [f32; 4],
}

/// Share of the union of two boxes that both cover.
fn overlap(a: [f32; 4], b: [f32; 4]) -> f32 {
    let area = |[left, top, right, bottom]: [f32; 4]| (right - left) * (bottom - top);
    let side = |low: usize, high: usize| (a[high].min(b[high]) - a[low].max(b[low])).max(0.0);
    let both = side(0, 2) * side(1, 3);
    let either = area(a) + area(b) - both;
    if both > 0.0 && either > 0.0 { both / either } else { 0.0 }
}

impl Suppression {
    /// Indices of the selected boxes of a batch, by score. Without any above the threshold, the best one is selected.
    fn select(&self, mut candidates: Vec<Candidate>) -> Vec<usize> {
        candidates.sort_by(|a, b| b.score.total_cmp(&a.score));
        let best = candidates.first().map(|candidate| candidate.index);
        let mut kept: Vec<Candidate> = Vec::new();
        for candidate in candidates {
            if kept.len() == self.most {
                break;
            }
            let near = |other: &Candidate| {
                let alike = !self.per_class || other.class == candidate.class;
                alike && overlap(other.corners, candidate.corners) > self.overlap
            };
            if self.threshold.is_none_or(|threshold| candidate.score >= threshold) && !kept.iter().any(near) {
                kept.push(candidate);
            }
        }
        match best {
            Some(best) if kept.is_empty() && self.most > 0 => vec![best],
            _ => kept.into_iter().map(|candidate| candidate.index).collect(),
        }
    }
}

impl Kernel for Suppression {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let (of_boxes, of_scores) = (&call.tensor(self.boxes)?.shape, &call.tensor(self.scores)?.shape);
        // the older form has a row for each box, the newer one a column
        let old = self.threshold.is_some();
        let sizes = match (&of_boxes[..], &of_scores[..]) {
            ([batch, count, 4], [other, all, classes]) if old && other == batch && all == count => {
                Some((*batch, *count, *classes))
            }
            ([batch, 4, count], [other, classes, all]) if !old && other == batch && all == count => {
                Some((*batch, *count, *classes))
            }
            _ => None,
        };
        let Some((batch, count, classes)) = sizes.filter(|(_, _, classes)| *classes > 0) else {
            return Err(format!("`boxes` {of_boxes:?} and `scores` {of_scores:?} don't fit"));
        };
        let (boxes, scores) = (call.floats(self.boxes)?, call.floats(self.scores)?);
        let at = |of: usize, box_index: usize, i: usize, batch: usize| match old {
            true => (batch * count + box_index) * of + i,
            false => (batch * of + i) * count + box_index,
        };
        let selected: Vec<Vec<usize>> = (0..batch)
            .map(|image| {
                let candidate = |index: usize| {
                    let of_class = |class: usize| scores[at(classes, index, class, image)];
                    let class =
                        (1..classes).fold(0, |best, class| if of_class(class) > of_class(best) { class } else { best });
                    let [x, y, width, height] = [0, 1, 2, 3].map(|i| boxes[at(4, index, i, image)]);
                    let corners = [x - width / 2.0, y - height / 2.0, x + width / 2.0, y + height / 2.0];
                    Candidate { index, score: of_class(class), class, corners }
                };
                self.select((0..count).map(candidate).collect())
            })
            .collect();
        let [chosen, rated] = [(boxes, 4), (scores, classes)].map(|(values, of)| {
            let shape = if old { [batch, self.most, of] } else { [batch, of, self.most] };
            pool.written(&shape, |out: &mut [f32]| {
                out.fill(0.0);
                for (image, selected) in selected.iter().enumerate() {
                    for (place, index) in selected.iter().enumerate() {
                        for i in 0..of {
                            let to = match old {
                                true => (image * self.most + place) * of + i,
                                false => (image * of + i) * self.most + place,
                            };
                            out[to] = values[at(of, *index, i, image)];
                        }
                    }
                }
            })
        });
        call.push(chosen)?;
        call.push(rated)?;
        let result = pool.make(&[batch, self.most], |out: &mut Vec<i32>| {
            for selected in &selected {
                out.extend(selected.iter().map(|index| *index as i32));
                out.extend(std::iter::repeat_n(-1, self.most - selected.len()));
            }
        });
        call.push(result)?;
        if old {
            let counts: Vec<i32> = selected.iter().map(|selected| selected.len() as i32).collect();
            let result = pool.copied(&[batch], &counts);
            call.push(result)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{NamedValues, assert_close, b, f, i, results};
    use crate::tensor::Tensor;
    use anec_mil::DataType;

    /// Three boxes, of which the first two overlap by 0.8.
    fn select(most: i32, score: f32, per_class: bool) -> Result<Vec<Tensor>, String> {
        let given: NamedValues<'_> = vec![
            ("boxes", f(&[1, 3, 4], &[5.0, 5.0, 10.0, 10.0, 5.5, 5.0, 9.0, 9.0, 50.0, 5.0, 10.0, 10.0])),
            ("scores", f(&[1, 3, 2], &[0.1, 0.7, 0.9, 0.2, 0.3, 0.0])),
            ("iou_threshold", f(&[], &[0.5])),
            ("score_threshold", f(&[], &[score])),
            ("max_boxes", i(&[], &[most])),
            ("per_class_suppression", b(&[], &[per_class])),
        ];
        let given = given.into_iter().map(|(name, value)| (name, vec![value])).collect();
        results("non_maximum_suppression", given, DataType::Fp32)
    }

    #[test]
    fn overlapping_boxes_are_left_out() {
        let found = select(3, 0.0, false).unwrap();
        assert_eq!(found[2].integers().unwrap(), [1, 2, -1]);
        assert_eq!(found[3].integers().unwrap(), [2]);
        assert_close(&found[1], &[1, 3, 2], &[0.9, 0.2, 0.3, 0.0, 0.0, 0.0]);
        assert_eq!(select(3, 0.0, true).unwrap()[2].integers().unwrap(), [1, 0, 2]);
        assert_eq!(select(3, 0.5, true).unwrap()[2].integers().unwrap(), [1, 0, -1]);
        // the best box stays, even if its score is too low
        assert_eq!(select(2, 2.0, false).unwrap()[2].integers().unwrap(), [1, -1]);
        assert_eq!(select(1, 0.0, true).unwrap()[3].integers().unwrap(), [1]);
        assert_eq!(select(0, 0.0, true).unwrap()[3].integers().unwrap(), [0]);
        assert!(select(-1, 0.0, true).unwrap_err().contains("`max_boxes` is -1"));
    }

    #[test]
    fn newer_boxes_are_columns() {
        let given = vec![
            ("boxes", vec![f(&[1, 4, 2], &[5.0, 50.0, 5.0, 5.0, 10.0, 10.0, 10.0, 10.0])]),
            ("scores", vec![f(&[1, 1, 2], &[0.1, 0.7])]),
            ("iou_threshold", vec![f(&[], &[0.5])]),
            ("max_boxes", vec![i(&[], &[2])]),
        ];
        let found = results("non_maximum_suppression", given, DataType::Fp32).unwrap();
        assert_close(&found[0], &[1, 4, 2], &[50.0, 5.0, 5.0, 5.0, 10.0, 10.0, 10.0, 10.0]);
        assert_eq!((found.len(), found[2].integers().unwrap()), (3, &[1, 0][..]));
    }
}
