//! A collective divided into pieces that fit into the shared memory: what each rank sends and receives in each piece.
//!
//! This file is pure arithmetic; every rank computes the same pieces.

use crate::shared::PIECE;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce,
    /// A broadcast from this rank.
    Broadcast(usize),
    AllGather,
    ReduceScatter,
}

/// The source of a piece's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    Sum,
    Rank(usize),
}

/// One piece, as one rank sees it; offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) bytes: usize,
    /// Where the rank reads the values that it sends.
    pub(crate) gives: Option<usize>,
    /// Where the rank writes the values that it receives.
    pub(crate) takes: Option<usize>,
    pub(crate) from: From,
}

impl Kind {
    /// Returns the n-th piece of a collective of `bytes` bytes, or `None` after the last.
    pub(crate) fn piece(self, n: usize, bytes: usize, rank: usize, ranks: usize) -> Option<Piece> {
        let each = bytes.div_ceil(PIECE);
        // Only these two have a part for each rank.
        let parts = if matches!(self, Kind::AllGather | Kind::ReduceScatter) { ranks } else { 1 };
        let (part, start) = (n / each.max(1), n % each.max(1) * PIECE);
        if part >= parts || bytes == 0 {
            return None;
        }
        let length = PIECE.min(bytes - start);
        let (whole, own) = (part * bytes + start, rank == part);
        let (gives, takes, from) = match self {
            Kind::AllReduce => (Some(start), Some(start), From::Sum),
            Kind::Broadcast(root) => ((rank == root).then_some(start), Some(start), From::Rank(root)),
            Kind::AllGather => (own.then_some(start), Some(whole), From::Rank(part)),
            Kind::ReduceScatter => (Some(whole), own.then_some(start), From::Sum),
        };
        Some(Piece { bytes: length, gives, takes, from })
    }

    /// Returns how many bytes a rank reads and writes in all.
    pub(crate) fn lengths(self, bytes: usize, rank: usize, ranks: usize) -> (usize, usize) {
        match self {
            Kind::AllReduce => (bytes, bytes),
            Kind::Broadcast(root) => (if rank == root { bytes } else { 0 }, bytes),
            Kind::AllGather => (bytes, ranks * bytes),
            Kind::ReduceScatter => (ranks * bytes, bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_give_and_take_every_byte_once() {
        let bytes = 2 * PIECE + 12;
        for kind in [Kind::AllReduce, Kind::Broadcast(1), Kind::AllGather, Kind::ReduceScatter] {
            for rank in 0..3 {
                let pieces: Vec<_> = (0..).map_while(|n| kind.piece(n, bytes, rank, 3)).collect();
                let total = |side: fn(&Piece) -> Option<usize>| {
                    pieces
                        .iter()
                        .filter(|piece| side(piece).is_some())
                        .map(|piece| piece.bytes)
                        .sum::<usize>()
                };
                let lengths = (total(|piece| piece.gives), total(|piece| piece.takes));
                assert_eq!(lengths, kind.lengths(bytes, rank, 3), "{kind:?} on rank {rank}");
            }
        }
    }
}
