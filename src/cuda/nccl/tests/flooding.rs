//! Peers and strangers who send too much, too little or nonsense: what they cost is counted, not timed.
//!
//! Each case drives the looks by hand, so that nothing depends on how fast the machine is.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::thread;

use super::{AMPLE, SHORT, hello, meet, options, pair, sum};
use crate::cuda::nccl::Options;
use crate::cuda::nccl::bootstrap::{Gathering, MOST_GUESTS};
use crate::cuda::nccl::group::{Group, Peer};
use crate::cuda::nccl::link::{LONGEST_BYTES, Link, Received};
use crate::cuda::nccl::message::Message;
use crate::error::Error;

fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn frame(message: &Message) -> Vec<u8> {
    let bytes = message.encode();
    [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat()
}

#[test]
fn strangers_who_hold_the_line_open_cost_bounded_memory_and_the_rank_still_joins() {
    let (listener, port) = listener();
    let options = options(0, 2, port, AMPLE);
    let mut gathering = Gathering::new(&options);
    let mut strangers = Vec::new();
    for _ in 0..MOST_GUESTS + 20 {
        let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
        // Most of a frame.
        stranger.write_all(&[&[252, 0, 0, 0], &[9; 200][..]].concat()).unwrap();
        strangers.push(stranger);
        gathering.look(&listener).unwrap();
        assert!(gathering.held().0 <= MOST_GUESTS);
    }
    while gathering.held().0 < MOST_GUESTS {
        gathering.look(&listener).unwrap();
    }
    assert!(gathering.held().1 <= MOST_GUESTS * 256, "{:?}", gathering.held());
    let mut seat = Link::new(TcpStream::connect(("127.0.0.1", port)).unwrap()).unwrap();
    seat.send(&hello(&Options { rank: 1, ..options.clone() }));
    while !gathering.missing().is_empty() {
        gathering.look(&listener).unwrap();
    }
    drop(strangers);
}

#[test]
fn refusals_are_counted_and_not_kept() {
    let (listener, port) = listener();
    let options = options(0, 2, port, AMPLE);
    let mut gathering = Gathering::new(&options);
    for rank in 0..200 {
        let stranger = Options { rank, job: format!("job {rank}"), ..options.clone() };
        let mut link = Link::new(TcpStream::connect(("127.0.0.1", port)).unwrap()).unwrap();
        link.send(&hello(&stranger));
        loop {
            gathering.look(&listener).unwrap();
            match link.receive() {
                Received::Nothing => {}
                answer => break assert_eq!(answer, Received::Message(Message::OtherJob)),
            }
        }
        assert!(gathering.held().1 < 100, "{:?}", gathering.held());
    }
    match gathering.give_up(vec![1]) {
        Error::Deadline { call, .. } => assert!(call.contains("200 refused"), "{call}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_seat_holder_cannot_make_rank_0_keep_more_than_an_introduction() {
    let (listener, port) = listener();
    let options = options(0, 2, port, AMPLE);
    let mut gathering = Gathering::new(&options);
    let mut holder = TcpStream::connect(("127.0.0.1", port)).unwrap();
    holder.write_all(&frame(&hello(&Options { rank: 1, ..options.clone() }))).unwrap();
    while !gathering.missing().is_empty() {
        gathering.look(&listener).unwrap();
    }
    // Most of a long frame. A seated rank that speaks before the id loses its seat.
    holder.write_all(&[&8000u32.to_le_bytes()[..], &[6; 5000]].concat()).unwrap();
    while gathering.missing().is_empty() {
        gathering.look(&listener).unwrap();
        assert!(gathering.held().1 <= 256, "{:?}", gathering.held());
    }
}

/// Rank 0 of two whose rank 1 is a bare socket.
fn star() -> (Group, TcpStream) {
    let (mut link, stream) = pair();
    link.trust();
    (Group::new(0, 2, vec![Peer::new(1, link)]), stream)
}

fn ended(group: &Group) -> Error {
    loop {
        if let Err(error) = group.check() {
            return error;
        }
    }
}

#[test]
fn a_peer_that_floods_the_group_neither_holds_up_a_check_nor_grows_memory() {
    let floods = [
        Message::Entry(sum(0)),
        Message::Agreed,
        Message::Leaving,
        Message::Seated,
        Message::Id(Box::new([0; 128])),
    ];
    for message in floods {
        let (group, mut stream) = star();
        let bytes = frame(&message).repeat(1 << 20 >> frame(&message).len().ilog2());
        thread::scope(|scope| {
            // Writes until the other end is closed.
            scope.spawn(move || while stream.write_all(&bytes).is_ok() {});
            match ended(&group) {
                Error::PeerLost { rank: 1, why } => assert!(why.contains("out of turn"), "{why}"),
                other => panic!("{other:?}"),
            }
            for _ in 0..100 {
                assert!(group.check().is_err());
                let held = group.held_bytes();
                assert!(held <= 2 * LONGEST_BYTES, "{} costs {held} bytes", message.kind());
            }
            drop(group);
        });
    }
}

#[test]
fn a_peer_that_sends_half_a_message_or_nothing_leaves_checks_free_and_ends_in_a_deadline() {
    for bytes in [&[][..], &[200, 0, 0, 0, 6]] {
        let (group, mut stream) = star();
        stream.write_all(bytes).unwrap();
        for _ in 0..100 {
            group.check().unwrap();
        }
        match group.compare(&sum(0), SHORT) {
            Err(Error::Deadline { rank: 0, missing, .. }) => assert_eq!(missing, [1]),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_peers_own_words_cannot_steer_a_terminal_or_fill_a_log() {
    let words = format!("\x1b[31m`it's`\r\n{}", "x".repeat(8000));
    let mismatch = |text: &str| Error::Mismatch {
        rank: 1,
        ours: text.to_owned(),
        other_rank: 0,
        theirs: text.to_owned(),
        differs: text.to_owned(),
    };
    let deadline = Error::Deadline { rank: 1, call: words.clone(), waited_ms: 1, missing: vec![0; 256] };
    let lost = Error::PeerLost { rank: 1, why: words.clone() };
    for cause in [mismatch(&words), deadline, lost] {
        let (group, mut stream) = star();
        stream.write_all(&frame(&Message::Failure(cause))).unwrap();
        let text = ended(&group).to_string();
        assert!(text.contains("`it's`\\r\\n") && !text.contains(char::is_control), "{text}");
        assert!(text.len() < 3000, "{}", text.len());
    }
}

#[test]
fn a_peer_that_reads_nothing_loses_its_connection() {
    let (mut link, stream) = pair();
    let entry = Message::Failure(Error::PeerLost { rank: 1, why: "x".repeat(8000) });
    // The system's own buffers take some megabytes.
    let lost = (0..100_000).any(|_| {
        link.send(&entry);
        assert!(link.held_bytes() <= 3 * LONGEST_BYTES);
        link.receive() != Received::Nothing
    });
    assert!(lost && link.held_bytes() == 0);
    drop(stream);
}

#[test]
fn garbage_ends_a_connection_and_one_that_has_not_introduced_itself_may_say_little() {
    for (bytes, trusted) in [(&[0xff; 64][..], true), (&[0; 64], true), (&[1, 1, 0, 0, 6], false)] {
        let (mut link, mut stream) = pair();
        if trusted {
            link.trust();
        }
        stream.write_all(bytes).unwrap();
        let end = loop {
            match link.receive() {
                Received::Nothing => thread::yield_now(),
                end => break end,
            }
        };
        assert!(matches!(&end, Received::Ended(why) if why.contains("protocol")), "{end:?}");
        assert_eq!(link.held_bytes(), 0);
    }
}

#[test]
fn a_group_outlives_strangers_who_come_after_it_has_met() {
    let port = super::port();
    let (zero, one) = thread::scope(|scope| {
        let one = scope.spawn(move || meet(&options(1, 2, port, AMPLE)).unwrap().0);
        (meet(&options(0, 2, port, AMPLE)).unwrap().0, one.join().unwrap())
    });
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "the port is still open");
    thread::scope(|scope| {
        scope.spawn(|| one.compare(&sum(0), AMPLE).unwrap());
        zero.compare(&sum(0), AMPLE).unwrap();
    });
}
