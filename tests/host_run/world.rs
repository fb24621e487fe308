//! Buckets as the kernels see them: memories between guards, the tables over them, and a pass.
//!
//! The GPU's kernels get what a device would give them, and the CPU's get the same; the norm gets no parameters.

use std::ptr;

use instep::DType;
use instep::abi::*;

use super::case::{Case, Segment, parts, rule};
use super::machine::Machine;
use super::memory::Bands;
use super::tensors::{Tensors, dtype_code, earlier};

/// Number of the first segment's first element in its layout: element 2^32 lies inside a tile.
const FIRST_ELEMENT: u64 = (1 << 32) - 1501;
/// Factors of learning rates, one segment after the other.
const MULTIPLIERS: [f64; 3] = [1.0, 0.3, 2.5];

pub(crate) struct World<'a> {
    case: &'a Case,
    control: Bands,
    /// The control blocks of single buckets.
    bucket_controls: Bands,
    segments: Bands,
    hypers: Bands,
    multipliers: Bands,
    actions: Bands,
    /// One norm per segment, for a rule that is scaled by norms; its step takes two launches.
    norms: Option<Bands>,
    ring: Bands,
    /// The tail of each segment, then the count of ranks of each bucket.
    counts: Bands,
    tensors: Tensors,
    /// One memory per bucket.
    grads: Vec<Bands>,
    tiles: Vec<Bands>,
}

impl World<'_> {
    pub(crate) fn new(case: &Case) -> World<'_> {
        let (_, hyper, _) = rule(case.optim);
        let grad_bytes = case.precision.grad.bytes() as usize;
        let all: Vec<Segment> = case.buckets.iter().flat_map(|bucket| bucket.segments.clone()).collect();
        let lens = |segments: &[Segment]| segments.iter().map(|segment| segment.len).collect::<Vec<_>>();
        // SAFETY: zeros are a value of each.
        let (norms, control, segment, status) = unsafe {
            (
                std::mem::zeroed::<InstepNorms>(),
                InstepControl { next_loss_scale: 2.0, previous_norm: -1.0, ..std::mem::zeroed() },
                std::mem::zeroed::<InstepRecord>(),
                std::mem::zeroed::<InstepStatus>(),
            )
        };
        let mut world = World {
            case,
            control: Bands::of("the control block", &[control]),
            bucket_controls: Bands::of("the buckets' control blocks", &vec![control; case.buckets.len()]),
            segments: Bands::of("the segments", &vec![segment; all.len()]),
            hypers: Bands::of("the hyperparameters", &[hyper]),
            multipliers: Bands::of(
                "the rates' multipliers",
                &(0..all.len()).map(|k| MULTIPLIERS[k % 3]).collect::<Vec<_>>(),
            ),
            actions: Bands::of("the actions", &all.iter().map(|segment| segment.action).collect::<Vec<_>>()),
            norms: (parts(case.optim).len() > 1).then(|| Bands::of("the norms", &vec![norms; all.len()])),
            ring: Bands::of("the status ring", &vec![status; case.slots]),
            counts: Bands::new("the counts", &vec![1; all.len() + case.buckets.len()], grad_bytes, 1),
            tensors: Tensors::new(case, &lens(&all)),
            grads: Vec::new(),
            tiles: Vec::new(),
        };
        for bucket in &case.buckets {
            let lens = lens(&bucket.segments);
            let misalignment = (case.misalignment + case.gradient_misalignment) % 16;
            world.grads.push(Bands::new("the gradients", &lens, grad_bytes, misalignment));
        }
        world.fill_tables();
        world
    }

    /// Fills the tables of segments and tiles: every second empty segment has an empty tile.
    fn fill_tables(&mut self) {
        let case = self.case;
        let [param_bytes, grad_bytes] =
            [case.precision.param, case.precision.grad].map(|dtype| dtype.bytes() as usize);
        let count = self.segment_count();
        let param_base = self.param_base().addr();
        let (mut k, mut element) = (0, FIRST_ELEMENT);
        for (b, bucket) in case.buckets.iter().enumerate() {
            let mut tiles = Vec::new();
            for (run, segment) in bucket.segments.iter().enumerate() {
                let mut row: InstepRecord = self.segments.get(0, k);
                row.tail =
                    segment.used.map_or(0, |_| self.counts.address::<u8>(k).expose_provenance() as u64);
                let mut contributors = || self.counts.address::<u8>(count + b).expose_provenance() as u64;
                row.contributors = bucket.ranks.map_or(0, |_| contributors());
                row.optimizer = rule(case.optim).0 as u16;
                row.grad_dtype = dtype_code(case.precision.grad) as u16;
                self.segments.set(0, k, row);
                let full = INSTEP_TILE_ELEMENTS as usize;
                let starts = (0..segment.len.max(k % 2)).step_by(full);
                tiles.extend(starts.map(|done| {
                    InstepTile {
                        param: (self.tensors.params.address::<u8>(k).expose_provenance() + done * param_bytes)
                            .wrapping_sub(param_base) as u64,
                        grad_offset: self.grads[b].distance(run, grad_bytes) + done as u64 + case.shift,
                        state_offset: self.tensors.params.distance(k, param_bytes) + done as u64 + case.shift,
                        element: element + done as u64,
                        count: full.min(segment.len - done) as u32,
                        record: k as u32,
                        first: (done == 0).into(),
                        first_record: k as u32,
                        run: ((segment.len - done) / full).max(1) as u32,
                        bucket: 0,
                        reserved: [0; 2],
                    }
                }));
                element += segment.len as u64;
                k += 1;
            }
            self.tiles.push(Bands::of("the tiles", &tiles));
        }
    }

    /// Returns null as in the library, or, with a shift, an address far before the parameters.
    fn param_base(&mut self) -> *mut u8 {
        if self.case.shift == 0 {
            return ptr::null_mut();
        }
        let bytes = self.case.precision.param.bytes() as usize;
        earlier(self.tensors.params.address(0), self.case.shift, bytes)
    }

    /// Returns every memory, tables included.
    pub(crate) fn all(&mut self) -> Vec<&mut Bands> {
        let World {
            control,
            bucket_controls,
            segments,
            hypers,
            multipliers,
            actions,
            norms,
            ring,
            counts,
            ..
        } = self;
        let tables = [control, bucket_controls, segments, hypers, multipliers, actions, ring, counts];
        let tensors = self.tensors.all();
        tables.into_iter().chain(norms).chain(tensors).chain(&mut self.grads).chain(&mut self.tiles).collect()
    }

    pub(crate) fn snapshot(&mut self) -> Vec<Vec<u64>> {
        self.all().into_iter().map(|bands| bands.words().to_vec()).collect()
    }

    fn step_args(&mut self, bucket: usize) -> InstepStepArgs {
        let case = self.case;
        let (optimizer, _, state_count) = rule(case.optim);
        let grad_bytes = case.precision.grad.bytes() as usize;
        InstepStepArgs {
            control: self.control_of(bucket),
            records: self.segments.address(0),
            tiles: self.tiles[bucket].address(0),
            tile_count: self.tile_count(bucket),
            param_base: self.param_base().cast(),
            grads: earlier(self.grads[bucket].address(0), case.shift, grad_bytes),
            optimizer,
            state_count: state_count as u32,
            bucket: bucket as u32,
            gradients: case.gradients,
            norms: self.norms(),
            ..self.tensors.args(case)
        }
    }

    fn norms(&mut self) -> *mut InstepNorms {
        self.norms.as_mut().map_or(ptr::null_mut(), |bands| bands.address(0))
    }

    fn control_of(&mut self, bucket: usize) -> *mut InstepControl {
        if !self.case.per_bucket {
            return self.control.address(0);
        }
        self.bucket_controls.address::<InstepControl>(0).wrapping_add(bucket)
    }

    fn segment_count(&self) -> usize {
        self.case.buckets.iter().map(|bucket| bucket.segments.len()).sum()
    }

    fn tile_count(&self, bucket: usize) -> u64 {
        (self.tiles[bucket].run_bytes(0) / size_of::<InstepTile>()) as u64
    }

    /// Runs one pass and returns all memory after it.
    pub(crate) fn pass(&mut self, pass: usize, machine: Machine) -> Vec<Vec<u64>> {
        let case = self.case;
        let count = self.segment_count();
        let begin = InstepBeginArgs {
            control: self.control.address(0),
            records: self.segments.address(0),
            hypers: self.hypers.address(0),
            lr_multipliers: self.multipliers.address(0),
            actions: self.actions.address(0),
            record_count: count as u64,
            norms: self.norms(),
            ring: ptr::null(),
            slot_words: 0,
            slot_count: 0,
            divisor: case.divisor,
            loss_scale: 0.0,
            previous_max_norm: case.max_norm,
            clip: 1.0,
            grad_scale: std::ptr::null(),
            found_inf: std::ptr::null(),
            further_controls: self.bucket_controls.address(0),
            further_count: if case.per_bucket { case.buckets.len() as u64 } else { 0 },
        };
        let decide = InstepDecideArgs {
            control: self.control.address(0),
            contributors: case.buckets[0].ranks.map_or(ptr::null_mut(), |_| self.counts.address(count)),
            max_norm: case.max_norm,
            skip_nonfinite: case.skip_nonfinite.into(),
            growth_factor: 2.0,
            backoff_factor: 0.5,
            largest_loss_scale: 1e30,
            growth_interval: 2,
            pass_control: ptr::null_mut(),
            bucket: INSTEP_NO_BUCKET,
            grad_dtype: dtype_code(case.precision.grad),
            found_inf: ptr::null_mut(),
            set_controls: ptr::null_mut(),
            set_count: 0,
        };
        let decide_bucket = |world: &mut Self, bucket: usize| InstepDecideArgs {
            control: world.control_of(bucket),
            contributors: case.buckets[bucket]
                .ranks
                .map_or(ptr::null_mut(), |_| world.counts.address(count + bucket)),
            pass_control: world.control.address(0),
            bucket: bucket as u32,
            ..decide
        };
        let decisions: Vec<_> = if case.per_bucket {
            (0..case.buckets.len()).rev().map(|bucket| decide_bucket(self, bucket)).collect()
        } else {
            vec![decide]
        };
        let (control, ring) = (self.control.address(0), self.ring.address(0));
        let publish = InstepPublishArgs { control, ring, slot_count: case.slots as u64 };
        let steps: Vec<_> = (0..case.buckets.len()).map(|bucket| self.step_args(bucket)).collect();
        // SAFETY: the arguments describe this world's memory, which nothing else uses meanwhile.
        self.fenced(|| unsafe { machine.begin(&begin) });
        self.reduce(pass);
        let control_and_steps = || {
            if case.normed {
                for args in &steps {
                    // What the norm must leave alone, it does not get.
                    let [param_base, master, copy] = [ptr::null_mut(); 3];
                    let (ema, states, scales) = (ptr::null_mut(), [ptr::null_mut(); 3], [ptr::null_mut(); 3]);
                    let gradients = InstepStepArgs { param_base, master, copy, ema, states, scales, ..*args };
                    // SAFETY: as above.
                    unsafe { machine.norm(&gradients) }
                }
                // SAFETY: as above.
                decisions.iter().for_each(|args| unsafe { machine.decide(args) });
            }
            for args in &steps {
                // SAFETY: as above.
                case.parts
                    .iter()
                    .for_each(|&part| unsafe { machine.step(&InstepStepArgs { part, ..*args }) });
            }
            // SAFETY: as above.
            unsafe { machine.publish(&publish) }
        };
        self.fenced(control_and_steps);
        self.snapshot()
    }

    /// Runs `work` while all memory outside the runs is forbidden.
    fn fenced(&mut self, work: impl FnOnce()) {
        self.all().into_iter().for_each(|bands| bands.forbid_gaps(true));
        work();
        self.all().into_iter().for_each(|bands| bands.forbid_gaps(false));
    }

    /// A count is one element, after the gradients.
    fn set_count(&mut self, k: usize, count: f32) {
        match self.case.precision.grad {
            DType::BF16 => self.counts.set(k, 0, half::bf16::from_f32(count).to_bits()),
            DType::F16 => self.counts.set(k, 0, half::f16::from_f32(count).to_bits()),
            _ => self.counts.set(k, 0, count),
        }
    }

    /// Fills gradients and counts with the sums of all ranks.
    fn reduce(&mut self, pass: usize) {
        let count = self.segment_count();
        let mut k = 0;
        for (b, bucket) in self.case.buckets.iter().enumerate() {
            for (run, segment) in bucket.segments.iter().enumerate() {
                for at in 0..segment.len {
                    let value = (self.case.gradient)(pass, k, at);
                    if self.case.precision.grad == DType::F32 {
                        self.grads[b].set(run, at, value);
                    } else {
                        self.grads[b].set(run, at, (value.to_bits() >> 16) as u16);
                    }
                }
                if let Some(used) = segment.used {
                    self.set_count(k, used);
                }
                k += 1;
            }
            if let Some(ranks) = bucket.ranks {
                self.set_count(count + b, ranks);
            }
        }
    }
}
