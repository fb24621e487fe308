//! A group that gets its optimizer later is addressed by its name, and trains as if the builder had been given it.
//!
//! The reference is a stepper that was built with the group. Host and GPU, or the stand-in, run the same calls.

use instep::checkpoint;
use instep::{
    AdamW, Device, Error, Layout, LrSchedule, ParamId, Result, SegmentAction, Sgd, Solo, Stepper, in_process,
};

use crate::support::device::cuda;
use crate::support::{paint, paint_gradient};

const LENGTHS: [usize; 4] = [300, 5, 2049, 17];

/// The last two parameters are in group "head".
fn layout() -> Layout {
    let mut builder = Layout::builder();
    for (k, len) in LENGTHS.into_iter().enumerate() {
        builder = builder.param(format!("p{k}"), len);
        builder = if k >= 2 { builder.in_group("head") } else { builder };
    }
    builder.build().unwrap()
}

const BODY: Sgd =
    Sgd { lr: 0.1, momentum: 0.9, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };

fn head() -> AdamW {
    AdamW { lr: 0.01, ..AdamW::default() }
}

fn train<D: Device>(stepper: &mut Stepper<D>, passes: std::ops::Range<usize>, rank: usize) -> Result<()> {
    let ids: Vec<ParamId> = stepper.layout().ids().collect();
    for step in passes {
        let mut pass = stepper.begin()?;
        for (k, id) in ids.iter().enumerate().rev() {
            let values: Vec<f32> = (0..LENGTHS[k]).map(|at| paint_gradient(step, k + 4 * rank, at)).collect();
            pass.write(id.grad(), &values)?;
            pass.grad_ready(*id)?;
        }
        pass.finish()?;
    }
    Ok(())
}

/// Returns the bits of each parameter and its states, with its count.
fn outcome<D: Device>(stepper: &Stepper<D>) -> Result<Vec<(Vec<u32>, u64)>> {
    let of = |(id, len): (ParamId, usize)| {
        let (mut all, mut values) = (Vec::new(), vec![0.0; len]);
        stepper.read(id, &mut values)?;
        all.extend(values.iter().map(|x| x.to_bits()));
        for name in stepper.state_names(id)? {
            stepper.read(id.state(&name), &mut values)?;
            all.extend(values.iter().map(|x| x.to_bits()));
        }
        Ok((all, stepper.step_count(id)?))
    };
    stepper.layout().ids().zip(LENGTHS).map(of).collect()
}

fn paint_all<D: Device>(stepper: &mut Stepper<D>) -> Result<()> {
    for (k, id) in stepper.layout().ids().collect::<Vec<_>>().into_iter().enumerate() {
        let values: Vec<f32> = (0..LENGTHS[k]).map(|at| paint(k, at)).collect();
        stepper.write(id, &values)?;
    }
    Ok(())
}

/// Makes the same calls by name for a group that was built and one that was added.
fn by_name<D: Device>(stepper: &mut Stepper<D>, rank: usize) -> Result<Vec<(Vec<u32>, u64)>> {
    train(stepper, 0..2, rank)?;
    stepper.set_lr("head", 0.05)?;
    stepper.set_hyper("head", &[("weight_decay", 0.25)])?;
    train(stepper, 2..4, rank)?;
    stepper.set_lr_schedule("head", Some(LrSchedule::constant(0.5)))?;
    train(stepper, 4..6, rank)?;
    outcome(stepper)
}

#[test]
fn a_group_that_is_added_before_the_first_pass_has_the_bits_of_one_that_was_built() {
    let layout = layout();
    let late =
        || Stepper::builder_without_optimizer(&layout).group("default", BODY).bucket_cap_bytes(4 << 10);
    let built = || Stepper::builder(&layout, BODY).group("head", head()).bucket_cap_bytes(4 << 10);
    let reference = in_process(2, |comm| {
        let rank = instep::Collective::rank(&comm) as usize;
        let mut stepper = built().host(comm)?;
        paint_all(&mut stepper)?;
        by_name(&mut stepper, rank)
    });
    let added = in_process(2, |comm| {
        let rank = instep::Collective::rank(&comm) as usize;
        let mut stepper = late().host(comm)?;
        paint_all(&mut stepper)?;
        stepper.add_group("head", head())?;
        by_name(&mut stepper, rank)
    });
    assert!(reference.unwrap() == added.unwrap());
    let mut host = built().host(Solo::default()).unwrap();
    // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
    let mut gpu = unsafe { late().cuda(Solo::default(), &cuda()) }.unwrap();
    let id = gpu.add_group("head", head()).unwrap();
    assert_eq!(gpu.optimizers().filter(|o| o.group == Some("head")).map(|o| o.id).collect::<Vec<_>>(), [id]);
    paint_all(&mut host).unwrap();
    paint_all(&mut gpu).unwrap();
    assert!(by_name(&mut host, 0).unwrap() == by_name(&mut gpu, 0).unwrap());
}

#[test]
fn a_checkpoint_of_a_stepper_with_a_late_group_goes_on_where_the_builder_had_it() {
    let layout = layout();
    let builder = Stepper::builder_without_optimizer(&layout).group("default", BODY);
    let mut stepper = builder.host(Solo::default()).unwrap();
    paint_all(&mut stepper).unwrap();
    train(&mut stepper, 0..2, 0).unwrap();
    stepper.add_group("head", head()).unwrap();
    train(&mut stepper, 2..4, 0).unwrap();
    let mut file = Vec::new();
    checkpoint::write(&stepper, &mut file).unwrap();
    let mut resumed = Stepper::builder(&layout, BODY).group("head", head()).host(Solo::default()).unwrap();
    checkpoint::read(&mut resumed, std::io::Cursor::new(file)).unwrap();
    for stepper in [&mut stepper, &mut resumed] {
        train(stepper, 4..6, 0).unwrap();
    }
    let counts: Vec<u64> = outcome(&stepper).unwrap().into_iter().map(|(_, count)| count).collect();
    assert_eq!(counts, [6, 6, 4, 4]);
    assert!(outcome(&stepper).unwrap() == outcome(&resumed).unwrap());
}

#[test]
fn a_group_without_a_parameter_to_step_or_of_another_name_is_refused() {
    let layout = Layout::builder().param("a", 1).param("b", 1).in_group("head").param("c", 1);
    let layout = layout.in_group("still").action(SegmentAction::Average).build().unwrap();
    let b = layout.id("b").unwrap();
    let builder =
        Stepper::builder_without_optimizer(&layout).group("default", BODY).optimizer_for(&[b], BODY);
    let mut stepper = builder.host(Solo::default()).unwrap();
    for (name, words) in [
        ("haed", "not a group of the layout; use one of default, head, still"),
        ("default", "has an optimizer already"),
        ("head", "each of its parameters has an optimizer"),
        ("still", "each of its parameters has an optimizer, or is not to be stepped"),
    ] {
        let error = stepper.add_group(name, BODY).unwrap_err();
        assert!(matches!(error, Error::Config { field: "group", .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    assert!(matches!(stepper.set_lr("head", 0.5), Err(Error::Config { .. })));
}
