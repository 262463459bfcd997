//! Types shared by a decoder's parts: the residual stream and the rotary embedding.

/// Names of the cosine and sine tables, if there are any.
pub(super) type RopeUse<'a> = Option<[&'a str; 2]>;

/// Residual stream at a point of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream<'a> {
    /// Sum computed by a norm with a skip connection: index of its node.
    Sum(usize),
    /// Name of a value.
    Value(&'a str),
}
