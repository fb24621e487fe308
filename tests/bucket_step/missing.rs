//! A gradient that a call lacks gives the bits of a step with a frozen parameter, and is not read.
//!
//! The reference freezes the parameter, and its gradient is NaN, so a step or norm that read it would change bits.

use std::ffi::c_void;

use instep::bucket_step::{Lent, StepTensors};
use instep::{BucketStep, GradNorm, Gradients, Layout, ParamId, Scaling};

use crate::support::{Optim, few_optimizers, paint};

const LENGTHS: [usize; 3] = [300, 17, 2100];
const LEN: usize = 2417;
/// The gradients that are missing in each step.
const LACKS: [[bool; 3]; 6] = [
    [false, false, false],
    [false, true, false],
    [false, true, true],
    [true, true, true],
    [false, false, false],
    [true, false, false],
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Says {
    Freezes,
    None,
    Null,
}

fn layout() -> (Layout, Vec<ParamId>) {
    let builder = LENGTHS.iter().enumerate();
    let builder = builder.fold(Layout::builder(), |builder, (k, len)| builder.param(format!("p{k}"), *len));
    let layout = builder.build().unwrap();
    let ids = layout.ids().collect();
    (layout, ids)
}

fn gradients(at: usize) -> Vec<Vec<f32>> {
    LENGTHS.iter().enumerate().map(|(k, len)| (0..*len).map(|i| paint(at + k, i)).collect()).collect()
}

/// Parameters, states, gradients after the last step, counts and norms.
type Outcome = (Vec<f32>, Vec<Vec<f32>>, Vec<Vec<f32>>, Vec<u64>, Vec<u64>);

fn train(optim: Optim, says: Says, gradients_are: Gradients, decides: bool) -> Outcome {
    let (layout, ids) = layout();
    let mut step = BucketStep::builder(&layout, optim.boxed()).gradients(gradients_are).host().unwrap();
    let mut norm = GradNorm::host().unwrap();
    let mut params: Vec<f32> = (0..LEN).map(|k| paint(9, k)).collect();
    let mut states = vec![vec![0f32; LEN]; optim.boxed().state_names().len()];
    let (mut grads, mut norms) = (Vec::new(), Vec::new());
    for (at, lacks) in LACKS.iter().enumerate() {
        grads = gradients(at);
        for (k, id) in ids.iter().enumerate().filter(|_| says == Says::Freezes) {
            step.set_frozen(*id, lacks[k]).unwrap();
            if lacks[k] {
                grads[k].fill(f32::NAN);
            }
        }
        let has = |k: usize| says == Says::Freezes || !lacks[k];
        let mut runs: Vec<Option<&mut [f32]>> =
            grads.iter_mut().enumerate().map(|(k, run)| has(k).then_some(&mut **run)).collect();
        let null = std::ptr::null_mut::<c_void>();
        let addresses: Vec<*mut c_void> =
            runs.iter_mut().map(|run| run.as_mut().map_or(null, |run| run.as_mut_ptr().cast())).collect();
        let is_none = says == Says::None;
        if decides {
            norm.begin(Scaling::mean(2)).unwrap();
            if is_none {
                let shared: Vec<Option<&[f32]>> = runs.iter().map(|run| run.as_deref()).collect();
                step.add_norm(&Lent::optional_slices(&shared), &mut norm).unwrap();
            } else {
                // SAFETY: memory of this function, which nothing else touches during the call.
                step.add_norm(&unsafe { Lent::at_each(&addresses) }, &mut norm).unwrap();
            }
            norms.push(norm.decide(Some(1.0), true).unwrap().norm.to_bits());
        }
        // SAFETY: as above.
        let raw = || unsafe { Lent::at_each(&addresses) };
        let lent = if is_none { Lent::optional_slices_mut(&mut runs) } else { raw() };
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), lent);
        let tensors = tensors.states(states.iter_mut().map(|state| Lent::slice_mut(state)));
        if decides {
            step.step_decided(&tensors, &mut norm).unwrap()
        } else {
            step.step(&tensors, Scaling::mean(2)).unwrap()
        }
    }
    let counts = ids.iter().map(|id| step.step_count(*id).unwrap()).collect();
    (params, states, grads, counts, norms)
}

#[test]
fn a_call_that_lacks_a_gradient_gives_the_bits_of_one_that_freezes_its_parameter() {
    for optim in few_optimizers() {
        for gradients in [Gradients::Keep, Gradients::Zero, Gradients::Average] {
            for decides in [false, true] {
                let frozen = train(optim, Says::Freezes, gradients, decides);
                assert_eq!(frozen.3, [4, 3, 4], "{optim:?}");
                for says in [Says::None, Says::Null] {
                    let mut lacking = train(optim, says, gradients, decides);
                    // The last step lacks the first gradient, which nobody has touched.
                    lacking.2[0].clone_from(&frozen.2[0]);
                    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert!(
                        bits(&lacking.0) == bits(&frozen.0),
                        "{optim:?}, {says:?}, {gradients:?}, {decides}"
                    );
                    for k in 0..frozen.1.len() {
                        assert!(bits(&lacking.1[k]) == bits(&frozen.1[k]), "{optim:?}, state {k}, {says:?}");
                    }
                    for k in 0..3 {
                        assert!(
                            bits(&lacking.2[k]) == bits(&frozen.2[k]),
                            "{optim:?}, gradient {k}, {says:?}"
                        );
                    }
                    assert_eq!((&lacking.3, &lacking.4), (&frozen.3, &frozen.4), "{optim:?}, {says:?}");
                }
            }
        }
    }
}

#[test]
fn only_gradients_may_be_missing() {
    let (layout, _) = layout();
    let mut step = BucketStep::builder(&layout, instep::Sgd::default()).host().unwrap();
    let mut params: Vec<Vec<f32>> = LENGTHS.iter().map(|len| vec![0.0; *len]).collect();
    let mut runs: Vec<Option<&mut [f32]>> = params.iter_mut().map(|run| Some(&mut **run)).collect();
    runs[1] = None;
    let grads = vec![1f32; LEN];
    let tensors = StepTensors::new(Lent::optional_slices_mut(&mut runs), Lent::slice(&grads));
    let refused = step.step(&tensors, Scaling::NONE).unwrap_err().to_string();
    assert!(
        refused.contains("parameters, run 1: a run of 0 elements, where its parameter has 17"),
        "{refused}"
    );
    let null = std::ptr::null_mut();
    let addresses = [params[0].as_mut_ptr().cast(), null, params[2].as_mut_ptr().cast()];
    // SAFETY: refused before anything is touched.
    let tensors = StepTensors::new(unsafe { Lent::at_each(&addresses) }, Lent::slice(&grads));
    let refused = step.step(&tensors, Scaling::NONE).unwrap_err().to_string();
    assert!(refused.contains("parameters, run 1: the address is null"), "{refused}");
    // SAFETY: as above.
    let tensors = StepTensors::new(Lent::slice_mut(&mut params[2]), unsafe { Lent::at(null) });
    let refused = step.step(&tensors, Scaling::NONE).unwrap_err().to_string();
    assert!(refused.contains("parameters: a run of 2100 elements, where the bucket has 2417"), "{refused}");
}

#[test]
fn a_refused_call_leaves_the_parameters_of_the_next_one_alone() {
    let layout = Layout::builder().param("a", 1).param("b", 1).build().unwrap();
    let sgd = instep::Sgd { lr: 1.0, ..Default::default() };
    let mut step = BucketStep::builder(&layout, sgd).host().unwrap();
    let (mut params, mut short) = ([0f32; 2], [0f32; 1]);
    let lacking: [Option<&[f32]>; 2] = [Some(&[1.0]), None];
    let tensors = StepTensors::new(Lent::slice_mut(&mut short), Lent::optional_slices(&lacking));
    step.step(&tensors, Scaling::NONE).unwrap_err();
    let whole = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&[1f32, 1.0]));
    step.step(&whole, Scaling::NONE).unwrap();
    assert_eq!(params, [-1.0, -1.0]);
    // A frozen parameter stays frozen, whether its gradient is missing in between or not.
    step.set_frozen(layout.id("b").unwrap(), true).unwrap();
    for grads in [lacking, [Some(&[1.0]), Some(&[1.0])]] {
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::optional_slices(&grads));
        step.step(&tensors, Scaling::NONE).unwrap();
    }
    assert_eq!(params, [-3.0, -1.0]);
}
