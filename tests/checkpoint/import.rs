//! States of `torch.optim` are imported from safetensors files: by name or by number, in torch's types, without what
//! torch leaves out.
//!
//! The tests write the files by hand, in torch's form. After every error all bits are compared.

use std::io::Cursor;

use instep::checkpoint::safetensors::Dtype;
use instep::checkpoint::{self, Extras};
use instep::{Adam, AdamW, Error, Layout, ParamId, Result, Sgd, Solo, Stepper, Strategy, in_process};
use safetensors::SafeTensors;

use crate::checkpoint::refusals::{Made, f32s, file};
use crate::checkpoint::round_trip::bytes_of;
use crate::support::reference::Scalar;
use crate::support::tolerance::{U, bounds};
use crate::support::{self, Optim, Options, Outcome, few_optimizers};

fn two() -> Layout {
    Layout::builder().param("layer.0.w", 2).param("b", 1).build().unwrap()
}

fn adam(layout: &Layout) -> Stepper {
    let mut stepper = Stepper::host(layout, Adam::default(), Solo::default()).unwrap();
    support::paint_params(&mut stepper);
    for id in layout.ids() {
        stepper.set_step_count(id, 77).unwrap();
        stepper.view_mut::<f32>(id.state("exp_avg")).unwrap().fill(7.0);
    }
    stepper
}

pub(crate) fn import(
    stepper: &mut Stepper,
    tensors: &[Made],
    order: Option<&[&str]>,
) -> Result<Extras, Error> {
    checkpoint::import(stepper, Cursor::new(file(tensors, &[])), order)
}

/// Returns the tensors that torch would save of the first parameter, under any name.
fn first(avg: &'static str, sq: &'static str, step: &'static str) -> [Made; 3] {
    [
        (step, Dtype::F32, &[], f32s(&[9.0])),
        (avg, Dtype::F32, &[2, 1], f32s(&[0.5, -0.25])),
        (sq, Dtype::F32, &[2, 1], f32s(&[1e-30, f32::MIN_POSITIVE])),
    ]
}

#[test]
fn a_state_comes_by_name_by_number_or_by_a_number_in_a_given_order() {
    let layout = two();
    let by_name = first("state.layer.0.w.exp_avg", "state.layer.0.w.exp_avg_sq", "state.layer.0.w.step");
    let by_number = first("state.0.exp_avg", "state.0.exp_avg_sq", "state.0.step");
    let second = first("state.1.exp_avg", "state.1.exp_avg_sq", "state.1.step");
    let order: &[&str] = &["b", "layer.0.w"];
    for (tensors, order) in
        [(&by_name, None), (&by_number, None), (&second, Some(order)), (&by_name, Some(order))]
    {
        let mut stepper = adam(&layout);
        let before = Outcome::of(&stepper).unwrap();
        import(&mut stepper, tensors, order).unwrap();
        let after = Outcome::of(&stepper).unwrap();
        assert_eq!(after.params, before.params, "parameters that are not in the file stay");
        assert_eq!(after.step_counts, [9, 0]);
        assert_eq!(after.states[0], [vec![0.5, -0.25], vec![1e-30, f32::MIN_POSITIVE]]);
        assert_eq!(after.states[1], [[0.0], [0.0]], "torch has no state before a first update");
    }
}

#[test]
fn narrower_types_widen_exactly_and_counts_may_be_of_any_type() {
    let layout = Layout::builder().param("w", 2).build().unwrap();
    let counts: [(Dtype, &'static [u64], Vec<u8>); 4] = [
        (Dtype::F32, &[], f32s(&[3.0])),
        (Dtype::F64, &[1], 3f64.to_le_bytes().into()),
        (Dtype::I64, &[1, 1], 3i64.to_le_bytes().into()),
        (Dtype::U64, &[], 3u64.to_le_bytes().into()),
    ];
    for (dtype, shape, data) in counts {
        let mut stepper = adam(&layout);
        let tensors: [Made; 4] = [
            ("state.w.step", dtype, shape, data),
            (
                "state.w.exp_avg",
                Dtype::F64,
                &[2],
                [0.1f32, -0.0].map(f64::from).map(f64::to_le_bytes).concat(),
            ),
            ("param.w", Dtype::Bf16, &[2], vec![0x80, 0x3f, 0x01, 0x00]),
            ("state.w.exp_avg_sq", Dtype::F16, &[2], vec![0x00, 0x3c, 0x01, 0x00]),
        ];
        import(&mut stepper, &tensors, None).unwrap();
        let after = Outcome::of(&stepper).unwrap();
        assert_eq!(after.step_counts, [3]);
        support::assert_same_bits(&after.params[0], &[1.0, f32::from_bits(1 << 16)], "BF16");
        support::assert_same_bits(&after.states[0][0], &[0.1, -0.0], "F64");
        support::assert_same_bits(&after.states[0][1], &[1.0, 1.0 / 16_777_216.0], "F16");
    }
}

#[test]
fn a_momentum_buffer_without_a_count_is_no_first_update() {
    let layout = two();
    let sgd = Sgd { lr: 1.0, momentum: 0.5, ..Sgd::default() };
    let mut stepper = Stepper::host(&layout, sgd, Solo::default()).unwrap();
    let buffer: [Made; 1] = [("state.1.momentum_buffer", Dtype::F32, &[1], f32s(&[4.0]))];
    import(&mut stepper, &buffer, None).unwrap();
    let ids: Vec<_> = layout.ids().collect();
    assert_eq!([0, 1].map(|k| stepper.step_count(ids[k]).unwrap()), [0, 1]);
    let mut pass = stepper.begin().unwrap();
    pass.grads().write(ids[0], &[1.0, 1.0]).unwrap();
    pass.grads().write(ids[1], &[1.0]).unwrap();
    pass.finish().unwrap();
    assert_eq!(stepper.view::<f32>(ids[1]).unwrap(), [-3.0]);
    assert_eq!(stepper.view::<f32>(ids[0]).unwrap(), [-1.0, -1.0]);
}

#[test]
fn a_group_need_not_bring_what_only_another_one_keeps() {
    let layout = Layout::builder().param("w", 1).param("b", 1).in_group("plain").build().unwrap();
    let amsgrad = AdamW { amsgrad: true, ..AdamW::default() };
    let builder = Stepper::builder(&layout, amsgrad).group("plain", AdamW::default());
    let mut stepper = builder.host(Solo::default()).unwrap();
    let one = || f32s(&[2.0]);
    let b: [Made; 3] = [
        ("state.b.exp_avg", Dtype::F32, &[1], one()),
        ("state.b.exp_avg_sq", Dtype::F32, &[1], one()),
        ("state.b.step", Dtype::F32, &[], one()),
    ];
    import(&mut stepper, &b, None).unwrap();
    assert_eq!(Outcome::of(&stepper).unwrap().states[1], [[2.0], [2.0], [0.0]]);
    let w = b.map(|(name, dtype, shape, data)| {
        let name: &'static str = Box::leak(name.replace('b', "w").into_boxed_str());
        (name, dtype, shape, data)
    });
    let error = import(&mut stepper, &w, None).unwrap_err().to_string();
    assert!(error.contains("`state.w.max_exp_avg_sq`: missing"), "{error}");
}

#[test]
fn a_checkpoint_can_be_imported_and_is_held_to_its_checksums() {
    let layout = support::layout(&[5, 3]);
    let optim = few_optimizers()[3];
    let source = support::open(&layout, optim, &Options::default());
    let mut bytes = bytes_of(&source, &Extras::default());
    let mut stepper = Options::default().stepper(&layout, optim, Solo::default()).unwrap();
    checkpoint::import(&mut stepper, Cursor::new(&bytes), None).unwrap();
    Outcome::of(&stepper).unwrap().assert_same(&Outcome::of(&source).unwrap(), "imported");
    let at = bytes.len() - 60;
    bytes[at] ^= 1;
    let error = checkpoint::import(&mut stepper, Cursor::new(&bytes), None).unwrap_err();
    assert!(error.to_string().contains("damaged, as its checksum differs"), "{error}");
}

#[test]
fn half_a_state_and_strangers_are_refused_by_name_and_change_nothing() {
    let layout = two();
    let mut stepper = adam(&layout);
    let before = Outcome::of(&stepper).unwrap();
    let fine = first("state.0.exp_avg", "state.0.exp_avg_sq", "state.0.step");
    let but = |at: usize, made: Made| {
        let mut all = fine.to_vec();
        all[at] = made;
        all
    };
    let and = |made: Made| [&fine[..], &[made]].concat();
    let step = |dtype, data| but(0, ("state.0.step", dtype, &[], data));
    let rows = [
        (fine[1..].to_vec(), "`state.layer.0.w.step`: missing"),
        (fine[..2].to_vec(), "`state.layer.0.w.exp_avg_sq`: missing"),
        (fine[..1].to_vec(), "`state.layer.0.w.exp_avg`: missing"),
        (and(("state.layer.0.w.step", Dtype::F32, &[], f32s(&[9.0]))), "given twice"),
        (and(("state.layer.0.w.exp_avg", Dtype::F32, &[2], vec![0; 8])), "given twice"),
        (
            and(("state.2.exp_avg", Dtype::F32, &[2], vec![0; 8])),
            "`state.2.exp_avg`: belongs to no parameter; use one of ",
        ),
        (
            and(("state.00.exp_avg", Dtype::F32, &[2], vec![0; 8])),
            "`state.00.exp_avg`: belongs to no parameter",
        ),
        (and(("param.0", Dtype::F32, &[2], vec![0; 8])), "`param.0`: belongs to no parameter"),
        (and(("state.0.momentum_buffer", Dtype::F32, &[2], vec![0; 8])), "keeps no such state"),
        (and(("layer.0.w", Dtype::F32, &[2], vec![0; 8])), "`layer.0.w`: has no place"),
        (and(("param.b", Dtype::F32, &[2], vec![0; 8])), "has 2 elements, and `b` has 1"),
        (and(("param.b", Dtype::I64, &[1], vec![0; 8])), "I64, not one of real numbers"),
        (and(("param.b", Dtype::F64, &[1], 0.1f64.to_le_bytes().into())), "1e-1, which f32 cannot represent"),
        (step(Dtype::F32, f32s(&[2.5])), "not a whole number"),
        (step(Dtype::F64, (-1f64).to_le_bytes().into()), "not a whole number"),
        (step(Dtype::I64, (-1i64).to_le_bytes().into()), "not a whole number"),
        (step(Dtype::Bf16, vec![0, 0]), "not a whole number"),
        (but(0, ("state.0.step", Dtype::F32, &[2], vec![0; 8])), "instead of 1"),
        (vec![("epoch", Dtype::U64, &[], vec![0; 8])], "neither parameters nor states"),
    ];
    for (tensors, word) in rows {
        let error = import(&mut stepper, &tensors, None).unwrap_err();
        assert!(
            matches!(error, Error::Checkpoint { .. }) && error.to_string().contains(word),
            "{error}, not {word}"
        );
        Outcome::of(&stepper).unwrap().assert_same(&before, word);
    }
    assert!(matches!(import(&mut stepper, &fine, Some(&["x"])), Err(Error::Layout(_))));
    Outcome::of(&stepper).unwrap().assert_same(&before, "an order of strangers");
    import(&mut stepper, &fine, None).unwrap();
}

/// The tensors of torch's file.
struct Torch<'a>(SafeTensors<'a>);

impl Torch<'_> {
    fn values(&self, key: &str) -> Vec<f32> {
        let tensor = self.0.tensor(key).unwrap();
        tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    /// Returns a parameter with its states, as `train` returns them.
    fn tensors(&self, name: &str) -> [Vec<f32>; 3] {
        let state = |state| self.values(&format!("state.{name}.{state}"));
        [self.values(&format!("param.{name}")), state("exp_avg"), state("exp_avg_sq")]
    }
}

fn scalars(tensors: &[Vec<f32>; 3], steps: i32) -> Vec<Scalar> {
    let [param, first, second] = tensors;
    let of =
        |k: usize| Scalar { param: param[k].into(), states: [first[k].into(), second[k].into(), 0.0], steps };
    (0..param.len()).map(of).collect()
}

/// Torch gathers the shards of rows or of flat parameters. `from_fsdp.py` wrote the files, the second one after one
/// more step.
#[test]
fn states_that_torchs_fsdp_kept_in_shards_go_on_in_any_strategy() {
    const SAVED: &[u8] = include_bytes!("from_fsdp.safetensors");
    const NEXT: &[u8] = include_bytes!("from_fsdp_next.safetensors");
    let [saved, next] = [SAVED, NEXT].map(|file| Torch(SafeTensors::deserialize(file).unwrap()));
    let shapes = [("0.weight", &[17, 5][..]), ("0.bias", &[17]), ("2.weight", &[3, 17]), ("2.bias", &[3])];
    let layout = shapes.iter().fold(Layout::builder(), |layout, (name, shape)| {
        layout.param(*name, shape.iter().product()).shape(shape.iter().copied())
    });
    let layout = layout.build().unwrap();
    let adamw = AdamW { lr: 0.01, ..AdamW::default() };
    let tensors = |stepper: &mut Stepper, id: ParamId| -> Result<[Vec<f32>; 3]> {
        let mut all = [(); 3].map(|()| vec![0.0; layout.parameter(id).unwrap().len as usize]);
        let [param, first, second] = &mut all;
        stepper.gather(id, param)?;
        stepper.gather(id.state("exp_avg"), first)?;
        stepper.gather(id.state("exp_avg_sq"), second)?;
        Ok(all)
    };
    let train = |comm, strategy| {
        let mut stepper = Stepper::builder(&layout, adamw).strategy(strategy).host(comm)?;
        checkpoint::import(&mut stepper, Cursor::new(SAVED), None)?;
        for (id, (name, _)) in layout.ids().zip(shapes) {
            assert_eq!(stepper.step_count(id)?, 3);
            assert_eq!(tensors(&mut stepper, id)?, saved.tensors(name), "{name}, {strategy:?}");
        }
        let mut pass = stepper.begin()?;
        for (id, (name, _)) in layout.ids().zip(shapes) {
            pass.write(id.grad(), &next.values(&format!("grad.{name}")))?;
        }
        pass.finish()?;
        layout.ids().map(|id| tensors(&mut stepper, id)).collect::<Result<Vec<_>>>()
    };
    let alone = in_process(1, |comm| train(comm, Strategy::Replicated)).unwrap().swap_remove(0);
    for ((name, _), ours) in shapes.into_iter().zip(&alone) {
        let (start, rule) = (scalars(&saved.tensors(name), 3), Optim::of(adamw).rule());
        let gradients: Vec<f64> = next.values(&format!("grad.{name}")).into_iter().map(f64::from).collect();
        let mut exact = start.clone();
        rule.step(&mut exact, &gradients);
        let bounds = bounds(&rule, &start, &exact, &gradients);
        // Both are f32 programs with the same start, so each is that close to exact arithmetic. Torch rounds twice more
        // what is left of the parameter and of its second moment: the factor (1 - lr * decay, beta2), and the product.
        // Half of the latter's error is in the change.
        let torchs = scalars(&next.tensors(name), 4);
        for (who, got, roundings) in [("torch", torchs, 2.0), ("instep", scalars(ours, 4), 0.0)] {
            for (k, ((got, exact), bound)) in got.iter().zip(&exact).zip(&bounds).enumerate() {
                let mut bound = *bound;
                let (was, error) = (start[k], roundings * U);
                bound.param += error * (was.param.abs() + (exact.param - was.param).abs());
                bound.states[1] += error * was.states[1];
                let is_close = |got: f64, exact: f64, bound: f64| (got - exact).abs() <= bound;
                let is_fine = is_close(got.param, exact.param, bound.param)
                    && (0..2).all(|s| is_close(got.states[s], exact.states[s], bound.states[s]));
                assert!(is_fine, "{who}, {name}[{k}]: {got:?}, not {exact:?}; {bound:?}");
            }
        }
    }
    for strategy in [Strategy::Replicated, Strategy::Zero, Strategy::Fsdp] {
        // The mean of so many equal gradients has their bits.
        for ranks in [2, 4] {
            let trained = in_process(ranks, |comm| train(comm, strategy)).unwrap();
            assert!(trained.iter().all(|tensors| *tensors == alone), "{strategy:?}, {ranks} ranks");
        }
    }
}
