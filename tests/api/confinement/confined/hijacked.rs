//! A thread of a running program under the test's control through `ptrace`, as if a guest had taken it over.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use libc::{c_int, c_long, pid_t, user_regs_struct};

/// Result of a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Stopped by a filter, which ends the program by SIGSYS. The test suppresses the signal.
    Filtered,
    /// Failed.
    Fails(c_int),
    /// Made.
    Made(u64),
}

/// A stopped thread. Dropping this resumes it.
pub(super) struct Hijacked {
    tid: pid_t,
    memory: File,
    /// Registers of the thread when it was stopped, just after the instruction of a system call.
    found: user_regs_struct,
}

fn ptrace(request: libc::c_uint, tid: pid_t, data: u64) -> io::Result<c_long> {
    // SAFETY: the requests used here have no address, and their data is a number or a pointer of the right type.
    let result = unsafe { libc::ptrace(request, tid, 0, data) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Hijacked {
    /// Stops a thread while it waits in a system call.
    pub(super) fn take(pid: u32, tid: pid_t) -> Self {
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
        ptrace(libc::PTRACE_SEIZE, tid, libc::PTRACE_O_TRACESYSGOOD as u64).unwrap();
        loop {
            ptrace(libc::PTRACE_INTERRUPT, tid, 0).unwrap();
            // Signals for the program, such as those that stop vCPUs, do not concern the test.
            while wait(tid) >> 8 != libc::SIGTRAP | libc::PTRACE_EVENT_STOP << 8 {
                ptrace(libc::PTRACE_CONT, tid, 0).unwrap();
            }
            let found = registers(tid);
            let mut instruction = [0; 2];
            memory.read_exact_at(&mut instruction, found.rip - 2).unwrap();
            // syscall
            if instruction == [0x0f, 0x05] {
                return Self { tid, memory, found };
            }
            ptrace(libc::PTRACE_CONT, tid, 0).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Places these bytes in its memory, until the next call.
    pub(super) fn place(&self, bytes: &[u8]) -> u64 {
        // Below the stack frames of its calls.
        let address = (self.found.rsp - 0x2000) & !0xf;
        self.memory.write_all_at(bytes, address).unwrap();
        address
    }

    fn set(&self, call: c_long, arguments: [u64; 4]) {
        let mut registers = self.found;
        // The interrupted call is not restarted.
        (registers.rip, registers.rax, registers.orig_rax) = (self.found.rip - 2, call as u64, u64::MAX);
        [registers.rdi, registers.rsi, registers.rdx, registers.r10] = arguments;
        (registers.r8, registers.r9) = (0, 0);
        set_registers(self.tid, &registers);
    }

    /// Makes it execute a system call.
    pub(super) fn call(&self, call: c_long, arguments: [u64; 4]) -> Outcome {
        self.set(call, arguments);
        // The entry and the exit of the call.
        for _ in 0..2 {
            ptrace(libc::PTRACE_SYSCALL, self.tid, 0).unwrap();
            assert_eq!(libc::WSTOPSIG(wait(self.tid)), libc::SIGTRAP | 0x80);
        }
        let status = fs::read_to_string(format!("/proc/{0}/status", self.tid)).unwrap();
        let pending = status.lines().find_map(|line| line.strip_prefix("SigPnd:")).unwrap().trim();
        if u64::from_str_radix(pending, 16).unwrap() & 1 << (libc::SIGSYS - 1) != 0 {
            ptrace(libc::PTRACE_CONT, self.tid, 0).unwrap();
            assert_eq!(libc::WSTOPSIG(wait(self.tid)), libc::SIGSYS);
            return Outcome::Filtered;
        }
        match registers(self.tid).rax.cast_signed() {
            error @ -4095..0 => Outcome::Fails(-error as c_int),
            result => Outcome::Made(result.cast_unsigned()),
        }
    }

    /// Makes it execute a system call, and resumes it.
    pub(super) fn end_by(self, call: c_long, arguments: [u64; 4]) {
        self.set(call, arguments);
        ptrace(libc::PTRACE_DETACH, self.tid, 0).unwrap();
        std::mem::forget(self);
    }
}

impl Drop for Hijacked {
    fn drop(&mut self) {
        set_registers(self.tid, &self.found);
        // The thread may have ended if the test has failed.
        let _ = ptrace(libc::PTRACE_DETACH, self.tid, 0);
    }
}

fn registers(tid: pid_t) -> user_regs_struct {
    // SAFETY: all zeroes is a value of this struct of numbers.
    let mut registers: user_regs_struct = unsafe { std::mem::zeroed() };
    ptrace(libc::PTRACE_GETREGS, tid, (&raw mut registers).expose_provenance() as u64).unwrap();
    registers
}

fn set_registers(tid: pid_t, registers: &user_regs_struct) {
    let _ = ptrace(libc::PTRACE_SETREGS, tid, std::ptr::from_ref(registers).expose_provenance() as u64);
}

/// Waits until the thread stops, and returns its status.
fn wait(tid: pid_t) -> c_int {
    let mut status = 0;
    // SAFETY: the status is a local variable.
    assert_eq!(unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL) }, tid);
    assert!(libc::WIFSTOPPED(status), "thread {tid} is gone: {status:#x}");
    status
}
