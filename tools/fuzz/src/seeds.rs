//! Valid pairs of configuration and input. They are small, so that a mutation usually hits something that matters.
//!
//! Together they have every key, every kind of tensor and every state. All pairs must stay valid: `main` checks each
//! before it breaks it.

use std::collections::HashMap;

use instep::optim::{ALL, Descriptor, Optimizer};
use safetensors::tensor::{Dtype, TensorView, serialize};
use safetensors::{SafeTensorError, SafeTensors};

/// A configuration and an input.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) config: Vec<u8>,
    pub(crate) input: Vec<u8>,
}

const SGD: &str = r#"{"optimizer":"sgd","world_size":8,"groups":[{"params":["a","layer.0.b"],"lr":0.1,"momentum":0.9,
"dampening":0.0,"weight_decay":0.01,"nesterov":true,"maximize":false},{"params":["c"]}]}"#;

const ADAM: &str = r#"{"optimizer":"adam","clip":{"global":1.5},"loss_scale":64,"skip_nonfinite":true,"groups":[
{"params":["a"],"lr":0.001,"betas":[0.9,0.95],"eps":1e-8,"weight_decay":0.1,"amsgrad":true,"maximize":true},
{"params":["layer.0.b","c"]}]}"#;

const ADAMW: &str = r#"{"optimizer":"adamw","clip":null,"groups":[{"params":["c","a","layer.0.b"]}]}"#;

const RMSPROP: &str = r#"{"optimizer":"rmsprop","groups":[{"params":["a"],"alpha":0.9,"momentum":0.5},
{"params":["layer.0.b","c"],"centered":true}]}"#;

const ADAGRAD: &str = r#"{"optimizer":"adagrad","groups":[{"params":["a","layer.0.b","c"],"lr_decay":0.1,
"initial_accumulator_value":0.5}]}"#;

const ADADELTA: &str = r#"{"optimizer":"adadelta","lr_multipliers":{"a":0.5,"c":0},
"groups":[{"params":["a","layer.0.b","c"],"rho":0.5}]}"#;

const ADAMAX: &str =
    r#"{"optimizer":"adamax","groups":[{"params":["a","layer.0.b","c"],"betas":[0.5,0.9]}]}"#;

const REMAINDER: &str = r#"{"optimizer":"adamw","copy":"f16","ema":0.9,"dtypes":{"param":"bf16","grad":"bf16",
"master":"remainder8","moments":"8bit","rounding":"stochastic","seed":7},"groups":[{"params":["a","layer.0.b","c"]}]}"#;

const MASTER: &str = r#"{"optimizer":"sgd","frozen":["a"],"ema":0.5,"copy":"f32","dtypes":{"param":"f16","grad":"f16",
"master":"f32","moments":"bf16"},"groups":[{"params":["a","layer.0.b","c"],"momentum":0.9}]}"#;

const NADAM: &str = r#"{"optimizer":"nadam","groups":[{"params":["a"],"momentum_decay":0.004,"weight_decay":0.1,
"decoupled_weight_decay":true},{"params":["layer.0.b","c"]}]}"#;

const RPROP: &str = r#"{"optimizer":"rprop","groups":[{"params":["c","a","layer.0.b"],"etas":[0.5,1.2],
"step_sizes":[1e-6,50]}]}"#;

/// Returns all pairs.
pub(crate) fn pairs() -> Vec<Pair> {
    let buffer = ["state.a.momentum_buffer"];
    let moments = ["state.a.exp_avg", "state.a.exp_avg_sq", "state.a.max_exp_avg_sq"];
    let mut pairs = vec![
        pair(SGD, &[], &[], 2),
        pair(SGD, &buffer, &[("step.a", "7"), ("note", "made by hand")], 1),
        pair(ADAM, &[], &[], 1),
        pair(ADAM, &moments, &[("step.a", "12345678901234567"), ("step.c", "0")], 2),
        pair(ADAMW, &moments[..2], &[("step.a", "1")], 11),
        pair(ADAMW, &[], &[], 0),
        pair(RMSPROP, &["state.a.square_avg", "state.a.momentum_buffer"], &[("step.a", "3")], 1),
        pair(ADAGRAD, &["state.a.sum"], &[("step.a", "3")], 1),
        pair(ADADELTA, &["state.a.square_avg", "state.a.acc_delta"], &[("step.a", "3")], 1),
        pair(ADAMAX, &["state.a.exp_avg", "state.a.exp_inf"], &[("step.a", "3")], 1),
        retyped(pair(REMAINDER, &[], &[], 1), Dtype::BF16, &["master.a"]),
        retyped(
            pair(REMAINDER, &moments[..2], &[("step.a", "3")], 1),
            Dtype::BF16,
            &["master.a", "copy.a", "ema.a"],
        ),
        retyped(pair(MASTER, &buffer, &[("step.a", "3")], 0), Dtype::F16, &["master.a", "copy.a", "ema.a"]),
        pair(NADAM, &moments[..2], &[("step.a", "3"), ("mu_product.a", "0.125")], 2),
        pair(RPROP, &["state.a.prev", "state.a.step_size"], &[("step.a", "1")], 1),
        many(),
    ];
    pairs.extend(ALL.iter().map(|descriptor| of(descriptor)));
    pairs
}

/// Returns a pair with every option of an optimizer at its default, and every state that the optimizer keeps with
/// these.
fn of(descriptor: &Descriptor) -> Pair {
    let options = descriptor.fields.iter().map(|field| format!(r#","{}":{}"#, field.name, field.default));
    let (name, options) = (descriptor.key(), options.collect::<String>());
    let config =
        format!(r#"{{"optimizer":"{name}","groups":[{{"params":["a","layer.0.b","c"]{options}}}]}}"#);
    let states: Vec<String> =
        descriptor.build().state_names().iter().map(|state| format!("state.a.{state}")).collect();
    let states: Vec<&str> = states.iter().map(String::as_str).collect();
    let mut metadata = vec![("step.a".to_owned(), "3")];
    metadata.extend(descriptor.carried.map(|carried| (format!("{carried}.a"), "0.125")));
    let metadata: Vec<(&str, &str)> = metadata.iter().map(|(key, value)| (key.as_str(), *value)).collect();
    pair(&config, &states, &metadata, 1)
}

/// Returns the same file with zeros of this type, and more tensors in addition to `param.a`.
fn retyped(mut pair: Pair, dtype: Dtype, more: &[&str]) -> Pair {
    let data = [0; 64];
    let view = |shape: &[usize]| {
        let bytes = dtype.bitsize() / 8 * shape.iter().product::<usize>();
        TensorView::new(dtype, shape.to_vec(), &data[..bytes])
    };
    let retyped = SafeTensors::deserialize(&pair.input).and_then(|file| {
        let (_, header) = SafeTensors::read_metadata(&pair.input)?;
        let own = file.iter().map(|(name, tensor)| Ok((name, view(tensor.shape())?)));
        let more = more.iter().map(|name| Ok((*name, view(&[3])?)));
        let views = own.chain(more).collect::<Result<Vec<_>, SafeTensorError>>()?;
        serialize(views, header.metadata().clone())
    });
    match retyped {
        Ok(input) => pair.input = input,
        Err(error) => panic!("a seed is no valid file: {error}"),
    }
    pair
}

/// Returns the pair that needs the most memory per byte of file: one element each, and every state.
fn many() -> Pair {
    let names: Vec<String> = (0..40).map(|k| format!("{k}")).collect();
    let config = format!(r#"{{"optimizer":"adam","groups":[{{"params":{names:?},"amsgrad":true}}]}}"#);
    let params: Vec<(&str, &[usize])> = names.iter().map(|name| (name.as_str(), &[][..])).collect();
    file(&config, &params, &[], &[], 1)
}

fn pair(config: &str, states_of_a: &[&str], metadata: &[(&str, &str)], passes: usize) -> Pair {
    file(config, &[("a", &[3]), ("layer.0.b", &[2, 0, 5]), ("c", &[])], states_of_a, metadata, passes)
}

fn file(
    config: &str,
    params: &[(&str, &[usize])],
    states_of_a: &[&str],
    metadata: &[(&str, &str)],
    passes: usize,
) -> Pair {
    let mut tensors: Vec<(String, &[usize])> = Vec::new();
    for &(name, shape) in params {
        tensors.push((format!("param.{name}"), shape));
        tensors.extend((0..passes).map(|pass| (format!("grad.{pass}.{name}"), shape)));
    }
    tensors.extend(states_of_a.iter().map(|name| (String::from(*name), &[3usize][..])));
    let data: Vec<u8> = (0..12u8).map(|k| k.wrapping_mul(37)).collect();
    let views = tensors.iter().map(|(name, shape)| {
        let bytes = &data[..4 * shape.iter().product::<usize>()];
        TensorView::new(Dtype::F32, shape.to_vec(), bytes).map(|view| (name, view))
    });
    let metadata: HashMap<String, String> =
        metadata.iter().map(|(key, value)| (String::from(*key), String::from(*value))).collect();
    let views = views.collect::<Result<Vec<_>, _>>();
    let input = views.and_then(|views| serialize(views, (!metadata.is_empty()).then_some(metadata)));
    match input {
        Ok(input) => Pair { config: config.as_bytes().to_vec(), input },
        Err(error) => panic!("a seed is no valid file: {error}"),
    }
}
