//! What the inputs and outputs of a function mean, so that a runtime needs no knowledge of the family.

use crate::StateRole;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An input or output tensor of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Port {
    /// Its name in the package.
    pub name: String,
    /// What it holds.
    #[serde(flatten)]
    pub role: PortRole,
    /// Its shape: numbers, and `"T"` for the number of tokens of a call.
    pub shape: Vec<PortDim>,
}

/// What attention and band masks hold where a token may not look. Not -inf: fp16 hardware makes NaN of a row that is all
/// -inf.
pub const MASKED: f32 = -1e4;

/// One dimension of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum PortDim {
    /// A number.
    Fixed(u64),
    /// The number of tokens of the call: `"T"`.
    Tokens(String),
}

/// What a port holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum PortRole {
    /// Hidden states of the tokens of the call, `[1, hidden, T, 1]` or `[1, hidden, 1, T]`.
    Hidden,
    /// In functions of the layer that drafts: the hidden states of the tokens before those of the call, one place back,
    /// `[1, hidden, T, 1]` or `[1, hidden, 1, T]`, as they leave the model's last layer; behind tokens that were drafted, as
    /// they leave this one.
    PreviousHidden,
    /// Beside it, `[1, 1, T, 1]` or `[1, 1, 1, T]`: 1 where that state left the layer that drafts, 0 where it left the
    /// model's last.
    PreviousDrafted,
    /// What the routers of the layers before have gathered about the tokens of the call,
    /// `[1, router_hidden_size, T, 1]` or `[1, router_hidden_size, 1, T]`: an output of one function, an input of the next.
    RouterState,
    /// What the feed-forward network of a parallel layer reads, normalised, `[1, hidden, T, 1]` or `[1, hidden, 1, T]`, where
    /// that network has a function of its own: an output of the layer's function, an input of the network's.
    FeedForwardInput,
    /// Vectors of the tokens of the call for layers `first..end`, `[1, (end - first) * width, T, 1]` or
    /// `[1, (end - first) * width, 1, T]`: columns `first * width .. end * width` of the tokens' rows of the host tensor
    /// [`per_layer_embedding`](crate::HostFacts::per_layer_embedding).
    PerLayerInput {
        /// First layer.
        first: usize,
        /// One past the last.
        end: usize,
    },
    /// Keys of the tokens of the call, rotated, `[1, heads, T, head_dim]`, which layers of other functions look at, too: an
    /// output of the layer's function, an input of those behind it.
    SharedKeys {
        /// The layer that they come from.
        layer: usize,
    },
    /// Values, likewise.
    SharedValues {
        /// The layer that they come from.
        layer: usize,
    },
    /// What the experts of the last layer before work on, `[1, hidden, T, 1]` or `[1, hidden, 1, T]`, or several such things
    /// side by side: an output of the layer's function, an input of those of its experts.
    ExpertInput,
    /// The share of each of the layer's experts in each token, 0 for those that it wasn't given,
    /// `[1, experts, T, 1]` or `[1, experts, 1, T]`: likewise.
    ExpertShares,
    /// Cosines of a rotary table, one row for each token: that of its position, of the host tensor that the table's variant
    /// for the text names.
    RopeCos {
        /// Which table of the bundle's `rope` list.
        table: String,
    },
    /// Sines, likewise.
    RopeSin {
        /// Which table of the bundle's `rope` list.
        table: String,
    },
    /// `[1, 1, T, S]`: 0 where a token may look at a cache slot, -1e4 where it may not. The token at position p has the
    /// slot p mod S; it sees the slots of positions `0..=p`, and with a window only the last `window` of them.
    AttentionMask {
        /// Tokens that a sliding window shows, the token itself included.
        #[serde(skip_serializing_if = "Option::is_none")]
        window: Option<u64>,
    },
    /// `[1, 1, T, T]`: 0 where two tokens of the call lie at most `band` apart and both belong to the text, -1e4 elsewhere:
    /// the text is looked at in both directions, and nothing is carried from call to call.
    BandMask {
        /// Largest distance.
        band: u64,
    },
    /// `[1, 1, S, T]`: 1 where token t is written to slot s, its position mod S, else 0.
    KvWriteMask,
    /// `[1, 1 + levels, T, T]` of ones and zeros: which token i of the call (rows) comes after which token j (columns).
    /// Plane 0: j <= i. Plane 1 + n: i and j lie in the same block of 2^(n + 1) tokens, j in its first half and i in its
    /// second.
    TokenOrder,
    /// int32 `[4]`: `0, 0, p, 0` for the position p of the call's first token: where its rows begin in caches
    /// `[1, heads, S, head_dim]`.
    SliceBegin,
    /// int32 `[4]`: `0, 0, p + T, 0`: where the call's rows end, those that fill it up included.
    SliceEnd,
    /// A state that the host keeps, in the shape of the port. As an output, what the next call of the text takes; as an
    /// input, what an output of the same `id` gave last, in whichever function, and zeros before there was one.
    State {
        /// Which state of a text it is, as with [`StatePort::id`](crate::StatePort::id).
        id: String,
        /// What it holds.
        holds: StateRole,
    },
    /// Keys or values that the host keeps, `[1, heads, S, head_dim]`, as an input that is only read: what the calls before
    /// left, zeros before there were any. The row of position p is in slot p mod S.
    Cache {
        /// Which cache of a text it is, as with [`StatePort::id`](crate::StatePort::id).
        id: String,
        /// What it holds.
        holds: StateRole,
    },
    /// As an output, the rows of the call's tokens for the cache of the same `id`, `[1, heads, T, head_dim]`: after the call
    /// the host puts the row of each token into the slot of its position.
    CacheRows {
        /// Which cache of a text.
        id: String,
        /// What it holds.
        holds: StateRole,
    },
    /// `[1, 1, T, S]`, beside caches that the host keeps: 0 where a token may look at the slot of a position before the
    /// call's first, -1e4 where it may not; with a window, the last `window` positions up to the token itself count.
    PastMask {
        /// Tokens that a sliding window shows, the token itself included.
        #[serde(skip_serializing_if = "Option::is_none")]
        window: Option<u64>,
    },
    /// `[1, 1, T, T]`, beside caches that the host keeps: 0 where a token of the call (rows) may look at another (columns),
    /// which is itself or one before it, within the window; -1e4 elsewhere.
    CallMask {
        /// Tokens that a sliding window shows, the token itself included.
        #[serde(skip_serializing_if = "Option::is_none")]
        window: Option<u64>,
    },
    /// Logits of a part of the vocabulary, or of a classifier's labels, `[1, rows, T, 1]` or `[1, rows, 1, T]`.
    Logits,
    /// Index of the largest logit within the part, `[1, 1, T, 1]` or `[1, 1, 1, T]`.
    Argmax,
}

impl PortRole {
    /// Whether it goes from a function to those of the layers behind it, beside the hidden states.
    pub fn is_carried(&self) -> bool {
        matches!(
            self,
            PortRole::RouterState
                | PortRole::FeedForwardInput
                | PortRole::SharedKeys { .. }
                | PortRole::SharedValues { .. }
        )
    }
}

impl Port {
    /// Its shape in a call of `tokens` tokens.
    pub fn shape_at(&self, tokens: u64) -> Vec<u64> {
        self.shape.iter().map(|extent| extent.at(tokens)).collect()
    }
}

impl PortDim {
    /// The number that it is in a call of `tokens` tokens.
    pub fn at(&self, tokens: u64) -> u64 {
        match self {
            PortDim::Fixed(count) => *count,
            PortDim::Tokens(_) => tokens,
        }
    }
}
