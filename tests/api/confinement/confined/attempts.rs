//! Every attempt of an exploit in each thread of a running VM, compared with the threat model's table.

use std::collections::BTreeSet;
use std::fs;
use std::mem::discriminant;
use std::path::Path;

use super::attacks::{ATTACKS, Attack, Target};
use super::hijacked::{Hijacked, Outcome};

/// Makes every attempt in each of these threads of a process, and checks the outcome.
pub(super) fn make_all(pid: u32, threads: &[(i32, String)], target: &Target) {
    let before = [placed(target.pid), placed(target.tid)];
    for (tid, name) in threads {
        for Attack { what, make, can: (can, why) } in ATTACKS {
            // The starter is released, so that it can enter Landlock after the others.
            let outcome = make(&Hijacked::take(pid, *tid), target);
            let is_stopped = match outcome {
                Outcome::Filtered => true,
                // Landlock, or a missing descriptor.
                Outcome::Fails(error) => [libc::EACCES, libc::EPERM, libc::EBADF].contains(&error),
                Outcome::Made(_) => false,
            };
            println!("| {name} | {what} | {outcome:?} |");
            assert_eq!(!is_stopped, can.contains(&kind(name)), "{name} tries to {what}: {outcome:?} ({why})");
            let told = documented(what, name);
            assert_eq!(discriminant(&outcome), discriminant(&told), "{name} tries to {what}: {outcome:?}, {told:?}");
        }
    }
    assert!(!target.made().exists());
    assert_eq!([placed(target.pid), placed(target.tid)], before, "the other VMM runs where it ran, with its limits");
}

/// The attempts that only the threat model or only the test has.
pub(super) fn differences() -> Vec<String> {
    let section = section();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    let documented: BTreeSet<_> = rows.filter(|row| *row != "attempt").collect();
    let made: BTreeSet<_> = ATTACKS.iter().map(|attack| attack.what).collect();
    documented.symmetric_difference(&made).map(|what| (*what).to_string()).collect()
}

/// The section of the threat model with the table.
fn section() -> String {
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let text = folders.map(|folder| folder.join("SECURITY.md")).find_map(|path| fs::read_to_string(path).ok()).unwrap();
    let section = text.split("\n### ").find(|section| section.starts_with("The exploit's view\n")).unwrap();
    section.split("\n\nWorkers of ").next().unwrap().to_string()
}

/// A thread's name as in the table of attacks: that of vsock's worker begins with the device's.
fn kind(name: &str) -> &str {
    if name.contains("vsock") { "vsock" } else { name }
}

/// The outcome of an attempt in the thread of this name, according to the threat model's table.
fn documented(what: &str, name: &str) -> Outcome {
    let section = section();
    let row = section.lines().find(|line| line.starts_with(&format!("| {what} |")));
    let row = row.unwrap_or_else(|| panic!("SECURITY.md has no row \"{what}\" in its table of an exploit's attempts"));
    let column = match kind(name) {
        "vsock" => 3,
        "event-monitor" => 4,
        "cloud-hyperviso" => 5,
        "starter" => 6,
        _ => 2,
    };
    let cell = row.split('|').nth(column).unwrap().trim();
    match cell {
        "dies" => Outcome::Filtered,
        _ if cell.starts_with("refused") => Outcome::Fails(0),
        _ if cell.starts_with("**") => Outcome::Made(0),
        _ => panic!("SECURITY.md: {what}: {cell}"),
    }
}

/// The CPUs, group, session and priority of a thread, and the limits of its process.
fn placed(tid: u64) -> String {
    let read = |file| fs::read_to_string(format!("/proc/{tid}/{file}")).unwrap();
    let (status, stat) = (read("status"), read("stat"));
    let cpus = status.lines().find(|line| line.starts_with("Cpus_allowed:")).unwrap().to_owned();
    // `proc_pid_stat(5)`: the group, the session, the priority and the niceness, after the name in parentheses.
    let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    format!("{cpus} {:?} {:?} {}", &fields[2..4], &fields[15..17], read("limits"))
}
