//! Measures, in the same rounds, the times of one bucket's step and of the ceiling. The ceiling is an in-place loop
//! with the same memory traffic. In f32, it runs on the same memory as the step.
//!
//! The machine's speed drifts, so only times of the same round are divided by each other. Every case is verified
//! before it is timed.

use std::time::Instant;

use clap::ValueEnum;
use instep::Isa;
use instep::bench::Launcher;
use instep::op::Memory;

use super::Arguments;
use super::cases::{self, Case, SAMPLE_ELEMENTS, Shape, WORLD_SIZE};
use super::plain_bits;
use super::precisions::Kind;
use super::record::Record;
use super::reference::Scalar;
use super::report::StepRow;
use super::statistics::Spread;
use super::system::{available_bytes, last_level_cache_bytes};
use super::table::announce;
use crate::Failure;
use crate::console::print_line;

pub(super) fn run(options: &Arguments, record: &mut Record) -> Result<(), Failure> {
    let (cases, isas, threads) = (all_cases(options)?, options.isas()?, options.threads()?);
    let what = format!(
        "one bucket's step (divide by {WORLD_SIZE} included) against the in-place ceiling; median (min-max)"
    );
    announce("step", cases.len() * isas.len() * threads.len(), &what)?;
    print_line(&StepRow::head())?;
    for case in cases {
        for isa in &isas {
            for threads in &threads {
                one(options, record, case, *isa, *threads)?;
            }
        }
    }
    Ok(())
}

/// Returns the cases. In a sweep, the cases are ordered by optimizer, then by precision, then by size. Without a sweep,
/// the cases are ordered by shape.
fn all_cases(options: &Arguments) -> instep::Result<Vec<(Case, Kind, Shape)>> {
    let kinds = |case| options.precision.iter().map(move |kind| (case, *kind));
    let pairs: Vec<(Case, Kind)> = options.optimizers().into_iter().flat_map(kinds).collect();
    if !options.sizes.is_given() {
        let of = |shape| pairs.iter().map(move |(case, kind)| (*case, *kind, shape));
        return Ok(or_all(&options.shape).into_iter().flat_map(of).collect());
    }
    let mut cases = Vec::new();
    for (case, kind) in pairs {
        let each = cases::resident_bytes(case, kind)?;
        let shapes = options.sizes.shapes(kind, each, last_level_cache_bytes());
        cases.extend(shapes.into_iter().map(|shape| (case, kind, shape)));
    }
    Ok(cases)
}

pub(super) fn or_all<T: ValueEnum + Clone>(chosen: &[T]) -> Vec<T> {
    if chosen.is_empty() { T::value_variants().to_vec() } else { chosen.to_vec() }
}

fn one(
    options: &Arguments,
    record: &mut Record,
    (case, kind, shape): (Case, Kind, Shape),
    isa: Isa,
    threads: usize,
) -> Result<(), Failure> {
    if let Some(line) = skipped((case, kind, shape), options.quick)? {
        return print_line(&line);
    }
    let mut launcher = cases::launcher(case, kind, shape, isa, threads, options.quick)?;
    // The ceiling moves each f32 array once. If a step has other element types, the ceiling's time is scaled to the
    // bytes of that step.
    let mut f32s = match kind {
        Kind::F32 => None,
        _ => Some(cases::launcher(case, Kind::F32, shape, isa, threads, options.quick)?),
    };
    match kind {
        Kind::F32 => verify(&mut launcher, case)?,
        _ => plain_bits::verify(&mut launcher, (case, kind), shape, options.quick)?,
    }
    let bytes = launcher.step_bytes(0) as f64 / launcher.plan().buckets()[0].len as f64;
    let updated_arrays = 1 + case.optimizer()?.state_names().len();
    let share = bytes / (4 + 8 * updated_arrays) as f64;
    let fewest = f32s.as_ref().map_or(usize::MAX, |f32s| f32s.plan().buckets().len());
    let buckets = launcher.plan().buckets().len().min(fewest);
    let elements = shape.elements() as f64;
    let sample = shape.buckets_per_sample().min(buckets);
    // A cached shape steps its only bucket again and again. Other shapes continue with the least recently used buckets.
    let sweeps = if buckets == 1 { (SAMPLE_ELEMENTS / elements).ceil() as usize } else { 1 };
    let of_sample = 1.0 / (elements * (sample * sweeps) as f64);
    let mut next = 0;
    let mut take = || {
        let first = if next + sample > buckets { 0 } else { next };
        next = first + sample;
        first..next
    };
    // The first touch maps pages, which takes longer than a step, and the next steps choose whether to prefetch.
    for _ in 0..3 {
        for bucket in 0..launcher.plan().buckets().len() as u32 {
            launcher.step(bucket)?;
        }
    }
    if let Some(f32s) = &mut f32s {
        f32s.ceiling(0..f32s.plan().buckets().len(), 1, false)?;
    }
    let (mut steps, mut ceilings) = (Vec::new(), Vec::new());
    for round in 0..=options.rounds(15) {
        let mut ceiling = f64::MAX;
        for prefetches in [false, true] {
            let others = take();
            let start = Instant::now();
            f32s.as_mut().unwrap_or(&mut launcher).ceiling(others, sweeps, prefetches)?;
            ceiling = ceiling.min(start.elapsed().as_nanos() as f64 * of_sample * share);
        }
        let own = take();
        let start = Instant::now();
        for _ in 0..sweeps {
            for bucket in own.clone() {
                launcher.step(bucket as u32)?;
            }
        }
        let step = start.elapsed().as_nanos() as f64 * of_sample;
        // The first round warms up threads and clocks.
        if round > 0 {
            steps.push(step);
            ceilings.push(ceiling);
        }
    }
    let ratio = Spread::of(steps.iter().zip(&ceilings).map(|(step, ceiling)| 100.0 * ceiling / step));
    let (step, ceiling) = (Spread::of(steps), Spread::of(ceilings));
    let row = StepRow {
        optimizer: case.name(),
        precision: kind.name(),
        bytes: shape.elements() as u64 * kind.precision().grad.bytes(),
        elements: shape.elements(),
        segments: shape.segments().0,
        cache: shape.cache(),
        isa: isa.name(),
        threads,
        buckets,
        bytes_per_element: bytes,
        step_us: step.scaled(elements * 1e-3),
        ceiling_us: ceiling.scaled(elements * 1e-3),
        step_gb_per_s: bytes / step.median,
        percent_of_ceiling: ratio,
    };
    print_line(&row.line())?;
    let what = match kind {
        Kind::F32 => format!("{} {}", case.name(), shape.name()),
        _ => format!("{} {} {}", case.name(), kind.name(), shape.name()),
    };
    let mut add = |quantity, value| record.add("step", &what, isa.name(), threads, quantity, value);
    add("bytes_per_element", Spread::of([bytes]));
    add("step_ns_per_element", step);
    add("ceiling_ns_per_element", ceiling);
    add("percent_of_ceiling", ratio);
    record.add_row(row)
}

/// Returns the line to print if a case is skipped for lack of free memory. If the system does not report its free
/// memory, no case is skipped.
fn skipped((case, kind, shape): (Case, Kind, Shape), quick: bool) -> instep::Result<Option<String>> {
    let bytes_of = |kind: Kind| {
        let each = cases::resident_bytes(case, kind)?;
        Ok::<u64, instep::Error>((shape.buckets(each, quick) * shape.elements()) as u64 * each)
    };
    // Another precision needs as many buckets again for the comparison, and f32 arrays for the ceiling.
    let needed = bytes_of(kind)? + if kind == Kind::F32 { 0 } else { bytes_of(kind)? + bytes_of(Kind::F32)? };
    let (name, precision, elements) = (case.name(), kind.name(), shape.elements());
    let bytes = elements as u64 * kind.precision().grad.bytes();
    Ok(available_bytes()
        .is_some_and(|available| available < needed)
        .then(|| format!("{name:<10}{precision:<24}{bytes:>10}  SKIPPED: the memory does not suffice")))
}

/// Steps every bucket twice, and compares about a thousand elements with the formula in f64. If the formula needs full
/// parameters, all elements are compared.
fn verify(launcher: &mut Launcher, case: Case) -> Result<(), Failure> {
    const STEPS: usize = 2;
    for _ in 0..STEPS {
        for bucket in 0..launcher.plan().buckets().len() as u32 {
            launcher.step(bucket)?;
        }
    }
    let reference = case.reference()?;
    let states = case.optimizer()?.state_names().len();
    let elements = launcher.elements(Memory::Params).len();
    let stride = if case.is_scaled() { 1 } else { (elements / 1000).max(1) };
    for segment in launcher.plan().segments().to_vec() {
        let sampled = (segment.start as usize..(segment.start + segment.len) as usize).step_by(stride);
        let start = |k| Scalar { param: f64::from(cases::parameter(k)), ..Scalar::default() };
        let mut tensor: Vec<Scalar> = sampled.clone().map(start).collect();
        let mean = |k| f64::from(cases::gradient(k)) / f64::from(WORLD_SIZE);
        let gradients: Vec<f64> = sampled.clone().map(mean).collect();
        for _ in 0..STEPS {
            reference.step(&mut tensor, &gradients);
        }
        for (k, x) in sampled.zip(tensor) {
            let mut check = |memory, want: f64| {
                let got = f64::from(launcher.elements(memory)[k]);
                // A step has fewer than eight roundings of at most half an ulp, of values no larger than the result.
                let allowed = want.abs() * (8 * STEPS) as f64 * f64::from(f32::EPSILON) / 2.0;
                if (got - want).abs() <= allowed {
                    return Ok(());
                }
                let name = case.name();
                Err(Failure::Bench(format!(
                    "{name} {memory:?} element {k}: is {got}, and the formula gives {want}; report this as a bug"
                )))
            };
            check(Memory::Params, x.param)?;
            (0..states).try_for_each(|state| check(Memory::State(state as u8), x.states[state]))?;
        }
    }
    Ok(())
}
