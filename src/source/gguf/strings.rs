//! List of strings in one allocation.

use std::fmt;

use serde::{Serialize, Serializer};

/// Strings in one allocation, because a vocabulary and its merges are hundreds of thousands.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Strings {
    text: String,
    ends: Vec<usize>,
}

impl Strings {
    /// Divides bytes at the given ends; `None` if a part isn't UTF-8.
    pub(super) fn divided(bytes: Vec<u8>, ends: Vec<usize>) -> Option<Self> {
        let text = String::from_utf8(bytes).ok()?;
        // UTF-8 text divided at character boundaries is UTF-8 in every part
        ends.iter().all(|end| text.is_char_boundary(*end)).then_some(Strings { text, ends })
    }

    /// Adds a string.
    pub fn push(&mut self, string: &str) {
        self.text.push_str(string);
        self.ends.push(self.text.len());
    }

    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the string at an index.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.text[start..end])
    }

    /// Returns all strings.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        let mut start = 0;
        self.ends.iter().map(move |end| &self.text[std::mem::replace(&mut start, *end)..*end])
    }
}

impl<S: AsRef<str>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Self {
        let mut all = Strings::default();
        strings.into_iter().for_each(|string| all.push(string.as_ref()));
        all
    }
}

impl fmt::Debug for Strings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl Serialize for Strings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_looked_at() {
        let divided = |ends: [usize; 2]| Strings::divided("üb".into(), ends.into());
        assert!(divided([2, 3]).unwrap().iter().eq(["ü", "b"]));
        // half a character
        assert!(divided([1, 3]).is_none());
        assert!(Strings::divided(vec![0xff], vec![1]).is_none());
    }

    #[test]
    fn strings_are_found_by_their_places() {
        let strings: Strings = ["a", "", "üb", ""].into_iter().collect();
        assert!(strings.iter().eq(["a", "", "üb", ""]));
        assert_eq!((strings.get(0), strings.get(2), strings.get(3)), (Some("a"), Some("üb"), Some("")));
        assert_eq!((strings.get(4), strings.len(), Strings::default().get(0)), (None, 4, None));
        assert_eq!(serde_json::to_string(&strings).unwrap(), r#"["a","","üb",""]"#);
    }
}
