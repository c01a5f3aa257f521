//! What cargo builds for the lab: static binaries, which run in the first-level machine as they run here.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::error::{Context, Error, Result};
use crate::progress::Step;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The static binaries that a run of the lab needs.
pub struct Binaries {
    /// The command under test, optimised.
    pub vmm: PathBuf,
    /// The measurement of throughput and latency.
    pub bench: PathBuf,
    /// The demonstration.
    pub demo: PathBuf,
    /// A PF that comes to a guest and goes.
    pub hotplug: PathBuf,
    /// The measurement of starts and memory.
    pub measure: PathBuf,
    /// Both ends of what [`Self::bench`] measures.
    pub netbench: PathBuf,
    /// VFs that come and go.
    pub stress: PathBuf,
    /// VFs over vDPA devices that pin memory.
    pub vp_vdpa: PathBuf,
    /// The folder of the fixtures: backends that guests' NICs have.
    pub fixtures: PathBuf,
    /// Each file of integration tests: its name, and the test binary.
    pub tests: Vec<(String, PathBuf)>,
}

/// Builds the commands that are delivered, static and optimised.
pub fn commands(workspace: &Path) -> Result<Vec<PathBuf>> {
    let built = build(
        workspace,
        "the commands, static and optimised",
        &["build", "--release", "--package", "cloud-hypervisor", "--bins"],
    )?;
    Ok(built.into_iter().map(|executable| executable.path).collect())
}

/// Builds the command, the lab's programs, and with `tests` the integration tests.
pub fn static_binaries(workspace: &Path, tests: bool) -> Result<Binaries> {
    let vmm =
        build(workspace, "the command, static and optimised", &["build", "--release", "--bin", "cloud-hypervisor"])?;
    let programs = build(workspace, "the lab's programs", &["build", "--package", "integration", "--bins"])?;
    // What serves a guest's NIC is measured, too.
    let fixtures = build(workspace, "the fixtures", &["build", "--release", "--package", "fixtures", "--bins"])?;
    let netbench = ["build", "--release", "--package", "integration", "--bin", "netbench"];
    let netbench = build(workspace, "the measuring program", &netbench)?;
    let test_binaries = if tests {
        let arguments = ["test", "--no-run", "--package", "integration", "--tests"];
        let mut tests = build(workspace, "the integration tests", &arguments)?;
        let arguments = ["test", "--no-run", "--package", "fixtures", "--test", "vduse"];
        tests.extend(build(workspace, "the tests of VDUSE devices", &arguments)?);
        tests
    } else {
        Vec::new()
    };
    let only = |built: &[Executable], name: &str| {
        let found = built.iter().find(|executable| executable.name == name);
        found.map(|executable| executable.path.clone()).ok_or_else(|| Error::new(format!("cargo built no {name}")))
    };
    Ok(Binaries {
        vmm: only(&vmm, "cloud-hypervisor")?,
        bench: only(&programs, "bench")?,
        demo: only(&programs, "demo")?,
        hotplug: only(&programs, "hotplug")?,
        measure: only(&programs, "measure")?,
        netbench: only(&netbench, "netbench")?,
        stress: only(&programs, "stress")?,
        vp_vdpa: only(&programs, "vp_vdpa")?,
        fixtures: only(&fixtures, "vhost-user-net")?.parent().map(Path::to_owned).unwrap_or_default(),
        tests: test_binaries
            .into_iter()
            .filter(|executable| executable.kind == "test")
            .map(|executable| (executable.name, executable.path))
            .collect(),
    })
}

struct Executable {
    name: String,
    kind: String,
    path: PathBuf,
}

fn build(workspace: &Path, what: &str, arguments: &[&str]) -> Result<Vec<Executable>> {
    let step = Step::begin("build", what);
    let mut command = cargo(workspace);
    command.args(arguments).args(["--target", TARGET, "--target-dir", "target/static"]);
    command.args(["--message-format", "json-render-diagnostics", "--quiet"]);
    // A folder of their own keeps these flags from rebuilding what a plain `cargo build` made.
    command.env("RUSTFLAGS", "-C target-feature=+crt-static").stderr(Stdio::inherit());
    let built = command.output().context("running cargo")?;
    if !built.status.success() {
        return Err(Error::new(format!("cargo could not build {what}")));
    }
    step.done();
    Ok(String::from_utf8_lossy(&built.stdout).lines().filter_map(executable).collect())
}

/// The executable that a cargo message is about, if it is about one.
fn executable(message: &str) -> Option<Executable> {
    let message: Value = serde_json::from_str(message).ok()?;
    let target = message.get("target")?;
    Some(Executable {
        name: target.get("name")?.as_str()?.to_owned(),
        kind: target.get("kind")?.get(0)?.as_str()?.to_owned(),
        path: message.get("executable")?.as_str()?.into(),
    })
}

/// The cargo that runs this program, in the workspace.
pub fn cargo(workspace: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace).stdin(Stdio::null());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_message_about_an_executable_names_one() {
        let message =
            r#"{"reason":"compiler-artifact","target":{"kind":["test"],"name":"sriov"},"executable":"/t/sriov-1"}"#;
        let found = executable(message).unwrap();
        assert_eq!(
            (found.name.as_str(), found.kind.as_str(), found.path.to_str()),
            ("sriov", "test", Some("/t/sriov-1"))
        );
        let library = r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"pci"},"executable":null}"#;
        assert!(executable(library).is_none());
        assert!(executable("not json").is_none());
    }
}
