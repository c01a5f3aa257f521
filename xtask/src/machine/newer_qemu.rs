//! Debian's newest QEMU for the first-level machine's release, unpacked, not installed: cloud-hypervisor is compared
//! with it, and it has devices that this machine's QEMU lacks.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::error::{Context, Result};
use crate::fetch::apt::{Apt, RELEASE_6_12};
use crate::lab::Lab;
use crate::lab::programs;
use crate::machine::emulator;

/// The firmware that a guest with virtio NICs needs.
const FIRMWARE: [&str; 4] = ["seabios/bios-256k.bin", "qemu/kvmvapic.bin", "qemu/linuxboot_dma.bin", "qemu/pvh.bin"];

/// The folder of QEMU, its libraries and its firmware. Fetches them if they are missing.
pub(crate) fn fetch(lab: &Lab) -> Result<PathBuf> {
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
    Ok(folder)
}

/// The command that runs a patched copy ([`emulator`]) on this machine, whose own libraries are older. Fetches QEMU if
/// it is missing.
pub(crate) fn command(lab: &Lab) -> Result<Command> {
    let folder = fetch(lab)?;
    let program = emulator::patched(&folder.join(emulator::PROGRAM), &lab.folder().join("emulator/newer"))?;
    let mut command = Command::new(folder.join("lib").join(programs::LOADER));
    command.arg("--library-path").arg(folder.join("lib")).arg(program);
    command.arg("-L").arg(folder.join("share"));
    Ok(command)
}
