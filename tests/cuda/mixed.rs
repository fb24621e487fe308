//! Parameters of several precisions on a GPU have the host's bits, with every option that `precision::mixed` draws.
//!
//! The tests run on the stand-in, or with `INSTEP_REQUIRE_GPU=1` on a GPU.

use instep::Solo;

use crate::precision::mixed::{STEPS, case, check_recording};
use crate::schedule::property::for_all;
use crate::support::device::cuda;
use crate::support::{Outcome, paint_params};

#[test]
fn parameters_of_several_precisions_train_to_the_hosts_bits() {
    for_all(80, case(), |case| {
        let layout = case.layout(true);
        let Ok(mut host) = case.mixed(&layout).threads(1).host(Solo::default()) else { return };
        // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
        let mut gpu = unsafe { case.mixed(&layout).cuda(Solo::default(), &cuda()) }.unwrap();
        paint_params(&mut host);
        paint_params(&mut gpu);
        for step in 0..STEPS {
            case.advance(&mut host, step);
            case.advance(&mut gpu, step);
            let (host, gpu) = (Outcome::of(&host).unwrap(), Outcome::of(&gpu).unwrap());
            gpu.assert_same(&host, &format!("pass {step}"));
            assert_eq!(gpu.status, host.status, "pass {step}");
        }
        check_recording(&mut gpu);
    });
}
