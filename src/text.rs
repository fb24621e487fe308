//! Prepares text from a file, another rank or another library for an error message.
//!
//! An error message reaches terminals and logs, so it repeats foreign text only escaped and shortened. No control
//! character can steer a terminal, and no 100 MB name can fill a log. This module depends on no other.

use std::fmt::{self, Display, Write};

/// The most characters of a foreign text that a message repeats.
const LONGEST: usize = 120;
/// The most characters of an error of another rank or of a parser that a message repeats.
const LONGEST_SENTENCE: usize = 500;

/// Returns a foreign name between backticks, escaped and shortened.
pub fn quoted(name: &str) -> String {
    format!("`{}`", escaped(name))
}

/// Returns a foreign text in one line: unprintable characters are escaped, and only the first 120 characters are kept.
fn escaped(text: impl Display) -> String {
    line(text, LONGEST, "\"'")
}

/// Returns the error of another rank or of a parser in one line, shortened to 500 characters. Quotation marks and
/// backslashes stay as they are, so names that are already quoted do not change.
pub(crate) fn sentence(text: impl Display) -> String {
    line(text, LONGEST_SENTENCE, "\"'`\\")
}

fn line(text: impl Display, longest: usize, kept: &'static str) -> String {
    let mut line = Line { text: String::new(), left: longest, kept, lost_bytes: 0 };
    // `Line` never fails, so an error comes from the text itself. The part written before it is still useful.
    let _ = write!(line, "{text}");
    if line.lost_bytes > 0 {
        line.text += &format!("... ({} more bytes)", line.lost_bytes);
    }
    line.text
}

/// Escapes text up to a limit and counts the dropped bytes.
struct Line {
    text: String,
    left: usize,
    /// Characters that are not escaped.
    kept: &'static str,
    lost_bytes: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for (at, char) in text.char_indices() {
            if self.left == 0 {
                self.lost_bytes += text.len() - at;
                break;
            }
            self.left -= 1;
            match char {
                _ if self.kept.contains(char) => self.text.push(char),
                '`' => self.text.push_str("\\`"),
                _ => self.text.extend(char.escape_debug()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_names_are_repeated_as_they_are() {
        assert_eq!(quoted("layers.0.weight"), "`layers.0.weight`");
        assert_eq!(quoted("l'état \"ß\" 重み"), "`l'état \"ß\" 重み`");
        assert_eq!(quoted(""), "``");
    }

    #[test]
    fn nothing_in_a_name_steers_a_terminal_or_ends_the_quotation() {
        assert_eq!(quoted("\x1b[31mred\u{9b}2J"), "`\\u{1b}[31mred\\u{9b}2J`");
        assert_eq!(quoted("a\nb\r\t\0"), "`a\\nb\\r\\t\\0`");
        assert_eq!(quoted("a` b \\"), "`a\\` b \\\\`");
        // The characters are right-to-left override and zero-width space.
        assert_eq!(quoted("\u{202e}\u{200b}"), "`\\u{202e}\\u{200b}`");
        for char in '\0'..=char::MAX {
            let escaped = escaped(char);
            assert!(!escaped.contains(char::is_control), "{char:?} is repeated");
        }
    }

    #[test]
    fn another_ranks_error_is_safe_to_print_and_does_not_change_when_it_is_passed_on() {
        let once = sentence("`a\\b` \"c\" it's\n\x1b[31m");
        assert_eq!(once, "`a\\b` \"c\" it's\\n\\u{1b}[31m");
        assert_eq!(sentence(&once), once);
        assert_eq!(sentence("x".repeat(1_000_000)).len(), 500 + "... (999500 more bytes)".len());
    }

    #[test]
    fn a_long_text_is_cut_between_characters_and_says_how_much_is_missing() {
        assert_eq!(escaped("x".repeat(120)), "x".repeat(120));
        assert_eq!(escaped("ß".repeat(1_000_000)), format!("{}... (1999760 more bytes)", "ß".repeat(120)));
        assert_eq!(
            escaped(format_args!("{}{}", "x".repeat(119), "yz")),
            "x".repeat(119) + "y... (1 more bytes)"
        );
        assert!(escaped("\u{1}".repeat(1_000_000)).len() < 1000);
    }
}
