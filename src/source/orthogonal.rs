//! Orthogonal matrices to multiply weights by, so that single large ones are spread over many.
//!
//! | module | holds |
//! |---|---|
//! | [`hadamard`] | randomised Hadamard matrices of any size |
//! | [`learn`] | such a matrix turned further, until the largest weights are small |

pub mod hadamard;
pub mod learn;

pub use hadamard::HadamardRotation;
pub use learn::LearnedRotation;
