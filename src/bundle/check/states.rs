//! Checks of states over all functions: which functions share which states.

use anec_base::listing::list;
use std::collections::BTreeMap;

use super::in_function;
use crate::{FunctionEntry, Port, PortRole, StateRole};

/// State as one function names it.
#[derive(PartialEq)]
struct NamedState<'a> {
    id: &'a str,
    name: &'a str,
    role: &'a StateRole,
    shape: Vec<u64>,
}

/// Returns all problems with state ids.
pub(super) fn problems(functions: &[FunctionEntry]) -> Vec<String> {
    let mut problems = Vec::new();
    // first function that has a state, by id
    let mut owners: BTreeMap<&str, &FunctionEntry> = BTreeMap::new();
    for entry in functions {
        let (kept, given) = (host_states(&entry.inputs), host_states(&entry.outputs));
        let same = |a: &[NamedState<'_>], b: &[NamedState<'_>]| {
            a.len() == b.len()
                && a.iter().all(|a| b.iter().any(|b| (a.id, a.role, &a.shape) == (b.id, b.role, &b.shape)))
        };
        if !same(&kept, &given) {
            let list =
                |states: &[NamedState<'_>]| list(states.iter().map(|state| format!("{} {:?}", state.id, state.shape)));
            let problem =
                format!("it gives back other states than it takes: takes {}, gives {}", list(&kept), list(&given));
            problems.push(in_function(entry, problem));
            continue;
        }
        let own: Vec<NamedState<'_>> = states(entry).chain(kept).chain(caches(&entry.inputs)).collect();
        if let Some(problem) = duplicate_state(&own) {
            problems.push(in_function(entry, problem));
            continue;
        }
        let shared = own.iter().find_map(|state| owners.get(state.id).copied());
        match shared {
            None => owners.extend(own.iter().map(|state| (state.id, entry))),
            Some(other) => {
                let theirs: Vec<NamedState<'_>> =
                    states(other).chain(host_states(&other.inputs)).chain(caches(&other.inputs)).collect();
                if theirs != own || other.package != entry.package || other.context != entry.context {
                    problems.push(in_function(
                        entry,
                        format!(
                            "it has a state in common with function `{}` of {}, but not the same states of the same shapes, \
                             package and context",
                            other.function, other.package
                        ),
                    ));
                }
            }
        }
    }
    problems
}

/// Finds an id that two states have, or a layer for which two states hold the same.
fn duplicate_state(own: &[NamedState<'_>]) -> Option<String> {
    own.iter().enumerate().find_map(|(index, state)| {
        let earlier = &own[..index];
        if let Some(other) = earlier.iter().find(|other| other.id == state.id) {
            return Some(format!("`{}` and `{}` have the same id `{}`", other.name, state.name, state.id));
        }
        let kind = std::mem::discriminant(state.role);
        // caches of a stack differ in their slots and layers
        let other = earlier.iter().find(|other| {
            std::mem::discriminant(other.role) == kind
                && other.role.layers().iter().any(|layer| state.role.layers().contains(layer))
        })?;
        Some(format!("`{}` and `{}` hold the same of one layer", other.name, state.name))
    })
}

/// States of the function.
fn states(entry: &FunctionEntry) -> impl Iterator<Item = NamedState<'_>> {
    entry.states.iter().map(|state| NamedState {
        id: &state.id,
        name: &state.name,
        role: &state.role,
        shape: state.shape.clone(),
    })
}

/// Caches among inputs.
fn caches(ports: &[Port]) -> Vec<NamedState<'_>> {
    let caches = ports.iter().filter_map(|port| match &port.role {
        PortRole::Cache { id, holds } => {
            Some(NamedState { id, name: &port.name, role: holds, shape: port.shape_at(0) })
        }
        _ => None,
    });
    caches.collect()
}

/// States among ports.
fn host_states(ports: &[Port]) -> Vec<NamedState<'_>> {
    let states = ports.iter().filter_map(|port| match &port.role {
        PortRole::State { id, holds } => {
            Some(NamedState { id, name: &port.name, role: holds, shape: port.shape_at(0) })
        }
        _ => None,
    });
    states.collect()
}
