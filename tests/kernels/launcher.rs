//! The bench's launcher: no safe call reads or writes outside a memory, whatever the types of the memories.
//!
//! The tests compare the memories byte by byte around every call.

use instep::bench::Launcher;
use instep::layout::Storage;
use instep::op::Memory;
use instep::{AdamW, DType, Error, Isa, Layout, Master, Moments, Precision, Rounding};

/// Several tiles, without being a multiple of one.
const ELEMENTS: usize = 5000;

/// Every memory except the moving average has another size than f32 elements need.
fn narrow() -> Storage {
    let precision = Precision {
        param: DType::BF16,
        grad: DType::BF16,
        master: Master::Remainder8,
        moments: Moments::EightBit,
        rounding: Rounding::Nearest,
    };
    Storage { precision, copy: Some(DType::F16), ema: true }
}

fn launcher(storage: Storage) -> Launcher {
    let layout = Layout::builder().param("w", ELEMENTS).build().unwrap();
    Launcher::new(&layout, &AdamW::default(), u64::MAX, 1, storage, Isa::Baseline, 2).unwrap()
}

fn memories(launcher: &mut Launcher) -> Vec<(Memory, Vec<u8>)> {
    let all: Vec<Memory> = Memory::of_tensors(launcher.plan(), 2).collect();
    all.into_iter().map(|memory| (memory, launcher.bytes(memory, 0).to_vec())).collect()
}

fn changed(before: &[(Memory, Vec<u8>)], launcher: &mut Launcher) -> Vec<Memory> {
    let now = memories(launcher);
    now.iter().zip(before).filter(|(now, before)| now != before).map(|(now, _)| now.0).collect()
}

#[test]
fn filling_changes_the_memory_that_is_named_and_its_master_alone() {
    let mut launcher = launcher(narrow());
    let zeros = memories(&mut launcher);
    launcher.fill(Memory::Params, |k| 1.0 + k as f32 / 7.0).unwrap();
    assert_eq!(changed(&zeros, &mut launcher), [Memory::Params, Memory::Master]);
    let filled = memories(&mut launcher);
    launcher.fill(Memory::Grads, |k| k as f32).unwrap();
    assert_eq!(changed(&filled, &mut launcher), [Memory::Grads]);
}

#[test]
fn filling_refuses_memories_of_other_types_and_changes_nothing() {
    for storage in [narrow(), Storage::default()] {
        let mut launcher = launcher(storage);
        let zeros = memories(&mut launcher);
        let others = [
            Memory::Master,
            Memory::Copy,
            Memory::Ema,
            Memory::State(0),
            Memory::Scales(1),
            Memory::State(200),
            Memory::Control,
            Memory::Settings,
        ];
        for memory in others {
            let refused = launcher.fill(memory, |_| 1.0);
            assert!(matches!(refused, Err(Error::Config { field: "memory", .. })), "{memory:?}: {refused:?}");
        }
        assert_eq!(changed(&zeros, &mut launcher), []);
    }
}

#[test]
fn the_ceiling_streams_f32_alone_and_refuses_every_other_type() {
    let precisions = [
        Precision { param: DType::BF16, ..Precision::F32 },
        Precision { grad: DType::BF16, ..Precision::F32 },
        Precision { moments: Moments::BF16, ..Precision::F32 },
        Precision { moments: Moments::EightBit, ..Precision::F32 },
    ];
    for precision in precisions {
        let mut launcher = launcher(precision.into());
        let refused = launcher.ceiling(0..1, 1, false);
        assert!(
            matches!(refused, Err(Error::Config { field: "precision", .. })),
            "{precision:?}: {refused:?}"
        );
    }
    let mut launcher = launcher(Storage::default());
    launcher.fill(Memory::Params, |k| k as f32).unwrap();
    let before = memories(&mut launcher);
    launcher.ceiling(0..1, 2, false).unwrap();
    launcher.ceiling(0..1, 2, true).unwrap();
    assert_eq!(changed(&before, &mut launcher), [], "it changes no value");
}
