//! Measures the time of one bucket's step or norm and, in the same rounds, of copies that move as many bytes.
//!
//! A sample is a sequence of launches between two events. All launches are queued before the first one starts. If the
//! GPU starts earlier, the sample counts as starved. A percentage is the quotient of two times from the same round.
//! Every second round runs the work and its copies in reverse order. The first round loads code and does not count. No
//! other sample is dropped. Every row is saved before the next case begins. If a step has a wrong bit, its row is
//! marked, and the other cases still run.

use std::time::Duration;

use instep::Error;
use instep::bench::{GpuLauncher, Sample, Work};
use instep::cuda::Cuda;

use super::files::save;
use super::report::{Report, StepRow};
use super::sweep::{self, Case};
use super::verify::{Compared, Expected};
use crate::Failure;
use crate::bench::Arguments;
use crate::bench::cases::WORLD_SIZE;
use crate::bench::statistics::Spread;
use crate::bench::table::announce;
use crate::console::print_line;

/// A sample has enough launches to move about this number of bytes, but at most [`MOST_LAUNCHES`] launches.
const SAMPLE_BYTES: u64 = 2 << 30;
const MOST_LAUNCHES: u64 = 64;
/// Time for which the GPU runs a case before its first round. This warm-up is needed because the GPU's clock rate drops
/// while the CPU compares results.
pub(super) const WARM_UP: Duration = Duration::from_millis(300);
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;

pub(super) fn run(
    options: &Arguments,
    cuda: &Cuda,
    kernels: Option<&[u8]>,
    report: &mut Report,
) -> Result<(), Failure> {
    let cases = sweep::steps(options, cuda)?;
    let zeros = if options.gpu.zeros { ", gradients and states of zeros" } else { "" };
    let what = format!(
        "one bucket (divide by {WORLD_SIZE} included), one launch (LAMB: two){zeros}, {}",
        against(kernels)
    );
    announce("step", cases.len(), &what)?;
    all(options, cases, cuda, kernels, report)
}

pub(super) fn run_norms(
    options: &Arguments,
    cuda: &Cuda,
    kernels: Option<&[u8]>,
    report: &mut Report,
) -> Result<(), Failure> {
    let cases = sweep::norms(options, cuda)?;
    announce("norm", cases.len(), &format!("one bucket, which is only read, {}", against(kernels)))?;
    all(options, cases, cuda, kernels, report)
}

fn against(kernels: Option<&[u8]>) -> &'static str {
    match kernels {
        Some(_) => {
            "against two copies that move as many bytes, the driver's and one by the multiprocessors; the ceiling is the \
             faster of the two; median (min-max)"
        }
        None => {
            "against the driver's device-to-device copy of as many bytes (with --kernels FILE also one by the \
             multiprocessors); median (min-max)"
        }
    }
}

fn all(
    options: &Arguments,
    cases: Vec<Case>,
    cuda: &Cuda,
    kernels: Option<&[u8]>,
    report: &mut Report,
) -> Result<(), Failure> {
    print_line(&head())?;
    let mut starved = false;
    for case in cases {
        let mut launcher = match case.launcher(cuda) {
            Err(error) if matches!(error.cause(), Error::Device { code: OUT_OF_MEMORY, .. }) => {
                print_line(&format!(
                    "{:<10}{:<24}{:>10}  SKIPPED: the memory does not suffice",
                    case.name(),
                    case.precision,
                    case.bytes
                ))?;
                report.skipped.push(case);
                save(options, report)?;
                continue;
            }
            made => made?,
        };
        if let Some(image) = kernels {
            launcher.load_sm_copy(image)?;
        }
        let expected = Expected::new(&case);
        expected.fill(&mut launcher)?;
        let compared = match case.work {
            Work::Step => Some(expected.compare(&case, &mut launcher)?),
            _ => None,
        };
        let row = measure(options, case, compared, &mut launcher)?;
        print_line(&line(&row))?;
        starved |= row.starved_samples > 0;
        if let Some(mismatch) = row.mismatch() {
            print_line(&format!("MISMATCH: {mismatch}"))?;
        }
        report.rows(row.case.work).push(row);
        save(options, report)?;
    }
    if starved {
        print_line(
            "*: in some samples the GPU began before all was queued, and may have waited for the host",
        )?;
    }
    Ok(())
}

fn measure(
    options: &Arguments,
    case: Case,
    compared: Option<Compared>,
    launcher: &mut GpuLauncher,
) -> Result<StepRow, Failure> {
    let bytes = match case.work {
        Work::Norm => launcher.norm_bytes(0),
        _ => launcher.step_bytes(0),
    };
    let buckets = launcher.plan().buckets().len() as u32;
    let most = if options.quick { MOST_LAUNCHES / 8 } else { MOST_LAUNCHES };
    let launches = (SAMPLE_BYTES / bytes).clamp(1, most) as usize;
    let mut works = vec![case.work, Work::Copy(bytes)];
    works.extend(launcher.has_sm_copy().then_some(Work::SmCopy(bytes)));
    let warm_up = if options.quick { Duration::ZERO } else { WARM_UP };
    let all: Vec<u32> = (0..buckets).collect();
    let warm_up_ns = launcher.warm_up(case.work, &all, warm_up)?;
    let mut next = 0;
    let mut take = || -> Vec<u32> {
        let taken = (0..launches as u32).map(|k| (next + k) % buckets).collect();
        next = (next + launches as u32) % buckets;
        taken
    };
    let us = |sample: Sample| sample.device_ns * 1e-3 / launches as f64;
    let (mut times, mut starved_samples) = (vec![Vec::new(); works.len()], 0);
    for round in 0..=options.rounds(21) {
        let mut order: Vec<usize> = (0..works.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for k in order {
            let sample = launcher.time(works[k], &take())?;
            // The first round loads code.
            if round > 0 {
                times[k].push(us(sample));
                starved_samples += usize::from(sample.starved);
            }
        }
    }
    let spreads: Vec<Spread> = times.iter().map(|times| Spread::of(times.iter().copied())).collect();
    let fastest =
        (1..works.len()).min_by(|a, b| spreads[*a].median.total_cmp(&spreads[*b].median)).unwrap_or(1);
    let shares = times[0].iter().zip(&times[fastest]).map(|(work, copy)| 100.0 * copy / work);
    let gb_per_s = |spread: &Spread| bytes as f64 * 1e-3 / spread.median;
    Ok(StepRow {
        buckets: buckets as usize,
        steps_per_sample: launches,
        bytes_per_element: bytes as f64 / case.elements as f64,
        step_us: spreads[0],
        copy_us: spreads[1],
        sm_copy_us: spreads.get(2).copied(),
        step_gb_per_s: gb_per_s(&spreads[0]),
        copy_gb_per_s: gb_per_s(&spreads[1]),
        sm_copy_gb_per_s: spreads.get(2).map(gb_per_s),
        ceiling: ["", "copy", "sm_copy"][fastest],
        percent_of_ceiling: Spread::of(shares),
        starved_samples,
        warm_up_ms: warm_up_ns * 1e-6,
        compared,
        case,
    })
}

fn head() -> String {
    format!(
        "{:<10}{:<24}{:>10}{:>6}  {:<9}{:>6}{:>8}{:>11}{:>7}  % of ceiling",
        "name", "precision", "bytes", "segm.", "cache", "blocks", "B/elem", "time us", "GB/s"
    )
}

/// Returns the row as a line under the table's header. The times of the copies and the spread of times are only in the
/// report.
fn line(row: &StepRow) -> String {
    let StepRow { case, bytes_per_element, step_us, step_gb_per_s, percent_of_ceiling, .. } = row;
    let blocks = case.max_blocks.map_or("all".to_owned(), |blocks| blocks.to_string());
    format!(
        "{:<10}{:<24}{:>10}{:>6}  {:<9}{blocks:>6}{bytes_per_element:>8.2}{:>11}{step_gb_per_s:>7.0}  {}{}{}",
        case.name(),
        case.precision,
        case.bytes,
        case.segments,
        case.cache.name(),
        step_us.median_us(),
        percent_of_ceiling.show(0),
        if row.starved_samples > 0 { " *" } else { "" },
        if row.mismatch().is_some() { " MISMATCH" } else { "" },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::cases::{self, Cache};
    use crate::bench::precisions::Kind;

    /// This row has the longest names and numbers: 4 GiB of gradients, seconds, and thousands of blocks.
    #[test]
    fn a_row_fits_120_columns() {
        let case = Case {
            optimizer: Some("adadelta".into()),
            precision: Kind::Remainder16Moments8bit.name(),
            rule: cases::Case::all()[0],
            kind: Kind::Remainder16Moments8bit,
            work: Work::Step,
            states: 2,
            bytes: 4 << 30,
            elements: 2 << 30,
            segments: 50,
            cache: Cache::Resident,
            max_blocks: Some(65_536),
            zeros: false,
        };
        let (us, percent) = (Spread::of([9_999_999.0]), Spread::of([99.0, 100.0, 101.0]));
        let compared =
            Compared { elements: 1, of: 1, sample: String::new(), mismatch: Some("element 0".into()) };
        let row = StepRow {
            case,
            buckets: 1,
            steps_per_sample: 1,
            bytes_per_element: 99.99,
            step_us: us,
            copy_us: us,
            sm_copy_us: None,
            step_gb_per_s: 3000.0,
            copy_gb_per_s: 3000.0,
            sm_copy_gb_per_s: None,
            ceiling: "copy",
            percent_of_ceiling: percent,
            starved_samples: 1,
            warm_up_ms: 0.0,
            compared: Some(compared),
        };
        let line = line(&row);
        assert!(line.len() <= 120, "{} columns: {line}", line.len());
        assert_eq!(line.find("100 (99-101)"), head().find("% of ceiling"), "{line}");
    }
}
