//! AMX, the matrix instructions of newer CPUs. Their registers take 8 KiB of each vCPU's state, so Linux gives them
//! only to guests of a process that has asked (Linux's `Documentation/arch/x86/xstate.rst`).

use std::io;

/// Asks for a component of the XSAVE area, for guests of this process.
const ARCH_REQ_XCOMP_GUEST_PERM: libc::c_long = 0x1025;
/// The component of AMX's tiles (Intel SDM, volume 1, §13.1).
const TILE_DATA: libc::c_long = 18;

/// Asks the host's kernel for AMX in guests of this process. It stays allowed as long as the process runs.
///
/// # Errors
///
/// The CPU or the kernel does not have it, or the process has run a VM without it.
pub(crate) fn allow() -> io::Result<()> {
    // SAFETY: the call passes two numbers, and changes nothing but what later vCPUs may have.
    match unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_GUEST_PERM, TILE_DATA) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
