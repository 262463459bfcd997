//! Quantized matrices with a scale per block.

use super::model::Node;
use super::network::{Constant, Network};
use crate::dtype::SourceDtype;
use crate::error::Result;
use crate::weight::{SourceWeight, ZeroPoints};

impl Network {
    /// Returns the result of `DequantizeLinear`: `(code - zero point) * scale` per block along an axis, per entry of an
    /// axis, or with a single scale.
    pub fn dequantized(&self, node: &Node, codes: Constant, steps: usize) -> Result<Constant> {
        let wrong = |problem: String| self.refuse(node, problem);
        let input = |index: usize, what: &str| -> Result<Constant> {
            self.constant_within(node.input(index), steps - 1)?
                .ok_or_else(|| wrong(format!("its {what} isn't constant")))
        };
        let scales = input(1, "scale")?;
        let zero_points = match node.input(2) {
            "" => None,
            _ => Some(input(2, "zero point")?),
        };
        let axis = match node.int("axis").unwrap_or(1) {
            0 | -2 => 0,
            1 | -1 => 1,
            axis => return Err(wrong(format!("its axis is {axis}"))),
        };
        let block_size = node.int("block_size").unwrap_or(0);
        let size = u64::try_from(block_size).map_err(|_| wrong(format!("its block_size is {block_size}")))?;
        self.scaled_codes(node, codes, [scales].into_iter().chain(zero_points).collect(), axis, size)
    }

    /// Returns `(code - zero point) * scale`, of a matrix of codes, with scales (and zero points) per block of `size`
    /// along an axis, per entry of the axis if `size` is 0, or with a single one.
    pub fn scaled_codes(
        &self,
        node: &Node,
        codes: Constant,
        scales: Vec<Constant>,
        axis: usize,
        size: u64,
    ) -> Result<Constant> {
        let [rows, columns] = *codes.weight.shape() else {
            let problem = format!("it dequantizes a weight of shape {:?}", codes.weight.shape());
            return Err(self.refuse(node, problem));
        };
        let block = match (scales[0].weight.elements(), size, axis) {
            (1, 0, _) => [rows.max(1), columns.max(1)],
            (_, 0, 0) => [1, columns.max(1)],
            (_, 0, _) => [rows.max(1), 1],
            (_, size, 0) => [size, 1],
            (_, size, _) => [1, size],
        };
        let shape = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        let bytes = codes.bytes + scales.iter().map(|scales| scales.bytes).sum::<u64>();
        let zero_points = match scales.get(1) {
            None => ZeroPoints::All(0.0),
            Some(zero_points) => ZeroPoints::Each(zero_points.weight.reshape(&shape)?),
        };
        let scales = scales[0].weight.reshape(&shape)?;
        let weight = SourceWeight::from_blocks(codes.weight.clone(), scales, zero_points, block)?;
        Ok(Constant { weight, bytes, is_float: true, ..codes })
    }

    /// Returns the matrix `[rows, columns]` of codes of `bits` bits with a scale per `block_size` elements of a row, in
    /// the layout of `MatMulNBits` and `GatherBlockQuantized`: rows are padded to whole blocks, and zero points to
    /// whole bytes.
    ///
    /// # Errors
    /// Returns an error if the constants don't fit the numbers, or are stored in another layout.
    pub fn blocks(&self, node: &Node, inputs: [&str; 3], rows: u64, columns: u64) -> Result<Constant> {
        let wrong = |problem: String| self.refuse(node, problem);
        let bits = node.int("bits").unwrap_or(4);
        let codes_of = match bits {
            2 => SourceDtype::U2,
            4 => SourceDtype::U4,
            8 => SourceDtype::U8,
            _ => return Err(wrong(format!("its codes have {bits} bits, expected 2, 4 or 8"))),
        };
        let block_size = node.int("block_size").unwrap_or(128);
        let size = u64::try_from(block_size).ok().filter(|size| *size >= 16 && size.is_power_of_two());
        let size =
            size.ok_or_else(|| wrong(format!("its block_size is {block_size}, expected a power of two, at least 16")))?;
        let blocks = columns.div_ceil(size);
        let [codes, scales, zero_points] = inputs;
        // reshapes of the codes don't change their order
        let (name, stored) = self
            .stored(self.behind_reshapes(codes))
            .ok_or_else(|| wrong(format!("its codes, `{codes}`, aren't a stored constant")))?;
        let padded = blocks.checked_mul(size).ok_or_else(|| wrong(format!("{columns} columns are too many")))?;
        // typed codes represent zero by 0, codes in bytes by the middle
        let (codes_of, middle) = match SourceDtype::from_onnx(stored.data_type) {
            Some(SourceDtype::U8) => (codes_of, (1u32 << (bits - 1)) as f32),
            Some(own @ (SourceDtype::U4 | SourceDtype::I4)) if bits == 4 => (own, 0.0),
            found => {
                let found = found.map_or_else(|| format!("number {}", stored.data_type), |found| found.to_string());
                return Err(wrong(format!("its codes have type {found}, expected U8")));
            }
        };
        let codes = self.tensor(name, stored, Some((codes_of, vec![rows, padded])))?;
        let scales = self.constant(scales)?.ok_or_else(|| wrong("its scales aren't constant".into()))?;
        if !scales.is_float {
            return Err(wrong(format!("its scales have type {}", scales.dtype)));
        }
        let mut bytes = codes.byte_length() + scales.bytes;
        let zero_points = match zero_points {
            "" => ZeroPoints::All(middle),
            value => {
                let (name, stored) =
                    self.stored(value).ok_or_else(|| wrong(format!("its zero points, `{value}`, aren't stored")))?;
                let tensor = match SourceDtype::from_onnx(stored.data_type) {
                    Some(dtype) if dtype.is_float() => self.tensor(name, stored, Some((dtype, vec![rows, blocks])))?,
                    _ => {
                        let per_byte = 8 / bits as u64;
                        let padded = blocks.next_multiple_of(per_byte);
                        self.tensor(name, stored, Some((codes_of, vec![rows, padded])))?
                    }
                };
                bytes += tensor.byte_length();
                ZeroPoints::Each(SourceWeight::from(tensor).columns_range(0..blocks)?)
            }
        };
        let (dtype, origin) = (codes.dtype(), name.to_owned());
        let scales = scales
            .weight
            .reshape(&[rows, blocks])
            .map_err(|_| wrong(format!("it has {} scales, expected {rows} x {blocks}", scales.weight.elements())))?;
        let weight =
            SourceWeight::from_blocks(codes.into(), scales, zero_points, [1, size])?.columns_range(0..columns)?;
        Ok(Constant { weight, dtype, is_float: true, bytes, origin })
    }
}
