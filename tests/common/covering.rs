//! Covering arrays: few combinations of choices in which any few choices still occur together.

use std::collections::{BTreeMap, BTreeSet};

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
    let all = product(choices);
    let mut numbers = BTreeMap::new();
    let mut number = |tuple: ChoiceTuple| {
        let next = numbers.len();
        *numbers.entry(tuple).or_insert(next)
    };
    let numbered = |combination: &Vec<usize>| tuples(combination, strength).into_iter().map(&mut number).collect();
    let of_combination: Vec<Vec<usize>> = all.iter().map(numbered).collect();
    let mut is_missing = vec![true; numbers.len()];
    let mut out = Vec::new();
    while is_missing.contains(&true) {
        let gain = |own: &[usize]| own.iter().filter(|tuple| is_missing[**tuple]).count();
        // the first of the best
        let best = (0..all.len()).rev().max_by_key(|i| gain(&of_combination[*i])).expect("a combination");
        of_combination[best].iter().for_each(|tuple| is_missing[*tuple] = false);
        out.push(all[best].clone());
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
