//! How long a guest takes to start and to enable VFs, how often it is left for that, and what the VMM keeps in memory.

use std::path::Path;
use std::time::Duration;

use crate::apt;
use crate::build;
use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::nested::{Clock, FirstLevel};
use crate::progress::note;
use crate::suite::{environment, quote};

/// A second of virtual time takes 5 s and more, and 255 VFs take many.
const LIMIT: Duration = Duration::from_secs(3600);

/// Measures in virtual time, where one instruction is one nanosecond, so that the figures depend on no machine and no load: each
/// start and each number of VFs `runs` times, or only `vfs` VFs.
pub fn run(lab: &Lab, workspace: &Path, runs: usize, vfs: Option<usize>) -> Result<()> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    let binaries = build::static_binaries(workspace, false)?;
    note("measure", "starts, VFs and the resident memory, in virtual time; this takes many minutes");
    let mut machine = FirstLevel::boot(lab, workspace, 9, Clock::Instructions)?;
    let vfs = vfs.map_or(String::new(), |vfs| vfs.to_string());
    let command = format!("{}{} {runs} {vfs}", environment(lab, &binaries), quote(&binaries.measure));
    match machine.run(&command, LIMIT, &mut |line| println!("{line}")) {
        Ok(0) => Ok(()),
        Ok(status) => Err(Error::new(format!("the measurement ended with status {status}"))),
        Err(lost) => Err(Error::new(format!("the measurement did not end: {}", lost.explain(LIMIT)))),
    }
}
