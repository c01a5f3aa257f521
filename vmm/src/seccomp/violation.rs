//! Log message of a system call that a thread may not make.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use libc::{c_long, siginfo_t, ucontext_t};

use super::names;

/// Code of a SIGSYS that a filter's action sent (`asm-generic/siginfo.h`).
const SYS_SECCOMP: c_int = 1;
/// A call that no kernel has had for decades and no filter allows.
const NO_CALL: c_long = libc::SYS_afs_syscall;

/// A line built without allocation, as a signal handler requires.
struct Line {
    bytes: [u8; 320],
    len: usize,
}

impl Line {
    const fn new() -> Self {
        Self { bytes: [0; 320], len: 0 }
    }

    /// Adds `text`, as far as there is room.
    fn add(&mut self, text: &[u8]) {
        for (to, from) in self.bytes.iter_mut().skip(self.len).zip(text) {
            *to = *from;
            self.len += 1;
        }
    }

    /// Adds a number in this base.
    fn add_number(&mut self, mut number: u64, base: u64) {
        let mut digits = [0; 20];
        let mut first = digits.len();
        for digit in digits.iter_mut().rev() {
            *digit = *b"0123456789abcdef".get((number % base) as usize).unwrap_or(&b'?');
            number /= base;
            first -= 1;
            if number == 0 {
                break;
            }
        }
        self.add(digits.get(first..).unwrap_or_default());
    }

    fn text(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

/// The line about a call, by a thread of this name.
fn line(thread: &[u8], call: c_long, arguments: [u64; 3]) -> Line {
    let mut line = Line::new();
    line.add(b"cloud-hypervisor: the thread ");
    line.add(thread);
    line.add(b" is not allowed the system call ");
    line.add(names::name(call).unwrap_or("without a name").as_bytes());
    line.add(b" (");
    line.add_number(call.cast_unsigned(), 10);
    line.add(b", with ");
    for (number, argument) in arguments.into_iter().enumerate() {
        line.add(if number == 0 { b"0x" } else { b", 0x" });
        line.add_number(argument, 16);
    }
    line.add(b"); please report this, unless the VM is under attack; --seccomp false allows all calls\n");
    line
}

/// Installs a handler that reports each call that a filter stops on standard error. The program then ends with SIGSYS.
///
/// # Errors
///
/// Fails if the handler cannot be installed.
pub(super) fn report() -> io::Result<()> {
    // SAFETY: all zeroes is a valid value of this struct, with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_violation as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler has the form that SA_SIGINFO requires, and only does what a signal handler may.
    if unsafe { libc::sigaction(libc::SIGSYS, &raw const action, ptr::null_mut()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_violation(_signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes both, and they live until the handler returns. A signal's cause can always be read.
    let (cause, registers) = unsafe { ((*info).si_code, (*context.cast::<ucontext_t>()).uc_mcontext.gregs) };
    if cause == SYS_SECCOMP {
        let register = |register: c_int| registers.get(register as usize).copied().unwrap_or(-1);
        let arguments = [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX].map(|number| register(number).cast_unsigned());
        let mut name = MaybeUninit::<[u8; 16]>::zeroed();
        // SAFETY: the kernel writes 16 bytes, the last of them a zero.
        unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        // SAFETY: initialized to zeroes, then written by the kernel.
        let name = unsafe { name.assume_init() };
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        let line = line(name.to_bytes(), register(libc::REG_RAX), arguments);
        // SAFETY: the text is readable for its length.
        unsafe { libc::write(libc::STDERR_FILENO, line.text().as_ptr().cast(), line.text().len()) };
    }
    // This signal is blocked in its handler. A filter's signal that is blocked ends the process with its default
    // action, whatever handlers there are.
    // SAFETY: the kernel does nothing for this call.
    unsafe { libc::syscall(NO_CALL) };
    // Without filters, another process has sent the signal.
    // SAFETY: it takes no pointers and does not return.
    unsafe { libc::_exit(128 + libc::SIGSYS) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_names_the_thread_the_call_and_its_arguments() {
        let text =
            |thread: &[u8], call, arguments| String::from_utf8(line(thread, call, arguments).text().into()).unwrap();
        let said = text(b"vcpu0", libc::SYS_ioctl, [12, 0xae80, u64::MAX]);
        let expected = "cloud-hypervisor: the thread vcpu0 is not allowed the system call ioctl (16, with 0xc, 0xae80, \
                        0xffffffffffffffff); please report this, unless the VM is under attack; --seccomp false \
                        allows all calls\n";
        assert_eq!(said, expected);
        let said = text(b"", 9999, [0; 3]);
        assert!(said.contains(" without a name (9999, with 0x0, 0x0, 0x0); "), "{said}");
    }

    #[test]
    fn no_line_is_too_long() {
        assert!(line(&[b'x'; 15], c_long::MAX, [u64::MAX; 3]).text().ends_with(b"\n"));
    }
}
