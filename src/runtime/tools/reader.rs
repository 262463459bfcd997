//! Reader of the literals of calls that aren't JSON, from their beginning.

/// Maximum nesting of values.
pub(super) const DEPTH: usize = 64;

/// Text that isn't parsed yet.
pub(super) struct Reader<'a> {
    pub(super) rest: &'a str,
}

impl Reader<'_> {
    /// Skips white space.
    pub(super) fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    /// Returns whether nothing but white space is left.
    pub(super) fn ends(&mut self) -> bool {
        self.skip();
        self.rest.is_empty()
    }

    /// Takes `token` after white space if it is next.
    pub(super) fn take(&mut self, token: &str) -> bool {
        self.skip();
        let after = self.rest.strip_prefix(token);
        self.rest = after.unwrap_or(self.rest);
        after.is_some()
    }
}
