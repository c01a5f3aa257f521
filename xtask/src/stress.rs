//! VFs that come and go, many times.

use std::path::Path;
use std::time::Duration;

use crate::apt;
use crate::build;
use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::nested::{Clock, FirstLevel};
use crate::progress::note;
use crate::suite::{environment, quote};

/// What a cycle with one VF may take, and what each further VF adds, under load.
const CYCLE_LIMIT: (Duration, Duration) = (Duration::from_secs(30), Duration::from_millis(500));
/// VFs that have their interrupt vectors on one vCPU: Linux has some 200 vectors, and a VF wants three.
const VFS_PER_VCPU: u16 = 55;

/// Runs `cycles` cycles with `vfs` VFs in a first-level machine.
pub fn run(lab: &Lab, workspace: &Path, vfs: u16, cycles: u32) -> Result<()> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    let binaries = build::static_binaries(workspace, false)?;
    let (cpus, mebibytes) = (1 + vfs / VFS_PER_VCPU, 512 + 4 * u32::from(vfs));
    note("stress", format!("{cycles} times {vfs} VFs, {cpus} vCPUs, {mebibytes} MiB"));
    let mut machine = FirstLevel::boot(lab, workspace, 8, Clock::Real)?;
    let arguments = format!("{vfs} {cycles} {cpus} {mebibytes}");
    let command = format!("{}{} {arguments}", environment(lab, &binaries), quote(&binaries.stress));
    let limit = Duration::from_secs(300) + (CYCLE_LIMIT.0 + CYCLE_LIMIT.1 * vfs.into()) * cycles;
    match machine.run(&command, limit, &mut |line| println!("{line}")) {
        Ok(0) => Ok(()),
        Ok(status) => Err(Error::new(format!("the run ended with status {status}"))),
        Err(lost) => Err(Error::new(format!("the run did not end: {}", lost.explain(limit)))),
    }
}
