//! Parameters of several precisions in one stepper: each trains to the bits of a stepper with only its precision.
//!
//! Groups have precisions, and single parameters have types. Gradients are dyadic, so sums and norms are exact in every
//! type, and one clip or skip over all buckets equals that of every reference.

use std::cell::Cell;
use std::io::Cursor;

use instep::checkpoint;
use instep::layout::Storage;
use instep::{DType, Device, Gradients, Layout, Mode, Precision, Sgd, Solo, Stepper, StepperBuilder, Unused};
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::select;

use crate::schedule::property::for_all;
use crate::support::stored::{Stored, accepted, dyadic, with};
use crate::support::{MODES, Optim, Options, few_optimizers, one_per_state_count, paint_params, pass};

const GROUPS: [&str; 3] = ["default", "first", "second"];
pub(crate) const STEPS: usize = 4;
/// The parameter that gets an infinite gradient in the third pass, if passes may be skipped.
const SPOILED: usize = 2;

/// A parameter: its length, its group, the type that it may have, and whether it is local.
type Param = (usize, usize, Option<DType>, bool);

#[derive(Clone, Debug)]
pub(crate) struct Case {
    params: Vec<Param>,
    precisions: [Precision; 3],
    copy: Option<DType>,
    ema: bool,
    optim: Optim,
    options: Options,
    /// The parameter that is frozen in the second and third pass; the index wraps.
    frozen: Option<usize>,
    /// The parameter without a gradient in the second pass.
    unused: Option<usize>,
    rebuilds: bool,
    /// All parameters get a second optimizer after the second pass.
    adds: bool,
}

pub(crate) fn case() -> impl Strategy<Value = Case> {
    let types = select(vec![DType::F32, DType::BF16, DType::F16]);
    let length = select(vec![0usize, 1, 17, 255, 256, 257, 1000, 2049]);
    let params =
        vec((length, 0..GROUPS.len(), weighted(0.4, types.clone()), prop::bool::weighted(0.15)), 1..9);
    let precision = || select(accepted().collect::<Vec<_>>());
    let optims: Vec<Optim> = few_optimizers().into_iter().chain(one_per_state_count()).collect();
    let options = (any::<bool>(), any::<bool>(), weighted(0.4, select(vec![0.5, 4.0])), any::<bool>());
    (
        (
            params,
            [precision(), precision(), precision()],
            weighted(0.3, types),
            any::<bool>(),
            select(optims),
        ),
        (select(MODES.to_vec()), select(vec![1u64, 700, 5000, 1 << 20]), options),
        (
            Just((0..8).collect::<Vec<usize>>()).prop_shuffle(),
            weighted(0.3, 0..8usize),
            weighted(0.3, 0..8usize),
        ),
        (any::<bool>(), prop::bool::weighted(0.3)),
    )
        .prop_map(
            |(
                (params, precisions, copy, ema, optim),
                (mode, cap, options),
                (order, frozen, unused),
                (rebuilds, adds),
            )| {
                let (steps_zeros, zeroes, max_norm, skips) = options;
                let is_eager = mode == Mode::Eager;
                let order = order.into_iter().filter(|param| *param < params.len()).collect();
                let options = Options {
                    mode,
                    cap: Some(cap),
                    unused: if steps_zeros { Unused::StepZero } else { Unused::Skip },
                    gradients: if zeroes { Gradients::Zero } else { Gradients::Keep },
                    max_norm: max_norm.filter(|_| !is_eager),
                    skip_nonfinite: skips && !is_eager,
                    record: true,
                    order: Some(order),
                    ..Options::default()
                };
                Case { params, precisions, copy, ema, optim, options, frozen, unused, rebuilds, adds }
            },
        )
}

impl Case {
    /// Returns the layout, with or without the parameters' own types.
    pub(crate) fn layout(&self, has_types: bool) -> Layout {
        let add = |layout: instep::LayoutBuilder, (k, (len, group, dtype, local)): (usize, &Param)| {
            let layout = layout.param(format!("p{k}"), *len).in_group(GROUPS[*group]);
            let layout = if *local { layout.local() } else { layout };
            match dtype.filter(|_| has_types) {
                Some(dtype) => layout.dtype(dtype),
                None => layout,
            }
        };
        self.params.iter().enumerate().fold(Layout::builder(), add).build().unwrap()
    }

    fn builder<'a>(&self, layout: &'a Layout, precision: Precision) -> StepperBuilder<'a> {
        let storage = Storage { precision, copy: self.copy, ema: self.ema };
        with(self.options.builder(layout, self.optim), &storage)
    }

    pub(crate) fn mixed<'a>(&self, layout: &'a Layout) -> StepperBuilder<'a> {
        let [default, first, second] = self.precisions;
        // The default group may be left to the stepper's own precision, which another case sets for the group.
        let common = if self.rebuilds { Precision::F32 } else { default };
        let builder = self.builder(layout, common).group_precision(GROUPS[1], first);
        let builder = builder.group_precision(GROUPS[2], second);
        if self.rebuilds { builder.group_precision(GROUPS[0], default) } else { builder }
    }

    fn at(&self, index: Option<usize>) -> Option<usize> {
        index.map(|index| index % self.params.len())
    }

    /// Makes one pass, and the calls between it and the next.
    pub(crate) fn advance<D: Device>(&self, stepper: &mut Stepper<D>, step: usize) {
        let ids: Vec<_> = stepper.layout().ids().collect();
        let frozen = self.at(self.frozen).filter(|_| (1..3).contains(&step));
        if let Some(param) = self.at(self.frozen) {
            stepper.set_frozen(ids[param], frozen.is_some()).unwrap();
        }
        pass(stepper, &self.options, |param, values| {
            values.iter_mut().enumerate().for_each(|(k, g)| *g = dyadic(step, 0, param, k));
            if self.options.skip_nonfinite && step == 2 && param == SPOILED % self.params.len() {
                values.iter_mut().take(1).for_each(|g| *g = f32::INFINITY);
            }
            frozen != Some(param) && (step != 1 || self.at(self.unused) != Some(param))
        })
        .unwrap();
        if self.rebuilds && step == 0 {
            check_recording(stepper);
            stepper.rebuild_buckets().unwrap();
        }
        if self.adds && step == 1 {
            check_recording(stepper);
            stepper.add_optimizer_for(&ids, Sgd { lr: 0.1, momentum: 0.5, ..Sgd::default() }).unwrap();
        }
    }

    /// Trains, and returns after every pass the stored tensors and the status.
    fn train(&self, mut stepper: Stepper) -> Vec<(Stored, Option<u64>, u64, bool)> {
        paint_params(&mut stepper);
        let mut seen = Vec::new();
        for step in 0..STEPS {
            self.advance(&mut stepper, step);
            let status = stepper.status().unwrap();
            let norm = status.norm.map(f64::to_bits);
            seen.push((Stored::of(&stepper).unwrap(), norm, status.clip.to_bits(), status.skipped));
        }
        check_recording(&mut stepper);
        stepper.close().unwrap();
        seen
    }
}

pub(crate) fn check_recording<D: Device>(stepper: &mut Stepper<D>) {
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), []);
}

#[test]
fn each_parameter_trains_as_in_a_stepper_of_its_precision_alone() {
    let trained = Cell::new(0);
    for_all(600, case(), |case| {
        let layout = case.layout(true);
        let Ok(stepper) = case.mixed(&layout).threads(1).host(Solo::default()) else {
            // Some type does not go with its group's precision, which `layout::storages` tests.
            return;
        };
        trained.set(trained.get() + 1);
        let of = |id| stepper.precision_of(id).unwrap();
        let precisions: Vec<Precision> = layout.ids().map(of).collect();
        for bucket in stepper.plan().buckets() {
            let segments = stepper.plan().segments_of(bucket);
            assert!(segments.iter().all(|s| precisions[s.param as usize] == bucket.storage.precision));
        }
        let mixed = case.train(stepper);
        let plain = case.layout(false);
        for (first, precision) in precisions.iter().enumerate() {
            if precisions[..first].contains(precision) {
                continue;
            }
            let alone =
                case.train(case.builder(&plain, *precision).threads(1).host(Solo::default()).unwrap());
            for (step, (ours, theirs)) in mixed.iter().zip(&alone).enumerate() {
                assert_eq!((ours.1, ours.2, ours.3), (theirs.1, theirs.2, theirs.3), "status of pass {step}");
                for param in (0..precisions.len()).filter(|param| precisions[*param] == *precision) {
                    assert_eq!(ours.0.params[param], theirs.0.params[param], "p{param} after pass {step}");
                }
            }
        }
    });
    assert!(trained.get() > 200, "{} cases could be built", trained.get());
}

#[test]
fn a_checkpoint_of_mixed_types_goes_on_with_the_same_bits_in_other_buckets() {
    for_all(60, case(), |mut case| {
        // The second optimizer would be there on one side alone.
        case.adds = false;
        let layout = case.layout(true);
        let Ok(mut stepper) = case.mixed(&layout).threads(1).host(Solo::default()) else { return };
        paint_params(&mut stepper);
        (0..2).for_each(|step| case.advance(&mut stepper, step));
        let mut file = Vec::new();
        checkpoint::write(&stepper, &mut file).unwrap();
        let builder = case.mixed(&layout).bucket_cap_bytes(300).mode(Mode::Sequential).threads(1);
        let mut resumed = builder.host(Solo::default()).unwrap();
        checkpoint::read(&mut resumed, Cursor::new(&file)).unwrap();
        for step in 2..STEPS {
            case.advance(&mut stepper, step);
            case.advance(&mut resumed, step);
        }
        // A copy is not saved, so one of a parameter without an update since is not there.
        let without_copies = |stepper: &Stepper| {
            let mut stored = Stored::of(stepper).unwrap();
            stored.params.iter_mut().for_each(|tensors| tensors.retain(|(name, _)| name != "copy"));
            stored
        };
        without_copies(&resumed).assert_same(&without_copies(&stepper), &case);
    });
}
