//! Addresses of a GPU's tensors. The tests check which exist, when, and that they hold the values that are copied out.
//!
//! The tests use only the stand-in, whose memory this thread can read.
#![allow(unsafe_code)]

use instep::cuda::Cuda;
use instep::{DType, DevicePtr, Error, Mode, Moments, Precision, Result, Solo, TensorId, bf16};

use crate::support::stand_in::{COMPUTE, StandIn};
use crate::support::{Options, few_optimizers, layout, paint_params, painted, pass};

#[test]
fn every_tensor_has_an_address_between_passes_and_two_have_one_in_a_pass() {
    let cuda = Cuda::on(StandIn::new()).compute_stream(COMPUTE);
    let (options, layout) = (Options { mode: Mode::Eager, ..Options::default() }, layout(&[300]));
    let builder = || options.builder(&layout, few_optimizers()[2]).ema(0.5).copy_params(DType::BF16);
    // SAFETY: the stand-in's stream is always there.
    let mut stepper = unsafe { builder().cuda(Solo::default(), &cuda) }.unwrap();
    let id = layout.ids().next().unwrap();
    let name = stepper.state_names(id).unwrap().remove(0);
    paint_params(&mut stepper);
    pass(&mut stepper, &options, |param, values| painted(&options)(0, param, values)).unwrap();
    let is_order = |outcome: Result<DevicePtr>| matches!(outcome, Err(Error::Order(_)));
    let between = [id.state(&name), id.ema(), id.copy()];
    let all = between.into_iter().chain([id.into(), id.grad()]);
    let addresses: Vec<DevicePtr> = all.clone().map(|tensor| stepper.ptr(tensor).unwrap()).collect();
    assert_eq!(addresses.iter().collect::<std::collections::HashSet<_>>().len(), 5, "{addresses:?}");
    for (tensor, address) in all.zip(addresses) {
        let mut values = vec![0.0; 300];
        stepper.read(tensor, &mut values).unwrap();
        let at = std::ptr::with_exposed_provenance::<u8>(address.0 as usize);
        // SAFETY: the stand-in's memory is the host's, and `read` has waited for everything.
        let first = unsafe {
            match tensor {
                TensorId::Copy(_) => at.cast::<bf16>().read().to_f32(),
                _ => at.cast::<f32>().read(),
            }
        };
        assert_eq!(first.to_bits(), values[0].to_bits(), "{tensor:?}");
    }
    let mut open = stepper.begin().unwrap();
    assert!(between.into_iter().all(|tensor| is_order(open.ptr(tensor))));
    open.ptr(id).unwrap();
    assert!(open.is_first(id).unwrap(), "a parameter's address writes nothing");
    open.ptr(id.grad()).unwrap();
    assert!(!open.is_first(id).unwrap());
    open.grad_ready(id).unwrap();
    assert!(is_order(open.ptr(id)) && is_order(open.ptr(id.grad())), "handed over");
    open.finish().unwrap();
    let eight = Precision { moments: Moments::EightBit, ..Precision::F32 };
    // SAFETY: as above.
    let mut coded = unsafe { builder().precision(eight).cuda(Solo::default(), &cuda) }.unwrap();
    assert!(matches!(coded.ptr(id.state(&name)), Err(Error::Unsupported(_))));
}
