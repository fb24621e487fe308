//! Parameters, gradients and states in 32, 16 and 8 bits, stochastic rounding, copies and moving averages.
//!
//! `support::stored` lists every precision; a new one is tested as soon as `Precision::validate` accepts it.

pub(crate) mod bfloat16;
pub(crate) mod bitexact;
pub(crate) mod conversions;
pub(crate) mod eight_bit;
pub(crate) mod eight_bit_stochastic;
pub(crate) mod eight_bit_thresholds;
pub(crate) mod ema_and_copies;
pub(crate) mod low_precision_states;
pub(crate) mod masters;
#[cfg(not(kernels_only))]
pub(crate) mod mixed;
pub(crate) mod mixed_ranks;
pub(crate) mod ranks;
pub(crate) mod refusals;
pub(crate) mod resume;
pub(crate) mod sixteen_bit;
pub(crate) mod slow_moments;
pub(crate) mod stochastic;
