//! The intermediate representation, which is Core ML's Model Intermediate Language (MIL).
//!
//! A [`Program`] has [`Function`]s; a function has inputs, states, one block of [`Op`]s in SSA form and outputs.
//! Model families build this IR. It is written to packages and read from them, printed, verified, costed and executed;
//! there is no second description of a graph.
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
//! | module | contents |
//! |---|---|
//! | `types` | data types, symbolic dimensions, value types, opsets |
//! | `constant` | constants: small literals, and large contents produced on demand |
//! | `ir` | program, function, block, op, value |
//! | `names` | legal names of functions and values |
//! | [`catalogue`] | table of ops: parameters, defaults, type inference, opset |
//! | `builder` | builder of functions with type inference |
//! | [`text`] | text form: printer and parser |
//! | [`codec`] | conversion to and from protobuf |
//! | `uses` | def-use chains |
//! | [`verify`] | verifier and type inference of functions |

#![forbid(unsafe_code)]

mod builder;
pub mod catalogue;
pub mod codec;
mod constant;
mod error;
mod ir;
mod names;
mod ops;
pub mod text;
mod types;
mod uses;
pub mod verify;

pub use builder::{FunctionBuilder, OpInput};
pub use constant::{Constant, Content, Data};
pub use error::MilError;
pub use ir::{
    Argument, Binding, Block, Function, Keyword, Op, OpKind, ParameterMap, Program, SymbolRange, Value, ValueId,
};
pub use types::{DataType, Dim, Opset, Symbol, TensorType, ValueType};
pub use uses::Uses;
