//! Names and texts of untrusted files in messages: lists and quotations have a limit.

use std::borrow::Cow;
use std::fmt::Display;

/// Maximum number of items that a message lists.
const MAX_ITEMS: usize = 10;
/// Maximum length of a quotation in characters.
const MAX_CHARS: usize = 120;
/// Maximum length of a library's message in characters.
const MAX_SENTENCE: usize = 400;
/// Maximum length of a message's line in characters.
const MAX_LINE: usize = 2000;
/// Maximum number of lines of a message.
const MAX_LINES: usize = 40;

/// Joins the first ten items with commas, and says how many more there are; `none` if there are none.
///
/// ```
/// use anec_base::listing::list;
///
/// assert_eq!(list(1..=3), "1, 2, 3");
/// assert_eq!(list(1..=65_535), "1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 65525 more");
/// assert_eq!(list([""; 0]), "none");
/// ```
pub fn list(items: impl IntoIterator<Item = impl Display>) -> String {
    let mut items = items.into_iter();
    let shown: Vec<String> = items.by_ref().take(MAX_ITEMS).map(|item| quote(&item.to_string()).into_owned()).collect();
    match (shown.is_empty(), items.count()) {
        (true, _) => "none".to_owned(),
        (false, 0) => shown.join(", "),
        (false, more) => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Returns a text as a message may quote it: its first line, up to a limit.
///
/// ```
/// use anec_base::listing::quote;
///
/// assert_eq!(quote("a short text"), "a short text");
/// assert_eq!(quote("two\nlines"), "two…");
/// assert_eq!(quote(&"x".repeat(1000)).chars().count(), 120);
/// ```
pub fn quote(text: &str) -> Cow<'_, str> {
    let line = text.split(['\n', '\r']).next().unwrap_or_default();
    match line.char_indices().nth(MAX_CHARS) {
        None if line.len() == text.len() => line.into(),
        None => format!("{line}…").into(),
        Some(_) => line.chars().take(MAX_CHARS - 1).chain(['…']).collect::<String>().into(),
    }
}

/// Returns a library's message, which may quote what it read, up to a limit.
///
/// ```
/// use anec_base::listing::sentence;
///
/// assert_eq!(sentence("unsupported type"), "unsupported type");
/// assert_eq!(sentence(&"x".repeat(5000)).chars().count(), 401);
/// ```
pub fn sentence(text: &str) -> String {
    match text.char_indices().nth(MAX_SENTENCE) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// Returns a message with lines of limited length and number: names of untrusted files have neither.
///
/// ```
/// use anec_base::listing::limited;
///
/// assert_eq!(limited("a message\nof two lines"), "a message\nof two lines");
/// assert_eq!(limited(&"x".repeat(1 << 20)).chars().count(), 2001);
/// assert_eq!(limited(&"x\n".repeat(1 << 20)).lines().count(), 41);
/// ```
pub fn limited(message: &str) -> Cow<'_, str> {
    // no line is longer than the text
    if message.len() <= MAX_LINE && message.matches('\n').count() < MAX_LINES {
        return message.into();
    }
    let mut lines = message.lines();
    let cut = |line: &str| match line.char_indices().nth(MAX_LINE) {
        None => line.to_owned(),
        Some((end, _)) => format!("{}…", &line[..end]),
    };
    let mut shown: Vec<String> = lines.by_ref().take(MAX_LINES).map(cut).collect();
    if lines.next().is_some() {
        shown.push("…".to_owned());
    }
    shown.join("\n").into()
}
