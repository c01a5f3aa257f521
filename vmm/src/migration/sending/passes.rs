//! Passes over the guest's memory: what is to be sent, who notes what is written meanwhile, and when there are enough.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use virtio_devices::GuestMap;
use vm_api::migration::SendMigration;

use crate::dirty::{DirtyLog, PageSet};
use crate::migration::pages_out::{PagesOut, ToSend};
use crate::migration::precopy::{Goal, Pass, Precopy, Verdict};
use crate::migration::progress::Progress;
use crate::migration::wire::PAGE;

/// The passes until now.
pub(super) struct Passes {
    to_send: Arc<Mutex<ToSend>>,
    policy: Precopy,
    /// Connections that are still to report of the pass.
    awaited: usize,
    count: u32,
    /// Start of the pass, and number of bytes that were sent in it.
    pass: (Instant, u64),
    /// Start of copying.
    began: Instant,
}

impl Passes {
    /// Passes over `memory`, as the client wants them.
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

    /// A message there and one back take `rtt`, and the guest's drivers use so many functions.
    pub(super) fn expect(&mut self, rtt: Duration, functions: u32) {
        self.policy.expect(rtt, functions);
    }

    /// Chunks from which connections take their pages.
    pub(super) const fn to_send(&self) -> &Arc<Mutex<ToSend>> {
        &self.to_send
    }

    /// Number of passes that have begun.
    pub(super) const fn count(&self) -> u32 {
        self.count
    }

    /// The share of the vCPUs' time that is to be taken from the guest, in percent.
    pub(super) const fn throttle(&self) -> u8 {
        self.policy.throttle()
    }

    /// Bytes per second of pages that the guest writes to.
    pub(super) const fn dirty_rate(&self) -> u64 {
        self.policy.dirty_rate()
    }

    /// Begins to copy, by what `log` notes from now on.
    pub(super) fn begin(&mut self, log: DirtyLog) {
        self.began = Instant::now();
        self.to_send.lock().log = Some(log);
    }

    /// Takes the log, whose end ends what is noted. Whoever is about to take a chunk finds none.
    pub(super) fn end(&self) -> Option<DirtyLog> {
        self.to_send.lock().log.take()
    }

    /// Has a pass be sent.
    pub(super) fn send(&mut self, out: &PagesOut) {
        self.awaited = out.count();
        self.pass = (Instant::now(), 0);
        out.send(self.count);
        self.count += 1;
    }

    /// A connection has sent all of its part of a pass. Returns whether it is the last of them.
    pub(super) fn sent(&mut self, bytes: u64) -> bool {
        self.awaited = self.awaited.saturating_sub(1);
        self.pass.1 += bytes;
        self.awaited == 0
    }

    /// A pass is complete while the guest runs: what was written meanwhile is the next.
    ///
    /// # Errors
    ///
    /// Fails if the dirty pages are not known.
    pub(super) fn passed(&mut self, progress: &Progress) -> io::Result<Verdict> {
        let rest = self.collect()?;
        let (began, sent) = self.pass;
        let pass = Pass { sent, took: began.elapsed(), rest, elapsed: self.began.elapsed() };
        let verdict = self.policy.after(pass);
        progress.passed(&self.policy, rest);
        Ok(verdict)
    }

    /// Adds what was written to what is to be sent. Returns how many bytes that is.
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
