//! Gradients are sent as bf16 and f16: the bits that arrive, their distance from the sum, and refusals.
//!
//! The formats come from their definition (`precision::sixteen_bit`), never from the kernels. The tests see only what a
//! rank sees: parameters, gradients, errors.

use std::ffi::c_void;

use instep::abi::{INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16};
use instep::layout::DEFAULT_GROUP;
use instep::overlap::{Compressed, Hooked};
use instep::{
    AdamW, Collective, Divisor, Error, InProcess, Isa, Layout, Mode, Place, Result, Sgd, Solo, Stepper,
    Unused, in_process,
};

use crate::kernels::bitpatterns::SPECIAL;
use crate::precision::sixteen_bit::Format;
use crate::support::entries::kernels;
use crate::support::{
    LENGTHS, MODES, Optim, Options, Outcome, Presummed, assert_same_bits, layout, paint, paint_gradient,
    paint_params, pass,
};

fn compressed(dtype: u32, comm: InProcess) -> Result<Compressed<InProcess>> {
    if dtype == INSTEP_DTYPE_BF16 { Compressed::bf16(comm) } else { Compressed::f16(comm) }
}

/// Returns the f32 sum of these terms in order, as 16 bits.
fn sum(format: &Format, terms: impl Iterator<Item = u16>) -> u16 {
    format.nearest(terms.map(|bits| format.value(bits)).reduce(|sum, x| sum + x).unwrap())
}

#[test]
fn sums_of_sixteen_bits_are_taken_as_f32_in_rank_order_and_rounded_once() {
    const LEN: usize = 3000;
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| Format::both().map(|f| (isa, f))) {
        for ranks in [1, 2, 3, 8] {
            let term = |rank: usize, k: usize| (k * 24_593 + rank * (k * 40_503 + 12_289)) as u16;
            let mut buffers: Vec<Vec<u16>> =
                (0..ranks).map(|rank| (0..LEN).map(|k| term(rank, k)).collect()).collect();
            let addresses: Vec<*mut c_void> = buffers.iter_mut().map(|x| x.as_mut_ptr().cast()).collect();
            // SAFETY: as many buffers as said, each longer than the range.
            unsafe {
                kernels(isa).sum.unwrap()(
                    addresses.as_ptr(),
                    ranks as u64,
                    format.dtype,
                    7,
                    LEN as u64 - 5,
                    std::ptr::null_mut(),
                )
            }
            for (rank, buffer) in buffers.iter().enumerate() {
                for (k, &got) in buffer.iter().enumerate() {
                    let summed = sum(&format, (0..ranks).map(|rank| term(rank, k)));
                    let expected = if (7..LEN - 5).contains(&k) { summed } else { term(rank, k) };
                    assert_eq!(got, expected, "{isa}, dtype {}, rank {rank}, element {k}", format.dtype);
                }
            }
        }
    }
}

#[test]
fn casts_scale_round_once_and_come_back() {
    let random = (0..70_000u32).map(|k| k.wrapping_mul(2_654_435_761));
    let patterns: Vec<f32> = SPECIAL.into_iter().chain(random).map(f32::from_bits).collect();
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| Format::both().map(|f| (isa, f))) {
        for factor in [1.0, 0.125, 8.0] {
            let what = format!("{isa}, dtype {}, times {factor}", format.dtype);
            let (mut narrow, mut wide) = (vec![0u16; patterns.len()], vec![0f32; patterns.len()]);
            let count = patterns.len() as u64;
            // SAFETY: all three are as long as said.
            unsafe {
                let table = kernels(isa);
                table.narrow.unwrap()(patterns.as_ptr(), narrow.as_mut_ptr(), format.dtype, factor, count);
                table.widen.unwrap()(narrow.as_ptr(), wide.as_mut_ptr(), format.dtype, 1.0 / factor, count);
            }
            let expected: Vec<u16> = patterns.iter().map(|x| format.nearest(x * factor)).collect();
            assert_eq!(narrow, expected, "{what}");
            let canonical = |x: f32| if x.is_nan() { f32::from_bits(0x7fff_ffff) } else { x };
            let expected: Vec<f32> =
                expected.iter().map(|bits| canonical(format.value(*bits) * (1.0 / factor))).collect();
            assert_same_bits(&wide, &expected, &what);
        }
    }
}

/// Returns the outcome of every rank after three passes; `gradient` gets step, rank, parameter and element.
fn train<C: Collective + 'static>(
    ranks: u32,
    options: &Options,
    optim: Optim,
    wrap: impl Fn(InProcess) -> Result<C> + Sync,
    gradient: impl Fn(usize, usize, usize, usize) -> f32 + Sync,
) -> Vec<Outcome> {
    let layout = layout(&LENGTHS);
    let outcomes = in_process(ranks, |comm| {
        let rank = comm.rank() as usize;
        let mut stepper = options.stepper(&layout, optim, wrap(comm)?)?;
        paint_params(&mut stepper);
        for step in 0..3 {
            stepper.set_lr(DEFAULT_GROUP, 0.05 / (step + 1) as f64)?;
            pass(&mut stepper, options, |param, values| {
                values.iter_mut().enumerate().for_each(|(k, g)| *g = gradient(step, rank, param, k));
                // One that some ranks do not use, one that none does.
                !(step == 1 && (param == 18 && rank % 2 == 1 || param == 17))
            })?;
        }
        Outcome::of(&stepper)
    });
    outcomes.unwrap()
}

fn optim() -> Optim {
    Optim::of(AdamW::default())
}

/// Returns multiples of 1/8 up to 31/8; the sum of eight is below 2^5, so it has at most 8 bits and every format holds
/// it.
fn dyadic(step: usize, rank: usize, param: usize, element: usize) -> f32 {
    ((step * 31 + rank * 57 + param * 17 + element * 13) % 63) as f32 / 8.0 - 31.0 / 8.0
}

#[test]
fn sums_that_the_format_holds_give_the_bits_of_no_compression() {
    for ranks in 1..=8 {
        for uneven in [None, Some(Divisor::ContributingRanks)] {
            let options = Options { mode: Mode::Eager, cap: Some(4096), uneven, ..Options::default() };
            let plain = train(ranks, &options, optim(), Ok, dyadic);
            for dtype in [INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16] {
                let ours = train(ranks, &options, optim(), |comm| compressed(dtype, comm), dyadic);
                for (ours, plain) in ours.iter().zip(&plain) {
                    ours.assert_same(plain, &format!("{ranks} ranks, dtype {dtype}, {uneven:?}"));
                    assert_eq!((ours.step_counts[16], ours.step_counts[17]), (3, 2), "counts are exact");
                }
            }
        }
    }
}

#[test]
fn no_cap_and_no_mode_changes_a_bit_and_all_ranks_receive_the_same() {
    let painted = |step, rank, param, k| paint_gradient(step + 3 * rank, param, k);
    for dtype in [INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16] {
        let wrap = |comm| compressed(dtype, comm);
        let expected = train(3, &Options::default(), optim(), wrap, painted).swap_remove(0);
        for (mode, cap) in MODES.into_iter().zip([Some(4096), Some(1), None]) {
            for (rank, outcome) in
                train(3, &Options { mode, cap, ..Options::default() }, optim(), wrap, painted)
                    .iter()
                    .enumerate()
            {
                outcome.assert_same(&expected, &format!("dtype {dtype}, {mode:?}, cap {cap:?}, rank {rank}"));
            }
        }
    }
}

/// With u the rounding of the format, each term is wrong by u of itself, the f32 sum of n terms by (n - 1) 2^-24 of the
/// magnitudes, and the sum's own rounding by u of the sum so far. Together these stay below (2u + u^2 + n 2^-23) of the
/// magnitudes. Below the smallest normal number, each of the n + 1 roundings is instead wrong by half of the smallest
/// subnormal.
#[test]
fn compressed_sums_keep_within_the_documented_bound_and_come_near_it() {
    for (dtype, u, smallest) in [
        (INSTEP_DTYPE_BF16, 2f64.powi(-8), 2f64.powi(-133)),
        (INSTEP_DTYPE_F16, 2f64.powi(-11), 2f64.powi(-24)),
    ] {
        for ranks in [2usize, 3, 5, 8] {
            let options = Options { mode: Mode::Eager, unused: Unused::StepZero, ..Options::default() };
            // Down to where f16 has subnormals only.
            let term = |rank: usize, k: usize| paint(rank, k) * [1.0, 3e-4, 2e-6][k % 3];
            let gradients = |_, rank, _, k| term(rank, k);
            let sgd = Optim::of(Sgd { lr: 0.0, ..Sgd::default() });
            let outcomes = train(ranks as u32, &options, sgd, |comm| compressed(dtype, comm), gradients);
            let pre_scale =
                if dtype == INSTEP_DTYPE_F16 { 1.0 / ranks.next_power_of_two() as f64 } else { 1.0 };
            let mut worst = 0f64;
            for (k, &got) in outcomes[0].grads[18].iter().enumerate() {
                let terms = || (0..ranks).map(|rank| f64::from(term(rank, k)));
                let (exact, magnitudes) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                let n = ranks as f64;
                let relative = (2.0 * u + u * u + n * 2f64.powi(-23)) * magnitudes;
                let bound = relative + (n + 1.0) * smallest / pre_scale / 2.0;
                let off = (f64::from(got) - exact).abs() / bound;
                assert!(off <= 1.0, "dtype {dtype}, {ranks} ranks, element {k}: {got} for {exact}");
                worst = worst.max(off);
            }
            assert!(worst > 0.3, "dtype {dtype}, {ranks} ranks: a bound {} times too wide", 1.0 / worst);
        }
    }
}

/// Trains one parameter on four ranks with SGD at rate 1 and equal gradients; returns its value, and whether the pass
/// was skipped.
fn lone(gradient: f32, skip_nonfinite: bool, pre_scale: Option<f32>) -> (f32, bool) {
    let layout = Layout::builder().param("w", 1).build().unwrap();
    let ranks = in_process(4, |comm| {
        let mut comm = Compressed::f16(comm)?;
        if let Some(pre_scale) = pre_scale {
            comm = comm.pre_scale(pre_scale)?;
        }
        let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() }).mode(Mode::Normed);
        let mut stepper = builder.skip_nonfinite(skip_nonfinite).host(comm)?;
        let w = layout.id("w")?;
        let mut pass = stepper.begin()?;
        pass.grads().write(w, &[gradient])?;
        pass.grad_ready(w)?;
        pass.finish()?;
        let skipped = stepper.status()?.skipped;
        Ok::<_, Error>((stepper.view::<f32>(w)?[0], skipped))
    });
    let ranks = ranks.unwrap();
    assert!(ranks.iter().all(|x| x.0.to_bits() == ranks[0].0.to_bits() && x.1 == ranks[0].1));
    ranks[0]
}

#[test]
fn f16_sums_of_finite_gradients_stay_finite_and_what_overflows_is_skipped() {
    assert_eq!(lone(60_000.0, true, None), (-60_000.0, false));
    assert_eq!(lone(60_000.0, true, Some(1.0)), (0.0, true), "the sum is 240000");
    assert_eq!(lone(1e9, true, None), (0.0, true));
    assert_eq!(lone(1e9, false, None).0, f32::NEG_INFINITY);
    assert_eq!(lone(f32::INFINITY, true, None), (0.0, true));
    assert_eq!(lone(f32::NAN, true, None), (0.0, true));
    assert_eq!(lone(f32::NAN, false, None).0.to_bits(), 0x7fff_ffff, "canonical");
    // 2^-24 is the smallest f16; a quarter of it is none, unless it is scaled.
    assert_eq!(lone(2f32.powi(-24), false, None).0, 0.0);
    assert_eq!(lone(2f32.powi(-24), false, Some(1.0)).0, -2f32.powi(-24));
    assert_eq!(lone(3.0 * 2f32.powi(-37), false, Some(8192.0)).0, -3.0 * 2f32.powi(-37));
}

#[test]
fn what_cannot_be_compressed_is_refused_by_name() {
    let f16 = |ranks| Compressed::f16(Presummed(ranks)).unwrap();
    for (ranks, pre_scale) in
        [(1, 0.3), (1, 0.0), (1, -0.5), (1, f32::NAN), (1, f32::INFINITY), (1, 2f32.powi(-25)), (2, 32_768.0)]
    {
        let refused = f16(ranks).pre_scale(pre_scale).err();
        assert!(
            matches!(refused, Some(Error::Config { field: "pre_scale", .. })),
            "{pre_scale}: {refused:?}"
        );
    }
    assert!(f16(1).pre_scale(32_768.0).is_ok() && f16(4).pre_scale(2f32.powi(-24)).is_ok());
    assert!(Compressed::bf16(Solo::default()).unwrap().pre_scale(0.5).is_err());

    let twice = Compressed::f16(Compressed::bf16(Solo::default()).unwrap()).unwrap_err();
    assert!(matches!(&twice, Error::Unsupported(refusal) if refusal.thing.contains("f16")), "{twice}");
    let around = Compressed::f16(Hooked::new(Solo::default(), |_| Ok(()))).err();
    assert!(matches!(around, Some(Error::Unsupported { .. })));
    assert!(!f16(1).reaches(Place::Cuda(0)) && Solo::default().reaches(Place::Cuda(0)));

    let layout = layout(&[5]);
    let build = |ranks, dtype, unused| {
        let builder = Stepper::builder(&layout, Sgd::default()).unused(unused);
        let comm = Presummed(ranks);
        if dtype == INSTEP_DTYPE_F16 {
            builder.host(Compressed::f16(comm)?)
        } else {
            builder.host(Compressed::bf16(comm)?)
        }
    };
    for (dtype, most) in [(INSTEP_DTYPE_BF16, 256), (INSTEP_DTYPE_F16, 2048)] {
        assert!(build(most, dtype, Unused::Skip).is_ok() && build(most + 1, dtype, Unused::StepZero).is_ok());
        let refused = build(most + 1, dtype, Unused::Skip).err();
        assert!(matches!(refused, Some(Error::Config { field: "world_size", .. })), "{refused:?}");
    }
}

#[test]
fn ranks_that_compress_differently_get_an_error_and_no_hang() {
    let layout = layout(&[300]);
    type Wrap = fn(InProcess) -> Result<Compressed<InProcess>>;
    let wraps: [[Wrap; 2]; 2] = [
        [Compressed::bf16, Compressed::f16],
        [Compressed::f16, |comm| Compressed::f16(comm)?.pre_scale(1.0)],
    ];
    for wrap in wraps {
        let outcome = in_process(2, |comm| {
            let rank = comm.rank() as usize;
            let mut stepper = Stepper::host(&layout, Sgd::default(), wrap[rank](comm)?)?;
            stepper.begin()?.finish()?;
            stepper.close()
        });
        let error = outcome.unwrap_err();
        assert!(matches!(error.cause(), Error::Mismatch { .. }), "{error}");
    }
}
