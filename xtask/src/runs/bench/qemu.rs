//! The QEMU that cloud-hypervisor is compared with.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use crate::error::{Context, Result};
use crate::lab::Lab;
use crate::machine::newer_qemu;

/// A script that takes cloud-hypervisor's options and runs QEMU.
const WRAPPER: &str = include_str!("qemu.sh");

/// The folder of QEMU, its libraries and its firmware, with the script. Fetches them if they are missing.
pub(super) fn fetch(lab: &Lab) -> Result<PathBuf> {
    let folder = newer_qemu::fetch(lab)?;
    let wrapper = folder.join("as-cloud-hypervisor");
    fs::write(&wrapper, WRAPPER).context(wrapper.display())?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).context(wrapper.display())?;
    Ok(folder)
}
