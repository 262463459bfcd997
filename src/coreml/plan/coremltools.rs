//! Compute plans in the form of coremltools' `MLComputePlan`, as `tools/export_plan.py` writes them on a Mac.

use serde::Deserialize;

use super::{ComputePlan, ComputeUnits, Device, FunctionPlan, Machine, Operation, PackageDigest, SCHEMA_VERSION};

/// Value of the key `format`.
pub(super) const FORMAT: &str = "coremltools.MLComputePlan";

/// Plans of one model or several.
#[derive(Deserialize)]
pub(super) struct CoremltoolsPlan {
    coremltools: String,
    #[serde(default)]
    name: String,
    date: String,
    machine: Machine,
    compute_units: String,
    models: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    model: String,
    sha256: String,
    plans: Vec<Plan>,
}

/// Plan of a model's default function at its default shape.
#[derive(Deserialize)]
struct Plan {
    function: String,
    #[serde(default)]
    tokens: Option<u64>,
    #[serde(default)]
    refused: Option<String>,
    #[serde(default)]
    block: Block,
}

#[derive(Default, Deserialize)]
struct Block {
    operations: Vec<Op>,
}

/// `MLModelStructureProgramOperation` with its `MLComputePlanDeviceUsage` and `MLComputePlanCost`.
#[derive(Deserialize)]
struct Op {
    operator_name: String,
    outputs: Vec<String>,
    device_usage: Option<Usage>,
    estimated_cost: Option<Cost>,
    #[serde(default)]
    blocks: Vec<Block>,
}

#[derive(Deserialize)]
struct Usage {
    preferred_compute_device: String,
    supported_compute_devices: Vec<String>,
}

#[derive(Deserialize)]
struct Cost {
    weight: f64,
}

fn device(class: &str) -> Device {
    match class {
        "MLNeuralEngineComputeDevice" => Device::NeuralEngine,
        "MLGPUComputeDevice" => Device::Gpu,
        "MLCPUComputeDevice" => Device::Cpu,
        _ => Device::Unknown,
    }
}

impl From<Op> for Operation {
    fn from(op: Op) -> Self {
        Operation {
            operator: op.operator_name,
            outputs: op.outputs,
            preferred: op.device_usage.as_ref().map(|usage| device(&usage.preferred_compute_device)),
            supported: op
                .device_usage
                .iter()
                .flat_map(|usage| &usage.supported_compute_devices)
                .map(|class| device(class))
                .collect(),
            cost: op.estimated_cost.map(|cost| cost.weight),
            blocks: op.blocks.into_iter().map(operations).collect(),
        }
    }
}

fn operations(block: Block) -> Vec<Operation> {
    block.operations.into_iter().map(Operation::from).collect()
}

impl CoremltoolsPlan {
    /// Converts the plans.
    ///
    /// # Errors
    /// If the compute units aren't those of coremltools.
    pub(super) fn into_plan(self) -> Result<ComputePlan, String> {
        let compute_units = match self.compute_units.as_str() {
            "CPU_AND_NE" => ComputeUnits::CpuAndNeuralEngine,
            "CPU_ONLY" => ComputeUnits::CpuOnly,
            "CPU_AND_GPU" => ComputeUnits::CpuAndGpu,
            "ALL" => ComputeUnits::All,
            other => return Err(format!("compute units `{other}`, expected CPU_AND_NE")),
        };
        let mut plan = ComputePlan {
            schema_version: SCHEMA_VERSION,
            anec_version: format!("coremltools {}", self.coremltools),
            bundle: self.name,
            date: self.date,
            machine: self.machine,
            compute_units,
            packages: Vec::new(),
            functions: Vec::new(),
        };
        for Model { model, sha256, plans } in self.models {
            plan.functions.extend(plans.into_iter().map(|Plan { function, tokens, refused, block }| FunctionPlan {
                package: model.clone(),
                function,
                tokens,
                operations: operations(block),
                refused,
                timings: Vec::new(),
            }));
            plan.packages.push(PackageDigest { package: model, sha256 });
        }
        Ok(plan)
    }
}
