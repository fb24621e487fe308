//! Rprop's hyperparameters and states.
//!
//! Defaults are those of `torch.optim.Rprop`. Limits in the wrong order are refused, because they would make every step
//! size the same. torch accepts them.

use super::declare::optimizer;
use crate::abi::INSTEP_OPTIMIZER_rprop;
use crate::error::{Error, Result};

optimizer! {
    /// Resilient backpropagation: every element has its own step size, which grows while its gradient keeps its sign.
    ///
    /// It needs gradients of the whole data set, because gradients of small batches change their signs at random.
    ///
    /// States: `prev`, `step_size`.
    pub struct Rprop: "Rprop" {
        /// Initial step size of each element; it has no effect after a parameter's first update.
        pub lr: f64 = 1e-2 => lr: NonNegative;
        /// Factors of the step size if the gradient's sign changes, and if it does not.
        pub etas: (f64, f64) = (0.5, 1.2) => eta_minus: InsideOne, eta_plus: AboveOne;
        /// Smallest and largest step size.
        pub step_sizes: (f64, f64) = (1e-6, 50.0) => step_size_min: NonNegative, step_size_max: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Riedmiller & Braun, ICNN 1993, in the variant of `torch.optim.Rprop`: an element is not updated in a step \
             in which its gradient changes sign.";
    kernel: INSTEP_OPTIMIZER_rprop, rprop;
    states: ["prev", "step_size"];
    relations: Rprop::relate;
    facts {
        needs_floats: Some("Rprop multiplies step sizes by factors near 1, which codes of 8 bits would round away")
    }
}

impl Rprop {
    fn relate(&self) -> Result<()> {
        let (smallest, largest) = self.step_sizes;
        if smallest > largest {
            return Err(Error::range("step_sizes.0", smallest, "at most step_sizes.1"));
        }
        Ok(())
    }
}
