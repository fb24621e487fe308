//! Anybody can make these calls without `unsafe`: each call that a group must not make is refused before it touches a
//! byte.
//!
//! A wrapper that lies about its ranks must not make an inner communicator read past a buffer.

use crate::support::Presummed;
use std::time::Duration;

use instep::collective::{Call, CallKey, CollectiveKind};
use instep::{Collective, DType, Error, InProcess, Solo, StreamHandle, in_process};

const KEY: CallKey = CallKey {
    kind: CollectiveKind::AllReduce,
    pass: 1,
    bucket: None,
    dtype: DType::F32,
    bytes: 64,
    agreement: 0,
};
const DEADLINE: Duration = Duration::from_secs(60);

/// Returns memory that starts at a multiple of 8.
fn aligned(words: &mut [u64]) -> &mut [u8] {
    bytemuck::cast_slice_mut(words)
}

#[test]
fn a_call_of_the_wrong_length_or_alignment_is_refused() {
    let comm = Presummed(4);
    let refused = |key: CallKey, source: Option<&mut [u8]>, target: &mut [u8]| {
        let made = Call::on_host(&comm, key, source, target, DEADLINE).map(drop);
        assert!(matches!(made, Err(Error::Layout(_))), "{key}: {made:?}");
    };
    let [mut a, mut b] = [[0u64; 16]; 2];
    refused(KEY, None, &mut aligned(&mut a)[..60]);
    refused(KEY, Some(&mut aligned(&mut a)[..60]), &mut aligned(&mut b)[..64]);
    refused(KEY, Some(&mut aligned(&mut a)[..64]), &mut aligned(&mut b)[..68]);
    refused(KEY, None, &mut aligned(&mut a)[2..66]);
    refused(CallKey { bytes: 62, ..KEY }, None, &mut aligned(&mut a)[..62]);
    refused(CallKey { kind: CollectiveKind::Sum64, bytes: 60, ..KEY }, None, &mut aligned(&mut a)[..60]);
    for kind in [CollectiveKind::ReduceScatter, CollectiveKind::AllGather] {
        // Four ranks cannot share nine elements.
        refused(CallKey { kind, bytes: 36, ..KEY }, None, &mut aligned(&mut a)[..36]);
        refused(CallKey { kind, ..KEY }, Some(&mut aligned(&mut a)[..64]), &mut aligned(&mut b)[..64]);
    }
    let scatter = CallKey { kind: CollectiveKind::ReduceScatter, ..KEY };
    let (source, target) = (&mut aligned(&mut a)[..64], &mut aligned(&mut b)[..16]);
    let mut call = Call::on_host(&comm, scatter, Some(source), target, DEADLINE).unwrap();
    assert_eq!((call.src_bytes(), call.dst_bytes()), (64, 16));
    assert_eq!((call.source().unwrap().len(), call.target().unwrap().len()), (64, 16));
    assert!(matches!(call.in_place(), Err(Error::Unsupported(_))));
}

#[test]
fn in_place_parts_are_those_of_the_own_rank() {
    let starts = in_process(3, |comm| {
        let mut values = [0u64; 12];
        values.iter_mut().zip(0..).for_each(|(value, at)| *value = at);
        let key = CallKey { kind: CollectiveKind::ReduceScatter, bytes: 96, ..KEY };
        let mut call = Call::on_host(&comm, key, None, aligned(&mut values), DEADLINE)?;
        let start = u64::from(call.target()?[0]);
        Ok((start, call.source()?.len()))
    });
    assert_eq!(starts.unwrap(), [(0, 96), (4, 96), (8, 96)]);
}

/// Claims to have eight ranks, around a communicator of two.
struct Lying(InProcess);

impl Collective for Lying {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        8
    }

    fn enqueue(&self, call: &mut Call<'_>) -> instep::Result<()> {
        self.0.enqueue(call)
    }

    fn abort(&self, _: &Error) {}
}

#[test]
fn parts_for_another_number_of_ranks_are_refused_by_the_group() {
    let refused = in_process(2, |comm| {
        let (comm, mut part, mut all) = (Lying(comm), [0u64; 1], [0u64; 8]);
        let key = CallKey { kind: CollectiveKind::AllGather, ..KEY };
        let mut call = Call::on_host(&comm, key, Some(aligned(&mut part)), aligned(&mut all), DEADLINE)?;
        Ok(comm.enqueue(&mut call))
    });
    assert!(refused.unwrap().iter().all(|refused| matches!(refused, Err(Error::Layout(_)))));
}

#[test]
fn memory_of_a_gpu_is_never_given_as_a_slice() {
    let dangling = || std::ptr::without_provenance_mut(1 << 20);
    // SAFETY: no kernel and no host code follows the address.
    let mut call = unsafe { Call::new(KEY, 1, dangling(), dangling(), DEADLINE, Some(StreamHandle(1))) };
    assert!(matches!(call.source(), Err(Error::Unsupported(_))));
    assert!(matches!(call.target().map(|_| ()), Err(Error::Unsupported(_))));
    assert!(matches!(call.in_place().map(|_| ()), Err(Error::Unsupported(_))));
    let refused = in_process(1, |comm| {
        // SAFETY: as above.
        let mut call = unsafe { Call::new(KEY, 1, dangling(), dangling(), DEADLINE, Some(StreamHandle(1))) };
        Ok(comm.enqueue(&mut call))
    });
    assert!(matches!(refused.unwrap()[..], [Err(Error::Unsupported(_))]));
}

#[test]
fn host_memory_has_no_stream_for_a_group_on_gpus() {
    let mut values = [0u64; 8];
    let call = Call::on_host(&Solo::default(), KEY, None, aligned(&mut values), DEADLINE).unwrap();
    assert!(matches!(call.require_stream(), Err(Error::Unsupported(_))));
}
