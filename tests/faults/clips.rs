//! A clip set has its own norm, over all its parameters on all ranks, and its own coefficient.
//!
//! The gradients are powers of two, so norms are exact. Both ranks have a shard of each parameter.

use instep::{Clip, Layout, Mode, Result, Sgd, Stepper, Strategy, in_process};

/// Length of each parameter, such that one rank's shard is not enough for the norm.
const LEN: usize = 1024;

#[test]
fn each_clip_set_steps_by_the_norm_of_its_own_parameters_on_all_ranks() {
    let layout = Layout::builder().param("together", LEN).param("alone", LEN).in_group("alone");
    let layout = layout.param("free", LEN).in_group("free").build().unwrap();
    for strategy in [Strategy::Replicated, Strategy::Zero] {
        let stepped = in_process(2, |comm| -> Result<_> {
            let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).mode(Mode::Normed);
            let builder = builder.clip(Clip::Global(32.0)).group_clip("alone", 8.0).group_clip("free", None);
            let mut stepper = builder.strategy(strategy).host(comm)?;
            let mut pass = stepper.begin()?;
            for (id, gradient) in layout.ids().zip([2.0, 4.0, 8.0]) {
                pass.grads().write(id, &[gradient; LEN])?;
                pass.grad_ready(id)?;
            }
            pass.finish()?;
            let norms = ["default", "alone", "free"].map(|group| stepper.group_norm(group));
            let first = |id| stepper.view::<f32>(id).map(|values| values[0]);
            let values = layout.ids().map(first).collect::<Result<Vec<f32>>>()?;
            let norms = norms.into_iter().collect::<Result<Vec<_>>>()?;
            stepper.close()?;
            Ok((values, norms))
        });
        for (values, norms) in stepped.unwrap() {
            let what = format!("a set that is clipped by another norm, {strategy:?}: {values:?}, {norms:?}");
            assert_eq!(norms, [Some(64.0), Some(128.0), Some(256.0)], "{what}");
            for (value, expected) in values.into_iter().zip([-1.0, -0.25, -8.0]) {
                assert!((value - expected).abs() < 1e-6, "{what}");
            }
        }
    }
}
