//! Escaping of text in markup.

/// Escapes text for HTML and XML, in elements and attributes. Control characters that XML can't represent become `?`.
pub fn markup(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && !matches!(c, '\n' | '\r' | '\t') => out.push('?'),
            c => out.push(c),
        }
    }
    out
}

/// Escapes text for a cell of a Markdown table.
pub fn cell(text: &str) -> String {
    text.replace('\\', "\\\\").replace('|', "\\|").replace('<', "&lt;").replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_characters_are_escaped() {
        assert_eq!(markup("a < b & \"c\" 'd'\u{0}"), "a &lt; b &amp; &quot;c&quot; &#39;d&#39;?");
        assert_eq!(cell("a|b\nc <br>"), "a\\|b c &lt;br>");
    }
}
