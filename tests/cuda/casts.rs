//! Copies of the trainer's tensors in another type: on the CPU against the `half` crate, on a GPU against the CPU.
//!
//! `host_run::cast` compares the kernel at every alignment and length. This file tests the calls around the kernel.

use instep::cuda::driver::Driver;
use instep::cuda::{CastKernel, Cuda};
use instep::{DType, DevicePtr, Element, Error, StreamHandle, bf16, cast, f16};

use crate::support::device::cuda;
use crate::support::stand_in::calls::Call;
use crate::support::stand_in::{COMPUTE, StandIn};
use crate::support::{hardware, paint};

fn assert_like_half<S: Element, T: Element>(values: &[S]) {
    let mut got = vec![T::from_f32(0.0); values.len()];
    cast(values, &mut got);
    for (value, got) in values.iter().zip(got) {
        let (wide, expected) = (value.to_f32(), T::from_f32(value.to_f32()).to_f32());
        let is_same = got.to_f32().to_bits() == expected.to_bits() || got.to_f32().is_nan() && wide.is_nan();
        assert!(is_same, "{:?} of {wide}, and not {expected}", got.to_f32());
    }
}

#[test]
fn every_16_bit_value_and_values_between_any_two_become_what_half_makes_of_them() {
    let all = 0..=u16::MAX;
    let brain: Vec<bf16> = all.clone().map(bf16::from_bits).collect();
    let halves: Vec<f16> = all.map(f16::from_bits).collect();
    assert_like_half::<_, f32>(&brain);
    assert_like_half::<_, f32>(&halves);
    assert_like_half::<_, f16>(&brain);
    assert_like_half::<_, bf16>(&halves);
    // A bf16, its neighbours in f32, halfway to the next one, and the neighbours of that.
    let upper = (0..=u16::MAX).map(|bits| u32::from(bits) << 16);
    let between: Vec<f32> = upper
        .flat_map(|bits| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits(bits | low)))
        .collect();
    assert_like_half::<_, bf16>(&between);
    let of_halves = |half: &f16| {
        let bits = half.to_f32().to_bits();
        [0u32, 1, 0xfff, 0x1000, 0x1001].map(|low| f32::from_bits(bits.wrapping_add(low)))
    };
    let between: Vec<f32> = halves.iter().flat_map(of_halves).collect();
    assert_like_half::<_, f16>(&between);
}

#[test]
fn a_gpu_casts_to_the_bits_of_the_cpu_on_the_trainers_stream() {
    let cuda = cuda();
    let kernel = CastKernel::new(&cuda).unwrap();
    let values: Vec<f32> = (0..5000).map(|k| paint(1, k) * 1e3).collect();
    let mut narrow = vec![bf16::ZERO; values.len()];
    let mut back = vec![0.0f32; values.len()];
    cast(&values, &mut narrow);
    cast(&narrow, &mut back);
    let (wide_bytes, narrow_bytes) = (4 * values.len() as u64, 2 * values.len() as u64);
    let compute = if hardware::is_required() { StreamHandle::default() } else { COMPUTE };
    hardware::entered(&**cuda.driver(), |driver| {
        let [from, to, again] =
            [wide_bytes, narrow_bytes, wide_bytes].map(|bytes| driver.allocate(bytes, compute).unwrap());
        // SAFETY: memory of this driver, as long as the calls say.
        unsafe {
            driver.upload(from, bytemuck::cast_slice(&values), compute).unwrap();
            kernel.cast((from, DType::F32), (to, DType::BF16), 5000).unwrap();
            kernel.cast((to, DType::BF16), (again, DType::F32), 5000).unwrap();
            kernel.cast((to, DType::BF16), (again, DType::F32), 0).unwrap();
            let (mut got_narrow, mut got) = (vec![bf16::ZERO; 5000], vec![0.0f32; 5000]);
            driver.download(bytemuck::cast_slice_mut(&mut got_narrow), to, compute).unwrap();
            driver.download(bytemuck::cast_slice_mut(&mut got), again, compute).unwrap();
            assert!(got_narrow == narrow && got == back);
            [from, to, again].into_iter().for_each(|at| driver.free(at, compute));
        }
        Ok(())
    });
    // SAFETY: refused before it is used.
    let refused = unsafe { kernel.cast((DevicePtr(6), DType::F32), (DevicePtr(64), DType::BF16), 1) };
    assert!(matches!(refused, Err(Error::Layout(_))), "{refused:?}");
}

#[test]
fn a_cast_is_one_launch_of_as_many_blocks_as_it_needs_or_may_have() {
    for (most, blocks) in [(None, 5), (Some(2), 2)] {
        let stand_in = StandIn::new();
        let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
        let cuda = most.map_or(cuda.clone(), |most| cuda.max_blocks(most));
        let kernel = CastKernel::new(&cuda).unwrap();
        stand_in.enter().unwrap();
        let [from, to] = [0; 2].map(|_| stand_in.allocate(4 * 5000, COMPUTE).unwrap());
        stand_in.take_calls();
        // SAFETY: memory of the stand-in.
        unsafe { kernel.cast((from, DType::F16), (to, DType::F32), 5000).unwrap() };
        let calls = stand_in.take_calls();
        assert!(
            matches!(&calls[..], [Call::Launch { kernel: "instep_cast", shape, stream: COMPUTE }] if shape.blocks == blocks),
            "{calls:?}"
        );
        drop(kernel);
        // SAFETY: allocated above.
        unsafe { [from, to].into_iter().for_each(|at| stand_in.free(at, COMPUTE)) };
        stand_in.leave();
    }
}
