//! Machine that runs the program.

use std::ffi::CStr;

use objc2::rc::autoreleasepool;
use objc2::runtime::AnyObject;
use objc2_core_ml::{MLAllComputeDevices, MLNeuralEngineComputeDevice};

use crate::error::CoreMlError;
use crate::plan::Machine;

pub(super) fn machine() -> Result<Machine, CoreMlError> {
    Ok(Machine {
        model: text(c"hw.model")?,
        chip: text(c"machdep.cpu.brand_string")?,
        os_version: os_version()?,
        os_build: text(c"kern.osversion")?,
        neural_engine_cores: neural_engine_cores(),
    })
}

pub(super) fn os_version() -> Result<String, CoreMlError> {
    text(c"kern.osproductversion")
}

/// Returns a string of `sysctl`.
fn text(name: &CStr) -> Result<String, CoreMlError> {
    let mut bytes = [0u8; 256];
    let mut length = bytes.len();
    // SAFETY: `length` is the size of `bytes`, which the call fills at most; nothing is set.
    let code =
        unsafe { libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &mut length, std::ptr::null_mut(), 0) };
    match CStr::from_bytes_until_nul(&bytes) {
        Ok(text) if code == 0 => Ok(text.to_string_lossy().into_owned()),
        _ => Err(CoreMlError::Unavailable(format!("the system doesn't tell {}", name.to_string_lossy()))),
    }
}

/// Returns the number of Neural Engine cores, if Core ML sees any.
fn neural_engine_cores() -> Option<u32> {
    autoreleasepool(|_| {
        // SAFETY: the function takes nothing and gives an array of devices.
        let devices = unsafe { MLAllComputeDevices() };
        devices.iter().find_map(|device| {
            let device: &AnyObject = (*device).as_ref();
            let engine = device.downcast_ref::<MLNeuralEngineComputeDevice>()?;
            // SAFETY: a property of an object that is there.
            u32::try_from(unsafe { engine.totalCoreCount() }).ok()
        })
    })
}
