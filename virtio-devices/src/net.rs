//! virtio-net (`virtio 1.4 §5.1`).
//!
//! Over a tap, each queue pair has a thread that owns its queues while the driver runs them; the first pair's serves the control
//! queue, too. Over a backend that runs the queues itself there is one thread, for the backend and the control queue.
//! What the driver gets wrong is dropped and counted, never logged, and ends nothing but the queue concerned.

mod config;
mod control;
mod counters;
mod engine;
mod features;
mod filter;
mod given;
mod header;
mod offload;
mod receive;
mod saved;
mod state;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;
mod transmit;
mod worker;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use log::debug;
use thiserror::Error;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VLAN;
use vmm_sys_util::eventfd::EventFd;

#[cfg(test)]
use crate::backend::Tap;
use crate::backend::{Backend, BackendKind, BackendObserver, DoorbellPages, Health};
use crate::counters::{Losses, log_losses};
use crate::{DeviceSpecific, Interrupts, MacError, Port, Start, StateError, VirtioDevice, Worker};
use config::Config;
pub use counters::{Counter, NetCounters};
use engine::Engine;
use features::has;
pub(crate) use features::{offered_by, offload_features, served_for_any};
use filter::is_multicast;
pub(crate) use header::HEADER;
pub(crate) use receive::MAX_READ;
use state::NetState;
pub(crate) use worker::MAX_STALE;

/// The longest frame: a TCP or UDP packet of 64 KiB (`virtio 1.4 §5.1.6.3.1`), an Ethernet header and two VLAN tags.
const MAX_FRAME: usize = 65_550 + 8;
/// The most frames that are handled in one direction before the other one, or a stop, is looked at.
const BATCH: usize = 64;
/// The smallest MTU that a device may tell (`virtio 1.4 §5.1.4.1`).
const MIN_MTU: u16 = 68;
/// The size of the control queue.
const CONTROL_SIZE: u16 = 64;
/// Receive queues shorter than this get no segments. Linux provides buffers again when half of a queue's, or 32, are used up, and none
/// is while a segment of 64 KiB waits for 43 of them: what is left must be enough.
const SEGMENT_QUEUE_SIZE: u16 = 128;
/// The largest size of a virtqueue (`virtio 1.4 §2.7`).
pub(crate) const MAX_QUEUE_SIZE: u16 = 32_768;
/// A network controller, Ethernet.
const CLASS: [u8; 3] = [0x02, 0x00, 0x00];

/// What a NIC is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetSpec {
    /// Its id, which its threads are named after.
    pub id: String,
    /// Its Ethernet address, a unicast one.
    pub mac: [u8; 6],
    /// The MTU that the driver is told, in bytes. Without one it is the backend's.
    pub mtu: Option<u16>,
    /// The number of its queue pairs, that of the backend's queues.
    pub queue_pairs: u16,
    /// The size of its queues, a power of two up to 32,768.
    pub queue_size: u16,
    /// Offers TCP segmentation offload in both directions, if checksums are offloaded.
    pub offload_tso: bool,
    /// Offers UDP fragmentation and segmentation offload in both directions, if checksums are offloaded.
    pub offload_ufo: bool,
    /// Offers checksum offload in both directions.
    pub offload_csum: bool,
}

/// Why there cannot be such a NIC: one line, to follow the option's name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NetError {
    /// The address is a group's or zero.
    #[error("mac={} is no address for a NIC: its first byte must be even, and not all bytes zero", Hex(.0))]
    Mac([u8; 6]),
    /// The queue size is not one.
    #[error("queue_size={0}: must be a power of two from 2 to 32768")]
    QueueSize(u16),
    /// The numbers of queue pairs differ.
    #[error("{pairs} queue pairs need as many queues of the tap, which has {queues}")]
    QueuePairs {
        /// The NIC's.
        pairs: u16,
        /// The backend's.
        queues: usize,
    },
    /// The backend has too few queues.
    #[error("num_queues={}: {name} has {has} pairs of queues; give num_queues={} or less", 2 * u32::from(*.pairs), 2 * u32::from(*.has))]
    TooFewPairs {
        /// The backend.
        name: String,
        /// The NIC's.
        pairs: u16,
        /// The backend's.
        has: u16,
    },
    /// The backend's queues are too small.
    #[error("queue_size={size}: {name} has queues of at most {has}; give queue_size={has} or less")]
    TooLarge {
        /// The backend.
        name: String,
        /// The NIC's.
        size: u16,
        /// The backend's.
        has: u16,
    },
    /// The backend's MTU is smaller.
    #[error("mtu={mtu}: {name} has an MTU of {has}; give {has} or less, or leave mtu out")]
    Mtu {
        /// The backend.
        name: String,
        /// The NIC's.
        mtu: u16,
        /// The backend's.
        has: u16,
    },
    /// The backend cannot run the queues of a modern driver.
    #[error("{0} does not offer VIRTIO_F_VERSION_1; it is no backend for a virtio 1 device")]
    Legacy(String),
}

struct Hex<'a>(&'a [u8; 6]);

impl std::fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A virtio network device. It and its backend outlive resets of the device and reboots of the guest.
pub struct Net {
    spec: NetSpec,
    engine: Engine,
    doorbells: Option<Arc<DoorbellPages>>,
    health: Arc<Health>,
    features: u64,
    queue_sizes: Vec<u16>,
    counters: Arc<NetCounters>,
    losses: Losses,
    state: Arc<NetState>,
    /// Where a change of the configuration is signalled while the driver runs.
    interrupts: Option<Arc<Interrupts>>,
    /// What wakes the worker of a backend that runs the queues, while the driver runs.
    wake: Option<Arc<EventFd>>,
    /// The queues have not been started since the last reset.
    fresh: bool,
}

impl Net {
    /// A NIC whose frames go to and come from `backend`.
    ///
    /// # Errors
    ///
    /// [`NetError`], when `spec` is no NIC or not one of this backend.
    pub fn new(spec: NetSpec, backend: impl Into<Backend>) -> Result<Self, NetError> {
        if !spec.queue_size.is_power_of_two() || !(2..=MAX_QUEUE_SIZE).contains(&spec.queue_size) {
            return Err(NetError::QueueSize(spec.queue_size));
        }
        let (engine, offered) = Engine::new(&spec, backend.into())?;
        let mac = offered.mac.unwrap_or(spec.mac);
        if is_multicast(&mac) || mac == [0; 6] {
            return Err(NetError::Mac(mac));
        }
        let mut queue_sizes = vec![spec.queue_size; 2 * usize::from(spec.queue_pairs)];
        queue_sizes.push(offered.control_size);
        let short = spec.queue_size < SEGMENT_QUEUE_SIZE;
        Ok(Self {
            features: if short { features::without_received_segments(offered.features) } else { offered.features },
            queue_sizes,
            counters: Arc::new(NetCounters::new()),
            losses: Losses::default(),
            health: Arc::default(),
            state: Arc::new(NetState::new(mac, true, 0)),
            interrupts: None,
            wake: None,
            fresh: true,
            spec: NetSpec { mac, mtu: offered.mtu, ..spec },
            engine,
            doorbells: offered.doorbells,
        })
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.spec.id
    }

    /// Has `observer` told when its backend is lost, and when it is back.
    pub fn observe_backend(&self, observer: BackendObserver) {
        self.health.observe(observer);
    }

    #[cfg(test)]
    fn tap(&self) -> Option<&Tap> {
        match &self.engine {
            Engine::Tap(tap) => Some(tap),
            Engine::Offload(..) => None,
        }
    }

    /// What it has done so far.
    pub fn counters(&self) -> Arc<NetCounters> {
        Arc::clone(&self.counters)
    }
}

impl Port for Net {
    fn backend_kind(&self) -> BackendKind {
        self.engine.kind()
    }

    fn backend_name(&self) -> &str {
        self.engine.name()
    }

    fn backend_lost(&self) -> bool {
        self.health.is_lost()
    }

    fn backend_losses(&self) -> u64 {
        self.health.losses()
    }

    fn mac(&self) -> [u8; 6] {
        self.state.mac()
    }

    fn set_mac(&mut self, mac: [u8; 6]) -> Result<(), MacError> {
        if is_multicast(&mac) || mac == [0; 6] {
            return Err(MacError::NotUnicast);
        }
        if self.interrupts.is_some() {
            return Err(MacError::InUse);
        }
        self.spec.mac = mac;
        self.state.set_mac(mac);
        Ok(())
    }

    fn link_up(&self) -> bool {
        self.state.link_up() && self.health.link_up()
    }

    fn set_link(&mut self, up: bool) {
        if !self.state.set_link_up(up) {
            return;
        }
        if let Some(interrupts) = &self.interrupts {
            interrupts.signal_config();
        }
        if let Some(wake) = &self.wake {
            // A full counter has woken the worker already.
            let _ = wake.write(1);
        }
    }
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_NET as u16
    }

    fn class(&self) -> [u8; 3] {
        CLASS
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn feature_requirements(&self) -> &'static [(u32, u32)] {
        features::REQUIREMENTS
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        let config = Config {
            mac: self.state.mac(),
            link_up: self.link_up(),
            queue_pairs: self.spec.queue_pairs,
            mtu: self.spec.mtu.unwrap_or(0),
        };
        config.read(offset, data);
    }

    /// All fields are read-only to a driver of version 1 (`virtio 1.4 §5.1.4`).
    fn config_write(&mut self, _offset: u64, _data: &[u8]) {}

    fn config_generation(&self) -> u8 {
        self.state.generation()
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        if self.fresh {
            self.state.set_offloads(features::guest_offloads(start.features));
        }
        if has(start.features, VIRTIO_NET_F_CTRL_VLAN) {
            self.state.change_filter(filter::Filter::enable_vlans);
        }
        let workers = self.start_workers(&start)?;
        debug!("{}: {} workers over {}", self.spec.id, workers.len(), self.backend_name());
        self.wake = match self.engine {
            Engine::Tap(_) => None,
            Engine::Offload(..) => workers.first().map(|worker| Arc::clone(&worker.kick)),
        };
        self.interrupts = Some(start.interrupts);
        self.fresh = false;
        Ok(workers)
    }

    fn port(&mut self) -> Option<&mut dyn Port> {
        Some(self)
    }

    fn doorbell_pages(&self) -> Option<&DoorbellPages> {
        self.doorbells.as_deref()
    }

    fn reset(&mut self) {
        let Self {
            spec,
            engine: _,
            doorbells: _,
            health: _,
            features: _,
            queue_sizes: _,
            counters,
            losses,
            state,
            interrupts,
            wake,
            fresh,
        } = self;
        // What workers that are still ending have yet to count is told another time.
        log_losses(&spec.id, losses.doubled(&counters.losses()));
        // The workers that are still ending keep the old state. The link is the host's business and stays as it is.
        *state = Arc::new(NetState::new(spec.mac, state.link_up(), state.generation().wrapping_add(1)));
        *interrupts = None;
        *wake = None;
        *fresh = true;
    }

    fn save(&self) -> DeviceSpecific {
        match saved::save(&self.state) {
            state if state == saved::power_on(self.spec.mac) => DeviceSpecific::PowerOn,
            state => DeviceSpecific::Net(state),
        }
    }

    fn restore(&mut self, state: &DeviceSpecific, started: Option<u64>) -> Result<(), StateError> {
        let power_on = saved::power_on(self.spec.mac);
        let state = match state {
            DeviceSpecific::PowerOn => &power_on,
            DeviceSpecific::Net(state) => state,
            DeviceSpecific::Config(_) => return Err(StateError::Shape("kinds of device")),
        };
        match started {
            Some(features) => saved::check(state, &power_on, features, self.pairs(features))?,
            None => saved::check_reset(state, &power_on)?,
        }
        self.state = Arc::new(saved::restored(state)?);
        // The driver has seen the frames of before its start dropped already, and told which offloads it takes.
        self.fresh = started.is_none();
        self.state.set_fresh(self.fresh);
        if started.is_some() {
            self.state.set_touched();
        }
        Ok(())
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        log_losses(&self.spec.id, self.losses.untold(&self.counters.losses()));
    }
}
