//! Connects the ranks at `MASTER_ADDR:MASTER_PORT`, which torchrun sets.
//!
//! No rank leaves a meeting before all ranks have joined, so the next group can meet at the same port. A meeting has
//! one deadline, and no read from a connection blocks rank 0, so strangers that connect do not delay the meeting.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

/// The largest number of open connections that have not yet sent their rank. If there are more, the oldest of these
/// connections is closed, and its rank connects again.
const MOST_SILENT: usize = 256;

/// Waits for all other ranks, closes the listener so that a later group can meet here, and answers each rank.
pub(crate) fn gather(address: (&str, u16), world_size: u32, deadline: Instant) -> io::Result<Vec<TcpStream>> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let mut silent: Vec<TcpStream> = Vec::new();
    let mut seats: Vec<Option<TcpStream>> = (1..world_size).map(|_| None).collect();
    while seats.iter().any(Option::is_none) {
        time_left(deadline)?;
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(true)?;
                silent.push(stream);
                silent.drain(..silent.len().saturating_sub(MOST_SILENT));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error),
        }
        silent = silent.into_iter().filter_map(|stream| seated(stream, &mut seats)).collect();
    }
    drop(listener);
    let mut streams: Vec<TcpStream> = seats.into_iter().flatten().collect();
    streams
        .iter_mut()
        .try_for_each(|stream| stream.set_nonblocking(false).and_then(|()| stream.write_all(&[1])))?;
    Ok(streams)
}

/// Stores a connection in `seats` once the connection has sent its rank. Until then, returns the connection. Closes the
/// connection of a stranger, or of a rank that gave up.
fn seated(mut stream: TcpStream, seats: &mut [Option<TcpStream>]) -> Option<TcpStream> {
    let mut rank = [0; 4];
    match stream.peek(&mut rank) {
        Ok(4) => {
            stream.read_exact(&mut rank).ok()?;
            let seat = u32::from_le_bytes(rank).checked_sub(1).and_then(|at| seats.get_mut(at as usize));
            *seat? = Some(stream);
            None
        }
        Ok(1..4) => Some(stream),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Some(stream),
        _ => None,
    }
}

/// Finds rank 0, which may not be listening yet.
pub(crate) fn join(address: (&str, u16), rank: u32, deadline: Instant) -> io::Result<TcpStream> {
    let host = address.to_socket_addrs()?.next().ok_or(ErrorKind::AddrNotAvailable)?;
    loop {
        let attempt = TcpStream::connect_timeout(&host, time_left(deadline)?).and_then(|mut stream| {
            stream.write_all(&rank.to_le_bytes())?;
            stream.set_read_timeout(Some(time_left(deadline)?))?;
            stream.read_exact(&mut [0])?;
            Ok(stream)
        });
        match attempt {
            Err(_) if time_left(deadline).is_ok() => thread::sleep(Duration::from_millis(10)),
            outcome => return outcome,
        }
    }
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}
