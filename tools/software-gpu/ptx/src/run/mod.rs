//! Runs launches: blocks one after the other, the warps of each in turns, the lanes of a warp together.
//!
//! The order of blocks and warps, and how long a warp's turn is, come from a seed. A kernel without races gives the
//! same bits for every seed.

mod access;
mod alu;
mod block;
mod compare;
mod copies;
mod float;
mod journal;
mod lanes;
mod launch;
mod order;
mod registers;
mod shared;
mod together;
mod values;
mod warp;

pub use launch::{Launch, Tally};

use crate::What;
use crate::decode::File;

/// A bit per lane of a warp.
pub(crate) type Lanes = u32;

/// The fault of a lane, before its kernel and block are known.
#[derive(Debug)]
pub(crate) struct Trap {
    pub lane: u32,
    pub address: Option<u64>,
    pub what: What,
    /// The register that the fault is about; the kernel knows its name.
    pub register: Option<(File, u32)>,
}

impl Trap {
    fn at(lane: u32, what: What) -> Box<Trap> {
        Box::new(Trap { lane, address: None, what, register: None })
    }

    fn access(lane: u32, address: u64, what: What) -> Box<Trap> {
        Box::new(Trap { lane, address: Some(address), what, register: None })
    }
}
