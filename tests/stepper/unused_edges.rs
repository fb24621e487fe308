//! Unused parameters while something else changes: rebuilt buckets, local parameters, views, single hand-overs.
//!
//! The ranks must report a difference, and no reader may see an unfinished value.

use instep::{
    AdamW, Borrowed, Error, ForeignBucket, Layout, Mode, ParamId, Result, Sgd, Stepper, Sums, Unused,
    in_process,
};

fn two() -> (Layout, [ParamId; 2]) {
    let layout = Layout::builder().param("a", 3).param("b", 3).build().unwrap();
    let ids = ["a", "b"].map(|name| layout.id(name).unwrap());
    (layout, ids)
}

#[test]
fn the_gradient_of_an_unused_parameter_is_not_shown_while_it_is_summed() {
    let (layout, [a, b]) = two();
    for mode in [Mode::Normed, Mode::Sequential, Mode::Eager] {
        let hazards = in_process(2, |comm| {
            let builder =
                Stepper::builder(&layout, Sgd::default()).mode(mode).unused(Unused::Refuse).record(true);
            let mut stepper = builder.host(comm)?;
            let mut pass = stepper.begin()?;
            pass.write(a.grad(), &[1.0; 3])?;
            pass.write(b.grad(), &[7.0; 3])?;
            assert_eq!(pass.view::<f32>(b.grad())?, [7.0; 3]);
            pass.set_unused(&[b])?;
            pass.grad_ready(a)?;
            let error = pass.view::<f32>(b.grad()).unwrap_err().to_string();
            assert!(error.contains("named as unused"), "{error}");
            assert!(matches!(pass.read(b.grad(), &mut [0.0; 3]), Err(Error::Order(_))));
            pass.finish()?;
            let recording = stepper.take_recording().unwrap();
            Ok::<_, Error>(stepper.check(&recording))
        });
        assert!(hazards.unwrap().iter().all(Vec::is_empty), "{mode:?}");
    }
}

/// Rank 0 alone names a parameter after its hand-over, before something changes the buckets.
fn late(
    change: fn(&mut Stepper, [ParamId; 2], *mut f32) -> Result<()>,
    is_borrowed: bool,
) -> Result<Vec<()>> {
    let (layout, [a, b]) = two();
    in_process(2, |comm| {
        let rank = comm.rank();
        let (mut params, mut grads) = ([0f32; 6], [0f32; 12]);
        let bucket = ForeignBucket::new(6).gradient(a, 0).gradient(b, 3);
        let memory = Borrowed::new()
            .param(a, params.as_mut_ptr())
            .param(b, params.as_mut_ptr().wrapping_add(3))
            .bucket(bucket, grads.as_mut_ptr());
        let builder = Stepper::builder(&layout, AdamW::default()).mode(Mode::Normed).unused(Unused::Refuse);
        let mut stepper = if is_borrowed {
            // SAFETY: the arrays outlive the stepper, which alone touches them.
            unsafe { builder.host_borrowing(comm, memory)? }
        } else {
            builder.bucket_cap_bytes(8).host(comm)?
        };
        for pass_index in 0..3 {
            let mut pass = stepper.begin()?;
            for id in [a, b] {
                pass.write(id.grad(), &[1.0; 3])?;
                pass.grad_ready(id)?;
            }
            if rank == 0 && pass_index == 0 {
                pass.set_unused(&[b])?;
            }
            pass.finish()?;
            if pass_index == 0 {
                change(&mut stepper, [a, b], grads.as_mut_ptr().wrapping_add(6))?;
            }
        }
        stepper.close()
    })
}

#[test]
fn a_difference_between_ranks_outlives_a_change_of_buckets() {
    let with_new_buckets = |stepper: &mut Stepper, [a, b]: [ParamId; 2], grads: *mut f32| {
        let bucket = ForeignBucket::new(6).gradient(b, 0).gradient(a, 3);
        // SAFETY: the second half of the gradients, which nothing else uses.
        unsafe { stepper.rebind(Borrowed::new().bucket(bucket, grads)).map(drop) }
    };
    let outcomes = [
        late(|_, _, _| Ok(()), true),
        late(with_new_buckets, true),
        late(|stepper, [a, _], _| stepper.add_optimizer_for(&[a], Sgd::default()).map(drop), true),
        late(|stepper, _, _| stepper.rebuild_buckets().map(drop), false),
    ];
    for (case, outcome) in outcomes.into_iter().enumerate() {
        let error = outcome.unwrap_err();
        assert!(matches!(error.cause(), Error::Mismatch { .. }), "{case}: {error}");
        // Both ranks have the same words of what was loaded, so none is blamed.
        assert!(!error.to_string().contains("loss scaler"), "{case}: {error}");
    }
}

#[test]
fn each_rank_names_its_own_local_parameters_at_any_time() {
    let layout = Layout::builder().param("a", 3).param("expert", 3).local().build().unwrap();
    let [a, expert] = ["a", "expert"].map(|name| layout.id(name).unwrap());
    for is_late in [false, true] {
        let counts = in_process(2, |comm| {
            let rank = comm.rank();
            let builder =
                Stepper::builder(&layout, AdamW::default()).mode(Mode::Normed).unused(Unused::Refuse);
            let mut stepper = builder.host(comm)?;
            for pass_index in 0..3 {
                let mut pass = stepper.begin()?;
                pass.write(a.grad(), &[1.0; 3])?;
                let names = rank == 0 && pass_index == 0;
                if !names || is_late {
                    pass.write(expert.grad(), &[1.0; 3])?;
                    pass.grad_ready(expert)?;
                }
                if names {
                    pass.set_unused(&[expert])?;
                }
                pass.finish()?;
            }
            Ok::<_, Error>((stepper.step_count(a)?, stepper.step_count(expert)?))
        });
        assert_eq!(counts.unwrap(), [(3, 2), (3, 3)], "late: {is_late}");
    }
}

/// Returns a stepper over one bucket of an engine.
fn external<'a>(layout: &Layout, ids: [ParamId; 2], memory: &'a mut [[f32; 6]; 2]) -> (Stepper, &'a [f32]) {
    let [params, grads] = memory;
    let bucket = ForeignBucket::new(6).gradient(ids[0], 0).gradient(ids[1], 3);
    let lent = Borrowed::new()
        .param(ids[0], params.as_mut_ptr())
        .param(ids[1], params.as_mut_ptr().wrapping_add(3))
        .bucket(bucket, grads.as_mut_ptr());
    let builder = Stepper::builder(layout, Sgd { lr: 1.0, ..Sgd::default() }).unused(Unused::Refuse);
    // SAFETY: the caller keeps the memory, and reads it after the stepper has ended.
    let stepper = unsafe { builder.host_borrowing(Sums::by_caller(0, 1), lent) }.unwrap();
    (stepper, &params[..])
}

#[test]
fn a_bucket_is_released_after_hand_overs_one_by_one() {
    let (layout, [a, b]) = two();
    let mut memory = [[0f32; 6]; 2];
    let (mut stepper, params) = external(&layout, [a, b], &mut memory);
    let mut pass = stepper.begin().unwrap();
    pass.write(a.grad(), &[1.0; 3]).unwrap();
    pass.grad_ready(a).unwrap();
    pass.set_unused(&[b]).unwrap();
    pass.bucket_ready(0).unwrap();
    assert!(matches!(pass.bucket_ready(0), Err(Error::Order(_))));
    assert_eq!(pass.abandon().unwrap().stepped_buckets, [0]);
    stepper.close().unwrap();
    assert_eq!(params, [-1.0, -1.0, -1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn a_bucket_that_is_frozen_whole_is_not_named_as_stepped() {
    let (layout, [a, b]) = two();
    let mut memory = [[0f32; 6]; 2];
    let (mut stepper, _) = external(&layout, [a, b], &mut memory);
    for id in [a, b] {
        stepper.set_frozen(id, true).unwrap();
    }
    let mut pass = stepper.begin().unwrap();
    pass.bucket_ready(0).unwrap();
    assert_eq!(pass.abandon().unwrap().stepped_buckets, [0u32; 0]);
    stepper.close().unwrap();
}
