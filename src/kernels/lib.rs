//! Inner loops. Each that has a version for a processor's vector unit has a portable one beside it, against which it is
//! tested; which one runs is decided when it is called.
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
pub mod ahead;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
pub mod codes;
mod columns;
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
mod digits;
pub mod dispatch;
pub mod distance;
pub mod dot;
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
mod dotprod;

pub mod aligned_buf;
pub mod hadamard;
pub mod layout;
pub mod level_table;
pub mod matrix;
pub mod memory;
pub mod norm24;
#[cfg(target_arch = "x86_64")]
mod planes;
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
