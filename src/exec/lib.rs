//! Runs functions of the IR on the CPU.
//!
//! An [`Executable`] is a function made ready: its constants loaded (compressed weights stay compressed), its ops
//! turned into a list of steps over value slots. A run resolves shapes from the inputs it gets, so `T` may differ from
//! call to call. Under [`Precision::F16`] every value declared fp16 is rounded to fp16, which shows on any machine what
//! half precision does to a model.
//!
//! ```
//! use anec_exec::{Executable, ExecOptions, Precision, Tensor, WeightCache};
//! use anec_mil::{Constant, DataType, FunctionBuilder, Opset, TensorType};
//!
//! let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
//! let x = ops.input("x", TensorType::new(DataType::Fp16, [1, 2]));
//! let y = ops.mul(x, Constant::fp16(3.0));
//! ops.output("y", y);
//! let function = ops.finish().unwrap();
//!
//! let options = ExecOptions { precision: Precision::F32 };
//! let executable = Executable::compile(&function, options, &WeightCache::new())?;
//! let x = Tensor::new([1, 2], vec![1.0f32, 2.0]);
//! let outputs = executable.run(&[("x", &x)], &mut executable.new_state())?;
//! assert_eq!(outputs[0].1.floats().unwrap(), [3.0, 6.0]);
//! # Ok::<(), anec_exec::ExecError>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`tensor`] | tensors in memory |
//! | [`weight`] | constants in memory |
//! | [`weight_cache`] | what functions of a model share |
//! | [`executable`] | what can be run, and running it |
//! | [`batch`] | running it for several sequences, which share the products with weights |
//! | [`memo`] | products that sequences have in common, remembered |
//! | [`state`], `state_buffer` | what a sequence keeps from run to run, and in which precision |
//! | [`profile`] | where the time went |
//! | `compile`, `constants`, `constexpr` | turning ops into steps, and constants, stored or compressed, into values |
//! | `kernel`, `resolve` | ops as typed kernels: arguments by name become fields, once |
//! | `ops` | the table of kernels by operator, and the kernels by group |
//! | `fuse` | steps that are carried out as one |
//! | [`engine`] | the arithmetic of the Neural Engine, simulated |
//! | `step`, `node`, `frame` | what a function is made of, and carrying it out |
//! | `pool`, `workspace` | tensors that nobody needs any more, kept for those that come |
//! | `slot_writes` | which slots of its caches a run writes |
//!
//! Inner loops, memory for weights and the threads are those of `anec_kernels`.

#![forbid(unsafe_code)]

mod arithmetic;
pub mod batch;
mod compile;
mod constants;
mod constexpr;
pub mod engine;
pub mod error;
pub mod executable;
mod frame;
mod fuse;
mod kernel;
pub mod memo;
mod node;
mod operand;
mod ops;
mod pool;
pub mod profile;
mod resolve;
mod slot_writes;
pub mod state;
mod state_buffer;
mod step;
mod strided;
pub mod tensor;
#[cfg(test)]
mod tests;
mod value;
pub mod weight;
pub mod weight_cache;
mod workspace;

pub use anec_kernels::pool::{set_threads, threads};
pub use anec_kernels::processor::processor;
pub use batch::SequenceCall;
pub use engine::{EngineEffect, EngineEffects};
pub use error::ExecError;
pub use executable::{ExecOptions, Executable, Precision};
pub use memo::ProductMemo;
pub use profile::{ExecProfile, OperatorTime};
pub use state::State;
pub use tensor::{Tensor, TensorData};
pub use weight_cache::WeightCache;
