//! Prepares text from a file, another rank or another library for an error message.
//!
//! Error messages appear in terminals and logs. Foreign text in a message is therefore escaped and shortened, so that
//! it cannot send control characters to a terminal or fill a log. This module depends on no other module.

use std::fmt::{self, Display, Write};

/// A message repeats at most this many characters of a foreign text.
const LONGEST: usize = 120;
/// A message repeats at most this many characters of an error from another rank or from a parser.
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
#[path = "../tests/unit/text.rs"]
mod tests;
