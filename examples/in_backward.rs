//! Steps optimizers during backward: a parameter has one optimizer, several or none, and may be local to its rank.
//!
//! A small regression on 4 ranks. `embedding` is used in two places, `bias` has two optimizers, `head` is stepped by an
//! optimizer outside the library, and `calibration` is never summed over ranks. The stepper releases a gradient's
//! memory after the parameter's steps. The example fails if a result differs from the comment about it.
//! `cargo run --release --example in_backward`

use std::any::Any;

use instep::{AdamW, Error, Gradients, Layout, Result, Sgd, Stepper, Unused, in_process};

const WIDTH: usize = 1 << 16;

fn main() -> Result<()> {
    let layout = Layout::builder()
        .param("embedding", WIDTH)
        .uses(2)
        .param("bias", WIDTH)
        .param("head", 16)
        .param("calibration", 16)
        .local()
        .build()?;
    let [embedding, bias, head, calibration] =
        ["embedding", "bias", "head", "calibration"].map(|name| layout.id(name));
    let (embedding, bias, head, calibration) = (embedding?, bias?, head?, calibration?);

    let ends = in_process(4, |comm| {
        let rank = comm.rank();
        let mut stepper = Stepper::builder_without_optimizer(&layout)
            .optimizer_for(&[embedding], AdamW { lr: 0.01, ..AdamW::default() })
            .optimizer_for(&[bias], Sgd { lr: 0.125, ..Sgd::default() })
            .then_for(&[bias], Sgd { lr: 0.0625, ..Sgd::default() }) // runs after the first
            .optimizer_for(&[calibration], Sgd { lr: 1.0, ..Sgd::default() })
            .bucket_cap_bytes(WIDTH as u64) // an early bucket for each
            .unused(Unused::Skip)
            .gradients(Gradients::Release)
            .host(comm)?;
        let mut head_momentum = [0.0f32; 16];
        for step in 0..3 {
            let mut pass = stepper.begin()?;
            // Backward, last layer first. Each bucket is summed and stepped while backward goes on.
            pass.grads().get_mut(calibration)?.fill(rank as f32);
            pass.grad_ready(calibration)?;
            pass.grads().get_mut(head)?.fill(1.0 + rank as f32);
            pass.grad_ready(head)?;
            if step != 1 {
                pass.grads().get_mut(bias)?.fill(1.0); // unused by all in the second pass: nothing moves
                pass.grad_ready(bias)?;
            }
            for _ in 0..2 {
                pass.grads().add(embedding, &vec![0.5; WIDTH])?; // two uses, one step
                pass.grad_ready(embedding)?;
            }
            pass.finish()?;
            // A parameter without an optimizer gets the mean of its gradients, for an optimizer outside. With a loss
            // scale, divide by it here. `write` makes the next pass broadcast all parameters, which is cheap
            // only for small models.
            let mean = stepper.view::<f32>(head.grad())?.to_vec();
            assert_eq!(mean, [2.5; 16]);
            let mut values = stepper.view::<f32>(head)?.to_vec();
            for ((p, m), g) in values.iter_mut().zip(&mut head_momentum).zip(mean) {
                *m = 0.5 * *m + g;
                *p -= 0.25 * *m;
            }
            stepper.write(head, &values)?;
            // A stepped parameter's gradient has been released.
            assert!(matches!(stepper.view::<f32>(bias.grad()), Err(Error::Order(_))));
        }

        let listed = stepper.optimizers_of(bias)?;
        let rates: Vec<f64> = stepper
            .optimizers()
            .filter(|attached| listed.contains(&attached.id))
            .filter_map(|attached| (attached.optimizer as &dyn Any).downcast_ref::<Sgd>().map(|sgd| sgd.lr))
            .collect();
        assert_eq!(rates, [0.125, 0.0625], "in the order of registration");
        assert_eq!(stepper.state_names(embedding)?, ["exp_avg", "exp_avg_sq"]);
        let counts = [embedding, bias, head, calibration].map(|id| stepper.step_count(id));
        let counts = [counts[0].clone()?, counts[1].clone()?, counts[2].clone()?, counts[3].clone()?];
        assert_eq!(counts, [3, 2, 0, 3]);
        let params = stepper.params();
        let first = |id| params.get(id).map(|values| values[0]);
        Ok((first(embedding)?, first(bias)?, first(head)?, first(calibration)?))
    })?;
    for (rank, (embedding, bias, head, calibration)) in ends.iter().enumerate() {
        println!("rank {rank}: embedding {embedding:.4} bias {bias} head {head} calibration {calibration}");
        assert_eq!(
            (*embedding, *bias, *head),
            (ends[0].0, -0.375, ends[0].2),
            "every rank holds the same bits"
        );
        assert_eq!(*calibration, -3.0 * rank as f32, "a local parameter differs by rank");
    }
    Ok(())
}
