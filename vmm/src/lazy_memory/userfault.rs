//! userfaultfd (Linux, `Documentation/admin-guide/mm/userfaultfd.rst`): missing-page faults that this process resolves.
//!
//! Opened through `/dev/userfaultfd`, which file permissions control. The system call needs a privilege that this
//! process does not keep, or a sysctl, because faults in the kernel (KVM's) must be handled as well.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Device that creates it.
pub(crate) const DEVICE: &str = "/dev/userfaultfd";

/// `USERFAULTFD_IOC_NEW`: `_IO(0xaa, 0)`.
pub(crate) const NEW: u64 = 0xaa00;
/// `UFFDIO_API`: `_IOWR(0xaa, 0x3f, struct uffdio_api)`.
pub(crate) const API: u64 = 0xc018_aa3f;
/// `UFFDIO_REGISTER`: `_IOWR(0xaa, 0, struct uffdio_register)`.
pub(crate) const REGISTER: u64 = 0xc020_aa00;
/// `UFFDIO_UNREGISTER`: `_IOR(0xaa, 1, struct uffdio_range)`.
pub(crate) const UNREGISTER: u64 = 0x8010_aa01;
/// `UFFDIO_WAKE`: `_IOR(0xaa, 2, struct uffdio_range)`.
pub(crate) const WAKE: u64 = 0x8010_aa02;
/// `UFFDIO_COPY`: `_IOWR(0xaa, 3, struct uffdio_copy)`.
pub(crate) const COPY: u64 = 0xc028_aa03;
/// `UFFDIO_ZEROPAGE`: `_IOWR(0xaa, 4, struct uffdio_zeropage)`.
pub(crate) const ZEROPAGE: u64 = 0xc020_aa04;

const VERSION: u64 = 0xaa;
/// `UFFD_FEATURE_EVENT_REMOVE`: reports pages before they are removed.
const EVENT_REMOVE: u64 = 1 << 3;
const MODE_MISSING: u64 = 1;
const PAGEFAULT: u8 = 0x12;
const REMOVE: u8 = 0x15;
/// Length of a message, in bytes.
const MESSAGE: usize = 32;

/// Event of registered memory, with addresses of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// A thread is blocked on the page at this address.
    Fault(u64),
    /// These pages are removed: they read as zero from now on.
    Removed(Range<u64>),
}

/// A userfaultfd. Once it is dropped, missing pages read as zero.
#[derive(Debug)]
pub(crate) struct Userfault(OwnedFd);

impl Userfault {
    /// Opens a userfaultfd.
    ///
    /// # Errors
    ///
    /// Fails if the host has none, or this user has no access.
    pub(crate) fn new() -> io::Result<Self> {
        let device = File::options().read(true).write(true).open(DEVICE)?;
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the request takes a number and returns a new descriptor.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), NEW as _, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, so it has no other owner.
        let fault = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        let mut api = [VERSION, EVENT_REMOVE, 0];
        fault.request(API, &mut api)?;
        Ok(fault)
    }

    /// Registers a range of private memory without pages, which stays mapped longer than `self` lives.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    pub(crate) fn register(&self, range: &Range<u64>) -> io::Result<()> {
        self.request(REGISTER, &mut [range.start, range.end - range.start, MODE_MISSING, 0])
    }

    /// Unregisters a range: missing pages read as zero from now on.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    pub(crate) fn unregister(&self, range: &Range<u64>) -> io::Result<()> {
        self.request(UNREGISTER, &mut [range.start, range.end - range.start])
    }

    /// Wakes all threads that are blocked on these pages, which then retry.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    pub(crate) fn wake(&self, range: &Range<u64>) -> io::Result<()> {
        self.request(WAKE, &mut [range.start, range.end - range.start])
    }

    /// Fills missing pages from `to` with `bytes`, whole pages, and wakes blocked threads. Returns the number of bytes
    /// copied before an error.
    ///
    /// # Errors
    ///
    /// Fails with `EEXIST` if a page exists, and with `EAGAIN` if a message must be read first.
    pub(crate) fn copy(&self, to: u64, bytes: &[u8]) -> (u64, io::Result<()>) {
        let mut argument = [to, bytes.as_ptr() as u64, bytes.len() as u64, 0, 0];
        let result = self.request(COPY, &mut argument);
        taken(argument[4], bytes.len() as u64, result)
    }

    /// Fills missing pages with zeros and wakes blocked threads.
    ///
    /// # Errors
    ///
    /// As [`Self::copy`].
    pub(crate) fn zero(&self, range: &Range<u64>) -> (u64, io::Result<()>) {
        let len = range.end - range.start;
        let mut argument = [range.start, len, 0, 0];
        let result = self.request(ZEROPAGE, &mut argument);
        taken(argument[3], len, result)
    }

    /// Returns the next message, if any.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    pub(crate) fn message(&self) -> io::Result<Option<Message>> {
        let mut bytes = [0; MESSAGE];
        match rustix::io::read(&self.0, &mut bytes) {
            Ok(MESSAGE) => {}
            Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let words = bytes.as_chunks::<8>().0;
        let word = |n: usize| words.get(n).map_or(0, |word| u64::from_ne_bytes(*word));
        Ok(match bytes[0] {
            PAGEFAULT => Some(Message::Fault(word(2))),
            REMOVE => Some(Message::Removed(word(1)..word(2))),
            _ => None,
        })
    }

    fn request(&self, request: u64, argument: &mut [u64]) -> io::Result<()> {
        // SAFETY: each request has as long an argument as its number says, made of 64-bit fields, and it lives through
        // the call. Requests that fill pages read from a buffer that their caller holds, and write to memory of the
        // guest that has no pages there, so that no reference points into it.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, argument.as_mut_ptr()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Returns the number of bytes done, from the kernel's reply: a length, or a negative error number.
fn taken(said: u64, asked: u64, result: io::Result<()>) -> (u64, io::Result<()>) {
    match result {
        Ok(()) => (asked, Ok(())),
        Err(error) => (if said.cast_signed() > 0 { said.min(asked) } else { 0 }, Err(error)),
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
