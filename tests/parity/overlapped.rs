//! T-DDP-4: overlapped steps of all parameters or of few equal ordinary steps; other parameters keep their bits.
//!
//! Two ranks in Eager have the bits of one in Sequential that gets their sums; a tenth of the width is compared with
//! f64. Half of the cases sum through a hook. The subsets are those of PyTorch: the first parameter, all, and the empty
//! list that means none.

use instep::overlap::{GradBucket, Hooked};
use instep::{
    Adam, AdamW, InProcess, Layout, Mode, ParamId, Result, Sgd, Stepper, StepperBuilder, in_process,
};

use super::network::{Activation, Linear, Network, sum};
use super::ranks::{as_f32, batch_of, initialise, iterate, layout_of, step_ordinary};
use super::{Ordinary, assert_close, assert_like, ids, resnet};
use crate::support::{Optim, Presummed, assert_same_bits};

const ITERATIONS: usize = 6;
const RANKS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subset {
    First,
    All,
    Nothing,
}

const SUBSETS: [Subset; 3] = [Subset::First, Subset::All, Subset::Nothing];

impl Subset {
    fn has(self, param: usize) -> bool {
        self == Subset::All || self == Subset::First && param == 0
    }

    fn of<'a>(self, builder: StepperBuilder<'a>, all: &[ParamId]) -> StepperBuilder<'a> {
        match self {
            Subset::First => builder.optimize_only(Some(&all[..1])),
            Subset::All => builder.optimize_only(None),
            Subset::Nothing => builder.optimize_only(Some(&[])),
        }
    }
}

fn optimizers() -> [Optim; 3] {
    let (lr, betas, eps) = (1e-2, (0.9, 0.99), 1e-6);
    [
        Optim::of(AdamW { lr, betas, eps, ..AdamW::default() }),
        Optim::of(Adam { lr, betas, eps, ..Adam::default() }),
        Optim::of(Sgd { lr, momentum: 0.9, weight_decay: 0.01, ..Sgd::default() }),
    ]
}

fn build(layout: &Layout, comm: InProcess, optim: Optim, subset: Subset, is_hooked: bool) -> Result<Stepper> {
    finish(optim.builder(layout), layout, comm, subset, is_hooked)
}

fn finish(
    builder: StepperBuilder<'_>,
    layout: &Layout,
    comm: InProcess,
    subset: Subset,
    is_hooked: bool,
) -> Result<Stepper> {
    let all: Vec<ParamId> = layout.ids().collect();
    let builder = subset.of(builder.mode(Mode::Eager), &all);
    if is_hooked {
        builder.host(Hooked::new(comm, |bucket: &mut GradBucket<'_>| bucket.all_reduce()))
    } else {
        builder.host(comm)
    }
}

/// Returns two layers without biases.
fn large_net(inputs: usize, hidden: usize, outputs: usize) -> Network {
    let linear = |weight, inputs, outputs| Linear { weight, bias: None, inputs, outputs };
    Network::new(vec![linear(0, inputs, hidden), linear(1, hidden, outputs)], Activation::None)
}

/// Makes one pass of the stepper that replaces all ranks, with gradients at its parameters.
fn iterate_alone(stepper: &mut Stepper, network: &mut Network, iteration: usize) -> Result<()> {
    let ids = ids(stepper);
    let values: Vec<Vec<f32>> =
        ids.iter().map(|id| Ok(stepper.view::<f32>(*id)?.to_vec())).collect::<Result<_>>()?;
    network.set_params(values.into_iter());
    let of = |rank| network.gradients(&batch_of(network, rank, iteration), sum);
    let mut pass = stepper.begin()?;
    for (param, (first, second)) in of(0).iter().zip(of(1)).enumerate().rev() {
        let sums: Vec<f32> = as_f32(first).iter().zip(as_f32(&second)).map(|(a, b)| a + b).collect();
        pass.grads().write(ids[param], &sums)?;
        pass.grad_ready(ids[param])?;
    }
    pass.finish()
}

/// Returns all that two steppers hold, as numbers, with the gradients of parameters that are not stepped.
fn held(stepper: &Stepper, subset: Subset) -> Result<Vec<Vec<u64>>> {
    let mut held = resnet::digests(stepper)?;
    for (param, id) in ids(stepper).into_iter().enumerate() {
        if !subset.has(param) {
            held[param].push(resnet::digest(stepper.view::<f32>(id.grad())?));
        }
    }
    Ok(held)
}

#[test]
fn ddp_4_large_net_overlapped_is_large_net_in_ordinary_steps() {
    for (k, optim) in optimizers().into_iter().enumerate() {
        for (n, subset) in SUBSETS.into_iter().enumerate() {
            // One case has the whole width, the others a tenth: a bit does not depend on it.
            let width = if (k, subset) == (0, Subset::All) { 10 } else { 1 };
            let network = large_net(100 * width, 200 * width, 50 * width);
            let layout = layout_of(&network);
            // Where nothing moves, one iteration says what six would.
            let iterations = if subset == Subset::Nothing { 1 } else { ITERATIONS };
            let ranks = in_process(RANKS as u32, |comm| {
                let rank = comm.rank() as usize;
                let mut stepper = build(&layout, comm, optim, subset, (k + n) % 2 == 0)?;
                initialise(&mut stepper, &network)?;
                (0..iterations).try_for_each(|iteration| iterate(&mut stepper, &network, rank, iteration))?;
                for (param, id) in ids(&stepper).into_iter().enumerate() {
                    let (now, before) = (stepper.view::<f32>(id)?, as_f32(&network.params()[param]));
                    assert_eq!(now != before, subset.has(param), "{optim:?}, {subset:?}");
                    if !subset.has(param) {
                        assert_same_bits(now, &before, "untouched");
                    }
                }
                held(&stepper, subset)
            });
            let all: Vec<ParamId> = layout.ids().collect();
            let builder = subset.of(optim.builder(&layout).mode(Mode::Sequential), &all);
            let mut alone = builder.host(Presummed(RANKS as u32)).unwrap();
            initialise(&mut alone, &network).unwrap();
            let mut own = network.clone();
            (0..iterations).for_each(|iteration| iterate_alone(&mut alone, &mut own, iteration).unwrap());
            let expected = held(&alone, subset).unwrap();
            for rank in ranks.unwrap() {
                assert_eq!(rank, expected, "{optim:?}, {subset:?}");
            }
        }
    }
}

#[test]
fn ddp_4_a_tenth_of_large_net_follows_ordinary_optimizers_in_f64() {
    for (k, optim) in optimizers().into_iter().enumerate() {
        for (n, subset) in SUBSETS.into_iter().enumerate() {
            in_process(RANKS as u32, |comm| {
                let (rank, mut network) = (comm.rank() as usize, large_net(100, 200, 50));
                let layout = layout_of(&network);
                let mut stepper = build(&layout, comm, optim, subset, (k + n) % 2 == 1)?;
                initialise(&mut stepper, &network)?;
                let mut ordinary = Ordinary::new(&network, |_| vec![optim.rule()]);
                for iteration in 0..ITERATIONS {
                    let what = format!("{optim:?}, {subset:?}, rank {rank}, iteration {iteration}");
                    iterate(&mut stepper, &network, rank, iteration)?;
                    let mean = super::ranks::averaged(&network, RANKS, iteration);
                    step_ordinary(&mut ordinary, &mut network, RANKS, iteration, |param| subset.has(param));
                    assert_like(&stepper, &network, &ordinary, &what)?;
                    for (param, id) in ids(&stepper).into_iter().enumerate().filter(|(k, _)| !subset.has(*k))
                    {
                        assert_close(
                            stepper.view::<f32>(id.grad())?,
                            &mean[param],
                            &format!("the average, {what}"),
                        );
                    }
                }
                stepper.close()
            })
            .unwrap();
        }
    }
}

/// There are fewer iterations, because each moves a gigabyte.
#[test]
fn ddp_4_the_shapes_of_resnet50_overlapped_are_ordinary_steps() {
    const STEPS: usize = 2;
    let [adamw, adam, sgd] = optimizers();
    for (shapes, optim, subset, is_hooked) in [
        (resnet::whole(), adamw, Subset::All, false),
        (resnet::sixteenth(), adam, Subset::All, true),
        (resnet::sixteenth(), sgd, Subset::All, true),
        (resnet::sixteenth(), adamw, Subset::First, true),
        (resnet::sixteenth(), sgd, Subset::Nothing, false),
    ] {
        let layout = &shapes.layout;
        let ranks = in_process(RANKS as u32, |comm| {
            let rank = comm.rank() as usize;
            let builder = shapes.capped(optim.builder(layout));
            let mut stepper = finish(builder, layout, comm, subset, is_hooked)?;
            resnet::initialise(&mut stepper, 0)?;
            let before = resnet::digests(&stepper)?;
            (0..STEPS).try_for_each(|step| resnet::pass(&mut stepper, step, rank..rank + 1, false))?;
            for (param, (now, before)) in resnet::digests(&stepper)?.iter().zip(&before).enumerate() {
                assert_eq!(now[0] != before[0], subset.has(param), "{optim:?}, {subset:?}, p{param}");
            }
            held(&stepper, subset)
        });
        let all: Vec<ParamId> = layout.ids().collect();
        let builder = subset.of(optim.builder(layout).mode(Mode::Sequential), &all);
        let mut alone = builder.host(Presummed(RANKS as u32)).unwrap();
        resnet::initialise(&mut alone, 0).unwrap();
        (0..STEPS).for_each(|step| resnet::pass(&mut alone, step, 0..RANKS, false).unwrap());
        let expected = held(&alone, subset).unwrap();
        assert!(ranks.unwrap().iter().all(|rank| *rank == expected), "{optim:?}, {subset:?}");
    }
}
