//! RAdam with a slowly decaying second moment, whose length must not be computed as a difference.
//!
//! The reference uses whole multiples of 2^-100, for decay rates of 1 - 2^-k, and does not use the header's sums.

use instep::{RAdam, Solo, Stepper};

use crate::support::layout;

const ONE: u128 = 1 << 100;

/// Returns 1 - beta2^t, and rho = 2/(1 - beta2) - 1 - 2 t beta2^t / (1 - beta2^t), for beta2 = 1 - 2^-k.
fn length(k: u32, t: u64) -> (f64, f64) {
    let power = (0..t).fold(ONE, |power, _| power - (power >> k));
    let (complement, double) = (ONE - power, 2 * u128::from(t));
    // Digit by digit, since 2 t beta2^t has no room for a shift.
    let (mut whole, mut rest) = (double * (power / complement), double * (power % complement));
    whole += rest / complement;
    rest %= complement;
    let rho = ((2u128 << k) - 1 - whole) as f64 - rest as f64 / complement as f64;
    (complement as f64 / ONE as f64, rho)
}

/// Returns the change of a parameter of 0 in one update at step `t`, from empty states and a gradient of 1.
fn change(radam: RAdam, t: u64) -> f64 {
    let layout = layout(&[1]);
    let id = layout.id("p0").unwrap();
    let mut stepper = Stepper::builder(&layout, radam).host(Solo::default()).unwrap();
    stepper.write(id, &[0.0]).unwrap();
    stepper.set_step_count(id, t - 1).unwrap();
    let mut pass = stepper.begin().unwrap();
    pass.write(id.grad(), &[1.0]).unwrap();
    pass.finish().unwrap();
    let mut param = [0.0];
    stepper.read(id, &mut param).unwrap();
    -f64::from(param[0])
}

#[test]
fn radam_keeps_its_length_where_the_second_moment_hardly_decays() {
    for k in [10, 20, 24, 27] {
        let beta2 = 1.0 - 0.5f64.powi(k as i32);
        let radam = RAdam { lr: 1.0, betas: (0.5, beta2), eps: 1e-12, ..RAdam::default() };
        let mut rectified = 0;
        for t in (1..=12).chain([40, 333, 1000, 2000]) {
            let (complement, rho) = length(k, t);
            let rho_inf = 2.0 / (1.0 - beta2) - 1.0;
            let plain = 0.5 / (1.0 - 0.5f64.powi(t as i32));
            let expected = if rho > 5.0 {
                rectified += 1;
                let square = (rho - 4.0) * (rho - 2.0) * rho_inf / ((rho_inf - 4.0) * (rho_inf - 2.0) * rho);
                plain * square.sqrt() * complement.sqrt() / ((1.0 - beta2).sqrt() + radam.eps)
            } else {
                plain
            };
            let error = change(radam, t) / expected - 1.0;
            assert!(error.abs() < 1e-6, "beta2 of 1 - 2^-{k}, update {t}: rho is {rho}, off by {error:e}");
        }
        assert_eq!(rectified, 11, "updates after the fifth are rectified");
    }
}

/// With beta2 = 2/3 the length rises to 5, the limit of rectification, and never exceeds it.
#[test]
fn a_length_that_ends_at_the_limit_does_not_cross_it_back_and_forth() {
    for beta2 in [2.0 / 3.0, (2.0f64 / 3.0).next_down(), (2.0f64 / 3.0).next_up()] {
        let rectifies = |t: u64| change(RAdam { lr: 1.0, betas: (0.0, beta2), ..RAdam::default() }, t) != 1.0;
        let mut switches = 0;
        let mut last = rectifies(1);
        for t in 2..=400 {
            let now = rectifies(t);
            switches += u32::from(now != last);
            last = now;
        }
        assert!(switches <= 1, "beta2 of {beta2}: {switches} switches");
    }
}
