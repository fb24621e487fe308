//! Feeds broken configurations and tensor files to `instep replay` and `instep diff`, or broken checkpoints to the
//! library or to `instep replay`. It can also run random trainings against a model (`programs/`).
//!
//! For files, four findings end the program with status 1 and leave the input on disk. They are a panic, an allocation
//! that the length of the files does not justify, a tensor file that the `safetensors` crate would refuse, and a change
//! by a refused input. Inputs are random, without coverage: the formats are small, and the mutations know them. Every
//! run must be reproducible: input n of a seed is the same in every run.

mod allocator;
mod checkpoint;
mod mutate;
mod programs;
mod replay;
mod resume;
mod seeds;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use seeds::Pair;

#[global_allocator]
static ALLOCATOR: allocator::Counting = allocator::Counting;

/// Bytes that are allowed for any input: queues, plans, chunks of files, threads.
const FREE_BYTES: usize = 64 << 10;

/// The most bytes allocated at a time per byte of input. A parameter of one element takes 1 KiB in each of up to five
/// memories, 8 to 16 KiB of queues if it has its own bucket, and some 130 bytes of file.
const HELD_FACTOR: usize = 256;

/// The most bytes requested at once per byte of input.
const REQUEST_FACTOR: usize = 24;

#[derive(Parser)]
struct Arguments {
    /// What gets the inputs
    #[arg(long, value_enum, default_value_t = Target::Replay)]
    target: Target,
    /// How many inputs to try
    #[arg(long, default_value_t = 1_000_000)]
    inputs: u64,
    /// Stop after this number of seconds, in the middle of a program if need be
    #[arg(long)]
    seconds: Option<u64>,
    /// Where random numbers start
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Try this one input of the seed only
    #[arg(long)]
    only: Option<u64>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Target {
    /// `instep replay` and `instep diff`
    Replay,
    /// `checkpoint::read` and `checkpoint::import`
    Checkpoint,
    /// `instep replay --grads`
    Resume,
    /// Steppers, by random programs against a model
    Programs,
}

/// Code under test, and how to make and break its inputs.
trait Subject {
    /// Returns valid inputs to begin with.
    fn seeds(&mut self) -> Vec<Pair>;

    /// Breaks an input.
    fn break_it(&self, pair: &mut Pair, others: &[Pair], random: &mut SmallRng);

    /// Returns whether the input is accepted, or what is wrong with the result.
    fn attempt(&mut self, pair: &Pair, number: u64) -> Result<bool, String>;
}

fn main() -> ExitCode {
    let Arguments { target, inputs, seconds, seed, only } = Arguments::parse();
    let mut subject: Box<dyn Subject> = match target {
        Target::Replay => Box::new(replay::Replay),
        Target::Checkpoint => match checkpoint::Checkpoint::new() {
            Ok(checkpoint) => Box::new(checkpoint),
            Err(error) => return no_stepper(&error),
        },
        Target::Resume => match resume::Resume::new() {
            Ok(resume) => Box::new(resume),
            Err(error) => return no_stepper(&error),
        },
        Target::Programs => {
            let numbers = only.map_or(0..inputs, |only| only..only + 1);
            return programs::fuzz(seed, numbers, seconds.map(Duration::from_secs));
        }
    };
    let pairs = subject.seeds();
    for (number, pair) in pairs.iter().enumerate() {
        // Both of the entries must take a seed, or one of them.
        let answers = [0, 1].map(|entry| subject.attempt(pair, entry));
        if !answers.contains(&Ok(true)) {
            eprintln!("seed {number} is refused: {answers:?}");
            return ExitCode::FAILURE;
        }
    }
    // A panic is a finding; its message comes with the input.
    std::panic::set_hook(Box::new(|_| ()));
    let (start, limit) = (Instant::now(), seconds.map(Duration::from_secs));
    let (mut tried, mut accepted, mut worst) =
        (0u64, 0u64, allocator::Asked { largest_bytes: 0, peak_bytes: 0 });
    for number in only.map_or(0..inputs, |only| only..only + 1) {
        if limit.is_some_and(|limit| start.elapsed() >= limit) {
            break;
        }
        let mut random = SmallRng::seed_from_u64(seed.rotate_left(40) ^ number);
        let mut pair = pairs[random.random_range(0..pairs.len())].clone();
        subject.break_it(&mut pair, &pairs, &mut random);
        let held = allocator::reset();
        let outcome = catch_unwind(AssertUnwindSafe(|| subject.attempt(&pair, number)));
        let asked = allocator::asked(held);
        let files_bytes = pair.config.len() + pair.input.len();
        let justified = asked.peak_bytes <= FREE_BYTES + HELD_FACTOR * files_bytes
            && asked.largest_bytes <= FREE_BYTES + REQUEST_FACTOR * files_bytes;
        let finding = match outcome {
            Err(panic) => Some(format!("panic: {}", message(&*panic))),
            Ok(_) if !justified => Some(format!("{asked:?} for files of {files_bytes} bytes")),
            Ok(Err(disagreement)) => Some(disagreement),
            Ok(Ok(ran)) => {
                accepted += u64::from(ran);
                None
            }
        };
        if let Some(finding) = finding {
            return report(seed, number, &pair, &finding);
        }
        tried += 1;
        worst.largest_bytes = worst.largest_bytes.max(asked.largest_bytes);
        worst.peak_bytes = worst.peak_bytes.max(asked.peak_bytes);
    }
    println!(
        "{tried} inputs of seed {seed} in {:.0} s: {accepted} were accepted, the others refused; no panic; at most {} bytes \
         at once and {} held",
        start.elapsed().as_secs_f64(),
        worst.largest_bytes,
        worst.peak_bytes
    );
    ExitCode::SUCCESS
}

fn no_stepper(error: &instep::Error) -> ExitCode {
    eprintln!("no stepper: {error}");
    ExitCode::FAILURE
}

fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

fn report(seed: u64, number: u64, pair: &Pair, finding: &str) -> ExitCode {
    eprintln!("input {number} of seed {seed}: {finding}");
    for (name, bytes) in [("finding.json", &pair.config), ("finding.safetensors", &pair.input)] {
        match std::fs::write(Path::new(name), bytes) {
            Ok(()) => eprintln!("  {name}: {} bytes", bytes.len()),
            Err(error) => eprintln!("  {name} could not be written: {error}"),
        }
    }
    ExitCode::FAILURE
}
