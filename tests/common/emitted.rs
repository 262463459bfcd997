//! Programs as the converter emits them.

use anec::convert::emit::Emitter;
use anec::convert::functions::build_package;
use anec::convert::open;
use anec::convert::plan::ConvertPlan;
use anec::manifest::Manifest;
use anec::mil::Program;

/// A manifest of defaults for a source below the repository, changed by `key=value` pairs.
pub fn manifest(source: &str, overrides: &[&str]) -> Manifest {
    let source = format!("source={}/{source}", env!("CARGO_MANIFEST_DIR"));
    let overrides: Vec<String> = std::iter::once(source).chain(overrides.iter().map(|o| o.to_string())).collect();
    Manifest::from_yaml("", "defaults", &overrides).unwrap_or_else(|e| panic!("{overrides:?}: {e}"))
}

/// The programs of a manifest's packages, by the packages' names.
pub fn programs(manifest: &Manifest) -> Vec<(String, Program)> {
    in_packages(manifest, false)
}

/// The programs of a manifest's packages with one layer in each, by the packages' names.
pub fn layers_apart(manifest: &Manifest) -> Vec<(String, Program)> {
    in_packages(manifest, true)
}

fn in_packages(manifest: &Manifest, layers_apart: bool) -> Vec<(String, Program)> {
    let opened = open::open(manifest).unwrap_or_else(|e| panic!("{:?}: {e}", manifest.source));
    let model = &*opened.model;
    let mut manifest = open::resolve(manifest, &opened.source, model);
    if layers_apart {
        manifest.shards.layers = Some((0..model.facts().num_layers).map(|layer| [layer, layer + 1]).collect());
    }
    let plan = ConvertPlan::new(&manifest, model).unwrap_or_else(|e| panic!("{:?}: {e}", manifest.source));
    let build = |package| {
        let mut emitter = Emitter::new(&manifest.quant);
        build_package(model, &plan.form, package, &mut emitter)
            .unwrap_or_else(|e| panic!("{:?}: {e}", manifest.source))
            .0
    };
    plan.packages.iter().map(|package| (package.name.clone(), build(package))).collect()
}
