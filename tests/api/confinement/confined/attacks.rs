//! Attempts of an exploit in a thread that it controls.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use libc::{c_int, c_long};

use super::hijacked::{Hijacked, Outcome};

/// Attempt of an exploit in a thread, and the threads that can make it, with the reason.
pub(super) struct Attack {
    /// The attempt, as described by the threat model.
    pub what: &'static str,
    pub make: fn(&Hijacked, &Target) -> Outcome,
    /// Threads that can make it, and the reason. The starter can make no attempt that no other thread can.
    pub can: (&'static [&'static str], &'static str),
}

/// Objects outside of the VM.
pub(super) struct Target {
    /// Another process, a VMM.
    pub pid: u64,
    /// A thread of the target.
    pub tid: u64,
    /// A TCP port on which a program listens.
    pub port: u16,
    /// The path where a program listens.
    pub path: PathBuf,
    /// The abstract name of a listening socket.
    pub name: String,
}

impl Target {
    /// A file next to the socket that does not exist.
    pub(super) fn made(&self) -> PathBuf {
        self.path.with_file_name("made")
    }

    /// The number in a CPU clock of the other process, or of its thread (`clock_getcpuclockid(3)`).
    fn clocks(&self) -> [u64; 2] {
        const SCHED: u64 = 2;
        const PER_THREAD: u64 = 4;
        [(!self.pid << 3) | SCHED, (!self.tid << 3) | PER_THREAD | SCHED]
    }
}

const CONNECTS: &str = "the path's permissions decide, as Landlock does not see it: vsock calls programs of the host, \
                        and the control thread connects to backends";

pub(super) const ATTACKS: &[Attack] = &[
    Attack { what: "open a file that the VM does not name", make: open, can: (&[], "") },
    Attack { what: "make a file", make: make_file, can: (&[], "") },
    Attack { what: "run a program", make: run, can: (&[], "") },
    Attack { what: "make a process", make: fork, can: (&[], "") },
    Attack { what: "trace another process", make: trace, can: (&[], "") },
    Attack { what: "read or write another process's memory", make: reach_memory, can: (&[], "") },
    Attack { what: "signal another process", make: signal, can: (&[], "") },
    Attack { what: "signal another process's thread", make: signal_thread, can: (&[], "") },
    Attack { what: "have another process signalled by the kernel", make: signal_by_kernel, can: (&[], "") },
    Attack { what: "bind another process to a CPU", make: bind_to_cpu, can: (&[], "") },
    Attack { what: "set a limit of another process", make: limit, can: (&[], "") },
    Attack { what: "take another process's descriptors", make: take_descriptors, can: (&[], "") },
    Attack { what: "change another process's priority or group", make: prioritise, can: (&[], "") },
    Attack { what: "join another process's cores, or move it to others", make: share_cores, can: (&[], "") },
    Attack { what: "move another process's memory, or have it dropped", make: move_memory, can: (&[], "") },
    Attack { what: "ask about another process, or measure it", make: ask, can: (&[], "") },
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
        can: (&["cloud-hyperviso", "starter", "vsock"], CONNECTS),
    },
    Attack {
        what: "load a program into the kernel (BPF)",
        make: |thread, _| thread.call(libc::SYS_bpf, [0; 4]),
        can: (&[], ""),
    },
    Attack {
        what: "make a VM of its own",
        make: make_vm,
        can: (&["cloud-hyperviso", "starter"], "the control thread makes the VM"),
    },
];

fn open(thread: &Hijacked, _: &Target) -> Outcome {
    thread.call(libc::SYS_openat, [libc::AT_FDCWD as u64, thread.place(b"/etc/passwd\0"), 0, 0])
}

fn make_file(thread: &Hijacked, target: &Target) -> Outcome {
    let path = [target.made().as_os_str().as_bytes(), b"\0"].concat();
    let flags = (libc::O_CREAT | libc::O_WRONLY) as u64;
    thread.call(libc::SYS_openat, [libc::AT_FDCWD as u64, thread.place(&path), flags, 0o600])
}

fn run(thread: &Hijacked, _: &Target) -> Outcome {
    thread.call(libc::SYS_execve, [thread.place(b"/bin/true\0"), 0, 0, 0])
}

fn fork(thread: &Hijacked, _: &Target) -> Outcome {
    thread.call(libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0])
}

fn trace(thread: &Hijacked, target: &Target) -> Outcome {
    let requests = [libc::PTRACE_ATTACH, libc::PTRACE_SEIZE];
    first_made(thread, requests.map(|request| (libc::SYS_ptrace, [u64::from(request), target.pid, 0, 0])))
}

/// `pidfd_getfd` takes a descriptor that the first makes; of 0, no process.
fn take_descriptors(thread: &Hijacked, target: &Target) -> Outcome {
    let calls =
        [(libc::SYS_pidfd_open, [target.pid, 0, 0, 0]), (libc::SYS_pidfd_getfd, [0; 4]), (libc::SYS_setns, [0; 4])];
    first_made(thread, calls)
}

/// Makes calls one after the other, and returns the outcome of the first that no filter stops.
fn first_made(thread: &Hijacked, calls: impl IntoIterator<Item = (c_long, [u64; 4])>) -> Outcome {
    let outcomes = calls.into_iter().map(|(call, arguments)| thread.call(call, arguments));
    outcomes.into_iter().find(|outcome| *outcome != Outcome::Filtered).unwrap_or(Outcome::Filtered)
}

/// The same for calls that take a thread's ID first, for two threads of the other process.
fn about(thread: &Hijacked, target: &Target, calls: &[(c_long, [u64; 3])]) -> Outcome {
    let of = |number: u64| calls.iter().map(move |(call, [b, c, d])| (*call, [number, *b, *c, *d]));
    first_made(thread, of(target.pid).chain(of(target.tid)))
}

fn reach_memory(thread: &Hijacked, target: &Target) -> Outcome {
    let calls = [libc::SYS_process_vm_readv, libc::SYS_process_vm_writev];
    about(thread, target, &calls.map(|call| (call, [0; 3])))
}

fn signal(thread: &Hijacked, target: &Target) -> Outcome {
    let signal = libc::SIGTERM as u64;
    let calls = [(libc::SYS_kill, [signal, 0, 0]), (libc::SYS_rt_sigqueueinfo, [signal, 0, 0])];
    match about(thread, target, &calls) {
        // The process's group, and a descriptor of a process.
        Outcome::Filtered => first_made(
            thread,
            [
                (libc::SYS_kill, [target.pid.wrapping_neg(), signal, 0, 0]),
                (libc::SYS_pidfd_send_signal, [0, signal, 0, 0]),
            ],
        ),
        made => made,
    }
}

fn signal_thread(thread: &Hijacked, target: &Target) -> Outcome {
    let signal = libc::SIGTERM as u64;
    let calls = [
        (libc::SYS_tgkill, [target.pid, target.tid, signal, 0]),
        (libc::SYS_tkill, [target.tid, signal, 0, 0]),
        (libc::SYS_rt_tgsigqueueinfo, [target.pid, target.tid, signal, 0]),
        (libc::SYS_pidfd_open, [target.pid, 0, 0, 0]),
    ];
    first_made(thread, calls)
}

/// As the owner of a descriptor, or as the foreground job of a terminal.
fn signal_by_kernel(thread: &Hijacked, target: &Target) -> Outcome {
    // `fcntl(2)`, where F_OWNER_PID is 1, and `asm-generic/sockios.h`.
    const F_SETOWN_EX: u64 = 15;
    const FIOSETOWN: u64 = 0x8901;
    const SIOCSPGRP: u64 = 0x8902;
    let owner = [1, target.pid as u32].map(u32::to_ne_bytes).concat();
    let calls = [
        (libc::SYS_fcntl, [0, libc::F_SETOWN as u64, target.pid, 0]),
        (libc::SYS_fcntl, [0, F_SETOWN_EX, thread.place(&owner), 0]),
        (libc::SYS_fcntl, [0, libc::F_SETFL as u64, libc::O_ASYNC as u64, 0]),
        (libc::SYS_ioctl, [0, FIOSETOWN, thread.place(&owner[4..]), 0]),
        (libc::SYS_ioctl, [0, SIOCSPGRP, thread.place(&owner[4..]), 0]),
        (libc::SYS_ioctl, [0, libc::TIOCSPGRP, thread.place(&(target.pid as u32).to_ne_bytes()), 0]),
    ];
    first_made(thread, calls)
}

fn bind_to_cpu(thread: &Hijacked, target: &Target) -> Outcome {
    let first = thread.place(&1_u64.to_ne_bytes());
    about(thread, target, &[(libc::SYS_sched_setaffinity, [8, first, 0])])
}

/// A limit of processor time: the kernel kills a process that exceeds it.
fn limit(thread: &Hijacked, target: &Target) -> Outcome {
    let second = thread.place(&[1_u64.to_ne_bytes(); 2].concat());
    about(thread, target, &[(libc::SYS_prlimit64, [u64::from(libc::RLIMIT_CPU), second, 0])])
}

fn prioritise(thread: &Hijacked, target: &Target) -> Outcome {
    // SCHED_IDLE (`sched(7)`), the lowest class of I/O priorities (`ioprio_set(2)`), and a niceness.
    let (priority, idle) = (thread.place(&[0; 48]), 5);
    let others = [
        (libc::SYS_setpriority, [u64::from(libc::PRIO_PROCESS), target.pid, 19, 0]),
        (libc::SYS_ioprio_set, [1, target.pid, 3 << 13, 0]),
        (libc::SYS_setpgid, [target.pid, 0, 0, 0]),
    ];
    let by_number = [
        (libc::SYS_sched_setscheduler, [idle, priority, 0]),
        (libc::SYS_sched_setparam, [priority, 0, 0]),
        (libc::SYS_sched_setattr, [priority, 0, 0]),
    ];
    let about_both = about(thread, target, &by_number);
    if about_both == Outcome::Filtered { first_made(thread, others) } else { about_both }
}

fn share_cores(thread: &Hijacked, target: &Target) -> Outcome {
    // `linux/prctl.h`: PR_SCHED_CORE, and PR_SCHED_CORE_GET, _CREATE, _SHARE_TO and _SHARE_FROM of a thread.
    const PR_SCHED_CORE: u64 = 62;
    let of = |number| (0..4).map(move |command| (libc::SYS_prctl, [PR_SCHED_CORE, command, number, 0]));
    first_made(thread, of(target.pid).chain(of(target.tid)))
}

fn move_memory(thread: &Hijacked, target: &Target) -> Outcome {
    let calls = [libc::SYS_move_pages, libc::SYS_migrate_pages, libc::SYS_process_madvise, libc::SYS_process_mrelease];
    about(thread, target, &calls.map(|call| (call, [0; 3])))
}

fn ask(thread: &Hijacked, target: &Target) -> Outcome {
    let calls = [
        (libc::SYS_sched_getaffinity, [128, thread.place(&[]), 0]),
        (libc::SYS_getpgid, [0; 3]),
        (libc::SYS_getsid, [0; 3]),
        (libc::SYS_kcmp, [target.pid, 0, 0]),
        (libc::SYS_get_robust_list, [0; 3]),
        (libc::SYS_sched_getscheduler, [0; 3]),
        (libc::SYS_sched_getparam, [thread.place(&[]), 0, 0]),
        (libc::SYS_sched_getattr, [thread.place(&[]), 48, 0]),
        (libc::SYS_sched_rr_get_interval, [thread.place(&[]), 0, 0]),
    ];
    let (wait, place) = (u64::from(libc::P_PID), thread.place(&[0; 16]));
    let others = [
        (libc::SYS_getpriority, [u64::from(libc::PRIO_PROCESS), target.pid, 0, 0]),
        (libc::SYS_ioprio_get, [1, target.pid, 0, 0]),
        (libc::SYS_wait4, [target.pid, 0, 0, 0]),
        (libc::SYS_waitid, [wait, target.pid, 0, libc::WEXITED as u64]),
        (libc::SYS_perf_event_open, [thread.place(&[0; 128]), target.pid, u64::MAX, u64::MAX]),
    ];
    let clocks = target.clocks().map(|clock| (libc::SYS_clock_gettime, [clock, place, 0, 0]));
    let sleep = (libc::SYS_clock_nanosleep, [target.clocks()[0], 0, place, 0]);
    match about(thread, target, &calls) {
        Outcome::Filtered => first_made(thread, others.into_iter().chain(clocks).chain([sleep])),
        made => made,
    }
}

/// KVM_CREATE_VM.
fn make_vm(thread: &Hijacked, _: &Target) -> Outcome {
    match thread.call(libc::SYS_openat, [libc::AT_FDCWD as u64, thread.place(b"/dev/kvm\0"), libc::O_RDWR as u64, 0]) {
        Outcome::Made(kvm) => {
            let outcome = thread.call(libc::SYS_ioctl, [kvm, 0xae01, 0, 0]);
            let opened = if let Outcome::Made(vm) = outcome { vec![kvm, vm] } else { vec![kvm] };
            opened.into_iter().for_each(|fd| _ = thread.call(libc::SYS_close, [fd, 0, 0, 0]));
            outcome
        }
        refused => refused,
    }
}

fn make_code(thread: &Hijacked, _: &Target) -> Outcome {
    let page = thread.place(&[]) & !0xfff;
    thread.call(libc::SYS_mprotect, [page, 4096, (libc::PROT_READ | libc::PROT_EXEC) as u64, 0])
}

/// Creates a socket, and connects it to an address.
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
