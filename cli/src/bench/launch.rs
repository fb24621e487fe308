//! Measures the time that a `BucketStep` spends outside its kernel: checking tensors, computing addresses, and deriving
//! the scalars of an update.
//!
//! Every round measures a `BucketStep`, and then the kernel alone on the same memory. Both run on one thread. In the
//! last entry of `CASES`, each parameter's tensors are separate, so the kernel is called once per parameter.

use std::time::Instant;

use instep::bench::Alone;

use super::Arguments;
use super::record::Record;
use super::statistics::Spread;
use super::table::announce;
use crate::Failure;
use crate::console::print_line;

/// The number of parameters in a bucket, the number of elements of each parameter, and whether each parameter's tensors
/// have separate memory.
const CASES: [(usize, usize, bool); 4] =
    [(1, 256, false), (1, 2048, false), (1, 65_536, false), (16, 256, true)];
const SAMPLE_ELEMENTS: usize = 1 << 20;

pub(super) fn run(options: &Arguments, record: &mut Record) -> Result<(), Failure> {
    let isas = options.isas()?;
    let what = "one BucketStep of AdamW and its kernel alone, ns, one thread, median (min-max)";
    announce("launch", isas.len() * CASES.len(), what)?;
    for isa in isas {
        for (params, elements, is_apart) in CASES {
            let mut bucket = Alone::new(params, elements, is_apart, isa)?;
            let sweeps = SAMPLE_ELEMENTS / (params * elements + 512);
            let mut samples = Vec::new();
            for round in 0..=options.rounds(15) {
                let start = Instant::now();
                (0..sweeps).try_for_each(|_| bucket.step())?;
                let whole = start.elapsed().as_nanos() as f64 / sweeps as f64;
                let start = Instant::now();
                (0..sweeps).for_each(|_| bucket.run_kernel());
                let alone = start.elapsed().as_nanos() as f64 / sweeps as f64;
                // The first round warms up caches and clocks.
                samples.extend((round > 0).then_some([whole, alone]));
            }
            let spread = |pick: &dyn Fn(&[f64; 2]) -> f64| Spread::of(samples.iter().map(pick));
            let (whole, alone) = (spread(&|both| both[0]), spread(&|both| both[1]));
            let added = spread(&|both| both[0] - both[1]);
            let apart = if is_apart { ", apart" } else { "" };
            let case = format!("{params} x {elements}{apart}");
            print_line(&format!(
                "{:<10}{case:<20}step {:<22}kernel {:<22}added {}",
                isa.name(),
                whole.show(0),
                alone.show(0),
                added.show(0)
            ))?;
            for (quantity, spread) in [("step_ns", whole), ("kernel_ns", alone), ("added_ns", added)] {
                record.add("launch", &case, isa.name(), 1, quantity, spread);
            }
        }
    }
    Ok(())
}
