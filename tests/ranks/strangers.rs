//! Strangers at the port of `examples/tcp_ranks`, which people copy: they hold nobody up, and rank 0 keeps nothing of what they
//! send.
//!
//! Everything stays on the loopback interface, and each stranger gives up by itself.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use instep::collective::{Call, CallKey, CollectiveKind};
use instep::{Collective, DType, Error};

#[path = "../../examples/tcp_ranks/meeting.rs"]
mod meeting;
#[path = "../../examples/tcp_ranks/tcp.rs"]
mod tcp;

use tcp::Tcp;

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
fn a_stranger_in_a_seat_is_cut_off_where_its_frame_is_too_long() {
    const MOST_SENT: usize = 256 << 20;
    let port = free_port();
    thread::scope(|threads| {
        let stranger = threads.spawn(|| {
            let mut stream = connect(port);
            stream.write_all(&1u32.to_le_bytes()).unwrap();
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(&[0]).unwrap();
            stream.write_all(&u64::MAX.to_le_bytes()).unwrap();
            let block = vec![0; 1 << 20];
            (0..MOST_SENT / block.len()).take_while(|_| stream.write_all(&block).is_ok()).count()
        });
        let comm = Tcp::meet((HOST, port), 0, 2, PATIENCE).unwrap();
        let blocks = stranger.join().unwrap();
        assert!(blocks < MOST_SENT >> 20, "rank 0 took {blocks} MiB");
        let mut values = [0u64; 2];
        let key = CallKey {
            kind: CollectiveKind::AllReduce,
            pass: 1,
            bucket: Some(0),
            dtype: DType::F32,
            bytes: 16,
            agreement: 0,
        };
        let target = bytemuck::cast_slice_mut(&mut values);
        let mut call = Call::on_host(&comm, key, None, target, PATIENCE).unwrap();
        let error = comm.enqueue(&mut call).unwrap_err();
        assert!(matches!(&error, Error::PeerLost { rank: 1, why } if why.contains("a frame of")), "{error}");
    });
}
