//! The packages of a bundle as one asset, with a function for each number of tokens.

use std::collections::BTreeMap;
use std::path::Path;

use anec_base::Result;
use anec_bundle::{Bundle, DraftFunctions, FunctionEntry, PackageEntry, Port, PortDim, TokenCount};
use anec_mil::{Function, Program};

use crate::aicode::AiModule;
use crate::error::CoreAiError;
use crate::inventory::GraphInventory;
use crate::lower::{LoweringChoices, LoweringPlan};

/// Most numbers of tokens of one function, each of which becomes a function of the asset.
const MOST_SIZES: u64 = 16;

/// A bundle whose programs are one asset.
pub struct Assembly {
    /// The asset's program.
    pub module: AiModule,
    /// The model's functions, as `bundle.json` names them.
    pub functions: Vec<FunctionEntry>,
    /// Functions of the layer that drafts, if there is one.
    pub draft: Option<DraftFunctions>,
}

impl Assembly {
    /// The bundle with these functions and their asset in place of its own functions and packages.
    pub fn in_bundle(&self, bundle: &Bundle, asset: PackageEntry) -> Bundle {
        let (functions, draft) = (self.functions.clone(), self.draft.clone());
        Bundle { functions, draft, packages: vec![asset], ..bundle.clone() }
    }
}

/// Lowers all functions of a bundle's packages into one asset of this name.
///
/// # Errors
/// [`CoreAiError::Unsupported`] names everything that Core AI can't express; a package that can't be read.
pub fn assemble(bundle: &Bundle, folder: &Path, asset: &str, choices: LoweringChoices) -> Result<Assembly> {
    let draft = bundle.draft.as_ref().map(|draft| &draft.functions[..]);
    let mut assembler = Assembler { folder, asset, packages: BTreeMap::new(), plan: LoweringPlan::new(choices) };
    let functions = assembler.functions(&bundle.functions)?;
    let draft = draft.map(|functions| assembler.functions(functions)).transpose()?;
    assembler.plan.check()?;
    Ok(Assembly {
        module: assembler.plan.finish(),
        functions,
        draft: draft.map(|functions| DraftFunctions { functions }),
    })
}

/// A function for one number of tokens.
#[derive(Clone, Debug)]
pub struct SizedFunction {
    /// Name in the asset.
    pub name: String,
    /// Tokens per call.
    pub tokens: u64,
    /// The function, whose shapes are fixed.
    pub function: Function,
}

/// The functions of an asset that a function of a package becomes: one for each number of tokens. `package` is a name
/// without extension.
///
/// # Errors
/// [`CoreAiError::Unsupported`] for too many numbers of tokens.
pub fn sized(package: &str, function: &Function, tokens: TokenCount) -> Result<Vec<SizedFunction>, CoreAiError> {
    let (least, most) = (tokens.least(), tokens.most());
    if most.saturating_sub(least) >= MOST_SIZES {
        let problem = format!("calls of {least} to {most} tokens; list up to {MOST_SIZES} numbers in `lengths.fixed`");
        return Err(CoreAiError::Unsupported { problems: vec![problem] });
    }
    let stem = match &function.name[..] {
        "main" => package.to_owned(),
        name => format!("{package}_{name}"),
    };
    let symbols: Vec<_> = function.symbols().cloned().collect();
    let of_size = |tokens| SizedFunction {
        name: if least == most { stem.clone() } else { format!("{stem}_{tokens}") },
        tokens,
        function: symbols.iter().fold(function.clone(), |sized, symbol| sized.with_length(symbol, tokens)),
    };
    Ok((least..=most).map(of_size).collect())
}

/// An asset of programs whose weights aren't read, as far as shapes tell.
pub struct AssetSketch {
    plan: LoweringPlan,
}

impl Default for AssetSketch {
    fn default() -> Self {
        AssetSketch { plan: LoweringPlan::new(LoweringChoices { without_weights: true, ..Default::default() }) }
    }
}

impl AssetSketch {
    /// Adds a function of a package, whose name has no extension, for each number of tokens; returns those functions.
    ///
    /// # Errors
    /// [`CoreAiError::Unsupported`] for too many numbers of tokens.
    pub fn add(
        &mut self,
        package: &str,
        function: &Function,
        tokens: TokenCount,
    ) -> Result<Vec<SizedFunction>, CoreAiError> {
        let sized = sized(package, function, tokens)?;
        sized.iter().for_each(|sized| self.plan.try_add(&sized.name, &sized.function));
        Ok(sized)
    }

    /// Contents of the asset's functions.
    ///
    /// # Errors
    /// [`CoreAiError::Unsupported`] names everything that Core AI can't express.
    pub fn functions(self) -> Result<Vec<GraphInventory>> {
        self.plan.check()?;
        Ok(self.plan.finish().graph_inventories())
    }
}

/// Ports of a function for one number of tokens.
fn fixed(ports: &[Port], tokens: u64) -> Vec<Port> {
    let port =
        |port: &Port| Port { shape: port.shape_at(tokens).into_iter().map(PortDim::Fixed).collect(), ..port.clone() };
    ports.iter().map(port).collect()
}

struct Assembler<'a> {
    folder: &'a Path,
    asset: &'a str,
    packages: BTreeMap<String, Program>,
    plan: LoweringPlan,
}

impl Assembler<'_> {
    fn functions(&mut self, entries: &[FunctionEntry]) -> Result<Vec<FunctionEntry>> {
        let mut out = Vec::new();
        for entry in entries {
            let function = self.function(entry)?;
            let package = entry.package.trim_end_matches(".mlpackage");
            for SizedFunction { name, tokens, function } in sized(package, &function, entry.tokens)? {
                self.plan.try_add(&name, &function);
                out.push(FunctionEntry {
                    package: self.asset.to_owned(),
                    function: name,
                    tokens: TokenCount::Fixed(tokens),
                    inputs: fixed(&entry.inputs, tokens),
                    outputs: fixed(&entry.outputs, tokens),
                    // values inside a function of an asset can't be seen
                    probes: Vec::new(),
                    logits: None,
                    ..entry.clone()
                });
            }
        }
        Ok(out)
    }

    /// A function out of its package, which is read once.
    fn function(&mut self, entry: &FunctionEntry) -> Result<Function> {
        let path = self.folder.join(&entry.package);
        if !self.packages.contains_key(&entry.package) {
            self.packages.insert(entry.package.clone(), anec_package::open(&path)?.program);
        }
        let found = self.packages.get(&entry.package).and_then(|program| program.function(&entry.function));
        let missing = || CoreAiError::Asset { path, problem: format!("no function `{}`", entry.function) };
        Ok(found.ok_or_else(missing)?.clone())
    }
}
