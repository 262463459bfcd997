//! Converts a model into a bundle: `cargo run --release --example convert -- SOURCE OUT`, where SOURCE is a .gguf, a
//! .safetensors, an .onnx, a folder of Hugging Face, or hf:owner/name.

use anec::{Converter, Manifest, ProgressEvent};

fn main() -> anec::base::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let source = arguments.next().unwrap_or_else(|| "demo/model".into());
    let out = arguments.next().unwrap_or_else(|| "example.anec".into());
    let manifest = Manifest::from_yaml("context: 256", "the example", &[])?;
    let converter = Converter::new(manifest).source(source).out(out).observe(|event| match event {
        ProgressEvent::Stage(name) => println!("writing {name}"),
        ProgressEvent::Note(line) => println!("note: {line}"),
        _ => {}
    });
    println!("{} bytes of weights", converter.plan()?.weight_bytes());
    let outcome = converter.convert()?;
    println!("{}", outcome.path().display());
    Ok(())
}
