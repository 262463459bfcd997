//! States.

use super::Row;

pub(super) const ROWS: &[Row] = &[
    ("read_state", |l, op| Ok(vec![l.read_state(op)?])),
    ("write_state", |l, op| l.write_state(op).map(|()| Vec::new())),
];
