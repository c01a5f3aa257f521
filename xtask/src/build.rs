//! Programs that cargo builds for the lab: static binaries, which run in the first-level machine as on this machine.
//!
//! Each command builds only the programs that it runs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::error::{Context, Error, Result};
use crate::progress::Step;

/// The target of programs for the lab.
pub(crate) const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Flags that link C's library into a program.
const STATIC: &str = "-C target-feature=+crt-static";
/// These flags, with relative relocations packed: the program reads them when it starts, and their 240 KiB stay in
/// memory otherwise.
const STATIC_AND_PACKED: &str = "-C target-feature=+crt-static -C link-arg=-Wl,-z,pack-relative-relocs";

/// Builds the commands that are delivered, optimised.
pub(crate) fn commands(workspace: &Path) -> Result<Vec<PathBuf>> {
    let built = build(
        workspace,
        "the commands, optimised",
        &["build", "--release", "--package", "cloud-hypervisor", "--bins"],
    )?;
    Ok(built.into_iter().map(|executable| executable.path).collect())
}

/// Arguments that build the fixtures, optimised because they take part in measurements.
const FIXTURES: &[&str] = &["build", "--release", "--bin", "vhost-user-net", "--bin", "vduse-net", "--bin", "vdpa-dev"];

/// Arguments that build the command under test, its client and the fixtures, optimised. A single build shares their
/// dependencies, and overlaps their last steps, each of which has one thread.
fn optimised() -> Vec<&'static str> {
    [FIXTURES, &["--bin", "cloud-hypervisor", "--bin", "ch-remote"]].concat()
}

/// Builds the command under test, its client next to it, and the fixtures, optimised. Returns the command and the
/// folder of the fixtures.
pub(crate) fn vmm_and_fixtures(workspace: &Path) -> Result<(PathBuf, PathBuf)> {
    let built = build(workspace, "cloud-hypervisor and the fixtures, optimised", &optimised())?;
    Ok((only(&built, "cloud-hypervisor")?, folder_of_fixtures(&built)?))
}

/// The command that [`vmm_and_fixtures`] runs.
pub(crate) fn command_for_vmm_and_fixtures(workspace: &Path) -> Command {
    for_the_lab(workspace, &optimised())
}

/// Builds the command under test, optimised.
pub(crate) fn vmm(workspace: &Path) -> Result<PathBuf> {
    let built = build(workspace, "cloud-hypervisor, optimised", &["build", "--release", "--bin", "cloud-hypervisor"])?;
    only(&built, "cloud-hypervisor")
}

/// Builds the command and the demonstration `demo`, in the profile that builds fastest.
pub(crate) fn demonstration(workspace: &Path, demo: &str) -> Result<(PathBuf, PathBuf)> {
    let packages = ["--package", "cloud-hypervisor", "--package", "integration"];
    let binaries = ["--bin", "cloud-hypervisor", "--bin", demo];
    let arguments = [&["build", "--profile", "quick"][..], &packages, &binaries].concat();
    let built = build(workspace, "cloud-hypervisor and the demonstration", &arguments)?;
    Ok((only(&built, "cloud-hypervisor")?, only(&built, demo)?))
}

/// Builds the programs `names` for `target`, static, and small in memory and on disk.
pub(crate) fn guest_programs(workspace: &Path, names: &[&str], target: &str) -> Result<Vec<PathBuf>> {
    let mut command = cargo(workspace);
    command.args(["build", "--profile", "guest", "--target", target]).env("RUSTFLAGS", STATIC);
    command.args(names.iter().flat_map(|&name| ["--package", name, "--bin", name]));
    let built = run(command, &format!("{}, small", names.join(" and ")))?;
    names.iter().map(|name| only(&built, name)).collect()
}

/// Builds a program of `tests/integration/src/bin`.
pub(crate) fn program(workspace: &Path, name: &str) -> Result<PathBuf> {
    let built = build(workspace, name, &["build", "--package", "integration", "--bin", name])?;
    only(&built, name)
}

/// Builds the program `name` for the measurements of `cargo xtask bench`, optimised.
pub(crate) fn measuring_program(workspace: &Path, name: &str) -> Result<PathBuf> {
    let arguments = ["build", "--release", "--package", "integration", "--bin", name];
    only(&build(workspace, &format!("{name}, optimised"), &arguments)?, name)
}

/// Builds the fixtures, which are backends of guests' NICs, optimised, and returns their folder.
pub(crate) fn fixtures(workspace: &Path) -> Result<PathBuf> {
    folder_of_fixtures(&build(workspace, "the fixtures, optimised", FIXTURES)?)
}

fn folder_of_fixtures(built: &[Executable]) -> Result<PathBuf> {
    Ok(only(built, "vhost-user-net")?.parent().map(Path::to_owned).unwrap_or_default())
}

/// Builds the command with assertions, as for development. If all unit tests are built already, this is the command
/// that they have used; building it alone has other features of dependencies, and takes a minute.
pub(crate) fn checked_vmm(workspace: &Path, tests_are_built: bool) -> Result<PathBuf> {
    let built = |arguments: [&str; 2]| {
        let mut command = cargo(workspace);
        command.args(arguments);
        only(&run(command, "the command, with its assertions")?, "cloud-hypervisor")
    };
    let alone = || built(["build", "--bin=cloud-hypervisor"]);
    // A test that does not build must not keep the command from being tested.
    if tests_are_built { built(["test", "--no-run"]).or_else(|_| alone()) } else { alone() }
}

/// Builds the integration tests. Returns each test binary, with what stands before the names of its tests.
///
/// A binary of `tests/integration` has a module for each file of tests. A binary without modules has one file, whose
/// name is then the target's.
pub(crate) fn tests(workspace: &Path) -> Result<Vec<(String, PathBuf)>> {
    let arguments = ["test", "--no-run", "--package", "integration", "--tests"];
    let built = build(workspace, "the integration tests", &arguments)?;
    let mut tests: Vec<_> = built.into_iter().map(|executable| (String::new(), executable)).collect();
    let arguments = ["test", "--no-run", "--package", "fixtures", "--test", "vduse"];
    let built = build(workspace, "the tests of VDUSE devices", &arguments)?;
    tests.extend(built.into_iter().map(|executable| (format!("{}::", executable.name), executable)));
    tests.retain(|(_, executable)| executable.kind == "test");
    Ok(tests.into_iter().map(|(prefix, executable)| (prefix, executable.path)).collect())
}

struct Executable {
    name: String,
    kind: String,
    /// True for a harness of tests, such as that of a program's unit tests, which has the program's name and kind.
    has_tests: bool,
    path: PathBuf,
}

fn build(workspace: &Path, what: &str, arguments: &[&str]) -> Result<Vec<Executable>> {
    run(for_the_lab(workspace, arguments), what)
}

/// A command of cargo with the settings of programs that run in the lab.
fn for_the_lab(workspace: &Path, arguments: &[&str]) -> Command {
    let mut command = cargo(workspace);
    // Naming the target keeps the flags from build scripts and macros, which are then the same as those of a plain
    // `cargo build`.
    command.args(arguments).args(["--target", TARGET]).env("RUSTFLAGS", STATIC_AND_PACKED);
    command
}

fn run(mut command: Command, what: &str) -> Result<Vec<Executable>> {
    let step = Step::begin("build", what);
    command.args(["--message-format", "json-render-diagnostics", "--quiet"]).stderr(Stdio::inherit());
    let built = command.output().context("running cargo")?;
    if !built.status.success() {
        return Err(Error::new(format!("cargo could not build {what}")));
    }
    step.done();
    Ok(String::from_utf8_lossy(&built.stdout).lines().filter_map(executable).collect())
}

/// The program called `name`.
fn only(built: &[Executable], name: &str) -> Result<PathBuf> {
    let is_it = |one: &&Executable| one.name == name && one.kind == "bin" && !one.has_tests;
    let found = built.iter().find(is_it);
    found.map(|executable| executable.path.clone()).ok_or_else(|| Error::new(format!("cargo built no {name}")))
}

/// The executable in a message of cargo, if it has one.
fn executable(message: &str) -> Option<Executable> {
    let message: Value = serde_json::from_str(message).ok()?;
    let target = message.get("target")?;
    Some(Executable {
        name: target.get("name")?.as_str()?.to_owned(),
        kind: target.get("kind")?.get(0)?.as_str()?.to_owned(),
        has_tests: message.pointer("/profile/test").and_then(Value::as_bool).unwrap_or(false),
        path: message.get("executable")?.as_str()?.into(),
    })
}

/// A command of the cargo that runs this program, in the workspace.
pub(crate) fn cargo(workspace: &Path) -> Command {
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

    #[test]
    fn a_program_is_not_mistaken_for_its_unit_tests() {
        let message = |is_test: bool, path: &str| {
            let target = r#""target":{"kind":["bin"],"name":"cloud-hypervisor"}"#;
            executable(&format!(r#"{{{target},"profile":{{"test":{is_test}}},"executable":"{path}"}}"#)).unwrap()
        };
        let built = [message(true, "/t/deps/cloud_hypervisor-1"), message(false, "/t/cloud-hypervisor")];
        assert_eq!(only(&built, "cloud-hypervisor").unwrap(), Path::new("/t/cloud-hypervisor"));
        assert!(only(&built[..1], "cloud-hypervisor").is_err());
    }
}
