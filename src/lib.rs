//! `anec` turns language-model weights into Core ML programs for Apple's Neural Engine, proves what it emitted, and
//! runs it.

pub use {
    anec_base as base, anec_base::error, anec_bundle as bundle, anec_convert as convert, anec_coreml as coreml,
    anec_exec as exec, anec_family as family, anec_manifest as manifest, anec_mil as mil, anec_package as package,
    anec_quant as quant, anec_report as report, anec_runtime as runtime, anec_serve as serve, anec_source as source,
    anec_validate as validate,
};
