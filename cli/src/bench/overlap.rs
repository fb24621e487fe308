//! Measures how long a trainer waits for the optimizer, by mode and bucket size. A loop simulates backward.
//!
//! The loop writes each parameter's gradient, then computes until a fixed time per element has passed. The bench has
//! only one rank, so collectives take no time. Every round has one pass of each mode.

use std::hint::black_box;
use std::time::{Duration, Instant};

use instep::{AdamW, Clip, Layout, Mode, ParamId, Solo, Stepper};

use super::Arguments;
use super::record::Record;
use super::statistics::Spread;
use super::table::announce;
use crate::Failure;
use crate::console::print_line;

const PARAMS: usize = 64;
const ELEMENTS: usize = 256 << 10;
/// Backward's time per element, long enough to hide a single-threaded step that starts early.
const BACKWARD_NS_PER_ELEMENT: u64 = 2;
const CAPS_MIB: [u64; 4] = [1, 4, 16, 64];

pub(super) fn run(options: &Arguments, record: &mut Record) -> Result<(), Failure> {
    let elements = if options.quick { ELEMENTS / 16 } else { ELEMENTS };
    let names = (0..PARAMS).map(|k| format!("p{k}"));
    let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, elements)).build()?;
    let backward = Duration::from_nanos((PARAMS * elements) as u64 * BACKWARD_NS_PER_ELEMENT);
    let what = format!(
        "{PARAMS} parameters of {elements} elements, AdamW, one kernel thread, backward {:.1} ms; exposed ms, \
         median (min-max)",
        backward.as_secs_f64() * 1e3
    );
    announce("overlap", CAPS_MIB.len(), &what)?;
    print_line(&format!("{:<10}{:<28}{:<28}normed", "cap MiB", "sequential", "eager"))?;
    for cap_mib in CAPS_MIB {
        let mut steppers = Vec::new();
        for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
            let builder = Stepper::builder(&layout, AdamW::default()).mode(mode).threads(1);
            let builder = if mode == Mode::Normed { builder.clip(Clip::Global(1.0)) } else { builder };
            let stepper = builder.bucket_cap_bytes(cap_mib << 20).host(Solo::default())?;
            steppers.push((mode, stepper, Vec::new()));
        }
        for round in 0..=options.rounds(11) {
            for (_, stepper, exposed) in &mut steppers {
                let sample = exposed_ms(stepper, &layout, elements)?;
                if round > 0 {
                    exposed.push(sample);
                }
            }
        }
        let isa = steppers[0].1.isa().name();
        let mut line = format!("{cap_mib:<10}");
        for (mode, _, exposed) in steppers {
            let spread = Spread::of(exposed);
            line += &format!("{:<28}", spread.show(2));
            let case = format!("{} cap {cap_mib} MiB", format!("{mode:?}").to_lowercase());
            record.add("overlap", &case, isa, 1, "exposed_ms", spread);
        }
        print_line(line.trim_end())?;
    }
    Ok(())
}

/// Runs one pass. Returns the time from the end of backward until the trainer may read every parameter.
fn exposed_ms(stepper: &mut Stepper, layout: &Layout, elements: usize) -> instep::Result<f64> {
    stepper.status()?;
    let ids: Vec<ParamId> = layout.ids().collect();
    let share = Duration::from_nanos(elements as u64 * BACKWARD_NS_PER_ELEMENT);
    let mut pass = stepper.begin()?;
    for id in ids.iter().rev() {
        let start = Instant::now();
        pass.grads().get_mut(*id)?.fill(0.01);
        while start.elapsed() < share {
            black_box((0..64).fold(1.0f32, |x, k| x * 0.99 + k as f32));
        }
        pass.grad_ready(*id)?;
    }
    let end = Instant::now();
    pass.finish()?;
    stepper.status()?;
    Ok(end.elapsed().as_secs_f64() * 1e3)
}
