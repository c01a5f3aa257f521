//! virtio-net (`virtio 1.4 §5.1`).
//!
//! Over a tap, each queue pair has a worker thread, which owns its queues while the driver runs them; the first also
//! serves the control queue. Over a [`QueueRunner`](crate::QueueRunner), one worker serves the backend and the control
//! queue. On a switch, the switch's workers carry all frames and serve the control queue. Malformed input is dropped
//! and counted, never logged, and stops at most the queue it came from.

mod carrier;
mod config;
mod connect;
mod control;
mod counters;
mod enforced;
mod engine;
mod filter;
mod of_host;
mod pass;
pub(crate) mod rarp;
mod receive;
mod runner;
mod saved;
mod spec;
mod start;
mod state;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;
mod tap_watch;
mod transmit;
mod wire;
mod worker;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VLAN, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STANDBY};
use vmm_sys_util::eventfd::EventFd;

#[cfg(test)]
use crate::backend::Tap;
use crate::backend::{BackendKind, DoorbellPages, Health, MemoryMailbox, MemoryUser};
use crate::device::config::ConfigField;
use crate::device::counters::Counted;
use crate::device::failures::{FailureObserver, Failures};
use crate::frames::net_protocol::{MAX_QUEUE_SIZE, features};
use crate::frames::policy::Replaced;
use crate::transport::features::has;
use crate::{
    BucketsState, ConnectError, DeviceSpecific, FeatureRequirement, HostNic, HostSettings, Interrupts, NewBackend,
    NicState, Start, StateError, VirtioDevice, Worker,
};
pub use carrier::PortHandle;
pub(crate) use carrier::{CarriedNic, Carrier};
use config::Config;
pub(crate) use config::FIELDS;
pub use connect::new_backend;
pub(crate) use control::{Commanded, Control};
pub(crate) use counters::Tally;
pub use counters::{Counter, NetCounters};
pub(crate) use enforced::{Enforced, PolicyCell};
pub use enforced::{PolicyNotice, PolicyObserver};
use engine::Engine;
use filter::is_multicast;
pub(crate) use filter::{Addresses, Filter, HEAD as FILTER_HEAD, Mode};
pub(crate) use pass::{BATCH, Pass, Shared, give_up};
pub use spec::{NetError, NetSpec};
use start::NetStart;
pub(crate) use state::NetState;
pub(crate) use tap_watch::TapFinder;
pub(crate) use transmit::reason as send_failure;
pub use wire::Backend;

/// Receive queues shorter than this get no segments. Linux provides buffers again when half of a queue's, or 32, are
/// used up, and none is while a segment of 64 KiB waits for 43 of them: the rest must be enough.
const SEGMENT_QUEUE_SIZE: u16 = 128;
/// A network controller, Ethernet.
const CLASS: [u8; 3] = [0x02, 0x00, 0x00];

/// A virtio network device. The device and its backend outlive resets of the device and reboots of the guest.
pub struct Net {
    spec: NetSpec,
    engine: Engine,
    doorbells: Option<Arc<DoorbellPages>>,
    health: Arc<Health>,
    failures: Arc<Failures>,
    features: u64,
    queue_sizes: Vec<u16>,
    /// The policy in force. A reset does not change it, and refills no bucket.
    policy: Arc<PolicyCell>,
    counted: Counted<NetCounters>,
    state: Arc<NetState>,
    /// The interrupts for changes of the configuration while the driver runs.
    interrupts: Option<Arc<Interrupts>>,
    /// The mailbox for changes of the guest's memory.
    mailbox: Arc<MemoryMailbox>,
    /// The events that wake the workers, while the driver runs.
    wake: Vec<Arc<EventFd>>,
    /// The queues have not been started since the last reset.
    fresh: bool,
    /// The features of the driver, from its start to its reset.
    negotiated: u64,
    /// The driver has read the configuration at the source: it must read it again.
    moved: bool,
    /// The address was that of a backend, which is missing.
    takes_mac: bool,
    /// The host's settings, while the guest has made others.
    host: Option<Box<HostSettings>>,
    /// The host makes several changes, which a switch follows at their end.
    is_changing: bool,
}

impl Net {
    /// Creates a NIC over `backend`.
    ///
    /// # Errors
    ///
    /// [`NetError`] if `spec` is invalid or does not fit the backend.
    pub fn new(spec: NetSpec, backend: impl Into<Backend>) -> Result<Self, NetError> {
        if !spec.queue_size.is_power_of_two() || !(2..=MAX_QUEUE_SIZE).contains(&spec.queue_size) {
            return Err(NetError::QueueSize(spec.queue_size));
        }
        let backend = backend.into();
        let takes_mac = matches!(&backend, Backend::Absent(absent) if absent.has_own_mac);
        let (engine, offered) = Engine::new(&spec, backend)?;
        let mac = offered.mac.unwrap_or(spec.mac);
        if is_multicast(&mac) || mac == [0; 6] {
            return Err(NetError::Mac(mac));
        }
        let mut queue_sizes = vec![spec.queue_size; 2 * usize::from(spec.queue_pairs)];
        queue_sizes.push(offered.control_size);
        let short = spec.queue_size < SEGMENT_QUEUE_SIZE;
        let features = if short { features::without_received_segments(offered.features) } else { offered.features };
        let net = Self {
            features: features | u64::from(spec.standby) << VIRTIO_NET_F_STANDBY,
            queue_sizes,
            policy: Arc::new(PolicyCell::new(spec.policy.clone(), spec.limits)),
            counted: Counted::new(&spec.id),
            health: Arc::default(),
            failures: Arc::new(Failures::new(&spec.id, "tap")),
            state: Arc::new(NetState::new(mac, spec.link_up, 0)),
            interrupts: None,
            mailbox: Arc::default(),
            wake: Vec::new(),
            fresh: true,
            negotiated: 0,
            moved: false,
            takes_mac,
            host: None,
            is_changing: false,
            spec: NetSpec { mac, mtu: offered.mtu, ..spec },
            engine,
            doorbells: offered.doorbells,
        };
        net.health.follow_tap(net.spec.follows_tap);
        net.attach();
        net.hold_without_backend();
        Ok(net)
    }

    /// Keeps the link down if there is no backend.
    fn hold_without_backend(&self) {
        if self.absence().is_some() {
            self.state.hold_link(true);
        }
    }

    /// The id.
    pub fn id(&self) -> &str {
        &self.spec.id
    }

    /// Notifies `observer` of actions of the driver that its policy concerns.
    pub fn observe_policy(&self, observer: PolicyObserver) {
        self.policy.observe(observer);
    }

    /// Notifies `observer` when its tap fails to accept frames, and when it accepts them again.
    pub fn observe_failures(&self, observer: FailureObserver) {
        self.failures.observe(observer);
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
            counters: self.counted.counters(),
            health: &self.health,
            failures: &self.failures,
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

    /// Attaches the NIC to its switch, if there is one, with its current state.
    fn attach(&self) {
        if let Engine::Switch(port) = &self.engine {
            let (state, policy) = (Arc::clone(&self.state), Arc::clone(&self.policy));
            port.carrier().attach(CarriedNic { state, policy, counters: Arc::clone(self.counted.counters()) });
        }
    }

    /// Makes the switch, if there is one, follow a change by the host.
    fn carrier_changed(&self) -> Option<Replaced> {
        match &self.engine {
            Engine::Switch(_) if self.is_changing => Some(Replaced::default()),
            Engine::Switch(port) => Some(port.carrier().changed()),
            Engine::Tap(_) | Engine::Runner(..) => None,
        }
    }

    /// The counters.
    pub fn counters(&self) -> Arc<NetCounters> {
        Arc::clone(self.counted.counters())
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

    fn feature_requirements(&self) -> &'static [FeatureRequirement] {
        features::REQUIREMENTS
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    /// A backend with a larger MTU serves the MTU that the driver has read, and a missing one serves any.
    fn serve(&mut self, config: &[u8], accepted: Option<u64>) {
        let Ok(told) = u16::try_from(config::MTU.number(config)) else { return };
        let takes = |mtu| told <= mtu || self.absence().is_some();
        let uses = has(accepted.unwrap_or(self.features), VIRTIO_NET_F_MTU);
        if uses && told != 0 && self.spec.mtu.is_some_and(takes) {
            self.spec.mtu = Some(told);
        }
    }

    fn config_fields(&self) -> &'static [ConfigField] {
        FIELDS
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        let config = Config {
            mac: self.state.mac(),
            link_up: self.has_link(),
            announce: self.state.announces(),
            queue_pairs: self.spec.queue_pairs,
            mtu: self.spec.mtu.unwrap_or(0),
            rate: self.rate(),
        };
        config.read(offset, data);
    }

    fn config_generation(&self) -> u8 {
        self.state.generation()
    }

    fn start(&mut self, mut start: Start) -> io::Result<Vec<Worker>> {
        // The feature concerns the driver only: it is hidden from the backend.
        start.features &= !(1 << VIRTIO_NET_F_STANDBY);
        if self.fresh {
            self.state.set_offloads(features::guest_offloads(start.features));
        }
        if has(start.features, VIRTIO_NET_F_CTRL_VLAN) {
            self.state.change_filter(Filter::enable_vlans);
        }
        let workers = self.starting(&start).workers()?;
        self.wake = workers.iter().map(|worker| Arc::clone(&worker.kick)).collect();
        self.interrupts = Some(start.interrupts);
        self.negotiated = start.features;
        if std::mem::take(&mut self.moved) || self.state.announces() {
            // The driver may have been notified at the source, and had another link there. A spurious signal is
            // harmless.
            self.signal_config();
        }
        self.fresh = false;
        Ok(workers)
    }

    fn hold_frames(&self, held: bool) {
        if let Engine::Switch(port) = &self.engine {
            port.carrier().hold_frames(held);
        }
    }

    fn host_nic(&mut self) -> Option<&mut dyn HostNic> {
        Some(self)
    }

    fn memory_user(&self) -> Option<MemoryUser> {
        let Engine::Runner(ability, backend) = &self.engine else { return None };
        if ability.kind == BackendKind::Absent {
            return None;
        }
        let (backend, mailbox) = (Arc::clone(backend), Arc::clone(&self.mailbox));
        let (kind, wake) = (ability.kind, self.wake.first().cloned());
        let (logs_writes, has_state) = (ability.logs_writes, ability.has_state);
        Some(MemoryUser { backend, mailbox, wake, kind, logs_writes, has_state })
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
            failures: _,
            features: _,
            queue_sizes: _,
            policy: _,
            counted,
            state,
            interrupts,
            mailbox: _,
            wake,
            fresh,
            negotiated,
            moved,
            takes_mac: _,
            host: _,
            is_changing: _,
        } = self;
        counted.was_reset();
        // Workers that are still exiting keep the old state. The link belongs to the host and stays as it is.
        let generation = state.generation().wrapping_add(1);
        *state = Arc::new(NetState::new(spec.mac, state.link_up(), generation).with_link(state.link()));
        *interrupts = None;
        wake.clear();
        (*fresh, *negotiated, *moved) = (true, 0, false);
        self.attach();
    }

    fn end_guest_settings(&mut self) {
        self.return_to_host();
    }

    fn adopt(&mut self, accepted: u64, state: &DeviceSpecific) {
        self.adopt_features(accepted, state);
    }

    fn connect(&mut self, new: &mut NewBackend, negotiated: Option<u64>) -> Result<(), ConnectError> {
        self.exchange(new, negotiated)
    }

    fn save(&self) -> DeviceSpecific {
        let buckets = BucketsState { uplink: self.engine.save_share(), ..self.policy.load().save() };
        let mut state = NicState { buckets, ..saved::save(&self.state) };
        // The switch may not have the driver's last change yet.
        state.held = self.engine.save_addresses();
        let NicState { mac, unicast, held, .. } = &mut state;
        held.retain(|held| saved::is_own(*mac, unicast, held));
        match state {
            state if state == saved::power_on(self.spec.mac) => DeviceSpecific::PowerOn,
            state => DeviceSpecific::Net(state),
        }
    }

    fn restore(&mut self, state: &DeviceSpecific, started: Option<u64>) -> Result<(), StateError> {
        let power_on = saved::power_on(self.spec.mac);
        let state = match state {
            DeviceSpecific::PowerOn => &power_on,
            DeviceSpecific::Net(state) => state,
            _ => return Err(StateError::Shape("kinds of device")),
        };
        match started {
            Some(features) => saved::check(state, &power_on, features, self.pairs(features))?,
            None => saved::check_reset(state, &power_on)?,
        }
        let restored = saved::restored(state)?;
        self.policy.load().restore(&state.buckets)?;
        self.engine.restore_share(state.buckets.uplink)?;
        self.engine.restore_addresses(&state.held)?;
        self.state = Arc::new(restored);
        // Frames from before the driver started are already dropped, and the offloads negotiated.
        self.fresh = started.is_none();
        self.negotiated = started.unwrap_or(0);
        self.moved = started.is_some();
        self.state.progress().set_fresh(self.fresh);
        if started.is_some() {
            self.state.progress().set_touched();
        }
        self.hold_without_backend();
        self.attach();
        Ok(())
    }
}
