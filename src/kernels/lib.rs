//! Inner loops of the executor and the converter. Each loop with a version for a vector unit has a portable version,
//! against which it is tested; [`dispatch`] selects one at run time.
//!
//! ```
//! use anec_kernels::{reduce, round};
//!
//! let mut values = [1.0, 2.0, 3.0001];
//! assert_eq!(reduce::max(&values), 3.0001);
//! round::round_to_f16(&mut values);
//! assert_eq!(values, [1.0, 2.0, 3.0]);
//! ```

pub mod activation;
pub mod codes;
mod columns;
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
mod digits;
pub mod dispatch;
pub mod distance;
pub mod dot;
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
mod dotprod;
pub mod prefetch;

pub mod aligned_buf;
#[cfg(target_arch = "x86_64")]
mod byte_planes;
pub mod hadamard;
pub mod layout;
pub mod level_table;
pub mod matrix;
pub mod memory;
pub mod norm24;
pub mod pool;
pub mod processor;
pub mod product;
pub mod quantize;
pub mod reduce;
pub mod round;
pub mod scan;
pub mod simd;
pub mod tiles;
pub mod weight;
pub mod widen;
