//! How ranks meet: at `MASTER_ADDR:MASTER_PORT`, as torchrun's variables say.
//!
//! No rank leaves a meeting before all are there, so the next group can meet at the same port.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};
use std::{env, thread};

use instep::{Error, Result};

/// Longest wait for other ranks.
const PATIENCE: Duration = Duration::from_secs(20);

/// Reads a variable of the environment.
pub(crate) fn variable<T: std::str::FromStr>(name: &'static str) -> Result<T> {
    let value = env::var(name).ok().and_then(|text| text.parse().ok());
    value.ok_or_else(|| Error::config(name, "none", "unset or unreadable", "set it as torchrun does"))
}

/// Waits for all other ranks and answers each; the listener is closed by then, so that a later group can meet here.
pub(crate) fn gather(address: (&str, u16), world_size: u32) -> io::Result<Vec<TcpStream>> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let since = Instant::now();
    let mut seats: Vec<Option<TcpStream>> = (1..world_size).map(|_| None).collect();
    while seats.iter().any(Option::is_none) {
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && since.elapsed() < PATIENCE => {
                thread::sleep(Duration::from_millis(5));
                continue;
            }
            Err(error) => return Err(error),
        };
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        let mut rank = [0; 4];
        // A stranger, or a rank that gave up, takes no seat.
        if stream.read_exact(&mut rank).is_ok() {
            let seat = u32::from_le_bytes(rank).checked_sub(1).and_then(|at| seats.get_mut(at as usize));
            seat.into_iter().for_each(|seat| *seat = stream.try_clone().ok());
        }
    }
    drop(listener);
    let mut streams: Vec<TcpStream> = seats.into_iter().flatten().collect();
    streams.iter_mut().try_for_each(|stream| stream.write_all(&[1]))?;
    Ok(streams)
}

/// Finds rank 0, which may not be listening yet.
pub(crate) fn join(address: (&str, u16), rank: u32) -> io::Result<TcpStream> {
    let since = Instant::now();
    loop {
        let attempt = TcpStream::connect(address).and_then(|mut stream| {
            stream.write_all(&rank.to_le_bytes())?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.read_exact(&mut [0])?;
            Ok(stream)
        });
        match attempt {
            Err(_) if since.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(10)),
            outcome => return outcome,
        }
    }
}
