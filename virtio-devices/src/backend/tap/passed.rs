//! Taps whose descriptors pass from one program to another.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::queue::{Passable, TapQueue, interface, is_deleted};
use super::{FLAGS, MULTI_QUEUE, Successor, Tap, TapError, TapSpec};
use crate::frames::net_protocol::Offloads;

/// A handle to an open tap, from which another program can take it over. It does not keep the tap open.
#[derive(Debug, Clone)]
pub struct TapHandle {
    mtu: Option<u16>,
    offloads: Offloads,
    present: Passable,
}

/// A tap of another program, which may still use it.
#[derive(Debug)]
pub struct PassedTap {
    /// The MTU in bytes when it was opened; `None` if it had been passed in.
    pub mtu: Option<u16>,
    /// The offloads that the tap supports (`TUNSETOFFLOAD`).
    pub offloads: u32,
    /// The queues.
    pub queues: Vec<OwnedFd>,
}

impl TapHandle {
    /// Duplicates the tap's descriptors.
    ///
    /// # Errors
    ///
    /// Fails if the tap is closed or was deleted, or there is no descriptor left.
    pub fn pass(&self) -> io::Result<PassedTap> {
        let closed = || io::Error::other("it was deleted since it was opened");
        let copy = |queue: &Weak<OwnedFd>| {
            let queue = queue.upgrade().ok_or_else(closed)?;
            if is_deleted(queue.as_fd()) {
                return Err(closed());
            }
            queue.as_fd().try_clone_to_owned()
        };
        let queues = self.present.lock().queues.iter().map(copy).collect::<io::Result<_>>()?;
        Ok(PassedTap { mtu: self.mtu, offloads: self.offloads.bits(), queues })
    }

    /// True if this program made the tap: there was none of its name.
    pub fn was_made(&self) -> bool {
        self.present.lock().made
    }
}

impl Tap {
    /// A handle for passing the tap to another program, or the one that replaces it after its deletion.
    pub fn handle(&self) -> TapHandle {
        TapHandle { mtu: self.mtu, offloads: self.offloads, present: Arc::clone(self.successor.passable()) }
    }

    /// Takes over the tap of another program. Changes nothing of it before its queues run. `spec` has the settings for
    /// opening it again if it is deleted and created again.
    ///
    /// # Errors
    ///
    /// [`TapError::NotATap`], [`TapError::WrongFlags`] or [`TapError::Queues`] if these are not the queues of a tap
    /// with the flags that this device needs.
    pub fn passed(spec: &TapSpec, passed: &PassedTap) -> Result<Self, TapError> {
        let count = passed.queues.len();
        let (mut name, mut queues) = (String::new(), Vec::new());
        for (index, fd) in passed.queues.iter().enumerate() {
            let wrong = |source| TapError::NotATap { index, source };
            let request = interface(fd.as_fd()).map_err(wrong)?;
            let needed = if count > 1 { FLAGS | MULTI_QUEUE } else { FLAGS };
            if request.flags() & needed != needed {
                return Err(TapError::WrongFlags { name: request.name(), multi_queue: count > 1 });
            }
            name = request.name();
            let queue = TapQueue::of_other(fd.as_fd().try_clone_to_owned().map_err(wrong)?, count > 1);
            queues.push(Arc::new(Mutex::new(queue)));
        }
        if count != usize::from(spec.queue_pairs) {
            return Err(TapError::Queues { name, queues: count });
        }
        // A tap that had been passed in cannot be opened by its name.
        let spec = passed.mtu.map(|_| TapSpec { name: Some(name.clone()), ..spec.clone() });
        let offloads = Offloads::from_bits_truncate(passed.offloads);
        let successor = Successor::of(&queues);
        Ok(Self { name, mtu: passed.mtu, offloads, queues, successor, spec })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(queue_pairs: u16) -> TapSpec {
        TapSpec { name: None, ip: None, mask: None, host_mac: None, mtu: None, queue_pairs }
    }

    #[test]
    fn a_passed_tap_keeps_all_its_queues_when_the_first_holder_ends() {
        crate::net::testing::namespace::enter();
        for queue_pairs in [1, 4] {
            let tap = Tap::open(&spec(queue_pairs)).unwrap();
            let handle = tap.handle();
            let other = Tap::passed(&spec(queue_pairs), &handle.pass().unwrap()).unwrap();
            assert_eq!((other.name(), other.mtu(), other.offloads()), (tap.name(), tap.mtu(), tap.offloads()));
            assert!(Tap::passed(&spec(queue_pairs + 1), &handle.pass().unwrap()).is_err());
            // The first program stops its queues, without the other's knowledge, and closes them.
            for queue in tap.queues().iter().skip(1) {
                let mut queue = queue.lock();
                queue.set_attached(true).unwrap();
                queue.set_attached(false).unwrap();
            }
            drop(tap);
            assert!(handle.pass().unwrap_err().to_string().contains("deleted"));
            for queue in other.queues() {
                let mut queue = queue.lock();
                queue.set_attached(true).unwrap();
                let flags = interface(queue.as_fd()).unwrap().flags();
                assert_eq!(flags & super::super::DETACHED, 0);
            }
            assert!(!other.is_gone());
        }
    }

    #[test]
    fn a_descriptor_that_is_not_a_tap_is_refused() {
        let queues = vec![tempfile::tempfile().unwrap().into()];
        let passed = PassedTap { mtu: None, offloads: 0, queues };
        assert!(matches!(Tap::passed(&spec(1), &passed), Err(TapError::NotATap { .. })));
    }
}
