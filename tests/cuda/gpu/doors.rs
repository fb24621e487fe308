//! Ranks join a group over NCCL in four ways, through environment variables of the parent process.
//!
//! The host collective is that of the example, over TCP: it reports ranks that die. `adopt` plays the framework: it
//! makes a blocking communicator with NCCL's own function, which this crate never calls.

use std::ffi::{CString, c_char, c_int, c_void};
use std::net::TcpListener;
use std::process::Command;

use instep::cuda::{Nccl, nccl};

use super::nccl::DEADLINE;
use crate::support::tcp::Tcp;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The way in which a scene's ranks join.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Door {
    File,
    Id,
    Beside,
    Adopt,
}

/// The folder, id and port that all ranks of one group use to join. Dropping this struct removes the folder.
pub(super) struct Threshold {
    folder: tempfile::TempDir,
    door: Door,
    id: String,
    port: u16,
}

impl Threshold {
    pub(super) fn new(door: Door) -> Threshold {
        // The process that makes an id has to live until all ranks have joined.
        let id = match door {
            Door::Id | Door::Adopt => nccl::unique_id().unwrap().map(|byte| format!("{byte:02x}")).concat(),
            Door::File | Door::Beside => String::new(),
        };
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Threshold { folder: tempfile::tempdir().unwrap(), door, id, port }
    }

    pub(super) fn describe(&self, rank: &mut Command) {
        rank.env("INSTEP_TEST_DOOR", format!("{:?}", self.door)).env("INSTEP_TEST_ID", &self.id);
        rank.env("INSTEP_ID_FILE", self.folder.path().join("id")).env("TORCHELASTIC_RUN_ID", "none");
        rank.env("MASTER_PORT", self.port.to_string()).env("LOCAL_RANK", "0");
    }
}

fn id() -> nccl::UniqueId {
    let digits = std::env::var("INSTEP_TEST_ID").unwrap();
    let byte = |at: usize| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap();
    std::array::from_fn(byte)
}

/// Joins the group that the environment variables describe.
pub(super) fn join() -> Nccl {
    let options = nccl::Options::from_environment().unwrap();
    let (rank, ranks) = (options.rank, options.world_size);
    match std::env::var("INSTEP_TEST_DOOR").unwrap().as_str() {
        "File" => Nccl::from_environment().unwrap(),
        "Id" => Nccl::with_id(&options, id()).unwrap(),
        "Beside" => {
            let port = std::env::var("MASTER_PORT").unwrap().parse().unwrap();
            let host = Tcp::meet(("127.0.0.1", port), rank, ranks, DEADLINE).unwrap();
            Nccl::beside(host, &options).unwrap()
        }
        "Adopt" => {
            // SAFETY: the framework is this function, which keeps the communicator for ever and makes no other call.
            unsafe { Nccl::adopt(communicator(rank, ranks), options.deadline) }.unwrap()
        }
        other => panic!("{other}"),
    }
}

/// Makes a communicator as a framework does: `Gpu::open` has made the device's context current.
fn communicator(rank: u32, ranks: u32) -> *mut c_void {
    #[repr(C)]
    struct Id([u8; 128]);
    type InitRank = unsafe extern "C" fn(*mut *mut c_void, c_int, Id, c_int) -> c_int;
    let path = std::env::var("INSTEP_NCCL").unwrap_or_else(|_| "libnccl.so.2".to_owned());
    let path = CString::new(path).unwrap();
    let mut made = std::ptr::null_mut();
    // SAFETY: strings that end in NUL; the symbol has the type that `nccl.h` gives it, and writes one handle.
    unsafe {
        let library = dlopen(path.as_ptr(), 2);
        assert!(!library.is_null(), "{path:?} cannot be opened");
        let symbol = dlsym(library, c"ncclCommInitRank".as_ptr());
        assert!(!symbol.is_null(), "{path:?} has no ncclCommInitRank");
        let init = std::mem::transmute::<*mut c_void, InitRank>(symbol);
        assert_eq!(init(&mut made, ranks as c_int, Id(id()), rank as c_int), 0);
    }
    made
}
