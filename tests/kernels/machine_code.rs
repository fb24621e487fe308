//! The compiler's output for the kernels: symbols and instructions of each object, read with binutils.
//!
//! A fused multiply-add, a weak symbol or a scalar loop changes results or speed, and no other test may notice it on
//! its author's machine. The tests must fail instead of skipping if INSTEP_REQUIRE_BINUTILS=1 says that the tools
//! exist. A cross-compiled test uses the target's tools with their prefix, such as `aarch64-linux-gnu-objdump`.
#![cfg(target_os = "linux")]

use std::io::Write;
use std::process::Command;

#[cfg(target_arch = "x86_64")]
const BUILDS: [&str; 3] = ["baseline", "avx2", "avx512"];
#[cfg(not(target_arch = "x86_64"))]
const BUILDS: [&str; 1] = ["baseline"];

/// The beginnings of the mnemonics of fused multiply-adds, scalar and vector.
const FUSED: &[&str] = if cfg!(target_arch = "x86_64") {
    &["vfm", "vfnm"]
} else {
    &["fmadd", "fmsub", "fnmadd", "fnmsub", "fmla", "fmls"]
};

fn archive(build: &str) -> String {
    format!("{}/{build}/libinstep_{build}.a", env!("INSTEP_KERNEL_OBJECTS"))
}

/// Returns the output of a tool for one archive, or none if the tool is missing.
fn output(tool: &str, arguments: &[&str], build: &str) -> Option<String> {
    let tool = &format!("{}{tool}", std::env::var("INSTEP_BINUTILS_PREFIX").unwrap_or_default());
    match Command::new(tool).args(arguments).arg(archive(build)).env("LC_ALL", "C").output() {
        Ok(done) => {
            assert!(done.status.success(), "{tool} {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
            Some(String::from_utf8(done.stdout).unwrap())
        }
        Err(error) => {
            let required = std::env::var("INSTEP_REQUIRE_BINUTILS").is_ok_and(|value| value == "1");
            assert!(!required, "INSTEP_REQUIRE_BINUTILS=1, but {tool} does not start: {error}");
            // Past the capture of the test harness, which would swallow it.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: {tool} does not start, the {build} object is unchecked"
            );
            None
        }
    }
}

/// Returns the kind letter and the name of every symbol, from lines like `0000 D name` and `U name`.
fn symbols(listing: &str) -> Vec<(char, String)> {
    let symbol = |line: &str| {
        let mut words = line.split_whitespace().rev();
        let (name, kind) = (words.next()?, words.next()?);
        (kind.len() == 1).then(|| (kind.chars().next().unwrap(), name.to_string()))
    };
    listing.lines().filter_map(symbol).collect()
}

/// Returns the mnemonic and the operands of every instruction, from lines like `  1f: <tab>vdivps %zmm0,%zmm1,%zmm2`.
fn instructions(listing: &str) -> Vec<(&str, &str)> {
    listing
        .lines()
        .filter_map(|line| line.split_once(":\t"))
        .map(|(_, text)| text.trim().split_once(char::is_whitespace).unwrap_or((text.trim(), "")))
        .collect()
}

#[test]
fn each_object_exports_its_table_and_nothing_that_a_linker_could_merge() {
    for build in BUILDS {
        let Some(listing) = output("nm", &[], build) else { return };
        let symbols = symbols(&listing);
        let global: Vec<&str> = symbols
            .iter()
            .filter(|(kind, _)| kind.is_uppercase() && *kind != 'U')
            .map(|(_, name)| &**name)
            .collect();
        assert_eq!(global, [format!("instep_kernels_{build}")]);
        // Weak ones are W, V or, in lower case, undefined; u is unique across the process.
        let mergeable: Vec<_> = symbols.iter().filter(|(kind, _)| "wvu".contains(*kind)).collect();
        assert!(mergeable.is_empty(), "{build}: {mergeable:?}");
    }
}

#[test]
fn the_objects_need_nothing_but_the_memory_functions() {
    // Compilers may call these for any loop; everything else would be a runtime, libm or a stack protector. Atomics of
    // aarch64 go through the compiler's own helpers, which pick LSE or not at run time and which rustc links.
    let is_atomic = |name: &str| cfg!(target_arch = "aarch64") && name.starts_with("__aarch64_");
    let allowed = ["memset", "memcpy", "memmove", "_GLOBAL_OFFSET_TABLE_"];
    for build in BUILDS {
        let Some(listing) = output("nm", &["-u"], build) else { return };
        for (_, name) in symbols(&listing) {
            assert!(allowed.contains(&name.as_str()) || is_atomic(&name), "the {build} object needs {name}");
        }
    }
}

#[test]
fn no_object_contains_a_fused_multiply_add() {
    for build in BUILDS {
        let Some(listing) = output("objdump", &["-d", "--no-show-raw-insn"], build) else { return };
        let instructions = instructions(&listing);
        assert!(instructions.len() > 1000, "{build}: the listing is not understood");
        let is_fused = |name: &str| FUSED.iter().any(|fused| name.starts_with(fused));
        let fused: Vec<_> = instructions.iter().filter(|(name, _)| is_fused(name)).collect();
        assert!(fused.is_empty(), "{build}: {fused:?}");
    }
}

#[test]
fn the_steps_divide_whole_vectors_of_each_instruction_set() {
    let x86_64 = [("baseline", "divps", "%xmm"), ("avx2", "vdivps", "%ymm"), ("avx512", "vdivps", "%zmm")];
    let aarch64 = [("baseline", "fdiv", ".4s")];
    let expected: &[_] = if cfg!(target_arch = "x86_64") { &x86_64 } else { &aarch64 };
    for &(build, mnemonic, register) in expected {
        let Some(listing) = output("objdump", &["-d", "--no-show-raw-insn"], build) else { return };
        let divides = |(name, operands): &(&str, &str)| *name == mnemonic && operands.contains(register);
        // Adam with two states, and with three.
        let count = instructions(&listing).iter().filter(|i| divides(i)).count();
        assert!(count >= 2, "{build}: {count} times {mnemonic} on {register}");
    }
}
