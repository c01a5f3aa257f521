//! Which system calls the threads of a running VM may make.

mod hijacked;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ::vmm::Allowance;
use libc::c_int;
use serde_json::json;

use crate::driven::{Driven, tasks};
use crate::faults::injector::Injector;
use crate::files::Files;
use crate::vmm::{BINARY, Kill, Vmm};
use hijacked::{Hijacked, Outcome};

/// The threads of the VM whose devices are all driven.
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
    "_vsock0_q0",
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
            let status = fs::read_to_string(format!("/proc/{}/task/{task}/status", driven.vmm.pid())).unwrap();
            let line = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_string();
            assert_eq!(line("Seccomp:"), mode, "{name}, {option:?}");
            let own = line("Seccomp_filters:").parse::<u32>().unwrap();
            // All but the control thread begin with the starter's two.
            let inherited =
                if name == "cloud-hyperviso" || filters == 0 { 0 } else { 2 - u32::from(name == "starter") };
            assert_eq!(own, filters + inherited, "{name}, {option:?}");
            names.insert(name);
        }
        assert!(THREADS.iter().all(|name| names.contains(*name)), "{names:?}");
    }
}

/// The kind of a thread of the driven VM, as `allowances` has it, by its name.
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
        "_pmem0_q0" => "Worker(Pmem)",
        "_vsock0_q0" => "Worker(Vsock)",
        "__watchdog_q0" => "Worker(Watchdog)",
        "__rtc_q0" => "Worker(Rtc)",
        _ if name.starts_with("vcpu") => "Vcpu",
        _ if name.starts_with("http-") => "Http",
        // The starter may do what all others may, and a thread has its name until it has set its own.
        _ => "",
    }
}

/// Prints which calls of the filters were not made in a run that drives devices, adds and removes some, and restarts
/// the guest. Many of them are for what lacks, breaks or comes back, or for another C library.
#[test]
fn every_call_that_was_made_is_one_that_its_thread_may_make() {
    let vmm = Vmm::of(command(&[]));
    let recorder = Injector::record(vmm.pid());
    let mut driven = Driven::over(vmm, "apisec3", &json!({}));
    let Driven { vmm, client } = &mut driven;
    client.put_json("vm.add-disk", &json!({"id": "later", "path": vmm.files.sparse("later", 1 << 20)})).expect(200);
    client.put_json("vm.add-net", &json!({"id": "m", "tap": "apisec4"})).expect(200);
    client.put_json("vm.resize-disk", &json!({"id": "ring", "desired_size": 2 << 20})).expect(204);
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

/// What an exploit in a thread tries, and which threads can do it, with the reason.
struct Attack {
    what: &'static str,
    make: fn(&Hijacked, &Target) -> Outcome,
    /// Threads that can, and why. The starter can do nothing that no other thread can.
    can: (&'static [&'static str], &'static str),
}

/// What is outside of the VM.
struct Target {
    /// Another process.
    pid: u64,
    /// Where a program listens by TCP.
    port: u16,
    /// The path where a program listens.
    path: PathBuf,
    /// The abstract name under which one does.
    name: String,
}

const CONNECTS: &str = "the path's permissions decide, as Landlock does not see it: vsock calls programs of the host, \
                        and the control thread connects to backends";

const ATTACKS: &[Attack] = &[
    Attack { what: "open a file that the VM does not name", make: open, can: (&[], "") },
    Attack { what: "make a file", make: make_file, can: (&[], "") },
    Attack { what: "run a program", make: run, can: (&[], "") },
    Attack { what: "make a process", make: fork, can: (&[], "") },
    Attack { what: "trace another process", make: trace, can: (&[], "") },
    Attack { what: "read another process's memory", make: read_memory, can: (&[], "") },
    Attack { what: "signal another process", make: signal, can: (&[], "") },
    Attack { what: "signal another process's thread", make: signal_thread, can: (&[], "") },
    Attack { what: "make memory executable", make: make_code, can: (&[], "") },
    Attack { what: "connect by TCP", make: connect_tcp, can: (&[], "") },
    Attack {
        what: "send by UDP",
        make: send_udp,
        can: (&["cloud-hyperviso", "starter"], "taps are set up through such a socket"),
    },
    Attack { what: "connect to an abstract socket", make: connect_abstract, can: (&[], "") },
    Attack {
        what: "connect to a socket at a path",
        make: connect_path,
        can: (&["cloud-hyperviso", "starter", "_vsock0_q0"], CONNECTS),
    },
    Attack {
        what: "load a program into the kernel (BPF)",
        make: |thread, _| thread.call(libc::SYS_bpf, [0; 4]),
        can: (&[], ""),
    },
    Attack {
        what: "make a VM of its own",
        make: |thread, _| thread.call(libc::SYS_ioctl, [u64::MAX, 0xae01, 0, 0]),
        // A descriptor of /dev/kvm is what it takes.
        can: (&[], ""),
    },
];

fn open(thread: &Hijacked, _: &Target) -> Outcome {
    thread.call(libc::SYS_openat, [libc::AT_FDCWD as u64, thread.place(b"/etc/shadow\0"), 0, 0])
}

fn make_file(thread: &Hijacked, _: &Target) -> Outcome {
    let flags = (libc::O_CREAT | libc::O_WRONLY) as u64;
    thread.call(libc::SYS_openat, [libc::AT_FDCWD as u64, thread.place(b"/var/tmp/apisec\0"), flags, 0o600])
}

fn run(thread: &Hijacked, _: &Target) -> Outcome {
    thread.call(libc::SYS_execve, [thread.place(b"/bin/true\0"), 0, 0, 0])
}

fn fork(thread: &Hijacked, _: &Target) -> Outcome {
    thread.call(libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0])
}

fn trace(thread: &Hijacked, target: &Target) -> Outcome {
    thread.call(libc::SYS_ptrace, [u64::from(libc::PTRACE_SEIZE), target.pid, 0, 0])
}

fn read_memory(thread: &Hijacked, target: &Target) -> Outcome {
    thread.call(libc::SYS_process_vm_readv, [target.pid, 0, 0, 0])
}

fn signal(thread: &Hijacked, target: &Target) -> Outcome {
    thread.call(libc::SYS_kill, [target.pid, libc::SIGTERM as u64, 0, 0])
}

fn signal_thread(thread: &Hijacked, target: &Target) -> Outcome {
    thread.call(libc::SYS_tgkill, [target.pid, target.pid, libc::SIGTERM as u64, 0])
}

fn make_code(thread: &Hijacked, _: &Target) -> Outcome {
    let page = thread.place(&[]) & !0xfff;
    thread.call(libc::SYS_mprotect, [page, 4096, (libc::PROT_READ | libc::PROT_EXEC) as u64, 0])
}

/// Makes a socket, and connects it to an address.
fn connect(thread: &Hijacked, family: c_int, kind: c_int, address: &[u8]) -> Outcome {
    match thread.call(libc::SYS_socket, [family as u64, (kind | libc::SOCK_CLOEXEC) as u64, 0, 0]) {
        Outcome::Made(socket) => {
            let outcome = thread.call(libc::SYS_connect, [socket, thread.place(address), address.len() as u64, 0]);
            thread.call(libc::SYS_close, [socket, 0, 0, 0]);
            outcome
        }
        refused => refused,
    }
}

/// `struct sockaddr_in` for this host.
fn inet(port: u16) -> Vec<u8> {
    let family = (libc::AF_INET as u16).to_ne_bytes();
    [&family[..], &port.to_be_bytes(), &[127, 0, 0, 1], &[0; 8]].concat()
}

fn unix(path: &[u8]) -> Vec<u8> {
    [&(libc::AF_UNIX as u16).to_ne_bytes()[..], path].concat()
}

fn connect_tcp(thread: &Hijacked, target: &Target) -> Outcome {
    connect(thread, libc::AF_INET, libc::SOCK_STREAM, &inet(target.port))
}

fn send_udp(thread: &Hijacked, target: &Target) -> Outcome {
    connect(thread, libc::AF_INET, libc::SOCK_DGRAM, &inet(target.port))
}

fn connect_abstract(thread: &Hijacked, target: &Target) -> Outcome {
    connect(thread, libc::AF_UNIX, libc::SOCK_STREAM, &unix(&[b"\0", target.name.as_bytes()].concat()))
}

fn connect_path(thread: &Hijacked, target: &Target) -> Outcome {
    connect(thread, libc::AF_UNIX, libc::SOCK_STREAM, &unix(&[target.path.as_os_str().as_bytes(), b"\0"].concat()))
}

/// The exploit's view: each thread of a VM under its filter and Landlock, with the registers of an exploit.
#[test]
fn a_thread_that_was_taken_over_reaches_nothing_outside_of_its_vm() {
    let driven = Driven::start(command(&[]), "apisec1", &json!({"landlock_enable": true}));
    let pid = driven.vmm.pid();
    let other = Kill(Command::new("sleep").arg("600").spawn().unwrap());
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = Files::new();
    let name = format!("apisec-{pid}");
    let target = Target {
        pid: other.0.id().into(),
        port: tcp.local_addr().unwrap().port(),
        path: folder.path("socket"),
        name: name.clone(),
    };
    let _at_path = UnixListener::bind(&target.path).unwrap();
    let _abstract = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    let mut tried = 0;
    for (tid, name) in tasks(pid) {
        for Attack { what, make, can: (can, why) } in ATTACKS {
            // The starter is let go, so that it follows others into Landlock.
            let outcome = make(&Hijacked::take(pid, tid), &target);
            let is_stopped = match outcome {
                Outcome::Filtered => true,
                // Landlock, or a descriptor that it does not have.
                Outcome::Fails(error) => [libc::EACCES, libc::EPERM, libc::EBADF].contains(&error),
                Outcome::Made(_) => false,
            };
            println!("| {name} | {what} | {outcome:?} |");
            assert_eq!(!is_stopped, can.contains(&name.as_str()), "{name} tries to {what}: {outcome:?} ({why})");
            tried += 1;
        }
    }
    assert!(tried >= THREADS.len() * ATTACKS.len(), "{tried}");
    drop(driven);
    assert!(!Path::new("/var/tmp/apisec").exists());
    let mut other = other;
    assert!(other.0.try_wait().unwrap().is_none(), "the other process is alive");
}

#[test]
fn a_call_that_is_not_allowed_ends_the_program_with_a_line_that_names_thread_and_call() {
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
