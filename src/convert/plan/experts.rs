//! Packages of experts outside of their layer's package.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::{PackagePlan, Planner};
use crate::error::ConvertError;
use crate::size::PackageSize;
use anec_base::Result;
use anec_bundle::Stage;
use anec_family::{ExpertCounts, FunctionRequest};
use anec_manifest::ExpertsForm;

/// Experts of a layer in packages of their own.
pub(super) struct Experts<'a> {
    pub planner: &'a Planner<'a>,
    pub known: &'a Mutex<HashMap<AlikeExperts, PackageSize>>,
    pub layer: usize,
    pub counts: ExpertCounts,
}

/// Key of the size of a package of experts. Experts of a layer have the same shapes, and so have those of layers whose
/// single experts have the same size; hundreds of packages need one measurement.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct AlikeExperts {
    single: PackageSize,
    count: u64,
    /// Includes the function that adds the experts' results.
    joins: bool,
    /// Layer, if layers have number formats of their own.
    layer: Option<usize>,
}

impl Experts<'_> {
    /// Plans the fewest packages under the limit, of equal groups of experts; their names start with `name`.
    pub fn packages(&self, name: &str) -> Result<Vec<PackagePlan>> {
        let (limit, shards) = (self.planner.limit(), &self.planner.manifest.shards);
        let all = self.counts.apart();
        let single = self.planner.size(&self.requests(0..1))?;
        if single.file_bytes > limit {
            let (layer, megabytes) = (self.layer, single.file_bytes as f64 / 1e6);
            return Err(ConvertError::LayerTooLarge { layer, megabytes, limit: shards.max_mb }.into());
        }
        let size = |range: Range<u64>| self.size_of(range, single);
        let mut groups = all.div_ceil(shards.max_experts.unwrap_or(all));
        while groups < all && size(0..all.div_ceil(groups))?.file_bytes > limit {
            groups += 1;
        }
        let each = all.div_ceil(groups);
        let digits = all.to_string().len();
        (0..all.div_ceil(each))
            .map(|group| {
                let range = group * each..all.min((group + 1) * each);
                let functions = self.requests(range.clone());
                Ok(PackagePlan {
                    name: format!("{name}_{:0digits$}_{:0digits$}", range.start, range.end),
                    weight_bytes: size(range.clone())?.weight_bytes,
                    functions,
                    stage: self.stage(range),
                    state_bytes: self.planner.no_state(),
                })
            })
            .collect()
    }

    /// Size of a package of several experts; `single` is that of one expert.
    fn size_of(&self, range: Range<u64>, single: PackageSize) -> Result<PackageSize> {
        let alike = AlikeExperts {
            single,
            count: range.end - range.start,
            joins: self.counts.joined && range.end == self.counts.apart(),
            layer: (!self.planner.manifest.quant.layers.is_empty()).then_some(self.layer),
        };
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(size) = known().get(&alike) {
            return Ok(*size);
        }
        let size = self.planner.size(&self.requests(range))?;
        known().insert(alike, size);
        Ok(size)
    }

    fn stage(&self, range: Range<u64>) -> Stage {
        Stage::Experts { layer: self.layer, first: range.start, end: range.end }
    }

    /// Functions of a package of experts: one for all, or one for each.
    fn requests(&self, range: Range<u64>) -> Vec<FunctionRequest> {
        if self.planner.manifest.experts != ExpertsForm::Routed {
            return self.planner.functions.of(&self.stage(range));
        }
        range.flat_map(|expert| self.requests_of_one(expert)).collect()
    }

    /// Functions of one expert among others.
    fn requests_of_one(&self, expert: u64) -> Vec<FunctionRequest> {
        let mut requests = self.planner.functions.of(&self.stage(expert..expert + 1));
        for request in &mut requests {
            request.name = match request.name.as_str() {
                "main" => format!("expert_{expert}"),
                name => format!("expert_{expert}_{name}"),
            };
        }
        requests
    }
}
