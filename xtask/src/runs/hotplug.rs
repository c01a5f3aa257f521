//! Plugs a PF with its VFs into a guest and unplugs it, many times.

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

/// Time limits under load: for the start, and for each round.
const LIMITS: (Duration, Duration) = (Duration::from_secs(300), Duration::from_secs(90));

/// Runs `rounds` rounds in a first-level machine, with a guest of the kernel `kernel`.
pub(crate) fn run(lab: &Lab, workspace: &Path, kernel: &str, rounds: u32) -> Result<()> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    lab.kernel(kernel, "vmlinux")?;
    lab.image(Image::Guest, kernel)?;
    let (vmm, hotplug) = (build::vmm(workspace)?, build::program(workspace, "hotplug")?);
    note("hotplug", format!("{rounds} rounds, Linux {kernel}"));
    let mut machine = FirstLevel::boot(lab, workspace, 7, Clock::Real)?;
    let command = format!("{}{} {kernel} {rounds}", environment(lab, &vmm, None), quote(&hotplug));
    let limit = LIMITS.0 + LIMITS.1 * rounds;
    match machine.run(&command, limit, &mut |line| println!("{line}")) {
        Ok(0) => Ok(()),
        Ok(status) => Err(Error::new(format!("the run ended with status {status}"))),
        Err(lost) => Err(Error::new(format!("the run did not end: {}", lost.explain(limit)))),
    }
}
