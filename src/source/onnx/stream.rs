//! What blocks of a decoder share: the residual stream, and the rotary embedding.

/// Names of a rotary embedding's cosines and sines, if there is one.
pub(super) type RopeUse<'a> = Option<[&'a str; 2]>;

/// The residual stream at one point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream<'a> {
    /// The sum that a norm with a skip connection makes: that node's place in the graph.
    Sum(usize),
    /// A value.
    Value(&'a str),
}
