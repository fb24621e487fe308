//! The agreement: one number for everything that ranks must have in common. Every collective carries it.
//!
//! Layout, buckets and options first, then what may change between passes: rates and the frozen set. Ranks that differ
//! get an error where they would silently have drifted apart. FNV-1a, the same in every process of a run.

use std::fmt::{self, Write};

use crate::layout::{Layout, Plan, fold};

/// The number, and whether it is still that of the settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreement {
    /// Of layout and options, without the plan.
    options: u64,
    built: u64,
    current: Option<u64>,
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
        let options = written(layout.fingerprint(), options);
        Agreement { options, built: options, current: None }.with_plan(plan)
    }

    /// The same with other buckets.
    pub(crate) fn with_plan(&self, plan: &Plan) -> Agreement {
        let fold = |hash, number: u64| fold(hash, &number.to_le_bytes());
        let hash = plan
            .buckets()
            .iter()
            .fold(self.options, |hash, bucket| fold(fold(hash, bucket.len), bucket.tail.start));
        let built = plan.segments().iter().fold(hash, |hash, segment| {
            let hash = fold(fold(hash, segment.param.into()), segment.grad_start);
            fold(hash, segment.action as u64)
        });
        Agreement { options: self.options, built, current: None }
    }

    /// The part that never changes.
    pub(crate) fn fixed(&self) -> u64 {
        self.built
    }

    /// The settings have changed.
    pub(crate) fn forget(&mut self) {
        self.current = None;
    }

    /// With the settings as they are now, which are looked at only if they have changed.
    pub(crate) fn number(&mut self, groups: &impl fmt::Debug, frozen: impl Iterator<Item = usize>) -> u64 {
        let built = self.built;
        *self.current.get_or_insert_with(|| {
            let hash = written(built, format_args!("{groups:?}"));
            frozen.fold(hash, |hash, param| fold(hash, &(param as u64).to_le_bytes()))
        })
    }
}
