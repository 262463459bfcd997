//! Quantized checkpoints keep their integers in number formats that can hold them.

use crate::common::folder::{self, json, run};
use crate::common::model::{self, RawTensor};

use std::path::Path;

use anec::exec::Precision;
use anec::runtime::{Chunking, ForwardOptions, LoadedModel};
use half::f16;
use safetensors::Dtype;
use serde_json::{Value as Json, json as value};

/// Columns that share a scale.
const GROUP: usize = 32;
/// Places of eight neighbouring rows within a word of AWQ.
const AWQ_ORDER: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Integers of 4 bits from 0 on, with a scale and a zero point for each group of a row.
struct Quantized {
    rows: usize,
    columns: usize,
    codes: Vec<u8>,
    scales: Vec<f16>,
    zeros: Vec<u8>,
}

impl Quantized {
    /// Rounds a matrix. Without `zero_points`, 8 stands for zero.
    fn of(shape: &[usize], data: &[u8], zero_points: bool) -> Self {
        let (rows, columns) = (shape[0], shape[1]);
        let values: Vec<f32> = data.as_chunks().0.iter().map(|half| f16::from_le_bytes(*half).to_f32()).collect();
        let (mut codes, mut scales, mut zeros) = (Vec::new(), Vec::new(), Vec::new());
        for group in values.chunks(GROUP) {
            let (least, most) = group.iter().fold((0f32, 0f32), |(least, most), v| (least.min(*v), most.max(*v)));
            let steps = if zero_points { (most - least) / 15.0 } else { most.max(-least) / 7.0 };
            let scale = f16::from_f32(steps).max(f16::MIN_POSITIVE);
            let zero = if zero_points { (-least / scale.to_f32()).round().clamp(0.0, 15.0) } else { 8.0 };
            let code = |v: &f32| ((v / scale.to_f32()).round() + zero).clamp(0.0, 15.0) as u8;
            codes.extend(group.iter().map(code));
            scales.push(scale);
            zeros.push(zero as u8);
        }
        Quantized { rows, columns, codes, scales, zeros }
    }

    fn groups(&self) -> usize {
        self.columns / GROUP
    }

    /// Values that the integers stand for.
    fn plain(&self, name: String) -> RawTensor {
        let value = |(index, code): (usize, &u8)| {
            let group = index / GROUP;
            (f32::from(*code) - f32::from(self.zeros[group])) * self.scales[group].to_f32()
        };
        let bytes = self.codes.iter().enumerate().flat_map(|of| value(of).to_le_bytes()).collect();
        (name, Dtype::F32, vec![self.rows, self.columns], bytes)
    }

    /// Tensors of compressed-tensors: words along the columns.
    fn compressed(&self, base: &str) -> Vec<RawTensor> {
        let word = |codes: &[u8]| codes.iter().rev().fold(0u32, |word, code| word << 4 | u32::from(*code));
        let packed = self.codes.chunks(8).flat_map(|codes| word(codes).to_le_bytes()).collect();
        let scales = self.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let shape = [self.rows, self.columns].iter().flat_map(|size| (*size as i64).to_le_bytes()).collect();
        vec![
            (format!("{base}.weight_packed"), Dtype::I32, vec![self.rows, self.columns / 8], packed),
            (format!("{base}.weight_scale"), Dtype::F16, vec![self.rows, self.groups()], scales),
            (format!("{base}.weight_shape"), Dtype::I64, vec![2], shape),
        ]
    }

    /// Tensors of AWQ: words along the rows, transposed.
    fn awq(&self, base: &str) -> Vec<RawTensor> {
        let (rows, groups) = (self.rows, self.groups());
        let word = |of: &dyn Fn(usize) -> u8, first: usize| {
            (0..8).fold(0u32, |word, row| word | u32::from(of(first + row)) << (4 * AWQ_ORDER[row]))
        };
        let words = |lines: usize, of: &dyn Fn(usize, usize) -> u8| -> Vec<u8> {
            let of_line = |line: usize| (0..rows).step_by(8).map(move |first| word(&|row| of(row, line), first));
            (0..lines).flat_map(of_line).flat_map(u32::to_le_bytes).collect()
        };
        let codes = words(self.columns, &|row, column| self.codes[row * self.columns + column]);
        let zeros = words(groups, &|row, group| self.zeros[row * groups + group]);
        let scales = (0..groups).flat_map(|group| (0..rows).map(move |row| (row, group)));
        let scales = scales.flat_map(|(row, group)| self.scales[row * groups + group].to_le_bytes()).collect();
        vec![
            (format!("{base}.qweight"), Dtype::I32, vec![self.columns, rows / 8], codes),
            (format!("{base}.qzeros"), Dtype::I32, vec![groups, rows / 8], zeros),
            (format!("{base}.scales"), Dtype::F16, vec![groups, rows], scales),
        ]
    }
}

/// Writes the demo with quantized projections, and the same values unquantized.
fn write(quantized: &Path, plain: &Path, settings: &Json, awq: bool) {
    for (folder, is_plain) in [(quantized, false), (plain, true)] {
        model::copy(&folder::repository("demo/model"), folder);
        model::edit_tensors(&folder.join("model.safetensors"), |tensors| {
            let replace = |tensor: RawTensor| {
                let (name, _, shape, data) = &tensor;
                let Some(base) = name.strip_suffix("_proj.weight") else { return vec![tensor] };
                let of = Quantized::of(shape, data, awq);
                match (is_plain, awq) {
                    (true, _) => vec![of.plain(name.clone())],
                    (false, true) => of.awq(&format!("{base}_proj")),
                    (false, false) => of.compressed(&format!("{base}_proj")),
                }
            };
            *tensors = std::mem::take(tensors).into_iter().flat_map(replace).collect();
        });
    }
    model::edit_json(&quantized.join("config.json"), |config| config["quantization_config"] = settings.clone());
}

/// Converts; returns the result and its notes.
fn convert(source: &Path, out: &Path, sets: &[&str]) -> (Json, String) {
    let fixed = ["convert", "--source", source.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let sets = sets.iter().chain(&["context=64"]).flat_map(|set| ["--set", set]);
    let rest = ["--no-measure", "--no-compile", "--json"];
    let (code, stdout, stderr) = run(&fixed.into_iter().chain(rest).chain(sets).collect::<Vec<_>>());
    assert_eq!(code, 0, "{stderr}");
    let result: Json = serde_json::from_str(&stdout).unwrap();
    let notes = result["notes"].to_string();
    (result, notes)
}

fn logits(bundle: &Path) -> Vec<f32> {
    let tokens: Vec<u32> = (0..40).map(|index| 5 + index * 37 % 2000).collect();
    let model = LoadedModel::on_cpu(bundle, Precision::F32).unwrap();
    let ask = ForwardOptions::all(Chunking::Largest);
    model.start(tokens.len() as u64).unwrap().forward(&tokens, &ask).unwrap().logits
}

#[test]
fn integers_are_kept_where_the_format_can_hold_them() {
    let weights = value!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": true});
    let compressed = value!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    });
    let awq = value!({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": true});
    let fitting = ["quant.weights=int4", "quant.granularity={block: 32}", "quant.overrides={lm_head: {weights: none}}"];
    for (settings, is_awq) in [(compressed, false), (awq, true)] {
        let room = tempfile::tempdir().unwrap();
        let [quantized, plain, out] = ["quantized", "plain", "out"].map(|name| room.path().join(name));
        write(&quantized, &plain, &settings, is_awq);
        convert(&plain, &out, &["quant.weights=none"]);
        let expected = logits(&out);
        // a coarser format rounds anew, and a note tells how not to
        let coarse = room.path().join("coarse");
        let (_, notes) = convert(&quantized, &coarse, &[]);
        assert!(notes.contains("integers with a scale for each 32 columns, which were rounded anew"), "{notes}");
        assert!(notes.contains("`quant.weights: int4`, `quant.granularity: { block: 32 }`"), "{notes}");
        assert!(json(&coarse.join("bundle.json"))["ledger"]["kept"].is_null());

        let wide = ["quant.weights=int8", fitting[1], fitting[2]];
        for (name, sets) in [("kept", &fitting), ("wide", &wide)] {
            let out = room.path().join(name);
            let (result, notes) = convert(&quantized, &out, sets);
            // six layers of seven projections
            assert!(notes.contains("42 of 42 quantized weights keep the source's integers"), "{notes}");
            let tensors = result["report"]["packages"].as_array().unwrap().iter();
            let tensors = tensors.flat_map(|package| package["tensors"].as_array().unwrap());
            assert_eq!(tensors.filter(|tensor| tensor["kept"] == true).count(), 42);
            assert_eq!(json(&out.join("bundle.json"))["ledger"]["kept"], 42);
            let (_, shown, _) = run(&["inspect", out.to_str().unwrap()]);
            assert!(shown.contains("42 with their integers kept"), "{shown}");
            let found = logits(&out);
            let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
            let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 4e-3 * largest, "{name}, AWQ {is_awq}: {worst} of {largest}");
        }
        // any change of the weights loses them
        let (result, _) =
            convert(&quantized, &room.path().join("turned"), &[&fitting[..], &["transforms=[rotate]"]].concat());
        let tensors = result["report"]["packages"].as_array().unwrap().iter();
        assert!(
            tensors.flat_map(|package| package["tensors"].as_array().unwrap()).all(|tensor| tensor["kept"].is_null())
        );
        assert_eq!(run(&["validate", room.path().join("kept").to_str().unwrap(), "--structure"]).0, 0);
    }
}
