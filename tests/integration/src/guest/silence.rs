//! A report on a guest that does not answer: the state of its VMM, of KVM and of this machine; and the guest's progress
//! after its vCPUs have left and entered it again, a key was typed, and an NMI was sent.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::lab;
use crate::measure::kernel_fs::{DEBUG, TRACING, mount_debugfs, mount_tracefs};
use crate::vmm::Vmm;

/// The events of KVM that show the activity of a vCPU, its interrupts, and its accesses to ports, such as those of its
/// serial port.
const EVENTS: [&str; 11] = [
    "kvm_entry",
    "kvm_exit",
    "kvm_pio",
    "kvm_eoi",
    "kvm_inj_virq",
    "kvm_set_irq",
    "kvm_msi_set_irq",
    "kvm_apic_accept_irq",
    "kvm_pic_set_irq",
    "kvm_ioapic_set_irq",
    "kvm_vcpu_wakeup",
];
/// The buffer of tracefs for reports, separate from that of tests.
const INSTANCE: &str = "instances/silence";
/// The time between two reads of counters, and the time for which exits are recorded, if they were not before.
const INTERVAL: Duration = Duration::from_secs(1);
/// Last lines of a trace or a kernel's log in a report.
const LINES: usize = 120;
/// The size of the trace's buffer in KiB: some 60,000 events, several minutes of an idle guest.
const BUFFER: &str = "4096";
/// The time limit for an answer of the VMM, which may hang like its guest.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Records all guests' exits and interrupts from now on, so that a report has those from before the guest fell silent.
/// Exits get some 10 % slower.
pub fn record_exits() {
    mount_tracefs();
    let folder = Path::new(TRACING).join(INSTANCE);
    let _ = fs::create_dir(&folder);
    let write = |file: &str, text: &str| fs::write(folder.join(file), text);
    // A machine may lack some of the events.
    let _ = write("buffer_size_kb", BUFFER);
    for event in EVENTS {
        let _ = write(&format!("events/kvm/{event}/enable"), "1");
    }
}

/// The counters of a VMM and of KVM at one time.
pub(crate) struct Look {
    times: Vec<Counter>,
    kvm: Vec<Counter>,
}

impl Look {
    fn at(vmm: &Vmm) -> Look {
        Look { times: cpu_times(vmm), kvm: counters(vmm) }
    }

    /// Adds the changes since `earlier`, and the VMM's own report.
    fn since(&self, earlier: &Look, vmm: &Vmm, text: &mut String) {
        part(text, "CPU time of each thread, in ticks", &grown(&earlier.times, &self.times));
        part(text, "KVM's counters: their values, and their growth", &grown(&earlier.kvm, &self.kvm));
        part(text, "eventfds of the VMM whose count is not 0", &pending_eventfds(vmm));
        part(text, "the VMM's counters, and registers of the serial port", &vmm_counters(vmm));
        part(text, "the last exits and interrupts of all guests", &tail(&trace()));
    }
}

/// Describes a VMM whose guest is silent, with the state of KVM and of this machine's kernel. Also returns the
/// counters, for [`progress`].
pub(crate) fn report(vmm: &Vmm) -> (String, Look) {
    mount_debugfs();
    record_exits();
    let before = Look::at(vmm);
    thread::sleep(INTERVAL);
    let after = Look::at(vmm);
    let mut text = String::new();
    part(&mut text, "the VMM's threads (state, place in the kernel)", &vmm.threads());
    after.since(&before, vmm, &mut text);
    part(&mut text, "this machine's interrupts", &read("/proc/interrupts"));
    part(&mut text, "this machine's load and uptime", &(read("/proc/loadavg") + &read("/proc/uptime")));
    let log = Command::new("dmesg").output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    part(&mut text, "the end of this machine's kernel log", &tail(&log.unwrap_or_default()));
    (text, after)
}

/// Describes the progress since `first`, and keeps the whole trace in a file, whose path it includes.
pub(crate) fn progress(vmm: &Vmm, first: &Look) -> String {
    let mut text = String::from("=== after the vCPUs entered the guest again, and a key:\n");
    Look::at(vmm).since(first, vmm, &mut text);
    let kept = keep(&trace()).map_or_else(|error| error.to_string(), |path| path.display().to_string());
    part(&mut text, "the whole trace is in", &kept);
    text
}

/// Sends the guest an NMI, on which Linux panics with a backtrace if its command line says so. Returns the answer.
pub(crate) fn interrupt(vmm: &Vmm) -> String {
    let mut text = String::new();
    part(&mut text, "an NMI was sent", &ask(vmm, "PUT", "vm.nmi"));
    text
}

fn part(text: &mut String, title: &str, body: &str) {
    let _ = write!(text, "--- {title}:\n{}\n", body.trim_end());
}

/// The counters of the VMM, if the test gave it an API and it answers. `__serial` has registers of the serial port.
fn vmm_counters(vmm: &Vmm) -> String {
    // One line for each device.
    ask(vmm, "GET", "vm.counters").replace("},", "},\n")
}

fn ask(vmm: &Vmm, method: &str, endpoint: &str) -> String {
    let Some(api) = vmm.api() else { return "the VMM has no API".into() };
    match api.ask(method, endpoint, ANSWER_LIMIT) {
        Ok(answer) => format!("{}: {}", answer.status, answer.body),
        Err(error) => format!("{method} {endpoint}: no answer: {error}"),
    }
}

/// All recorded events.
fn trace() -> String {
    read(Path::new(TRACING).join(INSTANCE).join("trace"))
}

/// Writes `trace` to a file of the lab, which outlives a first-level machine.
fn keep(trace: &str) -> std::io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let program = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let folder = lab::folder().join("log");
    fs::create_dir_all(&folder)?;
    let file = folder.join(format!("silence-{program}-{}.trace", std::process::id()));
    fs::write(&file, trace)?;
    Ok(file)
}

/// Makes each vCPU leave the guest and enter it again, so that KVM checks pending interrupts again.
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

/// The eventfds that were signalled and not read. An irqfd or ioeventfd among them is a lost notification.
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
