//! A PF with its VFs that comes to a guest and goes, many times.

use std::path::Path;
use std::time::Duration;

use crate::apt;
use crate::build;
use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::nested::{Clock, FirstLevel};
use crate::progress::note;
use crate::suite::{environment, quote};

/// What the start may take, and what each round may take, under load.
const LIMITS: (Duration, Duration) = (Duration::from_secs(300), Duration::from_secs(90));

/// Runs `rounds` rounds in a first-level machine, with a guest of the kernel `kernel`.
pub fn run(lab: &Lab, workspace: &Path, kernel: &str, rounds: u32) -> Result<()> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    let binaries = build::static_binaries(workspace, false)?;
    note("hotplug", format!("{rounds} rounds, Linux {kernel}"));
    let mut machine = FirstLevel::boot(lab, workspace, 7, Clock::Real)?;
    let command = format!("{}{} {kernel} {rounds}", environment(lab, &binaries), quote(&binaries.hotplug));
    let limit = LIMITS.0 + LIMITS.1 * rounds;
    match machine.run(&command, limit, &mut |line| println!("{line}")) {
        Ok(0) => Ok(()),
        Ok(status) => Err(Error::new(format!("the run ended with status {status}"))),
        Err(lost) => Err(Error::new(format!("the run did not end: {}", lost.explain(limit)))),
    }
}
