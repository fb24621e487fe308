//! The collective: every rank sends its call to rank 0, which compares the calls, adds in rank order and sends the
//! result back.
//!
//! One thread per connection receives frames, so two ranks that write to each other do not block each other. A call
//! limits the length of a frame, and the rest of a longer frame is dropped. A rank announces that it leaves. A
//! connection that ends without this message means a lost rank, and all ranks are notified.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use instep::collective::{Call, CallKey, Collective, CollectiveKind};
use instep::{Error, Result};

use super::meeting::{gather, join};

/// The first byte of a frame. The frame's length in eight bytes follows, and then its contents.
const CALL: u8 = 0; // to rank 0: a key, and the values that are to be summed
const RESULT: u8 = 1; // from rank 0: the bytes that every rank ends with
const DIFFERENT: u8 = 2; // from rank 0: a rank that makes another call, rank 0's key and that rank's key
const FAILURE: u8 = 3; // the group has ended: the rank that ended it, and why
const LEAVING: u8 = 4; // the sender makes no more calls

type Frame = (u8, Vec<u8>);

/// The time limit for sending the reason why a group has ended.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// A rank reads at most this many bytes of the reason why a group has ended.
const MOST_WORDS: u64 = 1024;
/// A rank and two keys.
const MOST_DIFFERENT: u64 = 4 + 2 * CallKey::BYTES as u64;

/// One rank's part in the group.
pub(crate) struct Tcp {
    rank: u32,
    world_size: u32,
    shared: Arc<Shared>,
    /// The inbox of each peer.
    inboxes: Vec<Mutex<Inbox>>,
}

/// Frames of a peer. The peer's thread reads the contents of a frame once a call has set the largest allowed length.
struct Inbox {
    wanted: Sender<u64>,
    frames: Receiver<Frame>,
}

struct Shared {
    rank: u32,
    /// The peers: on rank 0 all other ranks, by rank; on any other rank only rank 0.
    peers: Vec<(u32, Mutex<TcpStream>)>,
    failure: Mutex<Option<Error>>,
    /// The thread that sends the reason why the group has ended.
    last_words: Mutex<Option<JoinHandle<()>>>,
    is_closed: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write_frame(stream: &TcpStream, tag: u8, parts: &[&[u8]], deadline: Instant) -> io::Result<()> {
    let len = parts.iter().map(|part| part.len() as u64).sum::<u64>();
    let header = [&[tag][..], &len.to_le_bytes()].concat();
    [&header[..]].iter().chain(parts).try_for_each(|part| write_by(stream, part, deadline))
}

/// Writes all bytes before the deadline, or fails. A plain timeout would start again each time the peer reads some
/// bytes.
fn write_by(mut stream: &TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_write_timeout(Some(left))?;
        bytes = &bytes[stream.write(bytes)?..];
        if !bytes.is_empty() && Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

fn read_header(mut stream: &TcpStream) -> io::Result<(u8, u64)> {
    let (mut tag, mut len) = ([0], [0; 8]);
    stream.read_exact(&mut tag)?;
    stream.read_exact(&mut len)?;
    Ok((tag[0], u64::from_le_bytes(len)))
}

/// Reads the contents of a frame. If the frame is too long, reads only the key, so that the caller can say what is
/// wrong.
fn read_contents(stream: &TcpStream, len: u64, most: u64) -> io::Result<Vec<u8>> {
    let (kept, mut contents) = (if len <= most { len } else { most.min(CallKey::BYTES as u64) }, Vec::new());
    let read = stream.take(kept).read_to_end(&mut contents)? as u64;
    if read == kept { Ok(contents) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

impl Tcp {
    /// Connects to the other ranks at this address, or fails after `patience`. A program may make several groups, in
    /// the same order on all ranks.
    pub(crate) fn meet(address: (&str, u16), rank: u32, world_size: u32, patience: Duration) -> Result<Tcp> {
        let (host, port) = address;
        let lost = |error: io::Error| Error::PeerLost { rank: 0, why: format!("{host}:{port}: {error}") };
        let deadline = Instant::now() + patience;
        let met = if rank == 0 {
            gather(address, world_size, deadline)
        } else {
            join(address, rank, deadline).map(|stream| vec![stream])
        };
        let streams = met.map_err(lost)?;
        let set = |stream: &TcpStream| stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(None));
        streams.iter().try_for_each(set).map_err(lost)?;
        let readers =
            streams.iter().map(TcpStream::try_clone).collect::<io::Result<Vec<_>>>().map_err(lost)?;
        let first = if rank == 0 { 1 } else { 0 };
        let peers = (first..).zip(streams.into_iter().map(Mutex::new)).collect();
        let (failure, last_words) = Default::default();
        let shared = Arc::new(Shared { rank, peers, failure, last_words, is_closed: AtomicBool::new(false) });
        let inboxes = (first..).zip(readers).map(|(peer, reader)| shared.listen(peer, reader)).collect();
        Ok(Tcp { rank, world_size, shared, inboxes })
    }

    /// Returns the next frame of the peer at index `place`, with contents of at most `most` bytes.
    fn receive(&self, place: usize, most: u64, call: &Call<'_>, since: Instant) -> Result<Frame> {
        let (peer, inbox) = (self.shared.peers[place].0, lock(&self.inboxes[place]));
        // If the thread that takes this number has ended, `frames` is closed too.
        let _ = inbox.wanted.send(most);
        loop {
            match inbox.frames.recv_timeout(Duration::from_millis(2)) {
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

    /// Makes the call on rank 0: receives the call of every rank, and sends every rank the result.
    fn lead(&self, call: &Call<'_>, source: &[u8], since: Instant) -> Result<Vec<u8>> {
        let mut sum = source.to_vec();
        let most = CallKey::BYTES as u64 + sum.len() as u64;
        for (place, (peer, _)) in self.shared.peers.iter().enumerate() {
            let (_, frame) = self.receive(place, most, call, since)?;
            let (theirs, values) = frame.split_first_chunk().ok_or_else(|| nonsense(*peer))?;
            let theirs = CallKey::from_bytes(theirs).ok_or_else(|| nonsense(*peer))?;
            if theirs != call.key() {
                let keys = [call.key().to_bytes(), theirs.to_bytes()].concat();
                self.shared.send_to_all(DIFFERENT, &[&peer.to_le_bytes(), &keys], since + call.deadline());
                return Err(call.key().mismatch(&theirs, 0, *peer));
            }
            if call.kind == CollectiveKind::AllReduce {
                if values.len() != sum.len() {
                    return Err(nonsense(*peer));
                }
                add(&mut sum, values);
            }
        }
        self.shared.send_to_all(RESULT, &[&sum], since + call.deadline());
        Ok(sum)
    }

    /// Makes the call on any other rank: sends the call, and receives the result.
    fn follow(&self, call: &Call<'_>, source: &[u8], since: Instant) -> Result<Vec<u8>> {
        let values = if call.kind == CollectiveKind::AllReduce { source } else { &[] };
        self.shared.send_to_all(CALL, &[&call.key().to_bytes(), values], since + call.deadline());
        match self.receive(0, MOST_DIFFERENT.max(source.len() as u64), call, since)? {
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
    /// Starts a thread that receives frames until the peer leaves or the connection ends. The channel then closes, so
    /// calls that wait for more frames fail.
    fn listen(self: &Arc<Shared>, peer: u32, stream: TcpStream) -> Mutex<Inbox> {
        let ((sender, frames), (wanted, lengths)) = (channel(), channel());
        let shared = Arc::clone(self);
        thread::spawn(move || {
            let is_over = shared.take_in(&stream, &sender, &lengths);
            if !is_over && !shared.is_closed.load(Ordering::Relaxed) {
                shared.fail(Error::PeerLost { rank: peer, why: "its connection has ended".to_owned() });
            }
        });
        Mutex::new(Inbox { wanted, frames })
    }

    /// Receives frames until the peer leaves or the connection ends. Returns whether the peer has announced that it
    /// leaves.
    fn take_in(
        self: &Arc<Shared>,
        stream: &TcpStream,
        sender: &Sender<Frame>,
        lengths: &Receiver<u64>,
    ) -> bool {
        while let Ok((tag, len)) = read_header(stream) {
            let most = match tag {
                LEAVING => return true,
                FAILURE => Ok(MOST_WORDS),
                _ => lengths.recv(),
            };
            let Some(contents) = most.ok().and_then(|most| read_contents(stream, len, most).ok()) else {
                break;
            };
            let rest = len - contents.len() as u64;
            if tag != FAILURE {
                if sender.send((tag, contents)).is_err() {
                    break;
                }
            } else if let Some((rank, why)) = contents.split_first_chunk() {
                let why = String::from_utf8_lossy(why).into_owned();
                self.fail(Error::PeerLost { rank: u32::from_le_bytes(*rank), why });
            }
            if self.skip(stream, rest).is_err() {
                break;
            }
        }
        false
    }

    /// Drops the surplus of a frame, so that the rank that sent it can continue. Fails if the group has closed.
    fn skip(&self, stream: &TcpStream, mut rest: u64) -> io::Result<()> {
        while !self.is_closed.load(Ordering::Relaxed) {
            if rest == 0 {
                return Ok(());
            }
            match io::copy(&mut stream.take(rest.min(1 << 16)), &mut io::sink())? {
                0 => break,
                skipped => rest -= skipped,
            }
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }

    fn refuse(&self) -> Result<()> {
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    /// Stores the first failure. Sends this failure to all peers, unless the error is `Mismatch` or `LeftPass`. Rank 0
    /// therefore passes on the failures that it receives. A separate thread sends, because a peer that does not read
    /// would block an abort.
    fn fail(self: &Arc<Shared>, error: Error) -> Error {
        let mut failure = lock(&self.failure);
        if let Some(first) = &*failure {
            return first.clone();
        }
        *failure = Some(error.clone());
        // If calls differ, rank 0 has already told the ranks.
        if !matches!(error, Error::Mismatch { .. } | Error::LeftPass { .. }) {
            let (rank, why) = match &error {
                Error::PeerLost { rank, why } => (*rank, why.clone()),
                other => (self.rank, other.to_string()),
            };
            let shared = Arc::clone(self);
            let said = thread::spawn(move || {
                let until = Instant::now() + LAST_WORDS;
                shared.send_to_all(FAILURE, &[&rank.to_le_bytes(), why.as_bytes()], until);
            });
            *lock(&self.last_words) = Some(said);
        }
        error
    }

    /// Sends a frame to all peers. If a frame cannot be sent, its connection is closed. Otherwise the peer would read
    /// the next frame as the rest of this frame. The peer's calls that wait for frames then fail.
    fn send_to_all(&self, tag: u8, parts: &[&[u8]], deadline: Instant) {
        for (_, stream) in &self.peers {
            let stream = lock(stream);
            if write_frame(&stream, tag, parts, deadline).is_err() {
                drop(stream.shutdown(Shutdown::Both));
            }
        }
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
        if !self.supports(call.kind) {
            return Err(call.unknown_kind());
        }
        let (source, since) = (call.source()?, Instant::now());
        let result =
            if self.rank == 0 { self.lead(call, source, since) } else { self.follow(call, source, since) };
        let result = result.map_err(|error| self.shared.fail(error))?;
        call.target()?.copy_from_slice(&result);
        Ok(())
    }

    fn check(&self) -> Result<()> {
        self.shared.refuse()
    }

    fn abort(&self, cause: &Error) {
        self.shared.fail(cause.clone());
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::Relaxed);
        match lock(&self.shared.last_words).take() {
            Some(said) => drop(said.join()),
            None if self.shared.refuse().is_ok() && !thread::panicking() => {
                self.shared.send_to_all(LEAVING, &[], Instant::now() + LAST_WORDS);
            }
            None => {}
        }
        self.shared.peers.iter().for_each(|(_, stream)| drop(lock(stream).shutdown(Shutdown::Both)));
    }
}
