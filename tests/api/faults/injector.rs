//! Makes the n-th system call of a process fail: `ptrace` of all its threads.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use libc::{EMFILE, ENFILE, ENOMEM, ENOSPC, c_int, c_long, pid_t};

/// KVM_RUN, which cannot fail for lack of a resource.
const KVM_RUN: u64 = 0xae80;
/// KVM_CREATE_VM, KVM_CREATE_VCPU and KVM_CREATE_DEVICE, which create descriptors.
const KVM_CREATE: [u64; 3] = [0xae01, 0xae41, 0xc00c_aee0];
/// Up to this number, the kernel uses its stack and allocates nothing.
const POLLED_ON_STACK: u64 = 30;
/// Offsets of registers in `struct user`.
const RAX: u64 = 10 * 8;
const ORIG_RAX: u64 = 15 * 8;

/// The call to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fault {
    /// The number of the call among those that can fail with `errno`, from 0.
    pub number: usize,
    /// Error of the call.
    pub errno: c_int,
}

/// The failed calls.
#[derive(Debug, Clone, Default)]
pub(crate) struct Report {
    /// The number of calls that could have failed in that way.
    pub calls: usize,
    /// The failed call: its thread, its number, its first two arguments.
    pub failed: Option<(String, i64, [u64; 2])>,
    /// All calls by threads with these IDs and names, after each had got its own filter.
    pub seen: BTreeMap<(pid_t, String), BTreeSet<i64>>,
}

/// A thread that traces a process until [`Self::end`].
pub(crate) struct Injector {
    stop: Arc<AtomicBool>,
    tracer: JoinHandle<Report>,
}

impl Injector {
    /// Attaches to all threads of the process, and counts from now on.
    pub(super) fn attach(pid: u32, fault: Fault) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let (stopped, (attached, is_attached)) = (Arc::clone(&stop), std::sync::mpsc::channel());
        let tracer = std::thread::spawn(move || {
            let mut tracer = Tracer { pid: pid.cast_signed(), fault, report: Report::default(), ..Tracer::default() };
            tracer.attach();
            attached.send(()).unwrap();
            while !stopped.load(Ordering::Acquire) {
                tracer.turn();
            }
            tracer.detach();
            tracer.report
        });
        is_attached.recv().unwrap();
        Self { stop, tracer }
    }

    /// Attaches to all threads of the process, and records their calls from now on.
    pub(crate) fn record(pid: u32) -> Self {
        Self::attach(pid, Fault::default())
    }

    /// Detaches.
    pub(crate) fn end(self) -> Report {
        self.stop.store(true, Ordering::Release);
        self.tracer.join().unwrap()
    }
}

impl Default for Fault {
    fn default() -> Self {
        Self { number: usize::MAX, errno: ENOMEM }
    }
}

#[derive(Default)]
struct Tracer {
    pid: pid_t,
    fault: Fault,
    report: Report,
    threads: HashSet<pid_t>,
    /// Threads whose present call must fail.
    failing: HashMap<pid_t, c_int>,
    /// New threads that have not set up their signal stacks yet, and the number of their calls for that. Rust's
    /// standard library panics if these cannot be mapped, before any code of the program runs in the thread.
    young: HashMap<pid_t, u8>,
    is_ending: bool,
}

fn ptrace(request: libc::c_uint, tid: pid_t, address: u64, data: u64) -> io::Result<c_long> {
    // SAFETY: the requests used here access only the traced thread, except for PTRACE_GET_SYSCALL_INFO, whose caller
    // passes a buffer of the given length.
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Tracer {
    fn attach(&mut self) {
        let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE;
        loop {
            let mut found = false;
            for entry in fs::read_dir(format!("/proc/{}/task", self.pid)).unwrap() {
                let tid: pid_t = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
                // A thread that has just ended, or that its parent's trace includes, is not seized.
                if !self.threads.contains(&tid) && ptrace(libc::PTRACE_SEIZE, tid, 0, options as u64).is_ok() {
                    let _ = ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0);
                    self.threads.insert(tid);
                    found = true;
                }
            }
            if !found {
                return;
            }
        }
    }

    /// Handles one stop, or waits a little.
    fn turn(&mut self) -> bool {
        let mut status = 0;
        // Other threads of this process have children of their own.
        let flags = libc::__WALL | libc::WNOHANG | libc::__WNOTHREAD;
        // SAFETY: the status is a local variable.
        let tid = unsafe { libc::waitpid(-1, &raw mut status, flags) };
        if tid <= 0 {
            std::thread::sleep(Duration::from_micros(50));
            return false;
        }
        if !libc::WIFSTOPPED(status) {
            self.threads.remove(&tid);
            self.failing.remove(&tid);
            return true;
        }
        if self.threads.insert(tid) {
            self.young.insert(tid, 0);
        }
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        let mut deliver = 0;
        if signal == libc::SIGTRAP | 0x80 {
            self.call(tid);
        } else if event == 0 {
            deliver = signal as u64;
        }
        // A call that must fail has to return first.
        let request = if self.is_ending && !self.failing.contains_key(&tid) {
            self.threads.remove(&tid);
            libc::PTRACE_DETACH
        } else {
            libc::PTRACE_SYSCALL
        };
        // A killed thread no longer exists.
        let _ = ptrace(request, tid, 0, deliver);
        true
    }

    /// A thread begins or ends a system call.
    fn call(&mut self, tid: pid_t) {
        if let Some(errno) = self.failing.remove(&tid) {
            ptrace(libc::PTRACE_POKEUSER, tid, RAX, i64::from(-errno).cast_unsigned()).unwrap();
            return;
        }
        let mut info = MaybeUninit::<libc::ptrace_syscall_info>::zeroed();
        let len = size_of_val(&info) as u64;
        ptrace(libc::PTRACE_GET_SYSCALL_INFO, tid, len, info.as_mut_ptr() as u64).unwrap();
        // SAFETY: all zeros is a value of this struct of numbers.
        let info = unsafe { info.assume_init() };
        if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY || self.is_ending {
            return;
        }
        // SAFETY: these are the fields of a call's entry, according to `op`.
        let entry = unsafe { info.u.entry };
        let number = entry.nr.cast_signed();
        if self.fault.number == usize::MAX {
            let name = fs::read_to_string(format!("/proc/{}/task/{tid}/comm", self.pid)).unwrap_or_default();
            let seen = self.report.seen.entry((tid, name.trim().to_string())).or_default();
            if number == libc::SYS_seccomp {
                seen.clear();
            } else {
                seen.insert(number);
            }
            return;
        }
        if let Some(calls) = self.young.get_mut(&tid) {
            match number {
                libc::SYS_sigaltstack if *calls == 0 => *calls = 1,
                libc::SYS_sigaltstack => _ = self.young.remove(&tid),
                libc::SYS_mmap | libc::SYS_mprotect => return,
                _ => {}
            }
        }
        if !self.can_fail(number, &entry.args) {
            return;
        }
        if self.report.calls == self.fault.number {
            // No filter of the program would pass an invalid number.
            ptrace(libc::PTRACE_POKEUSER, tid, ORIG_RAX, libc::SYS_gettid as u64).unwrap();
            self.failing.insert(tid, self.fault.errno);
            let name = fs::read_to_string(format!("/proc/{}/task/{tid}/comm", self.pid)).unwrap_or_default();
            self.report.failed = Some((name.trim().to_string(), number, [entry.args[0], entry.args[1]]));
        }
        self.report.calls += 1;
    }

    /// True if the call can fail with `errno` on a host that lacks a resource.
    fn can_fail(&self, number: i64, args: &[u64; 6]) -> bool {
        let makes_descriptors = match number {
            libc::SYS_openat
            | libc::SYS_open
            | libc::SYS_socket
            | libc::SYS_socketpair
            | libc::SYS_accept
            | libc::SYS_accept4
            | libc::SYS_eventfd2
            | libc::SYS_epoll_create1
            | libc::SYS_pipe2
            | libc::SYS_timerfd_create
            | libc::SYS_memfd_create
            | libc::SYS_dup
            | libc::SYS_io_uring_setup => true,
            libc::SYS_fcntl => [libc::F_DUPFD, libc::F_DUPFD_CLOEXEC].contains(&(args[1] as c_int)),
            libc::SYS_ioctl => KVM_CREATE.contains(&args[1]),
            _ => false,
        };
        match self.fault.errno {
            EMFILE => makes_descriptors,
            ENFILE => makes_descriptors && number != libc::SYS_fcntl && number != libc::SYS_dup,
            ENOMEM => {
                makes_descriptors
                    || match number {
                        libc::SYS_ioctl => args[1] != KVM_RUN,
                        libc::SYS_poll | libc::SYS_ppoll => args[1] > POLLED_ON_STACK,
                        libc::SYS_mmap
                        | libc::SYS_mremap
                        | libc::SYS_mprotect
                        | libc::SYS_madvise
                        | libc::SYS_clone
                        | libc::SYS_clone3
                        | libc::SYS_epoll_ctl
                        | libc::SYS_sendmsg
                        | libc::SYS_sendto
                        | libc::SYS_recvmsg
                        | libc::SYS_connect
                        | libc::SYS_bind
                        | libc::SYS_statx
                        | libc::SYS_getdents64
                        | libc::SYS_unlink
                        | libc::SYS_io_uring_register
                        | libc::SYS_sched_setaffinity => true,
                        _ => false,
                    }
            }
            ENOSPC => match number {
                // Registered ioeventfds, whose number KVM limits; other drivers have such limits, too.
                libc::SYS_ioctl => args[1] != KVM_RUN,
                libc::SYS_epoll_ctl | libc::SYS_ftruncate | libc::SYS_fallocate => true,
                libc::SYS_openat => args[2] as c_int & libc::O_CREAT != 0,
                libc::SYS_write | libc::SYS_writev | libc::SYS_pwrite64 => self.is_file(args[0]),
                _ => false,
            },
            _ => false,
        }
    }

    fn is_file(&self, fd: u64) -> bool {
        fs::read_link(format!("/proc/{}/fd/{fd}", self.pid)).is_ok_and(|path| path.is_absolute())
    }

    fn detach(&mut self) {
        self.is_ending = true;
        for tid in &self.threads {
            let _ = ptrace(libc::PTRACE_INTERRUPT, *tid, 0, 0);
        }
        let until = std::time::Instant::now() + Duration::from_secs(10);
        while !self.threads.is_empty() && std::time::Instant::now() < until {
            self.turn();
            let pid = self.pid;
            self.threads.retain(|tid| fs::exists(format!("/proc/{pid}/task/{tid}")).unwrap_or(false));
        }
    }
}
