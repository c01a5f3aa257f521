//! virtio-net over a tap (`virtio 1.4 §5.1`).
//!
//! Each queue pair has a thread that owns its queues while the driver runs them; the first pair's serves the control queue, too.
//! What the driver gets wrong is dropped and counted, never logged, and ends nothing but the queue concerned.

mod config;
mod control;
mod counters;
mod features;
mod filter;
mod header;
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
use std::sync::atomic::AtomicBool;

use log::debug;
use parking_lot::Mutex;
use thiserror::Error;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VLAN, VIRTIO_NET_F_MQ};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::backend::{Offloads, Tap};
use crate::counters::{Losses, log_losses};
use crate::worker::{spawn, spawn_all, thread_name};
use crate::{DeviceSpecific, Interrupts, MacError, Port, Start, StateError, VirtioDevice, Worker};
use config::Config;
pub use counters::{Counter, NetCounters};
use features::has;
use filter::is_multicast;
pub(crate) use header::HEADER;
use state::NetState;
use worker::{Pair, Shared};

/// The longest frame: a TCP or UDP packet of 64 KiB (`virtio 1.4 §5.1.6.3.1`), an Ethernet header and two VLAN tags.
const MAX_FRAME: usize = 65_550 + 8;
/// The most frames that are handled in one direction before the other one, or a stop, is looked at.
const BATCH: usize = 64;
/// The smallest MTU that a device may tell (`virtio 1.4 §5.1.4.1`).
const MIN_MTU: u16 = 68;
/// The size of the control queue.
const CONTROL_SIZE: u16 = 64;
/// The largest size of a virtqueue (`virtio 1.4 §2.7`).
const MAX_SIZE: u16 = 32_768;
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
}

struct Hex<'a>(&'a [u8; 6]);

impl std::fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A virtio network device. It and its tap outlive resets of the device and reboots of the guest.
pub struct Net {
    spec: NetSpec,
    backend: Tap,
    features: u64,
    queue_sizes: Vec<u16>,
    counters: Arc<NetCounters>,
    losses: Losses,
    state: Arc<NetState>,
    /// Where a change of the configuration is signalled while the driver runs.
    interrupts: Option<Arc<Interrupts>>,
    /// The queues have not been started since the last reset.
    fresh: bool,
}

impl Net {
    /// A NIC whose frames go to and come from `backend`.
    ///
    /// # Errors
    ///
    /// [`NetError`], when `spec` is no NIC or not one of this backend.
    pub fn new(spec: NetSpec, backend: Tap) -> Result<Self, NetError> {
        if is_multicast(&spec.mac) || spec.mac == [0; 6] {
            return Err(NetError::Mac(spec.mac));
        }
        if !spec.queue_size.is_power_of_two() || !(2..=MAX_SIZE).contains(&spec.queue_size) {
            return Err(NetError::QueueSize(spec.queue_size));
        }
        let queues = backend.queues().len();
        if queues != usize::from(spec.queue_pairs) || queues == 0 {
            return Err(NetError::QueuePairs { pairs: spec.queue_pairs, queues });
        }
        let offloads = offloads(&spec) & backend.offloads();
        let mtu = spec.mtu.or(backend.mtu()).filter(|mtu| *mtu >= MIN_MTU);
        let mut queue_sizes = vec![spec.queue_size; 2 * queues];
        queue_sizes.push(CONTROL_SIZE);
        Ok(Self {
            features: features::offered(offloads, mtu.is_some(), queues > 1),
            queue_sizes,
            counters: Arc::new(NetCounters::new()),
            losses: Losses::default(),
            state: Arc::new(NetState::new(spec.mac, true, 0)),
            interrupts: None,
            fresh: true,
            spec: NetSpec { mtu, ..spec },
            backend,
        })
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.spec.id
    }

    /// Its backend.
    pub fn backend(&self) -> &Tap {
        &self.backend
    }

    /// What it has done so far.
    pub fn counters(&self) -> Arc<NetCounters> {
        Arc::clone(&self.counters)
    }

    /// The queue pairs that a driver with these features may use.
    fn pairs(&self, features: u64) -> u16 {
        if has(features, VIRTIO_NET_F_MQ) { self.spec.queue_pairs } else { 1 }
    }

    /// Sorts the driver's queues by pair. The control queue follows the last pair that the driver knows of
    /// (`virtio 1.4 §5.1.2`). Pairs of which no queue is enabled have no worker.
    fn pairs_to_run(&self, start: &Start) -> io::Result<Vec<Pair>> {
        let count = self.pairs(start.features);
        let queue = |index| start.queues.iter().find(|(other, _)| *other == index).cloned();
        let mut pairs = Vec::with_capacity(count.into());
        for (index, tap) in (0..count).zip(self.backend.queues()) {
            let (receive, transmit) = (queue(2 * index), queue(2 * index + 1));
            let control = if index == 0 { queue(2 * count) } else { None };
            if receive.is_none() && transmit.is_none() && control.is_none() {
                continue;
            }
            pairs.push(Pair {
                index,
                receive,
                transmit,
                control,
                tap: Arc::clone(tap),
                kick: Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?),
                stop: Arc::new(AtomicBool::new(false)),
                peers: Vec::new(),
            });
        }
        let peers = pairs.iter().filter(|pair| pair.index > 0).map(|pair| Arc::clone(&pair.kick)).collect();
        if let Some(first) = pairs.first_mut().filter(|pair| pair.index == 0) {
            first.peers = peers;
        }
        Ok(pairs)
    }

    fn shared(&self, start: &Start) -> Arc<Shared> {
        Arc::new(Shared {
            memory: start.memory.clone(),
            features: start.features,
            pairs: self.pairs(start.features),
            state: Arc::clone(&self.state),
            counters: Arc::clone(&self.counters),
            interrupts: Arc::clone(&start.interrupts),
            fresh: self.fresh,
            complete: Mutex::new(false),
        })
    }

    fn spawn(&self, pair: Pair, shared: &Arc<Shared>) -> io::Result<Worker> {
        let queues = [&pair.receive, &pair.transmit, &pair.control];
        let queues = queues.into_iter().flatten().map(|(index, _)| *index).collect();
        let (kick, stop) = (Arc::clone(&pair.kick), Arc::clone(&pair.stop));
        let shared = Arc::clone(shared);
        let name = thread_name(&self.spec.id, "qp", pair.index);
        let thread = spawn(name, move || pair.run(&shared))?;
        Ok(Worker { queues, kick, stop, thread })
    }
}

fn offloads(spec: &NetSpec) -> Offloads {
    // Segments have checksums to be filled in (`virtio 1.4 §5.1.3.1`).
    if !spec.offload_csum {
        return Offloads::empty();
    }
    let mut offloads = Offloads::CHECKSUM;
    offloads.set(Offloads::TSO4 | Offloads::TSO6 | Offloads::ECN, spec.offload_tso);
    offloads.set(Offloads::UFO | Offloads::USO4 | Offloads::USO6, spec.offload_ufo);
    offloads
}

impl Port for Net {
    fn backend_name(&self) -> &str {
        self.backend.name()
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
        self.state.link_up()
    }

    fn set_link(&mut self, up: bool) {
        if self.state.set_link_up(up)
            && let Some(interrupts) = &self.interrupts
        {
            interrupts.signal_config();
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

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        let config = Config {
            mac: self.state.mac(),
            link_up: self.state.link_up(),
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
        let pairs = self.pairs_to_run(&start)?;
        let shared = self.shared(&start);
        if self.fresh {
            self.state.set_offloads(features::guest_offloads(start.features));
        }
        if has(start.features, VIRTIO_NET_F_CTRL_VLAN) {
            self.state.change_filter(filter::Filter::enable_vlans);
        }
        let workers = spawn_all(pairs, &shared.complete, |pair| self.spawn(pair, &shared))?;
        debug!("{}: {} queue pairs over {}", self.spec.id, workers.len(), self.backend.name());
        self.interrupts = Some(start.interrupts);
        self.fresh = false;
        Ok(workers)
    }

    fn port(&mut self) -> Option<&mut dyn Port> {
        Some(self)
    }

    fn reset(&mut self) {
        let Self { spec, backend: _, features: _, queue_sizes: _, counters, losses, state, interrupts, fresh } = self;
        // What workers that are still ending have yet to count is told another time.
        log_losses(&spec.id, losses.doubled(&counters.losses()));
        // The workers that are still ending keep the old state. The link is the host's business and stays as it is.
        *state = Arc::new(NetState::new(spec.mac, state.link_up(), state.generation().wrapping_add(1)));
        *interrupts = None;
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
        Ok(())
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        log_losses(&self.spec.id, self.losses.untold(&self.counters.losses()));
    }
}
