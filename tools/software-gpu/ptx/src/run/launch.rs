//! A launch: checks its shape, fills registers with their first values, runs the blocks, and names faults.
//!
//! Rows of constants are filled once for all blocks; special registers for each block.

use super::block::{Machine, Stopped, members};
use super::journal::{Journal, Record};
use super::order::Choices;
use super::registers::{LANES, Registers};
use super::shared::Shared;
use super::warp::Warp;
use crate::decode::{Fixed, Special};
use crate::error::{Error, Fault, What};
use crate::memory::Memory;
use crate::module::Kernel;

/// The most threads of a block on any GPU.
const MOST_THREADS: u64 = 1024;
/// Instructions after which a warp counts as endless.
const BUDGET: u64 = 1 << 34;

/// The shape and the arguments of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z.
    pub block: [u32; 3],
    /// The bytes of the shared array without a size.
    pub dynamic_shared_bytes: u32,
    /// All parameters, at the offsets that the kernel gives.
    pub params: &'a [u8],
    /// The address of each of [`Module::variables`](crate::Module::variables).
    pub variables: &'a [u64],
    /// The seed of the order of blocks, of warps, and of asynchronous copies.
    pub seed: u64,
}

/// The amount of work of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Instructions, each counted once for a warp.
    pub warp_instructions: u64,
    /// Instructions, each counted once for every lane that was active.
    pub lane_instructions: u64,
}

impl Kernel {
    /// Runs all blocks to their end.
    ///
    /// # Errors
    /// [`Error::Launch`] before anything ran, [`Error::Fault`] at the first fault of a thread. Memory then has the
    /// values that were written before the fault.
    pub fn launch(&self, launch: &Launch, memory: &mut dyn Memory) -> Result<Tally, Error> {
        let entry = &*self.0;
        let threads = self.checked(launch)?;
        let files = &entry.program().files;
        let dynamic = (entry.dynamic, launch.dynamic_shared_bytes);
        let mut machine = Machine {
            instructions: &entry.program().instructions,
            memory,
            params: launch.params,
            shared: Shared::new(entry.shared.iter().copied().chain([dynamic])),
            choices: Choices::new(launch.seed),
            journal: Journal::default(),
            block: 0,
            barriers: 0,
            budget: BUDGET,
            lane_instructions: 0,
            clock_ns: 0,
        };
        let mut warps: Vec<Warp> =
            (0..threads.div_ceil(LANES as u32)).map(|k| Warp::new(k, Registers::new(files))).collect();
        for warp in &mut warps {
            self.fill(warp, launch);
        }
        let blocks: usize = launch.grid.iter().map(|count| *count as usize).product();
        let mut tally = Tally::default();
        for block in machine.choices.permutation(blocks) {
            machine.block = block;
            let block = at(block, launch.grid);
            for warp in &mut warps {
                self.place(warp, block);
                warp.registers.clear(files);
                warp.begin(members(warp.index, threads));
            }
            machine.run(&mut warps).map_err(|stopped| self.fault(launch, block, stopped))?;
            tally.warp_instructions += warps.iter().map(|warp| warp.taken).sum::<u64>();
        }
        tally.lane_instructions = machine.lane_instructions;
        match machine.journal.race() {
            Some(race) => Err(self.raced(launch, race)),
            None => Ok(tally),
        }
    }

    /// Returns the threads of a block, if a GPU would accept the launch.
    fn checked(&self, launch: &Launch) -> Result<u32, Error> {
        let name = self.name();
        let refuse = |what: String| Err(Error::Launch(format!("{name}: {what}")));
        let product = |counts: [u32; 3]| counts.iter().map(|count| u128::from(*count)).product::<u128>();
        let threads = product(launch.block);
        if threads == 0 || threads > MOST_THREADS.into() || threads > self.most_threads().into() {
            return refuse(format!("a block of {threads} threads; at most {}", self.most_threads()));
        }
        if product(launch.grid) == 0 || product(launch.grid) > u32::MAX.into() {
            return refuse(format!("a grid of {} blocks", product(launch.grid)));
        }
        if launch.params.len() as u64 != self.param_bytes() {
            return refuse(format!(
                "{} bytes of parameters where it has {}",
                launch.params.len(),
                self.param_bytes()
            ));
        }
        let fixed = &self.0.program().files.doubles.fixed;
        let variables = fixed.iter().filter_map(|fixed| match fixed {
            Fixed::Variable(index, _) => Some(*index as usize + 1),
            _ => None,
        });
        let variables = variables.max().unwrap_or(0);
        if launch.variables.len() < variables {
            return refuse(format!(
                "{} addresses of variables where it uses {variables}",
                launch.variables.len()
            ));
        }
        Ok(threads as u32)
    }

    /// Fills the values that no block changes.
    fn fill(&self, warp: &mut Warp, launch: &Launch) {
        let files = &self.0.program().files;
        let threads = |lane: usize| at(warp.index * LANES as u32 + lane as u32, launch.block);
        for (fixed, row) in files.words.fixed.iter().zip(files.words.registers as usize..) {
            let row = &mut warp.registers.words[row];
            for (lane, value) in row.iter_mut().enumerate() {
                *value = match *fixed {
                    Fixed::Bits(bits) => bits as u32,
                    Fixed::Special(Special::Thread(axis)) => threads(lane)[usize::from(axis)],
                    Fixed::Special(Special::Threads(axis)) => launch.block[usize::from(axis)],
                    Fixed::Special(Special::Blocks(axis)) => launch.grid[usize::from(axis)],
                    Fixed::Special(Special::Lane) => lane as u32,
                    Fixed::Special(Special::Warp) => warp.index,
                    Fixed::Special(Special::Block(_)) | Fixed::Variable(..) => 0,
                };
            }
        }
        for (fixed, row) in files.doubles.fixed.iter().zip(files.doubles.registers as usize..) {
            let value = match *fixed {
                Fixed::Bits(bits) => bits,
                Fixed::Variable(index, offset) => launch.variables[index as usize].wrapping_add(offset),
                Fixed::Special(_) => 0,
            };
            warp.registers.doubles[row] = [value; LANES];
        }
        for (fixed, row) in files.predicates.fixed.iter().zip(files.predicates.registers as usize..) {
            warp.registers.predicates[row] = if *fixed == Fixed::Bits(0) { 0 } else { u32::MAX };
        }
    }

    /// Fills the index of the block.
    fn place(&self, warp: &mut Warp, block: [u32; 3]) {
        let words = &self.0.program().files.words;
        for (fixed, row) in words.fixed.iter().zip(words.registers as usize..) {
            if let Fixed::Special(Special::Block(axis)) = *fixed {
                warp.registers.words[row] = [block[usize::from(axis)]; LANES];
            }
        }
    }

    fn fault(&self, launch: &Launch, block: [u32; 3], stopped: Stopped) -> Error {
        let Stopped { trap, warp, line } = stopped;
        let what = match (trap.what, trap.register) {
            (What::UninitialisedRegister(_), Some((file, row))) => {
                What::UninitialisedRegister(self.0.program().files.name(file, row))
            }
            (what, _) => what,
        };
        let thread = at(warp * LANES as u32 + trap.lane.min(31), launch.block);
        self.located(block, thread, line, trap.address, what)
    }

    fn raced(&self, launch: &Launch, (address, one, other): (u64, Record, Record)) -> Error {
        let place =
            |record: &Record| (at(record.block, launch.grid), at(record.thread(address), launch.block));
        let (other_block, other_thread) = place(&other);
        let other = format!("block {other_block:?}, thread {other_thread:?}, line {}", other.line);
        let (block, thread) = place(&one);
        self.located(block, thread, one.line, Some(address), What::Race { space: "global", other })
    }

    fn located(
        &self,
        block: [u32; 3],
        thread: [u32; 3],
        line: u32,
        address: Option<u64>,
        what: What,
    ) -> Error {
        let text = self.0.text.lines().nth(line as usize - 1).unwrap_or_default();
        let instruction = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let kernel = self.name().to_owned();
        Error::Fault(Box::new(Fault { kernel, block, thread, line, instruction, address, what }))
    }
}

/// Returns the coordinates of a number in a box of this size.
fn at(number: u32, size: [u32; 3]) -> [u32; 3] {
    [number % size[0], number / size[0] % size[1], number / size[0] / size[1]]
}
