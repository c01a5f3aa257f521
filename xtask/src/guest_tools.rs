//! Programs for guests: static, so that they run in any Linux, and small.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::build::{self, guest_programs};
use crate::error::{Context, Result};
use crate::fetch::apt::{self, output};
use crate::fetch::nightly;
use crate::lab::Lab;
use crate::progress::note;

/// The programs, each of the package of its name.
const PROGRAMS: [&str; 2] = ["vfctl", "virtio-sriov-cni"];
/// The target whose C library is made for static programs.
const MUSL: &str = "x86_64-unknown-linux-musl";

/// Fills `target/guest` with the programs, and prints their sizes.
pub(crate) fn run(workspace: &Path) -> Result<()> {
    for program in programs(workspace)? {
        let bytes = fs::metadata(&program).context(program.display())?.len();
        note("done", format!("{} ({} KiB)", program.display(), bytes.div_ceil(1024)));
    }
    Ok(())
}

/// Builds the programs, and writes them to an archive that a guest reads from a disk.
pub(crate) fn archive(lab: &Lab, workspace: &Path) -> Result<()> {
    apt::install_missing(&[("tar", "tar")])?;
    programs(workspace)?;
    let mut archive = Command::new("tar");
    archive.args(["--sort=name", "--mtime=@0", "-cf"]).arg(lab.folder().join("guest-tools.tar"));
    output(archive.arg("-C").arg(folder(workspace)).args(PROGRAMS)).map(drop)
}

fn folder(workspace: &Path) -> PathBuf {
    workspace.join("target/guest")
}

/// Builds the programs into their folder, and returns them.
pub(crate) fn programs(workspace: &Path) -> Result<Vec<PathBuf>> {
    // A Rust that is not of rustup may lack the target. Debian's C library also links into static programs.
    let target = if nightly::target(MUSL).is_ok() { MUSL } else { build::TARGET };
    let folder = folder(workspace);
    fs::create_dir_all(&folder).context(format!("making {}", folder.display()))?;
    let copy = |(built, name): (PathBuf, &str)| {
        let program = folder.join(name);
        // A program that runs cannot be written to, but replaced.
        let _ = fs::remove_file(&program);
        fs::copy(&built, &program).context(format!("copying {}", built.display()))?;
        Ok(program)
    };
    guest_programs(workspace, &PROGRAMS, target)?.into_iter().zip(PROGRAMS).map(copy).collect()
}
