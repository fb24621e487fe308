//! Setting a step count also sets what the optimizer carries, and refuses counts that no update can follow.
//!
//! NAdam carries a product of momenta, which is 1 before the first update and below 1 after it.

use instep::{AdamW, BucketStep, Error, Layout, NAdam, ParamId};

/// Runs the same calls on both devices.
macro_rules! on_both {
    ($layout:expr, $optimizer:expr, $step:ident => $body:block) => {{
        let mut $step = BucketStep::builder($layout, $optimizer).host().unwrap();
        $body
        #[cfg(not(kernels_only))]
        {
            let cuda = crate::support::device::cuda();
            let mut $step = BucketStep::builder($layout, $optimizer).cuda(&cuda).unwrap();
            $body
        }
    }};
}

pub(super) use on_both;

fn one() -> (Layout, ParamId) {
    let layout = Layout::builder().param("w", 4).build().unwrap();
    let id = layout.id("w").unwrap();
    (layout, id)
}

#[test]
fn a_count_without_what_is_carried_beside_it_is_refused_and_changes_nothing() {
    let (layout, id) = one();
    on_both!(&layout, NAdam::default(), step => {
        assert_eq!((step.step_count(id).unwrap(), step.carried(id).unwrap()), (0, Some(1.0)));
        step.set_step_count(id, (1000, 0.25)).unwrap();
        let refused = [
            (step.set_step_count(id, 1000), "step_count"),
            (step.set_step_count(id, (0, 0.0)), "carried"),
            (step.set_step_count(id, (0, 0.5)), "carried"),
            (step.set_step_count(id, (3, 1.0)), "carried"),
            (step.set_step_count(id, (3, -0.5)), "carried"),
            (step.set_step_count(id, (3, f64::NAN)), "carried"),
            (step.set_step_count(id, (3, f64::INFINITY)), "carried"),
        ];
        for (outcome, field) in refused {
            assert!(matches!(outcome, Err(Error::Config { field: f, .. }) if f == field), "{outcome:?}");
        }
        assert_eq!((step.step_count(id).unwrap(), step.carried(id).unwrap()), (1000, Some(0.25)));
        // A product of thousands of momenta is too small for its type.
        step.set_step_count(id, (5000, 0.0)).unwrap();
        assert_eq!((step.step_count(id).unwrap(), step.carried(id).unwrap()), (5000, Some(0.0)));
        step.set_step_count(id, 0).unwrap();
        assert_eq!((step.step_count(id).unwrap(), step.carried(id).unwrap()), (0, Some(1.0)));
    });
}

#[test]
fn an_optimizer_that_carries_nothing_takes_the_count_alone_or_with_a_one() {
    let (layout, id) = one();
    on_both!(&layout, AdamW::default(), step => {
        step.set_step_count(id, 7).unwrap();
        let refused = step.set_step_count(id, (8, 0.5));
        assert!(matches!(refused, Err(Error::Config { field: "carried", .. })), "{refused:?}");
        assert_eq!((step.step_count(id).unwrap(), step.carried(id).unwrap()), (7, None));
        step.set_step_count(id, (8, 1.0)).unwrap();
        assert_eq!(step.step_count(id).unwrap(), 8);
    });
}

#[test]
fn a_count_that_no_update_can_follow_is_refused() {
    let (layout, id) = one();
    on_both!(&layout, AdamW::default(), step => {
        for count in [1 << 63, u64::MAX - 1, u64::MAX] {
            let refused = step.set_step_count(id, count).unwrap_err();
            assert!(matches!(refused, Error::Config { field: "step_count", .. }), "{count}: {refused}");
        }
        assert_eq!(step.step_count(id).unwrap(), 0);
        step.set_step_count(id, (1 << 63) - 1).unwrap();
        assert_eq!(step.step_count(id).unwrap(), (1 << 63) - 1);
    });
}
