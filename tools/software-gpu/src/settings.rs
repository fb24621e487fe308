//! The settings of this GPU from the environment: seed, size, and the calls that fail.
//!
//! They are read once, at the first call. An invalid word ends the program, because otherwise a test would pass without
//! testing anything.

use std::env;

use crate::report;

/// One call that fails: the n-th call of this name, with this code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) call: String,
    pub(crate) nth: u64,
    pub(crate) code: u32,
}

/// A mistake of a program, planted into its n-th call of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plant {
    /// An event is recorded before the last work of its stream.
    Early,
    /// An event with timing is made without timing.
    Plain,
    /// An argument of a kernel lacks its last 8 bytes, and other bytes are in their place.
    Short,
    /// A claim lacks the first element of each range that it may write.
    Narrow,
}

pub(crate) struct Settings {
    /// `INSTEP_GPU_SEED`: picks the order of work.
    pub(crate) seed: u64,
    /// `INSTEP_GPU_DEVICES`: the number of GPUs.
    pub(crate) devices: i32,
    /// `INSTEP_GPU_MEMORY`: the bytes of each GPU.
    pub(crate) memory: u64,
    /// `INSTEP_GPU_FAIL`: calls that fail, such as `cuMemAlloc:3,kernel:1=719`.
    pub(crate) failures: Vec<Failure>,
    /// `INSTEP_GPU_PLANT`: mistakes that are planted as if the program had made them, such as `early:3`.
    pub(crate) plants: Vec<(Plant, u64)>,
    /// `INSTEP_GPU_HANG`: the kernel launch, counted from 1, that never ends.
    pub(crate) hangs: Option<u64>,
    /// `INSTEP_GPU_LEAKS=1`: a live object at exit is a fault.
    pub(crate) leaks: bool,
}

/// `INSTEP_GPU_TRACE`: the file to which every call adds a line; `%p` in its name is the process's number.
pub(crate) fn trace() -> Option<String> {
    env::var("INSTEP_GPU_TRACE").ok().filter(|path| !path.is_empty())
}

impl Settings {
    pub(crate) fn read() -> Settings {
        Settings {
            seed: number("INSTEP_GPU_SEED").unwrap_or(0),
            devices: number("INSTEP_GPU_DEVICES").unwrap_or(1) as i32,
            memory: number("INSTEP_GPU_MEMORY").unwrap_or(4 << 30),
            failures: env::var("INSTEP_GPU_FAIL").map_or_else(|_| Vec::new(), |text| failures(&text)),
            plants: env::var("INSTEP_GPU_PLANT").map_or_else(|_| Vec::new(), |text| plants(&text)),
            hangs: number("INSTEP_GPU_HANG"),
            leaks: number("INSTEP_GPU_LEAKS") == Some(1),
        }
    }
}

fn number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| report::misuse(&format!("{name}={text}: no number"))))
}

fn failures(text: &str) -> Vec<Failure> {
    text.split(',').filter(|word| !word.is_empty()).map(failure).collect()
}

fn plants(text: &str) -> Vec<(Plant, u64)> {
    let plant = |word: &str| {
        let (name, nth) = word.split_once(':')?;
        let known = [
            ("early", Plant::Early),
            ("plain", Plant::Plain),
            ("short", Plant::Short),
            ("narrow", Plant::Narrow),
        ];
        let (_, plant) = known.into_iter().find(|(known, _)| *known == name)?;
        Some((plant, nth.parse().ok()?))
    };
    let read = |word| {
        plant(word).unwrap_or_else(|| report::misuse(&format!("INSTEP_GPU_PLANT: {word} is no mistake")))
    };
    text.split(',').filter(|word| !word.is_empty()).map(read).collect()
}

/// Reads `call`, `call:nth` or `call:nth=code`. The default code is that of a failed launch, or of full memory.
fn failure(word: &str) -> Failure {
    let (rest, code) = word.split_once('=').map_or((word, None), |(rest, code)| (rest, Some(code)));
    let (call, nth) = rest.split_once(':').unwrap_or((rest, "1"));
    let usual = if call.starts_with("cuMem") && call.contains("Alloc") { 2 } else { 719 };
    let parsed = nth.parse().ok().zip(code.map_or(Some(usual), |code| code.parse().ok()));
    match parsed {
        Some((nth, code)) => Failure { call: call.to_owned(), nth, code },
        None => report::misuse(&format!("INSTEP_GPU_FAIL: {word} is not call:nth=code")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_fail_are_read_with_their_number_and_code() {
        let read = failures("cuMemAlloc:3,kernel:2=700,cuEventRecord");
        let rows: Vec<_> = read.iter().map(|f| (f.call.as_str(), f.nth, f.code)).collect();
        assert_eq!(rows, [("cuMemAlloc", 3, 2), ("kernel", 2, 700), ("cuEventRecord", 1, 719)]);
    }

    #[test]
    fn mistakes_are_read_with_the_number_of_their_call() {
        assert_eq!(plants("early:3,narrow:1"), [(Plant::Early, 3), (Plant::Narrow, 1)]);
    }
}
