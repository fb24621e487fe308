//! Tracks which values were written or loaded since ranks last compared them. The next pass broadcasts the parameters
//! that were written.
//!
//! There is a flag per parameter, not per bucket, because buckets may be rebuilt before the next pass. The first pass
//! broadcasts all parameters. A hash of loaded values and of values set by hand is part of the agreement. Each load
//! changes the hash, so ranks that loaded different values never agree again.

use std::fmt;

use crate::layout::{Layout, Plan, fold};
use crate::op::WrittenValues;
use crate::optim::ScalerState;
use crate::schedule::Broadcast;

/// Which parameters the next pass broadcasts.
#[derive(Debug)]
pub(crate) struct ParamsWritten {
    /// Whether passes broadcast written parameters. With sums by the caller, the caller must keep parameters equal on
    /// all ranks.
    is_sent: bool,
    /// Whether the first broadcast of all parameters is no longer due: a pass has begun, or the caller sums the
    /// gradients.
    is_shared: bool,
    is_any: bool,
    params: Vec<bool>,
    /// For each parameter, a hash of the written values that are not broadcast, or 0 if there are none.
    values: Vec<u64>,
    /// The buckets of written parameters, found when a pass opens. The list stays allocated, so later passes allocate
    /// nothing.
    buckets: Vec<u32>,
}

impl ParamsWritten {
    /// Returns the state before the first pass.
    pub(crate) fn new(plan: &Plan, sums_by_caller: bool) -> ParamsWritten {
        let (params, buckets) = (plan.segments().len(), plan.buckets().len());
        ParamsWritten {
            is_sent: !sums_by_caller,
            is_shared: sums_by_caller,
            is_any: false,
            params: vec![false; params],
            values: vec![0; params],
            buckets: Vec::with_capacity(buckets),
        }
    }

    /// Records a write of a parameter. A local parameter is never broadcast, because its values belong to one rank.
    pub(crate) fn note(&mut self, param: usize, plan: &Plan) {
        if self.is_sent && !plan.bucket_of(plan.segment_of(param)).is_local {
            (self.params[param], self.is_any) = (true, true);
        }
    }

    /// Records the values of a write that is not broadcast, for ranks to compare.
    pub(crate) fn note_values(&mut self, param: usize, hash: u64) {
        self.values[param] = fold(self.values[param], &hash.to_le_bytes()).max(1);
    }

    /// Returns whether any parameter was written since the last pass began.
    pub(crate) fn is_any(&self) -> bool {
        self.is_any
    }

    pub(crate) fn is_broadcast_due(&self) -> bool {
        !self.is_shared || self.is_any
    }

    /// Returns whether ranks compare which parameters they wrote. Returns false before the first pass, because that
    /// pass broadcasts all parameters of rank 0.
    pub(crate) fn is_compared(&self) -> bool {
        self.is_shared && self.is_any
    }

    /// Returns the parameters that the next pass must broadcast. The result is `Broadcast::All` for the first pass, or
    /// if every bucket that is not local has a written parameter. With sharded parameters or sums by the caller, the
    /// result is always `Broadcast::Nothing`.
    pub(crate) fn broadcast(&mut self, plan: &Plan) -> Broadcast<'_> {
        if plan.shards_params() {
            // No rank has all parameters. Ranks compare what they wrote instead.
            return Broadcast::Nothing;
        }
        if !self.is_shared {
            return Broadcast::All;
        }
        self.buckets.clear();
        if !self.is_any {
            return Broadcast::Nothing;
        }
        let mut is_every = true;
        for (k, bucket) in plan.buckets().iter().enumerate().filter(|(_, bucket)| !bucket.is_local) {
            if plan.segments_of(bucket).iter().any(|segment| self.params[segment.param as usize]) {
                self.buckets.push(k as u32)
            } else {
                is_every = false
            }
        }
        if is_every { Broadcast::All } else { Broadcast::Buckets(&self.buckets) }
    }

    /// Clears the records of writes, because the pass that broadcasts the written parameters has begun.
    pub(crate) fn clear(&mut self) {
        self.is_shared = true;
        if std::mem::take(&mut self.is_any) {
            self.params.fill(false);
            self.values.fill(0);
        }
    }

    /// Returns the names of the written parameters, and hashes of the values that are not broadcast, for ranks to
    /// compare.
    pub(crate) fn names<'a>(&'a self, layout: &'a Layout) -> impl fmt::Display {
        Names { written: self, layout }
    }
}

struct Names<'a> {
    written: &'a ParamsWritten,
    layout: &'a Layout,
}

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.written.is_any {
            return Ok(());
        }
        let values = self.layout.parameters().iter().zip(&self.written.values).enumerate();
        for (param, (parameter, hash)) in values.filter(|(_, (_, hash))| **hash != 0) {
            writeln!(f, "{}", WrittenValues { param, hash: *hash, name: &parameter.name })?;
        }
        if !self.written.is_compared() {
            return Ok(());
        }
        let params = self.layout.parameters().iter().zip(&self.written.params);
        if params.clone().all(|(param, written)| *written || param.local) {
            return f.write_str("written: all parameters\n");
        }
        let mut written = params.filter(|(_, written)| **written);
        written.try_for_each(|(param, _)| writeln!(f, "written: `{}`", param.name))
    }
}

/// The values that were loaded last, for ranks to compare.
#[derive(Clone, Copy, Default)]
pub(crate) struct Loaded {
    pub(crate) scaler: Option<ScalerState>,
    pub(crate) previous_norm: Option<Option<f64>>,
    /// A hash of step counts that were set, and of states that were written.
    folded: u64,
    /// A hash of the values that were written to parameters and are not broadcast. The order of the writes does not
    /// matter.
    params: u64,
}

impl Loaded {
    /// Records that a value was set. Ranks then detect a rank that set another value or no value.
    pub(crate) fn note(&mut self, what: usize, value: u64) {
        self.folded = fold(fold(self.folded, &(what as u64).to_le_bytes()), &value.to_le_bytes());
    }

    /// Records that a parameter was written. In this and later passes, ranks then detect a rank that wrote other values
    /// or no values.
    pub(crate) fn note_param(&mut self, param: usize, hash: u64) {
        let written = fold(fold(0, &(param as u64).to_le_bytes()), &hash.to_le_bytes());
        self.params = self.params.wrapping_add(written);
    }
}

/// Prints a line for each field, as text for an error.
impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Loaded { scaler, previous_norm, folded, params } = self;
        write!(f, "loss scaler: {scaler:?}\nprevious norm: {previous_norm:?}")?;
        write!(f, "\nset step counts and written states, as one number: {folded:016x}")?;
        write!(f, "\nvalues written to parameters so far, as one number: {params:016x}")
    }
}
