//! Measures the time of the kernels Begin and Decide. A pass launches Begin once. A pass with one decision about
//! clipping or skipping launches Decide once. These numbers do not depend on the number of elements.
//!
//! Each launch has one thread block, which loops over groups and segments. The time of a launch depends on the number
//! of parameters. This time is not compared with a ceiling. A sample of Begin has few launches, because the host may be
//! at most eight passes ahead of the GPU.

use std::time::Duration;

use instep::bench::{GpuCase, GpuLauncher, MOST_BEGINS, Work};
use instep::cuda::Cuda;
use instep::layout::Storage;
use instep::{AdamW, Layout};

use super::files::save;
use super::report::{ControlRow, Report};
use super::step::WARM_UP;
use crate::Failure;
use crate::bench::Arguments;
use crate::bench::cases::WORLD_SIZE;
use crate::bench::statistics::Spread;
use crate::bench::table::announce;
use crate::console::print_line;

const PARAMS: [usize; 3] = [1, 50, 1000];
const ELEMENTS: usize = 2048;
const DECIDES: usize = 64;

pub(super) fn run(options: &Arguments, cuda: &Cuda, report: &mut Report) -> Result<(), Failure> {
    let what = "one launch of a pass's Begin and Decide, us, AdamW with clipping; median (min-max)";
    announce("control", 2 * PARAMS.len(), what)?;
    for params in PARAMS {
        let names = (0..params).map(|k| format!("p{k}"));
        let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, ELEMENTS)).build()?;
        let case =
            GpuCase { cap_bytes: u64::MAX, world_size: WORLD_SIZE, storage: Storage::default(), clips: true };
        let mut launcher = GpuLauncher::new(&layout, &AdamW::default(), case, cuda)?;
        for (launch, work, launches) in
            [("begin", Work::Begin, MOST_BEGINS), ("decide", Work::Decide, DECIDES)]
        {
            let warm_up = if options.quick { Duration::ZERO } else { WARM_UP };
            let warm_up_ns = launcher.warm_up(work, &[0], warm_up)?;
            let (mut times, mut starved_samples) = (Vec::new(), 0);
            for round in 0..=options.rounds(21) {
                let sample = launcher.time(work, &vec![0; launches])?;
                // The first round loads code.
                if round > 0 {
                    times.push(sample.device_ns * 1e-3 / launches as f64);
                    starved_samples += usize::from(sample.starved);
                }
            }
            let launch_us = Spread::of(times);
            let mark = if starved_samples > 0 { " *" } else { "" };
            print_line(&format!("{launch:<8}{params:>5} parameters  {}{mark}", launch_us.show(2)))?;
            report.control.push(ControlRow {
                launch,
                params,
                launches_per_sample: launches,
                launch_us,
                starved_samples,
                warm_up_ms: warm_up_ns * 1e-6,
            });
            save(options, report)?;
        }
    }
    Ok(())
}
