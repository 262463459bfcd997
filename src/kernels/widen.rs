//! Widening stored bytes to f32.

use crate::vectorized_fn;

vectorized_fn! {
    /// Computes `out = values * scale`.
    pub fn scale_bytes<'a>(values: &'a [i8], scale: f32, out: &'a mut [f32]) -> () = scale_bytes_generic
}

#[inline(always)]
fn scale_bytes_generic(values: &[i8], scale: f32, out: &mut [f32]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = f32::from(*value) * scale;
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_byte_is_widened() {
        let values: Vec<i8> = (-128..=127).collect();
        let mut out = vec![0.0; 256];
        super::scale_bytes(&values, 0.5, &mut out);
        assert!(out.iter().zip(-128..=127).all(|(out, v)| *out == v as f32 * 0.5));
    }
}
