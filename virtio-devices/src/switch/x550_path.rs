//! The data path of an emulated X550: its PF and each of its VFs is a port of a switch.
//!
//! A port has the rings that the driver has enabled, and is opened again when that changes. The port's policy and
//! receive filter follow the registers of the function's pool: the switch's first worker looks at them before it
//! rebuilds the forwarding table, so a driver that writes registers again and again costs no more than one that
//! changes its filters.

mod host_end;
mod pool_rules;
pub(crate) mod ports;

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use x550::{Direction, Doorbell, Mac, Nic, Place};

use super::flow_rules::FlowRules;
use super::handle::Threads;
use super::port::OpenPort;
use super::port_nic::PortNic;
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
    /// The rings that should run.
    wanted: Mutex<Layout>,
    /// The rings that run. Locked while that changes.
    running: Mutex<Layout>,
    open: ArcSwapOption<OpenPort>,
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
    /// The pools may differ from what the ports' policies and filters were made of.
    is_stale: AtomicBool,
}

/// The bits of `range`.
fn bits(queues: &Range<u16>) -> u128 {
    let below = |end: u16| 1u128.checked_shl(end.into()).map_or(u128::MAX, |bit| bit - 1);
    below(queues.end) & !below(queues.start)
}

/// The numbers of the set bits.
fn queues(bits: u128) -> impl Iterator<Item = u16> {
    (0..QUEUES).filter(move |queue| bits >> queue & 1 != 0)
}

impl Layout {
    /// The queues of `place` that its driver has enabled.
    fn of(nic: &Nic, place: Place) -> Self {
        let owned = |queue: u16| nic.owner(queue).0 == place;
        let mut layout = Self::default();
        for queue in (0..QUEUES).filter(|queue| owned(*queue)) {
            layout.receive |= u128::from(nic.receive_queue(queue).enabled) << queue;
            layout.transmit |= u128::from(nic.transmit_queue(queue).enabled) << queue;
        }
        layout
    }

    fn has(self, doorbell: Doorbell) -> bool {
        let bits = match doorbell.direction {
            Direction::Receive => self.receive,
            Direction::Transmit => self.transmit,
        };
        bits & bits_of(doorbell.queue) != 0
    }

    fn is_empty(self) -> bool {
        self == Self::default()
    }
}

fn bits_of(queue: u16) -> u128 {
    bits(&(queue..queue + 1))
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
                wanted: Mutex::default(),
                running: Mutex::default(),
                open: ArcSwapOption::empty(),
            }
        });
        let [is_held, is_connected, is_stale] = [false, true, true].map(AtomicBool::new);
        let (ports, nic) = (ports.collect(), OnceLock::new());
        let path = Arc::new(Self { threads, ports, nic, is_connected, is_held, is_stale });
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
        self.is_connected.load(Ordering::Acquire)
            && !self.is_held.load(Ordering::Acquire)
            && self.threads.core().uplink_up()
    }

    /// Shows the link to the drivers.
    fn tell_link(&self) {
        if let Some(nic) = self.nic.get() {
            nic.set_link(self.has_link());
        }
        self.is_stale.store(true, Ordering::Release);
        self.threads.core().outdate();
    }

    fn port(&self, place: Place) -> Option<&FunctionPort> {
        match place {
            Place::Pf => self.ports.first(),
            Place::Vf(index) => self.ports.get(usize::from(index) + 1),
        }
    }

    /// Makes link, policies and filters follow the uplink and the registers.
    fn refresh(&self) {
        let Some(nic) = self.nic.get() else { return };
        let has_link = self.has_link();
        nic.set_link(has_link);
        if !self.is_stale.swap(false, Ordering::AcqRel) {
            return;
        }
        let core = self.threads.core();
        let registers = nic.lock();
        let switching = registers.switching();
        core.set_flow_rules(FlowRules::of(nic, &registers, pool_rules::first_queue_of_pf(&registers)));
        drop(registers);
        core.set_mode(pool_rules::mode(&switching));
        for port in &self.ports {
            // The lock is released in between: each pool takes some microseconds.
            let rules = PoolRules::of(&nic.lock(), port.place);
            rules.apply(&port.carried, has_link);
            port.steering.set(pool_rules::rss(&nic.lock(), port.place));
        }
    }

    /// The rings of a port that should run now.
    fn wanted(nic: &X550Handle, place: Place) -> Layout {
        if nic.may_run(place) { Layout::of(&nic.lock(), place) } else { Layout::default() }
    }

    /// Closes a port whose rings have changed, and opens it with those that should run. Waits for frames in progress.
    fn reconcile(&self, port: &FunctionPort, nic: &X550Handle) -> io::Result<()> {
        let mut running = port.running.lock();
        let wanted = *port.wanted.lock();
        if *running == wanted {
            return Ok(());
        }
        let core = self.threads.core();
        if let Some(open) = port.open.swap(None) {
            core.close(&open);
        }
        *running = Layout::default();
        let Some(memory) = nic.memory(port.place).filter(|_| !wanted.is_empty()) else { return Ok(()) };
        let CarriedNic { state, policy, counters } = port.carried.clone();
        // The NIC notifies the PF's driver of the link.
        let nic_of_port = PortNic { memory, state, policy, counters, tell_link: Box::new(|| {}) };
        let receive = queues(wanted.receive).map(|queue| {
            let steering = Arc::clone(&port.steering);
            Some(ReceiveRing::X550(X550Receive::new(nic.clone(), queue, steering)))
        });
        let send = queues(wanted.transmit).map(|queue| SendQueue::X550(X550Send::new(nic.clone(), queue)));
        let tx = PortTx::new(send, None);
        let open = OpenPort::new(port.index, nic_of_port, receive, tx, core.account(port.index))?;
        let open = Arc::new(open.steered_by(Arc::clone(&port.steering)));
        self.threads.start()?;
        port.open.store(Some(Arc::clone(&open)));
        *running = wanted;
        core.open(&open);
        Ok(())
    }

    /// Records which rings should run. Returns the ports where that has changed, and stops their workers.
    fn note_wanted(&self, nic: &X550Handle) -> Vec<usize> {
        let mut changed = Vec::new();
        for (number, port) in self.ports.iter().enumerate() {
            let layout = Self::wanted(nic, port.place);
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
