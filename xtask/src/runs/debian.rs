//! Boots a whole Debian from a disk, like a cloud image: with its own init and login, not the lab's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::build;
use crate::checks::suite::quote;
use crate::error::{Context, Error, Result};
use crate::fetch::apt::{self, output};
use crate::lab::Lab;
use crate::lab::images::Image;
use crate::machine::nested::{Clock, FirstLevel};
use crate::progress::{Step, note};

/// Time until the login prompt, in seconds. systemd takes minutes under two levels of emulation.
const LOGIN_LIMIT: u64 = 600;
/// The size of the disk. The file is sparse.
const DISK: &str = "640M";
/// Makes systemd wait as long as the lab does. On a busy machine its default of 90 s is too short for udev to announce
/// the serial port, without which there is no login.
const PATIENCE: &str = "[Manager]\\nDefaultTimeoutStartSec=900\\nDefaultDeviceTimeoutSec=900\\n";
/// Files of packages to leave out, for faster unpacking.
const WITHOUT: [&str; 3] = ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*"];

/// The programs that make a file system, and the packages that have them.
pub(crate) const PROGRAMS: [(&str, &str); 3] =
    [("mmdebstrap", "mmdebstrap"), ("fakeroot", "fakeroot"), ("mke2fs", "e2fsprogs")];

/// Boots Debian from a disk with the lab's `kernel` and returns when the login prompt shows.
pub(crate) fn run(lab: &Lab, workspace: &Path, kernel: &str) -> Result<()> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    apt::install_missing(&PROGRAMS)?;
    let disk = disk(lab)?;
    let vmm = build::vmm(workspace)?;
    note("debian", format!("Linux {kernel}"));
    let mut machine = FirstLevel::boot(lab, workspace, 6, Clock::Real)?;
    let command = command(lab, &vmm, kernel, &disk)?;
    // The disk is copied first.
    let limit = Duration::from_secs(LOGIN_LIMIT + 300);
    match machine.run(&command, limit, &mut |line| println!("{line}")) {
        Ok(0) => Ok(()),
        Ok(_) => Err(Error::new("Debian did not show a login prompt")),
        Err(lost) => Err(Error::new(format!("the run did not end: {}", lost.explain(limit)))),
    }
}

/// The shell command that boots the guest from a copy of `disk`, waits for the login, and shows the guest's console.
fn command(lab: &Lab, vmm: &Path, kernel: &str, disk: &Path) -> Result<String> {
    let image = lab.image(Image::DiskRoot, kernel)?;
    Ok(format!(
        "cp {disk} /tmp/root.raw || exit 1; \
         {vmm} --kernel {kernel} --initramfs {image} \
         --cmdline 'console=ttyS0 root=/dev/vda quiet systemd.show_status=1' \
         --disk path=/tmp/root.raw --cpus boot=1 --memory size=512M --serial file=/tmp/serial --console off & \
         vmm=$!; waited=0; \
         until grep -qs ' login: ' /tmp/serial; do \
         sleep 1; waited=$((waited + 1)); [ $waited -lt {LOGIN_LIMIT} ] && kill -0 $vmm || break; done; \
         cat /tmp/serial; echo; kill $vmm; echo \"after $waited s\"; grep -q ' login: ' /tmp/serial",
        disk = quote(disk),
        vmm = quote(vmm),
        kernel = quote(&lab.kernel(kernel, "vmlinux")?),
        image = quote(&image),
    ))
}

/// The disk. It is made once.
fn disk(lab: &Lab) -> Result<PathBuf> {
    let folder = lab.folder().join("debian");
    let disk = folder.join("patient.raw");
    if disk.exists() {
        return Ok(disk);
    }
    let step = Step::begin("make", format!("a disk with Debian {}", apt::RELEASE_6_1));
    let unfinished = folder.join("unfinished.raw");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).context(folder.display())?;
    file_system(&unfinished, DISK, "systemd-sysv,udev", &[])?;
    fs::rename(&unfinished, &disk).context(disk.display())?;
    step.done();
    Ok(disk)
}

/// Creates the file system of a Debian with these packages, of size `size`, at `image`. Each hook is a shell command;
/// `$1` is the root.
pub(crate) fn file_system(image: &Path, size: &str, packages: &str, hooks: &[&str]) -> Result<()> {
    let (archive, tree) = (image.with_extension("tar"), image.with_extension("tree"));
    let mut command = Command::new("mmdebstrap");
    command.args(["--variant=minbase", &format!("--include={packages}")]);
    command.args(WITHOUT.map(|path| format!("--dpkgopt=path-exclude={path}")));
    let patience =
        format!("cd \"$1/etc/systemd\" && mkdir -p system.conf.d && printf '{PATIENCE}' > system.conf.d/patience.conf");
    for hook in ["echo debian > \"$1/etc/hostname\"", &patience].into_iter().chain(hooks.iter().copied()) {
        command.arg(format!("--customize-hook={hook}"));
    }
    output(command.arg(apt::RELEASE_6_1).arg(&archive))?;
    // Without root, only fakeroot has the owners of files. It cannot read files without read permission, such as the
    // backups of the lists of users.
    let make = format!(
        "mkdir {tree} && tar -C {tree} --exclude='./etc/*-' -xf {archive} && \
         mke2fs -q -t ext4 -d {tree} {image} {size}",
        tree = quote(&tree),
        archive = quote(&archive),
        image = quote(image),
    );
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    output(Command::new("fakeroot").args(["sh", "-c", &make]).env("PATH", path))?;
    fs::remove_dir_all(&tree).context(tree.display())?;
    fs::remove_file(&archive).context(archive.display())
}
