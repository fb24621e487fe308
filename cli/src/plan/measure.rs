//! Holds a plan to a real run: ranks that are threads of this process, then the same run foreseen with the times that its
//! ops and its trainer took.
//!
//! What is compared is the schedule's part: the order of the ops, and when they run. Speeds are measured on both sides.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use instep::Foresight;
use instep::op::{Op, TimedOp};
use instep::{DType, Element, InProcess, Layout, ParamId, Recording, Stepper, bf16, f16, in_process};

use super::model::Model;
use super::trainer::Walk;
use super::{Arguments, PASSES};
use crate::Failure;
use crate::console::print_line;

/// What the trainer of rank 0 did, in order.
#[derive(Clone, Copy)]
enum Call {
    /// Reads a parameter, once it may.
    Read(usize),
    /// Writes its gradient.
    Write(usize),
    Begin,
    Ready(usize),
    Finish,
}

/// A call with the trainer's own time: what lies between it and the one before, without waits.
struct Timed {
    call: Call,
    own_ns: u64,
}

pub(super) fn run(arguments: &Arguments, model: &Model) -> Result<ExitCode, Failure> {
    let (calls, ran) = measure(arguments, model)?;
    let times: VecDeque<(Op, u64)> = ran.iter().map(|ran| (ran.op, ran.interval.ns())).collect();
    let left = Arc::new(Mutex::new(times));
    let misplaced = Arc::new(Mutex::new(0usize));
    let (source, errors) = (Arc::clone(&left), Arc::clone(&misplaced));
    let cost = move |op: &Op, _: u64| {
        let mut left = source.lock().unwrap_or_else(PoisonError::into_inner);
        let next = left.iter().position(|(other, _)| other.stream == op.stream);
        match next.and_then(|at| left.remove(at)) {
            Some((other, ns)) if other.to_string() == op.to_string() => ns,
            _ => {
                *errors.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                0
            }
        }
    };
    let mut stepper = arguments.builder(model).forecast(0, arguments.world_size, cost)?;
    foresee(&mut stepper, &model.layout, &calls)?;
    let foreseen = stepper.take_recording().map(|run| run.ran).unwrap_or_default();
    let unforeseen = left.lock().unwrap_or_else(PoisonError::into_inner).len();
    let misplaced = *misplaced.lock().unwrap_or_else(PoisonError::into_inner);
    print_line(&format!(
        "{} ops, {} per pass; every stream's in the same order: {}",
        ran.len(),
        ran.len() as u64 / PASSES,
        if misplaced + unforeseen == 0 { "yes" } else { "no" },
    ))?;
    let (measured_ns, foreseen_ns) = (makespan(&ran), makespan(&foreseen));
    print_line(&format!(
        "first op to last: {:.3} ms measured, {:.3} ms foreseen, ratio {:.3}",
        measured_ns as f64 / 1e6,
        foreseen_ns as f64 / 1e6,
        foreseen_ns as f64 / measured_ns as f64,
    ))?;
    if misplaced + unforeseen > 0 {
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn makespan(ran: &[TimedOp]) -> u64 {
    let start_ns = ran.iter().map(|ran| ran.interval.start_ns).min().unwrap_or_default();
    let end_ns = ran.iter().map(|ran| ran.interval.end_ns).max().unwrap_or_default();
    end_ns - start_ns
}

/// Runs all ranks; returns what rank 0's trainer and streams did.
fn measure(arguments: &Arguments, model: &Model) -> Result<(Vec<Timed>, Vec<TimedOp>), Failure> {
    let mut ranks = in_process(arguments.world_size, |rank| train(arguments, model, rank))?;
    Ok(ranks.swap_remove(0))
}

fn train(
    arguments: &Arguments,
    model: &Model,
    rank: InProcess,
) -> instep::Result<(Vec<Timed>, Vec<TimedOp>)> {
    let mut stepper = arguments.builder(model).threads(1).host(rank)?;
    let layout = &model.layout;
    let longest = model.lengths().max().unwrap_or_default();
    let mut values = vec![0.5f32; longest as usize];
    let (mut calls, mut ran, mut mark) = (Vec::new(), Vec::new(), Instant::now());
    let mut note = |stepper: &mut Stepper, call: Call| {
        let Recording { ran: ended, blocked, .. } = stepper.take_recording().unwrap_or_default();
        ran.extend(ended);
        let waited_ns: u64 = blocked.iter().map(|wait| wait.ns()).sum();
        let now = Instant::now();
        let passed_ns = now.duration_since(mark).as_nanos() as u64;
        mark = now;
        calls.push(Timed { call, own_ns: passed_ns.saturating_sub(waited_ns) });
    };
    for _ in 0..PASSES {
        let mut walk = Walk::default();
        for (index, id) in layout.ids().enumerate() {
            let len = layout.parameter(id)?.len as usize;
            walk.arrive(&mut stepper, id, true)?;
            read(&stepper, model.precision.param, id, &mut values[..len])?;
            note(&mut stepper, Call::Read(index));
        }
        stepper.begin()?.detach();
        note(&mut stepper, Call::Begin);
        for (index, id) in layout.ids().enumerate().rev() {
            let len = layout.parameter(id)?.len as usize;
            walk.arrive(&mut stepper, id, false)?;
            stepper.write(id.grad(), &values[..len])?;
            note(&mut stepper, Call::Write(index));
            stepper.grad_ready(id)?;
            note(&mut stepper, Call::Ready(index));
        }
        stepper.finish()?;
        note(&mut stepper, Call::Finish);
    }
    let mut walk = Walk::default();
    for (index, id) in layout.ids().enumerate() {
        walk.arrive(&mut stepper, id, true)?;
        read(&stepper, model.precision.param, id, &mut values[..layout.parameter(id)?.len as usize])?;
        note(&mut stepper, Call::Read(index));
    }
    ran.extend(stepper.take_recording().unwrap_or_default().ran);
    stepper.close()?;
    Ok((calls, ran))
}

/// Reads a parameter as a forward does: the parameter itself. Its master may be shared out.
fn read(stepper: &Stepper, stored: DType, id: ParamId, into: &mut [f32]) -> instep::Result<()> {
    fn copy<T: Element + Into<f32>>(stepper: &Stepper, id: ParamId, into: &mut [f32]) -> instep::Result<()> {
        into.iter_mut().zip(stepper.view::<T>(id)?).for_each(|(into, value)| *into = (*value).into());
        Ok(())
    }
    match stored {
        DType::F32 => copy::<f32>(stepper, id, into),
        DType::BF16 => copy::<bf16>(stepper, id, into),
        DType::F16 => copy::<f16>(stepper, id, into),
        other => {
            let remedy = "describe parameters as f32, bf16 or f16";
            Err(instep::Error::unsupported(format_args!("parameters of {other}"), "no reader", remedy))
        }
    }
}

fn foresee(stepper: &mut Foresight, layout: &Layout, calls: &[Timed]) -> Result<(), Failure> {
    let ids: Vec<_> = layout.ids().collect();
    let mut walk = Walk::default();
    for Timed { call, own_ns } in calls {
        match call {
            // The copy comes after the wait.
            Call::Read(index) => {
                walk.arrive(stepper, ids[*index], true)?;
                stepper.touch(ids[*index])?;
            }
            Call::Write(index) => {
                walk.arrive(stepper, ids[*index], false)?;
                stepper.touch(ids[*index].grad())?;
            }
            Call::Begin | Call::Ready(_) | Call::Finish => {}
        }
        stepper.compute(*own_ns);
        match call {
            Call::Read(_) | Call::Write(_) => {}
            Call::Begin => stepper.begin()?.detach(),
            Call::Ready(index) => stepper.grad_ready(ids[*index])?,
            Call::Finish => {
                stepper.finish()?;
                walk = Walk::default();
            }
        }
    }
    Ok(())
}
