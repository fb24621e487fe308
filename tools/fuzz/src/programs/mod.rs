//! Random trainings, compared with a naive f64 model that shares no code with the library.
//!
//! A program is drawn from a seed: a layout, optimizers, and phases of options and actions. Each phase runs on ranks of
//! this process and leaves a file, from which a stepper with other options continues. A seed always gives the same
//! program.

mod build;
mod check;
mod coverage;
mod draw;
mod model;
mod observe;
mod pass;
mod program;
mod rank;
mod rules;
mod run;
mod values;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use check::Checked;
use coverage::Coverage;
use program::{Program, hash};

/// Runs programs of a seed, and ends with the first difference.
pub(crate) fn fuzz(seed: u64, numbers: std::ops::Range<u64>, limit: Option<Duration>) -> ExitCode {
    let folder = std::env::temp_dir().join(format!("instep-programs-{}", std::process::id()));
    if let Err(error) = std::fs::create_dir_all(&folder) {
        eprintln!("{}: {error}", folder.display());
        return ExitCode::FAILURE;
    }
    let is_one = numbers.end - numbers.start == 1;
    let (start, mut tried, mut coverage) = (Instant::now(), 0u64, Coverage::default());
    for number in numbers {
        if limit.is_some_and(|limit| start.elapsed() >= limit) {
            break;
        }
        let program = draw::draw(hash(&[seed, number]) >> 1);
        if is_one {
            println!("{program}");
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&program, &folder)));
        let outcome = outcome.unwrap_or_else(|panic| Err(format!("panic: {}", crate::message(&*panic))));
        if let Err(difference) = outcome {
            eprintln!("program {number} of seed {seed}:\n{program}{difference}");
            eprintln!("repeat it with --target programs --seed {seed} --only {number}");
            let _ = std::fs::remove_dir_all(&folder);
            return ExitCode::FAILURE;
        }
        coverage.add(&program);
        tried += 1;
    }
    let _ = std::fs::remove_dir_all(&folder);
    println!("{coverage}");
    println!("{tried} programs of seed {seed} in {:.0} s: no difference", start.elapsed().as_secs_f64());
    ExitCode::SUCCESS
}

/// Runs a program and checks each phase.
fn run(program: &Program, folder: &Path) -> Result<(), String> {
    let file = |number: usize| folder.join(format!("{number}.safetensors"));
    let mut before: Option<Checked<'_>> = None;
    for number in 0..program.phases.len() {
        let logs = run::phase(program, number, &file(number), &file(number + 1));
        let logs = logs.map_err(|error| format!("phase {number}: {error:?}"))?;
        before = Some(check::phase(program, number, before.as_ref(), &logs)?);
    }
    Ok(())
}
