//! Covering arrays: few combinations of choices in which any few choices still meet.

use std::collections::BTreeSet;

/// The choices of `strength` factors, by factor.
type Meeting = Vec<(usize, usize)>;

/// Every way in which `strength` of the factors meet in a combination.
fn meetings(combination: &[usize], strength: usize) -> Vec<Meeting> {
    let mut out = vec![Meeting::new()];
    for (factor, choice) in combination.iter().enumerate() {
        let with: Vec<Meeting> = out
            .iter()
            .filter(|meeting| meeting.len() < strength)
            .map(|meeting| [meeting.as_slice(), &[(factor, *choice)]].concat())
            .collect();
        out.extend(with);
    }
    out.retain(|meeting| meeting.len() == strength);
    out
}

/// All combinations of factors with so many choices each.
fn product(choices: &[usize]) -> Vec<Vec<usize>> {
    choices.iter().fold(vec![Vec::new()], |all, count| {
        all.iter().flat_map(|head| (0..*count).map(move |choice| [head.as_slice(), &[choice]].concat())).collect()
    })
}

/// Combinations in which any choices of any `strength` factors meet at least once. Greedy, the same every time; the first
/// is the first choice of every factor.
pub fn covering(choices: &[usize], strength: usize) -> Vec<Vec<usize>> {
    let all: Vec<(Vec<usize>, Vec<Meeting>)> =
        product(choices).into_iter().map(|c| (c.clone(), meetings(&c, strength))).collect();
    let mut missing: BTreeSet<&Meeting> = all.iter().flat_map(|(_, meetings)| meetings).collect();
    let mut out = Vec::new();
    while !missing.is_empty() {
        let gain = |meetings: &[Meeting]| meetings.iter().filter(|meeting| missing.contains(meeting)).count();
        // the first of the best
        let best = all.iter().rev().max_by_key(|(_, meetings)| gain(meetings)).expect("a combination");
        best.1.iter().for_each(|meeting| _ = missing.remove(meeting));
        out.push(best.0.clone());
    }
    out
}

#[test]
fn any_three_choices_meet() {
    let choices = [2, 3, 4, 2, 2, 2];
    let few = covering(&choices, 3);
    assert!(few.len() < 40 && few[0] == [0; 6], "{} of 192: {few:?}", few.len());
    let met: BTreeSet<Meeting> = few.iter().flat_map(|c| meetings(c, 3)).collect();
    let all: BTreeSet<Meeting> = product(&choices).iter().flat_map(|c| meetings(c, 3)).collect();
    assert_eq!(met, all);
}
