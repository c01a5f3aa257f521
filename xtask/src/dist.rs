//! `cargo xtask dist`: the files of a distribution package.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use crate::build::{cargo, commands};
use crate::error::{Context, Error, Result};
use crate::licenses;
use crate::progress::{Step, note};

/// Fills `target/dist` with static binaries, shell completions, man pages, unit files, and the licences of all crates
/// in the binaries.
pub(crate) fn run(workspace: &Path) -> Result<()> {
    let folder = workspace.join("target/dist");
    if folder.exists() {
        fs::remove_dir_all(&folder).context("removing the files of an earlier run")?;
    }
    fs::create_dir_all(folder.join("bin")).context("making target/dist")?;
    for binary in commands(workspace)? {
        copy(&binary, &folder.join("bin"))?;
    }
    let step = Step::begin("write", "completions and man pages");
    let mut generate = cargo(workspace);
    generate.args(["run", "--quiet", "--example", "generate", "--"]).arg(&folder);
    let status = generate.stdout(Stdio::null()).status().context("running cargo")?;
    if !status.success() {
        return Err(Error::new("cannot generate completions and man pages"));
    }
    step.done();
    for part in ["systemd", "network"] {
        let (from, to) = (workspace.join("contrib").join(part), folder.join(part));
        fs::create_dir_all(&to).context(format!("making {}", to.display()))?;
        for file in fs::read_dir(&from).context(format!("reading {}", from.display()))? {
            copy(&file.context(format!("reading {}", from.display()))?.path(), &to)?;
        }
    }
    let step = Step::begin("write", "licences of third parties");
    copy(&workspace.join("LICENSE"), &folder)?;
    fs::write(folder.join("THIRD-PARTY-LICENSES.txt"), licenses::texts(workspace)?).context("writing the licences")?;
    step.done();
    note("done", folder.display());
    Ok(())
}

fn copy(file: &Path, folder: &Path) -> Result<()> {
    let name = file.file_name().unwrap_or_default();
    fs::copy(file, folder.join(name)).map(drop).context("copying a file")
}
