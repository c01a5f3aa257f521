//! System calls that the threads of a running VM may make.

mod attacks;
mod attempts;
mod hijacked;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use ::vmm::Allowance;
use serde_json::json;

use crate::faults::injector::Injector;
use crate::files::Files;
use crate::rig::driven::{Driven, tasks};
use crate::rig::vmm::{BINARY, Vmm};
use attacks::Target;
use hijacked::{Hijacked, Outcome};

/// The threads of a VM with all devices driven.
const THREADS: &[&str] = &[
    "cloud-hyperviso",
    "starter",
    "vcpu0",
    "vcpu1",
    "http-server",
    "http-0",
    "event-monitor",
    "serial",
    "debug-console",
    "nic_qp0",
    "ring_q0",
    "turns_q0",
    "qcow2_q0",
    "__rng_q0",
    "__console_q0",
    "__balloon_q0",
    "_pmem0_q0",
    "_vsock1_q0",
    "__watchdog_q0",
    "__rtc_q0",
];

fn command(seccomp: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command.args(["--event-monitor", "path=events"]).args(seccomp);
    command
}

#[test]
fn every_thread_has_a_filter_unless_there_shall_be_none() {
    for (option, mode, filters) in
        [(&[][..], "2", 1), (&["--seccomp", "false"], "0", 0), (&["--seccomp", "errno"], "2", 1)]
    {
        let driven = Driven::start(command(option), "apisec0", &json!({}));
        let mut names = BTreeSet::new();
        for (task, name) in tasks(driven.vmm.pid()) {
            // An idle worker of the API's server ends after a while.
            let status = fs::read_to_string(format!("/proc/{}/task/{task}/status", driven.vmm.pid()));
            let Ok(status) = status else { continue };
            let line = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_string();
            assert_eq!(line("Seccomp:"), mode, "{name}, {option:?}");
            let own = line("Seccomp_filters:").parse::<u32>().unwrap();
            // All except the control thread begin with the starter's two.
            let inherited =
                if name == "cloud-hyperviso" || filters == 0 { 0 } else { 2 - u32::from(name == "starter") };
            assert_eq!(own, filters + inherited, "{name}, {option:?}");
            names.insert(name);
        }
        assert!(THREADS.iter().all(|name| names.contains(*name)), "{names:?}");
    }
}

/// The kind of a thread of the driven VM by its name, as in `allowances`.
fn kind(name: &str) -> &'static str {
    match name {
        "cloud-hyperviso" => "Main",
        "http-server" => "HttpServer",
        "event-monitor" => "EventMonitor",
        "serial" => "Serial",
        "debug-console" => "DebugConsole",
        "open" => "Open",
        "nic_qp0" => "Worker(Net)",
        "ring_q0" | "turns_q0" | "qcow2_q0" | "later_q0" => "Worker(Block)",
        "__rng_q0" => "Worker(Rng)",
        "__console_q0" => "Worker(Console)",
        "__balloon_q0" => "Worker(Balloon)",
        "_pmem0_q0" => "Worker(Flush)",
        "_vsock1_q0" => "Worker(Vsock)",
        "__watchdog_q0" | "__rtc_q0" => "Worker(Queue)",
        _ if name.starts_with("vcpu") => "Vcpu",
        _ if name.starts_with("http-") => "Http",
        // The starter may make all other threads' calls, and a thread has its name until it has set its own.
        _ => "",
    }
}

/// Prints the allowed calls that were not made in a run that drives devices, adds and removes some, and restarts the
/// guest. Many of them are for missing resources, failures and recovery, or for another C library.
#[test]
fn every_call_that_was_made_is_one_that_its_thread_may_make() {
    let vmm = Vmm::of(command(&[]));
    let recorder = Injector::record(vmm.pid());
    let mut driven = Driven::over(vmm, "apisec3", &json!({}));
    let Driven { vmm, client } = &mut driven;
    client.put_json("vm.add-disk", &json!({"id": "later", "path": vmm.files.sparse("later", 1 << 20)})).expect(200);
    client.put_json("vm.add-net", &json!({"id": "m", "tap": "apisec4"})).expect(200);
    client.put_json("vm.resize-disk", &json!({"id": "ring", "desired_size": 2 << 20})).expect(204);
    client.put_json("vm.resize-disk", &json!({"id": "qcow2", "desired_size": 2 << 20})).expect(204);
    client.put("vm.pause").expect(204);
    client.put("vm.resume").expect(204);
    client.get("vm.counters").expect(200);
    client.put("vm.reboot").expect(204);
    client.put("vm.shutdown").expect(204);
    client.put("vm.boot").expect(204);
    client.put("vm.delete").expect(204);
    let seen = recorder.end().seen;
    let mut allowed = BTreeMap::<_, BTreeMap<_, _>>::new();
    for Allowance { thread, why, calls } in ::vmm::allowances() {
        allowed.entry(thread).or_default().entry(why).or_insert(calls);
    }
    let mut made = BTreeMap::<_, BTreeSet<_>>::new();
    for ((_, name), numbers) in &seen {
        made.entry(kind(name)).or_default().extend(numbers.iter().filter_map(|number| ::vmm::call_name(*number)));
    }
    made.remove("");
    assert!(made.len() >= 15, "{made:?}");
    for (kind, made) in &made {
        let groups = &allowed[*kind];
        let missing: Vec<_> =
            made.iter().filter(|call| !groups.values().flatten().any(|other| other == *call)).collect();
        assert!(missing.is_empty(), "{kind}: {missing:?}");
        for (why, calls) in groups {
            let unseen: Vec<_> = calls.iter().filter(|call| !made.contains(*call)).copied().collect();
            if !unseen.is_empty() {
                println!("{kind}: not made: {} ({why})", unseen.join(" "));
            }
        }
    }
}

/// An exploit's view: each thread of a VM under its filter and Landlock, with registers set by the exploit.
#[test]
fn a_compromised_thread_reaches_nothing_outside_its_vm() {
    let driven = Driven::start(command(&[]), "apisec1", &json!({"landlock_enable": true}));
    let pid = driven.vmm.pid();
    // Another VMM of the same user.
    let other = Vmm::start();
    // All its threads exist once it replies.
    other.client().get("vmm.ping").expect(200);
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = Files::new();
    let name = format!("apisec-{pid}");
    let thread = tasks(other.pid()).into_iter().find(|(_, name)| name == "http-server").unwrap().0;
    let target = Target {
        pid: other.pid().into(),
        tid: thread.cast_unsigned().into(),
        port: tcp.local_addr().unwrap().port(),
        path: folder.path("socket"),
        name: name.clone(),
    };
    let _at_path = UnixListener::bind(&target.path).unwrap();
    let _abstract = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    let threads = tasks(pid);
    let names: BTreeSet<_> = threads.iter().map(|(_, name)| name.as_str()).collect();
    assert!(THREADS.iter().all(|name| names.contains(name)), "{names:?}");
    attempts::make_all(pid, &threads, &target);
    drop(driven);
    other.client().put("vmm.shutdown").expect(200);
    assert_eq!(other.end(), Some(0));
}

#[test]
fn the_exploits_table_has_the_attempts_that_are_made() {
    assert_eq!(attempts::differences(), Vec::<String>::new());
}

#[test]
fn a_denied_call_ends_the_program_and_logs_thread_and_call() {
    for (option, ends) in [(&[][..], true), (&["--seccomp", "errno"], false)] {
        let mut driven = Driven::start(command(option), "apisec2", &json!({}));
        for name in ["__rng_q0", "vcpu0"] {
            let tid = tasks(driven.vmm.pid()).into_iter().find(|(_, other)| other == name).unwrap().0;
            let thread = Hijacked::take(driven.vmm.pid(), tid);
            if !ends {
                assert_eq!(thread.call(libc::SYS_ptrace, [0; 4]), Outcome::Fails(libc::EPERM));
                drop(thread);
                driven.client.get("vmm.ping").expect(200);
                continue;
            }
            thread.end_by(libc::SYS_ptrace, [16, 1, 0, 0]);
            let log = driven.vmm.files.path("log");
            let status = driven.vmm.ended();
            assert_eq!(status.signal(), Some(libc::SIGSYS));
            let said = fs::read_to_string(log).unwrap();
            let line = format!(
                "cloud-hypervisor: the thread {name} is not allowed the system call ptrace (101, with 0x10, 0x1, 0x0); "
            );
            assert!(said.lines().any(|said| said.starts_with(&line)), "{said}");
            driven = Driven::start(command(option), "apisec2", &json!({}));
        }
    }
}
