//! An io_uring for calls on an image.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, register::Restriction, squeue, types};

use super::call::{Call, zeroing};

/// Delay before resubmitting calls for which the kernel had no memory.
const PAUSE: Duration = Duration::from_millis(10);

/// Operations that the ring allows. System call filters do not see the operations of a ring.
const CALLS: [u8; 4] = [opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];

/// An io_uring restricted to the calls of an image. Dropping it waits for all calls.
pub(crate) struct Uring {
    ring: IoUring,
    /// The number of started calls that are not complete.
    in_flight: usize,
}

impl Uring {
    /// For up to `depth` calls at a time.
    ///
    /// # Errors
    ///
    /// Fails if the kernel has no io_uring, forbids it, or is too old to restrict its operations (before 5.10).
    pub(crate) fn new(depth: u32) -> io::Result<Self> {
        let ring = IoUring::builder().setup_r_disabled().build(depth.next_power_of_two())?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !CALLS.iter().all(|code| probe.is_supported(*code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // This also rules out any further registration.
        ring.submitter().register_restrictions(&mut CALLS.map(Restriction::sqe_op))?;
        ring.submitter().register_enable_rings()?;
        Ok(Self { ring, in_flight: 0 })
    }

    /// Readable when a call is complete.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor is open as long as the ring.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// Queues `call` under `tag`. Returns an error if the ring is full; it has room for the `depth` that it was created
    /// with.
    ///
    /// # Safety
    ///
    /// The call's segments, and the memory that they name, stay valid until the call is complete: until
    /// [`Self::next_complete`] returns `tag`, or this is dropped. The memory of a read may be written, and `file` stays
    /// open.
    pub(crate) unsafe fn start(
        &mut self,
        file: BorrowedFd<'_>,
        tag: usize,
        call: Call<'_>,
    ) -> Option<io::Result<usize>> {
        let entry = match entry(types::Fd(file.as_raw_fd()), call) {
            Ok(entry) => entry.user_data(tag as u64),
            Err(error) => return Some(Err(error)),
        };
        // SAFETY: the caller keeps what the call names until it is complete, and `drop` waits for that.
        match unsafe { self.ring.submission().push(&entry) } {
            Ok(()) => {
                self.in_flight += 1;
                None
            }
            Err(_) => Some(Err(io::ErrorKind::WouldBlock.into())),
        }
    }

    /// Submits the queue to the kernel. Calls for which it has no memory stay in the queue.
    pub(crate) fn submit(&mut self) {
        if self.has_backlog() {
            // Tried again with the next turn.
            let _ = self.ring.submit();
        }
    }

    /// True if calls have not been submitted yet.
    pub(crate) fn has_backlog(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    /// A call that is complete.
    pub(crate) fn next_complete(&mut self) -> Option<(usize, io::Result<usize>)> {
        let entry = self.ring.completion().next()?;
        self.in_flight = self.in_flight.saturating_sub(1);
        // The tag is one that a caller passed in.
        let result = usize::try_from(entry.result()).map_err(|_| io::Error::from_raw_os_error(-entry.result()));
        Some((entry.user_data() as usize, result))
    }

    /// Waits until a call is complete.
    pub(crate) fn wait(&mut self) {
        if self.in_flight > 0
            && let Err(error) = self.ring.submit_and_wait(1)
            && error.kind() != io::ErrorKind::Interrupted
        {
            std::thread::sleep(PAUSE);
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        while self.in_flight > 0 {
            self.wait();
            while self.next_complete().is_some() {}
        }
    }
}

fn entry(file: types::Fd, call: Call<'_>) -> io::Result<squeue::Entry> {
    let count = |iovecs: &[libc::iovec]| u32::try_from(iovecs.len()).map_err(|_| io::ErrorKind::InvalidInput);
    Ok(match call {
        Call::Read(iovecs, offset) => {
            opcode::Readv::new(file, iovecs.as_ptr().cast(), count(iovecs)?).offset(offset).build()
        }
        Call::Write { iovecs, offset, stable } => {
            let flags = if stable { libc::RWF_DSYNC } else { 0 };
            opcode::Writev::new(file, iovecs.as_ptr().cast(), count(iovecs)?).offset(offset).rw_flags(flags).build()
        }
        Call::Sync => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        Call::Zero { range, unmap } => {
            let mode = zeroing(unmap).bits() as i32;
            opcode::Fallocate::new(file, range.len).offset(range.offset).mode(mode).build()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_makes_the_calls_of_an_image_and_takes_no_other() {
        let mut uring = Uring::new(8).unwrap();
        let file = tempfile::tempfile().unwrap();
        let fd = types::Fd(file.as_raw_fd());
        let path = c"/etc/passwd".as_ptr();
        for (entry, allowed) in [
            (opcode::Fsync::new(fd).build(), true),
            (opcode::Fallocate::new(fd, 4096).build(), true),
            (opcode::Nop::new().build(), false),
            (opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path).build(), false),
            (opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(), false),
            (opcode::Fsync::new(fd).build().flags(squeue::Flags::ASYNC), false),
        ] {
            // SAFETY: the path is static, and the file stays open.
            unsafe { uring.ring.submission().push(&entry) }.unwrap();
            uring.in_flight += 1;
            uring.wait();
            let (_, result) = uring.next_complete().unwrap();
            let refused = result.is_err_and(|error| error.raw_os_error() == Some(libc::EACCES));
            assert_eq!(refused, !allowed, "{entry:?}");
        }
        assert!(uring.ring.submitter().register_files(&[file.as_raw_fd()]).is_err());
    }
}
