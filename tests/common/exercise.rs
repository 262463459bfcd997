//! Processing of untrusted bytes short of running them, shared by the damage tests and the fuzz targets.

use std::path::Path;
use std::sync::Arc;

use anec::base::{MappedFile, Result};
use anec::coreai;
use anec::manifest::Manifest;
use anec::mil::codec;
use anec::mil::text::parse;
use anec::mil::verify::{infer_types, verify};
use anec::mil::{Constant, Program};
use anec::package::{self, blob::WeightPlan};
use anec::runtime::chat::{Chat, ChatTemplate, Message};
use anec::runtime::{Detokenizer, Tokenizer};
use anec::source::tokenizer::GgufTokenizer;
use anec::source::{dequantize, gguf, onnx, pytorch, safetensors};
use anec::{Bundle, Gate, Model, Validator};

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

/// Reads a GGUF file, decodes its tensors, and rebuilds its tokenizer.
///
/// # Errors
/// Whatever is wrong with it.
pub fn gguf(bytes: &[u8]) -> Result<()> {
    let path = Path::new("memory.gguf");
    let header = gguf::parse(path, bytes)?;
    for tensor in &header.tensors {
        let data = &bytes[tensor.range.start as usize..tensor.range.end as usize];
        // a tensor of the file has at most 512 elements to two bytes, so this is bounded by the input
        let elements: u64 = tensor.shape.iter().product();
        let mut values = vec![0.0; elements as usize];
        dequantize::read(tensor.dtype, data, 0, &mut values);
    }
    if let Ok(Some(own)) = GgufTokenizer::read(&header.metadata)
        && let Ok(file) = own.file()
    {
        let _ = tokenizer(&file.to_json());
    }
    Ok(())
}

/// Reads a safetensors file and decodes its tensors.
///
/// # Errors
/// Whatever is wrong with it.
pub fn safetensors(bytes: &[u8]) -> Result<()> {
    let file = MappedFile::from_bytes(Path::new("memory.safetensors"), bytes.to_vec());
    for tensor in safetensors::tensors(&Arc::new(file))? {
        // elements are at least a byte, so this is bounded by the input
        let mut values = vec![0.0; tensor.elements() as usize];
        tensor.read(0, &mut values).expect("the whole of a tensor can be read");
    }
    Ok(())
}

/// Reads a checkpoint of PyTorch and decodes its tensors.
///
/// # Errors
/// Whatever is wrong with it.
pub fn pytorch(bytes: &[u8]) -> Result<()> {
    let file = MappedFile::from_bytes(Path::new("memory.bin"), bytes.to_vec());
    // any number of tensors may lie in the same bytes
    for tensor in pytorch::tensors(&Arc::new(file))?.iter().take(64) {
        let mut values = vec![0.0; tensor.elements() as usize];
        tensor.read(0, &mut values).expect("the whole of a tensor can be read");
    }
    Ok(())
}

/// Reads an ONNX model and decodes its tensors. `path` is for the file of weights that lies beside it.
///
/// # Errors
/// Whatever is wrong with it.
pub fn onnx(path: &Path, bytes: &[u8]) -> Result<()> {
    let file = || MappedFile::from_bytes(path, bytes.to_vec());
    let encoder = onnx::parse_encoder(file());
    let (ropes, tensors) = match encoder {
        Ok((_, tensors)) => (Vec::new(), tensors),
        Err(_) => onnx::parse(file()).map(|(decoder, tensors)| (decoder.ropes, tensors))?,
    };
    for tensor in tensors {
        // codes have two bits or more, so this is bounded by the files
        let mut values = vec![0.0; tensor.elements() as usize];
        tensor.read(0, &mut values).expect("the whole of a tensor can be read");
    }
    for rope in &ropes {
        let _ = rope.table.theta();
    }
    Ok(())
}

/// Reads a manifest, whose first line is an override, and prints it: what is printed must say the same.
///
/// # Errors
/// Whatever is wrong with it.
pub fn manifest(text: &str) -> Result<()> {
    let (first, text) = text.split_once('\n').unwrap_or(("", text));
    let overrides: Vec<String> = if first.is_empty() { Vec::new() } else { vec![first.to_owned()] };
    let manifest = Manifest::from_yaml(text, "memory", &overrides)?;
    let again = Manifest::from_yaml(&manifest.to_yaml(), "again", &[]).expect("what is printed is read");
    assert_eq!(again, manifest);
    Ok(())
}

/// Reads a `tokenizer.json`, and tokenizes and detokenizes texts with it.
///
/// # Errors
/// Whatever is wrong with it.
pub fn tokenizer(bytes: &[u8]) -> Result<()> {
    let path = Path::new("tokenizer.json");
    let _ = Tokenizer::check_steps(path, bytes);
    let tokenizer = Arc::new(Tokenizer::from_bytes(path, bytes)?);
    let long = "ab ca\n".repeat(50);
    for text in ["", " ", "abc a", "Hello, ä海🙂 \n\t x</s>[X]", &long] {
        let most = 1000 * (text.len() + 100);
        for ids in [tokenizer.encode(text), tokenizer.encode_rest(text), tokenizer.encode_literal(text)] {
            // a text that a step refuses is an error, which isn't this one's matter
            let Ok(ids) = ids else { continue };
            assert!(ids.len() <= most, "{} tokens of {} bytes", ids.len(), text.len());
            for special in [true, false] {
                let decoded = tokenizer.decode(&ids, special).unwrap_or_default();
                assert!(decoded.len() <= most, "{} bytes again of {}", decoded.len(), text.len());
            }
            if let Ok(mut stream) = Detokenizer::after(&tokenizer, &ids[..ids.len() / 2], &[]) {
                ids[ids.len() / 2..].iter().for_each(|id| drop(stream.push(*id)));
                let _ = stream.finish();
            }
        }
        let _ = tokenizer.encode_whole(text, Some("b"), true);
        let _ = tokenizer.tokens(text);
    }
    (0..tokenizer.len().min(100) as u32).for_each(|id| drop(tokenizer.token_bytes(id)));
    Ok(())
}

/// Parses a chat template and renders a conversation with it.
///
/// # Errors
/// If it can't be parsed or rendered.
pub fn template(text: &str) -> Result<()> {
    let template = ChatTemplate::new(text, "<s>", "</s>")?;
    let messages = [("system", "Be brief."), ("user", "Hello <b>"), ("assistant", "Hi\n"), ("user", "")];
    let mut chat = Chat::new(messages.map(|(role, text)| Message::new(role, text)).to_vec());
    let _ = template.takes_tools();
    chat.tools.push(serde_json::json!({"type": "function", "function": {"name": "f", "parameters": {}}}));
    template.render(&chat)?;
    Ok(())
}

/// Reads the bundle in a folder whose `bundle.json` may be any; one without contradictions goes through the structure
/// gate and generates text.
///
/// # Errors
/// Whatever is wrong with it.
pub fn bundle(folder: &Path) -> Result<()> {
    let bundle = Bundle::read(folder)?;
    let findings = bundle.check();
    let _ = (bundle.digest(), bundle.portable());
    Validator::new(folder).gates([Gate::Structure]).run()?;
    let model = Model::on_cpu(folder)?;
    assert!(findings.is_empty(), "a runtime refuses contradictions: {findings:?}");
    let mut session = model.session();
    let options = anec::GenerateOptions::default().max_tokens(2);
    for piece in session.generate("It was", &options)? {
        piece?;
    }
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
            op.constants().for_each(|(_, one)| constant(one));
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
