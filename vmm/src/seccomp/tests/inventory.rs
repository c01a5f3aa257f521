//! Each argument of each call that a thread may make: the thing that it names, and the reason why it is or is not
//! constrained.

use std::collections::{BTreeMap, BTreeSet};

use libc::*;
use virtio_devices::WorkerKind;

use super::{kinds, worker};
use crate::seccomp::rule::{Argument, Is, Rule};
use crate::seccomp::{ioctls, lists, names};
use crate::threads::{ThreadKind, core_group};

/// The kinds of things that an argument can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Names {
    /// A process or a thread by its number. Each rule limits it to this process.
    Process,
    /// An operation among several. Each rule limits it.
    Choice,
    /// A descriptor of this process, which is closed, or was passed to this process or opened by it.
    Descriptor,
    /// An address of this process, for a copy by the kernel of data that names nothing.
    Memory,
    /// A size, a position, flags: nothing that names an object.
    Number,
    /// A file by its path, in memory: to open, make, rename or remove it.
    Path,
    /// A file by its path, in memory: to inspect it.
    Look,
    /// The address of a socket, in memory.
    Address,
    /// A network interface by its name, in memory.
    Interface,
    /// Settings of a terminal.
    Terminal,
    /// Requests of an `io_uring`, which filters cannot see.
    Requests,
}

use Names::{Address, Choice, Descriptor, Interface, Look, Memory, Number, Path, Process, Requests, Terminal};

impl Names {
    /// The row of SECURITY.md about the effects on other processes. `None` if there are none.
    const fn row(self) -> Option<&'static str> {
        match self {
            Process | Choice => None,
            Descriptor => Some("what it has open, and others have, too"),
            Memory => Some("memory that it shares"),
            Number => Some("what a user or the host has only so much of"),
            Path => Some("files by their path"),
            Look => Some("what is at a path"),
            Address => Some("sockets by their address"),
            Interface => Some("network interfaces by their name"),
            Terminal => Some("a terminal"),
            Requests => Some("an io_uring of its own"),
        }
    }
}

/// A call, or the call with this value of its first [`Choice`] argument, and what its arguments name.
type Entry = (c_long, Option<u64>, &'static [Names]);

#[rustfmt::skip]
const INVENTORY: &[Entry] = &[
    // Memory of this process.
    (SYS_brk, None, &[Memory]),
    (SYS_munmap, None, &[Memory, Number]),
    (SYS_mremap, None, &[Memory, Number, Number, Number, Memory]),
    // Advice that harms other processes (MADV_HWPOISON) requires CAP_SYS_ADMIN, which this process has dropped.
    (SYS_madvise, None, &[Memory, Number, Number]),
    (SYS_mmap, None, &[Memory, Number, Choice, Number, Descriptor, Number]),
    (SYS_mprotect, None, &[Memory, Number, Choice]),
    (SYS_msync, None, &[Memory, Number, Number]),
    (SYS_mbind, None, &[Memory, Number, Number, Memory, Number, Choice]),
    (SYS_memfd_create, None, &[Memory, Number]),
    (SYS_membarrier, None, &[Choice, Number, Number]),
    // The thread, and this process.
    (SYS_futex, Some(FUTEX_WAIT as u64), &[Memory, Choice, Number, Memory]),
    (SYS_futex, Some(FUTEX_WAKE as u64), &[Memory, Choice, Number]),
    (SYS_futex, Some(FUTEX_REQUEUE as u64), &[Memory, Choice, Number, Number, Memory]),
    (SYS_futex, Some(FUTEX_WAIT_BITSET as u64), &[Memory, Choice, Number, Memory, Memory, Number]),
    (SYS_futex, Some(FUTEX_WAKE_BITSET as u64), &[Memory, Choice, Number, Memory, Memory, Number]),
    (SYS_set_robust_list, None, &[Memory, Number]),
    (SYS_rseq, None, &[Memory, Number, Number, Number]),
    (SYS_sched_yield, None, &[]),
    (SYS_sched_getaffinity, None, &[Process, Number, Memory]),
    (SYS_sched_setaffinity, None, &[Process, Number, Memory]),
    (SYS_gettid, None, &[]),
    (SYS_getpid, None, &[]),
    (SYS_getpgrp, None, &[]),
    (SYS_getpgid, None, &[Process]),
    (SYS_getuid, None, &[]),
    (SYS_geteuid, None, &[]),
    (SYS_getgid, None, &[]),
    (SYS_getegid, None, &[]),
    (SYS_uname, None, &[Memory]),
    (SYS_sysinfo, None, &[Memory]),
    (SYS_exit, None, &[Number]),
    (SYS_exit_group, None, &[Number]),
    (SYS_restart_syscall, None, &[]),
    (SYS_prlimit64, None, &[Process, Number, Memory, Memory]),
    (SYS_getrlimit, None, &[Number, Memory]),
    (SYS_setrlimit, None, &[Number, Memory]),
    (SYS_prctl, Some(PR_SET_NAME as u64), &[Choice, Memory]),
    (SYS_prctl, Some(PR_GET_NAME as u64), &[Choice, Memory]),
    (SYS_prctl, Some(PR_SET_NO_NEW_PRIVS as u64), &[Choice, Number]),
    // The command, the thread, and the scope of one thread.
    (SYS_prctl, Some(core_group::PR_SCHED_CORE as u64), &[Choice, Choice, Process, Choice, Memory]),
    (SYS_arch_prctl, None, &[Choice, Number]),
    // Only threads of this process: the flags guarantee that.
    (SYS_clone, None, &[Choice, Memory, Memory, Memory, Memory]),
    // Always ENOSYS.
    (SYS_clone3, None, &[Memory, Number]),
    (SYS_seccomp, None, &[Choice, Number, Memory]),
    (SYS_landlock_create_ruleset, None, &[Memory, Number, Number]),
    (SYS_landlock_add_rule, None, &[Descriptor, Number, Memory, Number]),
    (SYS_landlock_restrict_self, None, &[Descriptor, Number]),
    // Signals: this process's handling of its own, and signals to its threads.
    (SYS_rt_sigaction, None, &[Number, Memory, Memory, Number]),
    (SYS_rt_sigprocmask, None, &[Number, Memory, Memory, Number]),
    (SYS_rt_sigreturn, None, &[]),
    (SYS_sigaltstack, None, &[Memory, Memory]),
    (SYS_tgkill, None, &[Process, Number, Number]),
    // Clocks and random numbers.
    (SYS_getrandom, None, &[Memory, Number, Number]),
    // A clock may belong to another process.
    (SYS_clock_gettime, None, &[Choice, Memory]),
    (SYS_gettimeofday, None, &[Memory, Memory]),
    (SYS_clock_nanosleep, None, &[Choice, Number, Memory, Memory]),
    (SYS_nanosleep, None, &[Memory, Memory]),
    (SYS_timerfd_create, None, &[Number, Number]),
    (SYS_timerfd_settime, None, &[Descriptor, Number, Memory, Memory]),
    // Descriptors.
    (SYS_read, None, &[Descriptor, Memory, Number]),
    (SYS_readv, None, &[Descriptor, Memory, Number]),
    (SYS_pread64, None, &[Descriptor, Memory, Number, Number]),
    (SYS_preadv, None, &[Descriptor, Memory, Number, Number, Number]),
    (SYS_write, None, &[Descriptor, Memory, Number]),
    (SYS_writev, None, &[Descriptor, Memory, Number]),
    (SYS_pwrite64, None, &[Descriptor, Memory, Number, Number]),
    (SYS_pwritev, None, &[Descriptor, Memory, Number, Number, Number]),
    (SYS_close, None, &[Descriptor]),
    (SYS_lseek, None, &[Descriptor, Number, Number]),
    (SYS_poll, None, &[Memory, Number, Number]),
    (SYS_ppoll, None, &[Memory, Number, Memory, Memory, Number]),
    (SYS_epoll_create1, None, &[Number]),
    (SYS_epoll_ctl, None, &[Descriptor, Number, Descriptor, Memory]),
    (SYS_epoll_wait, None, &[Descriptor, Memory, Number, Number]),
    (SYS_epoll_pwait, None, &[Descriptor, Memory, Number, Number, Memory, Number]),
    (SYS_epoll_pwait2, None, &[Descriptor, Memory, Number, Memory, Memory, Number]),
    (SYS_eventfd2, None, &[Number, Number]),
    (SYS_pipe2, None, &[Memory, Number]),
    (SYS_fcntl, Some(F_GETFD as u64), &[Descriptor, Choice]),
    (SYS_fcntl, Some(F_SETFD as u64), &[Descriptor, Choice, Number]),
    (SYS_fcntl, Some(F_GETFL as u64), &[Descriptor, Choice]),
    // Without O_ASYNC, with which a terminal signals its foreground job.
    (SYS_fcntl, Some(F_SETFL as u64), &[Descriptor, Choice, Choice]),
    (SYS_fcntl, Some(F_DUPFD_CLOEXEC as u64), &[Descriptor, Choice, Number]),
    (SYS_fcntl, Some(F_OFD_GETLK as u64), &[Descriptor, Choice, Memory]),
    (SYS_fcntl, Some(F_OFD_SETLK as u64), &[Descriptor, Choice, Memory]),
    (SYS_fcntl, Some(F_ADD_SEALS as u64), &[Descriptor, Choice, Number]),
    (SYS_fcntl, Some(F_GET_SEALS as u64), &[Descriptor, Choice]),
    (SYS_fcntl, Some(F_GETPIPE_SZ as u64), &[Descriptor, Choice]),
    (SYS_flock, None, &[Descriptor, Number]),
    (SYS_fsync, None, &[Descriptor]),
    (SYS_fdatasync, None, &[Descriptor]),
    (SYS_fallocate, None, &[Descriptor, Number, Number, Number]),
    (SYS_ftruncate, None, &[Descriptor, Number]),
    (SYS_fstat, None, &[Descriptor, Memory]),
    (SYS_fstatfs, None, &[Descriptor, Memory]),
    (SYS_getdents64, None, &[Descriptor, Memory, Number]),
    // `REQUESTS` lists the things that requests name.
    (SYS_ioctl, None, &[Descriptor, Choice, Memory]),
    (SYS_io_uring_setup, None, &[Number, Memory]),
    (SYS_io_uring_register, None, &[Descriptor, Number, Memory, Number]),
    // A disk's ring only accepts requests for its image. The starter could create another ring.
    (SYS_io_uring_enter, None, &[Descriptor, Number, Number, Number, Memory, Number]),
    // Paths.
    (SYS_open, None, &[Path, Number, Number]),
    (SYS_openat, None, &[Descriptor, Path, Number, Number]),
    (SYS_unlink, None, &[Path]),
    (SYS_unlinkat, None, &[Descriptor, Path, Number]),
    (SYS_rename, None, &[Path, Path]),
    (SYS_renameat, None, &[Descriptor, Path, Descriptor, Path]),
    (SYS_renameat2, None, &[Descriptor, Path, Descriptor, Path, Number]),
    (SYS_stat, None, &[Look, Memory]),
    (SYS_lstat, None, &[Look, Memory]),
    (SYS_newfstatat, None, &[Descriptor, Look, Memory, Number]),
    (SYS_statx, None, &[Descriptor, Look, Number, Number, Memory]),
    (SYS_statfs, None, &[Look, Memory]),
    (SYS_access, None, &[Look, Number]),
    (SYS_faccessat, None, &[Descriptor, Look, Number]),
    (SYS_faccessat2, None, &[Descriptor, Look, Number, Number]),
    (SYS_readlink, None, &[Look, Memory, Number]),
    (SYS_readlinkat, None, &[Descriptor, Look, Memory, Number]),
    (SYS_getcwd, None, &[Memory, Number]),
    // Sockets.
    (SYS_socket, Some(AF_UNIX as u64), &[Choice, Number, Number]),
    (SYS_socket, Some(AF_INET as u64), &[Choice, Choice, Choice]),
    (SYS_socket, Some(AF_INET6 as u64), &[Choice, Choice, Choice]),
    (SYS_socket, Some(AF_NETLINK as u64), &[Choice, Choice, Choice]),
    (SYS_socketpair, None, &[Choice, Number, Number, Memory]),
    (SYS_connect, None, &[Descriptor, Address, Number]),
    (SYS_bind, None, &[Descriptor, Address, Number]),
    (SYS_sendmsg, None, &[Descriptor, Address, Number]),
    (SYS_sendmmsg, None, &[Descriptor, Address, Number, Number]),
    // The address has no length.
    (SYS_sendto, None, &[Descriptor, Memory, Number, Number, Memory, Choice]),
    (SYS_listen, None, &[Descriptor, Number]),
    (SYS_accept4, None, &[Descriptor, Memory, Memory, Number]),
    (SYS_recvfrom, None, &[Descriptor, Memory, Number, Number, Memory, Memory]),
    (SYS_recvmsg, None, &[Descriptor, Memory, Number]),
    (SYS_shutdown, None, &[Descriptor, Number]),
    (SYS_setsockopt, None, &[Descriptor, Number, Number, Memory, Number]),
    (SYS_getsockopt, None, &[Descriptor, Number, Number, Memory, Memory]),
    (SYS_getsockname, None, &[Descriptor, Memory, Memory]),
    (SYS_getpeername, None, &[Descriptor, Memory, Memory]),
];

/// Requests of ioctls, and what they name besides their descriptor.
const REQUESTS: &[(&[u64], Names)] = &[
    // This process's VM; the requests name its descriptors and memory.
    (&[ioctls::KVM_RUN], Descriptor),
    (ioctls::KVM_CREATE, Descriptor),
    (ioctls::KVM_VCPU, Descriptor),
    (ioctls::KVM_STATE, Descriptor),
    (ioctls::KVM_DIRTY_LOG, Descriptor),
    (ioctls::KVM_WIRES, Descriptor),
    // Devices that this process has open, which reach its memory.
    (ioctls::VHOST_RINGS, Descriptor),
    (ioctls::VHOST_NET, Descriptor),
    (ioctls::VHOST_VDPA, Descriptor),
    (ioctls::VFIO, Descriptor),
    (ioctls::VFIO_DMA, Descriptor),
    (ioctls::VFIO_DEVICE, Descriptor),
    (ioctls::TAP_QUEUE, Descriptor),
    (ioctls::BLOCK_DEVICE, Descriptor),
    (ioctls::STREAM, Descriptor),
    // Pages of the process that the descriptor refers to.
    (ioctls::PAGES, Memory),
    (ioctls::MAKE_USERFAULT, Memory),
    (ioctls::USERFAULT, Memory),
    (ioctls::TAP, Interface),
    (ioctls::SET_TERMINAL, Terminal),
    (ioctls::TERMINAL, Terminal),
];

/// Things that only some kinds of threads may name, and these threads.
const OF_SOME: &[(Names, &[ThreadKind])] = &[
    (
        Path,
        &[
            ThreadKind::Main,
            ThreadKind::Starter,
            ThreadKind::Open,
            ThreadKind::Snapshot,
            ThreadKind::Migration,
            ThreadKind::EventMonitor,
            worker(WorkerKind::VhostNet),
            worker(WorkerKind::Vdpa),
            worker(WorkerKind::TapFinder),
        ],
    ),
    (
        Interface,
        &[
            ThreadKind::Main,
            ThreadKind::Starter,
            ThreadKind::Open,
            worker(WorkerKind::VhostNet),
            worker(WorkerKind::TapFinder),
        ],
    ),
    (Requests, &[ThreadKind::Starter]),
];

/// The constraint of a rule on the argument at this place.
fn constraint(rule: &Rule, place: usize) -> Option<&Argument> {
    rule.arguments.iter().find(|argument| usize::from(argument.place) == place && !matches!(argument.is, Is::Any))
}

/// The entries about a rule.
fn entries(rule: &Rule) -> Vec<&'static Entry> {
    let of_call: Vec<_> = INVENTORY.iter().filter(|(call, ..)| *call == rule.call).collect();
    let values = |chosen: &Argument| match chosen.is {
        Is::OneOf(values) => values.to_vec(),
        Is::Bits { value, .. } => vec![value],
        Is::Any | Is::ThisProcess => Vec::new(),
    };
    match of_call.as_slice() {
        [] | [(_, None, _)] => of_call,
        // One for each value of the argument that selects the operation.
        [(_, _, names), ..] => {
            let place = names.iter().position(|names| *names == Choice).unwrap();
            let chosen = constraint(rule, place).map_or_else(Vec::new, values);
            let of = |value| of_call.iter().copied().find(|(_, of, _)| *of == Some(value));
            chosen
                .iter()
                .map_while(|value| of(*value))
                .filter(|_| chosen.iter().all(|value| of(*value).is_some()))
                .collect()
        }
    }
}

/// The things that a rule lets a thread name, with `None` for a call or an operation that the inventory lacks. Fails
/// for an argument that must be constrained and is not.
fn named(rule: &Rule) -> Result<BTreeSet<Names>, String> {
    let name = names::name(rule.call).unwrap();
    let entries = entries(rule);
    if entries.is_empty() {
        return Err(format!("{name}: the inventory does not say what its arguments name: {rule:?}"));
    }
    let mut named = BTreeSet::new();
    for (_, _, arguments) in entries {
        for (place, names) in arguments.iter().enumerate() {
            let constraint = constraint(rule, place);
            let holds = match names {
                Process => constraint.is_some_and(|argument| matches!(argument.is, Is::ThisProcess)),
                Choice => constraint.is_some(),
                _ => true,
            };
            if !holds {
                return Err(format!("{name}: argument {place} has to be constrained: {rule:?}"));
            }
            named.insert(*names);
        }
    }
    if rule.call == SYS_ioctl {
        let requests = constraint(rule, 1).map(|argument| argument.is);
        let Some(Is::OneOf(requests)) = requests else { return Err(format!("{name}: any request: {rule:?}")) };
        for request in requests {
            let found = REQUESTS.iter().find(|(known, _)| known.contains(request));
            // Requests of consoles are some of those of terminals and streams.
            named.insert(found.ok_or_else(|| format!("{name}: {request:#x} names what?"))?.1);
        }
    }
    Ok(named)
}

/// The things that the threads of each kind may name. The starter, which creates rings, may make them do anything.
fn named_by_kind() -> BTreeMap<ThreadKind, BTreeSet<Names>> {
    let of_kind = |kind| {
        let rules: Vec<_> = lists::groups(kind).into_iter().flat_map(|group| group.rules).collect();
        let mut all: BTreeSet<_> = rules.iter().flat_map(|rule| named(rule).unwrap()).collect();
        if rules.iter().any(|rule| rule.call == SYS_io_uring_setup) {
            all.insert(Requests);
        }
        (kind, all)
    };
    kinds().into_iter().map(of_kind).collect()
}

#[test]
fn every_argument_is_constrained_or_need_not_be() {
    let mut known = BTreeSet::new();
    for kind in kinds() {
        for rule in lists::groups(kind).into_iter().flat_map(|group| group.rules) {
            assert_eq!(named(rule).map(drop), Ok(()), "{kind:?}");
            known.extend(entries(rule).into_iter().map(|(call, chosen, _)| (*call, *chosen)));
        }
    }
    let spare: Vec<_> = INVENTORY.iter().filter(|(call, chosen, _)| !known.contains(&(*call, *chosen))).collect();
    assert!(spare.is_empty(), "no thread makes these calls: {spare:?}");
}

#[test]
fn an_argument_without_a_rule_or_reason_is_found() {
    use crate::seccomp::rule::{any, one_of, only, this_process};
    let refused = |rule: Rule, why: &str| {
        let error = named(&rule).unwrap_err();
        assert!(error.contains(why), "{error}");
    };
    refused(any(SYS_kcmp), "the inventory does not say");
    refused(any(SYS_sched_setaffinity), "argument 0 has to be constrained");
    refused(only(SYS_sched_setaffinity, [one_of(1, &[8])]), "argument 0 has to be constrained");
    refused(only(SYS_prlimit64, [one_of(0, &[7])]), "argument 0 has to be constrained");
    refused(any(SYS_clock_gettime), "argument 0 has to be constrained");
    refused(any(SYS_prctl), "the inventory does not say");
    refused(only(SYS_prctl, [one_of(0, &[PR_SET_NAME as u64, PR_SET_DUMPABLE as u64])]), "the inventory does not say");
    refused(only(SYS_prctl, [one_of(0, &[core_group::PR_SCHED_CORE as u64])]), "argument 1 has to be constrained");
    refused(only(SYS_fcntl, [one_of(1, &[F_SETFL as u64])]), "argument 2 has to be constrained");
    refused(only(SYS_fcntl, [one_of(1, &[F_SETOWN as u64])]), "the inventory does not say");
    refused(only(SYS_ioctl, [one_of(1, &[TIOCSTI as u64])]), "names what?");
    assert_eq!(named(&only(SYS_getpgid, [this_process(0)])), Ok(BTreeSet::from([Process])));
}

#[test]
fn only_some_kinds_of_threads_name_paths_interfaces_and_rings() {
    let named = named_by_kind();
    for (names, kinds) in OF_SOME {
        let who: Vec<_> = named.iter().filter(|(_, all)| all.contains(names)).map(|(kind, _)| *kind).collect();
        assert_eq!(who.iter().collect::<BTreeSet<_>>(), kinds.iter().collect(), "{names:?}");
    }
}

/// The threat model lists what a compromised thread can do to other processes.
#[test]
fn calls_that_reach_others_are_in_the_threat_model() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../SECURITY.md");
    let text = std::fs::read_to_string(path).unwrap();
    let section = text.split("\n### ").find(|section| section.starts_with("What it still does to others\n")).unwrap();
    let rows: BTreeSet<_> = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next()).collect();
    let reaches = named_by_kind().into_values().flatten().filter_map(Names::row).collect::<BTreeSet<_>>();
    let of_table: BTreeSet<_> = rows.into_iter().filter(|row| *row != "by").collect();
    assert_eq!(of_table, reaches);
}
