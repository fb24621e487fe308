//! The kernels must stay inside buffers of narrow elements. A step reads and writes every format, between bands of
//! bytes.
//!
//! The tests call the C functions directly. Each memory has exactly the length of its elements, so one element too many
//! changes a band. The f32 kernels are in `out_of_bounds`.

use std::ffi::c_void;

use instep::Isa;
use instep::abi::*;

use crate::kernels::out_of_bounds::AHEAD_BYTES;
use crate::support::entries::kernels;
use crate::support::hypers::{parts, rule};
use crate::support::{Optim, few_optimizers};

const BAND: usize = 64;
const BYTE: u8 = 0x6b;
/// Lengths near vectors, near blocks of 8-bit states, near the runs that pass through f32, and near a full tile.
const LENGTHS: [usize; 9] = [1, 5, 17, 33, 255, 257, 300, 513, 2048];

/// Elements between bands, at the alignment of one element.
struct Bytes(Vec<u64>, usize);

impl Bytes {
    fn new(count: usize, element: usize) -> Bytes {
        let bytes = count * element;
        let mut words = vec![u64::from_ne_bytes([BYTE; 8]); (2 * BAND + bytes).div_ceil(8) + 1];
        // SAFETY: inside the words, which any bytes are.
        unsafe { words.as_mut_ptr().cast::<u8>().add(BAND + element).write_bytes(0, bytes) };
        Bytes(words, BAND + element)
    }

    fn address<T>(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast::<u8>().wrapping_add(self.1).cast()
    }

    fn assert_bands_stand(&self, bytes: usize, what: &str) {
        let all: Vec<u8> = self.0.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let (before, rest) = all.split_at(self.1);
        assert!(before.iter().all(|byte| *byte == BYTE), "{what} was written before its first element");
        assert!(rest[bytes..].iter().all(|byte| *byte == BYTE), "{what} was written after its last element");
    }
}

/// The format of each tensor.
#[derive(Clone, Copy, Debug)]
struct Formats {
    param: u32,
    grad: u32,
    copy: u32,
    master: u32,
    moments: u32,
    stochastic: u32,
}

fn bytes_of(dtype: u32) -> usize {
    if dtype == INSTEP_DTYPE_F32 { 4 } else { 2 }
}

fn formats() -> Vec<Formats> {
    let (bf16, f16, f32) = (INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16, INSTEP_DTYPE_F32);
    let mut all = Vec::new();
    for stochastic in [0, 1] {
        for moments in [INSTEP_MOMENTS_F32, INSTEP_MOMENTS_BF16, INSTEP_MOMENTS_8BIT] {
            for (param, grad, copy) in
                [(bf16, bf16, f32), (f16, f32, f16), (f32, f16, bf16), (bf16, f16, f16)]
            {
                all.push(Formats { param, grad, copy, master: INSTEP_MASTER_NONE, moments, stochastic });
            }
            for master in [INSTEP_MASTER_F32, INSTEP_MASTER_REMAINDER16, INSTEP_MASTER_REMAINDER8] {
                all.push(Formats { param: bf16, grad: bf16, copy: bf16, master, moments, stochastic });
            }
        }
    }
    all
}

fn step(isa: Isa, optim: Optim, len: usize, formats: Formats, has_copy: bool) {
    let (optimizer, hyper, states) = rule(optim);
    let entries = kernels(isa);
    let state_bytes = match formats.moments {
        INSTEP_MOMENTS_F32 => 4,
        INSTEP_MOMENTS_BF16 => 2,
        _ => 1,
    };
    let master_bytes = match formats.master {
        INSTEP_MASTER_REMAINDER8 => 1,
        INSTEP_MASTER_REMAINDER16 => 2,
        _ => 4,
    };
    let blocks = len.div_ceil(INSTEP_QUANTUM as usize);
    // Parameters, gradients, master, copy, average, states and their scales, in this order.
    let mut sizes = vec![
        (len, bytes_of(formats.param)),
        (len, bytes_of(formats.grad)),
        (len, master_bytes),
        (len, bytes_of(formats.copy)),
        (len, 4),
    ];
    sizes.extend((0..states).flat_map(|_| [(len, state_bytes), (blocks, 4)]));
    let mut memories: Vec<Bytes> =
        sizes.iter().map(|(count, element)| Bytes::new(*count, *element)).collect();
    let addresses: Vec<*mut c_void> = memories.iter_mut().map(Bytes::address).collect();
    let of_state = |at: usize| {
        let mut pointers = [std::ptr::null_mut::<c_void>(); INSTEP_MAX_STATES as usize];
        (0..states).for_each(|k| pointers[k] = addresses[5 + 2 * k + at]);
        pointers
    };
    // SAFETY: zeros are a value of all three.
    let (mut control, mut record, mut norms) = unsafe {
        (
            std::mem::zeroed::<InstepControl>(),
            std::mem::zeroed::<InstepRecord>(),
            std::mem::zeroed::<InstepNorms>(),
        )
    };
    record.optimizer = optimizer as u16;
    record.grad_dtype = formats.grad as u16;
    let (mut hyper, mut lr_multiplier, mut action) = (hyper, 1.0, INSTEP_ACTION_STEP);
    let tile = InstepTile {
        param: addresses[0].expose_provenance() as u64,
        grad_offset: 0,
        state_offset: 0,
        element: 0,
        count: len as u32,
        record: 0,
        first: 1,
        first_record: 0,
        run: 1,
        bucket: 0,
        reserved: [0; 2],
    };
    // SAFETY: null pointers and zeros are values of both; what a step reads is set below.
    let (mut begin, mut args) =
        unsafe { (std::mem::zeroed::<InstepBeginArgs>(), std::mem::zeroed::<InstepStepArgs>()) };
    begin.control = &mut control;
    begin.records = &mut record;
    begin.hypers = &mut hyper;
    begin.lr_multipliers = &mut lr_multiplier;
    begin.actions = &mut action;
    begin.record_count = 1;
    begin.norms = &mut norms;
    (begin.divisor, begin.loss_scale, begin.previous_max_norm) = (1.0, 1.0, -1.0);
    args.control = &mut control;
    args.records = &mut record;
    (args.tiles, args.tile_count) = (&tile, 1);
    args.grads = addresses[1];
    args.master = if formats.master == INSTEP_MASTER_NONE { std::ptr::null_mut() } else { addresses[2] };
    if has_copy {
        (args.copy, args.ema) = (addresses[3], addresses[4].cast());
    }
    args.states = of_state(0);
    args.scales = of_state(1).map(<*mut c_void>::cast);
    args.norms = &mut norms;
    (args.optimizer, args.state_count) = (optimizer, states as u32);
    (args.param_dtype, args.grad_dtype, args.copy_dtype) = (formats.param, formats.grad, formats.copy);
    (args.master_kind, args.moments, args.stochastic) = (formats.master, formats.moments, formats.stochastic);
    (args.gradients, args.ema_weight) = (INSTEP_GRADIENTS_ZERO, 0.5);
    // SAFETY: every pointer leads into a memory above, which is as long as the tile and the formats say.
    unsafe {
        entries.begin.unwrap()(&begin);
        for part in parts(optim) {
            entries.step.unwrap()(
                &InstepStepArgs { part: *part, ..args },
                std::ptr::null(),
                0,
                1,
                AHEAD_BYTES,
            );
        }
    }
    assert_eq!(record.stepped, 1);
    let names = ["param", "grad", "master", "copy", "average"]
        .into_iter()
        .chain(["state", "scales"].into_iter().cycle());
    for ((memory, (count, element)), name) in memories.iter().zip(&sizes).zip(names) {
        let what = format!("{isa} {optim:?}, {len} elements, {formats:?}, copy {has_copy}: {name}");
        memory.assert_bands_stand(count * element, &what);
    }
}

#[test]
fn kernels_touch_nothing_beside_narrow_buffers() {
    for isa in Isa::available() {
        for optim in few_optimizers() {
            for len in LENGTHS {
                for formats in formats() {
                    [false, true].into_iter().for_each(|has_copy| step(isa, optim, len, formats, has_copy));
                }
            }
        }
    }
}
