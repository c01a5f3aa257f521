//! Boots what a cloud boots: a disk with a Debian of its own, by UEFI firmware, told who it is by cloud-init's disk.
//!
//! A unit of systemd enables the VFs of the guest's NIC, as an administrator would have it done at each start.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::apt::{self, output};
use crate::error::{Context, Error, Result};
use crate::gpt::{self, Kind};
use crate::images::Image;
use crate::lab::Lab;
use crate::nested::{Clock, FirstLevel};
use crate::progress::{Step, note};
use crate::suite::quote;
use crate::{build, debian, uefi};

/// How long the guest may take, in seconds of the machine's own time, which counts instructions.
const LIMIT: u64 = 1200;
/// How long all may take in real time: an emulated instruction takes longer than a nanosecond.
const REAL_LIMIT: Duration = Duration::from_secs(5400);
/// The size of the root file system. The file is sparse.
const ROOT_SIZE: u64 = 1 << 30;
const CMDLINE: &str = "console=ttyS0 root=/dev/vda2 quiet systemd.show_status=1";
/// The unit that enables VFs: the PF is the first NIC, in the first slot.
const UNIT: &str = "[Unit]\\nDescription=VFs\\nBefore=cloud-final.service\\n[Service]\\nType=oneshot\\n\
                    ExecStart=/bin/sh -c \"echo 4 > /sys/bus/pci/devices/0000:00:01.0/sriov_numvfs\"\\n\
                    [Install]\\nWantedBy=multi-user.target\\n";
/// What the guest says in the end: its name, which cloud-init gave it, and its VFs.
const EXPECTED: &str = "@@guest named-by-cloud-init, 4 VFs";
const USER_DATA: &str = "#cloud-config\nhostname: named-by-cloud-init\nruncmd:\n\
                         - 'echo \"@@guest $(hostname), $(ls -d /sys/bus/pci/devices/0000:01:00.* | wc -l) VFs\" \
                         > /dev/ttyS0'\n";
const META_DATA: &str = "instance-id: lab\n";
const NETWORK_CONFIG: &str = "network: {config: disabled}\n";

/// Boots it and returns when the guest has its name and its VFs.
pub(crate) fn run(lab: &Lab, workspace: &Path) -> Result<()> {
    apt::install_missing(&[
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("mmdebstrap", "mmdebstrap"),
        ("mke2fs", "e2fsprogs"),
        ("mformat", "mtools"),
        ("objcopy", "binutils"),
        ("genisoimage", "genisoimage"),
    ])?;
    let (firmware, disk, seed) = (uefi::firmware(lab)?, disk(lab)?, seed(lab)?);
    let vmm = build::vmm(workspace)?;
    note("boot", "Debian from a disk, by UEFI firmware; it takes many minutes");
    let mut machine = FirstLevel::boot(lab, workspace, 7, Clock::Instructions)?;
    let command = format!(
        "cp {disk} /tmp/root.raw || exit 1; \
         {vmm} --firmware {firmware} --disk path=/tmp/root.raw path={seed},readonly=on \
         --net tap=pf0,sriov_vfs=4 --cpus boot=1 --memory size=768M --serial file=/tmp/serial --console off & \
         vmm=$!; waited=0; \
         until grep -qs '^@@guest ' /tmp/serial; do \
         sleep 1; waited=$((waited + 1)); [ $waited -lt {LIMIT} ] && kill -0 $vmm || break; done; \
         cat /tmp/serial; echo; kill $vmm; echo \"after $waited s\"; grep -q '^{EXPECTED}' /tmp/serial",
        disk = quote(&disk),
        vmm = quote(&vmm),
        firmware = quote(&firmware),
        seed = quote(&seed),
    );
    match machine.run(&command, REAL_LIMIT, &mut |line| println!("{line}")) {
        Ok(0) => Ok(()),
        Ok(_) => Err(Error::new(format!("the guest did not say {EXPECTED:?}"))),
        Err(lost) => Err(Error::new(format!("the run did not end: {}", lost.explain(REAL_LIMIT)))),
    }
}

/// The guest's disk: an EFI system partition with a unified kernel image, and Debian. It is made once.
fn disk(lab: &Lab) -> Result<PathBuf> {
    let folder = lab.folder().join("cloud-image");
    let disk = folder.join("disk.raw");
    if disk.exists() {
        return Ok(disk);
    }
    let step = Step::begin("make", format!("a disk with Debian {} and cloud-init", apt::RELEASE_6_1));
    let (root, filesystem, unfinished) = (folder.join("root"), folder.join("root.raw"), folder.join("unfinished.raw"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).context(folder.display())?;
    let unit = format!("printf '{UNIT}' > \"$1/etc/systemd/system/vfs.service\"");
    let enable = "chroot \"$1\" systemctl enable vfs.service";
    debian::tree(&root, "systemd-sysv,udev,cloud-init", &[&unit, enable])?;
    let size = format!("{}K", ROOT_SIZE >> 10);
    output(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&root).arg(&filesystem).arg(size))?;
    fs::remove_dir_all(&root).context(root.display())?;
    let program = folder.join("linux.efi");
    uefi::unified_kernel_image(lab, &lab.image(Image::DiskRoot, uefi::KERNEL)?, CMDLINE, &program)?;
    let offsets = gpt::create(&unfinished, &[(Kind::EfiSystem, uefi::EFI_SYSTEM_SIZE), (Kind::Linux, ROOT_SIZE)])?;
    let [efi_system, linux] = offsets[..] else { return Err(Error::new("the disk has not two partitions")) };
    uefi::fill_efi_system(&unfinished, efi_system, &program)?;
    copy_sparse(&filesystem, &unfinished, linux)?;
    fs::remove_file(&filesystem).context(filesystem.display())?;
    fs::rename(&unfinished, &disk).context(disk.display())?;
    step.done();
    Ok(disk)
}

/// Copies a file into another one at `offset`, without its empty blocks.
fn copy_sparse(from: &Path, to: &Path, offset: u64) -> Result<()> {
    const BLOCK: usize = 1 << 20;
    let source = fs::File::open(from).context(from.display())?;
    let target = fs::OpenOptions::new().write(true).open(to).context(to.display())?;
    let len = source.metadata().context(from.display())?.len();
    let mut block = vec![0; BLOCK];
    for at in (0..len).step_by(BLOCK) {
        let block = &mut block[..BLOCK.min((len - at) as usize)];
        source.read_exact_at(block, at).context(from.display())?;
        if block.iter().any(|byte| *byte != 0) {
            target.write_all_at(block, offset + at).context(to.display())?;
        }
    }
    Ok(())
}

/// cloud-init's disk (NoCloud): an ISO 9660 file system with the label CIDATA.
fn seed(lab: &Lab) -> Result<PathBuf> {
    let folder = lab.folder().join("cloud-image/seed");
    fs::create_dir_all(&folder).context(folder.display())?;
    for (name, text) in [("user-data", USER_DATA), ("meta-data", META_DATA), ("network-config", NETWORK_CONFIG)] {
        fs::write(folder.join(name), text).context(name)?;
    }
    let image = folder.with_extension("iso");
    let mut command = Command::new("genisoimage");
    command.args(["-quiet", "-output"]).arg(&image).args(["-volid", "CIDATA", "-joliet", "-rock"]);
    output(command.arg(&folder))?;
    Ok(image)
}
