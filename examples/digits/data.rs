//! The digits: 1,797 images of 8x8 pixels with their labels, unpacked from the file that is compiled in.
//!
//! Fixed seeds decide which images are held out and how the others are shuffled. Every rank shuffles for itself and
//! gets the same order as all other ranks, independent of clocks, threads and modes.

use std::io::{self, Read};

use flate2::read::GzDecoder;

/// Pixels of an image.
pub(crate) const PIXELS: usize = 64;
/// The number of digits that an image can show.
pub(crate) const CLASSES: usize = 10;
/// Images per step, over all ranks. The number is fixed, so that one learning rate suits any number of ranks.
pub(crate) const GLOBAL_BATCH: usize = 64;

const FILE: &[u8] = include_bytes!("digits.csv.gz");
const HELD_OUT: usize = 360;
const SPLIT_SEED: u64 = 1998;
const EPOCH_SEED: u64 = 2025;

/// Images with their labels: the whole file, a part of it, or a batch.
#[derive(Default)]
pub(crate) struct Samples {
    /// `PIXELS` values per image, from 0 to 1.
    pub(crate) images: Vec<f32>,
    /// One label per image, below `CLASSES`.
    pub(crate) labels: Vec<usize>,
}

impl Samples {
    /// Unpacks the file.
    pub(crate) fn load() -> io::Result<Samples> {
        let mut text = String::new();
        GzDecoder::new(FILE).read_to_string(&mut text)?;
        let mut samples = Samples::default();
        for line in text.lines() {
            let cells: Vec<u8> =
                line.split(',').map(str::parse).collect::<Result<_, _>>().map_err(io::Error::other)?;
            match cells.split_last() {
                Some((label, pixels)) if pixels.len() == PIXELS && usize::from(*label) < CLASSES => {
                    samples.images.extend(pixels.iter().map(|pixel| f32::from(*pixel) / 16.0));
                    samples.labels.push(usize::from(*label));
                }
                _ => return Err(io::Error::other(format!("no image with its label: {line}"))),
            }
        }
        Ok(samples)
    }

    /// Splits the images into a training set and a held-out set.
    pub(crate) fn split(&self) -> (Samples, Samples) {
        let order = shuffle(self.labels.len(), SPLIT_SEED);
        let (held_out, training) = order.split_at(HELD_OUT);
        (self.select(training), self.select(held_out))
    }

    /// Draws one rank's part of every global batch of an epoch. An incomplete last batch is left out.
    pub(crate) fn draw_batches(
        &self,
        epoch: u32,
        rank: u32,
        ranks: u32,
    ) -> impl Iterator<Item = Samples> + '_ {
        let order = shuffle(self.labels.len(), EPOCH_SEED + u64::from(epoch));
        let (batches, part) = (self.labels.len() / GLOBAL_BATCH, GLOBAL_BATCH / ranks as usize);
        (0..batches).map(move |batch| {
            let first = batch * GLOBAL_BATCH + rank as usize * part;
            self.select(&order[first..first + part])
        })
    }

    fn select(&self, rows: &[usize]) -> Samples {
        let image = |row: &usize| &self.images[row * PIXELS..(row + 1) * PIXELS];
        Samples {
            images: rows.iter().flat_map(image).copied().collect(),
            labels: rows.iter().map(|row| self.labels[*row]).collect(),
        }
    }
}

/// A tiny generator with the same numbers on every machine: splitmix64 (Steele, Lea & Flood, OOPSLA 2014).
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// Starts the sequence of random numbers for a seed.
    pub(crate) fn new(seed: u64) -> Random {
        Random { state: seed }
    }

    /// Draws a uniform random number between `-limit` and `limit`.
    pub(crate) fn draw_within(&mut self, limit: f32) -> f32 {
        // 24 bits are what an f32 holds exactly.
        let unit = (self.draw() >> 40) as f32 / (1u64 << 24) as f32;
        (2.0 * unit - 1.0) * limit
    }

    fn draw_below(&mut self, bound: usize) -> usize {
        // The high half of the product; its bias is below 2^-50 for the bounds used here.
        ((u128::from(self.draw()) * bound as u128) >> 64) as usize
    }

    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// Puts `0..count` in random order (Fisher & Yates).
fn shuffle(count: usize, seed: u64) -> Vec<usize> {
    let mut random = Random::new(seed);
    let mut order: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        order.swap(last, random.draw_below(last + 1));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_every_image_with_a_label_and_pixels_in_range() -> io::Result<()> {
        let samples = Samples::load()?;
        assert_eq!((samples.labels.len(), samples.images.len()), (1797, 1797 * PIXELS));
        assert!((0..CLASSES).all(|digit| samples.labels.contains(&digit)));
        assert!(samples.images.iter().all(|pixel| (0.0..=1.0).contains(pixel)));
        Ok(())
    }

    #[test]
    fn ranks_share_each_batch_without_overlap_and_nothing_held_out_is_trained_on() {
        // Each label is its own row number, which shows where each row went.
        let labels: Vec<usize> = (0..1797).collect();
        let samples = Samples { images: vec![0.0; labels.len() * PIXELS], labels };
        let (training, held_out) = samples.split();
        let mut seen = held_out.labels;
        for rank in 0..4 {
            seen.extend(training.draw_batches(1, rank, 4).flat_map(|batch| batch.labels));
        }
        assert_eq!(seen.len(), HELD_OUT + 1437 / GLOBAL_BATCH * GLOBAL_BATCH);
        seen.sort_unstable();
        assert!(seen.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
