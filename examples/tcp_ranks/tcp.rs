//! The collective: every rank sends its call to rank 0, which compares the calls, adds in rank order and sends the result
//! back.
//!
//! A thread per connection takes frames in, so no write waits for a peer that is writing itself. A connection that ends
//! is a failure only where something more is waited for, because a rank may leave after its last call.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use instep::collective::{Call, CallKey, Collective, CollectiveKind};
use instep::{Error, Result};

use super::meeting::{gather, join};

/// The first byte of a frame; its length in eight bytes follows, then its contents.
const CALL: u8 = 0; // to rank 0: a key, and the values that are to be summed
const RESULT: u8 = 1; // from rank 0: the bytes that every rank ends with
const DIFFERENT: u8 = 2; // from rank 0: the rank whose call differs, rank 0's key and that rank's
const FAILURE: u8 = 3; // the sender has ended the group, and why

/// The longest frame. A peer that announces more is no rank, and would have this one hold whatever it sends.
const MOST_BYTES: u64 = 64 << 20;

/// Frames of a peer that wait to be taken: a rank sends its next call after the result of the last one.
const MOST_FRAMES: usize = 2;

type Frame = (u8, Vec<u8>);

/// One rank's end of the group.
pub(crate) struct Tcp {
    rank: u32,
    world_size: u32,
    shared: Arc<Shared>,
    /// By peer: what has arrived.
    inboxes: Vec<Mutex<Receiver<Frame>>>,
}

struct Shared {
    /// On rank 0 all others, by rank; on the others rank 0 alone.
    peers: Vec<(u32, Mutex<TcpStream>)>,
    failure: Mutex<Option<Error>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write_frame(mut stream: &TcpStream, tag: u8, parts: &[&[u8]]) -> io::Result<()> {
    let len = parts.iter().map(|part| part.len() as u64).sum::<u64>();
    stream.write_all(&[&[tag][..], &len.to_le_bytes()].concat())?;
    parts.iter().try_for_each(|part| stream.write_all(part))
}

fn read_frame(mut stream: &TcpStream) -> io::Result<Frame> {
    let (mut tag, mut len, mut contents) = ([0], [0; 8], Vec::new());
    stream.read_exact(&mut tag)?;
    stream.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    if len > MOST_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {len} bytes")));
    }
    let read = stream.take(len).read_to_end(&mut contents)? as u64;
    if read == len { Ok((tag[0], contents)) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

impl Tcp {
    /// Meets the other ranks at this address within this time. A program may make several groups, in one order on all ranks.
    pub(crate) fn meet(address: (&str, u16), rank: u32, world_size: u32, patience: Duration) -> Result<Tcp> {
        let (host, port) = address;
        let lost = |error: io::Error| Error::PeerLost { rank: 0, why: format!("{host}:{port}: {error}") };
        let met = if rank == 0 {
            gather(address, world_size, patience)
        } else {
            join(address, rank, patience).map(|stream| vec![stream])
        };
        let streams = met.map_err(lost)?;
        let set = |stream: &TcpStream| stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(None));
        streams.iter().try_for_each(set).map_err(lost)?;
        let readers =
            streams.iter().map(TcpStream::try_clone).collect::<io::Result<Vec<_>>>().map_err(lost)?;
        let first = if rank == 0 { 1 } else { 0 };
        let peers = (first..).zip(streams.into_iter().map(Mutex::new)).collect();
        let shared = Arc::new(Shared { peers, failure: Mutex::new(None) });
        let inboxes = (first..).zip(readers).map(|(peer, reader)| shared.listen(peer, reader)).collect();
        Ok(Tcp { rank, world_size, shared, inboxes })
    }

    /// Returns the next frame of a peer, by its place in the list of peers.
    fn receive(&self, place: usize, call: &Call<'_>, since: Instant) -> Result<Frame> {
        let (peer, inbox) = (self.shared.peers[place].0, lock(&self.inboxes[place]));
        loop {
            match inbox.recv_timeout(Duration::from_millis(2)) {
                Ok(frame) => return Ok(frame),
                Err(RecvTimeoutError::Timeout) if since.elapsed() < call.deadline() => {
                    self.shared.refuse()?
                }
                Err(RecvTimeoutError::Timeout) => {
                    let (rank, call, waited_ms) =
                        (self.rank, call.to_string(), call.deadline().as_millis() as u64);
                    return Err(Error::Deadline { rank, call, waited_ms, missing: vec![peer] });
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.shared.refuse()?;
                    return Err(Error::PeerLost { rank: peer, why: "its connection has ended".to_owned() });
                }
            }
        }
    }

    /// Rank 0: takes everyone's call, and gives everyone the result.
    fn lead(&self, call: &Call<'_>, source: &[u8], since: Instant) -> Result<Vec<u8>> {
        let mut sum = source.to_vec();
        for (place, (peer, _)) in self.shared.peers.iter().enumerate() {
            let (_, frame) = self.receive(place, call, since)?;
            let (theirs, values) = frame.split_first_chunk().ok_or_else(|| nonsense(*peer))?;
            let theirs = CallKey::from_bytes(theirs).ok_or_else(|| nonsense(*peer))?;
            if theirs != call.key() {
                let keys = [call.key().to_bytes(), theirs.to_bytes()].concat();
                self.shared.send_to_all(DIFFERENT, &[&peer.to_le_bytes(), &keys]);
                return Err(call.key().mismatch(&theirs, 0, *peer));
            }
            if call.kind == CollectiveKind::AllReduce {
                if values.len() != sum.len() {
                    return Err(nonsense(*peer));
                }
                add(&mut sum, values);
            }
        }
        self.shared.send_to_all(RESULT, &[&sum]);
        Ok(sum)
    }

    /// The others: send the call, and take the result.
    fn follow(&self, call: &Call<'_>, source: &[u8], since: Instant) -> Result<Vec<u8>> {
        let values = if call.kind == CollectiveKind::AllReduce { source } else { &[] };
        self.shared.send_to_all(CALL, &[&call.key().to_bytes(), values]);
        match self.receive(0, call, since)? {
            (RESULT, result) if result.len() == source.len() => Ok(result),
            (DIFFERENT, frame) => {
                let (peer, keys) = frame.split_first_chunk().ok_or_else(|| nonsense(0))?;
                let mut keys = keys.as_chunks().0.iter().filter_map(CallKey::from_bytes);
                let (first, other) = keys.next().zip(keys.next()).ok_or_else(|| nonsense(0))?;
                Err(first.mismatch(&other, 0, u32::from_le_bytes(*peer)))
            }
            _ => Err(nonsense(0)),
        }
    }
}

fn nonsense(rank: u32) -> Error {
    Error::PeerLost { rank, why: "it sent a frame that no rank sends".to_owned() }
}

fn add(sum: &mut [u8], values: &[u8]) {
    for (sum, value) in sum.as_chunks_mut().0.iter_mut().zip(values.as_chunks().0) {
        *sum = (f32::from_ne_bytes(*sum) + f32::from_ne_bytes(*value)).to_ne_bytes();
    }
}

impl Shared {
    /// Takes in frames until the connection ends. A closed channel tells those who wait for more.
    fn listen(self: &Arc<Shared>, peer: u32, stream: TcpStream) -> Mutex<Receiver<Frame>> {
        let (frames, inbox) = sync_channel(MOST_FRAMES);
        let shared = Arc::clone(self);
        thread::spawn(move || {
            loop {
                match read_frame(&stream) {
                    Ok((FAILURE, why)) => {
                        let why = String::from_utf8_lossy(&why).into_owned();
                        shared.fail(Error::PeerLost { rank: peer, why });
                    }
                    Ok(frame) => match frames.send(frame) {
                        Ok(()) => {}
                        Err(_) => break,
                    },
                    Err(error) => {
                        if error.kind() == io::ErrorKind::InvalidData {
                            drop(stream.shutdown(Shutdown::Both));
                            shared.fail(Error::PeerLost { rank: peer, why: format!("it sent {error}") });
                        }
                        break;
                    }
                }
            }
        });
        Mutex::new(inbox)
    }

    fn refuse(&self) -> Result<()> {
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    /// Keeps the first failure, and tells it to all peers: rank 0 so passes on what it is told. A thread of its own
    /// sends, because a peer that does not read would block an abort.
    fn fail(self: &Arc<Shared>, error: Error) -> Error {
        let mut failure = lock(&self.failure);
        if let Some(first) = &*failure {
            return first.clone();
        }
        *failure = Some(error.clone());
        // Ranks whose calls differ have been told by rank 0.
        if !matches!(error, Error::Mismatch { .. } | Error::LeftPass { .. }) {
            let (shared, why) = (Arc::clone(self), error.to_string());
            thread::spawn(move || shared.send_to_all(FAILURE, &[why.as_bytes()]));
        }
        error
    }

    /// A frame that cannot be sent is missed where it is waited for.
    fn send_to_all(&self, tag: u8, parts: &[&[u8]]) {
        self.peers.iter().for_each(|(_, stream)| drop(write_frame(&lock(stream), tag, parts)));
    }
}

impl Collective for Tcp {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        self.shared.refuse()?;
        if !self.knows(call.kind) {
            return Err(call.unknown_kind());
        }
        let (source, since) = (call.source()?, Instant::now());
        if source.len() as u64 > MOST_BYTES / 2 {
            let wrong = "more than a frame of this transport holds";
            return Err(Error::unsupported(
                format_args!("{} bytes", source.len()),
                wrong,
                "use smaller buckets",
            ));
        }
        let result =
            if self.rank == 0 { self.lead(call, source, since) } else { self.follow(call, source, since) };
        let result = result.map_err(|error| self.shared.fail(error))?;
        call.target()?.copy_from_slice(&result);
        Ok(())
    }

    fn abort(&self, cause: &Error) {
        self.shared.fail(cause.clone());
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.shared.peers.iter().for_each(|(_, stream)| drop(lock(stream).shutdown(Shutdown::Write)));
    }
}
