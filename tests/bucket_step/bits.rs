//! A stepper and separate buckets give the same bits, in every precision, wherever tensors lie and in any order.
//!
//! Between steps the tensors move to other addresses, and the buckets run in another order.

use instep::layout::{ForeignBucket, Storage};
use instep::{BucketStep, Isa, Layout, Mode, ParamId, Pool, Scaling, Solo};

use super::memory::Own;
use crate::support::stored::{EMA_DECAY, Stored, cases, dyadic, with};
use crate::support::{Optim, Options, Presummed, few_optimizers, layout, optimizers, paint, pass};

/// The lengths include a partial block of 256 and more than one tile.
const LENGTHS: [usize; 6] = [300, 0, 1, 2049, 512, 17];
const STEPS: usize = 4;
const WORLD_SIZE: u32 = 3;

/// The value is exact in every type, so a master begins with its parameter's bits.
fn first_value(param: usize, element: usize) -> f32 {
    dyadic(7, 1, param, element)
}

fn expected(layout: &Layout, storage: &Storage, optim: Optim) -> Stored {
    let builder = with(optim.builder(layout), storage).mode(Mode::Sequential).threads(1);
    let mut stepper = builder.host(Presummed(WORLD_SIZE)).unwrap();
    for (param, id) in layout.ids().enumerate() {
        let values: Vec<f32> = (0..LENGTHS[param]).map(|k| first_value(param, k)).collect();
        stepper.write(id, &values).unwrap();
    }
    for step in 0..STEPS {
        pass(&mut stepper, &Options::default(), |param, values| {
            values.iter_mut().enumerate().for_each(|(k, g)| *g = dyadic(step, 0, param, k));
            true
        })
        .unwrap();
    }
    Stored::of(&stepper).unwrap()
}

/// One bucket of a model, in memory of the test.
struct Alone {
    step: BucketStep,
    own: Own,
    params: Vec<usize>,
}

impl Alone {
    fn new(layout: &Layout, params: &[usize], storage: &Storage, optim: Optim, case: usize) -> Alone {
        let ids: Vec<ParamId> = params.iter().map(|param| layout.ids().nth(*param).unwrap()).collect();
        let states = optim.boxed().state_names().len();
        let mut own = Own::new(layout, &ids, (storage, states), case.is_multiple_of(2), case % 5);
        for (index, param) in params.iter().enumerate() {
            let values: Vec<f32> = (0..LENGTHS[*param]).map(|k| first_value(*param, k)).collect();
            own.write(index, &values, false);
        }
        let described = ids.iter().zip(&own.offsets);
        let bucket = described.fold(ForeignBucket::new(own.len), |b, (id, at)| b.gradient(*id, *at));
        let isas = Isa::available();
        let mut builder =
            BucketStep::builder(layout, optim.boxed()).bucket(bucket).isa(isas[case % isas.len()]);
        builder = builder.precision(storage.precision).pool(Pool::new(1 + case % 3).unwrap());
        builder = match storage.copy {
            Some(dtype) => builder.copy_params(dtype),
            None => builder,
        };
        builder = if storage.ema { builder.ema(EMA_DECAY) } else { builder };
        Alone { step: builder.host().unwrap(), own, params: params.to_vec() }
    }

    fn take_step(&mut self, step: usize) {
        for (index, param) in self.params.iter().enumerate() {
            let values: Vec<f32> = (0..LENGTHS[*param]).map(|k| dyadic(step, 0, *param, k)).collect();
            self.own.write(index, &values, true);
        }
        let Alone { step, own, .. } = self;
        own.lend(|tensors| step.step(tensors, Scaling::mean(WORLD_SIZE))).unwrap();
    }

    fn assert_same(&self, expected: &Stored, what: &dyn std::fmt::Debug) {
        self.own.assert_same(&self.params, &self.step, expected, what);
    }
}

#[test]
fn buckets_alone_give_a_steppers_bits_in_any_order_and_at_changing_addresses() {
    let layout = layout(&LENGTHS);
    for (case, (storage, optim)) in cases().enumerate() {
        let expected = expected(&layout, &storage, optim);
        let groups: [&[&[usize]]; 3] =
            [&[&[5, 3, 0], &[2, 4, 1]], &[&[0, 1, 2, 3, 4, 5]], &[&[3], &[1, 0], &[5, 4, 2]]];
        let parts = groups[case % 3].iter().map(|params| Alone::new(&layout, params, &storage, optim, case));
        let mut parts: Vec<Alone> = parts.collect();
        for step in 0..STEPS {
            parts.rotate_left(step % groups[case % 3].len());
            for alone in &mut parts {
                alone.take_step(step);
                alone.own = alone.own.moved(&layout, (case + step) % 2 == 0, (case + step) % 7);
            }
        }
        parts.iter().for_each(|alone| alone.assert_same(&expected, &(storage, optim, case)));
    }
}

#[test]
fn every_optimizer_gives_a_steppers_bits() {
    let layout = layout(&LENGTHS);
    for (case, optim) in optimizers().into_iter().enumerate() {
        let expected = expected(&layout, &Storage::default(), optim);
        let mut alone = Alone::new(&layout, &[4, 0, 3, 5, 1, 2], &Storage::default(), optim, case);
        (0..STEPS).for_each(|step| alone.take_step(step));
        alone.assert_same(&expected, &optim);
    }
}

#[test]
fn a_resumed_bucket_continues_with_the_same_bits() {
    let layout = layout(&LENGTHS);
    for optim in few_optimizers() {
        let expected = expected(&layout, &Storage::default(), optim);
        let mut alone = Alone::new(&layout, &[3, 0], &Storage::default(), optim, 0);
        (0..2).for_each(|step| alone.take_step(step));
        let mut resumed = Alone::new(&layout, &[3, 0], &Storage::default(), optim, 0);
        resumed.own = alone.own.clone();
        for id in alone.own.ids.clone() {
            let count = alone.step.step_count(id).unwrap();
            match alone.step.carried(id).unwrap() {
                None => resumed.step.set_step_count(id, count).unwrap(),
                Some(carried) => resumed.step.set_step_count(id, (count, carried)).unwrap(),
            }
        }
        (2..STEPS).for_each(|step| resumed.take_step(step));
        resumed.assert_same(&expected, &optim);
    }
}

#[test]
fn a_learning_rate_that_changes_between_steps_gives_a_steppers_bits() {
    let layout = layout(&[700]);
    let id = layout.id("p0").unwrap();
    let rate = |step: usize| instep::AdamW { lr: 0.1 / (step + 1) as f64, ..Default::default() };
    let gradient = |step: usize| -> Vec<f32> { (0..700).map(|k| paint(step, k)).collect() };
    let mut stepper = instep::Stepper::host(&layout, rate(0), Solo::default()).unwrap();
    let mut alone = BucketStep::builder(&layout, rate(0)).host().unwrap();
    let [mut params, mut first, mut second] = [(); 3].map(|()| vec![0f32; 700]);
    for step in 0..STEPS {
        stepper.set_lr("default", rate(step).lr).unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.write(id.grad(), &gradient(step)).unwrap();
        pass.finish().unwrap();
        alone.set_lr("default", rate(step).lr).unwrap();
        use instep::bucket_step::{Lent, StepTensors};
        let grads = gradient(step);
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads))
            .states([Lent::slice_mut(&mut first), Lent::slice_mut(&mut second)]);
        alone.step(&tensors, Scaling::NONE).unwrap();
    }
    assert_eq!(stepper.view::<f32>(id).unwrap(), params);
}
