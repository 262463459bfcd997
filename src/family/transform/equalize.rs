//! Rescaling of channels between two projections (cross-layer equalization, arXiv:1906.04721; SmoothQuant,
//! arXiv:2211.10438): the producer's row and bias times `s_j`, the consumer's column divided by it.
//!
//! | between | a scale for | shared by |
//! |---|---|---|
//! | up and down: `W_d (act(g) * u)` | each channel | |
//! | value and output, through softmax and a gate | each channel of a key-value head | query heads of its group |
//! | query and key: `q . k` | each pair of rotated dimensions, each other dimension | query heads; keys take `1 / s` |
//! | a head and its norm | each query head, each key head | |
//!
//! [`balance`](super::balance) finds the best scales. With an input `a` of the layer, its terms for up and down are
//! `G_j = E[act(g_j)^2] |a|^2 |down_j|^2` and `H_j = rows(down) E[h_j^2]`, and likewise for the others.

use super::balance::{Channels, largest};
use super::moments::activated;
use super::rows::{narrow, scale_rows};
use super::vector;
use crate::blocks::attention::Attention;
use crate::blocks::cca::Cca;
use crate::blocks::linear::Linear;
use crate::blocks::mlp::Mlp;
use crate::decoder::Decoder;
use crate::layer::{FeedForward, Mixer};
use crate::row::{Activation, QkNorm};
use anec_base::Result;
use anec_source::Result as SourceResult;
use anec_source::{RowOrder, SourceWeight, WeightExtent};

/// Largest scale of a head; a head without weights can't be scaled up.
const MAX_HEAD_SCALE: f64 = 64.0;

impl Decoder {
    /// Equalizes the channels of every layer.
    pub(super) fn equalize(&mut self) -> Result<()> {
        let mut deferred = Vec::new();
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let of_layer = |gain| Place { layer: index, gain };
            let place = of_layer(layer.mixer_norms.gain());
            match &mut layer.mixer {
                Mixer::Attention(attention) => {
                    deferred.extend(value_and_output(attention, None, &place)?);
                    let rotated = self.config.layers[index].rope;
                    deferred.extend(query_and_key(attention, rotated, &place)?);
                }
                Mixer::Cca(cca) => {
                    let Cca { attention, delayed_value, delay, .. } = &mut **cca;
                    deferred.extend(value_and_output(attention, Some((delayed_value, &mut delay.bias)), &place)?);
                }
                // decoders have none
                Mixer::Banded(_) => {}
                Mixer::ShortConv(conv) => deferred.push(super::kernels::short_conv(conv, index)?),
                Mixer::DeltaNet(net) => {
                    deferred.push(super::kernels::convolved(&mut net.query_key_value, &mut net.conv, index)?);
                }
                Mixer::Mamba2(mamba) => {
                    deferred.push(super::kernels::convolved(&mut mamba.inputs, &mut mamba.conv, index)?);
                }
                Mixer::AttentionAndMamba2(both) => {
                    let (attention, mamba) = &mut **both;
                    deferred.extend(value_and_output(attention, None, &place)?);
                    deferred.extend(query_and_key(attention, self.config.layers[index].rope, &place)?);
                    deferred.push(super::kernels::convolved(&mut mamba.inputs, &mut mamba.conv, index)?);
                }
            }
            let mut place = of_layer(layer.feed_forward_gain());
            if let FeedForward::DenseAndMoe(both) = &mut layer.feed_forward {
                let Mlp { gate, up, down, activation } = &mut both.mlp;
                deferred.push(up_and_down(gate, up, down, *activation, &place)?);
                place = of_layer(both.experts_norm.gain());
            }
            let (gate, up, down, activation) = match &mut layer.feed_forward {
                FeedForward::Mlp(mlp) => (&mlp.gate, &mut mlp.up, &mut mlp.down, mlp.activation),
                FeedForward::Plain(_) => continue,
                FeedForward::Moe(moe) => {
                    if let Some(shared) = &mut moe.shared {
                        let Mlp { gate, up, down, activation } = &mut shared.mlp;
                        deferred.push(up_and_down(gate, up, down, *activation, &place)?);
                    }
                    match moe.experts.up_and_down() {
                        Some(parts) => parts,
                        None => continue,
                    }
                }
                FeedForward::DenseAndMoe(both) => match both.moe.experts.up_and_down() {
                    Some(parts) => parts,
                    None => continue,
                },
                FeedForward::DepthMoe(moe) => match moe.experts.up_and_down() {
                    Some(parts) => parts,
                    None => continue,
                },
            };
            deferred.push(up_and_down(gate, up, down, activation, &place)?);
        }
        self.transformed.deferred.extend(deferred);
        Ok(())
    }
}

/// Position of a block, and the magnitudes of its input.
#[derive(Clone)]
struct Place {
    layer: usize,
    /// Gain of the norm before the block, unless folded.
    gain: Option<SourceWeight>,
}

impl Place {
    fn name(&self, of: &str) -> String {
        format!("units of {of}, layer {}", self.layer)
    }

    /// Statistics of a projection's rows.
    fn outputs(&self, projection: &Linear) -> SourceResult<Outputs> {
        let extent = WeightExtent::of(&projection.weight)?;
        let moments = self.moments(projection, || Ok(extent.row_squares))?;
        Ok(Outputs { largest: extent.row_max, moments })
    }

    /// Moments of a projection's outputs; `row_squares` are those of its weight.
    fn moments(
        &self,
        projection: &Linear,
        row_squares: impl FnOnce() -> SourceResult<Vec<f64>>,
    ) -> SourceResult<Moments> {
        let weight = &projection.weight;
        let (input, squares) = match &self.gain {
            None => (weight.columns() as f64, row_squares()?),
            Some(gain) => {
                let input = vector(Some(gain), 0)?.iter().map(|gain| gain * gain).sum();
                (input, WeightExtent::row_squares(&weight.multiply_rows(gain)?)?)
            }
        };
        let bias = vector(projection.bias.as_ref(), squares.len())?;
        let squares = squares.iter().zip(&bias).map(|(square, bias)| square + bias * bias).collect();
        Ok(Moments { input, squares, bias })
    }
}

/// Statistics of a projection's rows.
struct Outputs {
    /// Largest magnitude of a weight.
    largest: Vec<f64>,
    moments: Moments,
}

/// Moments of a projection's outputs `W a + b`.
struct Moments {
    /// `E |a|^2`
    input: f64,
    /// Second moment of each output.
    squares: Vec<f64>,
    /// Mean of each output.
    bias: Vec<f64>,
}

/// `W_d (act(g) * s u)`, with the columns of `W_d` divided by `s`.
fn up_and_down(
    gate: &Linear,
    up: &mut Linear,
    down: &mut Linear,
    activation: Activation,
    place: &Place,
) -> Result<SourceWeight> {
    let (gate, producer, consumer) = (gate.clone(), up.clone(), down.weight.clone());
    let (name, place) = (place.name("up and down"), place.clone());
    let units = SourceWeight::computed(&name, producer.rows(), move || {
        let gates = place.moments(&gate, || WeightExtent::row_squares(&gate.weight))?;
        let Outputs { largest, moments: ups } = place.outputs(&producer)?;
        let columns = WeightExtent::of(&consumer)?;
        let of = |(square, mean): (&f64, &f64)| activated(activation, *mean, (square - mean * mean).max(0.0).sqrt());
        let opened: Vec<f64> = gates.squares.iter().zip(&gates.bias).map(of).collect();
        let hidden: Vec<f64> = opened.iter().zip(&ups.squares).map(|(gate, up)| gate * up).collect();
        let rows = consumer.rows() as f64;
        let channels = Channels {
            produced: largest,
            consumed: columns.column_max,
            of_producer: opened
                .iter()
                .zip(&columns.column_squares)
                .map(|(gate, down)| gate * ups.input * down)
                .collect(),
            of_consumer: hidden.iter().map(|square| rows * square).collect(),
            magnitude: hidden.iter().map(|square| square.sqrt()).collect(),
        };
        Ok(narrow(channels.balance()))
    });
    scale_rows(up, &units)?;
    down.weight = down.weight.multiply_rows(&units.reciprocal())?;
    Ok(units)
}

/// `W_o softmax(..) (s v)`, with the columns of `W_o` divided by `s`. Values may come from two projections; the bias of
/// the second is stored elsewhere.
fn value_and_output(
    attention: &mut Attention,
    second: Option<(&mut Linear, &mut Option<SourceWeight>)>,
    place: &Place,
) -> Result<Option<SourceWeight>> {
    // a norm of each head cancels the scale of values, and one limit applies to all channels
    let own = attention.value_norm.is_none() && attention.clip.is_none();
    let heads = Heads::of(attention);
    let Some(value) = attention.value.as_mut().filter(|_| own) else { return Ok(None) };
    let mut values = vec![value.clone()];
    if let Some((second, bias)) = &second {
        values.push(Linear { bias: (*bias).clone(), ..(*second).clone() });
    }
    let consumer = attention.output.weight.clone();
    let (name, at) = (place.name("value and output"), place.clone());
    let units = SourceWeight::computed(&name, heads.keys(), move || {
        let (mut input, mut produced, mut squares) = (0.0, Vec::new(), Vec::new());
        for value in &values {
            let Outputs { largest, moments } = at.outputs(value)?;
            input = moments.input;
            produced.extend(largest);
            squares.extend(moments.squares);
        }
        let columns = WeightExtent::of(&consumer)?;
        let attended = squares.iter().map(|square| heads.group as f64 * square);
        let rows = consumer.rows() as f64;
        let of_output = heads.gather(&columns.column_squares, |a, b| a + b);
        let channels = Channels {
            produced,
            consumed: heads.gather(&columns.column_max, f64::max),
            of_producer: of_output.iter().map(|square| input * square).collect(),
            of_consumer: attended.map(|square| rows * square).collect(),
            magnitude: squares.iter().map(|square| square.sqrt()).collect(),
        };
        Ok(narrow(channels.balance()))
    });
    match second {
        None => scale_rows(value, &units)?,
        Some((second, bias)) => {
            let first = value.rows();
            scale_rows(value, &units.slice(0..first)?)?;
            let of_second = units.slice(first..units.elements())?;
            scale_rows(second, &of_second)?;
            *bias = bias.as_ref().map(|bias| bias.multiply_rows(&of_second)).transpose()?;
        }
    }
    let of_queries = units.reorder(heads.spread())?;
    attention.output.weight = attention.output.weight.multiply_rows(&of_queries.reciprocal())?;
    Ok(Some(units))
}

/// `(s q) . (k / s)`: dimensions that are rotated together share a scale. After a norm of each head, only a factor for
/// the head is possible, which the norm cancels.
fn query_and_key(attention: &mut Attention, rotated: bool, place: &Place) -> Result<Vec<SourceWeight>> {
    if attention.clip.is_some() {
        return Ok(Vec::new());
    }
    match attention.query_norm.as_ref().map(|_| attention.qk_norm_place) {
        None | Some(QkNorm::None) => Ok(units_of_pairs(attention, rotated, place)?.into_iter().collect()),
        Some(QkNorm::PerHead | QkNorm::PerHeadOwn | QkNorm::PerHeadRotated) => {
            let width = attention.head_dim as usize;
            let query = level_heads(&mut attention.query, width, &place.name("query heads"))?;
            let key =
                attention.key.as_mut().map(|key| level_heads(key, width, &place.name("key heads"))).transpose()?;
            Ok([query].into_iter().chain(key).collect())
        }
        Some(QkNorm::WholeWidth) => Ok(Vec::new()),
    }
}

fn units_of_pairs(attention: &mut Attention, rotated: bool, place: &Place) -> Result<Option<SourceWeight>> {
    let heads = Heads::of(attention);
    let rotated = if rotated { attention.rope_dim as usize } else { 0 };
    let Some(own_key) = &mut attention.key else { return Ok(None) };
    let (query, key) = (attention.query.clone(), own_key.clone());
    let (name, at) = (place.name("query and key"), place.clone());
    let units = SourceWeight::computed(&name, heads.keys(), move || {
        let (queries, keys) = (at.outputs(&query)?, at.outputs(&key)?);
        let input = keys.moments.input;
        let (q, k) = (heads.gather(&queries.moments.squares, |a, b| a + b), keys.moments.squares);
        // the two dimensions of a pair as one channel
        let both = |values: &[f64], join: fn(f64, f64) -> f64| heads.join_pairs(values, rotated, join);
        let (q, k) = (both(&q, |a, b| a + b), both(&k, |a, b| a + b));
        let channels = Channels {
            produced: both(&heads.gather(&queries.largest, f64::max), f64::max),
            consumed: both(&keys.largest, f64::max),
            of_producer: k.iter().map(|square| heads.group as f64 * input * square).collect(),
            of_consumer: q.iter().map(|square| input * square).collect(),
            magnitude: q.iter().map(|square| square.sqrt()).collect(),
        };
        let mut units = channels.balance();
        // bounds the growth of both queries and keys
        let grown = |scaled: &dyn Fn(usize) -> f64, plain: &[f64]| {
            let roots: Vec<f64> = plain.iter().map(|square| square.sqrt()).collect();
            let after = roots.iter().enumerate().map(|(j, root)| scaled(j) * root).fold(0.0, f64::max);
            after / largest(&roots)
        };
        let constant = (grown(&|j| 1.0 / units[j], &k) / grown(&|j| units[j], &q)).sqrt();
        if constant.is_finite() && constant > 0.0 {
            units.iter_mut().for_each(|unit| *unit *= constant);
        }
        Ok(narrow(units))
    });
    scale_rows(&mut attention.query, &units.reorder(heads.spread())?)?;
    scale_rows(own_key, &units.reciprocal())?;
    Ok(Some(units))
}

/// Scales every head to the magnitude of the largest.
fn level_heads(projection: &mut Linear, width: usize, name: &str) -> Result<SourceWeight> {
    let weight = projection.weight.clone();
    let units = SourceWeight::computed(name, weight.rows(), move || {
        let rows = WeightExtent::of(&weight)?.row_max;
        let most = largest(&rows);
        let of_head = |head: &[f64]| {
            let unit = most / largest(head);
            vec![if unit.is_finite() { unit.min(MAX_HEAD_SCALE) } else { 1.0 }; head.len()]
        };
        Ok(narrow(rows.chunks(width).flat_map(of_head).collect()))
    });
    scale_rows(projection, &units)?;
    Ok(units)
}

/// Heads of attention; groups of query heads share a key-value head.
#[derive(Clone, Copy)]
struct Heads {
    count: u64,
    group: u64,
    width: u64,
}

impl Heads {
    fn of(attention: &Attention) -> Heads {
        let count = attention.num_key_value_heads;
        Heads { count, group: attention.num_attention_heads / count, width: attention.head_dim }
    }

    fn keys(self) -> u64 {
        self.count * self.width
    }

    fn queries(self) -> u64 {
        self.keys() * self.group
    }

    /// Channel of the key-value head for every channel of query heads.
    fn spread(self) -> RowOrder {
        let origin = |channel: u64| channel / (self.group * self.width) * self.width + channel % self.width;
        RowOrder::Explicit((0..self.queries()).map(origin).collect())
    }

    /// Joins the values of a group's query heads for every channel of key-value heads.
    fn gather(self, values: &[f64], join: fn(f64, f64) -> f64) -> Vec<f64> {
        let (group, width) = (self.group as usize, self.width as usize);
        let of_group = |group: &[f64]| {
            let mut heads = group.chunks(width);
            let mut joined = heads.next().unwrap_or_default().to_vec();
            heads.for_each(|head| joined.iter_mut().zip(head).for_each(|(a, b)| *a = join(*a, *b)));
            joined
        };
        values.chunks(group * width).flat_map(of_group).collect()
    }

    /// Joins the values of each rotated pair, dimensions `i` and `i + rotated / 2` of a head; the result is in both
    /// places.
    fn join_pairs(self, values: &[f64], rotated: usize, join: fn(f64, f64) -> f64) -> Vec<f64> {
        let mut values = values.to_vec();
        for head in values.chunks_mut(self.width as usize) {
            for i in 0..rotated / 2 {
                let both = join(head[i], head[i + rotated / 2]);
                (head[i], head[i + rotated / 2]) = (both, both);
            }
        }
        values
    }
}
