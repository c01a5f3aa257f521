//! A report on a guest that does not answer: the state of its VMM, of KVM and of this machine, and whether the guest
//! answers once its vCPUs have left and entered it again.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::kernel_fs::{DEBUG, TRACING, mount_debugfs, mount_tracefs};
use crate::vmm::Vmm;

/// The events of KVM that show what a vCPU does and which interrupts it gets.
const EVENTS: [&str; 9] = [
    "kvm_entry",
    "kvm_exit",
    "kvm_inj_virq",
    "kvm_set_irq",
    "kvm_msi_set_irq",
    "kvm_apic_accept_irq",
    "kvm_pic_set_irq",
    "kvm_ioapic_set_irq",
    "kvm_vcpu_wakeup",
];
/// The buffer of tracefs that reports use, apart from that of tests.
const INSTANCE: &str = "instances/silence";
/// The time between two looks at counters, and the time for which exits are recorded, if they were not before.
const INTERVAL: Duration = Duration::from_secs(1);
/// Last lines of a trace or a kernel's log in a report.
const LINES: usize = 120;

/// Records all guests' exits and interrupts from now on, so that a report shows those before the guest was silent.
/// Exits get some 10 % slower.
pub fn record_exits() {
    mount_tracefs();
    let folder = Path::new(TRACING).join(INSTANCE);
    let _ = fs::create_dir(&folder);
    let write = |file: &str, text: &str| fs::write(folder.join(file), text);
    // A machine may lack single events.
    let _ = write("buffer_size_kb", "1024");
    for event in EVENTS {
        let _ = write(&format!("events/kvm/{event}/enable"), "1");
    }
}

/// Describes a VMM whose guest is silent, and what KVM and this machine's kernel know of it.
pub(crate) fn report(vmm: &Vmm) -> String {
    mount_debugfs();
    record_exits();
    let before = (cpu_times(vmm), counters(vmm));
    thread::sleep(INTERVAL);
    let after = (cpu_times(vmm), counters(vmm));
    let mut text = String::new();
    let mut part = |title: &str, body: &str| {
        let _ = write!(text, "--- {title}:\n{}\n", body.trim_end());
    };
    part("the VMM's threads (state, place in the kernel)", &vmm.threads());
    part("CPU time of each thread in this second, in ticks", &grown(&before.0, &after.0));
    part("KVM's counters: their values, and what this second added", &grown(&before.1, &after.1));
    part("eventfds of the VMM whose count is not 0", &pending_eventfds(vmm));
    part("the last exits and interrupts of all guests", &tail(&read(Path::new(TRACING).join(INSTANCE).join("trace"))));
    part("this machine's interrupts", &read("/proc/interrupts"));
    part("this machine's load and uptime", &(read("/proc/loadavg") + &read("/proc/uptime")));
    let log = Command::new("dmesg").output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    part("the end of this machine's kernel log", &tail(&log.unwrap_or_default()));
    text
}

/// Makes each vCPU leave the guest and enter it again, by which KVM looks at pending interrupts afresh.
pub(crate) fn reenter(vmm: &Vmm) {
    vmm.signal(libc::SIGSTOP);
    thread::sleep(INTERVAL);
    vmm.signal(libc::SIGCONT);
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The last lines of `text`.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// A named number.
type Counter = (String, u64);

/// The user and system time of each thread, in ticks (`proc_pid_stat(5)`).
fn cpu_times(vmm: &Vmm) -> Vec<Counter> {
    let tasks = fs::read_dir(format!("/proc/{}/task", vmm.id())).into_iter().flatten().flatten();
    let times = tasks.filter_map(|task| {
        let stat = read(task.path().join("stat"));
        let (start, rest) = stat.rsplit_once(')')?;
        let number = |index| rest.split_whitespace().nth(index).and_then(|word| word.parse::<u64>().ok());
        Some((format!("{start})"), number(11)? + number(12)?))
    });
    times.collect()
}

/// KVM's counters of the VM and its vCPUs, from debugfs.
fn counters(vmm: &Vmm) -> Vec<Counter> {
    let prefix = format!("{}-", vmm.id());
    let mut counters = Vec::new();
    let mut folders: Vec<PathBuf> = entries(&Path::new(DEBUG).join("kvm"));
    folders.retain(|folder| folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)));
    while let Some(folder) = folders.pop() {
        for entry in entries(&folder) {
            if entry.is_dir() {
                folders.push(entry);
            } else if let Ok(value) = read(&entry).trim().parse() {
                let name = entry.strip_prefix(Path::new(DEBUG).join("kvm")).unwrap_or(&entry);
                counters.push((name.display().to_string(), value));
            }
        }
    }
    counters.sort();
    counters
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Each counter that is not 0, with its growth.
fn grown(before: &[Counter], after: &[Counter]) -> String {
    let value = |name: &str| before.iter().find(|(other, _)| other == name).map_or(0, |(_, value)| *value);
    let lines = after.iter().filter(|(_, now)| *now != 0);
    lines.map(|(name, now)| format!("{name}: {now} (+{})\n", now.wrapping_sub(value(name)))).collect()
}

/// The eventfds that were signalled and not read. One of an irqfd or ioeventfd is a lost notification.
fn pending_eventfds(vmm: &Vmm) -> String {
    let files = entries(Path::new(&format!("/proc/{}/fdinfo", vmm.id())));
    let pending = files.iter().filter_map(|file| {
        let text = read(file);
        let count = text.lines().find_map(|line| line.strip_prefix("eventfd-count:"))?.trim().to_owned();
        (count != "0").then(|| format!("fd {}: {count}\n", file.file_name().unwrap_or_default().to_string_lossy()))
    });
    pending.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_show_their_growth_and_zeros_are_left_out() {
        let counter = |name: &str, value| (name.to_owned(), value);
        let text = grown(&[counter("exits", 5)], &[counter("exits", 7), counter("halts", 0), counter("new", 2)]);
        assert_eq!(text, "exits: 7 (+2)\nnew: 2 (+2)\n");
    }
}
