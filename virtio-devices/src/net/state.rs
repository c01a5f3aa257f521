//! The state that a NIC's workers share with each other and with the device.

mod link;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use arc_swap::{ArcSwap, Guard};

use self::link::Link;
use super::filter::{Filter, Mac};
use crate::device::runner::Progress;
use crate::frames::net_protocol::Offloads;

/// The state that the driver changes while the queues run. A reset of the device creates a new one: a worker that is
/// still exiting changes one that is no longer used.
#[derive(Debug)]
pub(crate) struct NetState {
    mac: AtomicU64,
    filter: ArcSwap<Filter>,
    active_pairs: AtomicU16,
    offloads: AtomicU32,
    link: Arc<Link>,
    generation: AtomicU8,
    /// The driver must announce its addresses.
    announce: AtomicBool,
    /// The worker must announce the addresses for the driver.
    rarp: AtomicBool,
    progress: Progress,
}

impl NetState {
    /// The power-on state, with a generation of the configuration.
    pub(crate) fn new(mac: Mac, link_up: bool, generation: u8) -> Self {
        Self {
            mac: AtomicU64::new(pack(mac)),
            filter: ArcSwap::from_pointee(Filter::new(mac)),
            active_pairs: AtomicU16::new(1),
            offloads: AtomicU32::new(Offloads::empty().bits()),
            link: Arc::new(Link::new(link_up)),
            generation: AtomicU8::new(generation),
            announce: AtomicBool::new(false),
            rarp: AtomicBool::new(false),
            progress: Progress::new(),
        }
    }

    /// Replaces the receive filter, whose address becomes the NIC's.
    pub(crate) fn with_filter(self, filter: Filter) -> Self {
        let mac = AtomicU64::new(pack(filter.mac));
        Self { mac, filter: ArcSwap::from_pointee(filter), ..self }
    }

    /// Replaces the link by that of another state.
    pub(crate) fn with_link(self, link: &Arc<Link>) -> Self {
        Self { link: Arc::clone(link), ..self }
    }

    /// Sets or clears the request for an announcement by the driver.
    pub(crate) fn with_announce(self, announce: bool) -> Self {
        Self { announce: AtomicBool::new(announce), ..self }
    }

    /// The NIC's address.
    pub(crate) fn mac(&self) -> Mac {
        let [_, _, mac @ ..] = self.mac.load(Ordering::Relaxed).to_be_bytes();
        mac
    }

    /// Changes the NIC's address, and its receive filter with it.
    pub(crate) fn set_mac(&self, mac: Mac) {
        self.mac.store(pack(mac), Ordering::Relaxed);
        self.change_filter(|filter| filter.mac = mac);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// The current receive filter.
    pub(crate) fn filter(&self) -> Guard<Arc<Filter>> {
        self.filter.load()
    }

    /// Replaces the receive filter, whose address becomes the NIC's.
    pub(crate) fn set_filter(&self, filter: Filter) {
        self.mac.store(pack(filter.mac), Ordering::Relaxed);
        self.filter.store(Arc::new(filter));
    }

    /// Changes the receive filter. `change` may be called again when another thread changes it, too.
    pub(crate) fn change_filter(&self, change: impl Fn(&mut Filter)) {
        self.filter.rcu(|filter| {
            let mut filter = Filter::clone(filter);
            change(&mut filter);
            filter
        });
    }

    /// The queue pairs that the driver uses: the first ones.
    pub(crate) fn active_pairs(&self) -> u16 {
        self.active_pairs.load(Ordering::Acquire)
    }

    /// Changes the number of queue pairs that the driver uses.
    pub(crate) fn set_active_pairs(&self, pairs: u16) {
        self.active_pairs.store(pairs, Ordering::Release);
    }

    /// The offloaded frames that the driver currently accepts.
    pub(crate) fn offloads(&self) -> Offloads {
        Offloads::from_bits_truncate(self.offloads.load(Ordering::Relaxed))
    }

    /// Changes the offloaded frames that the driver accepts: those that it negotiated at its first start, then those
    /// that it sets by commands.
    pub(crate) fn set_offloads(&self, offloads: Offloads) {
        self.offloads.store(offloads.bits(), Ordering::Relaxed);
    }

    /// The link, which workers watch and the host changes.
    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// True if the link is up.
    pub(crate) fn link_up(&self) -> bool {
        self.link.is_up()
    }

    /// Changes the link, as [`Link::set`] does. Returns true if that is a change.
    pub(crate) fn set_link_up(&self, up: bool) -> bool {
        let changed = self.link.set(up);
        if changed {
            self.generation.fetch_add(1, Ordering::Release);
        }
        changed
    }

    /// Keeps the link down, or no longer, as [`Link::hold`] does. Returns true if that is a change.
    pub(crate) fn hold_link(&self, held: bool) -> bool {
        let changed = self.link.hold(held);
        if changed {
            self.changed();
        }
        changed
    }

    /// Keeps the link down while the tap is lost, or no longer, as [`Link::set_lost`] does. Returns true if
    /// that is a change.
    pub(crate) fn lose_link(&self, lost: bool) -> bool {
        let changed = self.link.set_lost(lost);
        if changed {
            self.changed();
        }
        changed
    }

    /// True if the driver must announce its addresses.
    pub(crate) fn announces(&self) -> bool {
        self.announce.load(Ordering::Acquire)
    }

    /// Requests an announcement by the driver, or records that it was made.
    pub(crate) fn set_announce(&self, wanted: bool) {
        if self.announce.swap(wanted, Ordering::AcqRel) != wanted {
            self.changed();
        }
    }

    /// Makes the worker announce the addresses for the driver.
    pub(crate) fn ask_rarp(&self) {
        self.rarp.store(true, Ordering::Release);
    }

    /// True once after [`Self::ask_rarp`]: the caller makes the announcement.
    pub(crate) fn take_rarp(&self) -> bool {
        self.rarp.load(Ordering::Relaxed) && self.rarp.swap(false, Ordering::AcqRel)
    }

    /// Records that a field of the configuration has changed outside this state.
    pub(crate) fn changed(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// The progress of the queues on a backend that runs them itself.
    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// The configuration's generation.
    pub(crate) fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }
}

fn pack(mac: Mac) -> u64 {
    mac.iter().fold(0, |packed, byte| packed << 8 | u64::from(*byte))
}
