//! Devices and their parts, with a socket pair in place of a tap.

#[path = "../../../tests/fixtures/src/namespace.rs"]
pub(crate) mod namespace;
mod sample;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use vm_memory::{Bytes, GuestAddress};

use super::counters::{Counter, NetCounters, Tally};
use super::enforced::PolicyCell;
use super::pass::{Pass, Shared};
use super::state::NetState;
use super::wire::Backend;
use super::{Net, NetSpec};
use crate::backend::{Tap, TapQueue};
use crate::device::failures::Failures;
use crate::frames::net_protocol::MAX_READ;
use crate::frames::policy::Policy;
use crate::frames::spill::Spill;
use crate::queue::ring::Ring;
use crate::{DmaView, GuestMap, Interrupts, RateLimits, SharedQueue, VirtioDevice};

pub(crate) use self::sample::*;
pub(crate) use crate::testing::driver_queue::*;
pub(crate) use crate::testing::guest;

pub(crate) fn sockets() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None).unwrap()
}

/// A backend and the data that workers share, for queues that are run step by step, without a thread.
pub(crate) struct Rig {
    pub memory: GuestMap,
    tap: Tap,
    pub peer: OwnedFd,
    pub state: NetState,
    pub policy: PolicyCell,
    tally: Tally,
    counters: NetCounters,
    failures: Failures,
    pub interrupts: Interrupts,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let (near, peer) = sockets();
        Self::over(near, peer)
    }

    /// A rig with `backend` in place of a tap, and `peer` at its other end.
    pub(crate) fn over(backend: OwnedFd, peer: OwnedFd) -> Self {
        let interrupts = Interrupts::new(8, 8);
        (0..8).for_each(|queue| interrupts.set_queue_vector(queue, queue));
        Self {
            memory: memory(),
            tap: Tap::over_sockets(vec![backend]),
            peer,
            state: NetState::new(MAC, true, 0),
            policy: PolicyCell::new(Policy::default(), RateLimits::default()),
            tally: Tally::new(),
            counters: NetCounters::new(),
            failures: Failures::new("_net0", "tap"),
            interrupts,
        }
    }

    /// Runs `step`, and publishes its counts.
    pub(crate) fn pass<T>(&mut self, step: impl FnOnce(&mut Pass<'_>) -> T) -> T {
        let Self { memory, tap, state, policy, tally, counters, failures, interrupts, .. } = self;
        let backend: &TapQueue = &tap.queues()[0].lock();
        let memory = &DmaView::identity(memory);
        let result = step(&mut Pass { memory, backend, state, policy, tally, failures, interrupts, log: None });
        tally.flush(counters);
        result
    }

    pub(crate) fn ring<'q>(&self, driver: &'q SharedQueue, index: u16, event_idx: bool) -> Ring<'q> {
        Ring::open(index, driver.lock(), event_idx, &DmaView::identity(&self.memory)).unwrap()
    }

    pub(crate) fn count(&self, counter: Counter) -> u64 {
        self.counters.get(counter)
    }

    /// Every counter that is not 0.
    pub(crate) fn counts(&self) -> Vec<(Counter, u64)> {
        nonzero(&self.counters)
    }

    pub(crate) fn interrupted(&self, queue: u16) -> bool {
        self.interrupts.eventfd(queue).unwrap().read().is_ok()
    }
}

impl Net {
    /// Charges the transmit limit, as if this many bytes had been sent.
    pub(crate) fn use_up(&self, bytes: usize) {
        self.policy.load().transmit.take(bytes, 1);
    }
}

/// Memory for bytes beyond the driver's buffers.
pub(crate) fn spill() -> Spill {
    Spill::new(MAX_READ).unwrap()
}

pub(crate) fn nonzero(counters: &NetCounters) -> Vec<(Counter, u64)> {
    Counter::ALL.iter().map(|counter| (*counter, counters.get(*counter))).filter(|(_, count)| *count != 0).collect()
}

/// A log that keeps its lines.
struct Recorder(Mutex<Vec<String>>);

static RECORDER: Recorder = Recorder(Mutex::new(Vec::new()));

impl log::Log for Recorder {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        self.0.lock().push(record.args().to_string());
    }

    fn flush(&self) {}
}

/// Starts recording logs at the level `info`.
pub(crate) fn record_log() {
    // Another test may have been the first.
    let _ = log::set_logger(&RECORDER);
    log::set_max_level(log::LevelFilter::Info);
}

/// The recorded log of the NIC `id`.
pub(crate) fn logged(id: &str) -> Vec<String> {
    let lines = RECORDER.0.lock();
    lines.iter().filter(|line| line.starts_with(&format!("{id}: "))).cloned().collect()
}

/// The next frame that the device sent, with its header.
pub(crate) fn receive(peer: &impl AsFd) -> Option<Vec<u8>> {
    let mut data = vec![0; 1 << 17];
    let len = rustix::io::read(peer, &mut data).ok().filter(|len| *len != 0)?;
    data.truncate(len);
    Some(data)
}

/// Sends the device a frame, with its header.
pub(crate) fn send(peer: &impl AsFd, data: &[u8]) {
    assert_eq!(rustix::io::write(peer, data).unwrap(), data.len());
}

/// A NIC, with the other ends of its sockets.
pub(crate) type Guest = guest::Guest<Net, Vec<OwnedFd>>;

impl Guest {
    pub(crate) fn new(pairs: u16, size: u16) -> Self {
        Self::with(spec(pairs, size))
    }

    pub(crate) fn with(spec: NetSpec) -> Self {
        let (near, peers): (Vec<_>, Vec<_>) = (0..spec.queue_pairs).map(|_| sockets()).unzip();
        let mut guest = Self::over(spec, Tap::over_sockets(near));
        guest.host = peers;
        guest
    }

    /// A NIC over `backend`, without peers on this side.
    pub(crate) fn over(spec: NetSpec, backend: impl Into<Backend>) -> Self {
        Self::over_in(spec, backend, memory())
    }

    /// As [`Self::over`], with `map` for guest memory, of at least the size of [`memory`].
    pub(crate) fn over_in(spec: NetSpec, backend: impl Into<Backend>, map: GuestMap) -> Self {
        let net = Net::new(spec, backend).unwrap();
        let sizes = net.queue_sizes().to_vec();
        Self::stopped(net, Vec::new(), &map, &sizes)
    }

    /// Starts the queues, and waits until frames no longer count as stale.
    pub(crate) fn start_fresh(&mut self, features: u64) {
        let stale = self.count(Counter::RxStale);
        if self.device.fresh {
            self.host.iter().for_each(|peer| send(peer, &[0]));
        }
        let fresh = self.device.fresh;
        self.start_with(features);
        let receiving = self.workers.iter().filter(|worker| worker.doorbells[0].0 % 2 == 0).count() as u64;
        eventually("the start", || !fresh || self.count(Counter::RxStale) == stale + receiving);
    }

    /// True if the device has read all frames that it was sent.
    pub(crate) fn is_drained(&self, pair: usize) -> bool {
        let mut queued: libc::c_int = 0;
        let fd = self.host[pair].as_fd().as_raw_fd();
        // SAFETY: the kernel writes an int.
        assert_eq!(unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut queued) }, 0);
        queued == 0
    }

    /// The data that the workers of a start share.
    pub(crate) fn shared(&self) -> Arc<Shared> {
        self.device.starting(&self.to_start(0)).shared()
    }

    pub(crate) fn count(&self, counter: Counter) -> u64 {
        self.device.counters().get(counter)
    }

    /// Makes `count` receive buffers of `len` bytes available.
    pub(crate) fn provide(&mut self, queue: u16, count: u64, len: u32) {
        for i in 0..count {
            self.queues[usize::from(queue)].add(&[(
                BUFFERS + (u64::from(queue) << 19) + i * u64::from(len),
                len,
                WRITE,
            )]);
        }
        self.kick(queue);
    }

    /// Sends a control command to the control queue with this index, and returns the device's answer.
    pub(crate) fn command(&mut self, queue: u16, command: &[u8]) -> u8 {
        let driver = &mut self.queues[usize::from(queue)];
        let at = MEMORY - (1 << 18);
        driver.write(at - 1, [0xee]);
        driver.memory.write_slice(command, GuestAddress(at)).unwrap();
        driver.add(&[(at, command.len() as u32, 0), (at - 1, 1, WRITE)]);
        self.kick(queue);
        let driver = &mut self.queues[usize::from(queue)];
        eventually("an answer", || !driver.take_used().is_empty());
        driver.bytes(at - 1, 1)[0]
    }
}

pub(crate) fn spec(queue_pairs: u16, queue_size: u16) -> NetSpec {
    NetSpec { queue_pairs, queue_size, ..NetSpec::new("_net0", MAC) }
}
