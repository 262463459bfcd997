//! Inventory of a package, and comparison of its description with its program.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::interface::{Feature, Flexibility, Interface};
use super::open::{Package, PackageFile};
use anec_mil::{
    Binding, Constant, Data, DataType, Dim, Function, Opset, Program, SymbolRange, TensorType, Value, ValueType,
};

/// Inventory of a package.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inventory {
    /// Version of the specification.
    pub specification_version: i32,
    /// Functions.
    pub functions: Vec<FunctionInventory>,
    /// Size of the constants in bytes; each content counts once per package.
    pub weight_bytes: u64,
    /// Files.
    pub files: Vec<PackageFile>,
    /// Metadata of the model.
    pub metadata: super::PackageMetadata,
    /// Build tools and their versions.
    pub build_info: BTreeMap<String, String>,
}

/// Inventory of a function.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FunctionInventory {
    /// Name.
    pub name: String,
    /// Opset.
    pub opset: &'static str,
    /// Inputs, as `name: type`.
    pub inputs: Vec<String>,
    /// States.
    pub states: Vec<String>,
    /// Outputs.
    pub outputs: Vec<String>,
    /// Ranges of the symbols, as text.
    pub lengths: BTreeMap<String, String>,
    /// Number of operations by operator, nested blocks included.
    pub ops: BTreeMap<String, usize>,
    /// Size of the constants in bytes by element type; each content counts once.
    pub constant_bytes: BTreeMap<String, u64>,
    /// Size of the states in bytes.
    pub state_bytes: u64,
}

impl Package {
    /// Returns the inventory of the package.
    pub fn inventory(&self) -> Inventory {
        let mut seen = BTreeSet::new();
        let functions: Vec<&Function> = self.program.functions.iter().collect();
        Inventory {
            specification_version: self.specification_version,
            weight_bytes: constant_bytes(&functions, &mut seen).into_values().sum(),
            functions: functions.into_iter().map(inventory).collect(),
            files: self.files.clone(),
            metadata: self.metadata.clone(),
            build_info: self.build_info.clone(),
        }
    }

    /// Compares the description with the program and returns the differences.
    pub fn check_description(&self) -> Vec<DescriptionFinding> {
        check(&self.program, &self.interfaces, self.specification_version)
    }
}

fn inventory(function: &Function) -> FunctionInventory {
    let typed = |value: &Value| format!("{}: {}", value.name, value.ty);
    let mut ops = BTreeMap::new();
    for op in function.ops() {
        *ops.entry(op.operator.to_string()).or_default() += 1;
    }
    let lengths = function.lengths.iter().map(|(symbol, lengths)| {
        let text = match lengths {
            SymbolRange::Range { lower, upper, default } => {
                let upper = upper.map_or(String::new(), |u| u.to_string());
                format!("{lower}..{upper}, default {default}")
            }
            SymbolRange::Enumerated(sizes) => format!("{sizes:?}"),
        };
        (symbol.name().to_owned(), text)
    });
    FunctionInventory {
        name: function.name.clone(),
        opset: function.opset.name(),
        inputs: function.tensor_inputs().map(typed).collect(),
        states: function.states().map(typed).collect(),
        outputs: function.outputs().map(typed).collect(),
        lengths: lengths.collect(),
        ops,
        constant_bytes: constant_bytes(&[function], &mut BTreeSet::new()),
        state_bytes: function.states().filter_map(|s| s.ty.tensor()?.bytes()).fold(0, u64::saturating_add),
    }
}

/// Returns the size of the constants in bytes by element type; each content counts once.
fn constant_bytes(functions: &[&Function], seen: &mut BTreeSet<usize>) -> BTreeMap<String, u64> {
    let mut out: BTreeMap<String, u64> = BTreeMap::new();
    let mut add = |constant: &Constant| {
        let address = match &constant.data {
            Data::Literal(bytes) => bytes.as_ptr().addr(),
            Data::Content(content) => std::sync::Arc::as_ptr(content).cast::<()>().addr(),
            Data::Strings(_) => return,
        };
        if seen.insert(address) {
            let total = out.entry(constant.ty.dtype.name().to_owned()).or_default();
            *total = total.saturating_add(constant.ty.bytes().unwrap_or(0));
        }
    };
    for op in functions.iter().flat_map(|f| f.ops()) {
        op.attributes.values().for_each(&mut add);
        for binding in op.inputs.values().flatten() {
            if let Binding::Constant(constant) = binding {
                add(constant);
            }
        }
    }
    out
}

/// Difference between a description and its program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DescriptionFinding {
    /// Function; `None` for the model as a whole.
    pub function: Option<String>,
    /// Feature; `None` for the function as a whole.
    pub feature: Option<String>,
    /// Found and expected values.
    pub problem: String,
}

impl fmt::Display for DescriptionFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(function) = &self.function {
            write!(f, "function `{function}`: ")?;
        }
        if let Some(feature) = &self.feature {
            write!(f, "feature `{feature}`: ")?;
        }
        f.write_str(&self.problem)
    }
}

/// Compares a program with its description: names, order, data types, shapes and their flexibility, states, the
/// specification version.
pub fn check(program: &Program, interfaces: &[Interface], specification_version: i32) -> Vec<DescriptionFinding> {
    let mut findings = Findings { function: None, list: Vec::new() };
    let newest = program.opset();
    if newest.specification_version() != specification_version {
        findings.add(
            None,
            format!(
                "specification version {specification_version}, {} belongs to {}",
                newest.name(),
                newest.specification_version()
            ),
        );
    }
    if program.functions.len() > 1 && newest < Opset::CoreMl8 {
        findings.add(None, format!("several functions need CoreML8, found {}", newest.name()));
    }
    for interface in interfaces.iter().filter(|i| program.function(&i.function).is_none()) {
        findings.add(None, format!("function `{}` is described, the program doesn't have it", interface.function));
    }
    for function in &program.functions {
        findings.function = Some(function.name.clone());
        match interfaces.iter().find(|i| i.function == function.name) {
            Some(interface) => check_function(function, interface, &mut findings),
            None => findings.add(None, "it is not described".into()),
        }
    }
    findings.list
}

struct Findings {
    function: Option<String>,
    list: Vec<DescriptionFinding>,
}

impl Findings {
    fn add(&mut self, feature: Option<&str>, problem: String) {
        let feature = feature.map(str::to_owned);
        self.list.push(DescriptionFinding { function: self.function.clone(), feature, problem });
    }
}

fn check_function(function: &Function, interface: &Interface, findings: &mut Findings) {
    let inputs: Vec<&Value> = function.tensor_inputs().collect();
    let states: Vec<&Value> = function.states().collect();
    let outputs: Vec<&Value> = function.outputs().collect();
    for (role, values, features) in [
        ("input", inputs, &interface.inputs),
        ("state", states, &interface.states),
        ("output", outputs, &interface.outputs),
    ] {
        let in_function: Vec<&str> = values.iter().map(|v| v.name.as_str()).collect();
        let described: Vec<&str> = features.iter().map(|f| f.name.as_str()).collect();
        if in_function != described {
            findings.add(None, format!("{role}s {described:?} are described, the function has {in_function:?}"));
        }
        for value in values {
            let Some(feature) = features.iter().find(|f| f.name == value.name) else { continue };
            if let Some(problem) = check_feature(function, role, value, feature) {
                findings.add(Some(&value.name), problem);
            }
        }
    }
}

fn check_feature(function: &Function, role: &str, value: &Value, feature: &Feature) -> Option<String> {
    let expected_kind = if role == "state" { "stateType" } else { "multiArrayType" };
    let (ValueType::Tensor(ty) | ValueType::State(ty)) = &value.ty else {
        return (feature.kind == "multiArrayType").then(|| format!("described as a multi-array, it is {}", value.ty));
    };
    if feature.kind != expected_kind {
        // images describe tensors, and class labels scalars
        let stands_for_tensor = role != "state" && matches!(feature.kind, "imageType" | "stringType" | "int64Type");
        return (!stands_for_tensor).then(|| format!("described as {}, expected {expected_kind}", feature.kind));
    }
    if feature.dtype != Some(ty.dtype) {
        let described = feature.dtype.map_or("an unknown type", DataType::name);
        return Some(format!("described as {described}, it is {}", ty.dtype));
    }
    let open = ty.shape.iter().any(|d| d.fixed().is_none());
    if role == "output" && feature.shape.is_empty() && feature.flexibility == Flexibility::Fixed {
        return None;
    }
    if ty.rank() == 0 && feature.shape == [1] {
        return None;
    }
    let fits = |shape: &[i64]| {
        shape.len() == ty.rank()
            && shape.iter().zip(&ty.shape).all(|(n, d)| *n > 0 && d.fixed().is_none_or(|d| i64::try_from(d) == Ok(*n)))
    };
    if !fits(&feature.shape) {
        return Some(format!("the default shape is {:?}, the type {ty}", feature.shape));
    }
    match &feature.flexibility {
        Flexibility::Fixed if open && role == "input" => Some(format!("described with a fixed shape, it is {ty}")),
        Flexibility::Fixed => None,
        _ if !open => Some(format!("described as {feature}, it is {ty}")),
        Flexibility::Ranges(ranges) => check_ranges(function, ty, ranges, feature),
        Flexibility::Enumerated(shapes) => match shapes.iter().find(|s| !fits(s)) {
            Some(shape) => Some(format!("the shape {shape:?} is enumerated, the type is {ty}")),
            None if !shapes.contains(&feature.shape) => {
                Some(format!("the default shape {:?} is not enumerated", feature.shape))
            }
            None => None,
        },
    }
}

fn check_ranges(
    function: &Function,
    ty: &TensorType,
    ranges: &[(u64, Option<u64>)],
    feature: &Feature,
) -> Option<String> {
    if ranges.len() != ty.rank() {
        return Some(format!("{} ranges for {ty}; expected one for each dimension", ranges.len()));
    }
    for (axis, ((range, dim), default)) in ranges.iter().zip(&ty.shape).zip(&feature.shape).enumerate() {
        let (lower, upper) = *range;
        let inside = u64::try_from(*default).is_ok_and(|n| n >= lower && upper.is_none_or(|u| n <= u));
        if lower == 0 || upper.is_some_and(|u| u < lower) || !inside {
            return Some(format!("dimension {axis} has the range {lower}..{upper:?} and the default {default}"));
        }
        if let Some(size) = dim.fixed()
            && *range != (size, Some(size))
        {
            return Some(format!("dimension {axis} is {size}, described as {feature}"));
        }
        // a symbol with a range must have the described range
        if let Dim::Symbolic { symbol, .. } = dim
            && let Some(SymbolRange::Range { lower: l, upper: u, .. }) = function.lengths.get(symbol)
        {
            let size = |n: u64| dim.substitute(symbol, n).fixed();
            if size(*l) != Some(lower) || u.map(size).flatten() != upper {
                return Some(format!("dimension {axis} is {dim}, described as {feature}"));
            }
        }
    }
    None
}
