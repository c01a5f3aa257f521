//! Tools that are Python packages, each in its own virtual environment below `target/lab/python`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Context, Error, Result};
use crate::fetch::apt;
use crate::progress::Step;

/// The path of `program`, which the package `requirement` (`name==version`) contains. Installs that if it is missing.
pub(crate) fn tool(workspace: &Path, requirement: &str, program: &str) -> Result<PathBuf> {
    tool_with(workspace, requirement, &[], program)
}

/// As [`tool`], with `more` packages in the same virtual environment.
pub(crate) fn tool_with(workspace: &Path, requirement: &str, more: &[&str], program: &str) -> Result<PathBuf> {
    let environment = workspace.join("target/lab/python").join(requirement.replace("==", "-"));
    let path = environment.join("bin").join(program);
    if path.is_file() {
        return Ok(path);
    }
    apt::install_missing(&[("python3", "python3-venv")])?;
    let step = Step::begin("install", requirement);
    fs::create_dir_all(&environment).context(environment.display())?;
    let run = |command: &mut Command, what: &str| {
        let output = command.stdin(Stdio::null()).output().context(what)?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(()) } else { Err(Error::new(format!("{what}: {}", text.trim()))) }
    };
    run(
        Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment),
        "making a virtual environment of Python (Debian's package for it is python3-venv)",
    )?;
    let pip = environment.join("bin/pip");
    run(Command::new(pip).args(["install", "--quiet", requirement]).args(more), &format!("installing {requirement}"))?;
    step.done();
    if path.is_file() { Ok(path) } else { Err(Error::new(format!("{requirement} has no program {program}"))) }
}
