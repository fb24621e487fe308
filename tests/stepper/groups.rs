//! Several parameter groups are in one bucket, and learning rates change between passes.
//!
//! A group has the bits of a separate stepper; a scheduled rate has the bits of the arithmetic in this file.

use instep::layout::DEFAULT_GROUP;
use instep::op::Memory;
use instep::{AdamW, Error, Layout, Mode, Optimizer, RmsProp, Sgd, Solo, Stepper};

use crate::support::assert_same_bits;
use crate::support::waits::{assert_each_is_missed, middle_passes};

const LENS: [usize; 4] = [300, 257, 5, 2049];

fn gradient(pass: usize, param: usize, element: usize) -> f32 {
    ((pass * 31 + param * 17 + element * 13) % 251) as f32 / 97.0 - 1.3
}

/// Returns the bits of one parameter and its states after four passes.
fn train(mut stepper: Stepper, params: &[usize]) -> Vec<Vec<u32>> {
    let ids: Vec<_> = stepper.layout().ids().collect();
    let fill = |name: &str, slice: &mut [f32]| {
        let shift = name.len() as f32;
        slice.iter_mut().enumerate().for_each(|(k, p)| *p = k as f32 / 512.0 - shift);
    };
    stepper.fill_params(fill).unwrap();
    for pass_index in 0..4 {
        let mut pass = stepper.begin().unwrap();
        for (id, param) in ids.iter().zip(params).rev() {
            let mut grads = pass.grads();
            let slice = grads.get_mut(*id).unwrap();
            slice.iter_mut().enumerate().for_each(|(k, g)| *g = gradient(pass_index, *param, k));
            pass.grad_ready(*id).unwrap();
        }
        pass.finish().unwrap();
    }
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let of = |id| {
        let mut all = bits(stepper.view::<f32>(id).unwrap());
        for name in stepper.state_names(id).unwrap() {
            all.extend(bits(stepper.view::<f32>(id.state(&name)).unwrap()));
        }
        all
    };
    ids.into_iter().map(of).collect()
}

fn alone(param: usize, optimizer: impl Optimizer + 'static) -> Vec<u32> {
    let layout = Layout::builder().param(format!("p{param}"), LENS[param]).build().unwrap();
    train(Stepper::host(&layout, optimizer, Solo::default()).unwrap(), &[param]).remove(0)
}

#[test]
fn a_group_in_a_shared_bucket_gives_the_bits_of_a_stepper_of_its_own() {
    let mut builder = Layout::builder();
    for (k, len) in LENS.iter().enumerate() {
        builder = builder.param(format!("p{k}"), *len);
        if k % 2 == 1 {
            builder = builder.in_group("no decay");
        }
    }
    let layout = builder.build().unwrap();
    let common = AdamW { lr: 3e-3, weight_decay: 0.1, ..Default::default() };
    let own = AdamW { lr: 1e-2, betas: (0.8, 0.99), eps: 1e-6, weight_decay: 0.0, ..Default::default() };
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        for cap in [1, 1 << 20] {
            let builder = Stepper::builder(&layout, common).group("no decay", own);
            let stepper = builder.mode(mode).bucket_cap_bytes(cap).host(Solo::default()).unwrap();
            let together = train(stepper, &[0, 1, 2, 3]);
            for (k, bits) in together.iter().enumerate() {
                let expected = alone(k, if k % 2 == 1 { own } else { common });
                assert!(*bits == expected, "parameter {k}, {mode:?}, cap {cap}");
            }
        }
    }
}

#[test]
fn a_pass_uses_the_learning_rates_set_before_it_and_no_wait_is_too_many() {
    let layout = Layout::builder().param("a", 300).param("b", 300).in_group("slow").build().unwrap();
    let ids: Vec<_> = layout.ids().collect();
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        let builder = Stepper::builder(&layout, Sgd::default()).mode(mode).bucket_cap_bytes(1).record(true);
        let mut stepper = builder.host(Solo::default()).unwrap();
        let mut expected = [0.0f32; 2];
        for step in 0..6 {
            for (group, divisor) in [(DEFAULT_GROUP, 1.0), ("slow", 8.0)] {
                stepper.set_lr(group, 0.3 / f64::from(step + 1) / divisor).unwrap();
            }
            let mut pass = stepper.begin().unwrap();
            for (k, id) in ids.iter().enumerate().rev() {
                pass.params().get(*id).unwrap();
                pass.grads().get_mut(*id).unwrap().fill(0.7);
                pass.grad_ready(*id).unwrap();
                expected[k] -= (0.3 / f64::from(step + 1) / [1.0, 8.0][k]) as f32 * 0.7;
            }
            pass.finish().unwrap();
        }
        for (id, expected) in ids.iter().zip(expected) {
            let params = stepper.params();
            assert!(params.get(*id).unwrap().iter().all(|p| p.to_bits() == expected.to_bits()), "{mode:?}");
        }
        let list = stepper.take_recording().unwrap().list;
        let what = format!("{mode:?}");
        assert_each_is_missed(stepper.plan(), 0, &list, middle_passes(&list), 8, &what);
    }
}

#[test]
fn what_a_group_cannot_have_is_refused_and_changes_nothing() {
    let layout = Layout::builder().param("a", 3).in_group("x").build().unwrap();
    let a = layout.id("a").unwrap();
    let build = |group: &str, rule: Sgd| {
        Stepper::builder(&layout, Sgd::default()).group(group, rule).host(Solo::default())
    };
    assert!(matches!(build("y", Sgd::default()), Err(Error::Config { field: "group", .. })));
    assert!(matches!(
        build("x", Sgd { lr: -1.0, ..Default::default() }),
        Err(Error::Config { field: "lr", .. })
    ));
    let twice =
        Stepper::builder(&layout, Sgd::default()).group("x", Sgd::default()).group("x", Sgd::default());
    assert!(matches!(twice.host(Solo::default()), Err(Error::Config { field: "group", .. })));

    let mut stepper = build("x", Sgd { lr: 0.5, ..Default::default() }).unwrap();
    assert!(matches!(stepper.set_lr("y", 1.0), Err(Error::Config { field: "group", .. })));
    assert!(matches!(stepper.set_lr("x", f64::NAN), Err(Error::Config { field: "lr", .. })));
    std::mem::forget(stepper.begin().unwrap());
    assert!(matches!(stepper.set_lr("x", 1.0), Err(Error::Order(_))));
    stepper.abandon().unwrap();
    let mut pass = stepper.begin().unwrap();
    pass.grads().write(a, &[1.0; 3]).unwrap();
    pass.finish().unwrap();
    assert_eq!(stepper.view::<f32>(a).unwrap(), [-0.5; 3], "the rate is still the first one");
}

/// Groups of one kind share the memory of their states, whose order depends on hyperparameters.
#[test]
fn a_states_name_is_its_own_optimizers_whatever_the_other_groups_keep() {
    let lone = Layout::builder().param("a", 5).build().unwrap();
    let layout = Layout::builder().param("a", 5).param("b", 5).in_group("other").build().unwrap();
    let plain = RmsProp::default();
    let kinds = [
        plain,
        RmsProp { momentum: 0.9, ..plain },
        RmsProp { centered: true, ..plain },
        RmsProp { momentum: 0.5, centered: true, ..plain },
    ];
    let train = |mut stepper: Stepper| {
        for step in 0..3 {
            let ids: Vec<_> = stepper.layout().ids().collect();
            let mut pass = stepper.begin().unwrap();
            for id in ids {
                pass.grads()
                    .write(id, &[0.1, -0.5, 3.0, 1e-3, 0.7].map(|g| g * (step as f32 + 0.5)))
                    .unwrap();
            }
            pass.finish().unwrap();
        }
        stepper
    };
    for (own, other) in kinds.iter().flat_map(|own| kinds.map(|other| (*own, other))) {
        let beside = Stepper::builder(&layout, own).group("other", other).host(Solo::default());
        let alone = train(Stepper::host(&lone, own, Solo::default()).unwrap());
        let beside = train(beside.unwrap());
        let (a, same) = (lone.id("a").unwrap(), layout.id("a").unwrap());
        for name in own.state_names() {
            let (expected, got) =
                (alone.view::<f32>(a.state(name)).unwrap(), beside.view::<f32>(same.state(name)).unwrap());
            assert_same_bits(got, expected, &format!("{name} of {own:?} beside {other:?}"));
        }
        for name in beside.state_names(same).unwrap() {
            let is_used = own.state_names().contains(&&*name);
            let is_zero = beside.view::<f32>(same.state(&name)).unwrap().iter().all(|x| *x == 0.0);
            assert!(is_used != is_zero, "{name} of {own:?} beside {other:?}");
        }
    }
}

#[test]
fn memory_is_listed_by_kind() {
    let layout = Layout::builder().param("a", 300).param("b", 5).build().unwrap();
    let stepper = Stepper::host(&layout, AdamW::default(), Solo::default()).unwrap();
    let of = |wanted: Memory| {
        stepper.memory().iter().find(|(memory, _)| *memory == wanted).map(|(_, bytes)| *bytes)
    };
    // 300 and 5 elements on quanta of 256, and two elements of tail that take a quantum too.
    let arena = Some((512 + 256 + 256) * 4);
    for memory in [Memory::Params, Memory::Grads, Memory::State(0), Memory::State(1)] {
        assert_eq!(of(memory), arena, "{memory:?}");
    }
    assert_eq!(of(Memory::State(2)), None);
    assert!(of(Memory::Control).is_some() && of(Memory::Settings).is_some());
}
