//! The checks that need no guest: format, lints, rules for crates, unit and property tests.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::build::cargo;
use crate::checks::deny;
use crate::checks::fuzz;
use crate::checks::rust_text;
use crate::checks::suite::Tally;
use crate::error::{Context, Result};
use crate::fetch::apt;
use crate::progress::{Step, note};
use crate::stages::Stages;

/// Checks format, lints and crates of the workspace and of the fuzz workspace. Each check counts as a test.
pub(crate) fn lints(workspace: &Path) -> Result<Tally> {
    fuzz::install_compiler()?;
    let clippy = ["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"];
    let fuzz = workspace.join("fuzz");
    let mut outcomes = vec![
        check(workspace, "format", &["fmt", "--all", "--check"])?,
        check(workspace, "lints", &clippy)?,
        documentation(workspace)?,
        check(&fuzz, "format of the fuzz targets", &["fmt", "--check"])?,
        check(&fuzz, "lints of the fuzz targets", &clippy)?,
        deny::check(workspace)?,
    ];
    outcomes.extend(rust_text::check(workspace)?);
    let passed = outcomes.iter().filter(|passed| **passed).count();
    Ok(Tally { passed, failed: outcomes.len() - passed })
}

fn check(workspace: &Path, what: &str, arguments: &[&str]) -> Result<bool> {
    let step = Step::begin("check", what);
    let success = cargo(workspace).args(arguments).status().context("running cargo")?.success();
    step.done_with(if success { what.to_owned() } else { format!("{what}: FAILED") });
    Ok(success)
}

/// Builds the documentation of the crate for other VMMs, where a link that leads nowhere is a failure. Doc comments of
/// `vm-api` are texts of the help, which are not links.
fn documentation(workspace: &Path) -> Result<bool> {
    let what = "documentation of pci-sriov";
    let step = Step::begin("check", what);
    let mut command = cargo(workspace);
    command.args(["doc", "--quiet", "--package", "pci-sriov", "--lib", "--no-deps", "--all-features"]);
    let success = command.env("RUSTDOCFLAGS", "-D warnings").status().context("running cargo")?.success();
    step.done_with(if success { what.to_owned() } else { format!("{what}: FAILED") });
    Ok(success)
}

/// Rewrites the generated parts of checked-in files, with the tests that compare them.
pub(crate) fn generate(workspace: &Path) -> Result<bool> {
    // The first writes a table that the others are generated from.
    let tests = [["vmm", "--lib", "control::counter_texts"], ["vm-api", "--test", "generated"]];
    for [package, kind, tests] in tests {
        let mut command = cargo(workspace);
        // One at a time: a file has several generated parts.
        command.args(["test", "--quiet", "--package", package, kind, tests, "--", "--test-threads=1"]);
        if !command.env("REWRITE_GENERATED_FILES", "1").status().context("running cargo")?.success() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Runs the tests of every crate except the integration tests, and the seeds of the fuzz targets.
pub(crate) fn unit_tests(workspace: &Path, stages: &mut Stages) -> Result<Tally> {
    fuzz::install_compiler()?;
    // The first creates the qcow2 images of the unit tests, and checks them afterwards; the second is the guests' TPM.
    // The third checks the unit in contrib, and the fourth creates a file system that a test freezes.
    apt::install_missing(&[
        ("qemu-img", "qemu-utils"),
        ("swtpm", "swtpm"),
        ("systemd-analyze", "systemd"),
        ("mkfs.ext4", "e2fsprogs"),
    ])?;
    let mut tally = Tally::default();
    let what = "unit and property tests";
    if stages.measure("build of unit tests", || build_tests(workspace, what))? {
        let before = interfaces();
        tally += stages.measure("unit tests", || tests(workspace, what))?;
        tally += none_left(&before, &interfaces());
    } else {
        note("FAILED", format!("{what}: did not build"));
        tally.failed += 1;
    }
    tally += stages.measure("seeds of fuzz targets", || tests(&workspace.join("fuzz"), "seeds of the fuzz targets"))?;
    Ok(tally)
}

/// Builds the tests of the workspace. Returns false if that fails, after cargo has printed why.
fn build_tests(workspace: &Path, what: &str) -> Result<bool> {
    let step = Step::begin("build", what);
    let built = cargo(workspace).args(["test", "--quiet", "--no-run"]).status().context("running cargo")?;
    step.done_with(if built.success() { what.to_owned() } else { format!("{what}: FAILED") });
    Ok(built.success())
}

/// The network interfaces of this machine.
fn interfaces() -> BTreeSet<String> {
    let found = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    found.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Checks that the tests, which have their own network namespaces, have left no interface in this machine's.
fn none_left(before: &BTreeSet<String>, after: &BTreeSet<String>) -> Tally {
    let left: Vec<_> = after.difference(before).map(String::as_str).collect();
    if left.is_empty() {
        return Tally { passed: 1, failed: 0 };
    }
    note("FAILED", format!("network interfaces that were not there before the tests: {}", left.join(", ")));
    Tally { passed: 0, failed: 1 }
}

/// Runs the tests of the workspace in `folder`. Cargo's output is shown as it arrives.
fn tests(folder: &Path, what: &str) -> Result<Tally> {
    let mut command = cargo(folder);
    command.args(["test", "--quiet", "--no-fail-fast"]);
    count(&mut command, what)
}

/// Runs tests with a cargo command, and counts them.
pub(crate) fn count(command: &mut Command, what: &str) -> Result<Tally> {
    let step = Step::begin("test", what);
    println!();
    let mut child = command.stdout(Stdio::piped()).spawn().context("running cargo")?;
    let mut tally = Tally::default();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines().map_while(|line| line.ok()) {
            match summary(&line) {
                Some(counted) => tally += counted,
                None if line.is_empty() || line.starts_with("running ") => {}
                None => println!("{line}"),
            }
        }
    }
    let success = child.wait().context("running cargo")?.success();
    if !success && tally.failed == 0 {
        note("FAILED", format!("{what}: did not build or did not end"));
        tally.failed = 1;
    }
    step.done_with(format!("{what}: {} passed, {} failed", tally.passed, tally.failed));
    Ok(tally)
}

/// The counts of `test result: ok. 12 passed; 0 failed; …`.
fn summary(line: &str) -> Option<Tally> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |what: &str| {
        let field = counts.split("; ").find_map(|field| field.strip_suffix(what))?;
        field.trim().parse().ok()
    };
    Some(Tally { passed: count("passed")?, failed: count("failed")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_tests_leave_is_a_failure() {
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<BTreeSet<_>>();
        let before = names(&["eth0", "lo"]);
        assert_eq!(none_left(&before, &names(&["lo"])), Tally { passed: 1, failed: 0 });
        assert_eq!(none_left(&before, &names(&["eth0", "lo", "vmtap0"])), Tally { passed: 0, failed: 1 });
    }

    #[test]
    fn the_counts_of_a_test_binary_are_read_from_its_last_line() {
        let line = "test result: FAILED. 12 passed; 3 failed; 0 ignored; 0 measured; 1 filtered out; finished in 0.01s";
        assert_eq!(summary(line), Some(Tally { passed: 12, failed: 3 }));
        assert_eq!(summary("running 3 tests"), None);
    }
}
