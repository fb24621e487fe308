//! The special loops for bf16 tensors must give the bits of the general loop through f32, for every rule and option.
//!
//! With a moving average, the same tensors go through the general loop. The tests compare stored bits, never values.

use instep::{DType, Isa, Layout, Master, Moments, Precision, Rounding};

use crate::precision::low_precision_states::is_refused;
use crate::support::stored::stored_param;
use crate::support::{Optim, Presummed, optimizers, paint, paint_gradient};

const LENS: [usize; 3] = [2048 + 301, 5, 700];

fn run(optim: Optim, isa: Isa, precision: Precision, the_long_way: bool) -> Vec<u32> {
    let lens = LENS.iter().enumerate();
    let layout =
        lens.fold(Layout::builder(), |layout, (k, len)| layout.param(format!("p{k}"), *len)).build().unwrap();
    let builder = optim.builder(&layout).precision(precision).isa(isa);
    let builder = if the_long_way { builder.ema(0.9) } else { builder };
    let mut stepper = builder.host(Presummed(3)).unwrap();
    for (k, id) in layout.ids().enumerate() {
        let values: Vec<f32> = (0..LENS[k]).map(|at| paint(k, at)).collect();
        stepper.write(id, &values).unwrap();
    }
    let mut bits = Vec::new();
    for pass in 0..3 {
        let mut open = stepper.begin().unwrap();
        for (k, id) in layout.ids().enumerate() {
            let mut values: Vec<f32> = (0..LENS[k]).map(|at| paint_gradient(pass, k, at)).collect();
            if pass == 2 && k == 0 {
                values[..4].copy_from_slice(&[f32::NAN, f32::INFINITY, -0.0, f32::MIN_POSITIVE / 64.0]);
            }
            open.write(id.grad(), &values).unwrap();
        }
        crate::support::finish(open).unwrap();
        for (id, len) in layout.ids().zip(LENS) {
            bits.extend(stored_param(&stepper, id, DType::BF16).unwrap());
            let mut masters = vec![0.0f32; len];
            stepper.read(id, &mut masters).unwrap();
            bits.extend(masters.iter().map(|x| x.to_bits()));
            for name in stepper.state_names(id).unwrap() {
                let state = id.state(&name);
                match precision.moments {
                    Moments::F32 => {
                        bits.extend(stepper.view::<f32>(state).unwrap().iter().map(|x| x.to_bits()))
                    }
                    _ => {
                        let state = stepper.view::<half::bf16>(state).unwrap();
                        bits.extend(state.iter().map(|x| u32::from(x.to_bits())));
                    }
                }
            }
        }
    }
    bits
}

#[test]
fn one_loop_for_bf16_tensors_gives_the_bits_of_the_long_way_on_every_instruction_set() {
    let (param, grad) = (DType::BF16, DType::BF16);
    let throughout = Precision { param, grad, moments: Moments::BF16, ..Precision::F32 };
    let remainders = Precision { master: Master::Remainder16, ..throughout };
    let precisions = [
        throughout,
        Precision { rounding: Rounding::Stochastic { seed: 7 }, ..throughout },
        remainders,
        Precision { moments: Moments::F32, ..remainders },
    ];
    for precision in precisions {
        for optim in optimizers().into_iter().filter(|optim| !is_refused(*optim, precision.moments)) {
            let expected = run(optim, Isa::Baseline, precision, true);
            for isa in Isa::available() {
                assert!(run(optim, isa, precision, false) == expected, "{optim:?}, {precision:?}, {isa}");
            }
        }
    }
}
