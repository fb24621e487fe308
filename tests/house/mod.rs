//! Rules of the repository that no compiler holds.
//!
//! `tidy` uses only std, so it also compiles alone: `rustc --edition 2024 --test tests/house/tidy/mod.rs`.

mod errors;
mod option_tables;
mod tidy;
