//! The files that a VM's configuration names, and what each is needed for.

use std::collections::HashSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use landlock::{AccessFs, BitFlags};
use rustix::fs::{major, minor};
use virtio_devices::{BlockSpec, backing_files};

use super::rule::{Missing, READ, Rule, SOCKETS, WRITE};
use crate::config::{
    BackendPlan, ConsoleMode, DeviceKind, DevicePlan, LandlockAccess, LandlockConfig, MemoryConfig, MissingBackend,
    NicPlan, Options, PayloadConfig, PlannedVm, UplinkPlan, Vhost, VhostMode, VmConfig,
};
use crate::lazy_memory::userfault;
use crate::vfio::{VfioInterface, VfioSource, VfioSpec, cdev};

/// Rules for a process with this VM: for files that its configuration names, and for those that every VM needs of the
/// host.
pub(super) fn by_vm(vm: &PlannedVm) -> Vec<Rule> {
    let config = vm.config();
    let mut rules = of_host(config);
    if config.landlock_enable {
        rules.extend(config.landlock_rules.iter().map(of_user));
    }
    rules.extend(of_payload(&config.payload));
    rules.extend(of_zones(&config.memory));
    rules.extend(of_consoles(config));
    rules.extend(vm.plan().devices.iter().flat_map(by_device));
    rules
}

/// Rules for a VM that is restored from the snapshot in this folder.
pub(super) fn by_snapshot(folder: &Path) -> Vec<Rule> {
    vec![Rule::new("source_url", folder, READ), Rule::of_host(userfault::DEVICE, READ | WRITE)]
}

/// Rule for the folder of a new snapshot.
pub(super) fn by_destination(folder: &Path) -> Rule {
    Rule::new("destination_url", folder, READ | WRITE | SOCKETS | AccessFs::MakeReg)
}

/// Rule for the certificates in a folder.
pub(super) fn by_tls(folder: &Path) -> Rule {
    Rule::new("tls_dir", folder, READ)
}

/// The rules without those that say the same: thousands of VFs use one /dev/net/tun.
fn distinct(rules: impl Iterator<Item = Rule>) -> Vec<Rule> {
    let mut seen = HashSet::new();
    rules.filter(|rule| seen.insert((rule.path.clone(), rule.access.bits(), rule.missing))).collect()
}

/// Rule that the user gave.
fn of_user(config: &LandlockConfig) -> Rule {
    let write = WRITE | SOCKETS | AccessFs::MakeReg;
    let access = match config.access {
        LandlockAccess::Read => READ,
        LandlockAccess::Write => write,
        LandlockAccess::ReadWrite => READ | write,
    };
    Rule::new(LandlockConfig::OPTION, &config.path, access)
}

/// Rules for files of the host that this program reads by itself, and for the devices that it has for every VM.
fn of_host(config: &VmConfig) -> Vec<Rule> {
    let mut rules = vec![
        Rule::of_host("/dev/kvm", READ | WRITE),
        // Open files, threads, pinned memory, counters of taps.
        Rule::of_host("/proc/self", READ),
        Rule::of_host("/proc/meminfo", READ),
        Rule::of_host("/proc/sys/kernel/osrelease", READ),
        Rule::of_host("/sys/devices/system/cpu", READ),
        // For the log's local time.
        Rule::of_host("/etc/localtime", READ),
    ];
    if [config.serial.mode, config.console.mode, config.debug_console.mode].contains(&ConsoleMode::Pty) {
        rules.extend(["/dev/ptmx", "/dev/pts"].map(|path| Rule::of_host(path, READ | WRITE)));
    }
    rules
}

fn of_payload(payload: &PayloadConfig) -> Vec<Rule> {
    let files = [("--kernel", &payload.kernel), ("--firmware", &payload.firmware), ("--initramfs", &payload.initramfs)];
    let files = files.into_iter().filter_map(|(option, path)| Some((option, path.as_ref()?)));
    files.map(|(option, path)| Rule::new(option, path, READ)).collect()
}

fn of_zones(memory: &MemoryConfig) -> Vec<Rule> {
    let files = memory.zones.iter().filter_map(|zone| Some((zone, zone.file.as_ref()?)));
    files.map(|(zone, path)| Rule::new(format!("--memory-zone id={}", zone.id), path, READ | WRITE)).collect()
}

fn of_consoles(config: &VmConfig) -> Vec<Rule> {
    let (serial, console, debug) = (&config.serial, &config.console, &config.debug_console);
    let ends = [
        ("--serial", serial.mode, &serial.file, &serial.socket),
        ("--console", console.mode, &console.file, &console.socket),
        ("--debug-console", debug.mode, &debug.file, &None),
    ];
    let rule = |(option, mode, file, socket): (&str, ConsoleMode, &Option<PathBuf>, &Option<PathBuf>)| match mode {
        // A named pipe is opened for reading, too.
        ConsoleMode::File => {
            file.as_ref().map(|path| Rule { missing: Missing::Make, ..Rule::new(option, path, output(path)) })
        }
        ConsoleMode::Socket => socket.as_ref().map(|path| Rule::of_socket(option, path)),
        ConsoleMode::Off | ConsoleMode::Pty | ConsoleMode::Tty | ConsoleMode::Null => None,
    };
    ends.into_iter().filter_map(rule).collect()
}

/// Access to a file of output. A named pipe is opened for reading, too.
fn output(path: &Path) -> BitFlags<AccessFs> {
    let is_pipe = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo());
    if is_pipe { READ | WRITE } else { WRITE }
}

/// Rules for a device that is to be plugged.
pub(super) fn by_device(device: &DevicePlan) -> Vec<Rule> {
    let option = || device.option();
    let access = |read_only: bool| if read_only { READ } else { READ | WRITE };
    match &device.kind {
        DeviceKind::Net(net) => {
            let option = option();
            let uplink = net.switch.as_ref().and_then(|switch| switch.uplink.as_ref());
            let uplink = uplink.filter(|uplink| matches!(uplink, UplinkPlan::Tap(_)));
            let uplink = uplink.map(|_| Rule::new(option.clone(), "/dev/net/tun", READ | WRITE));
            distinct(uplink.into_iter().chain(net.functions().flat_map(|nic| of_nic(nic, &option))))
        }
        DeviceKind::Disk(disk) => of_disk(disk, &option()),
        DeviceKind::Rng(rng) => vec![Rule::new(option(), &rng.source, READ)],
        DeviceKind::Vsock(vsock) => vec![Rule::of_socket(option(), &vsock.socket)],
        DeviceKind::Pmem(pmem) => vec![Rule::new(option(), &pmem.file, access(pmem.discard_writes))],
        DeviceKind::Vfio(spec) => of_host_device(spec, &option()),
        // Connections to sockets that have a path are not the kernel's business here.
        DeviceKind::VhostUser(_)
        | DeviceKind::Console
        | DeviceKind::Balloon(_)
        | DeviceKind::Watchdog
        | DeviceKind::Pvpanic
        | DeviceKind::Mem { .. }
        | DeviceKind::Rtc(_)
        | DeviceKind::Iommu(_) => Vec::new(),
    }
}

fn of_nic(nic: &NicPlan, option: &str) -> Vec<Rule> {
    let device = |path: &str| Rule::new(option, path, READ | WRITE);
    let of_kernel = |vhost| match vhost {
        Vhost::On => Some(device("/dev/vhost-net")),
        Vhost::Auto => Some(Rule { missing: Missing::Skip, ..device("/dev/vhost-net") }),
        Vhost::Off => None,
    };
    let rules = match &nic.backend {
        BackendPlan::Tap { vhost, .. } => [device("/dev/net/tun")].into_iter().chain(of_kernel(*vhost)).collect(),
        BackendPlan::Fds { vhost, .. } => of_kernel(*vhost).into_iter().collect(),
        BackendPlan::VhostUser { socket, mode: VhostMode::Server } => vec![Rule::of_socket(option, socket)],
        BackendPlan::VhostUser { mode: VhostMode::Client, .. } | BackendPlan::Port(_) => Vec::new(),
        BackendPlan::Vdpa(spec) => {
            let time_out = sysfs("char", &spec.path).and_then(|device| {
                let files = device.ancestors().map(|folder| folder.join("msg_timeout"));
                files.into_iter().find(|file| file.exists())
            });
            let time_out = time_out.map(|file| Rule { missing: Missing::Skip, ..Rule::new(option, file, READ) });
            [Rule::new(option, &spec.path, READ | WRITE)].into_iter().chain(time_out).collect()
        }
    };
    match nic.missing {
        MissingBackend::Refused => rules,
        MissingBackend::LinkDown => rules.into_iter().map(Rule::if_present).collect(),
        MissingBackend::LeftOut(_) => Vec::new(),
    }
}

/// The files of VFIO for a device of the host: its folder in sysfs, that of its group, and the group's own file.
fn of_host_device(spec: &VfioSpec, option: &str) -> Vec<Rule> {
    let mut rules = Vec::new();
    let mut add = |path: &Path, access| rules.push(Rule::new(option, path, access));
    match spec.interface {
        VfioInterface::Groups => add(Path::new("/dev/vfio/vfio"), READ | WRITE),
        VfioInterface::Iommufd(None) => add(Path::new("/dev/iommu"), READ | WRITE),
        VfioInterface::Iommufd(Some(_)) => {}
    }
    if let VfioSource::Path(path) = &spec.source {
        add(path, READ);
    }
    // What is wrong with the device is said when it is opened.
    if let Ok((device, _)) = spec.source.find() {
        let neighbours = device.folder.join("iommu_group/devices");
        let neighbours = std::fs::read_dir(neighbours).into_iter().flatten().flatten();
        rules.extend(neighbours.filter_map(|entry| Some(Rule::new(option, entry.path().canonicalize().ok()?, READ))));
        let group = device.folder.join("iommu_group").canonicalize();
        rules.extend(group.ok().map(|group| Rule::new(option, group, READ)));
        let file = match (spec.interface, &spec.source) {
            (VfioInterface::Groups, _) => Some(device.group_file()),
            (VfioInterface::Iommufd(_), VfioSource::Path(_)) => cdev::path(&device),
            (VfioInterface::Iommufd(_), VfioSource::Fd(_)) => None,
        };
        let file = file.map(|file| Rule { missing: Missing::Skip, ..Rule::new(option, file, READ | WRITE) });
        rules.extend(file);
    }
    rules
}

/// An image, those below it, and what sysfs says of a block device.
fn of_disk(disk: &BlockSpec, option: &str) -> Vec<Rule> {
    let mut rules = vec![Rule::new(option, &disk.path, if disk.read_only { READ } else { READ | WRITE })];
    rules.extend(backing_files(disk).into_iter().map(|path| Rule::new(option, path, READ)));
    if let Some(device) = sysfs("block", &disk.path) {
        // Those of a partition are its disk's.
        let queues = [Some(device.as_path()), device.parent()].into_iter().flatten().map(|folder| folder.join("queue"));
        rules.extend(queues.map(|path| Rule { missing: Missing::Skip, ..Rule::new(option, path, READ) }));
    }
    rules
}

/// The folder in sysfs of the `block` or `char` device at `path`, if it is one.
fn sysfs(kind: &str, path: &Path) -> Option<PathBuf> {
    let found = std::fs::metadata(path).ok()?;
    let is_one = match kind {
        "block" => found.file_type().is_block_device(),
        _ => found.file_type().is_char_device(),
    };
    let (major, minor) = (major(found.rdev()), minor(found.rdev()));
    is_one.then(|| PathBuf::from(format!("/sys/dev/{kind}/{major}:{minor}")).canonicalize().ok()).flatten()
}
