//! Embeddings and rotary tables, as graphs express them.

use super::decoder::Rope;
use super::model::Node;
use super::network::{Constant, Network};
use super::rope::OnnxRope;
use crate::dtype::SourceDtype;
use crate::error::Result;

impl Network {
    /// Returns the embedding that a value is looked up in.
    pub fn embedding(&self, value: &str, input_ids: &str) -> Result<Constant> {
        let Some((node, ..)) = self.producer(value).filter(|(node, ..)| node.is("Slice")) else {
            return self.looked_up(value, input_ids);
        };
        // rows of codes are padded to whole blocks
        let embedding = self.looked_up(node.input(0), input_ids)?;
        let [start, end, axis] = [1, 2, 3].map(|index| self.integers(node.input(index)));
        let columns = embedding.weight.columns();
        let end = match (start?.as_deref(), end?.as_deref(), axis?.as_deref()) {
            (Some([0]), Some([end]), Some([-1 | 2])) if node.input(4).is_empty() => u64::try_from(*end).ok(),
            _ => None,
        };
        let end = end.ok_or_else(|| self.refuse(node, "it doesn't take the first columns of the embedding"))?;
        Ok(Constant { weight: embedding.weight.columns_range(0..end.min(columns))?, ..embedding })
    }

    /// Returns the rows that a value is looked up in, with padding.
    fn looked_up(&self, value: &str, input_ids: &str) -> Result<Constant> {
        let Some((node, ..)) = self.producer(value) else {
            return Err(self.refuse_value(value, "it should be looked up in the embedding"));
        };
        let ids = |node: &Node| {
            let value = self.behind_counting(node.input(1));
            if value == input_ids && self.is_input(value) {
                return Ok(());
            }
            Err(self.refuse(node, format!("it looks up `{value}`, expected the graph's input `{input_ids}`")))
        };
        if node.is("Gather") && node.int("axis").unwrap_or(0) == 0 {
            ids(node)?;
            return match self.constant(node.input(0))? {
                Some(embedding) if embedding.weight.shape().len() == 2 && embedding.is_float => Ok(embedding),
                _ => Err(self.refuse(node, "the embedding isn't a constant matrix")),
            };
        }
        if node.is_contrib("GatherBlockQuantized") {
            ids(node)?;
            let axis = node.int("quantize_axis").unwrap_or(1);
            if node.int("gather_axis").unwrap_or(0) != 0 || !matches!(axis, 1 | -1) {
                return Err(self.refuse(node, "its blocks don't lie within rows"));
            }
            return self.quantized_embedding(node);
        }
        Err(self.refuse(node, "it should be looked up in the embedding"))
    }

    fn quantized_embedding(&self, node: &Node) -> Result<Constant> {
        let wrong = |problem: &str| self.refuse(node, problem);
        let shape = self.shape_of(node.input(0))?.ok_or_else(|| wrong("its codes aren't a stored constant"))?;
        let bits = u64::try_from(node.int("bits").unwrap_or(4)).ok().filter(|bits| matches!(bits, 2 | 4 | 8));
        let (&[rows, last], Some(bits)) = (&shape[..], bits) else {
            return Err(wrong("its codes aren't a matrix of 2, 4 or 8 bits"));
        };
        let (name, stored) = self.stored(self.behind_reshapes(node.input(0))).ok_or_else(|| wrong("no codes"))?;
        let in_bytes = self.tensor(name, stored, None)?.dtype() == SourceDtype::U8;
        // a byte of a row holds several codes
        let columns =
            if in_bytes { last.checked_mul(8 / bits).ok_or_else(|| wrong("its rows are too long"))? } else { last };
        self.blocks(node, [node.input(0), node.input(2), node.input(3)], rows, columns)
    }

    /// Returns the rotary embedding of two tables, or of two pairs of tables if the graph chooses by the length of the
    /// text.
    pub fn rope(&self, names: [&str; 2]) -> Result<Rope> {
        let table = |network: &Network, [cos, sin]: [Option<Constant>; 2]| -> Result<OnnxRope> {
            let (Some(cos), Some(sin)) = (cos, sin) else {
                return Err(network.refuse_value(names[0], "the rotary tables aren't constant"));
            };
            OnnxRope::new(cos.weight, sin.weight, cos.dtype).map_err(|problem| network.refuse_value(names[0], problem))
        };
        let [cos, sin] = names.map(|name| self.constant(name));
        let (cos, sin) = (cos?, sin?);
        if cos.is_some() {
            return Ok(Rope { table: table(self, [cos, sin])?, long: None });
        }
        let choice = names.map(|name| self.producer(name));
        let [Some((node, index, 0)), Some((_, other, 1))] = choice else {
            return Err(self.refuse_value(names[0], "the rotary tables aren't constant"));
        };
        if !node.is("If") || index != other {
            return Err(self.refuse(node, "it makes rotary tables in a way that isn't understood"));
        }
        let longer_than = self.longer_than(node)?;
        let of = |branch: &str| table(self, self.constants_of_branch(node, branch)?);
        Ok(Rope { table: of("else_branch")?, long: Some((longer_than, of("then_branch")?)) })
    }

    /// Returns the length of text above which the first branch of an `If` is taken.
    fn longer_than(&self, node: &Node) -> Result<u64> {
        let unknown = || self.refuse(node, "it doesn't compare the length of the text with a number");
        let (greater, ..) = self.producer(self.behind_casts(node.input(0))).ok_or_else(unknown)?;
        self.check_counts(node, greater.input(0))?;
        let limit = self.integers(greater.input(1))?.filter(|list| list.len() == 1).map(|list| list[0]);
        let limit = limit.and_then(|limit| u64::try_from(limit).ok()).ok_or_else(unknown)?;
        match greater.op.as_str() {
            "Greater" => Ok(limit),
            "GreaterOrEqual" => Ok(limit.saturating_sub(1)),
            _ => Err(unknown()),
        }
    }
}
