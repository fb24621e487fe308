//! Calls that are refused: each error names what is wrong, and nothing has changed.
//!
//! The same call succeeds once the cause of the error is gone.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Optimizer;
use instep_candle::{Config, FusedOptimizer};

use crate::support::{bits, grads, spread, values, var};

fn config() -> Config {
    Config::new(instep::AdamW::default())
}

#[track_caller]
fn refuses<T>(result: Result<T>, part: &str) {
    match result {
        Ok(_) => panic!("not refused: {part}"),
        Err(error) => assert!(error.to_string().contains(part), "{error}"),
    }
}

#[test]
fn a_refused_step_leaves_all_variables_as_they_were_and_can_be_repeated() -> Result<()> {
    let vars = vec![var(0, 300)?, var(1, 5)?];
    let mut optimizer = FusedOptimizer::new(vars.clone(), config().max_norm(1.0))?;
    let right = [Some(spread(2, 300)), Some(spread(3, 5))];
    let before = bits(&vars);

    optimizer.set_learning_rate(f64::NAN);
    refuses(optimizer.step(&grads(&vars, &right)?), "lr = NaN");
    optimizer.set_learning_rate(0.1);
    let mut store = grads(&vars, &right)?;
    store.insert(&vars[1], Tensor::zeros(4, DType::F32, &Device::Cpu)?);
    refuses(optimizer.step(&store), "F32 [4] on Cpu for a variable [5]");
    store.insert(&vars[1], Tensor::zeros(5, DType::BF16, &Device::Cpu)?);
    refuses(optimizer.step(&store), "BF16 [5] on Cpu");
    store.insert(&vars[1], vars[1].as_detached_tensor());
    refuses(optimizer.step(&store), "gradient: shares memory with a variable");
    assert_eq!((bits(&vars), optimizer.steps()), (before, 0));

    let fresh = vec![var(0, 300)?, var(1, 5)?];
    let mut undisturbed = FusedOptimizer::new(fresh.clone(), config().max_norm(1.0))?;
    undisturbed.set_learning_rate(0.1);
    undisturbed.step(&grads(&fresh, &right)?)?;
    optimizer.step(&grads(&vars, &right)?)?;
    assert_eq!(bits(&vars), bits(&fresh));
    Ok(())
}

#[test]
fn variables_and_options_that_cannot_be_stepped_are_refused_by_name() -> Result<()> {
    let narrow = Var::from_tensor(&var(0, 4)?.to_dtype(DType::BF16)?)?;
    refuses(FusedOptimizer::new(vec![var(0, 4)?, narrow], config()), "variable `1`: BF16 on Cpu; only F32");
    let twice = var(0, 4)?;
    refuses(FusedOptimizer::new(vec![twice.clone(), twice], config()), "variable `1`: given twice");
    refuses(FusedOptimizer::new(vec![var(0, 4)?], config().threads(0)), "threads = 0");
    let wrong = Config::new(instep::AdamW { lr: -1.0, ..Default::default() });
    refuses(FusedOptimizer::new(vec![var(0, 4)?], wrong), "lr = -1");
    refuses(FusedOptimizer::new(vec![var(0, 4)?], config().max_norm(-1.0)), "max_norm = -1");

    // Integers are left out, as in candle-nn.
    let whole = Var::from_tensor(&Tensor::zeros(4, DType::I64, &Device::Cpu)?)?;
    let float = var(0, 4)?;
    let mut optimizer = FusedOptimizer::new(vec![whole, float.clone()], config())?;
    optimizer.step(&grads(&[float.clone()], &[Some(vec![1.0; 4])])?)?;
    assert_ne!(values(&float), spread(0, 4));
    Ok(())
}

#[test]
fn states_that_do_not_fit_are_refused_by_name_and_change_nothing() -> Result<()> {
    let vars = vec![var(0, 300)?, var(1, 5)?];
    let mut optimizer = FusedOptimizer::new(vars.clone(), config())?;
    optimizer.step(&grads(&vars, &[Some(spread(2, 300)), None])?)?;
    let state = || optimizer.state();
    let wrong = |name: &str, tensor: Option<Tensor>| {
        let mut state = state()?;
        match tensor {
            Some(tensor) => drop(state.insert(name.to_owned(), tensor)),
            None => drop(state.remove(name)),
        }
        Ok::<_, candle_core::Error>(state)
    };
    let cpu = &Device::Cpu;
    let cases = [
        ("0.exp_avg", None, "state `0.exp_avg`: missing"),
        ("1.step", None, "state `1.step`: missing"),
        ("lr", None, "state `lr`: missing"),
        ("steps", Some(Tensor::new(-1i64, cpu)?), "state `steps`: not an I64 of at least 0"),
        ("1.exp_avg", Some(Tensor::zeros(4, DType::F32, cpu)?), "state `1.exp_avg`: not 5 values of f32"),
        ("1.exp_avg", Some(Tensor::zeros(5, DType::U8, cpu)?), "state `1.exp_avg`: not 5 values of f32"),
        ("1.step", Some(Tensor::new(-3i64, cpu)?), "state `1.step`: a count below 0"),
        ("2.step", Some(Tensor::new(3i64, cpu)?), "state `2.step`: no state of this model"),
        ("1.step", Some(Tensor::new(3u32, cpu)?), "state `1.step`: U32 of rank 0"),
    ];
    let cases = cases.map(|(name, tensor, part)| (wrong(name, tensor), part));
    let before = state()?;
    for (state, part) in cases {
        refuses(optimizer.load_state(state?), part);
    }
    let after = optimizer.state()?;
    assert_eq!(before.len(), after.len());
    for (name, tensor) in before {
        assert_eq!(
            format!("{:?}", tensor.flatten_all()?.to_string()),
            format!("{:?}", after[&name].flatten_all()?.to_string())
        );
    }
    Ok(())
}
