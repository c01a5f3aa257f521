//! `cargo xtask dist`: the files of a distribution package.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use crate::build::{cargo, commands};
use crate::error::{Context, Error, Result};
use crate::guest_tools;
use crate::licenses;
use crate::progress::{Step, note};

/// Folders and files of the checkout that are in the package, and their places there. Error messages name documents.
const COPIED: [(&str, &str); 9] = [
    ("LICENSE", "LICENSE"),
    ("README.md", "README.md"),
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("SECURITY.md", "SECURITY.md"),
    ("docs", "docs"),
    ("api/openapi.yaml", "api/openapi.yaml"),
    ("contrib/systemd", "systemd"),
    ("contrib/network", "network"),
    ("contrib/rootless", "rootless"),
];

/// Fills `target/dist` with static binaries, shell completions, man pages, documents, unit files and scripts, and the
/// licences of all crates in the binaries.
pub(crate) fn run(workspace: &Path) -> Result<()> {
    let folder = workspace.join("target/dist");
    let forecast = "builds the commands, optimised: about 6 min on two processors, or 11 with their dependencies; \
                    then 1 min each for programs for guests, and for completions and man pages";
    note("dist", forecast);
    if folder.exists() {
        fs::remove_dir_all(&folder).context("removing the files of an earlier run")?;
    }
    // First: what is missing is found before the long build.
    copy_parts(workspace, &folder)?;
    let step = Step::begin("write", "licences of third parties");
    fs::write(folder.join("THIRD-PARTY-LICENSES.txt"), licenses::texts(workspace)?).context("writing the licences")?;
    step.done();
    for binary in commands(workspace)? {
        let name = binary.file_name().unwrap_or_default();
        copy(&binary, &folder.join("bin").join(name))?;
    }
    for program in guest_tools::programs(workspace)? {
        let name = program.file_name().unwrap_or_default();
        copy(&program, &folder.join("guest").join(name))?;
    }
    let step = Step::begin("write", "completions and man pages");
    let mut generate = cargo(workspace);
    // The profile of this program itself: the optimised build of the commands has other features of dependencies.
    generate.args(["run", "--quiet", "--profile", "quick", "--example", "generate", "--"]).arg(&folder);
    let status = generate.stdout(Stdio::null()).status().context("running cargo")?;
    if !status.success() {
        return Err(Error::new("cannot generate completions and man pages"));
    }
    step.done();
    note("done", folder.display());
    Ok(())
}

/// Copies the files that are not built.
fn copy_parts(workspace: &Path, folder: &Path) -> Result<()> {
    COPIED.iter().try_for_each(|(from, to)| copy(&workspace.join(from), &folder.join(to)))
}

/// Copies a file, or a folder with all that is in it, and makes the folders above it.
fn copy(from: &Path, to: &Path) -> Result<()> {
    if from.is_dir() {
        for entry in fs::read_dir(from).context(format!("reading {}", from.display()))? {
            let entry = entry.context(format!("reading {}", from.display()))?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    let above = to.parent().unwrap_or(to);
    fs::create_dir_all(above).context(format!("making {}", above.display()))?;
    fs::copy(from, to).map(drop).context(format!("copying {}", from.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_package_has_documents_the_api_and_scripts() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let folder = tempfile::tempdir().unwrap();
        copy_parts(workspace, folder.path()).unwrap();
        for file in [
            "docs/switch.md",
            "docs/guide/operator.md",
            "docs/pictures/threads.svg",
            "systemd/cloud-hypervisor@.service",
        ] {
            assert!(folder.path().join(file).exists(), "{file}");
        }
        let api = |root: &Path| fs::read(root.join("api/openapi.yaml")).unwrap();
        assert_eq!(api(folder.path()), api(workspace));
        let script = fs::metadata(folder.path().join("rootless/run-vm")).unwrap();
        assert!(script.permissions().mode() & 0o111 != 0, "it can be run");
    }
}
