//! Comparison with the formats' own libraries: `tests/fixtures/quantized`.

use std::path::Path;

use anec_source::Source;

use super::*;

/// Reads a content whole.
fn bytes(content: &dyn Content) -> Vec<u8> {
    let mut bytes = vec![0; content.length() as usize];
    content.read(0, &mut bytes).unwrap();
    bytes
}

fn unpacked(bytes: &[u8], dtype: DataType) -> Vec<f32> {
    match dtype {
        DataType::Int4 => {
            let signed = |nibble: u8| f32::from((nibble << 4) as i8 >> 4);
            bytes.iter().flat_map(|byte| [signed(byte & 15), signed(byte >> 4)]).collect()
        }
        _ => bytes.iter().map(|byte| f32::from(*byte as i8)).collect(),
    }
}

/// Values of a fixture as its format's own library gives them, their shape, and the weight that the source gives.
fn fixture(case: &str) -> (Vec<f32>, SourceWeight) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/quantized").join(case);
    // alone, because the configuration beside it is the checkpoint's
    let room = tempfile::tempdir().unwrap();
    let golden = room.path().join("golden.safetensors");
    std::fs::copy(folder.join("golden.safetensors"), &golden).unwrap();
    let golden = Source::open_path(&golden).unwrap();
    let golden = golden.tensor("a.weight").unwrap();
    let mut values = vec![0.0; golden.elements() as usize];
    golden.read(0, &mut values).unwrap();
    let source = Source::open_path(&folder.join("model.safetensors")).unwrap();
    (values, SourceWeight::from(source.tensor("a.weight").unwrap().clone()))
}

/// Expands a weight as the op does.
fn expanded(kept: &Arc<KeptWeight>) -> Vec<f32> {
    let layout = kept.layout();
    let [_, of_row] = layout.scales.unwrap();
    let data = unpacked(&bytes(&*kept.data()), layout.dtype);
    let scales = bytes(&*kept.scale());
    let scales: Vec<f32> = scales.as_chunks().0.iter().map(|half| f16::from_le_bytes(*half).to_f32()).collect();
    let offsets = kept.offset().map(|content| unpacked(&bytes(&*content), layout.dtype));
    assert_eq!(offsets.is_some(), layout.offsets);
    let size = layout.columns / of_row;
    let value = |(index, data): (usize, &f32)| {
        let block = (index as u64 / layout.columns * of_row + index as u64 % layout.columns / size) as usize;
        scales[block] * (data - offsets.as_ref().map_or(0.0, |offsets| offsets[block]))
    };
    data.iter().enumerate().map(value).collect()
}

const INT4: WeightFormat = WeightFormat::Int4;
const INT8: WeightFormat = WeightFormat::Int8;

fn kept(weight: &SourceWeight, weights: WeightFormat, granularity: Granularity) -> Option<Arc<KeptWeight>> {
    let format = NumberFormat { weights, granularity, ..NumberFormat::FP16 };
    KeptWeight::new(weight.clone(), KeptIntegers::of(weight, format)?)
}

#[test]
fn integers_of_every_format_decode_to_the_librarys_values() {
    let (block, channel) = (Granularity::Block(32), Granularity::PerChannel);
    let mut wrong = Vec::new();
    for (case, granularity, formats) in [
        ("awq", block, &[INT4, INT8][..]),
        // version 1 of the format stores zero points less one, and random ones reach 16
        ("gptq-4", block, &[INT8]),
        ("gptq-3", block, &[INT4, INT8]),
        ("gptq-2", block, &[INT4, INT8]),
        ("compressed-int4", block, &[INT4, INT8]),
        ("compressed-int4-zeros", block, &[INT4, INT8]),
        ("compressed-int3-zeros", block, &[INT4, INT8]),
        ("compressed-int8", block, &[INT8]),
        ("compressed-int8-row", channel, &[INT8]),
        ("bnb-int8", channel, &[INT8]),
        ("mlx-2", block, &[INT4, INT8]),
        ("mlx-3", block, &[INT4, INT8]),
        ("mlx-4", block, &[INT4, INT8]),
        // biases in bfloat16 are no multiples of their scales, by a fair part of a step
        ("mlx-5", block, &[]),
        ("mlx-8", block, &[]),
        // the columns of a group aren't neighbours
        ("gptq-4-order", block, &[]),
        ("compressed-int4-order", block, &[]),
        // codebooks with a scale for each block of elements are no form of Core ML
        ("bnb-nf4", block, &[]),
        ("fp8-row", channel, &[]),
    ] {
        let (golden, weight) = fixture(case);
        for format in [INT4, INT8] {
            let found = kept(&weight, format, granularity);
            if found.is_some() != formats.contains(&format) {
                wrong.push(format!("{case} {format}: kept is {}", found.is_some()));
            }
            let Some(kept) = found else { continue };
            let found = expanded(&kept);
            assert_eq!(found.len(), golden.len());
            let width = weight.columns() as usize;
            for (found, golden) in found.chunks(width).zip(golden.chunks(width)) {
                // the library rounds to its type, MLX twice, and bfloat16 has eight bits; scales below fp16's normal
                // numbers are replaced by the least
                let largest = golden.iter().fold(0f32, |most, value| most.max(value.abs()));
                let most = (largest / 128.0).max(0.51 * f16::MIN_POSITIVE.to_f32());
                let close = |(found, golden): (&f32, &f32)| (found - golden).abs() <= most;
                if !found.iter().zip(golden).all(close) {
                    wrong.push(format!("{case} {format}: {found:?} {golden:?}"));
                }
            }
            let loss = kept.measures().total().unwrap();
            // MLX rounds to bfloat16 before it adds the bias
            let most = if case.starts_with("mlx") { 2e-2 } else { 3e-3 };
            if loss.relative_rms_error >= most {
                wrong.push(format!("{case} {format}: {loss:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn finer_blocks_repeat_scales_and_coarser_ones_do_not_fit() {
    let (golden, weight) = fixture("compressed-int4");
    let kept_in = |granularity| kept(&weight, INT4, granularity);
    assert_eq!(expanded(&kept_in(Granularity::Block(32)).unwrap()), expanded(&kept_in(Granularity::Block(8)).unwrap()));
    assert_eq!(golden.len(), expanded(&kept_in(Granularity::Block(16)).unwrap()).len());
    for granularity in [Granularity::Block(64), Granularity::PerChannel, Granularity::PerTensor] {
        assert!(kept_in(granularity).is_none(), "{granularity}");
    }
}

#[test]
fn rows_may_be_chosen_and_joined_but_not_changed() {
    let (_, weight) = fixture("awq");
    let joined = SourceWeight::concatenate(vec![weight.slice(8..16).unwrap(), weight.slice(0..4).unwrap()]).unwrap();
    let whole = expanded(&kept(&weight, INT4, Granularity::Block(32)).unwrap());
    let found = expanded(&kept(&joined, INT4, Granularity::Block(32)).unwrap());
    assert_eq!(found, [&whole[8 * 128..16 * 128], &whole[..4 * 128]].concat());
    for changed in [weight.scale(2.0), weight.transpose().unwrap(), weight.columns_range(0..64).unwrap()] {
        assert!(kept(&changed, INT4, Granularity::Block(32)).is_none());
    }
    let affine =
        NumberFormat { weights: INT8, granularity: Granularity::PerChannel, op: Int8Op::Affine, ..NumberFormat::FP16 };
    // differences of integers and zero points fit into a byte
    assert!(KeptIntegers::of(&fixture("bnb-int8").1, affine).is_some());
}
