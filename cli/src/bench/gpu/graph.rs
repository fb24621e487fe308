//! Compares the time of replaying a captured pass with the time of the same pass made call by call.
//!
//! Parameters are small, so most of the measured time is that of launches and host calls. A round has one pass of each
//! kind, and both use the same stepper. The trainer's stream has no work except the passes.

use std::time::Instant;

use instep::bench::{Mark, Trainer};
use instep::cuda::{CapturedPass, Cuda, CudaDevice};
use instep::{AdamW, Layout, ParamId, Pass, Solo, Stepper};

use super::files::save;
use super::report::{GraphRow, Report};
use crate::Failure;
use crate::bench::Arguments;
use crate::bench::statistics::Spread;
use crate::bench::table::announce;
use crate::console::print_line;

const PARAMS: usize = 64;
const ELEMENTS: usize = 2048;

/// The time of the host's calls in one pass, and the time of the pass on the trainer's stream. Both are in
/// microseconds.
type Times = (f64, f64);

pub(super) fn run(options: &Arguments, cuda: &Cuda, report: &mut Report) -> Result<(), Failure> {
    let names = (0..PARAMS).map(|k| format!("p{k}"));
    let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, ELEMENTS)).build()?;
    let ids: Vec<ParamId> = layout.ids().collect();
    let trainer = Trainer::new(cuda)?;
    let caps_bytes = [u64::MAX, 1];
    let what = format!("a pass of {PARAMS} parameters of {ELEMENTS} elements, us; median (min-max)");
    announce("graph", 2 * caps_bytes.len(), &what)?;
    print_line(&format!("{:<13}{:>8}  {:<28}trainer's stream", "pass", "buckets", "host calls"))?;
    for cap_bytes in caps_bytes {
        let builder = Stepper::builder(&layout, AdamW::default()).bucket_cap_bytes(cap_bytes);
        let mut stepper = trainer.stepper(builder, Solo::default(), None)?;
        let buckets = stepper.plan().buckets().len();
        call_by_call(&trainer, &mut stepper, &ids)?;
        let captured = stepper.capture(|mut pass| {
            hand_over(&mut pass, &ids)?;
            pass.finish()
        })?;
        let (mut eager, mut replays) = (Vec::new(), Vec::new());
        let rounds = options.rounds(15) * 4;
        for round in 0..rounds + rounds / 4 {
            let times =
                (call_by_call(&trainer, &mut stepper, &ids)?, replayed(&trainer, &mut stepper, &captured)?);
            // The first passes load code and grow the driver's own memory.
            if round >= rounds / 4 {
                eager.push(times.0);
                replays.push(times.1);
            }
        }
        for (pass, times) in [("call by call", &eager), ("replay", &replays)] {
            let host_us = Spread::of(times.iter().map(|(host, _)| *host));
            let device_us = Spread::of(times.iter().map(|(_, device)| *device));
            print_line(&format!("{pass:<13}{buckets:>8}  {:<28}{}", host_us.show(1), device_us.show(1)))?;
            report.graph.push(GraphRow { pass, params: PARAMS, buckets, host_us, device_us });
        }
        save(options, report)?;
    }
    Ok(())
}

fn call_by_call(
    trainer: &Trainer,
    stepper: &mut Stepper<CudaDevice>,
    ids: &[ParamId],
) -> instep::Result<Times> {
    trainer.mark(Mark::Start)?;
    let start = Instant::now();
    let mut pass = stepper.begin()?;
    hand_over(&mut pass, ids)?;
    pass.finish()?;
    for id in ids {
        stepper.ptr(*id)?;
    }
    let host_us = start.elapsed().as_secs_f64() * 1e6;
    Ok((host_us, device_us(trainer)?))
}

fn hand_over(pass: &mut Pass<'_, CudaDevice>, ids: &[ParamId]) -> instep::Result<()> {
    for id in ids.iter().rev() {
        pass.ptr(id.grad())?;
        pass.grad_ready(*id)?;
    }
    Ok(())
}

fn replayed(
    trainer: &Trainer,
    stepper: &mut Stepper<CudaDevice>,
    captured: &CapturedPass,
) -> instep::Result<Times> {
    trainer.mark(Mark::Start)?;
    let start = Instant::now();
    trainer.replay(stepper, captured)?;
    let host_us = start.elapsed().as_secs_f64() * 1e6;
    Ok((host_us, device_us(trainer)?))
}

fn device_us(trainer: &Trainer) -> instep::Result<f64> {
    trainer.mark(Mark::BackwardEnd)?;
    trainer.mark(Mark::End)?;
    let times = trainer.wait(None)?;
    Ok((times.end_ns - times.start_ns) * 1e-3)
}
