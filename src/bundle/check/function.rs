//! Checks of single functions: ports fit the stage, and shapes fit the roles.

use std::ops::Range;

use super::duplicate;
use crate::{Bundle, FunctionEntry, Port, PortRole, Stage, StatePort, StateRole};

/// Returns all problems of a function.
pub(super) fn problems(bundle: &Bundle, entry: &FunctionEntry) -> Vec<String> {
    let mut problems = Vec::new();
    let (least, most) = (entry.tokens.least(), entry.tokens.most());
    if least == 0 || least > most {
        problems.push(format!("it takes {} tokens", entry.tokens));
        return problems;
    }
    problems.extend(part_problem(bundle, entry));
    problems.extend(context_problem(bundle, entry));
    let ports = || entry.inputs.iter().chain(&entry.outputs);
    let names: Vec<&str> = ports()
        .map(|port| &port.name)
        .chain(entry.states.iter().map(|state| &state.name))
        .map(String::as_str)
        .collect();
    problems.extend(duplicate(&names).map(|name| format!("two of its ports are named `{name}`")));
    for (direction, ports, allowed) in [
        ("input", &entry.inputs, takes as fn(&Stage, &PortRole) -> bool),
        ("output", &entry.outputs, gives as fn(&Stage, &PortRole) -> bool),
    ] {
        for port in ports {
            if !allowed(&entry.stage, &port.role) {
                problems.push(format!("a function of its stage has no {direction} like `{}`", port.name));
            }
        }
    }
    for port in ports() {
        // shapes are linear in the number of tokens: two points suffice
        let wrong = [least, most].into_iter().find(|tokens| !fits(bundle, entry, port, *tokens));
        problems.extend(wrong.map(|tokens| {
            format!("`{}` has shape {:?} in calls of {tokens} tokens, which its role contradicts", port.name, {
                port.shape_at(tokens)
            })
        }));
        if let PortRole::RopeCos { table } | PortRole::RopeSin { table } = &port.role
            && !bundle.host.rope.iter().any(|known| known.table == *table)
        {
            problems.push(format!("`{}` asks for a rotary table `{table}`, which isn't there", port.name));
        }
    }
    problems.extend(result_problem(entry));
    problems.extend(entry.states.iter().filter_map(|state| state_problem(entry, state)));
    problems.extend(cache_problem(entry));
    problems.extend(probe_problem(entry));
    problems
}

/// Checks that the function's part is within the model.
fn part_problem(bundle: &Bundle, entry: &FunctionEntry) -> Option<String> {
    let layers = bundle.model.num_layers;
    let right = match entry.stage {
        Stage::Layers { first, end } => first < end && end <= layers,
        Stage::FeedForward { layer } => layer < layers,
        Stage::Experts { layer, first, end } => first < end && layer < layers,
        Stage::Head { first, end } => first < end && end <= bundle.model.head_rows() && bundle.model.has_head(),
        Stage::Model { layers: own, rows } => {
            own == layers && rows == bundle.model.head_rows() && bundle.model.has_head()
        }
    };
    (!right).then(|| format!("the model has no {:?}", entry.stage))
}

fn context_problem(bundle: &Bundle, entry: &FunctionEntry) -> Option<String> {
    let longest = bundle.longest_context();
    let right = match entry.stage {
        Stage::Layers { .. } | Stage::Model { .. } => bundle.model.contexts.contains(&entry.context),
        Stage::FeedForward { .. } | Stage::Experts { .. } | Stage::Head { .. } => entry.context == longest,
    };
    (!right).then(|| format!("its context is {}, the model's are {:?}", entry.context, bundle.model.contexts))
}

/// Whether functions of a stage may have such an input.
fn takes(stage: &Stage, role: &PortRole) -> bool {
    match role {
        PortRole::Hidden => true,
        PortRole::ExpertInput | PortRole::ExpertShares => matches!(stage, Stage::Experts { .. }),
        PortRole::FeedForwardInput => matches!(stage, Stage::FeedForward { .. }),
        PortRole::RouterState | PortRole::Embedding | PortRole::PerLayerInput { .. } => {
            stage.whole_layers().is_some() || matches!(stage, Stage::FeedForward { .. })
        }
        PortRole::PreviousHidden
        | PortRole::PreviousDrafted
        | PortRole::SharedKeys { .. }
        | PortRole::SharedValues { .. }
        | PortRole::RopeCos { .. }
        | PortRole::RopeSin { .. }
        | PortRole::AttentionMask { .. }
        | PortRole::BandMask { .. }
        | PortRole::KvWriteMask
        | PortRole::TokenOrder
        | PortRole::SliceBegin
        | PortRole::SliceEnd
        | PortRole::State { .. }
        | PortRole::Cache { .. }
        | PortRole::PastMask { .. }
        | PortRole::CallMask { .. } => stage.whole_layers().is_some(),
        PortRole::CacheRows { .. } | PortRole::Logits | PortRole::TopValues | PortRole::TopIndices => false,
    }
}

/// Whether functions of a stage may have such an output.
fn gives(stage: &Stage, role: &PortRole) -> bool {
    match role {
        PortRole::Hidden => !matches!(stage, Stage::Head { .. }),
        PortRole::RouterState => matches!(stage, Stage::Layers { .. } | Stage::FeedForward { .. }),
        PortRole::SharedKeys { .. }
        | PortRole::SharedValues { .. }
        | PortRole::FeedForwardInput
        | PortRole::ExpertInput
        | PortRole::ExpertShares
        | PortRole::State { .. }
        | PortRole::CacheRows { .. } => stage.whole_layers().is_some(),
        PortRole::Logits | PortRole::TopValues | PortRole::TopIndices => stage.head_rows().is_some(),
        PortRole::PreviousHidden
        | PortRole::PreviousDrafted
        | PortRole::Embedding
        | PortRole::PerLayerInput { .. }
        | PortRole::RopeCos { .. }
        | PortRole::RopeSin { .. }
        | PortRole::AttentionMask { .. }
        | PortRole::BandMask { .. }
        | PortRole::KvWriteMask
        | PortRole::TokenOrder
        | PortRole::SliceBegin
        | PortRole::SliceEnd
        | PortRole::Cache { .. }
        | PortRole::PastMask { .. }
        | PortRole::CallMask { .. } => false,
    }
}

/// Whether a port's shape fits its role in calls of `t` tokens.
fn fits(bundle: &Bundle, entry: &FunctionEntry, port: &Port, t: u64) -> bool {
    let shape = port.shape_at(t);
    let columns = |channels: u64| shape == [1, channels, t, 1] || shape == [1, channels, 1, t];
    let slots = |slots: u64| (1..=entry.context).contains(&slots);
    match &port.role {
        PortRole::Hidden | PortRole::PreviousHidden | PortRole::FeedForwardInput | PortRole::Embedding => {
            columns(bundle.model.hidden_size)
        }
        PortRole::PreviousDrafted => columns(1),
        PortRole::ExpertInput => {
            let whole = |channels: &u64| channels.is_multiple_of(bundle.model.hidden_size.max(1));
            shape.get(1).filter(|channels| whole(channels)).is_some_and(|channels| columns(*channels))
        }
        PortRole::RouterState | PortRole::ExpertShares => shape.get(1).is_some_and(|channels| columns(*channels)),
        // of the function's layers, all of the same width
        PortRole::PerLayerInput { first, end } => {
            entry.stage.layers() == (*first..*end)
                && bundle.host.per_layer_embedding.is_some()
                && shape
                    .get(1)
                    .is_some_and(|rows| columns(*rows) && rows.is_multiple_of(end.saturating_sub(*first).max(1) as u64))
        }
        PortRole::SharedKeys { .. } | PortRole::SharedValues { .. } => {
            matches!(shape[..], [1, _, rows, _] if rows == t)
        }
        PortRole::RopeCos { .. } | PortRole::RopeSin { .. } => matches!(shape[..], [1, 1, rows, _] if rows == t),
        PortRole::AttentionMask { .. } | PortRole::PastMask { .. } => {
            matches!(shape[..], [1, 1, rows, s] if rows == t && slots(s))
        }
        PortRole::KvWriteMask => matches!(shape[..], [1, 1, s, columns] if columns == t && slots(s)),
        PortRole::BandMask { biased: true, .. } => {
            bundle.host.attention_bias.is_some()
                && matches!(shape[..], [1, heads, rows, columns] if heads > 0 && rows == t && columns == t)
        }
        PortRole::BandMask { .. } | PortRole::CallMask { .. } => shape == [1, 1, t, t],
        PortRole::Cache { .. } => matches!(shape[..], [1, _, s, _] if slots(s)) && shape == port.shape_at(0),
        PortRole::CacheRows { .. } => matches!(shape[..], [1, _, rows, _] if rows == t),
        // as many levels as distinguish all tokens
        PortRole::TokenOrder => {
            matches!(shape[..], [1, planes, rows, columns]
                if rows == t && columns == t && (1..=64).contains(&planes) && t <= 1 << (planes - 1))
        }
        PortRole::SliceBegin | PortRole::SliceEnd => shape == [4],
        PortRole::State { .. } => shape.len() == 4 && shape == port.shape_at(0),
        PortRole::Logits => entry.stage.head_rows().is_some_and(|rows| columns(rows.end.saturating_sub(rows.start))),
        // as many as asked for, or all of a smaller part
        PortRole::TopValues | PortRole::TopIndices => {
            let rows = entry.stage.head_rows().map_or(0, |rows| rows.end.saturating_sub(rows.start));
            let k = entry.largest_logits().or_else(|| shape.get(1).copied()).unwrap_or(0);
            let all = bundle.largest_logits().unwrap_or(k);
            (1..=rows).contains(&k) && k == all.min(rows) && columns(k)
        }
    }
}

/// A function has one input of hidden states and one result: hidden states, or logits, of which the largest may stand
/// in for all.
fn result_problem(entry: &FunctionEntry) -> Option<String> {
    let count = |ports: &[Port], role: PortRole| ports.iter().filter(|port| port.role == role).count();
    let [logits, values, indices] =
        [PortRole::Logits, PortRole::TopValues, PortRole::TopIndices].map(|role| count(&entry.outputs, role));
    let of_head = if logits == 0 { values.min(indices) } else { logits };
    let hidden_results = count(&entry.outputs, PortRole::Hidden);
    let results = match entry.stage {
        Stage::Layers { .. } | Stage::FeedForward { .. } | Stage::Experts { .. } => hidden_results,
        Stage::Head { .. } => of_head,
        // one of each
        Stage::Model { .. } if hidden_results == 1 => of_head,
        Stage::Model { .. } => hidden_results,
    };
    let hidden = count(&entry.inputs, PortRole::Hidden);
    if hidden != 1 || results != 1 || values > 1 || indices > 1 {
        return Some(format!("it has {hidden} inputs of hidden states and {results} results, expected one each"));
    }
    let [input, shares] = [PortRole::ExpertInput, PortRole::ExpertShares].map(|role| {
        let ports = if matches!(entry.stage, Stage::Experts { .. }) { &entry.inputs } else { &entry.outputs };
        count(ports, role)
    });
    let expected = if matches!(entry.stage, Stage::Experts { .. }) { 1 } else { shares.min(1) };
    (input != expected || shares != expected)
        .then(|| format!("it has {input} ports of experts' inputs and {shares} of their shares"))
}

/// Caches stored by the host: each must have rows among the outputs, belong to the function's layers, and have a mask.
fn cache_problem(entry: &FunctionEntry) -> Option<String> {
    let rows = |of: &str, held: &StateRole, cache: &Port| {
        let fit = |port: &Port| {
            let (rows, cache) = (port.shape_at(1), cache.shape_at(1));
            rows.len() == 4 && cache.len() == 4 && (rows[1], rows[3]) == (cache[1], cache[3])
        };
        let mine = |port: &&Port| matches!(&port.role, PortRole::CacheRows { id, holds } if id == of && holds == held);
        entry.outputs.iter().filter(mine).filter(|port| fit(port)).count()
    };
    let mut caches = 0;
    for port in &entry.inputs {
        let PortRole::Cache { id, holds } = &port.role else { continue };
        caches += 1;
        if rows(id, holds, port) != 1 {
            return Some(format!("no output, or several, has the rows of the call's tokens for `{}`", port.name));
        }
        if !holds.is_cache() {
            return Some(format!("`{}` is no cache of keys or values", port.name));
        }
        let slots = port.shape_at(0)[2];
        let seen = |port: &Port| matches!(port.role, PortRole::PastMask { .. }) && port.shape_at(0)[3] == slots;
        if !entry.inputs.iter().any(|port| port.shape.len() == 4 && seen(port)) {
            return Some(format!("no mask is for the {slots} slots of `{}`", port.name));
        }
        if !entry.inputs.iter().any(|port| matches!(port.role, PortRole::CallMask { .. })) {
            return Some(format!("no mask says what the tokens of a call see of each other, beside `{}`", port.name));
        }
        let state = StatePort { name: port.name.clone(), id: id.clone(), role: holds.clone(), shape: port.shape_at(0) };
        if let Some(problem) = place_problem(entry, &state) {
            return Some(problem);
        }
    }
    let rows = entry.outputs.iter().filter(|port| matches!(port.role, PortRole::CacheRows { .. })).count();
    (rows != caches).then(|| format!("it gives rows for {rows} caches and takes {caches}"))
}

/// A state must belong to the function's layers, and a cache needs a mask and a write position.
fn state_problem(entry: &FunctionEntry, state: &StatePort) -> Option<String> {
    if let Some(problem) = place_problem(entry, state) {
        return Some(problem);
    }
    if !state.role.is_cache() {
        return None;
    }
    let slots = state.shape[2];
    let seen = |port: &Port| match port.role {
        PortRole::AttentionMask { .. } => port.shape_at(0)[3] == slots,
        // tokens of the call have their own mask
        PortRole::PastMask { .. } => {
            port.shape_at(0)[3] == slots
                && entry.inputs.iter().any(|port| matches!(port.role, PortRole::CallMask { .. }))
        }
        _ => false,
    };
    let written = |port: &Port| match port.role {
        PortRole::KvWriteMask => port.shape_at(0).get(2) == Some(&slots),
        PortRole::SliceBegin => {
            slots == entry.context && entry.inputs.iter().any(|port| port.role == PortRole::SliceEnd)
        }
        _ => false,
    };
    if !entry.inputs.iter().any(|port| port.shape.len() == 4 && seen(port)) {
        return Some(format!("no attention mask is for the {slots} slots of state `{}`", state.name));
    }
    if !entry.inputs.iter().any(written) {
        return Some(format!("nothing says which of the {slots} slots of state `{}` are written", state.name));
    }
    None
}

/// A state must belong to the function's layers and contain something.
fn place_problem(entry: &FunctionEntry, state: &StatePort) -> Option<String> {
    let Some(Range { start: first, end }) = entry.stage.whole_layers() else {
        return Some(format!("it has a state `{}`, which only layers have", state.name));
    };
    if let Some(layer) = state.role.layers().iter().find(|layer| !(first..end).contains(*layer)) {
        return Some(format!(
            "state `{}` is of layer {layer}, the function has layers {first} to {}",
            state.name,
            end - 1
        ));
    }
    let &[1, rows, slots, width] = state.shape.as_slice() else {
        return Some(format!("state `{}` has shape {:?}", state.name, state.shape));
    };
    if state.role.layers().is_empty() || rows == 0 || slots == 0 || width == 0 {
        return Some(format!("state `{}` holds nothing", state.name));
    }
    None
}

/// Probes must name inner layers of the function, each once.
fn probe_problem(entry: &FunctionEntry) -> Option<String> {
    let layers = entry.stage.whole_layers().unwrap_or(0..0);
    let inner = layers.start..layers.end.saturating_sub(1);
    let layers: Vec<usize> = entry.probes.iter().map(|probe| probe.layer).collect();
    let layer = layers.iter().copied().find(|layer| !inner.contains(layer)).or_else(|| duplicate(&layers))?;
    Some(format!("it says where the hidden states of layer {layer} are, which isn't inside it, or twice"))
}
