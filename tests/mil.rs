//! MIL programs: their text form, the verifier, and inference.

#[path = "mil/filetests.rs"]
mod filetests;
#[path = "mil/round_trip.rs"]
mod round_trip;
#[path = "mil/verifier.rs"]
mod verifier;
