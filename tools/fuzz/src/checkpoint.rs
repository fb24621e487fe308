//! Checkpoints for one stepper; a refused checkpoint must not change it.
//!
//! Two of three broken files get true checksums again, because otherwise nothing would pass the checksums. The whole
//! state of the stepper is compared after every input: as a checkpoint, byte by byte.

use std::collections::{BTreeMap, HashMap};
use std::io::Cursor;

use instep::checkpoint::safetensors::{Tensor, open};
use instep::checkpoint::{self, Extras, Scalar};
use instep::{Adam, DType, Layout, Master, Moments, Precision, Solo, Stepper};
use rand::Rng;
use rand::rngs::SmallRng;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};

use crate::seeds::Pair;
use crate::{Subject, mutate};

pub(crate) struct Checkpoint {
    stepper: Stepper,
    /// The stepper's checkpoint before every input.
    before: Vec<u8>,
}

impl Checkpoint {
    pub(crate) fn new() -> instep::Result<Checkpoint> {
        let layout =
            Layout::builder().param("a", 3).param("layer.0.b", 10).param("c", 1).param("none", 0).build()?;
        let precision = Precision {
            param: DType::BF16,
            master: Master::Remainder16,
            moments: Moments::BF16,
            ..Precision::default()
        };
        let builder = Stepper::builder(&layout, Adam { amsgrad: true, ..Adam::default() });
        let mut stepper = builder.precision(precision).ema(0.5).host(Solo::default())?;
        stepper.fill_params(|name, values| values.fill(name.len() as f32))?;
        stepper.set_step_count(layout.id("a")?, 5)?;
        let before = written(&stepper, &Extras::default())?;
        Ok(Checkpoint { stepper, before })
    }
}

impl Subject for Checkpoint {
    fn seeds(&mut self) -> Vec<Pair> {
        let scalars: BTreeMap<String, Scalar> =
            [("epoch".to_owned(), Scalar::U64(3)), ("random.draw".to_owned(), Scalar::F64(65536.0))].into();
        let extras = Extras { scalars, metadata: [("note".to_owned(), "by hand".to_owned())].into() };
        let with_extras = written(&self.stepper, &extras).unwrap_or_default();
        let inputs =
            [self.before.clone(), with_extras, torch(Dtype::F32), torch(Dtype::BF16), torch(Dtype::F64)];
        inputs.map(|input| Pair { config: Vec::new(), input }).into()
    }

    fn break_it(&self, pair: &mut Pair, others: &[Pair], random: &mut SmallRng) {
        mutate::mutate(pair, others, random);
        if !random.random_ratio(1, 3) {
            make_checksums_true(&mut pair.input);
        }
    }

    fn attempt(&mut self, pair: &Pair, number: u64) -> Result<bool, String> {
        let source = Cursor::new(&pair.input);
        let answer = match number % 2 {
            0 => checkpoint::read(&mut self.stepper, source),
            _ => checkpoint::import(&mut self.stepper, source, None),
        };
        let failed = |error: instep::Error| format!("the stepper is over: {error}");
        let Ok(extras) = answer else {
            let same = written(&self.stepper, &Extras::default()).map_err(failed)? == self.before;
            return if same { Ok(false) } else { Err(format!("a refusal changed something: {answer:?}")) };
        };
        // The header's parser must never be more lenient than the format's.
        if let Err(error) = SafeTensors::deserialize(&pair.input) {
            return Err(format!("the crate refuses what was accepted: {error}"));
        }
        let once = written(&self.stepper, &extras).map_err(failed)?;
        let again = checkpoint::read(&mut self.stepper, Cursor::new(&once));
        let same =
            again.map_err(failed).and_then(|extras| written(&self.stepper, &extras).map_err(failed))? == once;
        checkpoint::read(&mut self.stepper, Cursor::new(&self.before)).map_err(failed)?;
        if same { Ok(true) } else { Err("what was accepted is not what is saved and loaded again".into()) }
    }
}

fn written(stepper: &Stepper, extras: &Extras) -> instep::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    checkpoint::write_with(stepper, extras, &mut bytes).map(|()| bytes)
}

/// Returns a state dict of torch, by number and by name.
fn torch(dtype: Dtype) -> Vec<u8> {
    let shape = |who: &str| if who == "0" { vec![1, 3] } else { vec![10] };
    let data = [0; 80];
    let mut tensors = Vec::new();
    for who in ["0", "layer.0.b"] {
        for state in ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"] {
            tensors.push((format!("state.{who}.{state}"), dtype, shape(who)));
        }
        tensors.push((format!("state.{who}.step"), Dtype::F32, vec![]));
    }
    tensors.push(("param.a".into(), dtype, vec![3]));
    let views = tensors.iter().map(|(name, dtype, shape)| {
        let bytes = &data[..dtype.bitsize() / 8 * shape.iter().product::<usize>()];
        TensorView::new(*dtype, shape.clone(), bytes).map(|view| (name, view))
    });
    let file = views.collect::<Result<Vec<_>, _>>().and_then(|views| serialize(views, None::<HashMap<_, _>>));
    match file {
        Ok(file) => file,
        Err(error) => panic!("a seed is no valid file: {error}"),
    }
}

/// Corrects the checksums, if the header can be read and there is room for them.
pub(crate) fn make_checksums_true(bytes: &mut [u8]) {
    let Ok((header, _)) = open(Cursor::new(&*bytes)) else { return };
    let range = |tensor: &Tensor| tensor.start_bytes() as usize..tensor.end_bytes() as usize;
    let Some(place) = header.tensors.get("crc32").map(range) else { return };
    let others = header.tensors.iter().filter(|(name, tensor)| *name != "crc32" && tensor.elements > 0);
    let mut others: Vec<_> = others.map(|(_, tensor)| range(tensor)).collect();
    others.sort_unstable_by_key(|range| range.start);
    let data = others.into_iter().map(|range| crc32fast::hash(&bytes[range]));
    let all = std::iter::once(header.checksum()).chain(data).flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
    if place.len() == all.len() {
        bytes[place].copy_from_slice(&all);
    }
}
