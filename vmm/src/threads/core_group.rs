//! Core scheduling: groups of threads that alone run on the threads of a core at the same time (Linux's
//! `Documentation/admin-guide/hw-vuln/core-scheduling.rst`).
//!
//! A new thread is in the group of the thread that starts it. No call here names a thread of another process, nor one
//! whose number is not known beforehand, so that filters can hold it to that.

use rustix::io::Errno;

/// `linux/prctl.h`: core scheduling, which the C library's headers do not have.
pub(crate) const PR_SCHED_CORE: libc::c_int = 62;
/// Makes a new group, of one thread.
pub(crate) const CREATE: libc::c_ulong = 1;
/// Moves the calling thread to the group of another.
pub(crate) const SHARE_FROM: libc::c_ulong = 3;
/// A thread, as opposed to all those of a process.
pub(crate) const OF_A_THREAD: libc::c_ulong = 0;

/// Moves the calling thread to a new group.
///
/// # Errors
///
/// EINVAL from a kernel without core scheduling, and ENODEV where a core has one thread.
pub(crate) fn create() -> Result<(), Errno> {
    call(CREATE, 0)
}

/// Moves the calling thread to the group that the process's first thread is in.
///
/// # Errors
///
/// As [`create`].
pub(crate) fn leave() -> Result<(), Errno> {
    call(SHARE_FROM, std::process::id().into())
}

fn call(command: libc::c_ulong, process: libc::c_ulong) -> Result<(), Errno> {
    const NO_PLACE: libc::c_ulong = 0;
    // SAFETY: it takes numbers alone with these commands.
    let result = unsafe { libc::prctl(PR_SCHED_CORE, command, process, OF_A_THREAD, NO_PLACE) };
    if result < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    Ok(())
}
