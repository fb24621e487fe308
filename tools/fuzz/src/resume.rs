//! `instep replay --grads`, with pairs of configuration and checkpoint; the gradients are never broken.
//!
//! Two of three broken checkpoints get true checksums again, because otherwise nothing would pass the checksums. A
//! refused input must have written nothing, and a written file must be a checkpoint that the next replay accepts.

use std::collections::HashMap;
use std::io::Cursor;

use instep::checkpoint::{self, Extras, Scalar};
use instep::optim::Optimizer;
use instep::{
    AdamW, DType, Layout, Master, Moments, NAdam, Precision, Rounding, Sgd, Solo, Stepper, StepperBuilder,
};
use instep_cli::replay::replay_checkpoint;
use rand::Rng;
use rand::rngs::SmallRng;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};

use crate::checkpoint::make_checksums_true;
use crate::replay::options;
use crate::seeds::Pair;
use crate::{Subject, mutate};

const PARAMS: [(&str, usize); 4] = [("a", 3), ("layer.0.b", 10), ("c", 1), ("none", 0)];

const GROUPS: &str = r#""groups":[{"params":["c","a"]},{"params":["none","layer.0.b"],"lr":0.5}]"#;

pub(crate) struct Resume {
    gradients: Vec<u8>,
    seeds: Vec<Pair>,
}

impl Resume {
    pub(crate) fn new() -> instep::Result<Resume> {
        let bf16 = Precision { param: DType::BF16, master: Master::F32, ..Precision::F32 };
        let rounding = Rounding::Stochastic { seed: 7 };
        let narrow = Precision { master: Master::Remainder8, moments: Moments::EightBit, rounding, ..bf16 };
        let narrow_words = r#""dtypes":{"param":"bf16","master":"remainder8","moments":"8bit",
"rounding":"stochastic","seed":7},"world_size":8"#;
        let momentum = Sgd { momentum: 0.9, ..Sgd::default() };
        let sgd = GROUPS
            .replace("]}", r#"],"momentum":0.9}"#)
            .replace(r#""lr":0.5}"#, r#""lr":0.5,"momentum":0.9}"#);
        let seeds = vec![
            seed(AdamW::default(), Precision::F32, &format!(r#"{{"optimizer":"adamw",{GROUPS}}}"#))?,
            seed(
                AdamW::default(),
                bf16,
                &format!(r#"{{"optimizer":"adamw","dtypes":{{"param":"bf16","master":"f32"}},{GROUPS}}}"#),
            )?,
            seed(AdamW::default(), narrow, &format!(r#"{{"optimizer":"adamw",{narrow_words},{GROUPS}}}"#))?,
            seed(NAdam::default(), Precision::F32, &format!(r#"{{"optimizer":"nadam",{GROUPS}}}"#))?,
            seed(momentum, Precision::F32, &format!(r#"{{"optimizer":"sgd","skip_nonfinite":true,{sgd}}}"#))?,
        ];
        Ok(Resume { gradients: gradients(), seeds })
    }
}

impl Subject for Resume {
    fn seeds(&mut self) -> Vec<Pair> {
        self.seeds.clone()
    }

    fn break_it(&self, pair: &mut Pair, others: &[Pair], random: &mut SmallRng) {
        mutate::mutate(pair, others, random);
        if !random.random_ratio(1, 3) {
            make_checksums_true(&mut pair.input);
        }
    }

    fn attempt(&mut self, pair: &Pair, number: u64) -> Result<bool, String> {
        let replay = |input: &[u8]| {
            let mut out = Vec::new();
            let gradients = Cursor::new(&self.gradients);
            let replayed =
                replay_checkpoint(&pair.config, Cursor::new(input), gradients, &options(number), &mut out);
            (replayed, out)
        };
        let (replayed, out) = replay(&pair.input);
        if replayed.is_err() {
            let whole = out.is_empty();
            return if whole {
                Ok(false)
            } else {
                Err("something was written, and then it was refused".into())
            };
        }
        if let Err(error) = SafeTensors::deserialize(&out) {
            return Err(format!("the output is broken: {error}"));
        }
        match replay(&out).0 {
            Ok(()) => Ok(true),
            // The next pass is one too many.
            Err(error) if error.to_string().contains("below 2^63") => Ok(true),
            Err(error) => Err(format!("what was written is refused: {error}")),
        }
    }
}

/// Returns a configuration and a checkpoint from which it resumes.
fn seed(
    optimizer: impl Optimizer + Clone + 'static,
    precision: Precision,
    config: &str,
) -> instep::Result<Pair> {
    let builder = PARAMS.iter().fold(Layout::builder(), |builder, (name, len)| builder.param(*name, *len));
    let layout = builder.build()?;
    let builder: StepperBuilder<'_> = Stepper::builder(&layout, optimizer).precision(precision);
    let mut stepper = builder.host(Solo::default())?;
    stepper.fill_params(|name, values| values.fill(name.len() as f32))?;
    stepper.begin()?.finish()?;
    let mut extras = Extras::default();
    extras.scalars.insert("epoch".into(), Scalar::U64(3));
    let mut input = Vec::new();
    checkpoint::write_with(&stepper, &extras, &mut input)?;
    Ok(Pair { config: config.as_bytes().to_vec(), input })
}

/// Returns one pass of ones.
fn gradients() -> Vec<u8> {
    let ones: Vec<u8> = [1f32; 10].iter().flat_map(|one| one.to_le_bytes()).collect();
    let views = PARAMS.iter().map(|(name, len)| {
        TensorView::new(Dtype::F32, vec![*len], &ones[..4 * len]).map(|view| (format!("grad.0.{name}"), view))
    });
    let file = views.collect::<Result<Vec<_>, _>>().and_then(|views| serialize(views, None::<HashMap<_, _>>));
    match file {
        Ok(file) => file,
        Err(error) => panic!("the gradients are no valid file: {error}"),
    }
}
