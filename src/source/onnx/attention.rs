//! Attention as graphs express it: ONNX Runtime's `GroupQueryAttention`.

use super::decoder::OnnxQkNorm;
use super::model::Node;
use super::network::{Constant, Network};
use super::norm::decimal;
use super::projection::Projection;
use super::stream::{RopeUse, Stream};
use crate::error::Result;

/// Maximum number of steps from attention back to a projection.
const LONGEST: usize = 8;

const NO_PROJECTION: &str = "what it attends to doesn't come from constant matrices";

/// Weight and epsilon of a norm.
type HeadNorm = (Constant, f64);
/// Query and key norms: placement, weights and epsilon.
type QkNorm = (OnnxQkNorm, [Constant; 2], f64);

/// Attention node with the projections before it.
#[derive(Clone, Debug)]
pub(super) struct Attention<'a> {
    /// Query, key and value projections.
    pub projections: [Projection<'a>; 3],
    /// Query heads.
    pub heads: u64,
    /// Key-value heads.
    pub key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Factor of the scores.
    pub scale: f64,
    /// Window in tokens; `None` for all tokens.
    pub window: Option<u64>,
    /// Names of the cosine and sine tables; `None` without rotation.
    pub rope: Option<[&'a str; 2]>,
    /// Query and key norms.
    pub qk_norm: Option<QkNorm>,
}

/// Norms and rotations between attention and a projection.
struct Head<'a> {
    projection: Projection<'a>,
    rope: RopeUse<'a>,
    norm: Option<HeadNorm>,
    rotated_first: bool,
}

impl Network {
    /// Parses an attention node.
    ///
    /// # Errors
    /// Returns an error if the node has unsupported properties.
    pub fn attention<'a>(&'a self, node: &'a Node) -> Result<Attention<'a>> {
        let refuse = |problem: String| self.refuse(node, problem);
        let count = |name: &str| {
            let found = node.int(name).and_then(|n| u64::try_from(n).ok()).filter(|n| (1..1 << 20).contains(n));
            found.ok_or_else(|| refuse(format!("its attribute {name} is {:?}", node.int(name))))
        };
        let (heads, key_value_heads) = (count("num_heads")?, count("kv_num_heads")?);
        if heads % key_value_heads != 0 {
            return Err(refuse(format!("its {heads} heads aren't whole groups of {key_value_heads}")));
        }
        self.check_plain(node)?;
        let window = match node.int("local_window_size").unwrap_or(-1) {
            -1 => None,
            size @ 1.. => Some(size as u64),
            size => return Err(refuse(format!("its local_window_size is {size}"))),
        };
        let [queries, keys, values] = self.heads(node, heads, key_value_heads)?;
        let head_dim = queries.projection.rows() / heads;
        let rows = [&queries, &keys, &values].map(|head| head.projection.rows());
        if head_dim == 0 || rows != [heads, key_value_heads, key_value_heads].map(|heads| heads * head_dim) {
            return Err(refuse(format!("{rows:?} rows aren't {heads} and twice {key_value_heads} heads of one width")));
        }
        if values.norm.is_some() || values.rope.is_some() {
            return Err(refuse("its values were normed or rotated".into()));
        }
        if queries.rope != keys.rope || queries.rotated_first != keys.rotated_first {
            return Err(refuse("its queries and keys aren't rotated alike".into()));
        }
        let rotates = node.int("do_rotary").unwrap_or(0) != 0;
        let rope = match (rotates, queries.rope) {
            (true, None) => Some([node.input(7), node.input(8)]),
            (false, rope) => rope,
            (true, Some(_)) => return Err(refuse("its queries and keys are rotated twice".into())),
        };
        let scale = match node.float("scale").unwrap_or(0.0) {
            0.0 => (head_dim as f64).powf(-0.5),
            scale => f64::from(scale),
        };
        let place = if queries.rotated_first { OnnxQkNorm::PerHeadRotated } else { OnnxQkNorm::PerHead };
        let qk_norm = match self.qk_norm(node, place, [queries.norm, keys.norm])? {
            Some((place, [q, k], epsilon)) => {
                let widths = [&q, &k].map(|of| of.weight.elements());
                let place = if widths == [head_dim; 2] {
                    place
                } else if widths == [heads * head_dim, key_value_heads * head_dim] && place == OnnxQkNorm::PerHead {
                    OnnxQkNorm::WholeWidth
                } else {
                    return Err(refuse(format!("the norms of its queries and keys have widths {widths:?}")));
                };
                Some((place, [q, k], epsilon))
            }
            None => None,
        };
        let projections = [queries.projection, keys.projection, values.projection];
        Ok(Attention { projections, heads, key_value_heads, head_dim, scale, window, rope, qk_norm })
    }

    /// Checks that a node has no unsupported properties.
    fn check_plain(&self, node: &Node) -> Result<()> {
        for (name, plain) in [("rotary_interleaved", 0), ("smooth_softmax", 0), ("causal", 1)] {
            // -1 is the default
            if node.int(name).is_some_and(|found| found != plain && !(found == -1 && name == "smooth_softmax")) {
                return Err(
                    self.refuse(node, format!("its attribute {name} is {:?}, expected {plain}", node.int(name)))
                );
            }
        }
        if let Some(cap) = node.float("softcap").filter(|cap| *cap != 0.0) {
            return Err(self.refuse(node, format!("it caps the scores (softcap {cap})")));
        }
        for name in ["k_quant_type", "v_quant_type"] {
            if node.text(name).is_some_and(|kind| kind != "NONE") {
                return Err(self.refuse(node, format!("it keeps quantized keys and values ({name})")));
            }
        }
        for (index, what) in
            [(10, "adds a bias to the scores"), (11, "has sinks"), (12, "scales keys"), (13, "scales values")]
        {
            if !node.input(index).is_empty() {
                return Err(self.refuse(node, format!("it {what} (input {index})")));
            }
        }
        for index in [3, 4].into_iter().filter(|&index| !node.input(index).is_empty()) {
            if !self.is_input(node.input(index)) {
                return Err(self.refuse(
                    node,
                    format!("the keys and values before it (input {index}) aren't an input of the graph"),
                ));
            }
        }
        for index in [5, 6] {
            self.check_counts(node, node.input(index))?;
        }
        Ok(())
    }

    /// Returns the paths of queries, keys and values, which may share a projection.
    fn heads<'a>(&'a self, node: &'a Node, heads: u64, key_value_heads: u64) -> Result<[Head<'a>; 3]> {
        let queries = self.head(node, node.input(0))?;
        if !node.input(1).is_empty() {
            return Ok([queries, self.head(node, node.input(1))?, self.head(node, node.input(2))?]);
        }
        if queries.norm.is_some() || queries.rope.is_some() {
            return Err(self.refuse(node, "queries, keys and values are one, but were normed or rotated"));
        }
        let rows = queries.projection.rows();
        let head_dim = rows / (heads + 2 * key_value_heads);
        let sizes = [heads, key_value_heads, key_value_heads].map(|heads| heads * head_dim);
        let Some(projections) = queries.projection.split(sizes)? else {
            let problem = format!("its input of {rows} isn't one of {heads} heads and twice {key_value_heads}");
            return Err(self.refuse(node, problem));
        };
        Ok(projections.map(|projection| Head { projection, rope: None, norm: None, rotated_first: false }))
    }

    /// Returns the query and key norms: those before the node, at `place`, or the node's own.
    fn qk_norm(&self, node: &Node, place: OnnxQkNorm, before: [Option<HeadNorm>; 2]) -> Result<Option<QkNorm>> {
        let own = [node.input(14), node.input(15)];
        match before {
            [None, None] if own == ["", ""] => Ok(None),
            [None, None] => {
                let weight = |value: &str| self.constant(value)?.ok_or_else(|| self.refuse(node, NO_PROJECTION));
                let epsilon = decimal(node.float("qk_norm_epsilon").unwrap_or(1e-6));
                Ok(Some((OnnxQkNorm::PerHead, [weight(own[0])?, weight(own[1])?], epsilon)))
            }
            [Some((q, epsilon)), Some((k, other))] if epsilon == other && own == ["", ""] => {
                Ok(Some((place, [q, k], epsilon)))
            }
            _ => Err(self.refuse(node, "its queries and keys aren't normed alike")),
        }
    }

    /// Returns the path from attention back to a projection: norms and rotations.
    fn head<'a>(&'a self, attention: &Node, value: &'a str) -> Result<Head<'a>> {
        let (mut rope, mut norm, mut rotated_first) = (None, None, false);
        let mut value = value;
        for _ in 0..LONGEST {
            if let Some(projection) = self.projection(value)? {
                return Ok(Head { projection, rope, norm, rotated_first });
            }
            value = self.behind_casts(value);
            let Some((node, ..)) = self.producer(value) else { break };
            if node.is("Reshape") {
                value = node.input(0);
            } else if node.is_contrib("RotaryEmbedding") {
                let factor = node.float("scale").unwrap_or(1.0);
                if rope.is_some() || node.int("interleaved").unwrap_or(0) != 0 || factor != 1.0 {
                    return Err(self.refuse(node, "it rotates a second time, neighbours, or with a factor"));
                }
                if !self.is_input(self.behind_counting(node.input(1))) {
                    return Err(self.refuse(node, "its positions aren't an input of the graph"));
                }
                (rope, rotated_first) = (Some([node.input(2), node.input(3)]), norm.is_some());
                value = node.input(0);
            } else if norm.is_none()
                && let Some(found) = self.norm(value)?.map(|norm| self.unscaled(norm)).transpose()?
                && let Stream::Value(input) = found.input
            {
                norm = Some((found.weight, found.epsilon));
                value = input;
            } else {
                return Err(self.refuse(node, "it changes queries, keys or values in a way that isn't understood"));
            }
        }
        Err(self.refuse(attention, NO_PROJECTION))
    }

    /// Checks that a value that counts tokens or positions depends on inputs and small integers only.
    pub fn check_counts(&self, node: &Node, value: &str) -> Result<()> {
        const UNDERSTOOD: [&str; 14] = [
            "Cast",
            "Identity",
            "Shape",
            "Gather",
            "ReduceSum",
            "Sub",
            "Add",
            "Squeeze",
            "Unsqueeze",
            "Reshape",
            "Constant",
            "Concat",
            "ReduceMax",
            "Slice",
        ];
        let mut left = vec![value];
        let mut seen = std::collections::HashSet::new();
        while let Some(value) = left.pop() {
            if value.is_empty() || self.is_input(value) || self.stored(value).is_some() || !seen.insert(value) {
                continue;
            }
            match self.producer(value) {
                Some((of, ..)) if UNDERSTOOD.iter().any(|op| of.is(op)) => {
                    left.extend(of.inputs.iter().map(String::as_str));
                }
                Some((of, ..)) => {
                    let problem =
                        format!("it takes part in counting tokens for `{}`, which isn't understood", node.name);
                    return Err(self.refuse(of, problem));
                }
                None => return Err(self.refuse(node, format!("its input `{value}` comes from nowhere"))),
            }
        }
        Ok(())
    }
}
