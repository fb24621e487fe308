//! Options of a bucket step, and the creation of a bucket step from them.
//!
//! This module converts the integers of C into options of the Rust library. The Rust library checks whether options can
//! be combined.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use instep::bucket_step::OnGpu;
use instep::{BucketStep, ForeignBucket, Pool};

use crate::arguments::{Growing, list};
use crate::codes::{dtype, gradients, zero};
use crate::layout::{Ids, close, instep_layout};
use crate::optimizer::instep_optimizer;
use crate::options::{Groups, cuda, instep_cuda, instep_group, instep_precision};
use crate::status::{Fault, INSTEP_CONFIG, Result};

/// Options of a bucket step. A field that is 0 or null has its default, but `layout` and `optimizer` must be given. The
/// library reads these options, and the structs, lists and texts in them, only until instep_bucket_step_create returns.
/// The library never frees this memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_bucket_step_options {
    /// sizeof(instep_bucket_step_options).
    pub size: usize,
    /// The model's parameters.
    pub layout: *mut instep_layout,
    /// The optimizer of all groups that `groups` does not name.
    pub optimizer: *const instep_optimizer,
    /// Groups with their own optimizers.
    pub groups: *const instep_group,
    /// The number of groups.
    pub group_count: usize,
    /// The parameters of the bucket. Null: the bucket has all parameters of the layout in order, without gaps.
    pub params: *const u32,
    /// For each parameter in `params`, its offset in the bucket, in elements.
    pub offsets: *const usize,
    /// The number of parameters in `params`.
    pub param_count: usize,
    /// The number of elements of the bucket, gaps included. Without `params` this number is ignored.
    pub elements: usize,
    /// Element types. Null: f32.
    pub precision: *const instep_precision,
    /// Element type of copies. A step writes a copy of each parameter that it steps. 0: there are no copies.
    pub copy: u32,
    /// INSTEP_GRADIENTS_KEEP, _ZERO or _AVERAGE.
    pub gradients: u32,
    /// Decay rate of the parameters' moving averages. 0: there are no averages.
    pub ema_decay: f64,
    /// Number of threads of a step on the CPU, including the caller's, at most 1024. 0: only the caller's. Bucket steps
    /// with the same number of threads share one thread pool, which lives as long as the process.
    pub threads: u32,
    /// Zero. Anything else is refused.
    pub reserved: u32,
    /// The GPU. Null: the CPU.
    pub cuda: *const instep_cuda,
    /// One number for each parameter in `params`. 0: the parameter is full. Any other number: the parameter is a shard
    /// that consists of rows of a full parameter, and the number is the length of a row in elements. Null: all
    /// parameters are full. For each element, stochastic rounding and the block of 8-bit states are the same in a shard
    /// as in the full parameter. With 8-bit states, each row of states, scales, masters, copies and averages starts at
    /// a multiple of 256 elements.
    pub row_elements: *const u64,
    /// One number for each parameter in `params`. For a shard, the number is the index of the shard's first element.
    /// The index counts the elements of all full parameters of the model, one parameter after the other. For a full
    /// parameter the number is ignored. Without `row_elements` the list is ignored.
    pub first_elements: *const u64,
}

// SAFETY: all fields are numbers and pointers, for which zeros are valid.
unsafe impl Growing for instep_bucket_step_options {
    const NAME: &'static str = "instep_bucket_step_options";
}

/// A bucket step, and the facts about it that the C functions need.
pub(crate) struct Step {
    pub(crate) engine: Engine,
    pub(crate) ids: Ids,
    /// Whether the bucket has no elements, so that no tensor needs an address.
    pub(crate) is_empty: bool,
    /// The name of each group, and the name of its optimizer.
    pub(crate) optimizers: Vec<(String, &'static str)>,
}

pub(crate) enum Engine {
    Host(Box<BucketStep>),
    Cuda(Box<BucketStep<OnGpu>>),
}

/// Evaluates the same expression for a bucket step on the host and for a bucket step on a GPU.
macro_rules! on_any {
    ($engine:expr, $step:ident => $body:expr) => {
        match $engine {
            $crate::bucket_options::Engine::Host($step) => $body,
            $crate::bucket_options::Engine::Cuda($step) => $body,
        }
    };
}

pub(crate) use on_any;

/// # Safety
/// The options meet the header's contract.
pub(crate) unsafe fn create(options: &instep_bucket_step_options) -> Result<Step> {
    zero("reserved", options.reserved)?;
    let layout = close(options.layout)?;
    let ids = Ids::of(&layout);
    let sharded = if options.row_elements.is_null() { 0 } else { options.param_count };
    // SAFETY: guaranteed by the caller.
    let (groups, gpu, params, offsets, rows, firsts) = unsafe {
        (
            Groups::read(options.optimizer, options.precision, options.groups, options.group_count)?,
            cuda(options.cuda)?,
            list(options.params, options.param_count, "params")?,
            list(options.offsets, options.param_count, "offsets")?,
            list(options.row_elements, sharded, "row_elements")?,
            list(options.first_elements, sharded, "first_elements")?,
        )
    };
    if let Some((group, _)) = groups.precisions.first() {
        let text = format_args!(
            "group `{group}`: has a precision of its own; create a bucket step for each precision"
        );
        return Err(Fault::new(INSTEP_CONFIG, text));
    }
    if let Some((group, _)) = groups.clips.first() {
        let text = format_args!("group `{group}`: has a clip of its own; decide a norm for each clip");
        return Err(Fault::new(INSTEP_CONFIG, text));
    }
    let names = groups.names(&layout);
    let mut builder = BucketStep::builder(&layout, groups.optimizer).precision(groups.precision);
    for (group, optimizer) in groups.optimizers {
        builder = builder.group(&group, optimizer);
    }
    builder = builder.gradients(gradients(options.gradients)?);
    if let Some(copy) = dtype("copy", options.copy)? {
        builder = builder.copy_params(copy);
    }
    if options.ema_decay != 0.0 {
        builder = builder.ema(options.ema_decay);
    }
    if !params.is_empty() {
        let listed = bucket(&ids, params, offsets, options.elements)?;
        builder = builder.bucket(in_rows(listed, &ids, params, rows.iter().zip(firsts))?);
    }
    if params.is_empty() && !options.row_elements.is_null() {
        return Err(Fault::argument(
            "row_elements",
            "given without params",
            "name the parameters of the bucket",
        ));
    }
    if options.threads > 1 {
        builder = builder.pool(shared_pool(options.threads)?);
    }
    let engine = match gpu {
        None => Engine::Host(Box::new(builder.host()?)),
        Some(gpu) => Engine::Cuda(Box::new(builder.cuda(&gpu)?)),
    };
    let is_empty = on_any!(&engine, step => step.elements()) == 0;
    Ok(Step { engine, ids, is_empty, optimizers: names })
}

/// Returns the Rust library's description of a bucket.
pub(crate) fn bucket(ids: &Ids, params: &[u32], offsets: &[usize], elements: usize) -> Result<ForeignBucket> {
    let bucket = ForeignBucket::new(elements);
    params
        .iter()
        .zip(offsets)
        .try_fold(bucket, |bucket, (param, offset)| Ok(bucket.gradient(ids.get(*param)?, *offset)))
}

/// Declares which parameters are shards. For each parameter, `rows` has the length of a row and the index of the first
/// element.
fn in_rows<'a>(
    bucket: ForeignBucket,
    ids: &Ids,
    params: &[u32],
    rows: impl Iterator<Item = (&'a u64, &'a u64)>,
) -> Result<ForeignBucket> {
    params.iter().zip(rows).filter(|(_, (row, _))| **row > 0).try_fold(
        bucket,
        |bucket, (param, (row, first))| {
            let elements = usize::try_from(*row).unwrap_or(usize::MAX);
            Ok(bucket.rows(ids.get(*param)?, elements, *first))
        },
    )
}

/// Returns the pool that all steps with this number of threads share.
fn shared_pool(threads: u32) -> Result<Pool> {
    static POOLS: Mutex<BTreeMap<u32, Pool>> = Mutex::new(BTreeMap::new());
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = pools.get(&threads) {
        return Ok(pool.clone());
    }
    let pool = Pool::new(threads as usize)?;
    Ok(pools.entry(threads).or_insert(pool).clone())
}
