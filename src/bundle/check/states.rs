//! States over all functions: who has one in common with whom.

use std::collections::BTreeMap;

use super::in_function;
use crate::{FunctionEntry, Port, PortRole, StateRole};

/// One state as a function names it.
#[derive(PartialEq)]
struct Named<'a> {
    id: &'a str,
    name: &'a str,
    role: &'a StateRole,
    shape: Vec<u64>,
}

/// What is wrong with the ids of states.
pub(super) fn problems(functions: &[FunctionEntry]) -> Vec<String> {
    let mut problems = Vec::new();
    // the first function that has a state, by its id
    let mut owners: BTreeMap<&str, &FunctionEntry> = BTreeMap::new();
    for entry in functions {
        let (kept, given) = (kept_by_host(&entry.inputs), kept_by_host(&entry.outputs));
        let same = |a: &[Named<'_>], b: &[Named<'_>]| {
            a.len() == b.len()
                && a.iter().all(|a| b.iter().any(|b| (a.id, a.role, &a.shape) == (b.id, b.role, &b.shape)))
        };
        if !same(&kept, &given) {
            let list = |states: &[Named<'_>]| -> String {
                let states: Vec<String> =
                    states.iter().map(|state| format!("{} {:?}", state.id, state.shape)).collect();
                if states.is_empty() { "none".into() } else { states.join(", ") }
            };
            let problem =
                format!("it gives back other states than it takes: takes {}, gives {}", list(&kept), list(&given));
            problems.push(in_function(entry, problem));
            continue;
        }
        let own: Vec<Named<'_>> = states(entry).chain(kept).chain(caches(&entry.inputs)).collect();
        if let Some(problem) = twice(&own) {
            problems.push(in_function(entry, problem));
            continue;
        }
        let shared = own.iter().find_map(|state| owners.get(state.id).copied());
        match shared {
            None => owners.extend(own.iter().map(|state| (state.id, entry))),
            Some(other) => {
                let theirs: Vec<Named<'_>> =
                    states(other).chain(kept_by_host(&other.inputs)).chain(caches(&other.inputs)).collect();
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

/// An id that two states have, or a layer for which two states hold the same.
fn twice(own: &[Named<'_>]) -> Option<String> {
    own.iter().enumerate().find_map(|(index, state)| {
        let earlier = &own[..index];
        if let Some(other) = earlier.iter().find(|other| other.id == state.id) {
            return Some(format!("`{}` and `{}` have the same id `{}`", other.name, state.name, state.id));
        }
        let kind = std::mem::discriminant(state.role);
        // several caches of a stack differ in their slots and layers
        let other = earlier.iter().find(|other| {
            std::mem::discriminant(other.role) == kind
                && other.role.layers().iter().any(|layer| state.role.layers().contains(layer))
        })?;
        Some(format!("`{}` and `{}` hold the same of one layer", other.name, state.name))
    })
}

/// The states of a function.
fn states(entry: &FunctionEntry) -> impl Iterator<Item = Named<'_>> {
    entry.states.iter().map(|state| Named {
        id: &state.id,
        name: &state.name,
        role: &state.role,
        shape: state.shape.clone(),
    })
}

/// The caches among inputs.
fn caches(ports: &[Port]) -> Vec<Named<'_>> {
    let caches = ports.iter().filter_map(|port| match &port.role {
        PortRole::Cache { id, holds } => Some(Named { id, name: &port.name, role: holds, shape: port.shape_at(0) }),
        _ => None,
    });
    caches.collect()
}

/// The states among ports.
fn kept_by_host(ports: &[Port]) -> Vec<Named<'_>> {
    let states = ports.iter().filter_map(|port| match &port.role {
        PortRole::State { id, holds } => Some(Named { id, name: &port.name, role: holds, shape: port.shape_at(0) }),
        _ => None,
    });
    states.collect()
}
