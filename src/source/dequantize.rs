//! Decoding of source elements to f32, bit for bit as ggml's reference reader decodes them.
//!
//! | module | formats |
//! |---|---|
//! | `numbers` | plain numbers: floats of 8 to 64 bits, integers |
//! | `blocks` | blocks of one or two scales over integers: Q4_0 … Q8_0, Q8_K, ternary, FP4 |
//! | `k_quants` | super-blocks whose sub-blocks have quantized scales: Q2_K … Q6_K, IQ4_XS |
//! | `codebook` | IQ1 … IQ3: groups of elements looked up in a codebook |
//!
//! A format is one function from the bytes of a block to its elements, written so that the compiler vectorizes it.
//! All of them are compiled once for the baseline of the target and, on x86-64, again for AVX2 and for AVX-512; the
//! processor decides which copy runs. No copy may contract `a * b + c`, so all give the same bits.

mod blocks;
mod codebook;
mod k_quants;
mod numbers;

use super::dtype::SourceDtype::{self, *};
use anec_kernels::dispatch::{InstructionSet, Vectorize};
use anec_kernels::prefetch::prefetch_ahead;

pub use numbers::half_to_f32;

/// Number of elements in the largest block.
const LARGEST_BLOCK: usize = 512;

/// Decodes elements `first ..` of a tensor stored in `bytes` until `output` is full.
///
/// `first` need not stand at the start of a block.
///
/// # Panics
/// Panics if `bytes` doesn't hold the elements asked for.
pub fn read(dtype: SourceDtype, bytes: &[u8], first: u64, output: &mut [f32]) {
    let block = dtype.block();
    let (block_elements, block_bytes) = (block.elements as usize, block.bytes as usize);
    let mut at = (first / block.elements) as usize * block_bytes;
    let skip = (first % block.elements) as usize;
    let mut output = output;

    if skip > 0 && !output.is_empty() {
        let mut buffer = [0.0; LARGEST_BLOCK];
        decode(dtype, &bytes[at..at + block_bytes], &mut buffer[..block_elements]);
        let take = output.len().min(block_elements - skip);
        let (head, rest) = output.split_at_mut(take);
        head.copy_from_slice(&buffer[skip..skip + take]);
        output = rest;
        at += block_bytes;
    }
    let whole = output.len() / block_elements;
    let (body, tail) = output.split_at_mut(whole * block_elements);
    let body_bytes = whole * block_bytes;
    decode(dtype, &bytes[at..at + body_bytes], body);
    at += body_bytes;
    if !tail.is_empty() {
        let mut buffer = [0.0; LARGEST_BLOCK];
        decode(dtype, &bytes[at..at + block_bytes], &mut buffer[..block_elements]);
        tail.copy_from_slice(&buffer[..tail.len()]);
    }
}

/// Decodes whole blocks: `input` holds exactly the blocks of `output`.
///
/// # Panics
/// Panics if the lengths don't fit each other.
pub fn decode(dtype: SourceDtype, input: &[u8], output: &mut [f32]) {
    let block = dtype.block();
    let blocks = output.len() as u64 / block.elements;
    assert!(
        blocks * block.elements == output.len() as u64 && blocks * block.bytes == input.len() as u64,
        "{} bytes of {dtype} for {} elements",
        input.len(),
        output.len()
    );
    decode_by(InstructionSet::best(), dtype, input, output);
}

/// Decodes blocks with the functions compiled for an instruction set. Each format's loop is a function of its own,
/// because one function with all loops runs out of registers.
fn decode_by(set: InstructionSet, dtype: SourceDtype, input: &[u8], output: &mut [f32]) {
    /// Decoder of plain elements.
    macro_rules! each {
        ($decode:expr) => {
            set.run(Each { input, output, decode: $decode })
        };
    }
    /// Decoder of blocks. The macro names the function, because a large function passed as a value is called instead of
    /// inlined and then compiled for the baseline only.
    macro_rules! each_block {
        ($decode:path) => {{
            struct Blocks<'a>(&'a [u8], &'a mut [f32]);
            impl Vectorize for Blocks<'_> {
                type Output = ();

                #[inline(always)]
                fn run(self) {
                    for (block, values) in self.0.as_chunks().0.iter().zip(self.1.as_chunks_mut().0) {
                        prefetch_ahead(block);
                        $decode(block, values);
                    }
                }
            }
            set.run(Blocks(input, output))
        }};
    }
    match dtype {
        F64 => each!(numbers::f64),
        F32 => each!(f32::from_le_bytes),
        F16 => each!(numbers::f16),
        BF16 => each!(numbers::bf16),
        F8_E4M3 => each!(numbers::f8_e4m3),
        F8_E5M2 => each!(numbers::f8_e5m2),
        F8_E8M0 => each!(numbers::f8_e8m0),
        F4_E2M1 => each_block!(numbers::f4_e2m1),
        Bool => each!(|[b]: [u8; 1]| f32::from(b != 0)),
        I8 => each!(|b| i8::from_le_bytes(b).into()),
        I16 => each!(|b| i16::from_le_bytes(b).into()),
        I32 => each!(|b| i32::from_le_bytes(b) as f32),
        I64 => each!(|b| i64::from_le_bytes(b) as f32),
        U8 => each!(|[b]: [u8; 1]| b.into()),
        U16 => each!(|b| u16::from_le_bytes(b).into()),
        U32 => each!(|b| u32::from_le_bytes(b) as f32),
        U64 => each!(|b| u64::from_le_bytes(b) as f32),
        U4 => each_block!(numbers::u4),
        I4 => each_block!(numbers::i4),
        U2 => each_block!(numbers::u2),
        Q4_0 => each_block!(blocks::q4_0),
        Q4_1 => each_block!(blocks::q4_1),
        Q5_0 => each_block!(blocks::q5_0),
        Q5_1 => each_block!(blocks::q5_1),
        Q8_0 => each_block!(blocks::q8_0),
        Q8_K => each_block!(blocks::q8_k),
        Q1_0 => each_block!(blocks::q1_0),
        SEQ_2BIT => each_block!(blocks::seq_2bit),
        TQ1_0 => each_block!(blocks::tq1_0),
        TQ2_0 => each_block!(blocks::tq2_0),
        MXFP4 => each_block!(blocks::mxfp4),
        NVFP4 => each_block!(blocks::nvfp4),
        IQ4_NL => each_block!(blocks::iq4_nl),
        Q2_K => each_block!(k_quants::q2_k),
        Q3_K => each_block!(k_quants::q3_k),
        Q4_K => each_block!(k_quants::q4_k),
        Q5_K => each_block!(k_quants::q5_k),
        Q6_K => each_block!(k_quants::q6_k),
        IQ4_XS => each_block!(k_quants::iq4_xs),
        IQ1_S => each_block!(codebook::iq1_s),
        IQ1_M => each_block!(codebook::iq1_m),
        IQ2_XXS => each_block!(codebook::iq2_xxs),
        IQ2_XS => each_block!(codebook::iq2_xs),
        IQ2_S => each_block!(codebook::iq2_s),
        IQ3_XXS => each_block!(codebook::iq3_xxs),
        IQ3_S => each_block!(codebook::iq3_s),
    }
}

/// Decoder of plain elements.
struct Each<'a, const BYTES: usize, F: Fn([u8; BYTES]) -> f32> {
    input: &'a [u8],
    output: &'a mut [f32],
    decode: F,
}

impl<const BYTES: usize, F: Fn([u8; BYTES]) -> f32> Vectorize for Each<'_, BYTES, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (bytes, value) in self.input.as_chunks().0.iter().zip(self.output) {
            *value = (self.decode)(*bytes);
        }
    }
}

/// Returns the `N` bytes of a block from `at`, which the format's layout puts inside the block.
#[inline(always)]
fn field<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("the field lies inside the block")
}

/// Returns the half-precision number of a block at `at`.
#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    half_to_f32(u16::from_le_bytes(*field(block, at)))
}

#[cfg(test)]
mod tests;
