//! Tests streams, rendezvous and pool under shuttle: the real code, in which every lock, wait and notification may
//! switch tasks.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test --lib interleavings` runs the tests. Shuttle reports a task that can never
//! continue as a deadlock. It has no clock, so a deadline here is either never or immediate. Its atomics are
//! sequentially consistent, so ThreadSanitizer checks memory orderings. Shuttle must see everything that a test waits
//! for.

mod launches;
mod meetings;
mod queues;

use std::sync::Arc;

use shuttle::thread::JoinHandle;

/// Number of schedules per property and scheduler.
const SCHEDULES: usize = 1500;
/// Number of preemptions of the second scheduler. Most bugs need no more.
const DEPTH: usize = 3;

fn explore(property: impl Fn() + Send + Sync + 'static) {
    let property = Arc::new(property);
    let again = Arc::clone(&property);
    shuttle::check_random(move || property(), SCHEDULES);
    shuttle::check_pct(move || again(), SCHEDULES, DEPTH);
}

/// Joins all tasks; shuttle reports panics.
fn join(tasks: Vec<JoinHandle<()>>) {
    tasks.into_iter().for_each(|task| drop(task.join()));
}
