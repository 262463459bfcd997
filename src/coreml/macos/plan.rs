//! Reader of compute plans.

use std::path::Path;

use objc2::runtime::{AnyObject, ProtocolObject};
use objc2_core_ml::{
    MLCPUComputeDevice, MLComputeDeviceProtocol, MLComputePlan, MLGPUComputeDevice, MLModelStructureProgramBlock,
    MLModelStructureProgramOperation, MLNeuralEngineComputeDevice,
};
use objc2_foundation::NSString;

use super::{Task, configuration, url};
use crate::error::CoreMlError;
use crate::plan::{ComputeUnits, Device, Operation};

/// Name of the only function of a package.
const ONLY_FUNCTION: &str = "main";

pub(super) fn plan(model: &Path, units: ComputeUnits) -> Result<Vec<Operation>, CoreMlError> {
    let task = Task { action: "plan", path: model };
    task.guard(|| {
        let model = url(model)?;
        let configuration = configuration(units, None);
        let plan = task.wait::<MLComputePlan>(|handler| {
            // SAFETY: the arguments live through the call; Core ML copies the handler.
            unsafe {
                MLComputePlan::loadContentsOfURL_configuration_completionHandler(&model, &configuration, handler);
            }
        })?;
        // SAFETY: properties of a plan that nobody else has.
        let program = unsafe { plan.modelStructure().program() };
        let program = program.ok_or_else(|| task.refused("it isn't an ML Program"))?;
        // SAFETY: as above.
        let functions = unsafe { program.functions() };
        let function = functions.objectForKey(&NSString::from_str(ONLY_FUNCTION));
        let function = function.ok_or_else(|| task.refused(format!("it has no function `{ONLY_FUNCTION}`")))?;
        // SAFETY: as above.
        let body = unsafe { function.block() };
        Ok(block(&plan, &body))
    })
}

fn block(plan: &MLComputePlan, block: &MLModelStructureProgramBlock) -> Vec<Operation> {
    // SAFETY: a property of an object of the plan's structure, which nobody changes.
    let operations = unsafe { block.operations() };
    operations.iter().map(|op| operation(plan, &op)).collect()
}

fn operation(plan: &MLComputePlan, op: &MLModelStructureProgramOperation) -> Operation {
    // SAFETY: the op is of this plan's structure; all are properties, which nobody changes.
    unsafe {
        let usage = plan.computeDeviceUsageForMLProgramOperation(op);
        let usage = usage.as_deref();
        Operation {
            operator: op.operatorName().to_string(),
            outputs: op.outputs().iter().map(|output| output.name().to_string()).collect(),
            preferred: usage.map(|usage| device(&usage.preferredComputeDevice())),
            supported: usage.map_or_else(Vec::new, |usage| {
                usage.supportedComputeDevices().iter().map(|supported| device(&supported)).collect()
            }),
            cost: plan.estimatedCostOfMLProgramOperation(op).map(|cost| cost.weight()),
            blocks: op.blocks().iter().map(|inner| block(plan, &inner)).collect(),
        }
    }
}

fn device(device: &ProtocolObject<dyn MLComputeDeviceProtocol>) -> Device {
    let device: &AnyObject = device.as_ref();
    if device.downcast_ref::<MLNeuralEngineComputeDevice>().is_some() {
        Device::NeuralEngine
    } else if device.downcast_ref::<MLGPUComputeDevice>().is_some() {
        Device::Gpu
    } else if device.downcast_ref::<MLCPUComputeDevice>().is_some() {
        Device::Cpu
    } else {
        Device::Unknown
    }
}
