//! AMX, the matrix instructions of newer CPUs. Their registers take 8 KiB of each vCPU's state, so Linux allows them
//! only in guests of a process that has requested permission (Linux's `Documentation/arch/x86/xstate.rst`).

use std::io;

/// Requests permission for a component of the XSAVE area, for guests of this process.
const ARCH_REQ_XCOMP_GUEST_PERM: libc::c_long = 0x1025;
/// The component of AMX's tiles (Intel SDM, volume 1, §13.1).
const TILE_DATA: libc::c_long = 18;

/// Requests permission from the host's kernel for AMX in guests of this process, for as long as the process runs.
///
/// # Errors
///
/// Fails if the CPU or the kernel lacks AMX, or the process has run a VM without it.
pub fn allow() -> io::Result<()> {
    // SAFETY: the call passes two numbers, and only changes the features that later vCPUs may have.
    match unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_GUEST_PERM, TILE_DATA) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
