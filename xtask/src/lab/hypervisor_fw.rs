//! Cloud Hypervisor's own firmware, rust-hypervisor-firmware, for which there is no package.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Context, Result};
use crate::lab::Lab;
use crate::progress::note;

/// Place next to the checkout or above it, if [`VARIABLE`] is not set.
const PLACE: &str = "shared/firmware/hypervisor-fw";
const VARIABLE: &str = "CH_HYPERVISOR_FW";

/// A copy of the firmware in the place that first-level machines and tests use. Without the firmware there is no copy,
/// and a line names `left_out`, which is skipped.
pub(crate) fn copy(lab: &Lab, workspace: &Path, left_out: &str) -> Result<Option<PathBuf>> {
    let folder = lab.folder().join("firmware");
    let copy = folder.join("hypervisor-fw");
    let Some(found) = find(workspace) else {
        let _ = fs::remove_file(&copy);
        note("skip", format!("{left_out}: no {PLACE} next to the checkout; name the file by {VARIABLE}"));
        return Ok(None);
    };
    fs::create_dir_all(&folder).context(folder.display())?;
    let bytes = fs::read(&found).context(found.display())?;
    fs::write(&copy, bytes).context(copy.display())?;
    Ok(Some(copy))
}

fn find(workspace: &Path) -> Option<PathBuf> {
    match std::env::var_os(VARIABLE) {
        Some(path) => Some(path.into()).filter(|path: &PathBuf| path.exists()),
        None => workspace.ancestors().map(|folder| folder.join(PLACE)).find(|path| path.exists()),
    }
}
