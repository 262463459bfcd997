//! Minimal failing subset of items.

use anec_base::Result;

/// Returns a minimal subset of `0..count` that fails: it passes without any one of its items. The whole set must fail
/// and the empty set pass.
///
/// Bisects the shortest failing prefix, then its shortest failing suffix, which takes few tries even among thousands;
/// ddmin thins out the rest.
///
/// # Errors
/// Any error of `fails`.
pub fn smallest(count: usize, fails: &mut dyn FnMut(&[usize]) -> Result<bool>) -> Result<Vec<usize>> {
    let all: Vec<usize> = (0..count).collect();
    // `..end` fails, `..passes` passes
    let (mut passes, mut end) = (0, count);
    while end - passes > 1 {
        let middle = passes + (end - passes) / 2;
        if fails(&all[..middle])? {
            end = middle;
        } else {
            passes = middle;
        }
    }
    // `start..end` fails, `passes..end` passes
    let (mut start, mut passes) = (0, end);
    while passes - start > 1 {
        let middle = start + (passes - start) / 2;
        if fails(&all[middle..end])? {
            start = middle;
        } else {
            passes = middle;
        }
    }
    thin_out(all[start..end].to_vec(), fails)
}

/// Leaves out smaller and smaller parts of `choice` while the rest fails.
fn thin_out(mut choice: Vec<usize>, fails: &mut dyn FnMut(&[usize]) -> Result<bool>) -> Result<Vec<usize>> {
    let mut size = choice.len().div_ceil(2);
    while choice.len() > 1 {
        let mut smaller = false;
        let mut at = 0;
        while at < choice.len() && choice.len() > 1 {
            let rest: Vec<usize> = [&choice[..at], &choice[(at + size).min(choice.len())..]].concat();
            if !rest.is_empty() && fails(&rest)? {
                choice = rest;
                smaller = true;
            } else {
                at += size;
            }
        }
        if size == 1 && !smaller {
            break;
        }
        // repeat with single items until none can be left out
        size = if size == 1 { 1 } else { size.div_ceil(2).min(choice.len().div_ceil(2)) };
    }
    Ok(choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(count: usize, fails: impl Fn(&[usize]) -> bool) -> (Vec<usize>, usize) {
        let mut tries = 0;
        let found = smallest(count, &mut |choice| {
            tries += 1;
            Ok(fails(choice))
        });
        (found.unwrap(), tries)
    }

    #[test]
    fn one_cause_among_thousands_takes_few_tries() {
        for culprit in [0, 1, 999, 1000, 1999] {
            let (choice, tries) = found(2000, |choice| choice.contains(&culprit));
            assert_eq!(choice, [culprit]);
            assert!(tries <= 24, "{tries}");
        }
    }

    #[test]
    fn all_required_items_are_kept() {
        let (choice, _) = found(500, |choice| [17, 44, 301].iter().all(|needed| choice.contains(needed)));
        assert_eq!(choice, [17, 44, 301]);
        let (choice, _) = found(7, |choice| choice.len() > 4);
        assert_eq!(choice.len(), 5);
        assert_eq!(found(1, |choice| !choice.is_empty()).0, [0]);
    }

    #[test]
    fn one_of_several_causes_suffices() {
        let (choice, _) = found(300, |choice| choice.contains(&40) || choice.contains(&200));
        assert_eq!(choice, [40]);
    }
}
