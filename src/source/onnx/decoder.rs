//! The decoder that a graph computes, found by following its values from the logits back to the embedding.
//!
//! What a constant is for follows from where the graph uses it, not from its name, which differs from exporter to
//! exporter. Every operation on the way must be understood, or the graph is refused: nothing of its maths gets lost.

use super::attention::Attention;
use super::model::Node;
use super::network::{Constant, Network};
use super::projection::Projection;
use super::rope::RopeTable;
use crate::source::dtype::SourceDtype;
use crate::source::error::{Result, SourceError};
use crate::source::weight::Weight;

/// Layers that are still followed.
const MOST_LAYERS: usize = 4096;

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

/// Where query-key norms sit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// On each head, before the rotation.
    PerHead,
    /// On each head, after the rotation.
    PerHeadRotated,
    /// Over all heads at once.
    WholeWidth,
}

/// Where the norms of a layer sit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// `x + f(norm(x))`
    Pre,
    /// `x + norm(f(x))`
    Post,
    /// `x + norm(f(norm(x)))`
    Both,
}

/// Activation of the gate in a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + exp(-x))`
    Silu,
    /// GELU by its approximation with tanh.
    GeluTanh,
    /// GELU by the error function.
    Gelu,
}

/// What a graph says about its decoder, beside the weights.
#[derive(Clone, Debug)]
pub struct Decoder {
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Rows of the embedding.
    pub vocab_size: u64,
    /// The LM head is the embedding.
    pub tied: bool,
    /// Epsilon of all norms.
    pub epsilon: f64,
    /// Multiplied to the embeddings.
    pub embedding_multiplier: f64,
    /// Multiplied to what a block adds to the residual stream.
    pub residual_multiplier: f64,
    /// Multiplied to the logits.
    pub logits_multiplier: f64,
    /// Place of the norms.
    pub norms: NormPlacement,
    /// Biases on query, key and value projections.
    pub qkv_bias: bool,
    /// Biases on attention's output projections.
    pub output_bias: bool,
    /// Biases on the feed-forward projections.
    pub mlp_bias: bool,
    /// The layers, which differ in these only.
    pub layers: Vec<Layer>,
    /// The rotary tables that layers use. A table for long texts follows its own for short ones.
    pub ropes: Vec<Rope>,
}

/// What a graph says about a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Query heads.
    pub heads: u64,
    /// Key-value heads.
    pub key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Multiplied to the scores.
    pub scale: f64,
    /// Tokens that it sees, if not all.
    pub window: Option<u64>,
    /// Which of the rotary embeddings it uses, if any.
    pub rope: Option<usize>,
    /// Query-key norms.
    pub qk_norm: Option<QkNorm>,
    /// Width of the feed-forward network.
    pub intermediate_size: u64,
    /// Activation of its gate.
    pub activation: Activation,
}

/// A rotary embedding.
#[derive(Clone, Debug)]
pub struct Rope {
    /// The table, of short texts where there is another.
    pub table: RopeTable,
    /// The table of texts longer than so many tokens.
    pub long: Option<(u64, RopeTable)>,
}

/// Weights by their names in transformers.
pub(super) type Weights = Vec<(String, Constant)>;

/// What a block of a layer is.
enum Block<'a> {
    Attention(Box<Attention<'a>>),
    Mlp { gate: Projection<'a>, up: Projection<'a>, activation: Activation },
}

/// What a block adds to the residual stream, from its end to its beginning.
struct Branch<'a> {
    multiplier: f64,
    after: Option<(Constant, f64)>,
    output: Projection<'a>,
    block: Block<'a>,
    before: Option<(Constant, f64)>,
    /// The residual stream that it begins with, which it is added to.
    from: Stream<'a>,
}

impl<'a> Branch<'a> {
    fn placement(&self) -> Option<NormPlacement> {
        match (&self.before, &self.after) {
            (Some(_), None) => Some(NormPlacement::Pre),
            (None, Some(_)) => Some(NormPlacement::Post),
            (Some(_), Some(_)) => Some(NormPlacement::Both),
            (None, None) => None,
        }
    }
}

impl Network {
    /// The residual stream that a value is.
    pub fn stream<'a>(&'a self, value: &'a str) -> Stream<'a> {
        let value = self.behind_casts(value);
        match self.producer(value) {
            Some((node, index, 3)) if node.is_contrib("SkipSimplifiedLayerNormalization") => Stream::Sum(index),
            _ => Stream::Value(value),
        }
    }

    /// The two values whose sum the residual stream is; nothing before the first layer.
    fn summands<'a>(&'a self, stream: Stream<'a>) -> Result<Option<[&'a str; 2]>> {
        let node = match stream {
            Stream::Sum(index) => &self.graph().nodes[index],
            Stream::Value(value) => match self.producer(value) {
                Some((node, ..)) if node.is("Add") => node,
                _ => return Ok(None),
            },
        };
        let summands = [node.input(0), node.input(1)];
        for value in summands {
            if self.constant(value)?.is_some() {
                return Err(self.refuse(node, "it adds a constant to the residual stream"));
            }
        }
        Ok(Some(summands))
    }

    fn refuse_stream(&self, stream: Stream<'_>, problem: &str) -> SourceError {
        match stream {
            Stream::Sum(index) => self.refuse(&self.graph().nodes[index], problem),
            Stream::Value(value) => self.refuse_value(value, problem),
        }
    }

    /// Follows the graph from its logits.
    ///
    /// # Errors
    /// When something on the way isn't understood: the error names the operation.
    pub fn decoder(&self, logits: &str, input_ids: &str) -> Result<(Decoder, Weights)> {
        if !self.graph().outputs.iter().any(|output| output == logits) {
            let problem = format!("the graph has no output `{logits}`; it has {}", self.graph().outputs.join(", "));
            return Err(SourceError::file(self.path(), problem).advise("give the model's decoder, with its LM head"));
        }
        let (value, logits_multiplier) = self.behind_factors(logits)?;
        let Some(head) = self.projection(value)? else {
            return Err(
                self.refuse_value(value, "it isn't an LM head, or changes the logits in a way that isn't known")
            );
        };
        if head.bias.is_some() {
            return Err(self.refuse_value(value, "the LM head has a bias, which no known family has"));
        }
        let Some(final_norm) = self.norm(self.behind_last_token(head.input)?)? else {
            return Err(self.refuse_value(head.input, "before the LM head should be a norm"));
        };
        // what is no sum yet was multiplied for the norm
        let final_norm = match self.summands(final_norm.input)? {
            Some(_) => final_norm,
            None => self.unscaled(final_norm)?,
        };
        let mut stream = final_norm.input;
        let mut branches = Vec::new();
        while let Some(summands) = self.summands(stream)? {
            if branches.len() >= 2 * MOST_LAYERS {
                return Err(self.refuse_stream(stream, "it has more layers than any model"));
            }
            let branch = self.branch(stream, summands)?;
            stream = branch.from;
            branches.push(branch);
        }
        let Stream::Value(embedded) = stream else {
            return Err(self.refuse_stream(stream, "the residual stream has no beginning"));
        };
        let (lookup, embedding_multiplier) = self.behind_factors(embedded)?;
        let embedding = self.embedding(lookup, input_ids)?;
        self.assemble(head, final_norm, branches, embedding, [embedding_multiplier, logits_multiplier])
    }

    /// The value behind the choice of the last token, which makes other logits fewer but not different.
    fn behind_last_token<'a>(&'a self, value: &'a str) -> Result<&'a str> {
        let value = self.behind_casts(value);
        let Some((node, ..)) = self.producer(value).filter(|(node, ..)| node.is("Unsqueeze")) else { return Ok(value) };
        match self.producer(node.input(0)) {
            Some((gather, ..)) if gather.is("Gather") && gather.int("axis") == Some(1) => {
                match self.integers(gather.input(1))?.as_deref() {
                    Some([-1]) => Ok(gather.input(0)),
                    _ => Err(self.refuse(gather, "it chooses other tokens than the last")),
                }
            }
            _ => Ok(value),
        }
    }

    /// What is added to the residual stream: the one of two summands that is a projection at its end.
    fn branch<'a>(&'a self, stream: Stream<'a>, summands: [&'a str; 2]) -> Result<Branch<'a>> {
        let mut found = None;
        for (index, value) in summands.into_iter().enumerate() {
            let (value, multiplier) = self.behind_factors(value)?;
            let (after, end) = match self.norm(value)? {
                Some(norm) => match norm.input {
                    Stream::Value(input) => (Some((norm.weight, norm.epsilon)), input),
                    Stream::Sum(_) => continue,
                },
                None => (None, value),
            };
            if let Some(output) = self.projection(end)? {
                if found.is_some() {
                    return Err(self.refuse_stream(stream, "both summands are what a block gives"));
                }
                found = Some((summands[1 - index], multiplier, after, output));
            }
        }
        let Some((residual, multiplier, after, output)) = found else {
            return Err(self.refuse_stream(stream, "neither summand is what a block gives"));
        };
        let inner = self.behind_casts(output.input);
        let Some((node, ..)) = self.producer(inner) else {
            return Err(self.refuse_value(inner, "it should be what attention or a feed-forward network gives"));
        };
        let (block, input) = if node.is_contrib("GroupQueryAttention") {
            let attention = self.attention(node)?;
            let [query, key, value] = attention.projections.each_ref().map(|part| self.behind_casts(part.input));
            if query != key || query != value {
                return Err(self.refuse(node, "queries, keys and values come from different values"));
            }
            (Block::Attention(Box::new(attention)), query)
        } else if node.is("Mul") {
            let (gate, up, activation) = self.gated(node)?;
            let (input, other) = (self.behind_casts(gate.input), self.behind_casts(up.input));
            if input != other {
                return Err(self.refuse(node, "gate and up projection come from different values"));
            }
            (Block::Mlp { gate, up, activation }, input)
        } else if node.is_contrib("MultiHeadAttention") {
            let problem = "its mask is computed in the graph, which isn't read; the model builder writes GroupQueryAttention \
                           for int4 and fp32 on CPUs, and for fp16 on GPUs";
            return Err(self.refuse(node, problem));
        } else {
            return Err(self.refuse(node, "it is neither GroupQueryAttention nor a gated feed-forward network"));
        };
        let residual = self.stream(residual);
        let (before, from) = match self.norm(input)? {
            Some(norm) => {
                // the stream itself may be a product, of the embedding
                let norm = if norm.input == residual { norm } else { self.unscaled(norm)? };
                (Some((norm.weight, norm.epsilon)), norm.input)
            }
            None => (None, self.stream(input)),
        };
        if from != residual {
            return Err(self.refuse(node, "it isn't added to the residual stream that it was computed from"));
        }
        Ok(Branch { multiplier, after, output, block, before, from })
    }

    /// The projections of a gated feed-forward network, from its product on.
    fn gated<'a>(&'a self, node: &'a Node) -> Result<(Projection<'a>, Projection<'a>, Activation)> {
        for (gate, up) in [(0, 1), (1, 0)] {
            let Some((gate, activation)) = self.activated(node.input(gate))? else { continue };
            let (gate, up) = (self.projection(gate)?, self.projection(node.input(up))?);
            if let (Some(gate), Some(up)) = (gate, up) {
                return Ok((gate, up, activation));
            }
        }
        Err(self.refuse(node, "it isn't the product of an activated gate and another projection"))
    }

    /// The value that an activation takes.
    fn activated<'a>(&'a self, value: &'a str) -> Result<Option<(&'a str, Activation)>> {
        let Some((node, ..)) = self.producer(self.behind_casts(value)) else { return Ok(None) };
        let input = node.input(0);
        let ours = node.domain == "com.microsoft";
        Ok(match node.op.as_str() {
            // x sigmoid(x)
            "Mul" if node.domain.is_empty() => {
                let sigmoid = |index: usize| {
                    let (of, ..) = self.producer(self.behind_casts(node.input(index)))?;
                    of.is("Sigmoid").then(|| self.behind_casts(of.input(0)))
                };
                let place = [(0, 1), (1, 0)]
                    .into_iter()
                    .find(|&(x, other)| sigmoid(other) == Some(self.behind_casts(node.input(x))));
                place.map(|(x, _)| (node.input(x), Activation::Silu))
            }
            "Swish" if node.domain.is_empty() && node.float("alpha").unwrap_or(1.0) == 1.0 => {
                Some((input, Activation::Silu))
            }
            // its factor is 1.702 unless it is given
            "QuickGelu" if ours && node.float("alpha") == Some(1.0) => Some((input, Activation::Silu)),
            "Gelu" if ours => Some((input, Activation::Gelu)),
            "Gelu" if node.domain.is_empty() => match node.text("approximate").unwrap_or("none") {
                "none" => Some((input, Activation::Gelu)),
                "tanh" => Some((input, Activation::GeluTanh)),
                _ => None,
            },
            "FastGelu" if ours && node.input(1).is_empty() => Some((input, Activation::GeluTanh)),
            _ => None,
        })
    }

    /// The embedding that a value was looked up in.
    fn embedding(&self, value: &str, input_ids: &str) -> Result<Constant> {
        let Some((node, ..)) = self.producer(value) else {
            return Err(self.refuse_value(value, "it should be looked up in the embedding"));
        };
        let ids = |node: &Node| {
            let value = self.behind_casts(node.input(1));
            if value == input_ids && self.is_input(value) {
                return Ok(());
            }
            Err(self.refuse(node, format!("it looks up `{value}`, expected the graph's input `{input_ids}`")))
        };
        if node.is("Slice") {
            // codes of a row are padded to whole blocks
            let embedding = self.embedding(node.input(0), input_ids)?;
            let [start, end, axis] = [1, 2, 3].map(|index| self.integers(node.input(index)));
            let columns = embedding.weight.columns();
            let end = match (start?.as_deref(), end?.as_deref(), axis?.as_deref()) {
                (Some([0]), Some([end]), Some([-1 | 2])) if node.input(4).is_empty() => u64::try_from(*end).ok(),
                _ => None,
            };
            let end = end.ok_or_else(|| self.refuse(node, "it doesn't take the first columns of the embedding"))?;
            return Ok(Constant { weight: embedding.weight.columns_range(0..end.min(columns))?, ..embedding });
        }
        if node.is("Gather") && node.int("axis").unwrap_or(0) == 0 {
            ids(node)?;
            return match self.constant(node.input(0))? {
                Some(embedding) if embedding.weight.shape().len() == 2 => Ok(embedding),
                _ => Err(self.refuse(node, "the embedding isn't a constant matrix")),
            };
        }
        if node.is_contrib("GatherBlockQuantized") {
            ids(node)?;
            let axis = node.int("quantize_axis").unwrap_or(1);
            if node.int("gather_axis").unwrap_or(0) != 0 || !matches!(axis, 1 | -1) {
                return Err(self.refuse(node, "its blocks don't lie within rows"));
            }
            return self.quantized_embedding(node);
        }
        Err(self.refuse(node, "it should be looked up in the embedding"))
    }

    fn quantized_embedding(&self, node: &Node) -> Result<Constant> {
        let wrong = |problem: &str| self.refuse(node, problem);
        let shape = self.shape_of(node.input(0))?.ok_or_else(|| wrong("its codes aren't a stored constant"))?;
        let bits = u64::try_from(node.int("bits").unwrap_or(4)).ok().filter(|bits| matches!(bits, 2 | 4 | 8));
        let (&[rows, last], Some(bits)) = (&shape[..], bits) else {
            return Err(wrong("its codes aren't a matrix of 2, 4 or 8 bits"));
        };
        let (name, stored) = self.stored(self.behind_reshapes(node.input(0))).ok_or_else(|| wrong("no codes"))?;
        let in_bytes = self.tensor(name, stored, None)?.dtype() == SourceDtype::U8;
        // a row in bytes has several codes in each
        let columns =
            if in_bytes { last.checked_mul(8 / bits).ok_or_else(|| wrong("its rows are too long"))? } else { last };
        self.blocks(node, [node.input(0), node.input(2), node.input(3)], rows, columns)
    }

    /// Puts together what was found.
    fn assemble<'a>(
        &'a self,
        head: Projection<'a>,
        final_norm: super::norm::Norm<'a>,
        branches: Vec<Branch<'a>>,
        embedding: Constant,
        [embedding_multiplier, logits_multiplier]: [f64; 2],
    ) -> Result<(Decoder, Weights)> {
        let whole = |problem: &str| SourceError::file(self.path(), problem);
        let &[vocab_size, hidden_size] = embedding.weight.shape() else {
            return Err(whole("the embedding isn't a matrix"));
        };
        let mut decoder = Decoder {
            hidden_size,
            vocab_size,
            tied: head.weight.origin == embedding.origin && head.weight.weight.shape() == embedding.weight.shape(),
            epsilon: final_norm.epsilon,
            embedding_multiplier,
            residual_multiplier: branches.first().map_or(1.0, |branch| branch.multiplier),
            logits_multiplier,
            norms: branches.first().and_then(Branch::placement).unwrap_or(NormPlacement::Pre),
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            layers: Vec::new(),
            ropes: Vec::new(),
        };
        let mut weights: Weights = vec![("model.embed_tokens.weight".into(), embedding)];
        if !decoder.tied {
            weights.push(("lm_head.weight".into(), head.weight));
        }
        weights.push(("model.norm.weight".into(), final_norm.weight));
        if branches.is_empty() || branches.len() % 2 != 0 {
            return Err(whole("its blocks aren't pairs of attention and feed-forward network"));
        }
        let (before_mlp, after_attention) = match decoder.norms {
            NormPlacement::Both => ("pre_feedforward_layernorm", "post_attention_layernorm"),
            _ => ("post_attention_layernorm", "post_attention_layernorm"),
        };
        let mut epsilons = Vec::new();
        let mut rope_names: Vec<[&str; 2]> = Vec::new();
        let mut branches = branches.into_iter().rev();
        while let (Some(mixer), Some(feed_forward)) = (branches.next(), branches.next()) {
            let index = decoder.layers.len();
            let prefix = format!("model.layers.{index}.");
            for branch in [&mixer, &feed_forward] {
                if branch.placement() != Some(decoder.norms) || branch.multiplier != decoder.residual_multiplier {
                    return Err(self.refuse_stream(branch.from, "the blocks after it are unlike those of other layers"));
                }
                epsilons.extend([&branch.before, &branch.after].into_iter().flatten().map(|(_, epsilon)| *epsilon));
            }
            let (Block::Attention(attention), Block::Mlp { gate, up, activation }) = (mixer.block, feed_forward.block)
            else {
                return Err(self.refuse_stream(mixer.from, "attention doesn't alternate with feed-forward networks"));
            };
            let mut push = |name: &str, constant: Constant| weights.push((format!("{prefix}{name}"), constant));
            for (name, norm) in [
                ("input_layernorm", mixer.before),
                (after_attention, mixer.after),
                (before_mlp, feed_forward.before),
                ("post_feedforward_layernorm", feed_forward.after),
            ] {
                if let Some((weight, _)) = norm {
                    push(&format!("{name}.weight"), weight);
                }
            }
            let rope = match attention.rope {
                None => None,
                Some(names) => match rope_names.iter().position(|known| *known == names) {
                    Some(known) => Some(known),
                    None => {
                        decoder.ropes.push(self.rope(names)?);
                        rope_names.push(names);
                        Some(rope_names.len() - 1)
                    }
                },
            };
            decoder.layers.push(Layer {
                heads: attention.heads,
                key_value_heads: attention.key_value_heads,
                head_dim: attention.head_dim,
                scale: attention.scale,
                window: attention.window,
                rope,
                qk_norm: attention.qk_norm.as_ref().map(|(place, ..)| *place),
                intermediate_size: gate.rows(),
                activation,
            });
            if let Some((_, [q, k], epsilon)) = attention.qk_norm {
                push("self_attn.q_norm.weight", q);
                push("self_attn.k_norm.weight", k);
                epsilons.push(epsilon);
            }
            let [q, k, v] = attention.projections;
            let mut project = |name: &str, projection: Projection<'_>, has_bias: &mut bool| {
                push(&format!("{name}.weight"), projection.weight);
                if let Some(bias) = projection.bias {
                    *has_bias = true;
                    push(&format!("{name}.bias"), bias);
                }
            };
            project("self_attn.q_proj", q, &mut decoder.qkv_bias);
            project("self_attn.k_proj", k, &mut decoder.qkv_bias);
            project("self_attn.v_proj", v, &mut decoder.qkv_bias);
            project("self_attn.o_proj", mixer.output, &mut decoder.output_bias);
            project("mlp.gate_proj", gate, &mut decoder.mlp_bias);
            project("mlp.up_proj", up, &mut decoder.mlp_bias);
            project("mlp.down_proj", feed_forward.output, &mut decoder.mlp_bias);
        }
        // single precision is what graphs hold: the same number may come by different ways
        let same = |other: &&f64| (**other / decoder.epsilon - 1.0).abs() > 1e-6;
        if let Some(other) = epsilons.iter().find(same) {
            let problem = format!(
                "its norms have different epsilons, {:e} and {other:e}; known families have one for all",
                decoder.epsilon
            );
            return Err(whole(&problem));
        }
        add_missing_biases(&decoder, &mut weights)?;
        Ok((decoder, weights))
    }

    /// The rotary embedding of two tables. Where the graph chooses between two pairs of tables by the length of the text,
    /// both.
    fn rope(&self, names: [&str; 2]) -> Result<Rope> {
        let table = |network: &Network, [cos, sin]: [Option<Constant>; 2]| -> Result<RopeTable> {
            let (Some(cos), Some(sin)) = (cos, sin) else {
                return Err(network.refuse_value(names[0], "the rotary tables aren't constant"));
            };
            RopeTable::new(cos.weight, sin.weight, cos.dtype).map_err(|problem| network.refuse_value(names[0], problem))
        };
        let [cos, sin] = names.map(|name| self.constant(name));
        let (cos, sin) = (cos?, sin?);
        if cos.is_some() {
            return Ok(Rope { table: table(self, [cos, sin])?, long: None });
        }
        let choice = names.map(|name| self.producer(name));
        let [Some((node, index, 0)), Some((_, other, 1))] = choice else {
            return Err(self.refuse_value(names[0], "the rotary tables aren't constant"));
        };
        if !node.is("If") || index != other {
            return Err(self.refuse(node, "it makes rotary tables in a way that isn't understood"));
        }
        let longer_than = self.longer_than(node)?;
        let of = |branch: &str| table(self, self.constants_of_branch(node, branch)?);
        Ok(Rope { table: of("else_branch")?, long: Some((longer_than, of("then_branch")?)) })
    }

    /// The length of text beyond which the first branch of an `If` is taken.
    fn longer_than(&self, node: &Node) -> Result<u64> {
        let unknown = || self.refuse(node, "it doesn't compare the length of the text with a number");
        let (greater, ..) = self.producer(self.behind_casts(node.input(0))).ok_or_else(unknown)?;
        self.check_counts(node, greater.input(0))?;
        let limit = self.integers(greater.input(1))?.filter(|list| list.len() == 1).map(|list| list[0]);
        let limit = limit.and_then(|limit| u64::try_from(limit).ok()).ok_or_else(unknown)?;
        match greater.op.as_str() {
            "Greater" => Ok(limit),
            "GreaterOrEqual" => Ok(limit.saturating_sub(1)),
            _ => Err(unknown()),
        }
    }
}

/// Layers may leave out biases that are all zero: if one layer has some, all get them.
fn add_missing_biases(decoder: &Decoder, weights: &mut Weights) -> Result<()> {
    const PARTS: [(&str, &[&str]); 3] = [
        ("qkv", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("output", &["self_attn.o_proj"]),
        ("mlp", &["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
    ];
    let have: std::collections::HashMap<String, (u64, SourceDtype)> =
        weights.iter().map(|(name, constant)| (name.clone(), (constant.weight.shape()[0], constant.dtype))).collect();
    for (part, names) in PARTS {
        let needed = match part {
            "qkv" => decoder.qkv_bias,
            "output" => decoder.output_bias,
            _ => decoder.mlp_bias,
        };
        for index in (0..decoder.layers.len()).filter(|_| needed) {
            for name in names {
                let name = format!("model.layers.{index}.{name}");
                let (rows, _) = have[&format!("{name}.weight")];
                let bias = format!("{name}.bias");
                if !have.contains_key(&bias) {
                    let weight = Weight::from_values(&bias, &[rows], vec![0.0; rows as usize])?;
                    let dtype = SourceDtype::F32;
                    weights.push((bias.clone(), Constant { weight, dtype, bytes: 0, origin: bias }));
                }
            }
        }
    }
    Ok(())
}
