//! Calls that an attacker in each kind of thread would make: a child process under its filter makes them.

#![allow(clippy::unnecessary_cast, reason = "types of constants differ between C libraries")]

mod inventory;

use std::collections::BTreeSet;
use std::io;

use libc::{c_int, c_long};
use virtio_devices::WorkerKind;

use super::*;
use crate::lazy_memory::userfault;
use crate::threads::core_group;

/// Core scheduling of a thread of another process.
const fn core_scheduling(command: u64) -> (c_long, [u64; 6]) {
    (libc::SYS_prctl, [core_group::PR_SCHED_CORE as u64, command, 1, 0, 0, 0])
}

/// The owner of a descriptor, set with a structure (`fcntl(2)`), and of a socket (`asm-generic/sockios.h`).
const F_SETOWN_EX: u64 = 15;
const FIOSETOWN: u64 = 0x8901;
const SIOCSPGRP: u64 = 0x8902;

/// A CPU clock of the process or thread 1 (`clock_getcpuclockid(3)`): its number is in the upper bits.
const fn cpu_clock(kind: i32) -> u64 {
    (!1 << 3 | kind) as u32 as u64
}

/// Types of sockets that a migration's threads may have.
const STREAM: u64 = (libc::SOCK_STREAM | libc::SOCK_CLOEXEC) as u64;
const DATAGRAM: u64 = (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as u64;
const ROUTES: u64 = (libc::SOCK_RAW | libc::SOCK_CLOEXEC) as u64;

/// A call that no thread may make.
const ATTACKS: &[(c_long, [u64; 6])] = &[
    // Programs and processes.
    (libc::SYS_execve, [0; 6]),
    (libc::SYS_execveat, [0; 6]),
    (libc::SYS_fork, [0; 6]),
    (libc::SYS_vfork, [0; 6]),
    (libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0, 0, 0]),
    (libc::SYS_clone, [libc::CLONE_VM as u64, 0, 0, 0, 0, 0]),
    (libc::SYS_unshare, [libc::CLONE_NEWUSER as u64, 0, 0, 0, 0, 0]),
    (libc::SYS_setns, [0; 6]),
    // Other processes.
    (libc::SYS_ptrace, [libc::PTRACE_ATTACH as u64, 1, 0, 0, 0, 0]),
    (libc::SYS_process_vm_readv, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_process_vm_writev, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_pidfd_open, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_pidfd_getfd, [0; 6]),
    (libc::SYS_pidfd_send_signal, [0; 6]),
    (libc::SYS_kill, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_tkill, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_tgkill, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_rt_sigqueueinfo, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_rt_tgsigqueueinfo, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_sched_setaffinity, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_sched_getaffinity, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_sched_setscheduler, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_sched_setparam, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_sched_setattr, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_setpriority, [libc::PRIO_PROCESS as u64, 1, 0, 0, 0, 0]),
    (libc::SYS_ioprio_set, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_prlimit64, [1, libc::RLIMIT_CPU as u64, 0, 0, 0, 0]),
    (libc::SYS_getpgid, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_setpgid, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_getsid, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_getpriority, [libc::PRIO_PROCESS as u64, 1, 0, 0, 0, 0]),
    (libc::SYS_ioprio_get, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_sched_getscheduler, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_sched_getparam, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_sched_getattr, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_sched_rr_get_interval, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_kcmp, [1, 1, 0, 0, 0, 0]),
    // The run time of a process (CPUCLOCK_SCHED), or of one of its threads (with CPUCLOCK_PERTHREAD).
    (libc::SYS_clock_gettime, [cpu_clock(2), 0, 0, 0, 0, 0]),
    (libc::SYS_clock_gettime, [cpu_clock(6), 0, 0, 0, 0, 0]),
    (libc::SYS_clock_nanosleep, [cpu_clock(2), 0, 0, 0, 0, 0]),
    (libc::SYS_get_robust_list, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_move_pages, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_migrate_pages, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_process_madvise, [0; 6]),
    (libc::SYS_process_mrelease, [0; 6]),
    (libc::SYS_mbind, [0, 0, 0, 0, 0, 4]),
    (libc::SYS_membarrier, [1, 0, 0, 0, 0, 0]),
    // PR_SCHED_CORE_GET, _CREATE, _SHARE_TO and _SHARE_FROM; and those for the caller that some threads may not make
    // either.
    core_scheduling(0),
    core_scheduling(1),
    core_scheduling(2),
    core_scheduling(3),
    (libc::SYS_prctl, [core_group::PR_SCHED_CORE as u64, 2, 0, 0, 0, 0]),
    (libc::SYS_prctl, [core_group::PR_SCHED_CORE as u64, 1, 0, 1, 0, 0]),
    // Signals that the kernel sends: to the owner of a descriptor, and to the foreground job of a terminal. And locks
    // whose owner is a thread, by number.
    (libc::SYS_fcntl, [0, libc::F_SETOWN as u64, 1, 0, 0, 0]),
    (libc::SYS_fcntl, [0, libc::F_SETFL as u64, libc::O_ASYNC as u64, 0, 0, 0]),
    (libc::SYS_fcntl, [0, F_SETOWN_EX, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [0, FIOSETOWN, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [0, SIOCSPGRP, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [0, libc::FIOASYNC as u64, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [0, libc::TIOCSPGRP as u64, 0, 0, 0, 0]),
    (libc::SYS_futex, [0, libc::FUTEX_LOCK_PI as u64, 0, 0, 0, 0]),
    (libc::SYS_futex, [0, (libc::FUTEX_TRYLOCK_PI | libc::FUTEX_PRIVATE_FLAG) as u64, 0, 0, 0, 0]),
    // New executable memory.
    (libc::SYS_mmap, [0, 4096, (libc::PROT_READ | libc::PROT_EXEC) as u64, 0x22, u64::MAX, 0]),
    (libc::SYS_mprotect, [0, 0, libc::PROT_EXEC as u64, 0, 0, 0]),
    (libc::SYS_pkey_mprotect, [0, 0, libc::PROT_EXEC as u64, 0, 0, 0]),
    (libc::SYS_personality, [0; 6]),
    (libc::SYS_modify_ldt, [0; 6]),
    // Privileged and rarely used parts of the kernel.
    (libc::SYS_bpf, [0; 6]),
    (libc::SYS_userfaultfd, [0; 6]),
    (libc::SYS_perf_event_open, [0; 6]),
    (libc::SYS_keyctl, [0; 6]),
    (libc::SYS_add_key, [0; 6]),
    (libc::SYS_init_module, [0; 6]),
    (libc::SYS_finit_module, [0; 6]),
    (libc::SYS_kexec_load, [0; 6]),
    (libc::SYS_io_submit, [0; 6]),
    (libc::SYS_iopl, [3, 0, 0, 0, 0, 0]),
    (libc::SYS_reboot, [0; 6]),
    // Mounts and identities.
    (libc::SYS_mount, [0; 6]),
    (libc::SYS_umount2, [0; 6]),
    (libc::SYS_pivot_root, [0; 6]),
    (libc::SYS_chroot, [0; 6]),
    (libc::SYS_open_by_handle_at, [0; 6]),
    (libc::SYS_setuid, [0; 6]),
    (libc::SYS_capset, [0; 6]),
    (libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1, 0, 0, 0, 0]),
    (libc::SYS_seccomp, [libc::SECCOMP_SET_MODE_STRICT as u64, 0, 0, 0, 0, 0]),
    // Files that this program never changes.
    (libc::SYS_chmod, [0; 6]),
    (libc::SYS_fchmod, [0; 6]),
    (libc::SYS_chown, [0; 6]),
    (libc::SYS_link, [0; 6]),
    (libc::SYS_symlink, [0; 6]),
    (libc::SYS_mknod, [0; 6]),
    (libc::SYS_mkdir, [0; 6]),
    (libc::SYS_truncate, [0; 6]),
    (libc::SYS_setxattr, [0; 6]),
    // The network, and other users' terminals.
    (libc::SYS_socket, [libc::AF_INET as u64, libc::SOCK_STREAM as u64, 0, 0, 0, 0]),
    (libc::SYS_socket, [libc::AF_INET as u64, libc::SOCK_RAW as u64, 1, 0, 0, 0]),
    (libc::SYS_socket, [libc::AF_INET6 as u64, libc::SOCK_STREAM as u64, 0, 0, 0, 0]),
    (libc::SYS_socket, [libc::AF_NETLINK as u64, libc::SOCK_RAW as u64, 0, 0, 0, 0]),
    (libc::SYS_socket, [libc::AF_PACKET as u64, libc::SOCK_RAW as u64, 0, 0, 0, 0]),
    (libc::SYS_socket, [libc::AF_VSOCK as u64, libc::SOCK_STREAM as u64, 0, 0, 0, 0]),
    (libc::SYS_socket, [libc::AF_ALG as u64, libc::SOCK_SEQPACKET as u64, 0, 0, 0, 0]),
    // Streams that Landlock does not treat as TCP, and netlink protocols other than routes.
    (libc::SYS_socket, [libc::AF_INET as u64, STREAM, libc::IPPROTO_MPTCP as u64, 0, 0, 0]),
    (libc::SYS_socket, [libc::AF_INET6 as u64, STREAM, libc::IPPROTO_SCTP as u64, 0, 0, 0]),
    (libc::SYS_socket, [libc::AF_INET as u64, DATAGRAM, libc::IPPROTO_ICMP as u64, 0, 0, 0]),
    (libc::SYS_socket, [libc::AF_NETLINK as u64, ROUTES, libc::NETLINK_SOCK_DIAG as u64, 0, 0, 0]),
    (libc::SYS_sendto, [u64::MAX, 0, 0, 0, 4096, 16]),
    (libc::SYS_ioctl, [0, libc::TIOCSTI as u64, 0, 0, 0, 0]),
    // getpid through the x32 ABI.
    (0x4000_0000 | libc::SYS_getpid, [0; 6]),
];

/// Kinds of threads that open all that a VM may have, on behalf of the user.
const OPENS: &[ThreadKind] = &[ThreadKind::Main, ThreadKind::Starter, ThreadKind::Open];

const fn worker(kind: WorkerKind) -> ThreadKind {
    ThreadKind::Worker(kind)
}

/// Calls that some threads may make, with these threads, in addition to [`OPENS`], and the reason.
const OF_SOME: &[(c_long, [u64; 6], &[ThreadKind], &str)] = &[
    (
        libc::SYS_openat,
        [0; 6],
        &[
            ThreadKind::EventMonitor,
            ThreadKind::Snapshot,
            ThreadKind::Migration,
            worker(WorkerKind::VhostNet),
            worker(WorkerKind::TapFinder),
            worker(WorkerKind::Vdpa),
        ],
        "a named pipe for events, which nothing else can be under Landlock; the files of a snapshot; /etc/hosts; a tap \
         or vDPA device that was lost",
    ),
    (
        libc::SYS_connect,
        [u64::MAX, 0, 0, 0, 0, 0],
        &[ThreadKind::Tpm, ThreadKind::Migration, worker(WorkerKind::VhostUser), worker(WorkerKind::Vsock)],
        "the target of a migration; swtpm and vhost-user backends that were lost; programs of the host that the guest \
         calls by vsock",
    ),
    (
        libc::SYS_socket,
        [libc::AF_UNIX as u64, u64::MAX, 0, 0, 0, 0],
        &[ThreadKind::Tpm, ThreadKind::Migration, worker(WorkerKind::VhostUser), worker(WorkerKind::Vsock)],
        "the same",
    ),
    (
        libc::SYS_socket,
        [libc::AF_INET as u64, DATAGRAM, 0, 0, 0, 0],
        &[ThreadKind::Migration, worker(WorkerKind::VhostNet), worker(WorkerKind::TapFinder)],
        "addresses of names; interfaces are set up through it; these workers have no call that sends or connects",
    ),
    (
        libc::SYS_bind,
        [u64::MAX, 0, 0, 0, 0, 0],
        &[ThreadKind::Migration],
        "migrations, consoles, vsock and vhost-user sockets are listened on",
    ),
    (
        libc::SYS_unlink,
        [0; 6],
        &[ThreadKind::Snapshot, ThreadKind::Migration],
        "sockets that are no longer listened on; half a snapshot",
    ),
    (libc::SYS_rename, [0; 6], &[], "the API's socket, which appears complete"),
    (libc::SYS_memfd_create, [0; 6], &[ThreadKind::Migration], "guest memory, and its log, that backends share"),
    (libc::SYS_ioctl, [u64::MAX, 0xae01, 0, 0, 0, 0], &[], "KVM_CREATE_VM"),
    (
        libc::SYS_ioctl,
        [u64::MAX, libc::TUNSETIFF as u64, 0, 0, 0, 0],
        &[worker(WorkerKind::VhostNet), worker(WorkerKind::TapFinder)],
        "taps, again if one was deleted",
    ),
    (libc::SYS_ioctl, [u64::MAX, userfault::NEW, 0, 0, 0, 0], &[], "memory that is read on demand"),
    (libc::SYS_ioctl, [u64::MAX, 0xae80, 0, 0, 0, 0], &[ThreadKind::Vcpu], "KVM_RUN"),
    (
        libc::SYS_ioctl,
        [u64::MAX, 0x4001_af72, 0, 0, 0, 0],
        &[ThreadKind::Vcpu, worker(WorkerKind::Vdpa)],
        "VHOST_VDPA_SET_STATUS: a device that does not forget what the guest's virtual IOMMU takes away is reset",
    ),
    (libc::SYS_prlimit64, [0; 6], &[worker(WorkerKind::Vdpa)], "memory that a device pins"),
];

/// End of a child that made a call under a filter.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Signal(c_int),
    /// The call returned: an error number, or 0.
    Returned(c_int),
}

/// Makes a call in a child process under the filters of `kind`.
fn call(filters: &Filters, kind: ThreadKind, number: c_long, [a, b, c, d, e, f]: [u64; 6]) -> End {
    // SAFETY: the child makes system calls only, and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", io::Error::last_os_error());
    if child == 0 {
        let no_dump = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the limit is read; the other calls refer to no memory, so an allowed call fails.
        unsafe {
            // Close the descriptors: other tests wait until no process has them open.
            libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
            libc::setrlimit(libc::RLIMIT_CORE, &raw const no_dump);
            if filters.enter(kind).is_err() {
                libc::_exit(126);
            }
            let result = libc::syscall(number, a, b, c, d, e, f);
            libc::_exit(if result < 0 { *libc::__errno_location() } else { 0 });
        }
    }
    let mut status = 0;
    // SAFETY: the status is a local variable, and the child was started here.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFSIGNALED(status) {
        End::Signal(libc::WTERMSIG(status))
    } else {
        End::Returned(libc::WEXITSTATUS(status))
    }
}

fn kinds() -> Vec<ThreadKind> {
    [ThreadKind::Main, ThreadKind::Starter].into_iter().chain(ThreadKind::started()).collect()
}

fn filters(mode: Seccomp) -> Filters {
    Filters::new(&mode.action().unwrap()).unwrap()
}

#[test]
fn no_kind_of_thread_survives_what_none_may_call() {
    let filters = filters(Seccomp::True);
    for kind in kinds() {
        assert_eq!(call(&filters, kind, libc::SYS_getpid, [0; 6]), End::Returned(0), "{kind:?}");
        for (number, arguments) in ATTACKS {
            let end = call(&filters, kind, *number, *arguments);
            assert_eq!(end, End::Signal(libc::SIGSYS), "{kind:?}: {:?} {arguments:x?}", names::name(*number));
        }
    }
}

#[test]
fn only_a_migration_goes_over_the_network() {
    let filters = filters(Seccomp::True);
    for kind in kinds() {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let end = call(&filters, kind, libc::SYS_socket, [family as u64, STREAM, 0, 0, 0, 0]);
            let may = [ThreadKind::Starter, ThreadKind::Migration].contains(&kind);
            assert_eq!(end != End::Signal(libc::SIGSYS), may, "{kind:?}: {end:?}");
        }
    }
}

#[test]
fn a_call_that_some_threads_may_make_ends_the_others() {
    let filters = filters(Seccomp::True);
    for (number, arguments, others, why) in OF_SOME {
        for kind in kinds() {
            let may = OPENS.contains(&kind) || others.contains(&kind);
            let end = call(&filters, kind, *number, *arguments);
            let name = names::name(*number);
            assert_eq!(end != End::Signal(libc::SIGSYS), may, "{kind:?}: {name:?} {arguments:x?} ({why}): {end:?}");
        }
    }
}

/// Calls that take the number of a process or a thread at this place, with their other arguments.
const OF_PROCESSES: &[(c_long, usize, [u64; 6])] = &[
    (libc::SYS_sched_getaffinity, 0, [0; 6]),
    (libc::SYS_sched_setaffinity, 0, [0; 6]),
    (libc::SYS_prlimit64, 0, [0; 6]),
    (libc::SYS_getpgid, 0, [0; 6]),
    (libc::SYS_tgkill, 0, [0; 6]),
    (libc::SYS_prctl, 2, [core_group::PR_SCHED_CORE as u64, core_group::CREATE, 0, 0, 0, 0]),
    (libc::SYS_prctl, 2, [core_group::PR_SCHED_CORE as u64, core_group::SHARE_FROM, 0, 0, 0, 0]),
];

#[test]
fn a_thread_names_itself_or_its_process_and_no_other() {
    let filters = filters(Seccomp::True);
    // The caller is a child, so the number in the filters is its parent's.
    let (own, parent) = (std::process::id(), std::os::unix::process::parent_id());
    for kind in kinds() {
        let mut may = 0;
        for (number, place, arguments) in OF_PROCESSES {
            let made = |process: u64| {
                let mut arguments = *arguments;
                arguments[*place] = process;
                call(&filters, kind, *number, arguments) != End::Signal(libc::SIGSYS)
            };
            assert_eq!(made(0), made(own.into()), "{kind:?}: {:?}", names::name(*number));
            may += u32::from(made(0));
            for other in [1, parent.into(), u64::from(own) + 1, u64::from(u32::MAX), (own as i32).wrapping_neg() as u64]
            {
                assert!(!made(other), "{kind:?}: {:?} {other:#x}", names::name(*number));
            }
        }
        // All threads may make the first call and the last but two.
        assert!(may >= 2, "{kind:?}");
    }
}

#[test]
fn core_scheduling_is_the_starters_and_each_vcpus_own() {
    let filters = filters(Seccomp::True);
    for kind in kinds() {
        let may = |command| {
            let arguments = [core_group::PR_SCHED_CORE as u64, command, 0, 0, 0, 0];
            call(&filters, kind, libc::SYS_prctl, arguments) != End::Signal(libc::SIGSYS)
        };
        let is_starter = kind == ThreadKind::Starter;
        assert_eq!(may(core_group::CREATE), is_starter || kind == ThreadKind::Vcpu, "{kind:?}");
        assert_eq!(may(core_group::SHARE_FROM), is_starter, "{kind:?}");
    }
}

#[test]
fn the_starter_makes_threads_and_no_processes() {
    let filters = filters(Seccomp::True);
    for kind in kinds() {
        let end = call(&filters, kind, libc::SYS_clone3, [0; 6]);
        let expected = if kind == ThreadKind::Starter { End::Returned(ENOSYS) } else { End::Signal(libc::SIGSYS) };
        assert_eq!(end, expected, "{kind:?}");
        // Flags of a thread that the kernel refuses: one bit lacks the other that it requires.
        let flags =
            libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_PIDFD | libc::CLONE_PARENT_SETTID;
        let end = call(&filters, kind, libc::SYS_clone, [flags as u64, 0, 0, 0, 0, 0]);
        assert_eq!(end != End::Signal(libc::SIGSYS), kind == ThreadKind::Starter, "{kind:?}: {end:?}");
    }
}

#[test]
fn a_call_fails_or_is_made_in_the_modes_that_end_nothing() {
    let execve = |mode| call(&filters(mode), ThreadKind::Vcpu, libc::SYS_execve, [0; 6]);
    assert_eq!(execve(Seccomp::Errno), End::Returned(EPERM));
    assert_eq!(execve(Seccomp::Log), End::Returned(libc::EFAULT));
    assert!(Seccomp::False.action().is_none());
}

#[test]
fn the_starter_may_do_what_those_may_that_it_starts() {
    let starter = rule::rules(lists::groups(ThreadKind::Starter)).unwrap();
    for kind in ThreadKind::started() {
        for (number, alternatives) in rule::rules(lists::groups(kind)).unwrap() {
            let (name, of_starter) = (names::name(number), starter.get(&number));
            let has_all = |all: &Vec<_>| all.is_empty() || alternatives.iter().all(|one| all.contains(one));
            assert!(of_starter.is_some_and(has_all), "{kind:?}: {name:?}");
            assert!(!alternatives.is_empty() || of_starter.is_some_and(Vec::is_empty), "{kind:?}: {name:?}");
        }
    }
}

#[test]
fn every_call_of_the_lists_has_a_name_and_every_group_a_reason() {
    let mut reasons = BTreeSet::new();
    for group in kinds().into_iter().flat_map(lists::groups) {
        reasons.insert(group.why);
        assert!(group.rules.iter().all(|rule| names::name(rule.call).is_some()), "{}", group.why);
    }
    assert!(reasons.len() > 20 && reasons.iter().all(|why| why.len() > 10), "{reasons:?}");
}
