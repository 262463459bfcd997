//! Choice of the instruction set: the only place that asks what the processor has.
//!
//! Two kinds of code are compiled once for each vector width: loops that the compiler vectorizes ([`Vectorize`], or
//! [`vectorized_fn`](crate::vectorized_fn) for a function), and code over explicit vectors ([`Kernel`]). Kernels that
//! multiply bytes check for their own instructions with [`InstructionSet::available`].
//!
//! The environment variable `ANEC_INSTRUCTIONS` limits the choice to an instruction set and those before it:
//!
//! | architecture | names, in order |
//! |---|---|
//! | x86-64 | `baseline`, `avx2`, `avx-vnni`, `avx512`, `avx512-vnni`, `avx512-vbmi` |
//! | 64-bit Arm | `baseline` (NEON), `dotprod`, `i8mm` |

use std::sync::LazyLock;

use super::simd::{self, Kernel};

/// Environment variable that limits the instruction set.
pub const LIMIT_VARIABLE: &str = "ANEC_INSTRUCTIONS";

/// Loops that the compiler vectorizes.
pub trait Vectorize {
    /// Result of the work.
    type Output;

    /// Does the work. Implementations and the functions that they call must be `#[inline(always)]`: only inlined code
    /// is compiled for each instruction set.
    fn run(self) -> Self::Output;
}

/// Instruction set of this processor. Only [`available`](InstructionSet::available) constructs one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InstructionSet(Set);

/// Instruction sets in order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Set {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx512Vbmi,
    #[cfg(target_arch = "aarch64")]
    Dotprod,
    #[cfg(target_arch = "aarch64")]
    I8mm,
}

impl Set {
    const ALL: &[Set] = &[
        Set::Baseline,
        #[cfg(target_arch = "x86_64")]
        Set::Avx2,
        #[cfg(target_arch = "x86_64")]
        Set::AvxVnni,
        #[cfg(target_arch = "x86_64")]
        Set::Avx512,
        #[cfg(target_arch = "x86_64")]
        Set::Avx512Vnni,
        #[cfg(target_arch = "x86_64")]
        Set::Avx512Vbmi,
        #[cfg(target_arch = "aarch64")]
        Set::Dotprod,
        #[cfg(target_arch = "aarch64")]
        Set::I8mm,
    ];

    fn name(self) -> &'static str {
        match self {
            Set::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::AvxVnni => "avx-vnni",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Vbmi => "avx512-vbmi",
            #[cfg(target_arch = "aarch64")]
            Set::Dotprod => "dotprod",
            #[cfg(target_arch = "aarch64")]
            Set::I8mm => "i8mm",
        }
    }

    /// Returns whether the processor has the instructions.
    fn is_present(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            match self {
                Set::Baseline => true,
                Set::Avx2 => avx2,
                Set::AvxVnni => avx2 && is_x86_feature_detected!("avxvnni"),
                Set::Avx512 => avx512,
                Set::Avx512Vnni => avx512 && is_x86_feature_detected!("avx512vnni"),
                Set::Avx512Vbmi => {
                    avx512 && is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vbmi")
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        match self {
            Set::Baseline => true,
            Set::Dotprod => std::arch::is_aarch64_feature_detected!("dotprod"),
            Set::I8mm => {
                std::arch::is_aarch64_feature_detected!("dotprod") && std::arch::is_aarch64_feature_detected!("i8mm")
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        true
    }
}

/// Instruction set that the environment variable allows at most. Unknown names count as none: [`check_limit`] reports
/// them.
fn limit() -> Option<Set> {
    let name = std::env::var(LIMIT_VARIABLE).ok()?;
    Set::ALL.iter().copied().find(|set| set.name() == name)
}

/// Checks the environment variable that limits the instruction set.
///
/// # Errors
/// A message if the variable names no instruction set of this architecture.
pub fn check_limit() -> Result<(), String> {
    match std::env::var(LIMIT_VARIABLE) {
        Ok(name) if !name.is_empty() && limit().is_none() => {
            let names: Vec<&str> = Set::ALL.iter().map(|set| set.name()).collect();
            Err(format!("{LIMIT_VARIABLE} is `{name}`, expected one of {}", names.join(", ")))
        }
        _ => Ok(()),
    }
}

/// Name of the instruction set in the environment variable, if it limits the choice.
pub fn limit_name() -> Option<&'static str> {
    limit().map(Set::name)
}

impl InstructionSet {
    /// Returns the instruction sets that the processor has and the environment allows, in order of preference.
    pub fn available() -> impl Iterator<Item = Self> {
        static AVAILABLE: LazyLock<Vec<InstructionSet>> = LazyLock::new(|| {
            let limit = limit();
            let is_allowed = |set: &Set| set.is_present() && limit.is_none_or(|limit| *set <= limit);
            Set::ALL.iter().copied().filter(is_allowed).map(InstructionSet).collect()
        });
        AVAILABLE.iter().copied()
    }

    /// Returns the preferred instruction set.
    #[inline]
    pub fn best() -> Self {
        static BEST: LazyLock<InstructionSet> =
            LazyLock::new(|| InstructionSet::available().last().unwrap_or(InstructionSet(Set::Baseline)));
        *BEST
    }

    /// Returns whether an instruction set is available.
    pub(crate) fn has(set: Set) -> bool {
        Self::available().any(|own| own.0 == set)
    }

    /// Runs work in the copy that is compiled for this instruction set. The compiler may not contract `a * b + c`, so
    /// every copy gives the same bits.
    #[inline]
    pub fn run<W: Vectorize>(self, work: W) -> W::Output {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn avx512<W: Vectorize>(work: W) -> W::Output {
            work.run()
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<W: Vectorize>(work: W) -> W::Output {
            work.run()
        }
        match self.0 {
            // SAFETY: this value exists only where the processor has the features.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 | Set::Avx512Vnni | Set::Avx512Vbmi => unsafe { avx512(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 | Set::AvxVnni => unsafe { avx2(work) },
            _ => work.run(),
        }
    }

    /// Runs a kernel with the vectors of this instruction set.
    #[inline]
    pub fn run_lanes<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn avx512<K: Kernel>(kernel: K) -> K::Output {
            // SAFETY: the processor has AVX-512, or this function could not be called.
            unsafe { kernel.run::<simd::x86::Avx512>() }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<K: Kernel>(kernel: K) -> K::Output {
            // SAFETY: the processor has AVX2, FMA and F16C, or this function could not be called.
            unsafe { kernel.run::<simd::x86::Avx2>() }
        }
        // a function of its own: inlined, it would be compiled once for each caller
        #[inline(never)]
        fn baseline<K: Kernel>(kernel: K) -> K::Output {
            #[cfg(target_arch = "aarch64")]
            type Vector = simd::neon::Neon;
            #[cfg(not(target_arch = "aarch64"))]
            type Vector = simd::Portable;
            // SAFETY: every processor has these: NEON belongs to 64-bit Arm, and the others are arrays.
            unsafe { kernel.run::<Vector>() }
        }
        match self.0 {
            // SAFETY: this value exists only where the processor has the features.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 | Set::Avx512Vnni | Set::Avx512Vbmi => unsafe { avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 | Set::AvxVnni => unsafe { avx2(kernel) },
            _ => baseline(kernel),
        }
    }
}

/// Runs work with the preferred instruction set.
#[inline]
pub fn vectorized<W: Vectorize>(work: W) -> W::Output {
    InstructionSet::best().run(work)
}

/// Runs a kernel with the vectors of the preferred instruction set.
#[inline]
pub(crate) fn with_lanes<K: Kernel>(kernel: K) -> K::Output {
    InstructionSet::best().run_lanes(kernel)
}

/// Defines a function that runs an `#[inline(always)]` function in the copy for the preferred instruction set.
#[macro_export]
macro_rules! vectorized_fn {
    ($(#[$doc:meta])* $vis:vis fn $name:ident<$life:lifetime>($($argument:ident: $ty:ty),*) -> $result:ty = $body:expr) => {
        $(#[$doc])*
        $vis fn $name<$life>($($argument: $ty),*) -> $result {
            struct Work<$life> {
                $($argument: $ty),*
            }
            impl<$life> $crate::dispatch::Vectorize for Work<$life> {
                type Output = $result;

                #[inline(always)]
                fn run(self) -> $result {
                    $body($(self.$argument),*)
                }
            }
            $crate::dispatch::vectorized(Work { $($argument),* })
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_preferred_set_is_the_last_that_is_available() {
        let sets: Vec<InstructionSet> = InstructionSet::available().collect();
        assert_eq!(sets[0], InstructionSet(Set::Baseline));
        assert!(sets.is_sorted() && InstructionSet::best() == *sets.last().unwrap());
        assert!(limit().is_none_or(|limit| sets.iter().all(|set| set.0 <= limit)));
        assert!(check_limit().is_ok());
    }
}
