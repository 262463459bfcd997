//! Decoding speed of each element type on one thread, out of cache and in rows as a converter reads them.
//!
//! `cargo bench --bench dequantize [-- TYPE…]`

use std::hint::black_box;
use std::time::Instant;

use anec_source::{SourceDtype, dequantize};

/// Columns of a row: divisible by every block size.
const COLUMNS: usize = 4096;
/// Rows of the tensor: 64 MiB of f32, more than caches hold.
const ROWS: usize = 4096;
/// Rows of one read.
const CHUNK: usize = 64;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let mut out = vec![0f32; CHUNK * COLUMNS];
    println!("{:10} {:>8} {:>8}", "type", "Gel/s", "GB/s in");
    for dtype in SourceDtype::all() {
        if !wanted.is_empty() && !wanted.iter().any(|name| name == dtype.name()) {
            continue;
        }
        let Some(length) = dtype.bytes((ROWS * COLUMNS) as u64) else { continue };
        // Neither zeros nor NaNs; 0x2A in the place of a scale's upper byte makes it small and finite.
        let bytes: Vec<u8> = (0..length).map(|i| if i % 2 == 1 { 0x2A } else { ((i * 37) >> 3) as u8 }).collect();
        let best = (0..20)
            .map(|_| {
                let start = Instant::now();
                for chunk in 0..ROWS / CHUNK {
                    dequantize::read(dtype, &bytes, (chunk * CHUNK * COLUMNS) as u64, &mut out);
                    black_box(&mut out);
                }
                start.elapsed().as_secs_f64()
            })
            .fold(f64::INFINITY, f64::min);
        let elements = (ROWS * COLUMNS) as f64;
        println!("{:10} {:8.2} {:8.2}", dtype.name(), elements / best / 1e9, length as f64 / best / 1e9);
    }
}
