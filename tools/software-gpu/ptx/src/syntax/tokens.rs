//! Splits a PTX text into words, numbers, strings and signs, each with its line.
//!
//! Comments are dropped. A word keeps its dots, so `cvt.rn.f32.f64` is one token.

use crate::Error;
use crate::error::syntax;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    pub line: u32,
    pub text: &'a str,
}

/// Reads tokens one after the other.
pub(crate) struct Tokens<'a> {
    list: Vec<Token<'a>>,
    at: usize,
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

impl<'a> Tokens<'a> {
    pub(crate) fn split(text: &'a str) -> Result<Tokens<'a>, Error> {
        let bytes = text.as_bytes();
        let (mut at, mut line, mut list) = (0, 1, Vec::new());
        while at < bytes.len() {
            let start = at;
            match bytes[at] {
                b'\n' => (at, line) = (at + 1, line + 1),
                byte if byte.is_ascii_whitespace() || byte == 0 => at += 1,
                b'/' if bytes[at..].starts_with(b"//") => {
                    at = text[at..].find('\n').map_or(bytes.len(), |end| at + end);
                }
                b'/' if bytes[at..].starts_with(b"/*") => {
                    let end =
                        text[at..].find("*/").ok_or_else(|| syntax(line, "a comment without an end"))?;
                    line += text[at..at + end].matches('\n').count() as u32;
                    at += end + 2;
                }
                b'"' => {
                    let end = text[at + 1..].find(['"', '\n']).map(|end| at + 1 + end);
                    match end {
                        Some(end) if bytes[end] == b'"' => at = end + 1,
                        _ => return Err(syntax(line, "a string without an end")),
                    }
                    list.push(Token { line, text: &text[start..at] });
                }
                byte if is_word(byte) => {
                    while at < bytes.len() && (is_word(bytes[at]) || bytes[at..].starts_with(b"::")) {
                        at += if bytes[at] == b':' { 2 } else { 1 };
                    }
                    list.push(Token { line, text: &text[start..at] });
                }
                byte if byte.is_ascii() => {
                    at += 1;
                    list.push(Token { line, text: &text[start..at] });
                }
                _ => return Err(syntax(line, "a byte that is no ASCII")),
            }
        }
        Ok(Tokens { list, at: 0 })
    }

    pub(crate) fn peek(&self) -> Option<&'a str> {
        self.list.get(self.at).map(|token| token.text)
    }

    /// Returns the line of the next token, or of the last one.
    pub(crate) fn line(&self) -> u32 {
        self.list.get(self.at).or(self.list.last()).map_or(1, |token| token.line)
    }

    pub(crate) fn next(&mut self) -> Result<Token<'a>, Error> {
        let token = self.list.get(self.at).copied();
        self.at += 1;
        token.ok_or_else(|| syntax(self.line(), "the text ends too early"))
    }

    /// Takes the next token if it is this one.
    pub(crate) fn take(&mut self, text: &str) -> bool {
        let is_it = self.peek() == Some(text);
        self.at += usize::from(is_it);
        is_it
    }

    pub(crate) fn expect(&mut self, text: &str) -> Result<(), Error> {
        let token = self.next()?;
        if token.text == text {
            return Ok(());
        }
        Err(syntax(token.line, format!("`{}` where `{text}` belongs", token.text)))
    }

    pub(crate) fn word(&mut self) -> Result<&'a str, Error> {
        let token = self.next()?;
        if token.text.bytes().next().is_some_and(is_word) {
            return Ok(token.text);
        }
        Err(syntax(token.line, format!("`{}` where a name belongs", token.text)))
    }

    /// Reads an integer with or without a sign, as its two's complement.
    pub(crate) fn integer(&mut self) -> Result<u64, Error> {
        let negative = self.take("-");
        if !negative {
            self.take("+");
        }
        let line = self.line();
        let word = self.word()?;
        let value = integer(word).ok_or_else(|| syntax(line, format!("{word}: no integer")))?;
        Ok(if negative { value.wrapping_neg() } else { value })
    }

    /// Reads an integer that must fit into 32 bits.
    pub(crate) fn small(&mut self) -> Result<u32, Error> {
        let line = self.line();
        u32::try_from(self.integer()?).map_err(|_| syntax(line, "a number that is too large"))
    }
}

/// Returns the value of `12`, `0x1f` or either with `U` after it.
pub(crate) fn integer(word: &str) -> Option<u64> {
    let word = word.strip_suffix('U').unwrap_or(word);
    match word.strip_prefix("0x").or(word.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    }
}
