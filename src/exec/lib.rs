//! CPU executor for functions of the IR.
//!
//! An [`Executable`] is a compiled function: constants are loaded (compressed weights stay compressed) and ops are a
//! list of steps over value slots. A run resolves shapes from its inputs, so `T` may differ from call to call. Under
//! [`Precision::F16`] every value declared fp16 is rounded to fp16, which shows the effect of half precision on any
//! machine.
//!
//! ```
//! use anec_exec::{Executable, Precision, Tensor, WeightCache};
//! use anec_mil::{Constant, DataType, FunctionBuilder, Opset, TensorType};
//!
//! let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
//! let x = ops.input("x", TensorType::new(DataType::Fp16, [1, 2]));
//! let y = ops.mul(x, Constant::fp16(3.0));
//! ops.output("y", y);
//! let function = ops.finish().unwrap();
//!
//! let executable = Executable::compile(&function, Precision::F32, &WeightCache::new())?;
//! let x = Tensor::new([1, 2], vec![1.0f32, 2.0]);
//! let outputs = executable.run(&[("x", &x)], &mut executable.new_state())?;
//! assert_eq!(outputs[0].1.floats().unwrap(), [3.0, 6.0]);
//! # Ok::<(), anec_exec::ExecError>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `tensor` | tensors in memory |
//! | [`weight`] | constants in memory |
//! | `weight_cache` | weights and memory shared by the functions of a model |
//! | `executable` | compiled functions, and runs of them |
//! | `batch` | runs for several sequences, which share the products with weights |
//! | `state`, `state_buffer` | states of a sequence, and their precision |
//! | `profile` | time by operator |
//! | `compile`, `constants`, `constexpr` | ops to steps, constants to values |
//! | `node::control` | branches and loops: ops with nested blocks |
//! | `kernel`, `resolve` | ops as typed kernels: arguments by name become fields, once |
//! | `ops` | table of kernels by operator, and the kernels by group |
//! | `fuse` | fusion of steps |
//! | `engine` | simulated arithmetic of the Neural Engine |
//! | `step`, `node`, `frame` | parts of a compiled function, and their execution |
//! | `pool`, `workspace` | reuse of tensors |
//! | `slot_writes` | cache slots that a run writes |
//!
//! Inner loops, weight memory and threads belong to `anec_kernels`.

#![forbid(unsafe_code)]

mod arithmetic;
mod batch;
mod compile;
mod constants;
mod constexpr;
mod engine;
mod error;
mod executable;
mod frame;
mod fuse;
mod kernel;
mod node;
mod operand;
mod ops;
mod pool;
mod profile;
mod resolve;
mod row;
mod slot_writes;
mod state;
mod state_buffer;
mod step;
mod strided;
mod tensor;
#[cfg(test)]
mod tests;
mod value;
pub mod weight;
mod weight_cache;
mod workspace;

pub use anec_kernels::dispatch::check_limit as check_instruction_limit;
pub use anec_kernels::pool::{set_threads, threads};
pub use anec_kernels::processor::processor;
pub use batch::SequenceCall;
pub use engine::{EngineEffect, EngineEffects};
pub use error::ExecError;
pub use executable::{Executable, Precision};
pub use profile::{ExecProfile, OperatorTime};
pub use state::State;
pub use tensor::{Tensor, TensorData};
pub use weight_cache::WeightCache;
