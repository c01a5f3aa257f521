//! A Linux tap interface: one file descriptor per queue, frames with a virtio header of 12 bytes.
//!
//! A tap that is created here vanishes when its descriptors are closed. An existing tap keeps its owner and its
//! settings, except those that the configuration changes, so a prepared tap needs no privilege. A tap outlives device
//! resets and guest reboots.

mod error;
mod ioctl;
mod link;
mod name;
mod passed;
mod queue;
mod spec;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::frames::net_protocol::Offloads;
pub use error::TapError;
use ioctl::Ifreq;
use link::Link;
pub use link::is_network_mask;
pub use name::{InterfaceNameError, check_interface_name};
pub use passed::{PassedTap, TapHandle};
pub use queue::TapQueue;
use queue::{Passable, Present};
pub use spec::TapSpec;

/// The name pattern of taps created without a name; the kernel fills in the first free number.
const PATTERN: &str = "vmtap%d";
/// The most queues that Linux attaches to one tap (`MAX_TAP_QUEUES`).
const MAX_QUEUES: u16 = 256;

/// The flags of every tap: Ethernet frames, no packet information, a virtio header.
const FLAGS: u16 = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as u16;
const MULTI_QUEUE: u16 = libc::IFF_MULTI_QUEUE as u16;
/// The flag of a queue that gets no frames.
const DETACHED: u16 = libc::IFF_DETACH_QUEUE as u16;

/// An open tap.
#[derive(Debug)]
pub struct Tap {
    name: String,
    mtu: Option<u16>,
    offloads: Offloads,
    queues: Vec<Arc<Mutex<TapQueue>>>,
    /// The queues of a tap that replaces this one.
    successor: Arc<Successor>,
    /// The settings that it was opened with; `None` if it was passed in.
    spec: Option<TapSpec>,
}

/// The queues of a tap that replaces a deleted one, until the workers of the deleted one take them.
#[derive(Debug, Default)]
pub(crate) struct Successor {
    queues: Mutex<Vec<Option<TapQueue>>>,
    /// The queues of the present tap, for other programs.
    passable: Passable,
}

impl Successor {
    /// No successor yet of a tap with these queues, which nothing uses yet.
    fn of(queues: &[Arc<Mutex<TapQueue>>]) -> Arc<Self> {
        let queues = queues.iter().map(|queue| queue.lock().descriptor()).collect();
        let passable = Arc::new(Mutex::new(Present { queues, made: false }));
        Arc::new(Self { queues: Mutex::default(), passable })
    }

    /// The queues of the present tap, for other programs.
    fn passable(&self) -> &Passable {
        &self.passable
    }

    /// Makes the queues of `tap` those that are passed to other programs.
    fn pass(&self, tap: &Tap) {
        let present = tap.successor.passable.lock().clone();
        *self.passable.lock() = present;
    }

    /// Replaces a tap by `tap`, which has as many queues.
    pub(crate) fn give(&self, tap: Tap) {
        self.pass(&tap);
        // Nothing else has its queues yet.
        let queues = tap.queues.into_iter().map(|queue| Arc::into_inner(queue).map(Mutex::into_inner));
        *self.queues.lock() = queues.collect();
    }

    /// The new queue of this index, once.
    pub(crate) fn take(&self, index: u16) -> Option<TapQueue> {
        self.queues.lock().get_mut(usize::from(index))?.take()
    }
}

impl Tap {
    /// Opens the tap, creating it if necessary, and brings it up.
    ///
    /// # Errors
    ///
    /// Fails with the remedy in one line; see [`TapError`]. No new tap is left behind.
    pub fn open(spec: &TapSpec) -> Result<Self, TapError> {
        let wanted = spec.name.as_deref().unwrap_or(PATTERN);
        if spec.name.is_some() {
            check_interface_name(wanted).map_err(|error| TapError::Name { name: wanted.into(), error })?;
        }
        if spec.queue_pairs == 0 || spec.queue_pairs > MAX_QUEUES {
            return Err(TapError::Queues { name: wanted.into(), queues: spec.queue_pairs.into() });
        }
        let exists = spec.name.is_some() && Link::new(wanted).map_err(TapError::Socket)?.exists();
        let (name, fds) = attach_all(wanted, exists, spec.queue_pairs)?;
        let link = Link::new(&name).map_err(TapError::Socket)?;
        link.configure(spec)?;
        let mtu = link.mtu().ok();
        let spec = TapSpec { name: Some(name.clone()), ..spec.clone() };
        let tap = Self::set_up(name, mtu, fds, spec.queue_pairs > 1)?;
        tap.successor.passable.lock().made = !exists;
        Ok(Self { spec: Some(spec), ..tap })
    }

    /// True if the tap was deleted. Waits for a worker that owns its first queue.
    pub fn is_gone(&self) -> bool {
        self.queues.first().is_some_and(|queue| queue.lock().is_gone())
    }

    /// True if the tap was deleted. False while a worker owns its first queue, since that worker detects it.
    pub(crate) fn is_gone_unnoticed(&self) -> bool {
        self.queues.first().and_then(|queue| queue.try_lock()).is_some_and(|queue| queue.is_gone())
    }

    /// True if the host has set the interface down; `None` while a worker owns its first queue, since that worker
    /// detects it.
    pub(crate) fn is_down_unnoticed(&self) -> Option<bool> {
        self.queues.first().and_then(|queue| queue.try_lock()).map(|queue| queue.seems_down())
    }

    /// The search for a new tap of the name of this one, with the same settings.
    pub(crate) fn search(&self) -> TapSearch {
        // The driver knows this MTU.
        let spec = self.spec.clone().map(|spec| TapSpec { mtu: self.mtu, ..spec });
        TapSearch { name: self.name.clone(), spec }
    }

    /// Opens a new tap with the name of this one, which was deleted, as [`TapSearch::open`] does.
    ///
    /// # Errors
    ///
    /// [`TapError::Gone`] if there is none, or this one was passed in; otherwise as [`Self::open`].
    pub fn reopen(&self) -> Result<Self, TapError> {
        self.search().open()
    }

    /// Returns `new` in place of this tap, which was deleted: handles of this one are handles of it.
    pub(crate) fn replaced_by(&self, new: Self) -> Self {
        self.successor.pass(&new);
        Self { successor: Arc::clone(&self.successor), ..new }
    }

    /// The queues of a tap that replaces this one.
    pub(crate) fn successor(&self) -> &Arc<Successor> {
        &self.successor
    }

    /// Takes a tap that was opened and set up elsewhere, one descriptor per queue.
    ///
    /// # Errors
    ///
    /// [`TapError::NotATap`], [`TapError::WrongFlags`], [`TapError::DifferentTaps`] or [`TapError::Request`] if these
    /// are not the queues of one tap with the flags that this device needs.
    pub fn from_fds(fds: Vec<OwnedFd>) -> Result<Self, TapError> {
        let count = fds.len();
        let mut name: Option<String> = None;
        for (index, fd) in fds.iter().enumerate() {
            let needed = if count > 1 { FLAGS | MULTI_QUEUE } else { FLAGS };
            let request = queue::with_flags(fd.as_fd(), needed);
            let request = request.map_err(|source| TapError::NotATap { index, source })?;
            if request.flags() & needed != needed {
                return Err(TapError::WrongFlags { name: request.name(), multi_queue: count > 1 });
            }
            match &name {
                Some(first) if *first != request.name() => {
                    return Err(TapError::DifferentTaps { first: first.clone(), other: request.name() });
                }
                Some(_) => {}
                None => name = Some(request.name()),
            }
            let flags = rustix::fs::fcntl_getfl(fd).map_err(|source| request_error(&request.name(), source))?;
            rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)
                .map_err(|source| request_error(&request.name(), source))?;
        }
        let name = name.ok_or(TapError::Queues { name: "fd=[]".into(), queues: 0 })?;
        // It may be in another network namespace, so a tap of the same name here may be a different one.
        Self::set_up(name, None, fds, count > 1)
    }

    /// The steps that need no privilege: header length, known offloads, and one queue attached.
    fn set_up(name: String, mtu: Option<u16>, fds: Vec<OwnedFd>, multi_queue: bool) -> Result<Self, TapError> {
        let wrong = |source: io::Error| TapError::Request { name: name.clone(), source };
        let mut offloads = Offloads::all();
        let mut queues = Vec::with_capacity(fds.len());
        for (index, fd) in fds.into_iter().enumerate() {
            let attached = queue::interface(fd.as_fd()).map_err(wrong)?.flags() & DETACHED == 0;
            let mut queue = TapQueue::new(fd, multi_queue, attached);
            queue.set_header_length().map_err(wrong)?;
            queue.set_attached(index == 0).map_err(wrong)?;
            if index == 0 {
                offloads = queue.known_offloads().map_err(wrong)?;
            }
            queues.push(queue);
        }
        let queues: Vec<_> = queues.into_iter().map(|queue| Arc::new(Mutex::new(queue))).collect();
        let successor = Successor::of(&queues);
        Ok(Self { name, mtu, offloads, queues, successor, spec: None })
    }

    /// The name of the interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The MTU in bytes when the tap was opened; `None` if it was passed in.
    pub fn mtu(&self) -> Option<u16> {
        self.mtu
    }

    /// The offloads that the tap supports.
    pub fn offloads(&self) -> Offloads {
        self.offloads
    }

    /// The queues. The worker of a queue pair locks its queue for as long as it runs.
    pub fn queues(&self) -> &[Arc<Mutex<TapQueue>>] {
        &self.queues
    }

    /// A substitute over sockets that keep message boundaries, or other descriptors that transfer a frame per call.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn over_sockets(sockets: Vec<OwnedFd>) -> Self {
        let queues: Vec<_> =
            sockets.into_iter().map(|fd| Arc::new(Mutex::new(TapQueue::new(fd, false, true)))).collect();
        let (name, offloads, successor) = ("sockets".into(), Offloads::all(), Successor::of(&queues));
        Self { name, mtu: Some(1500), offloads, queues, successor, spec: None }
    }
}

/// The name and the settings of a tap that was deleted.
#[derive(Debug, Clone)]
pub(crate) struct TapSearch {
    /// The name.
    pub name: String,
    /// The settings for [`Tap::open`]; `None` for a tap that was passed in, which has no replacement.
    pub spec: Option<TapSpec>,
}

impl TapSearch {
    /// Opens the new tap. It must exist already: the deletion of the old one was deliberate.
    ///
    /// # Errors
    ///
    /// [`TapError::Gone`] if there is none, or the old one was passed in; otherwise as [`Tap::open`].
    pub(crate) fn open(&self) -> Result<Tap, TapError> {
        let gone = || TapError::Gone(self.name.clone());
        let spec = self.spec.as_ref().ok_or_else(gone)?;
        if !Link::new(&self.name).map_err(TapError::Socket)?.exists() {
            return Err(gone());
        }
        Tap::open(spec)
    }
}

/// The name of the tap to which the queue `fd` belongs.
///
/// # Errors
///
/// Fails if `fd` is not a queue of a tap.
pub fn tap_name(fd: BorrowedFd<'_>) -> io::Result<String> {
    Ok(queue::interface(fd)?.name())
}

fn request_error(name: &str, source: Errno) -> TapError {
    TapError::Request { name: name.into(), source: source.into() }
}

/// Opens `queues` descriptors of one tap. A failure closes them all, which removes a tap that was created.
fn attach_all(wanted: &str, exists: bool, queues: u16) -> Result<(String, Vec<OwnedFd>), TapError> {
    let flags = if queues > 1 { FLAGS | MULTI_QUEUE } else { FLAGS };
    if exists && queues > 1 && Link::new(wanted).and_then(|link| link.has_carrier()).unwrap_or(false) {
        // A single-queue tap refuses a second user. A multi-queue tap would split its frames between two VMs.
        return Err(TapError::InUse(wanted.into()));
    }
    let mut name = wanted.to_owned();
    let mut fds = Vec::with_capacity(queues.into());
    for _ in 0..queues {
        let fd = open_tun()?;
        let mut request = Ifreq::new(&name);
        request.set_flags(flags);
        queue::attach(fd.as_fd(), &mut request).map_err(|source| explain(&name, exists, flags, source))?;
        name = request.name();
        fds.push(fd);
    }
    Ok((name, fds))
}

fn open_tun() -> Result<OwnedFd, TapError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(tun_error)
}

fn tun_error(errno: Errno) -> TapError {
    match errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => TapError::NoTunDevice,
        Errno::ACCESS | Errno::PERM => TapError::NoRightToTunDevice,
        other => TapError::TunDevice(other.into()),
    }
}

/// The reason why a queue could not be attached.
fn explain(name: &str, exists: bool, flags: u16, source: io::Error) -> TapError {
    let name = name.to_owned();
    match source.raw_os_error() {
        Some(libc::EBUSY) => TapError::InUse(name),
        Some(libc::EPERM) if exists => TapError::NotOurs(name),
        Some(libc::EPERM) => TapError::NoRightToCreate(name),
        Some(libc::EINVAL) if exists => {
            // The kernel returns no reason, so try the other kind.
            let other = open_tun().ok().is_some_and(|fd| {
                let mut request = Ifreq::new(&name);
                request.set_flags(flags ^ MULTI_QUEUE);
                queue::attach(fd.as_fd(), &mut request).is_ok()
            });
            match (other, flags & MULTI_QUEUE != 0) {
                (true, true) => TapError::IsSingleQueue(name),
                (true, false) => TapError::IsMultiQueue(name),
                (false, _) => TapError::NotATapInterface(name),
            }
        }
        _ => TapError::Attach { name, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, queue_pairs: u16) -> TapSpec {
        TapSpec { name: Some(name.into()), ip: None, mask: None, host_mac: None, mtu: None, queue_pairs }
    }

    #[test]
    fn an_invalid_interface_name_is_refused_before_any_open() {
        for name in ["", "a-name-of-16-byt", "a/b", "a b", "tap%d", "a:1", ".", "..", "tap\n"] {
            assert!(matches!(Tap::open(&spec(name, 1)), Err(TapError::Name { .. })), "{name:?}");
        }
        assert!(check_interface_name("a-name-of-15-by").is_ok());
    }

    #[test]
    fn no_queue_and_too_many_queues_are_refused() {
        for queues in [0, 257] {
            assert!(matches!(Tap::open(&spec("tap0", queues)), Err(TapError::Queues { .. })), "{queues}");
        }
        assert!(matches!(Tap::from_fds(Vec::new()), Err(TapError::Queues { .. })));
    }

    #[test]
    fn a_tun_driver_that_is_missing_or_closed_to_us_is_told_apart() {
        assert!(tun_error(Errno::NOENT).to_string().contains("modprobe tun"));
        assert!(tun_error(Errno::ACCESS).to_string().contains("read and write access"));
        assert!(tun_error(Errno::MFILE).to_string().starts_with("cannot open /dev/net/tun: Too many open files"));
    }

    #[test]
    fn a_descriptor_that_is_no_tap_is_refused_by_its_position() {
        let file = tempfile::tempfile().unwrap();
        let error = Tap::from_fds(vec![file.into()]).unwrap_err();
        assert!(matches!(error, TapError::NotATap { index: 0, .. }), "{error}");
    }
}
