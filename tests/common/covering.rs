//! Covering arrays: few combinations of choices in which any few choices still occur together.

use std::collections::BTreeSet;

/// The choices of `strength` factors, by factor.
type ChoiceTuple = Vec<(usize, usize)>;

/// Tuples of `strength` factors in a combination.
fn tuples(combination: &[usize], strength: usize) -> Vec<ChoiceTuple> {
    let mut out = vec![ChoiceTuple::new()];
    for (factor, choice) in combination.iter().enumerate() {
        let with: Vec<ChoiceTuple> = out
            .iter()
            .filter(|tuple| tuple.len() < strength)
            .map(|tuple| [tuple.as_slice(), &[(factor, *choice)]].concat())
            .collect();
        out.extend(with);
    }
    out.retain(|tuple| tuple.len() == strength);
    out
}

/// All combinations of factors with so many choices each.
fn product(choices: &[usize]) -> Vec<Vec<usize>> {
    choices.iter().fold(vec![Vec::new()], |all, count| {
        all.iter().flat_map(|head| (0..*count).map(move |choice| [head.as_slice(), &[choice]].concat())).collect()
    })
}

/// Combinations in which any choices of any `strength` factors occur together at least once. Greedy, the same every
/// time; the first is the first choice of every factor.
pub fn covering(choices: &[usize], strength: usize) -> Vec<Vec<usize>> {
    let all: Vec<(Vec<usize>, Vec<ChoiceTuple>)> =
        product(choices).into_iter().map(|c| (c.clone(), tuples(&c, strength))).collect();
    let mut missing: BTreeSet<&ChoiceTuple> = all.iter().flat_map(|(_, tuples)| tuples).collect();
    let mut out = Vec::new();
    while !missing.is_empty() {
        let gain = |tuples: &[ChoiceTuple]| tuples.iter().filter(|tuple| missing.contains(tuple)).count();
        // the first of the best
        let best = all.iter().rev().max_by_key(|(_, tuples)| gain(tuples)).expect("a combination");
        best.1.iter().for_each(|tuple| _ = missing.remove(tuple));
        out.push(best.0.clone());
    }
    out
}

#[test]
fn any_three_choices_occur_together() {
    let choices = [2, 3, 4, 2, 2, 2];
    let few = covering(&choices, 3);
    assert!(few.len() < 40 && few[0] == [0; 6], "{} of 192: {few:?}", few.len());
    let met: BTreeSet<ChoiceTuple> = few.iter().flat_map(|c| tuples(c, 3)).collect();
    let all: BTreeSet<ChoiceTuple> = product(&choices).iter().flat_map(|c| tuples(c, 3)).collect();
    assert_eq!(met, all);
}
