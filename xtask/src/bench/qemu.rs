//! The QEMU that cloud-hypervisor is compared with: Debian's newest for the first-level machine's release, unpacked,
//! not installed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::programs;
use crate::apt::{Apt, RELEASE_6_12};
use crate::error::{Context, Result};
use crate::lab::Lab;

/// A script that takes cloud-hypervisor's options and runs QEMU.
const WRAPPER: &str = include_str!("qemu.sh");
/// The firmware that a guest with virtio NICs needs.
const FIRMWARE: [&str; 4] = ["seabios/bios-256k.bin", "qemu/kvmvapic.bin", "qemu/linuxboot_dma.bin", "qemu/pvh.bin"];

/// The folder of QEMU, its libraries and its firmware. Fetches them if they are missing.
pub(super) fn fetch(lab: &Lab) -> Result<PathBuf> {
    let folder = lab.folder().join("qemu");
    if !folder.join("package").exists() {
        let unpacked = lab.folder().join("qemu.unpacked");
        let _ = fs::remove_dir_all(&unpacked);
        let mut apt = Apt::with_backports(&lab.folder().join("apt-backports"))?;
        let release = format!("{RELEASE_6_12}-backports");
        let packages = apt.with_libraries(&["qemu-system-x86", "qemu-system-data", "seabios", "zlib1g"], &release)?;
        let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
        let names = apt.unpack("QEMU and its libraries", &packages, &unpacked)?;
        programs::collect(&unpacked, &["usr/bin/qemu-system-x86_64"], &folder)?;
        for file in FIRMWARE {
            programs::copy(&unpacked.join("usr/share").join(file), &folder.join("share"))?;
        }
        fs::write(folder.join("package"), names).context("recording QEMU's version")?;
        let _ = fs::remove_dir_all(&unpacked);
    }
    let wrapper = folder.join("as-cloud-hypervisor");
    fs::write(&wrapper, WRAPPER).context(wrapper.display())?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).context(wrapper.display())?;
    Ok(folder)
}
