//! Core ML packages, ours or anybody's, to modules of Core AI.

use std::collections::{BTreeMap, BTreeSet};

use anec_base::Result;
use anec_mil::{DataType, Function, Op, Symbol, SymbolRange};
use anec_package::Package;
use anec_package::interface::Interface;

use crate::aicode::AiModule;
use crate::asset::AssetMetadata;
use crate::error::CoreAiError;
use crate::lower::{LoweringChoices, LoweringPlan};

/// Most functions that one function of the package becomes.
const MOST_FUNCTIONS: usize = 256;

/// How a package is migrated.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct MigrateOptions {
    /// Sizes of each symbol, each of which gets a function. Of symbols that aren't named, an enumeration gets a
    /// function for each of its sizes, and a range becomes a dynamic dimension.
    pub sizes: BTreeMap<String, Vec<u64>>,
    /// How programs are lowered.
    pub choices: LoweringChoices,
}

/// A package that was migrated.
pub struct Migration {
    /// The program.
    pub module: AiModule,
    /// Metadata of the package.
    pub metadata: AssetMetadata,
    /// Functions of the asset, with their fixed shapes and their ranges.
    pub functions: Vec<MigratedFunction>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// A function of an asset, and where it comes from.
#[derive(Clone, Debug)]
pub struct MigratedFunction {
    /// Name in the asset.
    pub name: String,
    /// The function in MIL. Its ranges are dynamic dimensions of the asset.
    pub function: Function,
}

/// Lowers all functions of a package.
///
/// # Errors
/// [`CoreAiError::Unsupported`] names everything that Core AI can't express: operators, images, classifiers, sizes that
/// a package doesn't allow.
pub fn migrate(package: &Package, options: &MigrateOptions) -> Result<Migration> {
    let mut problems: Vec<String> = package.interfaces.iter().flat_map(special_features).collect();
    let mut functions = Vec::new();
    for function in &package.program.functions {
        match sized(function, options) {
            Ok(sized) => functions.extend(sized),
            Err(problem) => problems.push(format!("function `{}`: {problem}", function.name)),
        }
    }
    let flexible: BTreeSet<&str> =
        package.program.functions.iter().flat_map(|function| function.symbols().map(|symbol| symbol.name())).collect();
    for symbol in options.sizes.keys().filter(|symbol| !flexible.contains(&symbol[..])) {
        let flexible = match flexible.is_empty() {
            true => "all shapes are fixed".to_owned(),
            false => format!("flexible: {}", Vec::from_iter(flexible.iter().copied()).join(", ")),
        };
        problems.push(format!("sizes of `{symbol}`, which no function has ({flexible})"));
    }
    let mut plan = LoweringPlan::new(options.choices);
    for MigratedFunction { name, function } in &functions {
        plan.try_add(name, function);
    }
    if let Err(error) = plan.check() {
        problems.push(error.to_string().trim_start_matches("Core AI can't express: ").to_owned());
    }
    if !problems.is_empty() {
        return Err(CoreAiError::Unsupported { problems }.into());
    }
    let notes = [range_notes(&functions), wide_notes(&functions)].concat();
    let own = &package.metadata;
    let mut custom = own.user_defined.clone();
    if !own.version.is_empty() {
        custom.insert("version".into(), own.version.clone());
    }
    let metadata = AssetMetadata {
        description: own.short_description.clone(),
        author: own.author.clone(),
        license: own.license.clone(),
        custom,
        ..Default::default()
    };
    Ok(Migration { module: plan.finish(), metadata, functions, notes })
}

/// Features of a description that stand for more than a tensor.
fn special_features(interface: &Interface) -> Vec<String> {
    let all = interface.inputs.iter().chain(&interface.outputs);
    let special = all.filter(|feature| !matches!(feature.kind, "multiArrayType" | "stateType"));
    special.map(|feature| format!("feature `{}` of {}", feature.name, feature.kind)).collect()
}

/// The function at each combination of sizes.
fn sized(function: &Function, options: &MigrateOptions) -> std::result::Result<Vec<MigratedFunction>, String> {
    let mut out = vec![MigratedFunction { name: function.name.clone(), function: function.clone() }];
    for (symbol, range) in &function.lengths {
        let sizes = match options.sizes.get(symbol.name()) {
            Some(sizes) => match sizes.iter().find(|size| !range.contains(**size)) {
                Some(size) => return Err(format!("`{}` can't be {size}", symbol.name())),
                None => sizes.clone(),
            },
            None => match range {
                SymbolRange::Enumerated(sizes) => sizes.clone(),
                SymbolRange::Range { .. } => continue,
            },
        };
        if out.len().saturating_mul(sizes.len()) > MOST_FUNCTIONS {
            return Err(format!("more than {MOST_FUNCTIONS} combinations of sizes"));
        }
        let several = sizes.len() > 1;
        out = out
            .iter()
            .flat_map(|known| {
                sizes.iter().map(move |size| MigratedFunction {
                    name: if several { format!("{}_{size}", known.name) } else { known.name.clone() },
                    function: known.function.with_length(symbol, *size),
                })
            })
            .collect();
    }
    Ok(out)
}

/// Notes about ranges, whose ends an asset doesn't hold.
fn range_notes(functions: &[MigratedFunction]) -> Vec<String> {
    let noted = functions.iter().flat_map(|function| function.function.lengths.iter().map(move |of| (function, of)));
    let note = |(function, (symbol, range)): (&MigratedFunction, (&Symbol, &SymbolRange))| {
        let sizes = match range {
            SymbolRange::Range { lower, upper: Some(upper), .. } => format!("{lower} to {upper}"),
            SymbolRange::Range { lower, upper: None, .. } => format!("{lower} or more"),
            SymbolRange::Enumerated(sizes) => format!("{sizes:?}"),
        };
        format!(
            "`{}` has the dynamic dimension {} ({sizes} in the package), which the Neural Engine doesn't take",
            function.name,
            symbol.name()
        )
    };
    noted.map(note).collect()
}

/// Notes about operators in f32.
fn wide_notes(functions: &[MigratedFunction]) -> Vec<String> {
    let wide = |function: &Function, op: &Op| {
        op.is_executed()
            && op.outputs.iter().any(|id| function.tensor_type(*id).is_some_and(|ty| ty.dtype == DataType::Fp32))
    };
    let count = |f: &MigratedFunction| f.function.ops().filter(|op| wide(&f.function, op)).count();
    let noted = functions.iter().map(|function| (function, count(function))).filter(|(_, count)| *count > 0);
    noted
        .map(|(function, count)| {
            format!(
                "`{}` has {count} operators in f32, which the Neural Engine doesn't take: they run on the GPU or CPU",
                function.name
            )
        })
        .collect()
}
