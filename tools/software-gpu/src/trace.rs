//! `INSTEP_GPU_TRACE`: every call as a line of a file, in the order of the calls, so that anybody can count them.
//!
//! A line is in the file before its call runs, so a call that ends the program is the last line. Objects and memory are
//! numbered in the order in which they were made, so two runs of a program with one thread write the same file.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ushort, c_void};
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::sync::OnceLock;

use crate::codes;
use crate::gpu::Gpu;
use crate::header::{
    CUcontext, CUctxCreateParams, CUdevResource, CUdevResourceDesc, CUdevResourceType, CUdevice_attribute,
    CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphEdgeData, CUgraphExec, CUgraphNode, CUgreenCtx,
    CUhostFn, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUmodule, CUpointer_attribute, CUresult,
    CUstream, CUstreamCaptureMode, CUstreamCaptureStatus, cudaError_enum as Code,
};
use crate::{report, settings};

/// A call as it was made.
pub(crate) struct Call<'a> {
    pub(crate) name: &'a str,
    /// The arguments by their names; `None` for a function that only the software GPU has. Such a function is not
    /// traced.
    pub(crate) arguments: Option<&'a [(&'static str, Value)]>,
}

/// A value that a call takes or returns.
#[derive(Clone, Copy)]
pub(crate) enum Value {
    /// A place for a result, or a value that differs from run to run: a line leaves it out.
    Unseen,
    Number(i64),
    /// A device address, or a number of that type.
    Device(u64),
    /// Any memory that the host named.
    Memory(u64),
    Context(usize),
    Stream(usize),
    Event(usize),
    Module(usize),
    Function(usize),
    Graph(usize),
    Executable(usize),
    Pool(usize),
    /// Bytes that a pool mapped for an allocation.
    Mapped(u64),
}

/// A type of `cuda.h` as a line shows it.
pub(crate) trait Shown {
    fn shown(self) -> Value;
}

macro_rules! shown {
    ($($($type:ty),* => |$value:pat_param| $shown:expr;)*) => {$($(
        impl Shown for $type {
            fn shown(self) -> Value {
                let $value = self;
                $shown
            }
        }
    )*)*};
}

shown! {
    CUcontext => |it| Value::Context(it.expose_provenance());
    CUgreenCtx => |it| Value::Context(it.expose_provenance());
    CUstream => |it| Value::Stream(it.expose_provenance());
    CUevent => |it| Value::Event(it.expose_provenance());
    CUmodule => |it| Value::Module(it.expose_provenance());
    CUfunction => |it| Value::Function(it.expose_provenance());
    CUgraph => |it| Value::Graph(it.expose_provenance());
    CUgraphExec => |it| Value::Executable(it.expose_provenance());
    CUmemoryPool => |it| Value::Pool(it.expose_provenance());
    CUdeviceptr => |it| Value::Device(it);
    *const c_void, *mut c_void => |it| Value::Memory(it.expose_provenance() as u64);
    c_int, c_uint, c_uchar, c_ushort => |it| Value::Number(it.into());
    usize => |it| Value::Number(it as i64);
    CUdevice_attribute, CUpointer_attribute => |it| Value::Number(it.0.into());
    CUstreamCaptureMode, CUstreamCaptureStatus, CUdevResourceType => |it| Value::Number(it.0.into());
    CUmemPool_attribute => |it| Value::Number(it.0.into());
    CUresult => |it| Value::Number(it.0.into());
    // Times, texts, and functions of the program.
    f32, CUhostFn, *const c_char, CUdevResource, CUdevResourceDesc => |_| Value::Unseen;
    // Places for answers.
    *mut c_int, *mut usize, *mut f32, *mut c_char, *mut *const c_char => |_| Value::Unseen;
    *mut CUdeviceptr, *mut *mut c_void, *mut CUcontext, *mut CUstream, *mut CUevent => |_| Value::Unseen;
    *mut CUmodule, *mut CUfunction, *mut CUgraph, *mut CUgraphExec => |_| Value::Unseen;
    *mut CUmemoryPool, *const CUmemPoolProps => |_| Value::Unseen;
    *mut CUgreenCtx, *mut CUdevResource, *mut CUdevResourceDesc => |_| Value::Unseen;
    *mut CUctxCreateParams, *mut CUstreamCaptureMode, *mut CUstreamCaptureStatus => |_| Value::Unseen;
    *mut *const CUgraphNode, *mut *const CUgraphEdgeData => |_| Value::Unseen;
}

impl Value {
    fn write(self, line: &mut String, gpu: Option<&Gpu>) {
        let numbered = |letters: &str, number: Option<usize>| match number {
            Some(number) => format!("{letters}{number}"),
            None => "unknown".to_owned(),
        };
        let memory = |address: u64| {
            let memory = gpu?.heap.around(address)?;
            let offset = address - memory.start;
            Some(if offset == 0 {
                format!("m{}", memory.number)
            } else {
                format!("m{}+{offset}", memory.number)
            })
        };
        let word = match self {
            Value::Unseen => return,
            Value::Number(number) => number.to_string(),
            Value::Mapped(bytes) => format!("mapped={bytes}"),
            Value::Stream(0 | 1) => "default".to_owned(),
            Value::Stream(2) => "default-of-thread".to_owned(),
            Value::Device(0) | Value::Memory(0) => "0".to_owned(),
            Value::Context(0) | Value::Event(0) | Value::Module(0) | Value::Function(0) => "0".to_owned(),
            Value::Graph(0) | Value::Executable(0) => "0".to_owned(),
            Value::Device(address) => memory(address).unwrap_or_else(|| format!("{address:#x}")),
            // The address of the program's own memory differs from run to run.
            Value::Memory(address) => memory(address).unwrap_or_else(|| "host".to_owned()),
            Value::Context(handle) => numbered("c", gpu.and_then(|gpu| gpu.contexts.number(handle))),
            Value::Stream(handle) => numbered("s", gpu.and_then(|gpu| gpu.streams.number(handle))),
            Value::Event(handle) => numbered("e", gpu.and_then(|gpu| gpu.events.number(handle))),
            Value::Module(handle) => numbered("module", gpu.and_then(|gpu| gpu.modules.number(handle))),
            Value::Pool(handle) => numbered("pool", gpu.and_then(|gpu| gpu.pools.number(handle))),
            Value::Graph(handle) => numbered("graph", gpu.and_then(|gpu| gpu.graphs.number(handle))),
            Value::Executable(handle) => numbered("exec", gpu.and_then(|gpu| gpu.executables.number(handle))),
            Value::Function(handle) => {
                let function = gpu.and_then(|gpu| gpu.functions.peek(handle));
                function.map_or_else(|| "unknown".to_owned(), |function| function.kernel.name().to_owned())
            }
        };
        line.push_str(&word);
    }
}

thread_local! {
    /// The results of the call in progress.
    static ANSWERED: RefCell<Vec<Value>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a value that a call returns, for the end of its line.
pub(crate) fn answered(value: Value) {
    ANSWERED.with_borrow_mut(|values| values.push(value));
}

/// Returns the file, if the environment names one; the first call makes it.
fn file() -> Option<&'static File> {
    static FILE: OnceLock<Option<File>> = OnceLock::new();
    let open = || {
        let path = settings::trace()?;
        let path = path.replace("%p", &std::process::id().to_string());
        // Ranks that share a file by mistake do not write over each other's lines.
        let truncated = File::create(&path).and_then(|_| OpenOptions::new().append(true).open(&path));
        Some(truncated.unwrap_or_else(|why| report::misuse(&format!("INSTEP_GPU_TRACE={path}: {why}"))))
    };
    FILE.get_or_init(open).as_ref()
}

fn write(mut file: &File, text: &str) {
    if let Err(why) = file.write_all(text.as_bytes()) {
        report::misuse(&format!("INSTEP_GPU_TRACE: {why}"));
    }
}

/// Writes a call with its arguments. The caller holds the lock of the GPU until [`end`].
pub(crate) fn begin(call: &Call<'_>, gpu: Option<&Gpu>) {
    ANSWERED.with_borrow_mut(Vec::clear);
    let (Some(file), Some(arguments)) = (file(), call.arguments) else { return };
    let mut line = call.name.to_owned();
    for (name, value) in arguments {
        if !matches!(value, Value::Unseen) {
            let _ = write!(line, " {}=", name.trim_start_matches('_'));
            value.write(&mut line, gpu);
        }
    }
    write(file, &line);
}

/// Ends the line of a call with its results: values, or the name of an error.
pub(crate) fn end(call: &Call<'_>, gpu: Option<&Gpu>, code: Option<CUresult>) {
    let (Some(file), Some(_)) = (file(), call.arguments) else { return };
    let mut line = String::new();
    match code {
        Some(Code(number)) => {
            let name = codes::name(Code(number)).map(CStr::to_string_lossy);
            let _ = write!(line, " -> {}", name.unwrap_or_else(|| number.to_string().into()));
        }
        None => ANSWERED.with_borrow(|values| {
            for value in values.iter().filter(|value| !matches!(value, Value::Unseen)) {
                line.push_str(if line.is_empty() { " -> " } else { " " });
                value.write(&mut line, gpu);
            }
        }),
    }
    line.push('\n');
    write(file, &line);
}
