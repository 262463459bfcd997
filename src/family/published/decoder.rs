//! The tensors of decoders' checkpoints.

use serde_json::Value as Json;

use super::{Shapes, missing, number};
use crate::error::FamilyError;
use anec_base::Result;

/// Names and shapes of a decoder's tensors.
pub(super) fn shapes(config: &Json) -> Result<Shapes> {
    // the text part of a multimodal model leaves out what its class has as the default
    let (prefix, config) = match config.get("text_config") {
        Some(text) if matches!(text["model_type"].as_str(), Some("gemma3_text" | "ministral3" | "mistral")) => {
            ("language_model.model.", text)
        }
        Some(text) => ("model.language_model.", text),
        None if config["model_type"] == "gpt_neox" => ("gpt_neox.", config),
        None => ("model.", config),
    };
    let sizes = DecoderSizes::of(config)?;
    let layers = sizes.number("num_hidden_layers")?;
    // a layer that guesses the token after the next
    let predicts =
        sizes.family == "qwen3_next" || config["mtp_num_hidden_layers"].as_u64().is_some_and(|layers| layers > 0);
    let mut shapes = Vec::new();
    sizes.ends(prefix, predicts, &mut shapes)?;
    for layer in 0..layers {
        LayerTensors::of(sizes, prefix, layer, config["layer_types"][layer as usize].as_str(), &mut shapes)?.list()?;
    }
    if predicts {
        LayerTensors::of(sizes, "mtp.", 0, Some("full_attention"), &mut shapes)?.list()?;
    }
    Ok(shapes)
}

/// What a configuration says of all layers.
#[derive(Clone, Copy, Default)]
struct DecoderSizes<'a> {
    config: &'a Json,
    family: &'a str,
    hidden: u64,
    vocab: u64,
    /// Of the feed-forward network.
    width: u64,
    heads: u64,
    key_heads: u64,
    head_dim: u64,
    /// Norms have biases.
    centred: bool,
}

impl<'a> DecoderSizes<'a> {
    fn of(config: &'a Json) -> Result<Self, FamilyError> {
        let family = config["model_type"].as_str().ok_or_else(|| missing("model_type"))?;
        let centred = matches!(family, "starcoder2" | "phi" | "gpt_neox" | "stablelm");
        let sizes = DecoderSizes { config, family, centred, ..DecoderSizes::default() };
        let heads = sizes.number("num_attention_heads")?;
        let hidden = sizes.number("hidden_size")?;
        Ok(DecoderSizes {
            hidden,
            vocab: sizes.number("vocab_size")?,
            width: match family {
                "zaya" | "qwen3_5_moe_text" => 0,
                "lfm2" => (sizes.number("block_ff_dim")? * 2 / 3).next_multiple_of(sizes.number("block_multiple_of")?),
                _ => sizes.number("intermediate_size")?,
            },
            heads,
            key_heads: if family == "gpt_neox" { heads } else { sizes.number("num_key_value_heads")? },
            head_dim: match family {
                "gemma2" | "gemma3_text" => sizes.number("head_dim")?,
                _ => config["head_dim"].as_u64().or(hidden.checked_div(heads)).unwrap_or(0),
            },
            ..sizes
        })
    }

    /// A number of the configuration, or what the family's class has where it is left out.
    fn number(&self, key: &str) -> Result<u64, FamilyError> {
        let default = match (self.family, key) {
            ("gemma3_text", "num_attention_heads") => Some(8),
            ("gemma3_text", "num_key_value_heads") => Some(4),
            ("gemma3_text", "head_dim") => Some(256),
            ("gemma3_text", "vocab_size") => Some(262_208),
            _ => None,
        };
        default.filter(|_| self.config[key].is_null()).map_or_else(|| number(self.config, key), Ok)
    }

    /// What stands before the layers and behind them.
    fn ends(&self, prefix: &str, predicts: bool, shapes: &mut Shapes) -> Result<(), FamilyError> {
        let DecoderSizes { config, family, hidden, vocab, .. } = *self;
        let embedding = if family == "gpt_neox" { "embed_in" } else { "embed_tokens" };
        let final_norm = match family {
            "gpt_neox" => "final_layer_norm",
            "falcon_h1" | "phi" => "final_layernorm",
            _ if family.starts_with("lfm2") => "embedding_norm",
            _ => "norm",
        };
        let mut add = |name: &str, shape: &[u64]| shapes.push((name.to_owned(), shape.to_vec()));
        add(&format!("{prefix}{embedding}.weight"), &[vocab, hidden]);
        add(&format!("{prefix}{final_norm}.weight"), &[hidden]);
        if self.centred {
            add(&format!("{prefix}{final_norm}.bias"), &[hidden]);
        }
        if family == "zaya" {
            add("model.input_hidden_states_bias", &[hidden]);
            add("model.input_hidden_states_scale", &[hidden]);
        }
        match (family, prefix) {
            ("gpt_neox", _) => add("embed_out.weight", &[vocab, hidden]),
            ("mistral", "language_model.model.") => add("language_model.lm_head.weight", &[vocab, hidden]),
            _ if config["tie_word_embeddings"] == false || family == "qwen3_vl_moe_text" => {
                add("lm_head.weight", &[vocab, hidden]);
            }
            _ => {}
        }
        if family == "phi" {
            add("lm_head.bias", &[vocab]);
        }
        if predicts {
            add("mtp.fc.weight", &[hidden, 2 * hidden]);
            for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
                add(&format!("mtp.{name}.weight"), &[hidden]);
            }
        }
        if family == "gemma4_text" && self.number("hidden_size_per_layer_input")? > 0 {
            let width = self.number("hidden_size_per_layer_input")?;
            let columns = self.number("num_hidden_layers")? * width;
            add(&format!("{prefix}embed_tokens_per_layer.weight"), &[vocab, columns]);
            add(&format!("{prefix}per_layer_model_projection.weight"), &[columns, hidden]);
            add(&format!("{prefix}per_layer_projection_norm.weight"), &[width]);
        }
        Ok(())
    }
}

/// A layer whose tensors are listed.
struct LayerTensors<'a> {
    of: DecoderSizes<'a>,
    prefix: &'a str,
    index: u64,
    /// What mixes tokens, as `layer_types` calls it.
    kind: Option<&'a str>,
    head_dim: u64,
    key_heads: u64,
    /// Rows of the query projection, and of the key projection.
    queries: u64,
    keys: u64,
    /// Values are the keys.
    is_key: bool,
    /// Keys and values are those of a layer before.
    shared: bool,
    width: u64,
    shapes: &'a mut Shapes,
}

impl<'a> LayerTensors<'a> {
    fn of(
        of: DecoderSizes<'a>,
        prefix: &'a str,
        index: u64,
        named: Option<&'a str>,
        shapes: &'a mut Shapes,
    ) -> Result<Self, FamilyError> {
        let kind = match of.config["full_attention_interval"].as_u64() {
            Some(interval) if named.is_none() && !(index + 1).is_multiple_of(interval) => Some("linear_attention"),
            _ => named,
        };
        let wide_heads = of.family == "gemma4_text" && kind == Some("full_attention");
        let head_dim = if wide_heads { of.number("global_head_dim")? } else { of.head_dim };
        let is_key = wide_heads && of.config["attention_k_eq_v"] == true;
        let key_heads = if is_key { of.number("num_global_key_value_heads")? } else { of.key_heads };
        let (queries, keys) = (of.heads * head_dim, key_heads * head_dim);
        let shared = of.family == "gemma4_text"
            && index + of.number("num_kv_shared_layers")? >= of.number("num_hidden_layers")?;
        let width = if shared && of.config["use_double_wide_mlp"] == true { 2 * of.width } else { of.width };
        Ok(LayerTensors { of, prefix, index, kind, head_dim, key_heads, queries, keys, is_key, shared, width, shapes })
    }

    fn add(&mut self, name: &str, shape: &[u64]) {
        self.shapes.push((format!("{}layers.{}.{name}", self.prefix, self.index), shape.to_vec()));
    }

    fn number(&self, key: &str) -> Result<u64, FamilyError> {
        self.of.number(key)
    }

    fn list(mut self) -> Result<(), FamilyError> {
        // Mamba-2 alone, or beside attention
        if self.kind == Some("mamba") || self.of.family == "falcon_h1" {
            self.mamba2()?;
        }
        match (self.kind, self.of.family) {
            (Some("mamba"), _) => {}
            (_, "gemma4_text") => self.gemma4_attention()?,
            (Some("conv"), _) => self.short_conv()?,
            (Some("linear_attention"), _) => self.delta_net()?,
            (_, "zaya") => self.cca()?,
            _ => self.attention(),
        }
        self.feed_forward()?;
        self.norms();
        Ok(())
    }

    fn mamba2(&mut self) -> Result<(), FamilyError> {
        let heads = self.number("mamba_n_heads")?;
        let width = heads * self.number("mamba_d_head")?;
        let mixed = width + 2 * self.number("mamba_n_groups")? * self.number("mamba_d_state")?;
        self.add("mamba.in_proj.weight", &[width + mixed + heads, self.of.hidden]);
        self.add("mamba.conv1d.weight", &[mixed, 1, self.number("mamba_d_conv")?]);
        self.add("mamba.conv1d.bias", &[mixed]);
        for name in ["A_log", "D", "dt_bias"] {
            self.add(&format!("mamba.{name}"), &[heads]);
        }
        if self.of.config["mamba_rms_norm"] != false {
            self.add("mamba.norm.weight", &[width]);
        }
        self.add("mamba.out_proj.weight", &[self.of.hidden, width]);
        Ok(())
    }

    fn gemma4_attention(&mut self) -> Result<(), FamilyError> {
        let inner = self.number("hidden_size_per_layer_input")?;
        self.add("self_attn.q_proj.weight", &[self.queries, self.of.hidden]);
        self.add("self_attn.q_norm.weight", &[self.head_dim]);
        if !self.shared {
            self.add("self_attn.k_proj.weight", &[self.keys, self.of.hidden]);
            self.add("self_attn.k_norm.weight", &[self.head_dim]);
        }
        if !self.shared && !self.is_key {
            self.add("self_attn.v_proj.weight", &[self.keys, self.of.hidden]);
        }
        self.add("self_attn.o_proj.weight", &[self.of.hidden, self.queries]);
        if inner > 0 {
            self.add("per_layer_input_gate.weight", &[inner, self.of.hidden]);
            self.add("per_layer_projection.weight", &[self.of.hidden, inner]);
            self.add("post_per_layer_input_norm.weight", &[self.of.hidden]);
        }
        self.add("layer_scalar", &[1]);
        if let Some(experts) = self.of.config["num_experts"].as_u64() {
            let width = self.number("moe_intermediate_size")?;
            self.add("router.proj.weight", &[experts, self.of.hidden]);
            self.add("router.scale", &[self.of.hidden]);
            self.add("router.per_expert_scale", &[experts]);
            self.add("experts.gate_up_proj", &[experts, 2 * width, self.of.hidden]);
            self.add("experts.down_proj", &[experts, self.of.hidden, width]);
            for name in ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"]
            {
                self.add(&format!("{name}.weight"), &[self.of.hidden]);
            }
        }
        Ok(())
    }

    fn short_conv(&mut self) -> Result<(), FamilyError> {
        self.add("conv.in_proj.weight", &[3 * self.of.hidden, self.of.hidden]);
        self.add("conv.conv.weight", &[self.of.hidden, 1, self.number("conv_L_cache")?]);
        self.add("conv.out_proj.weight", &[self.of.hidden, self.of.hidden]);
        Ok(())
    }

    fn delta_net(&mut self) -> Result<(), FamilyError> {
        let heads = self.number("linear_num_value_heads")?;
        let values = heads * self.number("linear_value_head_dim")?;
        let mixed = 2 * self.number("linear_num_key_heads")? * self.number("linear_key_head_dim")? + values;
        if self.of.family == "qwen3_next" {
            self.add("linear_attn.in_proj_qkvz.weight", &[mixed + values, self.of.hidden]);
            self.add("linear_attn.in_proj_ba.weight", &[2 * heads, self.of.hidden]);
        } else {
            self.add("linear_attn.in_proj_qkv.weight", &[mixed, self.of.hidden]);
            self.add("linear_attn.in_proj_z.weight", &[values, self.of.hidden]);
            self.add("linear_attn.in_proj_b.weight", &[heads, self.of.hidden]);
            self.add("linear_attn.in_proj_a.weight", &[heads, self.of.hidden]);
        }
        self.add("linear_attn.conv1d.weight", &[mixed, 1, self.number("linear_conv_kernel_dim")?]);
        self.add("linear_attn.A_log", &[heads]);
        self.add("linear_attn.dt_bias", &[heads]);
        self.add("linear_attn.norm.weight", &[self.number("linear_value_head_dim")?]);
        self.add("linear_attn.out_proj.weight", &[self.of.hidden, values]);
        Ok(())
    }

    fn cca(&mut self) -> Result<(), FamilyError> {
        let qkv = "self_attn.qkv_proj";
        self.add(&format!("{qkv}.q_proj.weight"), &[self.queries, self.of.hidden]);
        self.add(&format!("{qkv}.k_proj.weight"), &[self.keys, self.of.hidden]);
        self.add(&format!("{qkv}.v_proj_current.weight"), &[self.keys / 2, self.of.hidden]);
        self.add(&format!("{qkv}.v_proj_delayed.weight"), &[self.keys / 2, self.of.hidden]);
        for (name, group, kernel) in [("depthwise", 1, "cca_time0"), ("grouped", self.head_dim, "cca_time1")] {
            self.add(&format!("{qkv}.conv_qk_{name}.weight"), &[self.queries + self.keys, group, self.number(kernel)?]);
            self.add(&format!("{qkv}.conv_qk_{name}.bias"), &[self.queries + self.keys]);
        }
        self.add("self_attn.qk_norm.temp", &[self.key_heads]);
        self.add("self_attn.o_proj.weight", &[self.of.hidden, self.queries]);
        for sum in ["post_attention_residual_scale", "post_mlp_residual_scale"] {
            for part in ["hidden_states_bias", "hidden_states_scale", "residual_bias", "residual_scale"] {
                self.add(&format!("{sum}.{part}"), &[self.of.hidden]);
            }
        }
        Ok(())
    }

    fn attention(&mut self) {
        if self.of.family == "gpt_neox" {
            self.add("attention.query_key_value.weight", &[3 * self.of.hidden, self.of.hidden]);
            self.add("attention.query_key_value.bias", &[3 * self.of.hidden]);
        } else if self.of.family == "phi3" {
            self.add("self_attn.qkv_proj.weight", &[self.queries + 2 * self.keys, self.of.hidden]);
        } else {
            let gates =
                if matches!(self.of.family, "qwen3_5_text" | "qwen3_5_moe_text" | "qwen3_next") { 2 } else { 1 };
            for (name, rows) in [("q", gates * self.queries), ("k", self.keys), ("v", self.keys)] {
                self.add(&format!("self_attn.{name}_proj.weight"), &[rows, self.of.hidden]);
                if matches!(
                    self.of.family,
                    "qwen2" | "qwen2_moe" | "gpt_oss" | "glm4" | "starcoder2" | "phi" | "stablelm"
                ) {
                    self.add(&format!("self_attn.{name}_proj.bias"), &[rows]);
                }
            }
        }
        let qk_norms: &[&str] = match self.of.family {
            "qwen3" | "qwen3_moe" | "qwen3_vl_text" | "qwen3_vl_moe_text" | "exaone4" | "gemma3_text"
            | "qwen3_5_text" | "qwen3_5_moe_text" | "qwen3_next" => &["q_norm", "k_norm"],
            "hunyuan_v1_dense" => &["query_layernorm", "key_layernorm"],
            "lfm2" | "lfm2_moe" => &["q_layernorm", "k_layernorm"],
            _ => &[],
        };
        if matches!(self.of.family, "olmo3" | "olmoe") {
            self.add("self_attn.q_norm.weight", &[self.queries]);
            self.add("self_attn.k_norm.weight", &[self.keys]);
        }
        for name in qk_norms {
            self.add(&format!("self_attn.{name}.weight"), &[self.head_dim]);
        }
        let output = match self.of.family {
            "gpt_neox" => "attention.dense",
            "phi" => "self_attn.dense",
            _ if self.of.family.starts_with("lfm2") => "self_attn.out_proj",
            _ => "self_attn.o_proj",
        };
        self.add(&format!("{output}.weight"), &[self.of.hidden, self.queries]);
        if matches!(self.of.family, "gpt_oss" | "starcoder2" | "gpt_neox" | "phi") {
            self.add(&format!("{output}.bias"), &[self.of.hidden]);
        }
        if self.of.family == "gpt_oss" {
            self.add("self_attn.sinks", &[self.of.heads]);
        }
    }

    fn feed_forward(&mut self) -> Result<(), FamilyError> {
        match self.of.family {
            "phi3" | "glm4" => {
                self.add("mlp.gate_up_proj.weight", &[2 * self.width, self.of.hidden]);
                self.add("mlp.down_proj.weight", &[self.of.hidden, self.width]);
            }
            "zaya" => self.depth_routed()?,
            "starcoder2" | "phi" | "gpt_neox" => self.plain(),
            "granitemoe" | "granitemoehybrid" => self.granite_experts()?,
            "gpt_oss" => self.mxfp4_experts()?,
            // on their side
            "qwen3_vl_moe_text" => {
                let (experts, width) = (self.number("num_experts")?, self.number("moe_intermediate_size")?);
                self.add("mlp.gate.weight", &[experts, self.of.hidden]);
                self.add("mlp.experts.gate_up_proj", &[experts, self.of.hidden, 2 * width]);
                self.add("mlp.experts.down_proj", &[experts, width, self.of.hidden]);
            }
            "qwen3_5_moe_text" => {
                let (experts, width) = (self.number("num_experts")?, self.number("moe_intermediate_size")?);
                self.add("mlp.gate.weight", &[experts, self.of.hidden]);
                self.add("mlp.experts.gate_up_proj", &[experts, 2 * width, self.of.hidden]);
                self.add("mlp.experts.down_proj", &[experts, self.of.hidden, width]);
            }
            "qwen2_moe" | "qwen3_moe" | "qwen3_next" | "olmoe" => {
                let width = self.of.config["moe_intermediate_size"].as_u64().unwrap_or(self.width);
                let experts = self.number("num_experts")?;
                self.add("mlp.gate.weight", &[experts, self.of.hidden]);
                for expert in 0..experts {
                    self.gated(&format!("mlp.experts.{expert}"), width);
                }
            }
            "lfm2_moe" if self.index >= self.number("num_dense_layers")? => self.lfm2_experts()?,
            _ => self.dense(),
        }
        if let Some(width) = self.of.config["shared_expert_intermediate_size"].as_u64() {
            self.gated("mlp.shared_expert", width);
            self.add("mlp.shared_expert_gate.weight", &[1, self.of.hidden]);
        }
        Ok(())
    }

    /// A gated network of a width, under the names that most have.
    fn gated(&mut self, name: &str, width: u64) {
        let hidden = self.of.hidden;
        for (part, rows, columns) in [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)] {
            self.add(&format!("{name}.{part}_proj.weight"), &[rows, columns]);
        }
    }

    fn dense(&mut self) {
        let [gate, up, down] = match self.of.family {
            "lfm2" | "lfm2_moe" => ["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"],
            "falcon_h1" => ["feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"],
            _ => ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
        };
        self.add(&format!("{gate}.weight"), &[self.width, self.of.hidden]);
        self.add(&format!("{up}.weight"), &[self.width, self.of.hidden]);
        self.add(&format!("{down}.weight"), &[self.of.hidden, self.width]);
    }

    /// A network without a gate.
    fn plain(&mut self) {
        let [up, down] = match self.of.family {
            "phi" => ["fc1", "fc2"],
            "gpt_neox" => ["dense_h_to_4h", "dense_4h_to_h"],
            _ => ["c_fc", "c_proj"],
        };
        for (name, rows, columns) in [(up, self.width, self.of.hidden), (down, self.of.hidden, self.width)] {
            self.add(&format!("mlp.{name}.weight"), &[rows, columns]);
            self.add(&format!("mlp.{name}.bias"), &[rows]);
        }
    }

    fn depth_routed(&mut self) -> Result<(), FamilyError> {
        let (experts, width, router) =
            (self.number("num_experts")?, self.number("moe_intermediate_size")?, "mlp.gate.router_mlp");
        let state = self.number("router_hidden_size")?;
        self.add("mlp.gate.down_proj.weight", &[state, self.of.hidden]);
        self.add("mlp.gate.down_proj.bias", &[state]);
        if self.index > 0 {
            self.add("mlp.gate.router_states_scale", &[state]);
        }
        for name in ["fc1", "fc2"] {
            self.add(&format!("{router}.{name}.weight"), &[state, state]);
            self.add(&format!("{router}.{name}.bias"), &[state]);
        }
        self.add(&format!("{router}.norm.weight"), &[state]);
        self.add(&format!("{router}.out_proj.weight"), &[experts + 1, state]);
        self.add("mlp.gate.balancing_biases", &[experts + 1]);
        self.add("mlp.experts.gate_up_proj", &[experts, 2 * width, self.of.hidden]);
        self.add("mlp.experts.down_proj", &[experts, self.of.hidden, width]);
        Ok(())
    }

    fn granite_experts(&mut self) -> Result<(), FamilyError> {
        let experts = self.number("num_local_experts")?;
        if experts > 0 {
            self.add("block_sparse_moe.router.layer.weight", &[experts, self.of.hidden]);
            self.add("block_sparse_moe.input_linear.weight", &[experts, 2 * self.width, self.of.hidden]);
            self.add("block_sparse_moe.output_linear.weight", &[experts, self.of.hidden, self.width]);
        }
        if self.of.family == "granitemoehybrid" {
            let shared = self.number("shared_intermediate_size")?;
            self.add("shared_mlp.input_linear.weight", &[2 * shared, self.of.hidden]);
            self.add("shared_mlp.output_linear.weight", &[self.of.hidden, shared]);
        }
        Ok(())
    }

    fn mxfp4_experts(&mut self) -> Result<(), FamilyError> {
        let (experts, block) = (self.number("num_local_experts")?, 32);
        self.add("mlp.router.weight", &[experts, self.of.hidden]);
        self.add("mlp.router.bias", &[experts]);
        for (name, rows, columns) in
            [("gate_up_proj", 2 * self.width, self.of.hidden), ("down_proj", self.of.hidden, self.width)]
        {
            self.add(&format!("mlp.experts.{name}_blocks"), &[experts, rows, columns / block, block / 2]);
            self.add(&format!("mlp.experts.{name}_scales"), &[experts, rows, columns / block]);
            self.add(&format!("mlp.experts.{name}_bias"), &[experts, rows]);
        }
        Ok(())
    }

    fn lfm2_experts(&mut self) -> Result<(), FamilyError> {
        let (experts, width) = (self.number("num_experts")?, self.number("moe_intermediate_size")?);
        self.add("feed_forward.gate.weight", &[experts, self.of.hidden]);
        self.add("feed_forward.expert_bias", &[experts]);
        for expert in 0..experts {
            self.add(&format!("feed_forward.experts.{expert}.w1.weight"), &[width, self.of.hidden]);
            self.add(&format!("feed_forward.experts.{expert}.w2.weight"), &[self.of.hidden, width]);
            self.add(&format!("feed_forward.experts.{expert}.w3.weight"), &[width, self.of.hidden]);
        }
        Ok(())
    }

    fn norms(&mut self) {
        let norms: &[&str] = match self.of.family {
            "lfm2" | "lfm2_moe" => &["operator_norm", "ffn_norm"],
            "falcon_h1" => &["input_layernorm", "pre_ff_layernorm"],
            "gemma2" | "gemma3_text" | "gemma4_text" => &[
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ],
            "glm4" => {
                &["input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"]
            }
            "phi" | "cohere2" => &["input_layernorm"],
            "exaone4" | "olmo3" => &["post_attention_layernorm", "post_feedforward_layernorm"],
            _ => &["input_layernorm", "post_attention_layernorm"],
        };
        for name in norms {
            self.add(&format!("{name}.weight"), &[self.of.hidden]);
            if self.of.centred {
                self.add(&format!("{name}.bias"), &[self.of.hidden]);
            }
        }
    }
}
