//! The files that a VM's configuration names, and the access that each needs.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use landlock::{AccessFs, BitFlags};
use rustix::fs::{major, minor};

use super::rule::{Missing, READ, Rule, SOCKETS, WRITE};
use crate::config::{ConsoleMode, LandlockAccess, LandlockConfig, MemoryConfig, Options, PayloadConfig, VmConfig};
use crate::lazy_memory::userfault;

/// Rules for a process with this VM: for files that its configuration names, except for those of devices, and for host
/// files that every VM needs.
pub(super) fn by_vm(config: &VmConfig) -> Vec<Rule> {
    let mut rules = of_host(config);
    if config.landlock_enable {
        rules.extend(config.landlock_rules.iter().map(of_user));
    }
    rules.extend(of_payload(&config.payload));
    rules.extend(of_zones(&config.memory));
    rules.extend(of_consoles(config));
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

/// Rules for files that this program itself reads on the host, and for the devices of every VM.
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
        // A named pipe is opened for reading as well.
        ConsoleMode::File => {
            file.as_ref().map(|path| Rule { missing: Missing::Make, ..Rule::new(option, path, output(path)) })
        }
        ConsoleMode::Socket => socket.as_ref().map(|path| Rule::of_socket(option, path)),
        ConsoleMode::Off | ConsoleMode::Pty | ConsoleMode::Tty | ConsoleMode::Null => None,
    };
    ends.into_iter().filter_map(rule).collect()
}

/// Access to an output file. A named pipe is opened for reading as well.
fn output(path: &Path) -> BitFlags<AccessFs> {
    let is_pipe = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo());
    if is_pipe { READ | WRITE } else { WRITE }
}

/// The folder in sysfs of the `block` or `char` device at `path`, if it is one.
pub(crate) fn sysfs(kind: &str, path: &Path) -> Option<PathBuf> {
    let found = std::fs::metadata(path).ok()?;
    let is_one = match kind {
        "block" => found.file_type().is_block_device(),
        _ => found.file_type().is_char_device(),
    };
    let (major, minor) = (major(found.rdev()), minor(found.rdev()));
    is_one.then(|| PathBuf::from(format!("/sys/dev/{kind}/{major}:{minor}")).canonicalize().ok()).flatten()
}
