//! How a stepper ends: closed, dropped or unwound, with a device that works, has failed, or waits for peers.
//!
//! The caller always gets its memory back in finite time, and the first cause is reported. Every case has a time limit,
//! because its failure would be a hang.

use std::sync::mpsc;
use std::time::Duration;

use instep::collective::Call;
use instep::layout::ForeignBucket;
use instep::{Borrowed, Collective, Error, Layout, Result, Sgd, Solo, Stepper, Unused, in_process};

/// The limit is shorter than the default deadline of 60 s, so a case that waits for that deadline fails too.
const LIMIT: Duration = Duration::from_secs(45);

/// Runs `body` on a separate thread and fails if it does not end.
fn within_limit<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(body()));
    receiver.recv_timeout(LIMIT).expect("it hangs")
}

/// A panic payload whose drop panics too.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("dropped");
    }
}

#[derive(Clone, Copy)]
enum Misdeed {
    ErrsAndPanicsInAbort,
    PanicsWithABomb,
}

/// A user's collective with the worst behavior.
struct Broken(Misdeed);

impl Collective for Broken {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        1
    }

    fn enqueue(&self, _: &mut Call<'_>) -> instep::Result<()> {
        match self.0 {
            Misdeed::ErrsAndPanicsInAbort => Err(Error::order("test", "made up", "")),
            Misdeed::PanicsWithABomb => std::panic::panic_any(Bomb),
        }
    }

    fn abort(&self, _: &Error) {
        if matches!(self.0, Misdeed::ErrsAndPanicsInAbort) {
            panic!("in abort");
        }
    }
}

fn layout() -> Layout {
    Layout::builder().param("w", 300).build().unwrap()
}

fn borrow(
    layout: &Layout,
    weights: &mut [f32],
    bucket: &mut [f32],
    comm: impl Collective + 'static,
) -> Stepper {
    let id = layout.id("w").unwrap();
    let memory = Borrowed::new()
        .param(id, weights.as_mut_ptr())
        .bucket(ForeignBucket::new(300).gradient(id, 0), bucket.as_mut_ptr());
    let builder = Stepper::builder(layout, Sgd::default()).unused(Unused::StepZero);
    // SAFETY: both outlive the stepper in every test here.
    unsafe { builder.host_borrowing(comm, memory) }.unwrap()
}

/// Makes a pass of zeros, as borrowed memory requires.
fn whole_pass(stepper: &mut Stepper) -> Result<()> {
    let id = stepper.layout().id("w")?;
    let mut pass = stepper.begin()?;
    pass.grads().write(id, &[0.0; 300])?;
    pass.finish()
}

#[test]
fn a_collective_that_panics_wherever_it_can_poisons_and_lets_the_stepper_end() {
    for misdeed in [Misdeed::ErrsAndPanicsInAbort, Misdeed::PanicsWithABomb] {
        within_limit(move || {
            let layout = layout();
            for close in [true, false] {
                let (mut weights, mut bucket) = (vec![0.0; 300], vec![0.0; 300]);
                let mut stepper = borrow(&layout, &mut weights, &mut bucket, Broken(misdeed));
                // Its broadcast fails, which the first access may find out.
                let _ = whole_pass(&mut stepper);
                assert!(matches!(stepper.status().map(|_| ()), Err(Error::Poisoned { .. })));
                if close {
                    assert!(matches!(stepper.close(), Err(Error::Poisoned { .. })))
                } else {
                    drop(stepper)
                }
            }
        });
    }
}

#[test]
fn a_panic_between_passes_is_reported_at_once_though_borrowed_memory_waits_for_what_is_queued() {
    within_limit(|| {
        let layout = layout();
        let outcome = in_process(2, |comm| {
            let (mut weights, mut bucket) = (vec![0.0; 300], vec![0.0; 300]);
            let rank = comm.rank();
            let mut other = Stepper::host(&layout, Sgd::default(), comm.split())?;
            let mut stepper = borrow(&layout, &mut weights, &mut bucket, comm);
            // The first passes broadcast, so ranks make them together.
            other.begin()?.finish()?;
            whole_pass(&mut stepper)?;
            stepper.status()?;
            if rank == 0 {
                // Queued for a rank that never comes to it.
                let mut pass = stepper.begin()?;
                pass.grads().write(layout.id("w")?, &[1.0; 300])?;
                pass.finish()?;
                panic!("between passes");
            }
            other.begin()?.finish()?;
            other.close()
        });
        let error = outcome.unwrap_err();
        assert!(
            matches!(error.cause(), Error::Rank { rank: 0, message } if message == "between passes"),
            "{error}"
        );
    });
}

#[test]
fn what_a_poisoned_stepper_refuses_it_has_not_half_done() {
    let layout = layout();
    let id = layout.id("w").unwrap();
    let sgd = Sgd { momentum: 0.9, ..Sgd::default() };
    let mut stepper = Stepper::host(&layout, sgd, Broken(Misdeed::PanicsWithABomb)).unwrap();
    stepper.begin().unwrap().finish().unwrap();
    assert!(stepper.status().is_err());
    assert!(matches!(stepper.set_frozen(id, true), Err(Error::Poisoned { .. })));
    assert!(!stepper.is_frozen(id).unwrap());
    assert!(matches!(stepper.set_lr("default", 0.5), Err(Error::Poisoned { .. })));
    assert!(matches!(stepper.view_mut::<f32>(id.state("momentum_buffer")), Err(Error::Poisoned { .. })));
    assert!(matches!(stepper.join(), Err(Error::Config { field: "uneven_inputs", .. })));
}

#[test]
fn closing_inside_a_leaked_pass_is_refused_but_ends_the_stepper() {
    within_limit(|| {
        let layout = layout();
        let (mut weights, mut bucket) = (vec![0.0; 300], vec![0.0; 300]);
        let mut stepper = borrow(&layout, &mut weights, &mut bucket, Solo::default());
        std::mem::forget(stepper.begin().unwrap());
        assert!(matches!(stepper.close(), Err(Error::Order(_))));
        weights.fill(1.0);
    });
}
