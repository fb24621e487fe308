//! Refusals of a layout, of options and of hyperparameters, before a stepper is built.
//!
//! Each row is the smallest wrong call of the public interface; no row depends on the machine.

use crate::support::Presummed;
use std::num::NonZeroU32;
use std::time::Duration;

use instep::optim::{Custom, LossScaler, LrSchedule, ParamStep, StepParam};
use instep::overlap::{Compressed, EnqueuedSum, Registry, SumHooked};
use instep::{
    Adam, Clip, Collective, DType, Divisor, Gradients, Isa, Layout, LayoutBuilder, Master, Mode, Moments,
    NAdam, Precision, Result, Rounding, SegmentAction, Sgd, Solo, Stepper, StepperBuilder, Strategy, Unused,
    bf16, in_process,
};

use super::Page;

/// A user's own optimizer, which only the host can run.
struct Own(&'static [&'static str]);

impl StepParam for Own {
    fn name(&self) -> &str {
        "own"
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.0
    }

    fn step_param(&self, _: ParamStep<'_>) -> Result<()> {
        Ok(())
    }
}

pub(super) fn one() -> Layout {
    Layout::builder().param("w", 4).build().unwrap()
}

pub(super) fn add(page: &mut Page) {
    layouts(page);
    options(page);
    precisions(page);
    optimizers(page);
    shards(page);
    registry(page);
}

fn shards(page: &mut Page) {
    let layout = one();
    let zero = |builder: StepperBuilder<'_>| builder.strategy(Strategy::Zero).host(Solo::default());
    page.refused(zero(Stepper::builder(&layout, Custom::new(Own(&[])))));
    page.refused(zero(Stepper::builder_without_optimizer(&layout)));
    let (sgd, two) = (|| Stepper::builder(&layout, Sgd::default()), NonZeroU32::new(2).unwrap());
    page.refused(zero(sgd().shard_size(two)));
    page.refused(sgd().shard_size(two).host(Solo::default()));
    page.refused(in_process(2, |comm| Collective::subgroup(&comm, &[comm.rank(), comm.rank()]).map(drop)));
    page.refused(Collective::subgroup(&Solo::default(), &[0]).map(drop));
    let several = Stepper::builder(&layout, Sgd::default()).strategy(Strategy::Zero);
    page.refused(several.host(Presummed(2)));
    let mut stepper = zero(Stepper::builder(&layout, Adam::default())).unwrap();
    let w = layout.ids().next().unwrap();
    page.refused(stepper.rebuild_buckets());
    page.refused(in_process(2, |comm| {
        let stepper = sgd_with_momentum(&layout).strategy(Strategy::Zero).host(comm)?;
        stepper.view::<f32>(w.state("momentum_buffer")).map(drop)
    }));
    let only_on_gpus = SumHooked::on_gpu(Solo::default(), |_: &EnqueuedSum<'_>| Ok(()));
    page.refused(sgd().host(only_on_gpus));
}

fn sgd_with_momentum(layout: &Layout) -> StepperBuilder<'_> {
    Stepper::builder(layout, Sgd { momentum: 0.9, ..Sgd::default() })
}

fn layouts(page: &mut Page) {
    let layout = one;
    let builder = Layout::builder;
    let cases: [LayoutBuilder; 6] = [
        builder(),
        builder().uses(2).param("a", 1),
        builder().param("", 1),
        builder().param("a", 1).param("a", 2),
        builder().param("a", 1).uses(0),
        builder().param("a", 1 << 55).param("b", 1 << 55),
    ];
    cases.into_iter().for_each(|case| page.refused(case.build()));
    page.refused(layout().id("weight"));
    let other = builder().param("other", 9).build().unwrap();
    page.refused(layout().parameter(other.ids().next().unwrap()));
    let plan = Stepper::host(&layout(), Sgd::default(), Solo::default()).unwrap().plan().clone();
    page.refused(plan.reordered(&layout(), &[0, 0]));
}

fn options(page: &mut Page) {
    let layout = one();
    let mut row = |change: fn(StepperBuilder<'_>) -> StepperBuilder<'_>| {
        page.refused(change(Stepper::builder(&layout, Sgd::default())).host(Solo::default()));
    };
    row(|b| b.clip(Clip::Global(-1.0)).mode(Mode::Normed));
    row(|b| b.clip(Clip::Global(1.0)).mode(Mode::Eager));
    row(|b| b.skip_nonfinite(true).clip(Clip::PerBucket(1.0)).mode(Mode::Normed));
    row(|b| b.loss_scale(LossScaler::default()).clip(Clip::PerBucket(1.0)).mode(Mode::Normed));
    row(|b| b.skip_nonfinite(true).mode(Mode::Eager));
    row(|b| b.loss_scale(LossScaler::default()).mode(Mode::Eager));
    row(|b| b.loss_scale(LossScaler { growth_factor: 1.0, ..LossScaler::default() }).mode(Mode::Normed));
    row(|b| b.loss_scale(LossScaler { backoff_factor: 1.0, ..LossScaler::default() }).mode(Mode::Normed));
    row(|b| b.loss_scale(LossScaler { growth_interval: 0, ..LossScaler::default() }).mode(Mode::Normed));
    row(|b| b.loss_scale(0.0));
    row(|b| b.ema(2.0));
    row(|b| b.threads(0));
    row(|b| b.deadline(Duration::ZERO));
    row(|b| b.bucket_cap_bytes(0));
    row(|b| b.group("heads", Sgd::default()));
    row(|b| b.group("default", Sgd::default()).group("default", Sgd::default()));
    row(|b| b.lr_schedule("heads", LrSchedule::constant(0.1)));
    row(|b| {
        b.lr_schedule("default", LrSchedule::constant(0.1)).lr_schedule("default", LrSchedule::constant(0.1))
    });
    row(|b| b.then("default", Sgd::default()).lr_schedule("default", LrSchedule::constant(0.1)));
    let ids: Vec<_> = layout.ids().collect();
    let twice = [ids[0], ids[0]];
    page.refused(
        Stepper::builder(&layout, Sgd::default()).attach(&twice, Sgd::default()).host(Solo::default()),
    );
    let excluded = Stepper::builder(&layout, Sgd::default()).optimize_only(Some(&[]));
    page.refused(excluded.optimizer_for(&ids, Sgd::default()).host(Solo::default()));
    let averaged = Layout::builder().param("w", 4).action(SegmentAction::Average).build().unwrap();
    let own: Vec<_> = averaged.ids().collect();
    page.refused(
        Stepper::builder(&averaged, Sgd::default()).optimizer_for(&own, Sgd::default()).host(Solo::default()),
    );
    let empty = Layout::builder().param("w", 0).build().unwrap();
    let uneven = Stepper::builder(&empty, Sgd::default()).uneven_inputs(Divisor::WorldSize);
    page.refused(uneven.host(Solo::default()));
    page.refused(in_process(0, |_| Ok(())));
    page.refused("sse9".parse::<Isa>());
    if let Some(isa) = [Isa::Avx2, Isa::Avx512].into_iter().find(|isa| !isa.is_available()) {
        page.refused(Stepper::builder(&layout, Sgd::default()).isa(isa).host(Solo::default()));
    }
}

fn precisions(page: &mut Page) {
    let layout = one();
    let mut row = |precision: Precision| {
        page.refused(Stepper::builder(&layout, Adam::default()).precision(precision).host(Solo::default()));
    };
    let with = |param, master| Precision { param, master, ..Precision::F32 };
    let stochastic = Rounding::Stochastic { seed: 1 };
    row(with(DType::F32, Master::F32));
    row(with(DType::F16, Master::Remainder16));
    row(Precision { rounding: stochastic, ..Precision::F32 });
    row(Precision { rounding: stochastic, ..with(DType::F16, Master::None) });
    let few = Adam { eps: 1e-15, ..Adam::default() };
    let codes = Precision { moments: Moments::EightBit, ..Precision::F32 };
    page.refused(Stepper::builder(&layout, few).precision(codes).host(Solo::default()));
    let bf16_gradients = Precision { grad: DType::BF16, ..Precision::F32 };
    let many = Stepper::builder(&layout, Sgd::default()).precision(bf16_gradients);
    page.refused(many.unused(Unused::Skip).host(Presummed(512)));
    let compressed = |world_size| Compressed::bf16(Presummed(world_size)).unwrap();
    page.refused(Stepper::builder(&layout, Sgd::default()).host(compressed(512)));
    page.refused(Stepper::builder(&layout, Sgd::default()).precision(bf16_gradients).host(compressed(1)));
    page.refused(compressed(1).pre_scale(0.5));
    page.refused(Compressed::f16(Solo::default()).unwrap().pre_scale(0.3));
    page.refused(Compressed::f16(compressed(1)));
    let stepper = Stepper::host(&layout, Sgd::default(), Solo::default()).unwrap();
    let id = layout.ids().next().unwrap();
    page.refused(stepper.view::<bf16>(id));
    page.refused(stepper.view::<bf16>(id.grad()));
    page.refused(stepper.view::<bf16>(id.copy()));
    page.refused(stepper.read(id.ema(), &mut [0.0; 4]));
}

fn optimizers(page: &mut Page) {
    let layout = one();
    let mut sgd = |sgd: Sgd| page.refused(Stepper::host(&layout, sgd, Solo::default()));
    sgd(Sgd { lr: -1.0, ..Sgd::default() });
    sgd(Sgd { lr: 1e-50, ..Sgd::default() });
    sgd(Sgd { dampening: f64::NAN, ..Sgd::default() });
    sgd(Sgd { nesterov: true, ..Sgd::default() });
    let betas = Adam { betas: (1.0, 0.999), ..Adam::default() };
    page.refused(Stepper::host(&layout, betas, Solo::default()));
    let overflows = NAdam { lr: 1e38, ..NAdam::default() };
    page.refused(Stepper::host(&layout, overflows, Solo::default()));
    page.refused(Stepper::host(&layout, Custom::new(Own(&["a", "b", "c", "d"])), Solo::default()));
    page.refused(Stepper::host(&layout, Custom::new(Own(&["a.b"])), Solo::default()));
    let own = || Stepper::builder(&layout, Custom::new(Own(&[])));
    let bf16_parameters = Precision { param: DType::BF16, ..Precision::F32 };
    page.refused(own().precision(bf16_parameters).host(Solo::default()));
    page.refused(own().copy_params(DType::BF16).host(Solo::default()));
    page.refused(own().gradients(Gradients::Keep).ema(0.5).host(Solo::default()));
}

fn registry(page: &mut Page) {
    let registry = Registry::standard();
    page.refused(registry.resolve("LARS").map(drop));
    page.refused(Registry::new().resolve("LARS").map(drop));
    let sgd = registry.resolve("SGD").unwrap();
    page.refused(sgd.build(&[("beta1", 0.5)]));
    page.refused(sgd.build(&[("nesterov", 0.5)]));
    page.refused(sgd.build(&[("lr", 0.5), ("lr", 0.5)]));
}
