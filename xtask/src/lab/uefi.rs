//! Debian's UEFI firmware for Cloud Hypervisor, and disks for it and for hypervisor-fw. Creating them needs no root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Context, Result};
use crate::fetch::apt::{self, Apt, output};
use crate::lab::Lab;
use crate::lab::gpt::{self, Kind};
use crate::lab::images::Image;
use crate::progress::Step;

/// The package of the firmware, which only Debian's development release has.
const FIRMWARE_PACKAGE: &str = "cloudhv-efi-x86-64";
const FIRMWARE: &str = "usr/share/cloudhv-efi-x86-64/CLOUDHV.fd";
/// The program that starts the kernel contained in the same file.
const STUB_PACKAGE: &str = "systemd-boot-efi";
const STUB: &str = "usr/lib/systemd/boot/efi/linuxx64.efi.stub";
/// The size of the file system that firmware loads programs from. FAT32 needs 65,525 clusters.
pub(crate) const EFI_SYSTEM_SIZE: u64 = 64 << 20;
/// The guest's kernel.
pub(crate) const KERNEL: &str = "6.12";
/// Command line; the guest has IPv4 only, like those of the other tests.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 ipv6.disable=1";

/// Configuration with which hypervisor-fw finds a kernel (boot loader specification, type 1).
pub(crate) const LOADER: &str = "default lab\n";
const KERNEL_FILE: &str = "linux";
const INITRAMFS_FILE: &str = "initrd";

/// The firmware. Fetches it if it is missing.
pub(crate) fn firmware(lab: &Lab) -> Result<PathBuf> {
    let folder = lab.folder().join("firmware");
    fetch(&folder, "firmware for Cloud Hypervisor", FIRMWARE, || {
        Apt::with_development(&lab.folder().join("apt-development"))?.unpack(
            "firmware for Cloud Hypervisor",
            &[FIRMWARE_PACKAGE],
            &folder,
        )
    })
}

fn stub(lab: &Lab) -> Result<PathBuf> {
    let folder = lab.folder().join("uefi-stub");
    fetch(&folder, "the stub of unified kernel images", STUB, || {
        let package = format!("{STUB_PACKAGE}/{}", apt::RELEASE_6_1);
        Apt::new(&lab.folder().join("apt"))?.unpack("the stub of unified kernel images", &[&package], &folder)
    })
}

/// The file `path` of the packages that `unpack` puts into `folder` if it is missing.
fn fetch(folder: &Path, what: &str, path: &str, unpack: impl FnOnce() -> Result<String>) -> Result<PathBuf> {
    let record = folder.join("package");
    if !record.exists() {
        let names = unpack()?;
        fs::write(&record, names).context(format!("recording the version of {what}"))?;
    }
    Ok(folder.join(path))
}

/// A guest's disk whose kernel firmware loads. Its only partition has a unified kernel image for UEFI firmware; and the
/// same kernel and a smaller initramfs for hypervisor-fw, which reads 512 bytes at a time.
pub(crate) fn guest_disk(lab: &Lab) -> Result<PathBuf> {
    let disk = lab.folder().join("images").join(format!("uefi-{KERNEL}.raw"));
    let initramfs = lab.image(Image::GuestWithModules, KERNEL)?;
    let small = lab.image(Image::GuestWithDisks, KERNEL)?;
    let changed = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    let (record, wanted) = (disk.with_extension("wanted"), format!("{CMDLINE}\n{LOADER}"));
    let is_recorded = fs::read_to_string(&record).is_ok_and(|have| have == wanted);
    if is_recorded && disk.exists() && [&initramfs, &small].iter().all(|path| changed(&disk) >= changed(path)) {
        return Ok(disk);
    }
    apt::install_missing(&[("mformat", "mtools"), ("objcopy", "binutils")])?;
    let step = Step::begin("make", "a disk that firmware boots from");
    let image = lab.folder().join("images").join(format!("uefi-{KERNEL}.efi"));
    unified_kernel_image(lab, &initramfs, CMDLINE, &image)?;
    let unfinished = disk.with_extension("new");
    let offsets = gpt::create(&unfinished, &[(Kind::EfiSystem, EFI_SYSTEM_SIZE)])?;
    fill_efi_system(&unfinished, offsets[0], &image)?;
    add_entry(lab, &unfinished, offsets[0], &small, CMDLINE)?;
    fs::rename(&unfinished, &disk).context(disk.display())?;
    fs::write(&record, wanted).context(record.display())?;
    step.done();
    Ok(disk)
}

/// Writes a program that firmware can start: the lab's kernel with its initramfs and command line.
pub(crate) fn unified_kernel_image(lab: &Lab, initramfs: &Path, cmdline: &str, image: &Path) -> Result<()> {
    let text = |name: &str, contents: &str| -> Result<PathBuf> {
        let path = image.with_extension(name);
        fs::write(&path, contents).context(path.display())?;
        Ok(path)
    };
    let sections = [
        (".osrel", text("osrel", "ID=lab\nPRETTY_NAME=\"Lab\"\n")?, 0x2_0000),
        (".cmdline", text("cmdline", cmdline)?, 0x3_0000),
        (".linux", lab.kernel(KERNEL, "bzImage")?, 0x200_0000),
        (".initrd", initramfs.to_owned(), 0x300_0000),
    ];
    let mut command = Command::new("objcopy");
    for (name, path, address) in sections {
        command.arg("--add-section").arg(format!("{name}={}", path.display()));
        command.arg("--change-section-vma").arg(format!("{name}={address:#x}"));
    }
    output(command.arg(stub(lab)?).arg(image)).map(drop)
}

/// Creates a FAT file system in the partition at `offset` of `disk`, with `program` at the path that firmware starts.
pub(crate) fn fill_efi_system(disk: &Path, offset: u64, program: &Path) -> Result<()> {
    let place = format!("{}@@{offset}", disk.display());
    let sectors = (EFI_SYSTEM_SIZE / 512).to_string();
    output(Command::new("mformat").args(["-i", &place, "-F", "-T", &sectors, "-h", "64", "-s", "32", "::"]))?;
    output(Command::new("mmd").args(["-i", &place, "::/EFI", "::/EFI/BOOT"]))?;
    output(Command::new("mcopy").args(["-i", &place]).arg(program).arg("::/EFI/BOOT/BOOTX64.EFI")).map(drop)
}

/// Adds the kernel and this initramfs to the file system in the partition at `offset` of `disk`, in the form of the
/// boot loader specification.
pub(crate) fn add_entry(lab: &Lab, disk: &Path, offset: u64, initramfs: &Path, cmdline: &str) -> Result<()> {
    let place = format!("{}@@{offset}", disk.display());
    let text = |name: &str, contents: &str| -> Result<PathBuf> {
        let path = disk.with_extension(name);
        fs::write(&path, contents).context(path.display())?;
        Ok(path)
    };
    let entry = format!("title lab\nlinux /{KERNEL_FILE}\ninitrd /{INITRAMFS_FILE}\noptions {cmdline}\n");
    output(Command::new("mmd").args(["-i", &place, "::/loader", "::/loader/entries"]))?;
    for (file, name) in [
        (text("loader.conf", LOADER)?, "loader/loader.conf"),
        (text("lab.conf", &entry)?, "loader/entries/lab.conf"),
        (lab.kernel(KERNEL, "bzImage")?, KERNEL_FILE),
        (initramfs.to_owned(), INITRAMFS_FILE),
    ] {
        output(Command::new("mcopy").args(["-i", &place]).arg(file).arg(format!("::/{name}")))?;
    }
    Ok(())
}
