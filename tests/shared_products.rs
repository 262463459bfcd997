//! The parity gate tries ways of calling side by side, and products with weights are shared between them. The report is
//! what it is when nothing is shared, and what is wrong in one way of calling only is found.

use crate::common::folder;

use std::sync::Arc;

use anec::base::Result;
use anec::bundle::Bundle;
use anec::exec::{Precision, Tensor, TensorData};
use anec::manifest::Gates;
use anec::runtime::{
    Backend, CpuBackend, HostTables, InterceptedBackend, Interceptor, LoadedModel, PackageStore, Sequence, Watch, plan,
};
use anec::runtime::{BatchMember, BatchResult, FunctionCall, Phase, run_anew, run_each, run_in_turn};
use anec::validate::parity::{Candidate, parity};
use anec::validate::verdict::{Check, Verdict};
use anec::validate::{Golden, Thresholds};
use folder::run;

/// The CPU, on which no products are shared.
struct Forgetful(CpuBackend);

struct Alone(Box<dyn Sequence>);

impl Backend for Forgetful {
    fn prepare(&self, function: usize) -> Result<()> {
        self.0.prepare(function)
    }

    fn has_room(&self, _function: usize) -> bool {
        true
    }

    fn of_bundle(&self, _bundle: &Bundle) -> Result<Option<Box<dyn Backend>>> {
        Ok(None)
    }

    fn run_batch(&self, function: usize, members: Vec<BatchMember<'_>>) -> Vec<BatchResult> {
        run_each(function, members)
    }

    fn sequence(&self) -> Result<Box<dyn Sequence>> {
        Ok(Box::new(Alone(self.0.sequence()?)))
    }
}

impl Sequence for Alone {
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        self.0.run(function, inputs, watch)
    }

    fn run_into(&mut self, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()> {
        run_anew(self, call, outputs)
    }

    fn run_together(&mut self, calls: &[FunctionCall<'_>], outputs: &mut [Vec<Arc<Tensor>>]) -> Result<()> {
        run_in_turn(self, calls, outputs)
    }

    fn enter(&mut self, _phase: Phase) {}

    fn states(&self, function: usize) -> Result<Option<Vec<Arc<Tensor>>>> {
        self.0.states(function)
    }

    fn set_states(&mut self, function: usize, values: Vec<Tensor>) -> Result<()> {
        self.0.set_states(function, values)
    }

    fn reset(&mut self) -> Result<()> {
        self.0.reset()
    }

    fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
        Ok(None)
    }
}

/// The checks of the demo on a backend.
fn checks(folder: &std::path::Path, backend: impl Fn(CpuBackend) -> Box<dyn Backend>) -> Vec<Check> {
    let bundle = Bundle::read(folder).unwrap();
    let golden = Golden::read("demo/golden.safetensors".as_ref()).unwrap();
    let candidate = |precision: Precision| {
        let cpu = CpuBackend::new(PackageStore::of(&bundle, folder), precision);
        let host = Arc::new(HostTables::open(&bundle, folder).unwrap());
        let model = LoadedModel::new(bundle.clone(), folder, host, backend(cpu)).unwrap();
        let session = model.start(golden.tokens.len() as u64).unwrap();
        assert!(plan::sizes(&session.route().layers, session.limit()).len() > 2, "there is something to share");
        Candidate { name: precision.to_string(), model, layers: precision == Precision::F32 }
    };
    let candidates = [Precision::F32, Precision::F16].map(candidate);
    parity(&candidates, &golden, &Thresholds::of(&Gates::default()).parity).unwrap().checks
}

#[test]
fn a_report_is_the_same_whether_products_are_shared_or_not() {
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("demo.anec");
    let (code, _, stderr) = run(&["convert", "-m", "demo", "--source", "demo/model", "--out", out.to_str().unwrap()]);
    assert_eq!(code, 0, "{stderr}");

    let written = |checks: &[Check]| checks.iter().map(|check| format!("{check:?}")).collect::<Vec<_>>();
    let shared = checks(&out, |cpu| Box::new(cpu));
    assert_eq!(written(&shared), written(&checks(&out, |cpu| Box::new(Forgetful(cpu)))));
    assert!(shared.iter().all(|check| check.verdict != Verdict::Failed));

    // in calls of three tokens, what leaves them of the last token is wrong
    let spoil: Interceptor = Arc::new(|sequence, function, inputs, watch| {
        let mut outputs = sequence.run(function, inputs, watch)?;
        for tensor in outputs.iter_mut().filter(|tensor| tensor.shape.get(2) == Some(&3)) {
            if let TensorData::F32(values) = &mut tensor.data {
                values.iter_mut().skip(2).step_by(3).for_each(|value| *value = -*value);
            }
        }
        Ok(outputs)
    });
    let spoilt = checks(&out, |cpu| Box::new(InterceptedBackend::new(Arc::new(cpu), spoil.clone())));
    let failed: Vec<&Check> = spoilt.iter().filter(|check| check.verdict == Verdict::Failed).collect();
    let named = |what: &str| failed.iter().any(|check| check.subject == what);
    assert!(named("f32, T = 3") && named("f16, T = 3"), "{failed:#?}");
    assert!(named("f32, layers 0..3 forced, T = 3"), "{failed:#?}");
    assert!(!named("f32, T = 1") && !named("f32, T = 2"), "{failed:#?}");
}
