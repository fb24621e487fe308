//! What `BucketStep` adds to its kernel: checks, addresses and the scalars of an update.
//!
//! The kernel alone runs beside it in every round, on memory of the same size, on one thread. In the last case each
//! parameter's tensors lie apart, so the kernel is called once per parameter.

use std::time::Instant;

use instep::bench::KernelAlone;
use instep::bucket_step::{Tensor, Tensors};
use instep::{AdamW, BucketStep, Layout, Scaling};

use super::Arguments;
use super::cases::WORLD_SIZE;
use super::record::Record;
use super::statistics::Spread;
use crate::Failure;
use crate::console::print_line;

/// Parameters of a bucket, elements of each, and whether their tensors lie apart.
const CASES: [(usize, usize, bool); 4] =
    [(1, 256, false), (1, 2048, false), (1, 65_536, false), (16, 256, true)];
const SAMPLE_ELEMENTS: usize = 1 << 20;

pub(super) fn run(options: &Arguments, record: &mut Record) -> Result<(), Failure> {
    print_line("\nlaunch: one BucketStep of AdamW and its kernel alone, ns, one thread, median (min-max)")?;
    for isa in options.isas()? {
        for (params, elements, is_apart) in CASES {
            let names = (0..params).map(|k| format!("p{k}"));
            let layout =
                names.fold(Layout::builder(), |layout, name| layout.param(name, elements)).build()?;
            let mut step = BucketStep::builder(&layout, AdamW::default()).isa(isa).host()?;
            let mut kernel = KernelAlone::new(&layout, &AdamW::default(), WORLD_SIZE, isa)?;
            let mut memory = [(); 4].map(|()| vec![0.5f32; params * elements]);
            let sweeps = SAMPLE_ELEMENTS / (params * elements + 512);
            let mut samples = Vec::new();
            for round in 0..=options.rounds(15) {
                let steps = step_ns(&mut step, &mut memory, elements, is_apart, sweeps)?;
                let start = Instant::now();
                (0..sweeps).for_each(|_| kernel.step());
                let alone = start.elapsed().as_nanos() as f64 / sweeps as f64;
                // The first round warms up caches and clocks.
                samples.extend((round > 0).then_some([steps, alone]));
            }
            let spread = |pick: &dyn Fn(&[f64; 2]) -> f64| Spread::of(samples.iter().map(pick));
            let (whole, alone) = (spread(&|both| both[0]), spread(&|both| both[1]));
            let added = spread(&|both| both[0] - both[1]);
            let apart = if is_apart { ", apart" } else { "" };
            let case = format!("{params} x {elements}{apart}");
            print_line(&format!(
                "{:<10}{case:<20}step {:<22}kernel {:<22}added {}",
                isa.name(),
                whole.show(0),
                alone.show(0),
                added.show(0)
            ))?;
            for (quantity, spread) in [("step_ns", whole), ("kernel_ns", alone), ("added_ns", added)] {
                record.add("launch", &case, isa.name(), 1, quantity, spread);
            }
        }
    }
    Ok(())
}

fn step_ns(
    step: &mut BucketStep,
    memory: &mut [Vec<f32>; 4],
    elements: usize,
    is_apart: bool,
    sweeps: usize,
) -> instep::Result<f64> {
    let [params, grads, first, second] = memory;
    let scaling = Scaling::mean(WORLD_SIZE);
    let start = Instant::now();
    if !is_apart {
        for _ in 0..sweeps {
            let states = [Tensor::slice_mut(first), Tensor::slice_mut(second)];
            let tensors = Tensors::new(Tensor::slice_mut(params), Tensor::slice(grads)).states(states);
            step.step(&tensors, scaling)?;
        }
        return Ok(start.elapsed().as_nanos() as f64 / sweeps as f64);
    }
    let mut runs = [params, grads, first, second].map(|run| run.chunks_mut(elements).collect::<Vec<_>>());
    let [params, grads, first, second] = &mut runs;
    let states = [Tensor::slices_mut(first), Tensor::slices_mut(second)];
    let tensors = Tensors::new(Tensor::slices_mut(params), Tensor::slices_mut(grads)).states(states);
    let start = Instant::now();
    (0..sweeps).try_for_each(|_| step.step(&tensors, scaling))?;
    Ok(start.elapsed().as_nanos() as f64 / sweeps as f64)
}
