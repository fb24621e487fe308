//! Looks up optimizers by the names in a configuration, and steps all of them in the same buckets.
//!
//! Fits a curve with one optimizer per parameter; one of the optimizers is defined in this file. Each optimizer is
//! looked up in a registry by name, with an explicit fallback. The example fails if the fit is wrong.
//! `cargo run --release --example registry`

use instep::optim::{ParamStep, StepParam};
use instep::overlap::Registry;
use instep::{Error, Layout, Result, Stepper, in_process};

/// Moves each parameter by the sign of its averaged gradient. The library does not have this rule.
struct SignOfAverage {
    lr: f64,
    keep: f64,
}

impl StepParam for SignOfAverage {
    fn name(&self) -> &str {
        "sign of average"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["average"]
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn step_param(&self, step: ParamStep<'_>) -> Result<()> {
        let (lr, keep) = (step.lr as f32, self.keep as f32);
        let gradient = step.mean_grad();
        for ((p, g), average) in step.param.iter_mut().zip(gradient).zip(step.states[0].iter_mut()) {
            *average = keep * *average + (1.0 - keep) * g;
            *p -= if *average == 0.0 { 0.0 } else { lr * average.signum() };
        }
        Ok(())
    }
}

/// A line of a configuration file: parameter, optimizer, hyperparameters.
type Line = (&'static str, &'static str, &'static [(&'static str, f64)]);

const CONFIGURATION: [Line; 3] = [
    ("slope", "AdamW", &[("lr", 0.05), ("weight_decay", 0.0)]),
    ("offset", "SignOfAverage", &[("lr", 0.01)]),
    ("curve", "LARS", &[("lr", 0.1)]), // not registered: the fallback takes its place
];

fn main() -> Result<()> {
    let mut registry = Registry::standard();
    registry.register_custom("SignOfAverage", |keywords| {
        Ok(SignOfAverage { lr: keywords.number("lr", 1e-3), keep: keywords.number("keep", 0.5) })
    })?;
    // A name has one entry.
    let again = registry.register_custom("SignOfAverage", |_| Ok(SignOfAverage { lr: 0.0, keep: 0.0 }));
    assert!(matches!(again, Err(Error::Config { field: "name", .. })));
    if let Err(missing) = registry.resolve("LARS") {
        println!("{missing}");
    }
    if let Err(odd) = registry.resolve("SGD")?.build(&[("learning_rate", 0.1)]) {
        println!("{odd}");
    }

    let named = CONFIGURATION.iter().fold(Layout::builder(), |layout, (param, _, _)| layout.param(*param, 1));
    let layout = named.build()?;
    let fits = in_process(2, |comm| {
        let rank = comm.rank() as f32;
        let mut builder = Stepper::builder_without_optimizer(&layout);
        for (param, optimizer, hyperparameters) in CONFIGURATION {
            let optimizer = registry.resolve_or(optimizer, "SGD")?.build(hyperparameters)?;
            builder = builder.optimizer_for(&[layout.id(param)?], optimizer);
        }
        let mut stepper = builder.host(comm)?;
        let [slope, offset, curve] = ["slope", "offset", "curve"].map(|name| layout.id(name));
        let (slope, offset, curve) = (slope?, offset?, curve?);
        for step in 0..2000 {
            let x = (step % 16) as f32 / 8.0 - rank; // each rank has its own points of y = x^2 / 2 - 2x + 1
            let mut pass = stepper.begin()?;
            let params = pass.params();
            let guess = params.get(curve)?[0] * x * x + params.get(slope)?[0] * x + params.get(offset)?[0];
            let error = guess - (0.5 * x * x - 2.0 * x + 1.0);
            for (id, factor) in [(slope, x), (offset, 1.0), (curve, x * x)] {
                pass.grads().write(id, &[error * factor])?;
                pass.grad_ready(id)?;
            }
            pass.finish()?;
        }
        for attached in stepper.optimizers() {
            if rank == 0.0 {
                println!("{:?}", attached.optimizer);
            }
        }
        let params = stepper.params();
        Ok([params.get(curve)?[0], params.get(slope)?[0], params.get(offset)?[0]])
    })?;
    println!("y = {:.2} x^2 + {:.2} x + {:.2}", fits[0][0], fits[0][1], fits[0][2]);
    assert_eq!(fits[0], fits[1], "every rank holds the same bits");
    for (found, wanted) in fits[0].into_iter().zip([0.5, -2.0, 1.0]) {
        assert!((found - wanted).abs() < 0.1, "{found} instead of {wanted}");
    }
    Ok(())
}
