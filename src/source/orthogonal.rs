//! Orthogonal matrices that spread single large weights over many.
//!
//! | module | contents |
//! |---|---|
//! | [`hadamard`] | randomised Hadamard matrices of any size |
//! | [`learn`] | rotations learned to minimize the largest weights |
//! | `samples` | samples of weights from which rotations are learned |
//! | `descent` | descent to the blocks of a rotation |

mod descent;
pub mod hadamard;
pub mod learn;
mod samples;

pub use hadamard::HadamardRotation;
pub use learn::LearnedRotation;
