//! Reads anybody's .mlpackage: its functions, ops and weights: `cargo run --release --example read_mlpackage --
//! PACKAGE`. It needs none of anec's features.

use std::collections::BTreeMap;
use std::path::Path;

use anec::package;

fn main() -> anec::base::Result<()> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "tests/fixtures/coremltools/conv_fp16/model.mlpackage".into());
    let package = package::open(Path::new(&path))?;
    for function in &package.program.functions {
        let mut operators: BTreeMap<&str, usize> = BTreeMap::new();
        for op in &function.block.ops {
            *operators.entry(&op.operator).or_default() += 1;
        }
        println!("{}: {} inputs, {operators:?}", function.name, function.inputs.len());
    }
    println!("{} bytes of weights", package.inventory().weight_bytes);
    for finding in package.check_description() {
        println!("the description disagrees with the program: {finding:?}");
    }
    Ok(())
}
