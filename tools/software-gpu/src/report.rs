//! How a fault ends the program: one report to stderr, then an abort, so that no test can pass by not looking.
//!
//! It depends on nothing. A report names the rule in its first words; tests look for these. Each report is one write, because
//! two ranks may report at once into one stream.

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
