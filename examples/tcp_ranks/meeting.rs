//! How ranks meet: at `MASTER_ADDR:MASTER_PORT`, as torchrun's variables say.
//!
//! No rank leaves a meeting before all are there, so the next group can meet at the same port.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

/// How long a connection may take to say its rank.
const INTRODUCTION: Duration = Duration::from_secs(1);

/// Connections that may be at that at a time. A rank whose connection is dropped tries again.
const MOST_GUESTS: usize = 64;

/// Waits for all other ranks and answers each; the listener is closed by then, so that a later group can meet here. A thread
/// listens to each connection, so a silent stranger holds nobody up.
pub(crate) fn gather(
    address: (&str, u16),
    world_size: u32,
    patience: Duration,
) -> io::Result<Vec<TcpStream>> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let since = Instant::now();
    let mut seats: Vec<Option<TcpStream>> = (1..world_size).map(|_| None).collect();
    let (introduced, introductions) = channel();
    let mut guests = 0;
    while seats.iter().any(Option::is_none) {
        if since.elapsed() >= patience {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "ranks are missing"));
        }
        match listener.accept() {
            Ok((stream, _)) if guests < MOST_GUESTS => {
                guests += 1;
                let introduced = introduced.clone();
                thread::spawn(move || introduced.send(introduction(stream).ok()));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                thread::sleep(Duration::from_millis(5))
            }
            Err(error) => return Err(error),
        }
        for guest in introductions.try_iter() {
            guests -= 1;
            // A stranger, or a rank that gave up, takes no seat.
            let Some((rank, stream)) = guest else { continue };
            let seat = u32::checked_sub(rank, 1).and_then(|at| seats.get_mut(at as usize));
            seat.into_iter().for_each(|seat| *seat = stream.try_clone().ok());
        }
    }
    drop(listener);
    let mut streams: Vec<TcpStream> = seats.into_iter().flatten().collect();
    streams.iter_mut().try_for_each(|stream| stream.write_all(&[1]))?;
    Ok(streams)
}

fn introduction(mut stream: TcpStream) -> io::Result<(u32, TcpStream)> {
    let mut rank = [0; 4];
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(INTRODUCTION))?;
    stream.read_exact(&mut rank)?;
    Ok((u32::from_le_bytes(rank), stream))
}

/// Finds rank 0, which may not be listening yet.
pub(crate) fn join(address: (&str, u16), rank: u32, patience: Duration) -> io::Result<TcpStream> {
    let since = Instant::now();
    loop {
        let attempt = TcpStream::connect(address).and_then(|mut stream| {
            stream.write_all(&rank.to_le_bytes())?;
            stream.set_read_timeout(Some(patience))?;
            stream.read_exact(&mut [0])?;
            Ok(stream)
        });
        match attempt {
            Err(_) if since.elapsed() < patience => thread::sleep(Duration::from_millis(10)),
            outcome => return outcome,
        }
    }
}
