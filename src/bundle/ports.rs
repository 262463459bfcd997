//! Meaning of the inputs and outputs of functions, so that a runtime needs no knowledge of the family.

use crate::StateRole;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Input or output tensor of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Port {
    /// Name in the package.
    pub name: String,
    /// Role of the tensor.
    #[serde(flatten)]
    pub role: PortRole,
    /// Shape: numbers, and `"T"` for the number of tokens of a call.
    pub shape: Vec<PortDim>,
}

/// Value of attention and band masks where a token may not attend. Not -inf, because fp16 hardware returns NaN for rows
/// of only -inf. Core AI takes -40000 instead.
pub const MASKED: f32 = -1e4;

/// One dimension of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum PortDim {
    /// Fixed size.
    Fixed(u64),
    /// Number of tokens of the call: `"T"`.
    Tokens(String),
}

/// Role of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum PortRole {
    /// Hidden states of the call's tokens, `[1, hidden, T, 1]` or `[1, hidden, 1, T]`.
    Hidden,
    /// In functions of the layer that drafts: hidden states of the tokens one position before those of the call, `[1,
    /// hidden, T, 1]` or `[1, hidden, 1, T]`. They are outputs of the model's last layer, or of this layer if the
    /// following token was drafted.
    PreviousHidden,
    /// Beside `previous_hidden`, `[1, 1, T, 1]` or `[1, 1, 1, T]`: 1 if the state is an output of the layer that
    /// drafts, 0 if of the model's last layer.
    PreviousDrafted,
    /// Router state accumulated by earlier layers, `[1, router_hidden_size, T, 1]` or `[1, router_hidden_size, 1, T]`:
    /// an output of one function, an input of the next.
    RouterState,
    /// Normalised input of a parallel layer's feed-forward network, `[1, hidden, T, 1]` or `[1, hidden, 1, T]`, if that
    /// network has its own function: an output of the layer's function, an input of the network's.
    FeedForwardInput,
    /// Token embeddings of the call, as they enter the first layer, `[1, hidden, T, 1]` or `[1, hidden, 1, T]`: an
    /// input of functions of later layers that make their per-layer embeddings of them.
    Embedding,
    /// Per-layer embeddings of the call's tokens for layers `first..end`, `[1, (end - first) * width, T, 1]` or `[1,
    /// (end - first) * width, 1, T]`: columns `first * width .. end * width` of the tokens' rows of the host tensor
    /// [`per_layer_embedding`](crate::HostFacts::per_layer_embedding).
    PerLayerInput {
        /// First layer.
        first: usize,
        /// One past the last layer.
        end: usize,
    },
    /// Rotated keys of the call's tokens, `[1, heads, T, head_dim]`, shared with layers of later functions: an output
    /// of the layer's function, an input of those.
    SharedKeys {
        /// Layer that computes them.
        layer: usize,
    },
    /// Values of the call's tokens, shared in the same way.
    SharedValues {
        /// Layer that computes them.
        layer: usize,
    },
    /// Input of the experts of the last layer before, `[1, hidden, T, 1]` or `[1, hidden, 1, T]`, or several such
    /// tensors concatenated: an output of the layer's function, an input of the experts' functions.
    ExpertInput,
    /// Weight of each of the layer's experts for each token, 0 for experts that aren't selected, `[1, experts, T, 1]`
    /// or `[1, experts, 1, T]`: an output of the layer's function, an input of the experts' functions.
    ExpertShares,
    /// Cosines of a rotary table: for each token the row of its position, from the host tensor of the table's variant
    /// for the text.
    RopeCos {
        /// Name in the bundle's `rope` list.
        table: String,
    },
    /// Sines of a rotary table, in the same form.
    RopeSin {
        /// Name in the bundle's `rope` list.
        table: String,
    },
    /// `[1, 1, T, S]`: 0 where a token may attend to a cache slot, -1e4 elsewhere. The token at position p is in slot p
    /// mod S; it sees the slots of positions `0..=p`, and with a window only the last `window` of them.
    AttentionMask {
        /// Tokens of the sliding window, including the token itself.
        #[serde(skip_serializing_if = "Option::is_none")]
        window: Option<u64>,
    },
    /// `[1, 1, T, T]`: 0 where two tokens of the call are at most `band` apart and both belong to the text, -1e4
    /// elsewhere. For bidirectional models without states.
    BandMask {
        /// Largest distance.
        band: u64,
        /// Whether the mask is `[1, heads, T, T]` and has the host's
        /// [`attention_bias`](crate::HostFacts::attention_bias) in place of 0.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        biased: bool,
    },
    /// `[1, 1, S, T]`: 1 where token t is written to slot s, its position mod S, else 0.
    KvWriteMask,
    /// `[1, 1 + levels, T, T]` of ones and zeros: which token i of the call (rows) comes after which token j (columns).
    /// Plane 0: j <= i. Plane 1 + n: i and j are in the same block of 2^(n + 1) tokens, j in its first half and i in
    /// its second.
    TokenOrder,
    /// int32 `[4]`: `0, 0, p, 0` for the position p of the call's first token: where its rows begin in caches `[1,
    /// heads, S, head_dim]`.
    SliceBegin,
    /// int32 `[4]`: `0, 0, p + T, 0`: where the call's rows end, padding included.
    SliceEnd,
    /// State stored by the host, in the shape of the port. An output is passed to the next call of the text. An input
    /// is the last output of the same `id` of any function, or zeros before there is one.
    State {
        /// Id of the state within a text, as [`StatePort::id`](crate::StatePort::id).
        id: String,
        /// Content.
        holds: StateRole,
    },
    /// Keys or values stored by the host, `[1, heads, S, head_dim]`, as a read-only input: the rows of earlier calls,
    /// zeros before there are any. The row of position p is in slot p mod S.
    Cache {
        /// Id of the cache within a text, as [`StatePort::id`](crate::StatePort::id).
        id: String,
        /// Content.
        holds: StateRole,
    },
    /// Output with the rows of the call's tokens for the cache of the same `id`, `[1, heads, T, head_dim]`. After the
    /// call the host copies each token's row to the slot of its position.
    CacheRows {
        /// Id of the cache.
        id: String,
        /// Content.
        holds: StateRole,
    },
    /// `[1, 1, T, S]`, beside caches stored by the host: 0 where a token may attend to the slot of a position before
    /// the call's first, -1e4 elsewhere. With a window, only the last `window` positions up to the token itself count.
    PastMask {
        /// Tokens of the sliding window, including the token itself.
        #[serde(skip_serializing_if = "Option::is_none")]
        window: Option<u64>,
    },
    /// `[1, 1, T, T]`, beside caches stored by the host: 0 where a token of the call (rows) may attend to itself or an
    /// earlier one (columns) within the window, -1e4 elsewhere.
    CallMask {
        /// Tokens of the sliding window, including the token itself.
        #[serde(skip_serializing_if = "Option::is_none")]
        window: Option<u64>,
    },
    /// Logits of a part of the vocabulary or labels, `[1, rows, T, 1]` or `[1, rows, 1, T]`.
    Logits,
    /// The `k` largest logits of the part in descending order, `[1, k, T, 1]` or `[1, k, 1, T]`; all of a part with
    /// fewer rows than `k`.
    TopValues,
    /// int32, in the shape of `top_values`: their rows, counted from the first row of the part. Of equal logits the
    /// first row comes first. Version 3 bundles of older converters name it `argmax` and have no `top_values`.
    #[serde(alias = "argmax")]
    TopIndices,
}

impl PortRole {
    /// Whether the value is a result of the LM head.
    pub fn is_of_head(&self) -> bool {
        matches!(self, PortRole::Logits | PortRole::TopValues | PortRole::TopIndices)
    }

    /// Whether the value is passed to functions of later layers beside the hidden states.
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
    /// Shape in a call of `tokens` tokens.
    pub fn shape_at(&self, tokens: u64) -> Vec<u64> {
        self.shape.iter().map(|extent| extent.at(tokens)).collect()
    }
}

impl PortDim {
    /// Size in a call of `tokens` tokens.
    pub fn at(&self, tokens: u64) -> u64 {
        match self {
            PortDim::Fixed(count) => *count,
            PortDim::Tokens(_) => tokens,
        }
    }
}
