//! A group with a secret: processes without it get no seat, and no rank 0 without it is believed.
//!
//! Each stranger knows everything but the secret: port, world size, rank, job and protocol.

use std::net::TcpListener;
use std::thread;
use std::time::Instant;

use super::{AMPLE, connect, hello, meet, next, options, port};
use crate::cuda::nccl::bootstrap::{Attempt, attempt, job};
use crate::cuda::nccl::handshake::{Role, Transcript, nonce};
use crate::cuda::nccl::link::Link;
use crate::cuda::nccl::message::Message;
use crate::cuda::nccl::{Options, Secret};
use crate::error::Error;

const SECRET: &str = "correct horse battery";

fn with(secret: Option<&str>, options: Options) -> Options {
    Options { secret: secret.map(|text| Secret::new(text).unwrap()), ..options }
}

fn once(options: &Options) -> Attempt {
    attempt(options, Instant::now() + AMPLE).unwrap()
}

/// Rank 0 of three with the secret, which strangers visit before ranks 1 and 2 come.
fn visited(visit: impl FnOnce(u16)) {
    let port = port();
    thread::scope(|scope| {
        let member =
            |rank| scope.spawn(move || meet(&with(Some(SECRET), options(rank, 3, port, AMPLE))).unwrap().1);
        let zero = member(0);
        drop(connect(port));
        visit(port);
        for rank in [member(1), member(2), zero] {
            assert_eq!(rank.join().unwrap(), [7; 128]);
        }
    });
}

#[test]
fn a_stranger_without_the_secret_or_with_another_takes_no_seat() {
    visited(|port| {
        for secret in [None, Some("incorrect horse battery")] {
            match once(&with(secret, options(1, 3, port, AMPLE))) {
                Attempt::NotSeated(why) => assert!(why.contains("no common secret"), "{why}"),
                other => panic!("{secret:?}: {other:?}"),
            }
        }
    });
}

#[test]
fn a_stranger_who_does_not_check_rank_0_is_refused_for_its_proof() {
    visited(|port| {
        let known = options(1, 3, port, AMPLE);
        let own = nonce().unwrap();
        let wrong = Secret::new("incorrect horse battery").unwrap();
        let first = |message: Message| match message {
            Message::Challenge { nonce, proof } => (nonce, proof),
            other => panic!("{other:?}"),
        };
        let mut link = Link::new(connect(port)).unwrap();
        link.send(&Message::Hello { world_size: 3, rank: 1, job: job(&known), nonce: Some(own) });
        let (host, proof) = first(next(&mut link).unwrap());
        let transcript = Transcript { job: &known.job, world_size: 3, rank: 1, host: &host, guest: &own };
        for answer in [Message::Proof(transcript.prove(&wrong, Role::Guest)), Message::Proof(proof)] {
            let mut link = Link::new(connect(port)).unwrap();
            link.send(&Message::Hello { world_size: 3, rank: 1, job: job(&known), nonce: Some(own) });
            first(next(&mut link).unwrap());
            link.send(&answer);
            assert_eq!(next(&mut link), Ok(Message::Unproven));
        }
        // Neither does one proceed who skips the proof.
        link.send(&hello(&known));
        assert!(next(&mut link).is_err());
    });
}

#[test]
fn a_recorded_handshake_gets_no_seat() {
    visited(|port| {
        let known = options(1, 3, port, AMPLE);
        let (own, secret) = (nonce().unwrap(), Secret::new(SECRET).unwrap());
        let greeting = Message::Hello { world_size: 3, rank: 1, job: job(&known), nonce: Some(own) };
        let mut recorded = Link::new(connect(port)).unwrap();
        recorded.send(&greeting);
        let Ok(Message::Challenge { nonce: host, .. }) = next(&mut recorded) else { panic!("no challenge") };
        let transcript = Transcript { job: &known.job, world_size: 3, rank: 1, host: &host, guest: &own };
        let proof = Message::Proof(transcript.prove(&secret, Role::Guest));
        recorded.send(&proof);
        assert_eq!(next(&mut recorded), Ok(Message::Seated));
        drop(recorded);
        let mut replayed = Link::new(connect(port)).unwrap();
        replayed.send(&greeting);
        assert!(matches!(next(&mut replayed), Ok(Message::Challenge { .. })));
        replayed.send(&proof);
        assert_eq!(next(&mut replayed), Ok(Message::Unproven));
    });
}

#[test]
fn a_rank_with_the_secret_believes_no_rank_0_that_has_not_proven_it() {
    let failure = Error::PeerLost { rank: 0, why: "as I say".to_owned() };
    let answers = [
        vec![Message::Seated, Message::Id(Box::new([6; 128]))],
        vec![Message::Id(Box::new([6; 128]))],
        vec![Message::WorldSize(3)],
        vec![Message::Taken],
        vec![Message::Failure(failure)],
        vec![Message::Challenge { nonce: [1; 32], proof: [2; 32] }, Message::Seated],
    ];
    for answer in answers {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::scope(|scope| {
            let rank = scope.spawn(move || once(&with(Some(SECRET), options(1, 2, port, AMPLE))));
            let mut link = Link::new(listener.accept().unwrap().0).unwrap();
            assert!(matches!(next(&mut link), Ok(Message::Hello { nonce: Some(_), .. })));
            answer.iter().for_each(|message| link.send(message));
            match rank.join().unwrap() {
                Attempt::NotSeated(_) | Attempt::Unanswered(_) => {}
                other => panic!("{answer:?}: {other:?}"),
            }
        });
    }
}

#[test]
fn a_rank_without_a_secret_is_told_that_the_group_has_one_and_the_other_way_around() {
    for (host, guest) in [(Some(SECRET), None), (None, Some(SECRET))] {
        let port = port();
        thread::scope(|scope| {
            let zero = scope.spawn(move || meet(&with(host, options(0, 2, port, AMPLE))).map(|_| ()));
            drop(connect(port));
            match once(&with(guest, options(1, 2, port, AMPLE))) {
                Attempt::NotSeated(why) => assert!(why.contains("INSTEP_JOB_SECRET"), "{why}"),
                other => panic!("{other:?}"),
            }
            meet(&with(host, options(1, 2, port, AMPLE))).unwrap();
            zero.join().unwrap().unwrap();
        });
    }
}
