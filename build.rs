//! Packs the demo model for the program, which carries it: `src/cli/packed.rs` describes the form and reads it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cli")]
    demo::pack();
}

#[cfg(feature = "cli")]
mod demo {
    use std::collections::HashMap;
    use std::io::Write;
    use std::path::Path;

    use flate2::write::DeflateEncoder;
    use flate2::{Compression, Crc};

    const FILES: [&str; 6] = [
        "model/config.json",
        "model/generation_config.json",
        "model/tokenizer.json",
        "model/tokenizer_config.json",
        "model/model.safetensors",
        "golden.safetensors",
    ];
    /// The one whose 16-bit words are few different ones.
    const WORDS: &str = "model/model.safetensors";
    /// How many words have a code of their own; the code after the last stands for any other.
    const CODES: usize = 255;

    pub fn pack() {
        let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
        let out = std::env::var("OUT_DIR").expect("cargo sets it");
        for name in FILES {
            let path = Path::new(&root).join("demo").join(name);
            println!("cargo::rerun-if-changed={}", path.display());
            let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            let mut sum = Crc::new();
            sum.update(&bytes);
            let mut packed = (bytes.len() as u64).to_le_bytes().to_vec();
            packed.extend(sum.sum().to_le_bytes());
            packed.push(u8::from(name == WORDS));
            packed.extend(deflated(&if name == WORDS { coded(&bytes) } else { bytes }));
            let file = Path::new(name).file_name().expect("a name");
            std::fs::write(Path::new(&out).join(file), packed).expect("OUT_DIR is for this");
        }
    }

    /// The words with codes of their own, then a code for each word of the file, then the words without.
    ///
    /// One byte for each weight deflates to less than two do: their bits depend on each other, and deflate doesn't see it.
    fn coded(bytes: &[u8]) -> Vec<u8> {
        let words: Vec<[u8; 2]> = bytes.as_chunks().0.to_vec();
        assert_eq!(words.len() * 2, bytes.len(), "whole words");
        let mut counts: HashMap<[u8; 2], usize> = HashMap::new();
        words.iter().for_each(|&word| *counts.entry(word).or_default() += 1);
        let mut common: Vec<([u8; 2], usize)> = counts.into_iter().collect();
        common.sort_unstable_by_key(|&(word, count)| (std::cmp::Reverse(count), word));
        common.truncate(CODES);
        let code_of: HashMap<[u8; 2], u8> = common.iter().zip(0..).map(|(&(word, _), code)| (word, code)).collect();
        let mut out: Vec<u8> = common.iter().flat_map(|&(word, _)| word).collect();
        out.resize(2 * CODES, 0);
        out.extend(words.iter().map(|word| code_of.get(word).copied().unwrap_or(CODES as u8)));
        out.extend(words.iter().filter(|word| !code_of.contains_key(*word)).flatten());
        out
    }

    fn deflated(bytes: &[u8]) -> Vec<u8> {
        // at 9, this library looks for repetitions of three bytes, which in weights cost more than they save
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::new(8));
        encoder.write_all(bytes).and_then(|()| encoder.finish()).expect("memory takes all")
    }
}
