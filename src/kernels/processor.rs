//! Instructions that the kernels use on this processor.

use super::dispatch::{limit_name, with_lanes};
use super::simd::{Kernel, Lanes};

/// Name of the vectors that a kernel runs with.
struct VectorName;

impl Kernel for VectorName {
    type Output = &'static str;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> &'static str {
        L::NAME
    }
}

/// Returns the vector unit (`portable` if none has kernels of its own), followed by the available instructions that
/// multiply bytes, and by the [limit](super::dispatch::LIMIT_VARIABLE) if the environment sets one.
pub fn processor() -> Vec<String> {
    let mut names = vec![with_lanes(VectorName).to_owned()];
    #[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
    names.extend(super::dotprod::Instruction::names().map(str::to_owned));
    names.extend(limit_name().map(|name| format!("limited to {name} by {}", super::dispatch::LIMIT_VARIABLE)));
    names
}
