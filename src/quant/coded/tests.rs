use super::*;
use anec_manifest::{Granularity, Int8Op, WeightFormat};
use anec_mil::DataType;
use anec_source::SquareMatrix;

fn weight(rows: u64, columns: u64, value: impl Fn(u64, u64) -> f32) -> SourceWeight {
    let values = (0..rows * columns).map(|i| value(i / columns, i % columns)).collect();
    SourceWeight::from_values("w", &[rows, columns], values).unwrap()
}

fn noise(row: u64, column: u64) -> f32 {
    let x = (row * 7919 + column + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((x >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * (1.0 + row as f32 * 0.1)
}

fn bytes(content: &dyn Content) -> Result<Vec<u8>> {
    let mut out = vec![0; content.length() as usize];
    content.prepare()?;
    content.read(0, &mut out)?;
    Ok(out)
}

fn halves(content: Option<Arc<dyn Content>>) -> Vec<f32> {
    let bytes = bytes(&*content.unwrap()).unwrap();
    bytes.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
}

fn format(weights: WeightFormat, granularity: Granularity, row_scale: bool) -> NumberFormat {
    NumberFormat { weights, granularity, row_scale, op: Int8Op::Auto }
}

fn coded(weight: SourceWeight, format: NumberFormat) -> Arc<CodedWeight> {
    CodedWeight::new(weight, format, Overflow::Error, None)
}

fn int8(weight: SourceWeight, granularity: Granularity) -> Arc<CodedWeight> {
    coded(weight, format(WeightFormat::Int8, granularity, false))
}

/// Every format with every granularity that it supports.
fn formats() -> Vec<NumberFormat> {
    use WeightFormat::*;
    let mut all = Vec::new();
    for weights in [Int8, Int4] {
        for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::Block(32)] {
            all.push(format(weights, granularity, false));
        }
    }
    for weights in [Palette8, Palette6, Palette4, Palette3, Palette2, Palette1] {
        for granularity in [Granularity::PerTensor, Granularity::Group(16)] {
            all.extend([false, true].map(|row_scale| format(weights, granularity, row_scale)));
        }
    }
    all
}

/// Numbers that a coded weight stands for, decoded from its bytes alone.
fn expanded(coded: &Arc<CodedWeight>) -> Vec<f32> {
    let layout = *coded.layout();
    let (rows, columns, bits) = (layout.rows as usize, layout.columns as usize, layout.dtype.bits() as usize);
    let data = bytes(&*coded.data()).unwrap();
    let code =
        |i: usize| (0..bits).map(|b| usize::from(data[(i * bits + b) / 8] >> ((i * bits + b) % 8) & 1) << b).sum();
    let row_scales = if layout.row_scales { halves(coded.row_scale()) } else { vec![1.0; rows] };
    let number = |i: usize| -> f32 {
        let (row, column, code): (usize, usize, usize) = (i / columns, i % columns, code(i));
        if let Some([_, blocks]) = layout.scales {
            let scales = halves(coded.scale());
            let blocks = blocks as usize;
            let scale = if scales.len() == 1 { scales[0] } else { scales[row * blocks + column * blocks / columns] };
            let signed = code as i32 - if code >> (bits - 1) == 1 { 1 << bits } else { 0 };
            return scale * signed as f32;
        }
        let palettes = halves(coded.palette());
        let group = rows / layout.palettes.unwrap() as usize;
        row_scales[row] * palettes[((row / group) << bits) + code]
    };
    (0..rows * columns).map(number).collect()
}

#[test]
fn bytes_of_every_format_stand_for_the_weights() {
    // 33 columns: rows end within bytes
    let source = weight(48, 33, noise);
    for format in formats() {
        let coded = coded(source.clone(), format);
        let layout = coded.layout();
        let lengths = [Some(coded.data()), coded.scale(), coded.palette(), coded.row_scale()]
            .map(|c| c.map_or(0, |c| c.length()));
        assert_eq!(lengths.iter().sum::<u64>(), layout.bytes(), "{format}");
        let found = expanded(&coded);
        let (mut error, mut size) = (0.0, 0.0);
        for (i, found) in found.iter().enumerate() {
            let value = noise(i as u64 / 33, i as u64 % 33);
            error += f64::from(value - found).powi(2);
            size += f64::from(value).powi(2);
        }
        let loss = coded.measures().total().unwrap();
        let relative = (error / size).sqrt();
        assert!((loss.relative_rms_error / relative - 1.0).abs() < 1e-3, "{format}: {loss:?} {relative}");
        // uniform noise: steps of 2 / 2^bits, with an error of step / sqrt(12)
        let steps = f64::from(1u32 << layout.dtype.bits());
        assert!(relative < 3.4 / steps && relative > 0.1 / steps, "{format}: {relative}");
    }
}

#[test]
fn parts_read_in_any_order_are_the_whole_and_measure_the_same() {
    for format in formats() {
        let make = || coded(weight(400, 77, noise), format);
        let (a, b) = (make(), make());
        let whole = bytes(&*a.data()).unwrap();
        let data = b.data();
        let mut parts = vec![0; whole.len()];
        for (i, part) in parts.chunks_mut(data.granule() as usize).enumerate().rev() {
            data.read(i as u64 * data.granule(), part).unwrap();
        }
        assert!(parts == whole, "{format}");
        assert_eq!(a.measures().total(), b.measures().total(), "{format}");
        // scales and palettes are the same whether they are read before or after the codes
        let c = make();
        for part in [CodedWeight::scale, CodedWeight::palette, CodedWeight::row_scale] {
            let of = |coded: &Arc<CodedWeight>| part(coded).map(|content| bytes(&*content).unwrap());
            assert!(of(&c) == of(&a), "{format}");
        }
    }
}

#[test]
fn threads_change_nothing() {
    // enough weights to be counted instead of sorted
    let source = weight(900, 600, |r, c| noise(r, c) * noise(c, r));
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for row_scale in [false, true] {
        let format = format(WeightFormat::Palette4, Granularity::PerTensor, row_scale);
        let make = || {
            let coded = CodedWeight::new(source.clone(), format, Overflow::Error, None);
            (bytes(&*coded.data()).unwrap(), halves(coded.palette()), coded.row_scale().map(|of| bytes(&*of).unwrap()))
        };
        assert!(make() == alone.install(make));
    }
}

#[test]
fn each_channel_has_the_scale_of_its_largest_value() {
    let int8 = int8(weight(300, 333, noise), Granularity::PerChannel);
    let data = bytes(&*int8.data()).unwrap();
    let scales = halves(int8.scale());
    assert_eq!(scales.len(), 300);
    for (row, scale) in scales.iter().enumerate() {
        let values: Vec<f32> = (0..333).map(|c| noise(row as u64, c)).collect();
        let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
        assert_eq!(*scale, f16::from_f32(largest / 127.0).to_f32());
        let q = &data[row * 333..][..333];
        assert_eq!(q.iter().map(|q| (*q as i8).unsigned_abs()).max(), Some(127));
        for (x, q) in values.iter().zip(q) {
            assert!((x - f32::from(*q as i8) * scale).abs() <= 0.501 * scale + 0.06 * scale, "{x} {q} {scale}");
        }
    }
}

#[test]
fn a_tensor_has_one_scale() {
    let one = int8(weight(300, 333, noise), Granularity::PerTensor);
    let data = bytes(&*one.data()).unwrap();
    assert_eq!(halves(one.scale()).len(), 1);
    assert_eq!(data.iter().map(|q| (*q as i8).unsigned_abs()).max(), Some(127));
    let per_tensor = one.measures().total().unwrap();
    let finer = int8(weight(300, 333, noise), Granularity::PerChannel);
    bytes(&*finer.data()).unwrap();
    let per_channel = finer.measures().total().unwrap();
    assert!(per_channel.relative_rms_error < per_tensor.relative_rms_error);
    assert!(per_channel.cosine > per_tensor.cosine && per_tensor.cosine > 0.999);
}

#[test]
fn zeros_and_tiny_channels_have_safe_scales() {
    let tiny = || weight(3, 64, |row, c| [0.0, 1e-5, 1.0][row as usize] * if c % 2 == 0 { 1.0 } else { -1.0 });
    let int8 = int8(tiny(), Granularity::PerChannel);
    let data = bytes(&*int8.data()).unwrap();
    assert_eq!(halves(int8.scale())[..2], [1.0, 2f32.powi(-14)]);
    assert!(data[..64].iter().all(|q| *q == 0));
    assert_eq!(data[128..130], [127, 129]);
    let scaled = coded(tiny(), format(WeightFormat::Palette4, Granularity::PerTensor, true));
    assert_eq!(halves(scaled.row_scale()), [1.0, f16::from_f32(1.6e-4).to_f32(), 16.0]);
    for format in formats() {
        let zeros = coded(weight(4, 4, |_, _| 0.0), format);
        assert!(expanded(&zeros).iter().all(|value| *value == 0.0), "{format}");
        for scales in [zeros.scale(), zeros.row_scale()].into_iter().flatten() {
            assert!(halves(Some(scales)).iter().all(|scale| *scale == 1.0), "{format}");
        }
        assert_eq!(zeros.measures().total().unwrap().cosine, 1.0);
    }
}

#[test]
fn a_bad_number_or_one_too_large_names_its_place() {
    let bad = |value: f32| move |r: u64, c: u64| if (r, c) == (70, 3) { value } else { 0.1 };
    for format in formats() {
        let error = bytes(&*coded(weight(99, 600, bad(f32::NAN)), format).data());
        assert!(error.unwrap_err().to_string().contains("`w`, row 70, column 3"), "{format}");
        let error = bytes(&*coded(weight(99, 600, bad(1e6)), format).data());
        assert!(error.unwrap_err().to_string().contains("row 70, column 3: 1000000 doesn't fit"), "{format}");
        let weight = weight(99, 600, bad(1e6));
        let coded = CodedWeight::new(weight, format, Overflow::Saturate, None);
        bytes(&*coded.data()).unwrap();
        assert_eq!(coded.measures().total().unwrap().saturated, 1, "{format}");
    }
}

#[test]
fn the_extremes_are_among_256_levels() {
    let values = |r: u64, c: u64| if (r, c) == (5, 5) { 40.0 } else { noise(r, c) };
    let palette =
        halves(coded(weight(64, 64, values), format(WeightFormat::Palette8, Granularity::PerTensor, false)).palette());
    assert_eq!(palette.len(), 256);
    assert!(palette.is_sorted() && palette[255] == 40.0);
    // if there are at most as many different weights as levels, they are the levels
    let few = coded(weight(8, 8, |r, _| r as f32), format(WeightFormat::Palette3, Granularity::PerTensor, false));
    assert_eq!(halves(few.palette()), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    let two = coded(weight(8, 8, |r, _| (r % 2) as f32), format(WeightFormat::Palette2, Granularity::PerTensor, false));
    assert_eq!(halves(two.palette()), [0.0, 1.0, 1.0, 1.0]);
}

#[test]
fn shown_grids_match_the_codes() {
    // grids shown to error feedback match the weight's codes in every format
    for format in formats() {
        let nearest = coded(weight(20, 64, noise), format);
        let whole = expanded(&nearest);
        let found = nearest.with_grids(7..15, &mut Vec::new(), |values, grids| {
            let back = |((row, column), value): ((usize, usize), &f32)| {
                let grid = &grids[row];
                grid.value(column, grid.nearest(column, *value))
            };
            assert_eq!((values.dim(), grids.len()), ((8, 64), 8));
            values.indexed_iter().map(back).collect::<Vec<f32>>()
        });
        let found = found.unwrap();
        assert!(found.iter().zip(&whole[7 * 64..]).all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs()), "{format}");
    }
}

#[test]
fn codes_can_be_chosen_by_a_rounding() {
    /// Rounding towards negative infinity.
    struct Floor;

    impl Rounding for Floor {
        fn rows_at_a_time(&self) -> u64 {
            5
        }

        fn round(&self, _: u64, values: &[f32], grids: &[Grid<'_>], codes: &mut [u8]) -> Result<()> {
            let columns = values.len() / grids.len();
            for (i, (value, code)) in values.iter().zip(codes).enumerate() {
                let (grid, column) = (&grids[i / columns], i % columns);
                *code = grid.nearest(column, *value);
                // steps of a negative scale descend
                let down = matches!(grid, Grid::Steps { .. }) && grid.value(column, 1) < 0.0;
                let last: &[u8] = if down { &[7] } else { &[0x81, 0xf8, 0xf9] };
                if grid.value(column, *code) > *value && !last.contains(code) {
                    let lower = if down { code.wrapping_add(1) } else { code.wrapping_sub(1) };
                    *code = if matches!(grid, Grid::Levels { .. }) && *code == 0 { 0 } else { lower };
                }
            }
            Ok(())
        }
    }

    for format in formats() {
        let chosen = CodedWeight::new(weight(20, 64, noise), format, Overflow::Error, Some(Arc::new(Floor)));
        let found = expanded(&chosen);
        let lowest = found.iter().copied().fold(f32::INFINITY, f32::min);
        let above = found.iter().enumerate().filter(|(i, found)| {
            let value = noise(*i as u64 / 64, *i as u64 % 64);
            **found > value * (1.0 + 1e-6 * value.signum()) && **found > lowest
        });
        // values below the lowest number of their row's grid can't be rounded down
        assert!(above.count() <= 20 * 16, "{format}");
        let loss = chosen.measures().total().unwrap();
        let nearest = coded(weight(20, 64, noise), format);
        bytes(&*nearest.data()).unwrap();
        assert!(loss.relative_rms_error > nearest.measures().total().unwrap().relative_rms_error, "{format}");
    }
    assert_eq!(WeightLayout::of(formats()[3], 2, 2).dtype, DataType::Int4);
}

/// Weights of one large input get levels of their own if the moments of the inputs are known.
#[test]
fn levels_go_where_the_inputs_are_large() {
    let massive = |column: u64| column == 7;
    let values = move |r: u64, c: u64| if massive(c) { 5.0 + (r % 4) as f32 / 4.0 } else { noise(r, c) };
    let moments: Vec<f32> = (0..64).map(|column| if massive(column) { 1e6 } else { 1.0 }).collect();
    for (granularity, row_scale) in [(Granularity::PerTensor, false), (Granularity::Group(16), false)] {
        let format = format(WeightFormat::Palette4, granularity, row_scale);
        let make = |inputs| CodedWeight::with_inputs(weight(64, 64, values), format, Overflow::Error, None, inputs);
        let error = |coded: &Arc<CodedWeight>| {
            let expanded = expanded(coded);
            (0..64).map(|r| (expanded[r * 64 + 7] - values(r as u64, 7)).powi(2)).sum::<f32>()
        };
        let (alike, weighed) = (make(Inputs::Unknown), make(Inputs::Moments(&moments)));
        assert!(error(&weighed) < 0.1 * error(&alike), "{} {}", error(&weighed), error(&alike));
        // moments of another width, or all zero, have no effect
        for moments in [&moments[1..], &[0.0; 64]] {
            assert_eq!(halves(make(Inputs::Moments(moments)).palette()), halves(alike.palette()));
        }
    }
}

/// Matrix that exchanges neighbours, counts the elements that it multiplied, and lets other threads go on meanwhile.
struct Exchange(std::sync::atomic::AtomicUsize);

impl SquareMatrix for Exchange {
    fn size(&self) -> u64 {
        64
    }

    fn name(&self) -> String {
        "exchange".into()
    }

    fn multiply_rows(&self, rows: &mut [f32]) -> anec_source::Result<()> {
        self.0.fetch_add(rows.len(), std::sync::atomic::Ordering::Relaxed);
        std::thread::sleep(std::time::Duration::from_micros(50));
        rows.chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1));
        Ok(())
    }

    fn multiply_columns(&self, matrix: &mut [f32], columns: usize) -> anec_source::Result<()> {
        self.0.fetch_add(matrix.len(), std::sync::atomic::Ordering::Relaxed);
        matrix.chunks_exact_mut(2 * columns).for_each(|pair| {
            let (first, second) = pair.split_at_mut(columns);
            first.swap_with_slice(second);
        });
        Ok(())
    }
}

/// Scale and codes of a rotated tensor need one product, also if many threads read pieces out of order; in other
/// formats and in a second read the codes are the same.
#[test]
fn products_are_computed_once_for_scale_and_codes() {
    use std::sync::atomic::Ordering::Relaxed;
    type Make = fn(&SourceWeight, &Arc<dyn SquareMatrix>) -> anec_source::Result<SourceWeight>;
    let makes: [(&str, [u64; 2], Make); 2] = [
        ("rows", [3000, 64], |weight, matrix| weight.times(matrix)),
        ("columns", [64, 3000], |weight, matrix| weight.transposed_times(matrix)),
    ];
    for (name, [rows, columns], make) in makes {
        for inputs in [Inputs::Unknown, Inputs::Uniform] {
            let exchange = Arc::new(Exchange(Default::default()));
            let matrix: Arc<dyn SquareMatrix> = exchange.clone();
            let product = make(&weight(rows, columns, noise), &matrix).unwrap();
            let format = format(WeightFormat::Int8, Granularity::PerTensor, false);
            let coded = CodedWeight::with_inputs(product.clone(), format, Overflow::Error, None, inputs);
            let data = coded.data();
            data.prepare().unwrap();
            let mut codes = vec![0; data.length() as usize];
            let piece = data.granule() as usize * 4;
            let mut pieces: Vec<_> = codes.chunks_mut(piece).enumerate().collect();
            pieces.reverse();
            std::thread::scope(|threads| {
                for mut own in [pieces.split_off(pieces.len() / 2), pieces] {
                    let data = data.clone();
                    threads.spawn(move || {
                        own.iter_mut().for_each(|(i, out)| data.read((*i * piece) as u64, out).unwrap());
                    });
                }
            });
            let elements = (rows * columns) as usize;
            // threads that look for work at the end of a pass may compute a block that another hasn't finished
            let most = if name == "rows" { elements + elements / 4 } else { elements };
            let multiplied = exchange.0.load(Relaxed);
            assert!((elements..=most).contains(&multiplied), "{name}: {multiplied} of {elements}");
            let mut values = vec![0f32; elements];
            product.read(0, &mut values).unwrap();
            let plain = SourceWeight::from_values("p", &[rows, columns], values).unwrap();
            let plain = CodedWeight::with_inputs(plain, format, Overflow::Error, None, inputs);
            assert_eq!(bytes(&*plain.data()).unwrap(), codes, "{name}");
            assert_eq!(halves(plain.scale()), halves(coded.scale()), "{name}");
            assert_eq!(bytes(&*data).unwrap(), codes, "{name}, read again");
        }
    }
}
