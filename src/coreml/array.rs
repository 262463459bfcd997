//! Elements of arrays with padded rows: Core ML chooses the strides of its outputs.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// Element type of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 16-bit floating point.
    F16,
    /// 32-bit floating point.
    F32,
    /// 32-bit integers.
    I32,
}

impl Element {
    /// Returns the size of an element in bytes.
    pub fn size(self) -> usize {
        match self {
            Element::F16 => 2,
            Element::F32 | Element::I32 => 4,
        }
    }
}

/// Input or output of a function at one shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedArray {
    /// Name of the array.
    pub name: String,
    /// Element type.
    pub element: Element,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
}

impl StridedArray {
    /// Returns the number of elements.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the strides of a contiguous array, in elements.
    pub fn strides(&self) -> Vec<usize> {
        let mut strides = vec![1; self.shape.len()];
        for axis in (1..self.shape.len()).rev() {
            strides[axis - 1] = strides[axis] * self.shape[axis];
        }
        strides
    }
}

/// Elements in row-major order; floating-point elements are f32, whatever the array's type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values<'a> {
    /// Elements of [`Element::F16`] and [`Element::F32`].
    Floats(&'a [f32]),
    /// Elements of [`Element::I32`].
    Integers(&'a [i32]),
}

/// Owned form of [`Values`].
#[derive(Clone, Debug, PartialEq)]
pub enum OwnedValues {
    /// Elements of [`Element::F16`] and [`Element::F32`].
    Floats(Vec<f32>),
    /// Elements of [`Element::I32`].
    Integers(Vec<i32>),
}

impl OwnedValues {
    /// Borrows the values.
    pub fn as_values(&self) -> Values<'_> {
        match self {
            OwnedValues::Floats(values) => Values::Floats(values),
            OwnedValues::Integers(values) => Values::Integers(values),
        }
    }
}

/// Writes values into the memory of a contiguous array.
///
/// # Errors
/// If their kind or number differs from the array's elements.
pub fn write(array: &StridedArray, values: Values<'_>, memory: &mut [u8]) -> Result<(), String> {
    let (count, given) = match values {
        Values::Floats(values) => (array.count(), values.len()),
        Values::Integers(values) => (array.count(), values.len()),
    };
    if count != given || memory.len() != count * array.element.size() {
        return Err(format!("`{}` has {count} elements, {given} are given", array.name));
    }
    match (array.element, values) {
        (Element::F16, Values::Floats(values)) => match bytemuck::try_cast_slice_mut::<u8, f16>(memory) {
            Ok(halves) => halves.convert_from_f32_slice(values),
            Err(_) => return Err(format!("the memory of `{}` isn't aligned", array.name)),
        },
        (Element::F32, Values::Floats(values)) => memory.copy_from_slice(bytemuck::cast_slice(values)),
        (Element::I32, Values::Integers(values)) => memory.copy_from_slice(bytemuck::cast_slice(values)),
        (element, _) => return Err(format!("`{}` takes {element:?}, other values are given", array.name)),
    }
    Ok(())
}

/// Reads the elements of an array from its memory; strides count elements.
///
/// # Errors
/// If an element lies outside of the memory.
pub fn read(element: Element, shape: &[usize], strides: &[usize], memory: &[u8]) -> Result<OwnedValues, String> {
    if shape.len() != strides.len() {
        return Err(format!("{} sizes and {} strides", shape.len(), strides.len()));
    }
    let count = shape.iter().try_fold(1usize, |n, size| n.checked_mul(*size));
    let count = count.ok_or_else(|| format!("the shape {shape:?} is too large"))?;
    let last = shape
        .iter()
        .zip(strides)
        .try_fold(0usize, |last, (size, stride)| last.checked_add(size.saturating_sub(1).checked_mul(*stride)?));
    let needed = last.and_then(|last| last.checked_add(1)?.checked_mul(element.size()));
    if count > 0 && needed.is_none_or(|needed| needed > memory.len()) {
        let held = memory.len();
        return Err(format!("{held} bytes don't hold {element:?} of shape {shape:?} with strides {strides:?}"));
    }
    Ok(match element {
        Element::F16 => {
            let halves = gather(count, shape, strides, memory, f16::from_le_bytes);
            let mut floats = vec![0.0; halves.len()];
            halves.convert_to_f32_slice(&mut floats);
            OwnedValues::Floats(floats)
        }
        Element::F32 => OwnedValues::Floats(gather(count, shape, strides, memory, f32::from_le_bytes)),
        Element::I32 => OwnedValues::Integers(gather(count, shape, strides, memory, i32::from_le_bytes)),
    })
}

/// Writes values into memory with padded rows; strides count elements, and padding is left as it is.
///
/// # Errors
/// If their kind or number differs from the elements, or an element lies outside of the memory.
pub fn write_strided(
    element: Element,
    shape: &[usize],
    strides: &[usize],
    values: Values<'_>,
    memory: &mut [u8],
) -> Result<(), String> {
    let row = shape.last().copied().unwrap_or(1);
    let rows = shape.split_last().map_or(1, |(_, outer)| outer.iter().product());
    let given = match values {
        Values::Floats(values) => values.len(),
        Values::Integers(values) => values.len(),
    };
    if shape.len() != strides.len() || given != rows * row || strides.last().is_some_and(|stride| *stride != 1) {
        return Err(format!("{given} values don't go into {element:?} of shape {shape:?} with strides {strides:?}"));
    }
    let one = StridedArray { name: "a row".into(), element, shape: vec![row] };
    for index in 0..rows {
        let (mut left, mut at) = (index, 0);
        for axis in (0..shape.len().saturating_sub(1)).rev() {
            at += left % shape[axis] * strides[axis];
            left /= shape[axis];
        }
        let bytes = at * element.size()..(at + row) * element.size();
        let held = memory.len();
        let place = memory.get_mut(bytes).ok_or_else(|| format!("{held} bytes don't hold {shape:?} by {strides:?}"))?;
        let of_row = index * row..(index + 1) * row;
        match values {
            Values::Floats(values) => write(&one, Values::Floats(&values[of_row]), place)?,
            Values::Integers(values) => write(&one, Values::Integers(&values[of_row]), place)?,
        }
    }
    Ok(())
}

/// Gathers elements in row-major order. The memory must hold all of them.
fn gather<T: Copy, const N: usize>(
    count: usize,
    shape: &[usize],
    strides: &[usize],
    memory: &[u8],
    element: fn([u8; N]) -> T,
) -> Vec<T> {
    let (elements, _) = memory.as_chunks::<N>();
    let mut out = Vec::with_capacity(count);
    let mut index = vec![0; shape.len()];
    let mut at = 0;
    while out.len() < count {
        out.push(element(elements[at]));
        // advance the index like an odometer
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            at += strides[axis];
            if index[axis] < shape[axis] {
                break;
            }
            at -= strides[axis] * shape[axis];
            index[axis] = 0;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(element: Element, shape: &[usize]) -> StridedArray {
        StridedArray { name: "x".into(), element, shape: shape.to_vec() }
    }

    /// Returns memory of the 16-bit elements 0, 1, 2, …
    fn halves(count: usize) -> Vec<u8> {
        (0..count).flat_map(|i| f16::from_f32(i as f32).to_le_bytes()).collect()
    }

    #[test]
    fn padding_stays_as_it_is() {
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let (shape, strides) = ([2, 2, 3], [16, 8, 1]);
        let mut memory = vec![0xff; 64];
        write_strided(Element::F16, &shape, &strides, Values::Floats(&values), &mut memory).unwrap();
        assert_eq!(read(Element::F16, &shape, &strides, &memory).unwrap(), OwnedValues::Floats(values.clone()));
        assert_eq!(memory[6..16], [0xff; 10]);
        let error =
            write_strided(Element::F16, &shape, &strides, Values::Floats(&values), &mut memory[..40]).unwrap_err();
        assert_eq!(error, "40 bytes don't hold [2, 2, 3] by [16, 8, 1]");
        assert!(write_strided(Element::F16, &shape, &[16, 8, 2], Values::Floats(&values), &mut memory).is_err());
        assert!(write_strided(Element::F16, &shape, &strides, Values::Floats(&values[1..]), &mut memory).is_err());
    }

    #[test]
    fn values_survive_a_round_trip() {
        for (element, values) in [
            (Element::F16, Values::Floats(&[0.5, -1.0, 2048.0, 0.0, 6e-8, 65504.0])),
            (Element::F32, Values::Floats(&[0.1, -1.0, 1e30, 0.0, 1e-30, 3.0])),
            (Element::I32, Values::Integers(&[1, -1, i32::MAX, i32::MIN, 0, 7])),
        ] {
            let array = array(element, &[1, 2, 3]);
            let mut memory = vec![0; 6 * element.size()];
            write(&array, values, &mut memory).unwrap();
            let again = read(element, &array.shape, &array.strides(), &memory).unwrap();
            match (values, again) {
                (Values::Floats(a), OwnedValues::Floats(b)) => {
                    let tolerance = if element == Element::F16 { 1e-8 } else { 0.0 };
                    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= tolerance), "{a:?} {b:?}");
                }
                (Values::Integers(a), OwnedValues::Integers(b)) => assert_eq!(a, b),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn padding_is_skipped() {
        // two rows of three elements in four places each, and their transpose
        assert_eq!(
            read(Element::F16, &[2, 3], &[4, 1], &halves(7)),
            Ok(OwnedValues::Floats(vec![0.0, 1.0, 2.0, 4.0, 5.0, 6.0]))
        );
        assert_eq!(
            read(Element::F16, &[3, 2], &[1, 4], &halves(7)),
            Ok(OwnedValues::Floats(vec![0.0, 4.0, 1.0, 5.0, 2.0, 6.0]))
        );
        // shape [1, 2, 2, 1] with the last axis padded to 32
        assert_eq!(
            read(Element::F16, &[1, 2, 2, 1], &[128, 64, 32, 1], &halves(97)),
            Ok(OwnedValues::Floats(vec![0.0, 32.0, 64.0, 96.0]))
        );
        // a broadcast: stride 0
        assert_eq!(read(Element::F16, &[3], &[0], &halves(1)), Ok(OwnedValues::Floats(vec![0.0; 3])));
        assert_eq!(read(Element::I32, &[], &[], &[7, 0, 0, 0]), Ok(OwnedValues::Integers(vec![7])));
        assert_eq!(read(Element::I32, &[0, 3], &[3, 1], &[]), Ok(OwnedValues::Integers(vec![])));
    }

    #[test]
    fn reads_stay_within_the_memory() {
        assert!(read(Element::F16, &[2, 3], &[4, 1], &halves(6)).is_err());
        assert!(read(Element::F16, &[2, 3], &[4], &halves(6)).is_err());
        assert!(read(Element::F16, &[usize::MAX, 2], &[1, 1], &halves(6)).is_err());
        assert!(read(Element::F16, &[2, 2], &[usize::MAX, usize::MAX], &halves(6)).is_err());
    }

    #[test]
    fn values_of_another_kind_or_number_are_refused() {
        let x = array(Element::F16, &[2]);
        assert_eq!(write(&x, Values::Floats(&[1.0]), &mut [0; 4]), Err("`x` has 2 elements, 1 are given".into()));
        assert!(write(&x, Values::Integers(&[1, 2]), &mut [0; 4]).is_err());
        assert!(write(&x, Values::Floats(&[1.0, 2.0]), &mut [0; 2]).is_err());
    }
}
