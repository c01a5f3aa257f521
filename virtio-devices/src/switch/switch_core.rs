//! The state that a switch's workers share: its ports, its uplink, and its forwarding table.

use std::num::NonZeroU32;
#[cfg(any(test, feature = "testing"))]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption, Guard};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::account::Account;
use super::flow_rules::FlowRules;
use super::mailbox::{Message, WorkerMailbox};
use super::mode::SwitchMode;
use super::port::OpenPort;
use super::shares::Shares;
use super::spec::{MAX_PORTS, MAX_WORKERS, SwitchError, SwitchSpec};
use super::table::{Memory, PortIndex, PortSpec, Role, Table};
use super::uplink::Uplink;

use crate::frames::net_protocol::Offloads;
use crate::frames::policy::{Holder, Replaced, Retired};
use crate::memory::effort::Span;
use crate::net::{CarriedNic, Counter, Enforced, Filter, Mode};

/// The least time between two tables that guests cause.
const INTERVAL: Duration = Duration::from_millis(1);
/// The least time before guests can cause the next table, as a multiple of the time that this one took: with thousands
/// of ports and all addresses that drivers may set, building it takes tens of milliseconds.
const REST: u32 = 8;

/// The host's settings for a port, beyond its NIC's policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortSettings {
    /// The port exchanges frames with the uplink and the PF only.
    pub isolated: bool,
    /// The number of the port that gets a copy of the frames that this one sends and its policy passes.
    pub mirror: Option<u16>,
    /// The port's share of the workers' time if ports compete, 1 to 100, and of an uplink's rate beyond the guarantees.
    /// A port with twice the weight sends twice the bytes.
    pub weight: u8,
    /// The guaranteed part of the uplink's rate, in Mbit/s; 0 for none. The guarantees of all ports together do not
    /// exceed that rate. Without an uplink rate this has no effect.
    pub min_tx_rate: u32,
    /// The port's link is down while the uplink is; without an uplink it is up.
    pub follows_uplink: bool,
}

impl Default for PortSettings {
    fn default() -> Self {
        Self { isolated: false, mirror: None, weight: 10, min_tx_rate: 0, follows_uplink: true }
    }
}

/// Interrupts of ports that wait for a time.
pub(crate) trait Deferred: Send + Sync {
    /// The time of the first; `None` if none waits.
    fn due(&self) -> Option<Instant>;

    /// Sends those whose time has come.
    fn send(&self);
}

/// A batch of frames in progress.
pub(crate) struct Round<'h> {
    _held: RwLockReadGuard<'h, bool>,
    _span: Span,
}

/// A port, with or without a NIC.
#[derive(Default)]
struct Slot {
    nic: ArcSwapOption<CarriedNic>,
    settings: ArcSwapOption<PortSettings>,
    open: ArcSwapOption<OpenPort>,
    account: Arc<Account>,
}

/// The state of a port when a table is built.
struct View {
    mac: [u8; 6],
    policy: Guard<Arc<Enforced>>,
    filter: Guard<Arc<Filter>>,
    settings: PortSettings,
    open: bool,
}

/// A switch.
pub(crate) struct SwitchCore {
    id: String,
    /// True for [`SwitchMode::Vepa`].
    is_vepa: AtomicBool,
    /// Each port receives what it sends, and nothing else.
    loops_back: AtomicBool,
    slots: Box<[Slot]>,
    uplink: Option<Uplink>,
    uplink_rate: Option<NonZeroU32>,
    /// The ports' shares of the uplink's rate, if that is limited.
    shares: Option<Mutex<Shares>>,
    mailboxes: Box<[WorkerMailbox]>,
    table: ArcSwap<Table>,
    /// The number of tables that were built.
    #[cfg(any(test, feature = "testing"))]
    tables: AtomicU64,
    /// Earlier tables that a batch may still use.
    retired: Retired,
    /// The table does not match the ports.
    stale: AtomicBool,
    /// The earliest time at which guests can cause another table. Locked while one is built.
    next: Mutex<Option<Instant>>,
    /// The uplink is up, or there is none.
    uplink_up: AtomicBool,
    /// Locked while links follow the uplink.
    following: Mutex<()>,
    /// The addresses that drivers had before frames were held, or before the VM was saved, until all ports resume.
    memory: Mutex<Option<Memory>>,
    /// True while frames wait in their queues. Locked while frames are in progress.
    held: RwLock<bool>,
    /// Rules of an X550's driver, while there are any.
    flow_rules: ArcSwapOption<FlowRules>,
    /// Called before a table is built.
    refresh: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Interrupts of ports that are moderated.
    deferred: OnceLock<Box<dyn Deferred>>,
    /// Set to end the workers.
    pub end: AtomicBool,
}

impl SwitchCore {
    /// # Errors
    ///
    /// [`SwitchError`].
    pub(crate) fn new(spec: SwitchSpec) -> Result<Self, SwitchError> {
        let SwitchSpec { id, mode, ports, workers, uplink, uplink_rate } = spec;
        if !(1..=MAX_PORTS).contains(&ports) {
            return Err(SwitchError::Ports(ports));
        }
        if !(1..=MAX_WORKERS).contains(&workers) {
            return Err(SwitchError::Workers(workers));
        }
        let uplink = uplink.map(|tap| Uplink::new(tap, &id)).transpose()?;
        let shares = uplink_rate.map(|rate| Mutex::new(Shares::new(rate, ports, PortSettings::default().weight)));
        let mailboxes =
            (0..workers).map(|_| WorkerMailbox::new()).collect::<Result<_, _>>().map_err(SwitchError::Host)?;
        let core = Self {
            id,
            is_vepa: AtomicBool::new(mode == SwitchMode::Vepa),
            loops_back: AtomicBool::new(false),
            slots: (0..ports).map(|_| Slot::default()).collect(),
            uplink,
            uplink_rate,
            shares,
            mailboxes,
            table: ArcSwap::from_pointee(Table::new(mode, &[], None)),
            #[cfg(any(test, feature = "testing"))]
            tables: AtomicU64::new(0),
            retired: Retired::new(Holder::Switch),
            stale: AtomicBool::new(false),
            next: Mutex::new(None),
            uplink_up: AtomicBool::new(true),
            following: Mutex::default(),
            memory: Mutex::default(),
            held: RwLock::new(false),
            flow_rules: ArcSwapOption::empty(),
            refresh: OnceLock::new(),
            deferred: OnceLock::new(),
            end: AtomicBool::new(false),
        };
        drop(core.make_table());
        Ok(core)
    }

    /// The id that its threads are named after.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The forwarding mode.
    pub(crate) fn mode(&self) -> SwitchMode {
        if self.is_vepa.load(Ordering::Acquire) { SwitchMode::Vepa } else { SwitchMode::Veb }
    }

    /// Changes the forwarding mode, from the next table on.
    pub(crate) fn set_mode(&self, mode: SwitchMode) {
        self.is_vepa.store(mode == SwitchMode::Vepa, Ordering::Release);
    }

    /// Makes each port receive what it sends, and nothing else, from the next table on; or ends that.
    pub(crate) fn set_loopback(&self, on: bool) {
        self.loops_back.store(on, Ordering::Release);
    }

    /// The rules of an X550's driver, for a batch.
    pub(crate) fn flow_rules(&self) -> Option<Arc<FlowRules>> {
        self.flow_rules.load_full()
    }

    /// Replaces the rules of an X550's driver.
    pub(crate) fn set_flow_rules(&self, rules: Option<FlowRules>) {
        self.flow_rules.store(rules.map(Arc::new));
    }

    /// Calls `refresh` before each table is built, from now on: it updates the NICs of ports that do not announce their
    /// changes one by one. Only the first is kept.
    pub(crate) fn before_tables(&self, refresh: impl Fn() + Send + Sync + 'static) {
        _ = self.refresh.set(Box::new(refresh));
    }

    /// Workers send these interrupts, from now on. Only the first are kept.
    pub(crate) fn send_interrupts_of(&self, deferred: Box<dyn Deferred>) {
        _ = self.deferred.set(deferred);
    }

    /// The time at which an interrupt must be sent; `None` if none waits.
    pub(crate) fn interrupt_due(&self) -> Option<Instant> {
        self.deferred.get()?.due()
    }

    /// Sends the interrupts whose time has come.
    pub(crate) fn send_interrupts(&self) {
        self.deferred.get().into_iter().for_each(|deferred| deferred.send());
    }

    /// Wakes the workers, which wait for the interrupts of now: any of them may be busy.
    pub(crate) fn watch_interrupts(&self) {
        self.mailboxes.iter().for_each(WorkerMailbox::wake);
    }

    /// The number of ports without the uplink.
    pub(crate) fn ports(&self) -> u16 {
        self.slots.len() as u16
    }

    /// The uplink.
    pub(crate) fn uplink(&self) -> Option<&Uplink> {
        self.uplink.as_ref()
    }

    /// The limit of the traffic to the uplink, in Mbit/s.
    pub(crate) fn uplink_rate(&self) -> Option<NonZeroU32> {
        self.uplink_rate
    }

    /// The ports' shares of the uplink's rate, if that is limited.
    pub(crate) fn shares(&self) -> Option<&Mutex<Shares>> {
        self.shares.as_ref()
    }

    /// The number of the uplink in the table: the one after all ports.
    pub(crate) fn uplink_index(&self) -> PortIndex {
        self.ports()
    }

    /// The mailboxes of the workers.
    pub(crate) fn mailboxes(&self) -> &[WorkerMailbox] {
        &self.mailboxes
    }

    /// The mailbox of the worker that takes a port's frames.
    pub(crate) fn lane_of(&self, port: PortIndex) -> Option<&WorkerMailbox> {
        self.mailboxes.get(usize::from(port) % self.mailboxes.len().max(1))
    }

    /// The offloaded frames that the switch carries. UDP fragmentation offload is obsolete.
    pub(crate) fn offloads(&self) -> Offloads {
        let of_uplink = self.uplink.as_ref().map_or(Offloads::all(), Uplink::offloads);
        of_uplink - Offloads::UFO
    }

    /// The forwarding table, for a batch.
    pub(crate) fn table(&self) -> Guard<Arc<Table>> {
        self.table.load()
    }

    /// The port while its queues run.
    pub(crate) fn open_port(&self, port: PortIndex) -> Option<Arc<OpenPort>> {
        self.slots.get(usize::from(port))?.open.load_full().filter(|open| !open.is_stopped())
    }

    /// The cost that a port has caused to others.
    pub(crate) fn account(&self, port: PortIndex) -> Arc<Account> {
        self.slots.get(usize::from(port)).map(|slot| Arc::clone(&slot.account)).unwrap_or_default()
    }

    /// The host's settings for a port.
    pub(crate) fn settings(&self, port: PortIndex) -> PortSettings {
        let slot = self.slots.get(usize::from(port));
        slot.and_then(|slot| slot.settings.load().as_deref().copied()).unwrap_or_default()
    }

    /// Counts at a port.
    pub(crate) fn count(&self, port: PortIndex, reason: Counter) {
        if let Some(nic) = self.slots.get(usize::from(port)).and_then(|slot| slot.nic.load_full()) {
            nic.counters.add(reason, 1);
        }
    }

    /// Counts a frame for a port that accepts none now.
    pub(crate) fn count_closed(&self, port: PortIndex) {
        let nic = self.slots.get(usize::from(port)).and_then(|slot| slot.nic.load_full());
        if let Some(nic) = nic {
            let reason = if nic.state.link_up() { Counter::RxStale } else { Counter::RxLinkDown };
            nic.counters.add(reason, 1);
        }
    }

    /// Attaches a NIC to a port, or detaches it.
    pub(crate) fn attach(&self, port: PortIndex, nic: Option<CarriedNic>) {
        if let Some(slot) = self.slots.get(usize::from(port)) {
            slot.nic.store(nic.map(Arc::new));
            self.follow_uplink(port);
            self.outdate();
        }
    }

    /// See [`Switch::set_port`](super::Switch::set_port).
    pub(crate) fn set_port(&self, port: PortIndex, settings: PortSettings) -> Replaced {
        self.set_ports([(port, settings)])
    }

    /// See [`Switch::set_ports`](super::Switch::set_ports).
    pub(crate) fn set_ports(&self, ports: impl IntoIterator<Item = (PortIndex, PortSettings)>) -> Replaced {
        ports.into_iter().for_each(|(port, settings)| self.prepare_port(port, settings));
        self.make_table()
    }

    /// See [`Switch::prepare_port`](super::Switch::prepare_port).
    pub(crate) fn prepare_port(&self, port: PortIndex, settings: PortSettings) {
        if let Some(slot) = self.slots.get(usize::from(port)) {
            slot.settings.store(Some(Arc::new(settings)));
            if let Some(shares) = &self.shares {
                shares.lock().set(port, settings.min_tx_rate, settings.weight);
            }
            self.follow_uplink(port);
        }
    }

    /// See [`Switch::tables`](super::Switch::tables).
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn tables(&self) -> u64 {
        self.tables.load(Ordering::Relaxed)
    }

    /// Makes a port's link follow the uplink's, or stay up while that is down.
    pub(crate) fn set_follows_uplink(&self, port: PortIndex, follows_uplink: bool) {
        if let Some(slot) = self.slots.get(usize::from(port)) {
            // The control thread may store others in between.
            slot.settings.rcu(|now| {
                let now = now.as_deref().copied().unwrap_or_default();
                Some(Arc::new(PortSettings { follows_uplink, ..now }))
            });
            self.follow_uplink(port);
        }
    }

    /// True if the uplink was up at the last check, or there is none.
    pub(crate) fn uplink_up(&self) -> bool {
        self.uplink_up.load(Ordering::Acquire)
    }

    /// Records the uplink's state: the links of ports follow. On return, no batch still uses the old state.
    pub(crate) fn set_uplink_up(&self, up: bool) {
        if self.uplink_up.swap(up, Ordering::AcqRel) != up {
            self.uplink.iter().for_each(|uplink| uplink.note_up(up));
            (0..self.ports()).for_each(|port| self.follow_uplink(port));
            self.outdate();
        }
    }

    /// Makes a port's link follow the uplink's, if it is configured so, and interrupts its driver.
    fn follow_uplink(&self, port: PortIndex) {
        // Otherwise the last of two concurrent checks could set an outdated state.
        let _following = self.following.lock();
        let Some(slot) = self.slots.get(usize::from(port)) else { return };
        let held = self.settings(port).follows_uplink && !self.uplink_up();
        if slot.nic.load_full().is_some_and(|nic| nic.state.hold_link(held))
            && let Some(open) = self.open_port(port)
        {
            (open.nic.tell_link)();
        }
    }

    /// Opens a port when its queues start.
    pub(crate) fn open(&self, port: &Arc<OpenPort>) {
        if let Some(slot) = self.slots.get(usize::from(port.index)) {
            slot.open.store(Some(Arc::clone(port)));
            self.outdate();
            self.tell(port.index, Message::Opened(Arc::clone(port)));
        }
    }

    /// Closes a port when its queues stop. No thread touches the queues afterwards.
    pub(crate) fn close(&self, port: &Arc<OpenPort>) {
        port.close();
        if let Some(slot) = self.slots.get(usize::from(port.index)) {
            // The port may have been opened again.
            slot.open.rcu(|open| open.clone().filter(|open| !Arc::ptr_eq(open, port)));
            self.outdate();
            self.tell(port.index, Message::Closed(Arc::clone(port)));
        }
    }

    /// Sends the port's worker a message.
    pub(crate) fn tell(&self, port: PortIndex, message: Message) {
        if let Some(mailbox) = self.lane_of(port) {
            mailbox.tell(message);
        }
    }

    /// Applies a change of the host's policy for a port's NIC.
    pub(crate) fn changed(&self, port: PortIndex) -> Replaced {
        let replaced = self.make_table();
        if let Some(open) = self.open_port(port) {
            open.settle();
        }
        replaced
    }

    /// Makes all frames wait in their queues, or ends that. Waits for frames in progress.
    pub(crate) fn hold_frames(&self, held: bool) {
        if held {
            self.memory.lock().get_or_insert_with(|| self.table.load().memory());
        } else {
            drop(self.make_table());
            *self.memory.lock() = None;
        }
        *self.held.write() = held;
        self.mailboxes.iter().for_each(WorkerMailbox::wake);
    }

    /// The addresses that a port's driver has set, with a number for each: the lower, the longer the port has had it.
    pub(crate) fn addresses_of(&self, port: PortIndex) -> Vec<([u8; 6], u64)> {
        match &*self.memory.lock() {
            Some(memory) => memory.of_port(port).collect(),
            None => self.table.load().memory().of_port(port).collect(),
        }
    }

    /// Restores the addresses of a saved port, from [`Self::addresses_of`].
    pub(crate) fn remember(&self, port: PortIndex, addresses: impl IntoIterator<Item = ([u8; 6], u64)>) {
        let mut addresses = addresses.into_iter().peekable();
        if addresses.peek().is_some() {
            let mut memory = self.memory.lock();
            let memory = memory.get_or_insert_default();
            addresses.for_each(|(mac, since)| memory.add(port, mac, since));
        }
    }

    /// Marks a batch of frames as in progress, until the returned value is dropped. `None` while frames are held.
    pub(crate) fn round(&self) -> Option<Round<'_>> {
        let held = self.held.read();
        (!*held).then(|| Round { _held: held, _span: Span::new() })
    }

    /// Marks the table stale; a worker rebuilds it soon.
    pub(crate) fn outdate(&self) {
        if !self.stale.swap(true, Ordering::AcqRel)
            && let Some(mailbox) = self.mailboxes.first()
        {
            mailbox.wake();
        }
    }

    /// Rebuilds the table if it is stale. Returns the time to wait if it is too early.
    pub(crate) fn follow(&self) -> Option<Duration> {
        if !self.stale.load(Ordering::Acquire) {
            return None;
        }
        let next = *self.next.lock();
        let wait = next.map(|next| next.saturating_duration_since(Instant::now())).filter(|wait| !wait.is_zero());
        if wait.is_none() {
            drop(self.make_table());
        }
        wait
    }

    /// Rebuilds the table without waiting.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn follow_now(&self) -> Replaced {
        self.make_table()
    }

    /// Rebuilds the table. Earlier changes apply to all frames once the caller has waited for the returned handle.
    fn make_table(&self) -> Replaced {
        let mut next = self.next.lock();
        #[cfg(any(test, feature = "testing"))]
        self.tables.fetch_add(1, Ordering::Relaxed);
        let began = Instant::now();
        self.stale.store(false, Ordering::Release);
        self.refresh.get().into_iter().for_each(|refresh| refresh());
        let views: Vec<_> = self.slots.iter().map(Slot::view).collect();
        let none = crate::Policy::default();
        let mut specs: Vec<_> = (0..).zip(&views).map(|(index, view)| spec(index, view.as_ref(), &none)).collect();
        if self.uplink.is_some() {
            specs.push(PortSpec::uplink(true));
        }
        let before = self.table.load_full();
        let table = Table::remembering(self.mode(), &specs, Some(&before), self.memory.lock().as_ref())
            .looping_back(self.loops_back.load(Ordering::Acquire));
        for port in 0..self.ports() {
            let new = table.conflicts(port).saturating_sub(before.conflicts(port));
            for _ in 0..new {
                self.count(port, Counter::MacConflicts);
            }
        }
        *next = Some(Instant::now() + INTERVAL.max(REST * began.elapsed()));
        drop(before);
        self.retired.retire(self.table.swap(Arc::new(table)))
    }
}

impl Slot {
    fn view(&self) -> Option<View> {
        let nic = self.nic.load_full()?;
        let open = self.open.load().as_ref().is_some_and(|open| !open.is_stopped());
        Some(View {
            mac: nic.state.mac(),
            policy: nic.policy.load(),
            filter: nic.state.filter(),
            settings: self.settings.load().as_deref().copied().unwrap_or_default(),
            open: open && nic.state.link_up(),
        })
    }
}

fn spec<'v>(index: PortIndex, view: Option<&'v View>, none: &'v crate::Policy) -> PortSpec<'v> {
    let role = if index == 0 { Role::Pf } else { Role::Vf };
    let Some(View { mac, policy, filter, settings, open }) = view else {
        return PortSpec { role, policy: none, ..PortSpec::uplink(false) };
    };
    let any = |mode| filter.mode(Mode::Promiscuous) || filter.mode(mode);
    PortSpec {
        role,
        open: *open,
        policy: &policy.policy,
        current: *mac,
        unicast: filter.unicast.addresses(),
        multicast: filter.multicast.addresses(),
        all_unicast: any(Mode::AllUnicast) || filter.unicast.overflow(),
        all_multicast: any(Mode::AllMulticast) || filter.multicast.overflow(),
        isolated: settings.isolated,
        mirror: settings.mirror,
    }
}
