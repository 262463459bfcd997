//! A writer of GGUF, version 3, for synthetic models: tests and benchmarks make their sources with it.

use std::io::{self, Write};

use super::value::{GgufArray, GgufValue};
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC};
use crate::dtype::SourceDtype;
use half::f16;

/// Model to write: metadata, and names, types and shapes of tensors. Their data is requested while writing.
#[derive(Clone, Debug, Default)]
pub struct Writer {
    metadata: Vec<(String, GgufValue)>,
    tensors: Vec<Declared>,
}

#[derive(Clone, Debug)]
struct Declared {
    name: String,
    dtype: SourceDtype,
    shape: Vec<u64>,
}

impl Writer {
    /// Returns an empty model.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key.
    pub fn key(&mut self, key: &str, value: impl Into<GgufValue>) -> &mut Self {
        self.metadata.push((key.to_owned(), value.into()));
        self
    }

    /// Adds a tensor; `shape` is outermost dimension first.
    pub fn tensor(&mut self, name: &str, dtype: SourceDtype, shape: &[u64]) -> &mut Self {
        self.tensors.push(Declared { name: name.to_owned(), dtype, shape: shape.to_vec() });
        self
    }

    /// Returns names, types and shapes of the tensors in the order of insertion.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, SourceDtype, &[u64])> {
        self.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.dtype, tensor.shape.as_slice()))
    }

    fn alignment(&self) -> u64 {
        let key = self.metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY);
        match key {
            Some((_, GgufValue::U32(alignment))) => u64::from(*alignment).max(1),
            _ => DEFAULT_ALIGNMENT,
        }
    }

    /// Writes the model. `data` is called for each tensor in the order in which they were added, with its index, and
    /// must write as many bytes as its type and shape take.
    ///
    /// # Errors
    /// Returns an error if `out` or `data` fails, a shape isn't whole blocks, a type isn't one of GGUF, or `data`
    /// writes more or fewer bytes.
    pub fn write<W: Write>(
        &self,
        out: W,
        mut data: impl FnMut(usize, &mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut out = Counted { out, position: 0 };
        let alignment = self.alignment();
        out.write_all(&MAGIC)?;
        out.write_all(&3u32.to_le_bytes())?;
        out.write_all(&(self.tensors.len() as u64).to_le_bytes())?;
        out.write_all(&(self.metadata.len() as u64).to_le_bytes())?;
        for (key, value) in &self.metadata {
            write_string(&mut out, key)?;
            out.write_all(&value.type_number().to_le_bytes())?;
            write_value(&mut out, value)?;
        }
        let mut offset = 0;
        let mut lengths = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            write_string(&mut out, &tensor.name)?;
            out.write_all(&(tensor.shape.len() as u32).to_le_bytes())?;
            for dimension in tensor.shape.iter().rev() {
                out.write_all(&dimension.to_le_bytes())?;
            }
            let number = tensor.dtype.ggml_number().ok_or_else(|| wrong(tensor, "its type isn't one of GGUF"))?;
            out.write_all(&number.to_le_bytes())?;
            out.write_all(&u64::to_le_bytes(offset))?;
            let length = crate::tensor::byte_length(tensor.dtype, &tensor.shape).map_err(|p| wrong(tensor, &p))?;
            lengths.push(length);
            offset += length.next_multiple_of(alignment);
        }
        for (index, (tensor, length)) in self.tensors.iter().zip(lengths).enumerate() {
            out.pad(alignment)?;
            let start = out.position;
            data(index, &mut out)?;
            if out.position - start != length {
                return Err(wrong(tensor, &format!("{} bytes were written, expected {length}", out.position - start)));
            }
        }
        out.pad(alignment)?;
        out.flush()
    }
}

fn wrong(tensor: &Declared, problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("tensor `{}`: {problem}", tensor.name))
}

/// Writer that counts bytes.
struct Counted<W> {
    out: W,
    position: u64,
}

impl<W: Write> Counted<W> {
    fn pad(&mut self, alignment: u64) -> io::Result<()> {
        let length = self.position.next_multiple_of(alignment) - self.position;
        io::copy(&mut io::Read::take(io::repeat(0), length), self).map(|_| ())
    }
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.position += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn write_string(out: &mut impl Write, text: &str) -> io::Result<()> {
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(text.as_bytes())
}

fn write_value(out: &mut impl Write, value: &GgufValue) -> io::Result<()> {
    match value {
        GgufValue::U8(value) => out.write_all(&value.to_le_bytes()),
        GgufValue::I8(value) => out.write_all(&value.to_le_bytes()),
        GgufValue::U16(value) => out.write_all(&value.to_le_bytes()),
        GgufValue::I16(value) => out.write_all(&value.to_le_bytes()),
        GgufValue::U32(value) => out.write_all(&value.to_le_bytes()),
        GgufValue::I32(value) => out.write_all(&value.to_le_bytes()),
        GgufValue::F32(value) => out.write_all(&value.to_le_bytes()),
        GgufValue::Bool(value) => out.write_all(&[u8::from(*value)]),
        GgufValue::String(text) => write_string(out, text),
        GgufValue::Array(array) => write_array(out, array),
        GgufValue::U64(value) => out.write_all(&value.to_le_bytes()),
        GgufValue::I64(value) => out.write_all(&value.to_le_bytes()),
        GgufValue::F64(value) => out.write_all(&value.to_le_bytes()),
    }
}

fn write_array(out: &mut impl Write, array: &GgufArray) -> io::Result<()> {
    out.write_all(&array.type_number().to_le_bytes())?;
    out.write_all(&(array.len() as u64).to_le_bytes())?;
    match array {
        GgufArray::U8(values) => out.write_all(values),
        GgufArray::I8(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
        GgufArray::U16(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
        GgufArray::I16(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
        GgufArray::U32(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
        GgufArray::I32(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
        GgufArray::F32(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
        GgufArray::Bool(values) => values.iter().try_for_each(|value| out.write_all(&[u8::from(*value)])),
        GgufArray::String(values) => values.iter().try_for_each(|text| write_string(out, text)),
        GgufArray::Array(values) => values.iter().try_for_each(|array| write_array(out, array)),
        GgufArray::U64(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
        GgufArray::I64(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
        GgufArray::F64(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
    }
}

/// Quantizes to Q8_0 as ggml does, 34 bytes for 32 values; values beyond the last whole 32 are left out.
pub fn q8_0(values: &[f32], out: &mut Vec<u8>) {
    for block in values.as_chunks::<32>().0 {
        let largest = block.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let scale = largest / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        out.extend(f16::from_f32(scale).to_le_bytes());
        out.extend(block.iter().map(|value| (value * inverse).round() as i8 as u8));
    }
}
