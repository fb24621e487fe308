//! Bytes per element that a step moves, and that stay in memory: timings are compared with this minimum.
//!
//! The bytes are counted from the accesses that the checker judges and from which executors take their pointers. They
//! are compared with sums over each tensor's single read and write. This library lacks some rows of the usual tables:
//! Kahan-compensated bf16 (a remainder replaces it), fp8 parameters, and f16 scales for groups of 32. Its own scales
//! are f32 for groups of 256.

use instep::bench::Launcher;
use instep::layout::{BucketCaps, Gradients, Plan, Storage, Tails};
use instep::op::{Action, Frozen, Memory, Op, Span, Stream};
use instep::{
    Adam, AdamW, DType, Isa, Lamb, Layout, Master, Moments, Optimizer, Precision, RmsProp, Rounding, Sgd,
};

/// Whole blocks and tiles, so there is no padding.
const ELEMENTS: u64 = 1 << 16;
/// Bytes per element for the scale of an 8-bit state: an f32 for 256 elements, read and written.
const SCALE: f64 = 4.0 / 256.0;

struct Row {
    /// p, g, master or remainder of p, states.
    resident: f64,
    moved: f64,
    optimizer: Box<dyn Optimizer>,
    storage: Storage,
    gradients: Gradients,
}

fn row(resident: f64, moved: f64, optimizer: impl Optimizer, storage: impl Into<Storage>) -> Row {
    let (optimizer, storage) = (Box::new(optimizer), storage.into());
    Row { resident, moved, optimizer, storage, gradients: Gradients::Keep }
}

#[rustfmt::skip] // A table: one row per line.
fn rows() -> Vec<Row> {
    use DType::{BF16, F16, F32};
    use Moments::EightBit;
    let (none, momentum) = (Sgd::default(), Sgd { momentum: 0.9, ..Sgd::default() });
    let (adamw, amsgrad) = (AdamW::default(), Adam { amsgrad: true, ..Adam::default() });
    let lamb = Lamb::default();
    let stochastic = Rounding::Stochastic { seed: 1 };
    let of = |param, grad, master, moments| Precision { param, grad, master, moments, rounding: Rounding::Nearest };
    let by_chance = |moments| Precision { rounding: stochastic, ..of(BF16, BF16, Master::None, moments) };
    let (plain, narrow) = (Precision::F32, |master, moments| of(BF16, BF16, master, moments));
    let with = |copy, ema| Storage { precision: plain, copy, ema };
    vec![
        row( 8.0, 12.0, none, plain),
        row(12.0, 20.0, momentum, plain),
        row(12.0, 20.0, momentum, narrow(Master::F32, Moments::F32)),
        row( 6.0, 10.0, momentum, by_chance(Moments::BF16)),
        row( 5.0 + SCALE, 8.0 + 2.0 * SCALE, momentum, narrow(Master::None, EightBit)),
        row(16.0, 28.0, adamw, plain),
        Row { gradients: Gradients::Zero, ..row(16.0, 32.0, adamw, plain) },
        Row { gradients: Gradients::Average, ..row(16.0, 32.0, adamw, plain) },
        Row { gradients: Gradients::Average, ..row( 8.0, 16.0, adamw, by_chance(Moments::BF16)) },
        row(20.0, 36.0, amsgrad, plain),
        row(12.0, 20.0, adamw, of(F32, F32, Master::None, Moments::BF16)),
        row(16.0, 28.0, adamw, narrow(Master::F32, Moments::F32)),
        row(16.0, 28.0, adamw, of(F16, F16, Master::F32, Moments::F32)),
        row(18.0, 30.0, adamw, of(BF16, F32, Master::F32, Moments::F32)),
        row(12.0, 20.0, adamw, narrow(Master::F32, Moments::BF16)),
        row(14.0, 26.0, adamw, narrow(Master::Remainder16, Moments::F32)),
        row(16.0, 28.0, adamw, of(BF16, F32, Master::Remainder16, Moments::F32)),
        row(10.0, 18.0, adamw, narrow(Master::Remainder16, Moments::BF16)),
        row(12.0, 22.0, adamw, by_chance(Moments::F32)),
        row( 8.0, 14.0, adamw, by_chance(Moments::BF16)),
        row(10.0 + 2.0 * SCALE, 16.0 + 4.0 * SCALE, adamw, of(F32, F32, Master::None, EightBit)),
        row( 6.0 + 2.0 * SCALE, 10.0 + 4.0 * SCALE, adamw, by_chance(EightBit)),
        row( 7.0 + 2.0 * SCALE, 12.0 + 4.0 * SCALE, adamw, narrow(Master::Remainder8, EightBit)),
        row( 8.0 + 2.0 * SCALE, 14.0 + 4.0 * SCALE, adamw, narrow(Master::Remainder16, EightBit)),
        row(10.0, 16.0, RmsProp { momentum: 0.9, ..RmsProp::default() }, of(BF16, F32, Master::None, Moments::BF16)),
        row(20.0, 36.0, adamw, with(None, true)),
        row(18.0, 30.0, adamw, with(Some(BF16), false)),
        row(20.0, 32.0, adamw, with(Some(F32), false)),
        // p, g, m and v, m and v written; p, m and v, p written.
        row(16.0, 40.0, lamb, plain),
        Row { gradients: Gradients::Zero, ..row(16.0, 44.0, lamb, plain) },
        Row { gradients: Gradients::Average, ..row(16.0, 44.0, lamb, plain) },
        row(20.0, 48.0, lamb, with(None, true)),
        row(18.0, 42.0, lamb, with(Some(BF16), false)),
        row(16.0, 40.0, lamb, narrow(Master::F32, Moments::F32)),
        row(10.0, 26.0, lamb, narrow(Master::Remainder16, Moments::BF16)),
        row(10.0 + 2.0 * SCALE, 22.0 + 6.0 * SCALE, lamb, of(F32, F32, Master::None, EightBit)),
    ]
}

/// A step writes f32 masters and copies without reading them, but no zeros over gradients that it has not read. A step
/// of two launches reads its inputs twice.
fn moved_bytes(plan: &Plan, states: usize, action: Action, launches: u64) -> u64 {
    let mut bytes = 0;
    let op = Op { stream: Stream::Optim, action };
    op.accesses(plan, states, &Frozen::default(), &mut |access| {
        let times = match access.span.memory {
            Memory::Control => 0,
            Memory::Copy => 1,
            Memory::Params if plan.storages()[0].precision.master == Master::F32 => 1,
            Memory::Params | Memory::Master | Memory::State(_) | Memory::Scales(_) => launches + 1,
            _ => 1 + u64::from(access.writes),
        };
        bytes += times * access.span.bytes();
    });
    bytes
}

#[test]
fn every_configuration_moves_and_keeps_the_bytes_that_its_tensors_have() {
    let layout = Layout::builder().param("w", ELEMENTS as usize).build().unwrap();
    let caps = BucketCaps { first_bytes: u64::MAX, rest_bytes: u64::MAX };
    for Row { resident, moved, optimizer, storage, gradients } in rows() {
        let states = optimizer.state_names().len();
        let plan = Plan::new(&layout, 1, caps, Tails::default(), storage).unwrap().with_gradients(gradients);
        let per_element = |bytes: u64| bytes as f64 / ELEMENTS as f64;
        let what = format!("{optimizer:?} {storage:?} {gradients:?}");
        let launches = if optimizer.descriptor().unwrap().is_scaled { 2 } else { 1 };
        let step = moved_bytes(&plan, states, Action::Step { bucket: 0, count: 1 }, launches);
        assert_eq!(per_element(step), moved, "{what}");
        let kept = Memory::of_tensors(&plan, states).map(|memory| Span::whole(memory, &plan).bytes()).sum();
        assert_eq!(per_element(kept), resident, "{what}");
        let norm = moved_bytes(&plan, states, Action::Norm { bucket: 0 }, 1);
        assert_eq!(norm, ELEMENTS * storage.precision.grad.bytes(), "{what}");
        if gradients == Gradients::Keep {
            let launcher =
                Launcher::new(&layout, &*optimizer, u64::MAX, 1, storage, Isa::Baseline, 1).unwrap();
            assert_eq!(per_element(launcher.step_bytes(0)), moved, "{what}: as the benches count");
        }
    }
}
