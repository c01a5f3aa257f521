//! Miri: runs tests in an interpreter that finds undefined behaviour.
//!
//! Miri can run tests without system calls that it does not support: all of `pci`, and those of `virtio-devices` that
//! work on bytes, not on rings in mapped memory.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::checks::check;
use crate::checks::suite::Tally;
use crate::error::Result;
use crate::fetch::nightly::{self, TOOLCHAIN};

/// The tests of `virtio-devices` that Miri runs: those whose names contain one of these.
const OF_DEVICES: &[&str] = &[
    "policy::tests::",
    "net_protocol::",
    "net::filter::",
    "vsock::packet::",
    "vsock::credit::",
    "transport::",
    "rate_limiter::",
];
/// Tests that are left out: they look up each of 65,536 routing IDs, which takes Miri half an hour.
const LEFT_OUT: &[&str] = &["topology::tests"];
/// Number of random cases of a property. Miri is hundreds of times slower than the processor.
const CASES: &str = "2";

/// Runs the tests, and prints their total.
pub(crate) fn run(workspace: &Path) -> Result<bool> {
    nightly::install()?;
    nightly::component(&["miri", "rust-src"])?;
    let mut tally = Tally::default();
    for (package, filters) in [("pci-sriov", &[][..]), ("virtio-devices", OF_DEVICES)] {
        let mut command = Command::new("rustup");
        command.args(["run", TOOLCHAIN, "cargo", "miri", "test", "--quiet", "--package", package, "--lib", "--"]);
        command.args(filters).args(LEFT_OUT.iter().flat_map(|name| ["--skip", name]));
        // Properties read the clock and a file of failed cases; a failing case is not shrunk.
        command.env("MIRIFLAGS", "-Zmiri-disable-isolation").env("PROPTEST_CASES", CASES);
        command.env("PROPTEST_MAX_SHRINK_ITERS", "0").current_dir(workspace).stdin(Stdio::null());
        tally += check::count(&mut command, &format!("{package} under Miri"))?;
    }
    println!("{} passed, {} failed", tally.passed, tally.failed);
    Ok(tally.failed == 0)
}
