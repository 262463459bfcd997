//! Files as `build.rs` packs them into the program.

use std::io::{self, Read};

use flate2::read::DeflateDecoder;

/// The length of a file (8 bytes, little-endian), the check sum of its bytes (4 bytes, CRC-32), how it is coded (a byte: 0 as it is,
/// 1 as [`words`]), and the deflated codes.
#[derive(Clone, Copy)]
pub(super) struct Packed(pub &'static [u8]);

impl Packed {
    /// Bytes of the file itself.
    pub fn len(self) -> u64 {
        self.0.first_chunk().map_or(0, |length| u64::from_le_bytes(*length))
    }

    pub fn sum(self) -> u32 {
        self.part(8).first_chunk().map_or(0, |sum| u32::from_le_bytes(*sum))
    }

    /// The file itself.
    ///
    /// # Errors
    /// When what was packed isn't whole.
    pub fn unpack(self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        DeflateDecoder::new(self.part(13)).read_to_end(&mut bytes)?;
        match self.part(12).first() {
            Some(0) => Ok(bytes),
            Some(1) => words(&bytes, self.len() as usize / 2).ok_or_else(|| io::ErrorKind::InvalidData.into()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn part(self, start: usize) -> &'static [u8] {
        self.0.get(start..).unwrap_or_default()
    }
}

/// The bytes of `count` 16-bit words of which few are different: 255 words, then a code for each word of the file; the code 255 is for
/// the next of the words that follow the codes.
fn words(coded: &[u8], count: usize) -> Option<Vec<u8>> {
    const CODES: usize = 255;
    let (common, rest) = coded.split_at_checked(2 * CODES)?;
    let (codes, others) = rest.split_at_checked(count)?;
    let (common, mut others) = (common.as_chunks::<2>().0, others.as_chunks::<2>().0.iter());
    let mut bytes = Vec::with_capacity(2 * count);
    for code in codes {
        bytes.extend(common.get(usize::from(*code)).or_else(|| others.next())?);
    }
    Some(bytes)
}
