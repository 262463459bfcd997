//! Disentangled attention of DeBERTa v2 and v3. Beside contents, scores have terms of content and distance, each of
//! which may be absent (`pos_att_type`):
//!
//! ```text
//! score(i, j) = (q_i k_j + q_i K(i - j) + k_j Q(i - j)) / sqrt(terms head_dim)
//! K = W_k' norm(E) + b_k'      Q = W_q' norm(E) + b_q'
//! ```
//!
//! E is a table of all layers with a row for each bucket of distances. With `share_att_key`, W' are the projections of
//! the layer's own keys and queries. K and Q depend on weights only: they are computed here and stored in fp16.

use ndarray::ArrayView2;
use serde::Serialize;

use super::{BertConfig, Tensors};
use crate::blocks::distance_scores::{DistanceBuckets, DistanceTables};
use crate::blocks::linear::Linear;
use crate::config::keys::Keys;
use crate::error::FamilyError;
use crate::row::Activation;
use crate::tensors::take;
use anec_base::Result;
use anec_manifest::Role;
use anec_source::SourceWeight;

/// Configuration of DeBERTa beside BERT's.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Disentangled {
    /// Whether there are learned positions.
    pub(super) position_biased_input: bool,
    /// Activation of a classifier's dense layer.
    pub(super) pooler_hidden_act: Activation,
    /// Whether queries have scores by distance.
    content_to_position: bool,
    /// Whether keys have scores by distance.
    position_to_content: bool,
    /// Whether tokens and distances have the same projections.
    share_att_key: bool,
    /// Whether the embeddings of distances are normed.
    norm_rel_ebd: bool,
    /// Buckets of distances.
    buckets: DistanceBuckets,
}

impl Disentangled {
    /// Reads the keys that BERT doesn't have.
    pub(super) fn read(keys: &Keys<'_>) -> Result<Self, FamilyError> {
        if keys.bool("relative_attention")? != Some(true) {
            return Err(keys.value("relative_attention", "true"));
        }
        if keys.u64("conv_kernel_size")?.is_some_and(|size| size > 0) {
            return Err(keys.value("conv_kernel_size", "0: the first layer has no convolution"));
        }
        let hidden = keys.size("hidden_size")?;
        let head_dim = hidden / keys.size("num_attention_heads")?;
        for (key, size) in
            [("embedding_size", hidden), ("pooler_hidden_size", hidden), ("attention_head_size", head_dim)]
        {
            if keys.u64(key)?.is_some_and(|found| found != size) {
                return Err(keys.value(key, &size.to_string()));
            }
        }
        // a list, or one text with bars
        let words = |key: &str| -> Result<Vec<String>, FamilyError> {
            let words = match keys.get(key) {
                Some(value) if value.is_array() => keys.strings(key)?.unwrap_or_default().join("|"),
                _ => keys.str(key)?.unwrap_or_default().to_owned(),
            };
            Ok(words
                .to_lowercase()
                .split('|')
                .map(|word| word.trim().to_owned())
                .filter(|word| !word.is_empty())
                .collect())
        };
        let (terms, norms) = (words("pos_att_type")?, words("norm_rel_ebd")?);
        if terms.is_empty() || terms.iter().any(|term| !["c2p", "p2c"].contains(&term.as_str())) {
            return Err(keys.value("pos_att_type", "\"c2p\", \"p2c\" or both"));
        }
        if norms.iter().any(|norm| !["none", "layer_norm"].contains(&norm.as_str())) {
            return Err(keys.value("norm_rel_ebd", "\"none\" or \"layer_norm\""));
        }
        // transformers has -1 for the default
        let positive = |key: &str| Ok(keys.f64(key)?.filter(|number| *number >= 1.0).map(|number| number as u64));
        let farthest = match positive("max_relative_positions")? {
            Some(farthest) => farthest,
            None => keys.size("max_position_embeddings")?,
        };
        let span = positive("position_buckets")?;
        if span.is_some_and(|span| span < 4 || span / 2 + 1 >= farthest) {
            return Err(keys.value("position_buckets", &format!("4 to {}", (2 * farthest).saturating_sub(3))));
        }
        if farthest > 1 << 20 {
            return Err(keys.value("max_relative_positions", "at most 1048576"));
        }
        let has = |words: &[String], word: &str| words.iter().any(|own| own == word);
        Ok(Disentangled {
            position_biased_input: keys.bool("position_biased_input")?.unwrap_or(true),
            pooler_hidden_act: super::activation(keys, "pooler_hidden_act")?.unwrap_or(Activation::Gelu),
            content_to_position: has(&terms, "c2p"),
            position_to_content: has(&terms, "p2c"),
            share_att_key: keys.bool("share_att_key")?.unwrap_or(false),
            norm_rel_ebd: has(&norms, "layer_norm"),
            buckets: match span {
                Some(span) => DistanceBuckets { span, farthest: Some(farthest) },
                None => DistanceBuckets { span: farthest, farthest: None },
            },
        })
    }

    /// Number of terms of a score.
    fn terms(&self) -> u64 {
        1 + u64::from(self.content_to_position) + u64::from(self.position_to_content)
    }
}

impl BertConfig {
    /// Factor of attention scores.
    pub(super) fn attention_scale(&self) -> f64 {
        let terms = self.disentangled.as_ref().map_or(1, Disentangled::terms);
        ((terms * (self.hidden_size / self.num_attention_heads)) as f64).powf(-0.5)
    }
}

impl Tensors<'_, '_> {
    /// Embeddings of the buckets of distances, `[2 span, hidden_size]`.
    pub(super) fn relative_embeddings(&mut self, config: &Disentangled) -> Result<SourceWeight> {
        let shape = [2 * config.buckets.span, self.config.hidden_size];
        let name = format!("{}.weight", self.naming.name("encoder.rel_embeddings"));
        let table = take(self.ledger, &name, &shape, "position_buckets or max_relative_positions, hidden_size")?;
        if !config.norm_rel_ebd {
            return Ok(table);
        }
        let norm = self.norm("encoder.LayerNorm", "relative_norm", shape[1])?;
        let (eps, width) = (norm.eps, shape[1] as usize);
        let parts: Vec<SourceWeight> = [norm.weight, norm.bias].into_iter().flatten().collect();
        let of = table.clone();
        let normed =
            SourceWeight::computed_rows("layer norm", shape[1], vec![table], parts.clone(), move |first, out| {
                of.read_rows(first, out)?;
                let parts = parts.iter().map(values).collect::<anec_source::Result<Vec<_>>>()?;
                for row in out.chunks_exact_mut(width) {
                    let mean = |row: &[f32], of: &dyn Fn(f64) -> f64| {
                        row.iter().map(|x| of(f64::from(*x))).sum::<f64>() / width as f64
                    };
                    let centre = mean(row, &|x| x);
                    let root = (mean(row, &|x| (x - centre).powi(2)) + eps).sqrt();
                    for (x, (gain, bias)) in row.iter_mut().zip(parts[0].iter().zip(&parts[1])) {
                        *x = ((f64::from(*x) - centre) / root) as f32 * gain + bias;
                    }
                }
                Ok(())
            })?;
        Ok(normed)
    }

    /// Tables of a layer with the projections `[query, key]`.
    pub(super) fn distance_tables(
        &mut self,
        config: &Disentangled,
        relative: &SourceWeight,
        layer: usize,
        [query, key]: [&Linear; 2],
    ) -> Result<DistanceTables> {
        let hidden = self.config.hidden_size;
        // queries and keys of tokens have the root of the factor each
        let root = self.config.attention_scale().sqrt() as f32;
        let mut table = |wanted: bool, shared: &Linear, own: &str| -> Result<Option<SourceWeight>> {
            if !wanted {
                return Ok(None);
            }
            if config.share_att_key {
                return Ok(Some(projected(relative, shared, root)?));
            }
            let own = self.row.tensor(layer, &format!("attention.self.{own}"));
            let own = self.linear(&own, "distances", Role::Table, [hidden, hidden], "hidden_size, hidden_size")?;
            Ok(Some(projected(relative, &own, root)?))
        };
        let keys = table(config.content_to_position, key, "pos_key_proj")?;
        let queries = table(config.position_to_content, query, "pos_query_proj")?;
        Ok(DistanceTables { keys, queries, buckets: config.buckets })
    }
}

/// `factor (x W^T + b)`, computed whole at the first read.
fn projected(x: &SourceWeight, projection: &Linear, factor: f32) -> anec_source::Result<SourceWeight> {
    let shape = [x.rows(), projection.weight.rows()];
    let (inputs, weight, bias) = (x.clone(), projection.weight.clone(), projection.bias.clone());
    let name = format!("{factor:?} times {} of {}", weight.key(), x.key());
    let compute = move || {
        let (left, right) = (values(&inputs)?, values(&weight)?);
        let matrix = |of: &SourceWeight| (of.rows() as usize, of.columns() as usize);
        let product = ArrayView2::from_shape(matrix(&inputs), &left)
            .and_then(|left| Ok(left.dot(&ArrayView2::from_shape(matrix(&weight), &right)?.t())));
        let mut product = product.map_or_else(|_| Vec::new(), |product| product.into_raw_vec_and_offset().0);
        let bias = bias.as_ref().map(values).transpose()?.unwrap_or_default();
        for row in product.chunks_exact_mut(weight.rows() as usize) {
            row.iter_mut().zip(&bias).for_each(|(x, bias)| *x += bias);
            row.iter_mut().for_each(|x| *x *= factor);
        }
        Ok(product)
    };
    SourceWeight::computed(&name, shape[0] * shape[1], compute).reshape(&shape)
}

/// All elements of a weight.
fn values(of: &SourceWeight) -> anec_source::Result<Vec<f32>> {
    let mut values = vec![0.0; of.elements() as usize];
    of.read(0, &mut values)?;
    Ok(values)
}
