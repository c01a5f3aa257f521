//! A worker of a switch: it carries the frames of its ports, in turns, and those from the uplink.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::control::{Served, serve};
use super::forward::Forwarder;
use super::mailbox::{Message, WorkerMailbox};
use super::polling::After;
use super::port::OpenPort;
use super::rings::SendRing;
use super::sender::{PortTx, Started, TxScratch};
use super::source::End;
use super::switch_core::SwitchCore;
use super::table::{PortIndex, Table};
use super::tx_batch::{Sender, TxBatch};
use super::uplink_rx::UplinkRx;
use super::uplink_watch::UplinkWatch;
use crate::net::{Counter, rarp};
use crate::os::clock;
use crate::queue::ring::BrokenRing;

/// The bytes that a port of weight 1 may send in a round: ports of the usual weight, 10, have 160 KiB, which is more
/// than a batch of usual frames costs. With less, a round's system calls would be for half a batch.
const QUANTUM: i64 = 16 << 10;
/// The time per second that frames wait for a receiver's buffers.
const PATIENCE: Duration = Duration::from_millis(1);
/// The most batches of a port before others get their turn, whatever its credit.
const MAX_BATCHES: usize = 8;

/// A worker.
pub(crate) struct SwitchWorker {
    core: Arc<SwitchCore>,
    /// The worker's number.
    index: usize,
    forwarder: Forwarder,
    /// The ports that may have something to send, each once.
    active: VecDeque<PortIndex>,
    /// By port, true if it is among them.
    is_active: Vec<bool>,
    /// The ports that wait for a time: for a limit, or a receiver's buffers.
    waiting: Vec<Waiting>,
    /// Ports with deferred transmit interrupts, and when each is due.
    reports: Vec<(PortIndex, Instant)>,
    scratch: TxScratch,
    patience: Duration,
    /// The tokens that have signalled.
    tokens: Vec<u64>,
    /// The uplink, if this worker reads it.
    uplink: Option<UplinkRx>,
    /// The state of the uplink then.
    watch: Option<UplinkWatch>,
}

struct Waiting {
    port: PortIndex,
    until: Instant,
    /// The wait is for a receiver's buffers, which may come earlier.
    blocked: bool,
}

/// The outcome of a port's turn.
enum PortTurn {
    Idle,
    More,
    Wait { time: Duration, blocked: bool },
}

impl SwitchWorker {
    /// The worker with this number, which reads `uplink`.
    pub(crate) fn new(core: Arc<SwitchCore>, index: usize, uplink: Option<UplinkRx>) -> Self {
        let is_active = vec![false; usize::from(core.ports())];
        let forwarder = Forwarder::new(Arc::clone(&core), index);
        let (active, waiting, scratch, tokens) = (VecDeque::new(), Vec::new(), TxScratch::default(), Vec::new());
        let (patience, watch) = (PATIENCE, uplink.as_ref().map(|_| UplinkWatch::new()));
        let reports = Vec::new();
        Self { core, index, forwarder, active, is_active, waiting, reports, scratch, patience, tokens, uplink, watch }
    }

    /// Disables waiting for receive buffers (tests).
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn impatient(self) -> Self {
        Self { patience: Duration::ZERO, ..self }
    }

    /// Runs until the switch ends.
    pub(crate) fn run(mut self) {
        self.begin();
        while !self.core.end.load(Ordering::Acquire) {
            self.step(None);
        }
    }

    /// Watches the uplink, if this worker reads it.
    pub(crate) fn begin(&mut self) {
        let (core, index) = (&self.core, u64::from(self.core.uplink_index()));
        if let (Some(rx), Some(uplink), Some(mailbox)) =
            (&mut self.uplink, core.uplink(), core.mailboxes().get(self.index))
        {
            rx.begin(uplink, |fd| mailbox.watch(fd, index));
        }
    }

    /// Waits for something to do, at most for `limit`, and does it.
    pub(crate) fn step(&mut self, limit: Option<Duration>) {
        let core = Arc::clone(&self.core);
        let Some(mailbox) = core.mailboxes().get(self.index) else { return };
        let table = if self.index == 0 { core.follow() } else { None };
        let mut tokens = std::mem::take(&mut self.tokens);
        if mailbox.wait([self.timeout(table), limit].into_iter().flatten().min(), &mut tokens) {
            self.woken(mailbox);
        }
        for token in tokens.drain(..) {
            self.rung(token);
        }
        self.tokens = tokens;
        self.look_at_uplink(&core, mailbox);
        self.expire();
        self.round(&core);
    }

    /// Checks the uplink, if this worker reads it: links follow its state, and a new tap replaces a deleted one.
    fn look_at_uplink(&mut self, core: &SwitchCore, mailbox: &WorkerMailbox) {
        let (Some(watch), Some(rx), Some(uplink)) = (&mut self.watch, &mut self.uplink, core.uplink()) else { return };
        if let Some(tap) = watch.take_found() {
            let old = uplink.tap();
            match uplink.adopt(tap) {
                Ok(()) => {
                    mailbox.forget(&**old);
                    rx.begin(uplink, |fd| mailbox.watch(fd, u64::from(core.uplink_index())));
                }
                // The next check searches again.
                Err(error) => log::debug!("{}: {error}", core.id()),
            }
        }
        if let Some(up) = watch.look(uplink) {
            core.set_uplink_up(up);
        }
    }

    /// The time to wait for something to do; `None` is forever.
    pub(super) fn timeout(&self, table: Option<Duration>) -> Option<Duration> {
        let is_held = self.core.round().is_none();
        if !is_held && (!self.active.is_empty() || self.uplink.as_ref().is_some_and(UplinkRx::is_ready)) {
            return Some(Duration::ZERO);
        }
        let reports = self.reports.iter().map(|(_, due)| *due);
        let until =
            self.waiting.iter().map(|waiting| waiting.until).chain(reports).chain(self.core.interrupt_due()).min();
        let ports = until.map(|until| until.saturating_duration_since(clock::now()));
        let look = self.watch.as_ref().map(UplinkWatch::wait);
        [ports, table, look].into_iter().flatten().min()
    }

    /// Reads messages, and retries ports that wait for buffers.
    fn woken(&mut self, mailbox: &WorkerMailbox) {
        for message in mailbox.take_mail() {
            match message {
                // If watching fails for lack of memory, the port gets no doorbells until its driver resets it.
                Message::Opened(port) => {
                    let _ = mailbox.watch(crate::os::eventfd::borrow(&port.kick), u64::from(port.index));
                    self.activate(port.index);
                }
                Message::Closed(port) => mailbox.forget(crate::os::eventfd::borrow(&port.kick)),
                Message::Owes(port) => self.activate(port),
            }
        }
        self.take_waiting(|waiting| waiting.blocked);
    }

    /// Handles a doorbell, or a frame from the uplink.
    fn rung(&mut self, token: u64) {
        let Ok(port) = PortIndex::try_from(token) else { return };
        if port == self.core.uplink_index() {
            if let Some(uplink) = &mut self.uplink {
                uplink.set_ready();
            }
            return;
        }
        let Some(open) = self.core.open_port(port) else { return };
        open.bell.heard();
        let waiters = open.take_waiters();
        for (index, mailbox) in self.core.mailboxes().iter().enumerate() {
            if waiters & 1 << index != 0 && index != self.index {
                mailbox.wake();
            }
        }
        if waiters & 1 << self.index != 0 {
            self.take_waiting(|waiting| waiting.blocked);
        }
        open.nic.counters.add(Counter::Kicks, 1);
        self.activate(port);
    }

    fn activate(&mut self, port: PortIndex) {
        if let Some(active) = self.is_active.get_mut(usize::from(port))
            && !std::mem::replace(active, true)
        {
            self.active.push_back(port);
        }
    }

    /// Retries waiting ports that are `due`.
    fn take_waiting(&mut self, due: impl Fn(&Waiting) -> bool) {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|waiting| {
            let due = due(waiting);
            if due {
                self.activate(waiting.port);
            }
            !due
        });
        self.waiting = waiting;
    }

    fn expire(&mut self) {
        if !self.waiting.is_empty() {
            let now = clock::now();
            self.take_waiting(|waiting| waiting.until <= now);
        }
        if !self.reports.is_empty() {
            self.report(clock::now());
        }
        self.send_interrupts();
    }

    /// Sends the interrupts of ports that have waited long enough.
    fn send_interrupts(&self) {
        if self.core.interrupt_due().is_some_and(|due| due <= clock::now()) {
            self.core.send_interrupts();
        }
    }

    /// Sends the transmit interrupts that are due at the time `now`.
    fn report(&mut self, now: Instant) {
        let core = &self.core;
        self.reports.retain_mut(|(port, due)| {
            if *due > now {
                return true;
            }
            let Some(open) = core.open_port(*port) else { return false };
            let mut tx = open.tx.lock();
            if open.is_stopped() {
                return false;
            }
            tx.report(Some(now), &open.nic.memory.pass());
            tx.tally.flush(&open.nic.counters);
            tx.report_due().is_some_and(|next| {
                *due = next;
                true
            })
        });
    }

    /// Records the deadline of a port's transmit interrupt, if there is one.
    fn note_report(&mut self, port: PortIndex, due: Option<Instant>) {
        let known = self.reports.iter().position(|(other, _)| *other == port);
        match (known, due) {
            (Some(known), Some(due)) => self.reports.get_mut(known).into_iter().for_each(|(_, known)| *known = due),
            (Some(known), None) => _ = self.reports.swap_remove(known),
            (None, Some(due)) => self.reports.push((port, due)),
            (None, None) => {}
        }
    }

    /// Gives a turn to each port that may have something to send, and to the uplink; to none while frames are held.
    fn round(&mut self, core: &SwitchCore) {
        for _ in 0..self.active.len() {
            let Some(port) = self.active.pop_front() else { break };
            if let Some(active) = self.is_active.get_mut(usize::from(port)) {
                *active = false;
            }
            let Some(open) = core.open_port(port) else { continue };
            match self.turn(core, &open) {
                PortTurn::Idle => {}
                PortTurn::More => self.activate(port),
                PortTurn::Wait { time, blocked } => {
                    self.waiting.retain(|waiting| waiting.port != port);
                    self.waiting.push(Waiting { port, until: clock::now() + time, blocked });
                }
            }
            // The turns of many busy ports take longer than an interval.
            self.send_interrupts();
        }
        if let (Some(rx), Some(uplink)) = (&mut self.uplink, core.uplink())
            && rx.is_ready()
            && let Some(_round) = core.round()
        {
            let table = core.table();
            rx.batch(uplink, &core.end, |batch| self.forwarder.forward(batch, &table));
            drop(table);
            // They count in the batch's cost, and belong to no port.
            _ = self.forwarder.take_segments();
            self.forwarder.signal();
        }
    }

    /// A port's turn: its debt, its commands, and the frames that its credit allows. Locks are held for a part of it at
    /// a time: for the commands, and for each batch.
    fn turn(&mut self, core: &SwitchCore, open: &OpenPort) -> PortTurn {
        let Some(more) = self.begin_turn(core, open) else { return PortTurn::Idle };
        let turn = self.send(core, open);
        let mut tx = open.tx.lock();
        tx.tally.flush(&open.nic.counters);
        self.note_report(open.index, tx.report_due());
        match turn {
            // This includes ports with waiting packets: their commands and debt do not wait.
            _ if more => PortTurn::More,
            PortTurn::Idle => {
                let after = tx.polling.drained(open.take_heard(), clock::now());
                // The queues are drained once more after each change.
                open.bell.silence(tx.polling.gathers());
                match after {
                    After::Bell => PortTurn::Idle,
                    After::Again => PortTurn::More,
                    After::Wait(time) => PortTurn::Wait { time, blocked: false },
                }
            }
            turn => turn,
        }
    }

    /// Begins a port's turn. Returns true if there is more to do than to send; `None` if the port is stopped.
    fn begin_turn(&self, core: &SwitchCore, open: &OpenPort) -> Option<bool> {
        let Some(_round) = core.round() else { return Some(true) };
        let mut tx = open.tx.lock();
        if open.is_stopped() {
            return None;
        }
        self.announce(open);
        let granted = QUANTUM * i64::from(core.settings(open.index).weight.max(1));
        tx.grant(granted);
        tx.pay(&open.account.debt, granted);
        Some(self.serve(open, &mut tx).more || open.account.debt.is_due())
    }

    /// Announces the port's addresses behind the uplink, if that was requested. The switch itself learns no addresses.
    fn announce(&self, open: &OpenPort) {
        let nic = &open.nic;
        if nic.state.take_rarp()
            && nic.state.link_up()
            && let Some(uplink) = self.core.uplink()
        {
            uplink.announce(&rarp::frames(&nic.state.filter(), &nic.policy.load().policy));
        }
    }

    /// Executes the driver's commands, unless the port owes time for earlier ones.
    fn serve(&self, open: &OpenPort, tx: &mut PortTx) -> Served {
        let memory = open.nic.memory.pass();
        if !tx.has_command(&memory) {
            return Served::default();
        }
        if !tx.has_credit() {
            return Served { more: true, ..Served::default() };
        }
        let began = clock::now();
        let served = serve(tx, &memory);
        tx.charge_time(clock::now().saturating_duration_since(began));
        if served.filter_changed {
            self.core.outdate();
        }
        served
    }

    fn send(&mut self, core: &SwitchCore, open: &OpenPort) -> PortTurn {
        let (mut idle, mut batches) = (0, 0);
        loop {
            let Some(_round) = core.round() else { return PortTurn::More };
            open.follow.iter().for_each(|follow| follow());
            let mut guard = open.tx.lock();
            let tx = &mut *guard;
            // A stopped port has none left.
            if idle >= tx.len() {
                return PortTurn::Idle;
            }
            if batches == MAX_BATCHES.max(tx.len()) {
                return PortTurn::More;
            }
            batches += 1;
            let queue = tx.next_queue();
            match self.batch(open, tx, queue) {
                End::Drained => idle += 1,
                End::More if tx.has_credit() => idle = 0,
                End::More => return PortTurn::More,
                End::Stopped => return PortTurn::Idle,
                End::Limited(time) => return PortTurn::Wait { time, blocked: false },
                End::Blocked(time) => {
                    tx.repeat(queue);
                    return PortTurn::Wait { time, blocked: true };
                }
            }
        }
    }

    /// Carries a batch of frames of a queue.
    fn batch(&mut self, open: &OpenPort, tx: &mut PortTx, queue: usize) -> End {
        let nic = &open.nic;
        // All of these stay valid for the whole batch, and a thread that changes them waits for its end.
        let (table, link) = (self.core.table(), nic.state.link().batch());
        let memory = nic.memory.pass();
        let (stop, end, patience) = (&open.stop, &self.core.end, self.patience);
        let gathers = tx.polling.gathers();
        let (core, index) = (&self.core, open.index);
        let uplink = core.shares().map(|shares| (core.uplink_index(), shares));
        let port = Sender { index, nic, stop, end, patience, gathers, uplink };
        let forwarder = &mut self.forwarder;
        let (frames, end) = match tx.start(queue, port, &memory, &mut self.scratch) {
            Ok(Some(Started::Virtqueue(batch))) => carry(forwarder, batch, &table),
            Ok(Some(Started::X550(batch))) => carry(forwarder, batch, &table),
            Ok(None) => (0, Ok(End::Drained)),
            Err(broken) => (0, Err(broken)),
        };
        drop((table, link));
        tx.polling.took(frames);
        tx.charge_frames(self.forwarder.take_segments());
        self.forwarder.signal();
        end.unwrap_or_else(|BrokenRing| {
            tx.give_up(queue);
            End::Drained
        })
    }
}

/// Carries a batch of frames. Returns their number, and the reason for its end.
fn carry<R: SendRing>(
    forwarder: &mut Forwarder,
    mut batch: TxBatch<'_, R>,
    table: &Table,
) -> (usize, Result<End, BrokenRing>) {
    let end = forwarder.forward(&mut batch, table);
    let frames = batch.completed();
    (frames, batch.finish(end))
}
