//! One bucket's step against a copy of as many bytes, round by round.
//!
//! A sample is a row of launches between two events, all queued before the first one starts. Only times of the same
//! round are divided by each other, and step and copy alternate in running first. No sample is dropped.

use instep::Error;
use instep::bench::{GpuLauncher, Sample};
use instep::cuda::Cuda;

use super::report::{Report, StepRow};
use super::sweep::{self, Case};
use super::verify::Expected;
use crate::Failure;
use crate::bench::Arguments;
use crate::bench::cases::WORLD_SIZE;
use crate::bench::statistics::Spread;
use crate::console::print_line;

/// A sample moves about as many bytes, unless that takes more launches than are queued at a time.
const SAMPLE_BYTES: u64 = 2 << 30;
const MOST_LAUNCHES: u64 = 64;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;

pub(super) fn run(options: &Arguments, cuda: &Cuda, report: &mut Report) -> Result<(), Failure> {
    print_line(&format!(
        "step of one bucket (divide by {WORLD_SIZE} included), one launch (LAMB: two), against a device-to-device copy that \
         moves as many bytes; median (min-max)"
    ))?;
    print_line(
        "optimizer  elements  segm. cache    blocks  B/elem  step us                     GB/s  copy us                     \
         % of copy",
    )?;
    let mut expected = None;
    for case in sweep::cases(options, cuda)? {
        if expected.as_ref().is_none_or(|(rule, _)| *rule != case.rule) {
            expected = Some((case.rule, Expected::new(case.rule)?));
        }
        let mut launcher = match case.launcher(cuda) {
            Err(error) if matches!(error.cause(), Error::Device { code: OUT_OF_MEMORY, .. }) => {
                print_line(&format!(
                    "{:<10}{:>9}  SKIPPED: the memory does not suffice",
                    case.optimizer, case.elements
                ))?;
                report.skipped.push(case);
                continue;
            }
            made => made?,
        };
        if let Some((_, expected)) = &expected {
            expected.verify(&case, &mut launcher)?;
        }
        let row = measure(options, case, &mut launcher)?;
        print_line(&line(&row))?;
        report.step.push(row);
    }
    if report.step.iter().any(|row| row.starved_samples > 0) {
        print_line(
            "*: in some samples the GPU began before all was queued, and may have waited for the host",
        )?;
    }
    Ok(())
}

fn measure(options: &Arguments, case: Case, launcher: &mut GpuLauncher) -> Result<StepRow, Failure> {
    let bytes = launcher.step_bytes(0);
    let buckets = launcher.plan().buckets().len() as u32;
    let most = if options.quick { MOST_LAUNCHES / 8 } else { MOST_LAUNCHES };
    let launches = (SAMPLE_BYTES / bytes).clamp(1, most) as usize;
    let mut next = 0;
    let mut take = || -> Vec<u32> {
        let taken = (0..launches as u32).map(|k| (next + k) % buckets).collect();
        next = (next + launches as u32) % buckets;
        taken
    };
    let us = |sample: &Sample| sample.device_ns * 1e-3 / launches as f64;
    let (mut steps, mut copies, mut starved_samples) = (Vec::new(), Vec::new(), 0);
    for round in 0..=options.rounds(21) {
        let (step, copy) = if round % 2 == 0 {
            let step = launcher.time_steps(&take())?;
            (step, launcher.time_copies(&take())?)
        } else {
            let copy = launcher.time_copies(&take())?;
            (launcher.time_steps(&take())?, copy)
        };
        // The first round warms up clocks and loads code.
        if round > 0 {
            steps.push(us(&step));
            copies.push(us(&copy));
            starved_samples += [step, copy].iter().filter(|sample| sample.starved).count();
        }
    }
    let percent_of_copy = Spread::of(steps.iter().zip(&copies).map(|(step, copy)| 100.0 * copy / step));
    let (step_us, copy_us) = (Spread::of(steps), Spread::of(copies));
    Ok(StepRow {
        buckets: buckets as usize,
        steps_per_sample: launches,
        bytes_per_element: bytes as f64 / case.elements as f64,
        step_us,
        copy_us,
        step_gb_per_s: bytes as f64 * 1e-3 / step_us.median,
        copy_gb_per_s: bytes as f64 * 1e-3 / copy_us.median,
        percent_of_copy,
        starved_samples,
        case,
    })
}

fn line(row: &StepRow) -> String {
    let StepRow { case, bytes_per_element, step_us, step_gb_per_s, copy_us, percent_of_copy, .. } = row;
    let blocks = case.max_blocks.map_or("all".to_owned(), |blocks| blocks.to_string());
    format!(
        "{:<10}{:>9}  {:>5} {:<8} {blocks:>6}  {bytes_per_element:>6}  {:<26}{step_gb_per_s:>6.0}  {:<28}{}{}",
        case.optimizer,
        case.elements,
        case.segments,
        format!("{:?}", case.cache).to_lowercase(),
        step_us.show(2),
        copy_us.show(2),
        percent_of_copy.show(1),
        if row.starved_samples > 0 { " *" } else { "" },
    )
}
