//! Each stream of each rule has one special value at a time: the step must find it, also where the loop does not check
//! every value.
//!
//! A rule names the special values that its stepped parameter does not show (`HIDDEN` in kernels/rules/). If it names
//! too few, a gradient that is not finite goes unreported, or a NaN is stored with its original payload.

use half::bf16;
use instep::{
    Adadelta, Adamax, DType, Isa, Layout, Mode, Moments, Precision, RmsProp, Rounding, Solo, Stepper,
};

use crate::support::{Optim, optimizers, paint, paint_gradient};

/// Several whole rounds of every instruction set, and an odd number of elements after them.
const LEN: usize = 67;
/// The first and last lane of a round, the last round, and the tail.
const PLACES: [usize; 4] = [0, 31, 63, 66];
/// The upper halves are bf16 of the same kind. Both halves have bits of a NaN's payload.
const NAN: u32 = 0x7fd5_1234;
const NEGATIVE_NAN: u32 = 0xffb1_4321;
const NONFINITE: [u32; 4] = [0x7f80_0000, 0xff80_0000, NAN, NEGATIVE_NAN];

const BF16: Precision =
    Precision { param: DType::BF16, grad: DType::BF16, moments: Moments::BF16, ..Precision::F32 };
const PRECISIONS: [Precision; 3] =
    [Precision::F32, BF16, Precision { rounding: Rounding::Stochastic { seed: 3 }, ..BF16 }];

/// Ordinary passes before the tested one. The loop of RAdam with constant flags starts with its sixth pass.
const PASSES: usize = 5;

/// A stepper after some ordinary passes.
struct Run {
    stepper: Stepper,
    is_f32: bool,
    what: String,
}

impl Run {
    fn new(optim: Optim, precision: Precision, isa: Isa) -> Run {
        let layout = Layout::builder().param("w", LEN).build().unwrap();
        let builder = optim.builder(&layout).precision(precision).mode(Mode::Eager).isa(isa).threads(1);
        let mut stepper = builder.host(Solo::default()).unwrap();
        let values: Vec<f32> = (0..LEN).map(|k| paint(0, k)).collect();
        let w = layout.id("w").unwrap();
        stepper.write(w, &values).unwrap();
        let is_f32 = precision == Precision::F32;
        let mut run = Run { stepper, is_f32, what: format!("{optim:?}, {precision:?}, {isa}") };
        assert!((0..PASSES).all(|at| !run.pass(at, None)), "{}", run.what);
        run
    }

    /// Steps with ordinary gradients, one of them replaced, and returns whether the step found a value that is not
    /// finite.
    fn pass(&mut self, at: usize, poison: Option<(usize, u32)>) -> bool {
        let w = self.stepper.layout().id("w").unwrap();
        let mut gradient: Vec<f32> = (0..LEN).map(|k| paint_gradient(at, 0, k)).collect();
        if let Some((place, bits)) = poison {
            gradient[place] = f32::from_bits(bits);
        }
        let mut pass = self.stepper.begin().unwrap();
        pass.write(w.grad(), &gradient).unwrap();
        pass.finish().unwrap();
        self.stepper.status().unwrap().first_nonfinite_bucket.is_some()
    }

    /// Writes bits into a state, or into the parameter.
    fn put(&mut self, state: Option<&str>, place: usize, bits: u32) {
        let w = self.stepper.layout().id("w").unwrap();
        let narrow = bf16::from_bits((bits >> 16) as u16);
        match (self.is_f32, state) {
            (true, None) => self.stepper.view_mut::<f32>(w).unwrap()[place] = f32::from_bits(bits),
            (true, Some(name)) => {
                self.stepper.view_mut::<f32>(w.state(name)).unwrap()[place] = f32::from_bits(bits)
            }
            (false, None) => {
                self.stepper.view_mut::<bf16>(w).unwrap()[place] = narrow;
            }
            (false, Some(name)) => self.stepper.view_mut::<bf16>(w.state(name)).unwrap()[place] = narrow,
        }
    }

    fn assert_canonical(&self, what: &str) {
        let w = self.stepper.layout().id("w").unwrap();
        let names = self.stepper.state_names(w).unwrap();
        let (params, names) = (self.stepper.params(), names.iter());
        let is_canonical = if self.is_f32 {
            let all = names.flat_map(|name| self.stepper.view::<f32>(w.state(name)).unwrap());
            let mut all = params.get(w).unwrap().iter().chain(all);
            all.all(|x| !x.is_nan() || x.to_bits() == 0x7fff_ffff)
        } else {
            let all = names.flat_map(|name| self.stepper.view::<bf16>(w.state(name)).unwrap());
            let mut all = params.get_as::<bf16>(w).unwrap().iter().chain(all);
            all.all(|x| !x.is_nan() || x.to_bits() == 0x7fff)
        };
        assert!(is_canonical, "a NaN with a payload is stored: {what}, {}", self.what);
    }
}

/// One of the two sets of flags with a special loop occurs in no other case.
fn cases() -> Vec<Optim> {
    let mut all = optimizers();
    all.push(Optim::of(RmsProp { weight_decay: 0.04, ..RmsProp::default() }));
    all.push(Optim::of(Adadelta { weight_decay: 0.04, ..Adadelta::default() }));
    all.push(Optim::of(Adamax { weight_decay: 0.04, ..Adamax::default() }));
    all
}

fn each(test: impl Fn(&dyn Fn() -> Run)) {
    for isa in Isa::available() {
        for precision in PRECISIONS {
            for optim in cases() {
                let layout = Layout::builder().param("w", LEN).build().unwrap();
                // Some rules refuse states of fewer bits.
                if optim.builder(&layout).precision(precision).host(Solo::default()).is_ok() {
                    test(&|| Run::new(optim, precision, isa));
                }
            }
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_reported_wherever_it_lies() {
    each(|new| {
        for (place, bits) in PLACES.into_iter().zip(NONFINITE) {
            let mut run = new();
            assert!(run.pass(PASSES, Some((place, bits))), "{bits:x} at {place}, {}", run.what);
            run.assert_canonical(&format!("a gradient of {bits:x} at {place}"));
        }
        // Its square overflows, and it is finite.
        let mut run = new();
        assert!(!run.pass(PASSES, Some((PLACES[1], 0x7f00_0000))), "{}", run.what);
        run.assert_canonical("a large gradient");
    });
}

#[test]
fn a_nan_in_a_parameter_or_a_state_is_stored_without_its_payload_and_not_reported() {
    each(|new| {
        let names = {
            let run = new();
            let w = run.stepper.layout().id("w").unwrap();
            run.stepper.state_names(w).unwrap()
        };
        for stream in [None].into_iter().chain(names.iter().map(|name| Some(&**name))) {
            for (place, bits) in PLACES.into_iter().zip(NONFINITE.into_iter().rev()) {
                let mut run = new();
                run.put(stream, place, bits);
                assert!(!run.pass(PASSES, None), "{bits:x} in {stream:?} at {place}, {}", run.what);
                run.assert_canonical(&format!("{bits:x} in {stream:?} at {place}"));
            }
        }
    });
}
