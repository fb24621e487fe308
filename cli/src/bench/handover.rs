//! Measures the time of handing over a gradient (`grad_ready`) on the trainer's thread. In one case, every call only
//! counts a gradient, except for the last call of a pass. In the other case, each call completes a bucket and queues
//! the bucket's ops.
//!
//! Buckets are tiny, so the streams do little work. The time includes locking the streams and waking them. Only the
//! trainer's thread is timed.

use std::time::Instant;

use instep::{AdamW, Layout, Mode, ParamId, Solo, Stepper};

use super::Arguments;
use super::record::Record;
use super::statistics::Spread;
use super::table::announce;
use crate::Failure;
use crate::console::print_line;

const PARAMS: usize = 256;
const ELEMENTS: usize = 256;

pub(super) fn run(options: &Arguments, record: &mut Record) -> Result<(), Failure> {
    let names = (0..PARAMS).map(|k| format!("p{k}"));
    let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, ELEMENTS)).build()?;
    let modes = [Mode::Sequential, Mode::Eager, Mode::Normed];
    let cases = [("inside a bucket", u64::MAX), ("completes a bucket", 1)];
    let what =
        format!("the trainer's time in one grad_ready, us, median (min-max) of passes of {PARAMS} calls");
    announce("handover", modes.len() * cases.len(), &what)?;
    for mode in modes {
        for (case, cap_bytes) in cases {
            let builder = Stepper::builder(&layout, AdamW::default()).mode(mode).threads(1);
            let mut stepper = builder.bucket_cap_bytes(cap_bytes).host(Solo::default())?;
            let rounds = options.rounds(15) * 20;
            let samples =
                (0..rounds).map(|_| pass_us(&mut stepper, &layout)).collect::<instep::Result<Vec<_>>>()?;
            // The first passes start threads and grow queues.
            let spread = Spread::of(samples.into_iter().skip(rounds / 4));
            print_line(&format!("{:<12}{case:<20}{}", format!("{mode:?}").to_lowercase(), spread.show(2)))?;
            let case = format!("{} {case}", format!("{mode:?}").to_lowercase());
            record.add("handover", &case, stepper.isa().name(), 1, "grad_ready_us", spread);
        }
    }
    Ok(())
}

/// Returns the mean time of a call of `grad_ready` in one pass.
fn pass_us(stepper: &mut Stepper, layout: &Layout) -> instep::Result<f64> {
    let ids: Vec<ParamId> = layout.ids().collect();
    let mut pass = stepper.begin()?;
    for id in &ids {
        pass.grads().get_mut(*id)?.fill(0.01);
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
