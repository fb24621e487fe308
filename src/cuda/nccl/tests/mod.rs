//! Ranks that meet, agree, differ, fall silent and die, as threads over loopback. No GPU and no NCCL take part.
//!
//! No test asserts how long something took, only that it ended with the right error. Each test asks the system for a
//! port of its own.

mod flooding;
mod interfaces;
mod meeting;
mod secrets;
mod together;

use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use crate::collective::{CallKey, CollectiveKind};
use crate::cuda::nccl::group::Group;
use crate::cuda::nccl::link::{Link, Received};
use crate::cuda::nccl::message::{Entry, Message};
use crate::cuda::nccl::{Options, UniqueId, bootstrap};
use crate::dtype::DType;
use crate::error::Result;

/// Far longer than any test takes.
const AMPLE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

/// Returns a port that is free, and that no other test of this process has.
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

/// Runs one thread per rank and returns the outcomes by rank.
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

/// An all-reduce of this pass.
fn sum(pass: u64) -> Entry {
    let kind = CollectiveKind::AllReduce;
    Entry::Call(CallKey { kind, pass, bucket: None, dtype: DType::F32, bytes: 1024, agreement: 0 })
}

/// Connects to a rank 0 that may not be listening yet, as anyone could.
fn connect(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn hello(options: &Options) -> Message {
    let Options { world_size, rank, .. } = *options;
    Message::Hello { world_size, rank, job: bootstrap::job(options), nonce: None }
}

/// The next message of the other end, or the reason why there is none.
fn next(link: &mut Link) -> Result<Message, String> {
    loop {
        match link.receive() {
            Received::Message(message) => return Ok(message),
            Received::Ended(why) => return Err(why),
            Received::Nothing => thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// A connection that has the seat of a rank, without a secret.
fn seated(options: &Options) -> Link {
    let mut link = Link::new(connect(options.master_port)).unwrap();
    link.send(&hello(options));
    assert_eq!(next(&mut link), Ok(Message::Seated));
    link
}

/// The two ends of a connection.
fn pair() -> (Link, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (Link::new(listener.accept().unwrap().0).unwrap(), stream)
}
