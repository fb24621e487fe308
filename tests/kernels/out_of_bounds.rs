//! The kernels must stay inside their buffers. Guard bands surround every buffer, at every alignment.
//!
//! The tests call the C functions directly, on this thread. A read out of bounds picks up a guard's NaN, and a write
//! overwrites a guard; both change bits. Every pointer of an argument struct has bands.

use std::collections::HashSet;
use std::ffi::c_void;

use instep::Isa;
use instep::abi::*;

use crate::support::entries::kernels;
use crate::support::guarded::Guarded;
use crate::support::hypers::{parts, rule};
use crate::support::{LENGTHS, Optim, assert_same_bits, optimizers, paint, paint_gradient};

/// A value between bands of words.
#[repr(C)]
struct Banded<T> {
    before: [u64; 8],
    value: T,
    after: [u64; 8],
}

/// A step that prefetches names lines beyond the guards, but reads none of them.
pub(crate) const AHEAD_BYTES: u64 = 2048;
const WORD: u64 = 0x6b61_6e64_6261_6e64;

impl<T> Banded<T> {
    fn new(value: T) -> Banded<T> {
        Banded { before: [WORD; 8], value, after: [WORD; 8] }
    }

    fn assert_bands_stand(&self, what: &str) {
        assert_eq!((self.before, self.after), ([WORD; 8], [WORD; 8]), "{what} was written around");
    }
}

/// A second segment follows the segment under test in the same bucket and is averaged.
const SECOND: usize = 33;

struct Result {
    params: Vec<f32>,
    states: Vec<Vec<f32>>,
    grads: Vec<f32>,
    norm: u64,
}

/// Runs Begin, norm, Decide and step of one bucket in three passes; each tensor is misaligned differently, depending on
/// `offset`.
fn run(isa: Isa, optim: Optim, len: usize, offset: usize) -> Result {
    let what = format!("{isa} {optim:?}, {len} elements, offset {offset}");
    let (optimizer, hyper, states) = rule(optim);
    let entries = kernels(isa);
    let mut param = Guarded::new(len, offset);
    param.values_mut().iter_mut().enumerate().for_each(|(k, p)| *p = paint(1, k));
    let mut second = Guarded::new(SECOND, 0);
    // One element between the two gradients, and the tail flag and the count of ranks after them.
    let (gap, tail) = (len + 1, len + 1 + SECOND);
    let mut grads = Guarded::new(tail + 2, (offset * 3 + 1) % 16);
    let unused = f32::from_bits(0x7fc0_0bad);
    grads.values_mut()[len] = unused;
    let mut state: Vec<_> = (0..states).map(|k| Guarded::new(len, (offset * 5 + k) % 16)).collect();
    let mut hypers = Banded::new(hyper);
    let mut actions = Banded::new([INSTEP_ACTION_STEP, INSTEP_ACTION_AVERAGE]);
    // SAFETY: zeros are a value of all three.
    let (mut control, mut segments, mut norms) = unsafe {
        (
            Banded::new(std::mem::zeroed::<InstepControl>()),
            Banded::new(std::mem::zeroed::<[InstepRecord; 2]>()),
            Banded::new(std::mem::zeroed::<[InstepNorms; 2]>()),
        )
    };
    let element =
        |at: usize, grads: &mut Guarded| grads.address().wrapping_add(at).expose_provenance() as u64;
    for segment in &mut segments.value {
        segment.tail = element(tail, &mut grads);
        segment.contributors = element(tail + 1, &mut grads);
        segment.optimizer = optimizer as u16;
        segment.grad_dtype = INSTEP_DTYPE_F32 as u16;
    }
    let tile = |param: *mut f32, grad: usize, done: usize, count: usize, segment: u32| InstepTile {
        param: param.wrapping_add(done).expose_provenance() as u64,
        grad_offset: (grad + done) as u64,
        state_offset: done as u64,
        element: 0,
        count: count as u32,
        record: segment,
        first: (done == 0).into(),
        first_record: segment,
        run: 1,
        bucket: 0,
        reserved: [0; 2],
    };
    let full = INSTEP_TILE_ELEMENTS as usize;
    let cuts = (0..len).step_by(full).map(|done| (done, full.min(len - done)));
    let mut tiles: Vec<_> = cuts.map(|(done, count)| tile(param.address(), 0, done, count, 0)).collect();
    tiles.push(tile(second.address(), gap, 0, SECOND, 1));
    let mut pointers = [std::ptr::null_mut(); INSTEP_MAX_STATES as usize];
    pointers.iter_mut().zip(&mut state).for_each(|(pointer, state)| *pointer = state.address().cast());
    let args = InstepStepArgs {
        control: &raw mut control.value,
        records: (&raw mut segments.value).cast(),
        tiles: tiles.as_ptr(),
        tile_count: tiles.len() as u64,
        param_base: std::ptr::null_mut(),
        grads: grads.address().cast(),
        master: std::ptr::null_mut(),
        copy: std::ptr::null_mut(),
        states: pointers,
        optimizer,
        state_count: states as u32,
        bucket: 0,
        param_dtype: INSTEP_DTYPE_F32,
        grad_dtype: INSTEP_DTYPE_F32,
        copy_dtype: INSTEP_DTYPE_F32,
        gradients: INSTEP_GRADIENTS_KEEP,
        local: 0,
        master_kind: INSTEP_MASTER_NONE,
        moments: INSTEP_MOMENTS_F32,
        stochastic: 0,
        ema: std::ptr::null_mut(),
        scales: [std::ptr::null_mut(); INSTEP_MAX_STATES as usize],
        seed: 0,
        ema_from_sample: 0,
        ema_weight: 0.0,
        norms: (&raw mut norms.value).cast(),
        part: INSTEP_PART_WHOLE,
        share: 0,
    };
    let parts = parts(optim);
    let mut lr_multipliers = [1.0; 2];
    let begin = InstepBeginArgs {
        control: &raw mut control.value,
        records: (&raw mut segments.value).cast(),
        hypers: &raw mut hypers.value,
        lr_multipliers: lr_multipliers.as_mut_ptr(),
        actions: (&raw mut actions.value).cast(),
        record_count: 2,
        norms: (&raw mut norms.value).cast(),
        ring: std::ptr::null(),
        slot_words: 0,
        slot_count: 0,
        divisor: 0.0,
        loss_scale: 2.0,
        previous_max_norm: -1.0,
        clip: 1.0,
        grad_scale: std::ptr::null(),
        found_inf: std::ptr::null(),
        further_controls: std::ptr::null_mut(),
        further_count: 0,
    };
    let decide = InstepDecideArgs {
        control: &raw mut control.value,
        contributors: grads.address().wrapping_add(tail + 1).cast(),
        max_norm: 0.5,
        skip_nonfinite: 1,
        growth_factor: 1.0,
        backoff_factor: 1.0,
        largest_loss_scale: 0.0,
        growth_interval: 0,
        pass_control: std::ptr::null_mut(),
        bucket: 0,
        grad_dtype: INSTEP_DTYPE_F32,
        found_inf: std::ptr::null_mut(),
        set_controls: std::ptr::null_mut(),
        set_count: 0,
    };
    for step in 0..3 {
        // SAFETY: every pointer leads into a buffer above, which is as long as the tiles and arguments say.
        unsafe {
            entries.begin.unwrap()(&begin);
            // As if two ranks had been summed: a mean that is not the sum shows what else was averaged.
            grads.address().add(tail + 1).write(2.0);
            for (from, count) in [(0, len), (gap, SECOND)] {
                let painted = std::slice::from_raw_parts_mut(grads.address().add(from), count);
                painted.iter_mut().enumerate().for_each(|(k, g)| *g = paint_gradient(step, from, k));
            }
            entries.norm.unwrap()(&args, std::ptr::null(), 0, tiles.len() as u64);
            entries.decide.unwrap()(&decide);
            for part in parts {
                entries.step.unwrap()(
                    &InstepStepArgs { part: *part, ..args },
                    std::ptr::null(),
                    0,
                    tiles.len() as u64,
                    AHEAD_BYTES,
                );
            }
        }
    }
    for tensor in state.iter().chain([&param, &second, &grads]) {
        tensor.assert_bands_stand(&what);
    }
    hypers.assert_bands_stand(&what);
    actions.assert_bands_stand(&what);
    control.assert_bands_stand(&what);
    segments.assert_bands_stand(&what);
    norms.assert_bands_stand(&what);
    assert!(second.values().iter().all(|p| p.to_bits() == 0), "{what}: an averaged parameter was stepped");
    assert_eq!(
        grads.values()[len].to_bits(),
        unused.to_bits(),
        "{what}: the gap between two gradients was written"
    );
    assert_eq!(grads.values()[tail..], [1.0, 2.0], "{what}: the tail");
    let stepped = segments.value.map(|segment| segment.steps + u64::from(segment.stepped));
    assert_eq!(stepped, [if len > 0 { 3 } else { 0 }, 0], "{what}");
    Result {
        params: param.values().to_vec(),
        states: state.iter().map(|state| state.values().to_vec()).collect(),
        grads: grads.values().to_vec(),
        norm: control.value.norm.to_bits(),
    }
}

/// Returns every kernel with every number of states that it may have. Of several cases it returns the last, which has
/// most flags.
fn one_per_launch() -> Vec<Optim> {
    let mut launches = HashSet::new();
    let mut optims = optimizers();
    optims.reverse();
    optims.retain(|optim| {
        let (kernel, _, states) = rule(*optim);
        launches.insert((kernel, states))
    });
    optims
}

#[test]
fn kernels_touch_nothing_beside_their_buffers_and_no_alignment_changes_a_bit() {
    for isa in Isa::available() {
        for optim in one_per_launch() {
            for len in LENGTHS {
                let aligned = run(isa, optim, len, 0);
                for offset in 1..16 {
                    let what = format!("{isa} {optim:?}, {len} elements, offset {offset}");
                    let result = run(isa, optim, len, offset);
                    assert_same_bits(&result.params, &aligned.params, &what);
                    assert_same_bits(&result.grads, &aligned.grads, &what);
                    for (a, b) in result.states.iter().zip(&aligned.states) {
                        assert_same_bits(a, b, &what);
                    }
                    assert_eq!(result.norm, aligned.norm, "{what}");
                }
            }
        }
    }
}

#[test]
fn the_sum_over_ranks_stays_inside_its_part_of_every_buffer() {
    for isa in Isa::available() {
        for (len, ranks) in LENGTHS.into_iter().zip([1, 2, 3, 5].into_iter().cycle()) {
            let mut buffers: Vec<_> = (0..ranks).map(|rank| Guarded::new(len, rank * 3 + len % 5)).collect();
            for (rank, buffer) in buffers.iter_mut().enumerate() {
                buffer.values_mut().iter_mut().enumerate().for_each(|(k, x)| *x = paint(rank, k));
            }
            let (first, last) = (len / 3, len - len / 4);
            let addresses: Vec<*mut c_void> = buffers.iter_mut().map(|x| x.address().cast()).collect();
            let (dtype, ranks_given) = (INSTEP_DTYPE_F32, ranks as u64);
            // SAFETY: as many buffers as said, each `len` long.
            unsafe {
                kernels(isa).sum.unwrap()(
                    addresses.as_ptr(),
                    ranks_given,
                    dtype,
                    first as u64,
                    last as u64,
                    std::ptr::null_mut(),
                );
            }
            for (rank, buffer) in buffers.iter().enumerate() {
                buffer.assert_bands_stand("a rank's buffer");
                for (k, x) in buffer.values().iter().enumerate() {
                    let sum = (1..ranks).fold(paint(0, k), |sum, rank| sum + paint(rank, k));
                    let expected = if (first..last).contains(&k) { sum } else { paint(rank, k) };
                    assert_eq!(
                        x.to_bits(),
                        expected.to_bits(),
                        "{isa}: rank {rank} of {ranks}, element {k} of {len}"
                    );
                }
            }
        }
    }
}
