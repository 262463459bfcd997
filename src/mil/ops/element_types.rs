//! Element types of operators' parameters.

use std::collections::BTreeMap;

use crate::types::{DataType, Opset};

/// Element types of a parameter; an empty list means any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ElementTypes {
    /// Label; parameters of one operator with equal labels must have the same type.
    pub shared: Option<&'static str>,
    /// Accepted types.
    pub any_of: Vec<DataType>,
}

/// The element types of one operator's parameters.
pub type ElementForm = BTreeMap<&'static str, ElementTypes>;

/// The forms of every operator, each with the opset it appeared in, oldest first.
pub fn forms() -> BTreeMap<&'static str, Vec<(Opset, ElementForm)>> {
    let mut out: BTreeMap<&'static str, Vec<(Opset, ElementForm)>> = BTreeMap::new();
    for line in include_str!("element_types.txt").lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let operator = words.next().unwrap_or_default();
        let opset = words.next().and_then(|target| Opset::ALL.into_iter().find(|o| o.target() == target));
        let words: Vec<&str> = words.collect();
        let shared: BTreeMap<&str, &str> = words.iter().filter_map(|word| word.split_once('=')).collect();
        let form = words.iter().filter_map(|word| word.split_once(':')).map(|(parameter, types)| {
            let (shared, types) = match shared.get(types) {
                Some(those) => (Some(types), *those),
                None => (None, types),
            };
            // programs of this crate can't contain types that it doesn't know
            let any_of = types.split('|').filter_map(DataType::from_name).collect();
            (parameter, ElementTypes { shared, any_of })
        });
        if let Some(opset) = opset {
            out.entry(operator).or_default().push((opset, form.collect()));
        }
    }
    out
}
