//! The bytes that one kernel touches, as bits of pages: its reads of values of others, and its writes.
//!
//! A read of a byte that the kernel itself has written before does not count. It depends on nothing.

use std::collections::BTreeMap;
use std::ops::Range;

const PAGE: u64 = 4096;
const WORDS: usize = (PAGE / 64) as usize;

struct Page {
    read: [u64; WORDS],
    written: [u64; WORDS],
}

/// The accesses so far.
#[derive(Default)]
pub(crate) struct Accesses {
    pages: BTreeMap<u64, Box<Page>>,
}

impl Accesses {
    pub(crate) fn read(&mut self, address: u64, bytes: u64) {
        self.mark(address, bytes, |page, word, bits| page.read[word] |= bits & !page.written[word]);
    }

    pub(crate) fn write(&mut self, address: u64, bytes: u64) {
        self.mark(address, bytes, |page, word, bits| page.written[word] |= bits);
    }

    fn mark(&mut self, address: u64, bytes: u64, set: impl Fn(&mut Page, usize, u64)) {
        let mut at = address;
        while at < address + bytes {
            // Up to 64 bytes that share a word of bits.
            let end = (address + bytes).min(at / 64 * 64 + 64);
            let bits = (u64::MAX >> (64 - (end - at))) << (at % 64);
            let page = self
                .pages
                .entry(at / PAGE)
                .or_insert_with(|| Box::new(Page { read: [0; WORDS], written: [0; WORDS] }));
            set(page, (at % PAGE / 64) as usize, bits);
            at = end;
        }
    }

    /// Returns the ranges of values of others that were read, in order.
    pub(crate) fn reads(&self) -> Vec<Range<u64>> {
        self.ranges(|page| &page.read)
    }

    /// Returns the ranges that were written, in order.
    pub(crate) fn writes(&self) -> Vec<Range<u64>> {
        self.ranges(|page| &page.written)
    }

    fn ranges(&self, bits: impl Fn(&Page) -> &[u64; WORDS]) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        for (number, page) in &self.pages {
            for (word, bits) in bits(page).iter().enumerate() {
                let start = number * PAGE + 64 * word as u64;
                let mut left = *bits;
                while left != 0 {
                    let first = u64::from(left.trailing_zeros());
                    let count = u64::from((left >> first).trailing_ones());
                    let range = start + first..start + first + count;
                    match found.last_mut() {
                        Some(last) if last.end == range.start => last.end = range.end,
                        _ => found.push(range),
                    }
                    left &= !((u64::MAX >> (64 - count)) << first);
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_become_ranges_across_words_and_pages() {
        let mut accesses = Accesses::default();
        accesses.write(4000, 200);
        accesses.read(4100, 8);
        accesses.read(60, 10);
        accesses.read(70, 1);
        assert_eq!(accesses.reads(), vec![60..71; 1]);
        assert_eq!(accesses.writes(), vec![4000..4200; 1]);
    }
}
