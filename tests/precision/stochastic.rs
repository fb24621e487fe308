//! Stochastic rounding: a draw depends only on seed, update and element, and is fair.
//!
//! A parameter that a step does not change shows its draw. A value halfway between two bf16 rounds up with probability
//! one half, and a value at x/2^16 of the distance rounds up with probability x/2^16. Bounds are five standard
//! deviations of the counts.

use instep::{AdamW, DType, Layout, Mode, Moments, Precision, Rounding, Sgd, Solo, Stepper, StepperBuilder};

use crate::support::stored::stored_param;
use crate::support::{Options, layout, pass};

const LEN: usize = 1 << 14;
const SEED: u64 = 17;

fn by_chance(seed: u64, moments: Moments) -> Precision {
    let rounding = Rounding::Stochastic { seed };
    Precision { param: DType::BF16, moments, rounding, ..Precision::F32 }
}

/// SGD at rate 1 moves bf16 parameters from 1 by a share of their last place, 1/128.
struct Draws {
    stepper: Stepper,
    layout: Layout,
}

impl Draws {
    fn new(seed: u64, lengths: &[usize]) -> Draws {
        let layout = layout(lengths);
        let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).threads(1);
        let stepper = builder.precision(by_chance(seed, Moments::F32)).host(Solo::default()).unwrap();
        Draws { stepper, layout }
    }

    /// Returns, for each element at `share` of the way from 1 to the next bf16, whether it rounds up in the update
    /// after `updates`.
    fn went_up(&mut self, updates: u64, share: f32) -> Vec<bool> {
        let ids: Vec<_> = self.layout.ids().collect();
        for id in &ids {
            let ones = vec![1.0; self.layout.parameter(*id).unwrap().len as usize];
            self.stepper.write(*id, &ones).unwrap();
            self.stepper.set_step_count(*id, updates).unwrap();
        }
        let options = Options::default();
        pass(&mut self.stepper, &options, |_, values| {
            values.fill(-share / 128.0);
            true
        })
        .unwrap();
        let stored = ids.iter().flat_map(|id| stored_param(&self.stepper, *id, DType::BF16).unwrap());
        stored
            .map(|bits| match f32::from_bits(bits) {
                1.0 => false,
                1.0078125 => true,
                other => panic!("{other} is no neighbour"),
            })
            .collect()
    }

    /// Returns the 16 drawn bits of each element, found by bisection: the element rounds up if its share and the bits
    /// carry.
    fn bits(&mut self, updates: u64) -> Vec<u32> {
        let mut drawn = vec![0u32; LEN];
        for threshold in 1..=16u32 {
            // Each element asks for its own next bit; a share of x/2^16 goes up if the draw is at least 2^16 - x.
            let asked: Vec<u32> = drawn.iter().map(|low| low | 1 << (16 - threshold)).collect();
            let id = self.layout.ids().next().unwrap();
            self.stepper.write(id, &vec![1.0; LEN]).unwrap();
            self.stepper.set_step_count(id, updates).unwrap();
            let options = Options::default();
            pass(&mut self.stepper, &options, |_, values| {
                let share = |at_least: u32| (65536 - at_least) as f32 / 65536.0;
                values.iter_mut().zip(&asked).for_each(|(g, x)| *g = -share(*x) / 128.0);
                true
            })
            .unwrap();
            let stored = stored_param(&self.stepper, id, DType::BF16).unwrap();
            for ((low, asked), bits) in drawn.iter_mut().zip(asked).zip(stored) {
                *low = if f32::from_bits(bits) > 1.0 { asked } else { *low };
            }
        }
        drawn
    }
}

fn assert_fair(ones: usize, of: usize, what: &str) {
    let sigma = 0.5 * (of as f64).sqrt();
    let error = (ones as f64 - of as f64 / 2.0).abs();
    assert!(error < 5.0 * sigma, "{what}: {ones} of {of}");
}

#[test]
fn each_bit_is_as_often_one_as_zero_and_has_nothing_to_do_with_its_neighbours() {
    let mut draws = Draws::new(SEED, &[LEN]);
    let bits = draws.bits(0);
    let others = [("the next update", draws.bits(1)), ("a much later update", draws.bits(1 << 40))];
    let seeds = [1, SEED + 1, SEED | 1 << 63].map(|seed| Draws::new(seed, &[LEN]).bits(0));
    for bit in 0..16 {
        let ones = |bits: &mut dyn Iterator<Item = u32>| bits.filter(|x| x >> bit & 1 == 1).count();
        assert_fair(ones(&mut bits.iter().copied()), LEN, &format!("bit {bit}"));
        // Alike as often as not: with other elements at any distance of a vector, a block or a tile, updates, seeds,
        // bits.
        for distance in [1, 2, 4, 8, 16, 256, 2048] {
            let pairs = bits.iter().zip(&bits[distance..]);
            let what = format!("bit {bit}, {distance} further on");
            assert_fair(ones(&mut pairs.map(|(a, b)| a ^ b)), LEN - distance, &what);
        }
        for (what, other) in &others {
            let pairs = bits.iter().zip(other);
            assert_fair(ones(&mut pairs.map(|(a, b)| a ^ b)), LEN, &format!("bit {bit}, {what}"));
        }
        for other in &seeds {
            let pairs = bits.iter().zip(other);
            assert_fair(ones(&mut pairs.map(|(a, b)| a ^ b)), LEN, &format!("bit {bit}, another seed"));
        }
        for second in 0..bit {
            let what = format!("bits {bit} and {second}");
            assert_fair(bits.iter().filter(|x| (*x >> bit ^ *x >> second) & 1 == 1).count(), LEN, &what);
        }
    }
}

#[test]
fn a_draw_belongs_to_the_elements_place_in_the_layout_whatever_tensor_it_is_in() {
    let whole = Draws::new(SEED, &[LEN]).went_up(5, 0.5);
    assert_eq!(Draws::new(SEED, &[1000, 0, 1, LEN - 1001]).went_up(5, 0.5), whole);
    for other in [Draws::new(SEED + 1, &[LEN]).went_up(5, 0.5), Draws::new(SEED, &[LEN]).went_up(6, 0.5)] {
        assert_fair(whole.iter().zip(&other).filter(|(a, b)| a == b).count(), LEN, "seed, update");
    }
}

#[test]
fn parameter_and_states_draw_for_themselves() {
    // Each is halfway between two bf16: 1 + 2^-8 + 2^-16 very nearly, the states 1 + 2^-8 times a power of two.
    let layout = layout(&[LEN]);
    let id = layout.id("p0").unwrap();
    let goes_up = |builder: StepperBuilder<'_>, g: f32, names: &[&str]| {
        let mut stepper = builder.precision(by_chance(SEED, Moments::BF16)).host(Solo::default()).unwrap();
        stepper.write(id, &vec![1.0; LEN]).unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.write(id.grad(), &vec![g; LEN]).unwrap();
        pass.finish().unwrap();
        let mut tensors = vec![vec![0.0; LEN]; 1 + names.len()];
        stepper.read(id, &mut tensors[0]).unwrap();
        names.iter().zip(&mut tensors[1..]).for_each(|(name, into)| {
            stepper.read(id.state(name), into).unwrap();
        });
        let smallest = |values: &Vec<f32>| values.iter().fold(f32::INFINITY, |a, x| a.min(x.abs()));
        let raised = |values: Vec<f32>| {
            let low = smallest(&values);
            values.into_iter().map(move |x| x.abs() > low).collect::<Vec<bool>>()
        };
        tensors.into_iter().map(raised).collect::<Vec<_>>()
    };
    let halfway = 1.0 + 1.0 / 256.0;
    let sgd = Sgd { lr: 1.0, momentum: 0.5, ..Sgd::default() };
    let sgd = goes_up(Stepper::builder(&layout, sgd), -halfway / 256.0, &["momentum_buffer"]);
    let adam = AdamW { lr: 0.0, betas: (0.5, 0.5), amsgrad: true, ..AdamW::default() };
    let adam = Stepper::builder(&layout, adam);
    let adam = goes_up(adam, halfway.sqrt(), &["exp_avg_sq", "max_exp_avg_sq"]);
    for (a, b) in [(&sgd[0], &sgd[1]), (&adam[1], &adam[2])] {
        assert_fair(a.iter().filter(|up| **up).count(), LEN, "goes up");
        assert_fair(a.iter().zip(b).filter(|(a, b)| a == b).count(), LEN, "alike");
    }
}

#[test]
fn a_bf16_goes_up_as_often_as_its_way_to_the_next_one_is_long() {
    let mut draws = Draws::new(SEED, &[LEN]);
    for share in [0.0, 1.0 / 4096.0, 0.1, 0.25, 0.5, 0.75, 0.9] {
        let ups: usize = (0..8).map(|k| draws.went_up(k, share).into_iter().filter(|up| *up).count()).sum();
        let (count, share) = (8.0 * LEN as f64, f64::from(share));
        let sigma = (count * share * (1.0 - share)).sqrt();
        // Of the share 16 bits are left.
        let error = (ups as f64 - count * share).abs();
        assert!(error <= 5.0 * sigma + count / 65536.0, "{share}: {ups} of {count}");
    }
}

fn mean(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x)).sum::<f64>() / values.len() as f64
}

#[test]
fn ten_thousand_updates_far_below_the_last_place_add_up_by_chance_and_are_lost_to_the_nearest() {
    const UPDATES: usize = 10_000;
    let layout = layout(&[256]);
    let id = layout.id("p0").unwrap();
    let update = 2f32.powi(-13); // 1/64 of the last place of a bf16 between 1 and 2
    let run = |precision: Precision| {
        let sgd = Sgd { lr: 1.0, ..Sgd::default() };
        let builder = Stepper::builder(&layout, sgd).mode(Mode::Sequential).threads(1);
        let mut stepper = builder.precision(precision).host(Solo::default()).unwrap();
        stepper.write(id, &[1.0; 256]).unwrap();
        for _ in 0..UPDATES {
            let mut pass = stepper.begin().unwrap();
            pass.grads().get_mut(id).unwrap().fill(-update);
            pass.finish().unwrap();
        }
        let mut values = [0.0; 256];
        stepper.read(id, &mut values).unwrap();
        values
    };
    let chance = by_chance(SEED, Moments::F32);
    assert_eq!(run(Precision { rounding: Rounding::Nearest, ..chance }), [1.0; 256]);
    // A step varies by p(1-p) < p = update/place of its place squared; between 2 and 4 that place is 2^-6.
    let sigma = (UPDATES as f64 * f64::from(update) * 2f64.powi(-6) / 256.0).sqrt();
    let expected = 1.0 + UPDATES as f64 * f64::from(update);
    let moved = mean(&run(chance));
    assert!((moved - expected).abs() < 5.0 * sigma, "{moved}, not {expected}; sigma {sigma}");
    assert!(expected > 2.0 && 5.0 * sigma < 0.1);
}
