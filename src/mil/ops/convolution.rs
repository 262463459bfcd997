//! Convolutions and pooling.

use super::rules::{Inferred, one, shape_text};
use crate::catalogue::{Arguments, Row};
use crate::types::Dim;
use crate::types::Opset::{CoreMl5, CoreMl7};

const CONV: &str = "x weight bias!? strides!=spatial:1 pad_type!=\"valid\" pad!=pads:0 dilations!=spatial:1 groups!=1";
// the bias may be computed from iOS 17
const CONV_17: &str =
    "x weight bias? strides!=spatial:1 pad_type!=\"valid\" pad!=pads:0 dilations!=spatial:1 groups!=1";

const TRANSPOSE: &str =
    "x weight! bias!? pad!=pads:0 output_shape!? pad_type!=\"valid\" strides!=spatial:1 dilations!=spatial:1 groups!=1";
const TRANSPOSE_17: &str =
    "x weight bias? pad!=pads:0 output_shape!? pad_type!=\"valid\" strides!=spatial:1 dilations!=spatial:1 groups!=1";

pub const ROWS: &[Row] = &[
    ("conv", CoreMl5, CONV, conv),
    ("conv", CoreMl7, CONV_17, conv),
    ("conv_transpose", CoreMl5, TRANSPOSE, conv_transpose),
    ("conv_transpose", CoreMl7, TRANSPOSE_17, conv_transpose),
    (
        "avg_pool",
        CoreMl5,
        "x kernel_sizes! strides!=spatial:1 pad_type! pad!=pads:0 exclude_padding_from_average!=false ceil_mode!=false",
        pool,
    ),
    ("max_pool", CoreMl5, "x kernel_sizes! strides!=spatial:1 pad_type! pad!=pads:0 ceil_mode!=false", pool),
    ("l2_pool", CoreMl5, "x kernel_sizes! strides!=spatial:1 pad_type! pad!=pads:0 ceil_mode!=false", pool),
];

fn conv(a: &Arguments<'_>) -> Inferred {
    let (x, weight) = (a.tensor("x")?, a.tensor("weight")?);
    if !(3..=5).contains(&x.rank()) || weight.rank() != x.rank() {
        return Err(format!("x has rank {} and weight rank {}; both must be 3, 4 or 5", x.rank(), weight.rank()));
    }
    let groups = a.constant("groups").map_or(Ok(1), |_| a.integer("groups"))?;
    let groups = u64::try_from(groups).ok().filter(|g| *g > 0).ok_or_else(|| format!("`groups` is {groups}"))?;
    let channels = weight.shape[1].times(&Dim::Fixed(groups));
    if !x.shape[1].is_compatible(&channels) {
        return Err(format!("x has {} channels, the weight expects {channels}", x.shape[1]));
    }
    if let Some(bias) = a.optional_tensor("bias")?
        && !(bias.rank() == 1 && bias.shape[0].is_compatible(&weight.shape[0]))
    {
        return Err(format!("bias has shape {}; [{}] is needed", shape_text(&bias.shape), weight.shape[0]));
    }
    let kernel = weight.shape[2..].iter().map(|d| d.fixed().ok_or("the kernel's size must be fixed"));
    let kernel: Vec<u64> = kernel.collect::<Result<_, _>>()?;
    let mut shape = vec![x.shape[0].clone(), weight.shape[0].clone()];
    shape.extend(windows(a, &x.shape[2..], &kernel)?);
    one(x.dtype, shape)
}

fn conv_transpose(a: &Arguments<'_>) -> Inferred {
    let (x, weight) = (a.tensor("x")?, a.tensor("weight")?);
    if !(3..=5).contains(&x.rank()) || weight.rank() != x.rank() {
        return Err(format!("x has rank {} and weight rank {}; both must be 3, 4 or 5", x.rank(), weight.rank()));
    }
    if !x.shape[1].is_compatible(&weight.shape[0]) {
        return Err(format!("x has {} channels, the weight expects {}", x.shape[1], weight.shape[0]));
    }
    let groups = a.constant("groups").map_or(Ok(1), |_| a.integer("groups"))?;
    let groups = u64::try_from(groups).ok().filter(|g| *g > 0).ok_or_else(|| format!("`groups` is {groups}"))?;
    let mut shape = vec![x.shape[0].clone(), weight.shape[1].times(&Dim::Fixed(groups))];
    if let Some(wanted) = a.optional_integers("output_shape") {
        if wanted.len() != x.rank() {
            return Err(format!("`output_shape` has {} entries for rank {}", wanted.len(), x.rank()));
        }
        shape.extend(wanted[2..].iter().map(|n| Dim::Fixed((*n).max(0) as u64)));
        return one(x.dtype, shape);
    }
    let count = x.rank() - 2;
    let numbers = |parameter: &str, default: Vec<i64>| -> Result<Vec<i64>, String> {
        let values = a.optional_integers(parameter).unwrap_or_else(|| default.clone());
        let fits = values.len() == default.len() && values.iter().all(|v| *v >= 0);
        let needed = default.len();
        if fits { Ok(values) } else { Err(format!("`{parameter}` is {values:?}; {needed} numbers are needed")) }
    };
    let (strides, dilations) = (numbers("strides", vec![1; count])?, numbers("dilations", vec![1; count])?);
    let pads = numbers("pad", vec![0; 2 * count])?;
    let kind = a.text("pad_type").unwrap_or("valid");
    for i in 0..count {
        let kernel = weight.shape[i + 2].fixed().ok_or("the kernel's size must be fixed")?;
        let stretched = x.shape[i + 2].times(&Dim::Fixed(strides[i] as u64));
        let extent = extent(kernel, dilations[i])?.saturating_sub(strides[i]);
        shape.push(match kind {
            "same" => stretched,
            "valid" => stretched.offset_by(extent),
            "custom" => stretched.offset_by(extent.saturating_sub(pads[2 * i]).saturating_sub(pads[2 * i + 1])),
            other => return Err(format!("`pad_type` is \"{other}\"")),
        });
    }
    one(x.dtype, shape)
}

fn pool(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let kernel: Vec<u64> = a.integers("kernel_sizes")?.into_iter().map(|k| k.max(0) as u64).collect();
    if x.rank() != kernel.len() + 2 {
        return Err(format!("x has rank {}, `kernel_sizes` {} numbers", x.rank(), kernel.len()));
    }
    let mut shape = x.shape[..2].to_vec();
    shape.extend(windows(a, &x.shape[2..], &kernel)?);
    one(x.dtype, shape)
}

/// Extent of a dilated kernel in elements.
fn extent(kernel: u64, dilation: i64) -> Result<i64, String> {
    let steps = kernel.checked_sub(1).and_then(|steps| i64::try_from(steps).ok());
    let extent = steps.and_then(|steps| steps.checked_mul(dilation)?.checked_add(1));
    extent.ok_or_else(|| format!("a kernel of {kernel} with a dilation of {dilation}"))
}

/// Number of kernel positions along each spatial dimension.
fn windows(a: &Arguments<'_>, x: &[Dim], kernel: &[u64]) -> Result<Vec<Dim>, String> {
    let count = kernel.len();
    let per_dimension = |parameter: &str, default: i64| -> Result<Vec<i64>, String> {
        let values = a.optional_integers(parameter).unwrap_or_else(|| vec![default; count]);
        let fits = values.len() == count && values.iter().all(|v| *v > 0);
        if fits { Ok(values) } else { Err(format!("`{parameter}` is {values:?}; {count} positive numbers are needed")) }
    };
    let (strides, dilations) = (per_dimension("strides", 1)?, per_dimension("dilations", 1)?);
    let pads = a.optional_integers("pad").unwrap_or_else(|| vec![0; 2 * count]);
    let kind = a.text("pad_type").unwrap_or("valid");
    let ceil = a.flag("ceil_mode");
    (0..count)
        .map(|i| {
            let extent = extent(kernel[i], dilations[i])?;
            let padding = match kind {
                "valid" => 0,
                "custom" => pads.get(2 * i).zip(pads.get(2 * i + 1)).map(|(a, b)| a + b).ok_or("`pad` is too short")?,
                "same" | "same_lower" => match &x[i] {
                    Dim::Fixed(n) => return Ok(Dim::Fixed(n.div_ceil(strides[i] as u64))),
                    dim if strides[i] == 1 => return Ok(dim.clone()),
                    _ => return Ok(Dim::Unknown),
                },
                other => return Err(format!("`pad_type` is \"{other}\"")),
            };
            let free = x[i].offset_by(padding - extent);
            match &free {
                Dim::Fixed(n) => {
                    let stride = strides[i] as u64;
                    Ok(Dim::Fixed(if ceil { n.div_ceil(stride) } else { n / stride } + 1))
                }
                Dim::Unknown if x[i].fixed().is_some() => {
                    Err(format!("the kernel of {extent} is larger than the {} there are", x[i]))
                }
                dim if strides[i] == 1 => Ok(dim.offset_by(1)),
                _ => Ok(Dim::Unknown),
            }
        })
        .collect()
}
