//! Code that the compiler vectorizes, compiled several times: for the baseline of the target and, on x86-64, for AVX2
//! and AVX-512. The processor decides which copy runs.

use std::sync::LazyLock;

/// Work whose loops the compiler vectorizes.
pub trait Vectorize {
    /// What it gives.
    type Output;

    /// Does it. Implementations, and what they call, must be `#[inline(always)]`: only what is inlined is compiled again
    /// for each instruction set.
    fn run(self) -> Self::Output;
}

/// An instruction set that this processor has: only [`InstructionSet::available`] makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstructionSet(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl InstructionSet {
    /// The instruction sets that the processor has and code is compiled for, the widest last.
    pub fn available() -> impl Iterator<Item = Self> {
        [
            Some(Set::Baseline),
            #[cfg(target_arch = "x86_64")]
            is_x86_feature_detected!("avx2").then_some(Set::Avx2),
            #[cfg(target_arch = "x86_64")]
            (is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl"))
            .then_some(Set::Avx512),
        ]
        .into_iter()
        .flatten()
        .map(InstructionSet)
    }

    /// The widest of them. What the processor has is asked once: short rows are many calls.
    #[inline]
    pub fn widest() -> Self {
        static WIDEST: LazyLock<InstructionSet> =
            LazyLock::new(|| InstructionSet::available().last().unwrap_or(InstructionSet(Set::Baseline)));
        *WIDEST
    }

    /// Does work in the copy that is compiled for this instruction set. The compiler may not contract `a * b + c`, so
    /// every copy gives the same bits.
    pub fn run<W: Vectorize>(self, work: W) -> W::Output {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2")]
        fn avx512<W: Vectorize>(work: W) -> W::Output {
            work.run()
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn avx2<W: Vectorize>(work: W) -> W::Output {
            work.run()
        }
        match self.0 {
            Set::Baseline => work.run(),
            // SAFETY: a value of this kind is only made where the processor has the features; AVX-512 includes AVX2.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => unsafe { avx512(work) },
            // SAFETY: likewise.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { avx2(work) },
        }
    }
}

/// Does work with the widest vectors that the processor has.
pub fn vectorized<W: Vectorize>(work: W) -> W::Output {
    InstructionSet::widest().run(work)
}
