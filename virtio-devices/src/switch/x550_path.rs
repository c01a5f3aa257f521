//! The data path of an emulated X550: its PF and each of its VFs is a port of a switch.
//!
//! A port has the rings that the driver has enabled, and is opened again when that changes. The port's policy and
//! receive filter follow the registers of the function's pool: the switch's first worker looks at them before it
//! rebuilds the forwarding table, so a driver that writes registers again and again costs no more than one that
//! changes its filters.

mod host_end;
mod messages;
mod pool_rules;
pub(crate) mod ports;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use x550::{Direction, Doorbell, Mac, Nic, Place, Pool};

use super::flow_rules::FlowRules;
use super::handle::Threads;
use super::port::OpenPort;
use super::port_nic::{AddressFilter, PortNic};
use super::receiver::ReceiveRing;
use super::rings::x550::{X550Receive, X550Send};
use super::sender::{PortTx, SendQueue};
use super::steering::Steering;
use super::table::PortIndex;
use crate::RateLimits;
use crate::frames::policy::Policy;
use crate::net::{CarriedNic, NetCounters, NetState, PolicyCell};
use crate::x550_sriov::X550Handle;
use pool_rules::PoolRules;

/// Queues of a NIC in each direction.
const QUEUES: u16 = 128;

/// The queues of a function that are enabled, a bit for each queue of the NIC.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Layout {
    receive: u128,
    transmit: u128,
}

/// A port for a function of the NIC.
struct FunctionPort {
    place: Place,
    index: PortIndex,
    carried: CarriedNic,
    steering: Arc<Steering>,
    /// The pool, as policy and filter were made of it.
    pool: ArcSwapOption<Pool>,
    /// The version of the registers that policy and filter were made of. Locked while they are made.
    applied: Mutex<u64>,
    /// The rings that should run.
    wanted: Mutex<Layout>,
    /// The rings that run. Locked while that changes.
    running: Mutex<Layout>,
    open: ArcSwapOption<OpenPort>,
    /// The host could not run its rings: the next doorbell tries again.
    has_failed: AtomicBool,
}

/// The data path: a port of the switch for each function, the PF first.
pub(crate) struct X550Path {
    threads: Arc<Threads>,
    ports: Box<[FunctionPort]>,
    /// The NIC, from its first call.
    nic: OnceLock<X550Handle>,
    /// The host has connected the link.
    is_connected: AtomicBool,
    /// The host keeps the link down for a while.
    is_held: AtomicBool,
    /// The log has the host's failure to run queues. A guest can repeat it.
    has_failed: AtomicBool,
    /// The number of times that the pools may have changed.
    version: AtomicU64,
}

/// The numbers of the set bits.
fn queues(bits: u128) -> impl Iterator<Item = u16> {
    (0..QUEUES).filter(move |queue| bits >> queue & 1 != 0)
}

impl Layout {
    /// The queues that their drivers have enabled, for each of `ports` functions, the PF first.
    fn all(nic: &Nic, ports: usize) -> Vec<Self> {
        let mut layouts = vec![Self::default(); ports];
        for queue in 0..QUEUES {
            if let Some(layout) = layouts.get_mut(number_of(nic.owner(queue).0)) {
                layout.receive |= u128::from(nic.receive_queue(queue).enabled) << queue;
                layout.transmit |= u128::from(nic.transmit_queue(queue).enabled) << queue;
            }
        }
        layouts
    }

    fn has(self, doorbell: Doorbell) -> bool {
        let bits = match doorbell.direction {
            Direction::Receive => self.receive,
            Direction::Transmit => self.transmit,
        };
        bits.checked_shr(doorbell.queue.into()).is_some_and(|bits| bits & 1 != 0)
    }

    fn is_empty(self) -> bool {
        self == Self::default()
    }
}

/// The number of a function's port.
fn number_of(place: Place) -> usize {
    match place {
        Place::Pf => 0,
        Place::Vf(index) => usize::from(index) + 1,
    }
}

impl X550Path {
    /// The data path of a NIC with `total_vfs` VFs on a switch that has as many ports and one more.
    pub(crate) fn new(threads: Arc<Threads>, mac: [u8; 6], total_vfs: u16) -> Arc<Self> {
        let places = std::iter::once(Place::Pf).chain((0..total_vfs).map(Place::Vf));
        let rss = Nic::new(Mac(mac)).rss(0);
        let ports = (0..).zip(places).map(|(index, place)| {
            let mac = if place == Place::Pf { mac } else { [0; 6] };
            FunctionPort {
                place,
                index,
                carried: CarriedNic {
                    state: Arc::new(NetState::new(mac, false, 0)),
                    policy: Arc::new(PolicyCell::new(Policy::default(), RateLimits::default())),
                    counters: Arc::new(NetCounters::new()),
                },
                steering: Arc::new(Steering::new(rss.clone())),
                pool: ArcSwapOption::empty(),
                applied: Mutex::default(),
                wanted: Mutex::default(),
                running: Mutex::default(),
                open: ArcSwapOption::empty(),
                has_failed: AtomicBool::new(false),
            }
        });
        let [is_held, has_failed, is_connected] = [false, false, true].map(AtomicBool::new);
        let version = AtomicU64::new(1);
        let (ports, nic) = (ports.collect(), OnceLock::new());
        let path = Arc::new(Self { threads, ports, nic, is_connected, is_held, has_failed, version });
        for port in &path.ports {
            path.threads.core().attach(port.index, Some(port.carried.clone()));
        }
        let of_table = Arc::downgrade(&path);
        path.threads.core().before_tables(move || of_table.upgrade().iter().for_each(|path| path.refresh()));
        path
    }

    /// The counters of all functions, the PF's first.
    pub(crate) fn counters(&self) -> Vec<Arc<NetCounters>> {
        self.ports.iter().map(|port| Arc::clone(&port.carried.counters)).collect()
    }

    /// Connects or disconnects the link.
    fn connect(&self, up: bool) {
        self.is_connected.store(up, Ordering::Release);
        self.tell_link();
    }

    /// Keeps the link down, or no longer, whatever [`Self::connect`] says.
    fn hold(&self, held: bool) {
        self.is_held.store(held, Ordering::Release);
        self.tell_link();
    }

    /// True if the NIC has a link.
    fn has_link(&self) -> bool {
        let core = self.threads.core();
        self.is_connected.load(Ordering::Acquire)
            && !self.is_held.load(Ordering::Acquire)
            && (core.uplink_up() || !core.settings(0).follows_uplink)
    }

    /// Shows the link to the drivers.
    fn tell_link(&self) {
        if let Some(nic) = self.nic.get() {
            nic.set_link(self.has_link());
        }
        self.outdate();
    }

    /// Makes policies and filters follow the registers: that of a port before it sends its next frames, and all others
    /// before the next table.
    fn outdate(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
        self.threads.core().outdate();
    }

    fn port(&self, place: Place) -> Option<&FunctionPort> {
        self.ports.get(number_of(place))
    }

    /// Makes link, policies and filters follow the uplink and the registers.
    fn refresh(&self) {
        let Some(nic) = self.nic.get() else { return };
        nic.set_link(self.has_link());
        let core = self.threads.core();
        let registers = nic.lock();
        let switching = registers.switching();
        core.set_flow_rules(FlowRules::of(nic, &registers, pool_rules::pool_of(&switching, Place::Pf)));
        drop(registers);
        core.set_mode(pool_rules::mode(&switching));
        core.set_loopback(switching.loops_back);
        self.ports.iter().for_each(|port| self.follow(port, nic));
    }

    /// The exact filter of addresses of a port.
    fn addresses_of(self: &Arc<Self>, number: usize, nic: &X550Handle) -> AddressFilter {
        let (path, nic) = (Arc::downgrade(self), nic.clone());
        Box::new(move |address| {
            let path = path.upgrade();
            let pool = path.as_ref().and_then(|path| path.ports.get(number)?.pool.load_full());
            pool.is_none_or(|pool| pool_rules::wants_address(&nic.lock(), &pool, address))
        })
    }

    /// Makes a port follow the registers, if they have changed. Waits for a batch of the port in progress, if its link
    /// goes down.
    fn follow(&self, port: &FunctionPort, nic: &X550Handle) {
        let mut applied = port.applied.lock();
        let version = self.version.load(Ordering::Acquire);
        if std::mem::replace(&mut *applied, version) != version {
            let (rules, rss, pool) = {
                let registers = nic.lock();
                let pool = registers.pool(pool_rules::pool_of(&registers.switching(), port.place));
                (PoolRules::of(&registers, port.place), pool_rules::rss(&registers, port.place), pool)
            };
            port.pool.store(Some(Arc::new(pool)));
            rules.apply(&port.carried, self.has_link());
            port.steering.set(rss);
        }
    }

    /// As [`Self::reconcile`]. If the host fails, the log has that once, and [`Self::retry`] tries again.
    fn reconcile_or_note(self: &Arc<Self>, number: usize, nic: &X550Handle) {
        let reconciled = self.reconcile(number, nic);
        if let Some(port) = self.ports.get(number) {
            port.has_failed.store(reconciled.is_err(), Ordering::Release);
        }
        if let Err(error) = reconciled
            && !self.has_failed.swap(true, Ordering::Relaxed)
        {
            log::error!("{}: a function's queues cannot run: {error}; its next doorbell tries again", nic.id());
        }
    }

    /// Tries again to open a port that the host could not open. It is closed, so nothing is waited for.
    fn retry(self: &Arc<Self>, number: usize, nic: &X550Handle) {
        let failed = self.ports.get(number).filter(|port| port.has_failed.swap(false, Ordering::AcqRel));
        if failed.is_some_and(|port| port.open.load().is_none()) {
            self.reconcile_or_note(number, nic);
        }
    }

    /// Closes a port whose rings have changed, and opens it with those that should run. Waits for frames in progress.
    fn reconcile(self: &Arc<Self>, number: usize, nic: &X550Handle) -> io::Result<()> {
        let Some(port) = self.ports.get(number) else { return Ok(()) };
        let mut running = port.running.lock();
        let wanted = *port.wanted.lock();
        // A port that must stop ends, even if it was to start again in the meantime.
        let is_stopped = port.open.load().as_ref().is_some_and(|open| open.is_stopped());
        if *running == wanted && !is_stopped {
            return Ok(());
        }
        let core = self.threads.core();
        if let Some(open) = port.open.swap(None) {
            core.close(&open);
            // Nothing waits while a function does not run.
            nic.flush(Some(port.place));
        }
        *running = Layout::default();
        let Some(memory) = nic.memory(port.place).filter(|_| !wanted.is_empty()) else { return Ok(()) };
        let CarriedNic { state, policy, counters } = port.carried.clone();
        // The NIC notifies the PF's driver of the link.
        let (tell_link, wants_address) = (Box::new(|| {}), Some(self.addresses_of(number, nic)));
        let nic_of_port = PortNic { memory, state, policy, counters, tell_link, wants_address };
        // Drivers number the queues of their function, enabled or not.
        let first = pool_rules::first_queue(&nic.lock(), port.place);
        let receive = (first..QUEUES - wanted.receive.leading_zeros() as u16).map(|queue| {
            let steering = Arc::clone(&port.steering);
            let ring = ReceiveRing::X550(X550Receive::new(nic.clone(), queue, steering));
            (wanted.receive >> queue & 1 != 0).then_some(ring)
        });
        let send = queues(wanted.transmit).map(|queue| SendQueue::X550(X550Send::new(nic.clone(), queue)));
        let tx = PortTx::new(send, None);
        let open = OpenPort::new(port.index, nic_of_port, receive, tx, core.account(port.index))?;
        let (path, handle) = (Arc::downgrade(self), nic.clone());
        let follow = move || {
            if let Some(path) = path.upgrade()
                && let Some(port) = path.ports.get(number)
            {
                path.follow(port, &handle);
            }
        };
        let open = Arc::new(open.steered_by(Arc::clone(&port.steering), follow));
        self.threads.start()?;
        port.open.store(Some(Arc::clone(&open)));
        *running = wanted;
        core.open(&open);
        Ok(())
    }

    /// Records which rings should run. Returns the ports where that has changed, and stops their workers.
    fn note_wanted(&self, nic: &X550Handle) -> Vec<usize> {
        let mut changed = Vec::new();
        let layouts = Layout::all(&nic.lock(), self.ports.len());
        for (number, (port, layout)) in self.ports.iter().zip(layouts).enumerate() {
            let layout = if nic.may_run(port.place) { layout } else { Layout::default() };
            if std::mem::replace(&mut *port.wanted.lock(), layout) != layout {
                if let Some(open) = &*port.open.load() {
                    open.stop.store(true, Ordering::Release);
                }
                changed.push(number);
            }
        }
        changed
    }
}
