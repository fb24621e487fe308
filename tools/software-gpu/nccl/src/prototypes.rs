//! Compiles only if every exported function has the type that `nccl.h` gives it.
//!
//! Two functions fit into one array only if their types are equal.

macro_rules! same {
    ($($name:ident)*) => {
        const _: () = {
            $(let _ = [crate::exports::$name, crate::header::$name];)*
        };
    };
}

same! {
    ncclGetVersion ncclGetUniqueId ncclGetErrorString ncclGetLastError ncclCommInitRank ncclCommInitRankConfig
    ncclCommUserRank ncclCommCount ncclCommCuDevice ncclCommFinalize ncclCommDestroy ncclCommAbort
    ncclCommGetAsyncError ncclAllReduce ncclBroadcast ncclAllGather ncclReduceScatter ncclGroupStart ncclGroupEnd
    ncclMemAlloc ncclMemFree ncclCommRegister ncclCommDeregister
}
