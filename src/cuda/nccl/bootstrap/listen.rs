//! Rank 0's listening socket: on the one interface that the other ranks were told, if it is known.
//!
//! A port that is open on one interface cannot be reached through another. Nothing is received here.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use crate::cuda::nccl::Options;
use crate::error::{Error, Result};

/// Listens on `MASTER_ADDR` if that is an address of this machine, else on all interfaces.
pub(in crate::cuda::nccl) fn listen(options: &Options) -> Result<TcpListener> {
    let port = options.master_port;
    let named = (options.master_addr.as_str(), port).to_socket_addrs();
    let named: Vec<SocketAddr> = named.map(Iterator::collect).unwrap_or_default();
    for address in interfaces(&options.master_addr, &named) {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            // The address belongs to a router or a proxy that forwards to this machine.
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {}
            Err(error) => return Err(refused(port, &error)),
        }
    }
    // The second is for machines without IPv6.
    let everywhere: [SocketAddr; 2] =
        [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
    TcpListener::bind(&everywhere[..]).map_err(|error| refused(port, &error))
}

/// Returns the addresses that other ranks may connect to, of those that the name has on this machine.
///
/// Many systems give a machine's own name a loopback address. Other machines do not know it by that, so only a name
/// that means loopback everywhere keeps one.
pub(in crate::cuda::nccl) fn interfaces(name: &str, addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let literal = name.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok();
    let everywhere = literal || name.eq_ignore_ascii_case("localhost");
    let reachable = |address: &&SocketAddr| everywhere || !address.ip().is_loopback();
    addresses.iter().filter(reachable).copied().collect()
}

fn refused(port: u16, error: &std::io::Error) -> Error {
    let another = "choose another port with INSTEP_MASTER_PORT";
    let (wrong, remedy) = match error.kind() {
        ErrorKind::AddrInUse => ("address already in use", another),
        ErrorKind::PermissionDenied => {
            ("permission denied", "choose a port above 1023 with INSTEP_MASTER_PORT")
        }
        _ => ("rank 0 cannot listen there", another),
    };
    Error::config("MASTER_PORT", port, wrong, remedy)
}
