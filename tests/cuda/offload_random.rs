//! Random programs of a trainer whose GPU offloads its steps: each call returns what it returns on the host device.
//!
//! A program mixes passes with calls between them. The host device runs it with offload and without.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Cursor;
use std::sync::Arc;

use instep::checkpoint;
use instep::layout::DEFAULT_GROUP;
use instep::{
    Accumulation, Clip, Collective, DType, Device, Gradients, Master, Mode, Moments, OffloadPolicy, ParamId,
    Precision, Result, Solo, Stepper, StepperBuilder, Strategy, Unused, in_process,
};

use super::shard_cases::{PLAIN, builder};
use super::shards::{LENS, OnStandIn, shapes};
use crate::support::device::cuda;
use crate::support::hardware;

const TURNS: usize = 60;

/// Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % end
    }
}

fn hash(thing: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    thing.hash(&mut hasher);
    hasher.finish()
}

fn bits(values: &[f32]) -> u64 {
    hash(values.iter().map(|value| value.to_bits()).collect::<Vec<_>>())
}

/// Returns multiples of 1/64, whose sums are exact.
fn values(turn: usize, rank: usize, param: usize) -> Vec<f32> {
    let number = |k| (turn * 31 + rank * 57 + param * 17 + k * 13) % 251;
    (0..LENS[param]).map(|k| number(k) as f32 / 64.0 - 2.0).collect()
}

/// Runs a program and returns the results of its calls.
fn run<D: Device>(stepper: &mut Stepper<D>, seed: u64, saves: bool) -> Result<Vec<String>> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (mut log, mut saved, mut frozen) = (Vec::new(), None, [false; LENS.len()]);
    let ids: Vec<ParamId> = shapes().ids().collect();
    let buckets = stepper.plan().buckets().len();
    for (param, id) in ids.iter().enumerate() {
        stepper.write(*id, &values(900, 0, param))?;
    }
    for turn in 0..TURNS {
        let what = random.below(15);
        let (bucket, param) = (random.below(buckets) as u32, random.below(LENS.len()));
        let (id, mut read) = (ids[param], vec![0.0; LENS[param]]);
        match what {
            0 | 1 => log.push(format!("{turn}: unshard {}", stepper.unshard(bucket).is_ok())),
            2 => stepper.reshard(bucket)?,
            3 => {
                let is_there = stepper.read(id, &mut read).is_ok();
                log.push(format!("{turn}: read {is_there} {}", bits(&read)));
            }
            4 | 5 => {
                match what {
                    4 => stepper.gather(id, &mut read)?,
                    _ => stepper.gather(id.state("exp_avg"), &mut read)?,
                }
                log.push(format!("{turn}: gather {}", bits(&read)));
            }
            6 => stepper.write(id, &values(turn, 0, param))?,
            7 => {
                let scale = 0.5 + turn as f32 / 8.0;
                stepper.fill_params(|_, values| values.iter_mut().for_each(|value| *value *= scale))?;
            }
            8 => {
                frozen[param] = !frozen[param];
                stepper.set_frozen(id, frozen[param])?;
            }
            9 => stepper.set_lr(DEFAULT_GROUP, 0.001 * (turn + 1) as f64)?,
            10 if saves => {
                let mut file = Vec::new();
                checkpoint::write(stepper, &mut file)?;
                log.push(format!("{turn}: saved {}", hash(&file)));
                saved = Some(file);
            }
            11 if saves => {
                if let Some(file) = &saved {
                    checkpoint::read(stepper, Cursor::new(file))?;
                }
            }
            _ => pass(stepper, (turn, &mut random), &ids, &frozen, &mut log)?,
        }
    }
    for (param, id) in ids.iter().enumerate() {
        let [mut value, mut state] = [vec![0.0; LENS[param]], vec![0.0; LENS[param]]];
        stepper.gather(*id, &mut value)?;
        stepper.gather(id.state("exp_avg"), &mut state)?;
        log.push(format!("p{param}: {} {} {}", stepper.step_count(*id)?, bits(&value), bits(&state)));
    }
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), [], "program {seed}");
    Ok(log)
}

fn pass<D: Device>(
    stepper: &mut Stepper<D>,
    (turn, random): (usize, &mut Random),
    ids: &[ParamId],
    frozen: &[bool],
    log: &mut Vec<String>,
) -> Result<()> {
    let rank = stepper.rank() as usize;
    let (is_abandoned, walks) = (random.below(6) == 0, random.below(2) == 0);
    let (micro_batches, unused) = (1 + random.below(3), random.below(9));
    let mut pass = stepper.begin_accumulating((micro_batches as u32).try_into().unwrap())?;
    'pass: for micro_batch in 0..micro_batches {
        for (param, id) in ids.iter().enumerate().rev() {
            let bucket = pass.plan().segment_of(param).bucket;
            if walks && pass.unshard(bucket).is_ok() {
                let mut read = vec![0.0; LENS[param]];
                let is_there = pass.read(*id, &mut read).is_ok();
                log.push(format!("{turn}: in a pass {is_there} {}", bits(&read)));
            }
            if frozen[param] || param == unused {
                continue;
            }
            let mut gradient = values(turn + micro_batch, rank, param);
            if !pass.is_first(*id)? {
                let mut earlier = vec![0.0; LENS[param]];
                pass.read(id.grad(), &mut earlier)?;
                gradient.iter_mut().zip(&earlier).for_each(|(sum, earlier)| *sum += earlier);
            }
            pass.write(id.grad(), &gradient)?;
            pass.grad_ready(*id)?;
            if is_abandoned && param == 2 && micro_batch + 1 == micro_batches {
                break 'pass;
            }
        }
        if micro_batch + 1 < micro_batches {
            pass.next_micro_batch()?;
        }
    }
    if is_abandoned {
        drop(pass.abandon()?)
    } else {
        pass.finish()?
    }
    if random.below(3) == 0 {
        log.push(format!("{turn}: {:?}", stepper.status()?));
    }
    Ok(())
}

type Build = fn(StepperBuilder<'static>) -> StepperBuilder<'static>;

const WAYS: [Build; 6] = [
    |builder| builder,
    |builder| builder.mode(Mode::Normed).clip(Clip::Previous(0.5)).skip_nonfinite(true),
    |builder| builder.mode(Mode::Sequential).gradients(Gradients::Zero).clip(Clip::Global(0.5)),
    |builder| builder.mode(Mode::Normed).clip(Clip::Global(1.0)).gradients(Gradients::Zero),
    |builder| {
        let low = Precision {
            param: DType::BF16,
            grad: DType::BF16,
            master: Master::Remainder16,
            moments: Moments::EightBit,
            ..Precision::F32
        };
        builder.precision(low)
    },
    |builder| builder.clip(Clip::PerBucket(0.25)).unused(Unused::StepZero),
];

/// Returns the builder of a seed; its fourth way sums micro-batches if ranks shard something.
fn build(seed: u64, strategy: Strategy) -> StepperBuilder<'static> {
    let way = seed as usize % WAYS.len();
    let builder = WAYS[way](builder(&PLAIN, strategy));
    let sums = way == 3 && strategy != Strategy::Replicated;
    if sums { builder.accumulation(Accumulation::Summed) } else { builder }
}

#[test]
fn random_programs_return_the_same_with_the_steps_of_a_gpu_on_the_host() {
    for (seed, strategy) in (1..=12).flat_map(|seed| {
        [Strategy::Replicated, Strategy::Zero, Strategy::Fsdp].map(|strategy| (seed, strategy))
    }) {
        let policy = OffloadPolicy { pin_memory: seed % 4 != 1 };
        let on_host = |comm: Box<dyn Collective>, offloads: bool| {
            let builder = build(seed, strategy);
            let builder = if offloads { builder.offload(policy) } else { builder };
            let mut stepper = builder.host(comm)?;
            let log = run(&mut stepper, seed, stepper_is_alone(seed))?;
            stepper.close().map(|()| log)
        };
        let on_gpu = |comm: Box<dyn Collective>| {
            // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
            let mut stepper = unsafe { build(seed, strategy).offload(policy).cuda(comm, &cuda())? };
            let log = run(&mut stepper, seed, stepper_is_alone(seed))?;
            stepper.close().map(|()| log)
        };
        let logs: [Vec<Vec<String>>; 3] = if hardware::is_required() {
            let solo = || Box::new(Solo::default());
            [on_host(solo(), false), on_host(solo(), true), on_gpu(solo())].map(|log| vec![log.unwrap()])
        } else {
            let ranks = ranks(seed);
            [
                in_process(ranks, |comm| on_host(Box::new(comm), false)).unwrap(),
                in_process(ranks, |comm| on_host(Box::new(comm), true)).unwrap(),
                in_process(ranks, |comm| on_gpu(Box::new(OnStandIn(Arc::new(comm))))).unwrap(),
            ]
        };
        let [expected, rehearsed, gpu] = &logs;
        for (other, where_) in [(rehearsed, "the host device with offload"), (gpu, "a GPU")] {
            for (rank, (expected, other)) in expected.iter().zip(other).enumerate() {
                let what = format!("program {seed}, {strategy:?}, rank {rank} on {where_}");
                for (expected, other) in expected.iter().zip(other) {
                    assert_eq!(other, expected, "{what}");
                }
                assert_eq!(other.len(), expected.len(), "{what}");
            }
        }
    }
}

fn ranks(seed: u64) -> u32 {
    1 + (seed % 3) as u32
}

/// Several ranks save together, with calls that a random program of one rank does not make.
fn stepper_is_alone(seed: u64) -> bool {
    hardware::is_required() || ranks(seed) == 1
}
