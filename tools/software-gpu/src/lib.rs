//! A CUDA driver without a GPU: programs load it as `libcuda.so` and make the same calls as with the real driver.
//!
//! It is stricter than the real driver. Work runs as late, and in as unusual an order, as streams and events allow.
//! `seed` selects the order. Every byte that a kernel or copy touches is checked against the order that the calls have
//! made, and a fault ends the program with a report. One lock guards all state, so a program with one thread runs the
//! same way each time.

pub mod exports;
#[rustfmt::skip]
mod header;

mod accesses;
mod capture;
mod claims;
mod clock;
mod codes;
mod contexts;
mod copies;
mod engine;
mod entry;
mod events;
mod fatbin;
mod foreign;
mod gpu;
mod graphs;
mod handles;
mod heap;
mod judge;
mod modules;
mod objects;
mod pools;
mod prototypes;
mod queue;
mod random;
mod report;
mod run;
mod schedule;
mod settings;
mod shadow;
mod streams;
mod trace;
mod window;
mod work;
