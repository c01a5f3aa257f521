//! Programs of container networks for guests, which Go builds from folders of `tests/clients` at the versions pinned
//! there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Context, Result};
use crate::fetch::apt::{self, output};
use crate::lab::Lab;
use crate::progress::Step;

/// Programs of one archive: a folder of `tests/clients`, and packages that are built there.
type Sources = [(&'static str, &'static [&'static str])];

/// An archive of static programs, which a guest reads from a disk.
pub(crate) struct Archive {
    /// Name of its file, without the extension.
    name: &'static str,
    /// Subject in messages.
    subject: &'static str,
    sources: &'static Sources,
}

/// CNI plugins and what calls them, which build within a minute.
pub(crate) const PLUGINS: Archive = Archive {
    name: "programs",
    subject: "CNI plugins for guests",
    sources: &[
        (
            "cni",
            &[
                "./vf",
                "github.com/containernetworking/cni/cnitool",
                "github.com/containernetworking/plugins/plugins/main/host-device",
                "github.com/containernetworking/plugins/plugins/ipam/static",
            ],
        ),
        ("sriov-cni", &["github.com/intel/sriov-cni/cmd/sriov"]),
    ],
};
/// Programs of a cluster's node that are built with a client of Kubernetes, which takes ten minutes.
pub(crate) const NODE: Archive = Archive {
    name: "node",
    subject: "programs of a Kubernetes node for guests",
    sources: &[
        ("multus", &["gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus"]),
        ("sriovdp", &["./kubelet", "github.com/k8snetworkplumbingwg/sriov-network-device-plugin/cmd/sriovdp"]),
        ("operator", &["github.com/k8snetworkplumbingwg/sriov-network-operator/cmd/sriov-network-config-daemon"]),
    ],
};

impl Archive {
    /// The folder of the lab with its programs.
    pub(crate) fn folder(&self, lab: &Lab) -> PathBuf {
        lab.folder().join("cni").join(self.name)
    }
}

/// Builds the programs of `archive` and writes them to it. Go decides what is out of date.
pub(crate) fn prepare(lab: &Lab, workspace: &Path, archive: &Archive) -> Result<()> {
    apt::install_missing(&[("go", "golang-go"), ("tar", "tar")])?;
    let programs = archive.folder(lab);
    fs::create_dir_all(&programs).context(format!("making {}", programs.display()))?;
    let step = Step::begin("build", archive.subject);
    for (client, packages) in archive.sources {
        let mut build = Command::new("go");
        build.args(["build", "-buildvcs=false", "-mod=readonly", "-trimpath", "-ldflags", "-s -w", "-o"]);
        build.arg(&programs).args(*packages);
        build.current_dir(workspace.join("tests/clients").join(client)).env("CGO_ENABLED", "0");
        output(&mut build)?;
    }
    let mut pack = Command::new("tar");
    pack.args(["--sort=name", "--mtime=@0", "-cf"]).arg(programs.with_extension("tar"));
    output(pack.arg("-C").arg(&programs).arg("."))?;
    step.done();
    Ok(())
}
