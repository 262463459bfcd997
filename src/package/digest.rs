//! Digests of data that arrives in pieces of any length.

use sha2::{Digest, Sha256};

/// Hash function of a stream.
pub trait StreamHash: Default + Send {
    /// The digest.
    type Digest;

    /// Adds the next bytes.
    fn update(&mut self, bytes: &[u8]);

    /// Returns the digest of all bytes.
    fn finalize(self) -> Self::Digest;
}

impl StreamHash for Sha256 {
    type Digest = [u8; 32];

    fn update(&mut self, bytes: &[u8]) {
        Digest::update(self, bytes);
    }

    fn finalize(self) -> [u8; 32] {
        Digest::finalize(self).into()
    }
}

/// Number of bytes hashed in one call, at multiples of this offset. Each call hashes subtrees whose sizes divide their
/// offset; unaligned calls would hash many small subtrees that don't fill vector registers.
const TOGETHER: usize = 64 << 10;

/// Incremental BLAKE3.
#[derive(Default)]
pub struct Blake3Pieces {
    hash: blake3::Hasher,
    /// Last bytes, fewer than [`TOGETHER`].
    held: Vec<u8>,
}

impl StreamHash for Blake3Pieces {
    type Digest = blake3::Hash;

    fn update(&mut self, bytes: &[u8]) {
        let mut bytes = bytes;
        if !self.held.is_empty() {
            let (first, rest) = bytes.split_at(bytes.len().min(TOGETHER - self.held.len()));
            self.held.extend_from_slice(first);
            if self.held.len() < TOGETHER {
                return;
            }
            self.hash.update(&self.held);
            self.held.clear();
            bytes = rest;
        }
        let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % TOGETHER);
        self.hash.update(whole);
        self.held.extend_from_slice(rest);
    }

    fn finalize(mut self) -> blake3::Hash {
        self.hash.update(&self.held);
        self.hash.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_any_length_have_the_hash_of_the_whole() {
        let bytes: Vec<u8> = (0..5 * TOGETHER).map(|i| (i % 251) as u8).collect();
        let lengths = [0, 1, TOGETHER - 1, TOGETHER, TOGETHER + 1, 2 * TOGETHER + 7];
        for first in lengths {
            for second in lengths {
                let mut hasher = Blake3Pieces::default();
                let (mut rest, mut turns) = (&bytes[..], [first, second, 64].into_iter().cycle());
                while !rest.is_empty() {
                    let (piece, after) = rest.split_at(turns.next().unwrap().min(rest.len()));
                    hasher.update(piece);
                    rest = after;
                }
                assert_eq!(hasher.finalize(), blake3::hash(&bytes), "{first} {second}");
            }
        }
        assert_eq!(Blake3Pieces::default().finalize(), blake3::hash(&[]));
    }
}
