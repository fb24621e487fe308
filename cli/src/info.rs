//! `instep info`: prints what a stepper would use on this machine, what else is available, and what is missing.
//!
//! The command builds a stepper as a trainer would, so the output shows what really runs. The README of this crate
//! documents the keys of `--json`. Later versions may add keys, but do not change existing ones.

use std::collections::BTreeMap;
use std::process::ExitCode;

use instep::{Isa, Layout, Pool, Sgd, Solo, Stepper};
use serde::Serialize;

use crate::Failure;
use crate::console::{print, print_json};

/// Environment variables that set defaults.
const VARIABLES: [&str; 5] =
    ["INSTEP_ISA", "INSTEP_THREADS", "INSTEP_SPIN_US", "INSTEP_PREFETCH", "INSTEP_DEADLINE_MS"];

/// Show what this machine and build offer
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    isa: Choice<&'static str>,
    isa_available: Vec<&'static str>,
    threads: Choice<usize>,
    devices: Vec<String>,
    features: Vec<&'static str>,
    gpu_kernels: Option<GpuKernels>,
    environment: BTreeMap<&'static str, Option<String>>,
    missing: Vec<Missing>,
}

/// A value, and the reason for it.
#[derive(Serialize)]
struct Choice<T> {
    value: T,
    because: &'static str,
}

/// GPU kernels in this build.
#[derive(Serialize)]
struct GpuKernels {
    names: Vec<String>,
    /// The size of the embedded kernels in bytes, by GPU architecture.
    bytes: BTreeMap<String, u64>,
    #[serde(skip)]
    text: String,
}

#[derive(Serialize)]
struct Missing {
    what: String,
    how_to_get_it: String,
}

/// Runs the command.
///
/// # Errors
/// `Library` if an environment variable has an unusable value, or if the kernels are unusable.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let report = Report::collect()?;
    if arguments.json {
        print_json(&report)?
    } else {
        print(&report.text())?
    }
    Ok(ExitCode::SUCCESS)
}

impl Report {
    fn collect() -> Result<Report, Failure> {
        // Runs the kernels' self-test and reads every variable, as a trainer's stepper would.
        let layout = Layout::builder().param("nothing", 0).build()?;
        let stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
        let environment: BTreeMap<_, _> = VARIABLES
            .into_iter()
            .map(|name| (name, std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())))
            .collect();
        let because = |name: &str, otherwise| match &environment[name] {
            Some(_) => "environment",
            None => otherwise,
        };
        let lacking = Isa::ALL.into_iter().filter(|isa| !isa.is_available());
        let lacking = lacking.map(|isa| Missing {
            what: format!("instruction set {isa}"),
            how_to_get_it: "another CPU; results are the same bits without it".into(),
        });
        let (gpus, no_gpu) = match instep::cuda::device_count() {
            Ok(0) => (0, Some("the driver finds no GPU".to_owned())),
            Ok(count) => (count, None),
            Err(error) => (0, Some(error.to_string())),
        };
        let devices = ["host".to_owned()].into_iter().chain((0..gpus).map(|gpu| format!("cuda:{gpu}")));
        let no_gpu = no_gpu.map(|how_to_get_it| Missing { what: "device cuda".into(), how_to_get_it });
        let (gpu_kernels, no_kernels) = match instep::cuda::built_kernels() {
            Ok(built) => {
                let text = built.to_string();
                let bytes = built.images.into_iter().map(|image| (image.architecture, image.bytes)).collect();
                (Some(GpuKernels { names: built.names, bytes, text }), None)
            }
            Err(instep::Error::KernelsNotBuilt { how }) => {
                (None, Some(Missing { what: "GPU kernels".into(), how_to_get_it: how }))
            }
            Err(other) => return Err(other.into()),
        };
        Ok(Report {
            version: env!("CARGO_PKG_VERSION"),
            isa: Choice { value: stepper.isa().name(), because: because("INSTEP_ISA", "widest") },
            isa_available: Isa::available().into_iter().map(Isa::name).collect(),
            threads: Choice {
                value: Pool::from_environment()?.threads(),
                because: because("INSTEP_THREADS", "cores"),
            },
            devices: devices.collect(),
            features: if cfg!(feature = "cuda") { vec!["cuda"] } else { Vec::new() },
            gpu_kernels,
            missing: lacking.chain(no_gpu).chain(no_kernels).collect(),
            environment,
        })
    }

    fn text(&self) -> String {
        let or_none = |list: &[&str]| if list.is_empty() { "none".into() } else { list.join(", ") };
        let set =
            self.environment.iter().filter_map(|(name, value)| Some(format!("{name}={}", value.as_ref()?)));
        let set: Vec<String> = set.collect();
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let isa_reason = if self.isa.because == "environment" { "INSTEP_ISA" } else { "the widest" };
        let threads_reason =
            if self.threads.because == "environment" { "INSTEP_THREADS" } else { "one per core" };
        let mut lines = vec![
            format!("instep           {}", self.version),
            format!(
                "instruction set  {}, {isa_reason} (available: {})",
                self.isa.value,
                self.isa_available.join(", ")
            ),
            format!("kernel threads   {}, {threads_reason}", self.threads.value),
            format!("devices          {}", self.devices.join(", ")),
            format!("features         {}", or_none(&self.features)),
            format!("environment      {}", or_none(&set)),
        ];
        if let Some(kernels) = &self.gpu_kernels {
            lines.push(format!("GPU kernels      {}", kernels.text));
        }
        let missing =
            self.missing.iter().map(|m| format!("missing          {}: {}", m.what, m.how_to_get_it));
        lines.extend(missing);
        lines.join("\n") + "\n"
    }
}
