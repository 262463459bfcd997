//! Inner loops. Each that has a version for a processor's vector unit has a portable one beside it, against which it is
//! tested; which one runs is decided when it is called.

pub(crate) mod activation;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
pub(crate) mod dot;
mod lines;
pub(crate) mod matrix;
pub(crate) mod product;
pub(crate) mod reduce;
pub(crate) mod round;
pub(crate) mod simd;
pub(crate) mod team;
pub(crate) mod tiles;
pub(crate) mod widen;
