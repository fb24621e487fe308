//! Rules of the repository that no compiler checks.
//!
//! `tidy` uses only std, so it also compiles separately: `rustc --edition 2024 --test tests/house/tidy/mod.rs`.

mod errors;
mod option_tables;
mod tidy;
