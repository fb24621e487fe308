//! The caller's memory gives the bits of the stepper's own memory, at any alignment, and the bytes around it stay
//! unchanged.
//!
//! Every tensor lies between guard bands whose bits are compared at the end. The reference is the same training in the
//! stepper's memory, with other buckets.

use instep::layout::ForeignBucket;
use instep::{
    Borrowed, Clip, Collective, Error, Isa, Layout, Mode, Result, Solo, Stepper, Unused, in_process,
};

use crate::support::guarded::Guarded;
use crate::support::{
    self, MODES, Optim, Options, Outcome, few_optimizers, layout, one_per_state_count, paint_gradient,
    painted,
};

const LENGTHS: [usize; 8] = [300, 0, 1, 2049, 17, 256, 5, 700];

/// A caller's memory: separate parameters, gradients in buckets with gaps of one element.
struct Tensors {
    params: Vec<Guarded>,
    buckets: Vec<(Guarded, ForeignBucket)>,
}

impl Tensors {
    /// Parameter k lies `offset + k` elements after a boundary; each bucket has up to three gradients, in no order.
    fn new(layout: &Layout, offset: usize) -> Tensors {
        let ids: Vec<_> = layout.ids().collect();
        let params =
            LENGTHS.iter().enumerate().map(|(k, len)| Guarded::new(*len, (offset + k) % 16)).collect();
        let mut buckets = Vec::new();
        for members in [vec![7, 5, 6], vec![3], vec![0, 4, 1, 2]] {
            let (mut next, mut places) = (offset % 3, Vec::new());
            for param in members {
                places.push((ids[param], next));
                next += LENGTHS[param] + 1;
            }
            let bucket = places.iter().fold(ForeignBucket::new(next), |b, (id, at)| b.gradient(*id, *at));
            buckets.push((Guarded::new(next, offset), bucket));
        }
        Tensors { params, buckets }
    }

    fn lend(&mut self, layout: &Layout) -> Borrowed {
        let params = layout.ids().zip(&mut self.params);
        let borrowed = params.fold(Borrowed::new(), |b, (id, tensor)| b.param(id, tensor.address()));
        self.buckets
            .iter_mut()
            .fold(borrowed, |b, (tensor, bucket)| b.bucket(bucket.clone(), tensor.address()))
    }

    fn assert_bands_stand(&self, what: &str) {
        self.params.iter().chain(self.buckets.iter().map(|(tensor, _)| tensor)).for_each(|tensor| {
            tensor.assert_bands_stand(what);
        });
    }
}

fn borrowing(
    layout: &Layout,
    optim: Optim,
    options: &Options,
    tensors: &mut Tensors,
    comm: impl Collective + 'static,
) -> Stepper {
    let mut builder = optim.builder(layout).mode(options.mode).unused(Unused::StepZero).record(true);
    if let Some(isa) = options.isa {
        builder = builder.isa(isa);
    }
    if let Some(max_norm) = options.max_norm {
        builder = builder.clip(Clip::Global(max_norm));
    }
    // SAFETY: the tensors outlive the stepper in every test here, and are read only after its end.
    unsafe { builder.host_borrowing(comm, tensors.lend(layout)) }.unwrap()
}

fn run_borrowed(layout: &Layout, optim: Optim, options: &Options, offset: usize) -> Outcome {
    let mut tensors = Tensors::new(layout, offset);
    let mut stepper = borrowing(layout, optim, options, &mut tensors, Solo::default());
    support::paint_params(&mut stepper);
    for step in 0..3 {
        support::pass(&mut stepper, options, |param, values| gradient(step, param, values)).unwrap();
    }
    let outcome = Outcome::of(&stepper).unwrap();
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), []);
    stepper.close().unwrap();
    tensors.assert_bands_stand(&format!("{optim:?} {options:?} offset {offset}"));
    for (k, tensor) in tensors.params.iter().enumerate() {
        support::assert_same_bits(tensor.values(), &outcome.params[k], "the caller's own view");
    }
    outcome
}

/// One parameter is missing from the second pass.
fn gradient(step: usize, param: usize, values: &mut [f32]) -> bool {
    painted(&Options::default())(step, param, values) && !(step == 1 && param == 4)
}

#[test]
fn borrowed_tensors_at_every_offset_give_the_bits_of_owned_ones() {
    let layout = layout(&LENGTHS);
    for optim in one_per_state_count() {
        for mode in MODES {
            let options = Options { mode, unused: Unused::StepZero, ..Options::default() };
            let owned = support::run(&layout, optim, &options, 3, gradient);
            for offset in 0..16 {
                let borrowed = run_borrowed(&layout, optim, &options, offset);
                borrowed.assert_same(&owned, &format!("{optim:?} {mode:?} offset {offset}"));
            }
        }
    }
}

#[test]
fn every_instruction_set_and_the_clipped_norm_agree_at_odd_offsets() {
    let layout = layout(&LENGTHS);
    let optim = few_optimizers()[3];
    for isa in Isa::available() {
        for offset in [0, 1, 7, 15] {
            let mode = Mode::Normed;
            let options = Options {
                mode,
                isa: Some(isa),
                max_norm: Some(0.5),
                unused: Unused::StepZero,
                ..Options::default()
            };
            let owned = support::run(&layout, optim, &options, 3, gradient);
            let borrowed = run_borrowed(&layout, optim, &options, offset);
            borrowed.assert_same(&owned, &format!("{isa} offset {offset}"));
            assert_eq!(borrowed.status, owned.status, "{isa} offset {offset}");
        }
    }
}

#[test]
fn ranks_on_borrowed_memory_agree_with_ranks_on_their_own() {
    let layout = layout(&LENGTHS);
    let optim = few_optimizers()[1];
    for mode in MODES {
        let train = |mut stepper: Stepper, rank: usize| -> Result<Outcome> {
            support::paint_params(&mut stepper);
            if rank > 0 {
                // All ranks take rank 0's at the first pass.
                stepper.fill_params(|_, values| values.fill(9.0))?;
            }
            for step in 0..3 {
                support::pass(&mut stepper, &Options::default(), |param, values| {
                    values
                        .iter_mut()
                        .enumerate()
                        .for_each(|(k, g)| *g = paint_gradient(step + 5 * rank, param, k));
                    param != step
                })?;
            }
            let outcome = Outcome::of(&stepper)?;
            stepper.close()?;
            Ok(outcome)
        };
        let borrowed = in_process(3, |comm| {
            let rank = comm.rank() as usize;
            // Addresses may differ between ranks, places in a bucket may not: a multiple of 3 keeps them.
            let mut tensors = Tensors::new(&layout, 3 * rank);
            let options = Options { mode, ..Options::default() };
            let outcome = train(borrowing(&layout, optim, &options, &mut tensors, comm), rank)?;
            tensors.assert_bands_stand("a rank");
            Ok::<_, Error>(outcome)
        })
        .unwrap();
        let owned = in_process(3, |comm| {
            let (rank, options) =
                (comm.rank() as usize, Options { mode, unused: Unused::StepZero, ..Options::default() });
            train(options.stepper(&layout, optim, comm)?, rank)
        })
        .unwrap();
        for (rank, outcome) in borrowed.iter().enumerate() {
            outcome.assert_same(&owned[0], &format!("{mode:?} rank {rank}"));
        }
    }
}

#[test]
fn ranks_whose_gradients_lie_in_different_places_are_told() {
    let layout = layout(&LENGTHS);
    let outcome = in_process(2, |comm| {
        let mut tensors = Tensors::new(&layout, comm.rank() as usize);
        let options = Options::default();
        let mut stepper = borrowing(&layout, few_optimizers()[0], &options, &mut tensors, comm);
        support::pass(&mut stepper, &options, |param, values| gradient(0, param, values))?;
        stepper.close()
    });
    assert!(matches!(outcome.unwrap_err().cause(), Error::Mismatch { .. }));
}

#[test]
fn a_dropped_stepper_leaves_borrowed_memory_alone_at_once() {
    let layout = Layout::builder().param("w", 400_000).build().unwrap();
    let id = layout.id("w").unwrap();
    for _ in 0..20 {
        let (mut weights, mut bucket) = (vec![0.0f32; 400_000], vec![1.0f32; 400_000]);
        let memory = Borrowed::new()
            .param(id, weights.as_mut_ptr())
            .bucket(ForeignBucket::new(400_000).gradient(id, 0), bucket.as_mut_ptr());
        let builder = few_optimizers()[0].builder(&layout).unused(Unused::StepZero);
        // SAFETY: both outlive the stepper.
        let mut stepper = unsafe { builder.host_borrowing(Solo::default(), memory) }.unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.grads().get_mut(id).unwrap();
        pass.finish().unwrap();
        drop(stepper);
        // The step was queued before the drop, so it has been made, whole.
        let after = weights[0];
        assert!(after != 0.0 && weights.iter().all(|w| w.to_bits() == after.to_bits()));
    }
}

#[test]
fn what_cannot_be_borrowed_is_refused_by_name() {
    let layout = Layout::builder().param("a", 4).param("b", 4).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    let mut memory = [0.0f32; 32];
    let at = memory.as_mut_ptr();
    let bucket = || ForeignBucket::new(8).gradient(a, 0).gradient(b, 4);
    let whole = |first: usize, second: usize, grads: usize| {
        Borrowed::new()
            .param(a, at.wrapping_add(first))
            .param(b, at.wrapping_add(second))
            .bucket(bucket(), at.wrapping_add(grads))
    };
    let build = |memory: Borrowed| {
        let builder = few_optimizers()[0].builder(&layout).unused(Unused::StepZero);
        // SAFETY: the array outlives what is built, which never runs.
        unsafe { builder.host_borrowing(Solo::default(), memory) }
    };
    assert!(build(whole(0, 4, 8)).is_ok());
    let odd = at.wrapping_byte_add(2);
    let cases = [
        (whole(0, 3, 8), "`a` and `b`: overlap in memory at 0x"),
        (whole(0, 4, 7), "`b` and bucket 0: overlap in memory at 0x"),
        (Borrowed::new().param(a, at).bucket(bucket(), at.wrapping_add(8)), "`b`: has no address"),
        (whole(0, 4, 8).param(a, at.wrapping_add(20)), "`a`: has two addresses"),
        (
            Borrowed::new().param(a, odd).param(b, at.wrapping_add(6)).bucket(bucket(), at.wrapping_add(12)),
            "aligned",
        ),
        (
            Borrowed::new()
                .param(a, std::ptr::null_mut::<f32>())
                .param(b, at)
                .bucket(bucket(), at.wrapping_add(8)),
            "null",
        ),
        (Borrowed::new().param(a, at).param(b, at.wrapping_add(4)), "gradient of `a`: in no bucket"),
    ];
    for (memory, word) in cases {
        let error = build(memory).unwrap_err();
        assert!(matches!(error, Error::Layout(_)) && error.to_string().contains(word), "{error}");
    }
    let builder = || few_optimizers()[0].builder(&layout);
    let refused = [
        ("unused", builder().unused(Unused::Skip)),
        ("uneven_inputs", builder().unused(Unused::StepZero).uneven_inputs(instep::Divisor::WorldSize)),
        ("bucket_cap_bytes", builder().unused(Unused::StepZero).bucket_cap_bytes(100)),
    ];
    for (option, builder) in refused {
        // SAFETY: as above.
        let refused = unsafe { builder.host_borrowing(Solo::default(), whole(0, 4, 8)) };
        assert!(matches!(refused, Err(Error::Config { field, .. }) if field == option), "{option}");
    }
}
