//! The initramfs images of the lab: those of guests, and that of the first-level machine, which runs guests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Context, Error, Result};
use crate::fetch::apt::output;
use crate::lab::cpio::Cpio;
use crate::lab::programs;
use crate::lab::{FIRST_LEVEL_KERNEL, GENERIC_KERNEL, GUEST_KERNELS, Lab, has_iommu_driver, is_generic};

const GUEST_INIT: &str = include_str!("../init/guest.sh");
const DISK_ROOT_INIT: &str = include_str!("../init/disk-root.sh");
const FIRST_LEVEL_INIT: &str = include_str!("../init/first-level.sh");

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

/// The module with the driver of virtio disks.
const DISK_DRIVER: &str = "virtio_blk";

/// The vendors whose names the guest's `lspci` can need.
const PCI_VENDORS: [&str; 3] = ["1af4", "8086", "1b36"];

/// An initramfs of the lab. Each belongs to one kernel and contains modules of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Image {
    /// Of a guest: busybox and the modules of its NICs.
    Guest,
    /// Of a guest, with the real `lspci`.
    GuestWithLspci,
    /// Of a guest, with modules that tests load.
    GuestWithModules,
    /// Of a guest, with only the driver of disks. It is small, for firmware that reads it slowly.
    GuestWithDisks,
    /// Of a guest, with modules that tests load and DPDK's testpmd.
    GuestWithDpdk,
    /// Of a guest, with modules that tests load, and programs that configure NICs.
    GuestWithNicTools,
    /// Of a guest that continues from its disk.
    DiskRoot,
    /// Of a first-level machine.
    FirstLevel,
}

impl Image {
    /// Images of guests with `kernel`, which the tests choose from. DPDK is useless without an IOMMU, and the drivers
    /// of the cloud kernels do not use what the tools set.
    pub(crate) fn of_guests(kernel: &str) -> impl Iterator<Item = Image> {
        let all = [Image::Guest, Image::GuestWithLspci, Image::GuestWithModules, Image::DiskRoot];
        let with_dpdk = has_iommu_driver(kernel).then_some(Image::GuestWithDpdk);
        all.into_iter().chain(with_dpdk).chain(is_generic(kernel).then_some(Image::GuestWithNicTools))
    }

    /// The name of its file for `kernel`, which the tests use as well.
    pub(crate) fn file_name(self, kernel: &str) -> String {
        match self {
            Image::Guest => format!("guest-{kernel}.cpio"),
            Image::GuestWithLspci => format!("guest-{kernel}-lspci.cpio"),
            Image::GuestWithModules => format!("guest-{kernel}-modules.cpio"),
            Image::GuestWithDisks => format!("guest-{kernel}-disks.cpio"),
            Image::GuestWithDpdk => format!("guest-{kernel}-dpdk.cpio"),
            Image::GuestWithNicTools => format!("guest-{kernel}-nic-tools.cpio"),
            Image::DiskRoot => format!("disk-root-{kernel}.cpio"),
            Image::FirstLevel => format!("{kernel}.cpio"),
        }
    }

    /// Writes the image for `kernel` to `path`, if it is missing or out of date.
    pub(crate) fn write(self, lab: &Lab, kernel: &str, path: &Path) -> Result<()> {
        let init = match self {
            Image::FirstLevel => FIRST_LEVEL_INIT,
            Image::DiskRoot => DISK_ROOT_INIT,
            _ => GUEST_INIT,
        };
        let mut archive = userland(lab, init, kernel)?;
        match self {
            Image::Guest | Image::FirstLevel => {}
            Image::GuestWithLspci => add_lspci(lab, &mut archive)?,
            Image::GuestWithModules | Image::DiskRoot => add_modules(lab, kernel, &mut archive, |_| true)?,
            Image::GuestWithDisks => add_modules(lab, kernel, &mut archive, |module| module == DISK_DRIVER)?,
            Image::GuestWithDpdk => {
                add_modules(lab, kernel, &mut archive, |_| true)?;
                add_programs(&programs::of_dpdk(lab)?, &mut archive)?;
            }
            Image::GuestWithNicTools => {
                add_modules(lab, kernel, &mut archive, |_| true)?;
                add_programs(&programs::of_nics(lab)?, &mut archive)?;
            }
        }
        write_if_changed(path, &archive.finish()?)
    }
}

impl Lab {
    /// Fetches and builds all that guests, tests and a shell in the lab can use. If all exists, this needs no network
    /// and takes a moment.
    pub(crate) fn prepare_everything(&self) -> Result<()> {
        GUEST_KERNELS.iter().chain([&GENERIC_KERNEL]).try_for_each(|kernel| self.prepare(kernel))?;
        self.image(Image::FirstLevel, FIRST_LEVEL_KERNEL)?;
        programs::of_systemd(self)?;
        self.peers().map(drop)
    }

    /// Fetches a guest's kernel, and builds all that guests with it can use.
    pub(crate) fn prepare(&self, kernel: &str) -> Result<()> {
        self.kernel(kernel, "vmlinux")?;
        Image::of_guests(kernel).try_for_each(|image| self.image(image, kernel).map(drop))
    }

    /// An initramfs. Writes it if it is missing or out of date.
    pub(crate) fn image(&self, image: Image, kernel: &str) -> Result<PathBuf> {
        let name = image.file_name(kernel);
        let path = self.folder().join("images").join(&name);
        let mut ready = self.images.lock();
        if !ready.contains(&name) {
            image.write(self, kernel, &path)?;
            ready.insert(name);
        }
        Ok(path)
    }
}

/// Busybox with a link per applet, the modules of `kernel`, and `init`.
fn userland(lab: &Lab, init: &str, kernel: &str) -> Result<Cpio> {
    let mut archive = Cpio::default();
    for folder in ["bin", "dev", "etc", "modules", "proc", "root", "run", "sys", "tmp"] {
        archive.directory(folder)?;
    }
    // The kernel opens it for init before any file system is mounted.
    archive.character_device("dev/console", 5, 1)?;
    let busybox = lab.tool("bin/busybox")?;
    archive.file("bin/busybox", 0o755, &fs::read(&busybox).context(busybox.display())?)?;
    for applet in applets(&busybox)? {
        archive.symlink(&format!("bin/{applet}"), "busybox")?;
    }
    for (name, image) in lab.modules(kernel)? {
        archive.file(&format!("modules/{name}"), 0o644, &image)?;
    }
    archive.file("init", 0o755, init.as_bytes())?;
    Ok(archive)
}

fn applets(busybox: &Path) -> Result<Vec<String>> {
    let list = output(Command::new(busybox).arg("--list"))?;
    Ok(list.lines().filter(|name| !matches!(*name, "busybox" | "init" | "linuxrc")).map(str::to_owned).collect())
}

/// Adds the test modules for which `is_wanted` returns true. `/extra/<module>` contains a module and those it depends
/// on, in load order; it is empty for a built-in module.
fn add_modules(lab: &Lab, kernel: &str, archive: &mut Cpio, is_wanted: impl Fn(&str) -> bool) -> Result<()> {
    archive.directory("extra")?;
    for (module, files) in lab.extra_modules(kernel)?.into_iter().filter(|(module, _)| is_wanted(module)) {
        archive.directory(&format!("extra/{module}"))?;
        for (name, image) in files {
            archive.file(&format!("extra/{module}/{name}"), 0o644, &image)?;
        }
    }
    Ok(())
}

/// Adds the programs in `folder`, and the libraries of its subfolder `lib` in the loader's folders.
fn add_programs(folder: &Path, archive: &mut Cpio) -> Result<()> {
    for folder in ["lib", "lib64", "usr", "usr/bin"] {
        archive.directory(folder)?;
    }
    let libraries = folder.join("lib");
    for (source, target) in [(folder, "usr/bin"), (&libraries, "lib")] {
        let mut files: Vec<_> = fs::read_dir(source)
            .context(source.display())?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.is_file() && !path.ends_with(programs::RECORD))
            .collect();
        files.sort();
        for file in files {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            let target = if name == programs::LOADER { "lib64" } else { target };
            archive.file(&format!("{target}/{name}"), 0o755, &fs::read(&file).context(file.display())?)?;
        }
    }
    Ok(())
}

fn add_lspci(lab: &Lab, archive: &mut Cpio) -> Result<()> {
    for folder in ["lib", "lib64", "usr", "usr/bin", "usr/share", "usr/share/misc"] {
        archive.directory(folder)?;
    }
    let mut add = |target: &str, path: &Path| -> Result<()> {
        archive.file(target, 0o755, &fs::read(path).context(path.display())?)
    };
    add("usr/bin/lspci", &lab.tool("usr/bin/lspci")?)?;
    add("lib64/ld-linux-x86-64.so.2", &find_library(lab, "ld-linux-x86-64.so.2")?)?;
    for library in LIBRARIES {
        add(&format!("lib/{library}"), &find_library(lab, library)?)?;
    }
    let names = fs::read_to_string(lab.tool("usr/share/misc/pci.ids")?).context("reading pci.ids")?;
    archive.file("usr/share/misc/pci.ids", 0o644, reduce_pci_ids(&names).as_bytes())
}

fn find_library(lab: &Lab, name: &str) -> Result<PathBuf> {
    for folder in ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"] {
        let path = lab.tool(folder)?.join(name);
        if path.exists() {
            return Ok(path);
        }
    }
    Err(Error::new(format!("the guest's packages lack {name}; delete target/lab/tools to fetch them again")))
}

/// The vendors that a guest can have, and all device classes: the whole list would be unpacked at every boot.
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
