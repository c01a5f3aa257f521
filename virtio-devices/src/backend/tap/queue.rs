//! One queue of a tap.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bitflags::bitflags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::request::{Request, call_with_ref, call_with_value};
use crate::net::{HEADER, MAX_READ};
use crate::spill::Spill;

bitflags! {
    /// Frames that are left for the receiver to complete, as `TUNSETOFFLOAD` has them.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Offloads: u32 {
        /// Without a TCP or UDP checksum.
        const CHECKSUM = libc::TUN_F_CSUM;
        /// TCP over IPv4 in one segment of up to 64 KiB.
        const TSO4 = libc::TUN_F_TSO4;
        /// TCP over IPv6 in one segment.
        const TSO6 = libc::TUN_F_TSO6;
        /// TCP segments with congestion notification.
        const ECN = libc::TUN_F_TSO_ECN;
        /// UDP datagrams in one fragment.
        const UFO = libc::TUN_F_UFO;
        /// UDP datagrams over IPv4 in one segment.
        const USO4 = libc::TUN_F_USO4;
        /// UDP datagrams over IPv6 in one segment.
        const USO6 = libc::TUN_F_USO6;
    }
}

/// One queue of a tap: frames are read from and written to its descriptor, which does not block.
#[derive(Debug)]
pub struct TapQueue {
    fd: OwnedFd,
    multi_queue: bool,
    attached: bool,
    spill: Option<Spill>,
}

impl TapQueue {
    /// A queue of a tap; `attached` says whether it is one that the tap gives frames now.
    pub(super) fn new(fd: OwnedFd, multi_queue: bool, attached: bool) -> Self {
        Self { fd, multi_queue, attached, spill: None }
    }

    /// The memory for what exceeds a driver's buffers: that of [`Self::keep_spill`], or a new one.
    ///
    /// # Errors
    ///
    /// When the host gives none.
    pub fn take_spill(&mut self) -> io::Result<Spill> {
        self.spill.take().map_or_else(|| Spill::new(MAX_READ), Ok)
    }

    /// Keeps that memory until the queue runs again.
    pub fn keep_spill(&mut self, spill: Spill) {
        self.spill = Some(spill);
    }

    /// Whether the tap gives it frames.
    pub fn attached(&self) -> bool {
        self.attached
    }

    /// Whether the tap was deleted: nothing comes or goes by the queue any more.
    pub fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::empty())];
        // The kernel says so unasked.
        poll(&mut fds, Some(&Timespec::default())).is_ok() && !fds[0].revents().is_empty()
    }

    /// Gives the queue frames, or none; the kernel drops those that it holds. The only queue of a tap is always attached.
    ///
    /// # Errors
    ///
    /// When the tap is gone.
    pub fn set_attached(&mut self, attached: bool) -> io::Result<()> {
        if !self.multi_queue || self.attached == attached {
            return Ok(());
        }
        let mut request = Request::new("");
        request.set_flags(if attached { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE } as u16);
        request.call(self.fd.as_fd(), libc::TUNSETQUEUE)?;
        self.attached = attached;
        Ok(())
    }

    /// Has the tap deliver offloaded frames of these kinds only, on all of its queues.
    ///
    /// # Errors
    ///
    /// When the kernel does not know one of them, or the tap is gone.
    pub fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        call_with_value(self.fd.as_fd(), libc::TUNSETOFFLOAD, offloads.bits().into())
    }

    /// The offloads that this kernel knows: UDP segmentation came with Linux 6.2. None is in use after that.
    pub(super) fn known_offloads(&self) -> io::Result<Offloads> {
        let all = Offloads::all();
        let without_uso = all - Offloads::USO4 - Offloads::USO6;
        let known = [all, without_uso, Offloads::CHECKSUM]
            .into_iter()
            .find(|offloads| self.set_offloads(*offloads).is_ok())
            .unwrap_or(Offloads::empty());
        self.set_offloads(Offloads::empty())?;
        Ok(known)
    }

    /// Has frames come with a header of 12 bytes.
    pub(super) fn set_header_length(&self) -> io::Result<()> {
        call_with_ref(self.fd.as_fd(), libc::TUNSETVNETHDRSZ, &(HEADER as libc::c_int))
    }

    /// Reads and drops up to `limit` frames, and returns their number.
    pub(crate) fn discard(&self, limit: u32) -> u64 {
        let mut frame = [0; 64];
        (0..limit).take_while(|_| matches!(rustix::io::read(&self.fd, &mut frame), Ok(1..))).count() as u64
    }
}

impl AsFd for TapQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Attaches `fd` to the tap of `request`, which then has its name.
pub(super) fn attach(fd: BorrowedFd<'_>, request: &mut Request) -> io::Result<()> {
    request.call(fd, libc::TUNSETIFF)
}

/// The name and flags of the tap that `fd` is a queue of.
pub(super) fn interface(fd: BorrowedFd<'_>) -> io::Result<Request> {
    let mut request = Request::new("");
    request.call(fd, libc::TUNGETIFF)?;
    Ok(request)
}
