//! Products with constant matrices, as graphs express them.

use super::model::Node;
use super::network::{Constant, Network};
use crate::error::Result;
use crate::weight::SourceWeight;

/// Maximum depth of parts of parts of a projection.
const DEEPEST: usize = 8;

/// Projection `x W^T + b` of a graph.
#[derive(Clone, Debug)]
pub(super) struct Projection<'a> {
    /// Name of `x`.
    pub input: &'a str,
    /// `W`, `[outputs, inputs]`.
    pub weight: Constant,
    /// `b`, `[outputs]`.
    pub bias: Option<Constant>,
}

impl Constant {
    /// Returns rows of a matrix, or elements of a vector, with their share of the bytes.
    pub fn slice(&self, range: std::ops::Range<u64>) -> Result<Constant> {
        let weight = self.weight.slice(range)?;
        // sizes of tensors stay far below 2^63
        let bytes = u128::from(self.bytes) * u128::from(weight.elements()) / u128::from(self.weight.elements().max(1));
        Ok(Constant { weight, bytes: bytes as u64, ..self.clone() })
    }
}

impl Projection<'_> {
    fn slice(self, range: std::ops::Range<u64>) -> Result<Self> {
        let bias = self.bias.map(|bias| bias.slice(range.clone())).transpose()?;
        Ok(Projection { weight: self.weight.slice(range)?, bias, ..self })
    }

    /// Splits the rows into parts of the given sizes, which must be all rows.
    pub fn split<const N: usize>(self, sizes: [u64; N]) -> Result<Option<[Self; N]>> {
        if self.rows() != sizes.iter().sum::<u64>() {
            return Ok(None);
        }
        let mut start = 0;
        let parts: Vec<Self> = sizes
            .iter()
            .map(|size| {
                start += size;
                self.clone().slice(start - size..start)
            })
            .collect::<Result<_>>()?;
        Ok(parts.try_into().ok())
    }

    /// Number of outputs.
    pub fn rows(&self) -> u64 {
        self.weight.weight.shape()[0]
    }
}

impl Network {
    /// Returns the projection that a value comes from: a product with a constant, its sum with a constant, or a part of
    /// one.
    ///
    /// # Errors
    /// Returns an error if the projection is of an unsupported form.
    pub fn projection<'a>(&'a self, value: &'a str) -> Result<Option<Projection<'a>>> {
        self.projection_within(value, DEEPEST)
    }

    fn projection_within<'a>(&'a self, value: &'a str, steps: usize) -> Result<Option<Projection<'a>>> {
        let value = self.behind_casts(value);
        let Some((node, _, output)) = self.producer(value).filter(|_| steps > 0) else { return Ok(None) };
        if node.domain.is_empty() {
            match node.op.as_str() {
                "Add" => return self.with_bias(node, steps),
                "Split" => return self.part(node, output, steps),
                "Slice" => return self.sliced(node, steps),
                "MatMul" => {
                    return match self.constant(node.input(1))? {
                        Some(matrix) => self.product(node, node.input(0), turned(&matrix)?).map(Some),
                        None => Ok(None),
                    };
                }
                "Gemm" => return self.gemm(node),
                "Mul" => return self.dynamically_quantized(node),
                _ => {}
            }
        }
        if node.is_contrib("MatMulNBits") {
            return self.quantized(node).map(Some);
        }
        Ok(None)
    }

    /// Returns `x W^T` for a matrix `[outputs, inputs]`.
    fn product<'a>(&'a self, node: &'a Node, input: &'a str, matrix: Constant) -> Result<Projection<'a>> {
        if matrix.weight.shape().len() != 2 || !matrix.is_float {
            let shape = matrix.weight.shape();
            return Err(self.refuse(node, format!("its weight has type {} and shape {shape:?}", matrix.dtype)));
        }
        Ok(Projection { input, weight: matrix, bias: None })
    }

    fn with_bias<'a>(&'a self, node: &'a Node, steps: usize) -> Result<Option<Projection<'a>>> {
        for (of, bias) in [(0, 1), (1, 0)] {
            let Some(bias) = self.constant(node.input(bias))? else { continue };
            let Some(projection) = self.projection_within(node.input(of), steps - 1)? else { return Ok(None) };
            if projection.bias.is_some() {
                return Err(self.refuse(node, "it adds a second bias"));
            }
            return self.biased(node, projection, bias).map(Some);
        }
        Ok(None)
    }

    fn biased<'a>(&self, node: &Node, projection: Projection<'a>, bias: Constant) -> Result<Projection<'a>> {
        let rows = projection.rows();
        if bias.weight.elements() != rows || bias.weight.columns() != rows || !bias.is_float {
            let shape = bias.weight.shape();
            return Err(self.refuse(node, format!("its bias has shape {shape:?} for {rows} outputs")));
        }
        let weight = bias.weight.reshape(&[rows])?;
        Ok(Projection { bias: Some(Constant { weight, ..bias }), ..projection })
    }

    fn part<'a>(&'a self, node: &'a Node, output: usize, steps: usize) -> Result<Option<Projection<'a>>> {
        let Some(projection) = self.projection_within(node.input(0), steps - 1)? else { return Ok(None) };
        let last = matches!(node.int("axis").unwrap_or(0), -1 | 2);
        let rows = projection.rows();
        let sizes = match (self.integers(node.input(1))?, node.ints("split")) {
            (Some(sizes), _) => sizes,
            (None, Some(sizes)) => sizes.to_vec(),
            (None, None) => vec![(rows / node.outputs.len() as u64) as i64; node.outputs.len()],
        };
        let sizes: Option<Vec<u64>> = sizes.iter().map(|&size| u64::try_from(size).ok()).collect();
        let whole = |sizes: &Vec<u64>| {
            sizes.len() == node.outputs.len()
                && sizes.iter().try_fold(0u64, |sum, &size| sum.checked_add(size)) == Some(rows)
        };
        let Some(sizes) = sizes.filter(whole).filter(|_| last) else {
            return Err(self.refuse(node, format!("it doesn't split the last dimension, of {rows}, as it says")));
        };
        let start: u64 = sizes[..output].iter().sum();
        projection.slice(start..start + sizes[output]).map(Some)
    }

    fn sliced<'a>(&'a self, node: &'a Node, steps: usize) -> Result<Option<Projection<'a>>> {
        let Some(projection) = self.projection_within(node.input(0), steps - 1)? else { return Ok(None) };
        let rows = projection.rows();
        let one = |index: usize| -> Result<Option<i64>> {
            Ok(self.integers(node.input(index))?.filter(|list| list.len() == 1).map(|list| list[0]))
        };
        let place = |n: i64| if n < 0 { n.saturating_add(rows as i64).max(0) as u64 } else { (n as u64).min(rows) };
        let step = if node.input(4).is_empty() { Some(1) } else { one(4)? };
        match (one(1)?, one(2)?, one(3)?, step) {
            (Some(start), Some(end), Some(-1 | 2), Some(1)) if place(start) <= place(end) => {
                projection.slice(place(start)..place(end)).map(Some)
            }
            _ => Err(self.refuse(node, "it doesn't take a part of the last dimension")),
        }
    }

    fn gemm<'a>(&'a self, node: &'a Node) -> Result<Option<Projection<'a>>> {
        let Some(matrix) = self.constant(node.input(1))? else { return Ok(None) };
        let plain = [node.float("alpha"), node.float("beta")].into_iter().flatten().all(|factor| factor == 1.0);
        if !plain || node.int("transA").unwrap_or(0) != 0 {
            return Err(self.refuse(node, "it scales, or turns its input"));
        }
        let matrix = if node.int("transB").unwrap_or(0) != 0 { matrix } else { turned(&matrix)? };
        let projection = self.product(node, node.input(0), matrix)?;
        match node.input(2) {
            "" => Ok(Some(projection)),
            bias => match self.constant(bias)? {
                Some(bias) => self.biased(node, projection, bias).map(Some),
                None => Err(self.refuse(node, "its bias isn't constant")),
            },
        }
    }

    /// Returns the product of an input, rounded to 8 bits at run time, with codes of a weight: `MatMulInteger` times
    /// the scales of both. The rounding of the input is left out.
    fn dynamically_quantized<'a>(&'a self, node: &'a Node) -> Result<Option<Projection<'a>>> {
        for (product, scales) in [(0, 1), (1, 0)].map(|(a, b)| (node.input(a), node.input(b))) {
            let product = self.producer(self.behind_counting(product)).map(|(node, ..)| node);
            let Some(product) = product.filter(|node| node.is("MatMulInteger")) else { continue };
            let scales = self.producer(scales).map(|(node, ..)| node).filter(|node| node.is("Mul"));
            let Some((input, _, 0)) =
                self.producer(product.input(0)).filter(|(node, ..)| node.is("DynamicQuantizeLinear"))
            else {
                return Err(self.refuse(product, "its input isn't rounded by DynamicQuantizeLinear"));
            };
            let (Some(scales), Some(codes)) = (scales, self.constant(product.input(1))?) else {
                return Err(self.refuse(product, "its weight or the scales aren't constant"));
            };
            let of_input = |index: usize| input.outputs.get(1).is_some_and(|scale| scale == scales.input(index));
            let scale = match (of_input(0), of_input(1)) {
                (true, false) => self.constant(scales.input(1))?,
                (false, true) => self.constant(scales.input(0))?,
                _ => None,
            };
            let Some(scale) = scale.filter(|scale| scale.is_float) else {
                return Err(self.refuse(product, "its result isn't multiplied by the scales of input and weight"));
            };
            let zero_points = match product.input(3) {
                "" => None,
                value => match self.constant(value)? {
                    Some(zero_points) => Some(zero_points),
                    None => return Err(self.refuse(product, "its zero point isn't constant")),
                },
            };
            let scales = [scale].into_iter().chain(zero_points).collect();
            let weight = self.scaled_codes(product, codes, scales, 1, 0)?;
            return self.product(product, input.input(0), turned(&weight)?).map(Some);
        }
        Ok(None)
    }

    fn quantized<'a>(&'a self, node: &'a Node) -> Result<Projection<'a>> {
        let size = |name: &str| {
            let found = node.int(name).and_then(|n| u64::try_from(n).ok()).filter(|n| *n > 0 && *n < 1 << 32);
            found.ok_or_else(|| self.refuse(node, format!("its attribute {name} is {:?}", node.int(name))))
        };
        let (rows, columns) = (size("N")?, size("K")?);
        if node.int("weight_prepacked").unwrap_or(0) != 0 {
            return Err(self.refuse(node, "its weight is packed for one kind of processor (weight_prepacked)"));
        }
        if !node.input(4).is_empty() {
            return Err(self.refuse(node, "it puts its inputs into another order (g_idx)"));
        }
        let weight = self.blocks(node, [node.input(1), node.input(2), node.input(3)], rows, columns)?;
        let projection = Projection { input: node.input(0), weight, bias: None };
        match node.input(5) {
            "" => Ok(projection),
            bias => match self.constant(bias)? {
                Some(bias) => self.biased(node, projection, bias),
                None => Err(self.refuse(node, "its bias isn't constant")),
            },
        }
    }
}

/// Transposes a matrix `[inputs, outputs]`.
fn turned(matrix: &Constant) -> Result<Constant> {
    let weight = match matrix.weight.shape().len() {
        2 => matrix.weight.transpose()?,
        _ => SourceWeight::clone(&matrix.weight), // refused by who asked, with the node's name
    };
    Ok(Constant { weight, ..matrix.clone() })
}
