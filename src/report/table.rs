//! Tables for the terminal.

use comfy_table::{Cell, CellAlignment, Table, presets};

/// Formats a table with a line under the head. Columns whose head begins with `>` are right-aligned.
pub fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let right: Vec<bool> = head.iter().map(|h| h.starts_with('>')).collect();
    let align =
        |cell: Cell, right: bool| cell.set_alignment(if right { CellAlignment::Right } else { CellAlignment::Left });
    table.set_header(head.iter().zip(&right).map(|(h, r)| align(Cell::new(h.trim_start_matches('>')), *r)));
    for row in rows {
        table.add_row(row.into_iter().zip(&right).map(|(text, r)| align(Cell::new(text), *r)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    // no trailing spaces: tables are compared, copied and searched
    table.to_string().lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_space() {
        let rows = [vec!["a".to_owned(), "10".to_owned()], vec!["long".to_owned(), "5".to_owned()]];
        assert_eq!(table(&["name", ">size"], rows), "name  size\na       10\nlong     5\n");
    }
}
