//! Compares a plan with a real run. The ranks of the real run are threads of this process. The plan then predicts the
//! same run from the measured times of the real ops and of the real trainer.
//!
//! Only the schedule is compared: the order of the ops, and the times at which they run. Speeds are not compared,
//! because the plan uses the measured times.

use std::collections::{HashMap, VecDeque};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use instep::Foresight;
use instep::hazard::Traced;
use instep::op::{Action, Interval, Op, Stream, Ticket, TimedOp};
use instep::{DType, Element, InProcess, Layout, ParamId, Recording, Stepper, bf16, f16, in_process};

use super::model::Model;
use super::trainer::Walk;
use super::{Arguments, PASSES};
use crate::Failure;
use crate::bench::system::available_bytes;
use crate::console::print_line;
use crate::replay::refused;

/// The actions of rank 0's trainer, in order.
#[derive(Clone, Copy)]
enum Call {
    /// Waits until a parameter may be read, and reads it.
    Read(usize),
    /// Writes the gradient of a parameter.
    Write(usize),
    /// Ends the previous pass, if any, and begins a pass.
    Begin,
    Ready(usize),
}

/// A call that the trainer makes, and the time that the trainer spent in its own code since its previous call. This
/// time does not include waits for ops.
struct Timed {
    call: Call,
    own_ns: u64,
}

/// A recorded call. The end times of the ops for which the call waited are not yet known.
struct Seen {
    call: Call,
    passed_ns: u64,
    blocked: Vec<Interval>,
    /// The ops for which the call waited: the stream of each op, and its number among the ops of that stream.
    awaited: Vec<(Stream, usize)>,
}

impl Seen {
    /// Computes the trainer's own time since the previous call. A wait counts until its op ends. If the real thread
    /// then has to wait for a core, this delay counts as the trainer's own time, because the predicted trainer
    /// continues as soon as the op has ended.
    fn time(&self, ran: &[TimedOp]) -> Timed {
        let end_ns = |&(stream, count): &(Stream, usize)| {
            let ended = ran.iter().filter(|ran| ran.op.stream == stream).nth(count.checked_sub(1)?)?;
            Some(ended.interval.end_ns)
        };
        let ready_ns = self.awaited.iter().filter_map(end_ns).max().unwrap_or_default();
        let waited_ns = |wait: &Interval| wait.end_ns.min(ready_ns).saturating_sub(wait.start_ns);
        let waited_ns: u64 = self.blocked.iter().map(waited_ns).sum();
        Timed { call: self.call, own_ns: self.passed_ns.saturating_sub(waited_ns) }
    }
}

/// Maps each ticket to the op after which the ticket was recorded. An op is identified by its number among the ops of
/// its stream.
#[derive(Default)]
struct Given {
    counts: HashMap<Stream, usize>,
    positions: HashMap<Ticket, usize>,
}

impl Given {
    /// Processes recorded entries in the order of their submission. Returns the ops for which the trainer waited.
    fn follow(&mut self, list: &[Traced]) -> Vec<(Stream, usize)> {
        let mut awaited = Vec::new();
        for op in list.iter().filter_map(|entry| if let Traced::Op(op) = entry { Some(op) } else { None }) {
            match op.action {
                Action::Wait(ticket) if op.stream == Stream::Compute => {
                    awaited.extend(self.positions.get(&ticket).map(|&count| (ticket.stream, count)));
                }
                Action::Wait(_) => {}
                Action::Record(ticket) => {
                    let count = self.counts.get(&ticket.stream).copied().unwrap_or_default();
                    self.positions.insert(ticket, count);
                }
                _ => *self.counts.entry(op.stream).or_default() += 1,
            }
        }
        awaited
    }
}

pub(super) fn run(arguments: &Arguments, model: &Model) -> Result<ExitCode, Failure> {
    refuse_too_many(arguments, model)?;
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
    let mut stepper = arguments.builder(model).forecast(0, arguments.world_size, cost).map_err(refused)?;
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

/// Refuses a number of ranks that needs more memory than is available. Otherwise the system might kill this program or
/// other programs.
fn refuse_too_many(arguments: &Arguments, model: &Model) -> Result<(), Failure> {
    let foreseen = arguments.builder(model).forecast(0, arguments.world_size, |_, _| 0).map_err(refused)?;
    let of_rank: u64 = foreseen.memory().into_iter().map(|(_, bytes)| bytes).sum();
    let bytes = of_rank.saturating_mul(arguments.world_size.into());
    match available_bytes() {
        Some(available) if bytes > available => {
            let thing = format_args!("--measure of {} ranks", arguments.world_size);
            let wrong =
                format_args!("they would hold {} MiB, and {} MiB are free", bytes >> 20, available >> 20);
            Err(Failure::config(thing, wrong, "measure fewer ranks, or a smaller model"))
        }
        _ => Ok(()),
    }
}

fn makespan(ran: &[TimedOp]) -> u64 {
    let start_ns = ran.iter().map(|ran| ran.interval.start_ns).min().unwrap_or_default();
    let end_ns = ran.iter().map(|ran| ran.interval.end_ns).max().unwrap_or_default();
    end_ns - start_ns
}

/// Runs all ranks, and returns the recording of rank 0's trainer and streams.
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
    let mut given = Given::default();
    let mut note = |stepper: &mut Stepper, call: Call| {
        let Recording { list, ran: ended, blocked } = stepper.take_recording().unwrap_or_default();
        ran.extend(ended);
        let now = Instant::now();
        let passed_ns = now.duration_since(mark).as_nanos() as u64;
        mark = now;
        calls.push(Seen { call, passed_ns, blocked, awaited: given.follow(&list) });
    };
    for _ in 0..PASSES {
        let mut walk = Walk::default();
        // The pass stays open. In an open pass, an access waits only for its bucket, and `take_recording` does not wait
        // for all steps.
        stepper.begin()?.detach();
        note(&mut stepper, Call::Begin);
        for (index, id) in layout.ids().enumerate() {
            let len = layout.parameter(id)?.len as usize;
            walk.arrive(&mut stepper, id, true)?;
            read(&stepper, model.precision.param, id, &mut values[..len])?;
            note(&mut stepper, Call::Read(index));
        }
        for (index, id) in layout.ids().enumerate().rev() {
            let len = layout.parameter(id)?.len as usize;
            walk.arrive(&mut stepper, id, false)?;
            stepper.write(id.grad(), &values[..len])?;
            note(&mut stepper, Call::Write(index));
            stepper.grad_ready(id)?;
            note(&mut stepper, Call::Ready(index));
        }
        stepper.finish()?;
    }
    ran.extend(stepper.take_recording().unwrap_or_default().ran);
    stepper.close()?;
    Ok((calls.iter().map(|seen| seen.time(&ran)).collect(), ran))
}

/// Reads the parameter itself, like a forward pass. The master is not read, because the master may be sharded.
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
    let (mut walk, mut has_begun) = (Walk::default(), false);
    for Timed { call, own_ns } in calls {
        match call {
            // The copy of the parameter comes after the wait, as a part of the trainer's own time.
            Call::Read(index) => {
                walk.arrive(stepper, ids[*index], true)?;
                stepper.touch(ids[*index])?;
            }
            Call::Write(index) => {
                walk.arrive(stepper, ids[*index], false)?;
                stepper.touch(ids[*index].grad())?;
            }
            Call::Begin | Call::Ready(_) => {}
        }
        stepper.compute(*own_ns);
        match call {
            Call::Read(_) | Call::Write(_) => {}
            Call::Begin => {
                if has_begun {
                    stepper.finish()?;
                }
                stepper.begin()?.detach();
                (walk, has_begun) = (Walk::default(), true);
            }
            Call::Ready(index) => stepper.grad_ready(ids[*index])?,
        }
    }
    stepper.finish()?;
    Ok(())
}
