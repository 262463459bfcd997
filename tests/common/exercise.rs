//! Processing of untrusted bytes short of running them, shared by the damage tests and the fuzz targets.

use std::path::Path;

use anec::base::MappedFile;
use anec::coreai;
use anec::error::Result;
use anec::mil::codec;
use anec::mil::text::parse;
use anec::mil::verify::{infer_types, verify};
use anec::mil::{Binding, Constant, Program};
use anec::package::{self, blob::WeightPlan};

/// Reads a package and looks at all there is in it.
///
/// # Errors
/// Whatever is wrong with the package as such.
pub fn package(path: &Path) -> Result<()> {
    let package = package::open(path)?;
    let findings = package.check_description();
    let text = format!("{findings:?}{}", serde_json::to_string(&package.inventory()).expect("an inventory is JSON"));
    assert!(!text.is_empty());
    for file in &package.weights {
        let _ = file.records();
    }
    program(&package.program);
    Ok(())
}

/// Reads the bytecode of an asset of Core AI, looks at all there is in it, and encodes it.
///
/// # Errors
/// Whatever is wrong with it.
pub fn asset(bytes: Vec<u8>) -> Result<()> {
    let asset = coreai::open_bytes(MappedFile::from_bytes(Path::new("memory"), bytes))?;
    let text = serde_json::to_string(&asset.inventory()).expect("an inventory is JSON");
    assert!(!text.is_empty());
    let encoded = asset.module.encode();
    assert_eq!(encoded.before.len(), asset.module.resources.len().max(1));
    Ok(())
}

/// Reads a text as a program.
///
/// # Errors
/// What the parser says.
pub fn text(text: &str) -> Result<()> {
    program(&parse(text)?);
    Ok(())
}

/// Verifies a program, infers its types, encodes, and prints it: the text must read as itself.
pub fn program(program: &Program) {
    let _ = verify(program).iter().map(ToString::to_string).collect::<Vec<_>>();
    for function in &program.functions {
        let _ = infer_types(function);
        for size in [1, 7] {
            let fixed = function.symbols().fold(function.clone(), |fixed, symbol| fixed.with_length(symbol, size));
            let _ = infer_types(&fixed);
        }
        function.ops().for_each(|op| {
            let bound = op.inputs.values().flatten().filter_map(|binding| match binding {
                Binding::Constant(constant) => Some(constant),
                Binding::Value(_) => None,
            });
            op.attributes.values().chain(bound).for_each(constant);
        });
    }
    let _ = codec::encode(program, &mut WeightPlan::new());
    let printed = program.to_string();
    let again = parse(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"));
    assert_eq!(again.to_string(), printed);
}

fn constant(constant: &Constant) {
    let _ = (constant.as_integers(), constant.as_floats(), constant.as_str(), constant.is_consistent());
    if constant.ty.bytes().is_some_and(|bytes| bytes < 1 << 20) && constant.is_consistent() {
        let _ = constant.bytes();
    }
}
