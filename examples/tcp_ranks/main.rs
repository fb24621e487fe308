//! A `Collective` of your own: ranks are processes that meet over plain TCP at `MASTER_ADDR:MASTER_PORT`.
//!
//! With torchrun's variables (`RANK`, `WORLD_SIZE`) this program is one rank; without them it starts four ranks on this
//! machine. This example is not for production: traffic is neither authenticated nor encrypted, and rank 0 carries all
//! of it.

mod meeting;
mod tcp;

use std::error::Error;
use std::net::TcpListener;
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;
use std::{env, io};

use instep::collective::conformance::check;
use instep::{AdamW, Collective, Layout, Result, Stepper, in_process};

use tcp::Tcp;

const PATIENCE: Duration = Duration::from_secs(20);
const STEPS: u32 = 50;

/// Trains for a few steps, with different gradients on each rank.
fn train(comm: impl Collective + 'static) -> Result<Vec<u32>> {
    let rank = comm.rank() as f32;
    let layout = Layout::builder().param("weight", 1000).build()?;
    let weight = layout.id("weight")?;
    let mut stepper = Stepper::host(&layout, AdamW { lr: 0.1, ..Default::default() }, comm)?;
    for step in 0..STEPS {
        let mut pass = stepper.begin()?;
        let target = |k: usize| (rank + 1.0) / (k + 3) as f32 + step as f32 / 7.0;
        let gradient: Vec<f32> =
            pass.params().get(weight)?.iter().enumerate().map(|(k, w)| w - target(k)).collect();
        pass.grads().write(weight, &gradient)?;
        pass.grad_ready(weight)?;
        pass.finish()?;
    }
    Ok(stepper.view::<f32>(weight)?.iter().map(|w| w.to_bits()).collect())
}

/// Reads a variable of the environment.
fn variable<T: FromStr>(name: &'static str) -> Result<T> {
    let value = env::var(name).ok().and_then(|text| text.parse().ok());
    value.ok_or_else(|| instep::Error::config(name, "none", "unset or unreadable", "set it as torchrun does"))
}

/// Meets the ranks that torchrun's variables describe.
fn meet() -> Result<Tcp> {
    let host: String = variable("MASTER_ADDR")?;
    Tcp::meet((&host, variable("MASTER_PORT")?), variable("RANK")?, variable("WORLD_SIZE")?, PATIENCE)
}

fn run_rank() -> Result<(), Box<dyn Error>> {
    let report = check(PATIENCE, meet)?;
    let comm = meet()?;
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let trained = train(comm)?;
    if in_process(world_size, train)?[rank as usize] != trained {
        return Err(format!("rank {rank}: other bits than ranks in one process").into());
    }
    println!(
        "rank {rank}: {} properties hold; {STEPS} steps have the bits of one process",
        report.passed.len()
    );
    Ok(())
}

/// Starts a process per rank on this machine, and waits for all processes.
fn start_ranks(world_size: u32, arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = |rank: u32| {
        let mut command = Command::new(env::current_exe()?);
        command.args(arguments).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string()).spawn()
    };
    let started = (0..world_size).map(start).collect::<io::Result<Vec<_>>>()?;
    let ends = started.into_iter().map(|mut rank| rank.wait()).collect::<io::Result<Vec<_>>>()?;
    if ends.iter().all(|end| end.success()) {
        Ok(())
    } else {
        Err(format!("ranks ended with {ends:?}").into())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    if env::var_os("RANK").is_some() { run_rank() } else { start_ranks(4, &[]) }
}

#[cfg(test)]
mod tests {
    /// Each started rank is a process that runs this test too.
    #[test]
    fn ranks_that_are_processes_conform_and_train_to_the_bits_of_one()
    -> Result<(), Box<dyn std::error::Error>> {
        if std::env::var_os("RANK").is_some() {
            super::run_rank()
        } else {
            super::start_ranks(4, &["ranks_that"])
        }
    }
}
