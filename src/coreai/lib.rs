//! Core AI's assets (`.aimodel`, OS 27): read, written, and made from MIL, without MLIR or Apple's code.
//!
//! ```
//! use anec_coreai::{AssetMetadata, AssetOptions, lower::LoweringPlan, open, write};
//! use anec_mil::{DataType, FunctionBuilder, Opset, TensorType};
//!
//! let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
//! let x = ops.input("x", TensorType::new(DataType::Fp16, [1, 4]));
//! let y = ops.sigmoid(x);
//! ops.output("y", y);
//! let mut plan = LoweringPlan::default();
//! plan.add("main", &ops.finish()?)?;
//!
//! let folder = tempfile::tempdir().unwrap();
//! let path = folder.path().join("sigmoid.aimodel");
//! write(&plan.finish(), &path, &AssetOptions::default())?;
//! let asset = open(&path)?;
//! assert_eq!(asset.inventory().functions[0].inputs[0].to_string(), "x: tensor<1x4xf16>");
//! # Ok::<(), anec_base::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`bytecode`] | MLIR's bytecode container |
//! | [`aicode`] | the dialect: types, attributes, the table of operations, modules |
//! | [`bridge`] | Apple's runtime in a child process |
//! | [`builder`] | building a module |
//! | [`lower`] | MIL to `aicode` |
//! | [`assemble`] | a bundle's packages as one asset |
//! | `asset` | the folder: bytecode, digest, metadata; streamed, whole or not at all |
//! | [`migrate`] | Core ML packages to assets |
//! | [`inventory`] | functions, operations and weights of an asset, with findings |
//! | [`definitions`] | composite operations and what they stand for |
//! | `single` | an asset in f32, for comparison |

#![forbid(unsafe_code)]

pub mod aicode;
pub mod assemble;
mod asset;
pub mod bridge;
pub mod builder;
pub mod bytecode;
pub mod definitions;
mod error;
pub mod inventory;
pub mod lower;
pub mod migrate;
#[cfg(test)]
mod runtime_tests;
mod single;

pub use asset::{Asset, AssetMetadata, AssetOptions, WrittenAsset, open, open_bytes, write};
pub use error::CoreAiError;
pub use single::in_single_precision;
