//! Core scheduling: only threads of one group run on the threads of a core at the same time (Linux's
//! `Documentation/admin-guide/hw-vuln/core-scheduling.rst`).
//!
//! A new thread is in its parent's group. Calls here name only this process's first thread or the caller, so that
//! filters can restrict them to that.

use rustix::io::Errno;

/// `linux/prctl.h`: core scheduling. Missing in the C library's headers.
pub(crate) const PR_SCHED_CORE: libc::c_int = 62;
/// Creates a group of the calling thread.
pub(crate) const CREATE: libc::c_ulong = 1;
/// Moves the calling thread to another thread's group.
pub(crate) const SHARE_FROM: libc::c_ulong = 3;
/// Scope of a single thread, as opposed to a process.
pub(crate) const OF_A_THREAD: libc::c_ulong = 0;

/// Moves the calling thread to a new group.
///
/// # Errors
///
/// Fails with EINVAL if the kernel has no core scheduling, and with ENODEV if cores have one thread.
pub(crate) fn create() -> Result<(), Errno> {
    call(CREATE, 0)
}

/// Moves the calling thread to the group of the process's first thread.
///
/// # Errors
///
/// As [`create`].
pub(crate) fn leave() -> Result<(), Errno> {
    call(SHARE_FROM, std::process::id().into())
}

fn call(command: libc::c_ulong, process: libc::c_ulong) -> Result<(), Errno> {
    const NO_PLACE: libc::c_ulong = 0;
    // SAFETY: with these commands the call takes only numbers.
    let result = unsafe { libc::prctl(PR_SCHED_CORE, command, process, OF_A_THREAD, NO_PLACE) };
    if result < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    Ok(())
}
