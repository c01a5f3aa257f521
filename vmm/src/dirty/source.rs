//! Trait of dirty-page sources.

use std::io;

use super::page_set::{Chunk, PageSet};

/// A writer to guest memory with a dirty log.
pub trait DirtySource: Send {
    /// Name of the writer, to follow "what".
    fn name(&self) -> &'static str;

    /// Starts the log: later writes are recorded.
    ///
    /// # Errors
    ///
    /// Fails if the writer cannot log. The log is off then.
    fn start(&mut self) -> io::Result<()>;

    /// Adds the pages written since the last call, or since the start, to `pages`.
    ///
    /// # Errors
    ///
    /// Fails if the log was lost: pages sent so far may be stale then.
    fn collect(&mut self, pages: &mut PageSet) -> io::Result<()>;

    /// Prepares for copying the pages of `chunk`. A source that records a page once until it is cleared clears it here.
    ///
    /// # Errors
    ///
    /// As [`Self::collect`].
    fn release(&mut self, _chunk: &Chunk) -> io::Result<()> {
        Ok(())
    }

    /// Stops the log.
    fn stop(&mut self);
}
