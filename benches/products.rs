//! Speed of the executor's matrix products by stored type and number of tokens: `cargo bench --bench products`, or, for
//! lines that begin with a text, `cargo bench --bench products -- "4864x896 int8"`.

use std::sync::Arc;
use std::time::Instant;

use half::f16;

use anec_kernels::codes::{CodeTables, PackedCodes};
use anec_kernels::layout::MatrixLayout;
use anec_kernels::product::{Activations, multiply};
use anec_kernels::weight::{Elements, Scales, StoredWeight};

/// Pseudo-random numbers between -1 and 1.
fn noise(count: usize, mut seed: u32) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn main() {
    // cargo appends an option of its own
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    for (rows, columns) in [(4864, 896), (896, 4864), (16384, 4096)] {
        let values = noise(rows * columns, 1);
        let bytes: Vec<i8> = values.iter().map(|v| (v * 127.0) as i8).collect();
        let halves = values.iter().map(|v| f16::from_f32(*v)).collect();
        let scales = || Scales { values: vec![0.01; rows], blocks: 1 };
        let shape = || vec![rows, columns];
        let coded = |bits: usize, numbers: &[f32], scales: Scales| {
            let packed: Vec<u8> = bytes.iter().map(|v| *v as u8).take(rows * columns * bits / 8).collect();
            let codes = Arc::new(Elements::Codes(PackedCodes::new(bits, packed.into())));
            StoredWeight::coded(shape(), codes, CodeTables::new(bits, 1 << bits, numbers, rows), scales)
        };
        let palette = |bits: usize| coded(bits, &noise(1 << bits, 3), scales());
        let integers: Vec<f32> = (0..16).map(|code| if code < 8 { code } else { code - 16 } as f32).collect();
        let of_blocks = Scales { values: noise(rows * columns / 32, 4), blocks: columns / 32 };
        let weights = [
            ("palette4", 0.5, palette(4)),
            ("palette6", 0.75, palette(6)),
            ("palette8", 1.0, palette(8)),
            ("int4, blocks of 32", 0.5, coded(4, &integers, of_blocks)),
            ("int8", 1.0, StoredWeight::scaled(shape(), Arc::new(Elements::Int8(bytes.clone().into())), scales())),
            ("fp16", 2.0, StoredWeight::plain(shape(), Arc::new(Elements::F16(halves)))),
            ("fp32", 4.0, StoredWeight::plain(shape(), Arc::new(Elements::F32(values.into())))),
        ];
        let all = [Activations::F32, Activations::I16, Activations::I8];
        let cases = weights.iter().flat_map(|weight| all.map(|activations| (weight, activations)));
        for ((name, width, weight), activations) in cases {
            let name = format!("{rows}x{columns} {name} {activations:?}");
            if !name.starts_with(&wanted) {
                continue;
            }
            for tokens in [1, 2, 4, 8, 16, 64, 256, 512] {
                let x = noise(columns * tokens, 2);
                let layout = MatrixLayout { row: tokens, column: 1 };
                let mut out = vec![0.0; rows * tokens];
                let mut best = f64::INFINITY;
                for _ in 0..7 {
                    let start = Instant::now();
                    multiply(weight, activations, (&x, layout), tokens, None, (&mut out, layout));
                    best = best.min(start.elapsed().as_secs_f64());
                }
                let read = (rows * columns) as f64 * width / best / 1e9;
                let work = 2.0 * (rows * columns * tokens) as f64 / best / 1e9;
                println!("{name} T={tokens:<3} {:8.3} ms {read:6.1} GB/s {work:7.1} GFLOP/s", best * 1e3);
            }
        }
    }
}
