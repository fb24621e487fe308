//! A communicator allocates memory for a stepper's buckets. The tests check its requests, and that the stepper uses and
//! releases the memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use instep::collective::{Allocation, Call, Collective, Purpose};
use instep::{Error, Gradients, InProcess, Layout, Place, Result, Sgd, Stepper, Strategy, in_process};

#[derive(Default)]
struct Made {
    /// Each request, with its first address.
    requests: Mutex<Vec<(Purpose, Place, u64, usize)>>,
    given_back: AtomicUsize,
}

/// Memory that counts when it is dropped.
struct Owner {
    _bytes: Vec<u8>,
    made: Arc<Made>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.made.given_back.fetch_add(1, Ordering::Relaxed);
    }
}

struct Lending {
    comm: InProcess,
    made: Arc<Made>,
}

impl Collective for Lending {
    fn inner(&self) -> Option<&dyn Collective> {
        Some(&self.comm)
    }

    fn rank(&self) -> u32 {
        self.comm.rank()
    }

    fn world_size(&self) -> u32 {
        self.comm.world_size()
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        self.comm.duplicate()
    }

    fn allocate(&self, purpose: Purpose, place: Place, bytes: u64) -> Result<Option<Allocation>> {
        // Not zeros: a stepper clears what it gets.
        let mut made = vec![0xff; bytes as usize + 256];
        let offset = made.as_ptr().align_offset(256);
        let address = made[offset..].as_mut_ptr();
        self.made.requests.lock().unwrap().push((purpose, place, bytes, address.addr()));
        let owner = Owner { _bytes: made, made: Arc::clone(&self.made) };
        // SAFETY: as long as that, aligned, and there until the owner is dropped.
        Ok(Some(unsafe { Allocation::new(address, Box::new(owner)) }))
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        self.comm.enqueue(call)
    }

    fn abort(&self, cause: &Error) {
        self.comm.abort(cause);
    }
}

#[test]
fn a_stepper_lives_in_the_memory_that_its_communicator_makes_and_gives_it_back() {
    let layout = Layout::builder().param("w", 3000).param("b", 17).build().unwrap();
    let w = layout.id("w").unwrap();
    for (strategy, gradients, expected) in [
        (Strategy::Replicated, Gradients::Keep, vec![Purpose::Parameters, Purpose::Gradients]),
        (Strategy::Zero, Gradients::Zero, vec![Purpose::Parameters, Purpose::Gradients]),
        // Pages of these come and go.
        (Strategy::Zero, Gradients::Release, vec![Purpose::Parameters]),
        (Strategy::Fsdp, Gradients::Keep, vec![Purpose::Gradients]),
        (Strategy::Fsdp, Gradients::Release, vec![]),
    ] {
        let what = format!("{strategy:?}, {gradients:?}");
        in_process(2, |comm: InProcess| {
            let made = Arc::new(Made::default());
            let comm = Lending { comm, made: Arc::clone(&made) };
            let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).strategy(strategy);
            let mut stepper = builder.gradients(gradients).host(comm)?;
            let requests = made.requests.lock().unwrap().clone();
            assert_eq!(requests.iter().map(|request| request.0).collect::<Vec<_>>(), expected, "{what}");
            let lies_in = |purpose: Purpose, tensor: &[f32]| {
                let at = tensor.as_ptr().addr();
                let inside = |(of, place, bytes, first): &(Purpose, Place, u64, usize)| {
                    let end = first + *bytes as usize;
                    *of == purpose && *place == Place::Host && (*first..end).contains(&at)
                };
                assert_eq!(requests.iter().any(inside), expected.contains(&purpose), "{what}, {purpose:?}");
            };
            for _ in 0..2 {
                for k in 0..stepper.plan().buckets().len() as u32 {
                    stepper.unshard(k)?;
                }
                lies_in(Purpose::Parameters, stepper.view::<f32>(w)?);
                let mut pass = stepper.begin()?;
                for id in layout.ids() {
                    pass.grads().get_mut(id)?.fill(0.5);
                }
                lies_in(Purpose::Gradients, pass.view::<f32>(w.grad())?);
                pass.finish()?;
            }
            let mut values = vec![0.0; 3000];
            stepper.gather(w, &mut values)?;
            assert!(values.iter().all(|value| *value == -1.0), "{what}: {}", values[0]);
            stepper.close()?;
            // A helper thread of the pool may hold the last launch for a moment longer.
            let since = Instant::now();
            while made.given_back.load(Ordering::Relaxed) < expected.len() {
                assert!(since.elapsed() < Duration::from_secs(30), "{what}: the memory is kept");
                std::thread::yield_now();
            }
            Ok(())
        })
        .unwrap();
    }
}
