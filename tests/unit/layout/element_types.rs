//! Tests of the element types that a parameter may have beside its group's.
//!
//! Types that no kernel has are refused by name.

use super::*;

#[test]
fn a_type_of_its_own_takes_what_applies_of_the_groups_precision() {
    let stochastic = Rounding::Stochastic { seed: 3 };
    let precision =
        |param, master, moments, rounding| Precision { param, grad: DType::BF16, master, moments, rounding };
    let low = precision(DType::BF16, Master::Remainder8, Moments::F32, stochastic);
    assert_eq!(low.with_type(DType::F32), Precision::F32);
    let codes = precision(DType::BF16, Master::F32, Moments::EightBit, stochastic);
    let expected = Precision { moments: Moments::EightBit, rounding: stochastic, ..Precision::F32 };
    assert_eq!(codes.with_type(DType::F32), expected);
    let half = Precision { param: DType::F16, grad: DType::F16, ..codes };
    assert_eq!(codes.with_type(DType::F16), half);
    let wide = Precision { grad: DType::F32, ..low };
    assert_eq!(wide.with_type(DType::BF16), low);
}

#[test]
fn what_no_kernel_has_is_refused_by_name() {
    let layout = Layout::builder().param("w", 4).in_group("low").param("half", 4).in_group("low");
    let layout = layout.dtype(DType::F16).build().unwrap();
    let low = Precision { param: DType::BF16, grad: DType::BF16, ..Precision::F32 };
    let remainders = Precision { master: Master::Remainder16, ..low };
    let rounded = Precision { rounding: Rounding::Stochastic { seed: 1 }, ..low };
    let common = || Storages::from(Precision::F32);
    let cases = [
        (
            common().group("lwo", low),
            "group_precision = lwo: not a group of the layout; use one of default, low",
        ),
        (common().group("low", low).group("low", low), "group_precision = low: has a precision already"),
        (
            common().group("default", Precision { master: Master::F32, ..Precision::F32 }),
            "f32 parameters need no master",
        ),
        (common().group("low", remainders), "`half`: master = Remainder16: remainders exist only for bf16"),
        (common().group("low", rounded), "`half`: rounding = Stochastic { seed: 1 }: stochastic rounding"),
    ];
    for (storages, wrong) in cases {
        let error = storages.resolve(&layout).err().unwrap().to_string();
        assert!(error.contains(wrong), "{error}");
    }
    let resolved = common().group("low", low).resolve(&layout).unwrap();
    let types: Vec<DType> = resolved.kinds.iter().map(|kind| kind.storage.precision.param).collect();
    assert_eq!((types, resolved.of), (vec![DType::BF16, DType::F16], vec![0, 1]));
}
