//! Figures as CSV, one per line, with a header that names machine, compilers and commit, or as JSON.
//!
//! The header lets a reader trace a number that is quoted elsewhere. A record names no user and no path.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use super::load::Load;
use super::machine::Machine;
use super::report::{Figure, Report, StepRow};
use super::statistics::Spread;
use super::system::{commit, cpu_model, first_line, last_level_cache_bytes, read, write};
use crate::Failure;

/// Collects figures.
#[derive(Default)]
pub(super) struct Record {
    figures: Vec<Figure>,
    rows: Vec<StepRow>,
    /// Where the figures so far are written after each row.
    json: Option<Json>,
}

/// A file of figures, and what it says of the run.
struct Json {
    path: PathBuf,
    machine: Machine,
    quick: bool,
}

impl Record {
    /// Also writes every figure to this file, after each row.
    pub(super) fn with_json(path: &Path, machine: &Machine, quick: bool) -> Record {
        let json = Json { path: path.to_owned(), machine: machine.clone(), quick };
        Record { json: Some(json), ..Record::default() }
    }

    /// Adds one figure; `quantity` ends in its unit.
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

    /// Adds a row of the step bench.
    pub(super) fn add_row(&mut self, row: StepRow) -> Result<(), Failure> {
        self.rows.push(row);
        self.save_json(None)
    }

    /// Writes what there is so far, with the load if the run is over.
    pub(super) fn save_json(&self, load: Option<Load>) -> Result<(), Failure> {
        let Some(Json { path, machine, quick }) = &self.json else { return Ok(()) };
        let Record { figures, rows: step, .. } = self;
        Report { machine, load, quick: *quick, step, figures }.save(path)
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
        first_line(&cxx, &["--version"]),
    )
}
