//! A plan of one bucket. Parameters and states have the same offsets as gradients.
//!
//! This module depends only on the layout. Gradients and parameters get no padding, so a framework's flat buffers can
//! be used without a copy. A flat plan contains only the bucket's parameters, in the order of their offsets. No
//! schedule uses a flat plan.

use crate::error::{Error, Result};
use crate::layout::bucket::FirstBytes;
use crate::layout::element_types::Kind;
use crate::layout::foreign::Rows;
use crate::layout::plan::{QUANTUM, TOO_MANY_ELEMENTS};
use crate::layout::{Bucket, ForeignBucket, Layout, Moments, ParamId, Plan, Storages};

impl Plan {
    /// Builds the plan of one bucket. Also returns the index of each segment's parameter in the bucket's list.
    ///
    /// # Errors
    /// `Layout` if the bucket is empty, or if an offset splits a block of 8-bit states. Also returns `Layout` if a
    /// gradient ends outside the bucket, overlaps another gradient, is listed twice or belongs to a local parameter, if
    /// parameters differ in precision or clip, or if rows do not fit. `Config` if no kernel supports the precision.
    pub(crate) fn flat(
        layout: &Layout,
        bucket: &ForeignBucket,
        storages: impl Into<Storages>,
    ) -> Result<(Plan, Vec<usize>)> {
        let storages = storages.into();
        let resolved = storages.resolve(layout)?;
        bucket.refuse(layout, 0)?;
        let Kind { storage, clip_set } = bucket.kind(layout, &resolved, 0)?;
        let elements = layout.first_elements();
        let mut listed: Vec<(usize, usize, u64)> = Vec::with_capacity(bucket.gradients.len());
        for (place, (id, offset)) in bucket.gradients.iter().enumerate() {
            listed.push((layout.index(*id)?, place, *offset));
        }
        listed.sort_by_key(|(_, _, offset)| *offset);
        let mut plan = Plan::empty(layout.parameters().len(), storages, &resolved);
        for (param, _, offset) in &listed {
            let parameter = &layout.parameters()[*param];
            if storage.precision.moments == Moments::EightBit && offset % QUANTUM != 0 {
                let wrong = format_args!("offset {offset} splits a block of {QUANTUM} 8-bit states");
                let remedy = "use offsets that are multiples of 256, or other moments";
                return Err(Error::layout(format_args!("gradient of `{}`", parameter.name), wrong, remedy));
            }
            plan.push_segment(parameter, *param as u32, elements[*param], [*offset; 2]);
        }
        for (id, rows) in &bucket.rows {
            plan.take_rows(layout, *id, *rows, storage.precision.moments)?;
        }
        plan.refuse_rows_that_overlap(layout, bucket.len)?;
        (plan.len, plan.grads_len, plan.is_foreign) = (bucket.len, bucket.len, true);
        plan.push(Bucket {
            start: 0,
            len: bucket.len,
            params: 0..bucket.len,
            shard: 0..bucket.len,
            segments: 0..listed.len() as u32,
            tail: bucket.len..bucket.len,
            contributors: None,
            is_local: false,
            storage,
            clip_set,
            first_bytes: FirstBytes::default(),
        });
        Ok((plan, listed.into_iter().map(|(_, place, _)| place).collect()))
    }

    /// Turns a parameter's segment into the shard that `rows` describes.
    fn take_rows(&mut self, layout: &Layout, id: ParamId, rows: Rows, moments: Moments) -> Result<()> {
        let (param, Rows { row, first }) = (layout.index(id)?, rows);
        let thing = || format!("rows of `{}`", layout.parameters()[param].name);
        let segment = self.segments.get_mut(self.segment_of_param[param] as usize);
        let Some(segment) = segment.filter(|segment| segment.param as usize == param) else {
            return Err(Error::layout(thing(), "of no parameter of the bucket", "list its gradient"));
        };
        if row == 0 || !segment.len.is_multiple_of(row) {
            let wrong = format_args!("{} elements are no whole rows of {row}", segment.len);
            return Err(Error::layout(thing(), wrong, "cut it between rows"));
        }
        if first.checked_add(segment.len).is_none_or(|end| end >= TOO_MANY_ELEMENTS) {
            let wrong = format_args!("begin at element {first}, past 2^56");
            return Err(Error::layout(thing(), wrong, "count from the first parameter"));
        }
        segment.element = first;
        // If a row is a whole number of blocks, no block crosses the end of a row.
        let has_blocks = moments == Moments::EightBit && row % QUANTUM != 0;
        segment.row = if has_blocks { row } else { 0 };
        Ok(())
    }

    /// Returns an error if the padded states of a parameter's rows extend past the bucket's end, or into the states of
    /// the next parameter.
    fn refuse_rows_that_overlap(&self, layout: &Layout, len: u64) -> Result<()> {
        let next = self.segments.iter().skip(1).map(|segment| segment.start).chain([len]);
        for (segment, next) in self.segments.iter().zip(next).filter(|(segment, _)| segment.row > 0) {
            // This cannot overflow: states take at most 256 times the bucket's elements, which are fewer than 2^56.
            let end = segment.start + segment.state_len();
            if end > next {
                let name = &layout.parameters()[segment.param as usize].name;
                let wrong =
                    format_args!("states of rows of {} end at element {end}, after {next}", segment.row);
                let remedy = "leave room: each row takes a multiple of 256";
                return Err(Error::layout(format_args!("rows of `{name}`"), wrong, remedy));
            }
        }
        Ok(())
    }
}
