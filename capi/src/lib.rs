//! The C library: opaque handles, status codes and one header for instep.
//!
//! Every function of `include/instep.h` is one `extern "C"` function here. A function that returns a status runs in
//! [`entry::call`], which catches panics. `arguments.rs` and `handles.rs` check arguments from C before they are used.
//! Comments on public items are written for readers of C, because cbindgen copies them to the header.
#![allow(non_camel_case_types)] // The header's names.
#![allow(unreachable_pub)] // cbindgen takes what is `pub`.

mod access;
mod arguments;
mod between;
mod bucket_options;
mod bucket_step;
mod checkpoint;
mod codes;
mod collective;
mod entry;
mod fork;
mod handles;
mod layout;
mod memory;
mod norm;
mod optimizer;
mod options;
mod pass;
mod settings;
mod status;
mod stepper;
mod stepper_options;
mod tensors;
mod words;
