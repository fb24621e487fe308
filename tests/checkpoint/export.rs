//! A file of parameters only: their names, their shapes and types, and the stored bits.
//!
//! The `safetensors` crate, which candle and PyTorch use, reads the files.

use std::path::Path;

use instep::checkpoint::safetensors::Dtype as Stored;
use instep::checkpoint::{self, Export};
use instep::{AdamW, DType, Error, Layout, Master, Precision, Solo, Stepper};
use safetensors::{Dtype, SafeTensors};

use crate::checkpoint::refusals::{f32s, file};
use crate::support::stored::{Stored as Values, dyadic, stored_param};
use crate::support::{Options, paint_params, pass};

const BF16: Precision =
    Precision { param: DType::BF16, grad: DType::BF16, master: Master::Remainder16, ..Precision::F32 };

fn layout() -> Layout {
    let layout =
        Layout::builder().param("linear.weight", 600).shape([20, 30]).param("frozen", 3).param("empty", 0);
    let layout = layout
        .param("norm.weight", 30)
        .in_group("norms")
        .param("half", 2)
        .dtype(DType::F16)
        .in_group("norms");
    layout.build().unwrap()
}

/// Makes three passes in three types, with averages.
fn trained(layout: &Layout) -> Stepper {
    let builder = Stepper::builder(layout, AdamW { lr: 0.01, ..AdamW::default() }).ema(0.75);
    let builder = builder.precision(BF16).group_precision("norms", Precision::F32);
    let mut stepper = builder.host(Solo::default()).unwrap();
    paint_params(&mut stepper);
    stepper.set_frozen(layout.id("frozen").unwrap(), true).unwrap();
    for step in 0..3 {
        pass(&mut stepper, &Options::default(), |param, values| {
            values.iter_mut().enumerate().for_each(|(k, g)| *g = dyadic(step, 0, param, k));
            param != 1
        })
        .unwrap();
    }
    stepper
}

/// Returns the values of a tensor as f32, which is exact.
fn floats(dtype: Dtype, bytes: &[u8]) -> Vec<u32> {
    let two = || bytes.as_chunks::<2>().0.iter().copied();
    match dtype {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect(),
        Dtype::BF16 => two().map(|bytes| half::bf16::from_le_bytes(bytes).to_f32().to_bits()).collect(),
        Dtype::F16 => two().map(|bytes| half::f16::from_le_bytes(bytes).to_f32().to_bits()).collect(),
        other => panic!("{other:?}"),
    }
}

fn exported(stepper: &Stepper, values: Export, path: &Path) -> Vec<(String, Dtype, Vec<usize>, Vec<u32>)> {
    checkpoint::export(stepper, values, path).unwrap();
    let bytes = std::fs::read(path).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |id| {
        let name = &stepper.layout().parameter(id).unwrap().name;
        let tensor = read.tensor(name).unwrap();
        let dtype = tensor.dtype();
        (name.clone(), dtype, tensor.shape().to_vec(), floats(dtype, tensor.data()))
    };
    assert_eq!(read.len(), stepper.layout().ids().len());
    stepper.layout().ids().map(tensor).collect()
}

#[test]
fn each_parameter_is_exported_as_it_is_stored_or_as_its_f32_value_or_its_average() {
    let (layout, folder) = (layout(), tempfile::tempdir().unwrap());
    let (stepper, path) = (trained(&layout), folder.path().join("model.safetensors"));
    let stored = exported(&stepper, Export::default(), &path);
    let types: Vec<_> = stored.iter().map(|(_, dtype, shape, _)| (*dtype, shape.clone())).collect();
    assert_eq!(types[0], (Dtype::BF16, vec![20, 30]));
    assert_eq!(types[2], (Dtype::BF16, vec![0]));
    assert_eq!([&types[3], &types[4]], [&(Dtype::F32, vec![30]), &(Dtype::F16, vec![2])]);
    let wide = exported(&stepper, Export { f32: true, ..Export::default() }, &path);
    let averages = exported(&stepper, Export { averages: true, f32: true }, &path);
    let narrow = exported(&stepper, Export { averages: true, f32: false }, &path);
    for (k, id) in layout.ids().enumerate() {
        let mut values = vec![0.0; layout.parameter(id).unwrap().len as usize];
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
        let own = stepper.precision_of(id).unwrap().param;
        assert_eq!(stored[k].3, stored_param(&stepper, id, own).unwrap(), "{}", stored[k].0);
        stepper.read(id, &mut values).unwrap();
        assert_eq!((wide[k].1, &wide[k].3), (Dtype::F32, &bits(&values)));
        let is_updated = stepper.step_count(id).unwrap() > 0;
        if is_updated {
            stepper.read(id.ema(), &mut values).unwrap();
        }
        assert_eq!((averages[k].1, &averages[k].3), (Dtype::F32, &bits(&values)));
        if is_updated {
            let rounded: Vec<f32> = values.iter().map(|value| own.round(*value)).collect();
            assert_eq!((narrow[k].1, &narrow[k].3), (stored[k].1, &bits(&rounded)));
        } else {
            assert_eq!(narrow[k].3, stored[k].3, "a parameter without an update stands for itself");
        }
    }
    // The remainders are more than the parameters.
    assert_ne!(wide[0].3, stored[0].3);
}

#[test]
fn exported_parameters_come_back_and_leave_states_and_counts() {
    let (layout, folder) = (layout(), tempfile::tempdir().unwrap());
    let (stepper, path) = (trained(&layout), folder.path().join("model.safetensors"));
    checkpoint::export(&stepper, Export { f32: true, ..Export::default() }, &path).unwrap();
    let mut other = trained(&layout);
    for id in layout.ids() {
        let len = layout.parameter(id).unwrap().len as usize;
        other.write(id, &vec![7.0; len]).unwrap();
        other.write(id.ema(), &vec![9.0; len]).unwrap();
    }
    checkpoint::import_params(&mut other, std::fs::File::open(&path).unwrap()).unwrap();
    let (ours, theirs) = (Values::of(&stepper).unwrap(), Values::of(&other).unwrap());
    for (a, b) in ours.params.iter().zip(&theirs.params) {
        for ((name, a), (_, b)) in a.iter().zip(b).filter(|((name, _), _)| name != "average") {
            assert_eq!(a, b, "{name}");
        }
        assert_eq!(b[0].1, b.iter().find(|(name, _)| name == "average").unwrap().1, "averages begin anew");
    }
}

#[test]
fn a_plain_file_must_hold_the_parameters_and_nothing_else() {
    let layout = Layout::builder().param("a", 2).param("b", 1).build().unwrap();
    let mut stepper = Stepper::host(&layout, AdamW::default(), Solo::default()).unwrap();
    let a = ("a", Stored::F32, &[2u64][..], f32s(&[1.0, 2.0]));
    let b = ("b", Stored::F32, &[1u64][..], f32s(&[3.0]));
    let before = Values::of(&stepper).unwrap();
    let cases = [
        (vec![a.clone()], "b", "missing"),
        (
            vec![a.clone(), b.clone(), ("c", b.1, b.2, b.3.clone())],
            "c",
            "belongs to no parameter; use one of a, b",
        ),
        (vec![a.clone(), ("b", Stored::F32, &[2][..], f32s(&[1.0, 2.0]))], "b", "has 2 elements"),
        (vec![a, ("b", Stored::U64, &[1][..], vec![0; 8])], "b", "has dtype U64"),
    ];
    for (tensors, name, wrong) in cases {
        let source = std::io::Cursor::new(file(&tensors, &[]));
        let error = checkpoint::import_params(&mut stepper, source).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, Error::Checkpoint(_)) && text.contains(name) && text.contains(wrong),
            "{text}"
        );
        assert_eq!(Values::of(&stepper).unwrap(), before);
    }
    let folder = tempfile::tempdir().unwrap();
    let averages = Export { averages: true, ..Export::default() };
    let refused = checkpoint::export(&stepper, averages, folder.path().join("a")).unwrap_err().to_string();
    assert!(refused.contains("moving averages: this stepper keeps none; build it with"), "{refused}");
    let named = Layout::builder().param("__metadata__", 1).build().unwrap();
    let stepper = Stepper::host(&named, AdamW::default(), Solo::default()).unwrap();
    let refused = checkpoint::export(&stepper, Export::default(), folder.path().join("a")).unwrap_err();
    assert!(matches!(&refused, Error::Layout(why) if why.thing == "`__metadata__`"), "{refused}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a refused export leaves no file");
}
