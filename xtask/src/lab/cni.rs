//! CNI plugins and a client of VFs for guests, which Go builds from `tests/clients/cni` at the versions pinned there.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::error::{Context, Result};
use crate::fetch::apt::{self, output};
use crate::lab::Lab;
use crate::progress::Step;

/// The packages whose programs a guest runs.
const PROGRAMS: [&str; 4] = [
    "./vf",
    "github.com/containernetworking/cni/cnitool",
    "github.com/containernetworking/plugins/plugins/main/host-device",
    "github.com/containernetworking/plugins/plugins/ipam/static",
];

/// Builds the programs, static, and writes them to an archive that a guest reads from a disk. Go decides what is out of
/// date.
pub(crate) fn prepare(lab: &Lab, workspace: &Path) -> Result<()> {
    apt::install_missing(&[("go", "golang-go"), ("tar", "tar")])?;
    let folder = lab.folder().join("cni");
    let programs = folder.join("programs");
    fs::create_dir_all(&programs).context(format!("making {}", folder.display()))?;
    let step = Step::begin("build", "CNI plugins for guests");
    let mut build = Command::new("go");
    build.args(["build", "-buildvcs=false", "-mod=readonly", "-trimpath", "-ldflags", "-s -w", "-o"]);
    build.arg(&programs).args(PROGRAMS).current_dir(workspace.join("tests/clients/cni")).env("CGO_ENABLED", "0");
    output(&mut build)?;
    let mut archive = Command::new("tar");
    archive.args(["--sort=name", "--mtime=@0", "-cf"]).arg(folder.join("programs.tar"));
    output(archive.arg("-C").arg(&programs).arg("."))?;
    step.done();
    Ok(())
}
