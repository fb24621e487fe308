//! Writes `src/abi.rs` and `kernels/abi_layout.h` from `kernels/abi.h`, and `src/cuda/nccl/bindings.rs` from NCCL's
//! header; with `--check`, compares instead and fails on a difference.
//!
//! Only this program needs libclang, so its output is checked in. The output must not be edited by hand: the headers
//! are the source, and `cargo run -p bindings` writes it again. `scripts/cuda-toolchain.sh --nccl` gets NCCL's header.

use std::path::{Path, PathBuf};
use std::{env, fs, process::ExitCode};

const ABI_HEADER: &str = "\
//! Structs and constants that cross the C boundary, generated from `kernels/abi.h`.
//!
//! `cargo run -p bindings` writes this file; do not edit it by hand. The file has only
//! plain data. The compiler checks every size, alignment and offset against the header.
#![allow(missing_docs, non_camel_case_types, non_upper_case_globals, unreachable_pub)]
#![allow(unsafe_code, clippy::all)]";

/// The text before the first struct.
const LAYOUT_MACRO: &str = "\
/// Asserts that a type's size, alignment and field offsets are those in the header.
macro_rules! layout {
    ($name:ident: $size:literal bytes, aligned to $alignment:literal; $($field:ident at $offset:literal),*) => {
        const _: () = {
            assert!(size_of::<$name>() == $size);
            assert!(align_of::<$name>() == $alignment);
            $(assert!(core::mem::offset_of!($name, $field) == $offset);)*
        };
    };
}";

/// Stands after [`LAYOUT_MACRO`] in `src/abi.rs`.
const RECORDS_MACRO: &str = "\
/// Declares a type for each struct in the header. Each field is listed after its offset. Zeros are a valid value.
macro_rules! records {
    ($($kind:ident $name:ident: $size:literal bytes, aligned to $alignment:literal {
        $($at:literal => $field:ident: $type:ty,)*
    })*) => {
        $(
            #[repr(C)]
            #[derive(Copy, Clone)]
            pub $kind $name { $(pub $field: $type,)* }
            layout!($name: $size bytes, aligned to $alignment; $($field at $at),*);
            // SAFETY: numbers, pointers that may be null, and optional functions.
            unsafe impl bytemuck::Zeroable for $name {}
        )*
    };
}";

/// The text before the functions of a library that is loaded at run time.
const FUNCTIONS_MACRO: &str = "\
use ::core::ffi::{c_char, c_int, c_void};

/// Looks each function up once. A call panics if the library lacks the function.
macro_rules! functions {
    ($(pub fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        pub struct Functions {
            $(pub $name: Option<unsafe extern \"C\" fn($($type),*) -> $result>,)*
        }

        impl Functions {
            pub unsafe fn new(address_of: impl Fn(&str) -> *const c_void) -> Functions {
                Functions { $($name: ::core::mem::transmute(address_of(stringify!($name))),)* }
            }

            $(pub unsafe fn $name(&self, $($argument: $type),*) -> $result {
                (self.$name.as_ref().expect(\"asked for before it is called\"))($($argument),*)
            })*
        }
    };
}";

/// The bytes of a union; a caller can copy the union only by its numbers.
const HYPER_WORDS: &str = "\
impl InstepHyper {
    /// Returns the union as 8 words. Every constructor sets `words` first, so no word is uninitialised.
    pub fn to_words(&self) -> [f64; 8] {
        // SAFETY: every bit pattern is a number.
        unsafe { self.words }
    }
}";

const LAYOUT_HEADER: &str = "\
/* The layout of every struct of abi.h in Rust: each compiler of the kernels must have the same layout.
 *
 * `cargo run -p bindings` writes this file; do not edit it by hand. */
#ifndef INSTEP_ABI_LAYOUT_H
#define INSTEP_ABI_LAYOUT_H

#include <stddef.h>

#include \"abi.h\"

#if defined(__cplusplus)
#define INSTEP_ALIGNMENT(type) alignof(type)
#else
#include <assert.h>
#define INSTEP_ALIGNMENT(type) _Alignof(type)
#endif";

const NCCL_HEADER: &str = "\
//! The functions of NCCL that this crate calls, generated from its `nccl.h`: a table that is filled at run time.
//!
//! `cargo run -p bindings` writes this file; do not edit it by hand. A call panics if the loaded library lacks the
//! function, so `library.rs` first checks that each function exists. Result codes are numbers in a newtype, because a
//! newer library may return a new code.
#![allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, unreachable_pub)]
#![allow(dead_code, unsafe_code, unsafe_op_in_unsafe_fn, clippy::all, clippy::expect_used)]";

const SOFTWARE_GPU_HEADER: &str = "\
//! The functions of NVIDIA's driver that the software GPU has, with their types, generated from `cuda.h`.
//!
//! `cargo run -p bindings` writes this file; do not edit it by hand. `prototypes.rs` compares
//! the exported functions with these prototypes.
#![allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, unreachable_pub)]
#![allow(dead_code, unused_imports, unsafe_code, clippy::all)]";

const SOFTWARE_NCCL_HEADER: &str = "\
//! The functions of NCCL that the software GPU has, with their types, generated from `nccl.h`.
//!
//! `cargo run -p bindings` writes this file; do not edit it by hand. `prototypes.rs` compares
//! the exported functions with these prototypes.
#![allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, unreachable_pub)]
#![allow(dead_code, unused_imports, unsafe_code, clippy::all)]";

/// The functions that the software GPU's driver exports.
const SOFTWARE_GPU: &str = "tools/software-gpu/src/exported.txt";

/// The functions of NCCL that are called; everything else of the library stays out.
const NCCL_FUNCTIONS: &str = "nccl(GetVersion|GetUniqueId|GetErrorString|GetLastError|\
    CommInitRankConfig|CommUserRank|CommCount|CommCuDevice|CommFinalize|CommDestroy|CommAbort|CommGetAsyncError|\
    AllReduce|Broadcast|AllGather|ReduceScatter|GroupStart|GroupEnd|MemAlloc|MemFree|CommRegister|CommDeregister)";

/// The numbers of NCCL that are used; the bindings leave out all others.
const NCCL_NUMBERS: &str = "ncclSuccess ncclInProgress ncclSum ncclMin ncclMax ncclUint32 ncclUint64 ncclFloat16 \
    ncclFloat32 ncclBfloat16";

/// Further functions that the software GPU has for other programs.
const SOFTWARE_NCCL_FUNCTIONS: &str = "ncclCommInitRank";

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let check = env::args().any(|argument| argument == "--check");
    let outcome = abi(&root)
        .and_then(|text| {
            let shared = format!("{LAYOUT_MACRO}\npub(crate) use layout;\n\n{RECORDS_MACRO}");
            settle(&root, "src/abi.rs", &records(&compact(&text)?)?.replace(LAYOUT_MACRO, &shared), check)?;
            settle(&root, "kernels/abi_layout.h", &layout(&text)?, check)
        })
        .and_then(|()| nccl(&root))
        .and_then(|text| settle(&root, "src/cuda/nccl/bindings.rs", &text, check))
        .and_then(|()| software_gpu(&root))
        .and_then(|text| settle(&root, "tools/software-gpu/src/header.rs", &text, check))
        .and_then(|()| software_nccl(&root))
        .and_then(|text| settle(&root, "tools/software-gpu/nccl/src/header.rs", &text, check));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn abi(root: &Path) -> Result<String, String> {
    let builder = bindgen::Builder::default()
        .header(root.join("kernels/abi.h").display().to_string())
        .allowlist_item("(Instep|INSTEP_).*")
        .blocklist_item("INSTEP_ABI_H")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .raw_line(HYPER_WORDS);
    generate(builder, ABI_HEADER)
}

/// Size, alignment and offsets of one struct, as bindgen asserts them.
struct Layout<'a> {
    name: &'a str,
    size: &'a str,
    alignment: &'a str,
    offsets: Vec<(&'a str, &'a str)>,
}

/// The text before and after the assertions of a struct.
const ASSERTIONS: (&str, &str) =
    ("#[allow(clippy::unnecessary_operation, clippy::identity_op)]\nconst _: () = {", "\n};\n");

impl<'a> Layout<'a> {
    /// Reads the text between [`ASSERTIONS`].
    fn read(block: &'a str) -> Result<Layout<'a>, String> {
        let mut layout = Layout { name: "", size: "", alignment: "", offsets: Vec::new() };
        let assertions = block.split("[\"").skip(1);
        if assertions.clone().count() != block.matches("::core::mem::").count() {
            return Err("bindgen spells its assertions in another way".to_owned());
        }
        for assertion in assertions {
            let (what, rest) = assertion.split_once('"').ok_or("an assertion without a name")?;
            let (_, value) = rest.split_once(" - ").ok_or_else(|| format!("{what}: no value"))?;
            let value = value.split("usize").next().unwrap_or_default();
            let words: Vec<_> = what.split([' ', ':']).filter(|word| !word.is_empty()).collect();
            match words[..] {
                ["Size", "of", name] => (layout.name, layout.size) = (name, value),
                ["Alignment", "of", name] if name == layout.name => layout.alignment = value,
                ["Offset", "of", "field", name, field] if name == layout.name => {
                    layout.offsets.push((field, value));
                }
                _ => return Err(format!("{what}: bindgen asserts something new")),
            }
        }
        if layout.size.is_empty() || layout.alignment.is_empty() {
            return Err(format!("{}: its size or its alignment is not asserted", layout.name));
        }
        Ok(layout)
    }

    /// Returns the layout as one call of the macro in [`LAYOUT_MACRO`].
    fn rust(&self) -> String {
        let Layout { name, size, alignment, offsets } = self;
        let offsets: Vec<_> = offsets.iter().map(|(field, at)| format!("{field} at {at}")).collect();
        let fields = offsets.join(", ");
        wrapped(&format!("layout!({name}: {size} bytes, aligned to {alignment}; {fields});"), "    ")
    }

    fn c(&self) -> String {
        let Layout { name, size, alignment, offsets } = self;
        let offsets = offsets.iter().map(|(field, at)| (format!("offsetof({name}, {field})"), *at));
        [(format!("sizeof({name})"), *size), (format!("INSTEP_ALIGNMENT({name})"), *alignment)]
            .into_iter()
            .chain(offsets)
            .map(|(of, value)| format!("static_assert({of} == {value}, \"differs from src/abi.rs\");\n"))
            .collect()
    }
}

/// Breaks a long line after commas.
fn wrapped(text: &str, indent: &str) -> String {
    let (mut lines, mut length) = (String::new(), 0);
    for word in text.split_inclusive(", ") {
        if length > 0 && length + word.trim_end().len() > 120 {
            lines.truncate(lines.trim_end().len());
            lines += &format!("\n{indent}");
            length = indent.len();
        }
        lines += word;
        length += word.len();
    }
    lines + "\n"
}

/// Returns the assertions for C and C++.
fn layout(bindings: &str) -> Result<String, String> {
    let blocks = bindings.split(ASSERTIONS.0).skip(1);
    let blocks = blocks.map(|block| block.split(ASSERTIONS.1).next().unwrap_or_default());
    let assertions: Vec<_> =
        blocks.map(|block| Layout::read(block).map(|layout| layout.c())).collect::<Result<_, _>>()?;
    Ok(format!("{LAYOUT_HEADER}\n\n{}\n#endif\n", assertions.concat()))
}

/// Replaces the assertions by calls of the macro, because they have several lines for each field.
fn compact(bindings: &str) -> Result<String, String> {
    let mut blocks = bindings.split(ASSERTIONS.0);
    let mut text = blocks.next().unwrap_or_default().to_owned();
    for block in blocks {
        let (block, rest) = block.split_once(ASSERTIONS.1).ok_or("assertions without an end")?;
        text += &Layout::read(block)?.rust();
        text += rest;
    }
    if text.contains("::core::mem::") {
        return Err("bindgen spells its assertions in another way".to_owned());
    }
    Ok(text)
}

/// Moves each struct and the `layout!` below it into one call of the macro in [`RECORDS_MACRO`].
fn records(compact: &str) -> Result<String, String> {
    let mut parts = compact.split("#[repr(C)]\n");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let read = || {
            let (derive, declared) = part.split_once('\n')?;
            let (declared, rest) = declared.strip_prefix("pub ")?.split_once("}\nlayout!(")?;
            let (head, fields) = declared.split_once(" {\n")?;
            let (layout, rest) = rest.split_once(");\n")?;
            let (size, offsets) = layout.split_once("; ")?;
            let size = size.strip_prefix(head.split_once(' ')?.1)?;
            let mut offsets = offsets.split(',').map(|offset| offset.rsplit_once(' ').map(|(_, at)| at));
            let mut inside = String::new();
            for field in fields.split_inclusive('\n') {
                inside += &match field.strip_prefix("    pub ") {
                    Some(field) => format!("        {} => {field}", offsets.next()??),
                    None => format!("    {field}"),
                };
            }
            let is_plain = derive.starts_with("#[derive(") && offsets.next().is_none();
            is_plain.then(|| (format!("    {head}{size} {{\n{inside}    }}\n"), rest))
        };
        let (record, rest) = read().ok_or_else(|| format!("bindgen writes a type in another way: {part}"))?;
        match text.strip_suffix("}\n").filter(|text| text.ends_with("    }\n")) {
            Some(before) => text = format!("{before}{record}}}\n{rest}"),
            None => text += &format!("records! {{\n{record}}}\n{rest}"),
        }
    }
    Ok(text)
}

/// Returns a builder for one header of the CUDA toolchain.
fn toolchain(root: &Path, header: &str) -> Result<bindgen::Builder, String> {
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let toolchain = target.join("cuda-toolchain/nvidia");
    let header = toolchain.join(header);
    if !header.is_file() {
        return Err(format!("{} is not there: run `scripts/cuda-toolchain.sh --nccl`", header.display()));
    }
    Ok(bindgen::Builder::default()
        .header(header.display().to_string())
        .clang_arg(format!("-I{}", toolchain.join("cu13/include").display()))
        .generate_comments(false))
}

fn software_gpu(root: &Path) -> Result<String, String> {
    let exported =
        fs::read_to_string(root.join(SOFTWARE_GPU)).map_err(|error| format!("{SOFTWARE_GPU}: {error}"))?;
    let names: Vec<&str> =
        exported.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let builder = toolchain(root, "cu13/include/cuda.h")?
        .allowlist_function(names.join("|"))
        .allowlist_type("CUmemorytype")
        .allowlist_var("CUDA_VERSION")
        .newtype_enum(".*");
    compact(&generate(builder, SOFTWARE_GPU_HEADER)?)
}

fn software_nccl(root: &Path) -> Result<String, String> {
    let builder = toolchain(root, "nccl/include/nccl.h")?
        .allowlist_function(NCCL_FUNCTIONS)
        .allowlist_function(SOFTWARE_NCCL_FUNCTIONS)
        .allowlist_var("NCCL_(API_MAGIC|VERSION_CODE)")
        .blocklist_type("cudaStream_t|CUstream_st")
        .raw_line("/// A stream, as the driver and the runtime pass it.")
        .raw_line("pub type cudaStream_t = *mut ::core::ffi::c_void;")
        .newtype_enum("nccl.*");
    compact(&generate(builder, SOFTWARE_NCCL_HEADER)?)
}

fn nccl(root: &Path) -> Result<String, String> {
    let builder = toolchain(root, "nccl/include/nccl.h")?
        .allowlist_function(NCCL_FUNCTIONS)
        .allowlist_var("NCCL_(API_MAGIC|VERSION_CODE)")
        .blocklist_type("cudaStream_t|CUstream_st")
        .raw_line("/// A stream, as the driver and the runtime pass it.")
        .raw_line("pub type cudaStream_t = *mut ::core::ffi::c_void;")
        .newtype_enum("nccl.*");
    let bindings =
        compact(&generate(builder, NCCL_HEADER)?)?.replace(LAYOUT_MACRO, "use crate::abi::layout;");
    let is_used = |line: &&str| {
        let number = line.strip_prefix("    pub const ").and_then(|number| number.split(':').next());
        number.is_none_or(|number| NCCL_NUMBERS.split(' ').any(|used| used == number))
    };
    table(&bindings.split_inclusive('\n').filter(is_used).collect::<String>())
}

/// Puts the functions that the linker would look for into the table of [`FUNCTIONS_MACRO`].
fn table(bindings: &str) -> Result<String, String> {
    let mut blocks = bindings.split("unsafe extern \"C\" {\n");
    let mut rest = blocks.next().unwrap_or_default().to_owned();
    let mut functions = String::new();
    for block in blocks {
        let (block, after) = block.split_once("\n}\n").ok_or("functions without an end")?;
        let words = block.split_whitespace().collect::<Vec<_>>().join(" ");
        let words = words.replace("( ", "(").replace(", )", ")").replace("::core::ffi::", "");
        functions += &wrapped(&format!("    {words}"), "        ");
        rest += after;
    }
    Ok(format!("{rest}\n{FUNCTIONS_MACRO}\n\nfunctions! {{\n{functions}}}\n"))
}

fn generate(builder: bindgen::Builder, header: &str) -> Result<String, String> {
    let builder =
        builder.raw_line("").raw_line(LAYOUT_MACRO).derive_default(false).layout_tests(true).use_core();
    let builder = builder.disable_header_comment();
    let bindings = builder.generate().map_err(|error| format!("bindgen: {error}"))?;
    Ok(format!("{header}\n\n{bindings}"))
}

/// Writes the file, or compares it with the existing file.
fn settle(root: &Path, name: &str, text: &str, check: bool) -> Result<(), String> {
    let path = root.join(name);
    if !check {
        return fs::write(&path, text).map_err(|error| format!("{name}: {error}"));
    }
    if fs::read_to_string(&path).is_ok_and(|current| current == text) {
        println!("{name} is what its header says");
        return Ok(());
    }
    Err(format!("{name} is stale: run `cargo run -p bindings`"))
}
