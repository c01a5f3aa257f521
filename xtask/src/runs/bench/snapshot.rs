//! Measures the time to save and restore a guest.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::build;
use crate::error::Result;
use crate::lab::Lab;
use crate::progress::note;
use crate::runs::boot_time::{self, IN_MEMORY};

/// Time limits of a machine under load: for the start, and for each run.
const LIMITS: (Duration, Duration) = (Duration::from_secs(1200), Duration::from_secs(300));

/// Measures each number of VFs in `tests` with `run_test`, in a first-level machine each, and prints a table.
pub(super) fn run(
    lab: &Lab,
    workspace: &Path,
    vmm: PathBuf,
    (tests, runs): (&[&str], usize),
    run_test: impl Fn(&str, Duration, &str) -> Result<()>,
) -> Result<()> {
    let bench = build::program(workspace, "bench")?;
    let prepare = boot_time::prepare(lab, vmm, bench, "bench")?;
    println!("| guest | figure | median | least to most |");
    println!("|---|---|---|---|");
    let limit = LIMITS.0 + LIMITS.1 * u32::try_from(runs).unwrap_or(u32::MAX);
    for test in tests {
        note("measure", format!("saves and restores with {test} VFs, {runs} times"));
        let command = format!("{prepare} && exec {IN_MEMORY}/bench snapshot 0 {runs} {test}");
        run_test(&command, limit, &format!("snapshots with {test} VFs"))?;
    }
    Ok(())
}
