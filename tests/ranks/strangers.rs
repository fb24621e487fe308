//! Strangers connect to the port of `examples/tcp_ranks`, because people copy that example. They delay nobody, and a
//! rank stores no more of their data than its call expects.
//!
//! All connections stay on the loopback interface, and each stranger gives up by itself.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use instep::collective::{Call, CallKey, CollectiveKind};
use instep::{Collective, DType, Error};

use crate::support::tcp::Tcp;

const HOST: &str = "127.0.0.1";
const PATIENCE: Duration = Duration::from_secs(5);

fn free_port() -> u16 {
    TcpListener::bind((HOST, 0)).unwrap().local_addr().unwrap().port()
}

/// Connects as soon as somebody listens.
fn connect(port: u16) -> TcpStream {
    let since = Instant::now();
    loop {
        match TcpStream::connect((HOST, port)) {
            Ok(stream) => return stream,
            Err(error) if since.elapsed() > PATIENCE => panic!("{error}"),
            Err(_) => thread::sleep(Duration::from_millis(2)),
        }
    }
}

#[test]
fn ranks_meet_beside_silent_strangers() {
    let port = free_port();
    thread::scope(|threads| {
        let first = threads.spawn(|| Tcp::meet((HOST, port), 0, 3, PATIENCE));
        // One after the other, they would take longer than the patience of all.
        let silent: Vec<TcpStream> = (0..12).map(|_| connect(port)).collect();
        let others = [1, 2].map(|rank| threads.spawn(move || Tcp::meet((HOST, port), rank, 3, PATIENCE)));
        for rank in [first].into_iter().chain(others) {
            rank.join().unwrap().unwrap();
        }
        drop(silent);
    });
}

#[test]
fn strangers_do_not_lengthen_the_wait_for_a_rank_that_never_comes() {
    let (port, is_over) = (free_port(), AtomicBool::new(false));
    thread::scope(|threads| {
        threads.spawn(|| {
            let (mut silent, since) = (Vec::new(), Instant::now());
            while !is_over.load(SeqCst) && since.elapsed() < 20 * PATIENCE {
                silent.extend(TcpStream::connect((HOST, port)));
                thread::sleep(Duration::from_millis(20));
            }
            // Reached before rank 0 has given up, if they hold it.
            is_over.store(true, SeqCst);
        });
        let outcome = Tcp::meet((HOST, port), 0, 2, Duration::from_secs(1)).map(drop);
        assert!(!is_over.swap(true, SeqCst), "strangers were gone before rank 0 gave up");
        assert!(matches!(outcome, Err(Error::PeerLost { .. })), "{outcome:?}");
    });
}

#[test]
fn a_stranger_in_the_place_of_rank_0_holds_no_rank_past_its_patience() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    // It ends each connection late, again and again.
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            thread::sleep(Duration::from_millis(1400));
            drop(stream);
        }
    });
    let since = Instant::now();
    let outcome = Tcp::meet((HOST, port), 1, 2, Duration::from_secs(2)).map(drop);
    assert!(matches!(outcome, Err(Error::PeerLost { .. })), "{outcome:?}");
    assert!(since.elapsed() < Duration::from_millis(2700), "{:?}", since.elapsed());
}

/// Returns rank 0 of two, with a stranger in the other seat that has sent these words.
fn beside_a_stranger(words: &[u8]) -> (Tcp, TcpStream) {
    let port = free_port();
    thread::scope(|threads| {
        let stranger = threads.spawn(|| {
            let mut stream = connect(port);
            stream.write_all(&1u32.to_le_bytes()).unwrap();
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(words).unwrap();
            stream
        });
        (Tcp::meet((HOST, port), 0, 2, PATIENCE).unwrap(), stranger.join().unwrap())
    })
}

fn key(kind: CollectiveKind, bytes: u64) -> CallKey {
    CallKey { kind, pass: 1, bucket: Some(0), dtype: DType::F32, bytes, agreement: 0 }
}

fn call_frame(len: u64, key: CallKey) -> Vec<u8> {
    [&[0][..], &len.to_le_bytes(), &key.to_bytes()].concat()
}

/// Returns rank 0's result of a call.
fn outcome(comm: &Tcp, key: CallKey, deadline: Duration) -> instep::Result<()> {
    let mut values = vec![0u64; key.bytes as usize / 8];
    let mut call = Call::on_host(comm, key, None, bytemuck::cast_slice_mut(&mut values), deadline)?;
    comm.enqueue(&mut call)
}

#[test]
fn a_stranger_that_takes_nothing_in_holds_no_call_past_its_deadline() {
    // More than the system keeps for a connection.
    let key = key(CollectiveKind::Broadcast, 48 << 20);
    let (comm, stranger) = beside_a_stranger(&call_frame(32, key));
    let since = Instant::now();
    // What a peer does not take is missed where something of it is waited for.
    outcome(&comm, key, Duration::from_secs(1)).unwrap();
    outcome(&comm, key, Duration::from_secs(1)).unwrap_err();
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
    drop(stranger);
}

/// The stranger reads a little at a time, each time before a timeout would end.
#[test]
fn a_stranger_that_takes_little_in_is_sent_nothing_after_the_deadline() {
    let key = key(CollectiveKind::Broadcast, 48 << 20);
    let (comm, mut stranger) = beside_a_stranger(&call_frame(32, key));
    let slow = thread::spawn(move || {
        let (mut bytes, mut taken) = (vec![0; 1 << 16], 0);
        while let Ok(read @ 1..) = stranger.read(&mut bytes) {
            taken += read as u64;
            thread::sleep(Duration::from_millis(10));
        }
        taken
    });
    outcome(&comm, key, Duration::from_secs(1)).unwrap();
    // The rest of that frame is not sent, and no other frame in its place.
    outcome(&comm, key, Duration::from_secs(1)).unwrap_err();
    drop(comm);
    assert!(slow.join().unwrap() < key.bytes);
}

#[test]
fn a_frame_that_is_longer_than_its_call_is_refused_by_that_call_and_not_kept() {
    let ours = key(CollectiveKind::AllReduce, 64);
    for len in [32 + 64 + 4, 32 + (1 << 20), u64::MAX] {
        // A rank whose call differs is told how, however long its frame is.
        for (theirs, differs) in [(ours, false), (CallKey { bytes: len / 4 * 4, ..ours }, true)] {
            let (comm, mut stranger) = beside_a_stranger(&call_frame(len, theirs));
            let endless = thread::spawn(move || while stranger.write_all(&[0; 1 << 16]).is_ok() {});
            match outcome(&comm, ours, PATIENCE).unwrap_err() {
                Error::PeerLost { rank: 1, .. } if !differs => {}
                Error::Mismatch { .. } if differs => {}
                other => panic!("{len}: {other}"),
            }
            // The connection ends with the group, so the stranger does too.
            drop(comm);
            endless.join().unwrap();
        }
    }
}
