//! Buckets with offsets that the caller has chosen.
//!
//! This file has only offsets. The stepper has the addresses. The caller chooses the offsets of gradients. The plan
//! computes the offsets of parameters and states. A foreign bucket has no tail block, so it has no counts of ranks.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::layout::bucket::FirstBytes;
use crate::layout::element_types::{Kind, Resolved};
use crate::layout::plan::{QUANTUM, TOO_MANY_ELEMENTS};
use crate::layout::{Bucket, Layout, ParamId, Parameter, Plan, Storages};

/// One flat gradient buffer and the gradients in it. Offsets and lengths are in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignBucket {
    pub(super) len: u64,
    pub(super) gradients: Vec<(ParamId, u64)>,
    pub(super) rows: Vec<(ParamId, Rows)>,
}

/// Describes a parameter of the bucket that consists of some rows of a larger parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) row: u64,
    pub(super) first: u64,
}

impl ForeignBucket {
    /// Describes a bucket of `len` elements. All elements are reduced, including those between gradients.
    pub fn new(len: usize) -> ForeignBucket {
        ForeignBucket { len: len as u64, gradients: Vec::new(), rows: Vec::new() }
    }

    /// Sets the offset in the bucket at which a parameter's gradient starts. Any offset is allowed.
    pub fn gradient(mut self, id: ParamId, offset: usize) -> ForeignBucket {
        self.gradients.push((id, offset as u64));
        self
    }

    /// Declares that a parameter of this bucket is a shard of a larger parameter. The shard consists of some rows of
    /// the larger parameter, each with `row` elements. `first` is the index of the shard's first element among the
    /// elements of all full parameters. If a [`BucketStep`](crate::BucketStep) steps the shard, the shard gets the same
    /// bits as in a step of the full parameter. To get these bits, stochastic rounding counts elements from `first`,
    /// and no block of 8-bit states crosses the end of a row. [`Lamb`](crate::Lamb) is an exception, because its norms
    /// then cover only the shard.
    ///
    /// # Shapes
    /// With 8-bit states, each row of states, masters, copies and averages starts at a multiple of 256 elements. For
    /// example, a row of 300 elements occupies the space of 512 elements and has two scales. Parameters and gradients
    /// have no gaps between rows.
    pub fn rows(mut self, id: ParamId, row: usize, first: u64) -> ForeignBucket {
        self.rows.push((id, Rows { row: row as u64, first }));
        self
    }

    /// Returns the number of elements.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the bucket has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns an error if the bucket has no gradients or is too large, or if a parameter is local or listed twice.
    /// Also returns an error if gradients overlap or end outside the bucket.
    pub(super) fn refuse(&self, layout: &Layout, bucket: usize) -> Result<()> {
        if self.gradients.is_empty() {
            let thing = format_args!("bucket {bucket}");
            return Err(Error::layout(thing, "holds no gradient", "add one or drop it"));
        }
        if self.len >= TOO_MANY_ELEMENTS {
            let wrong = "takes the plan past 2^56 elements";
            return Err(Error::layout(format_args!("bucket {bucket}"), wrong, "use smaller buckets"));
        }
        let mut seen = HashSet::with_capacity(self.gradients.len());
        for (id, _) in &self.gradients {
            let Parameter { name, local, .. } = layout.parameter(*id)?;
            if *local {
                let wrong = format_args!("local, but bucket {bucket} is summed over the ranks");
                return Err(Error::layout(format_args!("`{name}`"), wrong, "leave it out of the buckets"));
            }
            if !seen.insert(*id) {
                return Err(listed_twice(name));
            }
        }
        self.refuse_overlap(layout, bucket)
    }

    /// Returns the properties that all parameters of the bucket have in common.
    ///
    /// # Errors
    /// `Layout` if the parameters differ in one of these properties.
    pub(super) fn kind(&self, layout: &Layout, resolved: &Resolved, bucket: usize) -> Result<Kind> {
        let mut of_all: Option<(usize, Kind)> = None;
        for (id, _) in &self.gradients {
            let param = layout.index(*id)?;
            let kind = resolved.kind(param);
            let (first, expected) = *of_all.get_or_insert((param, kind));
            let name = |param: usize| &layout.parameters()[param].name;
            let thing = || format!("gradients of `{}` and `{}`", name(first), name(param));
            if kind.clip_set != expected.clip_set {
                let wrong = format_args!("are not clipped together, but share bucket {bucket}");
                return Err(Error::layout(thing(), wrong, "give each clip buckets of its own"));
            }
            if kind != expected {
                let wrong = format_args!(
                    "differ in precision, but share bucket {bucket}: {:?} and {:?}",
                    expected.storage.precision, kind.storage.precision
                );
                let remedy = "give each precision buckets of its own";
                return Err(Error::layout(thing(), wrong, remedy));
            }
        }
        Ok(of_all.map_or_else(Kind::default, |(_, kind)| kind))
    }

    fn refuse_overlap(&self, layout: &Layout, bucket: usize) -> Result<()> {
        let mut runs = Vec::with_capacity(self.gradients.len());
        for (id, offset) in &self.gradients {
            let parameter = layout.parameter(*id)?;
            let end = offset.checked_add(parameter.len).filter(|end| *end <= self.len);
            let Some(end) = end else {
                let name = &parameter.name;
                return Err(Error::layout(
                    format_args!("gradient of `{name}`"),
                    format_args!("ends outside bucket {bucket}, which has {} elements", self.len),
                    "correct its offset or the bucket's length",
                ));
            };
            runs.push((*offset, end, &parameter.name));
        }
        runs.retain(|(start, end, _)| start < end);
        runs.sort_unstable();
        match runs.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            None => Ok(()),
            Some(pair) => Err(Error::layout(
                format_args!("gradients of `{}` and `{}`", pair[0].2, pair[1].2),
                format_args!("overlap in bucket {bucket}"),
                "give each elements of its own",
            )),
        }
    }
}

fn listed_twice(name: &str) -> Error {
    Error::layout(format_args!("gradient of `{name}`"), "listed twice", "list it once, in one bucket")
}

impl Plan {
    /// Builds a plan of the layout, with the gradients in these buckets. The buckets are numbered in the given order.
    ///
    /// # Errors
    /// `Layout` if a parameter is in no bucket or in two, if a bucket has no gradient, or if gradients overlap or end
    /// outside their bucket. Also returns `Layout` if the parameters of a bucket differ in
    /// [precision](crate::Precision) or [clip](crate::StepperBuilder::group_clip), if a parameter is local, or if the
    /// plan has 2^56 elements or more. `Config` for a precision without a kernel, an unknown group, or a group that is
    /// named twice. `Unsupported` if a bucket has [rows](ForeignBucket::rows).
    pub fn foreign(
        layout: &Layout,
        buckets: &[ForeignBucket],
        storages: impl Into<Storages>,
    ) -> Result<Plan> {
        let (parameters, storages) = (layout.parameters(), storages.into());
        let resolved = storages.resolve(layout)?;
        let mut plan = Plan::empty(parameters.len(), storages, &resolved);
        let elements = layout.first_elements();
        let mut placed = vec![false; parameters.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            bucket.refuse(layout, index)?;
            if !bucket.rows.is_empty() {
                let (wrong, remedy) =
                    ("are of a bucket that is stepped alone", "use a BucketStep, or a Strategy");
                return Err(Error::unsupported(format_args!("rows of bucket {index}"), wrong, remedy));
            }
            let Kind { storage, clip_set } = bucket.kind(layout, &resolved, index)?;
            let (first, start, params_start) = (plan.segments.len() as u32, plan.grads_len, plan.len);
            let wrong = "takes the plan past 2^56 elements";
            let too_large = || Error::layout(format_args!("bucket {index}"), wrong, "use smaller buckets");
            let end = start.checked_add(bucket.len).filter(|end| *end < TOO_MANY_ELEMENTS);
            plan.grads_len = end.ok_or_else(too_large)?;
            for (id, offset) in &bucket.gradients {
                let param = layout.index(*id)?;
                let parameter = &parameters[param];
                if std::mem::replace(&mut placed[param], true) {
                    return Err(listed_twice(&parameter.name));
                }
                plan.push_segment(parameter, param as u32, elements[param], [plan.len, start + offset]);
                let end =
                    parameter.len.checked_next_multiple_of(QUANTUM).and_then(|len| plan.len.checked_add(len));
                plan.len = end.filter(|end| *end < TOO_MANY_ELEMENTS).ok_or_else(too_large)?;
            }
            plan.push(Bucket {
                start,
                len: bucket.len,
                params: params_start..plan.len,
                shard: params_start..plan.len,
                segments: first..plan.segments.len() as u32,
                tail: plan.grads_len..plan.grads_len,
                contributors: None,
                is_local: false,
                storage,
                clip_set,
                first_bytes: FirstBytes::default(),
            });
        }
        if let Some(param) = placed.iter().position(|placed| !placed) {
            let thing = format_args!("gradient of `{}`", parameters[param].name);
            return Err(Error::layout(thing, "in no bucket", "add it to a bucket"));
        }
        plan.is_foreign = true;
        Ok(plan)
    }

    /// Returns whether the plan has exactly these buckets, with the same gradients in the same order and at the same
    /// offsets.
    pub(crate) fn has_foreign<'a>(
        &self,
        layout: &Layout,
        buckets: impl ExactSizeIterator<Item = &'a ForeignBucket>,
    ) -> Result<bool> {
        let mut is_same = buckets.len() == self.buckets.len();
        for (described, bucket) in self.buckets.iter().zip(buckets) {
            let segments = self.segments_of(described);
            is_same &= described.len == bucket.len && segments.len() == bucket.gradients.len();
            for (segment, (id, offset)) in segments.iter().zip(&bucket.gradients) {
                is_same &= segment.param as usize == layout.index(*id)?
                    && segment.grad_start - described.start == *offset;
            }
        }
        Ok(is_same)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/layout/foreign.rs"]
mod tests;
