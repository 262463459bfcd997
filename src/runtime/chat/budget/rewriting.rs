//! Templates whose instructions are preceded by ones that pay for them.

use minijinja::machinery::{Instruction, Instructions, Token};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Value, machinery};

use super::{MAX_TOKENS, Outcome, SAME, TREE, invalid};

/// A source whose constants are computed when they are rendered.
pub(in super::super) fn without_folding(source: &str, syntax: &SyntaxConfig) -> Outcome<String> {
    let mut out = String::new();
    let (mut done, mut tokens, mut operand) = (0, 0, false);
    for token in machinery::tokenize(source, false, syntax.clone()) {
        let (token, span) = token?;
        // what follows an operand is an operator of two, and not a sign or the star of `f(*arguments)`
        if operand && matches!(token, Token::Plus | Token::Mul | Token::Tilde) {
            let start = span.start_offset as usize;
            out.push_str(source.get(done..start).unwrap_or_default());
            out.push('|');
            out.push_str(SAME);
            out.push(' ');
            done = start;
        }
        operand = matches!(
            token,
            Token::Ident(_)
                | Token::Str(_)
                | Token::String(_)
                | Token::Int(_)
                | Token::Int128(_)
                | Token::Float(_)
                | Token::BracketClose
                | Token::ParenClose
                | Token::BraceClose
        );
        tokens = match token {
            Token::VariableStart | Token::BlockStart => 0,
            _ => tokens + 1,
        };
        if tokens > MAX_TOKENS {
            return Err(invalid(format!("line {}: a tag of more than {MAX_TOKENS} words", span.start_line)));
        }
    }
    out.push_str(source.get(done..).unwrap_or_default());
    Ok(out)
}

/// The instructions of a template.
pub(super) fn each<'a, 's>(instructions: &'a Instructions<'s>) -> impl Iterator<Item = &'a Instruction<'s>> {
    (0..).map_while(|index| instructions.get(index))
}

/// How instructions become ones that pay.
pub(super) struct Rewriting {
    /// There is a recursive loop, which any call may call.
    pub(super) recursive: bool,
}

impl Rewriting {
    pub(super) fn guarded<'s>(&self, instructions: &Instructions<'s>) -> Instructions<'s> {
        let mut targets = Vec::new();
        for instruction in each(instructions) {
            let mut instruction = instruction.clone();
            targets.extend(target(&mut instruction).map(|target| *target));
        }
        targets.sort_unstable();
        let mut out: Vec<(Instruction, u32)> = Vec::new();
        let mut places = Vec::new();
        let mut before: Option<&Instruction> = None;
        for (index, instruction) in (0u32..).zip(each(instructions)) {
            places.push(out.len() as u32);
            // whether the operand on top is a small constant, on whatever way this instruction is reached
            let small = matches!(before, Some(Instruction::LoadConst(value)) if value.as_object().is_none()
                && value.as_str().is_none_or(|text| text.len() < 256 && text != "arguments")
                && value.as_i64().is_none_or(|number| (0..256).contains(&number)));
            let small = small && targets.binary_search(&index).is_err();
            out.extend(self.one(instruction, small).into_iter().map(|instruction| (instruction, index)));
            before = Some(instruction);
        }
        places.push(out.len() as u32);
        let mut guarded = Instructions::new(instructions.name(), instructions.source());
        for (mut instruction, index) in out {
            if let Some(target) = target(&mut instruction) {
                *target = places.get(*target as usize).copied().unwrap_or(u32::MAX);
            }
            match (instructions.get_span(index), instructions.get_line(index)) {
                (Some(span), _) => guarded.add_with_span(instruction, span),
                (None, Some(line)) => guarded.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX)),
                (None, None) => guarded.add(instruction),
            };
        }
        guarded
    }

    /// What stands for one instruction.
    fn one<'s>(&self, instruction: &Instruction<'s>, small: bool) -> Vec<Instruction<'s>> {
        use Instruction as I;
        let own = instruction.clone();
        let apply = |name, count: u16| I::ApplyFilter(name, Some(count), !0);
        // the operands, paid for and put back
        let paid = |name, count: usize| match (count, u16::try_from(count)) {
            (0, _) => vec![],
            (1, _) => vec![apply(name, 1)],
            (_, Ok(short)) => vec![apply(name, short), I::UnpackList(count)],
            // more than a call can have
            (_, Err(_)) => vec![I::LoadConst(Value::from(())), apply("#refuse", 1)],
        };
        let around = |name, count| [paid(name, count), vec![own.clone(), apply("#made", 1)]].concat();
        let then = |name, count| [paid(name, count), vec![own.clone()]].concat();
        let call = |name, in_order, count: Option<u16>| match count {
            Some(count) => then(name, usize::from(count)),
            // the number of arguments is on top of them
            None => vec![I::ApplyFilter(in_order, None, !0), I::UnpackLists(1), own.clone()],
        };
        match instruction {
            I::EmitRaw(text) => vec![I::LoadConst(Value::from_safe_string((*text).to_owned())), I::Emit],
            I::StringConcat => then("#concat", 2),
            I::Add => around("#add", 2),
            I::Mul => around("#mul", 2),
            I::Slice => around("#slice", 4),
            I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte if !small => then("#compare", 2),
            I::In | I::CompareAndPreserve(_) => then("#in", 2),
            I::GetItem if !small => then("#item", 2),
            I::GetAttr("arguments") => then("#arguments", 1),
            I::BuildMap(pairs) => around("#keys", pairs * 2),
            I::BuildList(_) | I::BuildTuple(_) | I::BuildKwargs(_) => around("", 0),
            I::MergeKwargs(count) => around("#copy", *count),
            I::UnpackLists(count) => then("#items", *count),
            I::PushLoop(_) | I::FastRecurse => then("#loop", 1),
            I::CallFunction(_, count) if self.recursive => call("#loop", "#loop-in-order", *count),
            I::CallMethod("changed", count) => call("#changed", "#changed-in-order", *count),
            I::CallMethod("cycle", count) => call("#cycle", "#cycle-in-order", *count),
            I::Include(_) | I::LoadBlocks => then("#name", 1),
            I::SetAttr(name) => vec![I::LoadConst(Value::from(*name)), apply("#set", 3), I::DiscardTop],
            I::Enclose(_) => vec![I::LoadConst(Value::from(TREE)), apply("#pay", 1), I::DiscardTop, own],
            _ => vec![own],
        }
    }
}

/// Where an instruction goes on.
fn target<'a>(instruction: &'a mut Instruction<'_>) -> Option<&'a mut u32> {
    match instruction {
        Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::Iterate(target)
        | Instruction::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
}
