//! The initramfs of each machine in the lab: of the guests, and of the first-level machine that runs them.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::apt::output;
use crate::cpio::Cpio;
use crate::error::{Context, Error, Result};
use crate::lab::Lab;

const GUEST_INIT: &str = include_str!("init/guest.sh");
const DISK_ROOT_INIT: &str = include_str!("init/disk-root.sh");
const FIRST_LEVEL_INIT: &str = include_str!("init/first-level.sh");

/// The libraries of `lspci`, all found below one folder of the unpacked packages.
const LIBRARIES: [&str; 8] = [
    "libpci.so.3",
    "libkmod.so.2",
    "libc.so.6",
    "libz.so.1",
    "libudev.so.1",
    "libzstd.so.1",
    "liblzma.so.5",
    "libcrypto.so.3",
];

/// The vendors whose names the guest's `lspci` can meet.
const PCI_VENDORS: [&str; 3] = ["1af4", "8086", "1b36"];

/// Writes the images that are missing or differ from what the sources say.
pub fn build(lab: &Lab) -> Result<()> {
    fs::create_dir_all(lab.image("")).context("making the folder of the lab's images")?;
    let applets = applets(lab)?;
    for kernel in ["6.1", "6.12"] {
        let plain = userland(lab, &applets, GUEST_INIT, kernel)?;
        write_if_changed(&lab.image(&format!("guest-{kernel}.cpio")), &plain.finish())?;
        let mut with_lspci = userland(lab, &applets, GUEST_INIT, kernel)?;
        add_lspci(lab, &mut with_lspci)?;
        write_if_changed(&lab.image(&format!("guest-{kernel}-lspci.cpio")), &with_lspci.finish())?;
        let mut with_modules = userland(lab, &applets, GUEST_INIT, kernel)?;
        add_modules(lab, kernel, &mut with_modules)?;
        write_if_changed(&lab.image(&format!("guest-{kernel}-modules.cpio")), &with_modules.finish())?;
        let mut disk_root = userland(lab, &applets, DISK_ROOT_INIT, kernel)?;
        add_modules(lab, kernel, &mut disk_root)?;
        write_if_changed(&lab.image(&format!("disk-root-{kernel}.cpio")), &disk_root.finish())?;
    }
    first_level(lab, "first-level")
}

/// Writes the image of first-level machines that run `kernel`.
pub fn first_level(lab: &Lab, kernel: &str) -> Result<()> {
    let image = userland(lab, &applets(lab)?, FIRST_LEVEL_INIT, kernel)?;
    write_if_changed(&lab.image(&format!("{kernel}.cpio")), &image.finish())
}

/// Busybox with a link per applet, the modules of `kernel`, and `init`.
fn userland(lab: &Lab, applets: &[String], init: &str, kernel: &str) -> Result<Cpio> {
    let mut archive = Cpio::new();
    for folder in ["bin", "dev", "etc", "modules", "proc", "root", "run", "sys", "tmp"] {
        archive.directory(folder);
    }
    // The kernel opens it for init before anything is mounted.
    archive.character_device("dev/console", 5, 1);
    let busybox = lab.tool("bin/busybox");
    archive.file("bin/busybox", 0o755, &fs::read(&busybox).context(busybox.display())?);
    for applet in applets {
        archive.symlink(&format!("bin/{applet}"), "busybox");
    }
    for (name, image) in lab.modules(kernel)? {
        archive.file(&format!("modules/{name}"), 0o644, &image);
    }
    archive.file("init", 0o755, init.as_bytes());
    Ok(archive)
}

fn applets(lab: &Lab) -> Result<Vec<String>> {
    let list = output(Command::new(lab.tool("bin/busybox")).arg("--list"))?;
    Ok(list.lines().filter(|name| !matches!(*name, "busybox" | "init" | "linuxrc")).map(str::to_owned).collect())
}

/// The modules that tests load: `/extra/<module>` holds it and what it needs, in load order. The folder of one that is built in is
/// empty.
fn add_modules(lab: &Lab, kernel: &str, archive: &mut Cpio) -> Result<()> {
    archive.directory("extra");
    for (module, files) in lab.extra_modules(kernel)? {
        archive.directory(&format!("extra/{module}"));
        for (name, image) in files {
            archive.file(&format!("extra/{module}/{name}"), 0o644, &image);
        }
    }
    Ok(())
}

fn add_lspci(lab: &Lab, archive: &mut Cpio) -> Result<()> {
    for folder in ["lib", "lib64", "usr", "usr/bin", "usr/share", "usr/share/misc"] {
        archive.directory(folder);
    }
    let mut add = |target: &str, path: &Path| -> Result<()> {
        archive.file(target, 0o755, &fs::read(path).context(path.display())?);
        Ok(())
    };
    add("usr/bin/lspci", &lab.tool("usr/bin/lspci"))?;
    add("lib64/ld-linux-x86-64.so.2", &find_library(lab, "ld-linux-x86-64.so.2")?)?;
    for library in LIBRARIES {
        add(&format!("lib/{library}"), &find_library(lab, library)?)?;
    }
    let names = fs::read_to_string(lab.tool("usr/share/misc/pci.ids")).context("reading pci.ids")?;
    archive.file("usr/share/misc/pci.ids", 0o644, reduce_pci_ids(&names).as_bytes());
    Ok(())
}

fn find_library(lab: &Lab, name: &str) -> Result<std::path::PathBuf> {
    let folders = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];
    let mut candidates = folders.iter().map(|folder| lab.tool(folder).join(name));
    candidates.find(|path| path.exists()).ok_or_else(|| Error::new(format!("the guest's packages lack {name}")))
}

/// The vendors that a guest can meet, and all device classes: the whole list would be unpacked at every boot.
fn reduce_pci_ids(names: &str) -> String {
    let mut keep = false;
    let mut reduced = String::new();
    for line in names.lines() {
        if !line.starts_with(['\t', '#']) && !line.is_empty() {
            keep = line.starts_with("C ") || PCI_VENDORS.iter().any(|vendor| line.starts_with(vendor));
        }
        if keep && !line.starts_with('#') {
            reduced.push_str(line);
            reduced.push('\n');
        }
    }
    reduced
}

fn write_if_changed(path: &Path, contents: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == contents) {
        return Ok(());
    }
    fs::write(path, contents).context(path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_ids_keep_the_vendors_of_the_lab_and_every_class() {
        let names = "# list\n0001  Other\n\t1234  Thing\n1af4  Red Hat, Inc.\n\t1041  Virtio 1.0 network device\n\
                     C 02  Network controller\n\t00  Ethernet controller\n";
        let reduced = reduce_pci_ids(names);
        assert!(!reduced.contains("Other") && !reduced.contains("Thing"));
        assert!(reduced.contains("\t1041  Virtio 1.0 network device\n"));
        assert!(reduced.contains("\t00  Ethernet controller\n"));
    }
}
