//! How long a guest takes to start, and what the VMM keeps in memory.

use std::path::Path;
use std::time::Duration;

use crate::apt;
use crate::build;
use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::nested::{Clock, FirstLevel};
use crate::progress::note;
use crate::suite::{environment, quote};

/// A start of 2 s of virtual time takes about 20 s; the first-level machine's own takes as long.
const LIMIT: Duration = Duration::from_secs(600);

/// Measures `runs` starts in virtual time, where one instruction is one nanosecond, so that the figures depend on no
/// machine and no load; and the resident memory with and without reserved VFs.
pub fn run(lab: &Lab, workspace: &Path, runs: usize) -> Result<()> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    let binaries = build::static_binaries(workspace, false)?;
    note("measure", format!("{runs} starts and the resident memory, in virtual time; this takes minutes"));
    let mut machine = FirstLevel::boot(lab, workspace, 9, Clock::Instructions)?;
    let command = format!("{}{} {runs}", environment(lab, &binaries), quote(&binaries.measure));
    match machine.run(&command, LIMIT, &mut |line| println!("{line}")) {
        Ok(0) => Ok(()),
        Ok(status) => Err(Error::new(format!("the measurement ended with status {status}"))),
        Err(lost) => Err(Error::new(format!("the measurement did not end: {}", lost.explain(LIMIT)))),
    }
}
