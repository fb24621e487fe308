//! Ranks that meet, agree, differ, fall silent and die, as threads over loopback. No GPU and no NCCL take part.
//!
//! Everything here waits for at most a deadline that the test sets; none asserts how long something took, but that it
//! ended with the right error. Must not share a port: each test asks the system for one.

mod meeting;
mod together;

use std::net::TcpListener;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use crate::cuda::nccl::group::Group;
use crate::cuda::nccl::{Options, UniqueId, bootstrap};
use crate::error::Result;

/// Far more than anything here takes; only a test that expects it to pass waits for one.
const AMPLE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

/// A port that nobody listens on, and that no other test of this process has been given.
fn port() -> u16 {
    static GIVEN: Mutex<Vec<u16>> = Mutex::new(Vec::new());
    let mut given = GIVEN.lock().unwrap();
    loop {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if !given.contains(&port) {
            given.push(port);
            return port;
        }
    }
}

fn options(rank: u32, world_size: u32, port: u16, deadline: Duration) -> Options {
    Options { rank, world_size, master_port: port, job: "a test".to_owned(), deadline, ..Options::default() }
}

fn meet(options: &Options) -> Result<(Group, UniqueId)> {
    bootstrap::meet(options, || Ok([7; 128]))
}

/// One thread per rank; what each made of the group it met, by rank.
fn ranks<T: Send>(world_size: u32, body: impl Fn(u32, Result<Group>) -> T + Sync) -> Vec<T> {
    let port = port();
    let body = &body;
    thread::scope(|scope| {
        let one = |rank| {
            scope.spawn(move || {
                let group = meet(&options(rank, world_size, port, AMPLE));
                body(rank, group.map(|(group, id)| (group, assert_eq!(id, [7; 128])).0))
            })
        };
        let threads: Vec<_> = (0..world_size).map(one).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
