//! Packages (`.mlpackage`), their weight files, and archives of folders.
//!
//! ```
//! use anec_mil::{DataType, FunctionBuilder, Opset, Program, TensorType};
//! use anec_package::{WriteOptions, open, write};
//!
//! let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
//! let x = ops.input("x", TensorType::new(DataType::Fp16, [1, 4]));
//! let y = ops.sigmoid(x);
//! ops.output("y", y);
//! let program = Program { functions: vec![ops.finish()?], default_function: "main".into() };
//!
//! let folder = tempfile::tempdir().unwrap();
//! let path = folder.path().join("sigmoid.mlpackage");
//! write(&program, &path, &WriteOptions::default())?;
//!
//! let package = open(&path)?;
//! assert_eq!(package.program.functions[0].name, "main");
//! assert!(package.check_description().is_empty());
//! # Ok::<(), anec_base::Error>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`blob`] | weight files: planned, written by many threads, read through a map |
//! | `features` | a model's description from a program's signature and back |
//! | [`stream`] | files of parts that many threads produce, digested on the way |
//! | [`write()`] | a package from a program: streaming, deterministic, whole or not at all |
//! | [`open`] | a program from a package, ours or anybody's |
//! | [`interface`] | the features of a function, as the description has them |
//! | [`describe`] | what is in a package, and whether its description is that of its program |
//! | [`archive`] | reproducible zip archives of folders, and their safe extraction |

#![forbid(unsafe_code)]

pub mod archive;
pub mod blob;
pub mod describe;
mod digest;
mod error;
mod features;
mod files;
pub mod interface;
mod manifest;
mod open;
pub mod stream;
mod symbols;
mod write;

pub use error::PackageError;
pub use files::{PartialFolder, available_space, check_space, clean_partials, exchange};
pub use manifest::PackageMetadata;
pub use open::{Package, PackageFile, open};
pub use write::{WriteOptions, WrittenFile, WrittenPackage, write};

/// Folder of a package's content, below the package.
const DATA: &str = "Data";
/// File of the model's message, below [`DATA`].
const MODEL: &str = "com.apple.CoreML/model.mlmodel";
/// Folder of the weight files, below [`DATA`].
const WEIGHTS: &str = "com.apple.CoreML/weights";
/// Name of the weight file in that folder.
const WEIGHT_FILE: &str = "weight.bin";
/// Prefix by which a program refers to the folder of its message.
const MODEL_PATH: &str = "@model_path/";
