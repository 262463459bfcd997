//! Writing integers and sections.

use super::PADDING;

/// Alignment of resources; Apple's reader takes no other.
pub const RESOURCE_ALIGNMENT: u64 = 16;

/// Appends MLIR's PrefixVarInt.
pub fn push_varint(out: &mut Vec<u8>, value: u64) {
    let bytes = (64 - value.leading_zeros() as usize).div_ceil(7).max(1);
    if bytes > 8 {
        out.push(0);
        out.extend(value.to_le_bytes());
    } else {
        let word = (value << bytes) | (1 << (bytes - 1));
        out.extend(&word.to_le_bytes()[..bytes]);
    }
}

/// Appends a signed integer in zigzag form.
pub fn push_signed(out: &mut Vec<u8>, value: i64) {
    push_varint(out, ((value << 1) ^ (value >> 63)) as u64);
}

/// Appends a section without alignment.
pub fn push_section(out: &mut Vec<u8>, id: u8, body: &[u8]) {
    out.push(id);
    push_varint(out, body.len() as u64);
    out.extend(body);
}

/// Appends padding until `out`, which begins at `base`, ends at a multiple of `alignment`.
pub fn pad_to(out: &mut Vec<u8>, base: u64, alignment: u64) {
    let end = base + out.len() as u64;
    out.resize(out.len() + (end.next_multiple_of(alignment) - end) as usize, PADDING);
}
