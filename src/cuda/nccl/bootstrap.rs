//! How ranks find each other: rank 0 listens until all have come, the others knock until it opens.
//!
//! Whoever knocks may be anybody: a port scanner, a rank of yesterday's job, a second process with one rank. None of
//! them ends the wait of the others, and a silent one holds nobody up. Nothing is authenticated, as with NCCL's own
//! sockets: the port belongs on a trusted network.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crate::cuda::nccl::group::{Group, Peer};
use crate::cuda::nccl::link::{Link, Message, Received};
use crate::cuda::nccl::{Options, UniqueId};
use crate::error::{Error, Result};
use crate::layout::fold;

/// How long a connection may take to say who it is, or to be answered.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// How long one attempt to connect may take; a host that drops packets would use up the whole deadline.
const ATTEMPT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(1);
const RETRY: Duration = Duration::from_millis(50);
/// Connections that have not said who they are; more are closed at once.
const MOST_GUESTS: usize = 256;

/// Meets the other ranks. Rank 0 makes the id that all of them return.
pub(super) fn meet(
    options: &Options,
    make_id: impl FnOnce() -> Result<UniqueId>,
) -> Result<(Group, UniqueId)> {
    if options.rank > 0 {
        return join(options);
    }
    let id = make_id()?;
    let peers = if options.world_size > 1 { gather(listen(options)?, options, id)? } else { Vec::new() };
    Ok((Group::new(options.rank, options.world_size, peers), id))
}

/// Everybody can reach rank 0 unless the address that they were given is of this machine alone.
fn listen(options: &Options) -> Result<TcpListener> {
    let port = options.master_port;
    let everywhere: [SocketAddr; 2] =
        [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
    let named = (options.master_addr.as_str(), port).to_socket_addrs();
    let named: Vec<SocketAddr> = named.map(Iterator::collect).unwrap_or_default();
    let local = !named.is_empty() && named.iter().all(|address| address.ip().is_loopback());
    // The second is for machines without IPv6; of names with two addresses either is reached.
    TcpListener::bind(if local { &named[..] } else { &everywhere[..] }).map_err(|error| {
        let why = "rank 0 cannot listen there; INSTEP_MASTER_PORT chooses another port";
        Error::config("MASTER_PORT", format!("{port} ({error})"), why)
    })
}

fn job(options: &Options) -> u64 {
    fold(0xcbf2_9ce4_8422_2325, options.job.as_bytes())
}

/// Rank 0: waits for everybody, then hands the id out.
fn gather(listener: TcpListener, options: &Options, id: UniqueId) -> Result<Vec<Peer>> {
    let io = |error: std::io::Error| Error::Unsupported {
        what: "a listening socket".to_owned(),
        have: error.to_string(),
    };
    listener.set_nonblocking(true).map_err(io)?;
    let since = Instant::now();
    let mut seats: Vec<Option<Link>> = (1..options.world_size).map(|_| None).collect();
    let mut guests: Vec<(Link, Instant)> = Vec::new();
    let mut refusals = Vec::new();
    loop {
        while let Ok((stream, _)) = listener.accept() {
            if guests.len() < MOST_GUESTS {
                guests.extend(Link::new(stream).ok().map(|link| (link, Instant::now())));
            }
        }
        for seat in &mut seats {
            // Before the id nobody says anything; whoever has gone may come again.
            if seat.as_mut().is_some_and(|link| link.receive() != Received::Nothing) {
                *seat = None;
            }
        }
        for k in (0..guests.len()).rev() {
            match guests[k].0.receive() {
                Received::Nothing if guests[k].1.elapsed() < INTRODUCTION => {}
                Received::Message(Message::Hello { world_size, rank, job }) => {
                    let (mut link, _) = guests.swap_remove(k);
                    let answer = answer(options, &seats, world_size, rank, job);
                    link.send(&answer);
                    if answer == Message::Seated {
                        seats[rank as usize - 1] = Some(link);
                    } else {
                        refusals.push(format!("rank {rank} of {world_size}: {answer:?}"));
                    }
                }
                // A stranger, or a silent one.
                Received::Message(_) | Received::Ended(_) | Received::Nothing => {
                    guests.swap_remove(k);
                }
            }
        }
        let missing: Vec<u32> = (1..options.world_size)
            .zip(&seats)
            .filter(|(_, seat)| seat.is_none())
            .map(|(rank, _)| rank)
            .collect();
        if missing.is_empty() {
            break;
        }
        if since.elapsed() >= options.deadline {
            let error = late(options, &refusals, missing);
            seats.iter_mut().flatten().for_each(|link| link.send(&Message::Failure(error.clone())));
            return Err(error);
        }
        thread::sleep(POLL);
    }
    // Nobody may knock any more when the first rank goes on: it may found its next group on the same port.
    drop(listener);
    let seat = |(rank, link): (u32, Option<Link>)| link.map(|link| Peer::new(rank, link));
    let mut peers: Vec<Peer> = (1..).zip(seats).filter_map(seat).collect();
    peers.iter_mut().for_each(|peer| peer.send(&Message::Id(Box::new(id))));
    Ok(peers)
}

fn answer(options: &Options, seats: &[Option<Link>], world_size: u32, rank: u32, theirs: u64) -> Message {
    if theirs != job(options) {
        return Message::OtherJob;
    }
    let seat = rank.checked_sub(1).and_then(|at| seats.get(at as usize));
    match seat {
        _ if world_size != options.world_size => Message::WorldSize(options.world_size),
        Some(None) => Message::Seated,
        Some(Some(_)) | None => Message::Taken,
    }
}

fn late(options: &Options, refusals: &[String], missing: Vec<u32>) -> Error {
    let mut call = format!("gathering {} ranks on port {}", options.world_size, options.master_port);
    if let Some(last) = refusals.last() {
        call += &format!(", {} refused, the last was {last}", refusals.len());
    }
    Error::Deadline { rank: options.rank, call, waited_ms: options.deadline.as_millis() as u64, missing }
}

/// What came of one knock.
enum Attempt {
    Joined(Link, UniqueId),
    /// Rank 0 may not be there yet, or something else still has its port.
    Again(String),
}

/// The other ranks: knock until rank 0 opens.
fn join(options: &Options) -> Result<(Group, UniqueId)> {
    let until = Instant::now() + options.deadline;
    loop {
        let why = match attempt(options, until)? {
            Attempt::Joined(link, id) => {
                return Ok((Group::new(options.rank, options.world_size, vec![Peer::new(0, link)]), id));
            }
            Attempt::Again(why) => why,
        };
        if Instant::now() + RETRY >= until {
            let call =
                format!("joining rank 0 at {}:{}; at last {why}", options.master_addr, options.master_port);
            let waited_ms = options.deadline.as_millis() as u64;
            return Err(Error::Deadline { rank: options.rank, call, waited_ms, missing: vec![0] });
        }
        thread::sleep(RETRY);
    }
}

fn attempt(options: &Options, until: Instant) -> Result<Attempt> {
    let mut link = match knock(options, until) {
        Ok(link) => link,
        Err(error) => return Ok(Attempt::Again(error.to_string())),
    };
    let (world_size, rank) = (options.world_size, options.rank);
    link.send(&Message::Hello { world_size, rank, job: job(options) });
    let since = Instant::now();
    let mut seated = false;
    loop {
        match link.receive() {
            Received::Message(Message::Seated) => seated = true,
            Received::Message(Message::Id(id)) => return Ok(Attempt::Joined(link, *id)),
            Received::Message(Message::Failure(error)) => return Err(error),
            Received::Message(Message::WorldSize(theirs)) => {
                let group = |size| format!("joining a group of {size}");
                let (ours, theirs) = (group(world_size), group(theirs));
                return Err(Error::Mismatch { rank, ours, other_rank: 0, theirs });
            }
            Received::Message(Message::Taken) => {
                return Err(Error::config("RANK", rank, "another process has joined as this rank"));
            }
            // Its port may be ours in a moment.
            Received::Message(Message::OtherJob) => {
                return Ok(Attempt::Again("another job answered".to_owned()));
            }
            Received::Message(other) => return Ok(Attempt::Again(format!("it answered {other:?}"))),
            Received::Ended(why) => return Ok(Attempt::Again(why)),
            Received::Nothing if !seated && since.elapsed() >= INTRODUCTION => {
                return Ok(Attempt::Again("what listens there did not answer".to_owned()));
            }
            Received::Nothing if Instant::now() >= until => {
                return Ok(Attempt::Again("rank 0 still waited for others".to_owned()));
            }
            Received::Nothing => thread::sleep(POLL),
        }
    }
}

fn knock(options: &Options, until: Instant) -> std::io::Result<Link> {
    let mut last = std::io::Error::other("the name has no address");
    // Asked anew each time, since in a cluster that is starting the name may appear later.
    for address in (options.master_addr.as_str(), options.master_port).to_socket_addrs()? {
        let left = until.saturating_duration_since(Instant::now()).clamp(POLL, ATTEMPT);
        match TcpStream::connect_timeout(&address, left).and_then(Link::new) {
            Ok(link) => return Ok(link),
            Err(error) => last = error,
        }
    }
    Err(last)
}
