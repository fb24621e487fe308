//! The summary of a replay: parameters, steps, norm and time, as text or as JSON.
//!
//! The norm, the clip factor and the instruction set come from the stepper that made the steps.

use std::fmt;
use std::time::{Duration, Instant};

use instep::Stepper;
use serde::Serialize;

use super::Config;
use super::gradients::Steps;

/// One replay, after its output is written.
#[derive(Serialize)]
pub(super) struct Summary {
    optimizer: &'static str,
    parameters: usize,
    elements: u64,
    /// The number of parameters that are not stepped.
    frozen: usize,
    passes: u64,
    /// The number of passes that were skipped because of a NaN or infinite gradient.
    skipped: u64,
    /// The norm of the averaged gradients of the last pass; null if neither the mode nor the configuration needs this
    /// norm.
    norm: Option<f64>,
    /// The factor by which clipping multiplied the gradients of the last pass; 1 without clipping.
    clip_factor: f64,
    isa: &'static str,
    /// Seconds from the start of the command until the output was written.
    seconds: f64,
}

impl Summary {
    pub(super) fn new(
        config: &Config,
        stepper: &Stepper,
        steps: Steps,
        start: Instant,
    ) -> instep::Result<Summary> {
        let (layout, status) = (stepper.layout(), stepper.status()?);
        let mut elements = 0;
        for id in layout.ids() {
            elements += layout.parameter(id)?.len;
        }
        let optimizer = config.groups.first().and_then(|group| group.optimizer.descriptor());
        Ok(Summary {
            optimizer: optimizer.map_or("", |descriptor| descriptor.name),
            parameters: layout.ids().len(),
            elements,
            frozen: config.frozen.len(),
            passes: steps.passes,
            skipped: steps.passes - steps.updates,
            norm: status.norm,
            clip_factor: status.clip,
            isa: stepper.isa().name(),
            seconds: start.elapsed().as_secs_f64(),
        })
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { optimizer, parameters, elements, frozen, passes, skipped, isa, .. } = self;
        let parameters = counted(*parameters as u64, "parameter");
        write!(f, "{optimizer}: {parameters} of {}", counted(*elements, "element"))?;
        if *frozen > 0 {
            write!(f, ", {frozen} frozen")?;
        }
        write!(f, "; {}", counted(passes - skipped, "step"))?;
        if *skipped > 0 {
            write!(f, ", {} skipped", counted(*skipped, "pass"))?;
        }
        match self.norm {
            Some(norm) if self.clip_factor < 1.0 => {
                let factor = self.clip_factor;
                write!(f, "\nnorm of the last pass: {norm:.6}, clipped by the factor {factor:.6}")?;
            }
            Some(norm) => write!(f, "\nnorm of the last pass: {norm:.6}")?,
            None => {}
        }
        write!(f, "\n{:.3?} with {isa} kernels", Duration::from_secs_f64(self.seconds))
    }
}

fn counted(count: u64, what: &str) -> String {
    match (count, what) {
        (1, _) => format!("1 {what}"),
        (_, "pass") => format!("{count} passes"),
        _ => format!("{count} {what}s"),
    }
}
