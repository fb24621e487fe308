//! Many ranks against one: in-process groups of 1 to 8 ranks, and a single rank that gets the summed gradients.
//!
//! Gradients are small dyadic numbers, so every sum over ranks is exact and both sides agree bit for bit. Different
//! numbers of ranks are not compared with each other, because the mean itself is rounded.

use crate::support::Presummed;
use instep::{Adam, AdamW, Collective, Layout, Mode, Sgd, Stepper, StepperBuilder, in_process};

const LENS: [usize; 9] = [1, 3, 256, 257, 0, 1000, 2049, 5, 255];
const STEPS: usize = 5;

fn layout() -> Layout {
    let mut builder = Layout::builder();
    for (k, len) in LENS.iter().enumerate() {
        builder = builder.param(format!("p{k}"), *len);
    }
    builder.build().unwrap()
}

/// Returns multiples of 1/64 below 2: sums of eight are exact in f32.
fn gradient(step: usize, rank: usize, param: usize, element: usize) -> f32 {
    let n = (step * 31 + rank * 57 + param * 17 + element * 13) % 251;
    (n as f32 - 125.0) / 64.0
}

#[derive(Clone, Copy, Debug)]
enum Rule {
    Sgd,
    Adam,
    AdamW,
}

fn builder(layout: &Layout, rule: Rule, mode: Mode, cap: u64) -> StepperBuilder<'_> {
    let builder = match rule {
        Rule::Sgd => Stepper::builder(layout, Sgd { momentum: 0.9, nesterov: true, ..Default::default() }),
        Rule::Adam => {
            Stepper::builder(layout, Adam { amsgrad: true, weight_decay: 0.1, ..Default::default() })
        }
        Rule::AdamW => Stepper::builder(layout, AdamW::default()),
    };
    builder.mode(mode).bucket_cap_bytes(cap).record(true)
}

/// Trains and returns all bits of parameters and states; calls `gradient_of(step, param, element)`.
fn train(mut stepper: Stepper, gradient_of: impl Fn(usize, usize, usize) -> Option<f32>) -> Vec<u32> {
    let layout = stepper.layout().clone();
    stepper
        .fill_params(|_, slice| slice.iter_mut().enumerate().for_each(|(k, p)| *p = k as f32 / 512.0))
        .unwrap();
    for step in 0..STEPS {
        let mut pass = stepper.begin().unwrap();
        for (param, id) in layout.ids().enumerate().rev() {
            let (params, mut grads) = pass.split();
            assert_eq!(params.get(id).unwrap().len(), LENS[param]);
            if gradient_of(step, param, 0).is_none() {
                continue;
            }
            let slice = grads.get_mut(id).unwrap();
            slice.iter_mut().enumerate().for_each(|(k, g)| *g = gradient_of(step, param, k).unwrap());
            pass.grad_ready(id).unwrap();
        }
        pass.finish().unwrap();
    }
    let mut bits = Vec::new();
    for id in layout.ids() {
        bits.extend(stepper.view::<f32>(id).unwrap().iter().map(|x| x.to_bits()));
        for name in stepper.state_names(id).unwrap() {
            bits.extend(stepper.view::<f32>(id.state(&name)).unwrap().iter().map(|x| x.to_bits()));
        }
        bits.push(stepper.step_count(id).unwrap() as u32);
    }
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), []);
    stepper.close().unwrap();
    bits
}

/// One parameter is unused on some ranks in one step, and another on all ranks in another step.
fn is_unused(step: usize, rank: usize, param: usize) -> bool {
    (step == 2 && param == 3 && rank % 2 == 1) || (step == 3 && param == 6)
}

fn assert_ranks_equal_one(world_size: u32, rule: Rule, mode: Mode, cap: u64) {
    let layout = layout();
    let ranks = in_process(world_size, |comm| {
        let rank = comm.rank() as usize;
        let stepper = builder(&layout, rule, mode, cap).host(comm)?;
        Ok::<_, instep::Error>(train(stepper, |step, param, k| {
            (!is_unused(step, rank, param)).then(|| gradient(step, rank, param, k))
        }))
    })
    .unwrap();
    let one = builder(&layout, rule, mode, cap).host(Presummed(world_size)).unwrap();
    let one = train(one, |step, param, k| {
        let used: Vec<usize> = (0..world_size as usize).filter(|&r| !is_unused(step, r, param)).collect();
        (!used.is_empty()).then(|| used.iter().map(|&r| gradient(step, r, param, k)).sum())
    });
    for (rank, bits) in ranks.iter().enumerate() {
        assert!(
            *bits == one,
            "{rule:?} {mode:?} cap {cap}: rank {rank} of {world_size} differs from one rank"
        );
    }
}

#[test]
fn any_number_of_ranks_gives_the_bits_of_one_rank_fed_the_sums() {
    for world_size in 1..=8 {
        for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
            assert_ranks_equal_one(world_size, Rule::AdamW, mode, 4096);
        }
        assert_ranks_equal_one(world_size, Rule::Sgd, Mode::Eager, 1);
        assert_ranks_equal_one(world_size, Rule::Adam, Mode::Normed, 1 << 20);
    }
}

#[test]
fn all_ranks_start_from_rank_zero_and_do_so_again_after_a_write() {
    let layout = Layout::builder().param("w", 300).build().unwrap();
    let values = in_process(3, |comm| {
        let rank = comm.rank() as f32;
        let mut stepper = Stepper::host(&layout, Sgd::default(), comm)?;
        let id = layout.id("w")?;
        for round in 0..2 {
            stepper.view_mut::<f32>(id)?.fill(rank + 10.0 * round as f32);
            stepper.begin()?.finish()?;
            assert_eq!(stepper.view::<f32>(id)?[299], 10.0 * round as f32);
        }
        Ok::<_, instep::Error>(stepper.view::<f32>(id)?.to_vec())
    })
    .unwrap();
    assert!(values.iter().flatten().all(|&w| w == 10.0));
}

#[test]
fn the_mean_is_taken_over_the_ranks() {
    let layout = Layout::builder().param("w", 2).build().unwrap();
    let values = in_process(4, |comm| {
        let rank = comm.rank() as f32;
        let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, comm)?;
        let id = layout.id("w")?;
        let mut pass = stepper.begin()?;
        pass.split().1.write(id, &[rank, 8.0])?;
        pass.bucket_ready(0)?;
        pass.finish()?;
        assert_eq!(stepper.view::<f32>(id.grad())?, [6.0, 32.0], "gradients stay sums");
        Ok::<_, instep::Error>(stepper.view::<f32>(id)?.to_vec())
    })
    .unwrap();
    assert!(values.iter().all(|w| w == &[-1.5, -8.0]));
}

#[test]
fn a_collective_may_read_one_buffer_and_write_another() {
    use instep::collective::{Call, CallKey, CollectiveKind};
    for kind in [CollectiveKind::AllReduce, CollectiveKind::Broadcast] {
        let results = in_process(3, |comm| {
            let mut source = vec![comm.rank() as f32 + 1.0; 1536];
            let mut target = vec![-1.0f32; 1536];
            let dtype = instep::dtype::DType::F32;
            let key = CallKey { kind, pass: 1, bucket: None, dtype, bytes: 1536 * 4, agreement: 0 };
            let [from, to] = [&mut source, &mut target].map(|buffer| bytemuck::cast_slice_mut(buffer));
            let mut call = Call::on_host(&comm, key, Some(from), to, std::time::Duration::from_secs(60))?;
            comm.enqueue(&mut call)?;
            assert!(source.iter().all(|&x| x == comm.rank() as f32 + 1.0), "the source is only read");
            Ok::<_, instep::Error>(target)
        })
        .unwrap();
        let expected = if kind == CollectiveKind::AllReduce { 6.0 } else { 1.0 };
        assert!(results.iter().flatten().all(|&x| x == expected), "{kind}");
    }
}

#[test]
fn absurd_world_sizes_are_refused_before_a_thread_is_started() {
    for world_size in [0, 1025, u32::MAX] {
        let outcome = in_process(world_size, |_| Ok::<_, instep::Error>(()));
        assert!(matches!(outcome, Err(instep::Error::Config { field: "world_size", .. })), "{world_size}");
    }
    let layout = layout();
    let refused = Stepper::host(&layout, Sgd::default(), Presummed(0));
    assert!(matches!(refused, Err(instep::Error::Config { field: "world_size", .. })));
}
