//! Tests of the interface on which rank 0 listens.
//!
//! Everything runs on loopback, all of whose addresses are this machine's.

use std::net::{SocketAddr, TcpStream};

use super::{AMPLE, options, port};
use crate::cuda::nccl::Options;
use crate::cuda::nccl::bootstrap::{interfaces, listen};

fn listening(address: &str) -> (SocketAddr, bool) {
    let port = port();
    let options = Options { master_addr: address.to_owned(), ..options(0, 2, port, AMPLE) };
    let listener = listen(&options).unwrap();
    (listener.local_addr().unwrap(), TcpStream::connect(("127.0.0.1", port)).is_ok())
}

#[test]
fn rank_0_is_reached_by_its_own_address_only() {
    for (address, elsewhere) in [("127.0.0.1", true), ("127.0.0.2", false)] {
        let (own, reached) = listening(address);
        assert_eq!((own.ip().to_string().as_str(), reached), (address, elsewhere));
    }
    assert!(listening("localhost").0.ip().is_loopback());
}

/// The address is reserved for documentation, so it is no machine's.
#[test]
fn an_address_that_is_not_this_machines_opens_every_interface() {
    let (own, reached) = listening("192.0.2.1");
    assert!(own.ip().is_unspecified() && reached);
}

#[test]
fn a_name_that_only_this_machine_maps_to_loopback_does_not_shut_others_out() {
    let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
    let both = addresses(&["127.0.1.1:1", "10.0.0.7:1"]);
    assert_eq!(interfaces("node-0", &both), addresses(&["10.0.0.7:1"]));
    assert_eq!(interfaces("node-0", &addresses(&["127.0.1.1:1"])), []);
    let loopback = addresses(&["[::1]:1", "127.0.0.1:1"]);
    for name in ["localhost", "LOCALHOST", "127.0.0.1", "::1"] {
        assert_eq!(interfaces(name, &loopback), loopback, "{name}");
    }
}
