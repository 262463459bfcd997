//! MIL programs: their text form, the verifier, and inference.

#[path = "common/emitted.rs"]
mod emitted;
#[path = "mil/filetests.rs"]
mod filetests;
#[path = "mil/round_trip.rs"]
mod round_trip;
#[path = "mil/verifier.rs"]
mod verifier;
