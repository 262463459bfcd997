//! Which of a number of things are enough for a failure.

use anec_base::Result;

/// The smallest choice of `0..count` that fails and that was found: leaving out any one of it, it passes. All of them
/// must fail, and none of them pass.
///
/// First the shortest beginning that fails, then the shortest end of that, each by halves: the first is a few tries
/// away even among thousands. What is left between is thinned out by ddmin.
///
/// # Errors
/// Those of `fails`.
pub fn smallest(count: usize, fails: &mut dyn FnMut(&[usize]) -> Result<bool>) -> Result<Vec<usize>> {
    let all: Vec<usize> = (0..count).collect();
    // `..end` fails, `..passes` doesn't
    let (mut passes, mut end) = (0, count);
    while end - passes > 1 {
        let middle = passes + (end - passes) / 2;
        if fails(&all[..middle])? {
            end = middle;
        } else {
            passes = middle;
        }
    }
    // `start..end` fails, `passes..end` doesn't
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

/// Leaves out parts of `choice`, smaller and smaller ones, for as long as the rest fails.
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
        // single ones are tried again until none can be left out
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
    fn one_of_thousands_is_found_in_few_tries() {
        for culprit in [0, 1, 999, 1000, 1999] {
            let (choice, tries) = found(2000, |choice| choice.contains(&culprit));
            assert_eq!(choice, [culprit]);
            assert!(tries <= 24, "{tries}");
        }
    }

    #[test]
    fn all_that_it_takes_is_kept() {
        let (choice, _) = found(500, |choice| [17, 44, 301].iter().all(|needed| choice.contains(needed)));
        assert_eq!(choice, [17, 44, 301]);
        let (choice, _) = found(7, |choice| choice.len() > 4);
        assert_eq!(choice.len(), 5);
        assert_eq!(found(1, |choice| !choice.is_empty()).0, [0]);
    }

    #[test]
    fn of_several_culprits_one_is_enough() {
        let (choice, _) = found(300, |choice| choice.contains(&40) || choice.contains(&200));
        assert_eq!(choice, [40]);
    }
}
