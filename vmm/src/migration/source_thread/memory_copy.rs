//! Copy of guest memory: passes over it, the dirty log, throttling, and the threads that send pages.

use std::io;
use std::time::{Duration, Instant};

use virtio_devices::GuestMap;
use vm_api::migration::SendMigration;
use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};

use super::message::{SourceMessage, Tasks};
use super::pages_out::PagesOut;
use super::passes::Passes;
use super::throttle::Throttle;
use crate::dirty::{DirtyLog, DirtySource};
use crate::lazy_memory::discarded::Discarded;
use crate::migration::progress::Progress;
use crate::migration::transport::Stream;
use crate::threads::ThreadKind;

/// Copy of guest memory.
pub(super) struct MemoryCopy {
    memory: GuestMap,
    /// Persistent memory that is not sent, and must be unwritten.
    discarded: Discarded,
    /// Passes so far, and the policy.
    pub passes: Passes,
    throttle: Throttle,
    senders: Option<PagesOut>,
}

impl MemoryCopy {
    /// Prepares a copy of `memory`, with the client's limits.
    pub(super) fn new(config: &SendMigration, memory: GuestMap, discarded: Discarded) -> Self {
        let passes = Passes::new(config, &memory);
        Self { memory, discarded, passes, throttle: Throttle::new(), senders: None }
    }

    /// Size of the memory in bytes.
    pub(super) fn size(&self) -> u64 {
        self.memory.iter().map(|region| region.len()).sum()
    }

    /// Checks that the guest has not written to memory that is not sent.
    ///
    /// # Errors
    ///
    /// Fails with one line that names the device.
    pub(super) fn check_discarded(&self) -> Result<(), String> {
        self.discarded.check()
    }

    /// Starts the threads that send pages over `streams`.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(super) fn open(&mut self, streams: Vec<Stream>, progress: &Progress, tasks: &Tasks) -> io::Result<()> {
        let messages = tasks.messages();
        let notify = move |sent| _ = messages.send(SourceMessage::PassSent(sent));
        self.senders = Some(PagesOut::new(streams, &self.memory, self.passes.to_send(), progress, notify)?);
        Ok(())
    }

    /// Starts the dirty log in a thread: backends switch their logs on one by one, and may be slow.
    pub(super) fn start_log(writers: Vec<Box<dyn DirtySource>>, tasks: &mut Tasks) {
        let work = move || DirtyLog::start(writers).map_err(|error| error.to_string());
        tasks.spawn_or_fail(ThreadKind::Migration, work, SourceMessage::LogStarted);
    }

    /// Stops the dirty log in a thread, as it takes as long as starting one.
    pub(super) fn stop_log(&self, tasks: &mut Tasks) {
        if let Some(log) = self.passes.end() {
            tasks.drop_later(ThreadKind::Migration, log);
        }
    }

    /// Starts a pass. Returns its number, from 1; `None` if the connections are not open.
    pub(super) fn start_pass(&mut self) -> Option<u32> {
        self.passes.send(self.senders.as_ref()?);
        Some(self.passes.count())
    }

    /// Throttles the vCPUs by the share that the policy asks for, or not at all. Returns true to hold the vCPUs or
    /// false to release them, if that changes, and the time to the next change.
    pub(super) fn throttle(&mut self, is_copying: bool) -> (Option<bool>, Option<Duration>) {
        let share = if is_copying { self.passes.throttle() } else { 0 };
        self.throttle.follow(share, Instant::now())
    }

    /// Closes the connections for pages, whatever is being sent.
    pub(super) fn close(&mut self) {
        self.senders = None;
    }

    /// Takes the memory, to unmap it elsewhere, and ends the dirty log, which keeps KVM's VM.
    pub(super) fn take_memory(&mut self) -> GuestMap {
        drop(self.passes.end());
        std::mem::replace(&mut self.memory, GuestMap::new())
    }
}
