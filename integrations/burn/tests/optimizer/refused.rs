//! Calls that are refused: each error names what is wrong, and the module is returned unchanged.
//!
//! The same call succeeds once the cause of the error is gone.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::{Module, Param, ParamGroup};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};
use instep_burn::{Config, FusedOptimizer, Refused};

use crate::support::{Net, bits};

fn optimizer() -> FusedOptimizer {
    FusedOptimizer::new(Config::new(instep::AdamW::default()).max_norm(1.0)).expect("an optimizer")
}

/// Expects a refusal, and returns the module. Its bits must be unchanged.
#[track_caller]
fn refused(
    optimizer: &mut FusedOptimizer,
    lr: impl Into<ModuleLearningRate>,
    net: Net,
    grads: GradientsParams,
    part: &str,
) -> Net {
    let before = bits(&net);
    match optimizer.try_step(lr, net, grads) {
        Ok(_) => panic!("not refused: {part}"),
        Err(Refused { module, error }) => {
            assert!(error.to_string().contains(part), "{error}");
            assert_eq!(bits(&module), before);
            module
        }
    }
}

#[test]
fn a_refused_step_gives_the_module_back_and_can_be_repeated() {
    let mut disturbed = optimizer();
    let net = Net::new();
    let grads = net.grads();
    let net = refused(&mut disturbed, f64::NAN, net, grads, "lr = NaN");

    let id = net.second.weight.id;
    let mut grads = net.grads();
    grads.register(id, Tensor::<2>::zeros([33, 2], &burn::tensor::Device::flex()));
    let net = refused(&mut disturbed, 0.1, net, grads, "F32 [33, 1] with a gradient F32 [33, 2]");
    let mut grads = net.grads();
    grads.register(id, Tensor::<2>::zeros([33, 1], &burn::tensor::Device::flex()).cast(DType::BF16));
    let net = refused(&mut disturbed, 0.1, net, grads, "with a gradient BF16 [33, 1]");

    let base = ConstantLr::from(0.1);
    let group = ParamGroup::from_path("second.weight");
    let mut rates = ModuleLrScheduler::new(base).with_group(group, ConstantLr::from(0.2));
    let grads = net.grads();
    let net = refused(
        &mut disturbed,
        rates.step(),
        net,
        grads,
        "has the learning rate 0.2, where another one has 0.1",
    );

    let fresh = Net::new().load_record(net.clone().into_record());
    let grads = fresh.grads();
    let fresh = optimizer().step(0.1, fresh, grads);
    let grads = net.grads();
    let net = disturbed.step(0.1, net, grads);
    assert_eq!(bits(&net), bits(&fresh));

    let mut other = net.clone();
    other.first.weight = Param::from_tensor(other.first.weight.val());
    let grads = other.grads();
    refused(&mut disturbed, 0.1, other, grads, "module: has other f32 parameters than in the first step");
}

#[test]
fn step_panics_with_the_error_of_try_step() {
    let net = Net::new();
    let grads = net.grads();
    let mut optimizer = optimizer();
    let payload =
        catch_unwind(AssertUnwindSafe(|| optimizer.step(f64::NAN, net, grads))).expect_err("a panic");
    assert!(payload.downcast_ref::<String>().expect("a message").starts_with("lr = NaN"));
}

#[test]
fn wrong_options_are_refused_when_the_optimizer_is_made() {
    let refusal = |config: Config| FusedOptimizer::new(config).map(drop).expect_err("a refusal").to_string();
    let wrong = Config::new(instep::AdamW { lr: -1.0, ..Default::default() });
    assert!(refusal(wrong).starts_with("lr = -1"));
    assert!(refusal(Config::new(instep::AdamW::default()).max_norm(0.0)).starts_with("max_norm = 0"));
    assert!(refusal(Config::new(instep::AdamW::default()).threads(0)).starts_with("threads = 0"));
}

#[test]
fn states_of_another_module_or_optimizer_are_refused_by_name() {
    let train = |mut optimizer: FusedOptimizer, net: Net| {
        let grads = net.grads();
        let net = optimizer.step(0.1, net, grads);
        (optimizer.into_bytes().expect("bytes"), net)
    };
    let (bytes, net) = train(optimizer(), Net::new());
    let missing = format!("state `{}.exp_avg`: missing", net.first.weight.id.val());

    let stranger = Net::new();
    let grads = stranger.grads();
    let of_stranger = format!("state `{}.exp_avg`: missing", stranger.first.weight.id.val());
    let mut loaded = optimizer().from_bytes(bytes.clone()).expect("a record");
    refused(&mut loaded, 0.1, stranger, grads, &of_stranger);

    let eight =
        || FusedOptimizer::new(Config::new(instep::AdamW::default()).eight_bit()).expect("an optimizer");
    let mut loaded = eight().from_bytes(bytes.clone()).expect("a record");
    let grads = net.grads();
    let net = refused(&mut loaded, 0.1, net, grads, ".exp_avg.scales`: missing");
    let lion = FusedOptimizer::new(Config::new(instep::Lion::default())).expect("an optimizer");
    let mut loaded = lion.from_bytes(bytes.clone()).expect("a record");
    let grads = net.grads();
    let net = refused(&mut loaded, 0.1, net, grads, ".exp_avg_sq`: no state of this model and optimizer");

    let sgd = FusedOptimizer::new(Config::new(instep::Sgd::default())).expect("an optimizer");
    let (none, net) = train(sgd, net);
    let mut loaded = optimizer().from_bytes(none).expect("a record");
    let grads = net.grads();
    refused(&mut loaded, 0.1, net, grads, &missing);

    let error = optimizer().load("no/such/file").map(drop).expect_err("a refusal");
    assert!(error.to_string().starts_with("record: "), "{error}");
}
