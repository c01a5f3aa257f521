//! Receipt of guest memory: the threads that receive pages, and connections that wait for the memory.

use std::sync::Arc;

use super::message::{TargetMessage, Tasks};
use super::pages_in::PagesIn;
use crate::migration::loader::Loader;
use crate::migration::progress::Progress;
use crate::migration::transport::Stream;
use crate::threads::no_thread;

/// Receipt of guest memory.
#[derive(Default)]
pub(super) struct MemoryReceiver {
    pages: PagesIn,
    /// Connections for pages that wait until the memory exists.
    waiting: Vec<(u8, Stream)>,
}

impl MemoryReceiver {
    /// Sets the memory to receive, and the number of connections.
    pub(super) fn set_memory(&mut self, memory: Arc<Loader>, connections: u8) {
        self.pages.set_memory(memory, connections);
    }

    /// Adds a connection for pages, which waits for [`Self::start`].
    pub(super) fn add(&mut self, index: u8, stream: Stream) {
        self.waiting.push((index, stream));
    }

    /// Starts receiving on waiting connections.
    pub(super) fn start(&mut self, progress: &Progress, tasks: &Tasks) {
        for (index, stream) in self.waiting.drain(..) {
            let messages = tasks.messages();
            let notify = move |received| _ = messages.send(TargetMessage::PassReceived(received));
            if let Err(error) = self.pages.begin(index, stream, progress, notify) {
                tasks.post(TargetMessage::PassReceived(Err(no_thread(&error))));
            }
        }
    }

    /// True if each connection has finished `passes` passes.
    pub(super) fn has(&self, passes: u32) -> bool {
        self.pages.have(passes)
    }

    /// Ends the threads: nothing writes to the memory after this. The connections stay open.
    pub(super) fn end(&mut self) {
        self.pages.end();
    }

    /// Closes the connections.
    pub(super) fn close(&mut self) {
        self.pages.close();
        self.waiting.clear();
    }
}
