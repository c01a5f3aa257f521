//! How long a guest takes to start and to enable VFs, how often it is left for that, and what the VMM keeps in memory.

use std::path::Path;
use std::time::Duration;

use crate::apt;
use crate::build::{self, Binaries};
use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::nested::{Clock, FirstLevel};
use crate::progress::note;
use crate::suite::quote;

/// A second of virtual time takes 5 s and more, and 255 VFs take many.
const LIMIT: Duration = Duration::from_secs(3600);
/// Where the files are that guests start from: in the first-level machine's memory. While the machine waits for the checkout's disk
/// its clock leaps, by as much as the disk is busy.
const IN_MEMORY: &str = "/run/lab";
/// Open files that 1,024 VFs may need, and more.
const OPEN_FILES: u32 = 8192;

/// Measures in virtual time, where one instruction is one nanosecond, so that the figures depend on no machine and no load: each
/// start and each number of VFs `runs` times, or only `vfs` VFs.
pub fn run(lab: &Lab, workspace: &Path, runs: usize, vfs: Option<usize>) -> Result<()> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    let binaries = build::static_binaries(workspace, false)?;
    note("measure", "starts, VFs and the resident memory, in virtual time; this takes many minutes");
    let mut machine = FirstLevel::boot(lab, workspace, 9, Clock::Instructions)?;
    let vfs = vfs.map_or(String::new(), |vfs| vfs.to_string());
    let command = format!("{} && exec {IN_MEMORY}/measure {runs} {vfs}", prepare(lab, &binaries));
    match machine.run(&command, LIMIT, &mut |line| println!("{line}")) {
        Ok(0) => Ok(()),
        Ok(status) => Err(Error::new(format!("the measurement ended with status {status}"))),
        Err(lost) => Err(Error::new(format!("the measurement did not end: {}", lost.explain(LIMIT)))),
    }
}

/// The shell commands that bring all that the measurement reads into memory.
fn prepare(lab: &Lab, binaries: &Binaries) -> String {
    let mut files = vec![(binaries.vmm.clone(), "vmm".to_owned()), (binaries.measure.clone(), "measure".to_owned())];
    for kernel in ["6.1", "6.12"] {
        files.push((lab.kernel(kernel, "vmlinux"), format!("kernels/{kernel}/vmlinux")));
        let image = format!("guest-{kernel}.cpio");
        files.push((lab.image(&image), format!("images/{image}")));
    }
    let mut commands = format!("ulimit -n {OPEN_FILES} && export CH_LAB={IN_MEMORY} CH_BINARY={IN_MEMORY}/vmm");
    for (from, to) in files {
        let (folder, _) = to.rsplit_once('/').unwrap_or_default();
        commands += &format!(" && mkdir -p {IN_MEMORY}/{folder} && cp {} {IN_MEMORY}/{to}", quote(&from));
    }
    commands
}
