//! Measures the time of handing over a gradient (`grad_ready`) on the trainer's thread, with a GPU. The thread never
//! waits, so the time is that of the driver calls.
//!
//! The passes are like those of the handover bench on the host, but have fewer calls of `grad_ready`. A call that
//! completes a bucket makes all driver calls for this bucket. Only host time is measured.

use std::time::Instant;

use instep::bench::Trainer;
use instep::cuda::{Cuda, CudaDevice};
use instep::{AdamW, Layout, Mode, ParamId, Solo, Stepper};

use super::files::save;
use super::report::{HandoverRow, Report};
use crate::Failure;
use crate::bench::Arguments;
use crate::bench::statistics::Spread;
use crate::bench::table::announce;
use crate::console::print_line;

/// The number of calls of `grad_ready` in a pass. This number is so small that a pass never fills the driver's queue.
const PARAMS: usize = 64;
const ELEMENTS: usize = 256;

pub(super) fn run(options: &Arguments, cuda: &Cuda, report: &mut Report) -> Result<(), Failure> {
    let names = (0..PARAMS).map(|k| format!("p{k}"));
    let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, ELEMENTS)).build()?;
    let trainer = Trainer::new(cuda)?;
    let modes = [Mode::Sequential, Mode::Eager, Mode::Normed];
    let cases = [("inside a bucket", u64::MAX), ("completes a bucket", 1)];
    let what =
        format!("the trainer's time in one grad_ready, us, median (min-max) of passes of {PARAMS} calls");
    announce("handover", modes.len() * cases.len(), &what)?;
    for mode in modes {
        for (case, cap_bytes) in cases {
            let builder = Stepper::builder(&layout, AdamW::default()).mode(mode);
            let mut stepper = trainer.stepper(builder.bucket_cap_bytes(cap_bytes), Solo::default(), None)?;
            let rounds = options.rounds(15) * 4;
            let samples =
                (0..rounds).map(|_| pass_us(&mut stepper, &layout)).collect::<instep::Result<Vec<_>>>()?;
            // The first passes load code and grow the driver's own memory.
            let spread = Spread::of(samples.into_iter().skip(rounds / 4));
            let mode = format!("{mode:?}").to_lowercase();
            print_line(&format!("{mode:<12}{case:<20}{}", spread.show(2)))?;
            report.handover.push(HandoverRow { mode, case: case.to_owned(), grad_ready_us: spread });
            save(options, report)?;
        }
    }
    Ok(())
}

/// Returns the mean time of a call of `grad_ready` in one pass. The host waits for the GPU between passes, so the
/// driver's queue is never full during a call.
fn pass_us(stepper: &mut Stepper<CudaDevice>, layout: &Layout) -> instep::Result<f64> {
    let ids: Vec<ParamId> = layout.ids().collect();
    let mut pass = stepper.begin()?;
    for id in &ids {
        pass.ptr(id.grad())?;
    }
    let start = Instant::now();
    for id in ids.iter().rev() {
        pass.grad_ready(*id)?;
    }
    let us = start.elapsed().as_secs_f64() * 1e6 / ids.len() as f64;
    pass.finish()?;
    stepper.status()?;
    Ok(us)
}
