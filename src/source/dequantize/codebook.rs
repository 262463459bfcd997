//! IQ1, IQ2 and IQ3: super-blocks of 256 elements in groups of 8 or 4 that are looked up in a codebook.
//!
//! The codebooks are data that came out of training; `grids.py` makes `grids.bin` of them.

use super::{field, half_at};

/// Bits of the packed codebooks, each entry a group of elements; see `grids.py`.
const PACKED: &[u8; 9216] = include_bytes!("grids.bin");

/// The values of the elements of IQ2 entries.
const IQ2_VALUES: [i8; 3] = [0x08, 0x19, 0x2B];

static IQ2_XXS: [[i8; 8]; 256] = unpack(0, &IQ2_VALUES);
static IQ2_XS: [[i8; 8]; 512] = unpack(512, &IQ2_VALUES);
static IQ2_S: [[i8; 8]; 1024] = unpack(1536, &IQ2_VALUES);
static IQ3_XXS: [[i8; 4]; 256] = unpack(3584, &[0x04, 0x0C, 0x14, 0x1C, 0x24, 0x2C, 0x34, 0x3E]);
static IQ3_S: [[i8; 4]; 512] = unpack(4096, &[1, 3, 5, 7, 9, 11, 13, 15]);
static IQ1: [[i8; 8]; 2048] = unpack(5120, &[-1, 0, 1]);

/// Unpacks a codebook that begins at byte `at`; elements have 2 bits if there are three values, 4 if more.
const fn unpack<const GROUP: usize, const ENTRIES: usize>(at: usize, values: &[i8]) -> [[i8; GROUP]; ENTRIES] {
    let bits = if values.len() == 3 { 2 } else { 4 };
    let mut grid = [[0; GROUP]; ENTRIES];
    let mut element = 0;
    while element < GROUP * ENTRIES {
        let bit = element * bits;
        let code = PACKED[at + bit / 8] >> (bit % 8) & ((1 << bits) - 1);
        grid[element / GROUP][element % GROUP] = values[code as usize];
        element += 1;
    }
    grid
}

/// Seven signs and an eighth that makes their number even.
#[inline(always)]
fn even_signs(seven: u32) -> u32 {
    let seven = seven & 127;
    seven | (seven.count_ones() & 1) << 7
}

/// Scales a group and flips the elements whose bit is set in `signs`.
#[inline(always)]
fn signed<const GROUP: usize>(group: &[i8; GROUP], signs: u32, scale: f32, values: &mut [f32; GROUP]) {
    for i in 0..GROUP {
        values[i] = f32::from_bits((scale * f32::from(group[i])).to_bits() ^ (signs >> i & 1) << 31);
    }
}

/// Returns the 32-bit number at index `i` of an array of them that begins at `at`.
#[inline(always)]
fn u32_at(block: &[u8], at: usize, i: usize) -> u32 {
    u32::from_le_bytes(*field(block, at + 4 * i))
}

/// Returns the 16-bit number at index `i` of an array of them that begins at `at`.
#[inline(always)]
fn u16_at(block: &[u8], at: usize, i: usize) -> u16 {
    u16::from_le_bytes(*field(block, at + 2 * i))
}

/// For every 32 elements: four 8-bit indices; then four times seven signs and a 4-bit scale.
#[inline(always)]
pub fn iq2_xxs(block: &[u8; 66], values: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for (run, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let indices = field::<4>(block, 2 + 8 * run);
        let packed = u32_at(block, 6, 2 * run);
        let scale = d * (0.5 + (packed >> 28) as f32) * 0.25;
        for (group, values) in values.as_chunks_mut().0.iter_mut().enumerate() {
            signed(&IQ2_XXS[usize::from(indices[group])], even_signs(packed >> (7 * group)), scale, values);
        }
    }
}

/// For every 8 elements: a 9-bit index and seven signs; for every 16 a 4-bit scale.
#[inline(always)]
pub fn iq2_xs(block: &[u8; 74], values: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for (group, values) in values.as_chunks_mut().0.iter_mut().enumerate() {
        let packed = u16_at(block, 2, group);
        let scale = iq2_scale(d, &block[66..], group / 2);
        signed(&IQ2_XS[usize::from(packed & 511)], even_signs(u32::from(packed >> 9)), scale, values);
    }
}

/// For every 8 elements: a 10-bit index (its two high bits apart) and eight signs; for every 16 a 4-bit scale.
#[inline(always)]
pub fn iq2_s(block: &[u8; 82], values: &mut [f32; 256]) {
    let d = half_at(block, 0);
    let (low, signs, high) = (field::<32>(block, 2), field::<32>(block, 34), field::<8>(block, 66));
    for (group, values) in values.as_chunks_mut().0.iter_mut().enumerate() {
        let index = usize::from(low[group]) | usize::from(high[group / 4] >> (2 * (group % 4)) & 3) << 8;
        let scale = iq2_scale(d, &block[74..], group / 2);
        signed(&IQ2_S[index], u32::from(signs[group]), scale, values);
    }
}

/// Scale `i` of IQ2: nibbles, low one first, of which a half is added and a quarter taken.
#[inline(always)]
fn iq2_scale(d: f32, nibbles: &[u8], i: usize) -> f32 {
    d * (0.5 + f32::from(nibbles[i / 2] >> (4 * (i % 2)) & 15)) * 0.25
}

/// For every 4 elements an 8-bit index; for every 32, four times seven signs and a 4-bit scale.
#[inline(always)]
pub fn iq3_xxs(block: &[u8; 98], values: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for (run, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let indices = field::<8>(block, 2 + 8 * run);
        let packed = u32_at(block, 66, run);
        let scale = d * (0.5 + (packed >> 28) as f32) * 0.5;
        for (group, values) in values.as_chunks_mut().0.iter_mut().enumerate() {
            let signs = even_signs(packed >> (7 * (group / 2))) >> (4 * (group % 2));
            signed(&IQ3_XXS[usize::from(indices[group])], signs, scale, values);
        }
    }
}

/// For every 4 elements a 9-bit index (its high bit apart); for every 8, eight signs; for every 32 a 4-bit scale.
#[inline(always)]
pub fn iq3_s(block: &[u8; 110], values: &mut [f32; 256]) {
    let d = half_at(block, 0);
    let (low, high) = (field::<64>(block, 2), field::<8>(block, 66));
    let (signs, scales) = (field::<32>(block, 74), field::<4>(block, 106));
    for (run, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = d * f32::from(1 + 2 * (scales[run / 2] >> (4 * (run % 2)) & 15));
        for (group, values) in values.as_chunks_mut().0.iter_mut().enumerate() {
            let index = usize::from(low[8 * run + group]) | usize::from(high[run] >> group & 1) << 8;
            let signs = u32::from(signs[4 * run + group / 2]) >> (4 * (group % 2));
            signed(&IQ3_S[index], signs, scale, values);
        }
    }
}

/// Scales a ternary group after moving it up or down by an eighth.
#[inline(always)]
fn shifted(group: &[i8; 8], down: bool, scale: f32, values: &mut [f32; 8]) {
    let delta = if down { -0.125 } else { 0.125 };
    for i in 0..8 {
        values[i] = scale * (f32::from(group[i]) + delta);
    }
}

/// For every 8 elements an 11-bit index, whose three high bits stand with the others of 32 elements, their 3-bit scale
/// and the direction of their shift in 16 bits.
#[inline(always)]
pub fn iq1_s(block: &[u8; 50], values: &mut [f32; 256]) {
    let d = half_at(block, 0);
    let low = field::<32>(block, 2);
    for (run, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let high = u16_at(block, 34, run);
        let scale = d * f32::from(2 * (high >> 12 & 7) + 1);
        for (group, values) in values.as_chunks_mut().0.iter_mut().enumerate() {
            let index = usize::from(low[4 * run + group]) | usize::from(high >> (3 * group) & 7) << 8;
            shifted(&IQ1[index], high & 0x8000 != 0, scale, values);
        }
    }
}

/// For every 8 elements an 11-bit index and the direction of its shift, four bits of them apart; for every 16 a 3-bit
/// scale, four to 16 bits, in whose top nibbles the half-precision scale of the whole is spread.
#[inline(always)]
pub fn iq1_m(block: &[u8; 56], values: &mut [f32; 256]) {
    let (low, high) = (field::<32>(block, 0), field::<16>(block, 32));
    let d = (0..4).fold(0, |d, i| d | (u16_at(block, 48, i) >> 12) << (4 * i));
    let d = super::half_to_f32(d);
    for (group, values) in values.as_chunks_mut().0.iter_mut().enumerate() {
        let packed = u16_at(block, 48, group / 8) >> (3 * (group / 2 % 4)) & 7;
        let scale = d * f32::from(2 * packed + 1);
        let high = high[group / 2] >> (4 * (group % 2)) & 15;
        let index = usize::from(low[group]) | usize::from(high & 7) << 8;
        shifted(&IQ1[index], high & 8 != 0, scale, values);
    }
}
