//! Compares the optimizer with candle-nn's AdamW and with a `Stepper` of instep, and tests refused steps.
//!
//! Bits are compared only where both sides use instep's arithmetic.

mod bound;
mod refused;
mod support;

use candle_core::{Result, Tensor, Var, safetensors};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use instep::{Clip, Layout, LrSchedule, Mode, Moments, Precision, Solo, Stepper};
use instep_candle::{Config, FusedOptimizer};

use bound::Element;
use support::{Net, bits, grads, spread, values, var};

const PARAMS: ParamsAdamW = ParamsAdamW { lr: 0.01, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 };

/// Both optimizers get the gradients of one training. The learning rate changes. In some steps, including the first,
/// one variable has no gradient. Each parameter must differ from the f64 value by at most the bound on f32's rounding.
#[test]
fn a_training_has_the_parameters_of_candle_nn_within_the_rounding_of_f32() -> Result<()> {
    let net = Net::new()?;
    let ours = net.vars();
    let theirs =
        ours.iter().map(|var| Var::from_tensor(&var.copy()?.detach())).collect::<Result<Vec<_>>>()?;
    let rule = bound::AdamW {
        betas: (PARAMS.beta1, PARAMS.beta2),
        eps: PARAMS.eps,
        weight_decay: PARAMS.weight_decay,
        has_f32_powers: false,
    };
    let elements = |var: &Var| values(var).into_iter().map(|value| Element::new(value, rule)).collect();
    let mut exact: Vec<Vec<Element>> = ours.iter().map(elements).collect();

    let mut optimizer = FusedOptimizer::new(ours.clone(), PARAMS.into())?;
    let mut adamw = AdamW::new(theirs.clone(), PARAMS)?;
    let first = net.loss()?.to_scalar::<f32>()?;
    let mut worst = [0.0f64; 2];
    for step in 1..=200 {
        let lr = if step <= 100 { 0.01 } else { 0.003 };
        optimizer.set_learning_rate(lr);
        adamw.set_learning_rate(lr);
        let mut store = net.loss()?.backward()?;
        if step < 5 || step % 7 == 0 {
            store.remove(&ours[1]);
        }
        let given: Vec<_> = ours.iter().map(|var| store.get(var).map(values)).collect();
        optimizer.step(&store)?;
        adamw.step(&grads(&theirs, &given)?)?;
        for (elements, given) in exact.iter_mut().zip(&given) {
            for (element, grad) in elements.iter_mut().zip(given.iter().flatten()) {
                element.update(*grad, lr, step);
            }
        }
        for (k, elements) in exact.iter().enumerate() {
            for (worst, vars) in worst.iter_mut().zip([&ours, &theirs]) {
                for (element, value) in elements.iter().zip(values(&vars[k])) {
                    let share = element.judge(value);
                    assert!(
                        share <= 1.0 || share.is_nan(),
                        "step {step}, variable {k}: {share} of the bound"
                    );
                    *worst = worst.max(share);
                }
            }
        }
    }
    assert!(net.loss()?.to_scalar::<f32>()? < first / 2.0, "the loss halves");
    assert!(worst.iter().all(|share| *share > 0.01), "the bound is not vain: {worst:?}");
    Ok(())
}

#[test]
fn a_step_has_the_bits_of_a_stepper_clipped_or_not_in_f32_and_8_bits() -> Result<()> {
    let lens = [300, 7, 513];
    for (eight_bit, max_norm) in [(false, None), (false, Some(2.0)), (true, None), (true, Some(2.0))] {
        let vars = lens.iter().enumerate().map(|(k, len)| var(k as u32, *len)).collect::<Result<Vec<_>>>()?;
        let adamw = instep::AdamW { lr: 0.02, ..Default::default() };
        let mut config = Config::new(adamw.clone());
        let mut layout = Layout::builder();
        for (k, len) in lens.iter().enumerate() {
            layout = layout.param(format!("{k}"), *len);
        }
        let layout = layout.build().expect("a layout");
        let mut builder = Stepper::builder(&layout, adamw).mode(Mode::Sequential);
        if eight_bit {
            config = config.eight_bit();
            builder = builder.precision(Precision { moments: Moments::EightBit, ..Precision::F32 });
        }
        if let Some(max_norm) = max_norm {
            config = config.max_norm(max_norm);
            builder = builder.clip(Clip::Global(max_norm));
        }
        let mut stepper = builder.host(Solo::default()).expect("a stepper");
        for (id, var) in layout.ids().zip(&vars) {
            stepper.write(instep::TensorId::Param(id), &values(var)).expect("a parameter");
        }
        let mut optimizer = FusedOptimizer::new(vars.clone(), config)?;
        for step in 0..20 {
            let all: Vec<_> =
                lens.iter().enumerate().map(|(k, len)| spread(step * 3 + k as u32, *len)).collect();
            let mut pass = stepper.begin().expect("a pass");
            for (id, grad) in layout.ids().zip(&all) {
                pass.grads().write(id, grad).expect("a gradient");
                pass.grad_ready(id).expect("a gradient");
            }
            pass.finish().expect("a step");
            optimizer.step(&grads(&vars, &all.into_iter().map(Some).collect::<Vec<_>>())?)?;
            assert_eq!(optimizer.decision().is_some(), max_norm.is_some());
        }
        for (id, ours) in layout.ids().zip(bits(&vars)) {
            let theirs: Vec<u32> =
                stepper.params().get(id).expect("values").iter().map(|value| value.to_bits()).collect();
            assert!(ours == theirs, "8 bits: {eight_bit}, clip: {max_norm:?}");
        }
    }
    Ok(())
}

#[test]
fn a_resumed_training_has_the_bits_of_one_that_went_on() -> Result<()> {
    for eight_bit in [false, true] {
        let config = || {
            let config = Config::new(instep::NAdam::default()).max_norm(0.1);
            if eight_bit { config.eight_bit() } else { config }
        };
        let schedule = || LrSchedule::cosine(0.01, 30, 0.0).warm_up(4, 0.1);
        let new = |net: &Net| -> Result<FusedOptimizer> {
            let mut optimizer = FusedOptimizer::from_varmap(&net.varmap, config())?;
            optimizer.set_lr_schedule(schedule())?;
            Ok(optimizer)
        };
        let train = |net: &Net, optimizer: &mut FusedOptimizer, steps: usize| {
            (0..steps).try_for_each(|_| optimizer.backward_step(&net.loss()?))
        };
        let whole = Net::new()?;
        train(&whole, &mut new(&whole)?, 30)?;

        let folder = tempfile::tempdir().expect("a folder");
        let (weights, states) = (folder.path().join("weights"), folder.path().join("states"));
        let before = Net::new()?;
        let mut optimizer = new(&before)?;
        train(&before, &mut optimizer, 13)?;
        before.varmap.save(&weights)?;
        safetensors::save(&optimizer.state()?, &states)?;

        let mut after = Net::new()?;
        after.varmap.load(&weights)?;
        let mut optimizer = new(&after)?;
        optimizer.load_state(safetensors::load(&states, &candle_core::Device::Cpu)?)?;
        assert_eq!(optimizer.steps(), 13);
        train(&after, &mut optimizer, 17)?;
        assert_eq!(bits(&after.vars()), bits(&whole.vars()), "8 bits: {eight_bit}");
    }
    Ok(())
}

#[test]
fn a_learning_rate_follows_its_schedule_until_it_is_set() -> Result<()> {
    let vars = vec![var(0, 3)?];
    let mut optimizer =
        FusedOptimizer::new(vars.clone(), Config::new(instep::Sgd { lr: 9.0, ..Default::default() }))?;
    assert_eq!(optimizer.learning_rate(), 9.0);
    optimizer.set_lr_schedule(LrSchedule::step(1.0, 2, 0.5))?;
    let wrong = optimizer.set_lr_schedule(LrSchedule::step(1.0, 0, 0.5)).expect_err("a refusal");
    assert!(wrong.to_string().starts_with("step_size = 0"), "{wrong}");
    let mut rates = Vec::new();
    for step in 0..5 {
        if step == 4 {
            optimizer.set_learning_rate(8.0);
        }
        let before = values(&vars[0]);
        optimizer.step(&grads(&vars, &[Some(vec![1.0; 3])])?)?;
        rates.push((before[0] - values(&vars[0])[0]).round_ties_even_to(8));
    }
    assert_eq!(rates, [1.0, 1.0, 0.5, 0.5, 8.0]);
    Ok(())
}

/// Rounds a difference of two parameters to `places` binary digits, because it contains the parameters' rounding
/// errors.
trait Rounded {
    fn round_ties_even_to(self, places: i32) -> f32;
}

impl Rounded for f32 {
    fn round_ties_even_to(self, places: i32) -> f32 {
        (self * 2f32.powi(places)).round_ties_even() / 2f32.powi(places)
    }
}

#[test]
fn gradients_are_clipped_by_their_global_norm_and_a_step_with_a_nan_is_skipped() -> Result<()> {
    let vars = vec![
        Var::new(&[0f32, 0.], &candle_core::Device::Cpu)?,
        Var::new(&[0f32], &candle_core::Device::Cpu)?,
    ];
    let config = Config::new(instep::Sgd { lr: 1.0, ..Default::default() }).max_norm(1.5).skip_nonfinite();
    let mut optimizer = FusedOptimizer::new(vars.clone(), config)?;
    optimizer.step(&grads(&vars, &[Some(vec![1.0, 2.0]), Some(vec![2.0])])?)?;
    let decision = optimizer.decision().expect("a norm");
    assert_eq!(decision.norm, 3.0);
    for (value, expected) in values(&vars[0]).into_iter().chain(values(&vars[1])).zip([-0.5f32, -1.0, -1.0]) {
        assert!((value - expected).abs() < 1e-5, "{value} for {expected}");
    }
    let before = bits(&vars);
    optimizer.step(&grads(&vars, &[Some(vec![1.0, f32::NAN]), Some(vec![2.0])])?)?;
    assert!(optimizer.decision().expect("a norm").skipped);
    assert_eq!((bits(&vars), optimizer.steps()), (before, 1));
    Ok(())
}

#[test]
fn variables_are_stepped_where_they_lie_and_gradients_may_be_views() -> Result<()> {
    let vars = vec![var(0, 6)?, var(1, 3)?];
    let address = |tensor: &Tensor| match &*tensor.storage_and_layout().0 {
        candle_core::Storage::Cpu(cpu) => cpu.as_slice::<f32>().expect("f32").as_ptr().addr(),
        _ => 0,
    };
    let before: Vec<_> = vars.iter().map(|var| address(var)).collect();
    let mut optimizer =
        FusedOptimizer::new(vars.clone(), Config::new(instep::Sgd { lr: 1.0, ..Default::default() }))?;
    let all = Tensor::arange(0f32, 9f32, &candle_core::Device::Cpu)?;
    let mut store = grads(&vars, &[])?;
    store.insert(&vars[0], all.narrow(0, 3, 6)?);
    store.insert(&vars[1], all.narrow(0, 0, 3)?);
    optimizer.step(&store)?;
    let expected = |seed, grads: &[f32]| -> Vec<f32> {
        spread(seed, grads.len()).iter().zip(grads).map(|(value, grad)| value - grad).collect()
    };
    assert_eq!(values(&vars[0]), expected(0, &[3., 4., 5., 6., 7., 8.]));
    assert_eq!(values(&vars[1]), expected(1, &[0., 1., 2.]));
    assert_eq!(vars.iter().map(|var| address(var)).collect::<Vec<_>>(), before);
    assert!(FusedOptimizer::empty(Config::new(instep::AdamW::default()))?.step(&store).is_ok());
    Ok(())
}
