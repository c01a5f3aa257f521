//! Parts of Rust that `rustup` installs: the nightly toolchain, which fuzzing and Miri need, its components, and
//! targets.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Context, Error, Result};
use crate::fetch::apt;
use crate::progress::Step;

/// The toolchain's name.
pub(crate) const TOOLCHAIN: &str = "nightly";

/// Installs the toolchain if it is missing.
pub(crate) fn install() -> Result<()> {
    let mut version = Command::new("rustup");
    version.args(["run", TOOLCHAIN, "rustc", "--version"]);
    let status = version.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if status.is_ok_and(|status| status.success()) {
        return Ok(());
    }
    rustup("the nightly toolchain", &["toolchain", "install", TOOLCHAIN, "--profile", "minimal"])
}

/// The folder of LLVM's coverage tools. Installs them if they are missing.
pub(crate) fn llvm_tools() -> Result<PathBuf> {
    let mut libraries = Command::new("rustup");
    libraries.args(["run", TOOLCHAIN, "rustc", "--print", "target-libdir"]);
    let tools = Path::new(apt::output(&mut libraries)?.trim()).with_file_name("bin");
    if !tools.join("llvm-cov").is_file() {
        component(&["llvm-tools"])?;
    }
    Ok(tools)
}

/// Installs components of the toolchain, unless they are there.
pub(crate) fn component(names: &[&str]) -> Result<()> {
    let arguments = [&["component", "add", "--toolchain", TOOLCHAIN], names].concat();
    rustup(&names.join(" and "), &arguments)
}

/// Installs the standard library for `target`, unless it is there.
pub(crate) fn target(target: &str) -> Result<()> {
    let mut library = Command::new("rustc");
    library.args(["--print", "target-libdir", "--target", target]);
    if Path::new(apt::output(&mut library)?.trim()).is_dir() {
        return Ok(());
    }
    rustup(target, &["target", "add", target])
}

fn rustup(what: &str, arguments: &[&str]) -> Result<()> {
    let step = Step::begin("install", what);
    let mut command = Command::new("rustup");
    let installed = command.args(arguments).stdin(Stdio::null()).output().context(format!("installing {what}"))?;
    if !installed.status.success() {
        let text = String::from_utf8_lossy(&installed.stderr);
        return Err(Error::new(format!("could not install {what}: {}", text.trim())));
    }
    step.done();
    Ok(())
}
