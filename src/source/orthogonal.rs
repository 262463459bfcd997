//! Orthogonal matrices that spread single large weights over many.
//!
//! | module | contents |
//! |---|---|
//! | [`hadamard`] | randomised Hadamard matrices of any size |
//! | [`learn`] | rotations learned to minimize the largest weights |

pub mod hadamard;
pub mod learn;

pub use hadamard::HadamardRotation;
pub use learn::LearnedRotation;
