//! A queue of a tap.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, major};

use super::ioctl::{self, Ifreq, IfreqIoctl};
use crate::frames::net_protocol::header::HEADER;
use crate::frames::net_protocol::{MAX_READ, Offloads};
use crate::frames::spill::Spill;

/// The most frames that are dropped because they arrived before the driver was ready, or the link was down: a tap holds
/// 1,000 by default.
const MAX_STALE: usize = 4096;

/// The major number of `/dev/net/tun`, through which all queues are opened except those of macvtaps.
const MISC: u32 = 10;
/// The flags of a macvtap that can be changed.
const IFF_FEATURES: u16 = (libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE) as u16;

/// The present tap of a name, also after it has replaced a deleted one.
pub(super) type Passable = Arc<Mutex<Present>>;

/// See [`Passable`].
#[derive(Debug, Clone, Default)]
pub(super) struct Present {
    /// The queues, which are not kept open.
    pub queues: Vec<Weak<OwnedFd>>,
    /// The tap was made by this program, and ends with it.
    pub made: bool,
}

/// A queue of a tap: frames are read from and written to its descriptor, which does not block.
#[derive(Debug)]
pub struct TapQueue {
    fd: Arc<OwnedFd>,
    multi_queue: bool,
    attached: bool,
    /// Another program may have attached or detached it.
    is_others: bool,
    /// The queue belongs to a macvtap.
    is_macvtap: bool,
    /// The queue does not accept frames while the interface is down: that of a macvtap drops them.
    shows_down: bool,
    /// The tap is known to be deleted.
    lost: bool,
    spill: Option<Spill>,
    /// The link changes that all of its frames are known to follow.
    link_changes: u64,
}

impl TapQueue {
    /// A queue of a tap; `attached` is true if it gets frames now.
    pub(super) fn new(fd: OwnedFd, multi_queue: bool, attached: bool) -> Self {
        let device = device_major(&fd);
        let (is_macvtap, shows_down) = (device.is_some_and(|major| major != MISC), device == Some(MISC));
        let fd = Arc::new(fd);
        // A macvtap does not report which of its queues get frames.
        let is_others = is_macvtap;
        let (lost, spill, link_changes) = (false, None, 0);
        Self { fd, multi_queue, attached, is_others, is_macvtap, shows_down, lost, spill, link_changes }
    }

    /// A queue that another program uses.
    pub(super) fn of_other(fd: OwnedFd, multi_queue: bool) -> Self {
        Self { is_others: true, ..Self::new(fd, multi_queue, !multi_queue) }
    }

    /// The descriptor, which the result keeps open.
    pub(crate) fn shared(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.fd)
    }

    /// The descriptor, which this does not keep open.
    pub(super) fn descriptor(&self) -> Weak<OwnedFd> {
        Arc::downgrade(&self.fd)
    }

    /// Takes the spill area, that of [`Self::keep_spill`] or a new one.
    ///
    /// # Errors
    ///
    /// Fails if the host has no memory.
    pub fn take_spill(&mut self) -> io::Result<Spill> {
        self.spill.take().map_or_else(|| Spill::new(MAX_READ), Ok)
    }

    /// Keeps the spill area until the queue runs again.
    pub fn keep_spill(&mut self, spill: Spill) {
        self.spill = Some(spill);
    }

    /// Records the number of link changes. Returns true if it differs from the last call's, even if another worker made
    /// that call: frames that the tap holds may be older than the change.
    pub(crate) fn follow_link(&mut self, changes: u64) -> bool {
        std::mem::replace(&mut self.link_changes, changes) != changes
    }

    /// True if the queue gets frames.
    pub fn attached(&self) -> bool {
        self.attached && !self.lost
    }

    /// Records that the tap was deleted, so that its descriptor, which stays readable, is no longer read.
    pub(crate) fn lose(&mut self) {
        self.lost = true;
    }

    /// True if [`Self::lose`] was called.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    /// Replaces this queue, whose tap was deleted, by `new`.
    pub(crate) fn replace_by(&mut self, new: Self) {
        let spill = self.spill.take();
        *self = Self { spill, ..new };
    }

    /// True if the tap was deleted.
    pub fn is_gone(&self) -> bool {
        // A deleted macvtap reports no event: it drops what is sent, and never has a frame.
        if self.is_macvtap && interface(self.fd.as_fd()).is_err() {
            return true;
        }
        is_deleted(self.fd.as_fd())
    }

    /// True if the queue accepts a frame now: not while the interface is down, or the buffer limit of its owner is
    /// reached.
    pub fn is_writable(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::OUT)];
        poll(&mut fds, Some(&Timespec::default())).is_ok() && fds[0].revents() == PollFlags::OUT
    }

    /// True if the interface is down, or the buffer limit of its owner is reached. False if that is not known: for a
    /// macvtap, and a queue that gets no frames.
    pub(crate) fn seems_down(&self) -> bool {
        self.shows_down && self.attached() && !self.is_writable()
    }

    /// Attaches or detaches the queue. The kernel then drops the frames it holds. A single queue is always attached.
    ///
    /// # Errors
    ///
    /// Fails if the tap was deleted.
    pub fn set_attached(&mut self, attached: bool) -> io::Result<()> {
        if !self.multi_queue || self.attached == attached && !self.is_others {
            return Ok(());
        }
        let mut request = Ifreq::new("");
        request.set_flags(if attached { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE } as u16);
        match request.call(self.fd.as_fd(), IfreqIoctl::SET_QUEUE) {
            // The queue already is in that state.
            Err(error) if self.is_others && error.raw_os_error() == Some(libc::EINVAL) => {}
            result => result?,
        }
        (self.attached, self.is_others) = (attached, false);
        Ok(())
    }

    /// Restricts the offloaded frames that the tap delivers to `offloads`, for all of its queues.
    ///
    /// # Errors
    ///
    /// Fails if the kernel does not support one of them, or the tap was deleted.
    pub fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        ioctl::set_offloads(self.fd.as_fd(), offloads.bits())
    }

    /// The offloads that this kernel supports: UDP segmentation came with Linux 6.2. Leaves all offloads off.
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

    /// Sets the header length to 12 bytes.
    pub(super) fn set_header_length(&self) -> io::Result<()> {
        ioctl::set_header_length(self.fd.as_fd(), HEADER as libc::c_int)
    }

    /// Sends these frames, each with its header, as far as the tap accepts them at once.
    pub(crate) fn announce(&self, frames: &[Vec<u8>]) {
        // A frame that the tap does not accept is announced again, or the network learns the address from other frames.
        for frame in frames {
            let _ = rustix::io::write(&self.fd, frame);
        }
    }

    /// Drops the frames that the tap holds, and returns their number.
    pub(crate) fn discard_stale(&self) -> u64 {
        let mut frame = [0; 64];
        (0..MAX_STALE).take_while(|_| matches!(rustix::io::read(self.fd.as_fd(), &mut frame), Ok(1..))).count() as u64
    }
}

impl AsFd for TapQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// True if the tap of the queue `fd` was deleted; always false for a macvtap.
pub(super) fn is_deleted(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::empty())];
    // The kernel reports an error event without being asked for one.
    poll(&mut fds, Some(&Timespec::default())).is_ok() && !fds[0].revents().is_empty()
}

/// Attaches `fd` to the tap of `request`, which then has its name.
pub(super) fn attach(fd: BorrowedFd<'_>, request: &mut Ifreq) -> io::Result<()> {
    request.call(fd, IfreqIoctl::ATTACH)
}

/// The name and flags of the tap to which the queue `fd` belongs. Sets missing flags of `needed` on a macvtap: opened
/// through its device file, it lacks the multi-queue flag, and the opener need not know that.
pub(super) fn with_flags(fd: BorrowedFd<'_>, needed: u16) -> io::Result<Ifreq> {
    let mut request = interface(fd)?;
    if request.flags() & needed != needed && is_macvtap(&fd) {
        request.set_flags(request.flags() & IFF_FEATURES | needed);
        request.call(fd, IfreqIoctl::ATTACH)?;
        request = interface(fd)?;
    }
    Ok(request)
}

/// True for a queue of a macvtap, which has a device file of its own instead of the common one.
fn is_macvtap(fd: &impl AsFd) -> bool {
    device_major(fd).is_some_and(|major| major != MISC)
}

/// The major number of the device file that `fd` was opened through; `None` for other descriptors.
fn device_major(fd: &impl AsFd) -> Option<u32> {
    let stat = rustix::fs::fstat(fd).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice).then(|| major(stat.st_rdev))
}

/// The name and flags of the tap to which the queue `fd` belongs.
pub(super) fn interface(fd: BorrowedFd<'_>) -> io::Result<Ifreq> {
    let mut request = Ifreq::new("");
    request.call(fd, IfreqIoctl::GET_INTERFACE)?;
    Ok(request)
}
