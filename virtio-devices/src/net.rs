//! virtio-net (`virtio 1.4 §5.1`).
//!
//! Over a tap, each queue pair has a worker thread, which owns its queues while the driver runs them; the first also
//! serves the control queue. Over a [`QueueRunner`](crate::QueueRunner), one worker serves the backend and the control
//! queue. On a switch, the switch's workers carry all frames and serve the control queue. Malformed input is dropped
//! and counted, never logged, and stops at most the queue it came from.

mod carrier;
mod config;
mod control;
mod counters;
mod enforced;
mod engine;
mod filter;
mod limits;
mod link;
mod pass;
mod receive;
mod runner;
mod saved;
mod spec;
mod start;
mod state;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;
mod transmit;
mod wire;
mod worker;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use log::debug;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VLAN, VIRTIO_NET_F_MQ};
use vmm_sys_util::eventfd::EventFd;

#[cfg(test)]
use crate::backend::Tap;
use crate::backend::{BackendKind, BackendObserver, DoorbellPages, Health, MemoryMailbox, MemoryUser};
use crate::counters::{Losses, log_losses};
use crate::features::has;
use crate::net_protocol::{MAX_QUEUE_SIZE, features};
use crate::policy::{Policy, Replaced};
use crate::{DeviceSpecific, Interrupts, MacError, Port, RateLimits, Start, StateError, VirtioDevice, Worker};
pub use carrier::PortHandle;
pub(crate) use carrier::{CarriedNic, Carrier};
use config::Config;
pub(crate) use control::{Commanded, Control};
pub(crate) use counters::Tally;
pub use counters::{Counter, NetCounters};
pub(crate) use enforced::{Enforced, PolicyCell};
pub use enforced::{PolicyNotice, PolicyObserver};
use engine::Engine;
use filter::is_multicast;
pub(crate) use filter::{Filter, HEAD as FILTER_HEAD, Mode};
pub(crate) use pass::{BATCH, Pass, Shared, give_up};
pub use spec::{NetError, NetSpec};
use start::NetStart;
pub(crate) use state::NetState;
pub(crate) use transmit::reason as send_failure;
pub use wire::Backend;

/// Receive queues shorter than this get no segments. Linux provides buffers again when half of a queue's, or 32, are
/// used up, and none is while a segment of 64 KiB waits for 43 of them: what is left must be enough.
const SEGMENT_QUEUE_SIZE: u16 = 128;
/// A network controller, Ethernet.
const CLASS: [u8; 3] = [0x02, 0x00, 0x00];

/// A virtio network device. It and its backend outlive resets of the device and reboots of the guest.
pub struct Net {
    spec: NetSpec,
    engine: Engine,
    doorbells: Option<Arc<DoorbellPages>>,
    health: Arc<Health>,
    features: u64,
    queue_sizes: Vec<u16>,
    /// What it may do. A reset changes nothing of it, and refills no bucket.
    policy: Arc<PolicyCell>,
    counters: Arc<NetCounters>,
    losses: Losses,
    state: Arc<NetState>,
    /// Where a change of the configuration is signalled while the driver runs.
    interrupts: Option<Arc<Interrupts>>,
    /// Where a change of the guest's memory waits for the worker.
    mailbox: Arc<MemoryMailbox>,
    /// What wakes the workers, while the driver runs.
    wake: Vec<Arc<EventFd>>,
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
        let net = Self {
            features: if short { features::without_received_segments(offered.features) } else { offered.features },
            queue_sizes,
            policy: Arc::new(PolicyCell::new(spec.policy.clone(), spec.limits)),
            counters: Arc::new(NetCounters::new()),
            losses: Losses::default(),
            health: Arc::default(),
            state: Arc::new(NetState::new(mac, spec.link_up, 0)),
            interrupts: None,
            mailbox: Arc::default(),
            wake: Vec::new(),
            fresh: true,
            spec: NetSpec { mac, mtu: offered.mtu, ..spec },
            engine,
            doorbells: offered.doorbells,
        };
        net.attach();
        Ok(net)
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.spec.id
    }

    /// Notifies `observer` when its backend is lost, and when it is back.
    pub fn observe_backend(&self, observer: BackendObserver) {
        self.health.observe(observer);
    }

    /// Notifies `observer` when its driver does something that its policy is about.
    pub fn observe_policy(&self, observer: PolicyObserver) {
        self.policy.observe(observer);
    }

    /// The queue pairs that a driver with these features may use.
    fn pairs(&self, features: u64) -> u16 {
        if has(features, VIRTIO_NET_F_MQ) { self.spec.queue_pairs } else { 1 }
    }

    fn starting<'n>(&'n self, start: &'n Start) -> NetStart<'n> {
        NetStart {
            engine: &self.engine,
            id: &self.spec.id,
            pairs: self.pairs(start.features),
            state: &self.state,
            policy: &self.policy,
            counters: &self.counters,
            health: &self.health,
            mailbox: &self.mailbox,
            fresh: self.fresh,
            start,
        }
    }

    #[cfg(test)]
    fn tap(&self) -> Option<&Tap> {
        match &self.engine {
            Engine::Tap(tap) => Some(tap),
            Engine::Runner(..) | Engine::Switch(_) => None,
        }
    }

    /// Tells the switch, if there is one, what its port is now.
    fn attach(&self) {
        if let Engine::Switch(port) = &self.engine {
            let (state, policy) = (Arc::clone(&self.state), Arc::clone(&self.policy));
            port.carrier().attach(CarriedNic { state, policy, counters: Arc::clone(&self.counters) });
        }
    }

    /// Has the switch, if there is one, follow what the host has changed.
    fn carrier_changed(&self) -> Option<Replaced> {
        match &self.engine {
            Engine::Switch(port) => Some(port.carrier().changed()),
            Engine::Tap(_) | Engine::Runner(..) => None,
        }
    }

    /// Its counters.
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
        // Behind a switch, the frames of a driver that goes on with the one it has read are not the function's.
        if self.interrupts.is_some() && !matches!(self.engine, Engine::Switch(_)) {
            return Err(MacError::InUse);
        }
        self.spec.mac = mac;
        self.state.set_mac(mac);
        if let Some(replaced) = self.carrier_changed() {
            replaced.wait();
        }
        Ok(())
    }

    fn set_policy(&mut self, policy: Policy, limits: RateLimits) -> Replaced {
        (self.spec.policy, self.spec.limits) = (policy.clone(), limits);
        let replaced = self.policy.replace(policy, limits);
        match self.carrier_changed() {
            Some(table) => replaced.and(table),
            None => replaced,
        }
    }

    fn link_up(&self) -> bool {
        self.state.link_up() && self.health.link_up()
    }

    fn set_link(&mut self, up: bool) {
        if !self.state.set_link_up(up) {
            return;
        }
        if let Some(replaced) = self.carrier_changed()
            && !up
        {
            replaced.wait();
        }
        if let Some(interrupts) = &self.interrupts {
            interrupts.signal_config();
        }
        for wake in &self.wake {
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
            self.state.change_filter(Filter::enable_vlans);
        }
        let workers = self.starting(&start).workers()?;
        debug!("{}: {} workers over {}", self.spec.id, workers.len(), self.backend_name());
        self.wake = workers.iter().map(|worker| Arc::clone(&worker.kick)).collect();
        self.interrupts = Some(start.interrupts);
        self.fresh = false;
        Ok(workers)
    }

    fn port(&mut self) -> Option<&mut dyn Port> {
        Some(self)
    }

    fn memory_user(&self) -> Option<MemoryUser> {
        let Engine::Runner(_, backend) = &self.engine else { return None };
        let (backend, mailbox) = (Arc::clone(backend), Arc::clone(&self.mailbox));
        Some(MemoryUser { backend, mailbox, wake: self.wake.first().cloned() })
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
            policy: _,
            counters,
            losses,
            state,
            interrupts,
            mailbox: _,
            wake,
            fresh,
        } = self;
        // What workers that are still ending have yet to count is told another time.
        log_losses(&spec.id, losses.doubled(&counters.losses()));
        // The workers that are still ending keep the old state. The link is the host's business and stays as it is.
        let generation = state.generation().wrapping_add(1);
        *state = Arc::new(NetState::new(spec.mac, state.link_up(), generation).with_link(state.link()));
        *interrupts = None;
        wake.clear();
        *fresh = true;
        self.attach();
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
        self.state.progress().set_fresh(self.fresh);
        if started.is_some() {
            self.state.progress().set_touched();
        }
        self.attach();
        Ok(())
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        log_losses(&self.spec.id, self.losses.untold(&self.counters.losses()));
    }
}
