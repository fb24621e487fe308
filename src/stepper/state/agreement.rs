//! The agreement of one rank: hashes of its layout, options, hyperparameters and loaded values. Every collective
//! carries the number that they make.
//!
//! Layout, buckets and options stay; rates and the frozen set may change between passes. Ranks that differ get an error
//! where they would silently have drifted apart. FNV-1a, the same in every process of a run.

use std::fmt::{self, Write};

use crate::layout::{Layout, Plan, fold};
use crate::op::Agreed;

/// The number, and whether it is still that of the settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreement {
    layout: u64,
    /// The same with buckets.
    built: u64,
    options: u64,
    current: Option<u64>,
}

/// What may change between passes.
pub(crate) struct Changing<'a> {
    /// Which optimizers step which parameters.
    pub(crate) assigned: &'a dyn fmt::Debug,
    pub(crate) hyperparameters: &'a dyn fmt::Debug,
    pub(crate) loaded: &'a dyn fmt::Debug,
}

/// Folds what is written into it, so that nothing is allocated.
struct Folded(u64);

impl Write for Folded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 = fold(self.0, text.as_bytes());
        Ok(())
    }
}

fn written(hash: u64, what: fmt::Arguments<'_>) -> u64 {
    let mut folded = Folded(hash);
    // It cannot fail unless a Debug of ours does; what has been folded by then still stands.
    let _ = folded.write_fmt(what);
    folded.0
}

impl Agreement {
    /// Of what a stepper is built with.
    pub(crate) fn new(layout: &Layout, plan: &Plan, options: fmt::Arguments<'_>) -> Agreement {
        let layout = layout.fingerprint();
        Agreement { layout, built: layout, options: written(0, options), current: None }.with_plan(plan)
    }

    /// The same with other buckets.
    pub(crate) fn with_plan(&self, plan: &Plan) -> Agreement {
        let fold = |hash, number: u64| fold(hash, &number.to_le_bytes());
        let hash = plan
            .buckets()
            .iter()
            .fold(self.layout, |hash, bucket| fold(fold(hash, bucket.len), bucket.tail.start));
        let built = plan.segments().iter().fold(hash, |hash, segment| {
            let hash = fold(fold(hash, segment.param.into()), segment.grad_start);
            fold(hash, segment.action as u64)
        });
        Agreement { built, current: None, ..*self }
    }

    /// The part that never changes.
    pub(crate) fn fixed(&self) -> u64 {
        Agreed::Layout.share(self.built) ^ Agreed::Options.share(self.options)
    }

    /// The settings have changed.
    pub(crate) fn forget(&mut self) {
        self.current = None;
    }

    /// With the settings as they are now, which are looked at only if they have changed.
    pub(crate) fn number(&mut self, changing: &Changing<'_>, frozen: impl Iterator<Item = usize>) -> u64 {
        let Agreement { built, options, .. } = *self;
        *self.current.get_or_insert_with(|| {
            let Changing { assigned, hyperparameters, loaded } = changing;
            let loaded = written(0, format_args!("{loaded:?}"));
            let loaded = frozen.fold(loaded, |hash, param| fold(hash, &(param as u64).to_le_bytes()));
            Agreed::Layout.share(written(built, format_args!("{assigned:?}")))
                ^ Agreed::Options.share(options)
                ^ Agreed::Hyperparameters.share(written(0, format_args!("{hyperparameters:?}")))
                ^ Agreed::Loaded.share(loaded)
        })
    }
}
