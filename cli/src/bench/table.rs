//! The tables that benches print: at most 120 columns, so that a terminal does not break a row.
//!
//! One row may take minutes, so a table begins with its number of rows. Figures that do not fit into the columns are
//! only in the files of `--json` and `--csv`.

use crate::Failure;
use crate::console::print_line;

/// The largest number of columns in a line.
const COLUMNS: usize = 120;

/// Begins the table of a bench with its name, its number of rows, and the meaning of the rows.
pub(super) fn announce(bench: &str, rows: usize, what: &str) -> Result<(), Failure> {
    let rows = if rows == 1 { "1 row".to_owned() } else { format!("{rows} rows") };
    print_line(&format!("\n{}", wrapped(&format!("{bench}, {rows}: {what}"))))
}

/// Breaks a text into lines, between words. All lines after the first are indented, so that they do not look like rows.
fn wrapped(text: &str) -> String {
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split(' ') {
        if !line.trim().is_empty() && line.chars().count() + word.chars().count() > COLUMNS {
            lines.push(line.trim_end().to_owned());
            line = "  ".to_owned();
        }
        line += word;
        line.push(' ');
    }
    lines.push(line.trim_end().to_owned());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_broken_between_words_and_a_short_one_is_not() {
        assert_eq!(wrapped("one two"), "one two");
        let text = "word ".repeat(60);
        let lines = wrapped(text.trim_end());
        assert_eq!(lines.split_whitespace().count(), 60);
        assert_eq!(lines.lines().count(), 3);
        assert!(lines.lines().all(|line| line.len() <= COLUMNS && line.len() > 4), "{lines}");
        assert!(lines.lines().skip(1).all(|line| line.starts_with("  word")), "{lines}");
    }
}
