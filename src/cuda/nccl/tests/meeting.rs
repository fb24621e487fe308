//! Ranks that find each other while others connect to rank 0's port.
//!
//! In each case the group meets all the same, or the error names the cause.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use super::{AMPLE, SHORT, connect, meet, options, port, seated, sum};
use crate::cuda::nccl::Options;
use crate::cuda::nccl::bootstrap::{Attempt, attempt, repeat};
use crate::cuda::nccl::group::Group;
use crate::error::Error;

/// Rank 0 of two, which `act` disturbs before rank 1 comes.
fn disturbed(act: impl FnOnce(u16) -> Vec<TcpStream>) {
    let port = port();
    thread::scope(|scope| {
        let zero = scope.spawn(move || meet(&options(0, 2, port, AMPLE)).map(|_| ()));
        drop(connect(port));
        let disturbers = act(port);
        meet(&options(1, 2, port, AMPLE)).unwrap();
        zero.join().unwrap().unwrap();
        drop(disturbers);
    });
}

#[test]
fn a_second_group_can_meet_on_the_port_of_the_first() {
    let port = port();
    thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || {
                let groups: Vec<Group> =
                    (0..4).map(|_| meet(&options(rank, 3, port, AMPLE)).unwrap().0).collect();
                for group in &groups {
                    group.compare(&sum(0), AMPLE).unwrap();
                    group.leave();
                }
            });
        }
    });
}

#[test]
fn a_rank_that_never_comes_is_named_to_all_that_did() {
    let port = port();
    let outcomes = thread::scope(|scope| {
        let one = |rank, deadline| scope.spawn(move || meet(&options(rank, 4, port, deadline)).map(|_| ()));
        let threads = [one(0, SHORT), one(1, AMPLE), one(3, AMPLE)];
        threads.map(|thread| thread.join().unwrap())
    });
    for outcome in outcomes {
        match outcome {
            Err(Error::Deadline { rank: 0, missing, .. }) => assert_eq!(missing, [2]),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_rank_without_a_rank_0_gives_up_and_says_what_it_tried() {
    match meet(&options(1, 2, port(), SHORT)) {
        Err(Error::Deadline { rank: 1, call, missing, .. }) => {
            assert_eq!(missing, [0]);
            assert!(call.contains("127.0.0.1") && call.contains("refused"), "{call}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_of_another_world_size_is_refused_and_the_others_go_on() {
    disturbed(|port| {
        match meet(&options(1, 3, port, AMPLE)) {
            Err(Error::Mismatch { rank: 1, ours, other_rank: 0, theirs, .. }) => {
                assert!(ours.contains('3') && theirs.contains('2'), "{ours} {theirs}");
            }
            other => panic!("{other:?}"),
        }
        Vec::new()
    });
}

#[test]
fn a_rank_whose_seat_is_taken_tries_again_until_the_seat_is_free() {
    let port = port();
    thread::scope(|scope| {
        let zero = scope.spawn(move || meet(&options(0, 3, port, AMPLE)).map(|_| ()));
        let holder = seated(&options(1, 3, port, AMPLE));
        let refused = attempt(&options(1, 3, port, AMPLE), Instant::now() + AMPLE).unwrap();
        assert!(matches!(refused, Attempt::Taken), "{refused:?}");
        let one = scope.spawn(move || meet(&options(1, 3, port, AMPLE)).map(|_| ()));
        drop(holder);
        meet(&options(2, 3, port, AMPLE)).unwrap();
        one.join().unwrap().unwrap();
        zero.join().unwrap().unwrap();
    });
}

#[test]
fn ranks_of_another_job_do_not_join_and_do_not_disturb() {
    disturbed(|port| {
        let other = Options { job: "yesterday".to_owned(), ..options(1, 2, port, AMPLE) };
        match attempt(&other, Instant::now() + AMPLE).unwrap() {
            Attempt::NotSeated(why) => assert_eq!(why, "another job answered"),
            other => panic!("{other:?}"),
        }
        Vec::new()
    });
}

/// Plays these outcomes, of which the last lasts until the deadline.
fn repeated(outcomes: Vec<Attempt>) -> Error {
    let until = Instant::now() + SHORT;
    let mut outcomes = outcomes.into_iter().peekable();
    let attempt = || {
        let outcome = outcomes.next().unwrap();
        if outcomes.peek().is_none() {
            thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        Ok(outcome)
    };
    // A machine so slow that the deadline passes before the last outcome must report the same.
    repeat(&options(1, 2, 29500, SHORT), until, attempt).unwrap_err()
}

#[test]
fn a_rank_that_gives_up_names_the_last_answer_and_not_what_cut_the_next_attempt_short() {
    let answer = || Attempt::NotSeated("another job answered".to_owned());
    let silence = || Attempt::Unanswered("Connection refused".to_owned());
    for outcomes in [vec![answer(), Attempt::CutShort], vec![answer(), silence()], vec![answer()]] {
        match repeated(outcomes) {
            Error::Deadline { call, missing, .. } => {
                assert!(call.contains("another job answered") && missing == [0], "{call}");
            }
            other => panic!("{other:?}"),
        }
    }
    match repeated(vec![silence(), Attempt::CutShort]) {
        Error::Deadline { call, .. } => assert!(call.contains("Connection refused"), "{call}"),
        other => panic!("{other:?}"),
    }
    for outcomes in [vec![Attempt::Taken], vec![Attempt::Taken, silence()]] {
        assert!(matches!(repeated(outcomes), Error::Config { field: "RANK", .. }));
    }
}

#[test]
fn strangers_who_send_garbage_or_nothing_do_not_hold_up_the_ranks() {
    disturbed(|port| {
        let garbage: [&[u8]; 6] = [
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            &[0; 64],
            &[0xff; 4096],
            &[1, 0, 0, 0, 99],
            // A hello of the right length with another magic.
            &[25, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            // A text that claims more than there is.
            &[6, 0, 0, 0, 6, 0xff, 0xff, 0, 0, b'x'],
        ];
        for bytes in garbage {
            let mut stream = connect(port);
            stream.write_all(bytes).unwrap();
            // The connection ends, with or without an answer.
            stream.set_read_timeout(Some(AMPLE)).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        }
        let mut half = connect(port);
        half.write_all(&[25, 0, 0]).unwrap();
        vec![connect(port), half, connect(port)]
    });
}

#[test]
fn a_rank_that_answers_a_wrong_service_says_so() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        let rank = scope.spawn(move || meet(&options(1, 2, port, SHORT)).map(|_| ()));
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 mail.example.org ready\r\n").unwrap();
        drop(listener);
        match rank.join().unwrap() {
            Err(Error::Deadline { missing, .. }) => assert_eq!(missing, [0]),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_rank_that_leaves_before_all_are_there_may_come_again() {
    let port = port();
    thread::scope(|scope| {
        let zero = scope.spawn(move || meet(&options(0, 3, port, AMPLE)).map(|_| ()));
        assert!(matches!(meet(&options(1, 3, port, SHORT)), Err(Error::Deadline { .. })));
        let again = scope.spawn(move || meet(&options(1, 3, port, AMPLE)).map(|_| ()));
        meet(&options(2, 3, port, AMPLE)).unwrap();
        again.join().unwrap().unwrap();
        zero.join().unwrap().unwrap();
    });
}

#[test]
fn a_port_that_is_taken_is_a_config_error_on_rank_0() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    assert!(matches!(meet(&options(0, 2, port, AMPLE)), Err(Error::Config { field: "MASTER_PORT", .. })));
}
