//! Functions in memory, their states and arrays.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use block2::RcBlock;
use objc2::AnyThread;
use objc2::rc::Retained;
use objc2::runtime::{AnyObject, ProtocolObject};
use objc2_core_ml::{
    MLDictionaryFeatureProvider, MLFeatureProvider, MLFeatureValue, MLModel, MLMultiArray, MLMultiArrayDataType,
    MLPredictionOptions, MLState,
};
use objc2_foundation::{NSArray, NSDictionary, NSNumber, NSString};

use super::{Task, configuration, url};
use crate::array::{self, Element, OwnedValues, StridedArray, Values};
use crate::engine::LoadedFunction;
use crate::error::CoreMlError;
use crate::plan::ComputeUnits;

/// Alignment of arrays: Core ML can use page-aligned memory without a copy.
const PAGE: usize = 16384;

/// Function in memory.
pub struct Function {
    model: Retained<MLModel>,
    path: PathBuf,
}

// SAFETY: Core ML lets a model be used by one thread at a time, whichever it is. No other reference to it exists.
unsafe impl Send for Function {}

/// States of a text with their model.
pub struct State {
    state: Retained<MLState>,
    path: PathBuf,
}

/// Arrays of a call, bound to Core ML's feature provider.
pub struct Call {
    inputs: Vec<Buffer>,
    outputs: Vec<Buffer>,
    provider: Retained<MLDictionaryFeatureProvider>,
    options: Retained<MLPredictionOptions>,
}

// SAFETY: all objects were made for this call and are used by whoever has it, one thread at a time.
unsafe impl Send for Call {}

/// Array over memory owned by Rust, which lives as long as Core ML's object.
struct Buffer {
    array: StridedArray,
    name: Retained<NSString>,
    object: Retained<MLMultiArray>,
    memory: NonNull<u8>,
}

impl Function {
    pub(super) fn load(model: &Path, function: Option<&str>, units: ComputeUnits) -> Result<Self, CoreMlError> {
        let task = Task { action: "load", path: model };
        task.guard(|| {
            let (from, configuration) = (url(model)?, configuration(units, function));
            // SAFETY: both arguments are valid and live through the call.
            let loaded = unsafe { MLModel::modelWithContentsOfURL_configuration_error(&from, &configuration) };
            Ok(Function { model: loaded.map_err(|e| task.error(&e))?, path: model.to_owned() })
        })
    }

    fn task(&self, action: &'static str) -> Task<'_> {
        Task { action, path: &self.path }
    }
}

impl LoadedFunction for Function {
    type State = State;
    type Call = Call;

    fn state(&self, names: &[String]) -> Result<State, CoreMlError> {
        self.task("make states for").guard(|| {
            // SAFETY: the model is ours alone.
            let state = unsafe { self.model.newState() };
            for name in names {
                clear(&state, &NSString::from_str(name));
            }
            Ok(State { state, path: self.path.clone() })
        })
    }

    fn copy(&self, state: &State, names: &[String]) -> Result<State, CoreMlError> {
        let task = self.task("copy states of");
        task.guard(|| {
            // SAFETY: the model is ours alone.
            let copy = unsafe { self.model.newState() };
            for name in names {
                let key = NSString::from_str(name);
                let bytes = contents(&state.state, &key);
                if !fill(&copy, &key, &bytes) {
                    return Err(
                        task.refused(format!("state `{name}` has {} bytes, its copy another number", bytes.len()))
                    );
                }
            }
            Ok(State { state: copy, path: self.path.clone() })
        })
    }

    fn read(state: &State, arrays: &[StridedArray]) -> Result<Vec<OwnedValues>, CoreMlError> {
        let task = Task { action: "read states of", path: &state.path };
        task.guard(|| {
            let values = |array: &StridedArray| values(&state.state, array).map_err(|problem| task.refused(problem));
            arrays.iter().map(values).collect()
        })
    }

    fn restore(&self, arrays: &[StridedArray], values: &[OwnedValues]) -> Result<State, CoreMlError> {
        let task = self.task("write states of");
        task.guard(|| {
            // SAFETY: the model is ours alone.
            let state = unsafe { self.model.newState() };
            for (array, values) in arrays.iter().zip(values) {
                set_values(&state, array, values).map_err(|problem| task.refused(problem))?;
            }
            Ok(State { state, path: self.path.clone() })
        })
    }

    fn call(&self, inputs: &[StridedArray], outputs: &[StridedArray]) -> Result<Call, CoreMlError> {
        let task = self.task("make arrays for");
        task.guard(|| {
            let buffers = |arrays: &[StridedArray]| -> Result<Vec<Buffer>, CoreMlError> {
                arrays.iter().map(|array| Buffer::new(array, task)).collect()
            };
            let (inputs, outputs) = (buffers(inputs)?, buffers(outputs)?);
            let features = dictionary(&inputs, |buffer| {
                // SAFETY: the array is valid.
                unsafe { MLFeatureValue::featureValueWithMultiArray(&buffer.object) }.into()
            });
            // SAFETY: the values are feature values.
            let provider = unsafe {
                MLDictionaryFeatureProvider::initWithDictionary_error(MLDictionaryFeatureProvider::alloc(), &features)
            };
            let provider = provider.map_err(|e| task.error(&e))?;
            let backings = dictionary(&outputs, |buffer| buffer.object.clone().into());
            // SAFETY: a new object; the values are arrays, as outputs that are arrays ask for.
            let options = unsafe {
                let options = MLPredictionOptions::new();
                options.setOutputBackings(&backings);
                options
            };
            Ok(Call { inputs, outputs, provider, options })
        })
    }

    fn predict(
        &self,
        call: &mut Call,
        state: Option<&State>,
        inputs: &[Values<'_>],
    ) -> Result<Vec<OwnedValues>, CoreMlError> {
        let task = self.task("run");
        task.guard(|| {
            if inputs.len() != call.inputs.len() {
                return Err(task.refused(format!("{} inputs, expected {}", inputs.len(), call.inputs.len())));
            }
            for (buffer, values) in call.inputs.iter_mut().zip(inputs) {
                buffer.write(*values).map_err(|problem| task.refused(problem))?;
            }
            let provider = ProtocolObject::from_ref(&*call.provider);
            // SAFETY: all objects are valid; whoever has the model, the call and the states has them alone, so that no
            // other prediction is under way.
            let given = unsafe {
                match state {
                    Some(State { state, .. }) => {
                        self.model.predictionFromFeatures_usingState_options_error(provider, state, &call.options)
                    }
                    None => self.model.predictionFromFeatures_options_error(provider, &call.options),
                }
            };
            let given = given.map_err(|e| task.error(&e))?;
            let read = |buffer: &Buffer| output(&given, buffer).map_err(|problem| task.refused(problem));
            call.outputs.iter().map(read).collect()
        })
    }
}

impl Buffer {
    fn new(array: &StridedArray, task: Task<'_>) -> Result<Self, CoreMlError> {
        let bytes = (array.count() * array.element.size()).max(1);
        let layout = Layout::from_size_align(bytes, PAGE).map_err(|e| task.refused(e.to_string()))?;
        // SAFETY: the layout isn't of size 0.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        let free = RcBlock::new(move |memory: NonNull<c_void>| {
            // SAFETY: it was allocated with this layout, and the object that used it is gone.
            unsafe { dealloc(memory.as_ptr().cast(), layout) };
        });
        let data_type = match array.element {
            Element::F16 => MLMultiArrayDataType::Float16,
            Element::F32 => MLMultiArrayDataType::Float32,
            Element::I32 => MLMultiArrayDataType::Int32,
        };
        // SAFETY: the memory holds as many elements of the type as the shape has, with these strides.
        let object = unsafe {
            MLMultiArray::initWithDataPointer_shape_dataType_strides_deallocator_error(
                MLMultiArray::alloc(),
                memory.cast(),
                &numbers(&array.shape),
                data_type,
                &numbers(&array.strides()),
                Some(&free),
            )
        };
        let object = object.map_err(|e| task.error(&e))?;
        Ok(Buffer { array: array.clone(), name: NSString::from_str(&array.name), object, memory })
    }

    fn write(&mut self, values: Values<'_>) -> Result<(), String> {
        let bytes = self.array.count() * self.array.element.size();
        // SAFETY: the memory has that size, is initialised, and lives as long as the object that is held here; no
        // prediction is under way that would read it.
        let memory = unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), bytes) };
        array::write(&self.array, values, memory)
    }
}

/// Returns a dictionary of buffers by name.
fn dictionary(
    buffers: &[Buffer],
    value: impl Fn(&Buffer) -> Retained<AnyObject>,
) -> Retained<NSDictionary<NSString, AnyObject>> {
    let names: Vec<&NSString> = buffers.iter().map(|buffer| &*buffer.name).collect();
    let values: Vec<Retained<AnyObject>> = buffers.iter().map(value).collect();
    NSDictionary::from_retained_objects(&names, &values)
}

fn numbers(sizes: &[usize]) -> Retained<NSArray<NSNumber>> {
    let numbers: Vec<Retained<NSNumber>> = sizes.iter().map(|size| NSNumber::new_usize(*size)).collect();
    NSArray::from_retained_slice(&numbers)
}

fn sizes(numbers: &NSArray<NSNumber>) -> Result<Vec<usize>, String> {
    let size = |number: Retained<NSNumber>| {
        usize::try_from(number.as_isize()).map_err(|_| format!("a size or stride is {}", number.as_isize()))
    };
    numbers.iter().map(size).collect()
}

/// Sets a state to zero: new states were observed not to be zero always.
fn clear(state: &MLState, name: &NSString) {
    change(state, name, &|memory| memory.fill(0));
}

/// Returns the contents of a state without padding.
fn values(state: &MLState, array: &StridedArray) -> Result<OwnedValues, String> {
    let read = RefCell::new(Err(format!("there is no state `{}`", array.name)));
    let of_array = RcBlock::new(|object: NonNull<MLMultiArray>| {
        // SAFETY: the array is valid for the time of this call.
        let object = unsafe { object.as_ref() };
        // SAFETY: properties of a valid array.
        let strides = unsafe { object.strides() };
        let strides = sizes(&strides);
        let of_bytes = RcBlock::new(|memory: NonNull<c_void>, length: isize| {
            let length = usize::try_from(length).unwrap_or(0);
            // SAFETY: Core ML gives the memory and its size for the time of this call.
            let memory = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), length) };
            let values = |strides: &Vec<usize>| array::read(array.element, &array.shape, strides, memory);
            *read.borrow_mut() = strides.as_ref().map_err(Clone::clone).and_then(values);
        });
        // SAFETY: as above.
        unsafe { object.getBytesWithHandler(&of_bytes) };
    });
    // SAFETY: no prediction that uses the state is under way; the handler ends before the call does.
    unsafe { state.getMultiArrayForStateNamed_handler(&NSString::from_str(&array.name), &of_array) };
    drop(of_array);
    read.into_inner()
}

/// Writes values into a state with padded rows.
fn set_values(state: &MLState, array: &StridedArray, values: &OwnedValues) -> Result<(), String> {
    let written = RefCell::new(Err(format!("there is no state `{}`", array.name)));
    let of_array = RcBlock::new(|object: NonNull<MLMultiArray>| {
        let of_bytes = RcBlock::new(|memory: NonNull<c_void>, length: isize, strides: NonNull<NSArray<NSNumber>>| {
            let length = usize::try_from(length).unwrap_or(0);
            // SAFETY: Core ML gives the memory and its size for the time of this call, to us alone.
            let memory = unsafe { std::slice::from_raw_parts_mut(memory.as_ptr().cast::<u8>(), length) };
            // SAFETY: the strides are valid for the time of this call.
            let strides = sizes(unsafe { strides.as_ref() });
            *written.borrow_mut() = strides.and_then(|strides| {
                array::write_strided(array.element, &array.shape, &strides, values.as_values(), memory)
            });
        });
        // SAFETY: the array is valid for the time of this call.
        unsafe { object.as_ref().getMutableBytesWithHandler(&of_bytes) };
    });
    // SAFETY: no prediction that uses the state is under way; the handler ends before the call does.
    unsafe { state.getMultiArrayForStateNamed_handler(&NSString::from_str(&array.name), &of_array) };
    drop(of_array);
    written.into_inner()
}

/// Copies memory into a state of the same model, which has the same layout; returns false if the sizes differ.
fn fill(state: &MLState, name: &NSString, bytes: &[u8]) -> bool {
    let filled = Cell::new(false);
    change(state, name, &|memory| {
        if memory.len() == bytes.len() {
            memory.copy_from_slice(bytes);
            filled.set(true);
        }
    });
    filled.get()
}

/// Runs `work` on the memory of a state, padding included.
fn change(state: &MLState, name: &NSString, work: &dyn Fn(&mut [u8])) {
    let of_array = RcBlock::new(|array: NonNull<MLMultiArray>| {
        let of_bytes = RcBlock::new(|memory: NonNull<c_void>, length: isize, _: NonNull<NSArray<NSNumber>>| {
            let length = usize::try_from(length).unwrap_or(0);
            // SAFETY: Core ML gives the memory and its size for the time of this call, to us alone.
            work(unsafe { std::slice::from_raw_parts_mut(memory.as_ptr().cast::<u8>(), length) });
        });
        // SAFETY: the array is valid for the time of this call.
        unsafe { array.as_ref().getMutableBytesWithHandler(&of_bytes) };
    });
    // SAFETY: no prediction that uses the state is under way; the handler ends before the call does.
    unsafe { state.getMultiArrayForStateNamed_handler(name, &of_array) };
}

/// Returns the memory of a state, padding included.
fn contents(state: &MLState, name: &NSString) -> Vec<u8> {
    let bytes = RefCell::new(Vec::new());
    let of_array = RcBlock::new(|array: NonNull<MLMultiArray>| {
        let of_bytes = RcBlock::new(|memory: NonNull<c_void>, length: isize| {
            let length = usize::try_from(length).unwrap_or(0);
            // SAFETY: Core ML gives the memory and its size for the time of this call.
            let memory = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), length) };
            *bytes.borrow_mut() = memory.to_vec();
        });
        // SAFETY: the array is valid for the time of this call.
        unsafe { array.as_ref().getBytesWithHandler(&of_bytes) };
    });
    // SAFETY: no prediction that uses the state is under way; the handler ends before the call does.
    unsafe { state.getMultiArrayForStateNamed_handler(name, &of_array) };
    drop(of_array);
    bytes.into_inner()
}

/// Returns an output of a prediction, from our memory or from an array of Core ML's own with padded rows.
fn output(given: &ProtocolObject<dyn MLFeatureProvider>, buffer: &Buffer) -> Result<OwnedValues, String> {
    let name = &buffer.array.name;
    // SAFETY: properties of the result, which is ours.
    let object = unsafe { given.featureValueForName(&buffer.name).and_then(|value| value.multiArrayValue()) };
    let object = object.ok_or_else(|| format!("there is no output `{name}`"))?;
    // SAFETY: as above.
    let (data_type, shape, strides) =
        unsafe { (object.dataType(), sizes(&object.shape())?, sizes(&object.strides())?) };
    let element = match data_type {
        MLMultiArrayDataType::Float16 => Element::F16,
        MLMultiArrayDataType::Float32 => Element::F32,
        MLMultiArrayDataType::Int32 => Element::I32,
        other => return Err(format!("`{name}` has elements of type {}", other.0)),
    };
    if shape != buffer.array.shape {
        return Err(format!("`{name}` has shape {shape:?}, expected {:?}", buffer.array.shape));
    }
    let read = RefCell::new(Err(format!("`{name}` has no memory")));
    let handler = RcBlock::new(|memory: NonNull<c_void>, bytes: isize| {
        let bytes = usize::try_from(bytes).unwrap_or(0);
        // SAFETY: Core ML gives the memory and its size for the time of this call; the prediction has ended, so that
        // nothing writes to it.
        let memory = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), bytes) };
        *read.borrow_mut() = array::read(element, &shape, &strides, memory);
    });
    // SAFETY: the handler ends before the call does.
    unsafe { object.getBytesWithHandler(&handler) };
    drop(handler);
    read.into_inner()
}
