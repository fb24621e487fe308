//! Ends the program at a fault: one report to stderr, then an abort, so that no test can pass by ignoring it.
//!
//! It depends on nothing. The first words of a report name the rule; tests look for these words. Each report is one
//! write, because two ranks may report at once into one stream.

use std::io::Write as _;

/// Ends the program because it broke a rule of the driver's interface or has a race.
pub(crate) fn fault(rule: &str, what: &str) -> ! {
    end(&format!("software gpu: {rule}: {what}\n"))
}

/// Ends the program because this driver was set up wrongly.
pub(crate) fn misuse(what: &str) -> ! {
    end(&format!("software gpu: settings: {what}\n"))
}

fn end(report: &str) -> ! {
    // Nobody is left to be told if the write fails.
    let _ = std::io::stderr().write_all(report.as_bytes());
    std::process::abort()
}
