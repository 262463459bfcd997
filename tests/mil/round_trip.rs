//! Printed programs parse to the same program, except for data that the text omits.

use std::path::Path;
use std::sync::Arc;

use anec::mil::text::{INLINE_ELEMENTS, parse};
use anec::mil::verify::verify;
use anec::mil::{Binding, Block, Constant, Data, Program};
use anec::package::{self, WriteOptions};

use crate::common::emitted;

/// A program whose text reads as itself.
pub fn assert_round_trip(name: &str, program: &Program) {
    let text = program.to_string();
    let parsed = parse(&text).unwrap_or_else(|e| panic!("{name}: {e}\n{text}"));
    assert_same_text(name, &parsed.to_string(), &text);
    assert!(without_long_data(&parsed) == without_long_data(program), "{name} prints the same, but isn't");
}

fn assert_same_text(name: &str, found: &str, expected: &str) {
    if let Some((found, expected)) = found.lines().zip(expected.lines()).find(|(found, expected)| found != expected) {
        panic!("{name}: {found}\nshould be: {expected}");
    }
    assert_eq!(found.len(), expected.len(), "{name}");
}

/// The program with the length of its data in the place of data that isn't printed.
fn without_long_data(program: &Program) -> Program {
    fn shorten(constant: &mut Constant) {
        let length = match &constant.data {
            Data::Content(content) => content.length(),
            Data::Literal(bytes) if constant.ty.elements().is_none_or(|n| n > INLINE_ELEMENTS) => bytes.len() as u64,
            _ => return,
        };
        constant.data = Data::Literal(Arc::from(length.to_le_bytes().as_slice()));
    }
    fn shorten_block(block: &mut Block) {
        for op in &mut block.ops {
            op.attributes.iter_mut().for_each(|(_, constant)| shorten(constant));
            for binding in op.bindings_mut() {
                if let Binding::Constant(constant) = binding {
                    shorten(constant);
                }
            }
            op.blocks.iter_mut().for_each(shorten_block);
        }
    }
    let mut program = program.clone();
    for function in &mut program.functions {
        function.values.iter_mut().filter_map(|value| value.constant.as_mut()).for_each(shorten);
        shorten_block(&mut function.block);
    }
    program
}

#[test]
fn packages_of_coremltools_print_and_parse() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/coremltools");
    let mut packages = 0;
    for entry in std::fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path().join("model.mlpackage");
        if path.is_dir() {
            assert_round_trip(&path.display().to_string(), &package::open(&path).unwrap().program);
            packages += 1;
        }
    }
    assert!(packages >= 50, "{packages} packages");
}

#[test]
fn emitted_programs_print_and_parse() {
    let room = tempfile::tempdir().unwrap();
    for form in [&[][..], &["lengths.fixed=[8, 1]", "context=[64, 256]"]] {
        let manifest = emitted::manifest("demo/model", form);
        let programs = emitted::programs(&manifest);
        assert!(programs.len() >= 2);
        for (name, program) in programs {
            let text = program.to_string();
            let parsed = parse(&text).unwrap_or_else(|e| panic!("{name}, {form:?}: {e}"));
            assert_same_text(&name, &parsed.to_string(), &text);
            assert_eq!(verify(&parsed), [], "{name}, {form:?}");
            // a builder numbers values in its own order; what is read has them in the order of the text
            let path = room.path().join("emitted.mlpackage");
            let options = WriteOptions::default().replacing(true);
            package::write(&program, &path, &options).unwrap();
            assert_round_trip(&format!("package of {name}, {form:?}"), &package::open(&path).unwrap().program);
        }
    }
}
