//! Passes over guest memory: pages to send, dirty log, and policy.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use virtio_devices::GuestMap;
use vm_api::migration::SendMigration;

use super::pages_out::{PagesOut, ToSend};
use crate::dirty::{DirtyLog, PageSet};
use crate::migration::precopy::{Decision, Goal, Pass, Precopy};
use crate::migration::progress::Progress;
use crate::migration::wire::PAGE;

/// Passes so far.
pub(super) struct Passes {
    to_send: Arc<Mutex<ToSend>>,
    policy: Precopy,
    /// Connections that have not finished the pass yet.
    awaited: usize,
    count: u32,
    /// Start of the pass, and bytes sent in it.
    pass: (Instant, u64),
    /// Start of copying.
    began: Instant,
}

impl Passes {
    /// Prepares passes over `memory`, with the client's limits.
    pub(super) fn new(config: &SendMigration, memory: &GuestMap) -> Self {
        let SendMigration { downtime_ms, timeout_s, timeout_strategy, .. } = *config;
        let goal = Goal {
            downtime: Duration::from_millis(downtime_ms.into()),
            timeout: Duration::from_secs(timeout_s.into()),
            strategy: timeout_strategy,
        };
        let to_send = ToSend { pages: PageSet::all(memory), place: (0, 0), log: None };
        let now = Instant::now();
        Self {
            to_send: Arc::new(Mutex::new(to_send)),
            policy: Precopy::new(goal, Duration::ZERO),
            awaited: 0,
            count: 0,
            pass: (now, 0),
            began: now,
        }
    }

    /// Sets the round-trip time, and the number of functions in use by the guest's drivers.
    pub(super) fn expect(&mut self, rtt: Duration, functions: u32) {
        self.policy.expect(rtt, functions);
    }

    /// Pages that connections take their chunks from.
    pub(super) const fn to_send(&self) -> &Arc<Mutex<ToSend>> {
        &self.to_send
    }

    /// Number of passes begun.
    pub(super) const fn count(&self) -> u32 {
        self.count
    }

    /// Share of the vCPUs' time to withhold, in percent.
    pub(super) const fn throttle(&self) -> u8 {
        self.policy.throttle()
    }

    /// Rate at which the guest dirties pages, in bytes per second.
    pub(super) const fn dirty_rate(&self) -> u64 {
        self.policy.dirty_rate()
    }

    /// Starts copying, with `log` as the source of dirty pages.
    pub(super) fn begin(&mut self, log: DirtyLog) {
        self.began = Instant::now();
        self.to_send.lock().log = Some(log);
    }

    /// Takes the log; dropping it stops logging. Senders that take a chunk afterwards find no log.
    pub(super) fn end(&self) -> Option<DirtyLog> {
        self.to_send.lock().log.take()
    }

    /// Starts a pass.
    pub(super) fn send(&mut self, out: &PagesOut) {
        self.awaited = out.count();
        self.pass = (Instant::now(), 0);
        out.send(self.count);
        self.count += 1;
    }

    /// Counts a connection that has sent its share of a pass. Returns true for the last one.
    pub(super) fn sent(&mut self, bytes: u64) -> bool {
        self.awaited = self.awaited.saturating_sub(1);
        self.pass.1 += bytes;
        self.awaited == 0
    }

    /// Ends a pass while the guest runs: collects dirty pages and returns the next step.
    ///
    /// # Errors
    ///
    /// Fails if the dirty pages are not known.
    pub(super) fn passed(&mut self, progress: &Progress) -> io::Result<Decision> {
        let rest = self.collect()?;
        let (began, sent) = self.pass;
        let pass = Pass { sent, took: began.elapsed(), rest, elapsed: self.began.elapsed() };
        let decision = self.policy.after(pass);
        progress.passed(&self.policy, rest);
        Ok(decision)
    }

    /// Adds dirty pages to the pages to send. Returns the size of all of them in bytes.
    ///
    /// # Errors
    ///
    /// Fails if the dirty pages are not known.
    pub(super) fn collect(&self) -> io::Result<u64> {
        let mut to_send = self.to_send.lock();
        let ToSend { pages, place, log } = &mut *to_send;
        log.as_mut().map_or(Ok(()), |log| log.collect(pages))?;
        *place = (0, 0);
        Ok(pages.count() * PAGE)
    }
}
