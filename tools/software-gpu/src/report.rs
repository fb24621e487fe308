//! How a fault ends the program: one report to stderr, then an abort, so that no test can pass by not looking.
//!
//! It depends on nothing. A report names the rule in its first words; tests look for these.

/// Ends the program because it broke a rule of the driver's interface or has a race.
pub(crate) fn fault(rule: &str, what: &str) -> ! {
    eprintln!("software gpu: {rule}: {what}");
    std::process::abort()
}

/// Ends the program because this driver was set up wrongly.
pub(crate) fn misuse(what: &str) -> ! {
    eprintln!("software gpu: settings: {what}");
    std::process::abort()
}
