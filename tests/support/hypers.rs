//! Hyperparameters as a kernel takes them, for tests that call kernels themselves.
//!
//! The library writes them by name and these tests by place, so a field in the wrong place differs. Every struct of
//! hyperparameters has its numbers first, in the order of the optimizer's keywords, and then its flags.

use instep::Isa;
use instep::abi::*;
use instep::optim::Range;

use crate::support::entries::kernels;
use crate::support::optimizers::Optim;

/// Returns the kernel, the hyperparameters and the number of states of an optimizer.
pub(crate) fn rule(optim: Optim) -> (u32, InstepHyper, usize) {
    let descriptor = optim.descriptor;
    let ranges = descriptor.fields.iter().flat_map(|field| field.parts).map(|part| part.range);
    let given = ranges.zip(optim.keywords().map(|(_, number)| number));
    let (flags, numbers): (Vec<_>, Vec<_>) = given.partition(|(range, _)| *range == Range::Flag);
    // Adam and AdamW share a kernel, whose first flag says which of the two it is.
    let decoupled =
        (descriptor.kernel == INSTEP_OPTIMIZER_adam).then(|| u64::from(descriptor.name == "AdamW"));
    let flags: Vec<u64> = decoupled.into_iter().chain(flags.iter().map(|(_, flag)| *flag as u64)).collect();
    let pairs = flags.chunks(2).map(|pair| f64::from_bits(pair[0] | pair.get(1).unwrap_or(&0) << 32));
    let mut words = [0.0; 8];
    let all = numbers.iter().map(|(_, number)| *number).chain(pairs);
    all.enumerate().for_each(|(k, word)| words[k] = word);
    (descriptor.kernel, InstepHyper { words }, optim.boxed().state_names().len())
}

/// Returns the launches of an optimizer's step. Its descriptor and its header must agree on them.
pub(crate) fn parts(optim: Optim) -> &'static [InstepStepPart] {
    let descriptor = optim.descriptor;
    let is_scaled = kernels(Isa::Baseline).scaled[descriptor.kernel as usize] == 1;
    assert_eq!(is_scaled, descriptor.is_scaled, "{}", descriptor.name);
    if is_scaled { &[INSTEP_PART_MEASURE, INSTEP_PART_APPLY] } else { &[INSTEP_PART_WHOLE] }
}
