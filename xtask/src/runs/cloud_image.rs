//! Boots a guest as a cloud does: from a disk with its own Debian, through firmware, configured by cloud-init's disk.
//! The disk is raw, or a qcow2 image over the raw one; the firmware is UEFI's, or Cloud Hypervisor's own.
//!
//! A systemd unit enables the VFs of the guest's NICs, as an administrator would do at each start. The command that
//! starts the guest is README's first example, with one more NIC: the guest governs its VFs, and gives them to
//! containers as docs/guide/kubernetes-vlans.md does.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::build;
use crate::checks::suite::quote;
use crate::error::{Context, Error, Result};
use crate::fetch::apt::{self, output};
use crate::guest_tools;
use crate::lab::Lab;
use crate::lab::cni;
use crate::lab::gpt::{self, Kind};
use crate::lab::hypervisor_fw;
use crate::lab::images::Image;
use crate::lab::uefi;
use crate::machine::nested::{Clock, FirstLevel};
use crate::progress::{Step, note};
use crate::runs::debian;

/// Time that a guest may take, in seconds of the machine's own clock, which counts instructions.
const LIMIT: u64 = 1200;
/// Time that each may take in real time: an emulated instruction takes longer than a nanosecond.
const REAL_LIMIT: Duration = Duration::from_secs(5400);
/// The size of the root file system. The file is sparse.
const ROOT_SIZE: u64 = 512 << 20;
/// Packages on it.
const PACKAGES: &str = "systemd-sysv,udev,cloud-init,iproute2,iputils-ping";
const CMDLINE: &str = "console=ttyS0 root=/dev/vda2 quiet systemd.show_status=1";
/// The NIC whose VFs the guest governs, the first in the guest, and so with the addresses of the guide.
const GOVERNED: &str = "id=node,switch=veb,mac=52:54:00:00:00:02,sriov_vfs=2,guest_control=[vlan:100-199]";
/// The guide's script for the guest, which makes two containers on these VFs, and its output: the containers are apart,
/// then in one VLAN, and the host has refused another.
const TWO_PODS: &str = include_str!("../../../contrib/cloud-image/two-pods");
const OF_TWO_PODS: [&str; 3] = ["b is in another VLAN", "b is in the VLAN of a", "vlan=300: the host allows 100-199"];
/// The programs of CNI that the script needs.
const CNI_PROGRAMS: [&str; 2] = ["cnitool", "static"];
/// The number of VFs of README's NIC, and the tap of the first; the others have the PF's name and their index.
const VFS: usize = 8;
const FIRST_TAP: &str = "tenant-a";
/// README, and the start of the command of its first example.
const README: &str = include_str!("../../../README.md");
const EXAMPLE: &str = "\nsudo target/release/cloud-hypervisor ";
/// The unit that enables all VFs of each PF. systemd replaces `$name` and `%x` itself; doubled, they reach the shell.
const UNIT: &str = include_str!("../../../contrib/cloud-image/vfs.service");
/// The guest's prompt at the end.
const LOGIN: &str = "named-by-cloud-init login: ";
/// The guest's report at the end: its name from cloud-init, the state of the unit, its VFs with a driver, and the
/// machine's serial number from SMBIOS.
const EXPECTED: &str = "@@guest named-by-cloud-init, active, 10 VFs, serial number S42";
/// VF n of README's NIC, the guest's second, gets the address 10.79.n.2. The line starts after an empty one: a login
/// prompt may be there.
const USER_DATA: &str = "#cloud-config
hostname: named-by-cloud-init
write_files:
- path: /run/report
  content: |
    mount -o ro /dev/disk/by-label/CIDATA /mnt
    sh /mnt/two-pods
    for path in /sys/bus/pci/devices/0000:00:04.0/virtfn*/virtio*/net/*; do
      vf=${path#*/virtfn}
      ip address add 10.79.${vf%%/*}.2/24 dev ${path##*/}
      ip link set ${path##*/} up
    done
    vfs=$(ls -d /sys/bus/pci/drivers/virtio-pci/*/physfn | wc -l)
    serial=$(cat /sys/class/dmi/id/product_serial)
    echo
    echo \"@@guest $(hostname), $(systemctl is-active vfs.service), $vfs VFs, serial number $serial\"
runcmd:
- sh /run/report > /dev/ttyS0 2>&1
";
const META_DATA: &str = include_str!("../../../contrib/cloud-image/meta-data");
const NETWORK_CONFIG: &str = "network: {config: disabled}\n";

/// The form of the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Form {
    /// A file with the disk's bytes
    Raw,
    /// A qcow2 image over the raw one, which is its backing file
    Qcow2,
}

/// Firmware that boots the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Firmware {
    /// UEFI firmware, from a package of Debian
    Edk2,
    /// rust-hypervisor-firmware, which starts what the boot loader specification describes
    HypervisorFw,
}

/// Boots Debian from a disk of this form with this firmware, and returns when the guest has its name, a login, and VFs
/// that carry traffic. Returns false if this machine lacks the firmware.
pub(crate) fn run(lab: &Lab, workspace: &Path, form: Form, firmware: Firmware) -> Result<bool> {
    let Some((program, clock)) = program(lab, workspace, firmware)? else { return Ok(false) };
    let programs = [
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("mformat", "mtools"),
        ("objcopy", "binutils"),
        ("qemu-img", "qemu-utils"),
    ];
    apt::install_missing(&programs)?;
    apt::install_missing(&debian::PROGRAMS)?;
    apt::install_missing(&[("genisoimage", "genisoimage")])?;
    let (disk, seed) = (disk(lab)?, seed(lab, workspace)?);
    let vmm = build::vmm(workspace)?;
    let name = if form == Form::Raw { "a raw disk" } else { "a qcow2 image" };
    let file = program.file_name().unwrap_or_default().to_string_lossy();
    note("boot", format!("Debian from {name}, by {file}; it takes minutes"));
    let command = command(&vmm, &program, form, &disk, &seed)?;
    let mut machine = FirstLevel::boot(lab, workspace, 7, clock)?;
    match machine.run(&command, REAL_LIMIT, &mut |line| println!("{line}")) {
        Ok(0) => Ok(true),
        Ok(_) => Err(Error::new(format!(
            "the guest did not say {EXPECTED:?} or one of {OF_TWO_PODS:?}, has no login or no answer of a VF, or its \
             image has errors"
        ))),
        Err(lost) => Err(Error::new(format!("the run did not end: {}", lost.explain(REAL_LIMIT)))),
    }
}

/// The file of the firmware, at its path in first-level machines, and the kind of clock that such a machine needs for
/// it.
fn program(lab: &Lab, workspace: &Path, firmware: Firmware) -> Result<Option<(PathBuf, Clock)>> {
    if firmware == Firmware::Edk2 {
        return Ok(Some((uefi::firmware(lab)?, Clock::Instructions)));
    }
    let copy = hypervisor_fw::copy(lab, workspace, "a cloud image by hypervisor-fw")?;
    Ok(copy.map(|copy| (copy, Clock::Real)))
}

/// The shell command that boots the guest from a copy of `disk`, waits for its report and its login, pings it through
/// each VF, and shows its console.
fn command(vmm: &Path, firmware: &Path, form: Form, disk: &Path, seed: &Path) -> Result<String> {
    // --kernel accepts firmware as well.
    let (source, option, key, check) = match form {
        Form::Raw => (disk.to_owned(), "--firmware", "", ""),
        Form::Qcow2 => {
            let overlay = disk.with_extension("qcow2");
            let mut command = Command::new("qemu-img");
            command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(disk).arg(&overlay);
            output(&mut command)?;
            (overlay, "--kernel", ",image_type=qcow2,backing_files=on", "qemu-img check /tmp/disk &&")
        }
    };
    let changes = [
        ("--firmware hypervisor-fw", format!("{option} {}", quote(firmware))),
        ("path=debian.raw", format!("path=/tmp/disk{key}")),
        ("path=cidata.iso", format!("path={}", quote(seed))),
        ("--serial tty", "--serial file=/tmp/serial".into()),
        ("--net id=", format!("--net '{GOVERNED}' id=")),
    ];
    let of_two_pods: String = OF_TWO_PODS.iter().map(|line| format!(" && grep -q '{line}' /tmp/serial")).collect();
    Ok(format!(
        "cp {source} /tmp/disk || exit 1; \
         {vmm} {arguments} --platform system_serial_number=S42 & \
         vmm=$!; waited=0; \
         until grep -qs '^@@guest ' /tmp/serial && grep -qs ' login: ' /tmp/serial; do \
         sleep 1; waited=$((waited + 1)); [ $waited -lt {LIMIT} ] && kill -0 $vmm || break; done; \
         answers=0; for vf in $(seq 0 $(({VFS} - 1))); do tap=pf0v$vf; [ $vf = 0 ] && tap={FIRST_TAP}; \
         ip addr add 10.79.$vf.1/24 dev $tap && ip link set $tap up && \
         ping -c 3 -W 20 -I $tap 10.79.$vf.2 && answers=$((answers + 1)); done; \
         cat /tmp/serial; echo; kill $vmm; wait $vmm; echo \"after $waited s, $answers VFs answer\"; {check} \
         [ $answers -eq {VFS} ] && grep -q '{LOGIN}' /tmp/serial && grep -q '^{EXPECTED}' /tmp/serial{of_two_pods}",
        source = quote(&source),
        vmm = quote(vmm),
        arguments = example(&changes)?,
    ))
}

/// The arguments of README's first example, with each of `changes` applied once.
fn example(changes: &[(&str, String)]) -> Result<String> {
    let arguments = README.split_once(EXAMPLE).and_then(|(_, rest)| rest.split_once("\n```"));
    let (arguments, _) = arguments.ok_or_else(|| Error::new(format!("README.md has no example{EXAMPLE}")))?;
    let arguments = arguments.replace("\\\n", " ");
    changes.iter().try_fold(arguments, |arguments, (from, to)| match arguments.matches(from).count() {
        1 => Ok(arguments.replace(from, to)),
        count => Err(Error::new(format!("the first example of README.md has {from:?} {count} times, not once"))),
    })
}

/// The guest's disk: an EFI system partition with a kernel in both forms that firmware starts, and Debian. It is
/// created once, and again when its contents change.
fn disk(lab: &Lab) -> Result<PathBuf> {
    let folder = lab.folder().join("cloud-image");
    let disk = folder.join("disk.raw");
    let (record, wanted) = (folder.join("wanted"), format!("{PACKAGES}\n{CMDLINE}\n{UNIT}\n{}", uefi::LOADER));
    if fs::read_to_string(&record).is_ok_and(|have| have == wanted) {
        return Ok(disk);
    }
    let step = Step::begin("make", format!("a disk with Debian {} and cloud-init", apt::RELEASE_6_1));
    let (filesystem, unfinished) = (folder.join("root.raw"), folder.join("unfinished.raw"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).context(folder.display())?;
    let unit = folder.join("vfs.service");
    fs::write(&unit, UNIT).context(unit.display())?;
    let copy = format!("copy-in {} /etc/systemd/system", quote(&unit));
    let enable = "chroot \"$1\" systemctl enable vfs.service";
    let size = format!("{}K", ROOT_SIZE >> 10);
    debian::file_system(&filesystem, &size, PACKAGES, &[&copy, enable])?;
    let program = folder.join("linux.efi");
    let initramfs = lab.image(Image::DiskRoot, uefi::KERNEL)?;
    uefi::unified_kernel_image(lab, &initramfs, CMDLINE, &program)?;
    let offsets = gpt::create(&unfinished, &[(Kind::EfiSystem, uefi::EFI_SYSTEM_SIZE), (Kind::Linux, ROOT_SIZE)])?;
    let [efi_system, linux] = offsets[..] else { return Err(Error::new("the disk has not two partitions")) };
    uefi::fill_efi_system(&unfinished, efi_system, &program)?;
    uefi::add_entry(lab, &unfinished, efi_system, &initramfs, CMDLINE)?;
    copy_sparse(&filesystem, &unfinished, linux)?;
    fs::remove_file(&filesystem).context(filesystem.display())?;
    fs::rename(&unfinished, &disk).context(disk.display())?;
    fs::write(&record, wanted).context(record.display())?;
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

/// cloud-init's disk (NoCloud): an ISO 9660 file system with the label CIDATA, which also has the programs that the
/// guest needs for containers.
fn seed(lab: &Lab, workspace: &Path) -> Result<PathBuf> {
    let folder = lab.folder().join("cloud-image/seed");
    fs::create_dir_all(&folder).context(folder.display())?;
    let texts = [
        ("user-data", USER_DATA),
        ("meta-data", META_DATA),
        ("network-config", NETWORK_CONFIG),
        ("two-pods", TWO_PODS),
    ];
    for (name, text) in texts {
        fs::write(folder.join(name), text).context(name)?;
    }
    cni::prepare(lab, workspace, &cni::PLUGINS)?;
    let plugins = cni::PLUGINS.folder(lab);
    let programs = CNI_PROGRAMS.iter().map(|name| plugins.join(name));
    for program in guest_tools::programs(workspace)?.into_iter().chain(programs) {
        let copy = folder.join(program.file_name().unwrap_or_default());
        fs::copy(&program, &copy).context(format!("copying {}", program.display()))?;
    }
    let image = folder.with_extension("iso");
    let mut command = Command::new("genisoimage");
    command.args(["-quiet", "-output"]).arg(&image).args(["-volid", "CIDATA", "-joliet", "-rock"]);
    output(command.arg(&folder))?;
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readmes_first_example_is_what_boots_a_cloud_image() {
        let changed = ("path=debian.raw", "path=/d".to_string());
        let arguments = example(&[changed]).unwrap();
        assert!(arguments.starts_with("--firmware hypervisor-fw ") && arguments.contains("path=/d path=cidata.iso"));
        assert!(arguments.contains(&format!("sriov_vfs={VFS}")) && arguments.contains(&format!("tap={FIRST_TAP}")));
        assert!(!arguments.contains(['\\', '\n', '`']), "{arguments}");
        assert!(example(&[("no such words", String::new())]).is_err());
    }

    #[test]
    fn user_data_for_readers_has_the_unit_that_is_tested() {
        let user_data = include_str!("../../../contrib/cloud-image/user-data");
        let path = "- path: /etc/systemd/system/vfs.service\n  content: |\n";
        let (_, rest) = user_data.split_once(path).unwrap();
        let lines = rest.lines().map_while(|line| line.strip_prefix("    "));
        assert_eq!(lines.collect::<Vec<_>>(), UNIT.lines().collect::<Vec<_>>());
        assert!(
            user_data.starts_with("#cloud-config\n") && user_data.contains("\n- systemctl enable --now vfs.service\n")
        );
    }
}
