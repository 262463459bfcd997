//! Text form of programs, close to the `model.mil` that Core ML's compiler writes.
//!
//! ```text
//! program(1.3)
//! {
//!     func main<ios18>(tensor<fp16, [1, 64, T, 1]> hidden) [T = range(lower = 1, upper = 4, default = 1)] {
//!         tensor<fp16, [1, 64, T, 1]> y = add(x = hidden, y = hidden)[name = string("y")];
//!     } -> (y);
//! }
//! ```
//!
//! Differences: symbols stand for flexible dimensions, and their sizes follow the inputs; numbers are
//! decimal and exact; constants of more than [`INLINE_ELEMENTS`] elements are written as `<N bytes>`. [`parse()`] reads
//! this form.

use std::fmt::{self, Display, Formatter};

use super::catalogue;
use super::constant::{Constant, Data};
use super::ir::{Argument, Binding, Block, Function, Keyword, Op, Program, SymbolRange, ValueId};
use super::names::Name;
use super::types::{Opset, ValueType};

mod lexer;
mod literal;
mod parse;

pub use parse::parse;

/// Maximum number of elements of a constant in the text; larger ones are written as their number of bytes.
pub const INLINE_ELEMENTS: u64 = 64;

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        // the compiler writes 1.3 for programs with states and 1.0 for others
        writeln!(f, "program({})", if self.opset() >= Opset::CoreMl8 { "1.3" } else { "1.0" })?;
        if self.functions.first().is_none_or(|first| first.name != self.default_function) {
            writeln!(f, "[default = {}]", Name(&self.default_function))?;
        }
        f.write_str("{\n")?;
        for function in &self.functions {
            write_function(f, function, 1)?;
        }
        f.write_str("}\n")
    }
}

impl Display for Function {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write_function(f, self, 0)
    }
}

fn write_function(f: &mut Formatter<'_>, function: &Function, depth: usize) -> fmt::Result {
    let opset = function.opset.target().to_ascii_lowercase();
    write!(f, "{}func {}<{opset}>(", Indent(depth), Name(&function.name))?;
    write_definitions(f, function, &function.inputs)?;
    f.write_str(")")?;
    if !function.lengths.is_empty() {
        f.write_str(" [")?;
        for (i, (symbol, lengths)) in function.lengths.iter().enumerate() {
            write!(f, "{}{} = ", comma(i), Name(symbol.name()))?;
            match lengths {
                SymbolRange::Range { lower, upper: Some(upper), default } => {
                    write!(f, "range(lower = {lower}, upper = {upper}, default = {default})")?;
                }
                SymbolRange::Range { lower, upper: None, default } => {
                    write!(f, "range(lower = {lower}, default = {default})")?;
                }
                SymbolRange::Enumerated(sizes) => {
                    f.write_str("enumerated(")?;
                    for (i, size) in sizes.iter().enumerate() {
                        write!(f, "{}{size}", comma(i))?;
                    }
                    f.write_str(")")?;
                }
            }
        }
        f.write_str("]")?;
    }
    f.write_str(" ")?;
    write_body(f, function, &function.block, depth)
}

/// `{ ops } -> (outputs);`
fn write_body(f: &mut Formatter<'_>, function: &Function, block: &Block, depth: usize) -> fmt::Result {
    f.write_str("{\n")?;
    for op in &block.ops {
        write_op(f, function, op, depth + 1)?;
    }
    write!(f, "{}}} -> (", Indent(depth))?;
    for (i, output) in block.outputs.iter().enumerate() {
        write!(f, "{}{}", comma(i), name(function, *output))?;
    }
    f.write_str(");\n")
}

fn write_op(f: &mut Formatter<'_>, function: &Function, op: &Op, depth: usize) -> fmt::Result {
    write!(f, "{}", Indent(depth))?;
    write_definitions(f, function, &op.outputs)?;
    let equals = if op.outputs.is_empty() { "" } else { " = " };
    write!(f, "{equals}{}(", Name(&op.operator))?;
    let order = parameter_order(op, function.opset);
    for (i, (parameter, argument)) in in_order(op.inputs.iter(), &order).into_iter().enumerate() {
        write!(f, "{}{} = ", comma(i), Name(parameter))?;
        write_argument(f, function, argument, variadic(op, function.opset, parameter))?;
    }
    write!(f, ")[name = string({:?})", op.name)?;
    for (attribute, constant) in in_order(op.attributes.iter(), &order) {
        write!(f, ", {} = {}", Name(attribute), Inline(constant))?;
    }
    f.write_str("]")?;
    if !op.blocks.is_empty() {
        f.write_str(" {\n")?;
        for block in &op.blocks {
            write!(f, "{}block(", Indent(depth + 1))?;
            write_definitions(f, function, &block.inputs)?;
            f.write_str(") ")?;
            write_body(f, function, block, depth + 1)?;
        }
        write!(f, "{}}}", Indent(depth))?;
    }
    f.write_str(";\n")
}

fn write_argument(f: &mut Formatter<'_>, function: &Function, argument: &Argument, list: bool) -> fmt::Result {
    let list = list || argument.len() != 1;
    f.write_str(if list { "(" } else { "" })?;
    for (i, binding) in argument.iter().enumerate() {
        f.write_str(comma(i))?;
        match binding {
            Binding::Value(id) => write!(f, "{}", name(function, *id))?,
            Binding::Constant(constant) => write!(f, "{}", Inline(constant))?,
        }
    }
    f.write_str(if list { ")" } else { "" })
}

fn write_definitions(f: &mut Formatter<'_>, function: &Function, ids: &[ValueId]) -> fmt::Result {
    for (i, id) in ids.iter().enumerate() {
        match function.values.get(id.0 as usize).map(|v| &v.ty) {
            Some(ValueType::Opaque(text)) => write!(f, "{}opaque({text:?})", comma(i))?,
            Some(ty) => write!(f, "{}{ty}", comma(i))?,
            None => write!(f, "{}opaque(\"\")", comma(i))?,
        }
        write!(f, " {}", name(function, *id))?;
    }
    Ok(())
}

/// Names of the operator's parameters in the order of the catalogue.
fn parameter_order(op: &Op, opset: Opset) -> Vec<&'static str> {
    catalogue::lookup(&op.operator, opset).map_or(Vec::new(), |spec| spec.parameters.iter().map(|p| p.name).collect())
}

fn variadic(op: &Op, opset: Opset, parameter: &str) -> bool {
    catalogue::lookup(&op.operator, opset).and_then(|s| s.parameter(parameter)).is_some_and(|p| p.variadic)
}

/// Sorts entries: first those of the order, then the others by name.
fn in_order<'a, T>(
    entries: impl Iterator<Item = (&'a Keyword, &'a T)>,
    order: &[&'static str],
) -> Vec<(&'a Keyword, &'a T)> {
    let mut entries: Vec<_> = entries.collect();
    entries.sort_by_key(|(name, _)| order.iter().position(|known| known == name).unwrap_or(usize::MAX));
    entries
}

fn name(function: &Function, id: ValueId) -> Name<'_> {
    Name(function.values.get(id.0 as usize).map_or("", |v| v.name.as_str()))
}

fn comma(i: usize) -> &'static str {
    if i == 0 { "" } else { ", " }
}

struct Indent(usize);

impl Display for Indent {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        (0..self.0).try_for_each(|_| f.write_str("    "))
    }
}

/// A constant with its type: `tensor<int32, [2]>([1, 2])`.
struct Inline<'a>(&'a Constant);

impl Display for Inline<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let constant = self.0;
        write!(f, "{}(", constant.ty)?;
        let short = constant.ty.elements().is_some_and(|n| n <= INLINE_ELEMENTS);
        match &constant.data {
            Data::Content(content) => write!(f, "<{} bytes>", content.length())?,
            Data::Literal(bytes) if !short => write!(f, "<{} bytes>", bytes.len())?,
            Data::Literal(bytes) => match literal::elements(&constant.ty, bytes) {
                Some(elements) => write_nested(f, &elements, &constant.ty.fixed_shape().unwrap_or_default())?,
                None => write_bytes(f, bytes)?,
            },
            Data::Strings(strings) => {
                let elements: Vec<String> = strings.iter().map(|s| format!("{s:?}")).collect();
                match constant.ty.fixed_shape() {
                    Some(shape) if constant.is_consistent() => write_nested(f, &elements, &shape)?,
                    _ => write!(f, "[{}]", elements.join(", "))?,
                }
            }
        }
        f.write_str(")")
    }
}

/// Bytes in memory order, if text can't represent the elements.
fn write_bytes(f: &mut Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    f.write_str("0x")?;
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

fn write_nested(f: &mut Formatter<'_>, elements: &[String], shape: &[u64]) -> fmt::Result {
    let Some((count, inner)) = shape.split_first() else {
        return f.write_str(elements.first().map_or("", String::as_str));
    };
    if elements.is_empty() {
        return f.write_str("[]");
    }
    f.write_str("[")?;
    let stride = elements.len() / (*count).max(1) as usize;
    for i in 0..*count as usize {
        f.write_str(comma(i))?;
        write_nested(f, &elements[i * stride..(i + 1) * stride], inner)?;
    }
    f.write_str("]")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::constant::Content;
    use crate::types::{DataType, Dim, TensorType};
    use crate::{FunctionBuilder, verify};

    /// Weights that are produced on demand.
    struct Zeros(u64);

    impl Content for Zeros {
        fn length(&self) -> u64 {
            self.0
        }
        fn granule(&self) -> u64 {
            1
        }
        fn read(&self, _offset: u64, out: &mut [u8]) -> anec_base::Result<()> {
            out.fill(0);
            Ok(())
        }
    }

    /// Half a layer: quantized projection, reshape to heads, write and read of a state.
    fn sample() -> Program {
        let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
        let tokens = ops.symbol("T", SymbolRange::Range { lower: 1, upper: Some(4), default: 1 });
        let shape = [Dim::Fixed(1), Dim::Fixed(8), (&tokens).into(), Dim::Fixed(1)];
        let hidden = ops.input("hidden", TensorType::new(DataType::Fp16, shape));
        let cache = ops.state("k_cache_0", TensorType::new(DataType::Fp16, [2u64, 16, 4]));
        let data = Constant::content(TensorType::new(DataType::Int8, [8u64, 8, 1, 1]), Arc::new(Zeros(64)));
        let scale = Constant::fp16_tensor(&[1, 1, 1, 1], &[0.1]);
        let weight = ops.op("constexpr_blockwise_shift_scale", "weight", [("data", data), ("scale", scale)].map(given));
        let query = ops.conv("query", hidden, weight, None);
        let query = ops.reshape(query, &[1, 2, 4, -1]);
        let query = ops.transpose(query, &[0, 1, 3, 2]);
        let keys = ops.read_state(cache);
        let keys = ops.mul(keys, Constant::fp16(-1.5));
        ops.write_state(cache, keys);
        let keys = ops.read_state(cache);
        let keys = ops.expand_dims(keys, &[0]);
        let scores = ops.matmul(query, keys, false, true);
        let both = ops.concat(&[scores, scores], 1);
        ops.output("scores", both);
        Program::single(ops.finish().unwrap())
    }

    fn given((name, constant): (&'static str, Constant)) -> (&'static str, crate::builder::OpInput) {
        (name, constant.into())
    }

    #[test]
    fn a_program_reads_like_the_compilers_text() {
        insta::assert_snapshot!(sample().to_string());
    }

    #[test]
    fn what_is_printed_parses_back() {
        let program = sample();
        let parsed = parse(&program.to_string()).unwrap();
        assert_eq!(parsed.to_string(), program.to_string());
        assert_eq!(verify::verify(&parsed), []);
        assert_eq!(parsed.functions[0].lengths, program.functions[0].lengths);
    }

    #[test]
    fn data_that_was_left_out_is_not_made_up() {
        let parsed = parse(&sample().to_string()).unwrap();
        let op = parsed.functions[0].ops().find(|op| op.is_constexpr()).unwrap();
        let data = parsed.functions[0].constant(op.input("data").unwrap()).unwrap();
        assert_eq!(data.ty.bytes(), Some(64));
        let message = data.bytes().unwrap_err().to_string();
        assert_eq!(message, "the text form holds only the length of this constant (64 bytes), not its data");
    }

    #[test]
    fn a_mistake_in_the_text_is_placed() {
        let cases = [
            ("program(1.3) {", "line 1, column 15: found the end, expected `func`"),
            ("program(1.3) {}", "line 1, column 16: the program has no function"),
            (
                "program(1.3)\n{ func main<ios18>(fp17 x) {} -> (x); }",
                "line 2, column 20: found `fp17`, expected a type",
            ),
            ("program(1.3) { func main<ios99>() {} -> (); }", "expected one of ios15, ios16, ios17, ios18, ios26"),
            (
                "program(1.3) { func main<ios18>(fp16 x) {} -> (y); }",
                "`y` is used in function `main` but never defined",
            ),
            ("program(1.3) { func main<ios18>(fp16 \"x) {} -> (x); }", "line 1, column 38: the quote is never closed"),
            (
                "program(1.3) { func main<ios18>() { int8 y = const()[val = int8(200)]; } -> (y); }",
                "`200` is not of type int8",
            ),
            (
                "program(1.3) { func main<ios18>(fp16 x) { fp16 y = add(x = x, x = x); } -> (y); }",
                "\"x\" is given twice",
            ),
        ];
        for (text, message) in cases {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn deep_nesting_is_refused() {
        let lists = "[".repeat(100_000);
        let text = format!("program(1.3) {{ func main<ios18>() {{ fp16 y = const()[val = fp16({lists}");
        assert!(parse(&text).unwrap_err().to_string().contains("lists nest deeper than 64"));
        let blocks = "cond()[name = string(\"c\")] { block() { ".repeat(1000);
        let text = format!("program(1.3) {{ func main<ios18>() {{ {blocks}");
        assert!(parse(&text).unwrap_err().to_string().contains("blocks nest deeper than 64"));
    }
}
