//! Compares the optimizer with burn's AdamW and with a `Stepper` of instep, and tests refused steps.
//!
//! Bits are compared only where both sides use instep's arithmetic.

mod bound;
mod refused;
mod support;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Tensor};
use instep::{Clip, Layout, LrSchedule, Mode, Moments, Precision, Solo, Stepper, TensorId};
use instep_burn::{Config, FusedOptimizer};

use bound::Element;
use support::{Net, bits, copied, device, values};

fn sgd() -> instep::Sgd {
    instep::Sgd { lr: 1.0, ..Default::default() }
}

fn adamw() -> instep::AdamW {
    // burn keeps these in f32.
    let [beta1, beta2, eps, weight_decay] = [0.9f32, 0.999, 1e-5, 0.05].map(f64::from);
    instep::AdamW { betas: (beta1, beta2), eps, weight_decay, ..Default::default() }
}

/// Both optimizers get the gradients of one training. The learning rate changes. In some steps, including the first,
/// one parameter has no gradient. Each parameter must differ from the f64 value by at most the bound on f32's rounding.
#[test]
fn a_training_has_the_parameters_of_burn_within_the_rounding_of_f32() {
    let instep::AdamW { betas, eps, weight_decay, .. } = adamw();
    let rule = bound::AdamW { betas, eps, weight_decay, has_f32_powers: true };
    let mut ours = Net::new();
    let mut theirs = ours.clone();
    let elements = |values: Vec<f32>| values.into_iter().map(|value| Element::new(value, rule)).collect();
    let mut exact: Vec<Vec<Element>> = values(&ours).into_iter().map(elements).collect();
    let mut counts = vec![0; exact.len()];

    let mut optimizer = FusedOptimizer::new(Config::new(adamw())).expect("an optimizer");
    let mut burns = AdamWConfig::new().with_weight_decay(0.05).init();
    let first = ours.loss().into_scalar::<f32>();
    let mut worst = [0.0f64; 2];
    for step in 1..=200 {
        let lr = if step <= 100 { 0.01 } else { 0.003 };
        let mut grads = ours.grads();
        if step < 5 || step % 7 == 0 {
            let bias = ours.first.bias.as_ref().expect("a bias");
            grads.remove::<1>(bias.id).expect("a gradient");
        }
        let (given, twins) = copied(&ours, &grads);
        ours = optimizer.step(lr, ours, grads);
        theirs = burns.step(lr, theirs, twins);
        for ((elements, given), count) in exact.iter_mut().zip(&given).zip(&mut counts) {
            *count += i32::from(given.is_some());
            for (element, grad) in elements.iter_mut().zip(given.iter().flatten()) {
                element.update(*grad, lr, *count);
            }
        }
        for (worst, values) in worst.iter_mut().zip([values(&ours), values(&theirs)]) {
            for (k, (elements, values)) in exact.iter().zip(values).enumerate() {
                for (element, value) in elements.iter().zip(values) {
                    let share = element.judge(value);
                    assert!(
                        share <= 1.0 || share.is_nan(),
                        "step {step}, parameter {k}: {share} of the bound"
                    );
                    *worst = worst.max(share);
                }
            }
        }
    }
    assert!(ours.loss().into_scalar::<f32>() < first / 2.0, "the loss halves");
    assert!(worst.iter().all(|share| *share > 0.001), "the bound is not vain: {worst:?}");
}

#[test]
fn a_step_has_the_bits_of_a_stepper_clipped_or_not_in_f32_and_8_bits() {
    for (eight_bit, max_norm) in [(false, None), (false, Some(0.05)), (true, None), (true, Some(0.05))] {
        let mut net = Net::new();
        let mut config = Config::new(adamw());
        let start = values(&net);
        let named = start.iter().enumerate();
        let layout =
            named.fold(Layout::builder(), |layout, (k, values)| layout.param(format!("{k}"), values.len()));
        let layout = layout.build().expect("a layout");
        let mut builder = Stepper::builder(&layout, adamw()).mode(Mode::Sequential);
        if eight_bit {
            config = config.eight_bit();
            builder = builder.precision(Precision { moments: Moments::EightBit, ..Precision::F32 });
        }
        if let Some(max_norm) = max_norm {
            config = config.max_norm(max_norm);
            builder = builder.clip(Clip::Global(max_norm));
        }
        let mut stepper = builder.host(Solo::default()).expect("a stepper");
        for (id, values) in layout.ids().zip(&start) {
            stepper.write(TensorId::Param(id), values).expect("a parameter");
        }
        let mut optimizer = FusedOptimizer::new(config).expect("an optimizer");
        let schedule = LrSchedule::cosine(0.02, 20, 0.0);
        for step in 0..20 {
            let grads = net.grads();
            stepper.set_lr(instep::DEFAULT_GROUP, schedule.lr_at(step)).expect("a rate");
            let mut pass = stepper.begin().expect("a pass");
            for (id, grad) in layout.ids().zip(copied(&net, &grads).0) {
                pass.grads().write(id, &grad.expect("a gradient")).expect("a gradient");
                pass.grad_ready(id).expect("a gradient");
            }
            pass.finish().expect("a step");
            net = optimizer.step(schedule.lr_at(step), net, grads);
            assert_eq!(optimizer.decision().map(|decision| decision.clip < 1.0), max_norm.map(|_| true));
        }
        for (id, ours) in layout.ids().zip(bits(&net)) {
            let theirs: Vec<u32> =
                stepper.params().get(id).expect("values").iter().map(|value| value.to_bits()).collect();
            assert!(ours == theirs, "8 bits: {eight_bit}, clip: {max_norm:?}");
        }
    }
}

#[test]
fn a_resumed_training_has_the_bits_of_one_that_went_on() {
    for eight_bit in [false, true] {
        let new = || {
            let config = Config::new(instep::NAdam::default()).max_norm(0.1);
            FusedOptimizer::new(if eight_bit { config.eight_bit() } else { config }).expect("an optimizer")
        };
        let train = |net: Net, optimizer: &mut FusedOptimizer, steps: std::ops::Range<u64>| {
            let schedule = LrSchedule::cosine(0.01, 30, 0.0).warm_up(4, 0.1);
            steps.fold(net, |net, step| {
                let grads = net.grads();
                optimizer.step(schedule.lr_at(step), net, grads)
            })
        };
        let whole = train(Net::new(), &mut new(), 0..30);

        let folder = tempfile::tempdir().expect("a folder");
        let (weights, states) = (folder.path().join("weights.bpk"), folder.path().join("states.bpk"));
        let mut optimizer = new();
        let half = train(Net::new(), &mut optimizer, 0..13);
        optimizer.save(&states).expect("a file");
        half.save_file(&weights).expect("a file");
        let bytes = optimizer.into_bytes().expect("bytes");

        let resumed = Net::new().load_file(&weights);
        let mut optimizer = new().load(&states).expect("states");
        let again = optimizer.into_bytes().expect("bytes");
        assert_eq!(again[..], bytes[..], "states that were loaded are saved again");
        let resumed = train(resumed, &mut optimizer, 13..30);
        assert_eq!(bits(&resumed), bits(&whole), "8 bits: {eight_bit}");
        let mut optimizer = new().from_bytes(bytes).expect("states");
        let resumed = train(Net::new().load_file(&weights), &mut optimizer, 13..30);
        assert_eq!(bits(&resumed), bits(&whole), "8 bits: {eight_bit}");
    }
}

#[test]
fn gradients_are_clipped_by_their_global_norm_and_a_step_with_a_nan_is_skipped() {
    let config = Config::new(sgd()).max_norm(0.5).skip_nonfinite();
    let mut optimizer = FusedOptimizer::new(config).expect("an optimizer");
    let net = Net::new();
    let before = values(&net);
    let grads = net.own_values(1.0);
    let net = optimizer.step(1.0, net, grads);
    let norm = before.iter().flatten().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    let decision = optimizer.decision().expect("a norm");
    assert!((decision.norm - norm).abs() < 1e-12 * norm, "{} for {norm}", decision.norm);
    for (after, before) in values(&net).iter().flatten().zip(before.iter().flatten()) {
        assert!((f64::from(*after) - f64::from(*before) * (1.0 - 0.5 / norm)).abs() < 1e-6);
    }
    let before = bits(&net);
    let grads = net.own_values(f32::NAN);
    let net = optimizer.step(1.0, net, grads);
    assert!(optimizer.decision().expect("a norm").skipped);
    assert_eq!(bits(&net), before);
}

/// Compares addresses: a parameter keeps its address if no other tensor shares its memory.
#[test]
fn parameters_are_stepped_where_they_lie_and_clones_keep_their_values() {
    struct Addresses(Vec<usize>);
    impl ModuleMapper for Addresses {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, tensor, mapper) = param.consume();
            let data = tensor.inner().into_data();
            self.0.push(data.as_slice::<f32>().expect("f32").as_ptr().addr());
            let tensor = Tensor::from_data(data, (&burn::tensor::Device::flex(), DType::F32));
            Param::from_mapped_value(id, tensor.autodiff().require_grad(), mapper)
        }
    }
    let addresses = |net: Net| {
        let mut addresses = Addresses(Vec::new());
        (net.map(&mut addresses), addresses.0)
    };
    let mut optimizer = FusedOptimizer::new(Config::new(sgd())).expect("an optimizer");
    let net = Net::new();
    let grads = net.grads();
    let (net, before) = addresses(net);
    let (net, after) = addresses(optimizer.step(0.1, net, grads));
    assert_eq!(after, before);

    let (clone, kept) = (net.clone(), bits(&net));
    let grads = net.grads();
    let net = optimizer.step(0.1, net, grads);
    assert_ne!(bits(&net), kept);
    assert_eq!(bits(&clone), kept);
}

#[test]
fn a_parameter_keeps_whether_it_is_trained_and_other_types_stay() {
    let mut net = Net::new();
    let frozen = net.first.weight.val().detach();
    net.first.weight = Param::from_tensor(frozen).set_require_grad(false);
    let narrow = net.second.weight.val().cast(DType::BF16).detach();
    net.second.weight = Param::from_tensor(narrow).set_require_grad(false);
    let trained = |net: &Net| {
        let layers = [&net.first, &net.second];
        layers.map(|layer| {
            (layer.weight.is_require_grad(), layer.bias.as_ref().map(|bias| bias.is_require_grad()))
        })
    };
    let before = trained(&net);
    assert_eq!(before, [(false, Some(true)), (false, Some(true))]);
    let mut optimizer = FusedOptimizer::new(Config::new(sgd())).expect("an optimizer");
    let mut grads = burn::optim::GradientsParams::new();
    let bias = net.first.bias.as_ref().expect("a bias");
    let (id, old) = (bias.id, bias.val().inner());
    grads.register(id, old.clone());
    let (frozen, narrow) = (net.first.weight.val().to_data(), net.second.weight.val().to_data());
    let net = optimizer.step(1.0, net, grads);
    assert_eq!(trained(&net), before);
    assert_eq!(net.first.weight.val().to_data(), frozen);
    assert_eq!(net.second.weight.val().to_data(), narrow);
    let bias = net.first.bias.as_ref().expect("a bias").val();
    assert_eq!(bias.device(), device());
    assert_eq!(bias.to_data(), (old.clone() - old).to_data());
}
