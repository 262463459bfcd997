//! How many bytes weights take in a package, known before any is read.

use anec_family::PlannedWeight;
use anec_manifest::{Granularity, Quant, WeightFormat};

/// Blobs begin at multiples of this, and each has a record of as many bytes.
const BLOB_ALIGNMENT: u64 = 64;

/// Bytes that a weight takes in a weight file: elements, scales, the records before them and the padding after.
pub fn stored_bytes(quant: &Quant, planned: &PlannedWeight) -> u64 {
    blobs(quant, planned)
        .into_iter()
        .flatten()
        .map(|bytes| BLOB_ALIGNMENT + bytes.next_multiple_of(BLOB_ALIGNMENT))
        .sum()
}

/// Bytes of elements and of scales.
fn blobs(quant: &Quant, planned: &PlannedWeight) -> [Option<u64>; 2] {
    let weight = &planned.weight;
    match quant.of(planned.role) {
        (WeightFormat::None, _) => [Some(2 * weight.elements()), None],
        (WeightFormat::Int8, Granularity::PerTensor) => [Some(weight.elements()), Some(2)],
        (WeightFormat::Int8, Granularity::PerChannel) => [Some(weight.elements()), Some(2 * weight.rows())],
    }
}
