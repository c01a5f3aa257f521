//! The system calls that each kind of thread may make, with reasons.
//!
//! A call is listed because code of this program or of its libraries makes it, possibly on a rare path: an error, a
//! lost backend, a panic. Both C libraries are supported, which use older numbers for some calls.

#![allow(clippy::unnecessary_cast, reason = "types of constants differ between C libraries")]

use libc::*;
use virtio_devices::WorkerKind;

use super::ioctls;
use super::rule::{Group, Rule, any, bits, one_of, only, this_process, with, without};
use crate::threads::{ThreadKind, core_group};

/// Protection bits that are never allowed: this program generates no code.
const EXECUTABLE: u64 = PROT_EXEC as u64;
/// A new thread of this process, as opposed to a new process (`clone(2)`).
const NEW_THREAD: u64 = (CLONE_THREAD | CLONE_VM | CLONE_SIGHAND) as u64;
/// `linux/prctl.h`: core scheduling, which the C library's headers do not have.
const PR_SCHED_CORE: u64 = core_group::PR_SCHED_CORE as u64;
const OF_A_THREAD: u64 = core_group::OF_A_THREAD as u64;
/// `asm/prctl.h`: components of the XSAVE area for guests (AMX).
const ARCH_REQ_XCOMP_GUEST_PERM: u64 = 0x1025;

/// Socket families of the network, and the type of streams, closed in other programs.
const INET: &[u64] = &[AF_INET as u64, AF_INET6 as u64];
const STREAM: u64 = (SOCK_STREAM | SOCK_CLOEXEC) as u64;
const DATAGRAM: u64 = (SOCK_DGRAM | SOCK_CLOEXEC) as u64;
/// The default protocol of a socket type: TCP for streams, routes for netlink. Landlock restricts no other protocol of
/// streams.
const USUAL: u64 = 0;

/// The flag with which a descriptor sends signals: a terminal's go to all processes of its foreground job.
const SENDS_SIGNALS: u64 = O_ASYNC as u64;
/// Pages that other processes have mapped as well (`linux/mempolicy.h`).
const MPOL_MF_MOVE_ALL: u64 = 1 << 2;
/// The bits of a futex operation that select it (`linux/futex.h`). Some operations that the lists leave out find a
/// thread of any process by a number in memory: priority inheritance.
const FUTEX_CMD: u64 = 0x7f;
/// The host's clocks, and those of the calling thread and its process (`linux/time.h`). All others are clocks of
/// devices, and CPU clocks that contain the number of any process or thread (`clock_getcpuclockid(3)`).
const OWN_CLOCKS: &[u64] = &[
    CLOCK_REALTIME as u64,
    CLOCK_MONOTONIC as u64,
    CLOCK_PROCESS_CPUTIME_ID as u64,
    CLOCK_THREAD_CPUTIME_ID as u64,
    CLOCK_MONOTONIC_RAW as u64,
    CLOCK_REALTIME_COARSE as u64,
    CLOCK_MONOTONIC_COARSE as u64,
    CLOCK_BOOTTIME as u64,
];
/// Barriers of this process (`linux/membarrier.h`): `MEMBARRIER_CMD_PRIVATE_EXPEDITED` and its registration.
const OWN_BARRIERS: &[u64] = &[1 << 3, 1 << 4];

const fn ioctl(numbers: &'static [u64]) -> Rule {
    only(SYS_ioctl, [one_of(1, numbers)])
}

const fn fcntl(commands: &'static [u64]) -> Rule {
    only(SYS_fcntl, [one_of(1, commands)])
}

/// Flags of a file or socket, such as non-blocking mode.
const SET_FLAGS: Rule = only(SYS_fcntl, [one_of(1, &[F_SETFL as u64]), without(2, SENDS_SIGNALS)]);

const fn prctl(options: &'static [u64]) -> Rule {
    only(SYS_prctl, [one_of(0, options)])
}

/// Core scheduling of the calling thread: `command`, which may name this process.
const fn core_scheduling(command: &'static [u64]) -> Rule {
    only(SYS_prctl, [one_of(0, &[PR_SCHED_CORE]), one_of(1, command), this_process(2), one_of(3, &[OF_A_THREAD])])
}

const fn futex(operation: c_int) -> Rule {
    only(SYS_futex, [bits(1, FUTEX_CMD, operation as u64)])
}

/// A socket of this family whose type and protocol are among these.
const fn socket(family: &'static [u64], types: &'static [u64], protocols: &'static [u64]) -> Rule {
    only(SYS_socket, [one_of(0, family), one_of(1, types), one_of(2, protocols)])
}

const MEMORY: Group = Group {
    why: "the allocator and stacks, which are never executable",
    rules: &[
        any(SYS_brk),
        any(SYS_munmap),
        any(SYS_mremap),
        any(SYS_madvise),
        only(SYS_mmap, [without(2, EXECUTABLE)]),
        only(SYS_mprotect, [without(2, EXECUTABLE)]),
    ],
};

const THREAD: Group = Group {
    why: "the C library and the standard library, in any thread: its beginning and end, locks, clocks, random seeds of \
          tables, signals that vCPUs and the control thread get",
    rules: &[
        futex(FUTEX_WAIT),
        futex(FUTEX_WAKE),
        futex(FUTEX_REQUEUE),
        futex(FUTEX_WAIT_BITSET),
        futex(FUTEX_WAKE_BITSET),
        any(SYS_sched_yield),
        any(SYS_gettid),
        any(SYS_getpid),
        any(SYS_exit),
        any(SYS_exit_group),
        any(SYS_rt_sigreturn),
        any(SYS_rt_sigprocmask),
        any(SYS_sigaltstack),
        any(SYS_restart_syscall),
        any(SYS_set_robust_list),
        any(SYS_rseq),
        only(SYS_sched_getaffinity, [this_process(0)]),
        any(SYS_getrandom),
        only(SYS_clock_gettime, [one_of(0, OWN_CLOCKS)]),
        any(SYS_gettimeofday),
        only(SYS_clock_nanosleep, [one_of(0, OWN_CLOCKS)]),
        any(SYS_nanosleep),
        prctl(&[PR_SET_NAME as u64, PR_GET_NAME as u64]),
    ],
};

const DESCRIPTORS: Group = Group {
    why: "eventfds between threads, lines of the log, and descriptors that are open; a debug build looks at each that \
          it closes",
    rules: &[any(SYS_read), any(SYS_write), any(SYS_writev), any(SYS_close), fcntl(&[F_GETFD as u64])],
};

const WAIT: Group = Group { why: "waiting for descriptors", rules: &[any(SYS_poll), any(SYS_ppoll)] };

const PANIC: Group = Group {
    why: "a panic: the terminal is put back, and the program ends itself",
    rules: &[
        ioctl(ioctls::SET_TERMINAL),
        // Not tkill, which can signal threads of any process. musl aborts with it, and so ends with SIGSYS.
        only(SYS_tgkill, [this_process(0)]),
    ],
};

const SEND: Group = Group {
    why: "a byte of a signal's handler, which may run in any thread, and other bytes for a socket that is connected",
    rules: &[only(SYS_sendto, [one_of(5, &[0])])],
};

/// Calls that all threads may make.
const COMMON: &[&Group] = &[&MEMORY, &THREAD, &DESCRIPTORS, &WAIT, &SEND, &PANIC];

const PLACEMENT: Group =
    Group { why: "CPUs that the thread is bound to", rules: &[only(SYS_sched_setaffinity, [this_process(0)])] };

const SIGNALS: Group = Group {
    why: "eventfds, timers, sets of descriptors, and copies of descriptors, as devices that start have them",
    rules: &[
        any(SYS_eventfd2),
        any(SYS_timerfd_create),
        any(SYS_timerfd_settime),
        any(SYS_epoll_create1),
        fcntl(&[F_DUPFD_CLOEXEC as u64]),
    ],
};

const EPOLL: Group = Group {
    why: "waiting for many descriptors",
    rules: &[any(SYS_epoll_ctl), any(SYS_epoll_wait), any(SYS_epoll_pwait)],
};

const MOMENTS: Group =
    Group { why: "waiting for doorbells and for less than a millisecond", rules: &[any(SYS_epoll_pwait2)] };

const CONSOLE: Group = Group {
    why: "the other end of a console: a terminal, which may be another job's, or a client of a socket",
    rules: &[
        any(SYS_accept4),
        ioctl(&[FIONREAD as u64, FIONBIO as u64, TIOCGPGRP as u64, TIOCGWINSZ as u64, TCGETS as u64, 0x802c_542a]),
        any(SYS_getpgrp),
        only(SYS_getpgid, [this_process(0)]),
        any(SYS_recvfrom),
        any(SYS_shutdown),
    ],
};

const RUN: Group =
    Group { why: "running a vCPU, and setting it up", rules: &[ioctl(&[ioctls::KVM_RUN]), ioctl(ioctls::KVM_VCPU)] };

const OWN_CORE: Group = Group {
    why: "core scheduling: the thread shares a core with no other",
    rules: &[core_scheduling(&[core_group::CREATE as u64])],
};

const SHARED_CORES: Group = Group {
    why: "core scheduling: vCPUs begin in the group that their starter is in, and other threads leave it",
    rules: &[core_scheduling(&[core_group::CREATE as u64, core_group::SHARE_FROM as u64])],
};

const WIRES: Group = Group {
    why: "what an access of the guest changes: windows, doorbells and messages of devices",
    rules: &[ioctl(ioctls::KVM_WIRES)],
};

const SLOTS: Group = Group { why: "memory that is plugged and unplugged", rules: &[ioctl(&[ioctls::KVM_MEMORY_SLOT])] };

const ACCEPT: Group =
    Group { why: "new clients", rules: &[any(SYS_accept4), ioctl(ioctls::STREAM), any(SYS_shutdown)] };

const TALK: Group = Group {
    why: "talking over a socket that is connected, with descriptors",
    rules: &[
        any(SYS_recvfrom),
        any(SYS_sendmsg),
        any(SYS_recvmsg),
        any(SYS_shutdown),
        any(SYS_setsockopt),
        any(SYS_getsockopt),
        ioctl(ioctls::STREAM),
        fcntl(&[F_GETFL as u64]),
        SET_FLAGS,
    ],
};

const CONNECT: Group = Group {
    why: "connecting to a Unix socket, again if it was lost",
    rules: &[only(SYS_socket, [one_of(0, &[AF_UNIX as u64])]), any(SYS_connect)],
};

const SOCKET_PAIR: Group = Group {
    why: "a second channel, one end of which is passed on",
    rules: &[only(SYS_socketpair, [one_of(0, &[AF_UNIX as u64])])],
};

const LOOK: Group = Group {
    why: "what is at a path",
    rules: &[
        any(SYS_statx),
        any(SYS_newfstatat),
        any(SYS_fstat),
        any(SYS_stat),
        any(SYS_lstat),
        any(SYS_readlink),
        any(SYS_readlinkat),
        any(SYS_getcwd),
    ],
};

const OPEN: Group = Group { why: "opening a path", rules: &[any(SYS_openat), any(SYS_open)] };

const FRAMES: Group =
    Group { why: "frames of a tap, and its offloads", rules: &[any(SYS_readv), ioctl(ioctls::TAP_QUEUE)] };

const TAPS: Group = Group {
    why: "taps are made, found, set up and brought up, again if one was deleted",
    rules: &[
        ioctl(ioctls::TAP),
        ioctl(ioctls::TAP_QUEUE),
        // A socket with which an interface is configured.
        socket(INET, &[DATAGRAM], &[USUAL]),
        fcntl(&[F_GETFL as u64]),
        SET_FLAGS,
    ],
};

const VHOST_NET: Group =
    Group { why: "vhost-net's rings", rules: &[ioctl(ioctls::VHOST_RINGS), ioctl(ioctls::VHOST_NET)] };

const VDPA: Group = Group {
    why: "a vDPA device's rings and registers; it may be opened again, and then counts what this process has pinned",
    rules: &[
        ioctl(ioctls::VHOST_RINGS),
        ioctl(ioctls::VHOST_VDPA),
        only(SYS_prlimit64, [this_process(0)]),
        any(SYS_getrlimit),
        any(SYS_setrlimit),
        fcntl(&[F_GETFL as u64]),
    ],
};

const VDPA_RESET: Group = Group {
    why: "the reset of a vDPA device that does not forget memory when its virtual IOMMU says so",
    rules: &[ioctl(&[ioctls::VDPA_STATUS])],
};

const IOTLB: Group = Group {
    why: "a vhost-user backend that gets the mappings of its virtual IOMMU, and whose connection is closed if it does \
          not answer",
    rules: &[any(SYS_sendmsg), any(SYS_recvmsg), any(SYS_shutdown)],
};

const VFIO: Group = Group {
    why: "a device of the host: its group or its file, its address space and what it is",
    rules: &[ioctl(ioctls::VFIO), ioctl(ioctls::VFIO_DMA), ioctl(ioctls::VFIO_DEVICE)],
};

const HOST_DEVICE: Group = Group {
    why: "registers of a device of the host, its interrupts and its reset, and what it reaches",
    rules: &[any(SYS_pread64), any(SYS_pwrite64), ioctl(ioctls::VFIO_DEVICE), ioctl(ioctls::VFIO_DMA)],
};

const IMAGE: Group = Group {
    why: "a disk's image: requests, flushes, holes, and the growth of a qcow2 image",
    rules: &[
        any(SYS_preadv),
        any(SYS_pwritev),
        any(SYS_pread64),
        any(SYS_pwrite64),
        any(SYS_fdatasync),
        any(SYS_fsync),
        any(SYS_fallocate),
        any(SYS_ftruncate),
        any(SYS_lseek),
        any(SYS_fstat),
        any(SYS_newfstatat),
        any(SYS_statx),
    ],
};

const URING: Group = Group {
    why: "a disk's io_uring, which was limited to its calls before, as filters do not see them",
    rules: &[any(SYS_io_uring_enter)],
};

const HOLES: Group = Group {
    why: "memory of the guest that is given back, or overwritten where there is some",
    rules: &[any(SYS_fallocate), any(SYS_lseek), any(SYS_fstat), any(SYS_newfstatat)],
};

const FLUSH: Group = Group { why: "flushing a file", rules: &[any(SYS_fsync), any(SYS_fdatasync), any(SYS_msync)] };

const STREAMS: Group =
    Group { why: "bytes that go to several places at once: connections', and random ones", rules: &[any(SYS_readv)] };

const KVM: Group = Group {
    why: "making a VM, and setting its vCPUs up",
    rules: &[ioctl(ioctls::KVM_CREATE), ioctl(ioctls::KVM_VCPU), ioctl(ioctls::KVM_WIRES), ioctl(&[ioctls::KVM_RUN])],
};

const STATE: Group = Group { why: "the state of a VM that is saved or restored", rules: &[ioctl(ioctls::KVM_STATE)] };

const DIRTY_LOG: Group = Group {
    why: "which pages of guest memory are written",
    rules: &[ioctl(ioctls::KVM_DIRTY_LOG), only(SYS_membarrier, [one_of(0, OWN_BARRIERS)])],
};

const FILES: Group = Group {
    why: "files that are read, made, locked, given a size or removed",
    rules: &[
        any(SYS_getdents64),
        any(SYS_access),
        any(SYS_faccessat),
        any(SYS_faccessat2),
        any(SYS_unlink),
        any(SYS_unlinkat),
        any(SYS_rename),
        any(SYS_renameat),
        any(SYS_renameat2),
        any(SYS_flock),
        any(SYS_statfs),
        any(SYS_fstatfs),
        any(SYS_readv),
        fcntl(&[
            F_GETFL as u64,
            F_SETFD as u64,
            F_OFD_GETLK as u64,
            F_OFD_SETLK as u64,
            F_ADD_SEALS as u64,
            F_GET_SEALS as u64,
            F_GETPIPE_SZ as u64,
        ]),
        SET_FLAGS,
        ioctl(ioctls::BLOCK_DEVICE),
    ],
};

const GUEST_MEMORY: Group = Group {
    why: "guest memory and the nodes that it is on",
    rules: &[any(SYS_memfd_create), only(SYS_mbind, [without(5, MPOL_MF_MOVE_ALL)])],
};

const SNAPSHOT: Group = Group {
    why: "a snapshot's files: made, filled, flushed, and renamed or removed",
    rules: &[
        any(SYS_pwrite64),
        any(SYS_ftruncate),
        any(SYS_fsync),
        any(SYS_fdatasync),
        any(SYS_renameat),
        any(SYS_renameat2),
        any(SYS_unlink),
        any(SYS_unlinkat),
    ],
};

const PAGES: Group = Group {
    why: "which pages of the guest's memory there are to be saved or sent",
    rules: &[ioctl(ioctls::PAGES), any(SYS_pread64), any(SYS_lseek)],
};

const MAKE_USERFAULT: Group =
    Group { why: "memory of a restored guest that is filled on first use", rules: &[ioctl(ioctls::MAKE_USERFAULT)] };

const USERFAULT: Group = Group {
    why: "memory of a restored guest that is filled when it is used",
    rules: &[ioctl(ioctls::USERFAULT), any(SYS_pread64), any(SYS_lseek)],
};

const NETWORK: Group = Group {
    why: "a migration's connections over the network, and the addresses of a host's name",
    rules: &[
        only(SYS_socket, [one_of(0, &[AF_UNIX as u64])]),
        socket(INET, &[STREAM], &[USUAL]),
        // The C library queries name servers through these, and finds out which address is used.
        socket(INET, &[DATAGRAM, DATAGRAM | SOCK_NONBLOCK as u64], &[USUAL, IPPROTO_UDP as u64]),
        socket(&[AF_NETLINK as u64], &[(SOCK_RAW | SOCK_CLOEXEC) as u64], &[USUAL]),
        any(SYS_connect),
        any(SYS_bind),
        any(SYS_listen),
        any(SYS_getsockname),
        any(SYS_getpeername),
        any(SYS_sendmmsg),
        any(SYS_uname),
        any(SYS_lseek),
    ],
};

const LOG_FILE: Group = Group {
    why: "the log that backends in other processes share with this one, whose size is sealed",
    rules: &[any(SYS_memfd_create), any(SYS_ftruncate), fcntl(&[F_ADD_SEALS as u64])],
};

const PIPE: Group = Group {
    why: "a pipe through which a vhost-user backend saves or loads its own state in a migration",
    rules: &[any(SYS_pipe2)],
};

const REMOVE: Group =
    Group { why: "the path of a socket that is no longer listened on", rules: &[any(SYS_unlink), any(SYS_unlinkat)] };

const LISTEN: Group = Group {
    why: "sockets that are listened on",
    rules: &[
        any(SYS_bind),
        any(SYS_listen),
        any(SYS_accept4),
        any(SYS_getsockname),
        any(SYS_getpeername),
        any(SYS_setsockopt),
        any(SYS_getsockopt),
    ],
};

const TERMINALS: Group = Group {
    why: "terminals: raw mode, their size and job, pseudo-terminals",
    rules: &[
        ioctl(ioctls::TERMINAL),
        ioctl(ioctls::SET_TERMINAL),
        any(SYS_getpgrp),
        only(SYS_getpgid, [this_process(0)]),
    ],
};

const PROCESS: Group = Group {
    why: "limits of open files and of pinned memory, signals that are caught, who this is, AMX for guests",
    rules: &[
        only(SYS_prlimit64, [this_process(0)]),
        any(SYS_getrlimit),
        any(SYS_setrlimit),
        any(SYS_rt_sigaction),
        any(SYS_getuid),
        any(SYS_geteuid),
        any(SYS_getgid),
        any(SYS_getegid),
        any(SYS_uname),
        any(SYS_sysinfo),
        only(SYS_arch_prctl, [one_of(0, &[ARCH_REQ_XCOMP_GUEST_PERM])]),
    ],
};

const EVENTS: Group = Group {
    why: "a file of events on a full disk, from which half an event is taken back; and a pipe whose reader comes later",
    rules: &[any(SYS_ftruncate), any(SYS_lseek), any(SYS_fstat), any(SYS_statx), fcntl(&[F_GETFL as u64]), SET_FLAGS],
};

const LANDLOCK: Group = Group {
    why: "the thread confines itself: by Landlock, which can only take",
    rules: &[any(SYS_landlock_create_ruleset), any(SYS_landlock_add_rule), any(SYS_landlock_restrict_self)],
};

const MAKE_URING: Group = Group {
    why: "a disk's io_uring, made and limited before its thread gives these calls up",
    rules: &[any(SYS_io_uring_setup), any(SYS_io_uring_register)],
};

const NEW_THREADS: Group = Group {
    why: "new threads, but no processes, which have the starter's filter and add their own",
    rules: &[
        only(SYS_clone, [with(0, NEW_THREAD)]),
        // A filter cannot see the arguments of this call. Another filter makes it fail, so that the C library uses
        // `clone`.
        any(SYS_clone3),
        prctl(&[PR_SET_NO_NEW_PRIVS as u64]),
        only(SYS_seccomp, [one_of(0, &[SECCOMP_SET_MODE_FILTER as u64])]),
    ],
};

/// Calls that open a VM's devices, memory and sockets.
const OPENING: &[&Group] = &[
    &KVM,
    &SIGNALS,
    &EPOLL,
    &OPEN,
    &LOOK,
    &FILES,
    &IMAGE,
    &GUEST_MEMORY,
    &CONNECT,
    &LISTEN,
    &TALK,
    &SOCKET_PAIR,
    &TAPS,
    &VHOST_NET,
    &VDPA,
    &VFIO,
    &HOST_DEVICE,
    &TERMINALS,
    &PROCESS,
    &FLUSH,
    &MAKE_USERFAULT,
];

/// Calls that threads of a kind may make, in addition to those of all threads.
fn own(kind: ThreadKind) -> &'static [&'static Group] {
    match kind {
        ThreadKind::Main => &[&LANDLOCK, &STATE, &DIRTY_LOG],
        // The calls of the control thread and of all others are added by `groups`.
        ThreadKind::Starter => &[&NEW_THREADS, &SHARED_CORES, &MAKE_URING, &LANDLOCK, &OPEN],
        ThreadKind::Open => &[&LANDLOCK, &PIPE],
        ThreadKind::Snapshot => &[&SNAPSHOT, &PAGES, &OPEN, &LOOK],
        ThreadKind::PageFaults => &[&USERFAULT],
        // In addition to its own calls, it turns on the backends' dirty logs.
        ThreadKind::Migration => &[
            &NETWORK, &ACCEPT, &TALK, &SIGNALS, &OPEN, &LOOK, &REMOVE, &PAGES, &DIRTY_LOG, &WIRES, &VHOST_NET,
            &LOG_FILE,
        ],
        ThreadKind::Vcpu => {
            &[&RUN, &PLACEMENT, &OWN_CORE, &WIRES, &SIGNALS, &EPOLL, &CONSOLE, &HOST_DEVICE, &VDPA_RESET, &IOTLB]
        }
        ThreadKind::HttpServer => &[&ACCEPT, &EPOLL],
        ThreadKind::Http => &[&TALK, &EPOLL],
        ThreadKind::EventMonitor => &[&OPEN, &EVENTS],
        ThreadKind::Serial | ThreadKind::DebugConsole => &[&CONSOLE, &EPOLL],
        ThreadKind::Tpm => &[&CONNECT, &SOCKET_PAIR, &TALK],
        ThreadKind::Worker(kind) => worker(kind),
    }
}

fn worker(kind: WorkerKind) -> &'static [&'static Group] {
    match kind {
        WorkerKind::Net => &[&PLACEMENT, &FRAMES],
        WorkerKind::TapFinder => &[&PLACEMENT, &TAPS, &OPEN, &LOOK],
        WorkerKind::Absent => &[&PLACEMENT, &SIGNALS],
        WorkerKind::Switch => &[&PLACEMENT, &FRAMES, &EPOLL, &MOMENTS],
        WorkerKind::VhostNet => &[&PLACEMENT, &SIGNALS, &VHOST_NET, &TAPS, &OPEN, &LOOK],
        WorkerKind::Vdpa => &[&PLACEMENT, &SIGNALS, &VDPA, &OPEN, &LOOK],
        WorkerKind::VhostUser => &[&PLACEMENT, &SIGNALS, &CONNECT, &SOCKET_PAIR, &ACCEPT, &TALK, &LOOK],
        WorkerKind::VhostUserConfig => &[&PLACEMENT, &TALK],
        WorkerKind::Block => &[&PLACEMENT, &IMAGE, &URING],
        WorkerKind::Console => &[&PLACEMENT, &CONSOLE, &EPOLL],
        WorkerKind::Balloon => &[&PLACEMENT, &HOLES],
        WorkerKind::Mem => &[&PLACEMENT, &HOLES, &SLOTS],
        WorkerKind::Flush => &[&PLACEMENT, &FLUSH],
        WorkerKind::Vsock => &[&PLACEMENT, &EPOLL, &ACCEPT, &CONNECT, &TALK, &STREAMS],
        WorkerKind::Rng => &[&PLACEMENT, &STREAMS],
        WorkerKind::Queue => &[&PLACEMENT],
    }
}

/// Calls that threads of a kind may make.
pub(super) fn groups(kind: ThreadKind) -> Vec<&'static Group> {
    let opening: &[_] = if matches!(kind, ThreadKind::Main | ThreadKind::Open) { OPENING } else { &[] };
    // Filters add up: a thread can do no more than the one that starts it. Frequent calls come first.
    let started = ThreadKind::started().filter(|_| kind == ThreadKind::Starter);
    let mut groups: Vec<_> = started.flat_map(groups).collect();
    groups.extend(own(kind).iter().chain(opening).chain(COMMON));
    groups
}
