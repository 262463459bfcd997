//! What of this processor the inner loops use.

use super::simd::{Dispatch, Kernel, Lanes, Widest};

/// Says which vectors a kernel is run with.
struct Vectors;

impl Kernel for Vectors {
    type Output = &'static str;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> &'static str {
        L::NAME
    }
}

/// The vector unit, `portable` where there is none that code is written for, and then what multiplies bytes: of `SDOT`,
/// `SMMLA`, `VNNI`, `VBMI` and `AMX` those that are there.
pub fn processor() -> Vec<&'static str> {
    let mut found = vec![Widest.run(Vectors)];
    #[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
    found.extend(super::dotprod::Instruction::names());
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    found.extend(super::amx::is_available().then_some("AMX"));
    found
}
