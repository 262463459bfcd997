//! The intermediate representation, which is MIL (Core ML's Model Intermediate Language) itself.
//!
//! A [`Program`] holds [`Function`]s; a function has inputs, states, one block of [`Op`]s in SSA form and outputs.
//! The same IR is built by the model families, emitted to packages, read back from anybody's packages, printed,
//! checked, costed and executed; there is no second description of a graph.
//!
//! ```
//! use anec_mil::{Constant, DataType, FunctionBuilder, Opset, Program, TensorType, verify::verify};
//!
//! let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
//! let x = ops.input("x", TensorType::new(DataType::Fp16, [1, 4]));
//! let doubled = ops.mul(x, Constant::fp16(2.0));
//! let y = ops.softmax(doubled, -1);
//! ops.output("y", y);
//! let function = ops.finish()?;
//! println!("{function}");
//!
//! let program = Program { functions: vec![function], default_function: "main".into() };
//! assert!(verify(&program).is_empty());
//! # Ok::<(), anec_mil::MilError>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`types`] | data types, symbolic dimensions, value types, opsets |
//! | [`constant`] | constants: small literals and large contents that are produced when needed |
//! | [`ir`] | program, function, block, op, value |
//! | `names` | which names functions and values can have |
//! | [`catalogue`] | the table of ops: parameters, defaults, type inference, opset |
//! | [`builder`] | builds a function op by op, inferring types |
//! | [`text`] | the text form: printed and parsed |
//! | [`codec`] | programs to protobuf and back |
//! | `uses` | which op gives a value, and which ops read it |
//! | [`verify`] | what must hold for a program, and inference of a whole function |

#![forbid(unsafe_code)]

pub mod builder;
pub mod catalogue;
pub mod codec;
pub mod constant;
pub mod error;
pub mod ir;
mod names;
mod ops;
pub mod text;
pub mod types;
mod uses;
pub mod verify;

pub use builder::FunctionBuilder;
pub use constant::{Constant, Content};
pub use error::MilError;
pub use ir::{Argument, Binding, Block, Function, Op, OpKind, Program, SymbolRange, Value, ValueId};
pub use types::{DataType, Dim, Opset, Symbol, TensorType, ValueType};
pub use uses::Uses;
