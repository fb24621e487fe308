//! A run of any precision that is saved as f32 and resumed continues with the bits of the uninterrupted run.
//!
//! It resumes in another mode, with other buckets and on another instruction set: stochastic rounding depends on none
//! of them. Only the contents of a checkpoint are carried over, by name.

use instep::{Isa, Mode, Solo, Stepper};

use crate::support::stored::{Stored, cases, dyadic, with};
use crate::support::{MODES, Options, layout, paint_params, pass};

/// Loads everything that lasts, by name and as f32, as a checkpoint stores it.
pub(crate) fn load(from: &Stepper, to: &mut Stepper) {
    for id in from.layout().ids() {
        let mut values = vec![0.0; from.layout().parameter(id).unwrap().len as usize];
        from.read(id, &mut values).unwrap();
        to.write(id, &values).unwrap();
        for name in from.state_names(id).unwrap() {
            from.read(id.state(&name), &mut values).unwrap();
            to.write(id.state(&name), &values).unwrap();
        }
        if from.plan().keeps_ema() && to.plan().keeps_ema() {
            from.read(id.ema(), &mut values).unwrap();
            to.write(id.ema(), &values).unwrap();
        }
        let count = from.step_count(id).unwrap();
        for optimizer in from.optimizers_of(id).unwrap() {
            match from.carried((id, optimizer)).unwrap() {
                Some(carried) => to.set_step_count((id, optimizer), (count, carried)).unwrap(),
                None => to.set_step_count((id, optimizer), count).unwrap(),
            }
        }
    }
}

#[test]
fn a_resumed_run_of_any_precision_goes_on_with_the_bits_of_the_unbroken_one() {
    let layout = layout(&[300, 0, 2049, 17]);
    for (case, (storage, optim)) in cases().enumerate() {
        let open = |mode: Mode, cap: u64, isa: Isa| {
            let builder = with(optim.builder(&layout), &storage).mode(mode).bucket_cap_bytes(cap);
            builder.isa(isa).threads(1).host(Solo::default()).unwrap()
        };
        let train = |stepper: &mut Stepper, steps: std::ops::Range<usize>| {
            for step in steps {
                pass(stepper, &Options::default(), |param, values| {
                    values.iter_mut().enumerate().for_each(|(k, g)| *g = dyadic(step, 0, param, k));
                    true
                })
                .unwrap();
            }
        };
        let mut unbroken = open(Mode::Sequential, 1 << 20, Isa::Baseline);
        paint_params(&mut unbroken);
        train(&mut unbroken, 0..2);
        let isas = Isa::available();
        let mut resumed = open(MODES[case % 3], 700, isas[case % isas.len()]);
        load(&unbroken, &mut resumed);
        train(&mut unbroken, 2..4);
        train(&mut resumed, 2..4);
        Stored::of(&resumed).unwrap().assert_same(&Stored::of(&unbroken).unwrap(), &(storage, optim));
    }
}
