//! A parameter of more than 2^31 elements on a GPU, where 32-bit indices, signed or not, would be wrong.
//!
//! It is zero outside some windows, and a short parameter on the host holds the same windows. Steps are elementwise and
//! zeros add nothing to the norm, so bits and norm must be equal. Adam needs 33 GiB of GPU memory.

use instep::cuda::Cuda;
use instep::cuda::driver::Driver;
use instep::{DevicePtr, Mode, Solo, StreamHandle};

use crate::support::hardware;
use crate::support::{Options, Outcome, few_optimizers, layout, paint, paint_gradient};

const ELEMENTS: usize = (1 << 31) + 4097;
/// Starts of the windows, all multiples of a norm's leaf: at the beginning, around 2^32 bytes and 2^31 elements, and at
/// the end.
const WINDOWS: [usize; 4] = [0, (1 << 30) - 2048, (1 << 31) - WINDOW, 1 << 31];
const WINDOW: usize = 4096;
const CHUNK_BYTES: usize = 64 << 20;

/// Returns the contents of the windows, one after the other; the last window has the remaining elements.
fn filled(value: impl Fn(usize) -> f32) -> Vec<f32> {
    (0..(WINDOWS.len() - 1) * WINDOW + ELEMENTS - WINDOWS[3]).map(value).collect()
}

fn windows(values: &[f32]) -> impl Iterator<Item = (u64, &[f32])> {
    let ends = [1, 2, 3].map(|k| k * WINDOW).into_iter().chain([values.len()]);
    WINDOWS
        .into_iter()
        .enumerate()
        .zip(ends)
        .map(|((k, start), end)| (start as u64, &values[k * WINDOW..end]))
}

fn as_bytes(values: &[f32]) -> &[u8] {
    // SAFETY: f32 as bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Copies windows into a tensor that no kernel uses now.
fn write(cuda: &Cuda, tensor: DevicePtr, values: &[f32]) {
    hardware::entered(&**cuda.driver(), |driver| {
        windows(values).try_for_each(|(start, window)| {
            let to = DevicePtr(tensor.0 + 4 * start);
            // SAFETY: inside the tensor; the copy comes after the stepper's work on the trainer's stream.
            unsafe { driver.upload(to, as_bytes(window), StreamHandle::default()) }
        })
    });
}

/// Asserts that a tensor holds these windows and zeros elsewhere.
fn assert_holds(cuda: &Cuda, tensor: DevicePtr, values: &[f32], what: &str) {
    let mut chunk = vec![0u8; CHUNK_BYTES];
    for first in (0..4 * ELEMENTS).step_by(CHUNK_BYTES) {
        let chunk = &mut chunk[..CHUNK_BYTES.min(4 * ELEMENTS - first)];
        let from = DevicePtr(tensor.0 + first as u64);
        // SAFETY: inside the tensor, after the stepper's work on the trainer's stream.
        let download = |driver: &dyn Driver| unsafe { driver.download(chunk, from, StreamHandle::default()) };
        hardware::entered(&**cuda.driver(), download);
        for (start, window) in windows(values) {
            for (k, expected) in window.iter().enumerate() {
                let at = 4 * (start as usize + k);
                if (first..first + chunk.len()).contains(&at) {
                    let place = at - first..at - first + 4;
                    assert_eq!(chunk[place.clone()], expected.to_ne_bytes(), "{what}: element {}", at / 4);
                    chunk[place].fill(0);
                }
            }
        }
        let stray = chunk.iter().position(|byte| *byte != 0);
        assert_eq!(stray, None, "{what}: written beside what has a gradient, from byte {first}");
    }
}

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU with 33 GiB of free memory"]
fn steps_and_norms_past_two_billion_elements_are_those_of_a_short_parameter() {
    // Many blocks have short runs of tiles. One block has runs as long as there may be, of 2^30 elements.
    let (sgd, adam) = (few_optimizers()[0], few_optimizers()[2]);
    let cases =
        [(sgd, None, None), (adam, Some(0.5), None), (sgd, None, Some(1)), (adam, Some(0.5), Some(1))];
    for (optim, max_norm, max_blocks) in cases {
        let (mut cuda, large) = (hardware::open(), layout(&[ELEMENTS]));
        if let Some(blocks) = max_blocks {
            cuda = cuda.max_blocks(blocks);
        }
        let mode = if max_norm.is_some() { Mode::Normed } else { Mode::Eager };
        let options = Options { mode, max_norm, ..Options::default() };
        let params = filled(|k| paint(0, k));
        let short = layout(&[params.len()]);
        let mut host = options.stepper(&short, optim, Solo::default()).unwrap();
        let mut gpu = options.stepper_on(&cuda, &large, optim, Solo::default()).unwrap();
        let (on_host, on_gpu) = (short.id("p0").unwrap(), large.id("p0").unwrap());
        host.write(on_host, &params).unwrap();
        write(&cuda, gpu.ptr(on_gpu).unwrap(), &params);
        for step in 0..3 {
            let gradient = filled(|k| paint_gradient(step, 0, k));
            let mut pass = host.begin().unwrap();
            pass.write(on_host.grad(), &gradient).unwrap();
            pass.grad_ready(on_host).unwrap();
            pass.finish().unwrap();
            let mut pass = gpu.begin().unwrap();
            write(&cuda, pass.ptr(on_gpu.grad()).unwrap(), &gradient);
            pass.grad_ready(on_gpu).unwrap();
            pass.finish().unwrap();
        }
        assert_eq!(gpu.status().unwrap(), host.status().unwrap(), "{optim:?}");
        let expected = Outcome::of(&host).unwrap();
        assert_holds(
            &cuda,
            gpu.ptr(on_gpu).unwrap(),
            &expected.params[0],
            &format!("{optim:?}, {max_blocks:?}"),
        );
        gpu.close().unwrap();
    }
}
