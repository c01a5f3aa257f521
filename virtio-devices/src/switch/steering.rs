//! The receive queue of a frame, as the driver of an X550 distributes them.

use arc_swap::ArcSwap;
use x550::Rss;

use super::frame::Frame;
use super::frame::body::Body;

/// The first bytes of a frame, with all headers that are hashed: Ethernet with a tag, IPv6 and ports.
const HEADERS: usize = 78;

/// The distribution of frames to the queues of a function.
pub(crate) struct Steering {
    rss: ArcSwap<Rss>,
}

impl Steering {
    /// The distribution of `rss`.
    pub(crate) fn new(rss: Rss) -> Self {
        Self { rss: ArcSwap::from_pointee(rss) }
    }

    /// Replaces the distribution, if it is another one.
    pub(crate) fn set(&self, rss: Rss) {
        if **self.rss.load() != rss {
            self.rss.store(rss.into());
        }
    }

    /// The queue of the function for a frame, from 0.
    pub(crate) fn queue_of(&self, frame: &Frame<'_>, body: &Body<'_, '_, '_>) -> usize {
        let rss = self.rss.load();
        if !rss.is_enabled() {
            return 0;
        }
        let mut head = [0; HEADERS];
        let front = frame.front().len().min(HEADERS);
        let (known, rest) = head.split_at_mut(front);
        known.copy_from_slice(frame.front().get(..front).unwrap_or_default());
        let len = frame.rest().min(rest.len());
        body.read(rest.get_mut(..len).unwrap_or_default());
        rss.queue_of(head.get(..front + len).unwrap_or(&head)).queue.into()
    }

    /// The hash of a whole frame, and the hash's type for its descriptor; zeros if there is none.
    pub(crate) fn hash_of(&self, frame: &[u8]) -> (u32, u8) {
        let steered = self.rss.load().queue_of(frame);
        (steered.hash, steered.kind)
    }
}
