//! Enables and disables VFs, many times.

use std::path::Path;
use std::time::Duration;

use crate::build;
use crate::checks::suite::{environment, quote};
use crate::error::{Error, Result};
use crate::fetch::apt;
use crate::lab::Lab;
use crate::lab::images::Image;
use crate::machine::nested::{Clock, FirstLevel};
use crate::progress::note;

/// The guest's kernel.
const KERNEL: &str = "6.12";
/// Time limits under load: of a cycle with one VF, and for each further VF.
const CYCLE_LIMIT: (Duration, Duration) = (Duration::from_secs(30), Duration::from_millis(500));
/// The VFs whose interrupt vectors fit on one vCPU: Linux has some 200 vectors per CPU, and a VF takes three.
const VFS_PER_VCPU: u16 = 55;

/// Runs `cycles` cycles with `vfs` VFs in a first-level machine.
pub(crate) fn run(lab: &Lab, workspace: &Path, vfs: u16, cycles: u32) -> Result<()> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    lab.kernel(KERNEL, "vmlinux")?;
    lab.image(Image::Guest, KERNEL)?;
    let (vmm, stress) = (build::vmm(workspace)?, build::program(workspace, "stress")?);
    let (cpus, mebibytes) = (1 + vfs / VFS_PER_VCPU, 512 + 4 * u32::from(vfs));
    note("stress", format!("{cycles} times {vfs} VFs, {cpus} vCPUs, {mebibytes} MiB"));
    let mut machine = FirstLevel::boot(lab, workspace, 8, Clock::Real)?;
    let arguments = format!("{vfs} {cycles} {cpus} {mebibytes}");
    let command = format!("{}{} {arguments}", environment(lab, &vmm, None), quote(&stress));
    let limit = Duration::from_secs(300) + (CYCLE_LIMIT.0 + CYCLE_LIMIT.1 * vfs.into()) * cycles;
    match machine.run(&command, limit, &mut |line| println!("{line}")) {
        Ok(0) => Ok(()),
        Ok(status) => Err(Error::new(format!("the run ended with status {status}"))),
        Err(lost) => Err(Error::new(format!("the run did not end: {}", lost.explain(limit)))),
    }
}
