//! From a source of frames to their receivers.

use std::sync::Arc;

use super::flow_rules::FlowRules;
use super::frame::Frame;
use super::mailbox::Message;
use super::port::OpenPort;
use super::rx_run::{Delivery, DeliveryReason, RxRun, RxScratch};
use super::source::{End, Next, Source};
use super::switch_core::SwitchCore;
use super::table::{Destinations, PortIndex, Route, Table};
use super::tx_batch::FRAME_COST;
use crate::device::failures::RequestKind;
use crate::net::Counter;
use crate::queue::ring::BrokenRing;

/// A worker's state for forwarding.
pub(crate) struct Forwarder {
    core: Arc<SwitchCore>,
    /// The worker's number.
    worker: usize,
    /// The receive queues that got frames in this batch, and whose drivers are not interrupted yet.
    touched: Vec<(Arc<OpenPort>, usize)>,
    scratch: RxScratch,
}

impl Forwarder {
    /// A forwarder for the worker with this number.
    pub(crate) fn new(core: Arc<SwitchCore>, worker: usize) -> Self {
        Self { core, worker, touched: Vec::new(), scratch: RxScratch::default() }
    }

    /// Forwards a batch of frames.
    ///
    /// # Errors
    ///
    /// Fails if the source's ring is invalid.
    pub(crate) fn forward(&mut self, source: &mut impl Source, table: &Table) -> Result<End, BrokenRing> {
        let mut pending = None;
        let core = Arc::clone(&self.core);
        let rules = core.flow_rules();
        loop {
            let next = match pending.take() {
                Some(frame) => Next::Frame(frame),
                None => next_of(source, table, rules.as_deref(), core.uplink_index())?,
            };
            let frame = match next {
                Next::Frame(frame) => frame,
                Next::End(end) => return Ok(end),
            };
            if let Some(to) = frame.mirror {
                self.copy(to, &frame, source, DeliveryReason::Mirror);
                source.mirrored(&frame);
                if source.is_spent() {
                    source.put_back(&frame, 0);
                    return Ok(End::More);
                }
            }
            // The table may have changed since the batch that divided a frame: each gets it once.
            let is_done = match frame.route {
                _ if source.served().is_empty() => false,
                Err(_) => true,
                Ok(Route::One(port)) => source.served().has(port),
                Ok(Route::Many(_)) => false,
            };
            match frame.route {
                _ if is_done => conclude(&frame, source, Ok(()), 0),
                Err(reason) => source.dropped(reason),
                Ok(Route::One(port)) if port == self.core.uplink_index() => {
                    let sent = self.send(&frame, source);
                    conclude(&frame, source, sent, 1);
                }
                Ok(Route::One(port)) => match self.run_to(port, frame, source, (table, rules.as_deref()))? {
                    Next::Frame(next) => pending = Some(next),
                    // If the receiver's port has closed, there may be frames for others.
                    Next::End(End::More) => {}
                    Next::End(end) => return Ok(end),
                },
                Ok(Route::Many(ports)) => {
                    if let Some(end) = self.flood(&frame, ports, source) {
                        return Ok(end);
                    }
                }
            }
        }
    }

    /// Delivers a frame to several receivers. Returns [`End::More`] if there are more of them than the batch may cost:
    /// the others get it in the next.
    fn flood(&mut self, frame: &Frame<'_>, ports: Destinations<'_>, source: &mut impl Source) -> Option<End> {
        let (mut receivers, mut sent) = (0, Ok(()));
        for port in ports {
            if source.served().has(port) {
                continue;
            }
            if source.is_stopped() {
                break;
            }
            if receivers > 0 && source.is_spent() {
                source.put_back(frame, receivers);
                return Some(End::More);
            }
            receivers += 1;
            source.served().add(port);
            if port == self.core.uplink_index() {
                sent = self.send(frame, source);
            } else {
                self.copy(port, frame, source, DeliveryReason::Sender);
            }
        }
        // A frame that any receiver got is not lost.
        let sent = if source.served().len() > 1 { Ok(()) } else { sent };
        conclude(frame, source, sent, receivers);
        None
    }

    fn send(&self, frame: &Frame<'_>, source: &mut impl Source) -> Result<(), Counter> {
        let uplink = self.core.uplink().ok_or(Counter::TxUnknown)?;
        let restricted;
        let frame = match uplink.rules().map(|rules| rules.outgoing(frame)) {
            None => frame,
            Some(Ok(allowed)) => {
                restricted = allowed;
                &restricted
            }
            Some(Err(reason)) => {
                // It is lost behind its NIC: the driver is not told, as it is not of a loss in the network.
                uplink.counters().add(reason, 1);
                return Ok(());
            }
        };
        let sent = source.send(frame, uplink);
        let counters = uplink.counters();
        match sent {
            Ok(()) => {
                uplink.failures().worked(RequestKind::Write);
                counters.add(Counter::TxFrames, 1);
                counters.add(Counter::TxBytes, frame.len as u64);
            }
            Err(reason) => counters.add(reason, 1),
        }
        sent
    }

    /// Delivers a frame to one of several receivers. It never waits.
    fn copy(&mut self, port: PortIndex, frame: &Frame<'_>, source: &mut impl Source, reason: DeliveryReason) {
        let Some(open) = self.core.open_port(port) else { return self.core.count_closed(port) };
        let queue = open.queue_of(source.flow(frame), frame, &source.body());
        let spent = self.run(&open, queue, |run| {
            match run.deliver(frame, &source.body(), reason) {
                Delivery::NoBuffers if reason == DeliveryReason::Mirror => run.lose_mirrored(),
                Delivery::NoBuffers => run.drop_for_lack(false),
                Delivery::Done | Delivery::Dropped => {}
            }
            run.take_unspent()
        });
        source.spend(frame.len + FRAME_COST + spent.unwrap_or(0));
    }

    /// Forwards a frame, and those that follow it to the same port. Returns the first that goes elsewhere, or the
    /// reason why there is none; [`End::More`] also if the port has closed.
    fn run_to<'t>(
        &mut self,
        port: PortIndex,
        mut frame: Frame<'t>,
        source: &mut impl Source,
        (table, rules): (&'t Table, Option<&FlowRules>),
    ) -> Result<Next<'t>, BrokenRing> {
        let uplink = self.core.uplink_index();
        let open = self.core.open_port(port);
        let worker = self.worker;
        let ran = open.and_then(|open| {
            let queue = open.queue_of(source.flow(&frame), &frame, &source.body());
            open.set_heard();
            self.run(&open, queue, |run| {
                loop {
                    let delivery = run.deliver(&frame, &source.body(), DeliveryReason::Sender);
                    source.spend(run.take_unspent());
                    if delivery == Delivery::NoBuffers {
                        match run.patience(source.patience(), source.stop()) {
                            Some(patience) => {
                                let more = run.wait_for_buffers(worker);
                                if more && !source.is_spent() {
                                    continue;
                                }
                                source.put_back(&frame, 0);
                                return Ok(Next::End(if more { End::More } else { End::Blocked(patience) }));
                            }
                            None => run.drop_for_lack(source.is_patient()),
                        }
                    }
                    source.done(&frame, 1);
                    frame = match next_of(source, table, rules, uplink)? {
                        Next::Frame(next) if matches!(next.route, Ok(Route::One(to)) if to == port) => next,
                        other => return Ok(other),
                    };
                    // Another flow may have another queue.
                    let same_queue = open.queue_of(source.flow(&frame), &frame, &source.body()) == queue;
                    if frame.mirror.is_some() || !same_queue || open.is_stopped() {
                        return Ok(Next::Frame(frame));
                    }
                }
            })
        });
        ran.unwrap_or_else(|| {
            self.core.count_closed(port);
            source.done(&frame, 1);
            Ok(Next::End(End::More))
        })
    }

    /// Locks a receive queue for a run; `None` if it is closed.
    fn run<T>(&mut self, open: &Arc<OpenPort>, queue: usize, run: impl FnOnce(&mut RxRun<'_, '_>) -> T) -> Option<T> {
        let memory = open.nic.memory.pass();
        let mut rx = open.rx(queue)?.lock();
        if rx.touch() {
            self.touched.push((Arc::clone(open), queue));
        }
        let (ran, broken) = match rx.start(open.receiver(), &memory, &mut self.scratch) {
            Ok(Some(mut running)) => {
                // Even if the receiver's ring breaks, its senders' frames have been handled.
                let result = run(&mut running);
                (Some(result), running.finish().is_err())
            }
            Ok(None) => (None, false),
            Err(BrokenRing) => (None, true),
        };
        if broken {
            rx.give_up();
        }
        // The receiver pays for the cost that its sender is not charged for.
        let price = std::mem::take(&mut self.scratch.price);
        if price != 0 && open.account.debt.add(price) {
            self.core.tell(open.index, Message::Owes(open.index));
        }
        ran
    }

    /// Returns the number of segments that were made since the last call.
    pub(crate) fn take_segments(&mut self) -> usize {
        std::mem::take(&mut self.scratch.segments)
    }

    /// Interrupts the drivers that got frames.
    pub(crate) fn signal(&mut self) {
        for (open, queue) in self.touched.drain(..) {
            let memory = open.nic.memory.pass();
            if let Some(rx) = open.rx(queue) {
                rx.lock().signal(&open.nic, &memory);
            }
        }
    }
}

/// The next frame of a source, after the rules of an X550's driver.
fn next_of<'t>(
    source: &mut impl Source,
    table: &'t Table,
    rules: Option<&FlowRules>,
    uplink: PortIndex,
) -> Result<Next<'t>, BrokenRing> {
    let mut next = source.next(table)?;
    if let (Next::Frame(frame), Some(rules)) = (&mut next, rules) {
        rules.apply(frame, &source.body(), uplink);
    }
    Ok(next)
}

fn conclude(frame: &Frame<'_>, source: &mut impl Source, sent: Result<(), Counter>, receivers: usize) {
    match sent {
        Ok(()) => source.done(frame, receivers),
        Err(reason) => source.dropped(reason),
    }
}
