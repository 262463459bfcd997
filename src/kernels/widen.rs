//! Widening stored bytes to f32.

/// `out = values * scale`.
pub fn scale_bytes(values: &[i8], scale: f32, out: &mut [f32]) {
    #[inline(always)]
    fn body(values: &[i8], scale: f32, out: &mut [f32]) {
        for (out, value) in out.iter_mut().zip(values) {
            *out = f32::from(*value) * scale;
        }
    }
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn vector(values: &[i8], scale: f32, out: &mut [f32]) {
            body(values, scale, out);
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was just found.
            return unsafe { vector(values, scale, out) };
        }
    }
    body(values, scale, out);
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
