//! Continues a prompt: `cargo run --release --example generate -- BUNDLE [PROMPT]`. It needs none of anec's features.

use std::io::Write;

use anec::{GenerateOptions, Model, Sampling};

fn main() -> anec::base::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let bundle = arguments.next().unwrap_or_else(|| "example.anec".into());
    let prompt = arguments.next().unwrap_or_else(|| "It was a fine morning, and".into());
    let options = GenerateOptions::default().max_tokens(60).sampling(Sampling {
        temperature: 0.8,
        top_p: 0.9,
        seed: 1,
        ..Sampling::default()
    });
    let model = Model::on_cpu(bundle)?;
    let mut session = model.session();
    print!("{prompt}");
    let mut pieces = session.generate(prompt, &options)?;
    for piece in &mut pieces {
        print!("{}", piece?);
        // a reader that went away is no error
        let _ = std::io::stdout().flush();
    }
    if let Some(output) = pieces.output() {
        println!("\n{} tokens, {:.1} per second", output.ids.len(), output.timings.decode_tps);
    }
    Ok(())
}
