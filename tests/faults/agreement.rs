//! Ranks compare each setting that a trainer changes between passes. If only one rank changes it, that rank gets an
//! error in the next pass, also after passes in which the ranks agreed.
//!
//! The number that ranks compare is kept from pass to pass, so each setter must reset it. A setter that the table lacks
//! is not checked.

use std::io::Cursor;

use instep::checkpoint;
use instep::layout::DEFAULT_GROUP;
use instep::{
    Clip, DType, Error, InProcess, Layout, LossScaler, LrSchedule, Master, Mode, NAdam, Optimizer, ParamId,
    Precision, Result, ScalerState, Stepper, StepperBuilder, Strategy, Unused, in_process,
};

const LEN: usize = 600;

type Build = for<'a> fn(StepperBuilder<'a>) -> StepperBuilder<'a>;
type Set = fn(&mut Stepper, ParamId) -> Result<()>;

/// The setter, the stepper's options, the call, and a word of the error.
struct Setter(&'static str, Build, Set, &'static str);

fn plainly(builder: StepperBuilder<'_>) -> StepperBuilder<'_> {
    builder
}

fn with_master(builder: StepperBuilder<'_>) -> StepperBuilder<'_> {
    builder.precision(Precision { param: DType::BF16, master: Master::F32, ..Precision::F32 })
}

fn sharded_with_master(builder: StepperBuilder<'_>) -> StepperBuilder<'_> {
    with_master(builder).strategy(Strategy::Zero)
}

fn fully_sharded(builder: StepperBuilder<'_>) -> StepperBuilder<'_> {
    builder.strategy(Strategy::Fsdp)
}

const HYPER: &str = "hyperparameters";
const LOADED: &str = "loaded";

const SETTERS: &[Setter] = &[
    Setter("set_lr", plainly, |s, _| s.set_lr(DEFAULT_GROUP, 0.5), "lr"),
    Setter("set_hyper", plainly, |s, _| s.set_hyper(DEFAULT_GROUP, &[("eps", 0.5)]), "eps"),
    Setter(
        "set_lr_schedule",
        plainly,
        |s, _| s.set_lr_schedule(DEFAULT_GROUP, Some(LrSchedule::constant(0.5))),
        "lr",
    ),
    Setter(
        "set_schedule_step",
        |builder| builder.lr_schedule(DEFAULT_GROUP, LrSchedule::step(1.0, 3, 0.5)),
        |s, _| s.set_schedule_step(30),
        "lr",
    ),
    Setter("set_lr_multiplier", plainly, |s, id| s.set_lr_multiplier(id, 0.5), HYPER),
    Setter("set_frozen", plainly, |s, id| s.set_frozen(id, true), "frozen"),
    Setter(
        "set_scaler_state",
        |builder| builder.mode(Mode::Normed).loss_scale(LossScaler::default()),
        |s, _| s.set_scaler_state(ScalerState { scale: 2.0, growth_tracker: 1 }),
        "loss scaler",
    ),
    Setter(
        "set_previous_norm",
        |builder| builder.clip(Clip::Previous(1.0)),
        |s, _| s.set_previous_norm(Some(0.5)),
        "previous norm",
    ),
    Setter("set_step_count", plainly, |s, id| s.set_step_count(id, (7, 0.5)), LOADED),
    Setter("write of a state", plainly, |s, id| s.write(id.state("exp_avg"), &[0.5; LEN]), LOADED),
    Setter(
        "view_mut of a state",
        plainly,
        |s, id| s.view_mut::<f32>(id.state("exp_avg")).map(|state| state[0] = 0.5),
        LOADED,
    ),
    Setter("write of an average", |b| b.ema(0.5), |s, id| s.write(id.ema(), &[0.5; LEN]), LOADED),
    Setter("write of a parameter", plainly, |s, id| s.write(id, &[0.5; LEN]), "written"),
    Setter("fill_params", plainly, |s, _| s.fill_params(|_, values| values.fill(0.5)), "written"),
    Setter(
        "view_mut of a parameter",
        plainly,
        |s, id| s.view_mut::<f32>(id).map(|values| values[0] = 0.5),
        "written",
    ),
    Setter("write of a master", with_master, |s, id| s.write(id, &[0.5; LEN]), "written"),
    Setter("write of shards of masters", sharded_with_master, |s, id| s.write(id, &[0.5; LEN]), "written"),
    Setter("write of shards", fully_sharded, |s, id| s.write(id, &[0.5; LEN]), "written"),
    Setter(
        "write of a shard's state",
        fully_sharded,
        |s, id| s.write(id.state("exp_avg"), &[0.5; LEN]),
        LOADED,
    ),
    Setter(
        "set_unused after a hand-over",
        |builder| builder.mode(Mode::Sequential),
        |s, id| {
            let mut pass = s.begin()?;
            give(&mut pass)?;
            pass.set_unused(&[id])?;
            pass.finish()
        },
        "unused",
    ),
    Setter(
        "read of a checkpoint",
        plainly,
        |s, _| {
            let mut file = Vec::new();
            checkpoint::write(s, &mut file)?;
            checkpoint::read(s, Cursor::new(file)).map(drop)
        },
        LOADED,
    ),
];

fn nadam() -> impl Optimizer + Copy + 'static {
    NAdam { lr: 1.0, ..NAdam::default() }
}

/// Hands over a gradient of every parameter that has one.
fn give(pass: &mut Stepper) -> Result<()> {
    for id in pass.layout().clone().ids().rev() {
        if !pass.is_frozen(id)? {
            pass.write(id.grad(), &[1.0; LEN])?;
            pass.grad_ready(id)?;
        }
    }
    Ok(())
}

fn pass(stepper: &mut Stepper) -> Result<()> {
    let mut pass = stepper.begin()?;
    give(&mut pass)?;
    pass.finish()
}

/// Makes two passes, the call on some ranks, and two more passes. Where the call makes a pass, all other ranks make a
/// pass too.
fn run(setter: &Setter, callers: &[u32], comm: InProcess) -> Result<()> {
    let Setter(what, build, set, _) = setter;
    let layout = Layout::builder().param("a", LEN).param("b", LEN).build()?;
    let calls = callers.contains(&comm.rank());
    let builder = Stepper::builder(&layout, nadam()).unused(Unused::StepZero).bucket_cap_bytes(1);
    let mut stepper = build(builder).host(comm)?;
    for _ in 0..2 {
        pass(&mut stepper)?;
    }
    if calls {
        set(&mut stepper, layout.id("b")?)?;
    } else if what.starts_with("set_unused") {
        pass(&mut stepper)?;
    }
    for _ in 0..2 {
        pass(&mut stepper)?;
        stepper.status()?;
    }
    stepper.close()
}

#[test]
fn a_rank_that_alone_sets_anything_after_a_pass_is_told_in_the_next_one() {
    for setter in SETTERS {
        let Setter(what, _, _, word) = setter;
        in_process(2, |comm| run(setter, &[0, 1], comm))
            .unwrap_or_else(|error| panic!("{what} on all ranks: {error}"));
        for rank in 0..2 {
            let error = in_process(2, |comm| run(setter, &[rank], comm))
                .err()
                .unwrap_or_else(|| panic!("{what} on rank {rank} alone: nobody is told"));
            match error.cause() {
                Error::Mismatch { differs, .. } => {
                    assert!(differs.contains(word), "{what} on rank {rank}: {differs}");
                }
                other => panic!("{what} on rank {rank}: {other}"),
            }
        }
    }
}

/// Later passes do not repeat a comparison, so a call that changes nothing has no effect.
#[test]
fn a_rank_that_sets_what_it_has_agrees_with_the_others_after_a_write() {
    let layout = Layout::builder().param("a", LEN).param("b", LEN).build().unwrap();
    in_process(2, |comm| {
        let is_first = comm.rank() == 0;
        let mut stepper = Stepper::builder(&layout, nadam()).host(comm)?;
        pass(&mut stepper)?; // the first one gives all ranks rank 0's parameters
        stepper.write(layout.id("b")?, &[0.5; LEN])?;
        pass(&mut stepper)?;
        if is_first {
            stepper.set_lr(DEFAULT_GROUP, 1.0)?;
        }
        pass(&mut stepper)?;
        stepper.close()
    })
    .unwrap_or_else(|error| panic!("a rank that sets what it has: {error}"));
}
