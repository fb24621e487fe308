//! The agreement of one rank: hashes of its layout, options, hyperparameters, and loaded and written values. Every
//! collective call carries one number that combines these hashes.
//!
//! Layout and options never change. Buckets, learning rates and frozen parameters may change between passes. New
//! buckets get a new agreement (`with_plan`). If the agreements of ranks differ, the ranks get an error instead of
//! diverging silently. The hash is FNV-1a, which is the same in every process of a run.

use std::fmt::{self, Write};
use std::sync::Arc;

use crate::layout::{Layout, Plan, fold};
use crate::op::{Agreed, Line, Words};

/// The agreement's number, and whether it still matches the settings.
#[derive(Clone, Debug)]
pub(crate) struct Agreement {
    layout: Layout,
    /// The hash of layout and buckets.
    built: u64,
    /// The options as text, with one line for each option.
    options: Arc<str>,
    current: Option<u64>,
    words: Arc<Words>,
}

/// The part of an agreement that may change between passes.
pub(crate) struct Changing<'a> {
    /// Which optimizers step which parameters.
    pub(crate) assigned: &'a dyn fmt::Debug,
    pub(crate) hyperparameters: &'a dyn fmt::Debug,
    pub(crate) loaded: &'a dyn fmt::Debug,
    /// The parameters that were written since the last pass began, as lines of text. Each line ends with a line break.
    pub(crate) written: &'a dyn fmt::Display,
}

/// A writer that hashes its input. It also stores the input, because error messages quote the input if ranks differ.
struct Folded<'a>(u64, Option<Line<'a>>);

impl Write for Folded<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 = fold(self.0, text.as_bytes());
        if let Some(line) = &mut self.1 {
            // Text that does not fit is left out.
            let _ = line.write_str(text);
        }
        Ok(())
    }
}

fn written(hash: u64, what: fmt::Arguments<'_>, line: Option<Line<'_>>) -> u64 {
    let mut folded = Folded(hash, line);
    // This fails only if one of our `Debug` implementations fails. The text before the failure is hashed anyway.
    let _ = folded.write_fmt(what);
    folded.0
}

impl Agreement {
    /// Returns the agreement of a stepper's layout, plan and options. `options` has a line for each option.
    pub(crate) fn new(layout: &Layout, plan: &Plan, options: &str) -> Agreement {
        Agreement::of(layout, plan, options.into())
    }

    /// Returns an agreement with the same options and with the buckets of `plan`.
    pub(crate) fn with_plan(&self, plan: &Plan) -> Agreement {
        Agreement::of(&self.layout, plan, Arc::clone(&self.options))
    }

    fn of(layout: &Layout, plan: &Plan, options: Arc<str>) -> Agreement {
        let fold = |hash, number: u64| fold(hash, &number.to_le_bytes());
        let hash = plan
            .buckets()
            .iter()
            .fold(layout.fingerprint(), |hash, bucket| fold(fold(hash, bucket.len), bucket.tail.start));
        let built = plan.segments().iter().fold(hash, |hash, segment| {
            let hash = fold(fold(hash, segment.param.into()), segment.grad_start);
            fold(hash, segment.action as u64)
        });
        let words = Words::new(share(built, &options), format_args!("{}", Cut(layout, plan)), &options);
        Agreement { layout: layout.clone(), built, options, current: None, words }
    }

    /// Returns the hash of layout, buckets and options. This hash never changes while the agreement exists.
    pub(crate) fn fixed(&self) -> u64 {
        self.words.fixed()
    }

    /// Returns this rank's text, which errors quote if ranks differ.
    pub(crate) fn words(&self) -> &Arc<Words> {
        &self.words
    }

    /// Marks the agreement's number as stale, because the settings have changed.
    pub(crate) fn forget(&mut self) {
        self.current = None;
    }

    /// Returns the agreement's number for the current settings. Hashes the settings only if they have changed.
    pub(crate) fn number(&mut self, changing: &Changing<'_>, frozen: impl Iterator<Item = usize>) -> u64 {
        let Agreement { built, options, words, .. } = self;
        let number = |[assigned, hyperparameters, mut loaded]: [Line<'_>; 3]| {
            // Lines with parameter names come first, because the error quotes the first line that differs.
            let hash = written(0, format_args!("{}", changing.written), Some(loaded.again()));
            let hash = written(hash, format_args!("{:?}", changing.loaded), Some(loaded.again()));
            let loaded = frozen.fold(hash, |hash, param| {
                let _ = write!(loaded, "\nfrozen: parameter {param}");
                fold(hash, &(param as u64).to_le_bytes())
            });
            let assigned = written(*built, format_args!("{:?}", changing.assigned), Some(assigned));
            let rates = written(0, format_args!("{:?}", changing.hyperparameters), Some(hyperparameters));
            share(assigned, options) ^ Agreed::Hyperparameters.share(rates) ^ Agreed::Loaded.share(loaded)
        };
        *self.current.get_or_insert_with(|| words.update(number))
    }
}

/// Returns the contribution of layout and options to the agreement's number.
fn share(layout: u64, options: &str) -> u64 {
    Agreed::Layout.share(layout) ^ Agreed::Options.share(fold(0, options.as_bytes()))
}

/// Prints a layout and its buckets, with a line for each parameter and each bucket.
struct Cut<'a>(&'a Layout, &'a Plan);

impl fmt::Display for Cut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cut(layout, plan) = self;
        writeln!(f, "{} parameters in {} buckets", layout.parameters().len(), plan.buckets().len())?;
        for segment in plan.segments() {
            let parameter = &layout.parameters()[segment.param as usize];
            let (name, bucket, at) = (&parameter.name, segment.bucket, segment.grad_start);
            write!(f, "{name} of {:?} in bucket {bucket} at {at}, {:?}", parameter.shape, segment.action)?;
            parameter.dtype.map_or(Ok(()), |dtype| write!(f, ", {dtype}"))?;
            writeln!(f)?;
        }
        plan.buckets().iter().try_for_each(|bucket| writeln!(f, "a bucket of {} elements", bucket.len))
    }
}
