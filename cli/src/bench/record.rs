//! Writes figures as CSV or as JSON. The CSV has one figure per line, and a header that names machine, compilers and
//! commit.
//!
//! With the header, a reader can find the origin of a number that is quoted elsewhere. A record contains no name of a
//! user and no path.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use super::load::Load;
use super::machine::Machine;
use super::plot::{self, Point};
use super::report::{Figure, Report, StepRow};
use super::statistics::Spread;
use super::system::{commit, cpu_model, first_line, last_level_cache_bytes, read, write};
use crate::Failure;

/// Collects figures. After each row of the step bench, rewrites the JSON and SVG files with the figures so far.
pub(super) struct Record {
    machine: Machine,
    quick: bool,
    figures: Vec<Figure>,
    rows: Vec<StepRow>,
    json: Option<PathBuf>,
    svg: Option<PathBuf>,
}

impl Record {
    /// Starts an empty record of a run. `json` and `svg` are the files into which the record is written, if any.
    pub(super) fn new(machine: &Machine, quick: bool, json: Option<PathBuf>, svg: Option<PathBuf>) -> Record {
        Record { machine: machine.clone(), quick, figures: Vec::new(), rows: Vec::new(), json, svg }
    }

    /// Adds one figure. `quantity` ends in the figure's unit.
    pub(super) fn add(
        &mut self,
        bench: &str,
        case: &str,
        isa: &str,
        threads: usize,
        quantity: &str,
        value: Spread,
    ) {
        let [bench, case, isa, quantity] = [bench, case, isa, quantity].map(str::to_owned);
        self.figures.push(Figure { bench, case, isa, threads, quantity, value });
    }

    /// Adds a row of the step bench, and writes the files again.
    pub(super) fn add_row(&mut self, row: StepRow) -> Result<(), Failure> {
        self.rows.push(row);
        self.save(None)
    }

    /// Writes the figures so far into the files. `load` is `None` until the run ends.
    pub(super) fn save(&self, load: Option<Load>) -> Result<(), Failure> {
        let Record { machine, quick, figures, rows: step, .. } = self;
        if let Some(path) = &self.json {
            Report { machine, load, quick: *quick, step, figures }.save(path)?;
        }
        let Some(path) = &self.svg else { return Ok(()) };
        let title = format!("{}: step of a bucket, % of the in-place ceiling", machine.cpu);
        write(path, &plot::draw(&title, &points(step))).map_err(Failure::file(path))
    }

    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        let mut lines = String::from("bench,case,isa,threads,quantity,median,min,max\n");
        for Figure { bench, case, isa, threads, quantity, value } in &self.figures {
            let Spread { median, min, max } = value;
            // Writing to a String cannot fail.
            let _ =
                writeln!(lines, "{bench},{case},{isa},{threads},{quantity},{median:.5},{min:.5},{max:.5}");
        }
        write(path, &format!("{}{lines}", head()))
    }
}

/// Returns a point for each row with one segment, ordered by line and size. The name of a line consists of the
/// optimizer and the properties in which rows differ.
fn points(rows: &[StepRow]) -> Vec<Point> {
    let parts = |row: &StepRow| {
        let threads = format!("{} thread{}", row.threads, if row.threads == 1 { "" } else { "s" });
        [
            row.optimizer.clone(),
            row.precision.clone(),
            row.isa.to_owned(),
            threads,
            row.cache.name().to_owned(),
        ]
    };
    let differs = |k: &usize| rows.iter().any(|row| parts(row)[*k] != parts(&rows[0])[*k]);
    let shown: Vec<usize> = (0..5).filter(|k| *k == 0 || differs(k)).collect();
    let line = |row: &StepRow| shown.iter().map(|k| parts(row)[*k].clone()).collect::<Vec<_>>().join(" ");
    let of_one_segment = rows.iter().filter(|row| row.segments == 1);
    let point = |row: &StepRow| Point {
        line: line(row),
        elements: row.elements,
        percent_of_ceiling: row.percent_of_ceiling,
    };
    let mut points: Vec<Point> = of_one_segment.map(point).collect();
    points.sort_by(|one, other| (&one.line, one.elements).cmp(&(&other.line, other.elements)));
    points
}

/// Returns the first line that a compiler prints for `--version`. In `words`, a wrapper may precede the compiler, as in
/// `ccache g++`.
fn compiler(words: &str) -> String {
    let mut words = words.split_whitespace();
    let program = words.next().unwrap_or("c++");
    first_line(program, &words.chain(["--version"]).collect::<Vec<_>>())
}

fn head() -> String {
    let cores = std::thread::available_parallelism().map_or(0, |n| n.get());
    let load = read("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned();
    let cxx = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let commit = commit();
    let pages = read("/sys/kernel/mm/transparent_hugepage/enabled");
    format!(
        "# cpu: {}, {cores} cores, last-level cache {} MiB\n# load when written: {load}; transparent huge pages: {}\n\
         # compilers: {}; {}\n# commit: {commit}\n",
        cpu_model(),
        last_level_cache_bytes() >> 20,
        pages.trim(),
        first_line("rustc", &["--version"]),
        compiler(&cxx),
    )
}
