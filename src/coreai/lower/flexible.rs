//! Functions with dynamic dimensions. A function is lowered at several sizes, which gives equal operations with other
//! types and constants. A dimension that differs is dynamic. Integers that differ (shapes, ends of slices, counts) are
//! affine in the sizes, and computed from the shapes of the arguments.

use std::collections::BTreeSet;

use anec_mil::{Function, Symbol, SymbolRange};

use super::context::{LoweredGraph, Lowering};
use super::numbers::{number_bytes, numbers};
use super::{DYNAMIC, LoweringChoices, Memory};
use crate::aicode::{AiAttribute, AiBlock, AiOp, AiRegion, AiType, Blob, ElementType, TypeId};
use crate::builder::{BodyBuilder, GraphValue, ModuleBuilder, Property};

/// Sizes beyond the smallest one at which a function is lowered: two that give the slopes, and one that shows that
/// integers are affine. Sizes that no other dimension happens to have are the best; those of narrow ranges come next,
/// then sizes beyond a range.
const OFFSETS: [[u64; 3]; 5] = [[36, 53, 71], [10, 15, 22], [4, 7, 11], [2, 3, 5], [1, 2, 3]];

/// Largest size at which a function is lowered: shapes are computed as integers of 32 bits.
const LARGEST: u64 = i32::MAX as u64;

/// Lowers a function whose ranges become dynamic dimensions.
///
/// # Errors
/// Names the operators that can't be expressed, or whose form depends on the sizes.
pub(super) fn lower(
    module: &mut ModuleBuilder,
    choices: LoweringChoices,
    memory: &Memory,
    function: &Function,
) -> Result<LoweredGraph, BTreeSet<String>> {
    let mut problems = None;
    let tried = [true, false].into_iter().flat_map(|within| OFFSETS.map(|offsets| (within, offsets)));
    for points in tried.filter_map(|(within, offsets)| points(function, offsets, within)) {
        let sized = |point: &Vec<(&Symbol, u64)>| {
            point.iter().fold(function.clone(), |sized, (symbol, size)| sized.with_length(symbol, *size))
        };
        let lowered = points.iter().map(|point| Lowering::lower(module, choices, memory, &sized(point)));
        let mut graphs: Vec<LoweredGraph> = match lowered.collect::<Result<_, _>>() {
            Ok(graphs) => graphs,
            Err(found) => {
                problems.get_or_insert(found);
                continue;
            }
        };
        let numbers = |point: &Vec<(&Symbol, u64)>| point.iter().map(|(_, size)| *size as i64).collect();
        let mut sizes: Vec<Vec<i64>> = points.iter().map(numbers).collect();
        // integers that are affine in the middle of a range only, such as the smaller of two sizes
        for end in ends(function) {
            if let Ok(graph) = Lowering::lower(module, choices, memory, &sized(&end))
                && graph.body.ops().iter().map(|op| op.name).eq(graphs[0].body.ops().iter().map(|op| op.name))
            {
                graphs.push(graph);
                sizes.push(numbers(&end));
            }
        }
        match (Merging { module, sizes }).graph(&graphs) {
            Ok(graph) => return Ok(graph),
            Err(problem) => drop(problems.get_or_insert([format!("{problem} in `{}`", function.name)].into())),
        }
    }
    Err(problems.unwrap_or_else(|| [format!("`{}` {DYNAMIC} that isn't a range", function.name)].into()))
}

/// Sizes of all symbols: one for the bases, one for each symbol's slope, and one to check.
fn points(function: &Function, offsets: [u64; 3], within: bool) -> Option<Vec<Vec<(&Symbol, u64)>>> {
    let size = |index: usize, range: &SymbolRange, offset: u64| match range {
        SymbolRange::Range { lower, .. } => {
            let size = (*lower).max(1).checked_add(offset + index as u64).filter(|size| *size <= LARGEST)?;
            (!within || range.contains(size)).then_some(size)
        }
        SymbolRange::Enumerated(_) => None,
    };
    let count = function.lengths.len();
    let offset = |point: usize, symbol: usize| match point {
        point if point == symbol + 1 => offsets[1],
        point if point == count + 1 => offsets[2],
        _ => offsets[0],
    };
    let point = |point: usize| -> Option<Vec<(&Symbol, u64)>> {
        let symbols = function.lengths.iter().enumerate();
        symbols.map(|(i, (symbol, range))| Some((symbol, size(i, range, offset(point, i))?))).collect()
    };
    (0..count + 2).map(point).collect()
}

/// The ends of all ranges, without those beyond the largest size.
fn ends(function: &Function) -> Vec<Vec<(&Symbol, u64)>> {
    let of = |end: fn(&SymbolRange) -> Option<u64>| -> Option<Vec<(&Symbol, u64)>> {
        function.lengths.iter().map(|(symbol, range)| Some((symbol, end(range)?))).collect()
    };
    let lower = of(|range| match range {
        SymbolRange::Range { lower, .. } => Some((*lower).max(1)),
        SymbolRange::Enumerated(_) => None,
    });
    let upper = of(|range| match range {
        SymbolRange::Range { upper, .. } => upper.filter(|upper| *upper <= LARGEST),
        SymbolRange::Enumerated(_) => None,
    });
    [lower, upper].into_iter().flatten().collect()
}

/// An integer that is affine in the sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Affine {
    base: i64,
    /// Factor of each symbol's size.
    slopes: Vec<i64>,
}

impl Affine {
    fn is_constant(&self) -> bool {
        self.slopes.iter().all(|slope| *slope == 0)
    }
}

/// A body that is being made of those for the points.
struct Scope {
    body: BodyBuilder,
    /// Numbers in this body of the values in those of the points.
    values: Vec<u32>,
    /// Types of the arguments at each point.
    arguments: Vec<Vec<TypeId>>,
    /// Sizes that were computed, as vectors of one si32.
    sizes: Vec<Option<u32>>,
}

/// Makes one graph of those that a function gives at several points.
struct Merging<'m> {
    module: &'m mut ModuleBuilder,
    /// Sizes of the symbols at each point.
    sizes: Vec<Vec<i64>>,
}

/// A merged part; nothing if the points differ in more than types and integers.
type Merged<T> = Option<T>;

impl Merging<'_> {
    fn graph(&mut self, graphs: &[LoweredGraph]) -> Result<LoweredGraph, String> {
        let first = &graphs[0];
        let arguments: Vec<Vec<TypeId>> =
            (0..first.arguments.len()).map(|i| graphs.iter().map(|graph| graph.arguments[i].ty).collect()).collect();
        let values = |merging: &mut Self, of: fn(&LoweredGraph) -> &[GraphValue]| -> Result<Vec<GraphValue>, String> {
            let merged = |(i, value): (usize, &GraphValue)| {
                let types: Vec<TypeId> = graphs.iter().map(|graph| of(graph)[i].ty).collect();
                let name = value.name.as_deref().unwrap_or_default();
                let ty = merging.ty(&types).ok_or_else(|| format!("`{name}` {DYNAMIC}"))?;
                Ok(GraphValue { ty, ..value.clone() })
            };
            of(first).iter().enumerate().map(merged).collect()
        };
        let inputs = values(self, |graph| &graph.arguments)?;
        let results = values(self, |graph| &graph.results)?;
        let mut scope = self.scope(arguments).ok_or_else(|| format!("an argument {DYNAMIC}"))?;
        let bodies: Vec<&[AiOp]> = graphs.iter().map(|graph| graph.body.ops()).collect();
        if let Err(place) = self.ops(&mut scope, &bodies) {
            let operator = first.marks.iter().find(|(end, _)| place < *end).map(|(_, operator)| &operator[..]);
            return Err(format!("{} {DYNAMIC}", operator.unwrap_or("an output")));
        }
        Ok(LoweredGraph { arguments: inputs, results, body: scope.body, marks: Vec::new() })
    }

    fn scope(&mut self, arguments: Vec<Vec<TypeId>>) -> Merged<Scope> {
        let types = arguments.iter().map(|types| self.ty(types)).collect::<Option<Vec<_>>>()?;
        let values = (0..arguments.len() as u32).collect();
        let sizes = vec![None; self.sizes[0].len()];
        Some(Scope { body: BodyBuilder::new(&types), values, arguments, sizes })
    }

    /// Merges operations; gives the place of the first that can't be merged.
    fn ops(&mut self, scope: &mut Scope, bodies: &[&[AiOp]]) -> Result<(), usize> {
        for place in 0..bodies[0].len() {
            let ops: Option<Vec<&AiOp>> = bodies.iter().map(|ops| ops.get(place)).collect();
            ops.and_then(|ops| self.op(scope, &ops)).ok_or(place)?;
        }
        match bodies.iter().all(|ops| ops.len() == bodies[0].len()) {
            true => Ok(()),
            false => Err(bodies[0].len()),
        }
    }

    fn op(&mut self, scope: &mut Scope, ops: &[&AiOp]) -> Merged<()> {
        let first = ops[0];
        let alike = |op: &&AiOp| {
            let counts = |op: &AiOp| (op.name, op.results.len(), op.regions.len());
            counts(op) == counts(first) && op.operands == first.operands
        };
        if !ops.iter().all(alike) {
            return None;
        }
        let is_constant = self.module.op_name(first.name) == "primitive.constant_v1";
        if is_constant && !ops.iter().all(|op| op.results == first.results && op.properties == first.properties) {
            let value = self.constant(scope, ops)?;
            scope.values.push(value);
            return Some(());
        }
        if ops.iter().any(|op| op.properties != first.properties) {
            return None;
        }
        let types = (0..first.results.len())
            .map(|i| self.ty(&ops.iter().map(|op| op.results[i]).collect::<Vec<_>>()))
            .collect::<Option<Vec<_>>>()?;
        let regions = (0..first.regions.len())
            .map(|i| self.region(&ops.iter().map(|op| &op.regions[i]).collect::<Vec<_>>()))
            .collect::<Option<Vec<_>>>()?;
        let operands = first.operands.iter().map(|id| scope.values[*id as usize]).collect();
        let result = scope.body.push(AiOp { results: types.into(), operands, regions, ..first.clone() });
        scope.values.extend(result..result + first.results.len() as u32);
        Some(())
    }

    fn region(&mut self, regions: &[&AiRegion]) -> Merged<AiRegion> {
        let blocks: Vec<&AiBlock> = regions.iter().map(|region| region.blocks.first()).collect::<Option<_>>()?;
        let arguments = (0..blocks[0].arguments.len())
            .map(|i| blocks.iter().map(|block| block.arguments.get(i).map(|(ty, _)| *ty)).collect::<Option<Vec<_>>>())
            .collect::<Option<Vec<_>>>()?;
        let mut scope = self.scope(arguments)?;
        let bodies: Vec<&[AiOp]> = blocks.iter().map(|block| &block.ops[..]).collect();
        self.ops(&mut scope, &bodies).ok()?;
        Some(scope.body.region(self.module))
    }

    /// The type of a value, with dynamic dimensions where the points differ.
    fn ty(&mut self, types: &[TypeId]) -> Merged<TypeId> {
        if types.iter().all(|ty| *ty == types[0]) {
            return Some(types[0]);
        }
        let [first, others @ ..] = types else { return None };
        let AiType::Tensor { mut shape, element, constraints: None } = self.module.type_of(*first)?.clone() else {
            return None;
        };
        for other in others {
            match self.module.type_of(*other)? {
                AiType::Tensor { shape: sizes, element: of, constraints: None }
                    if sizes.len() == shape.len() && *of == element =>
                {
                    let differ = |(size, other): (&mut Option<u64>, &Option<u64>)| {
                        if size != other {
                            *size = None;
                        }
                    };
                    shape.iter_mut().zip(sizes).for_each(differ);
                }
                _ => return None,
            }
        }
        Some(self.module.ty(AiType::Tensor { shape, element, constraints: None }))
    }

    /// Shape and element type of a tensor at a point.
    fn tensor(&self, ty: TypeId) -> Option<(Vec<i64>, ElementType)> {
        let AiType::Tensor { shape, element, .. } = self.module.type_of(ty)? else { return None };
        let AiType::Scalar(element) = self.module.type_of(*element)? else { return None };
        let shape = shape.iter().map(|size| size.map(|size| size as i64)).collect::<Option<_>>()?;
        Some((shape, *element))
    }

    /// The affine function that has these values at the points; those of the ends may be left out.
    fn affine(&self, values: &[i64]) -> Option<Affine> {
        let (origin, count) = (&self.sizes[0], self.sizes[0].len());
        let slope = |symbol: usize| {
            let (rise, run) =
                (values[symbol + 1].checked_sub(values[0])?, self.sizes[symbol + 1][symbol] - origin[symbol]);
            (rise % run == 0).then_some(rise / run)
        };
        let slopes: Vec<i64> = (0..count).map(slope).collect::<Option<_>>()?;
        let at = |base: i64, point: &[i64]| {
            slopes.iter().zip(point).try_fold(base, |sum, (slope, size)| sum.checked_add(slope.checked_mul(*size)?))
        };
        let base = values[0].checked_sub(at(0, origin)?)?;
        let fits = self.sizes.iter().zip(values).all(|(point, value)| at(base, point) == Some(*value));
        fits.then_some(Affine { base, slopes })
    }

    /// Affine functions of the elements that stand at the same place at all points.
    fn affine_each<'a>(&self, points: impl Iterator<Item = &'a [i64]>) -> Option<Vec<Affine>> {
        let points: Vec<&[i64]> = points.collect();
        let element = |i: usize| self.affine(&points.iter().map(|p| p.get(i).copied()).collect::<Option<Vec<_>>>()?);
        let same = points.iter().all(|point| point.len() == points[0].len());
        same.then(|| (0..points[0].len()).map(element).collect()).flatten()
    }

    // ---- constants

    /// A constant whose value or shape depends on the sizes.
    fn constant(&mut self, scope: &mut Scope, ops: &[&AiOp]) -> Merged<u32> {
        let tensors = ops.iter().map(|op| self.tensor(*op.results.first()?)).collect::<Option<Vec<_>>>()?;
        let ((shape, element), rank) = (&tensors[0], tensors[0].0.len());
        let values = ops.iter().map(|op| self.value(op)).collect::<Option<Vec<_>>>()?;
        let dimensions = self.affine_each(tensors.iter().map(|(shape, _)| &shape[..]))?;
        if values.iter().all(|value| value.splat) {
            let number = match values.iter().all(|value| value.bytes == values[0].bytes) {
                true => self.literal(scope, &vec![1; rank], *element, values[0].bytes.clone()),
                false => {
                    // of the large numbers at the end, floats may round
                    let most = if element.is_float() { self.sizes[0].len() + 2 } else { values.len() };
                    let whole = values[..most].iter().map(|v| v.whole(*element)).collect::<Option<Vec<_>>>()?;
                    let number = self.affine_each(whole.iter().map(|numbers| &numbers[..1]))?;
                    self.computed(scope, &number, *element, &vec![1; rank])?
                }
            };
            let axes: Vec<usize> = (0..rank).filter(|i| !dimensions[*i].is_constant() || shape[*i] != 1).collect();
            if axes.is_empty() {
                return Some(number);
            }
            let sizes: Vec<Affine> = axes.iter().map(|axis| dimensions[*axis].clone()).collect();
            let sizes = self.computed(scope, &sizes, ElementType::Ui32, &[axes.len() as u64])?;
            let axes: Vec<i64> = axes.iter().map(|axis| *axis as i64).collect();
            let axes = self.vector(scope, &axes, ElementType::Si32);
            let ty = self.ty(&ops.iter().map(|op| op.results[0]).collect::<Vec<_>>())?;
            return Some(self.add(scope, "primitive.broadcast_in_dims_v1", &[number, sizes, axes], ty));
        }
        let whole = values.iter().map(|value| value.whole(*element)).collect::<Option<Vec<_>>>()?;
        if dimensions.iter().all(Affine::is_constant) {
            let numbers = self.affine_each(whole.iter().map(|numbers| &numbers[..]))?;
            let shape: Vec<u64> = shape.iter().map(|size| *size as u64).collect();
            return self.computed(scope, &numbers, *element, &shape);
        }
        // a row of equidistant integers
        let (start, step) = (whole[0][0], whole[0].get(1)?.checked_sub(whole[0][0])?);
        let at = |i: i64| start.checked_add(step.checked_mul(i)?);
        let in_row = |numbers: &Vec<i64>| numbers.iter().zip(0..).all(|(number, i)| at(i) == Some(*number));
        if rank != 1 || !whole.iter().all(in_row) {
            return None;
        }
        let Affine { base, slopes } = &dimensions[0];
        let slopes = slopes.iter().map(|slope| slope.checked_mul(step)).collect::<Option<_>>()?;
        let end = Affine { base: at(*base)?, slopes };
        let end = self.computed(scope, &[end], ElementType::Si32, &[])?;
        let [start, step] = [start, step].map(|number| {
            let bytes = number_bytes(number as f64, ElementType::Si32).unwrap_or_default();
            self.literal(scope, &[], ElementType::Si32, bytes)
        });
        let row = |element| AiType::Tensor { shape: vec![None], element, constraints: None };
        let [integers, elements] =
            [ElementType::Si32, *element].map(|element| self.module.ty(AiType::Scalar(element))).map(row);
        let [integers, elements] = [integers, elements].map(|ty| self.module.ty(ty));
        let row = self.add(scope, "primitive.range_v1", &[start, end, step], integers);
        Some(if integers == elements { row } else { self.add(scope, "primitive.cast_v1", &[row], elements) })
    }

    /// The value of a constant that isn't large.
    fn value(&self, op: &AiOp) -> Option<Value> {
        Some(match self.module.only_property(op)? {
            AiAttribute::Dense { splat, bytes } => Value { splat: *splat, bytes: bytes.clone() },
            AiAttribute::Resource(index) => match self.module.resource_of(*index)? {
                Blob::Bytes(bytes) => Value { splat: false, bytes: bytes.to_vec() },
                _ => return None,
            },
            _ => return None,
        })
    }

    // ---- operations

    fn add(&mut self, scope: &mut Scope, name: &'static str, operands: &[u32], ty: TypeId) -> u32 {
        scope.body.op(self.module, name, &[], operands, &[ty], Vec::new())
    }

    fn literal(&mut self, scope: &mut Scope, shape: &[u64], element: ElementType, bytes: Vec<u8>) -> u32 {
        let splat = shape.iter().product::<u64>() == 1;
        let value = Property::Required(self.module.dense(bytes, splat));
        let ty = self.module.tensor(shape, element);
        scope.body.op(self.module, "primitive.constant_v1", &[value], &[], &[ty], Vec::new())
    }

    fn vector(&mut self, scope: &mut Scope, values: &[i64], element: ElementType) -> u32 {
        let bytes = values.iter().flat_map(|value| number_bytes(*value as f64, element).unwrap_or_default()).collect();
        self.literal(scope, &[values.len() as u64], element, bytes)
    }

    /// Affine integers as elements of a shape.
    fn computed(&mut self, scope: &mut Scope, wanted: &[Affine], element: ElementType, shape: &[u64]) -> Merged<u32> {
        let count = wanted.len() as u64;
        let ty = self.module.tensor(&[count], ElementType::Si32);
        let bases: Vec<i64> = wanted.iter().map(|affine| affine.base).collect();
        let mut sum = self.vector(scope, &bases, ElementType::Si32);
        for symbol in 0..self.sizes[0].len() {
            let slopes: Vec<i64> = wanted.iter().map(|affine| affine.slopes[symbol]).collect();
            if slopes.iter().all(|slope| *slope == 0) {
                continue;
            }
            let mut size = self.size(scope, symbol)?;
            if count > 1 {
                let [to, axes] = [(count as i64, ElementType::Ui32), (0, ElementType::Si32)]
                    .map(|(value, element)| self.vector(scope, &[value], element));
                size = self.add(scope, "primitive.broadcast_in_dims_v1", &[size, to, axes], ty);
            }
            let slopes = self.vector(scope, &slopes, ElementType::Si32);
            let product = self.add(scope, "primitive.mul_v1", &[size, slopes], ty);
            sum = self.add(scope, "primitive.add_v1", &[sum, product], ty);
        }
        if element != ElementType::Si32 {
            let ty = self.module.tensor(&[count], element);
            sum = self.add(scope, "primitive.cast_v1", &[sum], ty);
        }
        if *shape != [count] {
            let sizes: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
            let sizes = self.vector(scope, &sizes, ElementType::Si32);
            let ty = self.module.tensor(shape, element);
            sum = self.add(scope, "primitive.reshape_v2", &[sum, sizes], ty);
        }
        Some(sum)
    }

    /// The size of a symbol, from the first argument with a dimension that depends on it alone.
    fn size(&mut self, scope: &mut Scope, symbol: usize) -> Merged<u32> {
        if let Some(known) = scope.sizes[symbol] {
            return Some(known);
        }
        let source = |(argument, types): (usize, &Vec<TypeId>)| {
            let shapes = types.iter().map(|ty| Some(self.tensor(*ty)?.0)).collect::<Option<Vec<_>>>()?;
            let dimensions = self.affine_each(shapes.iter().map(|shape| &shape[..]))?;
            let alone = |affine: &Affine| (0..affine.slopes.len()).all(|i| (affine.slopes[i] != 0) == (i == symbol));
            let axis = dimensions.iter().position(alone)?;
            Some((argument, dimensions.len(), axis, dimensions[axis].clone()))
        };
        let (argument, rank, axis, of) = scope.arguments.iter().enumerate().find_map(source)?;
        let [unsigned, signed] =
            [ElementType::Ui32, ElementType::Si32].map(|element| self.module.tensor(&[rank as u64], element));
        let one = self.module.tensor(&[1], ElementType::Si32);
        let shape = self.add(scope, "primitive.get_shape_v2", &[argument as u32], unsigned);
        let shape = self.add(scope, "primitive.cast_v1", &[shape], signed);
        let [begin, end, stride] =
            [axis as i64, axis as i64 + 1, 1].map(|value| self.vector(scope, &[value], ElementType::Si32));
        let mut size = self.add(scope, "primitive.slice_v1", &[shape, begin, end, stride], one);
        if of.base != 0 {
            let base = self.vector(scope, &[of.base], ElementType::Si32);
            size = self.add(scope, "primitive.sub_v1", &[size, base], one);
        }
        if of.slopes[symbol] != 1 {
            let slope = self.vector(scope, &[of.slopes[symbol]], ElementType::Si32);
            size = self.add(scope, "primitive.floor_divide_v1", &[size, slope], one);
        }
        scope.sizes[symbol] = Some(size);
        Some(size)
    }
}

/// The value of a constant.
struct Value {
    /// One element stands for all.
    splat: bool,
    bytes: Vec<u8>,
}

impl Value {
    /// The elements, if all are integers.
    fn whole(&self, element: ElementType) -> Option<Vec<i64>> {
        let whole =
            |number: f64| (number.fract() == 0.0 && number.abs() < f64::from(i32::MAX)).then_some(number as i64);
        numbers(&self.bytes, element)?.into_iter().map(whole).collect::<Option<Vec<_>>>().filter(|all| !all.is_empty())
    }
}
