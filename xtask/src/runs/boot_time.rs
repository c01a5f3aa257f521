//! Measures the time that a guest takes to boot and to enable VFs, the exits that this causes, and the VMM's memory
//! use.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::build;
use crate::checks::suite::{quote, vmm_arguments};
use crate::error::{Context, Error, Result};
use crate::fetch::apt;
use crate::lab::images::Image;
use crate::lab::{GUEST_KERNELS, Lab};
use crate::machine::nested::{Clock, FirstLevel};
use crate::progress::note;

/// A second of virtual time takes 5 s and more, and 255 VFs take many.
const LIMIT: Duration = Duration::from_secs(3600);
/// Folder of the guests' files: in the first-level machine's memory. While the machine waits for the checkout's disk,
/// its clock jumps ahead by the wait.
pub(crate) const IN_MEMORY: &str = "/run/lab";
/// The limit of open files, which suffices for 1,024 VFs.
const OPEN_FILES: u32 = 8192;

/// Measures each start and each number of VFs `runs` times, or only `vfs` VFs, with this commit's VMM or another. Time
/// is virtual, one nanosecond per instruction, so that the figures do not depend on the machine or its load.
pub(crate) fn run(lab: &Lab, workspace: &Path, runs: usize, vfs: Option<usize>, vmm: Option<&Path>) -> Result<()> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    let vmm = vmm.map_or_else(|| build::vmm(workspace), |path| path.canonicalize().context(path.display()))?;
    let measure = build::program(workspace, "measure")?;
    note("measure", "boots, VFs and resident memory, in virtual time; this takes many minutes");
    let mut machine = FirstLevel::boot(lab, workspace, 9, Clock::Instructions)?;
    let vfs = vfs.map_or(String::new(), |vfs| vfs.to_string());
    let command = format!("{} && exec {IN_MEMORY}/measure {runs} {vfs}", prepare(lab, vmm, measure, "measure")?);
    match machine.run(&command, LIMIT, &mut |line| println!("{line}")) {
        Ok(0) => Ok(()),
        Ok(status) => Err(Error::new(format!("the measurement ended with status {status}"))),
        Err(lost) => Err(Error::new(format!("the measurement did not end: {}", lost.explain(LIMIT)))),
    }
}

/// The shell commands that copy everything the measurement `name` reads into memory.
pub(crate) fn prepare(lab: &Lab, vmm: PathBuf, measure: PathBuf, name: &str) -> Result<String> {
    let mut files = vec![(vmm, "vmm".to_owned()), (measure, name.to_owned())];
    for kernel in GUEST_KERNELS {
        files.push((lab.kernel(kernel, "vmlinux")?, format!("kernels/{kernel}/vmlinux")));
        files.push((lab.image(Image::Guest, kernel)?, format!("images/{}", Image::Guest.file_name(kernel))));
    }
    let mut commands =
        format!("ulimit -n {OPEN_FILES} && export CH_LAB={IN_MEMORY} CH_BINARY={IN_MEMORY}/vmm {}", vmm_arguments());
    for (from, to) in files {
        let (folder, _) = to.rsplit_once('/').unwrap_or_default();
        commands += &format!(" && mkdir -p {IN_MEMORY}/{folder} && cp {} {IN_MEMORY}/{to}", quote(&from));
    }
    Ok(commands)
}
