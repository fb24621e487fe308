//! A stepper keeps a number of states for each parameter: numbers that would wrap are refused, and no caller gets a
//! missing state.
//!
//! Both faults once ended in a null pointer, which only a pass would use.

use std::sync::atomic::{AtomicUsize, Ordering};

use instep::layout::DEFAULT_GROUP;
use instep::optim::{Custom, ParamStep, StepParam};
use instep::{AdamW, Error, Layout, Result, Solo, Stepper};

#[test]
fn states_are_refused_where_their_numbers_would_wrap() {
    let layout = Layout::builder().param("w", 2).build().unwrap();
    let wide = AdamW { amsgrad: true, ..AdamW::default() };
    let build = |optimizers: usize| {
        let first = Stepper::builder(&layout, wide);
        (1..optimizers).fold(first, |builder, _| builder.then(DEFAULT_GROUP, wide)).host(Solo::default())
    };
    build(85).unwrap().begin().unwrap().finish().unwrap();
    assert!(matches!(build(86).unwrap_err(), Error::Config { field: "states", .. }));
}

/// An optimizer that reports states only after it has been asked four times.
struct Fickle(AtomicUsize);

impl StepParam for Fickle {
    fn name(&self) -> &str {
        "fickle"
    }
    fn state_names(&self) -> &'static [&'static str] {
        let asked = self.0.fetch_add(1, Ordering::Relaxed);
        if asked < 4 { &[] } else { &["late"] }
    }
    fn step_param(&self, step: ParamStep<'_>) -> Result<()> {
        step.states.iter_mut().for_each(|state| state.fill(1.0));
        Ok(())
    }
}

#[test]
fn a_rule_that_changes_its_mind_about_states_is_handed_none_that_were_not_made() {
    let layout = Layout::builder().param("w", 2).build().unwrap();
    let mut stepper =
        Stepper::host(&layout, Custom::new(Fickle(Default::default())), Solo::default()).unwrap();
    stepper.begin().unwrap().finish().unwrap();
    stepper.status().unwrap();
}
