//! Measures, on a GPU, how long the trainer's stream waits for the optimizer, and how much concurrent steps slow down
//! backward.
//!
//! Kernels simulate backward and all-reduce (`instep::bench::Load`) on one GPU, without ranks or NCCL. Each round
//! compares every mode with the same pass without an optimizer. Traces and pictures come from additional passes, which
//! do not count in the table.

use instep::bench::{Load, LoadKind, LoadSize, Mark, Pacing, Times, Trainer, clock_zero};
use instep::cuda::{Cuda, CudaDevice};
use instep::layout::Plan;
use instep::op::Stream;
use instep::timeline::{Interval, Lane, draw_picture, exposure, write_trace};
use instep::{AdamW, Clip, Layout, Mode, ParamId, Stepper};

use super::files::save;
use super::report::{OverlapRow, Report};
use super::sweep::Blocks;
use crate::Failure;
use crate::bench::statistics::Spread;
use crate::bench::table::announce;
use crate::bench::{Arguments, system};
use crate::console::print_line;

const CAP_BYTES: u64 = 25 << 20;
const MODES: [Mode; 3] = [Mode::Sequential, Mode::Eager, Mode::Normed];
const USUAL_BLOCKS: [Blocks; 3] = [Blocks::All, Blocks::PerMultiprocessor(2), Blocks::PerMultiprocessor(1)];
/// The time of an all-reduce by NCCL on eight H200s, as a linear function of its bytes. The function follows published
/// results of nccl-tests (35 us for 1 MiB, 164 us for 25 MiB).
const PACING: Pacing = Pacing { latency_ns: 30_000, bytes_per_ns: 195.0 };
const FULL: LoadSize =
    LoadSize { params: 32, side: 2048, depth: 4096, activation_bytes: 256 << 20, pacing: PACING };
const QUICK: LoadSize =
    LoadSize { params: 4, side: 128, depth: 32, activation_bytes: 128 << 10, pacing: PACING };
/// The number of passes in a trace. The picture shows the last of these passes.
const RECORDED: usize = 4;

/// The trainer on a GPU, and the kernels that simulate backward and all-reduce.
struct Bench {
    trainer: Trainer,
    load: Load,
    layout: Layout,
    ids: Vec<ParamId>,
}

pub(super) fn run(
    options: &Arguments,
    cuda: &Cuda,
    image: &[u8],
    report: &mut Report,
) -> Result<(), Failure> {
    let size = if options.quick { QUICK } else { FULL };
    let names = (0..size.params).map(|k| format!("p{k}"));
    let layout =
        names.fold(Layout::builder(), |builder, name| builder.param(name, size.elements())).build()?;
    let trainer = Trainer::new(cuda)?;
    let load = Load::new(&trainer, image, size)?;
    let bench = Bench { trainer, load, ids: layout.ids().collect(), layout };
    let (kinds, blocks) = ([LoadKind::Matmul, LoadKind::Elementwise], options.gpu.blocks(&USUAL_BLOCKS));
    let what = format!(
        "{} parameters of {} elements, AdamW, buckets of {} MiB; all-reduce of a stand-in, {} us and {} GB/s; \
         beyond the same pass without an optimizer, median (min-max)",
        size.params,
        size.elements(),
        CAP_BYTES >> 20,
        PACING.latency_ns / 1000,
        PACING.bytes_per_ns,
    );
    announce("overlap", 2 * kinds.len() * blocks.len(), &what)?;
    print_line(&format!(
        "{:<13}{:>6}  {:<14}{:<28}{:<28}normed",
        "backward", "blocks", "", "sequential", "eager"
    ))?;
    for kind in kinds {
        for blocks in &blocks {
            bench.compare(options, kind, blocks.of(cuda), report)?;
        }
    }
    if options.gpu.trace.is_some() || options.gpu.picture.is_some() {
        bench.show(options)?;
    }
    Ok(())
}

impl Bench {
    fn stepper(
        &self,
        mode: Mode,
        max_blocks: Option<u32>,
        record: bool,
    ) -> instep::Result<Stepper<CudaDevice>> {
        let builder = Stepper::builder(&self.layout, AdamW::default()).mode(mode).record(record);
        let builder = if mode == Mode::Normed { builder.clip(Clip::Global(1.0)) } else { builder };
        let builder = builder.bucket_cap_bytes(CAP_BYTES);
        self.trainer.stepper(builder, self.load.collective(), max_blocks)
    }

    fn compare(
        &self,
        options: &Arguments,
        kind: LoadKind,
        max_blocks: Option<u32>,
        report: &mut Report,
    ) -> Result<(), Failure> {
        let steppers = MODES.map(|mode| self.stepper(mode, max_blocks, false));
        let mut steppers = steppers.into_iter().collect::<instep::Result<Vec<_>>>()?;
        let mut rounds = Vec::new();
        for round in 0..=options.rounds(15) {
            let plan = steppers[0].plan();
            let alone = self.pass_alone(kind, plan)?;
            let modes: Vec<Times> =
                steppers.iter_mut().map(|s| self.pass(kind, s)).collect::<instep::Result<_>>()?;
            // The first round loads code and broadcasts parameters.
            if round > 0 {
                rounds.push((alone, modes));
            }
        }
        let blocks = max_blocks.map_or("all".to_owned(), |blocks| blocks.to_string());
        let backward = format!("{kind:?}").to_lowercase();
        let row = |mode: Option<usize>| {
            let of = |figure: fn(&Times, &Times) -> f64| {
                Spread::of(
                    rounds.iter().map(|(alone, modes)| figure(mode.map_or(alone, |k| &modes[k]), alone)),
                )
            };
            OverlapRow {
                backward: backward.clone(),
                max_blocks: blocks.clone(),
                mode: mode.map(|k| format!("{:?}", MODES[k]).to_lowercase()),
                pass_us: of(|pass, _| (pass.end_ns - pass.start_ns) * 1e-3),
                backward_us: of(|pass, _| backward_ns(pass) * 1e-3),
                tail_us: of(|pass, _| tail_ns(pass) * 1e-3),
                exposed_us: of(|pass, alone| (tail_ns(pass) - tail_ns(alone)) * 1e-3),
                backward_slowdown_percent: of(|pass, alone| {
                    100.0 * (backward_ns(pass) / backward_ns(alone) - 1.0)
                }),
            }
        };
        let rows: Vec<OverlapRow> = [None, Some(0), Some(1), Some(2)].map(row).into();
        let column = |figure: fn(&OverlapRow) -> &Spread, digits| {
            rows[1..].iter().map(|row| format!("{:<28}", figure(row).show(digits))).collect::<String>()
        };
        let exposed = column(|row| &row.exposed_us, 1);
        let slowdown = column(|row| &row.backward_slowdown_percent, 1);
        print_line(format!("{backward:<13}{blocks:>6}  {:<14}{exposed}", "exposed us").trim_end())?;
        print_line(format!("{:<21}{:<14}{slowdown}", "", "backward +%").trim_end())?;
        report.overlap.extend(rows);
        save(options, report)
    }

    /// Runs one pass, until the trainer may read every parameter.
    fn pass(&self, kind: LoadKind, stepper: &mut Stepper<CudaDevice>) -> instep::Result<Times> {
        let zero = clock_zero(stepper);
        self.trainer.mark(Mark::Start)?;
        let mut pass = stepper.begin()?;
        for id in self.ids.iter().rev() {
            self.load.backward(kind, &mut pass, *id)?;
            pass.grad_ready(*id)?;
        }
        self.trainer.mark(Mark::BackwardEnd)?;
        pass.finish()?;
        for id in &self.ids {
            stepper.ptr(*id)?;
        }
        self.trainer.mark(Mark::End)?;
        self.trainer.wait(zero)
    }

    /// Runs a pass without an optimizer: backward, and each bucket's all-reduce after the bucket's last gradient.
    fn pass_alone(&self, kind: LoadKind, plan: &Plan) -> instep::Result<Times> {
        self.trainer.mark(Mark::Start)?;
        for bucket in plan.buckets() {
            let params = plan.segments_of(bucket).iter().map(|segment| segment.param as usize);
            for param in params.clone() {
                self.load.backward_alone(kind, param)?;
            }
            self.load.reduce_alone(params.clone().min().unwrap_or(0), params.count())?;
        }
        self.trainer.mark(Mark::BackwardEnd)?;
        self.load.join_alone()?;
        self.trainer.mark(Mark::End)?;
        self.trainer.wait(None)
    }

    /// Writes a trace of a few passes in `Eager` mode, and draws the last of these passes. The trace and the picture
    /// show the waits of the trainer's stream.
    fn show(&self, options: &Arguments) -> Result<(), Failure> {
        let mut stepper = self.stepper(Mode::Eager, None, true)?;
        let times = (0..RECORDED).map(|_| self.pass(LoadKind::Matmul, &mut stepper));
        let times = times.collect::<instep::Result<Vec<Times>>>()?;
        let ran = stepper.take_recording().map(|recording| recording.ran).unwrap_or_default();
        let interval = |start: f64, end: f64| Interval { start_ns: start as u64, end_ns: end as u64 };
        let blocked: Vec<Interval> = times.iter().map(|t| interval(t.backward_end_ns, t.end_ns)).collect();
        let lane = Lane { rank: 0, ran: &ran, blocked: &blocked };
        let steps = ran.iter().filter(|ran| ran.op.stream == Stream::Optim);
        let busy: Vec<Interval> = steps.map(|ran| ran.interval).collect();
        let found = exposure(&busy, &blocked);
        print_line(&format!(
            "recorded: {RECORDED} eager passes, optimizer at work for {} us, of which {} us exposed",
            found.busy_ns / 1000,
            found.exposed_ns / 1000
        ))?;
        if let Some(path) = &options.gpu.trace {
            let mut text = String::new();
            // Writing to a String cannot fail.
            let _ = write_trace(&mut text, &[lane]);
            system::write(path, &text).map_err(Failure::file(path))?;
        }
        if let (Some(path), Some(last)) = (&options.gpu.picture, times.last()) {
            let title = "One pass beside a stand-in for backward, all-reduce of a stand-in, one GPU";
            let text = draw_picture(title, &[lane], interval(last.start_ns, last.end_ns));
            system::write(path, &text).map_err(Failure::file(path))?;
        }
        Ok(())
    }
}

fn backward_ns(pass: &Times) -> f64 {
    pass.backward_end_ns - pass.start_ns
}

fn tail_ns(pass: &Times) -> f64 {
    pass.end_ns - pass.backward_end_ns
}
