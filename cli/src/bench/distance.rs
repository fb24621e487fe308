//! Measures the time of a step's memory traffic with arrays that are 256 MiB apart. In one case all arrays start at the
//! same offset in a page. In the other case their starts are staggered, as in a stepper.
//!
//! Both cases run one after the other in each round. In the first case, the starts of the arrays differ only in high
//! address bits. If the CPU also uses these high bits to distinguish cache lines, both cases take equally long.

use std::time::Instant;

use instep::bench::Distant;

use super::Arguments;
use super::record::Record;
use super::statistics::Spread;
use super::table::announce;
use crate::Failure;
use crate::console::print_line;

const SWEEPS: usize = 64;

pub(super) fn run(options: &Arguments, record: &mut Record) -> Result<(), Failure> {
    let isas = options.isas()?;
    let what = format!(
        "the traffic of AdamW over four arrays of {} elements, 256 MiB apart, ns/element, median (min-max)",
        Distant::ELEMENTS
    );
    announce("distance", isas.len(), &what)?;
    for isa in isas {
        let mut alike = Distant::new(isa, false)?;
        let mut staggered = Distant::new(isa, true)?;
        let samples: Vec<[f64; 2]> = (0..=options.rounds(15))
            .map(|_| [&mut alike, &mut staggered].map(ns_per_element))
            .skip(1) // warms up caches and clocks
            .collect();
        let spread = |pick: &dyn Fn(&[f64; 2]) -> f64| Spread::of(samples.iter().map(pick));
        let (first, second) = (spread(&|both| both[0]), spread(&|both| both[1]));
        let ratio = spread(&|both| both[0] / both[1]);
        print_line(&format!(
            "{:<10}starts alike {:<22}staggered {:<22}alike / staggered {}",
            isa.name(),
            first.show(3),
            second.show(3),
            ratio.show(2)
        ))?;
        record.add("distance", "starts alike", isa.name(), 1, "ns_per_element", first);
        record.add("distance", "staggered", isa.name(), 1, "ns_per_element", second);
        record.add("distance", "alike over staggered", isa.name(), 1, "ratio", ratio);
    }
    Ok(())
}

fn ns_per_element(arrays: &mut Distant) -> f64 {
    let start = Instant::now();
    (0..SWEEPS).for_each(|_| arrays.stream());
    start.elapsed().as_secs_f64() * 1e9 / (SWEEPS * Distant::ELEMENTS) as f64
}
